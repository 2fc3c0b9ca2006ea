"""Identity of a sidecar: job id, attempt and node from the environment, the rest from the manifest."""

import math
import re
from collections.abc import Mapping

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import Manifest

LABEL_LENGTH = 128
_UNSAFE = re.compile(r"[^\w.:@+-]")


def safe_label(text: str) -> str:
    """Reduce user text to letters, digits and ``_.:@+-``, at most 128 characters.

    A job name is user input that appears in chat messages, web pages and other people's queries.
    """
    return _UNSAFE.sub("_", text)[:LABEL_LENGTH]


@dataclass(frozen=True)
class Identity:
    """One node's part of one attempt of a job."""

    cluster: str
    job_id: str
    job_name: str
    user: str
    partition: str
    node: str
    node_index: int
    attempt: int
    start: float | None = None  # of the job, epoch seconds; None if the environment does not give it
    end: float | None = None  # time limit of the job as a time, epoch seconds; None without a limit
    first_gpu: int | None = None  # index of this node's first GPU, if one machine plays all nodes
    supervised: bool = False  # whether a supervisor restarts it after `exporter.cli.RESTART_STATUS`

    def constant_labels(self) -> dict[str, str]:
        """Return the labels of every series of this job."""
        return {
            "cluster": safe_label(self.cluster),
            "job_id": safe_label(self.job_id),
            "job_name": safe_label(self.job_name),
            "user": safe_label(self.user),
            "partition": safe_label(self.partition),
            "node": safe_label(self.node),
        }


def identify(manifest: Manifest, environ: Mapping[str, str], hostname: str) -> Identity:
    """Determine the identity from this environment.

    The launcher passes ``GPUJOB_NODES`` (host names in the plan's order); the position of this node is the node index.
    Otherwise use ``SLURM_NODEID``. It counts the nodes of the step, so the sidecar step must span all nodes of the job.
    """
    node = environ.get("GPUJOB_NODE") or environ.get("SLURMD_NODENAME") or hostname.partition(".")[0]
    nodes = [name for name in environ.get("GPUJOB_NODES", "").split(",") if name]
    if node in nodes:
        node_index = nodes.index(node)
    else:
        node_index = _integer(environ.get("GPUJOB_NODE_INDEX", environ.get("SLURM_NODEID"))) or 0
    start = _number(environ.get("GPUJOB_START_TIME")) or _number(environ.get("SLURM_JOB_START_TIME"))
    end = _number(environ.get("SLURM_JOB_END_TIME"))
    if end is None and start is not None and manifest.time_limit_s is not None:
        end = start + manifest.time_limit_s
    return Identity(
        cluster=manifest.cluster or environ.get("SLURM_CLUSTER_NAME") or "slurm",
        job_id=environ.get("GPUJOB_JOB_ID") or environ.get("SLURM_JOB_ID") or "unknown",
        job_name=manifest.job_name,
        user=environ.get("SLURM_JOB_USER") or manifest.user,
        partition=environ.get("SLURM_JOB_PARTITION") or manifest.partition,
        node=node,
        node_index=node_index,
        attempt=_integer(environ.get("GPUJOB_ATTEMPT", environ.get("SLURM_RESTART_COUNT"))) or 0,
        start=start,
        end=end,
        first_gpu=_index(environ.get("GPUJOB_FIRST_GPU")),
        supervised=environ.get("GPUJOB_SUPERVISED") == "1",
    )


def _number(text: str | None) -> float | None:
    try:
        number = float(text) if text else None
    except ValueError:
        return None
    return number if number is not None and math.isfinite(number) else None


def _integer(text: str | None) -> int | None:
    number = _number(text)
    return None if number is None else int(number)


def _index(text: str | None) -> int | None:
    number = _integer(text)
    return None if number is None else max(0, number)
