"""One question to accounting for all who follow jobs of a user.

Each adds the ids that it wants to a file of the user's cache folder. Whoever may ask next asks for those of all, and
the others find their answers in the file: any number of followers make as many commands as one.
"""

import contextlib
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
from exporter.slurm.commands_reader import MOST_ASKED, SlurmReader
from exporter.slurm.sources.look_file_reader import OWNER_ONLY, cluster_name, look_path, own_folder
from exporter.slurm.states import array_of

LAST_S = 5.0  # between two questions of those who wait for nothing else
KEPT_S = 600.0  # for how long an answer is there for those who look each few minutes, and an id waits without them


class Wanted(NamedTuple):
    """What somebody wants to know of a job or an array."""

    at: float  # an answer to an earlier question is of no use
    since: float  # search from here on


class Answers(Record):
    """What accounting has said, and what it is to be asked."""

    SCHEMA = 1

    asked: float = 0.0  # when it was last asked
    used_until: float = 0.0  # of the allowance
    wanted: Mapping[str, Wanted] = NOTHING
    answered: Mapping[str, float] = NOTHING  # when the question about an id began
    rows: tuple[Attempt, ...] = ()


class SharedAccounting:
    """Accounting as one of those who follow jobs sees it; ``each_s`` is from question to question in the long run."""

    def __init__(
        self,
        slurm: SlurmReader,
        environ: Mapping[str, str],
        each_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._slurm, self._each_s, self._clock = slurm, each_s, clock
        folder, names = own_folder(environ), (slurm.user, slurm.cluster, cluster_name(environ))
        self._path: Path | None = None if folder is None else look_path(folder, Answers, *names)
        self._own = Answers()  # of this process, without a folder or on a full disk

    def next_at(self, *, is_last: bool) -> float:
        """When accounting may be asked; ``is_last``: for somebody who waits for nothing else."""
        return self._next_at(self._read(), is_last)

    def _next_at(self, known: Answers, is_last: bool) -> float:
        return known.asked + LAST_S if is_last else Extra(self._each_s, known.used_until).next_at

    def read(self, wanted: Mapping[str, Wanted], *, is_last: bool) -> tuple[frozenset[str], tuple[Attempt, ...]]:
        """Which of these ids have an answer, and all attempts of these.

        Accounting is asked if that is allowed now; ids without an answer are asked about later, with those of others.
        Raises SlurmUnansweredError.
        """
        with contextlib.ExitStack() as stack:
            if self._path is not None:
                try:
                    if (descriptor := lock_file(self._path.with_suffix(".lock"))) >= 0:
                        stack.callback(os.close, descriptor)
                except FileLockedError:  # another one asks
                    return frozenset(), ()
                except OSError:  # a full disk, for example
                    pass
            known, now = self._read(), self._clock()
            left = {job_id: each for job_id, each in wanted.items() if known.answered.get(job_id, -1.0) < each.at}
            waiting = {job_id: each for job_id, each in known.wanted.items() if now - each.at < KEPT_S} | left
            if left and now >= self._next_at(known, is_last):
                known = self._ask(known.replace(wanted=waiting), now)
                self._write(known)
            elif left and waiting != known.wanted:
                known = known.replace(wanted=waiting)
                self._write(known)
        found = frozenset(job_id for job_id, each in wanted.items() if known.answered.get(job_id, -1.0) >= each.at)
        return found, _rows_of(known, found)

    def _ask(self, known: Answers, now: float) -> Answers:
        """Ask about those who have waited longest. Raises SlurmUnansweredError, and the ids then wait on."""
        asked = sorted(known.wanted, key=lambda job_id: known.wanted[job_id].at)[:MOST_ASKED]
        used = Extra(self._each_s, known.used_until).after(now).used_until
        known = known.replace(asked=now, used_until=used)
        self._write(known)  # also if there is no answer
        rows = self._slurm.accounting(asked, max(0.0, min(known.wanted[job_id].since for job_id in asked)))
        kept = {job_id: at for job_id, at in known.answered.items() if now - at < KEPT_S and job_id not in asked}
        return known.replace(
            wanted={job_id: each for job_id, each in known.wanted.items() if job_id not in asked},
            answered={**kept, **dict.fromkeys(asked, now)},
            rows=(*_rows_of(known, kept), *rows),
        )

    def _read(self) -> Answers:
        found = None if self._path is None else Answers.read_valid(self._path)
        # one of the future was written by another clock
        is_usable = found is not None and self._own.asked <= found.asked <= self._clock()
        return found if found is not None and is_usable else self._own

    def _write(self, known: Answers) -> None:
        self._own = known
        if self._path is not None:
            with contextlib.suppress(OSError):
                body = {**known.replace(rows=()).to_json(), "rows": known.rows}
                run_files.write_json(self._path, body, durable=False, mode=OWNER_ONLY, default=to_json)


def _rows_of(known: Answers, job_ids: Collection[str]) -> tuple[Attempt, ...]:
    return tuple(attempt for attempt in known.rows if array_of(attempt.job_id) in job_ids)
