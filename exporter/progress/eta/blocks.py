"""Lines gathered into blocks, so that a long log costs no more than a short one, and the warm-up at their head."""

import statistics
from dataclasses import dataclass, field
from typing import Any, NamedTuple

BLOCKS_OF_ALL = 300
"""A block is closed when it holds this part of all work so far: their number grows with the logarithm of the run."""
SINGLE_LINES = 12  # the first lines are blocks of their own
LEAST_S = 1e-6  # lines that come closer together came at one moment
WARM_UP_BLOCKS = 16  # blocks among which the warm-up is looked for
WARM_UP_FACTOR = 1.4  # a leading block this much slower than those after it belongs to the warm-up


class WorkBlock(NamedTuple):
    """Work between two lines."""

    seconds: float
    items: float


NO_WORK = WorkBlock(0.0, 0.0)


@dataclass(slots=True)
class WorkBlocks:
    """Work so far, without pauses."""

    seconds: float = 0.0
    items: float = 0.0
    count: int = 0  # blocks that are closed
    open_seconds: float = 0.0
    open_items: float = 0.0
    mean: float = 0.0  # seconds per item, weighted towards the latest blocks
    head: list[WorkBlock] = field(default_factory=list)  # the first blocks
    warm_up: int = 0  # how many of them are warm-up
    cold: WorkBlock = NO_WORK  # the warm-up as one block

    @classmethod
    def restored(cls, state: list[Any]) -> "WorkBlocks":
        """The blocks of which this is the state."""
        *numbers, head, warm_up, cold = state
        blocks = cls(*numbers)
        blocks.head, blocks.warm_up, blocks.cold = [WorkBlock(*block) for block in head], warm_up, WorkBlock(*cold)
        return blocks

    def add(self, seconds: float, items: float) -> WorkBlock | None:
        """The block that this work completes, if it does. Lines of one moment stay together."""
        self.seconds += seconds
        self.items += items
        self.open_seconds += seconds
        self.open_items += items
        if self.count < SINGLE_LINES or self.open_seconds * BLOCKS_OF_ALL >= self.seconds:
            return self.close()
        return None

    def close(self) -> WorkBlock | None:
        """The open block, now closed; None when it holds no time."""
        if self.open_seconds < LEAST_S:
            return None
        block = WorkBlock(self.open_seconds, self.open_items)
        self.open_seconds = self.open_items = 0.0
        self.count += 1
        self.mean += max(0.1, 1 / self.count) * (block.seconds / block.items - self.mean)
        if len(self.head) < WARM_UP_BLOCKS:
            self.head.append(block)
        return block

    def warmed_up(self) -> list[WorkBlock] | None:
        """The blocks behind a warm-up that has just been found or has grown, else None."""
        if not 3 <= self.count <= WARM_UP_BLOCKS:
            return None
        found = count_warmup_blocks(self.head)
        if found <= self.warm_up:
            return None
        self.warm_up = found
        slow = self.head[:found]
        self.cold = WorkBlock(sum(block.seconds for block in slow), sum(block.items for block in slow))
        return self.head[found:]


def count_warmup_blocks(blocks: list[WorkBlock]) -> int:
    """How many of the first blocks are clearly slower per item than the latest ones (compiling, cold caches)."""
    pace = [seconds / items for seconds, items in blocks]
    limit = WARM_UP_FACTOR * statistics.median(pace[-5:])
    slow = 0
    while slow < len(pace) and pace[slow] > limit:
        slow += 1
    return slow


WINDOW_S = 60.0
WINDOW_LINES = 10


@dataclass(slots=True)
class RecentThroughput:
    """The rate over the last one or two minutes of work, or the last ten lines where those take longer."""

    seconds: float = 0.0
    items: float = 0.0
    lines: int = 0
    before_seconds: float = 0.0  # the same of the window before
    before_items: float = 0.0

    def add(self, seconds: float, items: float) -> None:
        """Work between two lines."""
        if self.seconds >= WINDOW_S and self.lines >= WINDOW_LINES:
            self.before_seconds, self.before_items = self.seconds, self.items
            self.seconds, self.items, self.lines = 0.0, 0.0, 0
        self.seconds += seconds
        self.items += items
        self.lines += 1

    @property
    def rate(self) -> float | None:
        """Items per second of work; None before any."""
        seconds = self.seconds + self.before_seconds
        return (self.items + self.before_items) / seconds if seconds > 0 else None
