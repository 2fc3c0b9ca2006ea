"""One finding of a preflight check: ``finding.warning(code, place, message)``."""

from collections.abc import Callable
from typing import Literal

from exporter.contract.lazy_dataclass import dataclass

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


def _of_status(status: Status) -> Callable[[str, str, str], CheckFinding]:
    """Return a function that makes findings of this status from a code, a place and a message."""
    return lambda code, place, message: CheckFinding(code, status, place, message)


ok, warning, error = _of_status("ok"), _of_status("warning"), _of_status("error")
not_checked = _of_status("not checked")
