"""Many sidecars in one process, each on a loopback address of its own: their pages are made of one of a real sidecar.

python -m tests.support.simulated_sidecars PAGE TARGETS NODES... [--interval SECONDS]

They are scraped every ``SECONDS``, else as often as Prometheus scrapes others. ``NODES`` are the nodes of each job.
SIGUSR1 stalls all jobs: their GPUs are busy, and no worker makes progress.
"""

import argparse
import asyncio
import gzip
import json
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web

from tests.support.ports import free_port

WORKERS = 8  # of a node
SAMPLE = re.compile(r"(\w+)(\{.*\}) (\S+)")
OWN = ("job_id", "job_name", "user", "node")
WORKER = re.compile(r'worker="worker_w(\d+)",role="(\w+)",rank="\d+"')
RISES = {  # in a second; other counters stay
    **dict.fromkeys(("gpujob_worker_items", "gpujob_worker_items_processed_total", "gpujob_output_records"), 5.0),
    "gpujob_worker_cpu_seconds_total": 1.0,
    "gpujob_exporter_cpu_seconds_total": 0.005,
    "gpujob_gpu_energy_joules_total": 630.0,
    "gpujob_gpu_throttle_seconds_total": 0.05,
    **dict.fromkeys(("gpujob_worker_io_read_bytes_total", "gpujob_output_bytes"), 1e6),
}
VARIES = re.compile(
    r"gpujob_(gpu_(utilization|power|temperature|sm_|tensor_|dram_|nvlink_bytes|pcie_bytes)|worker_(throughput|memory_rss))"
)
MOVES = re.compile(r"gpujob_(collector_last_success|worker_progress_last|\w+_mtime)_timestamp_seconds")
FASTER = {"gpujob_worker_items_expected", "gpujob_eta_seconds"}  # the real job is too short for a bench
TIMES_LONGER = 50
STALLED = ("gpujob_worker_stalled{%s} 1", 'gpujob_worker_gpu_condition{%s,condition="busy_without_progress"} 1')
STALLED_FOR_S = 600  # above the stall timeout of the page


class Pages:
    """Pages of nodes, of the same form as `page`."""

    def __init__(self, page: str, nodes: Sequence[int]) -> None:
        self.nodes = [(job, node) for job, number in enumerate(nodes) for node in range(number)]
        self.stalled = False
        self._samples: list[tuple[str, float]] = []
        self._began = time.time()
        lines = []
        for line in page.splitlines():
            sample = SAMPLE.fullmatch(line)
            if sample:
                name, labels, value = sample.groups()
                self._samples.append((name, float(value) * (TIMES_LONGER if name in FASTER else 1)))
                line = f"{name}{_general(labels)} %s"
            lines.append(line)
        self._text = "\n".join(lines) + "\n"
        self._of_node: dict[int, str] = {}  # with the labels of the node; made once, or scrapes of 1,000 would be late
        up = [line.partition("{")[2].partition("}")[0] for line in lines if line.startswith("gpujob_worker_up{")]
        self._stalled_text = "".join(f"{line % labels}\n" for line in STALLED for labels in up)

    def labels(self, target: int) -> dict[str, str]:
        """Those of the target, as in a target file."""
        job, node = self.nodes[target]
        return {
            "job": "gpujob-sidecar",
            "cluster": "c1",
            "partition": "gpu",
            "job_id": str(1000 + job),
            "job_name": f"train-{job}",
            "user": f"user{job % 40}",
            "node": f"n{job:03}-{node:02}",
        }

    def page(self, target: int) -> str:
        """The page of a node now."""
        elapsed = time.time() - self._began
        samples = enumerate(self._samples, start=target)
        values = tuple(self._value(name, value, elapsed, phase) for phase, (name, value) in samples)
        if target not in self._of_node:
            self._of_node[target] = self._labelled(self._text, target)
        stalled = self._labelled(self._stalled_text, target) if self.stalled else ""
        return self._of_node[target] % values + stalled

    def _labelled(self, text: str, target: int) -> str:
        own, (_, node) = self.labels(target), self.nodes[target]
        for label in OWN:
            text = text.replace(f"@{label}@", own[label])
        for worker in range(WORKERS):
            text = text.replace(f"@{worker}@", str(node * WORKERS + worker))
        return text

    def _value(self, name: str, value: float, elapsed: float, phase: int) -> float:
        if MOVES.fullmatch(name):
            late = STALLED_FOR_S if self.stalled and "collector" not in name else 0
            return self._began + elapsed - late
        if name in RISES:
            return value + RISES[name] * elapsed
        return value * (0.85 + 0.15 * math.sin(elapsed / 20 + phase)) if VARIES.match(name) else value


def _general(labels: str) -> str:
    """The labels with a place for each that is of one node or worker."""
    for label in OWN:
        labels = re.sub(rf'\b{label}="[^"]*"', f'{label}="@{label}@"', labels)
    labels = labels.replace('uuid="GPU-', 'uuid="GPU-@node@-')
    labels = WORKER.sub(r'worker="worker_w@\1@",role="\2",rank="@\1@"', labels)
    return labels.replace("%", "%%")


async def serve(pages: Pages, targets: Path, interval: int | None) -> None:
    addresses = [f"127.1.{number >> 8}.{number & 255}" for number in range(1, len(pages.nodes) + 1)]
    port = free_port()
    numbers = {address: number for number, address in enumerate(addresses)}

    async def answer(request: web.Request) -> web.Response:
        assert request.transport
        text = pages.page(numbers[request.transport.get_extra_info("sockname")[0]])
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8", "Content-Encoding": "gzip"}
        return web.Response(body=gzip.compress(text.encode(), 1), headers=headers)

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    loop = asyncio.get_running_loop()
    assert runner.server
    await loop.create_server(runner.server, addresses, port)
    loop.add_signal_handler(signal.SIGUSR1, lambda: setattr(pages, "stalled", True))
    often = dict.fromkeys(("__scrape_interval__", "__scrape_timeout__"), f"{interval}s") if interval else {}
    groups = [{"targets": [f"{a}:{port}"], "labels": pages.labels(n) | often} for n, a in enumerate(addresses)]
    (new := targets.with_suffix(".new")).write_text(json.dumps(groups))
    new.rename(targets)
    await asyncio.Event().wait()


@contextmanager
def simulated_sidecars(
    page: Path, targets: Path, nodes: Sequence[int], interval: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The process, as long as it is needed; `targets` is a target file of Prometheus."""
    words = [sys.executable, "-m", __name__, str(page), str(targets), *map(str, nodes)]
    words += ["--interval", str(interval)] if interval else []
    process = subprocess.Popen(words)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=Path)
    parser.add_argument("targets", type=Path)
    parser.add_argument("nodes", type=int, nargs="+")
    parser.add_argument("--interval", type=int)
    asked = parser.parse_args()
    asyncio.run(serve(Pages(asked.page.read_text("utf-8"), asked.nodes), asked.targets, asked.interval))
