"""Sidecars of a job over days, with a clock of the test."""

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.plan.plan import RunFacts
from launcher.run.sidecars import RESTARTS_WITHIN_S, Sidecars
from tests.support.launcher import plan_of


class EndingSteps:
    """Sidecars that end at once."""

    starts = 0

    def start_sidecars(self) -> list[subprocess.Popen[bytes]]:
        self.starts += 1
        process = subprocess.Popen(["false"])
        process.wait()
        return [process]

    def sidecars_have_no_leftovers(self, _: object) -> bool:
        return True


def test_sidecars_are_restarted_again_after_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    steps: Any = EndingSteps()
    clock = [time.monotonic()]
    facts = RunFacts("4459", tmp_path, ("cn01",))
    sidecars = Sidecars(plan_of(), facts, steps, lambda _: None, lambda: False)
    sidecars.start()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    for _ in range(5):
        clock[0] += 10.0
        sidecars.maintain(may_restart=True)
    assert steps.starts == 4
    assert capfd.readouterr().out.count("ended again, after 3 restarts within an hour; waiting") == 1
    for _ in range(5):  # one in two hours
        clock[0] += 2 * RESTARTS_WITHIN_S
        sidecars.maintain(may_restart=True)
    assert steps.starts == 9
