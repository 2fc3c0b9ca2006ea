"""One answer of Slurm for all commands of a user, with executables on PATH."""

import os
import stat
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from exporter.slurm.accounting import parse_history
from exporter.slurm.commands_reader import NO_CLUSTER, SlurmReader, SlurmUnansweredError
from exporter.slurm.sources import shared_answers_reader
from exporter.slurm.sources.cached_answers_reader import QueueAnswer, cluster_name
from exporter.slurm.sources.shared_answers_reader import (
    HISTORY_MAX_AGE_S,
    QUEUE_MAX_AGE_S,
    WATCHED_USE_S,
    read_queue_of_all,
    read_shared_history,
    read_shared_nodes,
    read_shared_queue,
    read_shared_use,
)
from tests.support.exporter import FakeClock, until
from tests.support.fake_slurm import PRINT_ROWS

SAMPLES = Path(__file__).parents[1] / "samples"
ROW = "7|COMPLETED|None|100|110|170|5:00|0|n1|gpu|cpu=4,mem=600M,node=1|7|ada|lab|normal|1|(null)|/dev/null|job|"
FAILURE = 'echo "Unable to contact slurm controller" >&2; exit 1'


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return {"HOME": str(tmp_path), "SLURM_CONF": str(tmp_path / "slurm.conf"), "PATH": os.environ["PATH"]}


def set_answer(folder: Path, text: str, command: str = "squeue", log: str = "calls") -> None:
    (folder / command).write_text(f"#!/bin/sh\n{PRINT_ROWS}echo >> {folder}/{log}\n{text}\n")
    (folder / command).chmod(0o755)


def calls(folder: Path, log: str = "calls") -> int:
    path = folder / log
    return len(path.read_text().splitlines()) if path.exists() else 0


def answer(environ: Mapping[str, str], now: float, user: str = "ada") -> QueueAnswer:
    return read_shared_queue(SlurmReader(user, None, environ), environ, lambda: now)


def test_ended_jobs_too_are_asked_for_only_once_a_minute(tmp_path: Path, environ: Mapping[str, str]) -> None:
    set_answer(tmp_path, f"echo '{ROW}' | rows")
    first = answer(environ, 1000.0)
    assert (first.rows[0].job_id, first.as_of, first.problem) == ("7", 1000.0, None)
    assert answer(environ, 1000.0 + QUEUE_MAX_AGE_S - 1) == first
    assert calls(tmp_path) == 1
    assert answer(environ, 1000.0 + QUEUE_MAX_AGE_S).as_of == 1000.0 + QUEUE_MAX_AGE_S
    answer(environ, 900.0)  # by a clock that is behind
    answer(environ, 1000.0, "bob")
    assert calls(tmp_path) == 4


def test_of_many_watchers_one_asks(tmp_path: Path, environ: Mapping[str, str]) -> None:
    set_answer(tmp_path, f"sleep 0.5; echo '{ROW}' | rows")
    with ThreadPoolExecutor(20) as pool:
        looks = list(pool.map(lambda _: answer(environ, 1000.0), range(20)))
    assert calls(tmp_path) == 1
    assert {found.as_of for found in looks} == {1000.0}


def test_files_are_private_and_a_damaged_one_is_ignored(tmp_path: Path, environ: Mapping[str, str]) -> None:
    set_answer(tmp_path, f"echo '{ROW}' | rows")
    answer(environ, 1000.0)
    folder = tmp_path / ".cache" / "gpujob"
    (path,) = folder.glob("*.json")
    assert (stat.S_IMODE(folder.stat().st_mode), stat.S_IMODE(path.stat().st_mode)) == (0o700, 0o600)
    path.write_text('{"schema": 1, "rows": [')
    assert answer(environ, 1001.0).rows[0].job_id == "7"
    folder.chmod(0o777)  # others could write there
    path.write_text(path.read_text().replace('"7"', '"8"'))
    assert answer(environ, 1002.0).rows[0].job_id == "7"
    assert calls(tmp_path) == 3


def test_without_an_answer_the_last_look_stays_and_the_failure_is_shared(
    tmp_path: Path, environ: Mapping[str, str]
) -> None:
    set_answer(tmp_path, f"echo '{ROW}' | rows")
    answer(environ, 1000.0)
    set_answer(tmp_path, FAILURE)
    late = answer(environ, 1100.0)
    assert (late.as_of, late.rows[0].job_id) == (1000.0, "7")
    assert late.problem == "squeue exited with 1: Unable to contact slurm controller"
    assert answer(environ, 1120.0) == late
    assert calls(tmp_path) == 2
    for _ in range(2):
        with pytest.raises(SlurmUnansweredError, match=r"^squeue exited with 1: Unable"):
            answer(environ, 1100.0, "bob")
    assert calls(tmp_path) == 3


def test_a_machine_without_slurm_leaves_nothing_for_others(tmp_path: Path, environ: Mapping[str, str]) -> None:
    set_answer(tmp_path, 'echo "fatal: Could not establish a configuration source" >&2; exit 1')
    with pytest.raises(SlurmUnansweredError, match=NO_CLUSTER):
        answer(environ, 1000.0)
    set_answer(tmp_path, f"echo '{ROW}' | rows")
    assert answer(environ, 1000.0).as_of == 1000.0


def test_a_lock_is_not_waited_for_beyond_the_deadline(
    tmp_path: Path, environ: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_answer(tmp_path, f"echo '{ROW}' | rows")
    answer(environ, 1000.0)
    set_answer(tmp_path, f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; echo '{ROW}' | rows")
    other = threading.Thread(target=answer, args=(environ, 1100.0))
    other.start()
    until(lambda: calls(tmp_path) == 2, "the question of the other")
    monkeypatch.setattr(shared_answers_reader, "DEADLINE_S", 0.2)
    waited = answer(environ, 1100.0)
    (tmp_path / "go").touch()
    other.join()
    assert waited.as_of == 1000.0
    assert waited.problem is not None
    assert "is being asked by process" in waited.problem
    assert answer(environ, 1100.0).as_of == 1100.0


def test_without_a_home_slurm_is_asked_each_time(tmp_path: Path, environ: Mapping[str, str]) -> None:
    set_answer(tmp_path, f"echo '{ROW}' | rows")
    for _ in range(2):
        assert answer({"PATH": environ["PATH"]}, 1000.0).as_of == 1000.0
    assert calls(tmp_path) == 2


def test_nodes_have_a_look_of_their_own(tmp_path: Path, environ: Mapping[str, str]) -> None:
    set_answer(tmp_path, "echo 'n1|idle|gpu*|gpu:h100:4|gpu:h100:0|0/8/0/8|1000|none|'", "sinfo")
    for _ in range(2):
        found = read_shared_nodes(SlurmReader("ada", None, environ), environ, lambda: 1000.0)
        assert (found.rows[0].node, found.rows[0].gpus) == ("n1", {"h100": 4})
    assert calls(tmp_path) == 1
    reader = SlurmReader("ada", None, environ)
    assert read_shared_nodes(reader, environ, lambda: 1100.0, watch=True).as_of == 1000.0
    assert read_shared_nodes(reader, environ, lambda: 1100.0).as_of == 1100.0  # who asks once wants to know it now


def test_the_use_of_all_watched_jobs_is_asked_for_three_times_in_ten_minutes(
    tmp_path: Path, environ: Mapping[str, str]
) -> None:
    set_answer(tmp_path, "echo '7.0|00:00:01|4|cpu=00:00:07,mem=1024'", "sstat")
    slurm, clock = SlurmReader("ada", None, environ), FakeClock(1000.0)
    for job_id in ("7", "8"):  # who begins to watch a job asks
        assert read_shared_use(slurm, job_id, environ, clock.time, WATCHED_USE_S).rows[0].cpu_s == 7.0
    for _ in range(119):
        clock.advance(5.0)
        looks = [read_shared_use(slurm, job_id, environ, clock.time, WATCHED_USE_S) for job_id in ("7", "8")]
    assert calls(tmp_path) == 2 + 2  # one about each
    assert {answer.as_of for answer in looks} == {1200.0, 1400.0}
    assert read_shared_use(slurm, "7", environ, clock.time).as_of == clock.now  # a single command asks


def test_those_who_watch_since_the_same_hour_share_an_answer_of_accounting(
    tmp_path: Path, environ: Mapping[str, str]
) -> None:
    attempts = (SAMPLES / "sacct.26.05.5.txt").read_text(encoding="utf-8").splitlines()
    (tmp_path / "attempts").write_text("".join(f"gpu|lab|normal|1|n1|{line}\n" for line in attempts))
    set_answer(tmp_path, f"rows < {tmp_path}/attempts", "sacct")
    pairs = parse_history((tmp_path / "attempts").read_text())
    ends = sorted(row.snapshot.ended for row, _ in pairs if row.snapshot.ended is not None)
    first, now = ends[0] // 3600 * 3600, ends[-1] + 10.0
    slurm = SlurmReader(None, None, environ)

    def ended(since: float, at: float = now) -> list[float]:
        found = read_shared_history(slurm, environ, since, lambda: at)
        return sorted(row.snapshot.ended for row, _ in found if row.snapshot.ended is not None)

    assert ended(ends[3]) == [end for end in ends if end >= ends[3]]
    assert ended(first) == ends
    assert calls(tmp_path) == 1
    assert ended(first - 3600) == ends
    assert ended(first) == ends
    assert calls(tmp_path) == 2
    ended(first, now + HISTORY_MAX_AGE_S)
    assert calls(tmp_path) == 3
    set_answer(tmp_path, FAILURE, "sacct")
    assert ended(first, now + 2 * HISTORY_MAX_AGE_S) == ends
    with pytest.raises(SlurmUnansweredError, match="sacct exited with 1: Unable"):
        ended(first - 1.0, now + 2 * HISTORY_MAX_AGE_S)  # the hour before is not there


def test_looks_are_of_one_cluster(tmp_path: Path, environ: Mapping[str, str]) -> None:
    assert cluster_name({"SLURM_CONF": str(tmp_path / "none")}) != "hal"
    (tmp_path / "slurm.conf").write_text("# ClusterName=no\nclustername = hal\n")
    assert cluster_name(environ) == "hal"
    assert cluster_name({**environ, "SLURM_CLUSTERS": "sal"}) == "sal"


def test_a_hundred_watchers_cost_15_commands_and_30_requests_in_ten_minutes(
    tmp_path: Path, environ: Mapping[str, str]
) -> None:
    set_answer(tmp_path, f"echo '{ROW}' | rows")
    set_answer(tmp_path, "echo 'n1|idle|gpu*|gpu:h100:4|gpu:h100:0|0/8/0/8|1000|none|'", "sinfo")
    set_answer(tmp_path, "true", "sacct", "accounting")
    everybody, clock = SlurmReader(None, None, environ), FakeClock(1000.0)
    for second in range(600):  # it begins with a question for each
        for _ in range(10):  # each reads every 5 seconds; half of them watch the nodes and the jobs on them
            read_queue_of_all(everybody, "ada", environ, clock.time)
            read_shared_nodes(everybody, environ, clock.time, watch=True)
            assert answer(environ, clock.now).rows[0].job_id == "7"
            clock.advance(0.1)
        assert answer(environ, clock.now, "bob").rows == ()
        of_others = [read_queue_of_all(everybody, "eve", environ, clock.time, user=user) for user in ("ada", "bob")]
        assert [len(found.rows) for found in of_others] == [1, 0]
        read_shared_history(everybody, environ, 500.0 + second % 7, clock.time)
        if second in (299, 599):
            assert calls(tmp_path) <= 1.5 * (second + 1) / 60
            assert calls(tmp_path) * 2 <= 3 * (second + 1) / 60  # PARTITION_INFO, and JOB_USER_INFO or NODE_INFO
    assert calls(tmp_path) + calls(tmp_path, "accounting") <= 15
