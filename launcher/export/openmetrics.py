"""The timelines of a job as OpenMetrics text with times, as Prometheus would have scraped them.

``promtool tsdb create-blocks-from openmetrics`` makes blocks of it.
"""

import json
import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from exporter.contract import run_files
from exporter.contract.manifest import Manifest
from exporter.contract.records import RecordError
from exporter.contract.target_files import SCRAPE_JOB
from exporter.contract.timeline_file import SUFFIX, TimelineHead, open_timeline

# A query finds a sample for five minutes, so points of a long job that are farther apart are filled
FILL_S = 240.0
GAP_STEPS = 3  # points farther apart than this many steps have a gap between them: no sidecar was running


class _Part(NamedTuple):
    """One series in one timeline."""

    head: TimelineHead
    points: Sequence[int]
    values: Sequence[float]  # NaN: absent


class Timelines(NamedTuple):
    """All timelines of a job: parts of series by family, in order of time."""

    heads: tuple[TimelineHead, ...]
    families: Mapping[str, Mapping[str, list[_Part]]]
    problems: tuple[str, ...]  # files that are damaged or cannot be read, one sentence each


def read_timelines(run_dir: Path, manifest: Manifest) -> Timelines:
    """Timelines of all nodes and attempts."""
    heads, problems = [], []
    families: dict[str, dict[str, list[_Part]]] = defaultdict(dict)
    for path in sorted(run_dir.glob(f"{run_files.STATUS_DIR}*/*{SUFFIX}")):
        try:
            with open_timeline(path) as (head, series):
                target = {"job": SCRAPE_JOB, "instance": head.instance}
                target |= {"notify": manifest.notify} if manifest.notify else {}
                labels = ",".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in target.items())
                found = [(name, array("L", points), _numbers(values)) for name, points, values in series]
        except (OSError, RecordError) as error:
            problems.append(str(error) if isinstance(error, RecordError) else f"{path}: {error.strerror}")
            continue
        heads.append(head)
        for name, points, values in found:
            family, _, rest = name.partition("{")
            parts = families[family].setdefault(f"{family}{{{labels},{rest}", [])
            parts.append(_Part(head, points, values))
    for parts in chain.from_iterable(series.values() for series in families.values()):
        parts.sort(key=lambda part: part.head.times)
    return Timelines(tuple(heads), families, tuple(problems))


def _numbers(values: Iterable[float | None]) -> Sequence[float]:
    return array("d", (float("nan") if value is None else value for value in values))


def openmetrics_lines(timelines: Timelines) -> Iterator[str]:
    """Lines of the text."""
    for family, series in sorted(timelines.families.items()):
        kind = {"_total": "counter", "_info": "info"}.get(family[family.rfind("_") :], "gauge")
        yield f"# TYPE {family.removesuffix('_total' if kind == 'counter' else '_info')} {kind}\n"
        for name, parts in series.items():
            last = float("-inf")
            for time, value in chain.from_iterable(_samples(part, rises=kind == "counter") for part in parts):
                if time > last:
                    yield f"{name} {value:.13g} {time:.3f}\n"
                    last = time
    yield "# EOF\n"


def _samples(part: _Part, *, rises: bool) -> Iterator[tuple[float, float]]:
    """Time and value of each sample. Between points that are far apart, gauges stay and counters rise evenly."""
    changes, step_s = dict(zip(part.points, part.values, strict=True)), part.head.step_s
    before, last = part.head.times[0], float("nan")
    for point, time in enumerate(part.head.times):
        value = changes.get(point, last)
        if not math.isnan(last) and time - before <= GAP_STEPS * step_s:
            rise = max(0.0, value - last) / (time - before) if rises and time > before else 0.0
            for number in range(1, int((time - before) / FILL_S) + 1):
                if (between := number * FILL_S) < time - before:
                    yield before + between, last + rise * between
        if not math.isnan(value):
            yield time, value
        before, last = time, value
