#!/usr/bin/env bash
# All tests, in two lanes side by side: most tests wait, and those of the one Slurm cluster cannot run beside each other.
#
#   lanes.sh PYTHON [OPTIONS OF PYTEST...]
#
# What the lane of the cluster has to say comes when both have ended. With TEST_RESULTS=DIR each lane leaves its
# results there, as cluster.xml and others.xml.
set -uo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
cluster=(tests/endtoend tests/realstack)
results() { [ -z "${TEST_RESULTS:-}" ] || printf -- '--junitxml=%s' "$TEST_RESULTS/$1.xml"; }

log=$(mktemp)
trap 'rm -f "$log"' EXIT
options=("$(results cluster)" "$@" "${cluster[@]}")
[ -n "${options[0]}" ] || options=("${options[@]:1}")
"$python" -m pytest "${options[@]}" >"$log" 2>&1 &
lane=$!
trap 'kill -INT "$lane" 2>/dev/null; wait "$lane"; cat "$log"; exit 130' INT TERM

options=("$(results others)" "$@" tests "${cluster[@]/#/--ignore=}")
[ -n "${options[0]}" ] || options=("${options[@]:1}")
"$python" -m pytest "${options[@]}"
others=$?
wait "$lane"
first=$?
cat "$log"
exit $((first ? first : others))
