"""Output and checkpoint directories in use: two running jobs that write the same file names would count, and replace,
each other's files.

Each use is a locked file in the user's state folder, ``outputs/{hash}.lock``, so that it is found from any working
directory and node, and leaves nothing in the directory itself. It ends with its process, however that ends.
"""

import fcntl
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from exporter.contract.file_locks import FileLockedError, lock_file
from exporter.contract.user_state import make_private_folder, user_state_folder
from launcher.errors import LauncherError
from launcher.plan.plan import BENCHMARK, Plan
from launcher.rundir.rundir import user_name

_KEYS = {"output": "paths.output_dir", "checkpoint": "paths.checkpoint_dir"}
_HASH_LENGTH = 16


class OutputInUseError(LauncherError):
    """Another running job writes the same files. The text begins with the key of the job file."""


class OutputLocks:
    """The locks of one job, until they are released or their process ends."""

    def __init__(self) -> None:
        self._held: list[tuple[int, str]] = []

    def acquire(self, plan: Plan, job_id: str, environ: Mapping[str, str]) -> None:
        """Lock what the job writes outside its run directory. Raises OutputInUseError and then holds nothing.

        An earlier attempt counts as the same job. Without a state folder nothing is locked.
        """
        facts = {"job_id": job_id, "job_name": plan.job_name, "user": user_name()}
        for key, directory, pattern, path in _uses(plan, environ):
            try:
                make_private_folder(path.parent)
                descriptor = lock_file(path, facts, shared=plan.shared_output)
            except FileLockedError as error:
                if error.holder.get("job_id") == job_id:
                    continue
                self.release()
                raise OutputInUseError(f"{key}: {_use_text(error, directory, pattern)}") from error
            except OSError:
                continue  # a full or read-only home must not fail the job
            if descriptor >= 0:
                self._held.append((descriptor, str(path)))

    def release(self) -> None:
        """Release all locks, and remove the files that no other job has locked."""
        for descriptor, path in self._held:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            except OSError:
                pass  # shared, or removed by someone else
            os.close(descriptor)
        self._held.clear()


def find_output_in_use(plan: Plan, environ: Mapping[str, str]) -> str | None:
    """Describe the running job that writes the same files; None without one. Nothing stays locked."""
    if not any(os.path.exists(path) for *_, path in _uses(plan, environ)):  # false where a home cannot be searched
        return None
    locks = OutputLocks()
    try:
        locks.acquire(plan, "", environ)
    except OutputInUseError as error:
        return str(error)
    locks.release()
    return None


def _uses(plan: Plan, environ: Mapping[str, str]) -> list[tuple[str, str, str, Path]]:
    """What the job writes outside its run directory: key of the job file, directory, pattern and path of the lock."""
    folder = user_state_folder(environ)
    if folder is None or all(planned.service or planned.stage == BENCHMARK for planned in plan.tasks):
        return []
    uses = []
    for group in plan.manifest.groups:
        if group.name in _KEYS and group.pattern and os.path.isabs(group.directory):
            use = f"{os.path.realpath(group.directory)}\n{group.pattern}".encode("utf-8", "surrogateescape")
            name = f"{hashlib.sha256(use).hexdigest()[:_HASH_LENGTH]}.lock"
            uses.append((_KEYS[group.name], group.directory, group.pattern, Path(folder, "outputs", name)))
    return uses


def _use_text(error: FileLockedError, directory: str, pattern: str) -> str:
    holder = error.holder
    job = (
        f"job {holder['job_id']} ({holder.get('job_name')}) of {holder.get('user')}"
        if holder.get("job_id")
        else "a job"
    )
    return (
        f'{job} writes {pattern} into "{directory}": {error}; wait for its end, choose another directory, '
        "or set `paths.shared_output: true` in both jobs"
    )
