"""Lasting changes of speed."""

import math
from dataclasses import field
from itertools import accumulate
from typing import NamedTuple

from exporter.contract.lazy_dataclass import dataclass
from exporter.progress.eta.blocks import WorkBlock

LEAST_SD, MOST_SD = 0.03, 1.5  # bounds of the standard deviation of the logarithm of a block's time per item
BLOCKS_BEFORE_TEST = 6  # blocks needed to know a speed before testing for a change
SLACK = 0.6
THRESHOLD = 10.0  # of the two-sided cumulative sum (Page's test), in standard deviations
MOST_DEVIATION = 4.0
LEAST_BLOCKS = 3
LEAST_CHANGE = 0.06  # smaller changes (of the logarithm) are not a new speed
MOST_PAST_SPEEDS = 6
MOST_LATEST_BLOCKS = 32


@dataclass(slots=True)
class Speed:
    """Work at one speed: time per item, and the variation of its logarithm between blocks."""

    seconds: float = 0.0
    items: float = 0.0
    blocks: int = 0
    log_sum: float = 0.0
    log_squares: float = 0.0

    def add(self, block: WorkBlock, log_seconds_per_item: float) -> None:
        """Add a block of this speed."""
        self.seconds += block.seconds
        self.items += block.items
        self.blocks += 1
        self.log_sum += log_seconds_per_item
        self.log_squares += log_seconds_per_item * log_seconds_per_item

    @property
    def seconds_per_item(self) -> float:
        """Seconds per item; 0 before the first block."""
        return self.seconds / self.items if self.items else 0.0

    @property
    def mean(self) -> float:
        """Mean logarithm of a block's seconds per item."""
        return self.log_sum / self.blocks

    @property
    def sd(self) -> float:
        """Standard deviation of that logarithm, within bounds."""
        if self.blocks < 2:
            return LEAST_SD
        variance = (self.log_squares - self.log_sum * self.log_sum / self.blocks) / (self.blocks - 1)
        return min(MOST_SD, max(LEAST_SD, math.sqrt(max(0.0, variance))))

    def without(self, part: "Speed") -> "Speed":
        """This speed without a part of it."""
        return Speed(
            self.seconds - part.seconds,
            self.items - part.items,
            self.blocks - part.blocks,
            self.log_sum - part.log_sum,
            self.log_squares - part.log_squares,
        )


class PastSpeed(NamedTuple):
    seconds_per_item: float
    seconds: float
    blocks: int
    items: float


@dataclass(slots=True)
class SpeedChanges:
    """The current speed and earlier ones."""

    speed: Speed = field(default_factory=Speed)
    past: list[PastSpeed] = field(default_factory=list)
    # Cumulative sum towards slower, with the work since it was 0 in `since_slower`; `faster` likewise.
    slower_sum: float = 0.0
    faster_sum: float = 0.0
    since_slower: Speed = field(default_factory=Speed)
    since_faster: Speed = field(default_factory=Speed)
    latest: list[WorkBlock] = field(default_factory=list)  # latest blocks, which contain the start of a change

    def restart(self, blocks: list[WorkBlock]) -> None:
        """Restart the current speed from these blocks."""
        self.speed = Speed()
        self._reset_sums()
        for block in blocks:
            self.speed.add(block, math.log(block.seconds / block.items))

    def _reset_sums(self) -> None:
        self.slower_sum = self.faster_sum = 0.0
        self.since_slower, self.since_faster = Speed(), Speed()

    def add(self, block: WorkBlock) -> bool:
        """Add a block; whether it reveals a lasting change."""
        log_pace = math.log(block.seconds / block.items)
        speed = self.speed
        if speed.blocks < BLOCKS_BEFORE_TEST:
            speed.add(block, log_pace)
            return False
        z = (log_pace - speed.mean) / speed.sd
        z = min(MOST_DEVIATION, max(-MOST_DEVIATION, z))
        speed.add(block, log_pace)
        self.latest.append(block)
        if len(self.latest) > MOST_LATEST_BLOCKS:
            del self.latest[0]
        self.slower_sum = max(0.0, self.slower_sum + z - SLACK)
        self.faster_sum = max(0.0, self.faster_sum - z - SLACK)
        if self.slower_sum:
            self.since_slower.add(block, log_pace)
        elif self.since_slower.blocks:
            self.since_slower = Speed()
        if self.faster_sum:
            self.since_faster.add(block, log_pace)
        elif self.since_faster.blocks:
            self.since_faster = Speed()
        if self.slower_sum > THRESHOLD and self._accept_new_speed(self.since_slower):
            return True
        return self.faster_sum > THRESHOLD and self._accept_new_speed(self.since_faster)

    def _accept_new_speed(self, new: Speed) -> bool:
        """Whether the work since then is a new speed, which then becomes the current one."""
        old = self.speed.without(new)
        if new.blocks < LEAST_BLOCKS or old.blocks < 1 or not (old.seconds_per_item > 0 and new.seconds_per_item > 0):
            return False
        if abs(math.log(new.seconds_per_item / old.seconds_per_item)) <= LEAST_CHANGE:
            return False
        if new.blocks <= len(self.latest):
            new = self._without_old_blocks(old, new.blocks)
            old = self.speed.without(new)
        self.past = [
            *self.past[1 - MOST_PAST_SPEEDS :],
            PastSpeed(old.seconds_per_item, old.seconds, old.blocks, old.items),
        ]
        self.speed = new
        self._reset_sums()
        return True

    def _without_old_blocks(self, old: Speed, blocks: int) -> Speed:
        """The new speed without blocks of the old one, since the sum may have started to rise by chance.

        From the end backwards, it takes blocks that are nearer to the newest ones than to the old speed.
        """
        newest = self.latest[-LEAST_BLOCKS:]
        middle = (old.mean + sum(math.log(seconds / items) for seconds, items in newest) / len(newest)) / 2
        sign = 1.0 if middle > old.mean else -1.0
        total, most, begin = 0.0, 0.0, LEAST_BLOCKS
        for count, (seconds, items) in enumerate(reversed(self.latest[-blocks:]), start=1):
            total += sign * (math.log(seconds / items) - middle)
            if total > most and count >= LEAST_BLOCKS:
                most, begin = total, count
        new = Speed()
        for block in self.latest[-begin:]:
            new.add(block, math.log(block.seconds / block.items))
        return new

    def starts(self, present: float) -> list[float]:
        """Counts at which the known speeds but the first began; the present one at ``present``."""
        if not self.past:
            return []
        return list(accumulate((-past.items for past in self.past[:0:-1]), initial=present))[::-1]

    def fastest_past_speed(self, work_seconds: float) -> PastSpeed | None:
        """The fastest earlier speed that lasted for 8 blocks and 2 % of all work; None without one."""
        fastest = None
        for past in self.past:
            lasting = past.blocks >= 8 and past.seconds > 0.02 * work_seconds
            if lasting and (fastest is None or past.seconds_per_item < fastest.seconds_per_item):
                fastest = past
        return fastest

    def slowdown_ratio(self, work_seconds: float) -> float | None:
        """Current seconds per item relative to the fastest earlier speed; None without an earlier one."""
        before = self.fastest_past_speed(work_seconds)
        return (
            None
            if before is None or not self.speed.seconds_per_item
            else self.speed.seconds_per_item / before.seconds_per_item
        )
