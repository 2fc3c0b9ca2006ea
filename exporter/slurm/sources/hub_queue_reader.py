"""The queue as a hub knows it, with its last answer in a file that the commands of a user share."""

import contextlib
import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.file_locks import FileLockedError, lock_file
from exporter.contract.records import Record
from exporter.slurm.commands_reader import SlurmReader
from exporter.slurm.sources.cached_answers_reader import OWNER_ONLY, QueueAnswer, answer_path, own_folder
from exporter.slurm.sources.hub_reader import HubAnswer, HubReply, hub_addresses, read_hub

HUB_READ_S = 10.0  # age at which a hub is asked anew
RECENT_S = 60.0  # age up to which an answer is used while another command asks, or the hub does not answer
HUB_LATE_S = 20.0  # how late the answer of a hub may be after its interval, with its jitter and a slow controller


class HubCopy(Record):
    """The answer of a hub about the queue. The file's time is that of the answer."""

    SCHEMA = 1

    address: str
    answer: HubAnswer


def read_hub_queue(
    slurm: SlurmReader, environ: Mapping[str, str], clock: Callable[[], float], since: float
) -> tuple[QueueAnswer | None, str | None]:
    """The queue as a hub knows it, None without one that fits, and the problem of a hub that the user has named.

    Commands share this answer too: a hub of 10,000 jobs works 100 ms for it.
    """
    addresses = hub_addresses(slurm, environ)
    folder = own_folder(environ) if addresses else None
    cluster = slurm.cluster or environ.get("SLURM_CLUSTERS")
    path = None if folder is None else answer_path(folder, HubCopy, slurm.user, cluster)
    age_s = _age_s(path, clock, since)

    def copy_within(most_s: float) -> QueueAnswer | None:
        return _read_copy(path, addresses, since) if age_s < most_s else None

    if (known := copy_within(HUB_READ_S)) is not None:
        return known, None
    with contextlib.ExitStack() as stack:
        if path is not None:
            try:
                if (descriptor := lock_file(path.with_suffix(".lock"))) >= 0:
                    stack.callback(os.close, descriptor)
            except FileLockedError:  # another command asks: a hub that all ask at once answers none in time
                if (known := copy_within(RECENT_S)) is not None:
                    return known, None
            except OSError:  # a full disk, for example
                pass
        found = read_hub(slurm, environ)
        if found is not None and found.answer is not None:
            if (answer := hub_queue(found.address, found.answer, clock())) is not None:
                _write_copy(path, found, clock())
            return answer, None
        if (known := copy_within(RECENT_S)) is not None:
            return known, None
        return None, None if found is None else found.problem


def _age_s(path: Path | None, clock: Callable[[], float], since: float) -> float:
    """Age of the copy of a hub's answer; infinite if there is none after ``since``."""
    with contextlib.suppress(OSError):
        written = -math.inf if path is None else path.stat().st_mtime
        if written >= since and written <= clock():  # one of the future was written by another clock
            return clock() - written
    return math.inf


def _read_copy(path: Path | None, addresses: Collection[str], since: float) -> QueueAnswer | None:
    """The queue as one of these hubs knew it at ``since`` or later; None without it."""
    copy = None if path is None else HubCopy.read_valid(path)
    if path is None or copy is None or copy.address not in addresses or (copy.answer.as_of or 0.0) < since:
        return None
    try:
        return hub_queue(copy.address, copy.answer, path.stat().st_mtime)
    except OSError:  # it is gone
        return None


def _write_copy(path: Path | None, found: HubReply, now: float) -> None:
    """Write a hub's answer as it came: made anew, that of 10,000 jobs takes 40 ms."""
    address = json.dumps(found.address).encode()
    text = b'{"schema": %d, "address": %b, "answer": %b}\n' % (HubCopy.SCHEMA or 0, address, found.text)
    if path is not None:
        with contextlib.suppress(OSError):
            run_files.replace_file(path, text, durable=False, mode=OWNER_ONLY)
            os.utime(path, (now, now))


def hub_queue(address: str, answer: HubAnswer, now: float) -> QueueAnswer | None:
    """The queue as a hub knows it; None if its answer is old and it reports no problem: it may hang."""
    if answer.as_of is None:
        return None
    is_late = now - answer.as_of > answer.scope.interval_s + HUB_LATE_S
    problem = (
        next((each for each in answer.problems if each.startswith(("squeue ", "slurmrestd "))), None)
        if is_late
        else None
    )
    if is_late and problem is None:
        return None
    cluster, as_of = answer.scope.cluster, answer.as_of
    return QueueAnswer(cluster=cluster, as_of=as_of, tried=now, problem=problem, source=address, rows=answer.rows())
