"""Whole jobs on this machine, by the real command.

Each scenario runs one job once; several tests check its result. Only scenarios that
the collected tests need are run, a few at a time, in the order of this file.
"""

import contextlib
import getpass
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from exporter.contract.identity import safe_label
from launcher.words import plain_text
from tests.realstack.waiting import readable
from tests.support.builders import orchestrator_record
from tests.support.launcher import (
    HARD_NAMES,
    LocalJob,
    clean_environment,
    embed_job,
    gpujob,
    kill_all_with,
    poll,
    processes_with,
    read_events,
    read_json,
    settled_run_dir,
)
from tests.support.ports import free_port
from tests.support.record_schema import problems, published_schema
from tests.support.scenarios import Ended, Results, Scenarios

MAX_CONCURRENT = 4
DEAD_PROXY = "http://127.0.0.1:9"
UNWATCHED = {"enabled": False}  # for jobs whose sidecars are not tested: they start sooner
ESCAPE = "\x1b"
END_OF_ALLOCATION = 4102444800  # in 2100


@dataclass(kw_only=True)
class EndedRun(Ended):
    """A `gpujob run` that has ended."""

    job: LocalJob
    left_over: dict[int, list[str]]  # processes that still existed when the command had ended


scenario = Scenarios[Path, EndedRun]("results")


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results[EndedRun]]:
    with scenario.run_in(tmp_path_factory.mktemp("jobs"), request, MAX_CONCURRENT) as results:
        yield results


def ended(job: LocalJob, timeout: float = 90.0, **seen: Any) -> EndedRun:
    """Wait for the command and collect the processes that it left over."""
    outcome = job.wait(timeout)
    return EndedRun(job.run_dir, outcome, seen, job=job, left_over=job.left_over())


def run_gpujob(job: LocalJob, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command about the job in the directory where the job was started."""
    return gpujob(*argv, cwd=job.folder, env=clean_environment(**env))


def wrong_packages(folder: Path) -> dict[str, str]:
    """Create packages with our names where the job runs; return the variable that puts them first."""
    for name in ("launcher", "exporter"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise SystemExit('the wrong package')")
    return {"PYTHONPATH": str(folder)}


def quick_job(command: Any = "true", **over: Any) -> dict[str, Any]:
    """A job whose workers do almost nothing."""
    return {"name": "quick", "workers": [{"command": command}], "monitoring": UNWATCHED, **over}


def until_exists(enough: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """The job, with workers of its first role that do not end before this file exists."""
    first, *others = spec["workers"]
    script = f"{first['command']} && until [ -e {shlex.quote(str(enough))} ]; do sleep 0.05; done"
    return {**spec, "workers": [{**first, "command": ["sh", "-c", script]}, *others]}


def await_output(job: LocalJob, count: int = 1) -> None:
    """Wait until `count` workers have printed that they are up, and so have set their signal handlers."""
    poll(lambda: [path.read_text() for path in job.run_dir.glob("*_worker_w*.out")] == ["up\n"] * count, "the workers")


# A job that completes


@scenario
def completed(folder: Path) -> EndedRun:
    env = clean_environment(**wrong_packages(folder))
    limited = embed_job(items=800, rate=80, env={"HF_TOKEN": "hunter2"}, slurm={"time_limit": "00:00:01"})
    spec = until_exists(folder / "enough", limited)
    with LocalJob(folder, spec, "--interval", "0.2", env=env) as job:
        job.phase("running")
        job_id = job.run_dir.name.partition("_")[0]

        def running_view() -> subprocess.CompletedProcess[str] | None:
            completed_process = run_gpujob(
                job, "watch", job_id, "--once", "--json", http_proxy=DEAD_PROXY, HTTP_PROXY=DEAD_PROXY
            )
            view = json.loads(completed_process.stdout)
            by_http = [node["source"] for node in view["nodes"]] == ["http"]
            return (
                completed_process
                if by_http and view["phase"] == "running" and all(w["up"] for w in view["workers"])
                else None
            )

        with ThreadPoolExecutor(3) as pool:
            view = pool.submit(poll, running_view, "a view of the running job")
            commands = [("watch", str(job.run_dir), "--once"), ("report", job_id, "--json")]
            picture, report = pool.map(lambda entry: run_gpujob(job, *entry), commands)
            running = view.result()
        poll((job.run_dir / "targets.json").exists, "targets")
        targets = (job.run_dir / "targets.json").read_text()
        (folder / "enough").touch()
        done = ended(job)
        after = run_gpujob(job, "watch", job_id, "--once", "--json")
        done.seen = {"running": running, "picture": picture, "report": report, "after": after, "targets": targets}
        done.seen["text"] = run_gpujob(job, "report", job_id)
        done.seen["json"] = run_gpujob(job, "report", str(job.run_dir), "--json")
        return done


def test_a_job_that_does_its_work_completes(completed: EndedRun) -> None:
    assert completed.outcome == 0, completed.job.output
    report = completed.report
    assert (report["state"], report["exit_status"], report["cause"]) == ("COMPLETED", 0, None)
    assert report["verification"]["verified"] is True
    assert {check["name"]: check["passed"] for check in report["verification"]["checks"]} == dict.fromkeys(
        ("workers", "items", "outputs", "valid", "records", "checkpoint"), True
    )
    assert completed.reasons() == ["completed", "completed"]
    assert [worker["exit"]["evidence"] for worker in report["workers"]] == [["exit status 0"]] * 2
    assert completed.left_over == {}


def test_report_views_statuses_and_events_match_their_schemas(completed: EndedRun) -> None:
    statuses = [read_json(path) for path in (completed.run_dir / "status").glob("*.json")]
    views = [json.loads(completed.seen[name].stdout) for name in ("running", "after")]
    assert statuses
    for name, values in {
        "status": statuses,
        "report": [completed.report],
        "view": views,
        "events": read_events(completed.run_dir),
    }.items():
        schema = published_schema(name)
        assert [problem for value in values for problem in problems(value, schema)] == [], name


def test_a_local_job_is_not_measured_by_a_limit_that_nobody_enforces(completed: EndedRun) -> None:
    view = json.loads(completed.seen["running"].stdout)
    assert (view["time_limit_s"], view["limit_end"], view["time_limit_met_probability"]) == (None, None, None)
    assert "limit" not in completed.seen["picture"].stdout


def test_every_item_is_a_line_of_output(completed: EndedRun) -> None:
    assert completed.report["items"] == completed.report["items_expected"] == completed.job.lines() == 800
    assert [worker["items"] for worker in completed.report["workers"]] == [400, 400]


def test_the_run_directory_contains_the_documented_files(completed: EndedRun) -> None:
    run_dir = completed.run_dir
    names = {path.name for path in run_dir.iterdir()}
    node = completed.report["nodes"][0]
    documented = {"config.yaml", "sbatch_script.sh", "manifest.json", "events.jsonl", "log.out", "log.err", "workers"}
    documented |= {
        "report.json",
        "report.md",
        *(f"{node}_worker_w{rank}.{end}" for rank in (0, 1) for end in ("out", "err")),
    }
    assert documented <= names
    assert "targets.json" not in names  # removed at the end
    assert re.fullmatch(r"local-[0-9a-f]{8}_embed_\d{8}_\d{6}", run_dir.name)
    assert completed.job.json(f"{run_dir.name.partition('_')[0]}.json")["job_name"] == "embed"
    log = completed.job.log()
    assert f"Node 0: {node}" in log
    assert f"Launching worker worker 0, node 0 (local_rank 0): {node}" in log
    assert (run_dir / "log.err").read_text() == ""


def test_the_orchestrator_records_in_which_container_its_pid_is_valid(completed: EndedRun) -> None:
    record = json.loads((completed.run_dir / "orchestrator.json").read_text())
    assert record["pid_namespace"] == os.stat("/proc/self/ns/pid").st_ino


def test_events_record_the_history_of_the_job(completed: EndedRun) -> None:
    events = read_events(completed.run_dir)
    names = [event["event"] for event in events]
    last_start = len(names) - 1 - names[::-1].index("worker started")
    assert names.index("launch verified") > last_start, (
        "the launch check runs next to the work and ends after its start"
    )
    names.remove("launch verified")
    of_sidecars = {"first output", "checkpoint saved", "checkpoint unusual", "output complete", "milestone", "disk low"}
    of_sidecars |= {"near completion"}  # if a read falls into the last items
    assert {"first output", "checkpoint saved", "milestone"} <= set(names)
    assert [name for name in names if name not in of_sidecars] == [
        *("job started", "phase", "worker started", "worker started", "phase"),
        *("worker ended", "worker ended", "phase", "job ended", "phase"),
    ]
    phases = [event["phase"] for event in events if event["event"] == "phase"]
    assert phases == ["launching", "running", "completing", "finished"]
    assert all(event["job_id"] == completed.report["job_id"] for event in events)
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)


def test_a_secret_stays_in_the_plan(completed: EndedRun) -> None:
    files = [path for path in completed.run_dir.rglob("*") if path.is_file()]
    assert [path.name for path in files if b"hunter2" in path.read_bytes()] == ["plan.json"]
    assert "hunter2" not in completed.job.output
    assert yaml.safe_load((completed.run_dir / "config.yaml").read_text())["env"] == {"HF_TOKEN": "<redacted>"}


def test_output_to_a_pipe_contains_no_escape_sequence(completed: EndedRun) -> None:
    printed = [completed.job.output, *(done.stdout for key, done in completed.seen.items() if key != "targets")]
    assert not [text for text in printed if ESCAPE in text or "\r" in text]
    assert "COMPLETED and verified" in completed.job.output
    assert "worker_w0 on" in completed.job.output


KEYS = {"job_id", "job_name", "user", "state", "phase", "items", "items_expected", "rate", "eta", "workers", "nodes"}
KEYS |= {"schema", "time", "start", "end", "outputs", "filesystems", "events", "cause", "report", "run_dir"}
WORKER_KEYS = {"worker", "role", "rank", "node", "gpus", "up", "state", "exit", "items", "items_expected", "pid"}


def test_a_running_job_is_watched_by_its_id(completed: EndedRun) -> None:
    done = completed.seen["running"]
    view = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (10, "")
    assert set(view) >= KEYS
    assert (view["schema"], view["state"], view["phase"], view["report"]) == (1, "RUNNING", "running", None)
    assert all(set(worker) >= WORKER_KEYS for worker in view["workers"])
    assert [(worker["up"], worker["exit"]) for worker in view["workers"]] == [(True, None)] * 2
    assert view["items_expected"] == 800
    assert view["run_dir"] == str(completed.run_dir)


def test_the_sidecar_is_not_queried_through_the_users_proxy(completed: EndedRun) -> None:
    (node,) = json.loads(completed.seen["running"].stdout)["nodes"]
    assert (node["source"], node["error"]) == ("http", None)


def test_the_picture_of_a_running_job_names_its_workers(completed: EndedRun) -> None:
    done = completed.seen["picture"]
    assert done.returncode == 10
    assert "  running\n" in done.stdout
    assert "worker_w1" in done.stdout


def test_the_report_of_a_running_job_has_the_state_running(completed: EndedRun) -> None:
    done = completed.seen["report"]
    assert done.returncode == 10
    assert json.loads(done.stdout)["state"] == "RUNNING"


def test_the_target_file_has_the_address_while_the_job_runs(completed: EndedRun) -> None:
    (group,) = json.loads(completed.seen["targets"])
    assert group["labels"]["job_id"] == completed.report["job_id"]
    assert re.fullmatch(r"127\.0\.0\.1:\d+", group["targets"][0])


def test_watch_shows_the_final_state_of_an_ended_job(completed: EndedRun) -> None:
    done = completed.seen["after"]
    view = json.loads(done.stdout)
    assert done.returncode == 0
    assert set(view) >= KEYS
    assert (view["state"], view["phase"], view["items"]) == ("COMPLETED", "finished", 800)
    assert [worker["exit"]["reason"] for worker in view["workers"]] == ["completed"] * 2
    assert {"reason", "code", "signal"} <= set(view["workers"][0]["exit"])
    assert view["report"] == completed.report


def test_the_report_is_printed_as_text_and_as_json(completed: EndedRun) -> None:
    text, printed = completed.seen["text"], completed.seen["json"]
    assert (text.returncode, printed.returncode) == (0, 0)
    assert json.loads(printed.stdout) == completed.report
    assert text.stdout.strip() == (completed.run_dir / "report.md").read_text().strip()
    assert {"job_id", "state", "items", "workers"} <= set(completed.report)


# Failures


@scenario
def app_error(folder: Path) -> EndedRun:
    spec = embed_job("--only-rank 1 --at 30 --exit-code 3", items=9000, count=3)
    with LocalJob(folder, spec, "--json") as job:
        return ended(job)


def test_one_failed_worker_ends_the_job(app_error: EndedRun) -> None:
    assert app_error.outcome == 1
    report = json.loads(app_error.job.output)
    assert report == app_error.report
    assert (report["state"], report["exit_status"]) == ("FAILED", 1)
    cause = report["cause"]
    assert (cause["worker"], cause["rank"], cause["reason"], cause["code"]) == ("worker_w1", 1, "app_error", 3)
    assert cause["evidence"] == ["exit status 3"]
    assert "Launch verification, as last seen before the job ended\n" in app_error.job.log()
    assert app_error.reasons() == ["terminated_peer", "app_error", "terminated_peer"]
    assert "worker_w1 rank 1" in report["stopped"]["cause"]
    assert app_error.left_over == {}


@scenario
def unreported(folder: Path) -> EndedRun:
    with LocalJob(folder, quick_job("rm {run_dir}/manifest.json"), "--quiet") as job:
        return ended(job)


def test_the_log_is_named_if_there_is_no_report(unreported: EndedRun) -> None:
    assert unreported.outcome == 9
    log = unreported.run_dir / "log.out"
    assert unreported.job.output.splitlines()[-1].endswith(f" without a report (status 9); see {log}")
    assert "cannot build the report" in log.read_text()


def test_a_sidecar_needs_little_address_space(tmp_path: Path) -> None:
    limited = ("sh", "-c", 'ulimit -v 300000; exec "$@"', "sh")  # KiB; stacks of 8 MiB would take it twice
    job_of_one = quick_job("echo Processed 5/5 items", monitoring={"linger": 0})
    with LocalJob(tmp_path, job_of_one, "--json", prefix=limited) as job:
        assert job.wait() == 0, job.output
    (status,) = (job.run_dir / "status").glob("*.json")
    assert json.loads(status.read_text())["workers"][0]["items"] == 5


def test_a_report_without_a_place_in_the_run_directory_is_in_the_state_directory(tmp_path: Path) -> None:
    env = clean_environment(XDG_STATE_HOME=str(tmp_path / "state"))
    with LocalJob(tmp_path, quick_job("mkdir {run_dir}/report.json"), "--json", env=env) as job:
        assert job.wait() == 0
        run_dir, (printed,) = job.run_dir, (line for line in job.output.splitlines() if line.startswith("{"))
    place = tmp_path / "state/gpujob/reports" / f"{run_dir.name.partition('_')[0]}.json"
    assert f"its report cannot be written to {run_dir}, so it is {place}" in (run_dir / "log.err").read_text()
    assert f"gpujob: the report cannot be written to {run_dir}, so it is {place}" in job.output
    assert place.with_suffix(".md").read_text().startswith("# Job local-")
    assert (place.stat().st_mode & 0o777, json.loads(printed)) == (0o600, json.loads(place.read_text()))
    assert json.loads(gpujob("report", str(run_dir), "--json", cwd=tmp_path, env=env).stdout) == json.loads(printed)


@scenario
def too_short(folder: Path) -> EndedRun:
    with LocalJob(folder, embed_job("--only-rank 1 --at 80 --exit-code 0"), "--quiet") as job:
        return ended(job)


def test_a_job_with_too_few_items_is_incomplete(too_short: EndedRun) -> None:
    assert too_short.outcome == 8
    report = too_short.report
    assert (report["state"], report["verification"]["verified"]) == ("INCOMPLETE", False)
    (items,) = [check for check in report["verification"]["checks"] if check["name"] == "items"]
    assert items["passed"] is False
    assert items["detail"].startswith("230 of 300 items done")
    assert "items: FAILED: 230 of 300 items done" in too_short.job.output


# Policy


@scenario
def restarted_in_vain(folder: Path) -> EndedRun:
    workers = [{"command": "sh -c 'exit 3'", "restart": {"max": 2, "backoff": 0}}]
    with LocalJob(folder, quick_job(workers=workers), "--quiet") as job:
        return ended(job)


def test_a_worker_is_restarted_at_most_max_times(restarted_in_vain: EndedRun) -> None:
    assert restarted_in_vain.outcome == 1
    worker = restarted_in_vain.worker("worker_w0")
    assert (worker["restarts"], [end["reason"] for end in worker["exits"]]) == (2, ["app_error"] * 3)


@scenario
def tolerated(folder: Path) -> EndedRun:
    spec = until_exists(folder / "enough", embed_job(options="--shards 2"))  # a late helper would be ended with the job
    spec["workers"].append({"role": "helper", "command": "sh -c 'exit 3'", "critical": False})
    with LocalJob(folder, spec, "--quiet") as job:
        job.worker(0)
        poll(lambda: "helper_w0 is not critical" in job.log(), "the end of the helper")
        (folder / "enough").touch()
        return ended(job)


def test_the_job_continues_without_a_helper_that_failed(tolerated: EndedRun) -> None:
    assert (tolerated.outcome, tolerated.report["state"], tolerated.report["cause"]) == (0, "COMPLETED", None)
    assert tolerated.reasons() == ["completed", "completed", "app_error"]
    assert tolerated.report["items"] == tolerated.job.lines() == 300
    assert tolerated.report["stopped"] is None
    assert "helper_w0 is not critical: the job continues without it" in tolerated.job.log()


# Ends from outside


@scenario
def interrupted_in_a_terminal(folder: Path) -> EndedRun:
    controller_fd, terminal_fd = os.openpty()
    env = clean_environment(TERM="xterm-256color")
    shown: list[bytes] = []
    with LocalJob(
        folder, embed_job(items=9000), prefix=["setsid", "--ctty"], stdin=terminal_fd, stdout=terminal_fd, env=env
    ) as job:
        os.close(terminal_fd)

        def read() -> None:
            with contextlib.suppress(OSError):
                while readable(controller_fd, 30):
                    shown.append(os.read(controller_fd, 65536))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        poll(lambda: b"running" in b"".join(shown), "a picture of the running job")
        os.write(controller_fd, b"\x03")
        done = ended(job)
        reader.join(60)
        os.close(controller_fd)
        done.seen["screen"] = b"".join(shown).decode(errors="replace")
        return done


@scenario
def interrupted(folder: Path) -> EndedRun:
    with LocalJob(folder, embed_job(items=9000), "--json") as job:
        poll(lambda: all(job.lines_of(rank) >= 20 for rank in (0, 1)), "some work of each worker")
        job.process.send_signal(signal.SIGINT)
        return ended(job)


@scenario
def terminated(folder: Path) -> EndedRun:
    with LocalJob(folder, embed_job(items=9000), "--json") as job:
        job.phase("running")
        job.process.terminate()
        return ended(job)


@scenario
def hung_up(folder: Path) -> EndedRun:
    with LocalJob(folder, embed_job(items=9000), "--json") as job:
        for rank in (0, 1):  # a worker that has not started would not start any more
            job.worker(rank)
        job.process.send_signal(signal.SIGHUP)
        return ended(job)


@scenario
def stopped(folder: Path) -> EndedRun:
    with LocalJob(folder, embed_job(items=9000), "--json") as job:
        job.phase("running")
        job_id = job.run_dir.name.partition("_")[0]
        stop = run_gpujob(job, "stop", job_id)
        done = ended(job, stop=stop)
        done.seen["again"] = run_gpujob(job, "stop", job_id)
        return done


@pytest.mark.parametrize(
    ("name", "status", "cause"),
    [
        ("interrupted_in_a_terminal", 130, "SIGINT to `gpujob run`, by Ctrl-C"),
        ("interrupted", 130, "SIGINT to `gpujob run`, by Ctrl-C"),
        ("terminated", 5, "SIGTERM to the job"),
        ("hung_up", 5, "SIGHUP to `gpujob run` because the terminal was closed"),
        ("stopped", 5, f"gpujob stop by {getpass.getuser()} on {socket.gethostname()}"),
    ],
)
def test_a_job_ended_from_outside_is_cancelled(name: str, status: int, cause: str, results: Results[EndedRun]) -> None:
    done = results(name)
    assert done.outcome == status
    report = done.report
    assert (report["state"], report["exit_status"], report["cause"]) == ("CANCELLED", 5, None)
    assert (report["stopped"]["reason"], report["stopped"]["cause"]) == ("cancelled", cause)
    assert f"Stopping the job: {cause}" in (done.run_dir / "log.out").read_text()
    assert f"- stopped: {plain_text(cause)}\n" in (done.run_dir / "report.md").read_text()
    assert done.reasons() == ["cancelled", "cancelled"]
    assert "the job was being stopped" in "; ".join(done.worker("worker_w0")["exit"]["evidence"])
    assert done.events("signal")
    assert done.left_over == {}


def test_workers_have_time_to_save_their_work(interrupted: EndedRun) -> None:
    positions = [worker["items"] for worker in interrupted.report["workers"]]
    for rank, position in enumerate(positions):
        assert (interrupted.run_dir / f"checkpoint_worker_{rank}_step_{position}.json").is_file()


@scenario
def interrupted_behind_a_shell(folder: Path) -> EndedRun:
    saves = "import signal; signal.signal(signal.SIGTERM, lambda *_: open('saved', 'w')); print('up'); signal.pause()"
    script = f'{sys.executable} -u -c "{saves}"\ntrue'
    with LocalJob(folder, quick_job(["bash", "-c", script]), "--quiet") as job:
        await_output(job)
        job.process.send_signal(signal.SIGINT)
        done = ended(job)
        done.seen["saved"] = (folder / "saved").exists()
        return done


def test_a_program_behind_a_shell_saves_its_work(interrupted_behind_a_shell: EndedRun) -> None:
    done = interrupted_behind_a_shell
    assert done.seen["saved"]
    assert (done.report["state"], done.reasons(), done.left_over) == ("CANCELLED", ["cancelled"], {})


@scenario
def interrupted_twice(folder: Path) -> EndedRun:
    stubborn = {"command": ["sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.1; done"], "count": 2}
    with LocalJob(folder, {"name": "stubborn", "workers": [stubborn], "monitoring": UNWATCHED}, "--quiet") as job:
        await_output(job, 2)
        job.process.send_signal(signal.SIGINT)
        stop = poll(lambda: job.json("state.json").get("stop"), "the stop")
        job.process.send_signal(signal.SIGINT)
        return ended(job, 26, stop=stop)  # the workers have 27 s of KillWait from the first signal


def test_a_second_ctrl_c_kills_workers_that_do_not_end(interrupted_twice: EndedRun) -> None:
    assert (interrupted_twice.outcome, interrupted_twice.report["state"]) == (130, "CANCELLED")
    assert "its workers have 27 s to end; Ctrl-C again kills them" in interrupted_twice.job.output
    assert interrupted_twice.left_over == {}
    for worker in interrupted_twice.report["workers"]:
        assert (worker["exit"]["reason"], worker["exit"]["signal"]) == ("cancelled", "SIGKILL")
    stop = interrupted_twice.seen["stop"]
    assert stop["kill_at"] - stop["time"] == pytest.approx(27.0, abs=1.0)


def test_a_terminal_shows_a_live_picture(interrupted_in_a_terminal: EndedRun) -> None:
    screen = interrupted_in_a_terminal.seen["screen"]
    assert ESCAPE in screen
    assert "running" in screen
    assert "stopped: SIGINT to `gpujob run`, by Ctrl-C" in screen
    assert "Traceback" not in screen


def test_stop_prints_that_the_job_is_being_stopped(stopped: EndedRun) -> None:
    job_id = stopped.report["job_id"]
    assert (stopped.seen["stop"].returncode, stopped.seen["stop"].stdout) == (0, f"job {job_id} is being stopped\n")
    assert stopped.seen["again"].stdout == f"job {job_id} has ended: CANCELLED\n"


@scenario
def under_nohup(folder: Path) -> EndedRun:
    spec = until_exists(folder / "enough", embed_job(monitoring=UNWATCHED))
    with LocalJob(folder, spec, "--quiet", prefix=["nohup"]) as job:
        job.phase("running")
        job.process.send_signal(signal.SIGHUP)
        (folder / "enough").touch()  # some work remains
        return ended(job)


def test_a_job_under_nohup_survives_the_end_of_its_terminal(under_nohup: EndedRun) -> None:
    assert (under_nohup.outcome, under_nohup.report["state"]) == (0, "COMPLETED")


@scenario
def completed_on_sigterm(folder: Path) -> EndedRun:
    spec = quick_job("sh -c 'trap \"exit 0\" TERM; echo up; while :; do sleep 0.05; done'")
    with LocalJob(folder, spec, "--quiet") as job:
        await_output(job)
        job.process.terminate()
        return ended(job)


def test_a_job_whose_workers_exit_0_on_sigterm_is_cancelled(completed_on_sigterm: EndedRun) -> None:
    assert (completed_on_sigterm.outcome, completed_on_sigterm.report["state"]) == (5, "CANCELLED")


@contextlib.contextmanager
def orchestrator(run_dir: Path, stdout: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The orchestrator of a run directory, without `gpujob run` above it."""
    argv = [sys.executable, "-I", "-m", "launcher.run.orchestrator", str(run_dir), "--local"]
    with subprocess.Popen(argv, env=clean_environment(), stdout=stdout, stderr=stdout, cwd=run_dir) as process:
        try:
            yield process
        finally:
            process.kill()
            kill_all_with(run_dir.parent)


def test_a_worker_that_ignores_sigterm_is_killed_at_the_deadline(tmp_path: Path) -> None:
    spec = quick_job("sh -c 'trap \"\" TERM; echo up; while :; do sleep 0.05; done'")
    run_dir = settled_run_dir(tmp_path, spec, kill_wait_s=2.5)
    with (run_dir / "log.out").open("wb") as log, orchestrator(run_dir, log) as process:
        poll(lambda: any(path.read_text() == "up\n" for path in run_dir.glob("*_worker_w0.out")), "the worker")
        process.terminate()
        assert process.wait(60) == 5
        assert processes_with(run_dir) == {}
    report = read_json(run_dir / "report.json")
    assert (report["state"], report["workers"][0]["exit"]["reason"]) == ("CANCELLED", "cancelled")
    assert "Killing 1 worker that did not end in time" in (run_dir / "log.out").read_text()


def test_a_full_disk_under_the_log_does_not_end_the_job(tmp_path: Path) -> None:
    spec = quick_job("sh -c 'echo done > result'")
    run_dir = settled_run_dir(tmp_path, spec, kill_wait_s=5)
    with open("/dev/full", "wb") as full, orchestrator(run_dir, full) as process:
        assert process.wait(60) == 0
    assert (tmp_path / "result").read_text() == "done\n"
    assert read_json(run_dir / "report.json")["state"] == "COMPLETED"


# Parts of gpujob that are killed


@scenario
def orchestrator_killed(folder: Path) -> EndedRun:
    with LocalJob(folder, embed_job(items=90000), "--quiet") as job:  # the workers would not end in time by themselves
        job.phase("running")
        os.kill(job.json("orchestrator.json")["pid"], signal.SIGKILL)
        job.wait()
        poll(lambda: not job.left_over(), "the end of workers and sidecar")
        watch = run_gpujob(job, "watch", str(job.run_dir), "--once", "--json")
        return ended(job, watch=watch, report=run_gpujob(job, "report", str(job.run_dir)))


def test_nothing_outlives_the_orchestrator(orchestrator_killed: EndedRun) -> None:
    assert orchestrator_killed.outcome == 1
    assert "the orchestrator was killed by SIGKILL" in orchestrator_killed.job.output
    assert orchestrator_killed.left_over == {}
    watch, report = orchestrator_killed.seen["watch"], orchestrator_killed.seen["report"]
    assert (watch.returncode, json.loads(watch.stdout)["state"]) == (1, "FAILED")
    assert report.returncode == 1
    assert not (orchestrator_killed.run_dir / "targets.json").exists()


@scenario
def guard_killed(folder: Path) -> EndedRun:
    with LocalJob(folder, embed_job(items=9000, monitoring=UNWATCHED), "--quiet") as job:
        job.phase("running")
        processes = processes_with(job.run_dir)
        os.kill(next(pid for pid, argv in processes.items() if "launcher.guard" in argv), signal.SIGKILL)
        return ended(job)


def test_a_job_without_its_guard_ends_in_order_with_a_report(guard_killed: EndedRun) -> None:
    report = guard_killed.report
    assert (guard_killed.outcome, report["state"], report["cause"]["worker"]) == (1, "FAILED", "guard")
    assert report["stopped"]["cause"] == "the guard of the orchestrator was killed"
    assert len(guard_killed.events("signal")) == 1
    assert guard_killed.left_over == {}


@scenario
def orchestrator_stopped(folder: Path) -> EndedRun:
    spec = until_exists(folder / "enough", quick_job("true", monitoring={"check_interval": 0.5, "linger": 0}))
    with LocalJob(folder, spec, "--quiet") as job:
        job.phase("running")
        orchestrator_pid = job.json("orchestrator.json")["pid"]
        os.kill(orchestrator_pid, signal.SIGSTOP)
        poll(lambda: job.json("state.json").get("orchestrator_silent_since"), "the message about it")

        def silent_view() -> subprocess.CompletedProcess[str] | None:
            view = run_gpujob(job, "watch", str(job.run_dir), "--once")
            return view if "the orchestrator has not responded since" in view.stdout else None

        view = poll(silent_view, "a view of the silent orchestrator")

        def status() -> dict[str, Any]:
            job_status: dict[str, Any] = read_json(next((job.run_dir / "status").glob("*.json")))["job"]
            return job_status

        poll(lambda: status()["orchestrator_silent_since"], "the status of the sidecar")
        os.kill(orchestrator_pid, signal.SIGCONT)
        poll(lambda: not status()["orchestrator_silent_since"], "the next status of the sidecar")
        (folder / "enough").touch()
        return ended(job, view=view.stdout)


def test_an_orchestrator_that_is_stopped_for_long_is_reported(orchestrator_stopped: EndedRun) -> None:
    assert (orchestrator_stopped.outcome, orchestrator_stopped.report["state"]) == (0, "COMPLETED")
    events = orchestrator_stopped.events("orchestrator silent") + orchestrator_stopped.events("orchestrator responds")
    assert [event["silent_s"] >= 30 for event in events] == [True, True]
    assert "has not responded for 30 s: it is stopped (SIGSTOP). The workers continue" in orchestrator_stopped.log()
    assert "The orchestrator responds again after " in orchestrator_stopped.log()


@scenario
def output_in_use(folder: Path) -> EndedRun:
    output = {"paths": {"output_dir": str(folder / "out")}}
    env = clean_environment(XDG_STATE_HOME=str(folder / "state"))
    spec = until_exists(folder / "enough", quick_job("true", **output))
    with LocalJob(folder, spec, "--quiet", env=env) as job:
        job.phase("running")
        refused = run_gpujob(job, "run", "job.yaml", "--quiet", XDG_STATE_HOME=str(folder / "state"))
        late = settled_run_dir(folder / "late", quick_job("true", **output))
        argv = [sys.executable, "-I", "-m", "launcher.run.orchestrator", str(late), "--local"]
        status = subprocess.run(argv, env=env, stdout=subprocess.DEVNULL, timeout=60, check=False).returncode
        (folder / "enough").touch()
        return ended(job, refused=refused, late=(status, read_json(late / "report.json")))


def test_a_job_that_writes_the_files_of_a_running_one_is_refused(output_in_use: EndedRun) -> None:
    job_id = output_in_use.run_dir.name.partition("_")[0]
    named = f"paths.output_dir: job {job_id} (quick) of "
    refused = output_in_use.seen["refused"]
    assert (refused.returncode, named in refused.stderr) == (2, True)
    assert len(list(output_in_use.job.folder.glob("logs/*"))) == 1
    status, report = output_in_use.seen["late"]
    assert (status, report["state"], report["cause"]["reason"]) == (1, "FAILED", "launch_failed")
    assert named in report["cause"]["evidence"][0]
    assert output_in_use.outcome == 0


@scenario
def command_killed(folder: Path) -> EndedRun:
    with LocalJob(folder, embed_job(items=90000, monitoring=UNWATCHED), "--quiet") as job:
        job.phase("running")
        job.process.kill()
        job.wait()
        poll(lambda: not job.left_over(), "the end of the job")
        return ended(job)


def test_a_job_ends_in_order_if_gpujob_run_is_killed(command_killed: EndedRun) -> None:
    assert command_killed.report["state"] == "CANCELLED"
    assert command_killed.left_over == {}


@scenario
def sidecar_killed(folder: Path) -> EndedRun:
    # outside the kernel's range: no other process gets the port while no sidecar listens
    monitoring = {"check_interval": 0.5, "linger": 0, "listen_address": f"127.0.0.1:{free_port()}"}
    spec = until_exists(folder / "enough", embed_job(items=800, monitoring=monitoring))
    with LocalJob(folder, spec, "--quiet") as job:
        job.phase("running")
        record = poll(lambda: next((job.run_dir / "sidecars").glob("*.json"), None), "a sidecar that listens")
        address = read_json(record)["address"]
        os.kill(job.sidecar_pid(), signal.SIGKILL)
        (log,) = job.run_dir.glob("*_sidecar.log")
        poll(lambda: log.read_text().count("listening on") == 2, "another sidecar that listens")
        (folder / "enough").touch()
        return ended(job, log=log.read_text(), address=address)


def test_a_killed_sidecar_restarts_at_the_same_address(sidecar_killed: EndedRun) -> None:
    assert "the sidecar ended by signal 9; restarting it in " in sidecar_killed.seen["log"]
    assert sidecar_killed.outcome == 0, sidecar_killed.job.output
    assert sidecar_killed.report["items"] == sidecar_killed.job.lines() == 800
    assert sidecar_killed.report["monitoring"]["nodes_without"] == []
    (path,) = (sidecar_killed.run_dir / "sidecars").glob("*.json")
    assert read_json(path)["address"] == sidecar_killed.seen["address"]


@scenario
def without_a_sidecar(folder: Path) -> EndedRun:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        spec = embed_job(monitoring={"check_interval": 0.5, "linger": 0, "listen_address": address})
        with LocalJob(folder, spec, "--quiet") as job:
            return ended(job)


def test_a_job_without_a_working_sidecar_completes_with_a_warning(without_a_sidecar: EndedRun) -> None:
    assert without_a_sidecar.outcome == 0, without_a_sidecar.job.output
    report, job = without_a_sidecar.report, without_a_sidecar.job
    assert report["items"] == job.lines() == 300
    assert report["monitoring"] == {"nodes_with_final_values": [], "nodes_without": report["nodes"]}
    assert "could not run on" in job.log()
    assert "the job runs without monitoring" in job.log()
    assert f"no final values from: {report['nodes'][0]}" in job.output
    assert "cannot listen on 127.0.0.1:" in next(job.run_dir.glob("*sidecar.log")).read_text()


@scenario
def not_monitored(folder: Path) -> EndedRun:
    spec = quick_job("sh -c 'echo Processed 5/5 items'")
    with LocalJob(folder, spec, "--quiet", env=clean_environment(HOME="/proc")) as job:
        return ended(job)


def test_a_job_runs_without_sidecars_and_without_a_writable_home(not_monitored: EndedRun) -> None:
    assert not_monitored.outcome == 0
    assert "No sidecars: monitoring.enabled is false" in not_monitored.job.log()
    assert (not_monitored.report["items"], not_monitored.worker("worker_w0")["items_expected"]) == (5, 5)


@scenario
def children_left(folder: Path) -> EndedRun:
    command = "sh -c 'sleep 300 & echo $!; exit 3'"
    spec = quick_job(workers=[{"command": command, "restart": {"max": 1, "backoff": 0}}])
    with LocalJob(folder, spec, "--quiet") as job:
        return ended(job)


def test_children_of_a_worker_do_not_outlive_it(children_left: EndedRun) -> None:
    assert children_left.outcome == 1
    assert children_left.left_over == {}


# Environment of a worker


@scenario
def bare_environment(folder: Path) -> EndedRun:
    spec = quick_job("cat /proc/self/environ", env={"MINE": "{rank} {{rank}}"})
    with LocalJob(folder, spec, "--quiet", env={"PATH": os.environ["PATH"], "ODD": "\udce9"}) as job:
        return ended(job)


def environment_of(done: EndedRun) -> dict[bytes, bytes]:
    (path,) = done.run_dir.glob("*_worker_w0.out")
    pairs = (entry.partition(b"=") for entry in path.read_bytes().split(b"\0") if entry)
    return {name: value for name, _, value in pairs}


def test_a_job_runs_without_a_home_or_a_locale(bare_environment: EndedRun) -> None:
    assert bare_environment.outcome == 0, bare_environment.job.output
    variables = environment_of(bare_environment)
    assert variables[b"ODD"] == b"\xe9"
    assert (variables[b"MINE"], variables[b"GPUJOB_RANK"], variables[b"GPUJOB_WORLD_SIZE"]) == (b"0 {rank}", b"0", b"1")
    assert b"HOME" not in variables
    assert variables[b"PYTHONUNBUFFERED"] == b"1"


def test_a_worker_gets_only_the_users_variables_and_ours(bare_environment: EndedRun) -> None:
    ours = {name for name in environment_of(bare_environment) if name.startswith(b"GPUJOB_")}
    given = set(environment_of(bare_environment)) - {b"PWD"}  # a script in a path with a space is started by sh
    assert given - ours == {b"PATH", b"ODD", b"MINE", b"PYTHONUNBUFFERED"}


CONNECT = """
import os, socket
if "RANK" not in os.environ:
    print("alone")
    raise SystemExit
at, size = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), int(os.environ["WORLD_SIZE"])
if os.environ["RANK"] == "0":
    server = socket.create_server(at)
    peers = [server.accept()[0] for _ in range(size - 1)]
    ranks = sorted(peer.recv(9) for peer in peers)
    print("met", b" ".join(ranks).decode())
else:
    for _ in range(600):
        try:
            peer = socket.create_connection(at)
            break
        except ConnectionRefusedError:
            import time; time.sleep(0.05)
    peer.send(os.environ["RANK"].encode())
    peer.recv(1)
"""  # what torch.distributed does with `env://`, by plain sockets


@scenario
def connected(folder: Path) -> EndedRun:
    folder.mkdir()
    (folder / "connect.py").write_text(CONNECT)
    (folder / "work.sh").write_text("echo ${RANK-alone}\n")
    spec = quick_job(
        resources={"nodes": 2},
        workers=[
            {"role": "train", "count": 4, "command": "python3 connect.py"},
            {"role": "one", "command": "python3 connect.py"},
            {"role": "shell", "command": "sh work.sh"},
            {"role": "binary", "command": "env"},
        ],
    )
    with LocalJob(folder, spec, "--quiet") as job:
        return ended(job)


def test_processes_of_a_role_connect_and_single_processes_run_alone(connected: EndedRun) -> None:
    assert connected.outcome == 0, connected.job.output
    said = {
        name: next(connected.run_dir.glob(f"*_{name}_w0.out")).read_text()
        for name in ("train", "one", "shell", "binary")
    }
    assert (said["train"], said["one"], said["shell"]) == ("met 1 2 3\n", "alone\n", "alone\n")
    assert {"GPUJOB_RANK=6", "GPUJOB_WORLD_SIZE=7"} <= set(said["binary"].splitlines())
    assert not re.search("^(RANK|WORLD_SIZE|LOCAL_|MASTER_)", said["binary"], re.MULTILINE)


@scenario
def two_nodes(folder: Path) -> EndedRun:
    command = "sh -c 'echo $GPUJOB_NODE $CUDA_VISIBLE_DEVICES $GPUJOB_FOM_URL'"
    spec = quick_job(
        monitoring={"check_interval": 0.5, "linger": 0},
        resources={"nodes": 2, "gpus_per_node": 2},
        workers=[{"count": 4, "gpus": 1, "command": command}],
    )
    with LocalJob(folder, spec, "--quiet", env=clean_environment(SLURM_JOB_END_TIME=str(END_OF_ALLOCATION))) as job:
        return ended(job)


def printed_by(done: EndedRun) -> list[str]:
    paths = [next(done.run_dir.glob(f"*_worker_w{worker['rank']}.out")) for worker in done.report["workers"]]
    return [path.read_text().strip() for path in paths]


def test_the_nodes_of_a_local_job_are_virtual(two_nodes: EndedRun) -> None:
    assert two_nodes.outcome == 0, two_nodes.job.output
    nodes = two_nodes.report["nodes"]
    assert len(set(nodes)) == 2
    assert [line.split()[0] for line in printed_by(two_nodes)] == [nodes[0], nodes[0], nodes[1], nodes[1]]
    assert two_nodes.report["monitoring"]["nodes_with_final_values"] == sorted(nodes)


def test_each_worker_gets_the_url_of_the_sidecar_on_its_node(two_nodes: EndedRun) -> None:
    ports = {node: read_json(two_nodes.run_dir / f"sidecars/{node}.json")["port"] for node in two_nodes.report["nodes"]}
    assert len(set(ports.values())) == 2
    for line in printed_by(two_nodes):
        node, _, url = line.split()
        assert url == f"http://127.0.0.1:{ports[node]}/fom"


def test_an_unmonitored_worker_gets_a_progress_file_and_no_fom_url(bare_environment: EndedRun) -> None:
    variables = environment_of(bare_environment)
    assert variables[b"GPUJOB_FOM_URL"] == b""
    progress = Path(os.fsdecode(variables[b"GPUJOB_PROGRESS_FILE"]))
    assert progress.parent == bare_environment.run_dir / "progress"
    assert progress.parent.is_dir()


def test_a_local_job_in_a_slurm_allocation_has_the_limit_of_the_allocation(two_nodes: EndedRun) -> None:
    ends = {read_json(path)["job"]["end"] for path in (two_nodes.run_dir / "status").glob("*.json")}
    assert ends == {END_OF_ALLOCATION}
    view = json.loads(run_gpujob(two_nodes.job, "watch", str(two_nodes.run_dir), "--once", "--json").stdout)
    assert view["limit_end"] == END_OF_ALLOCATION
    assert view["time_limit_s"] == pytest.approx(END_OF_ALLOCATION - view["start"], abs=2)


def test_virtual_nodes_do_not_share_gpus(two_nodes: EndedRun) -> None:
    assert [line.split()[1] for line in printed_by(two_nodes)] == ["0", "1", "2", "3"]


@scenario
def hostile(folder: Path) -> EndedRun:
    job_folder = folder.joinpath(*HARD_NAMES)
    job_folder.mkdir(parents=True)
    spec = embed_job(
        name="".join(HARD_NAMES), items=60,
        paths={"output_dir": f"out/{HARD_NAMES[3]}", "checkpoint_dir": f"{HARD_NAMES[5]}"},
    )  # fmt: skip
    spec["workers"][0]["env"] = {"NAME": "".join(HARD_NAMES)}
    with LocalJob(job_folder, spec, "--interval", "0.2", env=clean_environment(**wrong_packages(job_folder))) as job:
        record = poll(lambda: next((job.run_dir / "sidecars").glob("*.json"), None), "a sidecar that listens")
        labels = read_json(record)["labels"]
        view = run_gpujob(job, "watch", job.run_dir.name.partition("_")[0], "--once", "--json")
        return ended(job, labels=labels, view=view)


def test_hostile_names_are_treated_as_data(hostile: EndedRun) -> None:
    assert hostile.outcome == 0, hostile.job.output
    assert (hostile.report["items"], hostile.report["job_name"]) == (60, "".join(HARD_NAMES))
    top = hostile.job.folder
    assert not [
        path for parent in (top, *top.parents[: len(HARD_NAMES)]) for path in parent.glob("*pwned") if path.is_file()
    ]
    assert len(list((top / "out" / HARD_NAMES[3]).glob("output_worker_*.jsonl"))) == 2
    assert hostile.left_over == {}


def test_hostile_names_do_not_reach_labels_or_the_terminal(hostile: EndedRun) -> None:
    label = hostile.seen["labels"]["job_name"]
    assert label == safe_label("".join(HARD_NAMES))
    assert re.fullmatch(r"[\w.:@+-]+", label)
    assert json.loads(hostile.seen["view"].stdout)["job_name"] == "".join(HARD_NAMES)
    assert "two\nlines" not in hostile.job.output.replace(str(hostile.run_dir), "")
    assert ESCAPE not in hostile.job.output


# Processes of others


def test_a_reused_pid_is_not_signalled(tmp_path: Path) -> None:
    run_dir = settled_run_dir(tmp_path, quick_job(), kill_wait_s=5)
    with subprocess.Popen(["sleep", "600"]) as foreign_process:
        try:
            record = orchestrator_record(pid=foreign_process.pid, start_ticks=1)
            (run_dir / "orchestrator.json").write_text(json.dumps(record))
            done = gpujob("stop", str(run_dir), cwd=tmp_path)
            assert "has ended: UNKNOWN" in done.stdout
            assert foreign_process.poll() is None
        finally:
            foreign_process.kill()


@pytest.mark.parametrize(
    ("over", "place"),
    [
        ({"host": "login1"}, "login1"),
        ({"pid_namespace": 1}, f"{os.uname().nodename}, in another container"),
    ],
    ids=["machine", "container"],
)
def test_a_process_of_that_number_elsewhere_is_not_signalled(over: dict[str, Any], place: str, tmp_path: Path) -> None:
    run_dir = settled_run_dir(tmp_path, quick_job(), kill_wait_s=5)
    with subprocess.Popen(["sleep", "600"]) as foreign_process:
        try:
            record = orchestrator_record(pid=foreign_process.pid, start_ticks=None, **over)
            for start in (time.time(), 1000.0):  # it runs, or nothing is known of it
                (run_dir / "orchestrator.json").write_text(json.dumps({**record, "start": start}))
                done = gpujob("stop", str(run_dir), cwd=tmp_path)
                assert (done.returncode, done.stdout) == (2, "")
                assert done.stderr.endswith(f" was started on {place}; stop it there\n")
            assert foreign_process.poll() is None
        finally:
            foreign_process.kill()


def test_slurm_is_not_queried_for_a_local_job(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/squeue").write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\n")
    (tmp_path / "bin/squeue").chmod(0o755)
    run_dir = settled_run_dir(tmp_path, quick_job(), kill_wait_s=5)
    env = clean_environment(PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    assert gpujob("watch", str(run_dir), "--once", cwd=tmp_path, env=env).returncode in (9, 10)
    assert not (tmp_path / "asked").exists()
