"""Checks of input files: existence, one per worker, content that matches the name."""

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.check import inputs
from launcher.check.finding import CheckFinding
from launcher.check.inputs import check_inputs
from tests.launcher.check.planned_jobs import planned_job, summaries

CheckPatterns = Callable[..., list[CheckFinding]]


@pytest.fixture
def check_patterns(tmp_path: Path) -> CheckPatterns:
    """Checks input entries of a job with four workers."""

    def check(*patterns: str, workers: int = 4, contents: bool = True) -> list[CheckFinding]:
        plan = planned_job(tmp_path, workers=[{"count": workers, "command": "true"}]).plan
        return list(check_inputs(plan, patterns, check_contents=contents))

    return check


def test_a_job_without_inputs_is_not_checked(check_patterns: CheckPatterns) -> None:
    assert [item.status for item in check_patterns()] == ["not checked"]


def test_files_of_globs_paths_and_directories_are_counted(tmp_path: Path, check_patterns: CheckPatterns) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / f"in/{number}.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "odd[1].txt").write_text("x")
    items = check_patterns("in/*.jsonl", "in", str(tmp_path / "in/0.jsonl"), "odd[1].txt")
    assert [item.status for item in items] == ["ok"] * 4
    assert items[0].message == "in/*.jsonl: 3 files, 27 bytes"
    assert items[2].message.endswith("1 file, 9 bytes")


def test_missing_inputs_are_an_error(check_patterns: CheckPatterns, tmp_path: Path) -> None:
    (tmp_path / "gone").symlink_to("nowhere")
    items = check_patterns("none.json", "in/*.csv", "gone")
    assert summaries(items) == [
        ("no-input", "error", "inputs[0]"),
        ("no-input", "error", "inputs[1]"),
        ("unreadable-input", "error", "inputs[2]"),
    ]
    assert items[0].message == '"none.json" names no file; check the path, which is relative to the working directory'


def test_each_worker_needs_its_own_input_file(tmp_path: Path, check_patterns: CheckPatterns) -> None:
    for number in range(4):
        (tmp_path / f"part_{number}.txt").write_text("x")
    (ok,) = check_patterns("part_{rank}.txt")
    assert ok.message == "part_{rank}.txt: 4 files, one for each of 4 workers, 4 bytes"
    (missing,) = check_patterns("part_{rank}.txt", workers=9)
    assert missing.message.startswith('"part_4.txt", "part_5.txt", "part_6.txt" and 2 more name no file')
    (shared,) = check_patterns("part_{local_rank}.txt")
    assert (shared.code, shared.status) == ("split", "warning")


def test_a_placeholder_of_the_whole_job_names_one_file_for_all_workers(
    tmp_path: Path, check_patterns: CheckPatterns
) -> None:
    for number in range(4):
        (tmp_path / f"part_{number}.txt").write_text("x")
    one, several = check_patterns("{job_dir}/part_0.txt", "{job_dir}/part_*.txt")
    assert (one.status, one.message) == ("ok", "{job_dir}/part_0.txt: 1 file, 1 bytes")
    assert (several.status, several.message) == ("ok", "{job_dir}/part_*.txt: 4 files, 4 bytes")


def test_a_front_end_and_a_benchmark_read_no_inputs(tmp_path: Path) -> None:
    (tmp_path / "part_0.txt").write_text("x")
    served = planned_job(
        tmp_path,
        local=False,
        resources={"gpus_per_node": 8, "agg_workers": 1},
        backend={"type": "sglang"},
        workers=[],
        model={"path": "hf:a/b"},
        frontend={"type": "custom", "command": "front --port {http_port}"},
        benchmark={"type": "custom", "command": "bench"},
    )
    assert len(served.plan.tasks) == 3
    (item,) = check_inputs(served.plan, ["part_{rank}.txt"], check_contents=False)
    assert (item.status, item.message) == ("ok", "part_{rank}.txt: 1 file, one for each of 1 workers, 1 bytes")


def test_empty_and_unreadable_files_are_errors(
    tmp_path: Path, check_patterns: CheckPatterns, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.bin").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "secret.bin").write_text("x")
    monkeypatch.setattr("os.access", lambda path, _: Path(path).name != "secret.bin")
    for contents in (True, False):
        assert [item.code for item in check_patterns("empty.bin", "folder", "secret.bin", contents=contents)] == [
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
        ("a.csv", b"# made by x\n\na,b\n1,2\n", None),
        ("a.csv", b"# made by x\na,b\n1,2,3\n", "row 2 has 3 fields and the first has 2; fix the row, or its quotes"),
        ("a.csv", b'"a;b;c",d\n1,2\n', None),
        ("a.tsv", b"a\tb\n1\t2\n", None),
        ("a.tsv", b'id\ttext\tn\n1\t"Hello he said\t5\n', None),
        ("a.tsv", b'id\ttext\n1\t"Hello\the said"\n', None),
        ("a.tsv", b"a\tb\n1\n", "row 2 has 1 fields and the first has 2; fix the row, or its quotes"),
        ("a.yaml", b"a: 1\n---\nb: [1]\n", None),
        ("a.yml", b"a: [1\n", "it is not YAML in line 2: "),
        ("a.bin", b"\x00\xff", None),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0), None),
        ("a.jsonl", gzip.compress(LINES, mtime=0), None),
        ("a.jsonl.gz", gzip.compress(b"x\n", mtime=0), "the first record is not JSON "),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9], "the compressed file is truncated; fetch it again"),
        ("a.jsonl.gz", LINES, "its name ends in .gz and it is not gzip data; rename it, or fetch it again"),
        ("a.bin.gz", b"\x1f\x8b" + b"rubbish" * 5, "it cannot be unpacked ("),
    ],
)
def test_the_content_of_a_file_must_match_its_name(
    name: str, content: bytes, problem: str | None, tmp_path: Path, check_patterns: CheckPatterns
) -> None:
    (tmp_path / name).write_bytes(content)
    (item,) = check_patterns(name)
    if problem is None:
        assert (item.code, item.status) == ("inputs", "ok")
    else:
        assert (item.code, item.status) == ("bad-input", "error")
        assert item.message.startswith(f'"{tmp_path / name}": {problem}')
    assert [shallow.status for shallow in check_patterns(name, contents=False)] == ["ok"]


LARGE = 3 * inputs.MOST_BYTES // 2


@pytest.mark.parametrize(
    ("name", "content", "valid"),
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
def test_only_parts_of_a_large_file_are_read(
    name: str,
    content: bytes,
    valid: bool,
    tmp_path: Path,
    check_patterns: CheckPatterns,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / name).write_bytes(content)
    (item,) = check_patterns(name)
    assert item.status == ("ok" if valid else "error")


def test_only_the_first_of_many_files_are_read(
    tmp_path: Path, check_patterns: CheckPatterns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MOST_FILES", 3)
    for number in range(5):
        (tmp_path / f"{number}.json").write_text("{}" if number < 3 else "rubbish")
    (item,) = check_patterns("*.json")
    assert (item.status, item.message) == ("ok", "*.json: only the first 3 of 5 files were checked")


def test_the_same_problem_of_many_files_is_reported_once(tmp_path: Path, check_patterns: CheckPatterns) -> None:
    for number in range(5):
        (tmp_path / f"{number}.csv").write_text("a,b\n1\n")
    (item,) = check_patterns("*.csv")
    assert item.message.count(".csv") == 3
    assert " and 2 more: row 2 has 1 fields" in item.message
