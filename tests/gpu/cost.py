"""What each call of NVML costs that a look makes, and each part of a look: a program, since the library stays loaded.

Prints JSON: by call and by part, microseconds of all times.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from exporter.gpus.nvidia.calls import NvmlLibrary
from exporter.gpus.nvidia.reader import NvmlReader

PAUSE_S = 0.02

took: dict[str, list[float]] = defaultdict(list)


def timed(found: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same, with the time that it takes noted."""

    def call(*arguments: Any) -> Any:
        began = time.perf_counter_ns()
        value = found(*arguments)
        took[name].append((time.perf_counter_ns() - began) / 1000)
        return value

    return call


def watch_calls() -> None:
    """Have each function of the library timed."""
    find = NvmlLibrary.function

    def function(library: NvmlLibrary, name: str) -> Callable[..., int] | None:
        found = find(library, name)
        return None if found is None else timed(found, name)

    setattr(NvmlLibrary, "function", function)  # noqa: B010 - mypy does not see that it becomes a method


def look(uuid: str, rounds: int) -> dict[str, list[float]]:
    """Look at one GPU so often; parts of a look by their names, each once beforehand since the first finds out more."""
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
    return dict(took)


def main() -> None:
    """Look so often, with the functions timed or not: that costs some tenths of a microsecond each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("uuid")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--calls", action="store_true", help="time each call, not the parts of a look")
    options = parser.parse_args()
    if options.calls:
        watch_calls()
    found = look(options.uuid, options.rounds)
    print(json.dumps({name: times for name, times in found.items() if name.startswith("nvml") == options.calls}))


if __name__ == "__main__":
    main()
