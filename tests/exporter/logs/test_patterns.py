"""Patterns against log lines of real programs."""

import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.logs.lexicon_reader import build_lexicon
from exporter.logs.patterns import Pattern, PatternError, PatternKind, compile_pattern, pattern_problems
from exporter.logs.search.engine import SearchEngine
from exporter.logs.search.findings import LogFindings

HITS = {
    "items": ["Processed 120/1000 items", "2025-11-22 04:13:41 [INFO] Processed 0/7 items (12.5 items/s)"],
    "resume": ["Resuming at 60/100 items", "resumed from 60/100", "[INFO] Resumed at 0/5"],
    "batch": ["Batch 12/640 done in 0.4 s"],
    "epoch": ["Epoch 3, lr 0.001", "Epoch: 12"],
    "throughput": ["rate 12.5 items/s", "1 item/s", "1.2e3 items/sec"],
    "loss": ["loss: 0.123", "step 7 loss=1.5e-05 lr=0.1", "val loss = -0.3", "loss:.5", "loss: nan"],
    "cuda_oom": [
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 79.15 GiB total capacity)",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
        "RuntimeError: CUDA error: out of memory",
    ],
    "cuda_error": [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "terminate called: CUDA error: device-side assert triggered",
    ],
    "nccl_timeout": [
        "[rank3]:[E ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(Seq=1)",
        "RuntimeError: [unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
    ],
    "disk_full": ["OSError: [Errno 28] No space left on device", "cp: cannot create 'a': Disk quota exceeded"],
    "host_oom": [
        "[12.3] Out of memory: Killed process 4242 (python3) total-vm:9kB, anon-rss:8kB",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=4459.0.",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=4459.0. Some of the step tasks have been OOM Killed.",
        "[12.3] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=step_0",
    ],
    "connection": [
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "curl: (56) Recv failure: Connection reset by peer",
        "OSError: [Errno 101] Network is unreachable",
    ],
    "peer_lost": [
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4711",
        "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp, remote process exited or there was a network error",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
    ],
    "data_error": ["skipping corrupted record 17", "corrupt file a.tar", "parse error at 7", "invalid data at byte 7"],
    "python_traceback": ["Traceback (most recent call last):", "[rank0]: Traceback (most recent call last):"],
}  # lines that a pattern must match

MISSES = {
    "items": ["Processed 5 items", "processed 1/2 items", "Processed 1/2 shards", "Processed -1/2 items"],
    "resume": ["Resuming", "auto-resume: true", "will resume from checkpoint 60"],
    "batch": ["Batch size 64", "Batch 7"],
    "epoch": ["epochs: 10", "Epochs 10", "num_epoch=3"],
    "throughput": ["12 tokens/s", "items/s: 12"],
    "loss": ["train_loss: 0.5", "loss: unknown", "lossless 5", "loss_scale=1024"],
    "cuda_oom": [
        "Out of memory: Killed process 4242 (python3)",
        "MemoryError: out of memory",
        "CUDA memory summary: 3 GiB of 80 GiB",
        "torch.cuda.memory_stats: OutOfMemory count 0",
    ],
    "cuda_error": ["RuntimeError: CUDA error: out of memory", "CUDA version: 12.4", "cuda_error_threshold: 3"],
    "nccl_timeout": [
        "timeout: 600",
        "NCCL_TIMEOUT=1800",
        "nccl_timeout: 1800",
        "distributed_timeout_minutes ......... 10",
        "request timeout after 30 s, retrying",
        "ProcessGroupNCCL initialization options: size: 8, global rank: 0, TIMEOUT(ms): 600000",
        "NCCL version 2.21.5+cuda12.4",
        "backend=NCCL timeout=1800",
        "ProcessGroupNCCL(timeout=0:30:00)",
    ],
    "disk_full": ["disk usage 91 %", "quota: 100 GiB", "no space in the queue"],
    "host_oom": [
        "oom_kill_disable 0",
        "oom_score_adj 1000",
        "torch.OutOfMemoryError: CUDA out of memory",
    ],
    "connection": ["connection pool of 8", "max_connections: 100", "connected to redis"],
    "peer_lost": ["peer 3 joined", "reset the connection pool", "peer-to-peer access enabled"],
    "data_error": [
        *("skip_corrupt_files: true", "parser ready", "data is intact"),
        *("0 corrupt records", "corrupted files: 0", "parse errors: 0"),
    ],
    "python_traceback": ["no Traceback (most recent call last):", "traceback: on", "Traceback"],
}  # lines that it must not match

CONFIGURATION = """\
model:
  timeout: 30
  request_timeout_s: 600
  epochs: 10
  loss: cross_entropy
  on_oom: skip
  max_errors: 5
  skip_corrupt_files: true
nccl_timeout: 1800
TORCH_NCCL_ASYNC_ERROR_HANDLING=1
connection_pool: 8
"""

GENERIC = build_lexicon("generic")
STANDARD = (*GENERIC.progress_patterns("generic"), *GENERIC.errors)
ENGINE = SearchEngine(STANDARD)


def names(found: LogFindings) -> set[str]:
    """Every pattern with a finding."""
    return {position.pattern for position in found.positions} | found.values.keys() | found.errors.keys()


def positions(found: LogFindings) -> list[tuple[bool, int, int | None]]:
    """(whether it is a resume, done, total) of each position."""
    return [(position.resumed, position.done, position.total) for position in found.positions]


def numbers(found: LogFindings) -> dict[str, float]:
    """Each value without a rank."""
    return {name: of_ranks[None].number for name, of_ranks in found.values.items()}


def matches(name: str, line: str) -> bool:
    """Whether the pattern matches the line, alone and between others."""
    alone, amid = (name in names(ENGINE.scan(text.encode())) for text in (line, f"begin\n{line}\nend\n"))
    assert alone == amid
    return alone


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in HITS.items() for line in lines])
def test_a_pattern_matches_its_lines(name: str, line: str) -> None:
    assert matches(name, line)


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in MISSES.items() for line in lines])
def test_a_pattern_leaves_other_lines_alone(name: str, line: str) -> None:
    assert not matches(name, line)


def test_all_sample_lines_belong_to_existing_patterns() -> None:
    assert HITS.keys() == MISSES.keys() <= {pattern.name for pattern in STANDARD}


@pytest.mark.parametrize("name", HITS)
def test_a_line_with_a_match_holds_one_of_the_literals(name: str) -> None:
    of_name = [pattern for pattern in STANDARD if pattern.name == name]
    assert all(pattern.literals for pattern in of_name)
    for line in HITS[name]:
        assert any(pattern.may_match(line.encode()) for pattern in of_name)


def test_every_error_has_a_severity_and_no_progress_has_one() -> None:
    assert {pattern.severity for pattern in STANDARD if pattern.kind is PatternKind.ERROR} <= {"critical", "warning"}
    assert {pattern.severity for pattern in STANDARD if pattern.kind is not PatternKind.ERROR} == {None}


def test_a_configuration_dump_is_no_error_and_no_progress() -> None:
    assert ENGINE.scan(CONFIGURATION.encode()) == LogFindings()


def test_a_value_must_be_on_the_line_of_its_name() -> None:
    assert ENGINE.scan(b"Computing the loss:\n2025-11-22 04:13:41 [INFO] next\n").values == {}


def test_positions_are_in_log_order_one_per_pattern_and_record() -> None:
    text = b"Processed 80/100 items\nResuming at 60/100 items\nProcessed 66/100 items Processed 65/100 items\n"
    assert positions(ENGINE.scan(text)) == [(False, 80, 100), (True, 60, 100), (False, 66, 100)]


def test_the_last_value_counts() -> None:
    values = numbers(ENGINE.scan(b"Epoch 1 loss: 3\nEpoch 2 loss: 2.5e-1\n7 items/s\n"))
    assert values == {"epoch": 2.0, "loss": 0.25, "throughput": 7.0}


def test_a_nan_loss_is_a_value() -> None:
    assert math.isnan(numbers(ENGINE.scan(b"loss: 3\nloss: nan\n"))["loss"])


def test_an_error_counts_once_for_each_line() -> None:
    text = b"Connection refused, Connection refused\nfine\nConnection reset\nNo space left on device"
    assert ENGINE.scan(text).errors == {"connection": 2, "disk_full": 1}


def test_a_log_that_is_not_utf8_is_scanned() -> None:
    found = ENGINE.scan(b"\xff\xfe Processed 3/9 items \x80\nCUDA out of memory\xff")
    assert (positions(found), found.errors) == ([(False, 3, 9)], {"cuda_oom": 1})


def scan_elsewhere(text: str) -> str:
    """Positions in the text of an expression, found in another process: a regex search cannot be interrupted."""
    program = (
        "from exporter.logs.lexicon_reader import build_lexicon\n"
        f"print(build_lexicon('generic').engine('generic').scan({text}).positions)"
    )
    argv = [sys.executable, "-I", "-c", program]
    return subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True).stdout.strip()


def test_a_long_run_of_digits_is_scanned_quickly() -> None:
    assert scan_elsewhere("b'9' * 100_000 + b' items/s loss: ' + b'9' * 100_000") == "[]"


def test_an_absurdly_large_number_is_no_position() -> None:
    assert scan_elsewhere("b'Processed ' + b'9' * 400 + b'/' + b'9' * 400 + b' items'") == "[]"


@pytest.mark.parametrize("line", ["low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0", "--oom-kill-step=0"])
def test_a_count_of_zero_oom_kills_is_no_error(line: str) -> None:
    assert not matches("host_oom", line)


def test_an_absurdly_large_number_is_no_position_for_a_user_pattern() -> None:
    """Such a number does not fit a float, so every rate calculated from it would fail."""
    assert (
        SearchEngine([own("items", r"done (\d+)", PatternKind.POSITION)]).scan(b"done " + b"9" * 400) == LogFindings()
    )


def own(name: str, pattern: str, kind: PatternKind) -> Pattern:
    return compile_pattern(name, pattern, kind=kind, is_user_defined=True)


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        (r"step (\d+)/(\d+)", b"step 3/9", [(False, 3, 9)]),
        (r"step (\d+)", b"step 3/9", [(False, 3, None)]),
        (r"step (\d+)(?:/(\d+))?", b"step 3\nstep 4/9", [(False, 3, None), (False, 4, 9)]),
        (r"step \d+", b"step 3", []),
        (r"step (\S+)", b"step three", []),
        (r"^(\d+)$", b"x 1\n2\n", [(False, 2, None)]),
        ("Schritt für (\\d+)", "Schritt für 7".encode(), [(False, 7, None)]),
    ],
)
def test_a_job_pattern_may_define_the_position(
    pattern: str, text: bytes, expected: list[tuple[bool, int, int | None]]
) -> None:
    assert positions(SearchEngine([own("items", pattern, PatternKind.POSITION)]).scan(text)) == expected


@pytest.mark.parametrize(
    ("pattern", "values"), [(r"lr=(\S+)", {"lr": 0.5}), (r"lr=\S+", {}), (r"(lr)=", {}), (r"absent (\d)", {})]
)
def test_a_value_needs_a_group_that_is_a_number(pattern: str, values: dict[str, float]) -> None:
    assert numbers(SearchEngine([own("lr", pattern, PatternKind.VALUE)]).scan(b"lr=0.5\n")) == values


def test_an_invalid_regular_expression_is_refused() -> None:
    with pytest.raises(PatternError):
        compile_pattern("oom", "(out of memory", kind=PatternKind.ERROR)


def test_only_positions_and_resumes_have_a_unit() -> None:
    assert (
        own("items", r"(\d)", PatternKind.POSITION).unit == own("resume", r"(\d)", PatternKind.RESUME).unit == "items"
    )
    pattern = compile_pattern("items", "gpu 1", "info", kind=PatternKind.ERROR, error_class="cuda_error")
    assert (pattern.unit, pattern.severity, pattern.error_class) == (None, "info", "cuda_error")


def test_literals_are_extracted_from_a_pattern() -> None:
    assert own("items", r"(\d+) of (\d+) shards", PatternKind.POSITION).literals == (b" shards",)


@pytest.mark.parametrize(
    ("text", "position", "caret"),
    [
        ("(out of memory", 0, "(out of memory\n^"),
        ("für [a-", 4, "für [a-\n    ^"),
        ("first\n  *(?P<a>b)(", 17, "  *(?P<a>b)(\n           ^"),
        ("a{3,2}", 2, "a{3,2}\n  ^"),
        ("half \ud800", 5, "half \ud800\n     ^"),
    ],
)
def test_an_error_in_a_pattern_has_a_position(text: str, position: int, caret: str) -> None:
    with pytest.raises(PatternError) as refused:
        compile_pattern("oom", text, kind=PatternKind.ERROR)
    assert (refused.value.position, refused.value.caret(text)) == (position, caret)
    assert str(refused.value)


@pytest.mark.parametrize(
    "fields", [{"kind": PatternKind.POSITION, "unit": "furlongs"}, {"kind": PatternKind.PAIRS, "keys": {"": "loss"}}]
)
def test_a_meaningless_field_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(PatternError) as refused:
        compile_pattern("items", r"(\d)", **fields)
    assert refused.value.caret(r"(\d)") == r"(\d)"


def test_all_errors_in_user_patterns_are_reported_at_once() -> None:
    problems = pattern_problems(
        [
            ("items", r"done \d+"),
            ("items", r"done (\d+)"),
            ("lr", "(lr"),
            ("loss", r"(\d*)"),
            ("rate", r"(?P<rank>\d) it/s"),
            ("step", "step\n(\\d+)"),
            ("good", r"good (\d+)"),
        ]
    )
    assert [problem.partition(":")[0] for problem in problems] == ["items", "items", "lr", "loss", "rate", "step"]
    assert "\n    (lr\n    ^" in problems[2]
    assert all(part in " ".join(problems) for part in ("no group", "two patterns", "empty text", "end of a line"))


def test_an_error_needs_no_group() -> None:
    assert pattern_problems([("oom", "out of memory")], PatternKind.ERROR) == []
    assert pattern_problems([("oom", "out of memory")]) != []


@given(st.binary(max_size=200))
@example(b"Processed /")
def test_any_bytes_can_be_scanned(text: bytes) -> None:
    assert all(count > 0 for count in ENGINE.scan(text).errors.values())
