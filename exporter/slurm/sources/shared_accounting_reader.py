"""One question to accounting for all who follow jobs of a user.

Each adds the ids that it wants to a file of the user's cache folder. Whoever may ask next asks for those of all, and
the others find their answers in the file: any number of followers make as many commands as one.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from exporter.contract import run_files
from exporter.contract.file_locks import FileLockedError, lock_file
from exporter.contract.records import NOTHING, Record, to_json
from exporter.slurm.accounting import Attempt
from exporter.slurm.allowance import Extra
from exporter.slurm.commands_reader import MOST_ASKED, SlurmReader, SlurmUnansweredError
from exporter.slurm.sources.cached_answers_reader import OWNER_ONLY, answer_path, cluster_name, own_folder
from exporter.slurm.states import array_of

LAST_S = 5.0  # between two questions of those who wait for nothing else
LAST_AHEAD = 4  # questions of the long run that they may take in advance
KEPT_S = 600.0  # for how long an answer is there for those who ask each few minutes, and an id waits without them
MOST_SKEW_S = 5.0  # of the clocks of two hosts


class AccountingRequest(NamedTuple):
    """One request about a job or array, or its answer."""

    at: float  # an answer to an earlier question is of no use
    since: float  # search from here on; 0 is the whole history


class AccountingReply(NamedTuple):
    """Answers of accounting about the requested ids."""

    answered: Mapping[str, float] = NOTHING  # when the question about an id began
    attempts: tuple[Attempt, ...] = ()


class SharedAccountingFile(Record):
    """What accounting has said, and what it is to be asked."""

    SCHEMA = 1

    asked: float = 0.0  # when it was last asked
    problem: str | None = None  # why it did not answer then
    used_until: float = 0.0  # of the allowance
    wanted: Mapping[str, AccountingRequest] = NOTHING
    answered: Mapping[str, AccountingRequest] = NOTHING
    rows: tuple[Attempt, ...] = ()


class SharedAccounting:
    """Accounting for one follower of jobs; ``each_s`` is the mean time between queries."""

    def __init__(
        self,
        slurm: SlurmReader,
        environ: Mapping[str, str],
        each_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._slurm, self._each_s, self._clock = slurm, each_s, clock
        folder, names = own_folder(environ), (slurm.user, slurm.cluster, cluster_name(environ))
        self._path: Path | None = None if folder is None else answer_path(folder, SharedAccountingFile, *names)
        self._own = SharedAccountingFile()  # of this process, without a folder or on a full disk
        self._failed_at = 0.0  # the last failure that was told here

    def next_at(self, *, is_last: bool) -> float:
        """When accounting may be asked; ``is_last``: for somebody who waits for nothing else."""
        return self._next_at(self._read(), is_last)

    def _next_at(self, known: SharedAccountingFile, is_last: bool) -> float:
        """Time of the next query. A slower or busier process delays this one by at most its own ``each_s``."""
        allowed_at = Extra(self._each_s, known.used_until).next_at
        if is_last:
            allowed_at = max(known.asked + LAST_S, allowed_at - LAST_AHEAD * self._each_s)
        return min(allowed_at, known.asked + self._each_s)

    def read(self, wanted: Mapping[str, AccountingRequest], *, is_last: bool) -> AccountingReply:
        """What accounting has said of these ids.

        It is asked if that is allowed now; ids without an answer are asked about later, with those of others. Raises
        SlurmUnansweredError, once for each question without an answer, whoever has asked.
        """
        with contextlib.ExitStack() as stack:
            is_locked = False
            if self._path is not None:
                try:
                    if (descriptor := lock_file(self._path.with_suffix(".lock"))) >= 0:
                        stack.callback(os.close, descriptor)
                except FileLockedError:  # another one asks
                    is_locked = True
                except OSError:  # a full disk, for example
                    pass
            known, now = self._read(), self._clock()
            left = {job_id: each for job_id, each in wanted.items() if not _is_answered(known, job_id, each)}
            first_at = min((each.at for each in left.values()), default=math.inf)
            if known.problem is not None and first_at <= known.asked and self._failed_at < known.asked:
                self._failed_at = known.asked
                raise SlurmUnansweredError("sacct", known.problem)
            if left and not is_locked:
                waiting = _merge(known.wanted, left, now - KEPT_S)
                if now >= self._next_at(known, is_last):
                    known = self._ask(known.replace(wanted=waiting), now)
                elif waiting != known.wanted:
                    known = known.replace(wanted=waiting)
                    self._write(known)
        answers = ((job_id, known.answered.get(job_id), each) for job_id, each in wanted.items())
        answered = {job_id: told.at for job_id, told, each in answers if told is not None and told.since <= each.since}
        return AccountingReply(answered, _rows_of(known, answered))

    def _ask(self, known: SharedAccountingFile, now: float) -> SharedAccountingFile:
        """Ask about those who have waited longest. Raises SlurmUnansweredError, and the ids then wait on."""
        by_age = sorted(known.wanted, key=lambda job_id: known.wanted[job_id].at)
        is_endless = not known.wanted[by_age[0]].since  # one such question is enough to search everything for all
        asked = [job_id for job_id in by_age if (not known.wanted[job_id].since) == is_endless][:MOST_ASKED]
        since = min(known.wanted[job_id].since for job_id in asked)
        most_ahead_s = (LAST_AHEAD + 2) * self._each_s
        used = min(Extra(self._each_s, known.used_until).after(now).used_until, now + most_ahead_s)
        known = known.replace(asked=now, used_until=used, problem=None)
        self._write(known)  # nobody else asks meanwhile, also without locks
        try:
            rows = self._slurm.accounting(asked, since)
        except SlurmUnansweredError as error:
            self._failed_at = now
            if not error.is_local:
                self._write(known.replace(problem=str(error).partition(" ")[2]))
            raise
        kept = {key: told for key, told in known.answered.items() if now - told.at < KEPT_S and key not in asked}
        known = known.replace(
            wanted={job_id: each for job_id, each in known.wanted.items() if job_id not in asked},
            answered={**kept, **dict.fromkeys(asked, AccountingRequest(now, since))},
            rows=(*_rows_of(known, kept), *rows),
        )
        self._write(known)
        return known

    def _read(self) -> SharedAccountingFile:
        found = None if self._path is None else SharedAccountingFile.read_valid(self._path)
        # one of the future was written by another clock
        is_usable = found is not None and self._own.asked <= found.asked <= self._clock() + MOST_SKEW_S
        return found if found is not None and is_usable else self._own

    def _write(self, known: SharedAccountingFile) -> None:
        self._own = known
        if self._path is not None:
            with contextlib.suppress(OSError):
                body = {**known.replace(rows=()).to_json(), "rows": known.rows}
                run_files.write_json(self._path, body, durable=False, mode=OWNER_ONLY, default=to_json)


def _is_answered(known: SharedAccountingFile, job_id: str, wanted: AccountingRequest) -> bool:
    told = known.answered.get(job_id)
    return told is not None and told.at >= wanted.at and told.since <= wanted.since


def _merge(
    waiting: Mapping[str, AccountingRequest], more: Mapping[str, AccountingRequest], oldest: float
) -> dict[str, AccountingRequest]:
    """All that wait, without those of somebody who has gone."""
    found = {job_id: each for job_id, each in waiting.items() if each.at > oldest}
    for job_id, each in more.items():
        other = found.get(job_id, each)
        found[job_id] = AccountingRequest(max(each.at, other.at), min(each.since, other.since))
    return found


def _rows_of(known: SharedAccountingFile, job_ids: Collection[str]) -> tuple[Attempt, ...]:
    return tuple(attempt for attempt in known.rows if array_of(attempt.job_id) in job_ids)
