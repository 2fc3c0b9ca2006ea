"""How many lines of one kind a sidecar logs in a minute."""

import logging

import pytest

from exporter.sidecar.log_limit import MINUTE_S, MOST_A_MINUTE, MOST_KINDS, LogLimit

NOON = 1_700_000_000.0


def passed(limit: LogLimit, text: str, *args: object, name: str = "gpujob.gpus", now: float = NOON) -> str | None:
    """The line as it is logged, or None if it is not."""
    record = logging.LogRecord(name, logging.WARNING, "x.py", 1, text, args, None)
    record.created = now
    return record.getMessage() if limit.filter(record) else None


@pytest.mark.parametrize(
    ("name", "most"), [("gpujob.gpus", MOST_A_MINUTE), ("gpujob.web", 1), ("aiohttp.server", 1), ("asyncio", 1)]
)
def test_a_minute_has_few_lines_of_a_kind_and_the_next_one_has_their_number(name: str, most: int) -> None:
    limit = LogLimit()
    lines = [passed(limit, "peer %s", number, name=name) for number in range(100)]
    assert lines == [*(f"peer {number}" for number in range(most)), *[None] * (100 - most)]
    later = [passed(limit, "peer %s", "again", name=name, now=NOON + MINUTE_S * minute) for minute in (1, 2)]
    assert later == [f"peer again ({100 - most} more of this kind before)", "peer again"]


def test_another_kind_has_lines_of_its_own() -> None:
    limit = LogLimit()
    assert [passed(limit, "a", name="asyncio"), passed(limit, "b", name="asyncio")] == ["a", "b"]
    assert [
        passed(limit, "task failed\nTask-1", name="asyncio"),
        passed(limit, "task failed\nTask-2", name="asyncio"),
    ] == [
        "task failed\nTask-1",
        None,
    ]


def test_a_clock_that_is_set_back_does_not_silence_the_log() -> None:
    limit = LogLimit()
    assert passed(limit, "a", name="asyncio")
    assert passed(limit, "a", name="asyncio", now=NOON - 3600.0)


def test_texts_that_always_differ_are_limited_together() -> None:
    limit = LogLimit()
    lines = [passed(limit, f"odd {number}") for number in range(2 * MOST_KINDS)]
    assert lines.count(None) == MOST_KINDS
    assert passed(limit, "later", now=NOON + MINUTE_S)
