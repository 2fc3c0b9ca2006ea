"""Declaring families, adding samples, writing the page.

A page is rendered once per scrape from snapshots, by joining kept strings: the
library's ``generate_latest`` costs 6 to 9 microseconds a sample, this about one
(``bench/exposition.py``); tests compare the parsed samples of both.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

PREFIX = "gpujob_"
TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

Kind = Literal["gauge", "counter", "info", "summary"]
Value = float | int | bool | None


@dataclass(frozen=True, eq=False)
class Family:
    """A metric family as it is declared beside the collector that fills it.

    ``name`` is without the prefix; a counter's name ends in ``_total``, an info's in ``_info``.
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

    @property
    def full_name(self) -> str:
        """The name of the series."""
        return PREFIX + self.name


class Samples:
    """Samples of one page, with the labels that all of them carry.

    One object serves every page: the text before a sample's value is made once per series and
    kept while the series lasts.
    """

    def __init__(self, constant_labels: Mapping[str, str]) -> None:
        self._constant = [f'{name}="{_escape(value)}"' for name, value in constant_labels.items()]
        self._kept: dict[tuple[Family, tuple[object, ...]], str] = {}
        self._used: dict[tuple[Family, tuple[object, ...]], str] = {}
        self._lines: dict[Family, list[str]] = {}

    def add(self, family: Family, value: Value, **labels: object) -> None:
        """Add one sample; None means "not known" and adds nothing.

        Labels must be exactly those declared, in any order.
        """
        if value is None:
            return
        key = (family, tuple(labels.values()))
        prefix = self._kept.get(key)
        if prefix is None or tuple(labels) != family.labels:
            if labels.keys() != set(family.labels):
                raise ValueError(f"{family.name} has labels {family.labels}, not {tuple(labels)}")
            key = (family, tuple(labels[name] for name in family.labels))
            prefix = self._kept.get(key) or self._prefix(family, key[1])
        self._used[key] = prefix
        lines = self._lines.get(family)
        if lines is None:
            lines = self._lines[family] = []
        lines.append(prefix + _number(value))

    def mark(self) -> dict[Family, int]:
        """Where the page stands, for ``take_back``."""
        return {family: len(lines) for family, lines in self._lines.items()}

    def take_back(self, mark: Mapping[Family, int]) -> None:
        """Remove the samples added since the mark."""
        for family in list(self._lines):
            kept = mark.get(family, 0)
            del self._lines[family][kept:]
            if not kept:
                del self._lines[family]

    def _prefix(self, family: Family, values: Iterable[object]) -> str:
        pairs = self._constant + [
            f'{name}="{_escape(str(value))}"' for name, value in zip(family.labels, values, strict=True)
        ]
        return f"{family.full_name}{{{','.join(pairs)}}} " if pairs else f"{family.full_name} "

    def page(self, *, openmetrics: bool = False) -> str:
        """The page of all samples added since the last one, families in the order of their first sample."""
        parts: list[str] = []
        for family, lines in self._lines.items():
            name, kind = family.full_name, family.kind
            if openmetrics:
                name = name.removesuffix("_total" if kind == "counter" else "_info" if kind == "info" else "")
            elif kind == "info":
                kind = "gauge"
            parts.append(f"# HELP {name} {_escape_help(family.help, openmetrics)}\n# TYPE {name} {kind}")
            parts.extend(lines)
        if openmetrics:
            parts.append("# EOF")
        self._kept, self._used, self._lines = self._used, {}, {}
        return "\n".join(parts) + "\n" if parts else ""


def _number(value: float) -> str:
    """Go's and the library's spelling of a number; whole numbers without an exponent."""
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
