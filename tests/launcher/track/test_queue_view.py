"""The table and the JSON of `gpujob ps`, from the queue of a real Slurm."""

import json
from pathlib import Path

from exporter.slurm.queue import QueueRow, Sight, parse_queue
from launcher.track.queue_view import render_rows, rows_json, shown_rows
from tests.launcher.conftest import Golden

SAMPLE = Path(__file__).parents[2] / "exporter" / "slurm" / "samples" / "squeue.24.11.5.txt"
ROWS = parse_queue(SAMPLE.read_text(encoding="utf-8"))
NOW = 1795395600.0
TRAIN = QueueRow(
    *("7", Sight("RUNNING", 1705314600.0, 1705314660.0), "train", None),
    *("gpu", "cpu=32,mem=256G,node=1,billing=32,gres/gpu=1,gres/gpu:h100=1"),
)


def test_the_table_is_that_of_the_golden_page(golden: Golden) -> None:
    unfinished = render_rows(shown_rows(ROWS, ended_too=False), NOW, verbose=False)
    everything = render_rows(shown_rows([*ROWS, TRAIN], ended_too=True), NOW, verbose=True)
    golden("launcher/ps.txt", "\n".join([*unfinished, "", *everything]) + "\n")


def test_without_an_unfinished_job_the_last_ended_one_is_shown() -> None:
    ended = [QueueRow(str(end), Sight("COMPLETED", 1.0, 2.0, end), "job", None) for end in (30.0, 50.0, 40.0)]
    assert [row.job_id for row in shown_rows(ended, ended_too=False)] == ["50.0"]
    assert shown_rows([], ended_too=False) == []


def test_json_has_the_runs_with_their_jobs() -> None:
    gpu = {"name": "h100", "memory_mib": None}
    assert rows_json([TRAIN]) == {
        "schema": 1,
        "runs": [
            {
                "run_name": "train",
                "status": "running",
                "submitted_at": "2024-01-15T10:30:00Z",
                "jobs": [
                    {
                        "job_name": "train",
                        "job_id": "7",
                        "status": "running",
                        "reason": None,
                        "backend": "slurm",
                        "region": "gpu",
                        "resources": {"gpus": [gpu], "cpus": 32, "memory_mib": 262144},
                        "started_at": "2024-01-15T10:31:00Z",
                        "ended_at": None,
                    }
                ],
            }
        ],
    }
    array = [QueueRow(f"8_{index}", Sight(state), "arr", None) for index, state in enumerate(("COMPLETED", "PENDING"))]
    (run,) = json.loads(json.dumps(rows_json(array)))["runs"]
    assert (run["status"], len(run["jobs"])) == ("pending", 2)
