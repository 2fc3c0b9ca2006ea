"""The queue out of slurmrestd: the rows of squeue, whatever the version."""

import getpass
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from exporter.__main__ import REST_ADDRESS, needs_openssl
from exporter.contract.errors import ExporterError
from exporter.slurm.commands_reader import SlurmReader, SlurmUnansweredError
from exporter.slurm.queue import parse_queue
from exporter.slurm.sources.http_reader import NoAnswerError, read_json
from exporter.slurm.sources.rest_reader import ADDRESS, RestReader, parse_rest_jobs, slurm_reader
from tests.support.exporter import until
from tests.support.fake_slurm import FakeSlurm
from tests.support.launcher import ROOT

SAMPLES = Path(__file__).parents[1] / "samples"
VERSIONS = ("22.05.8", "24.11.5", "26.05.5")


def sample(version: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((SAMPLES / f"rest.{version}.json").read_text(encoding="utf-8"))
    return body


@pytest.mark.parametrize("version", VERSIONS)
def test_rows_are_those_of_squeue(version: str) -> None:
    rows = {row.job_id: row for row in parse_queue((SAMPLES / f"squeue.{version}.txt").read_text(encoding="utf-8"))}
    found = parse_rest_jobs(sample(version))
    assert found
    assert {row.job_id: row for row in found} == {row.job_id: rows[row.job_id] for row in found}


UNSET = {"set": False, "infinite": False, "number": 0}


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"time_limit": {"set": True, "infinite": True, "number": 0}}, "limit_s", None),
        ({"time_limit": UNSET}, "limit_s", None),
        ({"time_limit": 4294967295}, "limit_s", None),
        ({"job_state": ["RUNNING", "COMPLETING"]}, "state", "RUNNING"),
        ({"job_state": ["FAILED", "COMPLETING"]}, "state", "RUNNING"),
        ({"job_state": ["PENDING", "REQUEUED"]}, "state", "PENDING"),
        ({"job_state": ["RUNNING", "CONFIGURING"]}, "state", "PENDING"),
        ({"job_state": ["RUNNING", "POWER_UP_NODE"]}, "state", "RUNNING"),
        ({"job_state": "CANCELLED"}, "state", "CANCELLED"),
        ({"end_time": {"set": True, "infinite": False, "number": 1795395999}}, "ended", 1795395999.0),
        ({"state_description": "killed by hand"}, "reason", "killed by hand"),
        ({"restart_cnt": 2}, "restarts", 2),
    ],
)
def test_numbers_and_flags_of_all_versions(change: Mapping[str, object], field: str, value: object) -> None:
    body = sample("26.05.5")
    body["jobs"][0] |= change
    (row,) = parse_rest_jobs(body)
    assert getattr(row.snapshot, field) == value


@pytest.mark.parametrize(
    ("change", "output"),
    [
        ({"standard_output": "/logs/a|b %j.log", "name": "x|y"}, "/logs/a|b 32.log"),
        ({"standard_output": "", "current_working_directory": "/home/ada"}, "/home/ada/slurm-32.out"),
        ({"standard_output": "", "batch_flag": False}, None),
        ({"array_job_id": 30, "array_task_string": "1-3%2", "standard_output": "/logs/30_4294967294.log"}, None),
        ({"array_job_id": 30, "array_task_string": "1-3%2", "standard_output": "/logs/%A_%a.log"}, None),
        ({"array_job_id": 30, "array_task_id": 2, "standard_output": "/logs/%A_%a.log"}, "/logs/30_2.log"),
    ],
)
def test_the_output_is_the_file_of_the_job(change: Mapping[str, object], output: str | None) -> None:
    body = sample("22.05.8")
    body["jobs"] = [body["jobs"][0] | {"array_task_id": None, **change}]
    (row,) = parse_rest_jobs(body)
    assert row.output == output
    assert row.name == change.get("name", "node_fail")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"jobs": [], "errors": [{"description": "Authentication failure"}]}, "error: Authentication failure"),
        ({"errors": []}, "there are no jobs in it"),
        ({"jobs": [{"job_id": "x"}]}, "jobs in it cannot be parsed"),
        ({"jobs": [None]}, "jobs in it cannot be parsed"),
    ],
)
def test_an_error_is_no_empty_queue(body: Mapping[str, object], problem: str) -> None:
    with pytest.raises(SlurmUnansweredError, match=problem):
        parse_rest_jobs(body)


class Rest(ThreadingHTTPServer):
    """A slurmrestd of one version that wants a token."""

    def __init__(self, version: str) -> None:
        self.version, self.asked = version, list[str]()
        self.user = "ada"  # of its job
        self.more = list[object]()  # jobs
        super().__init__(("127.0.0.1", 0), RestHandler)


class RestHandler(BaseHTTPRequestHandler):
    server: Rest

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        is_known = self.path == f"/slurm/{self.server.version}/jobs"
        is_allowed = self.headers["X-SLURM-USER-TOKEN"] == "secret" and self.headers["X-SLURM-USER-NAME"] == "ada"
        self.send_response(401 if not is_allowed else 200 if is_known else 404)
        self.end_headers()
        body = sample("24.11.5")
        body["jobs"][0]["user_name"] = self.server.user
        body["jobs"] += self.server.more
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def rest() -> Iterator[Rest]:
    with Rest("v0.0.42") as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_the_version_is_found_once_and_the_token_is_of_the_user(rest: Rest) -> None:
    address = f"http://127.0.0.1:{rest.server_port}"
    environ = {"GPUJOB_SLURM_SOURCE": "rest", "GPUJOB_SLURMRESTD": address, "SLURM_JWT": "secret", "USER": "ada"}
    reader = slurm_reader("ada", None, environ)
    assert [row.job_id for row in (*reader.queue(), *reader.queue())] == ["32", "32"]
    versions = [path.split("/")[2] for path in rest.asked]
    assert versions == ["v0.0.45", "v0.0.44", "v0.0.43", "v0.0.42", "v0.0.42"]
    assert slurm_reader("bob", None, environ).queue() == slurm_reader("ada", None, environ, ["cpu"]).queue() == ()
    hint = r"; has the token expired\? SLURM_JWT_FILE takes new ones"
    with pytest.raises(SlurmUnansweredError, match=f"^slurmrestd at {address} answers with status 401{hint}$"):
        slurm_reader("ada", None, {**environ, "SLURM_JWT": "old"}).queue()
    rest.version = "v0.0.99"
    with pytest.raises(SlurmUnansweredError, match=r"serves none of v0.0.38 to v0.0.45$"):
        slurm_reader("ada", None, environ).queue()


def test_a_token_that_expires_is_replaced_in_its_file(rest: Rest, tmp_path: Path) -> None:
    path, address = tmp_path / "token", f"http://127.0.0.1:{rest.server_port}"
    reader = RestReader("ada", None, {"SLURM_JWT": "secret", "SLURM_JWT_FILE": str(path), "USER": "ada"}, (), address)
    with pytest.raises(SlurmUnansweredError, match=f"is not asked: SLURM_JWT_FILE: {path}: No such file or directory"):
        reader.queue()
    path.write_text("old\n")
    with pytest.raises(SlurmUnansweredError, match="answers with status 401"):
        reader.queue()
    path.write_text("secret\n")
    assert reader.queue()


def test_one_job_that_cannot_be_parsed_does_not_hide_the_others(rest: Rest) -> None:
    reader = RestReader(None, None, {"SLURM_JWT": "secret", "USER": "ada"}, (), f"http://127.0.0.1:{rest.server_port}")
    scattered = {"array_job_id": 11, "array_task_id": UNSET, "array_task_string": "1,3,5,7,9,11,13,15,17,19,21,2..."}
    rest.more = [sample("24.11.5")["jobs"][0] | scattered, *[{"job_id": number} for number in range(1, 200)], None]
    rows = reader.queue()
    assert (len(rows), rows[1].job_id) == (201, "11_[1,3,5,7,9,11,13,15,17,19,21,2...]")
    assert reader.unparsed == {"squeue": 1}
    rest.more += [None, None]
    with pytest.raises(SlurmUnansweredError, match="3 of the 204 jobs in it cannot be parsed"):
        reader.queue()


def test_a_hub_may_be_a_client_of_https(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpujob-exporter", "hub"])
    found = []
    for address in ("unix:/run/rest.sock", "http://host:6820", "https://host:6820"):
        monkeypatch.setenv(ADDRESS, address)
        found.append(needs_openssl())
    assert found == [False, False, True]
    assert REST_ADDRESS == ADDRESS


def test_auto_takes_commands_where_there_are_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"GPUJOB_SLURMRESTD": "unix:/run/rest.sock"}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert isinstance(slurm_reader(None, None, environ), RestReader)
    assert not isinstance(slurm_reader(None, None, {}), RestReader)
    (tmp_path / "squeue").write_text("#!/bin/sh\n")
    (tmp_path / "squeue").chmod(0o755)
    assert type(slurm_reader(None, None, environ)) is SlurmReader
    for wrong, problem in (
        ({"GPUJOB_SLURM_SOURCE": "json"}, "GPUJOB_SLURM_SOURCE: 'json' is none of auto, commands, rest"),
        ({"GPUJOB_SLURM_SOURCE": "rest"}, "GPUJOB_SLURMRESTD is not set; give the address of slurmrestd"),
        ({"GPUJOB_SLURM_SOURCE": "rest", "GPUJOB_SLURMRESTD": "host"}, "GPUJOB_SLURMRESTD: 'host' is no address"),
    ):
        with pytest.raises(ExporterError, match=problem):
            slurm_reader(None, None, wrong)


def test_a_hub_takes_the_queue_from_slurmrestd(rest: Rest, tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path / "fake")
    slurm.say("scontrol", "config", "ClusterName = c1\nPrivateData = none\n")
    rest.user = getpass.getuser()  # the hub follows the jobs of its own user
    argv = [sys.executable, "-m", "exporter", "hub", "--source", "rest"]
    environ = {**slurm.environment(XDG_RUNTIME_DIR="", USER="ada", SLURM_JWT="secret"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "GPUJOB_SLURMRESTD is not set" in done.stderr) == (2, True)
    environ["GPUJOB_SLURMRESTD"] = f"http://127.0.0.1:{rest.server_port}"
    socket = slurm.folder / "state/gpujob/hub/hub.sock"
    with subprocess.Popen(argv, env=environ, stderr=subprocess.PIPE) as hub:
        try:
            body: Any = until(lambda: socket.exists() and _jobs(socket), "the jobs")
        finally:
            hub.terminate()
            hub.communicate(timeout=60)
    assert (body["source"], [job["job_id"] for job in body["jobs"]]) == ("slurmrestd", ["32"])
    assert slurm.calls("squeue") == []


def _jobs(socket: Path) -> Mapping[str, object] | None:
    try:
        body = read_json(f"unix:{socket}", "/api/v1/jobs", 5.0)
    except NoAnswerError:
        return None
    return body if body["jobs"] else None
