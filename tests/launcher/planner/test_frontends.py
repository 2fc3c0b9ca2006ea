"""Front ends before the workers, and a real nginx before several front ends."""

import http.server
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from launcher.planner import nginx
from tests.launcher.planner.backends.serving_jobs import (
    argv_of,
    ask,
    job,
    option,
    plan_from,
    planned,
    rule_text,
)
from tests.support.launcher import poll
from tests.support.ports import free_port

MODEL = {"path": "/models/r1"}
PD = {"gpus_per_node": 8, "prefill_workers": 2, "decode_workers": 1}
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
NOBODY = 65534


def served(frontend: dict[str, Any] | None, kind: str = "sglang", **over: Any) -> str:
    parts = {"resources": PD, "model": MODEL, "backend": {"type": kind}, **over}
    return job(**parts, **({"frontend": frontend} if frontend else {}))


def test_one_front_end_listens_at_the_public_port() -> None:
    plan = plan_from(served({"type": "sglang-router", "args": {"policy": "round_robin"}}))
    argv = argv_of(plan, "frontend_0")
    assert argv == [
        *("python3", "-m", "sglang_router.launch_router", "--pd-disaggregation"),
        *("--prefill", "http://cn00:6100", "7200", "--prefill", "http://cn01:6100", "7200"),
        *("--decode", "http://cn02:6100", "--host", "0.0.0.0", "--port", "8000", "--prometheus-port", "7500"),
        *("--policy", "round_robin"),
    ]
    assert nginx.FILE not in plan.templates


def test_the_router_gets_the_urls_of_agg_workers() -> None:
    resources = {"gpus_per_node": 8, "agg_workers": 2, "gpus_per_agg": 4}
    argv = argv_of(plan_from(served({"type": "sglang-router"}, resources=resources)), "frontend_0")
    assert argv[3:6] == ["--worker-urls", "http://cn00:6100", "http://cn00:6132"]


def test_several_front_ends_are_spread_over_nodes_behind_nginx() -> None:
    plan = plan_from(served({"type": "sglang-router", "count": 5}))
    frontends = [entry for entry in plan.tasks if entry.stage == "frontends"]
    assert [(entry.task.node_index, entry.ports["http"]) for entry in frontends] == [
        *((0, 8180), (1, 8180), (2, 8180), (0, 8181), (1, 8181)),
    ]
    assert (planned(plan, "nginx").task.node_index, planned(plan, "nginx").ports) == (0, {"http": 8000})
    for entry in frontends:
        assert f"server {{host_{entry.task.node_index}}}:{{port_{entry.ports['http']}}} " in plan.templates[nginx.FILE]
    assert plan.readiness is not None
    models = [rule for rule in plan.readiness.rules if rule.kind == "sglang"]
    assert [rule.subject for rule in models] == [*(f"frontend_{index}" for index in range(5)), ""]
    assert rule_text(models[-1]) == "model: sglang node 0 port 8000 expects 2 prefill 1 decode, before benchmark"


def test_nginx_can_be_used_for_one_front_end() -> None:
    plan = plan_from(served({"type": "sglang-router", "nginx": True}))
    assert option(argv_of(plan, "frontend_0"), "--port") == "8180"


def test_front_ends_and_infrastructure_may_have_their_own_nodes() -> None:
    resources = {**PD, "infra_node": True, "frontend_node": True, "client_node": True}
    text = served(
        {"type": "dynamo", "count": 2}, resources=resources, benchmark={"type": "custom", "command": "python3 load.py"}
    )
    plan = plan_from(text)
    nodes = {entry.task.worker: entry.task.node_index for entry in plan.tasks if entry.stage != "workers"}
    assert nodes == {"etcd": 0, "nats": 0, "frontend_0": 1, "frontend_1": 1, "nginx": 1, "benchmark": plan.nodes - 1}


@pytest.mark.parametrize(
    ("kind", "program"), [("sglang", "dynamo.sglang"), ("vllm", "dynamo.vllm"), ("trtllm", "dynamo.trtllm")]
)
def test_dynamo_workers_run_the_programs_of_dynamo(kind: str, program: str) -> None:
    plan = plan_from(served({"type": "dynamo"}, kind))
    argv = argv_of(plan, "decode_w0")
    assert argv[argv.index("-m") + 1] == program
    assert option(argv, "--disaggregation-mode") == "decode"
    environments = [dict(entry.env) for entry in plan.tasks if entry.stage in ("workers", "frontends")]
    assert all("ETCD_ENDPOINTS" in env and "NATS_SERVER" in env for env in environments)
    assert plan.readiness is not None
    assert [rule.subject for rule in plan.readiness.rules if rule.before == "workers"] == ["etcd", "nats"]


def test_infrastructure_has_readiness_rules_without_model_rules() -> None:
    plan = plan_from(served({"type": "dynamo"}, readiness={"kind": "none"}))
    assert plan.readiness is not None
    assert [rule.subject for rule in plan.readiness.rules] == ["etcd", "nats"]


def test_a_users_command_in_place_of_the_router_takes_any_arguments() -> None:
    frontend = {"type": "sglang-router", "command": "front", "args": {"port": "{http_port}"}}
    assert argv_of(plan_from(served(frontend)), "frontend_0") == ["front", "--port", "8000"]


def test_a_custom_front_end_gets_the_urls_of_the_workers() -> None:
    frontend = {"type": "custom", "command": "front --port {http_port} --side {nixl_port}", "args": {"x": 1}}
    plan = plan_from(served({**frontend, "config": {"a": 1}, "env": {"B": "2"}}, "vllm"))
    entry = planned(plan, "frontend_0")
    assert argv_of(plan, "frontend_0") == ["front", "--port", "8000", "--side", "5408", "--x", "1"]
    assert entry.env["GPUJOB_PREFILL_URLS"] == "http://{host_0}:{port_6100},http://{host_1}:{port_6100}"
    assert entry.env["GPUJOB_DECODE_URLS"] == "http://{host_2}:{port_6100}"
    assert (entry.env["B"], entry.env["GPUJOB_CONFIG_FILE"]) == ("2", "{run_dir}/frontend_config.yaml")
    assert plan.templates["frontend_config.yaml"] == "a: 1\n"
    assert plan.readiness is not None
    assert rule_text(plan.readiness.rules[-1]) == "model: http node 0 port 8000, before benchmark"


def test_without_a_front_end_clients_go_to_the_first_worker() -> None:
    resources = {"gpus_per_node": 8, "agg_workers": 1}
    benchmark = {"type": "custom", "command": "load"}
    plan = plan_from(served(None, resources=resources, benchmark=benchmark))
    assert planned(plan, "benchmark").env["GPUJOB_ENDPOINT"] == "http://{host_0}:{port_6100}"


class Server(http.server.ThreadingHTTPServer):
    """A front end that answers with its name and the size of the request."""

    daemon_threads = True
    request_queue_size = 128  # with Python's 5, some of 16 clients wait a second or more for the next attempt

    def __init__(self, name: str, port: int, delay_s: float) -> None:
        self.name, self.delay_s = name, delay_s
        super().__init__(("127.0.0.1", port), Handler)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self.answer(f"{self.server.name} {len(self.path)}")

    def do_POST(self) -> None:
        self.answer(f"{self.server.name} {len(self.rfile.read(int(self.headers['Content-Length'])))}")

    def answer(self, text: str) -> None:
        time.sleep(self.server.delay_s)
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def front(name: str, port: int = 0, delay_s: float = 0.0) -> Iterator[int]:
    """Run a front end and yield its port."""
    server = Server(name, port, delay_s)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def balancer(run_dir: Path, upstreams: list[int]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a real nginx as an ordinary user, with the arguments and the file of a plan."""
    assert NGINX is not None
    port = free_port()
    (run_dir / nginx.FILE).write_text(
        nginx.render_nginx_config(str(port), [f"127.0.0.1:{upstream}" for upstream in upstreams])
    )
    argv = [NGINX if word == "nginx" else word.replace("{run_dir}", str(run_dir)) for word in nginx.NGINX.argv]
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    with (run_dir / "nginx.err").open("wb") as log:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **user)  # type: ignore[call-overload]
    url = f"http://127.0.0.1:{port}"
    try:
        poll(lambda: ask(url)[0] or process.poll() is not None, "nginx")
        assert process.poll() is None, (run_dir / "nginx.err").read_text()
        yield url, process
    finally:
        process.terminate()  # SIGKILL would leave its workers
        process.wait()


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A run directory of an ordinary user, with a name that needs quoting."""
    with tempfile.TemporaryDirectory(prefix="a run; {dir} $x ") as folder:
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        yield Path(folder)


def test_nginx_may_open_as_many_files_as_the_hard_limit_allows() -> None:
    shell = nginx.NGINX.argv[: nginx.NGINX.argv.index("nginx")]
    limited = ["sh", "-c", 'ulimit -Sn 64; ulimit -Hn 512; exec "$@"', "sh"]
    done = subprocess.run([*limited, *shell, "sh", "-c", "ulimit -Sn"], capture_output=True, text=True, check=True)
    assert done.stdout == "512\n"


@pytest.mark.skipif(NGINX is None, reason="no nginx here")
class TestRealNginx:
    """Behaviour of the configuration that we write."""

    def test_both_front_ends_answer_and_long_requests_reach_them(self, run_dir: Path) -> None:
        with ExitStack() as stack:
            ports = [stack.enter_context(front(name)) for name in ("one", "two")]
            url, _ = stack.enter_context(balancer(run_dir, ports))
            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(lambda _: ask(f"{url}/v1/models"), range(40)))
            assert {status for status, _ in answers} == {200}
            assert {body.split()[0] for _, body in answers} == {b"one", b"two"}
            long_path = "/" + "x" * 60_000
            assert ask(url + long_path)[1].split()[1] == b"60001"
            assert ask(url, b"x" * (32 << 20), timeout=30)[1].split()[1] == str(32 << 20).encode()
            assert (run_dir / "nginx.pid").exists()
        assert list((run_dir / "nginx_temp").iterdir()) == []

    def test_a_dead_front_end_is_skipped(self, run_dir: Path) -> None:
        with front("one") as port, balancer(run_dir, [free_port(), port, free_port()]) as (url, _):
            answers = [ask(f"{url}/v1/models") for _ in range(20)] + [ask(url, b"x" * 100_000) for _ in range(20)]
        assert {(status, body.split()[0]) for status, body in answers} == {(200, b"one")}

    def test_no_request_is_refused_once_late_front_ends_have_answered(self, run_dir: Path) -> None:
        ports = [free_port(), free_port()]
        with ExitStack() as stack:
            url, _ = stack.enter_context(balancer(run_dir, ports))
            with ThreadPoolExecutor(16) as pool:
                early = {status for status, _ in pool.map(lambda _: ask(url), range(64))}
                for name, port in zip(("one", "two"), ports, strict=True):
                    stack.enter_context(front(name, port, delay_s=0.1))
                poll(lambda: ask(url)[0] == 200, "an answer")
                late = {status for status, _ in pool.map(lambda _: ask(url, b"x"), range(64))}
        assert (early, late) == ({502}, {200})

    def test_nginx_ends_with_status_0(self, run_dir: Path) -> None:
        with front("one") as port, balancer(run_dir, [port]) as (_, process):
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
