"""Pages compared with the parsers and the writer of the Prometheus client library."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Metric, exposition, parser
from prometheus_client.openmetrics import exposition as openmetrics_exposition
from prometheus_client.openmetrics import parser as openmetrics_parser

from exporter.collecting.families import Family, Samples
from exporter.contract.manifest import ESSENTIAL, FULL, NORMAL
from tests.support.strategies import TEXT

parse_text: Callable[[str], Iterable[Metric]] = parser.text_string_to_metric_families
parse_openmetrics: Callable[[str], Iterable[Metric]] = openmetrics_parser.text_string_to_metric_families
library_text: Callable[[CollectorRegistry], bytes] = exposition.generate_latest
library_openmetrics: Callable[[CollectorRegistry], bytes] = openmetrics_exposition.generate_latest

GAUGE = Family("items", 'Items "done"\nwith a \\ in the help.', labels=("worker", "name"))
COUNTER = Family("exits_total", "Ends.", labels=("reason",), kind="counter")
INFO = Family("build_info", "What this is.", labels=("version",), kind="info")
SUMMARY = Family("eta_seconds", "Seconds left.", labels=("quantile",), kind="summary")
CONSTANT = {"job_name": 'a "b"\n\\c', "node": "node01"}

FINITE = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**70), 2**70)
NOT_NEGATIVE = st.floats(min_value=0, allow_infinity=False) | st.integers(0, 2**70) | st.booleans()


@dataclass(frozen=True)
class AddedSample:
    """One sample to add."""

    family: Family
    labels: dict[str, str]
    value: float

    def parsed(self) -> tuple[str, tuple[tuple[str, str], ...], str]:
        """The sample as a parser should return it."""
        return self.family.full_name, tuple(sorted({**CONSTANT, **self.labels}.items())), number_text(self.value)


def number_text(value: float) -> str:
    """The number as text, because NaN equals nothing. 0 has no sign."""
    return repr(float(value) + 0.0)


def unique(family: Family, values: st.SearchStrategy[float]) -> st.SearchStrategy[list[AddedSample]]:
    """Samples of a family without duplicates."""
    keys = st.tuples(*(TEXT for _ in family.labels))
    return st.dictionaries(keys, values, max_size=5).map(
        lambda found: [
            AddedSample(family, dict(zip(family.labels, key, strict=True)), value) for key, value in found.items()
        ]
    )


SAMPLES = st.tuples(
    unique(GAUGE, FINITE | st.sampled_from([math.nan, math.inf, -math.inf])),
    unique(COUNTER, NOT_NEGATIVE),
    unique(INFO, st.just(1)),
    st.just([AddedSample(SUMMARY, {"quantile": quantile}, 0.5) for quantile in ("0.1", "0.5", "0.9")]),
).map(lambda parts: [sample for part in parts for sample in part])


def page(samples: Iterable[AddedSample], *, openmetrics: bool = False) -> str:
    out = Samples(CONSTANT)
    for sample in samples:
        out.add(sample.family, sample.value, **sample.labels)
    return out.page(openmetrics=openmetrics)


def parsed_samples(metrics: Iterable[Metric]) -> list[tuple[str, tuple[tuple[str, str], ...], str]]:
    """Every sample that the parser has found."""
    return [
        (sample.name, tuple(sorted(sample.labels.items())), number_text(sample.value))
        for metric in metrics
        for sample in metric.samples
    ]


class LibraryCollector:
    """The same samples as a collector of the client library."""

    def __init__(self, samples: list[AddedSample]) -> None:
        self._samples = samples

    def collect(self) -> Iterable[Metric]:
        for family in (GAUGE, COUNTER, INFO, SUMMARY):
            name = family.full_name.removesuffix("_total").removesuffix("_info")
            metric = Metric(name, family.help, family.kind)
            for sample in self._samples:
                if sample.family is family:
                    metric.add_sample(family.full_name, {**CONSTANT, **sample.labels}, sample.value)
            if metric.samples:
                yield metric


@given(SAMPLES)
@example([AddedSample(GAUGE, {"worker": 'a"b\\n\n', "name": "\r\u2028\x00,={}#"}, 1e300)])
def test_the_text_parser_finds_exactly_the_added_samples(samples: list[AddedSample]) -> None:
    assert parsed_samples(parse_text(page(samples))) == [sample.parsed() for sample in samples]


@given(SAMPLES)
def test_the_openmetrics_parser_finds_exactly_the_added_samples(samples: list[AddedSample]) -> None:
    assert parsed_samples(parse_openmetrics(page(samples, openmetrics=True))) == [sample.parsed() for sample in samples]


@given(SAMPLES)
def test_pages_are_equivalent_to_those_of_the_library(samples: list[AddedSample]) -> None:
    registry = CollectorRegistry()
    registry.register(LibraryCollector(samples))
    for ours, theirs in (
        (parse_text(page(samples)), parse_text(library_text(registry).decode())),
        (parse_openmetrics(page(samples, openmetrics=True)), parse_openmetrics(library_openmetrics(registry).decode())),
    ):
        ours_found, theirs_found = list(ours), list(theirs)
        assert sorted(parsed_samples(ours_found)) == sorted(parsed_samples(theirs_found))
        kinds = [
            {metric.name: (metric.type, metric.documentation) for metric in metrics}
            for metrics in (ours_found, theirs_found)
        ]
        assert kinds[0] == kinds[1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1"),
        (True, "1"),
        (False, "0"),
        (0.0, "0"),
        (0.5, "0.5"),
        (1e-7, "1e-07"),
        (1_700_000_000.25, "1700000000.25"),
        (123_456_789_012_345.0, "123456789012345"),
        (1e16, "1e+16"),
        (2**63, "9223372036854775808"),
        (math.nan, "NaN"),
        (math.inf, "+Inf"),
        (-math.inf, "-Inf"),
    ],
)
def test_a_number_is_written_exactly_and_briefly(value: float, text: str) -> None:
    out = Samples({})
    out.add(Family("value", "A value."), value)
    assert out.page().splitlines()[-1] == f"gpujob_value {text}"


def test_an_unknown_value_adds_no_sample_and_no_heading() -> None:
    out = Samples(CONSTANT)
    out.add(GAUGE, None, worker="w0", name="loss")
    assert out.page() == ""
    assert out.page(openmetrics=True) == "# EOF\n"


def test_a_page_has_the_text_format() -> None:
    out = Samples({"node": "n1"})
    out.add(INFO, 1, version="1.0")
    out.add(COUNTER, 2, reason="x")
    out.add(Family("up", 'Say "up" \\ down.\nTwice.'), 1)
    assert out.page() == (
        "# HELP gpujob_build_info What this is.\n"
        "# TYPE gpujob_build_info gauge\n"
        'gpujob_build_info{node="n1",version="1.0"} 1\n'
        "# HELP gpujob_exits_total Ends.\n"
        "# TYPE gpujob_exits_total counter\n"
        'gpujob_exits_total{node="n1",reason="x"} 2\n'
        '# HELP gpujob_up Say "up" \\\\ down.\\nTwice.\n'
        "# TYPE gpujob_up gauge\n"
        'gpujob_up{node="n1"} 1\n'
    )


def test_a_page_has_the_openmetrics_format() -> None:
    out = Samples({})
    out.add(INFO, 1, version="1.0")
    out.add(COUNTER, 2, reason="x")
    out.add(Family("up", 'Say "up".'), 1)
    assert out.page(openmetrics=True) == (
        "# HELP gpujob_build What this is.\n"
        "# TYPE gpujob_build info\n"
        'gpujob_build_info{version="1.0"} 1\n'
        "# HELP gpujob_exits Ends.\n"
        "# TYPE gpujob_exits counter\n"
        'gpujob_exits_total{reason="x"} 2\n'
        '# HELP gpujob_up Say \\"up\\".\n'
        "# TYPE gpujob_up gauge\n"
        "gpujob_up 1\n"
        "# EOF\n"
    )


def test_samples_of_a_family_are_grouped() -> None:
    out = Samples({})
    for reason in ("a", "b"):
        out.add(COUNTER, 1, reason=reason)
        out.add(GAUGE, 2, worker=reason, name="loss")
    assert [line.partition("{")[0] for line in out.page().splitlines() if line[0] != "#"] == [
        *["gpujob_exits_total"] * 2,
        *["gpujob_items"] * 2,
    ]


def test_a_vanished_series_is_not_on_the_next_page() -> None:
    out = Samples(CONSTANT)
    out.add(COUNTER, 1, reason="x")
    out.add(COUNTER, 2, reason="y")
    out.page()
    out.add(COUNTER, 3, reason="y")
    assert parsed_samples(parse_text(out.page())) == [AddedSample(COUNTER, {"reason": "y"}, 3).parsed()]
    assert out.page() == ""


def lines(out: Samples) -> list[str]:
    """Samples of the next page."""
    return [line for line in out.page().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("detail", [ESSENTIAL, NORMAL])
def test_a_series_of_a_family_that_begins_late_is_absent_until_it_is_first_not_0_and_then_stays(detail: str) -> None:
    out, state = Samples({}, detail), Family("worker_state", "State.", ("state",))
    shown = []
    for value in (0, False, 0.0, 2, 0, None, 0):
        out.add(state, value, state="zombie")
        shown.append([line.rpartition(" ")[2] for line in lines(out)])
    assert shown == [[], [], [], ["2"], ["0"], [], []], "an unknown value ends the series, as everywhere"


def test_a_page_of_full_detail_has_series_that_are_0() -> None:
    out = Samples({}, FULL)
    out.add(Family("worker_state", "State.", ("state",)), 0, state="zombie")
    assert lines(out) == ['gpujob_worker_state{state="zombie"} 0']


@pytest.mark.parametrize(
    ("detail", "names"),
    [
        (ESSENTIAL, ["worker_up"]),
        (NORMAL, ["worker_up", "worker_memory_rss_bytes"]),
        (FULL, ["worker_up", "worker_memory_rss_bytes", "worker_threads"]),
        ("of a newer launcher", ["worker_up", "worker_memory_rss_bytes", "worker_threads"]),
    ],
)
def test_a_page_has_the_families_of_its_detail(detail: str, names: list[str]) -> None:
    out = Samples({}, detail)
    for name in ("worker_up", "worker_memory_rss_bytes", "worker_threads"):
        out.add(Family(name, "Help."), 1)
    assert lines(out) == [f"gpujob_{name} 1" for name in names]


def test_labels_may_be_numbers_and_in_any_order() -> None:
    out = Samples({})
    for _ in range(2):  # the second time from cached text
        out.add(GAUGE, 1, name=7, worker="w0")
        out.add(GAUGE, 2, worker=7, name="w0")
        assert out.page().splitlines()[2:] == [
            'gpujob_items{worker="w0",name="7"} 1',
            'gpujob_items{worker="7",name="w0"} 2',
        ]


@pytest.mark.parametrize(
    "labels", [{}, {"worker": "w0"}, {"worker": "w0", "name": "a", "gpu": 0}, {"worker": "w0", "x": 1}]
)
def test_undeclared_or_missing_labels_are_refused(labels: dict[str, object]) -> None:
    out = Samples({})
    out.add(GAUGE, 1, worker="w0", name="a")
    out.page()
    with pytest.raises(ValueError, match=r"^items has labels \('worker', 'name'\), not "):
        out.add(GAUGE, 1, **labels)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("exits", "counter", "counter exits must end in _total"),
        ("build", "info", "info build must end in _info"),
        ("exits_total", "gauge", "gauge exits_total must not end in _total or _info"),
        ("build_info", "gauge", "gauge build_info must not end in _total or _info"),
    ],
)
def test_a_name_that_does_not_fit_its_kind_is_refused(
    name: str, kind: Literal["gauge", "counter", "info"], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Family(name, "Help.", kind=kind)
