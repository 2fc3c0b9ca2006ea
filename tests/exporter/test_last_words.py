"""Which of a log's errors counts."""

from exporter.derive.last_words import last_words

PROGRESS = b"Processed 10/100 items\n"
OOM = b"torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
TRACEBACK = b"""Traceback (most recent call last):
  File "train.py", line 12, in <module>
    main()
ValueError: bad shard
"""


def test_the_last_error_is_told_with_its_place() -> None:
    found = last_words([("w.out", PROGRESS), ("w.err", TRACEBACK)])
    assert (found.line, found.place) == ("ValueError: bad shard", "train.py:12, in w.err")
    assert found.classes == ("python_traceback",)


def test_an_error_that_the_work_went_on_after_has_been_got_over() -> None:
    found = last_words([("w.out", OOM + PROGRESS)])
    assert (found.classes, found.line) == ((), None)


def test_an_error_before_the_last_one_is_not_the_reason() -> None:
    found = last_words([("w.err", OOM + b"retrying with half the batch\n" * 20 + TRACEBACK)])
    assert found.line == "ValueError: bad shard"
    assert "cuda_oom" not in found.classes


def test_what_an_error_has_led_to_counts_with_it() -> None:
    watchdog = (
        b"[rank0]:[E ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: "
        b"WorkNCCL(SeqNum=4, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600038 milliseconds before timing out.\n"
        b"terminate called after throwing an instance of 'c10::DistBackendError'\n"
        b"  what():  [Rank 0] Watchdog caught collective operation timeout\n"
    )
    assert "nccl_timeout" in last_words([("w.err", watchdog)]).classes


def test_the_log_whose_error_has_a_class_is_the_more_telling() -> None:
    found = last_words([("w.err", OOM), ("w.out", b"RuntimeError: worker failed\n")])
    assert found.line is not None
    assert "out of memory" in found.line
    assert found.place is not None
    assert found.place.endswith("w.err")


def test_nothing_said_is_no_evidence() -> None:
    found = last_words([("w.out", b""), ("w.err", b"all good\n")])
    assert (found.classes, found.line, found.place) == ((), None, None)
