"""The log of alerts: a line for people in one file, a line of JSON in another."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from exporter.alerts.messages import Alert, log_json, log_line, parse_log_json

MOST_BYTES = 32 * 1024 * 1024  # of a file; then it is renamed to `.1` and a new one begins
MODE = 0o600


class AlertLog:
    """Appends to FILE, and to FILE with `.jsonl` behind it."""

    def __init__(self, path: Path) -> None:
        self.path, self.json_path = path, Path(f"{path}.jsonl")
        self.failures = 0

    def alerts(self) -> Iterator[Alert]:
        """What has been written, oldest first; of files that cannot be read, nothing."""
        for path in (Path(f"{self.json_path}.1"), self.json_path):
            with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as lines:
                yield from filter(None, map(parse_log_json, lines))

    def write(self, alert: Alert, now: float) -> None:
        """Write an alert into both files. Raises OSError."""
        self._append(self.path, log_line(alert, now))
        self._append(self.json_path, log_json(alert, now))

    def say(self, words: str) -> None:
        """Write a line for people only. Raises OSError."""
        self._append(self.path, words)

    def _append(self, path: Path, line: str) -> None:
        try:
            target = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, MODE)
            with open(target, "a", encoding="utf-8", errors="backslashreplace") as lines:
                lines.write(f"{line}\n")
                size = lines.tell()
            if size > MOST_BYTES:
                path.replace(f"{path}.1")
        except OSError:
            self.failures += 1
            raise
