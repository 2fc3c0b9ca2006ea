"""One answer of a check before the launch."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "error", "not checked"]


@dataclass(frozen=True)
class CheckFinding:
    """What was looked at, where, what was found, and the cure; or why it could not be looked at."""

    code: str
    status: Status
    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"
