"""Slurm's queue as a running hub knows it: commands that ask a hub cost the controller nothing."""

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from exporter.contract.records import JsonValue, Record, RecordError
from exporter.contract.user_state import HUB_FOLDER, HUB_SOCKET, hub_socket, user_state_folder
from exporter.slurm.accounting import Figures
from exporter.slurm.commands_reader import SlurmReader
from exporter.slurm.nodes import NodeRow
from exporter.slurm.queue import AttemptSnapshot, QueueRow
from exporter.slurm.sources.http_reader import UNIX, NoAnswerError, check_address, read_json_text
from exporter.slurm.states import ENDS
from exporter.slurm.tracking import Event

VARIABLE = "GPUJOB_HUB"  # with the address of a hub, or NO_HUB; its token for TCP is in GPUJOB_HUB_TOKEN
NO_HUB = "none"
DEADLINE_S = 2.0  # a hub that is busy or stopped must not delay a command
MOST_JOBS = 10_000  # in one answer of a hub
NOT_FOUND = 404


class HubJob(Record):
    """A job in the answer of a hub."""

    job_id: str
    job_name: str
    user: str = ""
    partition: str = ""
    account: str | None = None
    qos: str | None = None
    state: str
    reason: str | None = None
    attempt: int = 1
    submitted: float | None = None
    started: float | None = None
    ended: float | None = None
    expected_start: float | None = None
    limit_s: float | None = None
    node_count: int | None = None
    nodes: str | None = None
    resources: str | None = None
    dependency: str | None = None
    log: str | None = None
    is_listed: bool = True
    figures: Figures | None = None
    history: tuple[Event, ...] = ()
    gpu_idle_seconds: float | None = None  # of the last attempt

    def row(self) -> QueueRow:
        """The row of squeue of which the hub has learned this."""
        snapshot = AttemptSnapshot(
            *(self.state, self.submitted, self.started, self.ended, self.attempt - 1, self.reason, self.limit_s)
        )
        return QueueRow(
            *(self.job_id, snapshot, self.job_name, self.log, self.partition, self.resources or "", self.user),
            *(self.account or "", self.qos or "", self.node_count or 0, self.nodes or "", self.dependency or ""),
            expected_start=self.expected_start,
        )


class HubScope(Record):
    """Whose jobs a hub has, and how often it asks Slurm."""

    cluster: str
    user: str | None = None  # None for everybody
    partitions: tuple[str, ...] = ()  # all without any
    interval_s: float


class HubAnswer(Record):
    """The answer of a hub about its jobs."""

    SCHEMA = 1

    as_of: float | None = None  # when it last read the queue
    problems: tuple[str, ...] = ()
    scope: HubScope
    jobs: tuple[HubJob, ...] = ()
    queue: tuple[QueueRow, ...] | None = None  # in the answer about the queue, in place of jobs
    is_all: bool = True
    covers_since: float | None = None  # of an answer about the past: from when on no end is missing

    def rows(self) -> tuple[QueueRow, ...]:
        """Jobs in Slurm's queue, and those that ended in the last 30 minutes."""
        if self.queue is not None:
            return self.queue
        return tuple(job.row() for job in self.jobs if job.is_listed or job.state in ENDS)


class HubJobs(Record):
    """The answer of a hub about one job or array."""

    SCHEMA = 1

    jobs: tuple[HubJob, ...] = ()


class HubNode(Record):
    """A node in the answer of a hub."""

    instance: str
    fleet: str
    state: str
    responds: bool = True
    gpus: tuple[Mapping[str, JsonValue], ...] = ()
    gpus_used: int | None = None
    cpus: int | None = None
    cpus_used: int | None = None
    memory_mib: int | None = None
    reason: str | None = None

    def row(self) -> NodeRow:
        """The row of sinfo of which the hub has learned this. Raises ValueError and KeyError if its GPUs are none."""
        gpus = {str(gpu.get("name") or ""): int(str(gpu["count"])) for gpu in self.gpus}
        used = (self.gpus_used, self.cpus, self.cpus_used, self.memory_mib, self.reason)
        return NodeRow(self.instance, self.state, self.responds, self.fleet, gpus, *used)


class HubNodes(Record):
    """The answer of a hub about the nodes."""

    SCHEMA = 1

    as_of: float | None = None  # when sinfo last answered
    scope: HubScope
    instances: tuple[HubNode, ...] = ()


class HubReply(NamedTuple):
    """What was found of a hub."""

    address: str
    answer: HubAnswer | None
    problem: str | None = None  # why a hub that was named has no answer
    text: bytes = b""  # JSON of the answer


def read_hub(slurm: SlurmReader, environ: Mapping[str, str], since: float | None = None) -> HubReply | None:
    """The answer of a hub that has all jobs that the reader would ask for; also of those that ended since a time.

    None if none runs. One that the user has named and that does not answer has a problem instead.
    """
    named = environ.get(VARIABLE)
    for address in hub_addresses(slurm, environ):
        try:
            check_address(address)
            body, text = _read(slurm, address, environ, since)
            answer = HubAnswer.from_json(body, address)
        except (NoAnswerError, RecordError, ValueError) as error:
            if named:
                return HubReply(address, None, str(error))
            continue
        problem = _misfit(answer, slurm.user, _cluster(slurm, environ))
        if problem is None:
            return HubReply(address, answer, text=text)
        if named:
            return HubReply(address, None, f"{address} {problem}")
    return None


def read_hub_jobs(address: str, job_ids: Iterable[str], environ: Mapping[str, str]) -> list[HubJob]:
    """What a hub knows of jobs and of the tasks of arrays; those that it does not know are left out."""
    found = list[HubJob]()
    for job_id in job_ids:
        with contextlib.suppress(NoAnswerError, RecordError):
            body = read_hub_json(address, f"/api/v1/jobs/{quote(job_id, safe='')}", environ)
            found += HubJobs.from_json(body, address).jobs
    return found


def read_hub_nodes(
    slurm: SlurmReader, environ: Mapping[str, str]
) -> tuple[str, float | None, tuple[NodeRow, ...]] | None:
    """The address of a hub of the cluster, when it read the nodes, and these; None without one."""
    for address in hub_addresses(slurm, environ):
        try:
            check_address(address)
            answer = HubNodes.from_json(read_hub_json(address, "/api/v1/fleet", environ), address)
            rows = tuple(node.row() for node in answer.instances)
        except (NoAnswerError, RecordError, ValueError, KeyError):
            continue
        if _cluster(slurm, environ) in (None, answer.scope.cluster):
            return address, answer.as_of, rows
    return None


def _read(
    slurm: SlurmReader, address: str, environ: Mapping[str, str], since: float | None
) -> tuple[Mapping[str, object], bytes]:
    whose = f"&user={quote(slurm.user, safe='')}" if slurm.user is not None else ""
    query = f"?limit={MOST_JOBS}{whose}"
    if since is not None:
        return _read_text(address, f"/api/v1/jobs{query}&since={since:.3f}", environ)
    try:
        return _read_text(address, f"/api/v1/queue{query}", environ)  # a third of the bytes
    except NoAnswerError as error:
        if error.status != NOT_FOUND:
            raise
        return _read_text(address, f"/api/v1/jobs{query}", environ)  # an older hub


def read_hub_json(address: str, path: str, environ: Mapping[str, str]) -> Mapping[str, object]:
    """What a hub says at a path. Raises NoAnswerError."""
    return _read_text(address, path, environ)[0]


def _read_text(address: str, path: str, environ: Mapping[str, str]) -> tuple[Mapping[str, object], bytes]:
    token = environ.get(f"{VARIABLE}_TOKEN") if not address.startswith(UNIX) else None
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return read_json_text(address, path, DEADLINE_S, headers)


def hub_addresses(slurm: SlurmReader, environ: Mapping[str, str]) -> list[str]:
    """The hub that the user has named, else the sockets of hubs of this user on this machine."""
    named = environ.get(VARIABLE)
    if named:
        return [] if named == NO_HUB else [named]
    state = user_state_folder(environ)
    cluster = _cluster(slurm, environ)
    names = [f"hub-user-{cluster}.sock", HUB_SOCKET] if cluster else [HUB_SOCKET]
    paths = [hub_socket(environ, f"{state}/{HUB_FOLDER}", name) for name in names]
    return [f"{UNIX}{path}" for path in paths if _is_own(Path(path))]


def _cluster(slurm: SlurmReader, environ: Mapping[str, str]) -> str | None:
    """The cluster that is asked for by its name."""
    return slurm.cluster or environ.get("SLURM_CLUSTERS") or None


def _is_own(path: Path) -> bool:
    """Whether a socket is this user's: what others say is not believed."""
    try:
        return path.is_socket() and path.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _misfit(answer: HubAnswer, user: str | None, cluster: str | None) -> str | None:
    """Why a hub cannot answer about a user's jobs on a cluster; None if it can."""
    scope = answer.scope
    if scope.user not in (None, user):
        return f"has the jobs of {scope.user} only"
    if scope.partitions:
        return f"has the partitions {','.join(scope.partitions)} only"
    if cluster not in (None, scope.cluster):
        return f"is for the cluster {scope.cluster}"
    if not answer.is_all:
        return f"has more than {MOST_JOBS:,} such jobs"
    return None
