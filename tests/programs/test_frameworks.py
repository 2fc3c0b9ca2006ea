"""Programs of common frameworks run under gpujob as they are, with one and with several processes."""

import os
from pathlib import Path

import pytest

from tests.endtoend.conftest import cluster, jobs, space_dir  # noqa: F401 - fixtures
from tests.endtoend.jobs import JobSpace
from tests.support.launcher import clean_environment, gpujob, read_json

SCRIPTS = Path(__file__).with_name("scripts")
BIN = Path(os.environ["GPUJOB_PROGRAMS"], "bin")


@pytest.mark.parametrize(
    ("options", "command", "items", "lines"),
    [
        ((), "python accelerate_training.py", 10, ["processes: 1"]),
        ((), "python transformers_trainer.py", 4, ["processes: 1"]),
        ((), "python lightning_trainer.py", None, ["processes: 1"]),
        (("--workers", "2"), "python lightning_trainer.py", None, ["processes: 2"] * 2),
        (
            ("--workers", "4"),
            "python sum_with_gloo.py",
            4,
            [f"rank {rank} of 4, local rank {rank}: sum 6" for rank in range(4)],
        ),
        (
            (),
            "torchrun --nproc-per-node 2 sum_with_gloo.py",
            1,
            [f"rank {rank} of 2, local rank {rank}: sum 1" for rank in range(2)],
        ),
        ((), "mpiexec -n 2 python sum_with_mpi.py", 1, [f"rank {rank} of 2: sum 1" for rank in range(2)]),
    ],
)
def test_a_program_of_a_framework_runs_as_it_is(
    options: tuple[str, ...], command: str, items: int | None, lines: list[str], tmp_path: Path
) -> None:
    for script in SCRIPTS.iterdir():
        (tmp_path / script.name).write_bytes(script.read_bytes())
    environment = clean_environment(PATH=f"{BIN}:{os.environ['PATH']}")
    fast = ("--quiet", "--set", "monitoring.linger=0")
    done = gpujob("run", *fast, *options, "--", *command.split(), cwd=tmp_path, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = (tmp_path / "logs").glob("local-*")
    report = read_json(run_dir / "report.json")
    assert report["state"] == "COMPLETED"
    assert items is None or report["items"] == items
    written = [line for log in run_dir.glob("*_worker_w*.out") for line in log.read_text().splitlines()]
    assert sorted(line for line in written if line.startswith(("processes:", "rank"))) == lines


@pytest.mark.slurm
def test_processes_of_several_nodes_find_each_other(jobs: JobSpace) -> None:  # noqa: F811 - a fixture
    script = jobs.directory / "sum_with_gloo.py"
    script.write_bytes((SCRIPTS / script.name).read_bytes())
    worker = {"count": 4, "command": [str(BIN / "python"), str(script)]}
    job = jobs.submit(
        {
            "name": "gloo",
            "resources": {"nodes": 2, "memory_per_node": "1G"},
            "workers": [worker],
            "monitoring": {"linger": 0},
        }
    )
    assert job.wait() == "COMPLETED"
    written = [line for log in job.run_dir.glob("*_worker_w*.out") for line in log.read_text().splitlines()]
    assert sorted(line for line in written if line.startswith("rank")) == [
        f"rank {rank} of 4, local rank {rank % 2}: sum 6" for rank in range(4)
    ]
    assert len({log.name.partition("_")[0] for log in job.run_dir.glob("*_worker_w*.out")}) == 2
