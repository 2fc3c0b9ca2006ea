#!/usr/bin/env bash
# All tests, in six lanes side by side: most tests wait, and those of the one Slurm cluster cannot run beside each other.
# Tests of the queue, and those that start clusters of their own, are other lanes, each with another user, who has no
# jobs or records in common.
#
#   lanes.sh PYTHON [OPTIONS OF PYTEST...]
#
# What the other lanes have to say comes when all have ended, and their failures again at the end. With TEST_RESULTS=DIR
# each lane leaves its results there, as cluster.xml, queue.xml, own_clusters.xml and so on.
set -uo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
own_clusters=(tests/endtoend/test_{bad_day,exit_reasons,full_disk,kills,serving}.py tests/realstack)
queue=(tests/endtoend/test_{hub,hub_faults,queue_commands,track}.py)
cluster=(tests/endtoend "${own_clusters[@]/#/--ignore=}" "${queue[@]/#/--ignore=}")
own_clusters+=(tests/exporter/timeline/test_real_prometheus.py)  # needs no cluster, and this lane has time
launcher=(tests/launcher --ignore=tests/launcher/run)
rules=(tests/alertmanager tests/docker tests/examples tests/packaging tests/launcher/run)  # ... and runs of local jobs
others=(tests --ignore=tests/endtoend --ignore=tests/launcher "${own_clusters[@]/#/--ignore=}" "${rules[@]/#/--ignore=}")

run() { # NAME PATHS...: the tests of one lane
    local results=()
    [ -z "${TEST_RESULTS:-}" ] || results=("--junitxml=$TEST_RESULTS/$1.xml")
    exec "$python" -m pytest ${results[@]+"${results[@]}"} "${options[@]}" "${@:2}"
}

options=("$@")
export GOGC=400  # Prometheus and its tools collect garbage less often: a third less CPU time, for memory that is there
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
(run cluster "${cluster[@]}") >"$logs/cluster" 2>&1 &
lanes=($!)
(GPUJOB_TEST_USER=gpujobtest2 run own_clusters "${own_clusters[@]}") >"$logs/own_clusters" 2>&1 &
lanes+=($!)
(GPUJOB_TEST_USER=gpujobtest3 GPUJOB_TEST_NODES=queue run queue "${queue[@]}") >"$logs/queue" 2>&1 &
lanes+=($!)
(run launcher "${launcher[@]}") >"$logs/launcher" 2>&1 &
lanes+=($!)
(run rules "${rules[@]}") >"$logs/rules" 2>&1 &
lanes+=($!)
trap 'kill -INT "${lanes[@]}" 2>/dev/null; wait "${lanes[@]}"; cat "$logs"/*; exit 130' INT TERM

(run others "${others[@]}")
status=$?
for lane in "${lanes[@]}"; do
    wait "$lane" || status=$?
done
cat "$logs"/*
grep -ah '^\(FAILED\|ERROR\) ' "$logs"/* # once more at the end, where one looks first
exit $status
