"""What jobs of the past took: the same from the index and from accounting, whatever each of them has."""

import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter.hub.engine import Engine, Settings
from exporter.hub.index_reader import History, index_path, read_history, rebuild_index
from exporter.hub.store import Batch, Store
from exporter.slurm.accounting import Attempt
from exporter.slurm.commands_reader import ClusterFacts, SlurmReader
from exporter.slurm.queue import AttemptSnapshot, QueueRow
from exporter.slurm.sources.hub_reader import HubJob
from exporter.slurm.usage import Usage, UsageRow
from launcher.fleet.history import read_ended, read_used
from launcher.fleet.usage_view import render_usage, usage_table
from launcher.registry.entries import register_job
from tests.launcher.fleet.run_dirs import run_directory
from tests.support.exporter import FakeClock

USER = pwd.getpwuid(os.geteuid()).pw_name
NOW = 2_000_000_000.0
TRES = "cpu=4,mem=600M,node=1,gres/gpu=2"
DAY_S = 86400.0


class Accounting(SlurmReader):
    """Accounting of some attempts: their jobs, states, times of submission, start and end."""

    def __init__(self, attempts: list[tuple[str, str, float, float | None, float | None]]) -> None:
        super().__init__(USER, None, {})
        self.attempts, self.asked = attempts, list[tuple[float, float | None]]()

    def cluster_facts(self) -> ClusterFacts:
        return ClusterFacts("c1", False, 300.0)

    def queue(self) -> tuple[QueueRow, ...]:
        rows = [row for row, _ in self._pairs() if row.snapshot.ended is None]
        return tuple(rows)

    def history(self, since: float, until: float | None = None) -> tuple[tuple[QueueRow, Attempt], ...]:
        self.asked.append((since, until))
        end = NOW if until is None else until
        return tuple(
            pair
            for pair in self._pairs()
            if (pair[0].snapshot.submitted or 0.0) < end and (pair[0].snapshot.ended or NOW) >= since
        )

    def usage_since(self, since: float) -> tuple[UsageRow, ...]:
        found = []
        for row, attempt in self._pairs():
            begin = max(row.snapshot.started or NOW, float(int(since)))
            elapsed_s = max(0.0, (row.snapshot.ended or NOW) - begin)
            known = (row.job_id, row.user, row.account, row.partition, row.snapshot.state, elapsed_s, attempt.cpus)
            found.append(UsageRow(*known, {"": 2}, row.name))
        return tuple(found)

    def _pairs(self) -> Iterator[tuple[QueueRow, Attempt]]:
        for job_id, state, submitted, started, ended in self.attempts:
            snapshot = AttemptSnapshot(state, NOW + submitted, started and NOW + started, ended and NOW + ended)
            elapsed_s = 0.0 if snapshot.started is None else (snapshot.ended or NOW) - snapshot.started
            made = Attempt(job_id, USER, f"job{job_id}", snapshot, "0:0", elapsed_s, 4, None, (), TRES)
            yield QueueRow(job_id, snapshot, made.name, None, "gpu", TRES, USER, "lab", "normal", 1, "n1"), made


ATTEMPTS = [
    ("1", "COMPLETED", -9 * DAY_S, -9 * DAY_S + 5, -9 * DAY_S + 105),
    ("2", "COMPLETED", -7 * DAY_S, -7 * DAY_S + 5, -2 * DAY_S),  # over the beginning of the index, and of the time
    ("3_1", "NODE_FAIL", -6 * DAY_S, -6 * DAY_S, -5 * DAY_S),
    ("3_1", "FAILED", -5 * DAY_S, -5 * DAY_S + 9, -4 * DAY_S),
    ("4", "CANCELLED", -4 * DAY_S, None, -3 * DAY_S),
    ("5", "TIMEOUT", -3600.0, -3500.0, -600.0),  # after the index was made
    ("6", "RUNNING", -2 * DAY_S, -2 * DAY_S + 1, None),
]


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr("time.time", lambda: NOW)
    return {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state"), "SLURM_CLUSTERS": "c1"}


def sums(slurm: Accounting, since: float, environ: dict[str, str]) -> dict[str, Usage]:
    return dict(usage_table(read_used(slurm, since, NOW, environ).rows, "name").groups)


def ended(slurm: Accounting, since: float, environ: dict[str, str]) -> dict[str, object]:
    found = read_ended(slurm, (), since, environ).rows
    return {row.job_id: (row._replace(output=None), figures) for row, figures in found if row.snapshot.ended}


@pytest.mark.parametrize("days", [1.0, 3.0, 5.5, 6.5, 8.0, 20.0])
def test_index_and_accounting_together_say_what_accounting_says(days: float, environ: dict[str, str]) -> None:
    slurm, since, alone = Accounting(ATTEMPTS), NOW - days * DAY_S, {**environ, "GPUJOB_HUB": "none"}
    made = Accounting(ATTEMPTS[:5] + ATTEMPTS[6:])
    rebuild_index(index_path(environ), environ, USER, NOW - 6.5 * DAY_S, (), made)
    store = Store(index_path(environ))
    store.save(Batch(NOW, meta={"covers_until": str(NOW - DAY_S / 2)}))
    store.close()
    assert read_used(slurm, since, NOW, alone).source == read_ended(slurm, (), since, alone).source == "accounting"
    assert read_ended(slurm, (), since, alone, watch=True) == read_ended(slurm, (), since, alone)
    slurm.asked.clear()
    assert sums(slurm, since, environ) == sums(slurm, since, alone)
    # accounting is asked for what is before and after the index
    before = [(since, NOW - 6.5 * DAY_S)] if days > 6.5 else []
    assert slurm.asked == [*before, (max(since, NOW - DAY_S / 2), None)]
    assert read_used(slurm, since, NOW, environ).source == f"{index_path(environ)} and accounting"
    told, wanted = ended(slurm, since, environ), ended(slurm, since, alone)
    wanted = {job_id: each for job_id, each in wanted.items() if each[0].snapshot.ended >= since}  # type: ignore[index]
    assert told == wanted


def test_idle_gpu_time_is_that_of_attempts_that_are_counted_whole(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = tuple(
        HubJob(
            job_id=name,
            job_name=name,
            state="COMPLETED",
            started=begin,
            ended=NOW,
            resources=TRES,
            gpu_idle_seconds=9.0,
        )
        for name, begin in (("whole", NOW - 50.0), ("cut", NOW - 500.0))
    )
    found = History("unix:/hub", jobs, 0.0, NOW, is_of_hub=True)
    monkeypatch.setattr("launcher.fleet.history.read_history", lambda *_: found)
    table = usage_table(read_used(Accounting([]), NOW - 100.0, NOW, environ).rows, "name")
    assert {name: usage.idle_s for name, usage in table.groups.items()} == {"whole": 9.0, "cut": None}
    head, _, whole, total = render_usage(table)
    assert (head.split()[:4], whole.split()[3], total.split()[3]) == (["NAME", "JOBS", "GPU_H", "IDLE"], "0.00", "0.00")


@pytest.mark.parametrize(("job_id", "link"), [("7", "."), ("7_2", "tasks/7_2")])
@pytest.mark.parametrize(("since", "idle_s"), [(100.0, 40.0), (120.0, None)])
def test_idle_gpu_time_of_a_running_job_is_that_of_its_sidecars(
    job_id: str,
    link: str,
    since: float,
    idle_s: float | None,
    environ: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir = run_directory(tmp_path / "run", idle_s=20.0)  # since 110, two GPUs
    if link != ".":
        (tmp_path / "sweep" / "tasks").mkdir(parents=True)
        (tmp_path / "sweep" / link).symlink_to(run_dir)
        run_dir = tmp_path / "sweep"
    register_job(run_dir, {"job_id": "7", "job_name": "train", "submitted": 100.0}, environ, tmp_path)
    slurm = Accounting([(job_id, "RUNNING", 100.0 - NOW, 110.0 - NOW, None), ("8", "RUNNING", -9.0, -8.0, None)])
    rows = read_used(slurm, since, NOW, {**environ, "GPUJOB_HUB": "none"}).rows
    assert {row.job_id: row.idle_s for row in rows} == {job_id: idle_s, "8": None}
    jobs = tuple(
        HubJob(job_id=each, job_name="", state="RUNNING", started=110.0, resources=TRES) for each in (job_id, "8")
    )
    monkeypatch.setattr("launcher.fleet.history.read_history", lambda *_: History("unix:/hub", jobs, 0.0, NOW, True))
    by_hub = read_used(slurm, since, NOW, environ).rows
    assert {row.job_id: row.idle_s for row in by_hub} == {job_id: idle_s, "8": None}


def test_a_hub_that_saw_everything_needs_no_accounting(environ: dict[str, str]) -> None:
    clock, slurm = FakeClock(NOW - 100.0), Accounting(ATTEMPTS)
    path = index_path(environ)
    path.parent.mkdir(parents=True)
    store = Store(path)
    engine = Engine(slurm, store, Settings(False, "c1", 60.0, 100), clock)
    engine.step()
    assert engine.covers_since == NOW - 100.0
    clock.advance(60)
    engine.step()
    assert engine.covers_since == NOW - 100.0
    clock.advance(2 * DAY_S)  # accounting is not asked about a gap of more than a day
    engine.step()
    assert engine.covers_since == clock.time()
    store.close()
    assert read_history(slurm, {**environ, "SLURM_CLUSTERS": "c2"}, NOW) is None  # the index is of another cluster
