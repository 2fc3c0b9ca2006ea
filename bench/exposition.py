"""Writing a page: our samples against the library's ``generate_latest`` for the same data, side by side."""

import time

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from bench.clock import Figures, spread
from exporter.collecting.families import Family, Samples

CONSTANT = {"cluster": "c", "job_id": "4711", "job_name": "embed", "user": "ada", "partition": "gpu", "node": "n1"}
LABELS = ("worker", "role", "rank")
FAMILIES = [Family(f"bench_{index}_bytes", "A family.", labels=LABELS) for index in range(40)]
WORKERS = 32
ROUNDS = 15


def _page(out: Samples, tick: int) -> str:
    for rank in range(WORKERS):
        row = out.row(worker=f"worker_w{rank}", role="worker", rank=rank)
        for family in FAMILIES:
            row.add(family, tick * 1.5 + rank)
    return out.page()


class _Library(Collector):
    def __init__(self) -> None:
        self.tick = 0

    def collect(self) -> list[GaugeMetricFamily]:
        found = []
        for family in FAMILIES:
            metric = GaugeMetricFamily(family.full_name, family.help, labels=[*CONSTANT, *LABELS])
            for rank in range(WORKERS):
                metric.add_metric([*CONSTANT.values(), f"worker_w{rank}", "worker", str(rank)], self.tick * 1.5 + rank)
            found.append(metric)
        return found


def measure() -> Figures:
    """Microseconds a sample of both, and their ratio pair by pair."""
    out, library, registry = Samples(CONSTANT), _Library(), CollectorRegistry()
    registry.register(library)
    samples = len(FAMILIES) * WORKERS
    ours, theirs = [], []
    _page(out, 0)
    for tick in range(1, ROUNDS + 1):
        library.tick = tick
        start = time.process_time()
        _page(out, tick)
        middle = time.process_time()
        generate_latest(registry)
        ours.append((middle - start) / samples * 1e6)
        theirs.append((time.process_time() - middle) / samples * 1e6)
    ratio = spread([b / a for a, b in zip(ours, theirs, strict=True)])
    return {
        "samples": samples,
        "ours_us": spread(ours),
        "library_us": spread(theirs),
        "library_over_ours": ratio,
        "goals": {
            "at most 2 us a sample": spread(ours)["median"] <= 2,
            "3 times below the library": ratio["median"] >= 3,
        },
    }
