"""Runs of MLflow that a killed program has left running, on a made-up server and in files."""

import asyncio
import contextlib
import dataclasses
import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from exporter.contract.report import Report
from launcher.errors import LauncherError
from launcher.plan.plan import Plan
from launcher.plan.trackers import CONTEXT, tracker_environment
from launcher.report.trackers.mlflow import end_runs
from tests.support import launcher

NAME = "{job_id}_train_20261128_120000"
RUN = "0123456789abcdef0123456789abcdef"
PAGE = 2  # experiments in one answer


class Server:
    """The five requests of MLflow's REST API that are used."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, Any]] = []
        self.authorization: set[str | None] = set()
        self.status = 200
        self.address = ""

    def add(self, run_id: str, name: str, status: str = "RUNNING", experiment: str = "0") -> None:
        self.runs[run_id] = {"name": name, "status": status, "experiment": experiment, "end_time": None}

    async def answer(self, request: web.Request) -> web.Response:
        what = request.path.removeprefix("/api/2.0/mlflow/")
        body = await request.json() if request.method == "POST" else dict(request.query)
        self.asked.append((what, body))
        self.authorization.add(request.headers.get("Authorization"))
        return web.json_response(getattr(self, what.replace("/", "_"))(body), status=self.status)

    def experiments_search(self, body: Mapping[str, Any]) -> object:
        first = int(body.get("page_token", "0"))
        page = [{"experiment_id": str(number)} for number in range(first, first + PAGE)]
        return {"experiments": page, **({"next_page_token": str(first + PAGE)} if first < PAGE else {})}

    def runs_search(self, body: Mapping[str, Any]) -> object:
        found = [
            self._run(run_id)
            for run_id, run in self.runs.items()
            if body["filter"] == f"tags.`gpujob.run` = '{run['name']}' and attributes.status = 'RUNNING'"
            and run["status"] == "RUNNING"
            and run["experiment"] in body["experiment_ids"]
        ]
        return {"runs": found} if found else {}

    def runs_get(self, body: Mapping[str, Any]) -> object:
        return {"run": self._run(body["run_id"])}

    def runs_update(self, body: Mapping[str, Any]) -> object:
        self.runs[body["run_id"]] |= {"status": body["status"], "end_time": body["end_time"]}
        return {}

    def _run(self, run_id: str) -> Mapping[str, Any]:
        run = self.runs[run_id]
        tags = [{"key": "gpujob.run", "value": run["name"]}]
        return {"info": {"run_id": run_id, "status": run["status"]}, "data": {"tags": tags}}


@pytest.fixture
def server() -> Iterator[Server]:
    fake, loop, ready = Server(), asyncio.new_event_loop(), threading.Event()

    async def serve() -> None:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", fake.answer)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fake.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()

    loop.create_task(serve())
    threading.Thread(target=loop.run_forever, daemon=True).start()
    assert ready.wait(10)
    yield fake
    loop.call_soon_threadsafe(loop.stop)


def plan_of(folder: Path, **env: str) -> Plan:
    plan = launcher.plan_of(workdir=str(folder))
    own = {**tracker_environment(["mlflow"], NAME), **env}
    tasks = tuple(dataclasses.replace(task, env={**task.env, **own}) for task in plan.tasks)
    return dataclasses.replace(plan, tasks=tasks, workdir=str(folder))


def report_of(state: str = "CANCELLED", **over: Any) -> Report:
    return Report(job_id="7", job_name="train", state=state, exit_status=5, attempt=0, end=1000.5, **over)


def test_runs_of_the_job_are_ended_on_the_server_and_no_others(server: Server, tmp_path: Path) -> None:
    own = NAME.replace("{job_id}", "7")
    server.add("a", own, experiment="3")
    server.add("b", own, "FINISHED")  # by the program itself
    server.add("c", NAME.replace("{job_id}", "8"))
    server.add(RUN, "of an earlier job that this one continues")
    plan = plan_of(tmp_path, MLFLOW_TRACKING_URI=f"{server.address}/", MLFLOW_RUN_ID=RUN)
    environ = {"MLFLOW_TRACKING_TOKEN": "secret", "MLFLOW_TRACKING_URI": "http://elsewhere:1"}
    assert sorted(end_runs(plan, report_of(), environ, 2000.0)) == [RUN, "a"]
    states = {run_id: (run["status"], run["end_time"]) for run_id, run in server.runs.items()}
    ended = ("KILLED", 1000500)
    assert states == {"a": ended, "b": ("FINISHED", None), "c": ("RUNNING", None), RUN: ended}
    assert server.authorization == {"Bearer secret"}
    assert end_runs(plan, report_of(), environ, 2000.0) == []


@pytest.mark.parametrize(
    ("state", "status"),
    [("COMPLETED", "FINISHED"), ("FAILED", "FAILED"), ("INCOMPLETE", "FAILED"), ("TIMEOUT", "KILLED")],
)
def test_the_status_is_that_of_the_job(server: Server, tmp_path: Path, state: str, status: str) -> None:
    server.add("a", NAME.replace("{job_id}", "7"))
    end_runs(plan_of(tmp_path), report_of(state), {"MLFLOW_TRACKING_URI": server.address}, 2000.0)
    assert server.runs["a"]["status"] == status


@pytest.mark.parametrize(
    "report",
    [report_of("RUNNING"), report_of("UNKNOWN"), report_of("PREEMPTED", requeued=True)],
    ids=lambda each: each.state,
)
def test_a_job_that_may_go_on_ends_nothing(server: Server, tmp_path: Path, report: Report) -> None:
    assert end_runs(plan_of(tmp_path), report, {"MLFLOW_TRACKING_URI": server.address}, 2000.0) == []
    assert server.asked == []


def test_without_the_key_nobody_is_asked(server: Server, tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    tasks = tuple(dataclasses.replace(task, env={}) for task in plan.tasks)
    environ = {"MLFLOW_TRACKING_URI": server.address, "MLFLOW_RUN_ID": RUN}
    assert end_runs(dataclasses.replace(plan, tasks=tasks), report_of(), environ, 2000.0) == []
    replaced = plan_of(tmp_path, **{CONTEXT: '{"mine": "1"}'})  # runs then do not name the job
    assert end_runs(replaced, report_of(), {"MLFLOW_TRACKING_URI": server.address}, 2000.0) == []
    assert server.asked == []


def test_a_server_that_refuses_or_is_gone_is_named(server: Server, tmp_path: Path) -> None:
    server.status = 403
    with pytest.raises(LauncherError, match=r"^http://127.0.0.1:\d+ answers experiments/search with status 403$"):
        end_runs(plan_of(tmp_path), report_of(), {"MLFLOW_TRACKING_URI": server.address}, 2000.0)
    # a password in the address is in no log
    for address, problem in (
        ("http://ada:pass@127.0.0.1:9", r"^http://127\.0\.0\.1:9 does not answer: ConnectionError$"),
        ("postgresql://ada:pass@db/mlflow", r"^postgresql:// holds the runs; they are ended only on a server"),
        ("databricks", r"^databricks:// holds the runs; they are ended only on a server"),
    ):
        with pytest.raises(LauncherError, match=problem):
            end_runs(plan_of(tmp_path), report_of(), {"MLFLOW_TRACKING_URI": address}, 2000.0)


META = """artifact_uri: file:///x/mlruns/0/{run}/artifacts
end_time: null
entry_point_name: ''
experiment_id: '0'
lifecycle_stage: active
run_id: {run}
run_name: 'status: 1'
start_time: 999000
status: {status}
tags: []
user_id: ada
"""  # as MLflow 3 writes it


def test_runs_in_files_are_ended_in_their_place(tmp_path: Path) -> None:
    def add(run: str, name: str, status: int = 1) -> Path:
        folder = tmp_path / "mlruns" / "0" / run
        (folder / "tags").mkdir(parents=True)
        (folder / "tags" / "gpujob.run").write_text(name)
        (folder / "meta.yaml").write_text(META.format(run=run, status=status))
        return folder / "meta.yaml"

    (tmp_path / "mlruns" / "0").mkdir(parents=True)
    (tmp_path / "mlruns" / "0" / "meta.yaml").write_text("experiment_id: '0'\n")
    (tmp_path / "mlflow.db").touch()  # not used while the folder has experiments
    own = NAME.replace("{job_id}", "7")
    mine, ended, other = add("a" * 32, own), add("b" * 32, own, 3), add("c" * 32, "8_train")
    before = ended.read_text(), other.read_text()
    assert end_runs(plan_of(tmp_path), report_of(), {}, 2000.0) == ["a" * 32]
    wanted = META.format(run="a" * 32, status=5).replace("end_time: null", "end_time: 1000500")
    assert mine.read_text() == wanted
    assert (ended.read_text(), other.read_text()) == before
    assert (
        end_runs(plan_of(tmp_path, MLFLOW_TRACKING_URI=(tmp_path / "mlruns").as_uri()), report_of(), {}, 2000.0) == []
    )
    assert json.loads(plan_of(tmp_path).tasks[0].env[CONTEXT]) == {"gpujob.run": NAME}


def test_runs_of_all_roles_are_ended_in_the_place_of_each(server: Server, tmp_path: Path) -> None:
    server.add("a", NAME.replace("{job_id}", "7"))
    folder = tmp_path / "runs of 7" / "0" / RUN
    (folder / "tags").mkdir(parents=True)
    (folder / "tags" / "gpujob.run").write_text(NAME.replace("{job_id}", "7"))
    (folder / "meta.yaml").write_text(META.format(run=RUN, status=1))
    plans = [plan_of(tmp_path, MLFLOW_TRACKING_URI=uri) for uri in (server.address, "runs of {job_id}")]
    tasks = [
        dataclasses.replace(task, env={**task.env, "MLFLOW_RUN_NAME": f"of {number}"})
        for number, each in enumerate((*plans, *plans))
        for task in each.tasks
    ]
    assert end_runs(dataclasses.replace(plans[0], tasks=tuple(tasks)), report_of(), {}, 2000.0) == ["a", RUN]
    searches = [body for what, body in server.asked if what == "experiments/search"]
    assert len(searches) == 2, "the store is searched once, in two pages, whatever the names of the runs"


@pytest.mark.parametrize("place", ["", "sqlite:///runs/own.db", "sqlite:///{}/runs/own.db"])
def test_runs_in_a_database_are_ended_there(tmp_path: Path, place: str) -> None:
    path = tmp_path / ("runs/own.db" if place else "mlflow.db")
    path.parent.mkdir(exist_ok=True)
    (tmp_path / "mlruns" / "1" / "a" / "artifacts").mkdir(parents=True)  # artifacts are there with each store
    own = NAME.replace("{job_id}", "7")
    running, ended = ("RUNNING", None), ("KILLED", 1000500)
    with contextlib.closing(sqlite3.connect(path)) as file, file:
        file.execute("CREATE TABLE runs (run_uuid PRIMARY KEY, status, end_time)")  # as MLflow 3 names them
        file.execute("CREATE TABLE tags (key, value, run_uuid)")
        runs = {"a": (own, *running), "b": (own, "FINISHED", 5), "c": ("8_train", *running), RUN: ("", *running)}
        file.executemany("INSERT INTO runs VALUES (?, ?, ?)", [(run, *state) for run, (_, *state) in runs.items()])
        file.executemany("INSERT INTO tags VALUES ('gpujob.run', ?, ?)", [(n, run) for run, (n, *_) in runs.items()])
    plan = plan_of(tmp_path, MLFLOW_RUN_ID=RUN, **({"MLFLOW_TRACKING_URI": place.format(tmp_path)} if place else {}))
    assert sorted(end_runs(plan, report_of(), {}, 2000.0)) == [RUN, "a"]
    with contextlib.closing(sqlite3.connect(path)) as file:
        states = {run: tuple(state) for run, *state in file.execute("SELECT run_uuid, status, end_time FROM runs")}
    assert states == {"a": ended, "b": ("FINISHED", 5), "c": running, RUN: ended}
    assert end_runs(plan, report_of(), {}, 2000.0) == []


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("no database" * 100)
    with pytest.raises(LauncherError, match=r"mlflow\.db cannot be written: file is not a database$"):
        end_runs(plan_of(tmp_path), report_of(), {}, 2000.0)


PROGRAM = """
import json, os, pathlib, signal
run = pathlib.Path("mlruns", "0", "%s")
(run / "tags").mkdir(parents=True)
for name, value in json.loads(os.environ["MLFLOW_RUN_CONTEXT"]).items():
    (run / "tags" / name).write_text(value)
(run / "meta.yaml").write_text(%r)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_program_leaves_no_running_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM % (RUN, META.format(run=RUN, status=1)))
    spec = {"name": "train", "workers": [{"command": "python3 train.py"}], "on_end": ["mlflow"]}
    (tmp_path / "job.yaml").write_text(json.dumps({**spec, "monitoring": {"enabled": False}}))
    done = launcher.gpujob("run", "job.yaml", "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert report["state"] == "FAILED", done.stderr
    text = (tmp_path / "mlruns" / "0" / RUN / "meta.yaml").read_text()
    assert f"\nend_time: {int(report['end'] * 1000)}\n" in text
    assert "\nstatus: 4\n" in text
