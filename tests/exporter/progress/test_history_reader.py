"""The run history of a job: its location, its content, and that no problem with it is an error. Earlier attempts."""

import dataclasses
import json
import logging
import os
import shlex
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.contract import run_files
from exporter.progress import history_reader
from exporter.progress.history_reader import (
    MOST_BYTES,
    MOST_RUNS,
    RunHistory,
    read_earlier_attempts,
    read_run_history,
    run_history_path,
    write_run_history,
)
from tests.launcher.run.test_batch import Submitted

RUN = RunHistory(1_700_000_000.0, 8, 100_000, 3600.5, {"worker": {"rate": 2.5, "shape": [1, 2]}, "decode": {}})
HOSTILE = (
    "../../x",
    "/etc/passwd",
    "..",
    ".",
    "",
    ".hidden",
    "x" * 300,
    "日本" * 150,
    "two\nlines",
    "a\0b",
    "🚀",
    "\udce9",
    "-rf *",
    "a/b\\c:d",
)

WORKER = """
import json, os
rank, progress = int(os.environ["GPUJOB_RANK"]), open(os.environ["GPUJOB_PROGRESS_FILE"], "a")
for done in (141, 200, 300, 400):
    print(json.dumps({"done": done + rank, "total": 400 + rank}), file=progress)
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"GPUJOB_HISTORY_DIR": str(tmp_path / "history")}


@pytest.fixture(autouse=True)
def forget_reported_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_reader, "_reported_paths", set())


def run_at(time: float, **changes: Any) -> RunHistory:
    return dataclasses.replace(RUN, time=time, **changes)


def path_of(name: str, environ: dict[str, str]) -> Path:
    path = run_history_path(name, environ)
    assert path is not None
    return path


# -- location ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HOME": "/home/ada"}, "/home/ada/.local/state/gpujob/history"),
        ({"HOME": "/home/ada", "XDG_STATE_HOME": "/scratch/state"}, "/scratch/state/gpujob/history"),
        ({"HOME": "/home/ada", "XDG_STATE_HOME": "state"}, "/home/ada/.local/state/gpujob/history"),
        ({"HOME": "/home/ada", "XDG_STATE_HOME": ""}, "/home/ada/.local/state/gpujob/history"),
        ({"XDG_STATE_HOME": "/scratch/state"}, "/scratch/state/gpujob/history"),
        ({"HOME": "/home/ada", "XDG_STATE_HOME": "/s", "GPUJOB_HISTORY_DIR": "/h"}, "/h"),
    ],
)
def test_the_folder_is_in_the_state_directory_of_the_user(environ: dict[str, str], folder: str) -> None:
    assert str(path_of("embed", environ).parent) == folder


@pytest.mark.parametrize(
    "environ",
    [{}, {"HOME": ""}, {"HOME": "relative"}, {"HOME": "/home/ada", "GPUJOB_HISTORY_DIR": ""}, {"HOME": "/a\0b"}],
)
def test_without_a_folder_there_is_no_history(environ: dict[str, str]) -> None:
    assert run_history_path("embed", environ) is None
    assert not write_run_history("embed", environ, RUN)
    assert read_run_history("embed", environ) == ()


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_job_with_any_name_has_its_file_in_the_folder(name: str, environ: dict[str, str]) -> None:
    assert write_run_history(name, environ, RUN)
    assert read_run_history(name, environ) == (RUN,)
    folder = Path(environ["GPUJOB_HISTORY_DIR"])
    (file,) = os.listdir(folder)
    assert folder / file == path_of(name, environ)
    assert os.listdir(folder.parent) == ["history"]


@given(st.text(max_size=300) | st.sampled_from(HOSTILE))
def test_file_names_are_short_plain_and_visible(name: str) -> None:
    path = path_of(name, {"GPUJOB_HISTORY_DIR": "/h"})
    assert path.parent == Path("/h")
    assert path.name.isascii()
    assert len(path.name) < 100
    assert path.name[0].isalnum() or path.name[0] == "-"


@pytest.mark.parametrize("others", [("a/b", "a_b"), ("A", "a"), ("x" * 300, "x" * 301), ("", "job"), ("é", "è")])
def test_jobs_with_different_names_have_different_files(others: tuple[str, str], environ: dict[str, str]) -> None:
    first, second = (path_of(name, environ).name.lower() for name in others)
    assert first != second


# -- content --------------------------------------------------------------------------------------


def test_a_job_that_never_ran_has_no_history(environ: dict[str, str]) -> None:
    assert read_run_history("embed", environ) == ()


def test_the_last_runs_are_kept_oldest_first(environ: dict[str, str]) -> None:
    for time in range(MOST_RUNS + 3):
        assert write_run_history("embed", environ, run_at(float(time), total=None))
    runs = read_run_history("embed", environ)
    assert [run.time for run in runs] == [3.0, 4.0, 5.0, 6.0, 7.0]
    assert runs[-1] == run_at(7.0, total=None)
    assert len(json.loads(path_of("embed", environ).read_bytes())["runs"]) == MOST_RUNS


def test_histories_of_other_jobs_are_untouched(environ: dict[str, str]) -> None:
    write_run_history("one", environ, run_at(1.0))
    write_run_history("two", environ, run_at(2.0))
    assert [run.time for run in read_run_history("one", environ)] == [1.0]


def test_the_file_is_private_and_no_temporary_file_remains(environ: dict[str, str]) -> None:
    write_run_history("embed", environ, RUN)
    path = path_of("embed", environ)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_fewer_large_runs_are_kept(environ: dict[str, str]) -> None:
    large: dict[str, dict[str, Any]] = {"worker": {"shape": "x" * (MOST_BYTES // 3)}}
    for time in range(4):
        assert write_run_history("embed", environ, run_at(float(time), prior=large))
    assert [run.time for run in read_run_history("embed", environ)] == [2.0, 3.0]
    assert path_of("embed", environ).stat().st_size <= MOST_BYTES


def test_a_run_that_is_too_large_on_its_own_is_not_kept(environ: dict[str, str]) -> None:
    write_run_history("embed", environ, RUN)
    assert not write_run_history("embed", environ, run_at(1.0, prior={"worker": {"shape": "x" * MOST_BYTES}}))
    assert read_run_history("embed", environ) == (RUN,)


# -- problems -------------------------------------------------------------------------------------


def altered(**changes: object) -> bytes:
    run = {**dataclasses.asdict(RUN), **changes}
    return json.dumps({"schema": 1, "runs": [run]}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not JSON",
        b"[]",
        b"null",
        b"{}",
        b'{"schema": 2, "runs": []}',
        b'{"schema": 1, "runs": {}}',
        b'{"schema": 1, "runs": [3]}',
        b'{"schema": 1, "runs": [{}]}',
        b"[" * 60_000,
        b"\xff\xfe\x00",
        b'{"schema": 1, "runs": [], "pad": "' + b"x" * MOST_BYTES + b'"}',
        altered(time=None),
        altered(time="now"),
        altered(time=float("nan")),
        altered(time=10**400),
        altered(seconds=-1),
        altered(seconds=float("inf")),
        altered(workers=1.5),
        altered(workers=True),
        altered(workers=-1),
        altered(total="all"),
        altered(total=1.5),
        altered(prior=None),
        altered(prior=[]),
        altered(prior={"worker": 3}),
    ],
)
def test_invalid_content_is_reported_once_and_replaced_by_the_next_run(
    content: bytes, environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    path = path_of("embed", environ)
    path.parent.mkdir()
    path.write_bytes(content)
    assert read_run_history("embed", environ) == ()
    assert read_run_history("embed", environ) == ()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"{path} is not a run history" in caplog.text
    assert write_run_history("embed", environ, RUN)
    assert read_run_history("embed", environ) == (RUN,)


def test_unknown_fields_of_a_newer_version_are_ignored(environ: dict[str, str]) -> None:
    path = path_of("embed", environ)
    path.parent.mkdir()
    path.write_bytes(altered(colour="red"))
    assert read_run_history("embed", environ) == (RUN,)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.mkdir()


def make_loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [make_pipe, make_folder, make_loop])
def test_a_path_that_is_no_regular_file_has_no_history(make: Callable[[Path], None], environ: dict[str, str]) -> None:
    path = path_of("embed", environ)
    path.parent.mkdir()
    make(path)
    assert read_run_history("embed", environ) == ()


def test_a_folder_that_cannot_be_written_to_is_no_error(locked: Path) -> None:
    environ = {"HOME": str(locked)}
    assert not write_run_history("embed", environ, RUN)
    assert read_run_history("embed", environ) == ()


def test_a_path_that_cannot_be_a_folder_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environ = {"GPUJOB_HISTORY_DIR": str(tmp_path / "file" / "below")}
    assert not write_run_history("embed", environ, RUN)
    assert read_run_history("embed", environ) == ()


def test_a_failed_write_leaves_the_previous_file(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    write_run_history("embed", environ, RUN)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert not write_run_history("embed", environ, run_at(1.0))
    assert read_run_history("embed", environ) == (RUN,)
    assert os.listdir(environ["GPUJOB_HISTORY_DIR"]) == [path_of("embed", environ).name]


def test_each_attempt_gives_its_report_or_the_statuses_of_its_sidecars(tmp_path: Path) -> None:
    for folder in ("status", "status_a0", "status_a1"):
        (tmp_path / folder).mkdir()
    run_files.write_json(tmp_path / "report_a0.json", {"attempt": 0})
    run_files.write_json(tmp_path / "report_a2.json", {"attempt": 2})
    run_files.write_json(tmp_path / "status_a0/n1.json", {"attempt": 0, "node": "n1"})
    run_files.write_json(tmp_path / "status_a1/n1.json", {"attempt": 1, "node": "n1"})
    run_files.write_json(tmp_path / "status_a1/n2.json", {"attempt": 1, "node": "n2"})
    (tmp_path / "status_a1/n3.json").write_text("{")
    run_files.write_json(tmp_path / "status/n1.json", {"attempt": 3, "node": "n1"})
    assert list(read_earlier_attempts(tmp_path, 3)) == [
        [{"attempt": 2}],
        [{"attempt": 1, "node": "n1"}, {"attempt": 1, "node": "n2"}],
        [{"attempt": 0}],
    ]


def test_attempts_are_read_lazily(tmp_path: Path) -> None:
    run_files.write_json(tmp_path / "report_a1.json", {"attempt": 1})
    found = read_earlier_attempts(tmp_path, 2)
    assert next(found) == [{"attempt": 1}]
    run_files.write_json(tmp_path / "report_a0.json", {"attempt": 0})
    assert next(found) == [{"attempt": 0}], "it was not there when the first one was asked for"


def test_the_first_attempt_has_no_earlier_attempts(tmp_path: Path) -> None:
    assert list(read_earlier_attempts(tmp_path, 0)) == []


def test_attempts_without_files_give_nothing(tmp_path: Path) -> None:
    assert list(read_earlier_attempts(tmp_path, 2)) == [[], []]


def test_statuses_of_an_attempt_without_report_include_moved_ranks(
    tmp_path: Path,
) -> None:
    """The batch step of attempt 0 was killed with its node. Its ranks 0 and 1 were on swapped nodes."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    job = Submitted(
        tmp_path / "job",
        "true",
        resources={"nodes": 2},
        workers=[{"count": 2, "command": shlex.join([sys.executable, str(script)])}],
    )
    for node, rank in (("cn01", 1), ("cn02", 0)):
        worker = {"rank": rank, "unit": "items", "items": 141 + rank, "items_expected": 400 + rank, "items_first": 1}
        status = {"attempt": 0, "final": False, "workers": [worker], "figures_of_merit": []}
        (job.run_dir / f"status/{node}.json").write_text(json.dumps(status))
    batch = job.run(SLURM_RESTART_COUNT="1")
    assert sorted(path.name for path in (job.run_dir / "status_a0").iterdir()) == ["cn01.json", "cn02.json"]
    assert batch.report["attempt"] == 1
    workers = batch.report["workers"]
    assert [(entry["rank"], entry["node"], entry["items"], entry["items_processed"]) for entry in workers] == [
        (0, "cn01", 400, 259),
        (1, "cn02", 401, 259),
    ], batch.log()
