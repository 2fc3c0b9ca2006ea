"""The table of a sweep that `gpujob watch` shows."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

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


def test_a_watch_asks_once_a_minute_how_lost_points_have_ended(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "4459_embed_20251122_041341"
    names = (*NAMES, "4459_2_p2_20251122_041341")  # accounting does not know how the last one has ended
    for name in names:
        run_dir(home, name)
    write_record(home, record_of(*((name,) for name in names)))
    slurm.say("squeue", "out", "4459_1|RUNNING\n")
    slurm.replace("sacct", 'echo asked >> "$FAKE_SLURM/asked"; echo "4459_0|Unknown|Unknown|TIMEOUT"')
    do_at_waits(monkeypatch, lambda: None, lambda: None, lambda: end_as(home, NAMES[1], "COMPLETED"))
    assert watch_sweep(home, 2.0, "done", once=False, as_json=False) == 3
    assert (slurm.folder / "asked").read_text() == "asked\n"


def test_a_live_table_fits_its_window_until_the_end(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "4459_embed_20251122_041341"
    names = [f"4459_{index}_p{index}_20251122_041341" for index in range(12)]
    for index, name in enumerate(names):
        run_dir(home, name, "COMPLETED" if index < 9 else None)
    write_record(home, record_of(*((name,) for name in names)))
    slurm.say("squeue", "out", "".join(f"4459_{index}|RUNNING\n" for index in range(9, 12)))
    screen = io.StringIO()
    monkeypatch.setattr("rich._console", Console(file=screen, force_terminal=True, width=100, height=8))
    monkeypatch.setattr(sweep_states, "has_screen", lambda: True)
    shown = list[list[str]]()

    def next_picture() -> None:
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
        shown.append(list(filter(None, text.splitlines())))
        screen.seek(0)
        screen.truncate()

    def fail() -> None:
        next_picture()
        slurm.say("squeue", "out", "")
        slurm.say("squeue", "err", UNREACHABLE)
        slurm.say("squeue", "status", 1)

    def end() -> None:
        next_picture()
        for name in names:
            end_as(home, name, "COMPLETED")

    do_at_waits(monkeypatch, fail, end)
    assert watch_sweep(home, 2.0, "done", once=False, as_json=False) == 0
    next_picture()
    running, unanswered, ended = shown
    assert [line.split()[0] for line in running[1:]] == ["0", "1", "9", "10", "11", "and", "12"]
    assert unanswered[0].startswith("gpujob: squeue exited with 1"), "above the table, which stays"
    assert unanswered[-8:] == running
    assert [line.split()[1] for line in ended[-13:-1]] == [f"p{index}" for index in range(12)]


def test_a_watch_of_a_sweep_says_where_no_slurm_is(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir(tmp_path / "s", NAMES[0])
    write_record(tmp_path / "s", record_of((NAMES[0],)))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SlurmUnansweredError, match="squeue is not on PATH"):
        watch_sweep(tmp_path / "s", 2.0, "done", once=False, as_json=False)
