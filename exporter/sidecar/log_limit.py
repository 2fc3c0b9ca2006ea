"""Limit of the sidecar's own log, which lies in the run directory of the job."""

import logging

MINUTE_S = 60.0
MOST_A_MINUTE = 30  # lines of one kind; a fault of each collector is logged when it begins and when it ends
FROM_CLIENTS = ("gpujob.web", "aiohttp", "asyncio")  # loggers whose lines clients can cause: one a minute of a kind
MOST_KINDS = 256  # in a minute; further lines are dropped


class LogLimit(logging.Filter):
    """Passes a few lines of each kind a minute; the first one after that says how many were left out.

    A kind is the text of a line before its values are filled in.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[tuple[str, str], tuple[float, int]] = {}  # start of the minute, lines since then

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.name, str(record.msg).partition("\n")[0][:80]
        if kind not in self._counts and len(self._counts) >= MOST_KINDS:
            recent = {key: one for key, one in self._counts.items() if record.created - one[0] < MINUTE_S}
            if len(recent) >= MOST_KINDS:
                return False
            self._counts = recent
        most = 1 if record.name.startswith(FROM_CLIENTS) else MOST_A_MINUTE
        begun, lines = self._counts.get(kind, (0.0, 0))
        if not 0.0 <= record.created - begun < MINUTE_S:
            if lines > most:
                record.msg, record.args = f"{record.getMessage()} ({lines - most} more of this kind before)", ()
            begun, lines = record.created, 0
        self._counts[kind] = begun, lines + 1
        return lines < most
