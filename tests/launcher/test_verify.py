"""What a job has left is looked into at its end: output files, the last checkpoint, results, checksums."""

import errno
import hashlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exporter.clock import SystemClock
from exporter.derive.work import Work, work_of
from exporter.manifest import parse_manifest, read_manifest, render_manifest
from exporter.readers.file_host import FileHost
from exporter.readers.formats import NoFile, open_source
from exporter.readers.mounts import Mount
from exporter.readers.record_count import LineCount
from launcher import verify_files, verify_looks
from launcher.checksums import CHECKSUMS_FILE, read_checksums, write_checksums
from launcher.verify import Check, verify
from launcher.verify_files import OutputFacts, OutputFiles
from launcher.verify_looks import Answer, look_at_all
from launcher.verify_tokens import Tokens, tokens_in, tokens_in_log
from tests.exporter.checkpoint_trees import safetensors_bytes, torch_bytes
from tests.exporter.fuse_server import FuseMount
from tests.launcher.support import settled_run_dir

SAMPLES = Path(__file__).parents[1] / "exporter" / "formats" / "samples"
START = time.time() - 3600.0
"""When the job has begun; the files of these tests are written later, unless they are made to be older."""
COMPLETED = ("completed", "completed")


class Job:
    """The run directory of a job of two workers whose files are written by hand."""

    def __init__(self, folder: Path, *, items: int | None = 100, role: str = "worker", count: int = 2, **over: Any):
        self.items = items
        over = {"patterns": {"output": "output_*", "checkpoints": "checkpoint_*"}, **over}
        progress = {"total_items": items} if items else {}
        workers = [{"role": role, "count": count, "command": "x"}]
        self.path = settled_run_dir(folder, {"name": "job", "workers": workers, "progress": progress, **over})
        self.work = self.of(*(items // count if items else None for _ in range(count)))
        self.idle: tuple[int, ...] = ()
        self.busy: tuple[int, ...] = ()
        self.logs: tuple[Path, ...] = ()

    @staticmethod
    def of(*positions: int | None, unit: str | None = None) -> Work:
        """The work of workers that have come so far."""
        entries = [{"items": done, "items_expected": done, "items_processed": done, "unit": unit} for done in positions]
        return work_of(entries)

    def write(self, name: str, content: bytes | str, age_s: float = 0.0) -> "Job":
        """A file of the job that was written so long ago."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        moment = time.time() - age_s
        os.utime(path, (moment, moment))
        return self

    def lines(self, rank: int, count: int, end: str = "", age_s: float = 0.0) -> "Job":
        """Output of a worker: so many records, and text behind them."""
        return self.write(f"output_worker_{rank}.jsonl", "".join(f'{{"id": {n}}}\n' for n in range(count)) + end, age_s)

    def checks(self, **over: Any) -> dict[str, Check]:
        """All checks, by name."""
        given: dict[str, Any] = {"work": self.work, "idle": self.idle, "busy": self.busy, "since": START}
        given |= {"logs": self.logs, **over}
        if "host" not in given:
            given["host"] = FileHost(SystemClock(), process=False)
        found = verify(read_manifest(self.path), reasons=COMPLETED, **given)
        assert len({check.name for check in found}) == len(found)
        return {check.name: check for check in found}

    def told(self, name: str, **over: Any) -> tuple[bool | None, str]:
        """How one check came out, and its words."""
        check = self.checks(**over)[name]
        return check.passed, check.detail


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_job_that_has_left_all_it_should_passes(job: Job) -> None:
    job.lines(0, 50).lines(1, 50).write("checkpoint_40.pt", torch_bytes())
    assert {name: check.passed for name, check in job.checks().items()} == dict.fromkeys(
        ("workers", "items", "outputs", "valid", "records", "checkpoint"), True
    )


# Output files


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("output_worker_1.jsonl", '{"id": 1}\nnot json\n{"id": 2}\n', "line 2 is no JSON"),
        ("output_worker_1.jsonl", '{"id": 1}\n{"id": 2, "te', "its last line is half-written"),
        ("output_worker_1.jsonl", b'{"id": 1}\n' + b"\0" * 4096, "NUL bytes"),
        ("output_worker_1.json", '[{"id": 1}, {"id"', "ends in the middle of a value"),
        ("output_worker_1.pt", torch_bytes(4096)[:-40], "torch"),
        ("output_worker_1.npy", (SAMPLES / "array.npy").read_bytes()[:-3], "npy"),
        ("output_worker_1.parquet", (SAMPLES / "rows.parquet").read_bytes()[:-9], "parquet"),
        ("output_worker_1.h5", (SAMPLES / "rows-latest.h5").read_bytes()[:-100], "hdf5"),
        ("output_worker_1.arrow", (SAMPLES / "rows.arrow").read_bytes()[:-9], "arrow"),
        ("output_worker_1.safetensors", safetensors_bytes(64)[:-1], "safetensors"),
    ],
)
def test_a_damaged_file_is_named_with_its_format_and_the_reason(
    name: str, content: bytes | str, reason: str, job: Job
) -> None:
    check = job.lines(0, 100).write(name, content).checks()["valid"]
    assert (check.passed, check.files_total) == (False, 1)
    assert check.detail == f"1 of 2 files damaged: {name}"
    (flaw,) = check.to_json()["files"]
    assert flaw["file"] == name
    assert reason in f"{flaw['format']}: {flaw['reason']}"


@pytest.mark.parametrize(
    "name",
    ["array.npy", "arrays.npz", "rows-latest.h5", "rows.arrow", "rows.parquet", "state.pt", "tensors.safetensors"],
)
def test_a_whole_file_of_each_format_passes(name: str, job: Job) -> None:
    job.write(f"output_{name}", (SAMPLES / name).read_bytes())
    assert job.told("valid")[0] is True


def test_files_of_no_known_format_are_neither_good_nor_bad(job: Job) -> None:
    job.write("output_worker_0.dat", "abc").write("output_worker_1.dat", "abc")
    assert job.told("valid") == (None, "2 files of no known format")
    assert "records" not in job.checks()
    assert job.lines(1, 3).told("valid") == (True, "1 file whole (jsonl); 2 files of no known format")


def test_of_many_damaged_files_some_are_named_and_all_counted(job: Job) -> None:
    for number in range(30):
        job.write(f"output_worker_{number}.jsonl", "{\n")
    check = job.checks()["valid"]
    assert check.detail.startswith("30 of 30 files damaged: ")
    assert check.detail.endswith(" and 25 more")
    assert (len(check.to_json()["files"]), check.files_total) == (30, 30)


def test_no_more_files_are_named_than_a_report_can_hold(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_files, "MOST_TOLD", 3)
    for number in range(5):
        job.write(f"output_worker_{number}.jsonl", "{\n")
    check = job.checks()["valid"]
    assert (len(check.files), check.files_total) == (3, 5)


def test_an_empty_file_is_a_failure(job: Job) -> None:
    job.lines(0, 50).write("output_worker_1.jsonl", "")
    assert job.told("outputs") == (False, "2 files, 540 bytes; empty: output_worker_1.jsonl")


def test_an_empty_file_is_none_when_all_records_are_there(job: Job) -> None:
    job.lines(0, 50).lines(1, 50).write("output_errors.jsonl", "")
    check = job.checks()["outputs"]
    assert (check.passed, check.detail, check.files_total) == (
        True,
        "3 files, 1080 bytes; empty: output_errors.jsonl",
        0,
    )


@pytest.mark.parametrize(("over", "passed"), [({"idle": (2,)}, True), ({"busy": (2,)}, False), ({}, None)])
def test_an_empty_file_of_records_that_cannot_be_counted_is_judged_by_its_worker(
    over: dict[str, Any], passed: bool | None, tmp_path: Path
) -> None:
    job = Job(tmp_path, count=3)
    for rank in range(2):
        job.write(f"output_worker_{rank}.pt", torch_bytes())
    assert job.write("output_worker_2.pt", "").told("outputs", **over)[0] is passed


def test_files_that_are_all_empty_are_a_failure(tmp_path: Path) -> None:
    job = Job(tmp_path, items=None, verify={"records_per_item": None}).lines(0, 0).lines(1, 0)
    assert job.told("outputs")[0] is False
    assert job.told("outputs", idle=(0, 1))[0] is True
    assert job.lines(0, 1).told("outputs", busy=(1,))[0] is None  # the job file says that records tell nothing


@pytest.mark.parametrize(
    "name",
    [
        *("output_worker_0.jsonl.lock", "output_worker_1.done", "output_SUCCESS", "output_._SUCCESS", "output_a.tmp"),
        *("output_a.json.tmp.4711", "output_b.part", "output_c.partial", "output_d~"),
    ],
)
def test_what_writers_put_beside_their_output_is_none_of_it(name: str, job: Job) -> None:
    job.lines(0, 50).lines(1, 50).write(name, "").write(f"output_0{name[6:]}", "{")
    checks = job.checks()
    assert (checks["outputs"].passed, checks["outputs"].detail) == (True, "2 files, 1080 bytes")
    assert checks["valid"].passed is True


def test_a_glob_may_ask_for_names_of_any_kind(tmp_path: Path) -> None:
    job = Job(tmp_path, patterns={"output": "*.part"})
    assert job.write("a.part", "x").told("outputs") == (True, "1 files, 1 bytes")


def test_a_worker_without_a_file_is_a_failure_where_others_have_some(job: Job) -> None:
    passed, words = job.lines(0, 50).told("outputs")
    assert passed is False
    assert "none of worker_w1; verify.outputs tells how many are enough" in words
    assert job.lines(1, 1).told("outputs")[0] is True


def test_a_worker_without_a_file_is_no_failure_when_all_records_are_there(job: Job) -> None:
    assert job.lines(0, 100).told("outputs") == (True, "1 files, 1090 bytes; none of worker_w1")


def test_a_worker_without_a_file_is_a_failure_where_records_cannot_be_counted(tmp_path: Path) -> None:
    job = Job(tmp_path, count=3).write("output_worker_0.pt", torch_bytes()).write("output_worker_1.pt", torch_bytes())
    assert job.told("outputs")[0] is False


def test_without_time_to_count_records_a_worker_without_a_file_is_no_failure(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    many_slices(monkeypatch)
    assert job.lines(0, 50).told("outputs", out_of_time=after(3))[0] is None


def test_the_first_of_each_group_of_workers_may_write_for_it(tmp_path: Path) -> None:
    job = Job(tmp_path, count=8)
    for rank in (0, 4):
        job.write(f"output_rank{rank}.pt", torch_bytes())
    assert job.told("outputs")[0] is True
    job.write("output_rank3.pt", torch_bytes())
    assert job.told("outputs")[0] is False


@pytest.mark.parametrize("names", [["shard_0", "shard_1", "shard_2"], ["node0_gpu0", "node0_gpu1", "node1_gpu0"]])
def test_numbers_that_are_no_ranks_ask_for_no_file_of_each_worker(names: list[str], tmp_path: Path) -> None:
    job = Job(tmp_path, items=96, count=8)
    for name in names:
        job.write(f"output_{name}.jsonl", "{}\n" * 10)
    checks = job.checks()
    assert checks["records"].passed is False
    assert (checks["outputs"].passed, "none of" in checks["outputs"].detail) == (True, False)


def test_a_worker_that_had_nothing_to_do_needs_no_file(job: Job) -> None:
    job.idle = (1,)
    assert job.lines(0, 100).told("outputs")[0] is True


def test_of_workers_that_do_the_same_work_the_first_may_write_for_all(job: Job) -> None:
    job.work = Job.of(300, 300, unit="steps")
    assert job.lines(0, 100).told("outputs")[0] is True
    job.path.joinpath("output_worker_0.jsonl").unlink()
    assert job.lines(1, 60).told("outputs")[0] is False


def test_names_that_do_not_tell_the_worker_ask_for_no_file_of_each(job: Job) -> None:
    assert job.write("output_all.jsonl", "{}\n" * 100).told("outputs")[0] is True


def test_a_role_without_any_file_is_no_writer(tmp_path: Path) -> None:
    workers = [{"role": "server", "command": "x"}, {"role": "client", "count": 2, "command": "x"}]
    job = Job(tmp_path, workers=workers)
    job.write("output_client_0.jsonl", "1\n").write("output_client_1.jsonl", "1\n")
    assert job.told("outputs")[0] is True
    job.path.joinpath("output_client_1.jsonl").unlink()
    assert "none of client_w1" in job.told("outputs")[1]


@pytest.mark.parametrize(("files", "passed"), [(3, True), (4, True), (2, False), (0, False)])
def test_the_job_file_tells_how_many_files_are_expected(files: int, passed: bool, tmp_path: Path) -> None:
    job = Job(tmp_path, verify={"outputs": 3})
    for number in range(files):
        job.write(f"output_{number}.jsonl", "1\n" * 100)
    found, words = job.told("outputs")
    assert found is passed
    assert passed or words.endswith("at least 3 are expected (verify.outputs)")


def test_a_count_takes_the_place_of_one_file_for_each_worker(tmp_path: Path) -> None:
    assert Job(tmp_path, verify={"outputs": 1}).lines(0, 100).told("outputs")[0] is True


def test_files_of_an_earlier_job_are_not_counted(job: Job) -> None:
    job.lines(0, 60, age_s=7200).lines(1, 60)
    passed, words = job.told("outputs")
    assert (passed, words.partition(";")[0]) == (False, "1 files, 650 bytes")
    assert "none of worker_w0" in words
    assert words.endswith("1 older ones count with `resume: true`")
    assert job.told("records") == (False, "60 records for 100 items (verify.records_per_item: 1)")


def test_files_of_an_earlier_job_count_where_the_job_goes_on_with_them(tmp_path: Path) -> None:
    job = Job(tmp_path, resume=True).lines(0, 60, age_s=7200).lines(1, 60)
    assert job.told("outputs") == (True, "2 files, 1300 bytes")
    assert job.told("records") == (True, "120 records for 100 items")


@pytest.mark.parametrize(("over", "passed"), [({}, None), ({"verify": {"outputs": 1}}, False)])
def test_a_job_that_has_written_nothing_says_so(over: dict[str, Any], passed: bool | None, tmp_path: Path) -> None:
    job = Job(tmp_path / "old", **over).lines(0, 100, age_s=7200)
    found, words = job.told("outputs")
    assert found is passed
    assert words.startswith("1 files in the run directory, none written since the job started")
    assert not {"valid", "records"} & job.checks().keys()
    assert Job(tmp_path / "none", **over).told("outputs")[0] is passed


def test_what_is_no_file_is_passed_over(job: Job) -> None:
    job.lines(0, 50).lines(1, 50)
    os.mkfifo(job.path / "output_fifo.jsonl")
    (job.path / "output_folder").mkdir()
    (job.path / "output_link.jsonl").symlink_to(job.path / "output_worker_0.jsonl")
    assert job.told("outputs") == (True, "2 files, 1080 bytes")


def test_names_of_any_kind_are_told_as_text(job: Job) -> None:
    name = b"output_\xff\n.jsonl"
    path = os.fsencode(job.path) + b"/" + name
    with open(path, "wb") as out:
        out.write(b"{\n")
    check = job.checks()["valid"]
    assert check.detail == r"1 of 1 file damaged: output_\udcff\n.jsonl"
    json.dumps(check.to_json()).encode("utf-8")


def test_a_directory_that_may_not_be_read_is_a_failure(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> object:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("launcher.verify_files.os.scandir", refuse)
    assert job.told("outputs") == (False, f"{job.path} cannot be read: Permission denied")


def beside(name: str, *errors: Exception) -> Callable[[str, str], Any]:
    """Opens files, but this one only after so many errors."""
    waiting = list(errors)

    def opens(folder: str, path: str) -> Any:
        if path == name and waiting:
            error = waiting.pop(0)
            if isinstance(error, FileNotFoundError):
                os.unlink(os.path.join(folder, path))
            raise NoFile(str(error)) from error
        return open_source(folder, path)

    return opens


def test_a_file_that_is_gone_since_it_was_listed_is_none(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.lines(0, 50).lines(1, 50).write("output_0.dat", "abc")
    monkeypatch.setattr(verify_files, "open_source", beside("output_0.dat", FileNotFoundError(2, "No such file")))
    checks = job.checks()
    assert (checks["outputs"].passed, checks["outputs"].detail) == (True, "2 files, 1080 bytes")
    assert (checks["valid"].passed, checks["valid"].detail) == (True, "2 files whole (jsonl)")


def test_the_last_file_of_a_worker_may_be_gone_since_it_was_listed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.lines(0, 50).lines(1, 50)
    monkeypatch.setattr(verify_files, "open_source", beside("output_worker_1.jsonl", FileNotFoundError(2, "gone")))
    assert "none of worker_w1" in job.told("outputs")[1]


def test_a_file_that_may_not_be_read_is_neither_good_nor_bad(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.lines(0, 50).lines(1, 50)
    error = PermissionError(13, "Permission denied")
    monkeypatch.setattr(verify_files, "open_source", beside("output_worker_1.jsonl", error))
    checks = job.checks()
    words = "1 file whole (jsonl); 1 file that could not be read ([Errno 13] Permission denied)"
    assert (checks["valid"].passed, checks["valid"].detail) == (None, words)
    assert (checks["records"].passed, checks["outputs"].passed) == (None, True)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
def test_a_file_server_that_is_back_soon_is_waited_for(number: int, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_files, "PAUSE_S", 0.0)
    job.lines(0, 50).lines(1, 50)
    errors = (OSError(number, "is not there"), OSError(number, "is not there"))
    monkeypatch.setattr(verify_files, "open_source", beside("output_worker_1.jsonl", *errors))
    assert job.told("valid") == (True, "2 files whole (jsonl)")


def test_records_of_a_file_that_cannot_be_read_to_its_end_are_not_known(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    for rank in range(2):
        job.write(f"output_worker_{rank}.jsonl", (json.dumps({"text": "x" * 100_000}) + "\n") * 20)
    assert job.told("records")[0] is False
    monkeypatch.setattr(LineCount, "advance", fails)
    assert job.told("outputs")[0] is True
    assert "records" not in job.checks()


def refusing(monkeypatch: pytest.MonkeyPatch, times: float, number: int = errno.ESTALE) -> None:
    """Have the listing of a directory fail so often."""
    asked, scandir = [0], os.scandir

    def refuse(path: Any) -> Any:
        asked[0] += 1
        if asked[0] <= times:
            raise OSError(number, os.strerror(number))
        return scandir(path)

    monkeypatch.setattr("launcher.verify_files.os.scandir", refuse)


def test_a_directory_that_cannot_be_read_for_a_moment_is_read_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_looks, "AGAIN_S", 0.05)
    refusing(monkeypatch, 3)
    assert job.lines(0, 50).lines(1, 50).told("records") == (True, "100 records for 100 items")


def test_a_directory_that_cannot_be_read_until_the_time_is_up_is_no_failure(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_looks, "AGAIN_S", 0.05)
    refusing(monkeypatch, float("inf"))
    passed, words = job.told("outputs", out_of_time=after(5))
    assert (passed, words) == (None, "the output files could not be looked at: Stale file handle")


def test_a_directory_that_cannot_be_read_for_long_is_a_failure(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_looks, "AGAIN_S", 0.05)
    monkeypatch.setattr(verify_looks, "PATIENCE_S", 0.3)
    refusing(monkeypatch, float("inf"))
    assert job.told("outputs") == (False, f"{job.path} cannot be read: Stale file handle")


# Files on the disks of the nodes


def of_nodes(
    job: Job, monkeypatch: pytest.MonkeyPatch, fstype: str = "ext4", shared: str = "nfs4", **over: Mapping[str, Any]
) -> dict[str, Check]:
    """Checks of a job on two nodes that share its run directory; their sidecars tell this of their output files."""
    manifest = replace(read_manifest(job.path), nodes=2)
    manifest = replace(manifest, tasks=tuple(replace(task, node_index=task.rank // 2) for task in manifest.tasks))
    groups = tuple(replace(group, directory=str(manifest.directory(group))) for group in manifest.groups)
    manifest = replace(manifest, groups=groups, run_dir=Path("/shared/run"))
    mounts = (Mount("/", fstype, "disk"), Mount("/shared", shared, "server:/shared"))
    monkeypatch.setattr("exporter.readers.mounts.MountTable.current", lambda _: mounts)
    entry = {"group": "output", "files": 2, "bytes": 50, "records": 50, "valid": True, "first_output": START + 9}
    told = {
        node: {"final": True, "outputs": [{"group": "other"}, {**entry, "files_invalid": 0, "invalid": [], **facts}]}
        for node, facts in over.items()
    }
    host = FileHost(SystemClock(), process=False)
    found = verify(manifest, reasons=COMPLETED, work=job.work, since=START, told=told, host=host)
    return {check.name: check for check in found}


@pytest.fixture
def wide(tmp_path: Path) -> Job:
    return Job(tmp_path, count=4).lines(0, 25).lines(1, 25)


def test_files_on_the_disks_of_nodes_are_counted_by_their_sidecars(wide: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = of_nodes(wide, monkeypatch, cn01={}, cn02={})
    assert {name: checks[name].passed for name in ("outputs", "valid", "records")} == {
        "outputs": True,
        "valid": True,
        "records": True,
    }
    assert checks["outputs"].detail.startswith("4 files, 100 bytes on the disks of the nodes")
    assert checks["records"].detail == "100 records for 100 items"


def test_a_node_that_does_not_tell_of_its_files_leaves_open_what_is_there(
    wide: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = of_nodes(wide, monkeypatch, cn01={})
    assert {name: checks[name].passed for name in ("outputs", "valid", "records")} == dict.fromkeys(
        ("outputs", "valid", "records")
    )
    assert "1 of them has not told of theirs" in checks["outputs"].detail
    assert of_nodes(wide, monkeypatch)["outputs"].passed is None


def test_what_a_sidecar_has_not_counted_or_found_damaged_is_no_failure(
    wide: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = {"valid": False, "files_invalid": 1, "invalid": [{"file": "output_x", "format": None, "reason": "cut"}]}
    checks = of_nodes(wide, monkeypatch, cn01={}, cn02={**damaged, "records": None, "first_output": None})
    assert (checks["valid"].passed, checks["records"].passed) == (None, None)
    assert "output_x" in checks["valid"].detail
    assert of_nodes(wide, monkeypatch, cn01={}, cn02={"records": 7})["records"].passed is None


def test_a_damaged_file_on_the_own_disk_is_a_failure_there_too(wide: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    wide.lines(1, 25, end="{")
    assert of_nodes(wide, monkeypatch, cn01={}, cn02={})["valid"].passed is False


def test_files_that_all_nodes_share_are_looked_at_here(wide: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_nodes(wide, monkeypatch, "nfs4", cn01={}, cn02={})["records"].passed is False


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
def test_records_of_each_kind_of_file_are_counted(kind: str, items: int, passed: bool, tmp_path: Path) -> None:
    """99 of them: enough for 100 items, of which the logs do not tell, and not for 101."""
    job = Job(tmp_path, items=items, count=1)
    job.work = Work()
    job.write(*ROWS[kind])
    assert job.told("records") == (
        passed,
        f"99 records for {items} items" + ("" if passed else " (verify.records_per_item: 1)"),
    )


@pytest.mark.parametrize("name", ["array.npy", "rows-latest.h5", "rows.arrow", "rows.feather", "rows.parquet"])
def test_headers_and_footers_tell_the_rows(name: str, tmp_path: Path) -> None:
    job = Job(tmp_path, items=1_000_000, count=1)
    job.work = Work()
    passed, words = job.write(f"output_{name}", (SAMPLES / name).read_bytes()).told("records")
    assert passed is False
    assert int(words.split()[0]) > 0


def test_each_item_that_was_done_has_its_record(job: Job) -> None:
    job.lines(0, 50).lines(1, 48)
    assert job.told("records") == (False, "98 records for 100 items (verify.records_per_item: 1)")
    assert job.lines(1, 49).told("records") == (True, "99 records for 100 items")  # 99% are enough


@pytest.mark.parametrize(("per_item", "records", "passed"), [(2, 198, True), (2, 197, False), (0.5, 50, True)])
def test_the_job_file_tells_how_many_records_belong_to_an_item(
    per_item: float, records: int, passed: bool, tmp_path: Path
) -> None:
    job = Job(tmp_path, verify={"records_per_item": per_item}, count=1).lines(0, records)
    assert job.told("records")[0] is passed


def test_records_are_not_counted_where_the_job_file_says_so(tmp_path: Path) -> None:
    job = Job(tmp_path, verify={"records_per_item": None}, count=1).lines(0, 3)
    assert "records" not in job.checks()


@pytest.mark.parametrize(
    ("share", "done", "passed"), [(0.9, 90, True), (0.9, 89, False), (1, 99, False), (0.55, 55, True)]
)
def test_the_job_file_tells_which_share_is_enough(share: float, done: int, passed: bool, tmp_path: Path) -> None:
    job = Job(tmp_path, verify={"complete_share": share}, count=1).lines(0, done)
    job.work = Job.of(done)
    found, words = job.told("items")
    assert found is passed
    assert words == f"{done} of 100 items done; {100 * share:g}% are enough"
    job.work = Work()
    assert job.told("records")[0] is passed


def test_files_without_records_leave_open_what_is_missing(job: Job) -> None:
    job.lines(0, 50).lines(1, 40).write("output_summary.json", '{"mean": 1}')
    assert job.told("records") == (None, "90 records for 100 items; 1 file without any that can be counted")
    assert job.lines(1, 50).told("records") == (True, "100 records for 100 items")


@pytest.mark.parametrize("content", ["[]", "{}", "[ ]\n", "null"])
def test_results_without_anything_in_them_are_a_failure(content: str, tmp_path: Path) -> None:
    job = Job(tmp_path, items=None, count=1)
    assert job.write("output_0.json", content).told("records") == (False, "0 records in 1 file")


# Results of benchmarks


RESULT: dict[str, Any] = {"num_prompts": 640, "completed": 640, "total_output_tokens": 589824, "duration": 93.97}
WITHOUT = {**RESULT, "total_output_tokens": 0, "mean_ttft_ms": 0.0}


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (RESULT, None),
        (WITHOUT, "total_output_tokens is 0"),
        ({**RESULT, "total_output_tokens": 0, "generated_texts": ["", ""]}, "total_output_tokens is 0"),
        ({**RESULT, "total_output_tokens": 0, "completed": 0}, "total_output_tokens is 0"),
        ({"num_prompts": 640, "completed": 0}, "completed is 0"),
        ({"request_count": {"avg": 0.0}, "output_token_throughput": {"avg": 0.0}}, "output_token_throughput is 0"),
        ({**WITHOUT, "duration": float("inf")}, "total_output_tokens is 0"),
        ({**WITHOUT, "generated_texts": ["x" * 3_000_000]}, "total_output_tokens is 0"),
    ],
)
def test_a_benchmark_without_tokens_is_a_failure(result: object, words: str | None, tmp_path: Path) -> None:
    job = Job(tmp_path, items=None, count=1, verify={"records_per_item": None})
    job.write("output_0.json", json.dumps(result))
    passed, told = job.told("tokens")
    assert passed is (words is None)
    assert told == (
        "1 results with tokens" if not words else f"the benchmark produced no tokens: output_0.json: {words}"
    )
    found, told = job.write("output_1.json", json.dumps(RESULT)).told("tokens")
    assert found is True, "a run to warm up has none"
    assert words is None or told == f"2 results, some with tokens; output_0.json: {words}"


@pytest.mark.parametrize(
    "result",
    [
        {**RESULT, "total_output_tokens": 0},
        {**WITHOUT, "backend": "sglang-embedding"},
        {**WITHOUT, "endpoint": "/v1/rerank", "padding": "x" * 3_000_000},
        {"request_count": {"avg": 64.0}, "output_sequence_length": {"avg": 0.0}},
    ],
)
def test_a_benchmark_of_embeddings_has_no_tokens(result: object, tmp_path: Path) -> None:
    job = Job(tmp_path, items=None, count=1, verify={"records_per_item": None})
    passed, told = job.write("output_0.json", json.dumps(result)).told("tokens")
    assert (passed, told) == (None, "1 results, none with tokens, of kinds that need not have any")


def test_a_line_of_a_warm_up_may_have_no_tokens(tmp_path: Path) -> None:
    job = Job(tmp_path, items=None, count=1)
    lines = ({**WITHOUT, "completed": 0}, {**RESULT, "total_output_tokens": 5000})
    job.write("output_0.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))
    assert job.told("tokens")[0] is True


def test_requests_are_a_failure_only_when_none_of_them_has_tokens(tmp_path: Path) -> None:
    job = Job(tmp_path, items=None, count=1)
    zeros = [{"id": number, "text": "", "output_tokens": 0} for number in range(3)]
    job.write("output_0.jsonl", "".join(f"{json.dumps(entry)}\n" for entry in zeros))
    assert job.told("tokens") == (False, "the benchmark produced no tokens: 0 in each of 3 requests")
    job.write("output_1.json", json.dumps([{"output_tokens": 5}]))
    assert job.told("tokens") == (True, "4 requests with tokens")


def test_requests_of_embeddings_have_no_tokens(tmp_path: Path) -> None:
    job = Job(tmp_path, items=None, count=1)
    line = json.dumps({"prompt_tokens": 12, "completion_tokens": 0, "embedding": [0.1]})
    passed, words = job.write("output_0.jsonl", f"{line}\n" * 3).told("tokens")
    assert (passed, words) == (None, "3 requests, none with tokens, of kinds that need not have any")


@pytest.mark.parametrize(
    "body",
    [{"completed": 0}, {"completed": False, "num_prompts": 1}, {"text": '"total_output_tokens": 0'}, [1], "x", {}],
)
def test_other_values_are_no_result_of_a_benchmark(body: object) -> None:
    assert tokens_in(json.dumps(body).encode(), lines=False) == Tokens()


def test_what_was_not_read_may_have_tokens() -> None:
    line = b'{"output_tokens": 0}\n'
    assert tokens_in(line * 3, lines=True).requests_with_tokens == 0
    assert tokens_in(line * 3 + b'{"outp', lines=True, whole=False).requests_with_tokens == 1
    assert tokens_in(line * 3, lines=True, whole=False).requests_with_tokens == 1


@pytest.mark.parametrize(
    ("log", "passed", "words"),
    [
        ("Successful requests:                     640\nTotal generated tokens:   589,824\n", True, "1 results with"),
        (
            "Successful requests:                     0\n",
            False,
            "produced no tokens: benchmark.out: Successful requests: 0",
        ),
        ("Total generated tokens:                  0", False, "produced no tokens: benchmark.out: Total generated"),
        ("Total generated tokens:                  0\nTotal generated tokens:  10\n", True, "1 results with"),
        ("Successful requests: 0\nSuccessful requests: 9\nTotal generated tokens: 50\n", True, "1 results with"),
        ("Successful requests: 9\nTotal generated tokens: 0\n", None, "of kinds that need not have any"),
        ("Successful requests: 9\nTotal generated tokens: 0\nMean TTFT (ms): 0.00\n", False, "tokens: 0"),
        (
            "Backend: sglang-embedding\nSuccessful requests: 9\nTotal generated tokens: 0\nMean TTFT (ms): 0\n",
            None,
            "of kinds that need not have any",
        ),
    ],
)
def test_a_benchmark_that_prints_no_tokens_is_a_failure(log: str, passed: bool | None, words: str, job: Job) -> None:
    job.write("benchmark.out", "warm-up\n" * 20_000 + log)
    job.logs = (job.path / "none.out", job.path / "benchmark.out")
    check = job.checks()["tokens"]
    assert check.passed is passed
    assert words in check.detail


def test_tokens_of_an_output_and_of_a_log_count_together(job: Job) -> None:
    job.write("output_0.json", json.dumps(RESULT)).write("a.log", "Successful requests: 0\n")
    job.logs = (job.path / "a.log",)
    assert job.told("tokens") == (True, "2 results, some with tokens; a.log: Successful requests: 0")


@pytest.mark.parametrize("text", [b"", b"Successful requests: many", b"Total generated tokens per second: 0"])
def test_a_log_may_hold_no_result(text: bytes) -> None:
    assert tokens_in_log(text) == Tokens()


def test_a_job_that_is_no_benchmark_has_no_check_of_tokens(job: Job) -> None:
    job.logs = (job.path / "none.out",)
    assert "tokens" not in job.lines(0, 50).lines(1, 50).checks()


# Checkpoints


@pytest.mark.parametrize("whole", [torch_bytes(4096), safetensors_bytes(64)])
def test_a_last_checkpoint_that_is_cut_is_told_with_the_last_good_one(whole: bytes, job: Job) -> None:
    name = "checkpoint_{}.pt" if whole.startswith(b"PK") else "checkpoint_{}.safetensors"
    for step, age in ((20, 300), (30, 200), (40, 100)):
        job.write(name.format(step), whole, age)
    assert job.told("checkpoint") == (True, f"{name.format(40)} is whole: 1 file, {len(whole)} bytes")
    job.write(name.format(40), whole[: len(whole) // 2], 100)
    check = job.checks()["checkpoint"]
    assert check.passed is False
    assert check.detail.startswith(f"{name.format(40)} is damaged: ")
    assert check.detail.endswith(f"; the last good one is {name.format(30)}")
    assert [flaw.file for flaw in check.files] == [name.format(40)]


def test_every_shard_of_the_last_checkpoint_is_looked_into(job: Job) -> None:
    for step, age in ((30, 200), (40, 100)):
        for rank in range(20):
            job.write(f"checkpoint_{step}/shard_rank{rank}.pt", torch_bytes(100), age)
    assert job.told("checkpoint")[0] is True
    job.write("checkpoint_40/shard_rank17.pt", torch_bytes(100)[:-30], 100)
    passed, words = job.told("checkpoint")
    assert passed is False
    assert words.startswith("checkpoint_40 is damaged: checkpoint_40/shard_rank17.pt: ")
    assert words.endswith("; the last good one is checkpoint_30")


def test_a_checkpoint_without_one_of_its_shards_is_a_failure(job: Job) -> None:
    for step, age in ((30, 200), (40, 100)):
        for shard in range(1, 4):
            name = f"checkpoint_{step}/model-{shard:05}-of-00003.safetensors"
            job.write(name, safetensors_bytes(), age)
    (job.path / "checkpoint_40/model-00002-of-00003.safetensors").unlink()
    check = job.checks()["checkpoint"]
    assert check.passed is False
    assert check.detail == (
        "checkpoint_40 is incomplete: checkpoint_40/model-00002-of-00003.safetensors is missing; "
        "the last good one is checkpoint_30"
    )
    assert [flaw.reason for flaw in check.files] == ["is missing"]


def test_a_damaged_checkpoint_beside_no_other_says_that_there_is_no_good_one(job: Job) -> None:
    passed, words = job.write("checkpoint_40.pt", "").told("checkpoint")
    assert (passed, words) == (False, "checkpoint_40.pt is damaged: is empty; there is no good one")


def test_what_a_writer_has_left_under_a_temporary_name_is_no_part_of_a_checkpoint(job: Job) -> None:
    job.write("checkpoint_40/model.pt", torch_bytes(), 700).write("checkpoint_40/optim.pt.tmp", torch_bytes()[:-9], 700)
    job.write("checkpoint_50.pt.tmp", torch_bytes()[:-9])
    assert job.told("checkpoint")[0] is True


def test_checkpoints_of_an_earlier_job_are_none_of_this_one(job: Job) -> None:
    job.write("checkpoint_40.pt", torch_bytes()[:-9], age_s=7200)
    assert job.told("checkpoint") == (None, "no checkpoint like checkpoint_* in the run directory")


def test_a_checkpoint_of_no_known_format_is_neither_good_nor_bad(job: Job) -> None:
    passed, words = job.write("checkpoint_40.bin", b"\1\2\3" * 100).told("checkpoint")
    assert passed is None
    assert words.startswith("checkpoint_40.bin: 1 file, 300 bytes, of no format")


def before_start(seconds: float) -> float:
    """The age of a file from so long before the start of the job."""
    return time.time() - START + seconds


def test_a_checkpoint_that_the_job_before_has_left_is_none_of_this_one(job: Job) -> None:
    job.write("checkpoint_40.pt", torch_bytes()[:-9], before_start(10))
    assert job.told("checkpoint")[0] is None


def test_a_checkpoint_that_the_job_before_has_begun_is_not_judged(job: Job) -> None:
    job.write("checkpoint_40/model.pt", torch_bytes()[:-9], before_start(100)).write("checkpoint_40/args.json", "{}")
    passed, words = job.told("checkpoint")
    assert passed is None
    assert words.endswith("1 file of which it cannot be told (left by an earlier job)")


def test_a_shard_that_the_job_before_has_not_written_is_not_judged(job: Job) -> None:
    for shard, age in ((1, before_start(100)), (3, 10)):
        job.write(f"checkpoint_40/model-{shard:05}-of-00003.safetensors", safetensors_bytes(), age)
    assert job.told("checkpoint")[0] is None


def test_a_checkpoint_that_is_removed_meanwhile_is_passed_over(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.write("checkpoint_30.pt", torch_bytes(), 200).write("checkpoint_40.pt", torch_bytes(), 100)
    monkeypatch.setattr(verify_files, "open_source", beside("checkpoint_40.pt", FileNotFoundError(2, "gone")))
    assert job.told("checkpoint") == (True, f"checkpoint_30.pt is whole: 1 file, {len(torch_bytes())} bytes")


def test_a_checkpoint_that_may_not_be_read_is_neither_good_nor_bad(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.write("checkpoint_40.pt", torch_bytes(), 100)
    monkeypatch.setattr(verify_files, "open_source", beside("checkpoint_40.pt", PermissionError(13, "denied")))
    passed, words = job.told("checkpoint")
    assert (passed, words.partition(", 1 file of ")[2]) == (None, "which it cannot be told ([Errno 13] denied)")


def test_a_job_without_a_pattern_of_checkpoints_has_no_check_of_them(tmp_path: Path) -> None:
    job = Job(tmp_path, patterns={"output": "output_*", "checkpoints": None})
    assert "checkpoint" not in job.write("checkpoint_1.pt", b"x").checks()


# Checksums


def test_checksums_are_written_for_sha256sum(tmp_path: Path) -> None:
    job = Job(tmp_path, verify={"checksums": True, "outputs": 1})
    job.lines(0, 50).write("output_a\\b\nc.jsonl", "{}\n" * 50)
    assert job.told("checksums") == (
        True,
        "SHA-256 of 2 of 2 files in checksums.txt",
    )
    done = subprocess.run(
        ["sha256sum", "-c", str(job.path / CHECKSUMS_FILE)], cwd=job.path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.count("OK")) == (0, 2), done.stderr
    expected = hashlib.sha256(b"{}\n" * 50).hexdigest()
    assert (read_checksums(job.path) or {})["output_a\\b\nc.jsonl"] == expected


def test_no_checksums_are_written_unless_asked_for(job: Job) -> None:
    assert "checksums" not in job.lines(0, 50).lines(1, 50).checks()
    assert not (job.path / CHECKSUMS_FILE).exists()


def test_files_that_have_changed_since_the_end_are_found_by_their_checksums(tmp_path: Path) -> None:
    job = Job(tmp_path, verify={"checksums": True}).lines(0, 50).lines(1, 50)
    job.checks()
    written = (job.path / CHECKSUMS_FILE).read_bytes()
    assert job.told("checksums", again=True) == (True, "2 of 2 files as in checksums.txt")
    job.lines(0, 49, end='{"id": 77}\n')
    check = job.checks(again=True)["checksums"]
    assert (check.passed, [flaw.file for flaw in check.files]) == (False, ["output_worker_0.jsonl"])
    job.path.joinpath("output_worker_1.jsonl").unlink()
    assert "output_worker_1.jsonl" in job.told("checksums", again=True)[1]
    assert (job.path / CHECKSUMS_FILE).read_bytes() == written
    (job.path / CHECKSUMS_FILE).unlink()
    assert job.told("checksums", again=True) == (None, "there is no checksums.txt in the run directory")


def test_names_of_any_kind_come_back_from_the_list(tmp_path: Path) -> None:
    sums = {"a\nb": "0" * 64, "a\\nb": "1" * 64, "\\": "2" * 64, "x  y": "3" * 64, "\udcff": "4" * 64}
    write_checksums(tmp_path, sums.items())
    assert read_checksums(tmp_path) == sums


# Time


def test_without_time_nothing_is_looked_at_and_nothing_fails(job: Job) -> None:
    job.write("output_worker_0.jsonl", "").write("checkpoint_40.pt", "")
    checks = job.checks(out_of_time=lambda: True)
    assert (checks["outputs"].passed, checks["outputs"].detail) == (None, "there was no time to look at them")
    assert checks["checkpoint"].passed is None


def many_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_files, "SLICE_S", 0.0)


def after(looks: int) -> Callable[[], bool]:
    """Says that the time is up after so many questions."""
    asked = [0]

    def over() -> bool:
        asked[0] += 1
        return asked[0] > looks

    return over


def test_what_was_found_before_the_time_was_up_counts(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    many_slices(monkeypatch)
    for number in range(50):
        job.write(f"output_worker_{number}.jsonl", "{\n", age_s=number)
    check = job.checks(out_of_time=after(64))["valid"]
    assert check.passed is False
    assert 0 < check.files_total < 50
    assert "there was no time to look at " in check.detail
    assert check.files[0].file == "output_worker_0.jsonl"  # those that were written last come first


def test_whole_files_alone_do_not_pass_when_the_time_was_up(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    many_slices(monkeypatch)
    for number in range(50):
        job.write(f"output_worker_{number}.jsonl", "{}\n")
    checks = job.checks(out_of_time=after(64))
    assert checks["valid"].passed is None
    assert checks["records"].passed is None
    assert checks["records"].detail.endswith("there was no time to count them all")


def test_progress_is_told(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    many_slices(monkeypatch)
    seen: list[tuple[int, int]] = []
    job.lines(0, 50).lines(1, 50)
    job.checks(progress=lambda done, files, _: seen.append((done, files)))
    assert seen[-1] == (2, 2)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(set(seen)) > 2


def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_looks, "PATIENCE_S", 0.5)
    monkeypatch.setattr(verify_looks, "WAIT_S", 0.02)


def test_a_watch_that_hangs_costs_its_own_checks_and_no_time(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    hurried(monkeypatch)
    gate = threading.Event()

    def hang(_self: OutputFiles, _now: float) -> OutputFacts:
        gate.wait()
        raise OSError

    monkeypatch.setattr(OutputFiles, "look", hang)
    job.write("checkpoint_40.pt", torch_bytes())
    began = time.monotonic()
    checks = job.checks()
    gate.set()
    assert time.monotonic() - began < 3.0
    assert checks["outputs"].passed is False
    assert checks["outputs"].detail.startswith("the output directory does not answer (mount /")
    assert checks["checkpoint"].passed is True
    assert not {"valid", "records"} & checks.keys()


def test_the_time_may_be_up_while_a_watch_hangs(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_looks, "OVERTIME_S", 0.1)
    gate = threading.Event()
    monkeypatch.setattr(OutputFiles, "look", lambda *_: gate.wait())
    began = time.monotonic()
    checks = job.checks(out_of_time=after(3))
    gate.set()
    assert time.monotonic() - began < 3.0
    assert (checks["outputs"].passed, checks["outputs"].detail) == (None, "there was no time to look at them")


def test_a_look_that_is_slow_when_the_time_is_up_is_no_failure(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_looks, "LATE_S", 0.2)
    gate = threading.Event()
    monkeypatch.setattr(OutputFiles, "look", lambda *_: gate.wait())
    end = time.monotonic() + 0.5
    passed, words = job.told("outputs", out_of_time=lambda: time.monotonic() > end)
    gate.set()
    assert (passed, words) == (None, "there was no time to look at them")


def test_a_folder_of_checkpoints_that_is_slow_is_looked_at_to_the_end(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are: no look takes as long as a file system that does not answer."""
    for step in range(30):
        for rank in range(10):
            job.write(f"checkpoint_{step}/model_rank{rank}.pt", torch_bytes(8), age_s=1000 - step)
    scandir = os.scandir

    class Slow:
        def __init__(self, entries: Any) -> None:
            self.entries = entries

        def __enter__(self) -> Any:
            self.entries.__enter__()
            return self

        def __iter__(self) -> Any:
            for entry in self.entries:
                time.sleep(0.005)
                yield entry

        def __exit__(self, *why: object) -> Any:
            return self.entries.__exit__(*why)

    monkeypatch.setattr(
        "exporter.readers.checkpoint_files.os.scandir",
        lambda place: Slow(scandir(place)) if isinstance(place, int) else scandir(place),
    )
    monkeypatch.setattr(verify_looks, "PATIENCE_S", 1.2)
    assert job.told("checkpoint")[0] is True


def test_a_defect_of_the_verification_fails_no_job(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OutputFiles, "look", lambda *_: 1 // 0)
    passed, words = job.told("outputs")
    assert passed is None
    assert "ZeroDivisionError" in words


def test_a_file_server_that_is_gone_is_told_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = FuseMount(tmp_path)
    try:
        (mount.folder / "output_worker_0.jsonl").write_text("{}\n" * 100)
        job = Job(tmp_path, paths={"output_dir": str(mount.point), "checkpoint_dir": str(tmp_path)}, count=1)
        (tmp_path / "checkpoint_1.pt").write_bytes(torch_bytes())
        assert job.checks(host=None)["records"].passed is True
        monkeypatch.setattr(verify_looks, "PATIENCE_S", 2.0)
        mount.say("swallow")
        began = time.monotonic()
        checks = job.checks(host=None)
        assert time.monotonic() - began < 10.0
        assert checks["outputs"].detail == f"the output directory does not answer (mount {mount.point})"
        assert checks["outputs"].passed is False
        assert checks["checkpoint"].passed is True
    finally:
        mount.say("answer")
        mount.close()


def test_a_process_that_looks_and_is_lost_is_started_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that was known of its work done anew."""
    many_slices(monkeypatch)
    job.lines(0, 50).lines(1, 50)
    host = FileHost(SystemClock(), process=True)
    killed: list[int] = []

    def kill_once(done: int, _files: int, _silent: str | None) -> None:
        if done and not killed and host.pid is not None:
            killed.append(host.pid)
            os.kill(host.pid, 9)

    try:
        checks = job.checks(host=host, progress=kill_once)
    finally:
        host.close()
    assert checks["records"].detail == "100 records for 100 items"


def test_work_that_nobody_can_look_at_is_not_a_failure(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_looks, "AGAIN_S", 0.0)
    host = FileHost(SystemClock(), process=True)
    host.close()
    passed, words = job.told("outputs", host=host)
    assert passed is None
    assert "could not be looked at" in words


def test_nothing_is_left_of_what_has_looked(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[FileHost] = []
    monkeypatch.setattr(FileHost, "close", lambda host: ends.append(host))
    job.checks(host=None)
    assert len(ends) == 1


def test_nothing_to_look_at_has_no_answer() -> None:
    assert look_at_all({}, FileHost(SystemClock(), process=False), lambda: False) == {}
    assert Answer() == (None, (), None, None, None, None)


# The job file


def test_what_the_job_file_asks_for_reaches_the_one_who_looks(tmp_path: Path) -> None:
    wanted = {"complete_share": 0.5, "outputs": 7, "records_per_item": None, "checksums": True}
    manifest = read_manifest(Job(tmp_path, verify=wanted, resume=True).path)
    assert {name: getattr(manifest.verify, name) for name in wanted} == wanted
    assert manifest.resumes
    again = parse_manifest(json.dumps(render_manifest(manifest)), manifest.run_dir)
    assert again == manifest


def test_a_manifest_from_before_there_was_anything_to_ask_for_has_the_defaults(job: Job) -> None:
    body = render_manifest(read_manifest(job.path))
    del body["verify"], body["resumes"]
    manifest = parse_manifest(json.dumps(body), job.path)
    assert manifest.verify == read_manifest(job.path).verify
    assert not manifest.resumes


def test_bars_over_batches_leave_the_items_to_the_records(tmp_path: Path) -> None:
    job = Job(tmp_path, items=960).lines(0, 480).lines(1, 480)
    bars = [{"items": 60, "items_expected": 60, "items_processed": 60, "unit": "items", "pattern": "bar"}] * 2
    job.work = work_of(bars)
    assert job.told("items") == (None, "the progress bars count 120 of 120 iterations, not the 960 items")
    assert job.told("records") == (True, "960 records for 960 items")
    job.lines(1, 300)
    assert job.told("records")[0] is False


def test_one_machine_that_plays_several_nodes_has_one_disk(wide: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = of_nodes(wide, monkeypatch, shared="ext4", cn01={}, cn02={})
    assert checks["records"].passed is False
    assert checks["records"].detail.startswith("50 records for 100 items")
