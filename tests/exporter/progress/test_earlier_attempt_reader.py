"""What earlier attempts have left of how far their workers had come."""

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


def test_of_each_attempt_there_is_its_report_or_what_its_sidecars_wrote(tmp_path: Path) -> None:
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


def test_an_attempt_that_nobody_asks_for_is_not_read(tmp_path: Path) -> None:
    run_files.write_json(tmp_path / "report_a1.json", {"attempt": 1})
    found = read_earlier_attempts(tmp_path, 2)
    assert next(found) == [{"attempt": 1}]
    run_files.write_json(tmp_path / "report_a0.json", {"attempt": 0})
    assert next(found) == [{"attempt": 0}], "it was not there when the first one was asked for"


def test_a_first_attempt_has_none_before_it(tmp_path: Path) -> None:
    assert list(read_earlier_attempts(tmp_path, 0)) == []


def test_without_anything_left_nothing_is_known(tmp_path: Path) -> None:
    assert list(read_earlier_attempts(tmp_path, 2)) == [[], []]


def test_after_an_attempt_that_has_left_no_report_its_statuses_tell_also_of_ranks_that_have_moved(
    tmp_path: Path,
) -> None:
    """The batch step of attempt 0 was killed with its node. Its ranks 0 and 1 were on nodes the other way round."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    job = Submitted(
        tmp_path / "job",
        "true",
        resources={"nodes": 2},
        workers=[{"count": 2, "command": shlex.join([sys.executable, str(script)])}],
    )
    for node, rank in (("cn01", 1), ("cn02", 0)):
        told = {"rank": rank, "unit": "items", "items": 141 + rank, "items_expected": 400 + rank, "items_first": 1}
        status = {"attempt": 0, "final": False, "workers": [told], "figures_of_merit": []}
        (job.run_dir / f"status/{node}.json").write_text(json.dumps(status))
    batch = job.run(SLURM_RESTART_COUNT="1")
    assert sorted(path.name for path in (job.run_dir / "status_a0").iterdir()) == ["cn01.json", "cn02.json"]
    assert batch.report["attempt"] == 1
    workers = batch.report["workers"]
    assert [(entry["rank"], entry["node"], entry["items"], entry["items_processed"]) for entry in workers] == [
        (0, "cn01", 400, 259),
        (1, "cn02", 401, 259),
    ], batch.log()
