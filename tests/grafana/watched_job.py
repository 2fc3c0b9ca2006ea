"""A local job that a real Prometheus watches, with the page served beside it.

Eight workers on four GPUs of a fake driver: one becomes slow, another fails. GPU values are invented.
"""

import http.server
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from launcher.boards.assets import write_assets
from tests.fakenvml import Scenario, compiler, library, profiles
from tests.realstack.stack import Stack
from tests.support.launcher import LocalJob, clean_environment, embed_job

GPUS = WORKERS = 8
SLOW = 5  # a rank
HOSTILE = "</script><img src=x onerror=alert(1)>'`${x}"  # a name that must stay text


def values_at(elapsed: float) -> Scenario:
    """GPUs whose load moves, each in its own way."""
    scenario = profiles.h200(GPUS)
    for number, gpu in enumerate(scenario.gpus):
        load = (
            0.86 - 0.06 * number + 0.09 * math.sin(elapsed / 7 + number) + 0.03 * math.sin(elapsed * 1.7 + 2 * number)
        )
        gpu.utilization, gpu.memory_utilization = round(100 * load), round(60 * load)
        gpu.power_mw, gpu.temperature_c = round(690_000 * load), round(38 + 34 * load)
    return scenario


@contextmanager
def watched_job(
    folder: Path,
    *,
    items: int = 12000,
    rate: float = 20,
    name: str = "embed",
    check_interval: int = 1,
    load_interval: float = 1,
) -> Iterator[tuple[Stack, LocalJob]]:
    """The stack and the running job. Prometheus serves the page; its series are scraped each second.

    The load of the GPUs changes each ``load_interval`` seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    targets, assets = folder / "targets", folder / "assets"
    targets.mkdir()
    write_assets(assets)
    (folder / "gpujob.yaml").write_text(yaml.safe_dump({"target_dir": str(targets), "cluster": "here"}))
    env = clean_environment(GPUJOB_CONFIG=str(folder / "gpujob.yaml"), GPUJOB_HISTORY_DIR="")
    ended = threading.Event()
    if compiler() is not None:
        (folder / "processes").mkdir()
        env |= {
            "LD_LIBRARY_PATH": str(library(Scenario().without)),
            "FAKENVML_SCENARIO": str(folder / "scenario"),
            "FAKENVML_PROCESSES": str(folder / "processes"),
        }
        values_at(0).write(folder / "scenario")

        def move() -> None:
            began = time.monotonic()
            while not ended.wait(load_interval):
                values_at(time.monotonic() - began).write(folder / "scenario")

        threading.Thread(target=move, daemon=True).start()
    spec = embed_job(f"--at 500 --only-rank {SLOW} --slow-down 4", items=items, rate=rate, count=WORKERS)
    spec["workers"][0] |= {"critical": False, "gpus": 1}
    if compiler() is not None:
        spec["resources"] = {"gpus_per_node": GPUS}
    spec |= {"name": name, "monitoring": {"check_interval": check_interval, "linger": 5}}
    with (
        Stack(folder / "stack", targets_dir=targets, user_assets=assets) as stack,
        LocalJob(folder / "job", spec, "--quiet", env=env) as job,
    ):
        try:
            yield stack, job
        finally:
            ended.set()


@contextmanager
def hostile_target(stack: Stack) -> Iterator[None]:
    """A sidecar of the cluster `evil` whose names are hostile."""
    labels = f'cluster="evil",job_id="{HOSTILE}",node="{HOSTILE}"'
    text = f'''gpujob_info{{{labels},job_name="{HOSTILE}",user="{HOSTILE}",partition="p",attempt="0"}} 1
gpujob_worker_up{{{labels},worker="{HOSTILE}",role="worker"}} 1
gpujob_worker_throughput_items_per_second{{{labels},worker="{HOSTILE}",role="worker"}} 1
'''

    class Sidecar(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sidecar) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.announce("evil", [f"127.0.0.1:{server.server_address[1]}"])
        stack.wait_for(lambda: stack.query('gpujob_info{cluster="evil"}'), 60, "the hostile names")
        try:
            yield
        finally:
            server.shutdown()
