"""`gpujob plan` for a thousand nodes of 8 GPUs, in the shapes that jobs have, and the start of the command itself."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.clock import Figures, spread

ROUNDS = 5
NODES, GPUS = 1000, 8
SERVED = {"model": {"path": "/models/qwen3-32b"}}
TRAINED = "python3 train.py --shard {rank} --out {output_dir}"


def _roles(**resources: int | str) -> dict[str, object]:
    return {"name": "bench", "resources": {"gpus_per_node": GPUS, **resources}}


def _worker(count: int, gpus: int) -> dict[str, object]:
    return {"workers": [{"role": "worker", "count": count, "gpus": gpus, "command": TRAINED}]}


def _split(each: int, gpus: int) -> dict[str, object]:
    sizes = {"gpus_per_prefill": gpus, "gpus_per_decode": gpus}
    return {**_roles(prefill_workers=each, decode_workers=each, **sizes), "backend": {"type": "sglang"}, **SERVED}


def _engine(kind: str, count: int, gpus: int) -> dict[str, object]:
    return {**_roles(agg_workers=count, gpus_per_agg=gpus), "backend": {"type": kind}, **SERVED}


SHAPES: dict[str, dict[str, object]] = {
    "whole nodes": {**_roles(), **_worker(NODES, GPUS)},
    "single GPUs": {**_roles(), **_worker(NODES * GPUS, 1)},
    "one worker": {**_roles(process_granularity="gpu"), **_worker(1, NODES * GPUS)},
    "one torchrun": {**_roles(), **_worker(1, NODES * GPUS), "backend": {"type": "torchrun"}},
    "one deepspeed": {**_roles(), **_worker(1, NODES * GPUS), "backend": {"type": "deepspeed"}},
    "one mpi": {**_roles(process_granularity="gpu"), **_worker(1, NODES * GPUS), "backend": {"type": "mpi"}},
    "sglang": _engine("sglang", NODES * GPUS, 1),
    "vllm": _engine("vllm", NODES, GPUS),
    "trtllm": _engine("trtllm", NODES, GPUS),
    "router and nginx": {**_split(NODES // 2, GPUS), "frontend": {"type": "sglang-router", "count": 4}},
    "dynamo": {**_split(NODES // 2 * GPUS, 1), "frontend": {"type": "dynamo", "count": 4}},
}


def measure() -> Figures:
    """Seconds of wall and CPU time of the whole command with each shape; the worst shape must keep the goal."""
    found: Figures = {"help": _command(["--help"])}
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.yaml")
        for name, shape in SHAPES.items():
            job.write_text(json.dumps(shape))
            found[name] = {"json": _command(["plan", str(job), "--json"]), "text": _command(["plan", str(job)])}
    shapes = [found[name][kind]["wall_s"]["median"] for name in SHAPES for kind in ("json", "text")]
    goals = {"help in 0.3 s": found["help"]["wall_s"]["median"] <= 0.3, "every plan in 1 s": max(shapes) <= 1}
    return {"gpus": NODES * GPUS, "rounds": ROUNDS, **found, "goals": goals}


def _command(words: list[str]) -> dict[str, dict[str, float]]:
    """Wall and CPU time of ``gpujob`` with these words; its output is discarded."""
    walls, spent = [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-I", "-m", "launcher", *words], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        walls.append(time.perf_counter() - start)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"gpujob {' '.join(words)} ended with {process.returncode}")
        spent.append(usage.ru_utime + usage.ru_stime)
    return {"wall_s": spread(walls), "cpu_s": spread(spent)}
