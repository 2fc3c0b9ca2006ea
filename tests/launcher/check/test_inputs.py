"""Input files: there, one for each worker, and what their names say."""

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.check import inputs
from launcher.check.finding import CheckFinding
from launcher.check.inputs import check_inputs
from tests.launcher.check.planned_jobs import subject_of, told

Look = Callable[..., list[CheckFinding]]


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """The items of some entries for a job of four workers."""

    def check(*patterns: str, workers: int = 4, inside: bool = True) -> list[CheckFinding]:
        plan = subject_of(tmp_path, workers=[{"count": workers, "command": "true"}]).plan
        return check_inputs(plan, patterns, check_contents=inside)

    return check


def test_a_job_that_names_no_input_is_not_checked(look: Look) -> None:
    assert [item.status for item in look()] == ["not checked"]


def test_globs_paths_and_folders_are_counted(tmp_path: Path, look: Look) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / f"in/{number}.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "odd[1].txt").write_text("x")
    items = look("in/*.jsonl", "in", str(tmp_path / "in/0.jsonl"), "odd[1].txt")
    assert [item.status for item in items] == ["ok"] * 4
    assert items[0].message == "in/*.jsonl: 3 files, 27 bytes"
    assert items[2].message.endswith("1 file, 9 bytes")


def test_what_is_not_there_is_an_error(look: Look, tmp_path: Path) -> None:
    (tmp_path / "gone").symlink_to("nowhere")
    items = look("none.json", "in/*.csv", "gone")
    assert told(items) == [
        ("no-input", "error", "inputs[0]"),
        ("no-input", "error", "inputs[1]"),
        ("unreadable-input", "error", "inputs[2]"),
    ]
    assert items[0].message == '"none.json" names no file; check the path, which counts from the working directory'


def test_there_is_a_file_for_each_worker(tmp_path: Path, look: Look) -> None:
    for number in range(4):
        (tmp_path / f"part_{number}.txt").write_text("x")
    (ok,) = look("part_{rank}.txt")
    assert ok.message == "part_{rank}.txt: 4 files, one for each of 4 workers, 4 bytes"
    (missing,) = look("part_{rank}.txt", workers=9)
    assert missing.message.startswith('"part_4.txt", "part_5.txt", "part_6.txt" and 2 more name no file')
    (shared,) = look("part_{local_rank}.txt")
    assert (shared.code, shared.status) == ("split", "warning")


def test_empty_and_forbidden_files_are_errors(tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.bin").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "secret.bin").write_text("x")
    monkeypatch.setattr("os.access", lambda path, _: Path(path).name != "secret.bin")
    for inside in (True, False):
        assert [item.code for item in look("empty.bin", "folder", "secret.bin", inside=inside)] == [
            "empty-input",
            "empty-input",
            "unreadable-input",
        ]


LINES = b'{"a": 1}\n{"a": 2}\n'


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.json", b'{"a": [1, 2]}', None),
        ("a.json", b'\xef\xbb\xbf{"a": 1}', None),
        ("a.json", b"{'a': 1}", "it is not JSON: "),
        ("a.json", LINES, None),
        ("a.json", b'{\n"a": 1,\n}', "it is not JSON: "),
        ("a.json", b'{"a": "\xff"}', "it is not UTF-8 at byte 7; convert it with iconv"),
        ("a.json", b"[" * 100_000, "it is not JSON: "),
        ("a.jsonl", LINES, None),
        ("a.ndjson", LINES.rstrip(), None),
        ("a.jsonl", b"\n" + LINES + b"\n\n", None),
        ("a.jsonl", '{"a": "x\u2028y"}\n'.encode(), None),
        ("a.jsonl", b"id,name\n", "the first record is not JSON "),
        ("a.jsonl", LINES + b'{"a": ', "the last record is not JSON "),
        ("a.csv", b'a,b\n1,"x,y"\n', None),
        ("a.csv", b"a;b\n1,5;2\n", None),
        ("a.csv", b"one\ntwo\n", None),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", "row 3 has 3 fields and the first has 2; fix the row, or its quotes"),
        ("a.tsv", b"a\tb\n1\t2\n", None),
        ("a.yaml", b"a: 1\n---\nb: [1]\n", None),
        ("a.yml", b"a: [1\n", "it is not YAML in line 2: "),
        ("a.bin", b"\x00\xff", None),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0), None),
        ("a.jsonl", gzip.compress(LINES, mtime=0), None),
        ("a.jsonl.gz", gzip.compress(b"x\n", mtime=0), "the first record is not JSON "),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9], "the packed file is cut short; fetch it again"),
        ("a.jsonl.gz", LINES, "it is called .gz and is not packed by gzip; rename it, or fetch it again"),
        ("a.bin.gz", b"\x1f\x8b" + b"rubbish" * 5, "it cannot be unpacked ("),
    ],
)
def test_a_file_is_what_its_name_says(
    name: str, content: bytes, problem: str | None, tmp_path: Path, look: Look
) -> None:
    (tmp_path / name).write_bytes(content)
    (item,) = look(name)
    if problem is None:
        assert (item.code, item.status) == ("inputs", "ok")
    else:
        assert (item.code, item.status) == ("bad-input", "error")
        assert item.message.startswith(f'"{tmp_path / name}": {problem}')
    assert [quick.status for quick in look(name, inside=False)] == ["ok"]


LARGE = 3 * inputs.MOST_BYTES // 2


@pytest.mark.parametrize(
    ("name", "content", "well"),
    [
        ("a.json", b'[1, "' + b"x" * LARGE, True),
        ("a.json", b"x" * LARGE, False),
        ("a.jsonl", b'{"a": 1}\n' * (LARGE // 9), True),
        ("a.jsonl", b'{"a": 1}\n' * (LARGE // 9) + b'{"a"', False),
        ("a.jsonl", b'"' + b"x" * LARGE, True),
        ("a.csv", b"1,2\n" * (LARGE // 4), True),
        ("a.yaml", b"a: [" + b"x" * LARGE, True),
        ("a.jsonl.gz", gzip.compress(os.urandom(LARGE).hex().encode()), True),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * LARGE, mtime=0), True),
        ("a.jsonl.gz", gzip.compress(b"x\n" * LARGE, mtime=0), False),
        ("a.json", "[\u00e9".encode() * (LARGE // 3), True),
    ],
    ids=["json", "text", "lines", "cut", "line", "table", "yaml", "dense", "packed", "packed text", "letters"],
)
def test_of_a_large_file_only_a_part_is_looked_at(
    name: str, content: bytes, well: bool, tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(content)
    (item,) = look(name)
    assert item.status == ("ok" if well else "error")


def test_of_many_files_only_some_are_looked_at(tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MOST_FILES", 3)
    for number in range(5):
        (tmp_path / f"{number}.json").write_text("{}" if number < 3 else "rubbish")
    (item,) = look("*.json")
    assert (item.status, item.message) == ("ok", "*.json: only the first 3 of 5 files were checked")


def test_the_same_problem_of_many_files_is_told_once(tmp_path: Path, look: Look) -> None:
    for number in range(5):
        (tmp_path / f"{number}.csv").write_text("a,b\n1\n")
    (item,) = look("*.csv")
    assert item.message.count(".csv") == 3
    assert " and 2 more: row 2 has 1 fields" in item.message
