#!/usr/bin/env bash
# The Slurm of another Debian suite, as a root tree for slurm-cluster.sh.
#
#   slurm-root.sh SUITE DIR            trixie has Slurm 24.11, forky 26.05 (bookworm: 22.05)
#   SLURM_ROOT=DIR slurm-cluster.sh up
#
# Does nothing when DIR is complete; to have it made anew (forky moves on), remove DIR. Needs root, and debootstrap,
# which it installs. Packages come from the mirror that this machine already uses. Nothing is written but DIR,
# DIR.new, DIR.log and DIR.lock, and nothing stays mounted, however it ends.
set -euo pipefail

if [ $# -ne 2 ]; then sed -n '2,/^set -euo/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2; fi
suite=$1 dir=$(realpath -m "$2")
packages=slurmctld,slurmd,slurmdbd,slurm-client,slurmrestd,munge,mariadb-server,iproute2,procps,curl,nginx,python3,python3-venv
scripts=/usr/share/debootstrap/scripts
export PATH=$PATH:/usr/sbin:/sbin

die() { echo "slurm-root: $*" >&2; exit 1; }
complete() { [ "$(cat "$dir/.packages" 2>/dev/null)" = "$suite $packages" ]; }

[[ $suite =~ ^[a-z]+$ ]] || die "$suite: not the name of a Debian suite"
[[ $dir =~ ^[A-Za-z0-9_./+-]+$ ]] || die "$dir: debootstrap takes letters, digits and _./+- only"
[ "$(id -u)" = 0 ] || die "needs root (debootstrap)"
mkdir -p "$(dirname "$dir")"
exec 9>"$dir.lock"
flock 9                               # one that makes the same tree now
if complete; then exit 0; fi

if ! command -v debootstrap >/dev/null; then
    DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends -o DPkg::Lock::Timeout=300 \
        debootstrap >"$dir.log" 2>&1 9>&- || { tail -n 5 "$dir.log" >&2; die "apt-get install failed (log: $dir.log)"; }
fi
# shellcheck disable=SC2016
mirror=$(apt-get indextargets --format '$(REPO_URI) $(COMPONENT)' 'Created-By: Packages' |
         awk '$2 == "main" && $1 ~ /\/debian\/?$/ {print $1; exit}')
[ -n "$mirror" ] || die "apt-get has no Debian mirror configured here"
script=()                             # a debootstrap older than the suite has the way for it under sid
[ -e "$scripts/$suite" ] || script=("$scripts/sid")

start=$SECONDS
rm -rf --one-file-system "$dir" "$dir.new"
# What it mounts and starts is in namespaces that end with it, and it ends with this script.
unshare --mount --pid --fork --kill-child --mount-proc -- debootstrap --variant=minbase --include="$packages" \
    "$suite" "$dir.new" "$mirror" ${script[@]+"${script[@]}"} >"$dir.log" 2>&1 9>&- &
child=$!
# unshare is spared: it collects the child, whose death ends all the rest
trap 'kill -9 $(cat "/proc/$child/task/$child/children") 2>/dev/null; wait $child' EXIT
if ! wait $child; then
    tail -n 5 "$dir.log" >&2
    die "debootstrap failed (log: $dir.log)"
fi
trap - EXIT
rm -rf "$dir.new"/var/cache/apt/archives/*.deb "$dir.new"/var/lib/apt/lists/*
echo "$suite $packages" >"$dir.new/.packages"
mv "$dir.new" "$dir"
echo "slurm-root: $(chroot "$dir" slurmd -V) in $dir ($((SECONDS - start)) s, $(du -sh "$dir" | cut -f1))"
