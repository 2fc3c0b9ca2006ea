"""One finding of a preflight check."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "error", "not checked"]


@dataclass(frozen=True)
class CheckFinding:
    """Place, finding and fix of one check, or why it could not run."""

    code: str
    status: Status
    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"
