"""What the hub learns from Slurm's answers, and what it still knows after a restart."""

import gzip
import math
import tempfile
from collections import Counter, UserDict
from collections.abc import ValuesView
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.contract.budget import USER_DAYS, Budget
from exporter.hub import costs
from exporter.hub.counters import COST, ENDED, ENERGY_J, GPU_S, GPU_S_OF_RUNS, IDLE_S, STARTED, CounterKey
from exporter.hub.engine import Engine, Settings
from exporter.hub.jobs import SHOWN_AFTER_END_S, Job, Outcome
from exporter.hub.polling import AFTER_END_S, MOST_IN_QUESTION, WATCHED_NODES_S
from exporter.hub.runs.budgets import sweeps_with_budgets
from exporter.hub.runs.reports import Run
from exporter.hub.runs.stale_runs import GONE_AFTER_S, StaleRuns
from exporter.hub.site_reader import Site
from exporter.hub.store import Store
from exporter.slurm.accounting import Step
from exporter.slurm.commands_reader import ClusterFacts
from exporter.slurm.nodes import parse_nodes
from exporter.slurm.prices import Prices
from exporter.slurm.queue import QueueRow
from exporter.slurm.tracking import CONFIRMED_WITHIN_S, GIVEN_UP_AFTER_S, MOST_EVENTS, UNKNOWN_AFTER_S
from tests.exporter.hub.made_up_slurm import MadeUpSlurm, attempt, queue_row, states
from tests.exporter.slurm.test_tracking import Life, lives
from tests.support.exporter import FakeClock

START = 1000.0
PRICES = Prices("EUR", {"h100": 3600.0})  # a second of a GPU costs 1
SITE = Site(PRICES, {"ada": Budget(gpu_hours=1.0, cost=7200.0), "default": Budget(gpu_hours=2.0)})


class Hub:
    """A hub without its process, which can be restarted."""

    def __init__(self, folder: Path, clock: FakeClock | None = None, *, whole_cluster: bool = False) -> None:
        self.clock, self.slurm, self.path = clock or FakeClock(START), MadeUpSlurm(), folder / "hub.sqlite"
        self.whole_cluster = whole_cluster
        self.runs: list[Run] = []
        self.slurm.controller_time = lambda: float(int(self.clock.now))
        self.store: Store | None = None
        self.restart()

    def restart(self) -> None:
        if self.store is not None:
            self.store.close()
        self.store = Store(self.path)
        settings = Settings(self.whole_cluster, None, 60.0, 100)
        self.engine = Engine(
            self.slurm, self.store, settings, self.clock, runs=lambda: self.runs, site=SITE, chance=lambda: 0.0
        )

    def steps(self, seconds: float, each_s: float = 5.0) -> None:
        """Let time pass."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.advance(each_s)
            self.engine.step()

    def told(self) -> list[tuple[object, object, object]]:
        assert self.store is not None
        return states([change.body for change in self.store.changes_after(0, 100_000)])

    def counters(self) -> dict[CounterKey, float]:
        return dict(self.engine.counters)

    def page(self) -> str:
        return gzip.decompress(self.engine.page()).decode()

    def close(self) -> None:
        assert self.store is not None
        self.store.close()


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    return Hub(tmp_path)


def test_changes_since_the_first_answer_are_told_with_slurms_times(hub: Hub) -> None:
    hub.slurm.rows = [queue_row("7", "RUNNING", started=110.0)]
    hub.steps(5)
    assert hub.told() == []  # the job started before this hub
    hub.slurm.rows = [
        queue_row("7", "COMPLETED", started=110.0, ended=1030.0),
        queue_row("8", "FAILED", 1010.0, started=1020.0, ended=1040.0),
    ]
    hub.steps(60)
    assert hub.told() == [("8", "PENDING", "RUNNING"), ("7", "RUNNING", "COMPLETED"), ("8", "RUNNING", "FAILED")]
    assert [change.time for change in hub.engine.recent] == [1020.0, 1030.0, 1040.0]
    assert [change.number for change in hub.engine.recent] == [1, 2, 3]
    place = ("ada", "gpu")
    counters = hub.counters()
    assert counters[CounterKey(ENDED, *place, "FAILED")] == counters[CounterKey(STARTED, *place)] == 1
    assert counters[CounterKey(GPU_S, *place)] == counters[CounterKey(GPU_S_OF_RUNS, *place)] == (920 + 20) * 4
    assert 'gpujob_jobs_ended_total{cluster="c1",user="ada",partition="gpu",state="TIMEOUT"} 0\n' in hub.page()


def test_a_restarted_hub_tells_what_happened_meanwhile_and_nothing_twice(hub: Hub) -> None:
    hub.slurm.rows = [queue_row("7", "PENDING", 1002.0), queue_row("8_[1-3]", "PENDING", 1002.0)]
    hub.steps(5)
    hub.slurm.rows = [queue_row("7", "RUNNING", 1002.0, started=1008.0), queue_row("8_[1-3]", "PENDING", 1002.0)]
    hub.steps(60)
    hub.restart()
    # 8_1 ran, ended and was forgotten by Slurm
    hub.slurm.rows = [
        queue_row("7", "COMPLETED", 1002.0, started=1008.0, ended=1070.0),
        queue_row("8_[2-3]", "PENDING", 1002.0),
    ]
    hub.slurm.attempts = [attempt("8_1", "FAILED", 1002.0, 1071.0, 1075.0)]
    hub.steps(600)
    assert hub.told() == [
        ("7", "PENDING", "RUNNING"),
        ("7", "RUNNING", "COMPLETED"),
        ("8_1", "PENDING", "RUNNING"),
        ("8_1", "RUNNING", "FAILED"),
    ]
    hub.restart()
    hub.steps(600)
    assert len(hub.told()) == hub.engine.last_number == 4


def test_an_array_whose_last_tasks_started_while_no_hub_ran_waits_no_more(hub: Hub) -> None:
    hub.slurm.rows = [queue_row("8_[1-2]", "PENDING", 1002.0)]
    hub.steps(5)
    hub.restart()
    hub.slurm.rows = [queue_row(f"8_{task}", "RUNNING", 1002.0, started=1010.0) for task in (1, 2)]
    hub.steps(60)
    assert hub.told() == [("8_1", "PENDING", "RUNNING"), ("8_2", "PENDING", "RUNNING")]
    assert hub.engine.view.jobs.keys() == {"8_1", "8_2"}
    hub.restart()
    assert hub.engine.view.jobs.keys() == {"8_1", "8_2"}


def test_tasks_that_a_cut_list_hides_still_wait(hub: Hub) -> None:
    hub.slurm.rows = [queue_row("8_[1-99:2]", "PENDING", 1002.0)]
    hub.steps(5)
    running = queue_row("8_1", "RUNNING", 1002.0, started=1010.0)
    hub.slurm.rows = [running, queue_row("8_[5,7,9,1...]", "PENDING", 1002.0)]
    hub.steps(60)
    assert hub.engine.view.jobs.keys() == {"8_1", "8_3", "8_[]"}


def test_an_ended_job_that_slurm_lists_for_days_is_told_once(hub: Hub) -> None:
    hub.steps(5)
    hub.slurm.rows = [queue_row("7", "CANCELLED", 1010.0, ended=1020.0)]
    hub.steps(3600, 60.0)
    hub.restart()
    hub.steps(3600, 60.0)
    assert hub.told() == [("7", "PENDING", "CANCELLED")]
    assert "job_id" not in hub.page()  # 30 minutes after its end
    hub.slurm.rows = []
    hub.steps(120)
    assert not hub.engine.view.jobs
    assert hub.store is not None
    assert [job.tracked.state for job in hub.store.jobs_by_id(["7"])] == ["CANCELLED"]


def test_cost_adds_up_over_attempts_and_restarts_and_idle_time_counts_once(hub: Hub) -> None:
    resources, place = "cpu=4,gres/gpu=2,gres/gpu:h100=2,energy=900", ("ada", "gpu")
    hub.slurm.node_rows = parse_nodes("n1|mixed|gpu*|gpu:4|gpu:2|4/0/0/4|1000|none|\n")
    hub.steps(5)
    first = queue_row("7", "RUNNING", 1001.0, started=1010.0)._replace(resources=resources)
    hub.slurm.rows = [first]
    hub.steps(60)
    second = queue_row("7", "RUNNING", 1080.0, restarts=1, started=1100.0)._replace(resources=resources)
    hub.slurm.rows = [second]
    hub.steps(60)
    hub.restart()
    price = (
        'gpujob_job_price_per_hour{cluster="c1",job_id="7",job_name="job",user="ada",partition="gpu",currency="EUR"}'
    )
    assert f"{price} 7200\n" in hub.page()
    ended = second.snapshot._replace(state="COMPLETED", ended=1150.0)
    hub.slurm.rows = [second._replace(snapshot=ended)]
    hub.slurm.attempts = [
        attempt("7", "REQUEUED", 1001.0, 1010.0, 1080.0),
        attempt("7", "COMPLETED", 1080.0, 1100.0, 1150.0)._replace(energy_j=900.0),
    ]
    found = Outcome(attempt=1, state="COMPLETED", exit_status=0, seen_s=90.0, idle_s=9.0, energy_j=70.0)
    hub.runs = [Run("7", "ada", "/runs/7", 1001.0, outcome=found)]
    hub.steps(600)
    hub.runs = []
    hub.restart()
    hub.steps(120)
    counters = hub.counters()
    ran_s = (1080 - 1010) + (1150 - 1100)
    assert counters[CounterKey(COST, *place, "EUR")] == counters[CounterKey(GPU_S, *place)] == ran_s * 2
    assert f"gpujob_job_cost{price.removeprefix('gpujob_job_price_per_hour')} {ran_s * 2}\n" in hub.page()
    assert counters[CounterKey(IDLE_S, *place)] == 9.0
    energies = {key.state: value for key, value in counters.items() if key.name == ENERGY_J}
    assert energies == {"gpu": 70.0, "slurm": 900.0}


def test_a_suspended_job_takes_only_the_time_in_which_it_runs(hub: Hub) -> None:
    hub.steps(5)

    def poll(state: str, ended: float | None = None) -> None:
        row = queue_row("7", state, 1001.0, started=1010.0)
        hub.slurm.rows = [row._replace(snapshot=row.snapshot._replace(ended=ended))]
        hub.steps(60)

    def gpu_seconds() -> tuple[float, float | None]:
        """By the counters, and by the job."""
        view, place = hub.engine.view, ("ada", "gpu")
        return view.counters[CounterKey(GPU_S, *place)], costs.gpu_seconds(view.jobs["7"], view.as_of or 0.0)

    for _ in range(20):  # a gang scheduler gives each job its turn
        poll("RUNNING")
        poll("SUSPENDED")
    hub.restart()
    poll("SUSPENDED")
    ran_s = (1125.0 - 1010.0) + 19 * 60.0
    assert gpu_seconds() == (ran_s * 4, ran_s * 4)
    poll("RUNNING")
    resumed = hub.engine.view.as_of or 0.0
    poll("RUNNING")
    assert gpu_seconds() == ((ran_s + 60) * 4, (ran_s + 60) * 4)
    suspended_s = resumed - 1010.0 - ran_s
    limit = 'gpujob_job_limit_timestamp_seconds{cluster="c1",job_id="7",job_name="job",user="ada",partition="gpu"}'
    assert f"{limit} {1010 + suspended_s + 300:g}\n" in hub.page()
    poll("COMPLETED", ended=resumed + 70)
    assert gpu_seconds() == ((ran_s + 70) * 4, (ran_s + 70) * 4)
    assert len(hub.engine.view.jobs["7"].tracked.history) <= MOST_EVENTS


def outcome(state: str, start: float, end: float, **more: int) -> Outcome:
    return Outcome(state=state, exit_status=0, start=start, end=end, **more)


@pytest.mark.parametrize(("later", "told"), [("COMPLETED", []), ("FAILED", [("7", "COMPLETED", "FAILED")])])
def test_the_report_of_a_run_tells_its_end_before_slurm_does(hub: Hub, later: str, told: list[object]) -> None:
    row = queue_row("7", "RUNNING", 1001.0, started=1002.0)
    hub.slurm.rows, hub.runs = [row], [Run("7", "ada", "/runs/7", 1001.0)]
    hub.steps(5)
    assert hub.engine.live_run_dirs() == {"/runs/7"}
    hub.runs = [Run("7", "ada", "/runs/7", 1001.0, outcome=outcome("COMPLETED", 1002.0, 1008.0))]
    hub.steps(5)
    assert hub.told() == [("7", "RUNNING", "COMPLETED")]
    hub.steps(90)  # Slurm still ends the job
    hub.slurm.rows = [row._replace(snapshot=row.snapshot._replace(state=later, ended=1010.0))]
    hub.steps(60)
    assert hub.told() == [("7", "RUNNING", "COMPLETED"), *told]
    assert hub.engine.view.jobs["7"].tracked.ended == 1010.0
    assert hub.engine.live_run_dirs() == frozenset()


def test_a_report_that_slurm_contradicts_for_minutes_is_no_end(hub: Hub) -> None:
    hub.slurm.rows = [queue_row("7", "RUNNING", 1001.0, started=1002.0)]
    hub.steps(5)
    hub.runs = [Run("7", "ada", "/runs/7", 1001.0, outcome=outcome("COMPLETED", 1002.0, 1007.0))]
    hub.steps(5)
    assert hub.told()[-1] == ("7", "RUNNING", "COMPLETED")
    hub.steps(CONFIRMED_WITHIN_S + 60)
    assert hub.told()[-1] == ("7", "COMPLETED", "RUNNING")
    hub.steps(60)
    tracked, as_of = hub.engine.view.jobs["7"].tracked, hub.engine.view.as_of or 0.0
    assert tracked.ended is None
    since = tracked.history[-1].seen  # what was counted at the reported end is not counted again
    assert hub.counters()[CounterKey(GPU_S, "ada", "gpu")] == (1007 - 1002 + as_of - since) * 4


@pytest.mark.parametrize("end", [1e12, 1e3, 0.0])
def test_a_report_by_a_clock_that_is_off_leaves_the_time_of_the_end_to_slurm(hub: Hub, end: float) -> None:
    hub.slurm.rows = [queue_row("7", "RUNNING", 1001.0, started=1002.0)]
    hub.steps(5)
    hub.runs = [Run("7", "ada", "/runs/7", 1001.0, outcome=outcome("COMPLETED", -1e12, end))]
    hub.steps(60)
    assert hub.told() == []
    hub.slurm.rows = [queue_row("7", "COMPLETED", 1001.0, started=1002.0, ended=1012.0)]
    hub.steps(60)
    assert hub.told() == [("7", "RUNNING", "COMPLETED")]
    assert hub.counters()[CounterKey(GPU_S_OF_RUNS, "ada", "gpu")] == (1012 - 1002) * 4


def test_a_reported_attempt_did_not_begin_before_its_submission(hub: Hub) -> None:
    hub.slurm.facts, hub.slurm.has_accounting = ClusterFacts("c1", False, 2.0), False
    hub.slurm.rows = [queue_row("7", "PENDING", 1001.0)]
    hub.steps(5)
    report = outcome("COMPLETED", -1e12, 1010.0, count=4)
    hub.runs = [Run("7", "ada", "/runs/7", 1001.0, outcome=report), Run("8", "ada", "/runs/8", 1007.0, outcome=report)]
    hub.steps(60)
    assert {job for job, _, state in hub.told() if state == "COMPLETED"} == {"7", "8"}
    gpu_s = sum(value for key, value in hub.counters().items() if key.name == GPU_S_OF_RUNS)
    assert gpu_s == (1010 - 1001 + 1010 - 1007) * 4


@pytest.mark.parametrize(("restarts", "user", "run_dir"), [(1, "ada", "/runs/7"), (0, "ada", None), (1, "eve", None)])
def test_a_job_that_was_requeued_before_the_hub_met_it_is_that_of_its_run(
    hub: Hub, restarts: int, user: str, run_dir: str | None
) -> None:
    hub.runs = [Run("7", user, "/runs/7", 1001.0)]
    hub.slurm.rows = [queue_row("7", "RUNNING", 12000.0, restarts=restarts, started=12100.0)]
    hub.steps(5)
    assert hub.engine.view.jobs["7"].tracked.run_dir == run_dir


def test_an_earlier_attempt_or_an_end_that_slurm_words_otherwise_is_awaited(hub: Hub) -> None:
    hub.slurm.rows = [queue_row(job_id, "RUNNING", 1001.0, started=1002.0) for job_id in ("7", "8")]
    hub.steps(5)
    hub.runs = [
        Run("7", "ada", "/runs/7", 1001.0, outcome=outcome("COMPLETED", 1002.0, 1007.0, attempt=1)),
        Run("8", "ada", "/runs/8", 1001.0, outcome=outcome("TIMEOUT", 1002.0, 1007.0)),
    ]
    hub.steps(60)
    assert hub.told() == []


def test_a_job_that_comes_and_goes_between_two_polls_is_found_in_accounting(hub: Hub) -> None:
    hub.steps(400)
    assert not hub.slurm.asked_for_missed  # not before the controller has said that it forgets
    hub.restart()
    hub.slurm.facts = ClusterFacts("c1", False, 2.0)
    hub.steps(120)
    begun = hub.clock.now
    hub.slurm.missed = [
        queue_row("7", "FAILED", begun + 1, started=begun + 2, ended=begun + 3),
        queue_row("6", "COMPLETED", 100.0, started=110.0, ended=120.0),  # before this hub
    ]
    hub.steps(600)
    hub.restart()
    hub.steps(600)
    assert hub.told() == [("7", "PENDING", "RUNNING"), ("7", "RUNNING", "FAILED")]
    times = hub.slurm.asked_for_missed
    assert 3 <= len(times) <= 6
    assert times == sorted(times)
    hub.slurm.facts = ClusterFacts("c1", False, 300.0)
    hub.restart()
    hub.steps(600)
    assert hub.slurm.asked_for_missed == times


def test_without_accounting_such_a_job_is_found_in_its_run_directory(hub: Hub) -> None:
    hub.slurm.facts, hub.slurm.has_accounting = ClusterFacts("c1", False, 2.0), False
    hub.steps(10)
    hub.runs = [
        Run("7", "ada", "/runs/7", 1020.0, outcome=outcome("TIMEOUT", 1021.0, 1030.0, count=2), name="train"),
        Run("6", "ada", "/runs/6", 10.0, outcome=outcome("COMPLETED", 11.0, 12.0)),  # before this hub
    ]
    hub.steps(60)
    hub.restart()
    hub.steps(60)
    told = [("7", "PENDING", "RUNNING"), ("7", "RUNNING", "TIMEOUT")]
    assert hub.told() == told
    job = hub.engine.view.jobs["7"]
    assert (job.tracked.name, job.gpus, job.tracked.run_dir) == ("train", 2.0, "/runs/7")
    hub.steps(SHOWN_AFTER_END_S * 2, 60.0)
    assert not hub.engine.view.jobs
    assert hub.told() == told  # its entry stays, and it is known


def test_budgets_of_users_count_what_ended_in_their_days_and_what_runs(hub: Hub) -> None:
    def row(job_id: str, user: str, start: float, end: float | None) -> QueueRow:
        found = queue_row(job_id, "RUNNING" if end is None else "FAILED", start, started=start)
        snapshot = found.snapshot._replace(ended=end)
        return found._replace(snapshot=snapshot, user=user, resources="gres/gpu=2,gres/gpu:h100=2")

    day = 86400.0
    begun = START + (USER_DAYS + 1) * day
    hub.clock.advance(begun - START)
    hub.slurm.rows = [
        row("1", "ada", 10 * day, 10 * day + 900.0),
        row("2", "ada", begun - 900.0, None),
        row("3", "eve", 100.0, 1000.0),  # too long ago
        row("4", "eve", begun - 3600.0, begun - 1800.0),
    ]
    hub.steps(900, 60.0)
    used = {key: round(value, 2) for key, value in hub.engine.budget_use.items()}
    ada_s = 1800 + 2 * (900 + (hub.clock.now - begun))
    assert used[("ada", "cost")] == pytest.approx(ada_s / 7200, abs=0.1)  # up to 5 minutes old
    assert used[("ada", "gpu_hours")] == pytest.approx(ada_s / 3600, abs=0.2)
    assert used[("eve", "gpu_hours")] == 0.5
    assert len(used) == 3


def test_a_later_job_with_the_same_id_is_another_job(hub: Hub) -> None:
    hub.slurm.rows = [queue_row("7", "RUNNING", 1001.0, started=1002.0)]
    hub.steps(5)
    hub.slurm.rows = [queue_row("7", "PENDING", 5000.0)]
    hub.slurm.attempts = [attempt("7", "TIMEOUT", 1001.0, 1002.0, 1030.0), attempt("7", "TIMEOUT", 1.0, 2.0, 3.0)]
    hub.steps(300)
    assert hub.told() == [("7", "RUNNING", "TIMEOUT")]
    assert hub.engine.view.jobs["7"].first_submitted == 5000.0


def test_accounting_of_another_user_under_the_same_id_is_not_believed(hub: Hub) -> None:
    hub.slurm.rows = [queue_row("7", "RUNNING", started=110.0)]
    hub.steps(5)
    hub.slurm.rows = []
    hub.slurm.attempts = [attempt("7", "FAILED", 100.0, 110.0, 1010.0)._replace(user="eve")]
    hub.steps(UNKNOWN_AFTER_S - 60)
    assert hub.told() == []
    hub.steps(GIVEN_UP_AFTER_S * 2, 60.0)
    assert hub.told() == [("7", "RUNNING", "UNKNOWN")]  # and no end was invented


def test_a_clock_that_is_off_is_a_problem_and_slurm_is_asked_less_than_twice_a_minute(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    hub.steps(600)
    assert hub.engine.problems == []
    assert abs(hub.engine.clock_offset_s or 9.0) <= 0.5
    hub.slurm.controller_time = lambda: hub.clock.now - 90.0
    hub.steps(3000)
    problem = "the clock of this machine is 90 s ahead of that of Slurm's controller"
    assert hub.engine.problems == [problem]
    asked = {command: use.answers + use.failures for command, use in hub.engine.commands.items()}
    assert sum(asked.values()) <= 1.5 * 60 + 3  # all of them at the start
    hub.slurm.controller_time = lambda: hub.clock.now
    hub.steps(600)
    assert hub.engine.problems == []
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [problem, "this machine and the controller of Slurm agree on the time again"]


def test_no_answer_says_nothing_about_a_job(hub: Hub) -> None:
    hub.slurm.rows = [queue_row("7", "RUNNING", started=110.0)]
    hub.steps(5)
    hub.slurm.rows = None
    hub.steps(600)
    assert hub.told() == []
    assert hub.engine.view.as_of == START + 5
    assert hub.engine.problems == ["squeue exited with 1: Socket timed out"]
    assert hub.slurm.polls <= 5  # at 60, 180 and 420 s
    hub.slurm.rows = [queue_row("7", "RUNNING", started=110.0)]
    hub.steps(300)
    assert (hub.engine.problems, hub.told()) == ([], [])


@pytest.mark.parametrize("ended_ago_s", [120.0, 2 * SHOWN_AFTER_END_S])
def test_the_end_of_a_job_is_shown_for_30_minutes_however_late_slurm_reports_it(hub: Hub, ended_ago_s: float) -> None:
    old = queue_row("6", "FAILED", 10.0, started=20.0, ended=30.0)  # before this hub
    hub.slurm.rows = [old, queue_row("7", "RUNNING", started=110.0)]
    hub.steps(5)
    hub.slurm.rows = None
    hub.steps(3 * SHOWN_AFTER_END_S, 60.0)
    hub.slurm.rows = [old, queue_row("7", "FAILED", started=110.0, ended=hub.clock.now - ended_ago_s)]
    hub.steps(300, 60.0)
    hub.restart()
    hub.slurm.rows = [old]
    hub.steps(SHOWN_AFTER_END_S - 600, 60.0)
    assert 'job_id="7",job_name="job",user="ada",partition="gpu",notify="",state="FAILED"} 1\n' in hub.page()
    assert 'job_id="6"' not in hub.page()
    hub.steps(900, 60.0)
    assert 'job_id="7"' not in hub.page()
    assert "7" not in hub.engine.view.jobs


def test_a_hub_without_any_answer_says_since_when(hub: Hub) -> None:
    """Else the alert on a hub without answers could not fire."""

    def last_answer() -> float | None:
        return hub.engine.commands["squeue"].last_success

    hub.slurm.rows = None
    hub.steps(600)
    assert last_answer() == START
    hub.slurm.rows = []
    hub.steps(300)
    answered = hub.engine.view.as_of
    hub.slurm.rows = None
    hub.restart()
    hub.steps(600)
    assert (last_answer(), hub.engine.view.is_ready) == (answered, False)


def test_an_answer_that_the_hub_fails_to_use_does_not_count(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.steps(5)

    def fail(batch: object) -> None:
        raise RuntimeError

    assert hub.store is not None
    monkeypatch.setattr(hub.store, "save", fail)
    hub.slurm.rows = [queue_row("7", "RUNNING", started=110.0)]
    with pytest.raises(RuntimeError):
        hub.steps(60)
    use = hub.engine.commands["squeue"]
    assert (use.answers, use.last_success, hub.engine.view.as_of) == (2, START + 5, START + 5)


def test_the_controller_is_asked_for_its_name_until_it_answers_and_then_every_ten_minutes(hub: Hub) -> None:
    hub.slurm.facts = hub.slurm.rows = None
    hub.steps(400)
    assert hub.slurm.facts_asked == 0  # while the queue has no answer either
    hub.slurm.rows = [queue_row("7", "RUNNING", started=110.0)]
    hub.steps(300)
    assert 1 <= hub.slurm.facts_asked <= 5
    assert 'cluster="slurm",job_id="7"' in hub.page()
    hub.slurm.facts = ClusterFacts("c1", False)
    hub.steps(60)
    assert 'cluster="c1",job_id="7"' in hub.page()
    asked = hub.slurm.facts_asked
    hub.steps(500)
    assert hub.slurm.facts_asked == asked
    hub.slurm.facts = ClusterFacts("c1", True)  # after a reconfiguration
    hub.steps(160)
    assert hub.slurm.facts_asked == asked + 1
    assert hub.engine.facts == ClusterFacts("c1", True)
    hub.slurm.facts = None
    hub.steps(600)
    assert hub.engine.facts == ClusterFacts("c1", True)  # no answer opens nothing


def test_figures_that_accounting_lacks_for_ten_minutes_are_not_measured(hub: Hub) -> None:
    hub.steps(5)
    hub.slurm.rows = [queue_row("7", "COMPLETED", 1005.0, started=1006.0, ended=1016.0)]
    late = attempt("7", "COMPLETED", 1005.0, 1006.0, 1016.0)._replace(steps=(Step(None, 20.0, 300.0),))
    hub.slurm.attempts = [late]
    hub.steps(300)
    assert hub.engine.view.jobs["7"].tracked.figures is None
    hub.steps(AFTER_END_S[-1])
    figures = hub.engine.view.jobs["7"].tracked.figures
    assert figures is not None
    assert (figures.cpu_ratio, figures.memory_bytes) == (0.5, 300.0)
    assert len(hub.slurm.asked) == 4  # after the nodes two at once, and one each 200 s
    assert 'gpujob_job_cpu_efficiency_ratio{cluster="c1",job_id="7",' in hub.page()


@pytest.mark.parametrize("is_watched", [False, True])
def test_in_no_ten_minutes_are_there_more_than_16_commands_or_30_requests(hub: Hub, is_watched: bool) -> None:
    requests = {"squeue": 2, "sinfo": 2, "sdiag": 1, "scontrol": 1, "sacct": 0}  # to the controller, by Slurm 22.05
    hub.slurm.facts = ClusterFacts("c1", False, 2.0)  # accounting is also asked for jobs that came and went
    minutes = list[Counter[str]]()
    for minute in range(120):
        before = {name: use.answers + use.failures for name, use in hub.engine.commands.items()}
        for second in range(0, 60, 5):  # in each of them jobs end
            now, first = hub.clock.now, 12 * minute + second // 5
            hub.slurm.rows = [queue_row(str(first), "FAILED", now, started=now, ended=now)]
            hub.slurm.attempts = [
                attempt(job.job_id, "FAILED", job.submitted or 0.0, job.started, job.ended)
                for job in (each.tracked for each in hub.engine.view.jobs.values())
            ]
            if is_watched:
                hub.engine.want_nodes()
            hub.steps(5)
        after = {name: use.answers + use.failures for name, use in hub.engine.commands.items()}
        minutes.append(Counter({name: after[name] - before[name] for name in after}))
    windows = [sum(minutes[first : first + 10], Counter[str]()) for first in range(111)]
    assert max(window.total() for window in windows) <= 16
    assert max(window.total() - window["scontrol"] for window in windows) <= 15
    assert max(sum(requests[name] * count for name, count in window.items()) for window in windows) <= 30
    # all of them have their turn
    assert all(window["squeue"] == 10 and window["sinfo"] >= 1 and window["sacct"] >= 1 for window in windows)
    assert all(len(asked) <= MOST_IN_QUESTION for asked in hub.slurm.asked)
    waits = [job.tracked for job in hub.engine.view.jobs.values() if job.tracked.figures is None]
    assert all(hub.clock.now - (job.ended or 0.0) < 900.0 for job in waits)


def test_in_a_cluster_jobs_that_wait_are_only_in_the_sums(tmp_path: Path) -> None:
    hub = Hub(tmp_path, whole_cluster=True)
    without_gpus = queue_row("9", "RUNNING", started=110.0)._replace(resources="cpu=1")
    hub.slurm.rows = [
        queue_row("7", "RUNNING", started=110.0),
        queue_row("8_[1-3]", "PENDING")._replace(partition="low,high"),
        without_gpus,
    ]
    hub.steps(5)
    assert 'job_id="7"' in hub.page()
    assert 'job_id="8' not in hub.page()
    assert 'job_id="9"' not in hub.page()
    for partition in ("low", "high"):
        assert f'gpujob_jobs_pending{{cluster="c1",partition="{partition}",reason="None"}} 3\n' in hub.page()
    hub.runs = [Run("9", "eve", "/runs/9", 100.0)]
    hub.steps(60)
    assert 'job_id="9"' not in hub.page()  # eve's word says nothing about ada's job
    hub.runs = [Run("9", "ada", "/runs/9", 101.0, notify="oncall")]
    hub.steps(60)
    assert 'notify="oncall",state="RUNNING"' in hub.page()
    hub.runs = [*hub.runs, Run("8", "ada", "/sweeps/8", 101.0, notify="sweeps")]
    hub.slurm.rows = [queue_row("8_1", "RUNNING", started=110.0)]
    hub.steps(60)
    assert 'notify="sweeps",state="RUNNING"' in hub.page()
    assert (
        'job_id="9",job_name="job",user="ada",partition="gpu",attempt="1",account="lab",qos="normal",launched_by="gpujob"'
        in hub.page()
    )


@settings(max_examples=30)
@given(
    given_lives=st.lists(lives(), min_size=1, max_size=3),
    restarts=st.sets(st.integers(0, 80), max_size=6),
    silences=st.sets(st.integers(0, 80), max_size=40),
)
def test_whenever_it_restarts_no_change_is_told_twice_and_no_counter_falls(
    given_lives: list[Life], restarts: set[int], silences: set[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        hub = Hub(Path(folder), FakeClock(900.0))
        hub.steps(5)
        last, seen = dict[CounterKey, float](), set[str]()
        for step in range(220):
            if step in restarts:
                hub.restart()
            now = hub.clock.now
            answers = step not in silences
            rows = [
                row._replace(job_id=str(number), user="ada", partition="gpu", resources="gres/gpu=2")
                for number, life in enumerate(given_lives)
                if now >= (life.attempts[0].snapshot.submitted or 0.0)
                for row in life.queue(now)
            ]
            hub.slurm.rows = rows if answers else None
            hub.slurm.attempts = [
                one._replace(job_id=str(number))
                for number, life in enumerate(given_lives)
                for one in life.accounting(now)
            ]
            polls = hub.slurm.polls
            hub.engine.step()
            if answers and hub.slurm.polls > polls:
                seen |= {row.job_id for row in rows if row.snapshot.submitted != life_end(given_lives, row.job_id) + 1}
            hub.clock.advance(13.0)
            counters = dict(hub.engine.counters)
            assert all(counters[key] >= value for key, value in last.items())
            last = counters
        assert hub.store is not None
        changes = hub.store.changes_after(0, 10_000)
        hub.close()
    assert [change.number for change in changes] == list(range(1, len(changes) + 1))
    own = [(change.body["job_id"], change.body["first_submitted"]) for change in changes]
    for job in set(own):
        told = [change.body for change, name in zip(changes, own, strict=True) if name == job]
        assert [each["previous"] for each in told[1:]] == [each["state"] for each in told[:-1]]
        keys = [(each["attempt"], each["previous"], each["state"]) for each in told]
        assert len(keys) == len(set(keys))
    for job_id in seen:  # the others came and went between two answers
        later = job_id, life_end(given_lives, job_id) + 1
        final = [
            change.body["state"]
            for change, name in zip(changes, own, strict=True)
            if name[0] == job_id and name != later
        ]
        assert final[-1] == given_lives[int(job_id)].attempts[-1].snapshot.state


def life_end(given_lives: list[Life], job_id: str) -> float:
    return given_lives[int(job_id)].attempts[-1].snapshot.ended or 0.0


def test_nodes_are_read_more_often_while_somebody_watches_them(hub: Hub) -> None:
    hub.slurm.rows = []
    hub.steps(10)
    found = []
    for _ in range(4):
        hub.steps(WATCHED_NODES_S / 3)
        found.append((hub.engine.want_nodes(), hub.engine.wake.is_set()))
        hub.engine.step()
    assert found == [(False, False), (False, False), (True, True), (False, True)]


def test_runs_that_have_left_the_registry_take_no_memory() -> None:
    stale = StaleRuns(lambda _: ())
    for number in range(5):
        run = Run(str(number), "ada", f"/runs/{number}", 0.0, is_monitored=True)
        asked = stale.update([run], {}, 1e6)
        assert asked == [run]
        stale.take(asked, (), 1e6)
        assert stale.update([run], {}, 1e6) == [], "it was asked"
    assert (len(stale._ended), len(stale._asked)) == (1, 1)


def test_targets_are_stale_once_slurm_says_that_their_job_or_attempt_has_ended(hub: Hub) -> None:
    def run(job_id: str, submitted: float = 1000.0) -> Run:
        return Run(job_id, "ada", f"/runs/{job_id}", submitted, is_monitored=True)

    hub.runs = [*map(run, ("7", "8", "9", "local-1")), run("3", 300.0), run("4", 300.0), run("6", 300.0)]
    jobs = [queue_row(job_id, "RUNNING", 1000.0, started=1001.0) for job_id in ("7", "8", "9")]
    hub.slurm.rows = [*jobs, queue_row("6", "RUNNING", 2000.0)]  # the id of another job
    hub.slurm.attempts = [attempt("3", "NODE_FAIL", 300.0, 310.0, 400.0), attempt("4", "RUNNING", 300.0, 310.0, None)]
    hub.steps(10)
    # accounting knows the end of one job that the queue does not have
    assert (hub.engine.stale_targets(), hub.slurm.asked) == ({"/runs/3": math.inf}, [("3", "4", "6")])
    ended = queue_row("7", "NODE_FAIL", 1000.0, started=1001.0, ended=1060.0)
    requeued = queue_row("8", "PENDING", 1060.0, restarts=1)
    hub.slurm.rows = [ended, requeued, jobs[2]]
    hub.steps(GONE_AFTER_S)
    assert hub.engine.stale_targets() == {"/runs/3": math.inf}
    hub.steps(GONE_AFTER_S + 65)
    assert hub.engine.ends_of_stale() == {"/runs/3": 400.0, "/runs/7": 1060.0}
    stale = {"/runs/3": math.inf, "/runs/7": math.inf, "/runs/8": 1060.0}
    assert hub.engine.stale_targets() == stale
    hub.slurm.rows = [jobs[2], requeued]
    hub.steps(2 * SHOWN_AFTER_END_S, 60.0)
    hub.slurm.attempts = []
    hub.restart()
    hub.steps(70)
    assert hub.engine.stale_targets() == {
        path: stale[path] for path in ("/runs/7", "/runs/8")
    }  # 3 is no job of its own
    hub.slurm.rows = [jobs[2], queue_row("8", "RUNNING", 1060.0, restarts=1, started=5000.0)]
    hub.steps(70)
    assert hub.engine.stale_targets().keys() == {"/runs/7"}


def test_tasks_of_arrays_are_those_that_no_longer_wait_together(hub: Hub) -> None:
    tasks = (queue_row(job_id, "RUNNING", 1000.0, started=1000.0) for job_id in ("7_0", "7_3"))
    hub.slurm.rows = [*tasks, queue_row("7_[4-6]", "PENDING", 1000.0), queue_row("8", "PENDING", 1000.0)]
    hub.steps(5)
    assert hub.engine.array_tasks() == {"7": ["7_0", "7_3"]}


def test_ended_runs_with_a_budget_cost_no_look_at_all_jobs_each() -> None:
    looks = 0

    class Jobs(UserDict[str, Job]):
        def values(self) -> ValuesView[Job]:
            nonlocal looks
            looks += 1
            return super().values()

    runs = [Run(str(number), "ada", "/runs", 1.0, budget=Budget(gpu_hours=1.0)) for number in range(100)]
    assert not list(sweeps_with_budgets(runs, Jobs(), lambda ids, user: (), 5.0))
    assert looks == 1


def test_all_points_of_a_sweep_use_one_budget(hub: Hub) -> None:
    times = {"7": 200.0, "9": 1000.0}  # resumed later
    sweep = Run("7", "ada", "/runs/sweep", 200.0, name="lr", notify="oncall", job_ids=times)
    hub.runs = [sweep._replace(budget=Budget(gpu_hours=1.0))]
    rows = [queue_row(f"{of}_1", "COMPLETED", at, started=1000.0, ended=1090.0) for of, at in times.items()]
    hub.slurm.rows = [*rows, queue_row("7_2", "PENDING", 200.0), queue_row("70_1", "RUNNING", 1000.0, started=1000.0)]
    hub.steps(2 * SHOWN_AFTER_END_S, 60.0)
    hub.slurm.rows = hub.slurm.rows[2:]  # Slurm and the hub forget those that ended
    hub.steps(2 * SHOWN_AFTER_END_S, 60.0)
    assert "7_1" not in hub.engine.view.jobs
    place = 'cluster="c1",job_id="7",job_name="job",user="ada",partition="gpu"'
    used = [line for line in hub.page().splitlines() if line.startswith("gpujob_job_budget_used_ratio{")]
    # 2 x 90 s of 4 GPUs
    assert used == [f'gpujob_job_budget_used_ratio{{{place},notify="oncall",kind="gpu_hours"}} 0.2']
    hub.slurm.rows = [queue_row("7_2", "CANCELLED", 200.0, ended=9000.0)]
    hub.steps(400, 60.0)
    assert "gpujob_job_budget_used_ratio{" not in hub.page()
