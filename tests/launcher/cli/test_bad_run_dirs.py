"""Run directories that cannot be read, have moved, or lost files: one line and a documented status, no traceback."""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exporter.contract.view import JobView
from launcher.cli.main import main
from launcher.report.report import build_report, write_report
from launcher.report.state import EXIT_STATUS
from launcher.rundir.rundir import PIPELINE_FILE, SWEEP_FILE
from launcher.watch.view import JobClient
from tests.support.builders import orchestrator_record
from tests.support.launcher import settled_run_dir

NOBODY = 65534
DOCUMENTED = {*EXIT_STATUS.values(), 2}
COMMANDS = [
    ("watch", "--once"),
    ("watch", "--json"),
    ("report",),
    ("report", "--verify"),
    ("stop",),
    ("logs",),
    ("sweep",),
]

Call = Callable[..., tuple[int, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command in this process; returns its status and standard error. Another exception fails the test."""

    def run(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["gpujob", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        shown = capsys.readouterr()
        assert "\x1b]" not in shown.out + shown.err, "a record commands the terminal"
        return ended.value.code, shown.err

    return run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A job that has ended, with all its records; its orchestrator is gone."""
    path = settled_run_dir(tmp_path, {"name": "job", "workers": [{"command": "true"}]})
    (path / "orchestrator.json").write_text(json.dumps(orchestrator_record(pid=2**22 + 1)))
    write_report(path, build_report(path, now=2000.0, ended=True))
    for name in ("state.json", "status/here.json", "sidecars/here.json", SWEEP_FILE):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text('{"schema": 1}')
    return path


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def become_other_kind(path: Path) -> None:
    was_directory = path.is_dir()
    remove(path)
    path.touch() if was_directory else path.mkdir()


def link_to_itself(path: Path) -> None:
    remove(path)
    path.symlink_to(path.name)


def lose_its_content(path: Path) -> None:
    if path.is_file():
        path.write_bytes(b'{"schema": 1, "\xff": [')


def become_a_pipe(path: Path) -> None:
    if path.is_file():
        path.unlink()
        os.mkfifo(path)


def become_huge(path: Path) -> None:
    if path.suffix == ".json":
        os.truncate(path, 2**40)


HARMS = [remove, become_other_kind, link_to_itself, lose_its_content, become_a_pipe, become_huge]


@pytest.mark.parametrize("harm", HARMS)
def test_no_harm_to_a_record_ends_in_a_traceback(harm: Callable[[Path], None], run_dir: Path, call: Call) -> None:
    whole = shutil.copytree(run_dir, run_dir.parent / "whole")
    names = sorted(path.relative_to(whole) for path in whole.rglob("*"))
    for name in names:
        for command in COMMANDS:
            shutil.rmtree(run_dir)
            shutil.copytree(whole, run_dir)
            harm(run_dir / name)
            status, errors = call(*command, run_dir)
            assert status in DOCUMENTED, (command, name)
            assert status != 2 or errors.startswith("gpujob: "), (command, name, errors)


def put(hostile: str | int, value: object) -> object:
    """End all texts with a text, or put a number into the place of all numbers."""
    if isinstance(value, dict):
        return {key: inner if key.startswith("schema") else put(hostile, inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [put(hostile, inner) for inner in value]
    if isinstance(hostile, int):
        return hostile if isinstance(value, int | float) and not isinstance(value, bool) else value
    return f"{value}{hostile}" if isinstance(value, str) else value


@pytest.mark.parametrize("is_reported", [True, False])
@pytest.mark.parametrize(
    "hostile", ["\0", "\ud800", "\x1b]0;x\x07\u202e", 10**400, 10**30], ids=lambda value: ascii(value)[:9]
)
def test_nothing_in_a_record_ends_in_a_traceback_or_commands_the_terminal(
    hostile: str | int, is_reported: bool, run_dir: Path, call: Call
) -> None:
    if not is_reported:
        (run_dir / "report.json").unlink()
    ended = {"schema": 1, "worker": "worker_w0", "rank": 0, "host": "here", "start": 1.0, "end": 2.0, "code": 3}
    (run_dir / "workers/worker_w0_rank0_a0_r0.exit.json").write_text(json.dumps(ended))
    for path in sorted(run_dir.rglob("*.json")):
        whole = path.read_text()
        path.write_text(json.dumps(put(hostile, json.loads(whole))))
        for command in (*COMMANDS, ("metrics",)):
            if command == ("stop",) and "\x1b" in str(hostile):
                continue  # it takes records of this user alone
            assert call(*command, run_dir)[0] in {*DOCUMENTED, hostile}, (command, path)  # as the report says
        path.write_text(whole)


POINT = {"index": 0, "name": "a", "values": {}, "runs": ["\ud800", "a\0"]}


@pytest.mark.parametrize(
    ("name", "record"),
    [
        (SWEEP_FILE, {"submission": {}, "max_parallel": None, "local": True, "points": []}),
        (SWEEP_FILE, {"submission": {"job_id": "local-1"}, "max_parallel": None, "local": True, "points": [POINT]}),
        (PIPELINE_FILE, {"submission": {}, "parts": []}),
    ],
)
def test_sweeps_and_pipelines_without_names_or_with_impossible_ones_end_in_no_traceback(
    name: str, record: dict[str, object], tmp_path: Path, call: Call
) -> None:
    (tmp_path / name).write_text(json.dumps({"schema": 1, **record}))
    for command in (("watch", "--once"), ("watch", "--once", "--json"), ("report", "--json"), ("sweep", "--json")):
        assert call(*command, tmp_path)[0] in DOCUMENTED, command


def test_an_event_that_is_nested_deeply_is_left_out(run_dir: Path, call: Call) -> None:
    (run_dir / "report.json").unlink()
    (run_dir / "events.jsonl").write_text('{"time": 2e9, "event": "milestone", "x": ' + "[" * 30_000)
    assert call("watch", "--once", run_dir)[0] in DOCUMENTED


@pytest.mark.parametrize("name", ["orchestrator.json", "report.json"])
def test_a_damaged_record_is_named_and_not_taken_for_an_absent_one(name: str, run_dir: Path, call: Call) -> None:
    """An absent one would be a job that waits, or one without a report."""
    (run_dir / name).write_text('{"a": ')
    for command in ("watch", "stop"):
        status, errors = call(command, run_dir)
        assert status == 2
        assert errors == (
            f"gpujob: {run_dir / name} is damaged or cannot be read: no JSON object in its 6 bytes; "
            "restore it, or remove it to continue without it\n"
        )


def test_logs_of_a_job_of_a_newer_version_are_refused(run_dir: Path, call: Call) -> None:
    (run_dir / "orchestrator.json").write_text('{"schema": 99}')
    status, errors = call("logs", run_dir)
    assert status == 2
    assert errors.startswith("gpujob: orchestrator.json has schema 99")


@pytest.fixture
def other_user() -> Iterator[None]:
    """Files are opened as another user."""
    os.seteuid(NOBODY)
    yield
    os.seteuid(0)


def everything(run_dir: Path) -> list[Path]:
    return [run_dir, *sorted(run_dir.rglob("*"))]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_logs_directory_that_cannot_be_read_is_named(run_dir: Path, other_user: None, call: Call) -> None:
    os.seteuid(0)
    logs = run_dir.parent
    logs.chmod(0)
    os.seteuid(NOBODY)
    with contextlib.chdir(logs.parent):
        status, errors = call("report", "local-1")
    assert (status, errors) == (2, f"gpujob: {logs}: Permission denied; ask its owner for access\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_what_cannot_be_read_is_named_in_one_line(run_dir: Path, other_user: None, call: Call) -> None:
    os.seteuid(0)
    places = {place: place.stat().st_mode for place in everything(run_dir)}
    for place in places:
        place.chmod(0o755 if place.is_dir() else 0o644)
    for place in places:
        mode = place.stat().st_mode
        place.chmod(0)
        os.seteuid(NOBODY)
        for command in COMMANDS:
            status, errors = call(*command, run_dir)
            assert status in DOCUMENTED, (command, place)
            if place == run_dir or (place.name == "manifest.json" and command[0] in ("watch", "report")):
                assert status == 2
                line = errors.splitlines()[-1]
                assert line == f"gpujob: {run_dir / 'manifest.json'}: Permission denied; ask its owner for access"
        os.seteuid(0)
        place.chmod(mode)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_run_directory_that_moves_while_it_is_watched_ends_the_view(
    options: tuple[str, ...], run_dir: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job goes on for the reader of its records: its orchestrator is this process."""
    read_view = JobClient.read_view

    def read_and_move(client: JobClient) -> JobView:
        view = read_view(client)
        run_dir.rename(run_dir.with_name("elsewhere"))
        return view

    (run_dir / "report.json").unlink()
    (run_dir / "orchestrator.json").write_text(json.dumps(orchestrator_record()))
    monkeypatch.setattr(JobClient, "read_view", read_and_move)
    status, errors = call("watch", "--interval", "0.1", *options, run_dir)
    assert status == 2
    assert (
        errors
        == f"gpujob: {run_dir / 'manifest.json'}: No such file or directory; if it was moved, name its new place\n"
    )
