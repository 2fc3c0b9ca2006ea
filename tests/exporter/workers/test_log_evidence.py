"""The error in a log that explains the end of its worker."""

import time

import pytest

from exporter.logs.errors.lines import without_survived
from exporter.logs.lexicon_reader import build_lexicon
from exporter.workers.exit_reason import ExitEvidence, LogEvidence, find_exit_reason
from exporter.workers.log_evidence import log_evidence

LEXICON = build_lexicon()

PROGRESS = b"Processed 10/100 items\n"
OOM = b"torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
TRACEBACK = b"""Traceback (most recent call last):
  File "train.py", line 12, in <module>
    main()
ValueError: bad shard
"""


def evidence_of(texts: list[tuple[str, bytes]]) -> LogEvidence:
    return log_evidence(texts, LEXICON)


def test_the_last_error_has_its_source_line() -> None:
    evidence = evidence_of([("w.out", PROGRESS), ("w.err", TRACEBACK)])
    assert (evidence.line, evidence.place) == ("ValueError: bad shard", "train.py:12, in w.err")
    assert evidence.classes == ("python_traceback",)


def test_an_error_followed_by_progress_does_not_count() -> None:
    evidence = evidence_of([("w.out", OOM + PROGRESS)])
    assert (evidence.classes, evidence.line) == ((), None)


def test_a_redrawn_progress_bar_is_not_progress() -> None:
    bar = b"\rTraining:  10%|#         | 10/100 [00:05<00:45,  2.00it/s]"
    assert evidence_of([("w.err", bar + b"\n" + OOM + bar + b"\n")]).classes == ("cuda_oom",)
    assert evidence_of([("w.err", bar + b"\n" + OOM + bar.replace(b" 10/", b" 11/") + b"\n")]).classes == ()


def test_an_error_in_the_line_of_a_progress_bar_counts() -> None:
    bar = b"\rTraining:  10%|#         | 10/100 [00:05<00:45,  2.00it/s]"
    assert evidence_of([("w.err", bar + TRACEBACK)]).line == "ValueError: bad shard"


def test_an_error_before_the_position_in_a_line_does_not_count() -> None:
    assert evidence_of([("w.err", b"RuntimeError: retrying; Processed 10/100 items\n")]).line is None


def test_an_error_before_the_last_one_is_not_the_reason() -> None:
    evidence = evidence_of([("w.err", OOM + b"retrying with half the batch\n" * 20 + TRACEBACK)])
    assert evidence.line == "ValueError: bad shard"
    assert "cuda_oom" not in evidence.classes


def test_the_class_of_an_error_includes_its_consequences() -> None:
    watchdog = (
        b"[rank0]:[E ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: "
        b"WorkNCCL(SeqNum=4, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600038 milliseconds before timing out.\n"
        b"terminate called after throwing an instance of 'c10::DistBackendError'\n"
        b"  what():  [Rank 0] Watchdog caught collective operation timeout\n"
    )
    assert "nccl_timeout" in evidence_of([("w.err", watchdog)]).classes


@pytest.mark.parametrize(
    "line",
    [
        *("retrying after NCCL timeout at rank 3 ... succeeded", "skipping batch: CUDA out of memory (recovered)"),
        *("If you see `CUDA error: out of memory`, lower --max-num-seqs.", "hipErrorOutOfMemory count: 0"),
        "No space left on device handled by a fallback to /scratch",
    ],
)
def test_an_error_that_the_program_outlived_is_not_the_reason(line: str) -> None:
    assert evidence_of([("w.err", f"{line}\nbye\n".encode())]).classes == ()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB on local_rank=0", "cuda_oom"),
        ("Segmentation fault (core dumped) node_id=0", "segfault"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered. This could cause others", "cuda_error"),
        ("torch.distributed.DistNetworkError: Connection reset by peer, retries=0", "peer_lost"),
        ("Exception: request not handled: CUDA out of memory", "cuda_oom"),
    ],
)
def test_an_error_is_the_reason_whatever_rank_or_risk_it_names(line: str, found: str) -> None:
    assert found in evidence_of([("w.err", f"{line}\n".encode())]).classes


def test_a_long_line_is_asked_quickly_whether_the_program_outlived_it() -> None:
    begin = time.process_time()
    without_survived(b"a_" * 100_000 + b"\n" + b"count: " * 30_000)
    assert time.process_time() - begin < 3


def test_a_log_with_a_classified_error_is_preferred() -> None:
    evidence = evidence_of([("w.err", OOM), ("w.out", b"RuntimeError: worker failed\n")])
    assert evidence.line is not None
    assert "out of memory" in evidence.line
    assert evidence.place is not None
    assert evidence.place.endswith("w.err")


def test_logs_without_errors_give_no_evidence() -> None:
    evidence = evidence_of([("w.out", b""), ("w.err", b"all good\n")])
    assert (evidence.classes, evidence.line, evidence.place) == ((), None, None)


ECC = b"RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
XID = b"[123456.7] NVRM: Xid (PCI:0000:3b:00): %d, pid=4242, name=python3\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (TRACEBACK.replace(b"ValueError: bad shard\n", ECC), "gpu_fault"),
        (XID % 79, "gpu_fault"),
        (b"kernel: GPU has fallen off the bus.\n", "gpu_fault"),
        (XID % 31, "app_error"),
        (XID % 79 + TRACEBACK, "app_error"),
        (b"Failed to initialize NVML: Driver/library version mismatch\n", "app_error"),
        (XID % 79 + PROGRESS, "app_error"),
    ],
)
def test_a_gpu_fault_is_found_only_if_it_is_the_last_error(text: bytes, reason: str) -> None:
    assert find_exit_reason(ExitEvidence(code=1, log=evidence_of([("w.err", text)]))).reason == reason
