"""What Prometheus costs with 1,000 sidecars and all rules, and how soon the boards show them.

A real Prometheus, with the shipped configuration, scrapes simulated sidecars: 200 jobs, one of them with 512 GPUs.
Their pages are made of one of a real sidecar: 8 workers on 8 GPUs, `normal` detail. First all jobs are well, then all
are stalled. CPU time is that of the process, so that a busy machine adds little; durations of rules and of first
paints are by the clock, so compare them on a quiet one.
"""

import asyncio
import gzip
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.clock import Figures, cpu_s, rss_mib
from bench.series import complete_page, start_job
from exporter.contract.manifest import NORMAL
from launcher.boards.assets import write_assets
from tests.grafana.browser import open_browser
from tests.realstack.waiting import wait_for
from tests.support.simulated_sidecars import simulated_sidecars

ROOT = Path(__file__).resolve().parents[1]
WORKERS, NODES_OF_LARGE_JOB = 8, 64
NODES = [NODES_OF_LARGE_JOB, *[5] * 140, *[4] * 59]  # of 200 jobs; 1,000 in all
WARM_UP_S, HEALTHY_S, UNTIL_ALERTS_S, STALLED_S = 60, 150, 200, 150
SAMPLED_EACH_S = 15
MOST_CPU, MOST_MIB, MOST_OF_INTERVAL = 0.10, 1024, 0.25
TIMES_OPENED = 3
FIRST_PAINTS = {  # board, and the goal in seconds
    "fleet": ("board=gpujob-fleet&from=now-1h&to=now", 2.0),
    "job of 512 GPUs": ("board=gpujob-job&var-cluster=c1&var-job_id=1000&from=now-1h&to=now", 1.0),
}
GROUP = re.compile(r'prometheus_rule_group_(last_duration|interval)_seconds\{rule_group="[^"]*;([\w-]+)"\} (\S+)')


def measure() -> Figures:
    """CPU, memory and evaluations of both states, and the first paints."""
    assert sum(NODES) == 1000
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpujob-bench-")))
        (folder / "page").write_bytes(_landed_page())
        sidecars = stack.enter_context(simulated_sidecars(folder / "page", folder / "targets.json", NODES))
        prometheus = _Prometheus(folder)
        stack.callback(prometheus.end)
        wait_for(
            lambda: prometheus.value("sum(up)") >= sum(NODES), 180.0, "scrapes", logs=folder / "log", retry=(OSError,)
        )
        time.sleep(WARM_UP_S)
        figures = {"healthy": prometheus.cost(HEALTHY_S)}
        paints = asyncio.run(_first_paints(prometheus.url))
        sidecars.send_signal(signal.SIGUSR1)
        time.sleep(UNTIL_ALERTS_S)
        figures["stalled"] = prometheus.cost(STALLED_S)
    return {
        "sidecars": sum(NODES),
        "samples_of_a_page": prometheus.samples_of_a_page,
        **figures,
        "first_paint_s": paints,
        "load": [round(each, 1) for each in os.getloadavg()],
        "goals": {
            **{f"{name}: {goal}": met for name, found in figures.items() for goal, met in _goals(found).items()},
            **{f"{name} shown within {most:g} s": paints[name] <= most for name, (_, most) in FIRST_PAINTS.items()},
        },
    }


def _goals(found: Mapping[str, Any]) -> dict[str, bool]:
    return {
        f"at most {MOST_CPU:.0%} of a core": found["cpu_share_of_a_core"] <= MOST_CPU,
        f"at most {MOST_MIB} MiB": found["rss_mib"] <= MOST_MIB,
        "every scrape answered": found["answered"] == 1,  # or the figures are of less
        "each group of rules within a quarter of its interval": found["slowest_group"][1] <= MOST_OF_INTERVAL,
    }


def _landed_page() -> bytes:
    with ExitStack() as stack:
        return gzip.decompress(complete_page(start_job(stack, NORMAL, WORKERS), WORKERS))


class _Prometheus:
    """With the shipped configuration, rules and boards; its messages go to nobody."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.url = f"http://{address}"
        self.samples_of_a_page = 0.0
        config = (ROOT / "docker" / "prometheus.yml").read_text("utf-8")
        for shipped, own in {
            "/etc/prometheus/gpujob": str(ROOT / "alertmanager" / "rules"),
            "/targets/*.json": str(folder / "targets.json"),
            "127.0.0.1:9090": address,
            "127.0.0.1:9093": "127.0.0.1:1",
            "/hub/token": str(folder / "page"),
        }.items():
            assert shipped in config
            config = config.replace(shipped, own)
        (folder / "prometheus.yml").write_text(config, "utf-8")
        write_assets(folder / "assets")
        words = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        words += [f"--web.listen-address={address}", f"--web.user-assets={folder}/assets"]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log)

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(60)

    def value(self, query: str) -> float:
        """The only value of a query, or 0."""
        url = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            found = json.load(answer)["data"]["result"]
        return float(found[0]["value"][1]) if found else 0.0

    def cost(self, seconds: float) -> Figures:
        """CPU, memory and evaluations over some time."""
        began, used = time.monotonic(), cpu_s(self._process.pid)
        durations, intervals = defaultdict[str, list[float]](list), dict[str, float]()
        rss = 0.0
        while time.monotonic() - began < seconds:
            time.sleep(SAMPLED_EACH_S)
            rss = max(rss, rss_mib(self._process.pid))
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
                for kind, name, value in GROUP.findall(answer.read().decode()):
                    if kind == "interval":
                        intervals[name] = float(value)
                    else:
                        durations[name].append(float(value))
        share = (cpu_s(self._process.pid) - used) / (time.monotonic() - began)
        answered = self.value(f'avg(avg_over_time(up{{job="gpujob-sidecar"}}[{round(seconds)}s]))')
        self.samples_of_a_page = self.value('avg(scrape_samples_scraped{job="gpujob-sidecar"})')
        medians = {name: statistics.median(each) for name, each in durations.items()}
        slowest = max(medians, key=lambda name: medians[name] / intervals[name])
        return {
            "cpu_share_of_a_core": round(share, 3),
            "rss_mib": round(rss),
            "answered": answered,
            "series": self.value("prometheus_tsdb_head_series"),
            "firing": self.value('count(ALERTS{alertstate="firing"})'),
            "slowest_group": [slowest, round(medians[slowest] / intervals[slowest], 3)],
            "evaluation_s": {name: round(value, 3) for name, value in sorted(medians.items())},
        }


async def _first_paints(url: str) -> dict[str, float]:
    """Seconds from the address to a complete board, the least of some: the machine may be busy."""
    found = {}
    for name, (query, _) in FIRST_PAINTS.items():
        times = []
        for _ in range(TIMES_OPENED):
            async with open_browser() as page:
                await page.open(f"{url}/user/index.html?{query}")
                times.append(await page.run("performance.now()") / 1000)
                assert not await page.run("document.querySelectorAll('.error').length"), name
        found[name] = round(min(times), 2)
    return found
