"""Run directory, manifest and identity of an attached job, made from settings.

These files replace those of a launcher, so the sidecar, ``gpujob watch`` and ``gpujob report`` work as usual. The
finder adds the workers.
"""

import logging
import os
import pwd
import re
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from exporter.attach.workers_reader import (
    PID_FILE_NAME,
    WorkerCandidate,
    WorkerSearch,
    WorkerSearchCriteria,
    read_process,
)
from exporter.contract import run_files
from exporter.contract.errors import ExporterError
from exporter.contract.identity import Identity, identify
from exporter.contract.manifest import LogPattern, Manifest, PathGroup, Task, read_manifest, render_manifest
from exporter.machine.procfs import read_environment

LISTEN_ADDRESS = ":9410"
ROLE = "worker"
_NAME_LENGTH = 64
_SLURM_FACTS = ("SLURM_CLUSTER_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_USER", "SLURM_JOB_END_TIME")

log = logging.getLogger("gpujob.attach")


@dataclass(frozen=True)
class AttachSettings:
    """Settings of an attached job, by flag name. Paths are absolute, times in seconds."""

    job_name: str
    num_workers: int
    output_dir: str
    log_dir: str
    gpu_ids: tuple[int, ...] = ()  # empty if the job uses no GPUs
    checkpoint_dir: str | None = None  # None: the output directory
    total_items: int = 0  # 0: unknown
    check_interval: float = 10
    launch_timeout: float = 60
    stall_timeout: float = 300
    output_pattern: str = "output_worker_*.json"
    log_pattern: str = "worker_*.log"
    checkpoint_pattern: str = "checkpoint_*.pt"
    progress_patterns: tuple[LogPattern, ...] = ()
    error_patterns: tuple[LogPattern, ...] = ()
    gpu_metrics: bool = False
    alert_email: str | None = None
    email_enabled: bool = True
    alert_slack: str | None = None
    slack_enabled: bool = True
    terminal: bool = False
    pid_file: str | None = None
    slurm_job_id: str | None = None
    state_dir: str | None = None


REQUIRED = ("job_name", "num_workers", "output_dir", "log_dir")
_FILE_ONLY = ("progress_patterns", "error_patterns", "email_enabled", "slack_enabled", "terminal")
FLAGS = tuple(item.name for item in fields(AttachSettings) if item.name not in _FILE_ONLY)


def merge_settings(flags: Mapping[str, Any], config: Mapping[str, Any]) -> AttachSettings:
    """Combine flags and file; flags win. Raises ExporterError that lists all missing settings."""
    given = {**config, **{name: value for name, value in flags.items() if value is not None}}
    missing = [flag_name(name) for name in REQUIRED if name not in given]
    if missing:
        raise ExporterError(
            f"missing {', '.join(missing)}; describe a running job with flags or with --config FILE; "
            "use --run-dir DIR for a job that gpujob launched"
        )
    for name in ("output_dir", "log_dir", "checkpoint_dir", "pid_file", "state_dir"):
        if given.get(name) is not None:
            given[name] = os.path.abspath(os.path.expanduser(given[name]))
    return AttachSettings(**{**given, "gpu_ids": tuple(given.get("gpu_ids", ()))})


def flag_name(setting: str) -> str:
    """Flag of a setting."""
    return "--" + setting.replace("_", "-")


def setting_notices(settings: AttachSettings) -> list[str]:
    """Notices about settings that do less than one may expect, without secrets."""
    found = []
    place = "alertmanager/alertmanager.yml"
    routed = "alerts are rules of Prometheus (alertmanager/rules/) that Alertmanager routes; "
    if settings.alert_email is not None and settings.email_enabled:
        found.append(
            f"alerts by mail: {routed}write {settings.alert_email} as `to:` of an `email_configs:` entry below a "
            f"receiver in {place}, and the mail server as `smtp_smarthost:` below its `global:`"
        )
    if settings.alert_slack is not None and settings.slack_enabled:
        found.append(
            f"alerts to Slack: {routed}put the webhook into a file and name that as `api_url_file:` of a "
            f"`slack_configs:` entry below a receiver in {place}"
        )
    if settings.terminal:
        found.append("the terminal display is a separate command: gpujob watch with the run directory named below")
    for name in ("output_dir", "log_dir", "checkpoint_dir"):
        path = getattr(settings, name)
        if path is not None and not os.path.isdir(path):
            found.append(f"{name}: {path} does not exist yet")
    return found


def gpus_of_workers(gpu_ids: tuple[int, ...], workers: int) -> tuple[tuple[int, ...], ...]:
    """GPUs of each worker: divided evenly, or shared if there are fewer GPUs than workers."""
    count = len(gpu_ids)
    if count < workers:
        return tuple(gpu_ids[index * count // workers : index * count // workers + 1] for index in range(workers))
    return tuple(gpu_ids[index * count // workers : (index + 1) * count // workers] for index in range(workers))


@dataclass(frozen=True)
class AttachedJob:
    """A job that can be watched."""

    manifest: Manifest
    identity: Identity
    search: WorkerSearch


def attach_to_job(settings: AttachSettings, environ: Mapping[str, str], listen_address: str) -> AttachedJob:
    """Search for the job, and create its run directory or reuse that of an earlier sidecar."""
    job = settings.slurm_job_id or environ.get("SLURM_JOB_ID")
    gpus = gpus_of_workers(settings.gpu_ids, settings.num_workers)
    pid_file = Path(settings.pid_file or Path(settings.log_dir, PID_FILE_NAME))
    search = WorkerSearch(
        WorkerSearchCriteria(settings.job_name, gpus, pid_file, settings.pid_file is not None, job), environ
    )
    now = time.time()
    run_dir = _make_run_dir(settings, job or f"pid-{os.getpid()}", now)
    earlier = _read_earlier(run_dir, settings)
    candidates = search.find().candidates
    facts = _slurm_facts(job, environ, candidates)
    job_id = job or str(earlier.get("job_id") or (run_dir.name if settings.state_dir else f"pid-{os.getpid()}"))
    start = min((candidate.start for candidate in candidates), default=now)
    attempt = 0
    if earlier:
        attempt = int(str(earlier.get("attempt", 0)))
        if (run_files.read_json(run_dir / run_files.STATE_FILE) or {}).get("phase") == "finished":
            attempt += 1  # the recorded job is over, so this is its next launch
        else:
            start = float(str(earlier.get("start", start)))
    manifest = _build_manifest(
        settings, run_dir, gpus, facts, _owner(candidates), listen_address, on_slurm=job is not None
    )
    hostname = socket.gethostname()
    identity = identify(
        manifest,
        {
            **{name: value for name, value in environ.items() if name == "SLURMD_NODENAME"},
            **facts,
            "GPUJOB_JOB_ID": job_id,
            "GPUJOB_NODE_INDEX": "0",
            "GPUJOB_ATTEMPT": str(attempt),
            "GPUJOB_START_TIME": repr(start),
        },
        hostname,
    )
    _write_run_dir(manifest, identity, hostname)
    return AttachedJob(manifest, identity, search)


def _make_run_dir(settings: AttachSettings, job_id: str, now: float) -> Path:
    if settings.state_dir is not None:
        path = Path(settings.state_dir)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ExporterError(f"--state-dir: {path} cannot be created: {error.strerror}") from error
        return path
    word = re.sub(r"[^\w.-]+", "_", settings.job_name).strip("._")[:_NAME_LENGTH] or "job"
    stamp = time.strftime("%Y%m%d_%H%M%S", time.localtime(now))
    path = Path.cwd() / "logs" / f"{job_id}_{word}_{stamp}"
    try:
        path.mkdir(parents=True)
    except OSError as error:
        fallback = Path(tempfile.mkdtemp(prefix="gpujob-"))
        log.warning("%s cannot be created (%s); the run directory is %s", path, error.strerror, fallback)
        return fallback
    return path


def _read_earlier(run_dir: Path, settings: AttachSettings) -> Mapping[str, object]:
    """Record of an earlier sidecar; empty for a new directory."""
    if not (run_dir / run_files.MANIFEST_FILE).exists():
        return {}
    manifest = read_manifest(run_dir)
    if not manifest.attached:
        raise ExporterError(
            f"--state-dir: {run_dir} belongs to a job that gpujob has launched; watch it with --run-dir"
        )
    if manifest.job_name != settings.job_name:
        raise ExporterError(f"--state-dir: {run_dir} belongs to the job {manifest.job_name!r}; give another directory")
    earlier = run_files.read_json(run_dir / run_files.ORCHESTRATOR_FILE) or {}
    pid = earlier.get("pid")
    process = read_process(pid) if isinstance(pid, int) and earlier.get("host") == socket.gethostname() else None
    if process is not None and process.start_ticks == earlier.get("start_ticks") and pid != os.getpid():
        raise ExporterError(f"--state-dir: {run_dir} is in use: process {pid} already watches this job")
    return earlier


def _slurm_facts(
    job: str | None, environ: Mapping[str, str], candidates: tuple[WorkerCandidate, ...]
) -> dict[str, str]:
    """Cluster, partition, user and time limit of a Slurm job, from our environment or a worker's."""
    facts: Mapping[str, str] | None = environ if job is not None and environ.get("SLURM_JOB_ID") == job else None
    for candidate in candidates:
        if facts is None and candidate.found_by == "slurm_step":
            facts = read_environment(candidate.pid, _SLURM_FACTS)
    return {name: value for name, value in (facts or {}).items() if name in _SLURM_FACTS}


def _owner(candidates: tuple[WorkerCandidate, ...]) -> str:
    uid = os.getuid()
    if candidates:
        try:
            uid = os.stat(f"/proc/{candidates[0].pid}").st_uid
        except OSError:
            pass  # it has just ended
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _build_manifest(
    settings: AttachSettings,
    run_dir: Path,
    gpus: tuple[tuple[int, ...], ...],
    facts: Mapping[str, str],
    user: str,
    listen_address: str,
    *,
    on_slurm: bool,
) -> Manifest:
    elsewhere = "" if on_slurm else "local"
    return Manifest(
        job_name=settings.job_name,
        user=user,
        cluster=facts.get("SLURM_CLUSTER_NAME") or elsewhere,
        partition=facts.get("SLURM_JOB_PARTITION") or elsewhere,
        nodes=1,
        tasks=tuple(Task(f"{ROLE}_w{index}", ROLE, index, index, index, 0, own) for index, own in enumerate(gpus)),
        groups=(
            PathGroup("output", settings.output_dir, settings.output_pattern),
            PathGroup("checkpoint", settings.checkpoint_dir or settings.output_dir, settings.checkpoint_pattern),
        ),
        logs=PathGroup("logs", settings.log_dir, settings.log_pattern),
        progress=settings.progress_patterns,
        errors=settings.error_patterns,
        total_items=settings.total_items or None,
        check_interval_s=settings.check_interval,
        launch_timeout_s=settings.launch_timeout,
        stall_timeout_s=settings.stall_timeout,
        gpu_metrics=settings.gpu_metrics,
        listen_address=listen_address,
        attached=True,
        run_dir=run_dir,
    )


def _write_run_dir(manifest: Manifest, identity: Identity, hostname: str) -> None:
    """Write the run directory's files, as a launcher would."""
    run_dir, own = manifest.run_dir, read_process(os.getpid())
    try:
        for folder in (run_files.WORKERS_DIR, run_files.SIDECARS_DIR, run_files.STATUS_DIR):
            (run_dir / folder).mkdir(exist_ok=True)
        (run_dir / run_files.REPORT_FILE).unlink(missing_ok=True)  # of the previous launch
        run_files.write_json(run_dir / run_files.MANIFEST_FILE, render_manifest(manifest))
        run_files.write_job_state(str(run_dir), "launching")
        run_files.write_json(
            run_dir / run_files.ORCHESTRATOR_FILE,
            {
                "schema": run_files.RECORD_SCHEMA,
                "job_id": identity.job_id,
                "pid": os.getpid(),
                "start_ticks": own.start_ticks if own is not None else None,
                "host": hostname,
                "hosts": [identity.node],
                "attempt": identity.attempt,
                "start": identity.start,
                "local": True,
            },
        )
    except OSError as error:
        raise ExporterError(f"the run directory {run_dir} cannot be written: {error.strerror}") from error
