"""Every query of the dashboard against a real Prometheus that scrapes a real job."""

import functools
import time
from typing import Any

import pytest

from grafana.build.queries import all_queries
from tests.endtoend.jobs import JobSpace, embed_job, kill_worker
from tests.grafana.substitute import MAY_BE_EMPTY, substitute, variables
from tests.realstack.cluster import Cluster
from tests.realstack.stack import Stack

pytestmark = [pytest.mark.slurm, pytest.mark.prometheus]


def query_job(stack: Stack, expr: str, since: float) -> Any:
    """Result of a query over the time of the job."""
    return stack.query_range(expr, since, time.time(), 1)


def test_every_query_of_the_dashboard_returns_data_for_a_running_job(
    jobs: JobSpace, stack: Stack, cluster: Cluster, fake_gpus: dict[str, str]
) -> None:
    # longer than the test; the job is cancelled after all queries
    spec = embed_job("panels", items=48_000)
    spec["workers"][0]["critical"] = False
    started_at = time.time()
    job = jobs.submit(spec, env=fake_gpus)
    values = variables(cluster="test", job_id=job.job_id, scrape=1, span=60)

    up = f'gpujob_worker_up{{job_id="{job.job_id}",rank="7"}} == 1'
    stack.wait_for(lambda: stack.query(up), 120, "a running worker")
    # only a file that is no longer written is checked, and only this worker ends
    output = job.run_dir / "output_worker_7.jsonl"
    cluster.wait_for(lambda: output.exists() and output.stat().st_size, 60, "output of worker 7")
    kill_worker(cluster, job, 7)
    # this job has an exit, a limit, progress and GPUs, but no services; all other queries must return data
    may_be_empty = {"worker_rss", "log_errors", "memory_pressure", "slowdown", "lag", "xids", "gpu_conditions"}
    may_be_empty |= {"ready_workers", "ready_expected", "restarts", "restarts_in_time", "gpu_ecc"}
    may_be_empty |= {"collector_duration", "log_values", "log_highest", "log_lowest"}
    assert may_be_empty <= set(MAY_BE_EMPTY)
    for query in all_queries():
        if query.name not in may_be_empty:
            expr = substitute(query.expr, values)
            stack.wait_for(functools.partial(query_job, stack, expr, started_at), 180, f"an answer to {query.name}")
