"""``stack.json`` of `gpujob stack`: the user's own Prometheus and Alertmanager, as other commands need them."""

import os
from collections.abc import Mapping
from pathlib import Path

from exporter.contract.records import Record
from launcher.rundir.job_records import ProcessRecord

STACK_FILE = "stack.json"
STACK_VARIABLE = "GPUJOB_STACK_DIR"
TARGETS_DIR = "targets"  # where jobs publish their targets, unless the cluster file names a directory


class StackProgram(ProcessRecord):
    """A program of the stack that was started."""

    digest: str = ""  # of its command line and of the files that it reads at its start alone


class StackRecord(Record):
    """The stack: what is kept over its restarts, and what runs."""

    SCHEMA = 1
    token: str  # secret part of the address
    password: str  # with which the gate asks Prometheus and Alertmanager
    password_hash: str
    ports: Mapping[str, int]
    programs: Mapping[str, StackProgram] = {}  # empty once it is down
    targets: str = ""  # target directory that Prometheus reads
    job: str | None = None  # Slurm job in which it runs

    @property
    def url(self) -> str:
        """Address of Prometheus, with a slash at its end."""
        return f"http://127.0.0.1:{self.ports['gate']}/{self.token}/"


def stack_folder(environ: Mapping[str, str]) -> Path | None:
    """The folder of the stack: that of GPUJOB_STACK_DIR, else below the user's data (XDG Base Directory)."""
    if named := environ.get(STACK_VARIABLE):
        return Path(named).absolute()
    if os.path.isabs(environ.get("XDG_DATA_HOME", "")):
        return Path(environ["XDG_DATA_HOME"], "gpujob", "stack")
    home = environ.get("HOME", "")
    return Path(home, ".local", "share", "gpujob", "stack") if os.path.isabs(home) else None


def read_own_stack(environ: Mapping[str, str]) -> StackRecord | None:
    """The user's stack while it is up, as far as its file says; None without one."""
    folder = stack_folder(environ)
    record = None if folder is None else StackRecord.read_valid(folder / STACK_FILE)
    return record if record is not None and record.programs else None
