"""Is the work all there: workers, items, output files and what is in them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from exporter.manifest import Manifest
from exporter.readers.files import count_lines, read_files

COMPLETE_SHARE = 0.99
"""Share of the expected items that counts as complete."""
CLOCK_SLACK_S = 60.0
"""How far the clock of a file server may be behind."""
MOST_COUNTED_BYTES = 1 << 30
"""Larger files are not read for their number of records."""

_RECORD_FILES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Check:
    """One question about the finished job; ``passed`` is None when there was nothing to ask about."""

    name: str
    passed: bool | None
    detail: str


def verify(
    manifest: Manifest,
    *,
    items_processed: int | None,
    positions: Sequence[int | None],
    reasons: Sequence[str | None],
    expected: Sequence[int | None] = (),
    since: float = 0.0,
    out_of_time: Callable[[], bool] = lambda: False,
) -> list[Check]:
    """Checks of a finished job that started at ``since``.

    ``positions`` are those of its tasks, ``expected`` how many their logs say there are, ``reasons``
    those of the critical ones.
    """
    return [
        _workers(reasons),
        _items(manifest, items_processed, positions, expected),
        *_outputs(manifest, positions, since, out_of_time),
    ]


def _workers(reasons: Sequence[str | None]) -> Check:
    done = sum(reason == "completed" for reason in reasons)
    return Check("workers", done == len(reasons), f"{done} of {len(reasons)} workers completed")


def _items(
    manifest: Manifest, processed: int | None, positions: Sequence[int | None], expected: Sequence[int | None]
) -> Check:
    total = manifest.total_items
    known = [position for position in positions if position is not None]
    if total is None:
        told = sum(entry for entry in expected if entry is not None)
        short = f"; the logs say {sum(known)} of {told}" if told and sum(known) < COMPLETE_SHARE * told else ""
        return Check("items", None, f"the job file gives no progress.total_items{short}")
    if not known:
        return Check("items", False, f"no log said how many of {total} items were done")
    done = sum(known)
    again = f" ({processed} with those done again)" if processed is not None and processed > done else ""
    enough = "" if done >= total else f"; {COMPLETE_SHARE:.0%} are enough"
    return Check("items", done >= COMPLETE_SHARE * total, f"{done} of {total} items done{again}{enough}")


def _outputs(
    manifest: Manifest, positions: Sequence[int | None], since: float, out_of_time: Callable[[], bool]
) -> list[Check]:
    group = next((group for group in manifest.groups if group.name == "output"), None)
    if group is None or group.pattern is None:
        return []
    directory = manifest.directory(group)
    try:
        files = read_files(directory, group.pattern)
    except OSError as error:
        return [Check("outputs", False, f"{directory} cannot be read: {error.strerror}")]
    if not files:
        return [Check("outputs", None, f"no file matches {group.pattern} in {directory}")]
    if all(file.mtime < since - CLOCK_SLACK_S for file in files):
        # some may be: a job that goes on where an earlier one has ended need not write to all of them
        return [Check("outputs", None, f"{len(files)} files in {directory}, none written since the job started")]
    empty = [file.name for file in files if file.size_bytes == 0]
    size = sum(file.size_bytes for file in files)
    checks = [
        Check(
            "outputs",
            not empty,
            f"{len(files)} files, {size} bytes" + (f"; empty: {', '.join(empty[:5])}" if empty else ""),
        )
    ]
    records = [directory / file.name for file in files if file.name.endswith(_RECORD_FILES)]
    if records and len(records) == len(files) and all(position is not None for position in positions):
        checks.append(_records(records, sum(position or 0 for position in positions), out_of_time))
    return checks


def _records(paths: Sequence[Path], done: int, out_of_time: Callable[[], bool]) -> Check:
    lines = 0
    for path in paths:
        if out_of_time():
            return Check("records", None, "there was no time to count them all")
        try:
            count = count_lines(path, MOST_COUNTED_BYTES)
        except OSError as error:
            return Check("records", False, f"{path.name} cannot be read: {error.strerror}")
        if count is None:
            return Check("records", None, f"{path.name} is too large to count its records")
        lines += count
    return Check("records", lines >= done, f"{lines} records for {done} items")
