"""How array tasks ended that have left Slurm's queue without a report, by Slurm's accounting."""

import time
from collections.abc import Collection, Mapping

from exporter.slurm.states import array_of
from launcher.steps.slurm_steps import read_final_states

ASK_AGAIN_S = 60.0  # what accounting does not know: it learns of an end some seconds later, or never


class FinalStates:
    """Slurm's final states of the lost tasks of one sweep, each asked for until it is known."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._next_at: dict[str, float] = {}  # when to ask again, monotonic clock

    def read(self, lost: Collection[str], arrays: Mapping[str, tuple[float, str | None]]) -> Mapping[str, str]:
        """The final states of those of these tasks of which accounting has one, by task id.

        ``arrays`` has when each array was submitted, and to which cluster.
        """
        now = time.monotonic()
        self._known = {task: state for task, state in self._known.items() if task in lost}  # others may run again
        due = {task for task in lost if task not in self._known and now >= self._next_at.get(task, now)}
        self._next_at |= dict.fromkeys(due, now + ASK_AGAIN_S)
        wanted = {job_id: arrays[job_id] for job_id in set(map(array_of, due)) if job_id in arrays}
        for cluster in {cluster for _, cluster in wanted.values()}:
            submitted = {job_id: at for job_id, (at, on) in wanted.items() if on == cluster}
            found = read_final_states(submitted, cluster)
            self._known |= {task: found[task] for task in due & found.keys()}
        return self._known
