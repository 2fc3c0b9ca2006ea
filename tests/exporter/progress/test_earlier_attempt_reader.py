"""Positions of the workers in earlier attempts, from reports and statuses."""

import json
import shlex
import sys
from pathlib import Path

from exporter.contract import run_files
from exporter.progress.earlier_attempt_reader import read_earlier_attempts
from tests.launcher.run.test_batch import Submitted

WORKER = """
import json, os
rank, progress = int(os.environ["RANK"]), open(os.environ["GPUJOB_PROGRESS_FILE"], "a")
for done in (141, 200, 300, 400):
    print(json.dumps({"done": done + rank, "total": 400 + rank}), file=progress)
"""


def test_each_attempt_gives_its_report_or_the_statuses_of_its_sidecars(tmp_path: Path) -> None:
    for folder in ("status", "status_a0", "status_a1"):
        (tmp_path / folder).mkdir()
    run_files.write_json(tmp_path / "report_a0.json", {"attempt": 0})
    run_files.write_json(tmp_path / "report_a2.json", {"attempt": 2})
    run_files.write_json(tmp_path / "status_a0/n1.json", {"attempt": 0, "node": "n1"})
    run_files.write_json(tmp_path / "status_a1/n1.json", {"attempt": 1, "node": "n1"})
    run_files.write_json(tmp_path / "status_a1/n2.json", {"attempt": 1, "node": "n2"})
    (tmp_path / "status_a1/n3.json").write_text("{")
    run_files.write_json(tmp_path / "status/n1.json", {"attempt": 3, "node": "n1"})
    assert list(read_earlier_attempts(tmp_path, 3)) == [
        [{"attempt": 2}],
        [{"attempt": 1, "node": "n1"}, {"attempt": 1, "node": "n2"}],
        [{"attempt": 0}],
    ]


def test_attempts_are_read_lazily(tmp_path: Path) -> None:
    run_files.write_json(tmp_path / "report_a1.json", {"attempt": 1})
    found = read_earlier_attempts(tmp_path, 2)
    assert next(found) == [{"attempt": 1}]
    run_files.write_json(tmp_path / "report_a0.json", {"attempt": 0})
    assert next(found) == [{"attempt": 0}], "it was not there when the first one was asked for"


def test_the_first_attempt_has_no_earlier_attempts(tmp_path: Path) -> None:
    assert list(read_earlier_attempts(tmp_path, 0)) == []


def test_attempts_without_files_give_nothing(tmp_path: Path) -> None:
    assert list(read_earlier_attempts(tmp_path, 2)) == [[], []]


def test_statuses_of_an_attempt_without_report_include_moved_ranks(
    tmp_path: Path,
) -> None:
    """The batch step of attempt 0 was killed with its node. Its ranks 0 and 1 were on swapped nodes."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    job = Submitted(
        tmp_path / "job",
        "true",
        resources={"nodes": 2},
        workers=[{"count": 2, "command": shlex.join([sys.executable, str(script)])}],
    )
    for node, rank in (("cn01", 1), ("cn02", 0)):
        worker = {"rank": rank, "unit": "items", "items": 141 + rank, "items_expected": 400 + rank, "items_first": 1}
        status = {"attempt": 0, "final": False, "workers": [worker], "figures_of_merit": []}
        (job.run_dir / f"status/{node}.json").write_text(json.dumps(status))
    batch = job.run(SLURM_RESTART_COUNT="1")
    assert sorted(path.name for path in (job.run_dir / "status_a0").iterdir()) == ["cn01.json", "cn02.json"]
    assert batch.report["attempt"] == 1
    workers = batch.report["workers"]
    assert [(entry["rank"], entry["node"], entry["items"], entry["items_processed"]) for entry in workers] == [
        (0, "cn01", 400, 259),
        (1, "cn02", 401, 259),
    ], batch.log()
