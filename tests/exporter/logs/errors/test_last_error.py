import gc
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.logs.errors.last_error import LINE_LENGTH, TRACEBACK_LINES, LogError, last_error
from exporter.logs.errors.lines import DECISIVE, LINES, TRIGGER, plain_line
from exporter.logs.packs import parse_pack
from exporter.logs.packs_reader import ERRORS, PACKS, read_error_patterns

PLAIN = """\
Processed 3/50 items
Traceback (most recent call last):
  File "/home/ada/train.py", line 12, in <module>
    main()
  File "/home/ada/lib/model.py", line 80, in main
    step(batch)
RuntimeError: CUDA error: device-side assert triggered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1

"""


def find_error(text: str) -> LogError:
    error = last_error(text.encode(), read_error_patterns())
    assert error is not None
    return error


def test_an_exception_has_its_line_traceback_and_source() -> None:
    error = find_error(PLAIN)
    assert error.kind == "RuntimeError"
    assert error.line == "RuntimeError: CUDA error: device-side assert triggered"
    assert error.traceback == tuple(PLAIN.splitlines()[1:7])
    assert error.source == "model.py:80"
    assert (error.led_to, error.certain) == (None, True)
    assert (error.offset, error.line_index) == (PLAIN.index("RuntimeError"), 6)
    assert error.lines_from_end == 3


def test_the_later_of_two_tracebacks_counts() -> None:
    error = find_error(PLAIN + "Processed 4/50 items\n" * 5 + PLAIN.replace("RuntimeError", "OSError"))
    assert error.kind == "OSError"


@pytest.mark.parametrize(
    "between",
    [
        "During handling of the above exception, another exception occurred:",
        "The above exception was the direct cause of the following exception:",
    ],
)
def test_the_first_exception_of_a_chain_is_the_cause(between: str) -> None:
    second = PLAIN.replace("RuntimeError: CUDA error: device-side assert triggered", "ada.jobs.StepFailed: step 3")
    error = find_error(f"{PLAIN}{between}\n\n{second}")
    assert (error.kind, error.led_to) == ("RuntimeError", "ada.jobs.StepFailed: step 3")
    assert between in error.traceback
    assert error.traceback[-1] == "ada.jobs.StepFailed: step 3"


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    return done.stderr


@pytest.mark.parametrize(
    ("code", "kind", "line"),
    [
        ("1 / 0", "ZeroDivisionError", "ZeroDivisionError: division by zero"),
        ("assert False", "AssertionError", "AssertionError"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", "KeyboardInterrupt"),
        ("import queue; queue.Queue().get(False)", "Empty", "_queue.Empty"),
        ("class Oops(Exception): pass\nraise Oops('x: y')", "Oops", "Oops: x: y"),
        ("def f(): f()\nf()", "RecursionError", "RecursionError: maximum recursion depth exceeded"),
        ("try:\n  1/0\nexcept Exception as e:\n  raise ValueError('b') from e", "ZeroDivisionError", None),
        ("try:\n  1/0\nexcept Exception:\n  {}['k']", "ZeroDivisionError", None),
        ("raise ExceptionGroup('g', [ValueError('first'), KeyError('second')])", "ValueError", "ValueError: first"),
        ("import faulthandler; faulthandler.enable(); import ctypes; ctypes.string_at(0)", "fatal_python_error", None),
        ("import json; json.loads('{')", "JSONDecodeError", None),
        ("eval('1 +')", "SyntaxError", "SyntaxError: invalid syntax"),
        ("raise RuntimeError('a\\nb\\nOtherError: no error of its own\\n')", "RuntimeError", "RuntimeError: a"),
        ("import threading\nt=threading.Thread(target=lambda: 1/0); t.start(); t.join()", "ZeroDivisionError", None),
    ],
)
def test_errors_of_the_running_python_are_recognized(code: str, kind: str, line: str | None) -> None:
    error = find_error(run_python(code))
    assert error.kind == kind
    assert line is None or error.line == line
    assert error.traceback


def test_ranks_in_one_log_are_distinguished() -> None:
    third = [f"[rank3]: {line}" for line in PLAIN.splitlines()[1:7]]
    first = [f"[rank1]: {line}" for line in PLAIN.replace("RuntimeError: CUDA error", "OSError").splitlines()[1:7]]
    mixed = [line for pair in zip(third, first, strict=True) for line in pair]
    error = find_error("\n".join(["Processed 3/50 items", *mixed]) + "\n")
    assert (error.kind, error.traceback) == ("RuntimeError", tuple(PLAIN.splitlines()[1:7]))


@pytest.mark.parametrize(
    "mark", ["[rank12]: ", "[default3]:", "[default0]:[rank0]: ", "3: ", " 3: ", "(Worker_TP0 pid=12) "]
)
def test_every_rank_prefix_is_removed(mark: str) -> None:
    marked = "".join(f"{mark}{line}\n" for line in PLAIN.splitlines())
    assert find_error(marked).traceback == find_error(PLAIN).traceback


def test_the_longest_mark_of_a_line_is_removed() -> None:
    for marks in (("gn01: ", "gn01: app: "), ("gn01: app: ", "gn01: ")):
        text = "".join(f"{mark}{line}\n" for mark in marks for line in PLAIN.splitlines()[1:7])
        assert find_error(text).line == "RuntimeError: CUDA error: device-side assert triggered"


def test_the_bars_of_an_exception_group_are_no_mark() -> None:
    text = """\
  + Exception Group Traceback (most recent call last):
  |   File "/w/train.py", line 3, in <module>
  |     main()
  | ExceptionGroup: two (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/w/read.py", line 9, in read
    | ValueError: bad sample 7
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "/w/read.py", line 9, in read
    | KeyError: 'x'
    +------------------------------------
"""
    assert find_error(text).line == "ValueError: bad sample 7"


def test_a_log_prefix_on_each_line_is_removed() -> None:
    lines = PLAIN.splitlines()[1:7]
    text = "".join(
        f"(EngineCore_0 pid=7) ERROR 10-12 01:02:0{at} [core.py:708] {line}\n" for at, line in enumerate(lines)
    )
    assert find_error(text).traceback == tuple(lines)


TORCHRUN = """\
E0325 20:57:27.620000 2606 torch/distributed/elastic/api.py:869] failed (exitcode: 1) local_rank: 5 (pid: 9)
Traceback (most recent call last):
  File "/opt/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2025-11-22_04:13:41
  host      : gn01
  rank      : 5 (local_rank: 5)
  exitcode  : -9 (pid: 2630)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 2630
============================================================
"""


def test_the_error_of_the_worker_overrides_the_torchrun_summary() -> None:
    assert find_error(PLAIN + TORCHRUN).kind == "RuntimeError"


def test_the_torchrun_summary_counts_if_there_is_no_other_error() -> None:
    error = find_error("step 3\n" + TORCHRUN)
    assert error.kind == "ChildFailedError"
    assert error.line == (
        "ChildFailedError: rank 5 (local_rank: 5), exitcode -9 (pid: 2630), Signal 9 (SIGKILL) received by PID 2630"
    )


def test_a_traceback_inside_the_torchrun_summary_counts() -> None:
    inner = "\n".join(f"  {line}" for line in PLAIN.splitlines()[1:7]).lstrip()
    error = find_error(TORCHRUN.replace("Signal 9 (SIGKILL) received by PID 2630", inner))
    assert error.line == "RuntimeError: CUDA error: device-side assert triggered"
    assert error.source == "model.py:80"


TERMINATE = """\
terminate called after throwing an instance of 'c10::Error'
  what():  CUDA error: an illegal memory access was encountered
Exception raised from c10_cuda_check at ../c10/cuda/CUDAException.cpp:44 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x57
"""


def test_a_crash_message_of_cpp_is_recognized() -> None:
    error = find_error(TERMINATE + "Aborted (core dumped)\n")
    assert (error.kind, error.led_to) == ("c10::Error", "Aborted (core dumped)")
    assert error.line == "c10::Error: CUDA error: an illegal memory access was encountered"
    assert error.traceback[-1].startswith("frame #0")


def test_an_exception_right_before_a_crash_is_its_cause() -> None:
    error = find_error(PLAIN + TERMINATE + "Aborted (core dumped)\n")
    assert (error.kind, error.led_to) == (
        "RuntimeError",
        "c10::Error: CUDA error: an illegal memory access was encountered",
    )


def test_an_exception_long_before_a_crash_is_not_its_cause() -> None:
    error = find_error(PLAIN + "Processed 4/50 items\n" * 100 + "Segmentation fault (core dumped)\n")
    assert (error.kind, error.led_to) == ("segmentation_fault", None)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("Segmentation fault (core dumped)", "segmentation_fault"),
        ("bash: line 1: 123 Segmentation fault      python train.py", "segmentation_fault"),
        ("[gn01:123] Signal: Segmentation fault (11)", "segmentation_fault"),
        ("Bus error", "bus_error"),
        ("Killed", "killed"),
        ("run.sh: line 3: 4711 Killed                  python train.py", "killed"),
        ("srun: error: gn01: task 3: Killed", "killed"),
        ("Aborted", "aborted"),
        ("Illegal instruction (core dumped)", "illegal_instruction"),
        ("double free or corruption (!prev)", "heap_corruption"),
        ("free(): invalid pointer", "heap_corruption"),
        ("python: model.cpp:12: int f(): Assertion `x > 0' failed.", "assertion"),
        ("thread 'main' panicked at src/lib.rs:3:5:", "panic"),
        ("MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD", "mpi_abort"),
        ("application called MPI_Abort(MPI_COMM_WORLD, 1) - process 0", "mpi_abort"),
        ("ValueError: no traceback was printed", "ValueError"),
        ("KeyError: 7", "KeyError"),
        ("[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)", "nccl_timeout"),
        ("cp: error writing 'x': No space left on device", "disk_full"),
        ("python: can't open file '/x/train.py': [Errno 2] No such file or directory", "message"),
        ("bash: line 1: trian: command not found", "message"),
        ("train.py: error: unrecognized arguments: --foo", "message"),
        ("2025-11-22 ERROR could not load the shard", "message"),
        ("WARNING giving up after requests.ConnectionError: refused", "ConnectionError"),
    ],
)
def test_a_single_line_can_be_an_error(line: str, kind: str) -> None:
    error = find_error(f"Processed 3/50 items\n{line}\nmore\n")
    assert error.kind == kind
    assert error.line in line
    assert (error.line_index, error.lines_from_end, error.traceback) == (1, 1, ())
    assert error.certain is (kind not in ("message", "ConnectionError"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Processed 3/50 items\n",
        "loss=0.1 error_rate=0.02 killed=0 errors: 0\n",
        "UserWarning: this is deprecated\n",
        "epoch 3 of 10, no errors\nKilled processes: none\n",
        "MeanSquaredError: 0.031\nValidationError: 12%\nerror: null\n",
        "WARNING: may cause Segmentation fault on old drivers\n",
    ],
)
def test_ordinary_text_is_no_error(text: str) -> None:
    error = last_error(text.encode(), read_error_patterns())
    assert error is None or not error.certain


def test_a_traceback_without_its_end_ends_with_its_last_frame() -> None:
    error = find_error("\n".join(PLAIN.splitlines()[:6]))
    assert (error.kind, error.line) == ("traceback", 'File "/home/ada/lib/model.py", line 80, in main')
    assert error.source == "model.py:80"


def test_a_traceback_without_its_beginning_is_recognized() -> None:
    error = find_error("\n".join(PLAIN.splitlines()[2:]))
    assert (error.kind, error.source) == ("RuntimeError", "model.py:80")


def test_other_output_inside_a_traceback_does_not_end_it() -> None:
    lines = PLAIN.splitlines()
    error = find_error("\n".join([*lines[:4], "Processed 4/50 items", "Loss: 0.3", *lines[4:]]))
    assert error.traceback == tuple(lines[1:7])


def test_colour_codes_and_progress_bars_are_left_out() -> None:
    coloured = PLAIN.replace("RuntimeError", "\x1b[1;35mRuntimeError\x1b[0m").replace(
        "Traceback", "\r50%|##  |\rTraceback"
    )
    assert find_error(coloured).traceback == find_error(PLAIN).traceback


def test_a_long_traceback_keeps_its_beginning_and_end() -> None:
    frames = "".join(f'  File "/x/m{at}.py", line {at}, in f\n    g()\n' for at in range(500))
    error = find_error(f"Traceback (most recent call last):\n{frames}RuntimeError: deep\n")
    assert len(error.traceback) <= TRACEBACK_LINES
    assert error.traceback[1] == '  File "/x/m0.py", line 0, in f'
    assert error.traceback[-1] == "RuntimeError: deep"
    assert error.source == "m499.py:499"
    assert any("lines left out" in line for line in error.traceback)


def test_secrets_are_redacted() -> None:
    error = find_error(PLAIN.replace("device-side assert triggered", "login with token=hf_abcdef failed"))
    assert error.line == error.traceback[-1] == "RuntimeError: CUDA error: login with token=<redacted> failed"


def test_a_long_line_is_cut() -> None:
    assert len(find_error(f"ValueError: {'x' * 70000}\n").line) == LINE_LENGTH


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"a\x1b[31mred\x1b[0m b", "ared b"),
        (b"\x1b]0;title\x07text", "text"),
        (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        (b" 10%|#   |\r 50%|##  |\r100%|####|", "100%|####|"),
        (b"bar 50%\r       \r", "bar 50%"),
        (b"line\r", "line"),
        (b"a\x00\x07\x08b\tc", "ab\tc"),
        ("a\u202eb\x9b31mc".encode(), "abc"),
        (b"\xff\xfe", "\ufffd\ufffd"),
    ],
)
def test_a_line_is_shown_as_a_terminal_would(raw: bytes, shown: str) -> None:
    assert plain_line(raw) == shown


@given(st.binary(max_size=2000))
def test_any_bytes_can_be_searched(raw: bytes) -> None:
    last_error(raw, read_error_patterns())
    shown = plain_line(raw)
    assert all(character == "\t" or character.isprintable() or ord(character) > 0x9F for character in shown)


WORDS = st.sampled_from(
    [
        *(
            "Traceback (most recent call last):",
            '  File "x.py", line 3, in f',
            "    g()",
            "ValueError: x",
            "",
            "[rank1]: ",
        ),
        *("The above exception was the direct cause of the following exception:", "  | ", "  +-+---- 1 ----", "Killed"),
        *("  + Exception Group Traceback (most recent call last):", "terminate called without an active exception"),
        *(
            "Fatal Python error: Aborted",
            "Thread 0x1 (most recent call first):",
            "  what():  x",
            "Root Cause",
            "step 3",
        ),
        *("x.ChildFailedError: ", "  rank      : 3", "  traceback : Traceback (most recent call last):", "ERROR no"),
    ]
)


@given(st.lists(st.tuples(st.sampled_from(["", "[rank1]: ", "[rank2]: "]), WORDS), max_size=40))
def test_any_order_of_lines_can_be_searched(lines: list[tuple[str, str]]) -> None:
    text = "\n".join(mark + word for mark, word in lines).encode()
    error = last_error(text, read_error_patterns())
    if error is not None:
        whole = text.split(b"\n")
        assert error.offset == sum(len(line) + 1 for line in whole[: error.line_index])
        assert len(error.traceback) <= TRACEBACK_LINES


@pytest.mark.parametrize(
    "piece",
    [
        *("a", "a.", "Error", "[1]", "(a) ", "\r", "\x1b[", "\x1b]", "Error\n", "ERROR x\n", '  File "', "a: Killed "),
        *(PLAIN, "Traceback (most recent call last):\nx\n", 'Traceback (most recent call last):\n  File "x", line 3\n'),
        *("a:Error", "terminate called after throwing an instance of '", "Assertion `", "MPI_ABORT was invoked\n"),
        *("[rank1]: ERROR\n[rank2]: ERROR\n", "(((", ": : : Killed\n", "During handling of the above exception\n"),
    ],
)
def test_hostile_text_takes_bounded_time(piece: str) -> None:
    text = (piece * (1 << 20))[: 1 << 20].encode()
    began = time.thread_time()
    last_error(text, read_error_patterns())
    assert time.thread_time() - began < 2


def test_a_search_leaves_no_work_for_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        assert last_error(PLAIN.encode(), read_error_patterns()) is not None
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_line_that_an_error_pattern_matches_is_always_examined() -> None:
    pack = parse_pack((PACKS / f"{ERRORS}.toml").read_text("utf-8"), ERRORS)
    decisive = [
        one for one in pack.patterns if one.severity == "critical" or one.name in ("peer_lost", "worker_failed")
    ]
    lines = [line.encode() for sample in pack.samples for line in sample.text.split("\n")]
    missed = [line for line in lines if any(one.regex.search(line) for one in decisive) and not TRIGGER.search(line)]
    assert not missed


@given(st.data())
@pytest.mark.parametrize("form", [pattern.pattern for _, _, pattern in LINES] + [r"^(\w\.)*\w+(Error|Exception)(: |$)"])
def test_every_form_of_an_error_has_a_decisive_word(form: str, data: st.DataObject) -> None:
    assert DECISIVE.search(data.draw(st.from_regex(form)))
