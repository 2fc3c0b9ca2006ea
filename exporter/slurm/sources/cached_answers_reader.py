"""What Slurm or a hub answered, and the files of the user's cache folder in which commands share it."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from exporter.contract import run_files
from exporter.contract.records import Record, to_json
from exporter.contract.user_state import make_private_folder, user_cache_folder
from exporter.slurm.accounting import Attempt
from exporter.slurm.nodes import NodeRow
from exporter.slurm.queue import QueueRow
from exporter.slurm.usage import RunningUse

OWNER_ONLY = 0o600  # names of jobs may be private
MOST_CONF_BYTES = 1 << 20  # of slurm.conf that is searched for the cluster's name
CONF_FILES = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")
_CLUSTER_NAME = re.compile(r"^[ \t]*ClusterName[ \t]*=[ \t]*([\w.-]+)", re.IGNORECASE | re.MULTILINE)


class CachedAnswer(Record):
    """What Slurm answered, and when."""

    SCHEMA = 1

    cluster: str
    as_of: float | None = None  # epoch seconds of the answer; None if there was never one
    tried: float  # when Slurm was last asked
    problem: str | None = None  # why it did not answer then
    source: str = "squeue"  # or slurmrestd, or the address of a hub
    hub_problem: str | None = None  # why the hub that the user has named was not asked


class QueueAnswer(CachedAnswer):
    """An answer of squeue."""

    rows: tuple[QueueRow, ...] = ()

    @property
    def is_of_hub(self) -> bool:
        """Whether it came from a hub, which may have a newer one."""
        return self.source not in ("squeue", "slurmrestd")


class NodesAnswer(CachedAnswer):
    """An answer of sinfo, or of a hub."""

    rows: tuple[NodeRow, ...] = ()


class UseAnswer(CachedAnswer):
    """An answer of sstat about one job."""

    rows: tuple[RunningUse, ...] = ()


class HistoryAnswer(CachedAnswer):
    """An answer of sacct about all jobs of a user."""

    since: float = 0.0  # attempts that ended before are not there
    rows: tuple[tuple[QueueRow, Attempt], ...] = ()


def write_answer(path: Path, answer: QueueAnswer | NodesAnswer | UseAnswer | HistoryAnswer) -> None:
    """Write an answer, its rows as lists: with the name of each field a reader takes twice the time. Raises OSError."""
    body = {**answer.replace(rows=()).to_json(), "rows": answer.rows}
    run_files.write_json(path, body, durable=False, mode=OWNER_ONLY, default=to_json)


def answer_path(folder: Path, kind: type[Record], *names: str | None) -> Path:
    """The file of one of the answers of a kind: a digest would be shorter, but hashlib takes 5 ms to load."""
    words = (quote(name or "", safe="", errors="surrogateescape") for name in names)
    return folder / f"{kind.__name__.lower()}+{'+'.join(words)}.json"


def own_folder(environ: Mapping[str, str]) -> Path | None:
    """The cache folder of this user; None if there is none in which nobody else can write."""
    found = user_cache_folder(environ)
    if found is None:
        return None
    folder = Path(found)
    try:
        make_private_folder(folder)
        status = folder.stat()
    except OSError:
        return None
    return folder if status.st_uid == os.geteuid() and not status.st_mode & 0o022 else None


def cluster_name(environ: Mapping[str, str]) -> str:
    """The cluster that the commands ask: a home may serve several.

    It is the one that the user has chosen, else that of Slurm's configuration, else known by this machine's name.
    """
    return environ.get("SLURM_CLUSTERS") or configured_cluster(environ) or os.uname().nodename


def configured_cluster(environ: Mapping[str, str]) -> str | None:
    """The name of the cluster in Slurm's configuration; None if it cannot be read here."""
    for path in filter(None, (environ.get("SLURM_CONF"), *CONF_FILES)):
        try:
            with open(path, encoding="utf-8", errors="replace") as source:
                found = _CLUSTER_NAME.search(source.read(MOST_CONF_BYTES))
        except OSError:
            continue
        return found[1] if found else None
    return None
