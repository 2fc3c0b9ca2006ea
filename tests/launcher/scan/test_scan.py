"""Results of `gpujob scan`."""

import errno
import gzip
import itertools
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from exporter.contract.manifest import LogPattern
from exporter.logs.lexicon import compile_job_pattern
from exporter.logs.lexicon_reader import build_lexicon
from exporter.logs.packs_reader import pack_names
from exporter.logs.patterns import PatternKind
from launcher.cli.main import commands
from launcher.scan import scan
from launcher.scan.log_file import os_error_text, read_chunks
from launcher.scan.position import ExpectedTotals
from launcher.scan.records import ScanResults
from launcher.scan.scan import LogScan, PatternResult, ScanRecord, scan_log, scan_logs
from launcher.scan.suggestions import ProgressCandidate, progress_lines, suggest_pattern
from launcher.scan.text import render_scan, scan_results
from tests.launcher.conftest import Golden
from tests.support.launcher import GPUJOB, gpujob
from tests.support.record_schema import problems, published_schema

LOG = (
    b"2026-03-01 12:00:00 [INFO] worker 3: Processed 12/400 items (3.5 items/s)\n"
    b"2026-03-01 12:00:01 [ERROR] worker 3: out of memory, 17 left\n"
    b"Fancy progress 3/10 done\n"
    b"Processed 13/400 ite\x1b[31mms\x1b[0m\rProcessed 14/400 items\r\n"
    b"\n"
    b"end: loss: nan, lr=3"
)
JOB = r"""
name: job
workers: [{command: "true"}]
progress:
  pack: generic
  patterns: {lr: 'lr=(\d+)', nope: 'nope (\d+)', sure: 'loss: (?P<loss>\w+), lr=(?P<rate>\d+)'}
errors: [{pattern: 'out of (memory)', severity: critical, name: oom}]
"""
HARD_TEXT = st.lists(
    st.sampled_from([b"Processed 7/9 items", b"xx", b"", b"oom 3", b"loss: 0.5", b"\x1b[1m", b"\n", b"\r", b"\r\n"])
).map(b"".join)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a log and a job file."""
    (tmp_path / "train.log").write_bytes(LOG)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def report_of(
    path: Path, text: bytes, pack: str = "generic", own: Mapping[str, str] | None = None, *, count_all: bool = False
) -> LogScan:
    path.write_bytes(text)
    lexicon = build_lexicon(pack, [LogPattern(name, regex) for name, regex in (own or {}).items()])
    return scan_log(str(path), lexicon, count_all=count_all)


def by_name(report: LogScan) -> dict[str, PatternResult]:
    """Results of the user's patterns, by name."""
    return {found.name: found for found in report.pattern_results if found.own}


def place_of(found: PatternResult) -> tuple[int, int]:
    assert found.last is not None
    return found.last.line, found.last.offset


def scan_folder(folder: Path, *options: str) -> dict[str, Any]:
    done = gpujob("scan", "train.log", "--json", *options, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    body = json.loads(done.stdout)
    assert body["schema"] == 1
    (log,) = body["logs"]
    return dict(log)


def test_the_scan_of_a_log_matches_the_golden_page(folder: Path, golden: Golden) -> None:
    done = gpujob("scan", "train.log", "--config", "job.yaml", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    golden("launcher/scan.txt", re.sub(r"\d+\.\d{3} s", "0.000 s", done.stdout))


def test_a_single_record_is_one_record(tmp_path: Path) -> None:
    (head, *_) = render_scan([report_of(tmp_path / "a.log", b"Processed 7/9 items\n")])
    assert ": 20 bytes, 1 record; searched in " in head


def test_each_match_has_its_line_offset_and_groups(folder: Path) -> None:
    log = scan_folder(folder, "--config", "job.yaml")
    assert (log["bytes"], log["records"], log["lines"]) == (len(LOG), 7, 6)
    patterns = {(entry["name"], entry["kind"]): entry for entry in log["patterns"]}
    items = patterns["items", "position"]
    assert (items["done"], items["total"], items["unit"], items["matches"]) == (14, 400, "items", 3)
    place = {"line": 4, "offset": LOG.index(b"Processed 14"), "text": "Processed 14/400 items", "unfinished": False}
    assert items["last"] == place
    position = {"done": 14, "total": 400, "unit": "items", "pattern": "items", "epoch": None, "epochs": None}
    assert log["position"] == {**position, "aside": False}
    assert log["unfinished"]["line"] == 6
    error = patterns["oom", "error"]
    assert (error["matches"], error["severity"], error["groups"]) == (1, "critical", {"1": "memory"})
    assert error["last"]["line"] == 2
    assert patterns["sure", "value"]["values"] == {"loss": None, "rate": 3.0}
    assert patterns["sure", "value"]["groups"] == {"loss": "nan", "rate": "3"}
    assert patterns["nope", "value"]["last"] is None
    assert patterns["nope", "value"]["matches"] == 0


def test_an_unmatched_progress_line_has_a_suggested_pattern(folder: Path) -> None:
    (line,) = scan_folder(folder)["unmatched"]
    assert (line["line"], line["text"]) == (3, "Fancy progress 3/10 done")
    assert line["suggestion"] == {"name": "item", "pattern": r"Fancy progress (\d+)/(\d+)"}


def test_the_pack_is_detected_with_its_evidence(tmp_path: Path) -> None:
    bar = b"Training:  10%|#         | 10/100 [00:05<00:45,  2.00it/s]\n"
    report = report_of(tmp_path / "a.log", b"starting\n" + bar, "auto")
    assert (report.pack, report.is_pack_detected) == ("tqdm", True)
    assert report.pack_evidence is not None
    assert report.pack_evidence.line == 2
    named = report_of(tmp_path / "a.log", b"starting\n" + bar, "generic")
    assert (named.pack, named.is_pack_detected, named.pack_evidence) == ("generic", False, None)


def test_a_log_is_searched_again_when_its_pack_is_detected_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "FULL_READ_BYTES", 1 << 20)
    noise = b"nothing is said in this line\n" * (5 << 15)
    bar = b"Training:  10%|#         | 10/100 [00:05<00:45,  2.00it/s]\n"
    report = report_of(tmp_path / "a.log", b"Processed 1/2 items\n" + noise + bar, "auto")
    found = {entry.name: entry for entry in report.pattern_results if entry.kind is PatternKind.POSITION and entry.last}
    assert (report.pack, found["bar"].done, found["items"].done) == ("tqdm", 10, 1)


def test_a_log_without_matches_has_the_nearest_pack(tmp_path: Path) -> None:
    report = report_of(tmp_path / "a.log", b"Decode throughput of this scheduler 40 %\n" * 3, "generic")
    assert report.has_no_match
    assert report.nearest_pack is not None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (gzip.compress(LOG), "is compressed with gzip; unpack it first"),
        (bytes(range(256)) * 64, "is binary, not a text that can be searched"),
        (LOG.decode("latin-1").encode("utf-16"), "is UTF-16, not a text that can be searched"),
    ],
    ids=["gzip", "binary", "utf-16"],
)
def test_a_file_that_is_not_text_is_reported_and_not_searched(folder: Path, content: bytes, problem: str) -> None:
    (folder / "train.log").write_bytes(content)
    log = scan_folder(folder)
    assert (log["problem"], log["records"], log["patterns"]) == (problem, 0, [])


def test_a_log_with_a_hole_at_its_beginning_is_text(tmp_path: Path) -> None:
    report = report_of(tmp_path / "a.log", bytes(200_000) + LOG)
    found = next(found for found in report.pattern_results if found.name == "items")
    assert (found.done, found.matches) == (14, 3)
    assert place_of(found) == (4, 200_000 + LOG.index(b"Processed 14"))


def test_the_page_of_packs_names_every_pack() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "log-packs.md").read_text(encoding="utf-8")
    assert not [name for name in pack_names() if f"`{name}`" not in page]


UNREADABLE = """gpujob: 2 logs cannot be read
  no.log: does not exist; check the name, which is relative to the working directory
  .: is a directory; name the logs in it
"""


def test_unreadable_logs_are_all_named_after_the_results_of_others(folder: Path) -> None:
    done = gpujob("scan", "no.log", "train.log", ".", cwd=folder)
    assert (done.returncode, done.stderr) == (2, UNREADABLE)
    assert "Processed 14/400 items" in done.stdout
    done = gpujob("scan", "no.log", "train.log", ".", "--json", cwd=folder)
    assert (done.returncode, done.stderr) == (2, UNREADABLE)
    body = json.loads(done.stdout)
    assert [log["path"] for log in body["logs"]] == ["train.log"]
    assert body["errors"] == [
        {"path": "no.log", "problem": "does not exist; check the name, which is relative to the working directory"},
        {"path": ".", "problem": "is a directory; name the logs in it"},
    ]


def test_standard_input_is_a_log_among_others(folder: Path) -> None:
    text = (folder / "train.log").read_bytes()
    argv = [str(GPUJOB), "scan", "--json", "-", "train.log"]
    done = subprocess.run(argv, cwd=folder, input=text, capture_output=True)
    found, of_file = json.loads(done.stdout)["logs"]
    assert (done.returncode, done.stderr, found.pop("path"), of_file.pop("path")) == (0, b"", "-", "train.log")
    assert _without_seconds(found) == _without_seconds(of_file)
    assert found["position"] is not None


def test_a_closed_standard_input_is_named(folder: Path) -> None:
    done = subprocess.run(["sh", "-c", 'exec "$0" scan - <&-', str(GPUJOB)], cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gpujob: standard input is closed; give the path of a log instead of -\n"


def test_a_signal_leaves_no_copy_of_standard_input(tmp_path: Path) -> None:
    argv, environ = [str(GPUJOB), "scan", "-"], {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, env=environ) as process:
        assert process.stdin is not None
        process.stdin.write(b"step 1/10\n" * 100_000)  # more than a pipe takes, so that the copy has begun
        process.stdin.flush()
        process.terminate()
        process.wait()
    assert list(tmp_path.iterdir()) == []


def _without_seconds(report: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in report.items() if "cpu_second" not in name}


def test_nothing_is_shown_if_no_log_can_be_read(folder: Path) -> None:
    done = gpujob("scan", "a\nb\x1b[2J.log", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpujob: 1 log cannot be read\n  ")
    assert (done.stderr.count("\n"), "\x1b" in done.stderr) == (2, False)


def test_a_log_with_a_read_error_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", refuse)
    reports, (error,) = scan_logs([str(folder / "train.log")], build_lexicon("generic"))
    assert (reports, error.problem) == ([], "cannot be read (Input/output error); is its file system mounted?")
    _, (error,) = scan_logs(["/dev/null"], build_lexicon())
    assert error.problem.startswith("is not a regular file; ")
    assert scan_results([], [error]).to_json()["errors"] == [{"path": "/dev/null", "problem": error.problem}]


@pytest.mark.parametrize(
    ("number", "fix"),
    [(errno.EACCES, "chmod +r"), (errno.ENOTDIR, "check the name"), (errno.ESTALE, "is its file system mounted?")],
)
def test_a_read_error_is_reported_with_a_fix(number: int, fix: str) -> None:
    assert fix in os_error_text(OSError(number, os.strerror(number)))


TRAINING = b"Batch 10/100\nBatch 20/100\nBatch 30/100\n"
VALIDATION = b"Batch 1/12\nBatch 6/12\n"


def position_of(path: Path, text: bytes, own: Mapping[str, str] | None = None) -> tuple[float, float | None, bool]:
    position = report_of(path, text, own=own).position
    assert position is not None
    return position.done, position.total, position.aside


def test_the_position_is_that_of_the_work_and_not_of_a_later_validation(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    assert position_of(path, TRAINING) == (30, 100, False)
    assert position_of(path, TRAINING + VALIDATION) == (30, 100, True)
    assert position_of(path, TRAINING + VALIDATION + b"Batch 40/100\n") == (40, 100, False)


def test_the_position_in_a_long_log_is_as_recent_as_in_a_short_one(tmp_path: Path) -> None:
    text = b"".join(b"Batch %d/200000\n" % batch for batch in range(1, 100_001)) + VALIDATION
    assert position_of(tmp_path / "a.log", text) == (100_000, 200_000, True)


def test_counting_in_a_long_log_is_detected_from_its_beginning(tmp_path: Path) -> None:
    epochs = [b"Epoch %d/3 Batch %d/100\n" % (epoch, batch) for epoch in range(3) for batch in range(1, 101)]
    noise = b"nothing is said in this line\n" * (3 << 15)
    text = epochs[0] + noise + b"".join(epochs[100:200]) + noise + b"".join(epochs[200:])
    assert position_of(tmp_path / "a.log", text) == (300, 300, False)


def test_a_long_validation_becomes_the_position_as_in_a_sidecar(tmp_path: Path) -> None:
    lines = [b"12:00:00 Batch 30/100", b"12:01:00 Batch 1/12", b"13:01:00 Batch 6/12"]
    assert position_of(tmp_path / "a.log", b"\n".join([*lines, b""]))[:2] == (6, 12)
    assert position_of(tmp_path / "a.log", b"\n".join([*lines[:2], b""]))[:2] == (30, 100)


def test_an_evaluation_does_not_change_the_position(tmp_path: Path) -> None:
    text = b"Epoch 1: 100%|###| 50/50 [00:05<00:00, 9it/s, v_num=0]\nValidation DataLoader 0: 0%| | 0/9 [00:00<?]\n"
    report = report_of(
        tmp_path / "a.log", text + b"Epoch 1: 20%|# | 10/50 [00:05<00:00, 9it/s, v_num=0]\n", "lightning"
    )
    assert report.position is not None
    assert (report.position.done, report.position.epoch) == (100, 1)
    assert "  position 100 batches, in epoch 1, by epoch_bar, and another counter advanced after it" in render_scan(
        [report]
    )


def test_totals_of_the_job_file_give_the_position_its_total(folder: Path) -> None:
    (folder / "train.log").write_bytes(b"Epoch 3:  45%|#  | 45/100 [00:12<00:15, 3.66it/s, v_num=0]\n")
    (folder / "job.yaml").write_text(JOB.replace("pack: generic", "total_epochs: 10"))
    position = scan_folder(folder, "--config", "job.yaml")["position"]
    assert (position["done"], position["total"], position["unit"]) == (345, 1000, "batches")
    found = scan_log(str(folder / "train.log"), build_lexicon(), ExpectedTotals(epochs=5)).position
    assert found is not None
    assert (found.done, found.total) == (345, 500)
    (folder / "train.log").write_bytes(b"at step 7\n")
    job = JOB.replace("pack: generic", "total_steps: 70").replace("{lr:", r"{step: 'at step (\d+)', lr:")
    (folder / "job.yaml").write_text(job)
    position = scan_folder(folder, "--config", "job.yaml")["position"]
    assert (position["done"], position["total"], position["unit"]) == (7, 70, "steps")


def test_an_unfinished_last_record_is_marked_and_not_in_the_position(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    whole = report_of(path, b"Processed 14/400 items\nProcessed 15/400 items\n")
    assert whole.unfinished is None
    assert "unfinished" not in "\n".join(render_scan([whole])[1:])  # the first line has the path, with the test's name
    half = report_of(path, b"Processed 14/400 items\nProcessed 15/400 items")
    assert half.unfinished == ScanRecord(23, "Processed 15/400 items", 2, unfinished=True)
    assert half.position is not None
    assert half.position.done == 14
    found = next(found for found in half.pattern_results if found.name == "items")
    assert (found.done, found.last) == (15, half.unfinished)
    results = scan_results([half])
    assert results.logs[0].unfinished is not None
    assert results.logs[0].unfinished.unfinished is True
    assert ScanResults.from_json(json.loads(json.dumps(results.to_json()))) == results
    assert not list(problems(results.to_json(), published_schema("scan")))
    shown = render_scan([half])
    assert any(line.endswith("Processed 15/400 items (unfinished)") for line in shown)
    assert any(line.startswith("  note: line 2 ends in an unfinished record, ") for line in shown)


def test_the_newest_state_of_a_bar_is_in_the_position(tmp_path: Path) -> None:
    report = report_of(tmp_path / "a.log", b"\rProcessed 14/400 items\rProcessed 15/400 items")
    assert report.unfinished is None
    assert report.position is not None
    assert report.position.done == 15


def test_a_long_unfinished_last_record_is_not_in_the_position(tmp_path: Path) -> None:
    text = b"Processed 14/400 items\nProcessed 15/400 items" + b"." * 400_000
    assert position_of(tmp_path / "a.log", text) == (14, 400, False)


@pytest.mark.parametrize("end", [b"\r", b"\n", b"\r\n", b"\n\n", b"\n\x1b[0m"])
def test_a_record_ends_with_a_newline_or_a_carriage_return(tmp_path: Path, end: bytes) -> None:
    report = report_of(tmp_path / "a.log", b"Processed 14/400 items" + end)
    assert report.unfinished is None
    assert report.position is not None


def test_no_pattern_is_suggested_for_an_unfinished_line(tmp_path: Path) -> None:
    assert report_of(tmp_path / "a.log", b"Processed 14/400 items\nProcessed 15/4").unmatched == []
    assert len(report_of(tmp_path / "a.log", b"Processed 14/400 items\nProcessed 15/4\n").unmatched) == 1


def suggested_names(*lines: str, names: Sequence[str] = ()) -> list[str | None]:
    candidates = [ProgressCandidate(line.encode(), 0) for line in lines]
    found = [suggested for _, suggested in progress_lines(candidates, lambda _: False, names)]
    return [None if suggested is None else suggested[0] for suggested in found]


def test_suggestions_have_unique_names_and_work_together(tmp_path: Path) -> None:
    lines = {"Fancy progress 3/10 done": (3, 10), "Sorted 4/20 rows": (4, 20), "Packed 1,000/5,000 rows": (1000, 5000)}
    assert suggested_names(*lines, names=["item"]) == ["items", "items_2", "items_3"]
    report = report_of(tmp_path / "a.log", "\n".join([*lines, ""]).encode())
    own = dict(unmatched.suggestion for unmatched in report.unmatched if unmatched.suggestion)
    assert list(own) == ["items", "item", "items_2"]
    for line, numbers in lines.items():
        report = report_of(tmp_path / "a.log", f"{line}\n".encode(), own=own)
        (last,) = (found for found in by_name(report).values() if found.last)
        assert (last.kind, last.unit, last.done, last.total) == (PatternKind.POSITION, "items", *numbers)


def test_no_pattern_is_suggested_when_all_names_of_its_unit_are_used() -> None:
    lines = ("Training step 500 loss 0.4", "Tuning steps 7/9", "Polishing steps 7/9")
    assert suggested_names(*lines) == ["step", "steps", None], "a pattern with another name would not count steps"
    assert suggested_names("batch 3/9", "batches 3/9 of", "a batch 3/9") == ["batch", "batches", None]
    assert suggested_names("done 7%", "Copied 8% done") == ["items", None], "a share always counts items"


def test_a_suggestion_does_not_replace_a_matching_pattern(tmp_path: Path) -> None:
    text = b"Processed 14/400 items\nFancy progress 3/10 done\n"
    (unmatched,) = report_of(tmp_path / "a.log", text).unmatched
    assert unmatched.suggestion == ("item", r"Fancy progress (\d+)/(\d+)")
    (unmatched,) = report_of(tmp_path / "a.log", text[23:], own={"items": r"none (\d+)"}).unmatched
    assert unmatched.suggestion == ("item", r"Fancy progress (\d+)/(\d+)")


def test_an_unknown_pack_is_reported_with_the_nearest_name(folder: Path) -> None:
    done = gpujob("scan", "train.log", "--pack", "tqmd", cwd=folder)
    assert done.returncode == 2
    assert done.stderr.startswith('gpujob: --pack: unknown pack "tqmd"; did you mean "tqdm"? (known: auto, ')


def test_invalid_patterns_of_a_job_file_are_all_reported_with_their_key(folder: Path) -> None:
    (folder / "job.yaml").write_text(JOB.replace("lr=(", "lr=((").replace(r"nope (\d+)", "nope"))
    done = gpujob("scan", "train.log", "--config", "job.yaml", cwd=folder)
    assert done.returncode == 2
    assert "job.yaml: 3 problems" in done.stderr
    assert "\n    lr=((\\d+)\n       ^\n" in done.stderr
    assert "progress.patterns.nope: " in done.stderr


def test_an_empty_log_is_reported_as_empty(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"")
    shown = CliRunner().invoke(commands, ["scan", str(tmp_path / "a.log")])
    assert (shown.exit_code, shown.output) == (0, f"{tmp_path}/a.log: is empty\n")


def test_terminal_escapes_are_not_shown(tmp_path: Path) -> None:
    report = report_of(tmp_path / "a.log", b"v=\x1b]0;title\x07\x1b[2J\x08 3\n", own={"v": "v=(?:.*) (.*)"})
    shown = json.dumps(scan_results([report]).to_json())
    assert not re.search(r"\\u00[01]|\\b", shown)
    assert by_name(report)["v"].values == {"v": 3.0}


def test_a_slow_pattern_is_reported_and_does_not_block_others(tmp_path: Path) -> None:
    report = report_of(tmp_path / "a.log", b"a" * 5000 + b"\nlr=3\n", own={"slow": "((?:a+)+)b", "lr": r"lr=(\d+)"})
    assert by_name(report)["lr"].values == {"lr": 3.0}
    assert report.timeouts["slow"] > 0
    assert any('"slow"' in note for note in report.notes)


@pytest.mark.parametrize("count_all", [True, False])
def test_patterns_for_the_same_value_keep_their_own_last_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, count_all: bool
) -> None:
    monkeypatch.setattr(scan, "COUNT_ALL_BYTES", 0)
    text = b"one v=1\n" + b"noise\n" * 100_000 + b"two v=2\n" + b"noise\n" * 100_000
    own = {"one": r"one v=(?P<v>\d)", "two": r"two v=(?P<v>\d)", "three": r"three v=(?P<v>\d)"}
    found = by_name(report_of(tmp_path / "a.log", text, own=own, count_all=count_all))
    assert [found[name].values for name in own] == [{"v": 1.0}, {"v": 2.0}, {}]
    assert [found[name].matches for name in own] == ([1, 1, 0] if count_all else [None, None, None])
    assert place_of(found["two"]) == (100_002, text.index(b"two"))


@settings(max_examples=30, deadline=None)
@given(st.lists(HARD_TEXT, max_size=40).map(b"\n".join), st.booleans())
@example(b"Processed 7/9 items\r\noom\rProcessed 7/9 items", True)
@example(b"Processed 5/9 items\n" + b"-" * 50 + b"\nProcessed 7/9 items", False)
def test_a_search_in_parts_equals_a_search_of_the_whole_log(
    tmp_path_factory: pytest.TempPathFactory, text: bytes, count_all: bool
) -> None:
    # a record longer than a chunk is split, and each part is a record
    assume(all(len(record) <= 60 for record in re.split(rb"[\r\n]", text)))
    path = tmp_path_factory.mktemp("logs") / "a.log"
    own = {"oom": r"oom (\d)", "share": r"Processed (?P<oom>\d)|loss: (?P<loss>0)"}
    whole = report_of(path, text, own=own, count_all=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "SEGMENT_BYTES", 64)
        patch.setattr("exporter.logs.tail_reader.CHUNK_BYTES", 64)
        patch.setattr("launcher.scan.log_file.CHUNK_BYTES", 64)
        parts = report_of(path, text, own=own, count_all=count_all)
    assert (parts.records, parts.lines) == (whole.records, whole.lines)
    assert by_name(parts) == by_name(whole)
    assert (parts.position, parts.unfinished) == (whole.position, whole.unfinished)


@given(HARD_TEXT, st.integers(16, 80))
def test_chunks_are_whole_records_and_cover_the_log(text: bytes, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launcher.scan.log_file.CHUNK_BYTES", size)
        found = list(read_chunks(lambda offset, count: text[offset : offset + count], 0, len(text)))
    assert b"".join(piece for piece, _ in found) == text
    assert [offset for _, offset in found] == [sum(len(piece) for piece, _ in found[:n]) for n in range(len(found))]
    assert not any(
        before.endswith(b"\r") and after.startswith(b"\n") and len(before) < size
        for (before, _), (after, _) in itertools.pairwise(found)
    )


@pytest.mark.parametrize(
    ("line", "name", "done", "total"),
    [
        ("Fancy progress 3/10 done", "items", 3, 10),
        ("2026-03-01 12:00:00 [INFO] worker 3: Encoded 17 of 400 documents", "items", 17, 400),
        ("done 5%", "items", 5, 100),
        ("12.5 % complete", "items", 12, 100),
        ("Training step 500 loss 0.4", "step", 500, None),
        ("Iteration [3/10]", "step", 3, 10),
        ("finished epochs:  3/ 10", "epochs", 3, 10),
        ("Finished 1,200/50,000 rows in 3 s", "items", 1200, 50000),
        ("37 samples processed", "items", 37, None),
        ("it's 'quoted', done (4/9)", "items", 4, 9),
        ("Größe 3/4", "items", 3, 4),
    ],
)
def test_a_suggested_pattern_finds_the_position_in_its_line(
    tmp_path: Path, line: str, name: str, done: int, total: int | None
) -> None:
    suggested = suggest_pattern(line.encode())
    assert suggested is not None
    assert suggested[0] == name
    found = by_name(report_of(tmp_path / "a.log", f"{line}\n".encode(), own=dict([suggested])))[name]
    assert (found.kind, found.done, found.total) == (PatternKind.POSITION, done, total)


@pytest.mark.parametrize("line", ["[ 12/ 400]", "worker 3: 17 left", "6.9 it/s", "2026/03/01 12:00:00", "v1.2/3.4"])
def test_no_pattern_is_suggested_for_numbers_without_a_position(line: str) -> None:
    assert suggest_pattern(line.encode()) is None


@given(st.text(max_size=80))
@example("a" * 60 + " 3/4")
@example("\\ (x 3/4")
def test_a_suggestion_is_always_a_valid_pattern(line: str) -> None:
    suggested = suggest_pattern(line.encode("utf-8", "replace"))
    assert suggested is None or compile_job_pattern(*suggested).kind is PatternKind.POSITION
