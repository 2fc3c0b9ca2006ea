"""Figures of merit that the job reports by ``POST /fom``, as with omnistat.

{"name": "gflops", "value": 511.26}
"""

import json
import math
import threading

from exporter.collecting.collector import CollectorContext, StatusParts
from exporter.collecting.families import Family, Samples
from exporter.contract import run_files
from exporter.contract.identity import safe_label
from exporter.contract.status import FigureOfMerit, NodeStatus

FIGURE = Family("figure_of_merit", "Latest figure of merit that the job reported, by its name.", labels=("name",))
FIGURE_TIME = Family("figure_of_merit_timestamp_seconds", "When the job last reported that figure.", labels=("name",))

MOST_FIGURES = 64
STALE_S = 600.0  # a figure not reported for this long makes room for a new name; jobs report theirs each few minutes
EXAMPLE = '{"name": "gflops", "value": 511.26}'


class FigureOfMeritError(ValueError):
    """An invalid figure; the message says what would be valid."""


def parse_figure_of_merit(body: bytes) -> tuple[str, float]:
    """Parse name, as a safe label, and value from a request body; raises FigureOfMeritError."""
    try:
        content = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FigureOfMeritError(f"the body is not JSON: send an object like {EXAMPLE}") from error
    if not isinstance(content, dict):
        raise FigureOfMeritError(f"the body is not a JSON object: send one like {EXAMPLE}")
    missing = [key for key in ("name", "value") if key not in content]
    if missing:
        raise FigureOfMeritError(f"{' and '.join(missing)} missing: send an object like {EXAMPLE}")
    name, value = content["name"], content["value"]
    if not isinstance(name, str) or not name.strip():
        raise FigureOfMeritError(f"name: {_value_text(name)} is not a name; use a text")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FigureOfMeritError(f"value: {_value_text(value)} is not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise FigureOfMeritError(f"value: {_value_text(value)} is not a finite number")
    if abs(number) >= run_files.MOST_NUMBER:
        raise FigureOfMeritError(f"value: {_value_text(value)} is too large; use one below {run_files.MOST_NUMBER:g}")
    return safe_label(name.strip()), number


def _value_text(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


class FomCollector:
    """Keeps the figures until the job ends, since a job may report one only once, or until a new one needs the room.

    Figures of an earlier sidecar of this node and attempt come from its published status.
    """

    name = "fom"
    interval_s = 5.0
    families = (FIGURE, FIGURE_TIME)

    def __init__(self, context: CollectorContext) -> None:
        self._clock = context.clock
        self._lock = threading.Lock()
        self._figures = _earlier_figures(context)

    def accept(self, body: bytes) -> FigureOfMerit:
        """Store the figure of one request; raises FigureOfMeritError. Called by the web server."""
        name, value = parse_figure_of_merit(body)
        figure = FigureOfMerit(name, value, self._clock.time())
        with self._lock:
            if name not in self._figures and len(self._figures) >= MOST_FIGURES:
                oldest = min(self._figures.values(), key=lambda known: known.time)
                if figure.time - oldest.time < STALE_S:
                    why = f"{MOST_FIGURES} others were reported within the last {STALE_S / 60:g} minutes; reuse a name"
                    raise FigureOfMeritError(f"name: {name} is not added: {why}")
                del self._figures[oldest.name]
            self._figures[name] = figure
        return figure

    def read(self) -> tuple[FigureOfMerit, ...]:
        with self._lock:
            return tuple(self._figures.values())

    def render(self, figures: tuple[FigureOfMerit, ...], out: Samples) -> None:
        for figure in figures:
            out.add(FIGURE, figure.value, name=figure.name)
            out.add(FIGURE_TIME, figure.time, name=figure.name)

    def describe(self, figures: tuple[FigureOfMerit, ...], parts: StatusParts) -> None:
        parts.figures_of_merit = figures


def _earlier_figures(context: CollectorContext) -> dict[str, FigureOfMerit]:
    identity = context.identity
    status = NodeStatus.read_valid(context.manifest.run_dir / run_files.STATUS_DIR / f"{identity.node}.json")
    if status is None or status.attempt != identity.attempt:
        return {}
    return {figure.name: figure for figure in status.figures_of_merit[:MOST_FIGURES]}
