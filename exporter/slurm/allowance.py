"""How many commands may be run besides those at a steady pace."""

import math
from typing import NamedTuple


class Extra(NamedTuple):
    """A rate limit: a burst of two commands, then one each ``each_s``."""

    each_s: float
    used_until: float = -math.inf

    def after(self, now: float) -> "Extra":
        """What is left after one more."""
        return self._replace(used_until=max(self.used_until, now) + self.each_s)

    @property
    def next_at(self) -> float:
        """When the next one may be run."""
        return self.used_until - self.each_s
