"""Is the work all there: workers, items or steps, output files and what is in them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from exporter.derive.work import ITEMS, Work
from exporter.manifest import Manifest
from exporter.readers.files import count_lines, read_files

COMPLETE_SHARE = 0.99
"""Share of the expected work that counts as complete."""
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
    work: Work,
    reasons: Sequence[str | None],
    since: float = 0.0,
    out_of_time: Callable[[], bool] = lambda: False,
) -> list[Check]:
    """Checks of a finished job that started at ``since``, its ``work`` as the logs say.

    ``reasons`` are those of its critical tasks.
    """
    return [_workers(reasons), *_work(manifest, work), *_outputs(manifest, work, since, out_of_time)]


def _workers(reasons: Sequence[str | None]) -> Check:
    done = sum(reason == "completed" for reason in reasons)
    return Check("workers", done == len(reasons), f"{done} of {len(reasons)} workers completed")


def _work(manifest: Manifest, work: Work) -> list[Check]:
    total, done, told = manifest.total_items, work.done, work.expected
    if work.counts_items and total is not None:
        if done is None:
            return [Check(ITEMS, False, f"no log said how many of {total} items were done")]
        return [_count(ITEMS, done, total, work.processed)]
    checks = []
    if work.in_step and done is not None and told:
        checks.append(_count(str(work.unit), done, told, work.processed))
    if total is None:
        if not checks:
            counted = "" if work.counts_items else f" {work.unit}"
            short = (
                f"; the logs say {done or 0} of {told}{counted}" if (done or 0) < COMPLETE_SHARE * (told or 0) else ""
            )
            checks.append(Check(ITEMS, None, f"the job file gives no progress.total_items{short}"))
    else:
        checks.append(Check(ITEMS, None, _no_items(work)))
    return checks


def _no_items(work: Work) -> str:
    """Why items cannot be told from the logs."""
    if work.unit is not None:
        return f"the log counts {work.unit}, not items"
    return f"the logs count {' and '.join(work.units)}, which do not add up"


def _count(unit: str, done: int, total: int, processed: int | None) -> Check:
    again = f" ({processed} with those done again)" if processed is not None and processed > done else ""
    words = f"{done} of {total} {unit} done{again}"
    if unit == ITEMS:
        enough = "" if done >= total else f"; {COMPLETE_SHARE:.0%} are enough"
        return Check(unit, done >= COMPLETE_SHARE * total, words + enough)
    if done >= COMPLETE_SHARE * total:
        return Check(unit, True, words)
    # logs count from 0, skip lines, and training stops early: a program that ends well decides itself what is enough
    return Check(unit, None, f"{words}, as far as the logs say; the job file gives no total of them")


def _outputs(manifest: Manifest, work: Work, since: float, out_of_time: Callable[[], bool]) -> list[Check]:
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
    if records and len(records) == len(files):
        checks += _record_checks(manifest.total_items, work, records, out_of_time)
    return checks


def _record_checks(
    total: int | None, work: Work, paths: Sequence[Path], out_of_time: Callable[[], bool]
) -> list[Check]:
    """Records against the items done, or against those of the job file where the logs count something else."""
    if work.counts_items:
        done = work.done if work.whole else None
        return [] if done is None else [_records(paths, done, done, out_of_time)]
    if total is None:
        return [Check("records", None, _no_items(work))]
    return [_records(paths, math.ceil(COMPLETE_SHARE * total), total, out_of_time)]


def _records(paths: Sequence[Path], enough: int, items: int, out_of_time: Callable[[], bool]) -> Check:
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
    return Check("records", lines >= enough, f"{lines} records for {items} items")
