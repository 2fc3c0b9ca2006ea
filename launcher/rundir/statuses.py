"""Latest statuses of a job's sidecars, for its report and its view."""

import contextlib
import hashlib
import json
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporter.contract import run_files
from exporter.contract.identity import safe_label
from exporter.contract.records import RecordError
from exporter.contract.status import NodeStatus, WorkerStatus
from launcher.rundir.targets import SidecarRecord

if TYPE_CHECKING:
    import http.client

ANSWER_S = 4.0  # for the connection, and for the whole answer, which also ends servers that send byte by byte
ASK_AGAIN_S = 60.0  # after a sidecar has not answered in that time; its status file is at most 5 s old
MOST_THREADS = 64  # requests at the same time: those to a job of 64 nodes wait only once
STATUS_BYTES = 2 * 1024 * 1024  # largest status without workers
WORKER_BYTES = 64 * 1024  # what each worker of the job may add: 600 restarts take less than 150 KB
SILENT_S = 20.0  # a sidecar writes its status every 5 s
CONCLUDING_S = 90.0  # after its final status, it verifies the results for up to 60 s
MOST_DEPTH = 32  # of nested objects and lists; ours have less than ten


def read_statuses(run_dir: Path, attempt: int) -> dict[str, NodeStatus]:
    """The latest status of each sidecar of this attempt, by node. One that cannot be read counts as absent."""
    try:
        paths = sorted(path for path in (run_dir / run_files.STATUS_DIR).iterdir() if path.suffix == ".json")
    except OSError:
        return {}
    found = {path.stem: NodeStatus.read_valid(path) for path in paths}
    return {node: status for node, status in found.items() if status is not None and status.attempt == attempt}


def is_reporting(run_dir: Path, attempt: int, now: float) -> bool:
    """Whether a sidecar of this attempt has lately written its status, also on a machine that cannot be seen."""
    statuses = read_statuses(run_dir, attempt).values()
    return any(now - status.time < (CONCLUDING_S if status.final else SILENT_S) for status in statuses)


class StatusFetcher:
    """Fetches the statuses of a job's sidecars repeatedly. One that has let us wait is asked again after a minute.

    A firewall may drop requests, and then each would wait as long as the first.
    """

    def __init__(self) -> None:
        self._silent: dict[str, tuple[float, str]] = {}  # by address: when to ask again, and the error

    def fetch(
        self, sidecars: Mapping[str, SidecarRecord], token: str | None, workers: int
    ) -> dict[str, NodeStatus | str | None]:
        """What `fetch_status` returns for each sidecar, by node. They are asked at the same time."""
        from concurrent.futures import ThreadPoolExecutor  # lazy: the orchestrator only reads files

        with ThreadPoolExecutor(max_workers=min(MOST_THREADS, len(sidecars) or 1)) as pool:
            answers = pool.map(lambda node: self._fetch_one(node, sidecars[node], token, workers), sidecars)
            return dict(zip(sidecars, answers, strict=True))

    def _fetch_one(self, node: str, sidecar: SidecarRecord, token: str | None, workers: int) -> NodeStatus | str | None:
        began = time.monotonic()
        ask_at, error = self._silent.get(sidecar.address, (began, ""))
        if began < ask_at:
            return error
        answer = fetch_status(node, sidecar, token, workers)
        if isinstance(answer, str) and time.monotonic() - began >= ANSWER_S:
            self._silent[sidecar.address] = began + ASK_AGAIN_S, answer
        return answer


def fetch_status(node: str, sidecar: SidecarRecord, token: str | None, workers: int) -> NodeStatus | str | None:
    """The status that the sidecar of a node serves, or one line about why there is none.

    Whoever has the port now may answer instead. So the answer is limited in time and in size, by the ``workers`` of
    the job, and must be of the same job and node, with TLS also with the certificate of the record.

    None for a user who may not read the job's ``token``: the sidecar would not answer.
    """
    if token is None:
        return None
    import http.client  # lazy: it loads TLS and the parser of mail, and the orchestrator only reads files

    try:
        body = _read_page(sidecar, token, STATUS_BYTES + workers * WORKER_BYTES)
    except (OSError, OverflowError, ValueError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: no answer from {sidecar.address}"
    try:
        value = json.loads(body)
        _check_limits(value)
        status = NodeStatus.from_json(value, "its status")
    except (RecordError, ValueError, RecursionError) as error:
        return f"no status from {sidecar.address}: {str(error)[:200]}"
    found = {"job_id": safe_label(status.job.job_id), "node": safe_label(status.node.name if status.node else "")}
    wanted = {"job_id": sidecar.labels.get("job_id"), "node": safe_label(node)}
    if found != wanted:
        theirs, ours = (f"job {labels['job_id']} on {labels['node']}" for labels in (found, wanted))
        return f"{sidecar.address} answers for {theirs}, not for {ours}"
    return status


def _read_page(sidecar: SidecarRecord, token: str, most_bytes: int) -> bytes:
    """The page ``/status``. Raises OSError or HTTPException, also if it is too late or too large."""
    import http.client  # lazy: as above

    connection = _connection(sidecar)
    deadline = None
    try:
        connection.connect()
        deadline = threading.Timer(ANSWER_S, _shut_down, (connection.sock,))
        deadline.daemon = True
        deadline.start()
        if sidecar.certificate is not None:
            secured: Any = connection.sock
            if hashlib.sha256(secured.getpeercert(binary_form=True)).hexdigest() != sidecar.certificate:
                raise http.client.HTTPException("another certificate")
        connection.request("GET", "/status", headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            raise http.client.HTTPException(answer.status)
        body = answer.read(most_bytes + 1)
        if len(body) > most_bytes:
            raise http.client.HTTPException(f"more than {most_bytes} bytes")
        return body
    finally:
        if deadline is not None:
            deadline.cancel()
        connection.close()


def _connection(sidecar: SidecarRecord) -> "http.client.HTTPConnection":
    """A connection to a sidecar, not yet open. Its certificate is compared with the record, not with authorities."""
    import http.client  # lazy: as above

    if sidecar.certificate is None:
        return http.client.HTTPConnection(sidecar.address, timeout=ANSWER_S)
    import ssl  # lazy: only a site with TLS needs it

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(sidecar.address, timeout=ANSWER_S, context=context)


def _shut_down(connection: socket.socket) -> None:
    """End a read that another thread waits for."""
    with contextlib.suppress(OSError):  # it has just ended by itself
        connection.shutdown(socket.SHUT_RDWR)


def _check_limits(value: object) -> None:
    """Raises ValueError if JSON is nested deeply or has numbers with which nobody can calculate."""
    level = [value]
    for _ in range(MOST_DEPTH):
        inner: list[object] = []
        for entry in level:
            if isinstance(entry, dict):
                inner += entry.values()
            elif isinstance(entry, list):
                inner += entry
            elif isinstance(entry, int | float) and not abs(entry) < run_files.MOST_NUMBER:
                raise ValueError("a number is out of range")
        if not inner:
            return
        level = inner
    raise ValueError(f"it is nested more than {MOST_DEPTH} deep")


def merge_workers(statuses: Mapping[str, NodeStatus]) -> dict[int, WorkerStatus]:
    """Workers of all nodes by rank."""
    return {worker.rank: worker for status in statuses.values() for worker in status.workers}
