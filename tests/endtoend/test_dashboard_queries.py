"""Every query of the dashboard against a real Prometheus that scrapes a real job."""

import time

import pytest

from grafana.build.queries import all_queries
from tests.endtoend.jobs import JobSpace, embed_job
from tests.grafana.substitute import MAY_BE_EMPTY, substitute, variables
from tests.realstack.cluster import Cluster
from tests.realstack.stack import Stack

pytestmark = [pytest.mark.slurm, pytest.mark.prometheus]


def test_every_query_of_the_dashboard_returns_data_for_a_running_job(
    jobs: JobSpace, stack: Stack, cluster: Cluster, fake_gpus: dict[str, str]
) -> None:
    # longer than anybody waits: it is cancelled once all queries are answered
    spec = embed_job("panels", items=48_000, options="--exit-code 3 --at 60 --only-rank 7")
    spec["workers"][0]["critical"] = False
    job = jobs.submit(spec, env=fake_gpus)
    values = variables(cluster="test", job_id=job.job_id, scrape=1, span=60)

    def empty() -> set[str]:
        now = time.time()
        return {
            query.name
            for query in all_queries()
            if not stack.query_range(substitute(query.expr, values), now - 30, now, 1)
        }

    # this job has an exit, a limit, progress and GPUs, and serves nothing, so all but these must say something
    may_be_empty = {"worker_rss", "log_errors", "memory_pressure", "slowdown", "lag", "xids", "gpu_conditions"}
    may_be_empty |= {"ready_workers", "ready_expected"}
    assert may_be_empty <= set(MAY_BE_EMPTY)
    stack.wait_for(lambda: not empty() - may_be_empty, 180, "an answer to every query")
