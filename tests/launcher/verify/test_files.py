"""Checks of output files and the last checkpoint: damaged, empty, missing, or from an earlier job."""

import errno
import json
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from exporter.contract.manifest import read_manifest
from exporter.contract.status import NodeStatus
from exporter.files.checkpoints import parts_reader
from exporter.files.formats.record_count import LineCounter
from exporter.files.formats.source import NotRegularFile, open_source
from launcher.verify import files as verify_files
from tests.exporter.files.checkpoints.checkpoint_trees import safetensors_bytes, torch_bytes
from tests.launcher.verify.verify_job import SAMPLES, START, Job, out_of_time_after, shortest_slices


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


# Output files


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("output_worker_1.jsonl", '{"id": 1}\nnot json\n{"id": 2}\n', "line 2 is not JSON"),
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
def test_a_damaged_file_is_named_with_format_and_reason(name: str, content: bytes | str, reason: str, job: Job) -> None:
    check = job.lines(0, 100).write(name, content).checks()["valid"]
    assert (check.passed, check.files_total) == (False, 1)
    assert check.detail == f"1 of 2 files damaged: {name}"
    (flaw,) = check.files
    assert flaw.file == name
    assert reason in f"{flaw.format}: {flaw.reason}"


def test_the_most_telling_files_are_read_first(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(300):
        job.write(f"output_{number:03d}.txt", "x" * (100 + number % 7), age_s=number)
    job.write("output_worker_1.jsonl", "{}\n" * 34, age_s=900).write("output_big.txt", "x" * 300, age_s=910)
    job.write("output_small.txt", "x", age_s=920).write("output_bad.txt", "x" * 103, age_s=930)
    read: list[str] = []

    def open_noted(directory: str, name: str) -> object:
        read.append(name)
        return open_source(directory, name)

    monkeypatch.setattr(verify_files, "open_source", open_noted)
    suspect = {"group": "output", "invalid": [{"file": "output_bad.txt", "format": None, "reason": "cut"}]}
    job.checks(statuses={"cn01": NodeStatus.from_json({"outputs": [suspect]})})
    assert (len(read), read[0]) == (304, "output_bad.txt")
    others = {"output_worker_1.jsonl", "output_big.txt", "output_small.txt", "output_063.txt"}
    assert others < set(read[: 3 * verify_files.TELLING + 3])
    assert read[-1] == "output_299.txt"


def test_files_that_are_not_held_in_memory_are_read_in_another_pass(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        job.write(f"output_worker_{number % 2}_{number:02d}.jsonl", "{}\n" * (1 + number % 5), age_s=number)
    job.write("output_bad.jsonl", "{\n", age_s=30).write("output_old.jsonl", "{}\n", age_s=99_999)
    whole = job.checks()
    read: list[str] = []

    def open_noted(directory: str, name: str) -> object:
        read.append(name)
        if len(read) == 8:  # among those that were listed first
            job.write("output_worker_1_new.jsonl", "{}\n" * 3)
            (job.path / "output_worker_0_38.jsonl").unlink()
        return open_source(directory, name)

    monkeypatch.setattr(verify_files, "MOST_HELD", 4)
    monkeypatch.setattr(verify_files, "TELLING", 2)
    assert job.checks() == whole
    monkeypatch.setattr(verify_files, "open_source", open_noted)
    checks = job.checks()
    assert sorted(read) == sorted({path.name for path in job.path.glob("output_*")} - {"output_old.jsonl"})
    bytes_before, bytes_now = (int(found["outputs"].detail.split()[2]) for found in (whole, checks))
    assert (checks["outputs"].detail.split()[0], bytes_now - bytes_before) == ("41", 3 * 3 - 4 * 3)
    assert checks["valid"].coverage == whole["valid"].coverage
    assert checks["valid"].detail == "1 of 41 files damaged: output_bad.jsonl"


def test_a_million_files_would_take_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_files, "MOST_HELD", 64)
    for number in range(3000):
        (tmp_path / f"output_{number}.json").touch()
    files = verify_files.OutputFiles(str(tmp_path), "*", 0.0, {})
    tracemalloc.start()
    try:
        while not files.poll(0.0).done:
            pass
        assert tracemalloc.get_traced_memory()[1] < 400_000  # with a list of the files 900,000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("pattern", ["*", "*.csv"])
def test_gpu_metrics_of_sidecars_are_not_output(pattern: str, tmp_path: Path) -> None:
    names = ("gpu_metrics.csv", "gpu_metrics_gn02.csv", "worker_0.csv", "worker_1.csv")
    found = {}
    for asked in (True, False):
        (tmp_path / str(asked)).mkdir()
        job = Job(
            tmp_path / str(asked),
            items=None,
            patterns={"output": pattern},
            paths={"output_dir": "results"},
            monitoring={"gpu_metrics": asked},
        )
        directory = read_manifest(job.path).groups[0].directory
        for name in names:
            job.write(f"{directory}/{name}", "a,b\n1,2\n")
        found[asked] = job.result("outputs")[1].partition(",")[0]
    assert found == {True: "2 files", False: "4 files"}


@pytest.mark.parametrize(
    "name",
    ["array.npy", "arrays.npz", "rows-latest.h5", "rows.arrow", "rows.parquet", "state.pt", "tensors.safetensors"],
)
def test_a_valid_file_of_each_format_passes(name: str, job: Job) -> None:
    job.write(f"output_{name}", (SAMPLES / name).read_bytes())
    assert job.result("valid")[0] is True


def test_files_of_unknown_format_are_neither_valid_nor_damaged(job: Job) -> None:
    job.write("output_worker_0.dat", "abc").write("output_worker_1.dat", "abc")
    assert job.result("valid") == (None, "2 files of unknown format")
    assert "records" not in job.checks()
    assert job.lines(1, 3).result("valid") == (True, "1 file valid (jsonl); 2 files of unknown format")


def test_many_damaged_files_are_all_counted_and_some_named(job: Job) -> None:
    for number in range(30):
        job.write(f"output_worker_{number}.jsonl", "{\n")
    check = job.checks()["valid"]
    assert check.detail.startswith("30 of 30 files damaged: ")
    assert check.detail.endswith(" and 25 more")
    assert (len(check.files), check.files_total) == (30, 30)


def test_the_list_of_damaged_files_is_bounded(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_files, "MOST_FLAWS", 3)
    for number in range(5):
        job.write(f"output_worker_{number}.jsonl", "{\n")
    check = job.checks()["valid"]
    assert (len(check.files), check.files_total) == (3, 5)


def test_an_empty_file_is_a_failure(job: Job) -> None:
    job.lines(0, 50).write("output_worker_1.jsonl", "")
    assert job.result("outputs") == (False, "2 files, 540 bytes; empty: output_worker_1.jsonl")


def test_an_empty_file_is_not_a_failure_when_all_records_are_present(job: Job) -> None:
    job.lines(0, 50).lines(1, 50).write("output_errors.jsonl", "")
    check = job.checks()["outputs"]
    assert (check.passed, check.detail, check.files_total) == (
        True,
        "3 files, 1080 bytes; empty: output_errors.jsonl",
        0,
    )


@pytest.mark.parametrize(("over", "passed"), [({"idle_ranks": (2,)}, True), ({"busy_ranks": (2,)}, False), ({}, None)])
def test_an_empty_file_without_countable_records_is_checked_by_its_worker(
    over: dict[str, Any], passed: bool | None, tmp_path: Path
) -> None:
    job = Job(tmp_path, count=3)
    for rank in range(2):
        job.write(f"output_worker_{rank}.pt", torch_bytes())
    assert job.write("output_worker_2.pt", "").result("outputs", **over)[0] is passed


@pytest.mark.parametrize(("name", "passed"), [("output_summary.json", False), ("output_errors.txt", None)])
def test_an_empty_file_that_belongs_to_no_worker_counts(name: str, passed: bool | None, job: Job) -> None:
    job.write("output_worker_0.pt", torch_bytes()).write("output_worker_1.pt", torch_bytes()).write(name, "")
    assert job.result("outputs", busy_ranks=(0, 1))[0] is passed


def test_only_empty_files_are_a_failure(tmp_path: Path) -> None:
    job = Job(tmp_path, items=None, verify={"records_per_item": None}).lines(0, 0).lines(1, 0)
    assert job.result("outputs")[0] is False
    assert job.result("outputs", idle_ranks=(0, 1))[0] is True
    assert job.lines(0, 1).result("outputs", busy_ranks=(1,))[0] is None  # the job file disables the records check


@pytest.mark.parametrize(
    "name",
    [
        *("output_worker_0.jsonl.lock", "output_worker_1.done", "output_SUCCESS", "output_._SUCCESS", "output_a.tmp"),
        *("output_a.json.tmp.4711", "output_b.part", "output_c.partial", "output_d~"),
    ],
)
def test_lock_marker_and_temporary_files_are_not_output(name: str, job: Job) -> None:
    job.lines(0, 50).lines(1, 50).write(name, "").write(f"output_0{name[6:]}", "{")
    checks = job.checks()
    assert (checks["outputs"].passed, checks["outputs"].detail) == (True, "2 files, 1080 bytes")
    assert checks["valid"].passed is True


def test_a_pattern_may_match_names_of_temporary_files(tmp_path: Path) -> None:
    job = Job(tmp_path, patterns={"output": "*.part"})
    assert job.write("a.part", "x").result("outputs") == (True, "1 file, 1 byte")


def test_a_worker_without_a_file_is_a_failure_when_others_have_one(job: Job) -> None:
    passed, detail = job.lines(0, 50).result("outputs")
    assert passed is False
    assert "none of worker_w1; set verify.outputs if fewer are enough" in detail
    assert job.lines(1, 1).result("outputs")[0] is True


def test_a_worker_without_a_file_is_not_a_failure_when_all_records_are_present(job: Job) -> None:
    assert job.lines(0, 100).result("outputs") == (True, "1 file, 1090 bytes; none of worker_w1")


def test_a_worker_without_a_file_is_a_failure_when_records_cannot_be_counted(tmp_path: Path) -> None:
    job = Job(tmp_path, count=3).write("output_worker_0.pt", torch_bytes()).write("output_worker_1.pt", torch_bytes())
    assert job.result("outputs")[0] is False


def test_a_worker_without_a_file_is_undecided_without_time_to_count_records(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    shortest_slices(monkeypatch)
    assert job.lines(0, 50).result("outputs", out_of_time=out_of_time_after(3))[0] is None


def test_the_first_worker_of_each_group_may_write_for_the_group(tmp_path: Path) -> None:
    job = Job(tmp_path, count=8)
    for rank in (0, 4):
        job.write(f"output_rank{rank}.pt", torch_bytes())
    assert job.result("outputs")[0] is True
    job.write("output_rank3.pt", torch_bytes())
    assert job.result("outputs")[0] is False


@pytest.mark.parametrize(
    ("total", "done", "unit", "passed"),
    [
        (96, [12] * 8, None, False),  # each has items of its own
        (None, [12] * 8, None, None),  # each group may have done the same items
        (None, [48, None, None, None] * 2, None, True),
        (96, [12] * 8, "requests", None),
        (96, [48] * 8, None, True),  # each group of four does its half together, and all of it log that
        (96, [48, None, None, None] * 2, None, True),
        (100, [24, None, None, None] * 2, None, True),  # the items are short, not the files
        (None, [12] * 8, "steps", True),
    ],
)
def test_the_items_of_a_group_may_show_that_each_of_its_workers_should_write(
    total: int | None, done: list[int | None], unit: str | None, passed: bool | None, tmp_path: Path
) -> None:
    job = Job(tmp_path, count=8, items=total)
    job.work = Job.of(*done, unit=unit)
    for rank in (0, 4):
        job.write(f"output_rank{rank}.pt", torch_bytes())
    known = {rank: count for rank, count in enumerate(done) if count is not None}
    result, detail = job.result("outputs", done_by_rank=known)
    assert (result, "none of worker_w1, worker_w2" in detail) == (passed, not passed)


@pytest.mark.parametrize("names", [["shard_0", "shard_1", "shard_2"], ["node0_gpu0", "node0_gpu1", "node1_gpu0"]])
def test_numbers_in_names_that_are_not_ranks_do_not_require_one_file_per_worker(
    names: list[str], tmp_path: Path
) -> None:
    job = Job(tmp_path, items=96, count=8)
    for name in names:
        job.write(f"output_{name}.jsonl", "{}\n" * 10)
    checks = job.checks()
    assert checks["records"].passed is False
    assert (checks["outputs"].passed, "none of" in checks["outputs"].detail) == (True, False)


def test_an_idle_worker_needs_no_file(job: Job) -> None:
    job.idle = (1,)
    assert job.lines(0, 100).result("outputs")[0] is True


def test_the_first_worker_may_write_for_workers_with_the_same_work(job: Job) -> None:
    job.work = Job.of(300, 300, unit="steps")
    assert job.lines(0, 100).result("outputs")[0] is True
    job.path.joinpath("output_worker_0.jsonl").unlink()
    assert job.lines(1, 60).result("outputs")[0] is False


def test_names_without_a_worker_do_not_require_one_file_per_worker(job: Job) -> None:
    assert job.write("output_all.jsonl", "{}\n" * 100).result("outputs")[0] is True


def test_a_role_without_any_file_is_not_expected_to_write(tmp_path: Path) -> None:
    workers = [{"role": "server", "command": "x"}, {"role": "client", "count": 2, "command": "x"}]
    job = Job(tmp_path, workers=workers)
    job.write("output_client_0.jsonl", "1\n").write("output_client_1.jsonl", "1\n")
    assert job.result("outputs")[0] is True
    job.path.joinpath("output_client_1.jsonl").unlink()
    assert "none of client_w1" in job.result("outputs")[1]


@pytest.mark.parametrize(("files", "passed"), [(3, True), (4, True), (2, False), (0, False)])
def test_the_expected_number_of_files_comes_from_the_job_file(files: int, passed: bool, tmp_path: Path) -> None:
    job = Job(tmp_path, verify={"outputs": 3})
    for number in range(files):
        job.write(f"output_{number}.jsonl", "1\n" * 100)
    result, detail = job.result("outputs")
    assert result is passed
    assert passed or detail.endswith("at least 3 are expected (verify.outputs)")


def test_an_expected_number_of_files_replaces_one_file_per_worker(tmp_path: Path) -> None:
    assert Job(tmp_path, verify={"outputs": 1}).lines(0, 100).result("outputs")[0] is True


def test_files_of_an_earlier_job_are_not_counted(job: Job) -> None:
    job.lines(0, 60, age_s=7200).lines(1, 60)
    passed, detail = job.result("outputs")
    assert (passed, detail.partition(";")[0]) == (False, "1 file, 650 bytes")
    assert "none of worker_w0" in detail
    assert detail.endswith("1 older ones would count with `resume: true`")
    assert job.result("records") == (False, "60 records for 100 items (verify.records_per_item: 1)")


def test_files_of_an_earlier_job_count_when_the_job_resumes(tmp_path: Path) -> None:
    job = Job(tmp_path, resume=True).lines(0, 60, age_s=7200).lines(1, 60)
    assert job.result("outputs") == (True, "2 files, 1300 bytes")
    assert job.result("records") == (True, "120 records for 100 items")


@pytest.mark.parametrize(("over", "passed"), [({}, None), ({"verify": {"outputs": 1}}, False)])
def test_a_job_without_new_files_is_reported(over: dict[str, Any], passed: bool | None, tmp_path: Path) -> None:
    job = Job(tmp_path / "old", **over).lines(0, 100, age_s=7200)
    result, detail = job.result("outputs")
    assert result is passed
    assert detail.startswith("1 file in the run directory, none written since the job started")
    assert not {"valid", "records"} & job.checks().keys()
    assert Job(tmp_path / "none", **over).result("outputs")[0] is passed


def test_fifos_directories_and_links_are_ignored(job: Job) -> None:
    job.lines(0, 50).lines(1, 50)
    os.mkfifo(job.path / "output_fifo.jsonl")
    (job.path / "output_folder").mkdir()
    (job.path / "output_link.jsonl").symlink_to(job.path / "output_worker_0.jsonl")
    assert job.result("outputs") == (True, "2 files, 1080 bytes")


def test_undecodable_file_names_are_reported_as_text(job: Job) -> None:
    name = b"output_\xff\n.jsonl"
    path = os.fsencode(job.path) + b"/" + name
    with open(path, "wb") as out:
        out.write(b"{\n")
    check = job.checks()["valid"]
    assert check.detail == r"1 of 1 file damaged: output_\udcff\n.jsonl"
    json.dumps(check.result().to_json()).encode("utf-8")


def test_an_unreadable_directory_is_a_failure(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> object:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("launcher.verify.files.os.scandir", refuse)
    assert job.result("outputs") == (False, f"{job.path} cannot be read: Permission denied")


def fail_opening(monkeypatch: pytest.MonkeyPatch, name: str, *errors: Exception) -> None:
    """Let the first attempts to open a file fail with these errors; a missing file is removed."""
    pending = list(errors)

    def opens(folder: str, path: str) -> Any:
        if path == name and pending:
            error = pending.pop(0)
            if isinstance(error, FileNotFoundError):
                os.unlink(os.path.join(folder, path))
            raise NotRegularFile(str(error)) from error
        return open_source(folder, path)

    monkeypatch.setattr(verify_files, "open_source", opens)
    monkeypatch.setattr(parts_reader, "open_source", opens)


def test_a_file_removed_after_listing_is_ignored(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.lines(0, 50).lines(1, 50).write("output_0.dat", "abc")
    fail_opening(monkeypatch, "output_0.dat", FileNotFoundError(2, "No such file"))
    checks = job.checks()
    assert (checks["outputs"].passed, checks["outputs"].detail) == (True, "2 files, 1080 bytes")
    assert (checks["valid"].passed, checks["valid"].detail) == (True, "2 files valid (jsonl)")


def test_the_only_file_of_a_worker_removed_after_listing_is_missing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.lines(0, 50).lines(1, 50)
    fail_opening(monkeypatch, "output_worker_1.jsonl", FileNotFoundError(2, "gone"))
    assert "none of worker_w1" in job.result("outputs")[1]


def test_an_unreadable_file_is_neither_valid_nor_damaged(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.lines(0, 50).lines(1, 50)
    error = PermissionError(13, "Permission denied")
    fail_opening(monkeypatch, "output_worker_1.jsonl", error)
    checks = job.checks()
    expected = "1 file valid (jsonl); 1 file that could not be read ([Errno 13] Permission denied)"
    assert (checks["valid"].passed, checks["valid"].detail) == (None, expected)
    assert (checks["records"].passed, checks["outputs"].passed) == (None, True)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
def test_a_brief_file_server_error_is_retried(number: int, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_files, "PAUSE_S", 0.0)
    job.lines(0, 50).lines(1, 50)
    errors = (OSError(number, "is not there"), OSError(number, "is not there"))
    fail_opening(monkeypatch, "output_worker_1.jsonl", *errors)
    assert job.result("valid") == (True, "2 files valid (jsonl)")


def test_records_of_a_partly_unreadable_file_are_unknown(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    for rank in range(2):
        job.write(f"output_worker_{rank}.jsonl", (json.dumps({"text": "x" * 100_000}) + "\n") * 20)
    assert job.result("records")[0] is False
    monkeypatch.setattr(LineCounter, "advance", fails)
    assert job.result("outputs")[0] is True
    assert "records" not in job.checks()


# Checkpoints


@pytest.mark.parametrize("whole", [torch_bytes(4096), safetensors_bytes(64)])
def test_a_truncated_last_checkpoint_is_reported_with_the_last_good_one(whole: bytes, job: Job) -> None:
    name = "checkpoint_{}.pt" if whole.startswith(b"PK") else "checkpoint_{}.safetensors"
    for step, age in ((20, 300), (30, 200), (40, 100)):
        job.write(name.format(step), whole, age)
    assert job.result("checkpoint") == (True, f"{name.format(40)} is valid: 1 file, {len(whole)} bytes")
    job.write(name.format(40), whole[: len(whole) // 2], 100)
    check = job.checks()["checkpoint"]
    assert check.passed is False
    assert check.detail.startswith(f"{name.format(40)} is damaged: ")
    assert check.detail.endswith(f"; the newest undamaged one is {name.format(30)}")
    assert [flaw.file for flaw in check.files] == [name.format(40)]


def test_every_shard_of_the_last_checkpoint_is_checked(job: Job) -> None:
    for step, age in ((30, 200), (40, 100)):
        for rank in range(20):
            job.write(f"checkpoint_{step}/shard_rank{rank}.pt", torch_bytes(100), age)
    assert job.result("checkpoint")[0] is True
    job.write("checkpoint_40/shard_rank17.pt", torch_bytes(100)[:-30], 100)
    passed, detail = job.result("checkpoint")
    assert passed is False
    assert detail.startswith("checkpoint_40 is damaged: checkpoint_40/shard_rank17.pt: ")
    assert detail.endswith("; the newest undamaged one is checkpoint_30")


def test_a_checkpoint_with_a_missing_shard_is_a_failure(job: Job) -> None:
    for step, age in ((30, 200), (40, 100)):
        for shard in range(1, 4):
            name = f"checkpoint_{step}/model-{shard:05}-of-00003.safetensors"
            job.write(name, safetensors_bytes(), age)
    (job.path / "checkpoint_40/model-00002-of-00003.safetensors").unlink()
    check = job.checks()["checkpoint"]
    assert check.passed is False
    assert check.detail == (
        "checkpoint_40 is incomplete: checkpoint_40/model-00002-of-00003.safetensors is missing; "
        "the newest undamaged one is checkpoint_30"
    )
    assert [flaw.reason for flaw in check.files] == ["is missing"]


def test_a_damaged_only_checkpoint_reports_that_no_good_one_exists(job: Job) -> None:
    passed, detail = job.write("checkpoint_40.pt", "").result("checkpoint")
    assert (passed, detail) == (False, "checkpoint_40.pt is damaged: is empty; there is no undamaged one")


def test_temporary_files_are_not_part_of_a_checkpoint(job: Job) -> None:
    job.write("checkpoint_40/model.pt", torch_bytes(), 700).write("checkpoint_40/optim.pt.tmp", torch_bytes()[:-9], 700)
    job.write("checkpoint_50.pt.tmp", torch_bytes()[:-9])
    assert job.result("checkpoint")[0] is True


def test_checkpoints_much_older_than_the_job_are_ignored(job: Job) -> None:
    job.write("checkpoint_40.pt", torch_bytes()[:-9], age_s=7200)
    assert job.result("checkpoint") == (None, "no checkpoint matches checkpoint_* in the run directory")


def test_a_checkpoint_of_unknown_format_is_neither_valid_nor_damaged(job: Job) -> None:
    passed, detail = job.write("checkpoint_40.bin", b"\1\2\3" * 100).result("checkpoint")
    assert passed is None
    assert detail == "checkpoint_40.bin: 1 file, 300 bytes; cannot tell: checkpoint_40.bin: has an unknown format"


def before_start(seconds: float) -> float:
    """The age of a file written `seconds` before the start of the job."""
    return time.time() - START + seconds


def test_a_checkpoint_from_just_before_the_start_is_ignored(job: Job) -> None:
    job.write("checkpoint_40.pt", torch_bytes()[:-9], before_start(10))
    assert job.result("checkpoint")[0] is None


def test_a_checkpoint_begun_by_an_earlier_job_is_undecided(job: Job) -> None:
    job.write("checkpoint_40/model.pt", torch_bytes()[:-9], before_start(100)).write("checkpoint_40/args.json", "{}")
    passed, detail = job.result("checkpoint")
    assert passed is None
    assert detail.endswith("; cannot tell: checkpoint_40/model.pt: left by an earlier job")


def test_a_missing_shard_is_undecided_when_an_earlier_job_began_the_checkpoint(job: Job) -> None:
    for shard, age in ((1, before_start(100)), (3, 10)):
        job.write(f"checkpoint_40/model-{shard:05}-of-00003.safetensors", safetensors_bytes(), age)
    assert job.result("checkpoint")[0] is None


def test_a_checkpoint_removed_during_the_check_is_ignored(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.write("checkpoint_30.pt", torch_bytes(), 200).write("checkpoint_40.pt", torch_bytes(), 100)
    fail_opening(monkeypatch, "checkpoint_40.pt", FileNotFoundError(2, "gone"))
    assert job.result("checkpoint") == (True, f"checkpoint_30.pt is valid: 1 file, {len(torch_bytes())} bytes")


def test_an_unreadable_checkpoint_is_neither_valid_nor_damaged(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.write("checkpoint_40.pt", torch_bytes(), 100)
    fail_opening(monkeypatch, "checkpoint_40.pt", PermissionError(13, "denied"))
    passed, detail = job.result("checkpoint")
    assert (passed, detail.partition("cannot tell: ")[2]) == (None, "checkpoint_40.pt: [Errno 13] denied")


def test_a_job_without_a_checkpoint_pattern_has_no_checkpoint_check(tmp_path: Path) -> None:
    job = Job(tmp_path, patterns={"output": "output_*", "checkpoints": None})
    assert "checkpoint" not in job.write("checkpoint_1.pt", b"x").checks()
