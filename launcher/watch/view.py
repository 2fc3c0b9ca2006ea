"""The state of a job, merged from its run directory and its sidecars."""

import socket
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporter.contract import run_files
from exporter.contract.manifest import Manifest, read_manifest
from exporter.contract.process_identity import read_start_ticks
from exporter.gpus.analysis.node_status import worker_devices
from exporter.progress.eta.interval import EtaEstimate, slowest_eta
from exporter.progress.outlook import time_limit_met_probability
from exporter.progress.phases import PHASES as PHASES_OF_LOGS
from exporter.progress.work import job_rate, job_work
from launcher.report.report import build_report
from launcher.report.state import EXIT_STATUS, REASON_OF_STATE
from launcher.rundir.job_ids import job_id_of
from launcher.rundir.rundir import submitted_cluster
from launcher.rundir.statuses import merge_workers, read_statuses
from launcher.rundir.targets import read_sidecars
from launcher.steps.slurm_queue import WAITING_STATES, SlurmQueue
from launcher.steps.slurm_steps import read_final_state
from launcher.watch.serving_view import StageFacts, output_tokens_rate, readiness_view

if TYPE_CHECKING:
    from launcher.verify.timed_reads import ReportProgress

VIEW_SCHEMA = 1
HTTP_TIMEOUT_S = 2.0
SILENT_S = 20.0  # a sidecar writes its status every 5 s
CONCLUDING_S = 90.0  # after its final status, it verifies the results for up to 60 s
STARTING_S = 30.0  # a local job without an orchestrator after this time will never start


class JobClient:
    """Repeated reads of the state of one job."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.manifest: Manifest = read_manifest(run_dir)
        self._queue = SlurmQueue(run_dir)
        self._last_orchestrator_key: object = (
            None  # orchestrator at the last read, and whether it had written its report
        )

    @cached_property
    def _stages(self) -> StageFacts:
        return StageFacts.read(self.manifest)

    def read_view(self) -> dict[str, Any]:
        """Read the state of the job now; ``report`` is set when it has ended."""
        now = time.time()
        orchestrator = run_files.read_json(self.run_dir / run_files.ORCHESTRATOR_FILE)
        report = run_files.read_json(self.run_dir / run_files.REPORT_FILE)
        if report is not None and orchestrator is not None and report.get("attempt") != orchestrator.get("attempt"):
            report = None
        self._drop_outdated_queue_state(orchestrator, report)
        attempt = int((orchestrator or {}).get("attempt", 0))  # type: ignore[call-overload]
        if orchestrator is not None and self._is_requeued(orchestrator, report):
            return self._queued_view(attempt, report, now)
        state = self._state(orchestrator, report)
        statuses = read_statuses(self.run_dir, attempt)
        nodes: list[dict[str, Any]] = []
        if orchestrator is not None and report is None:
            live, nodes = self._fetch_statuses(attempt, statuses, now)
            statuses = {**statuses, **live}
        return self._view(state, statuses, nodes, orchestrator or {}, report, now)

    def report(self, *, verify: bool = False, progress: "ReportProgress | None" = None) -> dict[str, Any]:
        """The report of the job, or one made now; its state shows whether the job has ended.

        ``verify`` checks the files again and reports to ``progress``.
        """
        found = run_files.read_json(self.run_dir / run_files.REPORT_FILE)
        if found is not None:
            return self._verify_again(found, progress) if verify else found
        state = self.read_view()["state"]
        slurm_state = None
        if state == "UNKNOWN" and not (self.manifest.attached or self.run_dir.name.startswith("local-")):
            slurm_state = read_final_state(job_id_of(self.run_dir), submitted_cluster(self.run_dir))
        ended = state == "UNKNOWN"
        report = build_report(self.run_dir, now=time.time(), ended=ended, slurm_state=slurm_state, progress=progress)
        has_ended = slurm_state in REASON_OF_STATE or self._has_watched_end(report)
        if state == "PENDING" or (state == "UNKNOWN" and not has_ended):
            report |= {"state": state, "exit_status": EXIT_STATUS[state]}
        if verify and ended and not report["verification"]["checks"]:
            return self._verify_again(report, progress)
        return report

    def _has_watched_end(self, report: Mapping[str, Any]) -> bool:
        """Whether the sidecars of an attached job saw the ends of all workers, though they left no report."""
        ends = [worker["exit"] for worker in report["workers"]]
        return self.manifest.attached and all(end and end["time"] is not None for end in ends)

    def _verify_again(self, report: Mapping[str, Any], progress: "ReportProgress | None") -> dict[str, Any]:
        from launcher.report.verification import verify_again  # lazy: few calls verify, and file formats load slowly

        return verify_again(self.run_dir, report, progress)

    def _fetch_statuses(
        self, attempt: int, saved_statuses: Mapping[str, Mapping[str, Any]], now: float
    ) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
        """Status of every sidecar by node, read in parallel over HTTP, and how each was obtained.

        If a sidecar does not answer, its status file counts.
        """
        sidecars = read_sidecars(self.run_dir, attempt)
        with ThreadPoolExecutor(max_workers=min(32, len(sidecars) or 1)) as pool:
            answers = dict(zip(sidecars, pool.map(_get_status, (r["address"] for r in sidecars.values())), strict=True))
        live, nodes = {}, []
        for node, answer in answers.items():
            if isinstance(answer, dict):
                live[node] = answer
            status = answer if isinstance(answer, dict) else saved_statuses.get(node, {})
            nodes.append(
                {
                    "node": node,
                    "address": sidecars[node]["address"],
                    "source": "http" if isinstance(answer, dict) else "file",
                    "age_s": now - status["time"] if "time" in status else None,
                    "error": answer if isinstance(answer, str) else None,
                }
            )
        return live, nodes

    def _state(self, orchestrator: Mapping[str, Any] | None, report: Mapping[str, Any] | None) -> str:
        if report is not None:
            return str(report["state"])
        if orchestrator is None and self.run_dir.name.startswith("local-"):
            age = time.time() - (self.run_dir / run_files.MANIFEST_FILE).stat().st_mtime
            return "PENDING" if age < STARTING_S else "UNKNOWN"
        if orchestrator is None:
            return "PENDING" if self._queue.read().state in (None, "PENDING", "CONFIGURING", "RUNNING") else "UNKNOWN"
        if self.manifest.attached and orchestrator.get("host") != socket.gethostname():
            return "RUNNING" if self._is_reporting(orchestrator) else "UNKNOWN"
        if orchestrator.get("local"):
            return "RUNNING" if is_running_here(orchestrator) else "UNKNOWN"
        return "UNKNOWN" if self._queue.read().state == "" else "RUNNING"

    def _is_reporting(self, orchestrator: Mapping[str, Any]) -> bool:
        """Whether a sidecar on another machine has lately written its status."""
        statuses = read_statuses(self.run_dir, int(orchestrator.get("attempt", 0)))
        return any(
            time.time() - status.get("time", 0.0) < (CONCLUDING_S if status.get("final") else SILENT_S)
            for status in statuses.values()
        )

    def _drop_outdated_queue_state(
        self, orchestrator: Mapping[str, Any] | None, report: Mapping[str, Any] | None
    ) -> None:
        """Discard the queue's answer when a new orchestrator has started, or the report was written: it is outdated."""
        record = orchestrator or {}
        stage = *(record.get(key) for key in ("attempt", "start", "pid")), report is not None
        if stage != self._last_orchestrator_key:
            self._last_orchestrator_key = stage
            self._queue.invalidate()

    def _is_requeued(self, orchestrator: Mapping[str, Any], report: Mapping[str, Any] | None) -> bool:
        """Whether the attempt of this orchestrator is over and the job waits in the queue for the next one."""
        if orchestrator.get("local") or self.manifest.attached:
            return False
        at = self._queue.read().state
        if report is not None and report.get("requeued"):
            return at != ""  # "" is not in the queue; without an answer (None) the report counts
        return at in WAITING_STATES

    def _queued_view(self, ended_attempt: int, report: Mapping[str, Any] | None, now: float) -> dict[str, Any]:
        """View of a job that waits for the attempt after ``ended_attempt``; values of that attempt are not shown."""
        last_attempt = {
            "attempt": ended_attempt,
            **{key: (report or {}).get(key) for key in ("state", "items", "items_expected", "unit")},
        }
        return self._view("PENDING", {}, [], {"attempt": ended_attempt + 1}, None, now) | {"requeued": last_attempt}

    def _view(
        self,
        state: str,
        statuses: Mapping[str, Mapping[str, Any]],
        nodes: list[dict[str, Any]],
        orchestrator: Mapping[str, Any],
        report: Mapping[str, Any] | None,
        now: float,
    ) -> dict[str, Any]:
        attempt = int(orchestrator.get("attempt", 0))
        coming = attempt if state == "PENDING" else None
        summary = report or build_report(self.run_dir, now=now, ended=False, next_attempt=coming)
        seen = merge_workers(statuses)
        gpus = {node: status["gpus"] for node, status in sorted(statuses.items()) if status.get("gpus")}
        workers = [
            _merge_worker(
                worker, seen.get(int(worker["rank"]), {}), gpus.get(worker["node"], {}), is_final=report is not None
            )
            for worker in summary["workers"]
        ]
        self._mark_services_and_waiting(workers, is_running=state == "RUNNING")
        work = job_work(workers)
        job: Mapping[str, Any] = next((status["job"] for status in statuses.values() if status.get("job")), {})
        published = {} if coming is not None else run_files.read_json(self.run_dir / run_files.STATE_FILE) or {}
        limit = self.manifest.time_limit_s
        start = orchestrator.get("start")
        limit_end = job.get("end") or (start + limit if start and limit else None)
        eta = None if report else _job_eta(workers)
        return {
            "schema": VIEW_SCHEMA,
            "time": now,
            "job_id": summary["job_id"],
            "job_name": self.manifest.job_name,
            "user": self.manifest.user,
            "state": state,
            "pending_reason": self._pending_reason(state),
            "attempt": attempt,
            "requeued": None,
            "phase": "finished" if report else _phase(str(published.get("phase", "launching")), statuses.values()),
            "start": start,
            "end": summary["end"],
            "time_limit_s": limit,
            "limit_end": limit_end,
            "unit": work.unit,
            "items": work.done,
            "items_expected": report["items_expected"] if report else work.expected_total(self.manifest.total_items),
            "items_processed": work.processed,
            "rate": None if report else job_rate((worker for worker in workers if worker["up"]), work),
            "output_tokens_per_second": output_tokens_rate(workers),
            "eta": eta._asdict() if eta else None,
            "time_limit_met_probability": time_limit_met_probability(now, limit_end, eta) if eta else None,
            "readiness": self._readiness(state, orchestrator, published),
            "first_to_stop": next((name for name in map(_first_to_stop, statuses.values()) if name), None),
            "workers": workers,
            "outputs": _merge_outputs(statuses.values()),
            "checkpoints": next((found for s in statuses.values() if (found := s.get("checkpoints"))), None),
            "filesystems": _merge_filesystems(statuses.values()),
            "gpus": [{"node": node, **entry} for node, entry in gpus.items()],
            "events": sorted(
                (event for status in statuses.values() for event in status.get("events", ())),
                key=lambda event: float(event["time"]),
            ),
            "nodes": nodes,
            "launch": _merge_launch(statuses),
            "cause": summary["cause"],
            "report": report,
            "run_dir": str(self.run_dir),
        }

    def _mark_services_and_waiting(self, workers: list[dict[str, Any]], *, is_running: bool) -> None:
        """Mark the tasks that are services. If the job ``is_running``, mark those waiting for an earlier stage."""
        waiting = self._stages.waiting_ranks(workers) if is_running else set()
        for worker in workers:
            worker["service"] = worker["rank"] in self._stages.services
            if worker["rank"] in waiting:
                worker["state"] = "waiting"

    def _pending_reason(self, state: str) -> str | None:
        """Slurm's reason for a pending job, from the query that returned its state."""
        local = self.run_dir.name.startswith("local-")
        return self._queue.read().reason if state == "PENDING" and not local else None

    def _readiness(
        self, state: str, orchestrator: Mapping[str, Any], published: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Readiness of the services. None if the job does not wait for it, or is being stopped: polling has ended."""
        phase, start = str(published.get("phase", "launching")), orchestrator.get("start")
        pending, runs = state == "PENDING", state == "RUNNING" and phase in ("launching", "running")
        if not (pending or runs) or published.get("stop") is not None:
            return None
        attempt = int(orchestrator.get("attempt", 0))
        return readiness_view(
            self.run_dir, attempt, has_readiness_rules=self._stages.has_readiness_rules, start=start, phase=phase
        )


def _get_status(address: str) -> dict[str, Any] | str:
    """The status of one sidecar, or an error text."""
    import requests  # lazy: 30 ms, and a job that has ended has no sidecar to query

    try:
        with requests.Session() as session:
            session.trust_env = False  # a user's proxy does not reach cluster nodes
            answer = session.get(f"http://{address}/status", timeout=HTTP_TIMEOUT_S)
        answer.raise_for_status()
        body = answer.json()
    except (requests.RequestException, ValueError) as error:
        return f"{type(error).__name__}: no answer from {address}"
    return body if isinstance(body, dict) else f"no status from {address}"


def is_running_here(orchestrator: Mapping[str, Any]) -> bool:
    """Whether the recorded process runs on this machine. Start ticks guard against a reused pid."""
    ticks = read_start_ticks(int(orchestrator["pid"]))
    same_host = orchestrator.get("host") == socket.gethostname()
    return same_host and ticks is not None and ticks == orchestrator.get("start_ticks", ticks)


def _merge_worker(
    worker: Mapping[str, Any], sidecar_entry: Mapping[str, Any], gpus: Mapping[str, Any], *, is_final: bool
) -> dict[str, Any]:
    """Merge a worker's records with its sidecar's status; ``gpus`` is the GPU status of its node.

    The sidecar's position wins while the job runs. With ``is_final`` the report's wins: it saw more.
    """
    extra = (
        "pid",
        "rss_bytes",
        "children",
        "threads",
        "rate",
        "average_rate",
        "output_tokens_per_second",
        "input_tokens_per_second",
        "eta",
        "last_progress",
        "stalled",
        "at",
        "confidence",
        "slowdown",
        "lag",
        "pack",
        "values",
        "gpu_misplaced",
        "gpu_conditions",
        "gpu_memory_full",
    )
    joined = {**worker, **{key: sidecar_entry.get(key) for key in extra}}
    for key in ("unit", "pattern", "items", "items_expected", "items_processed", "cpu_s"):
        first, other = (worker, sidecar_entry) if is_final else (sidecar_entry, worker)
        joined[key] = first.get(key) if first.get(key) is not None else other.get(key)
    if is_final and worker["items"] is not None:
        joined["items_expected"] = worker["items_expected"]  # the sidecar's total may belong to another count
    joined["gpu_devices"] = worker_devices(sidecar_entry, gpus)
    # with these states the sidecar polled before the start
    if joined["up"] and sidecar_entry.get("state") not in (None, "not_found", "dead"):
        joined["state"] = sidecar_entry["state"]
    return joined


def _sum_known(values: Iterable[Any]) -> Any:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _job_eta(workers: list[dict[str, Any]]) -> EtaEstimate | None:
    """ETA of the job: that of its slowest worker.

    None if a running worker with a position has no ETA. If any worker has a position, those without one are ignored:
    often only the first worker writes a log.
    """
    progressing = any(worker["items"] is not None for worker in workers)
    estimates = []
    for worker in workers:
        if worker["exit"] or (progressing and worker["items"] is None):
            continue
        if not worker.get("eta"):
            return None
        estimates.append(EtaEstimate(*(float(worker["eta"][key]) for key in EtaEstimate._fields)))
    return slowest_eta(estimates)


def _phase(published: str, statuses: Iterable[Mapping[str, Any]]) -> str:
    """Phase of the job: the orchestrator's, refined by a phase from the logs while the job runs."""
    if published != "running":
        return published
    log_phases = [str(status["job"].get("phase")) for status in statuses if status.get("job")]
    return next((phase for phase in log_phases if phase in PHASES_OF_LOGS), published)


def _first_to_stop(status: Mapping[str, Any]) -> str | None:
    """The worker of a node that stalled first, or None."""
    rank = (status.get("job") or {}).get("first_to_stop")
    return next((str(worker["worker"]) for worker in status.get("workers", ()) if worker.get("rank") == rank), None)


def _merge_outputs(statuses: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Output files by path group, summed over all nodes; ``stalled_ranks`` are workers that no longer write."""
    merged: dict[str, dict[str, Any]] = {}
    for status in statuses:
        for group in status.get("outputs", ()):
            entry = merged.setdefault(
                group["group"],
                {
                    "group": group["group"],
                    "files": 0,
                    "bytes": 0,
                    "growth_bytes_per_second": None,
                    "mtime": None,
                    "records": None,
                    "stalled": None,
                    "stalled_ranks": [],
                    "files_invalid": 0,
                    "invalid": [],
                },
            )
            entry["files"] += group["files"]
            entry["bytes"] += group["bytes"]
            for key in ("growth_bytes_per_second", "records"):
                entry[key] = _sum_known((entry[key], group.get(key)))
            entry["mtime"] = max((t for t in (entry["mtime"], group["mtime"]) if t is not None), default=None)
            known = [stalled for stalled in (entry["stalled"], group.get("stalled")) if stalled is not None]
            entry["stalled"] = all(known) if known else None
            entry["stalled_ranks"] += [
                int(rank) for rank, worker in (group.get("workers") or {}).items() if worker.get("stalled")
            ]
            entry["files_invalid"] += group.get("files_invalid") or 0
            entry["invalid"] += group.get("invalid") or []
    return list(merged.values())


def _merge_filesystems(statuses: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The file system with the least free space per path group; one that does not answer comes first."""
    merged: dict[str, dict[str, Any]] = {}
    for status in statuses:
        for space in status.get("filesystems", ()):
            known = merged.get(space["group"])
            if known is None or _space_left(space) < _space_left(known):
                merged[space["group"]] = dict(space)
    return list(merged.values())


def _space_left(space: Mapping[str, Any]) -> float:
    """Free bytes for comparison: -1 if the file system does not answer, infinite if unknown."""
    if space.get("responding") is False:
        return -1.0
    available = space.get("available_bytes")
    return float("inf") if available is None else float(available)


def _merge_launch(statuses: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Whether all nodes passed their launch checks, and the required checks that failed."""
    launches = {node: status.get("launch") or {} for node, status in statuses.items()}
    lacking = [
        f"{node}: {check['detail']}"
        for node, launch in sorted(launches.items())
        for check in launch.get("checks", ())
        if launch.get("final") and check["level"] == "issue" and check["passed"] is False
    ]
    return {
        "verified": bool(launches) and all(found.get("verified") for found in launches.values()),
        "lacking": lacking,
    }
