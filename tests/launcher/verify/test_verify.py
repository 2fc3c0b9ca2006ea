"""Verification at the end of a job: records, files on node disks, checksums, and settings of the job file."""

import hashlib
import json
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exporter.contract.clock import SystemClock
from exporter.contract.manifest import parse_manifest, read_manifest, render_manifest
from exporter.contract.status import NodeStatus, WorkerStatus
from exporter.machine.file_host import FileWatchHost
from exporter.machine.mounts import MountPoint
from exporter.progress.work import JobWork, job_work
from launcher.verify.checksums import CHECKSUMS_FILE, read_checksums, write_checksums
from launcher.verify.verify import FinishedJob, VerificationCheck, verify_results
from tests.exporter.files.checkpoints.checkpoint_trees import torch_bytes
from tests.launcher.verify.verify_job import COMPLETED, SAMPLES, START, Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_job_with_all_its_results_passes(job: Job) -> None:
    job.lines(0, 50).lines(1, 50).write("checkpoint_40.pt", torch_bytes())
    assert {name: check.passed for name, check in job.checks().items()} == dict.fromkeys(
        ("workers", "items", "outputs", "valid", "records", "checkpoint"), True
    )


# Files on the disks of the nodes


def checks_of_nodes(
    job: Job, monkeypatch: pytest.MonkeyPatch, fstype: str = "ext4", shared: str = "nfs4", **over: Mapping[str, Any]
) -> dict[str, VerificationCheck]:
    """Checks of a job on two nodes that share its run directory; `over` has the output files each sidecar reports."""
    manifest = replace(read_manifest(job.path), nodes=2)
    manifest = replace(manifest, tasks=tuple(replace(task, node_index=task.rank // 2) for task in manifest.tasks))
    groups = tuple(replace(group, directory=str(manifest.directory(group))) for group in manifest.groups)
    manifest = replace(manifest, groups=groups, run_dir=Path("/shared/run"))
    mounts = (MountPoint("/", fstype, "disk"), MountPoint("/shared", shared, "server:/shared"))
    monkeypatch.setattr("exporter.machine.mounts.MountTable.current", lambda _: mounts)
    entry = {
        "group": "output",
        "files": 2,
        "bytes": 50,
        "records": 50,
        "files_checked": 2,
        "valid": True,
        "first_output": START + 9,
    }
    statuses = {
        node: NodeStatus.from_json({"final": True, "outputs": [{"group": "other"}, {**entry, **facts}]})
        for node, facts in over.items()
    }
    host = FileWatchHost(SystemClock(), use_helper=False)
    finished = FinishedJob(manifest, job.work, COMPLETED, since=START, statuses=statuses)
    found = verify_results(finished, host=host)
    return {check.name: check for check in found}


@pytest.fixture
def two_node_job(tmp_path: Path) -> Job:
    return Job(tmp_path, count=4).lines(0, 25).lines(1, 25)


def test_files_on_the_disks_of_nodes_are_counted_by_their_sidecars(
    two_node_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = checks_of_nodes(two_node_job, monkeypatch, cn01={}, cn02={})
    assert {name: checks[name].passed for name in ("outputs", "valid", "records")} == {
        "outputs": True,
        "valid": True,
        "records": True,
    }
    assert checks["outputs"].detail.startswith("4 files, 100 bytes on the nodes' disks")
    assert checks["records"].detail == "100 records for 100 items"


def test_output_checks_are_undecided_while_a_node_has_not_reported_its_files(
    two_node_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = checks_of_nodes(two_node_job, monkeypatch, cn01={})
    assert {name: checks[name].passed for name in ("outputs", "valid", "records")} == dict.fromkeys(
        ("outputs", "valid", "records")
    )
    assert "no file report from 1 node" in checks["outputs"].detail
    assert checks_of_nodes(two_node_job, monkeypatch)["outputs"].passed is None


def test_uncounted_or_damaged_files_reported_by_a_sidecar_are_not_a_failure(
    two_node_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = {"valid": False, "files_invalid": 1, "invalid": [{"file": "output_x", "format": None, "reason": "cut"}]}
    checks = checks_of_nodes(
        two_node_job, monkeypatch, cn01={}, cn02={**damaged, "records": None, "first_output": None}
    )
    assert (checks["valid"].passed, checks["records"].passed) == (None, None)
    assert "output_x" in checks["valid"].detail
    assert checks_of_nodes(two_node_job, monkeypatch, cn01={}, cn02={"records": 7})["records"].passed is None


def test_a_damaged_file_on_the_local_disk_is_a_failure(two_node_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    two_node_job.lines(1, 25, end="{")
    assert checks_of_nodes(two_node_job, monkeypatch, cn01={}, cn02={})["valid"].passed is False


def test_files_on_a_shared_disk_are_read_directly(two_node_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks_of_nodes(two_node_job, monkeypatch, "nfs4", cn01={}, cn02={})["records"].passed is False


# Records


ROWS: Mapping[str, tuple[str, bytes]] = {
    "json": ("output_a.json", json.dumps([{"id": n} for n in range(99)]).encode()),
    "large json": ("output_b.json", json.dumps([{"id": n, "text": "x" * 20_000} for n in range(99)]).encode()),
    "csv": ("output_c.csv", b"id,text\n" + b'1,"a\nb"\n' * 99),
    "jsonl without a last newline": ("output_d.jsonl", b'{"id": 1}\n' * 98 + b'{"id": 2}'),
    "long lines": ("output_e.jsonl", b"\n".join([json.dumps({"text": "x" * 100_000}).encode()] * 99)),
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize(("items", "passed"), [(100, True), (101, False)])
def test_records_of_each_file_format_are_counted(kind: str, items: int, passed: bool, tmp_path: Path) -> None:
    """99 records suffice for 100 items without positions in the logs, but not for 101."""
    job = Job(tmp_path, items=items, count=1)
    job.work = JobWork()
    job.write(*ROWS[kind])
    assert job.result("records") == (
        passed,
        f"99 records for {items} items" + ("" if passed else " (verify.records_per_item: 1)"),
    )


@pytest.mark.parametrize("name", ["array.npy", "rows-latest.h5", "rows.arrow", "rows.feather", "rows.parquet"])
def test_row_counts_come_from_headers_and_footers(name: str, tmp_path: Path) -> None:
    job = Job(tmp_path, items=1_000_000, count=1)
    job.work = JobWork()
    passed, detail = job.write(f"output_{name}", (SAMPLES / name).read_bytes()).result("records")
    assert passed is False
    assert int(detail.split()[0]) > 0


def test_completed_items_need_a_record_each(job: Job) -> None:
    job.lines(0, 50).lines(1, 48)
    assert job.result("records") == (False, "98 records for 100 items (verify.records_per_item: 1)")
    assert job.lines(1, 49).result("records") == (True, "99 records for 100 items")  # 99% are enough


@pytest.mark.parametrize("logged", [80, None])
@pytest.mark.parametrize(
    ("records", "end", "per_item", "short", "passed"),
    [
        (100, "", 1, False, None),
        (99, "", 1, False, None),
        (98, "", 1, False, False),
        (101, "", 1, False, False),  # as of items with several records each
        (200, "", 2, False, None),
        (100, "", None, False, False),
        (100, "{", 1, False, False),  # damaged
        (100, "", 1, True, False),
    ],
)
def test_logs_may_skip_items_if_the_output_files_have_a_record_for_each(
    logged: int | None, records: int, end: str, per_item: int | None, short: bool, passed: bool | None, tmp_path: Path
) -> None:
    job = Job(tmp_path, verify={"records_per_item": per_item}, count=1).lines(0, records, end)
    job.work = Job.of(logged)
    left = [WorkerStatus(rank=0, worker="worker_w0", items=80, items_expected=100)]
    result, detail = job.result("items", short=left if short else [])
    assert result is passed
    assert (f"the output files have {records} records" in detail) == (passed is None)


@pytest.mark.parametrize(("per_item", "records", "passed"), [(2, 198, True), (2, 197, False), (0.5, 50, True)])
def test_records_per_item_come_from_the_job_file(per_item: float, records: int, passed: bool, tmp_path: Path) -> None:
    job = Job(tmp_path, verify={"records_per_item": per_item}, count=1).lines(0, records)
    assert job.result("records")[0] is passed


def test_null_records_per_item_disables_the_records_check(tmp_path: Path) -> None:
    job = Job(tmp_path, verify={"records_per_item": None}, count=1).lines(0, 3)
    assert "records" not in job.checks()


@pytest.mark.parametrize(
    ("share", "done", "passed"), [(0.9, 90, True), (0.9, 89, False), (1, 99, False), (0.55, 55, True)]
)
def test_the_required_share_comes_from_the_job_file(share: float, done: int, passed: bool, tmp_path: Path) -> None:
    job = Job(tmp_path, verify={"complete_share": share}, count=1).lines(0, done)
    job.work = Job.of(done)
    result, detail = job.result("items")
    assert result is passed
    assert detail == f"{done} of 100 items done; {100 * share:g}% are enough"
    job.work = JobWork()
    assert job.result("records")[0] is passed


def test_missing_records_are_undecided_when_a_file_has_no_countable_records(job: Job) -> None:
    job.lines(0, 50).lines(1, 40).write("output_summary.json", '{"mean": 1}')
    assert job.result("records") == (None, "90 records for 100 items; 1 file without countable records")
    assert job.lines(1, 50).result("records") == (True, "100 records for 100 items")


@pytest.mark.parametrize("content", ["[]", "{}", "[ ]\n", "null"])
def test_empty_json_results_are_a_failure(content: str, tmp_path: Path) -> None:
    job = Job(tmp_path, items=None, count=1)
    assert job.write("output_0.json", content).result("records") == (False, "0 records in 1 file")


# Checksums


def test_checksums_are_written_for_sha256sum(tmp_path: Path) -> None:
    job = Job(tmp_path, verify={"checksums": True, "outputs": 1})
    job.lines(0, 50).write("output_a\\b\nc.jsonl", "{}\n" * 50)
    assert job.result("checksums") == (True, "SHA-256 of 2 of 2 files in checksums.txt")
    done = subprocess.run(
        ["sha256sum", "-c", str(job.path / CHECKSUMS_FILE)], cwd=job.path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.count("OK")) == (0, 2), done.stderr
    expected = hashlib.sha256(b"{}\n" * 50).hexdigest()
    assert (read_checksums(job.path) or {})["output_a\\b\nc.jsonl"] == expected


def test_no_checksums_are_written_unless_asked_for(job: Job) -> None:
    assert "checksums" not in job.lines(0, 50).lines(1, 50).checks()
    assert not (job.path / CHECKSUMS_FILE).exists()


def test_checksums_detect_files_that_changed_after_the_end(tmp_path: Path) -> None:
    job = Job(tmp_path, verify={"checksums": True}).lines(0, 50).lines(1, 50)
    job.checks()
    written = (job.path / CHECKSUMS_FILE).read_bytes()
    assert job.result("checksums", is_repeated=True) == (True, "2 of 2 files as in checksums.txt")
    job.lines(0, 49, end='{"id": 77}\n')
    check = job.checks(is_repeated=True)["checksums"]
    assert (check.passed, [flaw.file for flaw in check.files]) == (False, ["output_worker_0.jsonl"])
    job.path.joinpath("output_worker_1.jsonl").unlink()
    assert "output_worker_1.jsonl" in job.result("checksums", is_repeated=True)[1]
    assert (job.path / CHECKSUMS_FILE).read_bytes() == written
    (job.path / CHECKSUMS_FILE).unlink()
    assert job.result("checksums", is_repeated=True) == (None, "there is no checksums.txt in the run directory")


def test_unusual_file_names_survive_the_checksum_file(tmp_path: Path) -> None:
    sums = {"a\nb": "0" * 64, "a\\nb": "1" * 64, "\\": "2" * 64, "x  y": "3" * 64, "\udcff": "4" * 64}
    write_checksums(tmp_path, sums.items())
    assert read_checksums(tmp_path) == sums


# The job file


def test_verify_settings_of_the_job_file_reach_the_manifest(tmp_path: Path) -> None:
    wanted = {"complete_share": 0.5, "outputs": 7, "records_per_item": None, "checksums": True}
    manifest = read_manifest(Job(tmp_path, verify=wanted, resume=True).path)
    assert {name: getattr(manifest.verify, name) for name in wanted} == wanted
    assert manifest.resumes
    again = parse_manifest(json.dumps(render_manifest(manifest)), manifest.run_dir)
    assert again == manifest


def test_an_old_manifest_without_verify_settings_has_the_defaults(job: Job) -> None:
    body = render_manifest(read_manifest(job.path))
    del body["verify"], body["resumes"]
    manifest = parse_manifest(json.dumps(body), job.path)
    assert manifest.verify == read_manifest(job.path).verify
    assert not manifest.resumes


def test_progress_bars_over_batches_leave_the_item_check_to_the_records(tmp_path: Path) -> None:
    job = Job(tmp_path, items=960).lines(0, 480).lines(1, 480)
    bar = WorkerStatus(rank=0, items=60, items_expected=60, items_processed=60, unit="items", pattern="bar")
    job.work = job_work([bar, bar])
    assert job.result("items") == (None, "the progress bars count 120 of 120 iterations, not the 960 items")
    assert job.result("records") == (True, "960 records for 960 items")
    job.lines(1, 300)
    assert job.result("records")[0] is False


def test_several_nodes_on_one_machine_share_its_disk(two_node_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = checks_of_nodes(two_node_job, monkeypatch, shared="ext4", cn01={}, cn02={})
    assert checks["records"].passed is False
    assert checks["records"].detail.startswith("50 records for 100 items")
