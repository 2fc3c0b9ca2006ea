"""Whether there may be new names in a folder, by one look at the folder itself."""

import os
from pathlib import Path

from exporter.readers.files import read_mtime

RECENT_S = 5.0
"""For so long after a change of the folder each look has news."""
LOOK_ANYWAY_EVERY = 5


class FolderNews:
    """Asked at each look of somebody who would otherwise ask for many files of a folder one by one.

    Some file systems tell a change to the second, and their clock may be another one: so it counts for a while, and
    every few looks have news without it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._before: float | None = None
        self._looks = 0

    def has_news(self, now: float) -> bool:
        """Whether names may have come since the last look; ``now`` in epoch seconds. A folder that is not there has."""
        before, self._before = self._before, read_mtime(self._folder)
        self._looks += 1
        recent = self._before is None or abs(now - self._before) < RECENT_S
        return recent or self._before != before or self._looks % LOOK_ANYWAY_EVERY == 0
