"""Every query of every board, with a real Prometheus that scrapes a real local job and itself."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from grafana.build import __main__ as build
from grafana.build import job
from grafana.build.queries import all_queries
from tests.grafana.substitute import MAY_BE_EMPTY as OF_ONE_JOB
from tests.grafana.substitute import panels_of, substitute, variables
from tests.realstack.stack import Stack, prometheus_unavailable
from tests.support.launcher import LocalJob, clean_environment, embed_job

pytestmark = pytest.mark.prometheus

NO_GPU = "the job has no GPU"
RARE = "it is absent until it happens"
NO_HUB = "no hub runs here"
NO_LIMIT = "the job has no time limit"
NO_OTHER = "the service that tells it does not run here"
NAMES = {query.expr: query.name for query in all_queries()}  # two of the same text return data together
# Panels that may be empty, each with its reason; one query of a panel by its letter, or by its name if it has one.
MAY_BE_EMPTY: Mapping[str, Mapping[str, str]] = {
    "gpujob-fleet": {
        "GPUs": NO_GPU,
        "Waiting and failed": NO_HUB,
        "Jobs/D": "the time to the end is unknown before enough progress was seen",
        "Jobs/E": NO_LIMIT,
        "Jobs/G": "a worker has one speed until it has shown another",
        **dict.fromkeys(("Jobs/H", "Jobs/I", "Jobs/J"), NO_GPU),
        **dict.fromkeys(("Least margin at the limit", "Chance to finish"), NO_LIMIT),
        **dict.fromkeys(("GPUs given and idle", "Idle GPU hours", "Lowest use"), NO_GPU),
        **dict.fromkeys(("Energy of ended jobs", "Cost", "Waiting jobs by reason", "Average wait"), NO_HUB),
        **dict.fromkeys(("Oldest waiting job", "Ended jobs"), NO_HUB),
        **dict.fromkeys(("Nodes with warnings or failures", "Xid errors", "Low disks"), RARE),
    },
    "gpujob-node": {
        **dict.fromkeys(
            (
                *("Strangers on GPUs", "Utilization", "GPU memory in use", "Multiprocessors", "Tensor cores"),
                *("Memory bandwidth", "Power", "Throttled clocks", "Temperature", "NVLink traffic", "PCIe traffic"),
                *("Health of the GPUs", "Responding GPUs", "Xid errors", "Memory errors", "Repaired memory"),
                *("Waiting for a reset", "PCIe replays", "NVLink errors", "Xids in time"),
            ),
            NO_GPU,
        ),
        "Firing alerts of the node": "as long as nothing is wrong",
        "Waiting for memory": "cgroups v1 do not tell it",
        "Memory of jobs": "the job may be in no memory cgroup of its own",
        "OOM kills": "as Memory of jobs",
    },
    "gpujob-self": {
        "Age of the heartbeat": NO_OTHER,
        "Notifications of Alertmanager": NO_OTHER,
        "Age of the hub's answers": NO_OTHER,
        **dict.fromkeys(("Firing now, of no job", "Failing collectors"), RARE),
    },
    job.UID: {name: OF_ONE_JOB[name] for name in NAMES.values() if name in OF_ONE_JOB},
}
CLUSTER = "here"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Prometheus with a running job, one of whose workers has failed, and the alert of it."""
    if reason := prometheus_unavailable():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("boards")
    (folder / "targets").mkdir()
    (folder / "gpujob.yaml").write_text(yaml.safe_dump({"target_dir": str(folder / "targets"), "cluster": CLUSTER}))
    env = clean_environment(GPUJOB_CONFIG=str(folder / "gpujob.yaml"), GPUJOB_HISTORY_DIR="")
    spec = embed_job(items=30_000, rate=20, count=4)
    spec["workers"][0]["critical"] = False
    with (
        Stack(folder / "stack", targets_dir=folder / "targets", whole=True) as stack,
        LocalJob(folder / "job", spec, "--quiet", env=env) as running,
    ):
        stack.wait_for(lambda: stack.query("sum(gpujob_worker_items) > 0"), 60, "progress")
        os.kill(running.worker(2)["pid"], signal.SIGSEGV)
        stack.wait_for(lambda: stack.query('ALERTS{alertstate="firing", job_id!=""}'), 60, "an alert")
        yield stack


def queries(uid: str) -> list[Any]:
    """Expressions of a board with the name that the list of reasons has for each."""
    board = json.loads((build.DASHBOARDS / f"{uid}.json").read_text("utf-8"))
    return [
        *(
            (NAMES.get(one["expr"], f"{panel['title']}/{one['refId']}"), one["expr"])
            for panel in panels_of(board)
            for one in panel.get("targets") or []
        ),
        *((NAMES.get(mark["expr"], mark["name"]), mark["expr"]) for mark in board["annotations"]["list"]),
    ]


def answer_until_now(stack: Stack, expr: str, since: float) -> list[dict[str, Any]]:
    return stack.query_range(expr, since, time.time())


@pytest.mark.parametrize("uid", MAY_BE_EMPTY)
def test_every_query_returns_data_or_has_its_reason(stack: Stack, uid: str) -> None:
    (info,) = stack.wait_for(lambda: stack.query("gpujob_info"), 60, "the job")
    since = time.time() - 30
    values = variables(cluster=CLUSTER, job_id=info["metric"]["job_id"], node=info["metric"]["node"], scrape=1, span=60)
    named = queries(uid)
    assert MAY_BE_EMPTY[uid].keys() <= {name.split("/")[0] for name, _ in named} | {name for name, _ in named}
    for name, expr in named:
        if not {name, name.split("/")[0]} & MAY_BE_EMPTY[uid].keys():
            asked = functools.partial(answer_until_now, stack, substitute(expr, values), since)
            stack.wait_for(asked, 90, f"an answer to {name}")  # ALERTS begin with the third evaluation of a group
        else:
            stack.query(substitute(expr, values))
