"""Growth per second out of a few readings."""

from collections import deque


class Growth:
    """Growth of a quantity over the last readings.

    None before two readings. A fall (files removed, a counter that starts again) is not growth:
    the readings before it are forgotten.
    """

    def __init__(self, window_s: float = 60.0) -> None:
        self._window_s = window_s
        self._readings: deque[tuple[float, float]] = deque()

    def update(self, t: float, value: float) -> None:
        """A reading at time ``t``."""
        if self._readings and value < self._readings[-1][1]:
            self._readings.clear()
        self._readings.append((t, value))
        while len(self._readings) > 2 and t - self._readings[1][0] >= self._window_s:
            self._readings.popleft()

    def per_second(self) -> float | None:
        """Growth per second from the oldest kept reading to the newest."""
        if len(self._readings) < 2:
            return None
        (t0, v0), (t1, v1) = self._readings[0], self._readings[-1]
        return (v1 - v0) / (t1 - t0) if t1 > t0 else None
