"""Load of the controller and its clock, from the text of sdiag."""

import re
from typing import NamedTuple

_TIME = re.compile(r"^sdiag output at .*\((\d+)\)$", re.MULTILINE)
_NUMBER = re.compile(r"^(Server thread count|Agent queue size|DBD Agent queue size): +(\d+)$", re.MULTILINE)
_BY_USER = "Remote Procedure Call statistics by user"
_RPCS = re.compile(r"^\t(\S+) +\( *(\d+)\) count:(\d+) +ave_time:\d+ +total_time:(\d+)$", re.MULTILINE)


class RpcUse(NamedTuple):
    """Remote procedure calls that the controller has answered since its statistics began."""

    calls: int
    seconds: float


class Diagnostics(NamedTuple):
    """What the controller says of its load. None is not told."""

    time: float  # by its clock, in whole seconds
    threads: int | None
    agent_queue: int | None  # messages that wait to be sent to nodes
    accounting_queue: int | None  # messages that wait to be written by slurmdbd
    rpcs: RpcUse
    own_rpcs: RpcUse  # of the user who asked


def parse_diagnostics(text: str, own_uid: int) -> Diagnostics | None:
    """Parse ``sdiag``; None if it has no time."""
    moment = _TIME.search(text)
    if moment is None:
        return None
    numbers = {name: int(number) for name, number in _NUMBER.findall(text)}
    by_user = [
        (int(uid), int(count), int(spent_us)) for _, uid, count, spent_us in _RPCS.findall(text.partition(_BY_USER)[2])
    ]
    return Diagnostics(
        float(moment[1]),
        numbers.get("Server thread count"),
        numbers.get("Agent queue size"),
        numbers.get("DBD Agent queue size"),
        _sum(by_user, None),
        _sum(by_user, own_uid),
    )


def _sum(by_user: list[tuple[int, int, int]], wanted: int | None) -> RpcUse:
    own = [(count, spent_us) for uid, count, spent_us in by_user if wanted in (None, uid)]
    return RpcUse(sum(count for count, _ in own), sum(spent_us for _, spent_us in own) / 1e6)
