"""The scrape configuration that we ship, in a real Prometheus: what target files and pages cannot do to it."""

import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from tests.conftest import GOLDEN, TESTS
from tests.endtoend.jobs import GPUJOB
from tests.realstack.stack import Stack, prometheus_unavailable

pytestmark = pytest.mark.prometheus

ROOT = TESTS.parent
ANA, MALLORY = "daemon", "nobody"  # users that every machine has
IDENTITY = {"cluster": "hal", "job_id": "4711", "job_name": "embed", "user": ANA, "partition": "gpu", "node": "cn01"}
JOB = {"job": "gpujob-sidecar"}
WORKERS = 256


class Pages:
    """A server of pages by path; it keeps the requests it was sent."""

    def __init__(self, page: str) -> None:
        self.requests: set[str] = set()
        pages = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                pages.requests.add(self.path)
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(page.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def sample(name: str, value: float, labels: dict[str, str], **more: str) -> str:
    pairs = ",".join(f'{key}="{text}"' for key, text in (labels | more).items())
    return f"{name}{{{pairs}}} {value}\n"


def large_page() -> str:
    """The samples of a node with 256 workers, each with all that the golden pages have for one."""
    lines = [
        line
        for path in sorted((GOLDEN / "exporter").glob("*.prom"))
        for line in path.read_text().splitlines()
        if line and not line.startswith("#")
    ]
    for_one = {line for line in lines if 'rank="0"' in line}
    others = {line for line in lines if "rank=" not in line}
    return "\n".join(
        [*others, *(line.replace('rank="0"', f'rank="{n}"') for line in for_one for n in range(WORKERS)), ""]
    )


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    if reason := prometheus_unavailable():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="gpujob-stack-"))
    with Stack(folder) as instance:
        yield instance
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def serve(stack: Stack) -> Iterator[list[Pages]]:
    """Pages that are closed at the end, and their targets forgotten."""
    open_pages: list[Pages] = []
    yield open_pages
    for page in open_pages:
        page.close()
    for path in stack.targets_dir.iterdir():
        path.unlink()


def test_a_forged_page_raises_no_alert_for_another_user(stack: Stack, serve: list[Pages], tmp_path: Path) -> None:
    """Neither the page nor the target file of mallory can claim to be ana's, and her own alert stays as it was."""
    if os.geteuid() != 0:
        pytest.skip("needs root for files of two users")
    worker = {"worker": "w0", "rank": "0"}
    killed = sample("gpujob_worker_last_exit_timestamp_seconds", time.time(), IDENTITY, **worker, reason="host_oom")
    over = sample("gpujob_phase", 1, IDENTITY, phase="finished")
    broken = sample("gpujob_gpu_health", 1, IDENTITY, gpu="0", health="failure")
    serve += [Pages(killed + over), Pages(broken)]

    def announce(owner: str, page: Pages) -> None:
        path = tmp_path / f"{owner}.json"
        path.write_text(json.dumps([{"targets": [page.address], "labels": IDENTITY | JOB}]))
        shutil.chown(path, owner)
        subprocess.run([GPUJOB, "targets", tmp_path, "--output", stack.targets_dir / "targets.json"], check=True)

    def users(alert: str) -> set[str]:
        return {found["metric"]["user"] for found in stack.query(f'ALERTS{{alertname="{alert}"}}')}

    announce(MALLORY, serve[0])
    stack.wait_for(lambda: users("GpuJobWorkerOutOfMemory"), 60, "the forged alert")
    announce(ANA, serve[1])
    stack.wait_for(lambda: users("GpuJobGpuUnhealthy"), 60, "an alert of ana's, whose job is not over")
    found = stack.wait_for(lambda: users("GpuJobWorkerOutOfMemory"), 60, "the forged alert")  # also after a late scrape
    assert found == {MALLORY}
    (health,) = stack.wait_for(lambda: stack.query("gpujob_gpu_health"), 60, "her page")
    page = {"__name__": "gpujob_gpu_health", "gpu": "0", "health": "failure", "instance": serve[1].address}
    assert health["metric"] == page | IDENTITY | JOB


def test_a_target_file_chooses_addresses_and_labels_and_nothing_else(stack: Stack, serve: list[Pages]) -> None:
    """Also where Prometheus reads the files of jobs itself."""
    serve.append(Pages(sample("gpujob_exporter_info", 1, IDENTITY)))
    hostile = {
        "__scheme__": "https",
        "__metrics_path__": "/admin/delete",
        "__param_all": "yes",
        "__scrape_interval__": "1ms",
        "__scrape_timeout__": "1ms",
        "instance": "prometheus:9090",
    }
    stack.announce("odd", [serve[0].address], IDENTITY | JOB | hostile)
    stack.announce("ports", ["127.0.0.1:22", "127.0.0.1:9090", "127.0.0.1:9093"], IDENTITY | JOB)
    stack.announce("jobs", ["127.0.0.1:40000"], IDENTITY | {"job": "prometheus"})
    stack.wait_for(lambda: stack.query(f'up{{instance="{serve[0].address}"}} == 1'), 60, "the target")
    found = {target["scrapeUrl"]: target["scrapeInterval"] for target in stack.targets()}
    assert found == {f"http://{serve[0].address}/metrics": "1s"}
    assert serve[0].requests == {"/metrics"}


def test_a_node_with_many_workers_fits_and_a_flood_does_not(stack: Stack, serve: list[Pages]) -> None:
    large = large_page()
    flood = "".join(f'gpujob_fom{{name="{number}"}} 1\n' for number in range(60_000))
    long = f'gpujob_fom{{name="{"x" * 600}"}} 1\n'
    serve += [Pages(large), Pages(flood), Pages(long), Pages("# " + "x" * 33 * 1024 * 1024 + "\n")]
    for page, user in zip(serve, ("large", "flood", "long", "huge"), strict=True):
        stack.announce(user, [page.address], {**IDENTITY, **JOB, "user": user})

    def errors() -> dict[str, str]:
        found = {target["labels"]["user"]: target["lastError"] for target in stack.targets() if target["lastError"]}
        # a busy machine may be too late for a scrape within a second
        return found if len(found) >= 3 and "context deadline exceeded" not in found.values() else {}

    refused = stack.wait_for(errors, 60, "the refused pages")
    assert refused == {
        "flood": "sample limit exceeded",
        "long": refused["long"],
        "huge": "body size limit exceeded",
    }
    assert "label_value_length_limit" in refused["long"]
    whole = 'scrape_samples_post_metric_relabeling{user="large"} and on (instance) up == 1'
    (samples,) = stack.wait_for(lambda: stack.query(whole), 60, "the large page")
    assert int(samples["value"][1]) == large.count("\n") > 18_000
    print(f"\n{large.count(chr(10))} samples, {len(large) / 1e6:.1f} MB for {WORKERS} workers")


def test_the_page_about_prometheus_and_the_containers_have_the_same_configuration() -> None:
    text = (ROOT / "docs/how-to/connect-prometheus.md").read_text(encoding="utf-8")
    (block,) = [found for found in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "scrape_configs" in found]
    documented = yaml.safe_load(block.replace("/run/gpujob/", "/targets/"))["scrape_configs"]
    shipped = yaml.safe_load((ROOT / "docker/prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    assert documented == shipped[:1]
