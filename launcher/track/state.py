"""The state file of a tracking run: what is known of its jobs, and what has been reported."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from exporter.contract.records import Record
from exporter.contract.user_state import make_private_folder, user_state_folder
from exporter.slurm.tracking import TrackedJob
from launcher.errors import LauncherError
from launcher.report.state import EXIT_STATUS

FIRST_STATES = ("PENDING", "RUNNING", "COMPLETED", "FAILED")  # in counts, before all others


class TrackState(Record):
    """Content of the state file."""

    SCHEMA = 1

    words: tuple[str, ...] = ()  # names and ids on the command line
    user: str
    cluster: str | None = None  # None for the cluster of this machine
    started: float
    updated: float
    polls: int = 0
    jobs: Mapping[str, TrackedJob]  # by job id
    complete: bool = False
    summary: Mapping[str, int]  # jobs by state
    exit_status: int = EXIT_STATUS["RUNNING"]

    @property
    def is_over(self) -> bool:
        """Whether each job has ended, was given up, or can never start."""
        return all(map(_is_over, self.jobs.values()))


def count_states(jobs: Iterable[TrackedJob]) -> dict[str, int]:
    """Number of jobs in each state, in the order of a summary."""
    counts = Counter(job.state for job in jobs)
    order = [*(state for state in FIRST_STATES if state in counts), *sorted(counts.keys() - {*FIRST_STATES})]
    return {state: counts[state] for state in order}


def exit_status_of(jobs: Iterable[TrackedJob]) -> int:
    """0 if all jobs completed, 10 while some have not ended, else that of the first one that ended in another way."""
    jobs = sorted(jobs, key=lambda job: job.ended or float("inf"))
    if not all(map(_is_over, jobs)):
        return EXIT_STATUS["RUNNING"]
    states = ["FAILED" if job.can_never_start else job.state for job in jobs if job.state != "COMPLETED"]
    # the deadline is a limit of time, too
    return next((EXIT_STATUS.get(state, EXIT_STATUS["TIMEOUT"]) for state in states), 0)


def _is_over(job: TrackedJob) -> bool:
    return job.is_over or job.can_never_start


def find_state_files(key: Sequence[str | None], given: Path | None, environ: Mapping[str, str]) -> tuple[Path, Path]:
    """The state file, and the lock that keeps a second process from it.

    ``given`` is the user's, else it is one for the ``key`` in the user's state directory.
    """
    state_folder = user_state_folder(environ)
    if state_folder is None:
        raise LauncherError("HOME is not set, so there is no place for the states; set it")
    folder = Path(state_folder, "track")
    make_private_folder(folder)
    text = repr(key) if given is None else str(given.absolute())
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return given or folder / f"{digest}.json", folder / f"{digest}.lock"


def read_state(path: Path, words: Sequence[str], user: str) -> TrackState | None:
    """What an earlier run with these words has left; None without one. Raises LauncherError and RecordError."""
    state = TrackState.read(path)
    if state is not None and (state.words, state.user) != (tuple(words), user):
        other = " ".join(state.words) or f"all jobs of {state.user}"
        raise LauncherError(f"{path} has the states of another run ({other}); give another --state-file")
    return state
