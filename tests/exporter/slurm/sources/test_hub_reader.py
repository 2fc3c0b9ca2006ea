"""Slurm's queue out of a running hub, and what commands do without a fitting one."""

import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest

from exporter.contract.records import JsonValue
from exporter.hub.api.answers import Head, QueueText, job_json
from exporter.hub.jobs import split_rows, take_queue
from exporter.slurm.commands_reader import SlurmReader, SlurmUnansweredError
from exporter.slurm.queue import parse_queue
from exporter.slurm.sources import hub_queue_reader, hub_reader, shared_answers_reader
from exporter.slurm.sources.cached_answers_reader import QueueAnswer
from exporter.slurm.sources.http_reader import NoAnswerError
from exporter.slurm.sources.hub_reader import HubAnswer, HubReply, read_hub
from exporter.slurm.sources.shared_answers_reader import read_queue_of_all, read_shared_queue
from tests.exporter.hub.test_process import COMPLETED, RUNNING, HubProcess, line
from tests.support.certificates import Authority
from tests.support.exporter import FakeClock, until
from tests.support.fake_slurm import FakeSlurm
from tests.support.launcher import ROOT

SAMPLES = sorted((Path(__file__).parents[1] / "samples").glob("squeue.*.txt"))
SCOPE: Mapping[str, JsonValue] = {"cluster": "c1", "user": None, "partitions": [], "interval_s": 60.0}


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_the_rows_of_a_hub_are_those_of_squeue(sample: Path) -> None:
    rows = split_rows(parse_queue(sample.read_text(encoding="utf-8")))
    seen = take_queue({}, rows, {}, 1000.0)
    for now in (2000.0, 3000.0):  # a job that may be requeued is over after a while
        seen = take_queue(seen.jobs, rows, seen.rows, now)
    jobs = seen.jobs.values()
    texts = QueueText()
    texts.of_jobs([job._replace(partition="before") for job in jobs])
    queue = json.loads(texts.of_jobs(jobs))
    for body in ({"jobs": [job_json(job, 3000.0) for job in jobs]}, {"queue": queue}):
        told = json.dumps(Head(3000.0, 3000.0, (), SCOPE).with_body() | body)
        answer = HubAnswer.from_json(json.loads(told))
        assert {row.job_id: row for row in answer.rows()} == {row.job_id: row for row in rows.values()}


def test_a_hub_without_the_queue_is_asked_for_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def read(address: str, path: str, *_: object) -> tuple[Mapping[str, object], bytes]:
        asked.append(path.partition("?")[0])
        if asked[-1] == "/api/v1/queue":
            raise NoAnswerError(f"{address} answers with status 404", 404)
        return _answer(), b""

    monkeypatch.setattr(hub_reader, "read_json_text", read)
    found = read_hub(SlurmReader("ada", None, {}), {"GPUJOB_HUB": "unix:/x"})
    assert found is not None
    assert (found.problem, asked) == (None, ["/api/v1/queue", "/api/v1/jobs"])


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "fake")
    for name, value in fake.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GPUJOB_HUB", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    # a hub of these tests answers, and commands take a copy of its answer, however slow the machine
    monkeypatch.setattr(hub_reader, "DEADLINE_S", 60.0)
    monkeypatch.setattr(hub_queue_reader, "HUB_READ_S", 300.0)
    fake.say("squeue", "out", RUNNING + line("8", "PENDING"))
    fake.say("scontrol", "config", "ClusterName = c1\nPrivateData = none\n")
    return fake


@pytest.fixture
def hub(slurm: FakeSlurm) -> Iterator[HubProcess]:
    process = HubProcess(slurm, "--interval", "60").ready()
    yield process
    process.end()


def answer(user: str | None = "root", cluster: str | None = None, **environ: str) -> QueueAnswer:
    environment = {**os.environ, **environ}
    return read_shared_queue(SlurmReader(user, cluster, environment), environment)


def test_commands_ask_the_hub_and_not_slurm(slurm: FakeSlurm, hub: HubProcess) -> None:
    looks = [answer() for _ in range(50)]
    assert {found.source for found in looks} == {f"unix:{hub.socket}"}
    assert (
        'gpujob_hub_http_requests_total{cluster="c1",handler="/api/v1/queue",code="200"} 1\n' in hub.get("/metrics")[1]
    )
    assert {*looks[0].rows} == {*parse_queue(RUNNING + line("8", "PENDING"))}
    assert len(slurm.calls("squeue")) == 1
    assert (
        answer("bob").source == answer(None).source == answer(cluster="c2").source == answer(GPUJOB_HUB="none").source
    )
    assert answer(cluster="c1").source == f"unix:{hub.socket}"
    assert len(slurm.calls("squeue")) == 4  # the last of them took its jobs out of those of all


def test_beside_a_hub_with_own_jobs_those_of_others_are_asked_for_less_often(
    slurm: FakeSlurm, hub: HubProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_answers_reader, "QUEUE_MAX_AGE_S", 0.0)
    slurm.say("squeue", "out", line("9", "RUNNING", user="eve"))
    everybody = SlurmReader(None, None, os.environ)
    answers = [
        read_queue_of_all(everybody, "root", os.environ, lambda: time.time() - 100.0),  # before the hub began
        *(read_queue_of_all(everybody, "root", os.environ) for _ in range(2)),
    ]
    rows = [sorted(row.job_id for row in found.rows) for found in answers]
    assert rows == [["7", "8", "9"]] * 3
    assert len(slurm.calls("squeue")) == 2  # one of them by the hub
    alone = read_queue_of_all(everybody, "root", {**os.environ, "GPUJOB_HUB": "none"})
    assert ([row.job_id for row in alone.rows], len(slurm.calls("squeue"))) == (["9"], 3)


def test_an_answer_older_than_the_question_is_asked_anew(slurm: FakeSlurm, hub: HubProcess) -> None:
    slurm.say("squeue", "out", COMPLETED)
    found = read_shared_queue(SlurmReader("root", None, os.environ), os.environ, since=time.time())
    assert (found.source, found.rows) == ("squeue", parse_queue(COMPLETED))


def test_a_hub_that_is_named_and_does_not_answer_is_told(slurm: FakeSlurm, hub: HubProcess, tmp_path: Path) -> None:
    nowhere = f"unix:{tmp_path}/x.sock"
    found = answer(GPUJOB_HUB=nowhere)
    problem = f"{nowhere} does not answer: No such file or directory"
    assert (found.source, found.hub_problem, len(found.rows)) == ("squeue", problem, 2)
    assert answer("bob", GPUJOB_HUB=f"unix:{hub.socket}").hub_problem == f"unix:{hub.socket} has the jobs of root only"
    assert "'http://' is no address; write it as in unix:/" in str(answer(GPUJOB_HUB="http://").hub_problem)


def test_over_tcp_the_token_is_sent(slurm: FakeSlurm) -> None:
    process = HubProcess(slurm, "--web.listen-address", "127.0.0.1:0").ready()
    try:
        port = until(lambda: _port_of(process.process.pid), "the port")
        address = f"http://127.0.0.1:{port}"
        assert answer(GPUJOB_HUB=address).hub_problem == f"{address} answers with status 401"
        token = (slurm.folder / "state/gpujob/hub/token").read_text().strip()
        assert answer(GPUJOB_HUB=address, GPUJOB_HUB_TOKEN=token).source == address
    finally:
        process.end()


def _port_of(pid: int) -> int | None:
    inodes = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    for fields in map(str.split, Path("/proc/net/tcp").read_text().splitlines()[1:]):
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            return int(fields[1].rpartition(":")[2], 16)
    return None


def _answer(**body: object) -> Mapping[str, object]:
    return {"as_of": 1000.0, "problems": [], "scope": SCOPE, "jobs": [], **body}


@pytest.mark.parametrize(
    ("body", "now", "problem", "is_used"),
    [
        ({}, 1079.0, None, True),
        ({}, 1081.0, None, False),  # it hangs
        ({"problems": ["squeue did not answer in 30 s"]}, 1200.0, "squeue did not answer in 30 s", True),
        ({"problems": ["squeue did not answer in 30 s"]}, 1040.0, None, True),
        ({"problems": ["sacct exited with 1"]}, 1200.0, None, False),
        ({"as_of": None}, 1000.0, None, False),
    ],
)
def test_an_old_answer_is_used_only_if_slurm_is_to_blame(
    body: Mapping[str, object], now: float, problem: str | None, is_used: bool
) -> None:
    found = hub_queue_reader.hub_queue("unix:/x", HubAnswer.from_json(_answer(**body)), now)
    assert (found is not None, found and found.problem) == (is_used, problem)


def _told(address: str) -> HubReply:
    return HubReply(address, HubAnswer.from_json(_answer()), text=json.dumps(_answer()).encode())


def test_a_hub_is_asked_by_one_command_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ, clock = {"GPUJOB_HUB": "unix:/x", "HOME": str(tmp_path), "PATH": ""}, FakeClock(1000.0)
    asked, may_answer, answers = list[float](), Event(), [_told("unix:/x")]

    def ask(*_: object) -> HubReply | None:
        asked.append(clock.now)
        assert len(asked) != 2 or may_answer.wait(60.0)
        return answers[-1]

    def read() -> float | None:
        return read_shared_queue(SlurmReader("ada", None, environ), environ, clock.time).as_of

    monkeypatch.setattr(hub_queue_reader, "read_hub", ask)
    assert read() == 1000.0
    clock.advance(20.0)
    other = Thread(target=read)
    other.start()
    until(lambda: len(asked) == 2, "the question of the other")
    assert (read(), len(asked)) == (1000.0, 2)
    may_answer.set()
    other.join()
    clock.advance(20.0)
    answers.append(HubReply("unix:/x", None, "unix:/x does not answer in 2 s"))
    assert (read(), len(asked)) == (1000.0, 3)  # it may be busy: Slurm is not asked by all at once
    clock.advance(60.0)
    with pytest.raises(SlurmUnansweredError, match="squeue"):
        read()


def test_the_answer_of_one_hub_is_not_taken_for_that_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    def ask(_: SlurmReader, environ: Mapping[str, str]) -> HubReply:
        asked.append(environ["GPUJOB_HUB"])
        return _told(asked[-1])

    monkeypatch.setattr(hub_queue_reader, "read_hub", ask)
    for address in ("unix:/x", "unix:/x", "unix:/y"):
        environ = {"GPUJOB_HUB": address, "HOME": str(tmp_path), "PATH": ""}
        assert read_shared_queue(SlurmReader("ada", None, environ), environ, lambda: 1000.0).source == address
    assert asked == ["unix:/x", "unix:/y"]


@pytest.mark.parametrize(
    "body", [{"is_all": False}, {"scope": {**SCOPE, "partitions": ["gpu"]}}, {"scope": {**SCOPE, "cluster": "c2"}}]
)
def test_a_hub_with_other_jobs_is_not_asked(body: Mapping[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    from exporter.slurm.sources import hub_reader

    monkeypatch.setattr(hub_reader, "read_json_text", lambda *_: (_answer(**body), b""))
    found = read_hub(SlurmReader("ada", "c1", {}), {"GPUJOB_HUB": "unix:/x"})
    assert found is not None
    assert (found.answer, found.problem is None) == (None, False)


def test_an_https_address_is_verified(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("server", "IP:127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    with HTTPServer(("127.0.0.1", 0), _Echo) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        Thread(target=server.serve_forever, daemon=True).start()
        program = (
            "import sys; from exporter.web import aiohttp_server; from exporter.slurm.sources.http_reader import *\n"
            f"try: print(read_json('https://127.0.0.1:{server.server_port}/x', '/jobs', 5.0))\n"
            "except NoAnswerError as error: print(error)"
        )  # the server of a hub, which has been loaded before, has none of TLS
        shown = [
            subprocess.run(
                [sys.executable, "-c", program],
                env={**os.environ, **trusted, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            ).stdout
            for trusted in ({"SSL_CERT_FILE": str(tmp_path / "ca.pem")}, {})
        ]
        server.shutdown()
    assert shown[0] == "{'path': '/x/jobs'}\n"
    assert "certificate verify failed" in shown[1]


class _Echo(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"path": self.path}).encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""
