#!/usr/bin/env bash
# The same jobs on several Slurms, one after the other.
#
#   versions.sh [SUITE...]      by default: machine trixie forky
#
# `machine` is the Slurm installed here; any other word is a Debian suite, whose Slurm slurm-root.sh fetches (1 to 2
# minutes and 0.7 GB each, once). There gpujob is a wheel of this checkout, installed for the suite's own Python.
#
# Environment:
#   GPUJOB_SLURM_CACHE=/var/cache/gpujob-slurm   the trees and wheels; may be removed at any time
#   PYTEST_OPTIONS=                              further options of pytest, such as -x or -k
# The exit status is that of the last pytest that failed. Needs root, packages.sh and `make install-dev`.
set -euo pipefail

HERE=$(cd "$(dirname "$0")" && pwd)
CHECKOUT=$(cd "$HERE/../.." && pwd)
CACHE=$(realpath -m "${GPUJOB_SLURM_CACHE:-/var/cache/gpujob-slurm}")
PYTHON=$CHECKOUT/.venv/bin/python
INSTALLED=/opt/gpujob                # of a suite's tree

# What may differ from one Slurm to the next: how it starts, signals, ends and accounts for steps.
TESTS=(
    tests/realstack/test_realstack.py::TestFourNodes
    tests/endtoend/test_slurm_job.py
    tests/endtoend/test_exit_reasons.py
    tests/endtoend/test_submission.py
    tests/endtoend/test_sweep.py
    tests/endtoend/test_hub.py
    tests/endtoend/test_queue_commands.py
    tests/endtoend/test_track.py
    tests/endtoend/test_rest_source.py
    tests/endtoend/test_pipeline.py
    tests/endtoend/test_accounting.py
    tests/endtoend/test_serving.py
)

die() { echo "versions: $*" >&2; exit 1; }

build_wheel() {
    rm -rf "$CACHE/wheel"
    "$PYTHON" -m pip wheel -qq --no-deps --wheel-dir "$CACHE/wheel" "$CHECKOUT"
}

# pip runs here for what it fetches, with this machine's index and certificates, and there for what it installs.
install_into() { # ROOT
    local root=$1 version
    local there=(chroot "$root" env -i PATH=/usr/bin:/bin HOME=/root PIP_DISABLE_PIP_VERSION_CHECK=1)
    version=$("${there[@]}" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    [ -x "$root$INSTALLED/bin/pip" ] || "${there[@]}" python3 -m venv "$INSTALLED"
    rm -rf "$root$INSTALLED/wheels"
    mkdir -p "$root$INSTALLED/wheels"
    cp "$CACHE"/wheel/*.whl "$root$INSTALLED/wheels"
    "${there[@]}" sh -c \
        "$INSTALLED/bin/pip install --quiet --force-reinstall --no-deps $INSTALLED/wheels/gpujob-*.whl"
    if ! "${there[@]}" "$INSTALLED/bin/pip" check >/dev/null; then
        "$PYTHON" -m pip download -qq --python-version "$version" --only-binary=:all: --dest "$root$INSTALLED/wheels" \
            "$CACHE"/wheel/*.whl
        "${there[@]}" sh -c \
            "$INSTALLED/bin/pip install --quiet --no-index --find-links $INSTALLED/wheels $INSTALLED/wheels/gpujob-*.whl"
    fi
    rm -rf "$root$INSTALLED/wheels"
}

# In the background, since bash hears a signal only after the end of what runs in the foreground, and in a session of
# its own, since pytest would take a second Ctrl-C, the terminal's and ours, for impatience.
attended() { # SIGNAL CMD...: that signal ends it in order
    local rc=0
    ending=$1; shift
    setsid "$@" 8>&- &
    child=$!
    wait "$child" || rc=$?
    child=
    return $rc
}
stop() { # SIGNAL
    trap '' INT TERM HUP
    [ -z "$child" ] || { kill -"$ending" "$child" 2>/dev/null && wait "$child"; } || true
    trap - "$1"
    kill -"$1" $$
}
child='' ending=''
for signal in INT TERM HUP; do
    # shellcheck disable=SC2064
    trap "stop $signal" $signal
done

[ $# -gt 0 ] || set -- machine trixie forky
for suite in "$@"; do [[ $suite =~ ^[a-z]+$ ]] || die "$suite: neither 'machine' nor the name of a Debian suite"; done
[ "$(id -u)" = 0 ] || die "needs root (namespaces, slurmd)"
[ -x "$PYTHON" ] || die "no $PYTHON: run make install-dev"
mkdir -p "$CACHE"
exec 8>"$CACHE/lock"
flock -n 8 || die "another versions.sh uses $CACHE"
cd "$CHECKOUT"

verdicts=() status=0 built=''
for suite in "$@"; do
    root='' program=''
    if [ "$suite" = machine ]; then
        slurm=$(PATH=$PATH:/usr/sbin slurmd -V) || die "no Slurm here: run $HERE/packages.sh"
    else
        root=$CACHE/$suite program=$INSTALLED/bin/gpujob
        attended TERM "$HERE/slurm-root.sh" "$suite" "$root"
        [ -n "$built" ] || { build_wheel; built=yes; }
        install_into "$root"
        slurm=$(chroot "$root" slurmd -V)
    fi
    echo "== $suite: $slurm"
    start=$SECONDS rc=0
    # shellcheck disable=SC2086
    attended INT env GPUJOB_SLURM_ROOT="$root" GPUJOB_PROGRAM="$program" \
        "$PYTHON" -m pytest -v -m slurm -p no:cacheprovider ${PYTEST_OPTIONS:-} "${TESTS[@]}" || rc=$?
    verdict=passed
    [ $rc = 0 ] || { status=$rc verdict="FAILED, pytest exited with $rc"; }
    verdicts+=("$suite ($slurm): $verdict in $((SECONDS - start)) s")
done
printf '%s\n' "${verdicts[@]}"
exit $status
