"""Dataclasses that are compiled when first used behave like those of the standard library."""

import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import field
from typing import Any, ClassVar

import pytest

from exporter.contract.lazy_dataclass import dataclass as lazy

VARIANTS: tuple[dict[str, bool], ...] = (
    {},
    {"eq": False},
    {"slots": True},
    {"frozen": True},
    {"frozen": True, "slots": True},
)


def record_class(decorator: Callable[..., Any], **options: bool) -> Any:
    """A dataclass with fields of every kind, and one derived from it."""

    class Base:
        """A record."""

        KIND: ClassVar[str] = "record"
        first: int
        second: str = "two"
        third: list[int] = field(default_factory=list, compare=False)
        fourth: float = field(default=0.5, init=False)
        fifth: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

        def __post_init__(self) -> None:
            self.third.append(self.first)

        @property
        def double(self) -> int:
            return 2 * self.first

    base = decorator(**options)(Base)

    class Derived(base):  # type: ignore[misc, valid-type]
        """A record with more."""

        sixth: tuple[int, ...] = ()

    return base, decorator(**options)(Derived)


def outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except (TypeError, AttributeError) as error:
        return type(error)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_it_behaves_like_one_of_the_standard_library(options: dict[str, bool]) -> None:
    def behaviour(decorator: Callable[..., Any]) -> list[object]:
        base, derived = record_class(decorator, **options)
        one, same, other, more = base(1), base(1, third=[3]), base(second="b", first=2), derived(1, sixth=(4,))
        return [
            *(repr(record) for record in (one, other, more)),
            [one == same, one != other, one == more, more == derived(1, sixth=(4,)), one == 1],
            outcome(lambda: hash(one) == hash(same) if options.get("eq", True) else hash(one) != hash(same)),
            [dataclasses.asdict(record) for record in (one, more)],
            repr(dataclasses.replace(more, first=7)),
            [outcome(base), outcome(lambda: base(1, unknown=2)), outcome(lambda: base(1, fourth=2.0))],
            [outcome(lambda: setattr(one, "second", "new")), outcome(lambda: delattr(more, "second"))],
            [one.second, outcome(lambda: setattr(one, "unknown", 1)) is None, one.double, one.__match_args__],
            [one.third is base(1).third, one.fifth is base(1).fifth],
        ]

    assert behaviour(lazy) == behaviour(dataclasses.dataclass)


@lazy(frozen=True, slots=True)
class Slotted:
    """A record that another process sends."""

    first: int
    second: str = "two"


def test_a_frozen_record_can_be_sent_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(Slotted(1, "b"))) == Slotted(1, "b")  # noqa: S301
