"""Signals to the orchestrator."""

import os
import signal
from collections.abc import Iterator

import pytest

from launcher.run.signals import CHECKPOINT_SIGNALS, IGNORED, OrchestratorSignals, signal_text
from launcher.steps.steps import ENDING_SIGNALS


@pytest.fixture
def signals() -> Iterator[OrchestratorSignals]:
    """The signal handlers of an orchestrator, installed in this process during the test."""
    numbers = (*ENDING_SIGNALS, *CHECKPOINT_SIGNALS, *IGNORED, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in numbers}
    installed = OrchestratorSignals()
    installed.install_handlers()
    yield installed
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "local", "text"),
    [
        (signal.SIGINT, True, "SIGINT to `gpujob run`, by Ctrl-C"),
        (signal.SIGHUP, True, "SIGHUP to `gpujob run` because the terminal was closed"),
        (signal.SIGTERM, True, "SIGTERM to the job"),
        (signal.SIGINT, False, "SIGINT to the job"),
        (signal.SIGTERM, False, "SIGTERM to the job"),
    ],
)
def test_the_text_of_a_signal_names_it_and_its_source(number: int, local: bool, text: str) -> None:
    assert signal_text(number, local=local) == text


@pytest.mark.parametrize(
    ("sent", "first", "kill_requested"),
    [
        ((signal.SIGINT,), signal.SIGINT, False),
        ((signal.SIGINT, signal.SIGINT), signal.SIGINT, True),
        ((signal.SIGTERM, signal.SIGTERM), signal.SIGTERM, False),
        ((signal.SIGTERM, signal.SIGINT), signal.SIGTERM, False),
        ((signal.SIGTERM, signal.SIGINT, signal.SIGINT), signal.SIGTERM, True),
        ((signal.SIGINT, signal.SIGTERM), signal.SIGINT, False),
    ],
)
def test_the_first_signal_is_the_reason_and_a_second_ctrl_c_kills(
    signals: OrchestratorSignals, sent: tuple[int, ...], first: int, kill_requested: bool
) -> None:
    for number in sent:
        os.kill(os.getpid(), number)
    assert (signals.end_signal, signals.is_kill_requested) == (first, kill_requested)
