"""The progress file of a worker: its valid lines, and invalid ones that must not break anything."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.contract.identity import safe_label
from exporter.logs.search.findings import MARKS, UNITS, ActivityMark, LogFindings, LogPosition, LogValue
from exporter.progress.progress_file import (
    ALL_RECORDS_BYTES,
    END_BYTES,
    MOST_NAMES,
    MOST_RECORD_BYTES,
    WORKING,
    ProgressUpdate,
    ProgressUpdates,
    parse_update,
    parse_updates,
)

NAMES = st.text(min_size=1, max_size=20)
NUMBERS = st.floats() | st.integers()
JSON = st.recursive(st.none() | st.booleans() | NUMBERS | st.text(), lambda inner: st.lists(inner, max_size=3))


def line(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def update_of(**fields: Any) -> ProgressUpdate:
    update = parse_update(line(**fields), 7)
    assert update is not None
    return update


def position(**fields: Any) -> LogPosition:
    found = update_of(**fields).position
    assert found is not None
    return found


def test_a_position_with_a_value() -> None:
    assert update_of(done=10, total=100, loss=0.3) == ProgressUpdate(
        LogPosition("progress_file", "items", 7, 10, 100), {"loss": LogValue(0.3, 7)}
    )


def test_all_fields_of_a_line_are_parsed() -> None:
    update = update_of(done=3, total=9, epoch=1, epochs=4, unit="steps", phase="evaluating", rank=2, resumed=True, lr=1)
    expected = LogPosition("progress_file", "steps", 7, 3, 9, 1, 4, rank=2, resumed=True)
    assert update == ProgressUpdate(expected, {"lr": LogValue(1.0, 7)}, ActivityMark("evaluating", True, 7), 2)


def test_an_epoch_alone_is_a_position_in_epochs() -> None:
    assert position(epoch=2, epochs=5) == LogPosition("progress_file", "epochs", 7, 2, 5)


@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_is_known_in_the_plural_and_in_capitals(unit: str) -> None:
    assert position(done=1, unit=unit).unit == position(done=1, unit=f" {unit.upper()}").unit == unit


@pytest.mark.parametrize(
    ("word", "unit"),
    [("step", "steps"), ("batch", "batches"), ("epoch", "epochs"), ("images", "items"), ("", "items")],
)
def test_a_singular_unit_is_known_and_any_other_word_means_items(word: str, unit: str) -> None:
    assert position(done=1, unit=word).unit == unit


@pytest.mark.parametrize("phase", MARKS)
def test_a_phase_other_than_work_begins(phase: str) -> None:
    assert update_of(phase=phase.capitalize()).mark == ActivityMark(phase, True, 7)


def test_any_other_phase_is_the_work() -> None:
    assert update_of(phase="step 2, training").mark == ActivityMark(WORKING, False, 7)


def test_null_means_unknown() -> None:
    fields = dict.fromkeys(("total", "epoch", "epochs", "unit", "phase", "rank", "resumed", "loss"))
    assert update_of(done=1, **fields) == ProgressUpdate(LogPosition("progress_file", "items", 7, 1))


def test_fractions_of_a_count_are_rounded_down() -> None:
    assert (position(done=1.99, total=3.0).done, position(done=1.99, total=3.0).total) == (1, 3)


@pytest.mark.parametrize("key", ["done", "total", "epoch", "epochs", "rank"])
@pytest.mark.parametrize("wrong", [-1, -0.5, True, False, "10", [1], {}, math.nan, math.inf, 10**18, 10**400])
def test_an_invalid_count_makes_a_line_unusable(key: str, wrong: object) -> None:
    assert parse_update(line(**{"done": 1, key: wrong}), 0) is None


@pytest.mark.parametrize(("key", "wrong"), [("unit", 3), ("phase", ["x"]), ("phase", True), ("resumed", "no")])
def test_texts_and_flags_of_another_type_make_a_line_unusable(key: str, wrong: object) -> None:
    assert parse_update(line(**{"done": 1, key: wrong}), 0) is None


@pytest.mark.parametrize(
    "record",
    [
        b'{"done": 10, "tot',
        b'"done": 10, "total": 100}',
        b'{"done": 10}{"done": 11}',
        b'{"done": }',
        b"{'done': 10}",
        b"",
        b"10",
        b"null",
        b'[{"done": 10}]',
        b"{}",
        b'{"note": "nothing that counts", "flag": true, "more": {"loss": 1}}',
        b'{"total": 10}',
        b'{"done": 1, "caf\xe9": 2}',
        b'{"done": ' + b"9" * 5000 + b"}",
        b'{"a": ' * 20_000,
        b"[" * 60_000,
    ],
)
def test_a_record_that_is_no_update_gives_none(record: bytes) -> None:
    assert parse_update(record, 0) is None


def test_an_overlong_line_is_not_parsed() -> None:
    assert parse_update(line(done=1, pad="x" * 10 * 1024 * 1024), 0) is None
    padding = MOST_RECORD_BYTES - len(line(done=1, pad=""))
    assert parse_update(line(done=1, pad="x" * padding), 0) is not None
    assert parse_update(line(done=1, pad="x" * (padding + 1)), 0) is None


def test_a_nan_loss_is_reported_with_the_position() -> None:
    update = update_of(done=1, loss=math.nan, reward=-2.5, norm=math.inf, huge=-(10**400))
    assert update.position is not None
    assert math.isnan(update.values["loss"].number)
    assert [update.values[name].number for name in ("reward", "norm", "huge")] == [-2.5, math.inf, -math.inf]


def test_only_numbers_are_values() -> None:
    assert update_of(done=1, best=True, note="1", more={"a": 1}, list=[1]).values == {}


def test_the_number_of_values_of_a_line_is_bounded() -> None:
    values = update_of(**{f"v{index}": index for index in range(MOST_NAMES + 5)}).values
    assert list(values) == [f"v{index}" for index in range(MOST_NAMES)]


@given(st.dictionaries(NAMES, NUMBERS, max_size=40))
def test_names_of_values_are_safe_labels(fields: dict[str, float]) -> None:
    update = parse_update(line(**fields), 0)
    names = set(update.values) if update is not None else set()
    assert names <= {safe_label(name) for name in fields}
    assert all(name and safe_label(name) == name for name in names)


@given(st.binary(max_size=200) | st.dictionaries(NAMES, JSON).map(lambda fields: json.dumps(fields).encode()))
def test_no_line_raises_an_error(record: bytes) -> None:
    update = parse_update(record, 3)
    if update is not None and update.position is not None:
        assert 0 <= update.position.done < 10**18
        assert update.position.unit in UNITS


# -- parts of the file --------------------------------------------------------------------------


def test_findings_of_several_lines_are_in_order_with_their_offsets() -> None:
    first, last = line(done=1, loss=3), line(done=2, loss=2.5, phase="loading")
    text = first + b"\n\n" + b"half {\n" + last + b"\r\n"
    place = 100 + text.index(last)
    assert parse_updates(text, 100) == ProgressUpdates(
        positions=[LogPosition("progress_file", "items", 100, 1), LogPosition("progress_file", "items", place, 2)],
        values={"loss": {None: LogValue(2.5, place)}},
        marks=[ActivityMark("loading", True, place)],
        records=3,
        invalid=1,
        phase="loading",
    )
    assert isinstance(parse_updates(b"", 0), LogFindings)


def test_values_of_several_ranks_are_kept_apart() -> None:
    text = b"\n".join(line(rank=rank, done=rank, loss=rank) for rank in (0, 1))
    assert {rank: value.number for rank, value in parse_updates(text, 0).values["loss"].items()} == {0: 0.0, 1: 1.0}


def test_value_names_beyond_the_limit_of_a_worker_are_left_out() -> None:
    known = [f"old{index}" for index in range(MOST_NAMES - 1)]
    found = parse_updates(line(old3=1) + b"\n" + line(new=1, newer=2) + b"\n" + line(new=5), 0, known)
    assert set(found.values) == {"old3", "new"}
    assert found.values["new"][None].number == 5


def phases(*fields: str | None, before: str | None = None) -> tuple[list[tuple[str, bool]], str | None]:
    """The marks (name, whether it begins) of lines with these phases, and the phase after them."""
    found = parse_updates(b"\n".join(line(done=1, phase=phase) for phase in fields), 0, phase=before)
    return [(mark.name, mark.begins) for mark in found.marks], found.phase


def test_only_a_change_of_the_phase_is_a_mark() -> None:
    fields = ("loading", "loading", None, "training", "training", "evaluating", "Evaluating", "checkpointing", "step 7")
    marks = [
        *(("loading", True), ("loading", False), ("evaluating", True), ("evaluating", False)),
        *(("checkpointing", True), ("checkpointing", False)),
    ]
    assert phases(*fields) == (marks, None)


def test_a_phase_lasts_from_poll_to_poll() -> None:
    assert phases("evaluating", before="evaluating") == ([], "evaluating")
    assert phases(None, before="evaluating") == ([], "evaluating")
    assert phases("", before="evaluating") == ([("evaluating", False)], None)
    assert phases("loading", before="evaluating") == ([("evaluating", False), ("loading", True)], "loading")


def long_text(*records: bytes, at: int) -> bytes:
    """A text longer than what is read whole, with these records after `at` others."""
    filler = [line(done=0, step=index) for index in range(at)]
    rest = line(done=1) + b"\n"
    head = b"\n".join((*filler, *records, b""))
    return head + rest * (ALL_RECORDS_BYTES // len(rest) + 1)


def test_only_the_end_and_the_last_resume_of_a_long_text_count() -> None:
    resumes = (line(done=50, resumed=True), line(done=70, total=90, resumed=True), line(done=80, resumed=False))
    text = long_text(*resumes, at=3)
    found = parse_updates(text, 1000)
    place = 1000 + text.index(resumes[1])
    assert found.positions[0] == LogPosition("progress_file", "items", place, 70, 90, resumed=True)
    assert 0 < (found.records - 1) * len(line(done=1) + b"\n") <= END_BYTES
    assert all(text[at.offset - 1000 :][:11] == b'{"done": 1}' for at in found.positions[1:])
    assert found.invalid == 0


def test_a_long_text_that_is_one_record_is_one_unusable_record_at_most() -> None:
    found = parse_updates(b"x" * (ALL_RECORDS_BYTES + 1), 0)
    assert (found.positions, found.records - found.invalid) == ([], 0)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20), st.sampled_from([b"\n", b"\r\n", b"\r", b"\n\n"]))
def test_a_text_gives_the_same_findings_whole_and_in_parts(counts: list[int], end: bytes) -> None:
    records = [line(done=count, loss=count) for count in counts]
    text = b"".join(record + end for record in records)
    cut = sum(len(record + end) for record in records[: len(records) // 2])
    whole, first, second = parse_updates(text, 5), parse_updates(text[:cut], 5), parse_updates(text[cut:], 5 + cut)
    assert whole.positions == first.positions + second.positions
    assert whole.values == {**first.values, **second.values}
    assert [found.done for found in whole.positions] == counts
