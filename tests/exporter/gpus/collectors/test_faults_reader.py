"""Faults of GPUs since the job's start: counted once, not forgotten by the next sidecar, and blamed on who had them."""

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from exporter.contract import run_files
from exporter.gpus.collectors import page as gpu_page
from exporter.gpus.collectors.gpus_collector import XIDS
from exporter.gpus.records import GpuEvent
from exporter.machine.kernel_log import KernelEvent, KernelXid, OomVictim
from exporter.workers.exit_facts_reader import gpu_exit_facts
from exporter.workers.exit_reason import evidence_from_record, find_exit_reason
from tests.exporter.gpus.fake_gpus import DEVICE_LISTS, Node, divided, gpu, instance, uuid
from tests.support.exporter import NODE, page_of, samples_of

STATE = Path("state") / f"{NODE}.gpus.json"


@pytest.fixture(autouse=True)
def no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """No devices are given by the environment."""
    for name in DEVICE_LISTS:
        monkeypatch.delenv(name, raising=False)


def pair(run_dir: Path, **more: Any) -> Node:
    """A node with two GPUs, one for each of two workers."""
    return Node(run_dir, gpu(0), gpu(1), **{"plan": ((0,), (1,)), **more})


def counts(node: Node, seconds: float = 0.0) -> dict[str, float]:
    """Xids of the node that are not 0, by code."""
    shown = samples_of(page_of(node.gpus, node.look(seconds)), XIDS)
    return {labels.partition('"')[2].rstrip('"'): value for labels, value in shown.items() if value}


def by_gpu(node: Node) -> dict[tuple[str, int], tuple[int, float]]:
    """Count and last moment by GPU and code."""
    gpus = node.look().gpus
    return {(e.state.gpu.index, code): (found.count, found.last) for e in gpus for code, found in e.xids.items()}


def job_errors(node: Node, number: int = 0) -> dict[str, int]:
    """Memory errors of a GPU since the job's start."""
    return dict(node.look().gpus[number].job_memory_errors)


# Xids


def test_errors_of_the_driver_count_by_gpu_and_code(tmp_path: Path) -> None:
    node = pair(tmp_path)
    for number, code in ((0, 31), (1, 31), (1, 79), (1, 31)):
        node.clock.advance(1)
        node.xid(number, code)
    now = node.clock.now
    assert by_gpu(node) == {("0", 31): (1, now - 3), ("1", 31): (2, now), ("1", 79): (1, now - 1)}
    assert counts(node, 1) == {"31": 3, "79": 1}


def test_an_error_that_driver_and_kernel_tell_counts_once(tmp_path: Path) -> None:
    node = pair(tmp_path)
    node.look()
    node.xid(0, 79)
    assert counts(node, 1) == {"79": 1}
    node.line("0000:18:00", 79)  # the kernel's log is read a little later
    assert counts(node, 1) == {"79": 1}
    assert [kind for _, kind, _ in node.events()].count("GPU Xid") == 1
    node.line("0000:18:00", 79)
    assert counts(node, 1) == {"79": 2}
    node.xid(0, 79)
    assert counts(node, 1) == {"79": 2}
    assert [kind for _, kind, _ in node.events()].count("GPU Xid") == 2


@pytest.mark.parametrize("pci", ["0000:19:00", "0000:19:00.0", "00000000:19:00.0", "0:19:00"])
def test_the_kernel_names_a_gpu_by_its_place_on_the_bus(tmp_path: Path, pci: str) -> None:
    node = pair(tmp_path)
    node.line(pci, 43, pid=77)
    assert by_gpu(node) == {("1", 43): (1, node.clock.now)}
    assert node.events()[-1][2].endswith(", process 77")


def test_errors_of_other_gpus_and_other_lines_of_the_kernel_do_not_count(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0), gpu(1), attached=True)
    node.line("0000:19:00", 79)
    node.line("0000:99:00", 79)
    node.kernel.events = (*node.kernel.events, KernelEvent(node.clock.now, OomVictim(7)))
    node.xid(1, 79)
    node.host.told.append(GpuEvent("", 79, node.clock.now))
    assert counts(node) == {}


def test_on_a_divided_gpu_the_kernels_word_is_of_the_whole(tmp_path: Path) -> None:
    node = Node(tmp_path, divided(0), instance(0, 0), instance(0, 1))
    node.xid(0, 94)
    node.line("0000:18:00", 94)
    assert by_gpu(node) == {("0", 94): (1, node.clock.now)}


def test_what_the_kernel_told_before_the_gpus_were_known_counts(tmp_path: Path) -> None:
    node = pair(tmp_path)
    gpus, node.host.gpus, node.host.state = node.host.gpus, [], "hanging"
    node.line("0000:18:00", 79)
    node.look()
    node.host.gpus, node.host.state = gpus, "ok"
    assert counts(node, 1) == {"79": 1}


def test_an_error_is_not_counted_again_when_older_ones_are_dropped(tmp_path: Path) -> None:
    node = pair(tmp_path)
    for _ in range(3):
        node.xid(0, 31)
    assert counts(node) == {"31": 3}
    node.host.told = node.host.told[1:]
    node.xid(0, 31)
    assert counts(node, 1) == {"31": 4}


# Over restarts


def test_the_next_sidecar_goes_on_counting(tmp_path: Path) -> None:
    first = pair(tmp_path)
    first.xid(0, 79)
    first.xid(1, 31)
    assert counts(first) == {"31": 1, "79": 1}
    second = pair(tmp_path)
    second.clock.advance(60)
    assert counts(second) == {"31": 1, "79": 1}
    second.xid(1, 31)
    assert by_gpu(second) == {
        ("0", 79): (1, first.clock.now),
        ("1", 31): (2, second.clock.now),
    }
    # known before this sidecar, and so no news
    assert [detail.partition(": ")[2][:6] for _, kind, detail in second.events() if kind == "GPU Xid"] == ["Xid 31"]
    assert counts(pair(tmp_path)) == {"31": 2, "79": 1}


def test_lines_that_the_kernel_still_has_are_not_counted_again_after_a_restart(tmp_path: Path) -> None:
    first = pair(tmp_path)
    first.xid(0, 79)
    first.line("0000:18:00", 79)
    first.look()
    second = pair(tmp_path)
    second.kernel.events = first.kernel.events
    assert counts(second) == {"79": 1}
    assert [kind for _, kind, _ in second.events()].count("GPU Xid") == 0


def test_another_attempt_of_the_job_begins_anew(tmp_path: Path) -> None:
    first = pair(tmp_path)
    first.xid(0, 79)
    first.look()
    assert counts(pair(tmp_path, attempt=1)) == {}


@pytest.mark.parametrize(
    "gpus",
    [
        [],
        "GPU",
        {uuid(0): None},
        {uuid(0): {"ecc": [{}, {}]}},
        {uuid(0): {"xids": {"79": [1, 2.0]}}},
        {uuid(0): {"xids": {"79": [1, 2.0]}, "ecc": [{}]}},
        {uuid(0): {"xids": {"79": 1}, "ecc": [{}, {}]}},
        {uuid(0): {"xids": {"79": [1, 2.0]}, "ecc": [{"corrected": "many"}, {}]}},
        {uuid(0): {"xids": {"79": [float("inf"), 2.0]}, "ecc": [{}, {}]}},
        {uuid(0): {"xids": {"79": [1, 2.0], "fallen": [1, 2.0]}, "ecc": [{}, {}]}},
    ],
)
def test_a_broken_state_is_told_and_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture, gpus: Any) -> None:
    node = pair(tmp_path)
    (tmp_path / STATE).parent.mkdir()
    body = {"schema": 1, "job_id": "4459", "attempt": 0, "gpus": {"gpus": gpus}}
    (tmp_path / STATE).write_text(json.dumps(body), encoding="ascii")
    with caplog.at_level(logging.WARNING):
        assert counts(node) == {}
    assert ("is not used" in caplog.text) == (gpus != [])
    node.xid(0, 31)
    assert counts(node, 1) == {"31": 1}
    assert counts(pair(tmp_path)) == {"31": 1}


@pytest.mark.parametrize("text", ["", "{", "null", "[]", '{"schema": 99}'])
def test_a_state_that_is_none_is_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / STATE).parent.mkdir()
    (tmp_path / STATE).write_text(text, encoding="ascii")
    assert counts(pair(tmp_path)) == {}


def test_a_run_directory_that_takes_nothing_costs_the_memory_of_restarts_alone(
    locked: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = pair(locked)
    node.xid(0, 79)
    assert counts(node) == {"79": 1}
    assert "faults of GPUs are not saved" in caplog.text


# Memory errors


def test_memory_errors_count_from_the_jobs_start(tmp_path: Path) -> None:
    node = pair(tmp_path)
    node.change(0, ecc_corrected=100, ecc_uncorrected=2)
    assert job_errors(node) == {"corrected": 0, "uncorrected": 0}
    node.change(0, ecc_corrected=103, ecc_uncorrected=3)
    page = page_of(node.gpus, node.look(60))
    assert samples_of(page, gpu_page.ECC) == {'gpu="0",type="corrected"': 103, 'gpu="0",type="uncorrected"': 3}
    assert samples_of(page, gpu_page.ECC_JOB) == {'gpu="0",type="corrected"': 3, 'gpu="0",type="uncorrected"': 1}
    assert ("0", "failure") in [(reason.gpu, reason.severity) for reason in node.look().reasons]


def test_a_gpu_that_tells_of_no_memory_errors_has_no_series_of_them(tmp_path: Path) -> None:
    node = pair(tmp_path)
    node.change(1, ecc_uncorrected=0)
    page = page_of(node.gpus, node.look())
    assert samples_of(page, gpu_page.ECC_JOB) == {'gpu="1",type="uncorrected"': 0}


def test_memory_errors_count_on_after_a_restart_of_the_sidecar(tmp_path: Path) -> None:
    first = pair(tmp_path)
    first.change(0, ecc_corrected=100)
    first.look()
    first.change(0, ecc_corrected=104)
    first.look(60)
    second = pair(tmp_path)
    second.change(0, ecc_corrected=105)
    assert job_errors(second) == {"corrected": 5}


@pytest.mark.parametrize("restarted", [False, True])
def test_memory_errors_count_on_after_the_driver_was_loaded_anew(tmp_path: Path, restarted: bool) -> None:
    node = pair(tmp_path)
    for count in (100, 104):
        node.change(0, ecc_corrected=count)
        node.look(60)
    if restarted:
        node = pair(tmp_path)
    node.change(0, ecc_corrected=1)
    assert job_errors(node) == {"corrected": 5}
    node.change(0, ecc_corrected=3)
    assert job_errors(node) == {"corrected": 7}


def test_the_state_is_written_when_there_is_something_new_alone(tmp_path: Path) -> None:
    node = pair(tmp_path)
    node.look()
    assert not (tmp_path / STATE).exists()
    node.change(0, ecc_corrected=5, ecc_uncorrected=0)
    node.look(60)
    written = os.stat(tmp_path / STATE).st_ino
    node.change(0, ecc_uncorrected=None)  # it is not told for once
    node.look(60)
    assert os.stat(tmp_path / STATE).st_ino == written
    node.change(0, ecc_corrected=6)
    node.look(60)
    assert os.stat(tmp_path / STATE).st_ino != written
    assert run_files.read_json(str(tmp_path / STATE)) is not None


# Whose fault it was


def end_of(node: Node, rank: int, ran_s: float = 600.0) -> tuple[str, tuple[str, ...]]:
    """What is said of a worker that ends now with exit status 1."""
    start = node.clock.now - ran_s
    faults = gpu_exit_facts(node.context, node.tasks[rank], node.board.pids.get(rank, frozenset()), start)
    record = {"start": start, "end": node.clock.now, "code": 1, "signal": None, **faults}
    judged = find_exit_reason(evidence_from_record(record))
    return judged.reason, judged.evidence


def facts_of(node: Node, rank: int) -> list[str]:
    """Words of the errors that are this worker's."""
    found = gpu_exit_facts(node.context, node.tasks[rank], node.board.pids.get(rank, frozenset()), 0.0)
    return [fault["words"] for fault in found.get("gpu_faults", ())]


def log(node: Node, what: KernelXid) -> None:
    """The kernel's log tells of an error."""
    node.kernel.events = (*node.kernel.events, KernelEvent(node.clock.now, what))


def shared(run_dir: Path, plan: tuple[tuple[int, ...], ...] = ((0,), (1,))) -> Node:
    """A GPU divided into two instances, numbered 5 and 6, with workers at work in those of the plan."""
    parts = [instance(0, number) for number in (0, 1)]
    parts = [
        dataclasses.replace(part, gpu=dataclasses.replace(part.gpu, gpu_instance=5 + number))
        for number, part in enumerate(parts)
    ]
    node = Node(run_dir, divided(0), *parts, plan=plan)
    at_work(node, *((rank, 1 + at) for rank, positions in enumerate(plan) for at in positions))
    return node


def at_work(node: Node, *users: tuple[int, int]) -> None:
    """Workers on GPUs: each the rank, and the place of the GPU in the look."""
    for rank in {rank for rank, _ in users}:
        node.run(rank, 1000 + rank)
    for number in {number for _, number in users}:
        node.use(number, *(1000 + rank for rank, place in users if place == number))
    node.page()


def test_an_error_of_the_program_on_a_gpu_of_its_own_ends_it_by_its_own_fault(tmp_path: Path) -> None:
    node = pair(tmp_path)
    at_work(node, (0, 0), (1, 1))
    node.xid(0, 31)
    reason, evidence = end_of(node, 0)
    assert reason == "gpu_fault"
    assert evidence[-1] == f"Xid 31 on GPU 0 ({uuid(0)}): invalid address, by the program"
    assert end_of(node, 1)[0] == "app_error"


def test_an_error_of_a_program_on_a_shared_gpu_is_blamed_on_nobody(tmp_path: Path) -> None:
    node = pair(tmp_path, plan=((0,), (0,)))
    at_work(node, (0, 0), (1, 0))
    node.xid(0, 31)
    assert [end_of(node, rank)[0] for rank in (0, 1)] == ["app_error", "app_error"]


def test_an_error_of_a_program_beside_a_stranger_is_blamed_on_nobody(tmp_path: Path) -> None:
    node = pair(tmp_path, plan=((0,), (1,)))
    at_work(node, (0, 0), (1, 1))
    node.board.shared_gpus = frozenset({uuid(0)})
    node.xid(0, 31)
    node.xid(1, 31)
    assert [end_of(node, rank)[0] for rank in (0, 1)] == ["app_error", "gpu_fault"]


def test_the_other_one_on_a_gpu_is_remembered_when_it_has_just_ended(tmp_path: Path) -> None:
    node = pair(tmp_path)
    at_work(node, (0, 1), (1, 1))
    node.xid(1, 31)
    node.board.pids = {1: frozenset({1001})}
    node.use(1, 1001)
    node.page(5)
    assert end_of(node, 1)[0] == "app_error"
    node.page(120)
    node.xid(1, 31)
    assert end_of(node, 1)[0] == "gpu_fault"


def test_an_error_of_the_device_ends_everybody_on_it(tmp_path: Path) -> None:
    node = pair(tmp_path, plan=((0,), (0,)))
    at_work(node, (0, 0), (1, 0))
    node.xid(0, 79)
    for rank in (0, 1):
        reason, evidence = end_of(node, rank)
        assert reason == "gpu_fault"
        assert evidence[-1] == f"Xid 79 on GPU 0 ({uuid(0)}): fallen off the bus"


def test_an_error_of_the_gpu_counts_on_which_a_worker_is_against_the_plan(tmp_path: Path) -> None:
    node = pair(tmp_path)
    at_work(node, (0, 1))
    node.xid(1, 79)
    assert end_of(node, 0)[0] == "gpu_fault"


def test_an_error_before_a_worker_was_started_is_not_its(tmp_path: Path) -> None:
    node = pair(tmp_path)
    at_work(node, (0, 0))
    node.xid(0, 31)
    node.clock.advance(5)
    assert end_of(node, 0, ran_s=4.0)[0] == "app_error"
    assert end_of(node, 0, ran_s=6.0)[0] == "gpu_fault"


@pytest.mark.parametrize(("code", "reasons"), [(79, ["gpu_fault"] * 2), (31, ["app_error"] * 2)])
def test_an_error_of_a_divided_gpu_is_one_of_all_its_instances(tmp_path: Path, code: int, reasons: list[str]) -> None:
    node = Node(tmp_path, divided(0), instance(0, 0), instance(0, 1), plan=((0,), (1,)))
    at_work(node, (0, 1), (1, 2))
    node.xid(0, code)
    assert [end_of(node, rank)[0] for rank in (0, 1)] == reasons


def test_an_error_of_a_divided_gpu_counts_before_the_worker_was_seen_there(tmp_path: Path) -> None:
    node = Node(tmp_path, divided(0), instance(0, 0), gpu(1), plan=((0,), (1,)))
    node.page()
    node.xid(0, 79)
    assert [end_of(node, rank)[0] for rank in (0, 1)] == ["gpu_fault", "app_error"]


@pytest.mark.parametrize("processes", [(), None])
def test_where_nobody_tells_who_is_on_a_gpu_all_that_the_plan_puts_there_are(tmp_path: Path, processes: Any) -> None:
    node = Node(tmp_path, gpu(0, processes=processes), gpu(1), plan=((0,), (0,), (1,)))
    node.page()
    node.xid(0, 13)
    assert [end_of(node, rank)[0] for rank in (0, 1)] == ["app_error", "app_error"]
    node.xid(1, 13)
    assert end_of(node, 2)[0] == "gpu_fault"


def test_where_nobody_tells_whether_there_are_strangers_a_program_is_not_blamed(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0, processes=None))
    node.page()
    node.xid(0, 13)
    assert end_of(node, 0)[0] == "app_error"


def test_before_the_processes_on_a_gpu_were_looked_at_a_program_is_not_blamed(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0))
    node.look()
    node.xid(0, 13)
    assert end_of(node, 0)[0] == "app_error"


def test_of_a_divided_gpu_others_may_have_parts_that_are_not_seen_here(tmp_path: Path) -> None:
    node = shared(tmp_path)
    node.xid(0, 31)
    assert end_of(node, 0)[0] == "app_error"


@pytest.mark.parametrize(
    ("code", "number", "reasons"),
    [
        (31, 5, ["gpu_fault", "app_error"]),
        (31, 6, ["app_error", "gpu_fault"]),
        (94, 6, ["app_error", "gpu_fault"]),
        (95, 5, ["gpu_fault", "app_error"]),
        (95, 7, ["app_error", "app_error"]),
        (95, None, ["gpu_fault", "gpu_fault"]),
    ],
)
@pytest.mark.parametrize("by", ["driver", "kernel"])
def test_an_error_of_an_instance_is_that_of_the_worker_in_it(
    tmp_path: Path, by: str, code: int, number: int | None, reasons: list[str]
) -> None:
    node = shared(tmp_path)
    if by == "driver":
        node.host.told.append(GpuEvent(uuid(0), code, node.clock.now, gpu_instance=number))
    else:
        log(node, KernelXid("0000:18:00", code, gpu_instance=number))
    assert [end_of(node, rank)[0] for rank in (0, 1)] == reasons


def test_a_contained_error_of_an_instance_ends_all_workers_in_it(tmp_path: Path) -> None:
    node = shared(tmp_path, plan=((0,), (0,)))
    for number in (6, 5):
        assert [end_of(node, rank)[0] for rank in (0, 1)] == ["app_error", "app_error"]
        node.host.told.append(GpuEvent(uuid(0), 94, node.clock.now, gpu_instance=number))
    assert [end_of(node, rank)[0] for rank in (0, 1)] == ["gpu_fault", "gpu_fault"]


def test_a_contained_error_is_that_of_the_program_that_is_named(tmp_path: Path) -> None:
    node = pair(tmp_path, plan=((0,), (0,)))
    at_work(node, (0, 0), (1, 0))
    node.xid(0, 94)
    node.line("0000:18:00", 94, pid=1001)
    assert [end_of(node, rank)[0] for rank in (0, 1)] == ["app_error", "gpu_fault"]


# Driver and kernel's log together


def test_a_gpu_that_fell_off_the_bus_names_nobody_and_ends_its_worker(tmp_path: Path) -> None:
    node = pair(tmp_path)
    at_work(node, (0, 0), (1, 1))
    node.line("0000:18:00", 79)
    node.clock.advance(1)
    node.line("0000:18:00", 45, pid=1000)
    assert facts_of(node, 0) == [
        f"Xid 79 on GPU 0 ({uuid(0)}): fallen off the bus",
        f"Xid 45 on GPU 0 ({uuid(0)}), process 1000",
    ]
    assert [end_of(node, rank)[0] for rank in (0, 1)] == ["gpu_fault", "app_error"]


def test_what_driver_and_kernel_tell_of_one_error_is_one_with_the_pid(tmp_path: Path) -> None:
    node = pair(tmp_path)
    at_work(node, (0, 0), (1, 1))
    node.xid(0, 31)
    node.xid(0, 79)
    node.clock.advance(1)
    node.line("0000:18:00", 31, pid=1000)
    node.line("0000:18:00", 79)
    node.line("0000:19:00", 79)
    assert facts_of(node, 0) == [
        f"Xid 79 on GPU 0 ({uuid(0)}): fallen off the bus",
        f"Xid 31 on GPU 0 ({uuid(0)}), process 1000",
    ]
    node.clock.advance(60)
    node.xid(0, 79)
    assert len(facts_of(node, 0)) == 3


def test_what_the_driver_alone_tells_counts_beside_what_the_kernel_tells(tmp_path: Path) -> None:
    node = pair(tmp_path)
    at_work(node, (0, 0), (1, 1))
    node.xid(0, 79)
    node.line("0000:18:00", 45, pid=1000)
    assert end_of(node, 0)[0] == "gpu_fault"


def test_an_error_of_the_device_counts_whoever_has_met_it_first(tmp_path: Path) -> None:
    """The firmware's are met by whoever asks it next, as any monitor may."""
    node = pair(tmp_path)
    at_work(node, (0, 0), (1, 1))
    node.line("0000:18:00", 119, pid=77)
    assert [end_of(node, rank)[0] for rank in (0, 1)] == ["gpu_fault", "app_error"]


def test_an_error_of_another_workers_program_is_not_that_of_the_one_whose_gpu_it_is(tmp_path: Path) -> None:
    node = pair(tmp_path)
    at_work(node, (0, 0), (1, 1))
    node.line("0000:18:00", 31, pid=1001)
    assert [end_of(node, rank)[0] for rank in (0, 1)] == ["app_error", "gpu_fault"]


def test_a_program_that_was_gone_before_it_was_seen_is_that_of_the_worker_alone_on_the_gpu(tmp_path: Path) -> None:
    node = pair(tmp_path)
    at_work(node, (0, 0), (1, 1))
    node.line("0000:18:00", 31, pid=77)
    assert [end_of(node, rank)[0] for rank in (0, 1)] == ["gpu_fault", "app_error"]


def test_without_a_look_at_the_gpus_nobody_is_blamed(tmp_path: Path) -> None:
    node = pair(tmp_path)
    node.xid(0, 79)
    assert gpu_exit_facts(node.context, node.tasks[0], frozenset(), 0.0) == {}


def test_errors_in_the_parts_of_a_gpu_that_others_have_are_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = instance(0, 1), instance(0, 5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own.gpu.uuid)
    node = Node(tmp_path, divided(0), own, other)
    for part, code in ((5, 94), (1, 13), (None, 79), (5, 95)):
        node.host.told.append(GpuEvent(uuid(0), code, node.clock.now, gpu_instance=part))
    node.kernel.events = tuple(
        KernelEvent(node.clock.now, KernelXid("0000:18:00", code, 7, part)) for part, code in ((5, 31), (1, 32))
    )
    assert counts(node) == {"13": 1, "32": 1, "79": 1, "95": 1}


# A GPU that is lost, and no error told


def ended_with(node: Node, rank: int) -> tuple[str, tuple[str, ...]]:
    """What is said of a worker that has ended four seconds after the last look."""
    node.clock.advance(4)
    return end_of(node, rank)


@pytest.mark.parametrize(("state", "words"), [("lost", "GPU is lost"), ("reset_required", "GPU requires reset")])
def test_a_worker_that_ends_right_after_its_gpu_was_lost_ends_by_that(tmp_path: Path, state: str, words: str) -> None:
    node = pair(tmp_path)
    at_work(node, (0, 0), (1, 1))
    node.change(0, state=state, words=words)
    node.page(1)
    reason, evidence = ended_with(node, 0)
    assert (reason, evidence[-1]) == ("gpu_fault", f"GPU 0 ({uuid(0)}) was lost 4 s before its end: {words}")
    assert end_of(node, 1) == ("app_error", ("exit status 1",))


def test_a_loss_that_the_looks_have_not_seen_yet_is_looked_for(tmp_path: Path) -> None:
    node = pair(tmp_path)
    at_work(node, (0, 0), (1, 1))
    node.change(0, state="lost", words=None)
    assert end_of(node, 0)[0] == "gpu_fault"
    assert node.board.gpus_lost == {}


def test_a_loss_of_long_ago_is_told_beside_another_reason(tmp_path: Path) -> None:
    node = pair(tmp_path)
    at_work(node, (0, 0))
    node.change(0, state="lost", words="GPU is lost")
    node.page(1)
    node.clock.advance(100)
    found = gpu_exit_facts(node.context, node.tasks[0], frozenset(), 0.0)
    assert found == {"gpu_lost": [{"time": node.clock.now - 100, "gpu": f"GPU 0 ({uuid(0)})", "words": "GPU is lost"}]}
    record = {"end": node.clock.now, "code": None, "signal": 15, "signals": [[node.clock.now, 15, 1]], **found}
    judged = find_exit_reason(evidence_from_record(record))
    assert judged.reason == "cancelled"
    assert judged.evidence[-1] == f"GPU 0 ({uuid(0)}) was lost 100 s before its end: GPU is lost"


def test_a_gpu_that_works_again_is_not_lost(tmp_path: Path) -> None:
    node = pair(tmp_path)
    at_work(node, (0, 0))
    for state in ("lost", "ok"):
        node.change(0, state=state)
        node.page(1)
    assert ended_with(node, 0)[0] == "app_error"


def test_the_loss_of_a_divided_gpu_is_that_of_all_its_instances(tmp_path: Path) -> None:
    node = shared(tmp_path)
    node.change(0, state="lost", words="GPU is lost")
    node.page(1)
    for rank in (0, 1):
        reason, evidence = end_of(node, rank)
        assert reason == "gpu_fault"
        assert evidence[-1] == f"GPU 0 ({uuid(0)}) was lost 0 s before its end: GPU is lost"


def test_an_end_that_an_earlier_sidecar_has_seen_is_not_blamed_on_a_gpu_that_is_lost_by_now(tmp_path: Path) -> None:
    node = pair(tmp_path)
    node.change(0, state="lost", words="GPU is lost")
    node.look()
    assert end_of(node, 0)[0] == "app_error"
    node.run(0)
    assert end_of(node, 0)[0] == "gpu_fault"
