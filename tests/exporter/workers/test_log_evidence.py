"""Which of a log's errors counts."""

import pytest

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


def words_of(texts: list[tuple[str, bytes]]) -> LogEvidence:
    return log_evidence(texts, LEXICON)


def test_the_last_error_is_told_with_its_place() -> None:
    found = words_of([("w.out", PROGRESS), ("w.err", TRACEBACK)])
    assert (found.line, found.place) == ("ValueError: bad shard", "train.py:12, in w.err")
    assert found.classes == ("python_traceback",)


def test_an_error_that_the_work_went_on_after_has_been_got_over() -> None:
    found = words_of([("w.out", OOM + PROGRESS)])
    assert (found.classes, found.line) == ((), None)


def test_a_bar_that_is_drawn_once_more_as_it_is_torn_down_is_no_progress() -> None:
    bar = b"\rTraining:  10%|#         | 10/100 [00:05<00:45,  2.00it/s]"
    assert words_of([("w.err", bar + b"\n" + OOM + bar + b"\n")]).classes == ("cuda_oom",)
    assert words_of([("w.err", bar + b"\n" + OOM + bar.replace(b" 10/", b" 11/") + b"\n")]).classes == ()


def test_an_error_in_the_line_of_a_progress_bar_follows_it() -> None:
    bar = b"\rTraining:  10%|#         | 10/100 [00:05<00:45,  2.00it/s]"
    assert words_of([("w.err", bar + TRACEBACK)]).line == "ValueError: bad shard"


def test_an_error_before_the_position_in_a_line_has_been_got_over() -> None:
    assert words_of([("w.err", b"RuntimeError: retrying; Processed 10/100 items\n")]).line is None


def test_an_error_before_the_last_one_is_not_the_reason() -> None:
    found = words_of([("w.err", OOM + b"retrying with half the batch\n" * 20 + TRACEBACK)])
    assert found.line == "ValueError: bad shard"
    assert "cuda_oom" not in found.classes


def test_what_an_error_has_led_to_counts_with_it() -> None:
    watchdog = (
        b"[rank0]:[E ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: "
        b"WorkNCCL(SeqNum=4, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600038 milliseconds before timing out.\n"
        b"terminate called after throwing an instance of 'c10::DistBackendError'\n"
        b"  what():  [Rank 0] Watchdog caught collective operation timeout\n"
    )
    assert "nccl_timeout" in words_of([("w.err", watchdog)]).classes


def test_the_log_whose_error_has_a_class_is_the_more_telling() -> None:
    found = words_of([("w.err", OOM), ("w.out", b"RuntimeError: worker failed\n")])
    assert found.line is not None
    assert "out of memory" in found.line
    assert found.place is not None
    assert found.place.endswith("w.err")


def test_nothing_said_is_no_evidence() -> None:
    found = words_of([("w.out", b""), ("w.err", b"all good\n")])
    assert (found.classes, found.line, found.place) == ((), None, None)


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
def test_a_device_is_at_fault_where_the_last_error_says_so(text: bytes, reason: str) -> None:
    assert find_exit_reason(ExitEvidence(code=1, log=words_of([("w.err", text)]))).reason == reason
