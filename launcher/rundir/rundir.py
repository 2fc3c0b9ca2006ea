"""Run directories: complete before a job can start."""

import getpass
import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from exporter import __version__
from exporter.contract import run_files
from exporter.contract.manifest import PathGroup
from exporter.contract.records import JsonValue
from launcher.errors import LauncherError
from launcher.plan.plan import PLAN_FILE, Plan
from launcher.rundir.files import plan_files
from launcher.rundir.job_ids import job_id_of
from launcher.rundir.secrets_file import write_secrets

# readable only by the owner: they repeat the job file, which may contain keys
PRIVATE_FILES = (PLAN_FILE, "config.yaml", "sbatch_script.sh")
LOGS_MODE = 0o755  # before the umask: who can write there can put other run directories in the place of these
PIPELINE_FILE = "pipeline.json"  # marks the directory of a pipeline; its jobs have their own beside it
SWEEP_FILE = "sweep.json"  # marks the directory of a sweep, which contains the run directories of its points


def staging_name() -> str:
    """Unique, hidden name for a directory that has no job id yet."""
    return f".gpujob-{os.urandom(8).hex()}"


def _make_group_directory(staging: Path, group: PathGroup) -> None:
    try:
        (staging / group.directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if not Path(group.directory).is_absolute():
            raise
        message = f'"{group.directory}" cannot be created: {error.strerror}; choose another directory'
        raise LauncherError(f"paths.{group.name}_dir: {message}") from error


def stage_run_dir(plan: Plan, script: str, parent: Path | None = None) -> Path:
    """Create a complete run directory without a job id, hidden in the logs directory or in ``parent``."""
    logs = Path(plan.logs_dir) if parent is None else parent
    staging = logs / staging_name()
    try:
        logs.mkdir(LOGS_MODE, parents=True, exist_ok=True)
        staging.mkdir(run_files.FOLDER_MODE)
        for name, text in plan_files(plan, script).items():
            path = staging / name
            with open(path, "w", encoding="utf-8", errors="surrogateescape", opener=_opener(name)) as out:
                out.write(text)
        write_secrets(staging, plan.secrets, os.environ)
        run_files.make_token(staging)
        for folder in (run_files.WORKERS_DIR, run_files.SIDECARS_DIR, run_files.STATUS_DIR, run_files.PROGRESS_DIR):
            (staging / folder).mkdir(run_files.FOLDER_MODE)
        run_files.write_job_state(str(staging), "launching")
        for group in plan.manifest.groups:
            _make_group_directory(staging, group)
    except OSError as error:
        discard_run_dir(staging)
        where = f": {error.filename}" if error.filename else ""  # a write names no file
        raise LauncherError(f"the run directory cannot be created in {logs}: {error.strerror}{where}") from error
    except BaseException:  # also Ctrl-C: nothing else would ever remove the secrets
        discard_run_dir(staging)
        raise
    return staging


def _opener(name: str) -> Callable[[str, int], int]:
    mode = 0o600 if name in PRIVATE_FILES else run_files.FILE_MODE
    return lambda path, flags: os.open(path, flags, mode)


def finalize_run_dir(staging: Path, plan: Plan, job_id: str, cluster: str | None = None) -> Path:
    """Give the run directory its final name, with the job id.

    ``cluster`` is the job's cluster if it is not this machine's.
    """
    final = plan.run_dir(job_id)
    try:
        run_files.write_json(staging / f"{job_id}.json", describe_submission(plan, job_id, cluster))
        staging.rename(final)
    except OSError as error:
        raise LauncherError(f"{final} cannot be created: {error.strerror}") from error
    return final


def create_run_dir(plan: Plan, script: str, job_id: str) -> Path:
    """Create the run directory of a job that has an id already, or nothing."""
    staging = stage_run_dir(plan, script)
    try:
        return finalize_run_dir(staging, plan, job_id)
    except BaseException:  # also Ctrl-C: nothing else would ever remove the secrets
        discard_run_dir(staging)
        raise


def discard_run_dir(staging: Path) -> None:
    """Remove a run directory for which no job was submitted."""
    shutil.rmtree(staging, ignore_errors=True)


def submitted_cluster(run_dir: Path) -> str | None:
    """Cluster to which a job was submitted, or None if it is this machine's."""
    found = (run_files.read_json(run_dir / f"{job_id_of(run_dir)}.json") or {}).get("cluster")
    return str(found) if found else None


def describe_submission(plan: Plan, job_id: str, cluster: str | None = None) -> dict[str, JsonValue]:
    """Who submitted the job, when and where, with which source tree and versions."""
    return {
        "schema": run_files.RECORD_SCHEMA,
        "job_id": job_id,
        "job_name": plan.job_name,
        "cluster": cluster,
        "user": user_name(),
        "host": socket.gethostname(),
        "submitted": time.time(),
        "budget": plan.resolved.get("budget"),
        "notify": plan.manifest.notify,
        "workdir": plan.workdir,
        "job_dir": plan.job_dir,
        "git": _git_state(plan.workdir),
        "versions": {"gpujob": __version__, "python": platform.python_version(), "kernel": platform.release()},
    }


def user_name() -> str:
    """Name of the user, or the uid if it has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _git_state(workdir: str) -> dict[str, JsonValue] | None:
    def ask(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", workdir, *words],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=5,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    if commit is None:
        return None
    return {
        "commit": commit,
        "branch": ask("rev-parse", "--abbrev-ref", "HEAD"),
        "dirty": bool(ask("status", "--porcelain", "--untracked-files=no")),
    }
