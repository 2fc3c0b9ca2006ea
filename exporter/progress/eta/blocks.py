"""Blocks of lines, which limit the cost of long logs, and the warm-up at their start."""

import statistics
from dataclasses import field
from typing import NamedTuple

from exporter.contract.lazy_dataclass import dataclass

# A block closes when it has this part of all work, so their number grows with the logarithm of the run.
BLOCK_SHARE_DIVISOR = 300
SINGLE_LINES = 12  # the first lines are separate blocks
SAME_TIME_S = 1e-6  # closer lines came at the same time
WARM_UP_BLOCKS = 16  # blocks that may contain the warm-up
WARM_UP_FACTOR = 1.4  # first blocks this much slower than later ones are warm-up


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
    count: int = 0  # closed blocks
    open_seconds: float = 0.0
    open_items: float = 0.0
    moving_mean: float = 0.0  # seconds per item, weighted towards recent blocks
    first_blocks: list[WorkBlock] = field(default_factory=list)  # the first blocks
    warm_up_count: int = 0  # how many of them are warm-up
    warm_up_work: WorkBlock = NO_WORK  # the warm-up as one block

    def add(self, seconds: float, items: float) -> WorkBlock | None:
        """Add work; return the block that it completes, or None. Lines of the same time stay together."""
        self.seconds += seconds
        self.items += items
        self.open_seconds += seconds
        self.open_items += items
        if self.count < SINGLE_LINES or self.open_seconds * BLOCK_SHARE_DIVISOR >= self.seconds:
            return self.close()
        return None

    def close(self) -> WorkBlock | None:
        """Close the open block and return it; None if it has no time."""
        if self.open_seconds < SAME_TIME_S:
            return None
        block = WorkBlock(self.open_seconds, self.open_items)
        self.open_seconds = self.open_items = 0.0
        self.count += 1
        self.moving_mean += max(0.1, 1 / self.count) * (block.seconds / block.items - self.moving_mean)
        if len(self.first_blocks) < WARM_UP_BLOCKS:
            self.first_blocks.append(block)
        return block

    def update_warm_up(self) -> list[WorkBlock] | None:
        """The blocks after a newly found or longer warm-up, else None."""
        if not 3 <= self.count <= WARM_UP_BLOCKS:
            return None
        found = count_warmup_blocks(self.first_blocks)
        if found <= self.warm_up_count:
            return None
        self.warm_up_count = found
        slow = self.first_blocks[:found]
        self.warm_up_work = WorkBlock(sum(block.seconds for block in slow), sum(block.items for block in slow))
        return self.first_blocks[found:]


def count_warmup_blocks(blocks: list[WorkBlock]) -> int:
    """Number of first blocks that are clearly slower than the latest ones (compilation, cold caches)."""
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
    """Rate over the last one or two minutes of work, or the last ten lines if those took longer.

    It does not reach back to before a lasting change of speed.
    """

    seconds: float = 0.0
    items: float = 0.0
    lines: int = 0
    previous_seconds: float = 0.0  # the previous window
    previous_items: float = 0.0

    def add(self, seconds: float, items: float) -> None:
        """Add work between two lines."""
        if self.seconds >= WINDOW_S and self.lines >= WINDOW_LINES:
            self.previous_seconds, self.previous_items = self.seconds, self.items
            self.seconds, self.items, self.lines = 0.0, 0.0, 0
        self.seconds += seconds
        self.items += items
        self.lines += 1

    def restart(self, seconds: float, items: float) -> None:
        """Count only work at a new speed, of which there was this much."""
        self.seconds, self.items, self.lines = seconds, items, 0
        self.previous_seconds = self.previous_items = 0.0

    @property
    def rate(self) -> float | None:
        """Items per second of work; None before any."""
        seconds = self.seconds + self.previous_seconds
        return (self.items + self.previous_items) / seconds if seconds > 0 else None
