#!/usr/bin/env bash
# Installs the Debian packages that the tests with real components need, and a C compiler for the fake GPU driver.
#
#   packages.sh [--no-browser]      --no-browser: all but chromium, which takes 80 MB to fetch and half a minute
#
# Does nothing, quickly, when all are there. As an ordinary user it only says what will be skipped.
# None of the daemons in these packages is started by the installation; the tests start their own.
set -euo pipefail

LOCK_WAIT=300          # seconds to wait for another apt-get or dpkg
POLICY=/usr/sbin/policy-rc.d

slurm=(slurmctld slurmd slurm-client slurmdbd slurmrestd munge mariadb-server iproute2 python3)
prometheus=(prometheus prometheus-alertmanager curl python3)
nginx=(nginx-light)
systemd=(systemd)  # its command that checks units
compiler=(gcc libc6-dev)
browser=(chromium)
case ${1:-} in
    '') ;;
    --no-browser) browser=() ;;
    *) sed -n '2,/^set -euo/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2 ;;
esac

# Those of the given packages that are not installed, one per line.
missing() {
    local have
    have=$(dpkg-query -W -f '${Package} ${db:Status-Status}\n' "$@" 2>/dev/null || true)
    printf '%s\n' "$@" | grep -vxF -f <(sed -n 's/ installed$//p' <<<"$have") | sort -u || true
}
all=("${slurm[@]}" "${prometheus[@]}" "${nginx[@]}" "${systemd[@]}" "${compiler[@]}" ${browser[@]+"${browser[@]}"})
mapfile -t want < <(missing "${all[@]}")

if [ ${#want[@]} -eq 0 ]; then
    echo "packages: all present, nothing to install"
    exit 0
fi
if [ "$(id -u)" != 0 ]; then
    skipped=()
    [ -z "$(missing "${slurm[@]}")" ] || skipped+=(slurm)
    [ -z "$(missing "${prometheus[@]}")" ] || skipped+=(prometheus)
    [ -z "$(missing "${nginx[@]}")" ] || skipped+=(nginx)
    [ -z "$(missing "${systemd[@]}")" ] || skipped+=(systemd)
    [ -z "$(missing "${compiler[@]}")" ] || skipped+=(fakenvml)
    [ ${#browser[@]} -eq 0 ] || [ -z "$(missing "${browser[@]}")" ] || skipped+=(browser)
    echo "packages: not root, so not installed: ${want[*]}; skipped: tests of ${skipped[*]}"
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "packages: no apt-get here; install what provides: ${want[*]}" >&2
    exit 1
fi

# One installation at a time: each would remove the other's policy file under its feet.
mkdir -p /run/lock
exec 9>/run/lock/gpujob-packages
flock -w "$LOCK_WAIT" 9 || { echo "packages: another packages.sh runs for more than $LOCK_WAIT s" >&2; exit 1; }
mapfile -t want < <(missing "${all[@]}")
[ ${#want[@]} -gt 0 ] || { echo "packages: all present now, nothing to install"; exit 0; }

log=$(mktemp /tmp/gpujob-packages.XXXXXX.log)
echo "packages: installing ${want[*]} (log: $log)"

# Maintainer scripts ask this file before they start a daemon; 101 means no. One that
# the machine's owner put there stays as it is.
if [ ! -e "$POLICY" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$POLICY"
    chmod 755 "$POLICY"
    trap 'rm -f "$POLICY"' EXIT
fi

# `apt-get update` takes a lock that DPkg::Lock::Timeout does not wait for.
end=$((SECONDS + LOCK_WAIT))
until apt-get update -q >"$log" 2>&1; do
    if ! grep -q 'Could not get lock' "$log" || [ $SECONDS -ge $end ]; then
        echo "packages: apt-get update failed, going on with the package lists at hand" >>"$log"
        break
    fi
    sleep 1
done
if ! RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends \
        -o DPkg::Lock::Timeout="$LOCK_WAIT" "${want[@]}" >>"$log" 2>&1 9>&-; then
    tail -n 5 "$log" >&2
    echo "packages: apt-get install failed (log: $log)" >&2
    exit 1
fi
rm -f "$log"
