"""What the signals of the orchestrator mean."""

import os
import signal
from collections.abc import Iterator

import pytest

from launcher.run.signals import CHECKPOINT_SIGNALS, IGNORED, OrchestratorSignals, signal_text
from launcher.steps.steps import ENDING_SIGNALS


@pytest.fixture
def signals() -> Iterator[OrchestratorSignals]:
    """Those of this very process, as long as the test lasts."""
    numbers = (*ENDING_SIGNALS, *CHECKPOINT_SIGNALS, *IGNORED, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in numbers}
    made = OrchestratorSignals()
    made.install_handlers()
    yield made
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "local", "words"),
    [
        (signal.SIGINT, True, "SIGINT to `gpujob run`, by Ctrl-C"),
        (signal.SIGHUP, True, "SIGHUP to `gpujob run` because the terminal was closed"),
        (signal.SIGTERM, True, "SIGTERM to the job"),
        (signal.SIGINT, False, "SIGINT to the job"),
        (signal.SIGTERM, False, "SIGTERM to the job"),
    ],
)
def test_what_came_is_called_by_its_name(number: int, local: bool, words: str) -> None:
    assert signal_text(number, local=local) == words


@pytest.mark.parametrize(
    ("sent", "first", "hurry"),
    [
        ((signal.SIGINT,), signal.SIGINT, False),
        ((signal.SIGINT, signal.SIGINT), signal.SIGINT, True),
        ((signal.SIGTERM, signal.SIGTERM), signal.SIGTERM, False),
        ((signal.SIGTERM, signal.SIGINT), signal.SIGTERM, False),
        ((signal.SIGTERM, signal.SIGINT, signal.SIGINT), signal.SIGTERM, True),
        ((signal.SIGINT, signal.SIGTERM), signal.SIGINT, False),
    ],
)
def test_the_first_signal_is_the_reason_and_a_second_ctrl_c_is_impatience(
    signals: OrchestratorSignals, sent: tuple[int, ...], first: int, hurry: bool
) -> None:
    for number in sent:
        os.kill(os.getpid(), number)
    assert (signals.end_signal, signals.is_kill_requested) == (first, hurry)
