"""MLflow runs of a job, ended after the program that opened them was killed: on a server, in its files or its SQLite.

The runs name the job themselves: the launcher sets a variable whose tags MLflow adds to every run. A run that the
program has ended is left alone. Without the package of MLflow, which takes 100 MB.
"""

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from exporter.contract import run_files
from exporter.contract.report import Report
from launcher.errors import LauncherError
from launcher.plan.placeholders import fill_placeholders, placeholder_values
from launcher.plan.plan import Plan, RunFacts
from launcher.plan.trackers import CONTEXT, TAG
from launcher.report.state import UNFINISHED
from launcher.rundir.secrets_file import read_secrets

WAIT_S = 10.0  # for everything, while the nodes of the job wait
HURRY_S = 2.0  # the same within KillWait
MOST_EXPERIMENTS = 100  # in one search
MOST_BYTES = 1 << 20  # of a file that is read
FOLDER, DATABASE = "mlruns", "mlflow.db"
RUNNING, CODES = "1", {"FINISHED": "3", "FAILED": "4", "KILLED": "5"}  # in the files of runs
VARIABLES = (CONTEXT, "MLFLOW_RUN_ID", "MLFLOW_TRACKING_")  # variables that say which runs, or lead to the store
DATABRICKS = ("databricks", "databricks-uc")  # each a store without an address
KILLED = ("CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY")
_STATUS, _END = re.compile(r"^status: (\S+)$", re.MULTILINE), re.compile(r"^end_time: \S*$", re.MULTILINE)
_RUN_ID = re.compile(r"[0-9a-f]{32}")


class TrackerError(LauncherError):
    """The runs of a tracker could not be ended."""


def end_runs(plan: Plan, report: Report, environ: Mapping[str, str], now: float, wait_s: float = WAIT_S) -> list[str]:
    """End the runs of the job that still count as running. Return their ids. Raises TrackerError and OSError."""
    if report.requeued or report.state in (*UNFINISHED, "UNKNOWN") or not (stores := _stores(plan, report)):
        return []
    end, moment = time.monotonic() + wait_s, now if report.end is None else report.end
    secrets = {}
    if plan.secrets:
        try:
            secrets = read_secrets(plan.manifest.run_dir, plan.secrets)
        except LauncherError:
            pass  # removed after an earlier end; the credentials may be in the environment
    return [
        run_id
        for own in stores
        for run_id in _end_in_store(Path(plan.workdir), {**environ, **own, **secrets}, _status(report), moment, end)
    ]


def _stores(plan: Plan, report: Report) -> list[dict[str, str]]:
    """The variables by which tasks name their runs and where these are, each set once: roles may differ."""
    hosts = (*report.nodes, *[""] * plan.nodes)  # a report may name none
    facts = RunFacts(report.job_id, plan.manifest.run_dir, hosts, report.attempt)
    found: list[dict[str, str]] = []
    for task in plan.tasks:
        if CONTEXT in task.env:
            values = placeholder_values(plan, task, facts)
            named = ((name, value) for name, value in task.env.items() if name.startswith(VARIABLES))
            own = {name: fill_placeholders(value, values) for name, value in named}
            if own not in found:
                found.append(own)
    return found


def _end_in_store(workdir: Path, variables: Mapping[str, str], status: str, moment: float, end: float) -> Iterable[str]:
    name = _name(variables[CONTEXT])
    place = variables.get("MLFLOW_TRACKING_URI") or _usual_place(workdir)
    parts = urlparse(place)
    scheme = place if place in DATABRICKS else parts.scheme
    if scheme in ("http", "https"):
        return _Server(place.rstrip("/"), variables, end).end(name, status, moment)
    if scheme in ("", "file"):
        return _end_in_files(Path(workdir, unquote(parts.path)), name, variables, status, moment, end)
    if scheme == "sqlite":
        database = Path(workdir, unquote(parts.path.removeprefix("/")))
        return _end_in_database(database, name, variables, status, moment, max(0.0, end - time.monotonic()))
    # without the rest, in which a password may stand
    raise TrackerError(f"{scheme}:// holds the runs; they are ended only on a server, in a folder or in SQLite")


def _usual_place(workdir: Path) -> str:
    """Where MLflow keeps runs if nobody says: newer versions in a database, unless older ones left experiments.

    The folder alone says nothing, since artifacts are there in both cases.
    """
    has_experiments = any((workdir / FOLDER).glob("[0-9]*/meta.yaml"))
    return f"sqlite:///{DATABASE}" if (workdir / DATABASE).exists() and not has_experiments else FOLDER


def _name(context: str) -> str | None:
    """The name by which runs name the job; None if the job file has replaced the variable."""
    try:
        found = json.loads(context)
    except ValueError:
        return None
    name = found.get(TAG) if isinstance(found, dict) else None
    return name if isinstance(name, str) else None


def _status(report: Report) -> str:
    if report.state in KILLED:
        return "KILLED"
    return "FINISHED" if report.state == "COMPLETED" else "FAILED"


class _Server:
    """A tracking server of MLflow."""

    def __init__(self, address: str, environ: Mapping[str, str], end: float) -> None:
        import requests  # lazy: 30 ms, and few jobs have a tracker

        self._requests, self._address, self._end_at = requests, address, end
        self._shown = re.sub("//[^/]*@", "//", address)  # without user and password
        self._run_id = environ.get("MLFLOW_RUN_ID")
        self._session = requests.Session()
        user, password = environ.get("MLFLOW_TRACKING_USERNAME"), environ.get("MLFLOW_TRACKING_PASSWORD")
        if user and password:
            self._session.auth = user, password
        elif token := environ.get("MLFLOW_TRACKING_TOKEN"):
            self._session.headers["Authorization"] = f"Bearer {token}"
        if environ.get("MLFLOW_TRACKING_INSECURE_TLS") == "true":
            self._session.verify = False
        elif certificate := environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH"):
            self._session.verify = certificate

    def end(self, name: str | None, status: str, moment: float) -> list[str]:
        run_ids = [run["info"]["run_id"] for run in self._runs(name)]
        for run_id in run_ids:
            self._ask("runs/update", {"run_id": run_id, "status": status, "end_time": int(moment * 1000)})
        return run_ids

    def _runs(self, name: str | None) -> Iterator[Mapping[str, Any]]:
        """Running ones with the tag, and the one that the job continues."""
        experiments = (
            []
            if name is None
            else [each["experiment_id"] for each in self._pages("experiments/search", {}, "experiments", 1000)]
        )
        query = f"tags.`{TAG}` = '{name}' and attributes.status = 'RUNNING'"
        for first in range(0, len(experiments), MOST_EXPERIMENTS):
            wanted = {"experiment_ids": experiments[first : first + MOST_EXPERIMENTS], "filter": query}
            yield from self._pages("runs/search", wanted, "runs", 100)
        if self._run_id and _RUN_ID.fullmatch(self._run_id):
            run = self._ask(f"runs/get?run_id={self._run_id}")["run"]
            if run["info"].get("status") == "RUNNING" and _tag_of(run) != name:
                yield run

    def _pages(self, path: str, body: Mapping[str, object], key: str, most: int) -> Iterator[Mapping[str, Any]]:
        token = ""
        while True:
            page = {"page_token": token} if token else {}
            answer = self._ask(path, {**body, "max_results": most, **page})
            yield from answer.get(key, [])
            token = answer.get("next_page_token", "")
            if not token:
                return

    def _ask(self, path: str, body: Mapping[str, object] | None = None) -> Mapping[str, Any]:
        url, left_s = f"{self._address}/api/2.0/mlflow/{path}", self._end_at - time.monotonic()
        if left_s <= 0:
            raise TrackerError(f"{self._shown} is too slow")
        try:
            method = "GET" if body is None else "POST"
            answer = self._session.request(method, url, json=body, timeout=left_s, allow_redirects=False)
        except self._requests.RequestException as error:
            raise TrackerError(f"{self._shown} does not answer: {type(error).__name__}") from error
        try:
            found = answer.json() if answer.status_code == 200 else None
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise TrackerError(f"{self._shown} answers {path.partition('?')[0]} with status {answer.status_code}")
        return found


def _tag_of(run: Mapping[str, Any]) -> str | None:
    tags = run.get("data", {}).get("tags", [])
    return next((tag.get("value") for tag in tags if tag.get("key") == TAG), None)


def _end_in_files(
    folder: Path, name: str | None, environ: Mapping[str, str], status: str, moment: float, end: float
) -> Iterator[str]:
    """End runs in a folder of files: ``EXPERIMENT/RUN/meta.yaml``, with a file for each tag."""
    for path in folder.glob("*/*/meta.yaml"):
        if time.monotonic() > end:
            raise TrackerError(f"{folder} is too large or too slow to be searched in the time that is left")
        run_dir = path.parent
        is_named = name is not None and _read(run_dir / "tags" / TAG) == name
        if not is_named and run_dir.name != environ.get("MLFLOW_RUN_ID"):
            continue
        text = _read(path)
        found = None if text is None else _STATUS.search(text)
        if text is None or found is None or found[1] != RUNNING or path.stat().st_uid != os.geteuid():
            continue
        text = _STATUS.sub(f"status: {CODES[status]}", _END.sub(f"end_time: {int(moment * 1000)}", text))
        run_files.replace_file(path, f"{text}\n".encode(), mode=path.stat().st_mode & 0o777)
        yield run_dir.name


def _end_in_database(
    path: Path, name: str | None, environ: Mapping[str, str], status: str, moment: float, wait_s: float
) -> list[str]:
    """End runs in MLflow's database, if it is the user's own file."""
    import sqlite3  # lazy: few jobs have a store of this kind

    if not path.exists() or path.stat().st_uid != os.geteuid():
        return []
    query = """SELECT run_uuid FROM runs WHERE status = 'RUNNING' AND
        (run_uuid = ? OR run_uuid IN (SELECT run_uuid FROM tags WHERE key = ? AND value = ?))"""
    file = sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", timeout=wait_s, uri=True)
    try:
        with file:
            file.execute("BEGIN IMMEDIATE")
            run_ids = [run_id for (run_id,) in file.execute(query, (environ.get("MLFLOW_RUN_ID"), TAG, name))]
            ended = [(status, int(moment * 1000), run_id) for run_id in run_ids]
            file.executemany("UPDATE runs SET status = ?, end_time = ? WHERE run_uuid = ?", ended)
        return run_ids
    except sqlite3.Error as error:
        raise TrackerError(f"{path} cannot be written: {error}") from error
    finally:
        file.close()


def _read(path: Path) -> str | None:
    """The text of a small file; None if there is none."""
    try:
        with path.open("rb") as source:
            return source.read(MOST_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return None
