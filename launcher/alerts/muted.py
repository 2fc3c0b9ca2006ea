"""What is muted of a job, for a view that must not wait for Alertmanager."""

import threading
from collections.abc import Callable, Mapping, Sequence

from exporter.contract.records import NOTHING
from exporter.contract.view import MutedAlert
from launcher.alerts.api import UnansweredError
from launcher.alerts.firing import Silence

READ_EACH_S = 30.0


def muted_alerts(
    silences: Sequence[Silence], job_id: str, now: float, place: Mapping[str, str] = NOTHING
) -> tuple[MutedAlert, ...]:
    """Alerts of a job that are muted now, all of them first; ``place`` is as in ``Silence.is_of``."""
    found = [
        MutedAlert(alert=silence.alert, until=silence.until, by=silence.by)
        for silence in silences
        if silence.about(job_id, place) and (silence.until is None or silence.until > now)
    ]
    return tuple(sorted(found, key=lambda each: (each.alert or "", each.until or 0.0)))


class SilencesReader:
    """Reads the silences on a thread of its own. Without an answer, no alert counts as muted."""

    def __init__(self, read: Callable[[], list[Silence]], wait_s: float) -> None:
        """``wait_s`` is for the first answer."""
        self._read, self._answered = read, threading.Event()
        self.latest: list[Silence] = []
        threading.Thread(target=self._read_on, name="silences", daemon=True).start()
        self._answered.wait(wait_s)

    def _read_on(self) -> None:
        while True:
            try:
                self.latest = self._read()
            except UnansweredError:
                self.latest = []
            self._answered.set()
            threading.Event().wait(READ_EACH_S)
