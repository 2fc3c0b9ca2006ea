#!/usr/bin/env bash
# Rules, routes, templates, messages and queries of boards on several versions of Prometheus and Alertmanager, one after the other.
#
#   stack-versions.sh [SUITE...]      by default: machine trixie forky
#
# `machine` has what is installed here; any other word is a Debian suite, whose packages are extracted into a folder
# (30 s and 250 MB each, once). Nothing is installed.
#
# Environment:
#   GPUJOB_STACK_CACHE=/var/cache/gpujob-stack   the folders; may be removed at any time
#   PYTEST_OPTIONS=                              further options of pytest, such as -x or -k
# The exit status is that of the last pytest that failed. Needs packages.sh and `make install-dev`.
set -euo pipefail

CHECKOUT=$(cd "$(dirname "$0")/../.." && pwd)
CACHE=$(realpath -m "${GPUJOB_STACK_CACHE:-/var/cache/gpujob-stack}")
PYTHON=$CHECKOUT/.venv/bin/python
TESTS=(
    tests/alertmanager
    tests/exporter/sidecar/test_page_process.py
    tests/launcher/alerts
    tests/grafana/test_board_queries.py
    tests/grafana/test_board_rules.py
    tests/grafana/test_first_values.py
    tests/endtoend/test_local_job.py
    tests/realstack/test_realstack.py::TestStackOnLoopback
)
KEYS=/usr/share/keyrings/debian-archive-keyring.gpg
PACKAGES=(prometheus promtool prometheus-alertmanager)
PROGRAMS=(prometheus promtool prometheus-alertmanager amtool)

die() { echo "stack-versions: $*" >&2; exit 1; }

# apt-get with lists and a cache of its own, so that this machine's packages stay as they are.
fetch() { # SUITE DIR
    local suite=$1 dir=$2 mirror apt
    # shellcheck disable=SC2016
    mirror=$(apt-get indextargets --format '$(REPO_URI) $(COMPONENT)' 'Created-By: Packages' |
             awk '$2 == "main" && $1 ~ /\/debian\/?$/ {print $1; exit}')
    [ -n "$mirror" ] || die "apt-get has no Debian mirror configured here"
    rm -rf "$dir" "$dir.new"
    mkdir -p "$dir.new"/{apt/lists/partial,apt/cache/archives/partial,debs}
    echo "deb [signed-by=$KEYS] $mirror $suite main" >"$dir.new/apt/sources.list"
    apt=(apt-get -q -o "Dir::Etc::sourcelist=$dir.new/apt/sources.list" -o Dir::Etc::sourceparts=/nowhere
         -o "Dir::State::lists=$dir.new/apt/lists" -o "Dir::Cache=$dir.new/apt/cache" -o APT::Sandbox::User=root)
    "${apt[@]}" update >"$dir.log" 2>&1 || die "apt-get update failed (log: $dir.log)"
    (cd "$dir.new/debs" && "${apt[@]}" download "${PACKAGES[@]}") >>"$dir.log" 2>&1 ||
        die "apt-get download failed (log: $dir.log)"
    for deb in "$dir.new"/debs/*.deb; do dpkg-deb -x "$deb" "$dir.new"; done
    rm -rf "$dir.new"/{apt,debs}
    for program in "${PROGRAMS[@]}"; do
        [ -x "$dir.new/usr/bin/$program" ] || die "no package of $suite has $program: the machine's own would be tested"
    done
    mv "$dir.new" "$dir"
}

[ $# -gt 0 ] || set -- machine trixie forky
for suite in "$@"; do [[ $suite =~ ^[a-z]+$ ]] || die "$suite: neither 'machine' nor the name of a Debian suite"; done
[ -x "$PYTHON" ] || die "no $PYTHON: run make install-dev"
mkdir -p "$CACHE"
exec 8>"$CACHE/lock"
flock -n 8 || die "another stack-versions.sh uses $CACHE"
cd "$CHECKOUT"

verdicts=() status=0
for suite in "$@"; do
    path=$PATH
    if [ "$suite" != machine ]; then
        [ -d "$CACHE/$suite" ] || fetch "$suite" "$CACHE/$suite"
        path=$CACHE/$suite/usr/bin:$PATH
    fi
    versions=$(PATH=$path; for program in prometheus prometheus-alertmanager; do
        "$program" --version 2>&1 | sed -n '1s/^\([a-z]*\), version \([0-9.]*\).*/\1 \2/p'; done | paste -sd,)
    echo "== $suite: $versions"
    start=$SECONDS rc=0
    # shellcheck disable=SC2086
    PATH=$path "$PYTHON" -m pytest -q -p no:cacheprovider ${PYTEST_OPTIONS:-} "${TESTS[@]}" 8>&- || rc=$?
    verdict=passed
    [ $rc = 0 ] || { status=$rc verdict="FAILED, pytest exited with $rc"; }
    verdicts+=("$suite ($versions): $verdict in $((SECONDS - start)) s")
done
printf '%s\n' "${verdicts[@]}"
exit $status
