"""Series of the hub: all of what is known, and nothing of what is not."""

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.collecting.families import Family, Samples
from exporter.contract.budget import Budget
from exporter.hub.counters import COST, ENERGY_J, GPU_S, IDLE_S, STARTED, WAIT_S, CounterKey
from exporter.hub.jobs import SHOWN_AFTER_END_S, Job, Outcome
from exporter.hub.page.job_page import JobPage
from exporter.hub.page.series import (
    FAMILIES,
    CommandUse,
    SelfFacts,
    render_controller,
    render_nodes,
    render_self,
    render_user_budgets,
)
from exporter.slurm.accounting import Figures
from exporter.slurm.diagnostics import Diagnostics, RpcUse
from exporter.slurm.nodes import parse_nodes
from exporter.slurm.prices import Price, Prices
from exporter.slurm.states import ENDS
from exporter.slurm.tracking import UNKNOWN, TrackedJob

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
REPORTED = make_job("11", "COMPLETED", **TIMES, ended=NOW - 60.0, figures=FIGURES.replace(energy_j=700.0))._replace(
    price=Price(3.6, "EUR"),
    outcome=Outcome(
        state="COMPLETED", exit_status=0, seen_s=80.0, idle_s=8.0, energy_j=500.0, items_processed=4, items_expected=5
    ),
)
NODE_ROWS = parse_nodes("n1|mixed|gpu*|gpu:h100:8|gpu:h100:6|4/0/0/4|1000|none|\n")
COUNTERS = {CounterKey(name, "ada", "gpu"): 1.0 for name in (STARTED, WAIT_S, GPU_S, IDLE_S)} | {
    CounterKey(COST, "ada", "gpu", "EUR"): 2.5,
    CounterKey(ENERGY_J, "ada", "gpu", "slurm"): 3.5,
}


def page(*jobs: Job) -> dict[str, str]:
    """Values of the samples by series, without the labels that all have."""
    text = "".join(JobPage("c1", whole_cluster=False, most=100).parts(by_key(*jobs), COUNTERS, NOW))
    out = Samples({})
    use = CommandUse(3, 1, 0.5, NOW)
    render_self(
        SelfFacts({"squeue": use}, {}, 60.0, 4096, True, {("/metrics", 200): 2}, {"/metrics": 0.5}, {"/home": True}),
        out,
    )
    render_user_budgets({("ada", "cost"): 0.5}, out)
    render_controller(Diagnostics(NOW, 1, 2, 3, RpcUse(4, 0.5), RpcUse(1, 0.1)), 90.0, out)
    render_nodes(NODE_ROWS, Prices("EUR", {"h100": 2.5}), out)
    text = text.replace('cluster="c1"', "").replace("{,", "{") + out.page()
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name.removesuffix("{}"): value for name, _, value in lines}


def by_key(*jobs: Job) -> dict[str, Job]:
    return {job.key: job for job in jobs}


def of_job(samples: dict[str, str], job_id: str) -> dict[str, str]:
    place = f'{{job_id="{job_id}",job_name="job",user="ada",partition="gpu"'
    own = {name.replace(place, "").strip("},"): value for name, value in samples.items() if place in name}
    own = {name.replace(',notify=""', ""): value for name, value in own.items()}
    return {name.removeprefix("gpujob_job_"): value for name, value in own.items()}


def test_every_family_is_on_the_page_of_some_jobs() -> None:
    running = RUNNING._replace(price=Price(3.6, "EUR"), budget=Budget(cost=7.0))
    names = {name.partition("{")[0] for name in page(running, PENDING, FAILED, REPORTED)}
    assert names == {family.full_name for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_has_a_good_name_and_help(family: Family) -> None:
    name, text = family.full_name, family.help
    subjects = ("job_", "user_", "node_", "jobs", "hub_", "queue_wait_", "gpu_", "energy_", "cost_")
    assert name.startswith(tuple(f"gpujob_{subject}" for subject in subjects))
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


def test_the_exit_code_is_that_of_the_report_until_accounting_has_one() -> None:
    outcome = Outcome(state="INCOMPLETE", exit_status=8)
    early = FAILED._replace(tracked=FAILED.tracked.replace(figures=None), outcome=outcome)
    unknown = FAILED._replace(tracked=FAILED.tracked.replace(figures=Figures()), outcome=outcome)
    late = FAILED._replace(outcome=outcome)
    assert [of_job(page(job), "9")["exit_code"] for job in (early, unknown, late)] == ["8", "8", "3"]


def test_cost_energy_and_idle_time_have_their_source() -> None:
    found = of_job(page(REPORTED), "11")
    assert {name: value for name, value in found.items() if name.startswith(("cost", "energy", "gpu_", "items"))} == {
        'cost,currency="EUR"': "0.05",
        'energy_joules,source="gpu"': "500",
        "gpu_seconds": "100",
        "gpu_idle_seconds": "8",
        "gpu_seen_ratio": "0.8",
        "items_processed": "4",
        "items_expected": "5",
    }
    alone = of_job(page(REPORTED._replace(has_nodes_alone=True)), "11")
    assert alone['energy_joules,source="slurm"'] == "700"
    totals = page(REPORTED)
    assert totals['gpujob_cost_total{user="ada",partition="gpu",currency="EUR"}'] == "2.5"
    assert totals['gpujob_energy_joules_total{user="ada",partition="gpu",source="slurm"}'] == "3.5"


def test_the_budget_of_a_job_is_used_while_it_runs() -> None:
    """It has two GPUs for 9,800 s."""
    budgeted = RUNNING._replace(price=Price(3.6, "EUR"), budget=Budget(gpu_hours=2.0, cost=4.9))
    found = of_job(page(budgeted), "7")
    used = {name: float(value) for name, value in found.items() if name.startswith("budget")}
    assert used == {
        'budget_used_ratio,kind="gpu_hours"': pytest.approx(2 * 9800 / 3600 / 2),
        'budget_used_ratio,kind="cost"': pytest.approx(2.0),
    }
    ended = budgeted._replace(tracked=budgeted.tracked.replace(state="COMPLETED", ended=NOW))
    unpriced = budgeted._replace(price=None, budget=Budget(cost=4.9))
    assert "budget" not in " ".join((*of_job(page(ended), "7"), *of_job(page(unpriced), "7")))


def test_series_that_alerts_count_say_who_is_notified() -> None:
    budgeted = RUNNING._replace(budget=Budget(gpu_hours=2.0), notify="on call")
    found = of_job(page(budgeted, PENDING._replace(notify="on call")), "7")
    found |= of_job(page(PENDING._replace(notify="on call")), "8")
    said = {name.partition(",")[0] for name in found if 'notify="on_call"' in name}
    assert said == {"state", "pending_reason", "monitored", "submit_timestamp_seconds", "budget_used_ratio"}


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


def test_a_mount_whose_name_is_not_utf_8_is_on_the_page() -> None:
    out = Samples({})
    render_self(SelfFacts({}, {}, 60.0, 4096, True, {}, {}, {os.fsdecode(b"/data/\xe9"): True, "/données": False}), out)
    lines = out.page().encode("utf-8").decode().splitlines()
    found = [line for line in lines if line.startswith("gpujob_hub_mount_responding{")]
    assert found == [
        'gpujob_hub_mount_responding{mount="/data/\\\\udce9"} 1',
        'gpujob_hub_mount_responding{mount="/données"} 0',
    ]


def test_series_of_a_job_go_30_minutes_after_its_end_and_the_youngest_have_them() -> None:
    old = make_job("6", "FAILED", **TIMES, ended=NOW - SHOWN_AFTER_END_S)
    young = make_job("10", "RUNNING", submitted=300.0)
    kept = JobPage("c1", whole_cluster=False, most=1)
    for jobs, shown in ([old, FAILED, PENDING], '"9"'), ([FAILED, young], '"10"'), ([FAILED], '"9"'), ([old], None):
        text = "".join(kept.parts(by_key(*jobs), {}, NOW))
        found = {part.partition(",")[0] for part in text.split("job_id=")[1:]}
        assert found == ({shown} if shown else set())
        more = max(0, sum(job is not old for job in jobs) - 1)
        assert f'gpujob_hub_jobs{{cluster="c1",kind="not_shown"}} {more}\n' in text


STATES = ("PENDING", "RUNNING", "FAILED", UNKNOWN)


@given(st.lists(st.dictionaries(st.sampled_from("123"), st.tuples(st.sampled_from(STATES), st.booleans()))))
def test_a_kept_page_is_the_one_that_would_be_made_anew(polls: list[dict[str, tuple[str, bool]]]) -> None:
    kept, jobs = JobPage("c1", whole_cluster=False, most=2), dict[str, Job]()
    for number, poll in enumerate(polls):
        now = NOW + number * SHOWN_AFTER_END_S / 3
        made = {
            key: make_job(key, state, **TIMES, ended=now if state in ENDS else None, figures=FIGURES if known else None)
            for key, (state, known) in poll.items()
        }
        jobs = {key: jobs[key] if jobs.get(key) == job else job for key, job in made.items()}
        anew = JobPage("c1", whole_cluster=False, most=2)
        texts = ["".join(each.parts(jobs, COUNTERS, now)).splitlines() for each in (kept, anew)]
        assert sorted(texts[0]) == sorted(texts[1])
