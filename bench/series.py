"""Series and compressed bytes of the page of a real sidecar: 8 workers on 8 GPUs of a stand-in for NVIDIA's library.

At each detail, and at normal detail with 16 workers. A page counts once it has all that a job without trouble shows:
every worker uses its GPU, writes output and makes progress, and every GPU has been read.
"""

import gzip
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bench.clock import Figures
from exporter.contract.manifest import DETAILS, NORMAL
from tests.exporter.gpus.collectors.gpu_job import GpuJob
from tests.fakenvml import profiles
from tests.realstack.waiting import wait_for
from tests.support.exporter import make_task

GPUS, WORKERS, MORE_WORKERS = 8, 8, 16
MOST_SERIES, MOST_KB, MOST_PER_WORKER = 400, 6.0, 25
RECORDS = "{}\n" * 50


def measure() -> Figures:
    """Series by family, kB over the wire, and series of each further worker."""
    cases = [*((detail, WORKERS) for detail in DETAILS), (NORMAL, MORE_WORKERS)]
    with ExitStack() as stack:
        jobs = [start_job(stack, detail, workers) for detail, workers in cases]
        pages = [complete_page(job, workers) for job, (_, workers) in zip(jobs, cases, strict=True)]
    families = [_families(gzip.decompress(page).decode()) for page in pages]
    series = [found.total() for found in families]
    kb = [round(len(page) / 1000, 2) for page in pages]
    normal = cases.index((NORMAL, WORKERS))
    per_worker = (series[-1] - series[normal]) / (MORE_WORKERS - WORKERS)
    names = [f"{detail}, {workers} workers" for detail, workers in cases]
    return {
        "series": dict(zip(names, series, strict=True)),
        "kb_gzip": dict(zip(names, kb, strict=True)),
        "series_of_a_further_worker": per_worker,
        "by_family": dict(families[normal].most_common()),
        "goals": {
            f"at most {MOST_SERIES} series": series[normal] <= MOST_SERIES,
            f"at most {MOST_KB:g} kB": kb[normal] <= MOST_KB,
            f"at most {MOST_PER_WORKER} series for a further worker": per_worker <= MOST_PER_WORKER,
        },
    }


def start_job(stack: ExitStack, detail: str, workers: int) -> GpuJob:
    """Start a job with a log, an output file and a GPU for each worker, and a checkpoint."""
    run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    tasks = tuple(replace(make_task(rank), gpus=(rank % GPUS,)) for rank in range(workers))
    job = GpuJob(run_dir, profiles.h200(GPUS), workers, detail=detail, tasks=tasks)
    stack.callback(job.close)
    for name in ("out", "ckpt"):
        (run_dir / name).mkdir()
    (run_dir / "ckpt" / "step_1.pt").write_bytes(b"")
    job.start()
    for rank in range(workers):
        use = job.use_gpu(rank % GPUS, "--items", "5000", "--seconds", "1000", "--memory", str(3 << 30))
        job.work(rank, *use)
        (run_dir / "out" / f"output_worker_{rank}.jsonl").write_text(RECORDS, encoding="utf-8")
    return job


def complete_page(job: GpuJob, workers: int) -> bytes:
    """The compressed page once every worker and GPU shows all that it has."""
    numbers = {
        **dict.fromkeys(("worker_items", "worker_output_mtime_timestamp_seconds", "worker_gpu_info"), workers),
        **dict.fromkeys(("gpu_recovery_action", "gpu_throttle_seconds_total"), GPUS),  # of both kinds of GPU reads
        "finish_timestamp_seconds": 1,
    }

    def complete() -> bytes | None:
        packed = job.body("gzip")
        found = _families(gzip.decompress(packed).decode())
        return packed if all(found[f"gpujob_{name}"] >= number for name, number in numbers.items()) else None

    return wait_for(complete, 120.0, "workers and GPUs show too little", logs=job.log)


def _families(page: str) -> Counter[str]:
    return Counter(line.partition("{")[0] for line in page.splitlines() if not line.startswith("#"))
