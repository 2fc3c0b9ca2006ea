"""Prepare the sidecar of a job that others started, and become it.

    python -I -m launcher.attach.prepare REQUEST

REQUEST is a JSON object: the ``flags`` of ``gpujob-exporter sidecar`` by name, what the manifest says about its
``page``, and its ``log_level``; or the file to ``check``. From ``gpujob attach`` also what it has ``found`` of the job,
and ``view_fd``, through which the view learns the run directory.

The run directory is like that of a launched job, so the sidecar, ``gpujob watch`` and ``gpujob report`` work as usual.
On several nodes of one Slurm step, the first node prepares it for all.
"""

import dataclasses
import json
import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from exporter.attach.workers_reader import PID_FILE_NAME, WorkerCandidate, WorkerSearch, WorkerSearchCriteria
from exporter.contract import run_files
from exporter.contract.errors import ExporterError
from exporter.contract.file_locks import FileLockedError, lock_file
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import (
    Manifest,
    WorkerSearchPlan,
    read_manifest,
    render_manifest,
)
from exporter.contract.process_identity import read_pid_namespace, read_start_ticks
from exporter.contract.python_flags import ISOLATED
from exporter.contract.records import NOTHING, RecordError
from exporter.machine.procfs import read_environment
from launcher.attach.manifest import NOTHING_FOUND, FoundJob, absolute, make_manifest, with_found
from launcher.errors import LauncherError
from launcher.jobfile.monitor_config import MonitorConfig, load_monitor_config
from launcher.plan.placeholders import nodes_variable
from launcher.plan.plan import safe_file_word
from launcher.registry.entries import register_job
from launcher.report.report import REPORT_TEXT_FILE, archive
from launcher.rundir.cluster_file import read_cluster_key
from launcher.rundir.job_records import OrchestratorRecord
from launcher.rundir.trust import foreign_owner, other_writers, read_facts
from launcher.steps.hostlist import parse_hostlist

USAGE = 2
FIRST_NODE_S = 60.0  # how long the other nodes wait for the run directory, whose file system may be slow
POLL_S = 0.2
_OF_ANOTHER_JOB = ("GPUJOB_SUPERVISED", "GPUJOB_FIRST_GPU")  # variables of a launched job around this command
_SLURM_FACTS = ("SLURM_CLUSTER_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_USER", "SLURM_JOB_END_TIME")


@dataclass(frozen=True)
class NodePlace:
    """This node among those whose sidecars belong together."""

    hosts: tuple[str, ...]
    index: int = 0
    step: str | None = None  # Slurm step of the sidecars, if it has several nodes

    @property
    def name(self) -> str:
        return self.hosts[self.index]


class AttachedRecord(OrchestratorRecord):
    """``orchestrator.json`` of an attached job, whose sidecar takes the orchestrator's place."""

    step: str | None = None  # Slurm step of the sidecars, if it has several nodes
    slurm: Mapping[str, str] = NOTHING  # variables of the Slurm job


def find_place(environ: Mapping[str, str], hostname: str, job: str | None) -> NodePlace:
    """The place of this node: in the Slurm step of this command, if it is a step of the job."""
    name = environ.get("SLURMD_NODENAME") or hostname.partition(".")[0]
    step = environ.get("SLURM_STEP_ID") if environ.get("SLURM_JOB_ID") == job else None
    hosts = parse_hostlist(environ.get("SLURM_STEP_NODELIST", "")) if step is not None else ()
    if len(hosts) < 2 or name not in hosts:
        return NodePlace((name,))
    return NodePlace(hosts, hosts.index(name), f"{job}.{step}.{environ.get('SLURM_RESTART_COUNT', '0')}")


def notices(config: MonitorConfig) -> list[str]:
    """Notices about settings that do less than one may expect, without secrets."""
    found, alerts = [], config.alerts
    routed = "alerts are rules of Prometheus (alertmanager/rules/) that Alertmanager routes; "
    if alerts.email.address is not None and alerts.email.enabled:
        command = f"gpujob alerts config --alert-email {shlex.quote(alerts.email.address)}"
        found.append(f"alerts by mail: {routed}`{command}` writes its configuration")
    if alerts.slack.webhook is not None and alerts.slack.enabled:
        command = "gpujob alerts config --alert-slack FILE"
        found.append(f"alerts to Slack: {routed}put the webhook into a file, and `{command}` writes its configuration")
    if alerts.terminal.enabled:
        found.append("the terminal display is `gpujob attach`, or `gpujob watch` in another terminal")
    for name, path in config.paths.model_dump().items():
        if path is not None and not os.path.isdir(os.path.expanduser(path)):
            found.append(f"{name}: {absolute(path)} does not exist yet")
    return found


class Preparation:
    """The run directory of one attached job, and the environment of its sidecar."""

    def __init__(
        self, flags: Mapping[str, object], environ: Mapping[str, str], found: FoundJob = NOTHING_FOUND
    ) -> None:
        self._found = found
        own = {name: str(flags[name]) if name in flags else None for name in _OWN_FLAGS}
        places = {name: value for name, value in flags.items() if name not in own}
        self.config = load_monitor_config(own["config"], places)
        self.lock = -1  # descriptor of the locked run directory; -1 without a lock
        self._environ = environ
        self._state_dir = None if own["state_dir"] is None else Path(absolute(own["state_dir"]))
        job = own["slurm_job_id"] or environ.get("SLURM_JOB_ID")
        default_pid_file = Path(absolute(self.config.paths.log_dir), PID_FILE_NAME)
        pid_file = str(default_pid_file) if own["pid_file"] is None else absolute(own["pid_file"])
        self._search = WorkerSearchPlan(pid_file, own["pid_file"] is not None, job)
        self._place = find_place(environ, socket.gethostname(), job)

    @property
    def is_first_node(self) -> bool:
        return self._place.index == 0

    def run(self, page: Mapping[str, Any]) -> tuple[Path, dict[str, str]]:
        """Create or find the run directory. Return it with the environment of the sidecar."""
        run_dir = self._prepare(page) if self.is_first_node else self._await_run_dir()
        record = AttachedRecord.read(run_dir / run_files.ORCHESTRATOR_FILE) or AttachedRecord()
        unwanted = (*_OF_ANOTHER_JOB, *_SLURM_FACTS)
        return run_dir, {
            **{name: value for name, value in self._environ.items() if name not in unwanted},
            **record.slurm,
            "GPUJOB_JOB_ID": str(record.job_id),
            "GPUJOB_NODE": self._place.name,
            "GPUJOB_NODE_INDEX": str(self._place.index),
            **nodes_variable(self._place.hosts),
            "GPUJOB_ATTEMPT": str(record.attempt),
            "GPUJOB_START_TIME": repr(record.start),
        }

    def _prepare(self, page: Mapping[str, Any]) -> Path:
        """Create the run directory, or take over that of an earlier sidecar."""
        now, job, own_id = time.time(), self._search.slurm_job_id, f"pid-{os.getpid()}"
        run_dir = self._make_run_dir(job or own_id, now)
        self.lock = _lock(run_dir)
        earlier = self._read_earlier(run_dir)
        if self._found.pids:
            self._search = dataclasses.replace(self._search, pid_file=str(run_dir / PID_FILE_NAME), must_exist=True)
            _write_pid_file(run_dir, self._found.pids)
        manifest = make_manifest(self.config, self._search, run_dir, len(self._place.hosts), page)
        manifest = with_found(manifest, self._found)
        criteria = WorkerSearchCriteria.of_node(manifest, self._search, self._place.index)
        workers = WorkerSearch(criteria, self._environ).find().candidates
        slurm = self._slurm_facts(workers)
        start, attempt = min((worker.start for worker in workers), default=now), 0
        if earlier is not None:
            attempt = earlier.attempt
            if (run_files.read_json(run_dir / run_files.STATE_FILE) or {}).get("phase") == "finished":
                _archive(run_dir, attempt)
                attempt += 1  # the recorded job is over, so this is its next launch
            else:
                start = earlier.start if earlier.start is not None else start
        manifest = dataclasses.replace(
            manifest,
            user=_owner(workers) or manifest.user,
            cluster=self._named_cluster() or slurm.get("SLURM_CLUSTER_NAME") or manifest.cluster,
            partition=slurm.get("SLURM_JOB_PARTITION") or manifest.partition,
        )
        earlier_id = earlier.job_id if earlier is not None else None
        record = AttachedRecord(
            job_id=job or earlier_id or (run_dir.name if self._state_dir else own_id),
            pid=os.getpid(),  # stays that of the sidecar, and of the program that writes the report
            start_ticks=read_start_ticks(os.getpid()),
            host=socket.gethostname(),
            pid_namespace=read_pid_namespace(),
            hosts=self._place.hosts,
            attempt=attempt,
            start=start,
            local=True,
            step=self._place.step,
            slurm=slurm,
        )
        _write_run_dir(manifest, record)
        facts = {"job_name": manifest.job_name, "user": manifest.user, "host": record.host, "submitted": now}
        register_job(run_dir, {"job_id": record.job_id, **facts}, self._environ, Path.cwd())
        return run_dir

    def _make_run_dir(self, job_id: str, now: float) -> Path:
        if self._state_dir is not None:
            try:
                self._state_dir.mkdir(run_files.FOLDER_MODE, parents=True, exist_ok=True)
            except OSError as error:
                raise LauncherError(f"--state-dir: {self._state_dir} cannot be created: {error.strerror}") from error
            _refuse_shared(self._state_dir)
            return self._state_dir
        stamp = time.strftime("%Y%m%d_%H%M%S", time.localtime(now))
        path = Path.cwd() / "logs" / f"{job_id}_{safe_file_word(self.config.job.name)}_{stamp}"
        try:
            path.mkdir(run_files.FOLDER_MODE, parents=True)
        except OSError as error:
            fallback = Path(tempfile.mkdtemp(prefix="gpujob-"))
            _say(f"{path} cannot be created ({error.strerror}); the run directory is {fallback}")
            return fallback
        return path

    def _named_cluster(self) -> str | None:
        """The name that the cluster file gives this cluster, as in jobs that gpujob launches."""
        named = read_cluster_key("cluster", self._environ, Path.cwd())[1]
        return named if isinstance(named, str) else None

    def _read_earlier(self, run_dir: Path) -> AttachedRecord | None:
        """Record of an earlier sidecar; None for a new directory."""
        if not (run_dir / run_files.MANIFEST_FILE).exists():
            return None
        manifest = read_manifest(run_dir)
        if not manifest.attached:
            raise LauncherError(
                f"--state-dir: {run_dir} belongs to a job that gpujob has launched; watch it with --run-dir"
            )
        if manifest.job_name != self.config.job.name:
            raise LauncherError(
                f"--state-dir: {run_dir} belongs to the job {manifest.job_name!r}; give another directory"
            )
        earlier = AttachedRecord.read(run_dir / run_files.ORCHESTRATOR_FILE)
        # where the file system has no locks
        if earlier is not None and earlier.pid != os.getpid() and earlier.is_running_here():
            raise LauncherError(f"--state-dir: {run_dir} is in use: process {earlier.pid} already watches this job")
        return earlier

    def _await_run_dir(self) -> Path:
        """The run directory that the first node prepares for this step."""
        name = f"{self._search.slurm_job_id}_{safe_file_word(self.config.job.name)}_*"
        until = time.monotonic() + FIRST_NODE_S
        while time.monotonic() < until:
            for path in [self._state_dir] if self._state_dir is not None else Path.cwd().glob(f"logs/{name}"):
                record = AttachedRecord.read_valid(path / run_files.ORCHESTRATOR_FILE)
                is_ours = record is not None and record.step == self._place.step
                if is_ours and foreign_owner(path) is None:
                    return path
            time.sleep(POLL_S)
        raise LauncherError(
            f"{self._place.name} sees no run directory from {self._place.hosts[0]}, the first node of the step; "
            "give all nodes the same --state-dir on a file system that they share"
        )

    def _slurm_facts(self, candidates: Iterable[WorkerCandidate]) -> dict[str, str]:
        """Cluster, partition, user and time limit of a Slurm job, from our environment or a worker's."""
        job, facts = self._search.slurm_job_id, None
        if job is not None and self._environ.get("SLURM_JOB_ID") == job:
            facts = self._environ
        for candidate in candidates:
            if facts is None and candidate.found_by == "slurm_step":
                facts = read_environment(candidate.pid, _SLURM_FACTS)
        return {name: value for name, value in (facts or {}).items() if name in _SLURM_FACTS}


_OWN_FLAGS = ("config", "pid_file", "slurm_job_id", "state_dir")  # flags without a place in the file


def _lock(run_dir: Path) -> int:
    """Lock the run directory for this process and the sidecar that it becomes; return the descriptor, or -1."""
    try:
        descriptor = lock_file(run_dir / run_files.LOCK_FILE)
    except FileLockedError as error:
        raise LauncherError(
            f"--state-dir: {run_dir} is in use: {error} already watches this job; end it, or give another directory"
        ) from error
    except OSError as error:
        raise LauncherError(f"the run directory {run_dir} cannot be written: {error.strerror}") from error
    if descriptor >= 0:
        os.set_inheritable(descriptor, True)
    return descriptor


def _owner(workers: Sequence[WorkerCandidate]) -> str | None:
    """Owner of the first worker; None if it is unknown."""
    try:
        return Path(f"/proc/{workers[0].pid}").owner() if workers else None
    except (OSError, KeyError):
        return None  # it has just ended, or the user has no name


def _archive(run_dir: Path, attempt: int) -> None:
    """Number report and statuses of the last launch, which this one would overwrite."""
    for name in (run_files.REPORT_FILE, REPORT_TEXT_FILE, run_files.STATUS_DIR):
        try:
            archive(run_dir / name, attempt)
        except OSError as error:
            raise LauncherError(f"{run_dir / name} cannot be archived: {error.strerror}") from error


def _write_pid_file(run_dir: Path, pids: Sequence[int]) -> None:
    try:
        run_files.replace_file(run_dir / PID_FILE_NAME, "".join(f"{pid}\n" for pid in pids).encode("ascii"))
    except OSError as error:
        raise LauncherError(f"the run directory {run_dir} cannot be written: {error.strerror}") from error


def _write_run_dir(manifest: Manifest, record: AttachedRecord) -> None:
    """Write the run directory's files; the record, for which other nodes wait, last."""
    run_dir = manifest.run_dir
    try:
        for folder in (run_files.WORKERS_DIR, run_files.SIDECARS_DIR, run_files.STATUS_DIR):
            (run_dir / folder).mkdir(run_files.FOLDER_MODE, exist_ok=True)
        (run_dir / run_files.REPORT_FILE).unlink(missing_ok=True)  # of a watch that was stopped
        run_files.make_token(run_dir)
        run_files.write_json(run_dir / run_files.MANIFEST_FILE, render_manifest(manifest))
        run_files.write_job_state(str(run_dir), "launching", attempt=record.attempt)
        run_files.write_json(run_dir / run_files.ORCHESTRATOR_FILE, record.to_json())
    except OSError as error:
        raise LauncherError(f"the run directory {run_dir} cannot be written: {error.strerror}") from error


def check_file(path: str) -> None:
    """Check a ``monitor_config.yaml`` and print a summary of it."""
    config = load_monitor_config(path, {})
    for notice in notices(config):
        _say(notice)
    print(
        f"{path}: job {config.job.name!r}, {config.job.num_workers} workers, {len(config.job.gpu_ids)} GPUs, "
        f"{len(config.progress_patterns)} progress patterns, {len(config.error_patterns)} error patterns"
    )


def _say(text: str) -> None:
    print(f"gpujob-exporter: {text}", file=sys.stderr)


def _hand_over(run_dir: Path, view_fd: int) -> None:
    """Tell the view where the run directory is, and leave the terminal to it."""
    with open(run_dir / "sidecars.log", "ab", opener=run_files.open_with_file_mode) as log:
        sys.stderr.flush()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.write(view_fd, os.fsencode(run_dir))
    os.close(view_fd)


def _refuse_shared(state_dir: Path) -> None:
    """Raise LauncherError if others may know a token in this directory, or can put one there."""
    if problem := foreign_owner(state_dir):
        raise LauncherError(f"--state-dir: {problem}; give a directory of your own")
    if writers := other_writers(read_facts(state_dir)):
        fix = f"run `chmod go-w {state_dir}`, or give a directory that only you can write"
        raise LauncherError(f"--state-dir: {state_dir} can be written by {writers}; {fix}")


def main(request: Mapping[str, object]) -> NoReturn:
    """Carry out a request of ``gpujob-exporter``."""
    try:
        if "check" in request:
            check_file(str(request["check"]))
            sys.exit(0)
        flags = request["flags"]
        found = FoundJob.from_json(request.get("found", {}))
        preparation = Preparation(flags if isinstance(flags, dict) else {}, os.environ, found)
        page = request["page"]
        run_dir, environ = preparation.run(page if isinstance(page, dict) else {})
    except (LauncherError, ExporterError, RecordError) as error:
        _say(str(error))
        sys.exit(USAGE)
    if preparation.is_first_node:
        for notice in notices(preparation.config):
            _say(notice)
        record = AttachedRecord.read(run_dir / run_files.ORCHESTRATOR_FILE) or AttachedRecord()
        _say(f"the run directory is {run_dir}; `gpujob watch {record.job_id}` shows the job")
    if isinstance(view_fd := request.get("view_fd"), int):
        _hand_over(run_dir, view_fd)
    words = ("sidecar", "--run-dir", str(run_dir), "--log-level", str(request["log_level"]))
    os.execve(sys.executable, [sys.executable, *ISOLATED, "-m", "exporter", *words], environ)  # noqa: S606 - no shell


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
