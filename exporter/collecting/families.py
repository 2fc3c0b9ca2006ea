"""Declare metric families, add samples, write the page.

Each scrape joins cached strings. That costs about one microsecond a sample; the library's ``generate_latest`` costs 6
to 9 (``bench/exposition.py``). Tests compare the parsed samples of both.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Literal

from exporter.collecting.detail import ESSENTIAL_FAMILIES, FULL_FAMILIES, LATE_FAMILIES
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import DETAILS, ESSENTIAL, FULL, NORMAL

PREFIX = "gpujob_"
TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

Kind = Literal["gauge", "counter", "info", "summary"]
Value = float | int | bool | None


@dataclass(frozen=True, eq=False)
class Family:
    """A metric family, declared next to the collector that fills it.

    ``name`` has no prefix. The name of a counter ends in ``_total``, that of an info in ``_info``.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    kind: Kind = "gauge"

    def __post_init__(self) -> None:
        suffix = {"counter": "_total", "info": "_info"}.get(self.kind)
        if suffix and not self.full_name.endswith(suffix):
            raise ValueError(f"{self.kind} {self.name} must end in {suffix}")
        if self.kind == "gauge" and self.name.endswith(("_total", "_info")):
            raise ValueError(f"gauge {self.name} must not end in _total or _info")

    @cached_property
    def full_name(self) -> str:
        """Name with the prefix."""
        return PREFIX + self.name

    @cached_property
    def detail(self) -> str:
        """The least detail of a page that has it."""
        return ESSENTIAL if self.name in ESSENTIAL_FAMILIES else FULL if self.name in FULL_FAMILIES else NORMAL

    @cached_property
    def begins_late(self) -> bool:
        """Whether its series begin when they are first other than 0, below full detail."""
        return self.name in LATE_FAMILIES


class SeriesGroup:
    """Series that share labels, for example of one worker. Made by ``Samples.row``.

    The text of a sample is made when its series begins and when its value changes.
    """

    __slots__ = ("_cached", "_constant", "_details", "_labels", "_lines", "_names", "_text", "_used")

    def __init__(
        self,
        labels: Mapping[str, object],
        constant: Sequence[str],
        lines: dict[Family, list[str]],
        details: tuple[str, ...],
    ) -> None:
        self._labels, self._constant, self._lines, self._details = labels, constant, lines, details
        self._names = tuple(labels)
        self._text: str | None = None  # its labels as the page writes them
        # Value, line, and the part of the line before the value; by family, or by family and its further labels
        self._cached: dict[object, tuple[Value, str, str]] = {}
        self._used: dict[object, tuple[Value, str, str]] = {}

    def add(self, family: Family, value: Value, **more: object) -> None:
        """Add one sample; None means unknown and adds nothing.

        The labels of the row and ``more`` must be exactly the declared ones.
        """
        if value is None:
            return
        key = (family, *more.values()) if more else family
        in_order = len(more) < 2 or family.labels[-len(more) :] == tuple(more)
        if not in_order:
            key = (family, *(more[name] for name in family.labels if name in more))
        kept = self._cached.get(key)
        if kept is None or not in_order:
            if kept is None and not self._begins(family, value):
                return
            prefix = self._prefix(family, more)
            kept = (value, prefix + _number(value), prefix)
        elif kept[0] != value:
            prefix = kept[2]
            kept = (value, prefix + _number(value), prefix)
        self._used[key] = kept
        lines = self._lines.get(family)
        if lines is None:
            lines = self._lines[family] = []
        lines.append(kept[1])

    def _begins(self, family: Family, value: Value) -> bool:
        """Whether a series that was not on the previous page begins with this value."""
        return FULL in self._details or (family.detail in self._details and (value != 0 or not family.begins_late))

    def _prefix(self, family: Family, extra_labels: Mapping[str, object]) -> str:
        own = len(self._names)
        if own and family.labels[:own] == self._names and family.labels[own:] == tuple(extra_labels):
            if self._text is None:
                self._text = ",".join(
                    [*self._constant, *(f'{name}="{_escape(str(value))}"' for name, value in self._labels.items())]
                )
            more = "".join(f',{name}="{_escape(str(value))}"' for name, value in extra_labels.items())
            return f"{family.full_name}{{{self._text}{more}}} "
        labels = {**self._labels, **extra_labels}
        if labels.keys() != set(family.labels):
            raise ValueError(f"{family.name} has labels {family.labels}, not {tuple(labels)}")
        pairs = [*self._constant, *(f'{name}="{_escape(str(labels[name]))}"' for name in family.labels)]
        return f"{family.full_name}{{{','.join(pairs)}}} " if pairs else f"{family.full_name} "

    def end_page(self) -> bool:
        """Drop series that were not on this page. Return whether any is left."""
        self._cached, self._used = self._used, {}
        return bool(self._cached)


class Samples:
    """Samples of one page, with their common labels.

    One object serves every page: it caches a sample's text as long as its series lasts.
    """

    def __init__(self, constant_labels: Mapping[str, str], detail: str = FULL) -> None:
        # Unknown detail, of a newer launcher: everything
        self._details = DETAILS[: DETAILS.index(detail) + 1] if detail in DETAILS else DETAILS
        self._constant = [f'{name}="{_escape(value)}"' for name, value in constant_labels.items()]
        self._lines: dict[Family, list[str]] = {}
        self._rows: dict[tuple[tuple[str, object], ...], SeriesGroup] = {}
        self.add = self.row().add  # add one sample with all its labels, in any order; see `SeriesGroup.add`

    def row(self, **labels: object) -> SeriesGroup:
        """Return the group of series with these labels, and possibly more."""
        key = tuple(labels.items())
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = SeriesGroup(labels, self._constant, self._lines, self._details)
        return row

    def mark(self) -> dict[Family, int]:
        """Return the position on the page, for ``remove_since``."""
        return {family: len(lines) for family, lines in self._lines.items()}

    def remove_since(self, mark: Mapping[Family, int]) -> None:
        """Remove the samples added since ``mark``."""
        for family in list(self._lines):
            kept = mark.get(family, 0)
            del self._lines[family][kept:]
            if not kept:
                del self._lines[family]

    def page(self, *, openmetrics: bool = False) -> str:
        """Render all samples added since the previous page, families in order of their first sample."""
        text = "".join(page_part(family, lines, openmetrics=openmetrics) for family, lines in self.take().items())
        return text + "# EOF\n" if openmetrics else text

    def take(self) -> dict[Family, list[str]]:
        """Return the lines of all samples added since the previous page, in place of a page."""
        lines = dict(self._lines)
        self._lines.clear()
        for key in [key for key, row in self._rows.items() if not row.end_page() and key]:
            del self._rows[key]
        return lines


def page_part(family: Family, lines: Iterable[str], *, openmetrics: bool = False) -> str:
    """Render one family with all its lines."""
    name, kind = family.full_name, family.kind
    if openmetrics:
        name = name.removesuffix("_total" if kind == "counter" else "_info" if kind == "info" else "")
    elif kind == "info":
        kind = "gauge"
    head = f"# HELP {name} {_escape_help(family.help, openmetrics)}\n# TYPE {name} {kind}"
    return "\n".join((head, *lines, ""))


def _number(value: float) -> str:
    """Format a number as Go and the library do; whole numbers without an exponent."""
    if value.__class__ is int:
        return str(value)
    value = float(value)
    if value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _escape_help(text: str, openmetrics: bool) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if openmetrics else text
