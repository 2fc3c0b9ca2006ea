"""Items per second lately."""

from dataclasses import dataclass

WINDOW_S = 60.0
WINDOW_LINES = 10


@dataclass(slots=True)
class Throughput:
    """The rate over the last one or two minutes of work, or the last ten lines where those take longer."""

    seconds: float = 0.0
    items: float = 0.0
    lines: int = 0
    before_seconds: float = 0.0
    """The same of the window before."""
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
