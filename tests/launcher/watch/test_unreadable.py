"""Watching a job while its run directory cannot be read."""

import errno
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.contract.view import JobView
from launcher.cli import watch
from launcher.cli.watch import show_job
from tests.launcher.watch.test_picture import a_view


class Client:
    """A job that ends while its file server fails over."""

    run_dir = Path("/runs/1")

    def __init__(self) -> None:
        running = JobView.from_json(a_view())
        stale = OSError(errno.ESTALE, "Stale file handle")
        ended = running.replace(state="COMPLETED")
        self.answers: Iterator[JobView | OSError] = iter([running, stale, stale, ended, ended])

    def read_view(self) -> JobView:
        answer = next(self.answers)
        if isinstance(answer, OSError):
            raise answer
        return answer


def show(client: Any) -> JobView:
    return show_job(client, 0.0, lambda view: view.state == "COMPLETED", True, True, on_interrupt="ends the view")


def test_the_last_view_stays_while_the_run_directory_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show(Client()).state == "COMPLETED"
    problem = "/runs/1 cannot be read: Stale file handle; the view stays as it was"
    assert capsys.readouterr().err == f"gpujob: warning: {problem}\n"
    clock = iter(range(0, 10**6, 10**4))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    assert watch.UNREADABLE_S < 10**4
    with pytest.raises(OSError, match="Stale file handle"):
        show(Client())
