"""Series of the hub: all of what is known, and nothing of what is not."""

from typing import Any

import pytest

from exporter.collecting.families import Family, Samples
from exporter.hub.counters import GPU_S, STARTED, WAIT_S, CounterKey
from exporter.hub.jobs import SHOWN_AFTER_END_S, Job
from exporter.hub.series import FAMILIES, CommandUse, SelfFacts, render_jobs, render_self, shown_jobs
from exporter.slurm.accounting import Figures
from exporter.slurm.states import ENDS
from exporter.slurm.tracking import TrackedJob

NOW = 10_000.0
FIGURES = Figures(
    elapsed_s=50.0, limit_s=100.0, cpu_ratio=0.5, memory_bytes=1.0, memory_requested_bytes=4.0, exit_code="3:0"
)
TIMES = {"submitted": 100.0, "started": 200.0, "limit_s": 100.0}


def make_job(job_id: str, state: str, **known: Any) -> Job:
    tracked = TrackedJob(job_id=job_id, name="job", state=state, **known)
    return Job(tracked, 100.0, "ada", "gpu", "lab", "normal", "cpu=8,mem=64G,gres/gpu=2", 1, "n1")


RUNNING = make_job("7", "RUNNING", **TIMES)._replace(is_monitored=True)
PENDING = make_job("8", "PENDING", submitted=100.0, reason="Priority")._replace(expected_start=11_000.0)
FAILED = make_job("9", "FAILED", **TIMES, ended=NOW - 60.0, figures=FIGURES)
COUNTERS = {CounterKey(name, "ada", "gpu"): 1.0 for name in (STARTED, WAIT_S, GPU_S)}


def page(*jobs: Job) -> dict[str, str]:
    """Values of the samples by series, without the labels that all have."""
    out = Samples({})
    render_jobs(jobs, jobs, 0, COUNTERS, NOW, out)
    use = CommandUse(3, 1, 0.5, NOW)
    render_self(SelfFacts({"squeue": use}, 60.0, 4096, True, {("/metrics", 200): 2}), out)
    lines = [line.rpartition(" ") for line in out.page().splitlines() if not line.startswith("#")]
    return {name: value for name, _, value in lines}


def of_job(samples: dict[str, str], job_id: str) -> dict[str, str]:
    place = f'{{job_id="{job_id}",job_name="job",user="ada",partition="gpu"'
    own = {name.replace(place, "").strip("},"): value for name, value in samples.items() if place in name}
    return {name.removeprefix("gpujob_job_"): value for name, value in own.items()}


def test_every_family_is_on_the_page_of_some_jobs() -> None:
    names = {name.partition("{")[0] for name in page(RUNNING, PENDING, FAILED)}
    assert names == {family.full_name for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_has_a_good_name_and_help(family: Family) -> None:
    name, text = family.full_name, family.help
    assert name.startswith(("gpujob_job_", "gpujob_jobs", "gpujob_hub_", "gpujob_queue_wait_", "gpujob_gpu_seconds_"))
    assert text[0].isupper() or text[0].isdigit()
    assert text.endswith(".")


def test_an_ended_job_has_its_figures() -> None:
    found = of_job(page(FAILED), "9")
    assert {name: value for name, value in found.items() if "ratio" in name or "exit" in name or "gpu" in name} == {
        "cpu_efficiency_ratio": "0.5",
        "memory_efficiency_ratio": "0.25",
        "time_limit_used_ratio": "0.5",
        "exit_code": "3",
        "gpu_seconds": "100",
        "gpus": "2",
    }
    assert 'state,state="FAILED"' in found


def test_what_is_unknown_has_no_series() -> None:
    bare = Job(TrackedJob(job_id="7", name="job", figures=Figures()), None, "ada", "gpu")
    assert {name.partition(",")[0] for name in of_job(page(bare), "7")} == {"info", "state"}


def test_sums_have_every_task_and_every_end_from_the_start() -> None:
    array = PENDING._replace(tasks=5, partition="low,high")
    samples = page(array, RUNNING)
    assert samples['gpujob_jobs_pending{partition="low",reason="Priority"}'] == "5"
    assert samples['gpujob_jobs{user="ada",partition="high",state="PENDING"}'] == "5"
    ends = {name: value for name, value in samples.items() if name.startswith("gpujob_jobs_ended_total")}
    assert (len(ends), set(ends.values())) == (len(ENDS), {"0"})


def test_series_of_a_job_go_30_minutes_after_its_end_and_the_youngest_have_them() -> None:
    old = make_job("6", "FAILED", **TIMES, ended=NOW - SHOWN_AFTER_END_S)
    shown, more = shown_jobs([old, FAILED, PENDING], NOW, whole_cluster=False, most=1)
    assert ([job.key for job in shown], more) == (["9"], 1)
    young = make_job("10", "RUNNING", submitted=300.0)
    assert shown_jobs([FAILED, young], NOW, whole_cluster=False, most=1) == ([young], 1)
