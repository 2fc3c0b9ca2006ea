"""Measures the time of NVML calls and of the parts of a read. A program, since the library stays loaded.

Prints JSON: microseconds of each run, by call or by part.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from exporter.gpus.nvidia.reader import NvmlReader

PAUSE_S = 0.02

durations: dict[str, list[float]] = defaultdict(list)


def timed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function, with its durations recorded."""

    def call(*arguments: Any) -> Any:
        began = time.perf_counter_ns()
        value = function(*arguments)
        durations[name].append((time.perf_counter_ns() - began) / 1000)
        return value

    return call


def watch_calls() -> None:
    """Time each function of the library."""
    import pynvml

    find = pynvml._nvmlGetFunctionPointer
    pynvml._nvmlGetFunctionPointer = lambda name: timed(find(name), name)


def measure(uuid: str, rounds: int) -> dict[str, list[float]]:
    """Read one GPU `rounds` times. The first read of each part is timed separately, since it does more."""
    reader = NvmlReader()
    timed(reader.open, "open")()
    (gpu,) = (gpu for gpu in timed(reader.gpus, "first list")() if gpu.uuid == uuid)
    parts: dict[str, Callable[..., Any]] = {
        "activity": reader.activity,
        "processes": reader.processes,
        "condition": reader.condition,
    }
    for name, part in parts.items():
        timed(part, f"first {name}")(gpu)
    for _ in range(rounds):
        for name, part in parts.items():
            timed(part, name)(gpu)
        timed(reader.gpus, "list")()
        time.sleep(PAUSE_S)
    reader.close()
    return dict(durations)


def main() -> None:
    """Time the parts of a read or, with ``--calls``, each call, which adds some tenths of a microsecond."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("uuid")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--calls", action="store_true", help="time each call, not the parts of a read")
    options = parser.parse_args()
    if options.calls:
        watch_calls()
    found = measure(options.uuid, options.rounds)
    print(json.dumps({name: times for name, times in found.items() if name.startswith("nvml") == options.calls}))


if __name__ == "__main__":
    main()
