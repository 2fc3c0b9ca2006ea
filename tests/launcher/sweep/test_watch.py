"""The table of a sweep that `gpujob watch` shows."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from exporter.contract import run_files
from exporter.slurm.commands_reader import SlurmUnansweredError
from launcher.cli.jobs import sweep_states
from launcher.cli.jobs.sweep_states import watch_sweep
from launcher.sweep.directory import write_record
from tests.launcher.sweep.test_directory import ENDED, record_of, run_dir
from tests.support.fake_slurm import FakeSlurm

NAMES = ("4459_0_p0_20251122_041341", "4459_1_p1_20251122_041341")
UNREACHABLE = "slurm_load_jobs error: Unable to contact slurm controller\n"


def do_at_waits(monkeypatch: pytest.MonkeyPatch, *turns: Callable[[], object]) -> None:
    """Let the watch wait only as often as there are turns, and do one of them each time."""
    left = iter(turns)
    monkeypatch.setattr(sweep_states, "time", SimpleNamespace(sleep=lambda _: next(left)()))


def end_as(home: Path, name: str, state: str, **more: object) -> None:
    run_files.write_json(home / name / run_files.REPORT_FILE, {**ENDED, "state": state, **more})


def test_a_watch_of_a_sweep_outlives_a_queue_without_an_answer(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "4459_embed_20251122_041341"
    for name in NAMES:
        run_dir(home, name)
    write_record(home, record_of(*((name,) for name in NAMES)))
    queue = "4459_0|RUNNING\n4459_1|RUNNING\n"
    slurm.say("squeue", "out", queue)

    def fail() -> None:
        end_as(home, NAMES[0], "TIMEOUT", requeued=True, exit_status=3)
        slurm.say("squeue", "out", "")
        slurm.say("squeue", "err", UNREACHABLE)
        slurm.say("squeue", "status", 1)

    def answer() -> None:
        slurm.say("squeue", "status", 0)
        slurm.say("squeue", "err", "")
        slurm.say("squeue", "out", "4459_0|PENDING\n4459_1|RUNNING\n")

    def end() -> None:
        for name in NAMES:
            end_as(home, name, "COMPLETED")

    do_at_waits(monkeypatch, fail, lambda: None, answer, end)
    assert watch_sweep(home, 2.0, "done", once=False, as_json=False) == 0
    shown = capsys.readouterr()
    assert [line for line in shown.out.splitlines() if "points:" in line] == [
        "2 points: 2 RUNNING",
        "2 points: 1 PENDING, 1 RUNNING",
        "2 points: 2 COMPLETED",
    ]
    assert shown.err == f"gpujob: squeue exited with 1: {UNREACHABLE.strip()}; asked again every 15 s\n"
    end_as(home, NAMES[0], "TIMEOUT", requeued=True, exit_status=3)
    fail()
    assert watch_sweep(home, 2.0, "done", once=True, as_json=False) == 10, "one look shows what is known"
    assert "1 PENDING" in capsys.readouterr().out


def test_a_watch_of_a_sweep_says_where_no_slurm_is(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir(tmp_path / "s", NAMES[0])
    write_record(tmp_path / "s", record_of((NAMES[0],)))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SlurmUnansweredError, match="squeue is not on PATH"):
        watch_sweep(tmp_path / "s", 2.0, "done", once=False, as_json=False)
