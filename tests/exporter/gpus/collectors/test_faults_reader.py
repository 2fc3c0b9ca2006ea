"""GPU faults since the start of the job: counted once, kept across sidecar restarts, assigned to workers."""

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from exporter.contract import run_files
from exporter.gpus.collectors import page
from exporter.gpus.collectors.gpus_collector import XIDS
from exporter.gpus.records import GpuEvent
from exporter.machine.kernel_log import KernelEvent, OomVictim
from exporter.workers.exit_reason import evidence_from_record, find_exit_reason
from tests.exporter.gpus.fake_gpus import DEVICE_LISTS, Node, gpu, instance, mig_gpu, uuid
from tests.support.exporter import NODE, page_of, samples_of

STATE = Path("state") / f"{NODE}.gpus.json"


@pytest.fixture(autouse=True)
def no_device_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """No device list in the environment."""
    for name in DEVICE_LISTS:
        monkeypatch.delenv(name, raising=False)


def two_gpus(run_dir: Path, **more: Any) -> Node:
    """A node with two GPUs and a worker on each."""
    return Node(run_dir, gpu(0), gpu(1), **{"plan": ((0,), (1,)), **more})


def counts(node: Node, seconds: float = 0.0) -> dict[str, float]:
    """Nonzero Xid counts of the node, by code."""
    samples = samples_of(page_of(node.gpus, node.read_gpus(seconds)), XIDS)
    return {labels.partition('"')[2].rstrip('"'): value for labels, value in samples.items() if value}


def by_gpu(node: Node) -> dict[tuple[str, int], tuple[int, float]]:
    """Count and last time, by GPU and code."""
    gpus = node.read_gpus().gpus
    return {(e.state.gpu.index, code): (found.count, found.last) for e in gpus for code, found in e.xids.items()}


def job_errors(node: Node, number: int = 0) -> dict[str, int]:
    """Memory errors of a GPU since the start of the job."""
    return dict(node.read_gpus().gpus[number].job_memory_errors)


# Xids


def test_xids_of_the_driver_are_counted_by_gpu_and_code(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    for number, code in ((0, 31), (1, 31), (1, 79), (1, 31)):
        node.clock.advance(1)
        node.xid(number, code)
    now = node.clock.now
    assert by_gpu(node) == {("0", 31): (1, now - 3), ("1", 31): (2, now), ("1", 79): (1, now - 1)}
    assert counts(node, 1) == {"31": 3, "79": 1}


def test_an_xid_from_both_driver_and_kernel_counts_once(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    node.read_gpus()
    node.xid(0, 79)
    assert counts(node, 1) == {"79": 1}
    node.log_xid("0000:18:00", 79)  # the kernel log is read a little later
    assert counts(node, 1) == {"79": 1}
    assert [kind for _, kind, _ in node.events()].count("GPU Xid") == 1
    node.log_xid("0000:18:00", 79)
    assert counts(node, 1) == {"79": 2}
    node.xid(0, 79)
    assert counts(node, 1) == {"79": 2}
    assert [kind for _, kind, _ in node.events()].count("GPU Xid") == 2


@pytest.mark.parametrize("pci", ["0000:19:00", "0000:19:00.0", "00000000:19:00.0", "0:19:00"])
def test_a_kernel_xid_is_matched_by_the_pci_address(tmp_path: Path, pci: str) -> None:
    node = two_gpus(tmp_path)
    node.log_xid(pci, 43, pid=77)
    assert by_gpu(node) == {("1", 43): (1, node.clock.now)}
    assert node.events()[-1][2].endswith(", process 77")


def test_xids_of_other_gpus_and_other_kernel_events_do_not_count(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0), gpu(1), attached=True)
    node.log_xid("0000:19:00", 79)
    node.log_xid("0000:99:00", 79)
    node.kernel.events = (*node.kernel.events, KernelEvent(node.clock.now, OomVictim(7)))
    node.xid(1, 79)
    node.host.reported_events.append(GpuEvent("", 79, node.clock.now))
    assert counts(node) == {}


def test_a_kernel_xid_without_an_instance_belongs_to_the_parent_gpu(tmp_path: Path) -> None:
    node = Node(tmp_path, mig_gpu(0), instance(0, 0), instance(0, 1))
    node.xid(0, 94)
    node.log_xid("0000:18:00", 94)
    assert by_gpu(node) == {("0", 94): (1, node.clock.now)}


def test_a_kernel_xid_from_before_the_first_listing_counts(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    gpus, node.host.gpus, node.host.state = node.host.gpus, [], "hanging"
    node.log_xid("0000:18:00", 79)
    node.read_gpus()
    node.host.gpus, node.host.state = gpus, "ok"
    assert counts(node, 1) == {"79": 1}


def test_an_xid_is_not_counted_again_when_older_ones_are_dropped(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    for _ in range(3):
        node.xid(0, 31)
    assert counts(node) == {"31": 3}
    node.host.reported_events = node.host.reported_events[1:]
    node.xid(0, 31)
    assert counts(node, 1) == {"31": 4}


# Restarts of the sidecar


def test_the_next_sidecar_continues_the_counts(tmp_path: Path) -> None:
    first = two_gpus(tmp_path)
    first.xid(0, 79)
    first.xid(1, 31)
    assert counts(first) == {"31": 1, "79": 1}
    second = two_gpus(tmp_path)
    second.clock.advance(60)
    assert counts(second) == {"31": 1, "79": 1}
    second.xid(1, 31)
    assert by_gpu(second) == {
        ("0", 79): (1, first.clock.now),
        ("1", 31): (2, second.clock.now),
    }
    # the first sidecar has already reported the others
    assert [detail.partition(": ")[2][:6] for _, kind, detail in second.events() if kind == "GPU Xid"] == ["Xid 31"]
    assert counts(two_gpus(tmp_path)) == {"31": 2, "79": 1}


def test_old_kernel_lines_are_not_counted_again_after_a_restart(tmp_path: Path) -> None:
    first = two_gpus(tmp_path)
    first.xid(0, 79)
    first.log_xid("0000:18:00", 79)
    first.read_gpus()
    second = two_gpus(tmp_path)
    second.kernel.events = first.kernel.events
    assert counts(second) == {"79": 1}
    assert [kind for _, kind, _ in second.events()].count("GPU Xid") == 0


def test_the_next_attempt_starts_from_zero(tmp_path: Path) -> None:
    first = two_gpus(tmp_path)
    first.xid(0, 79)
    first.read_gpus()
    assert counts(two_gpus(tmp_path, attempt=1)) == {}


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
        {uuid(0): {"xids": {"79": [1, 2.0], "fallen": [1, 2.0]}, "ecc": [{}, {}]}},
    ],
)
def test_a_damaged_saved_state_is_logged_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gpus: Any
) -> None:
    node = two_gpus(tmp_path)
    (tmp_path / STATE).parent.mkdir()
    body = {"schema": 1, "job_id": "4459", "attempt": 0, "gpus": {"gpus": gpus}}
    (tmp_path / STATE).write_text(json.dumps(body), encoding="ascii")
    with caplog.at_level(logging.WARNING):
        assert counts(node) == {}
    assert "is not used" in caplog.text
    node.xid(0, 31)
    assert counts(node, 1) == {"31": 1}
    assert counts(two_gpus(tmp_path)) == {"31": 1}


@pytest.mark.parametrize("text", ["", "{", "null", "[]", '{"schema": 99}'])
def test_an_unreadable_saved_state_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / STATE).parent.mkdir()
    (tmp_path / STATE).write_text(text, encoding="ascii")
    assert counts(two_gpus(tmp_path)) == {}


def test_xids_are_counted_when_the_run_directory_is_not_writable(
    locked: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = two_gpus(locked)
    node.xid(0, 79)
    assert counts(node) == {"79": 1}
    assert "GPU faults cannot be saved" in caplog.text


# Memory errors


def test_memory_errors_count_from_the_start_of_the_job(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    node.change(0, ecc_corrected=100, ecc_uncorrected=2)
    assert job_errors(node) == {"corrected": 0, "uncorrected": 0}
    node.change(0, ecc_corrected=103, ecc_uncorrected=3)
    text = page_of(node.gpus, node.read_gpus(60))
    assert samples_of(text, page.ECC) == {'gpu="0",type="corrected"': 103, 'gpu="0",type="uncorrected"': 3}
    assert samples_of(text, page.ECC_JOB) == {'gpu="0",type="corrected"': 3, 'gpu="0",type="uncorrected"': 1}
    assert ("0", "failure") in [(reason.gpu, reason.severity) for reason in node.read_gpus().reasons]


def test_unreported_memory_errors_have_no_series(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    node.change(1, ecc_uncorrected=0)
    text = page_of(node.gpus, node.read_gpus())
    assert samples_of(text, page.ECC_JOB) == {'gpu="1",type="uncorrected"': 0}


def test_memory_errors_keep_counting_after_a_restart_of_the_sidecar(tmp_path: Path) -> None:
    first = two_gpus(tmp_path)
    first.change(0, ecc_corrected=100)
    first.read_gpus()
    first.change(0, ecc_corrected=104)
    first.read_gpus(60)
    second = two_gpus(tmp_path)
    second.change(0, ecc_corrected=105)
    assert job_errors(second) == {"corrected": 5}


@pytest.mark.parametrize("restarted", [False, True])
def test_memory_errors_keep_counting_after_the_driver_was_reloaded(tmp_path: Path, restarted: bool) -> None:
    node = two_gpus(tmp_path)
    for count in (100, 104):
        node.change(0, ecc_corrected=count)
        node.read_gpus(60)
    if restarted:
        node = two_gpus(tmp_path)
    node.change(0, ecc_corrected=1)
    assert job_errors(node) == {"corrected": 5}
    node.change(0, ecc_corrected=3)
    assert job_errors(node) == {"corrected": 7}


def test_the_state_is_saved_only_when_it_has_changed(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    node.read_gpus()
    assert not (tmp_path / STATE).exists()
    node.change(0, ecc_corrected=5, ecc_uncorrected=0)
    node.read_gpus(60)
    inode = os.stat(tmp_path / STATE).st_ino
    node.change(0, ecc_uncorrected=None)  # missing from one reading
    node.read_gpus(60)
    assert os.stat(tmp_path / STATE).st_ino == inode
    node.change(0, ecc_corrected=6)
    node.read_gpus(60)
    assert os.stat(tmp_path / STATE).st_ino != inode
    assert run_files.read_json(str(tmp_path / STATE)) is not None


# Assignment of faults to workers


def end_of(node: Node, rank: int, ran_s: float = 600.0) -> tuple[str, tuple[str, ...]]:
    """Exit reason and evidence of a worker that ends now with exit status 1."""
    start = node.clock.now - ran_s
    faults = node.node_facts.gpu_facts(node.tasks[rank], node.pids.get(rank, frozenset()), start)
    record = {"start": start, "end": node.clock.now, "code": 1, "signal": None, **faults}
    result = find_exit_reason(evidence_from_record(record))
    return result.reason, result.evidence


def facts_of(node: Node, rank: int) -> list[str]:
    """Texts of the GPU faults of this worker."""
    facts = node.node_facts.gpu_facts(node.tasks[rank], node.pids.get(rank, frozenset()), 0.0)
    return [str(fault["words"]) for fault in facts.get("gpu_faults", ())]


def mig_node(run_dir: Path, plan: tuple[tuple[int, ...], ...] = ((0,), (1,))) -> Node:
    """A node whose GPU has the MIG instances 5 and 6, with busy workers as planned."""
    instances = [instance(0, number) for number in (0, 1)]
    instances = [
        dataclasses.replace(each, gpu=dataclasses.replace(each.gpu, gpu_instance=5 + number))
        for number, each in enumerate(instances)
    ]
    node = Node(run_dir, mig_gpu(0), *instances, plan=plan)
    use_gpus(node, *((rank, 1 + at) for rank, positions in enumerate(plan) for at in positions))
    return node


def use_gpus(node: Node, *users: tuple[int, int]) -> None:
    """Let workers use GPUs: pairs of a rank and the position of the GPU in the reading."""
    for rank in {rank for rank, _ in users}:
        node.run(rank, 1000 + rank)
    for number in {number for _, number in users}:
        node.use(number, *(1000 + rank for rank, position in users if position == number))
    node.page()


def test_a_program_error_on_an_exclusive_gpu_is_the_exit_reason_of_its_worker(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    use_gpus(node, (0, 0), (1, 1))
    node.xid(0, 31)
    reason, evidence = end_of(node, 0)
    assert reason == "gpu_fault"
    assert evidence[-1] == f"Xid 31 on GPU 0 ({uuid(0)}): invalid address, by the program"
    assert end_of(node, 1)[0] == "app_error"


@pytest.mark.parametrize(
    ("users", "by_driver", "by_kernel", "at_fault"),
    [
        pytest.param("00", [31], [], [], id="a program error on a shared GPU is assigned to no worker"),
        pytest.param("00", [79], [], [0, 1], id="a device error affects every worker on the GPU"),
        pytest.param("10", [79], [], [0, 1], id="a device error affects the planned and the present worker"),
        pytest.param("01", [79], [(45, 1000)], [0], id="errors of the driver count next to others of the kernel"),
        # A firmware error appears in whichever process calls the firmware next, such as a monitor.
        pytest.param("01", [], [(119, 77)], [0], id="a device error counts whichever process it names"),
        pytest.param("01", [], [(31, 1001)], [1], id="a program error is that of the named process"),
        pytest.param("01", [], [(31, 77)], [0], id="a program error of an unseen process is that of the only worker"),
        pytest.param("00", [94], [(94, 1001)], [1], id="a contained error is that of the named process"),
    ],
)
def test_errors_of_the_first_gpu_are_assigned_to_workers(
    tmp_path: Path, users: str, by_driver: list[int], by_kernel: list[tuple[int, int]], at_fault: list[int]
) -> None:
    """``users``: the GPU that each worker uses."""
    node = two_gpus(tmp_path, plan=((0,), (0,)) if users == "00" else ((0,), (1,)))
    use_gpus(node, *((rank, int(number)) for rank, number in enumerate(users)))
    for code in by_driver:
        node.xid(0, code)
    for code, pid in by_kernel:
        node.log_xid("0000:18:00", code, pid)
    assert [rank for rank in (0, 1) if end_of(node, rank)[0] == "gpu_fault"] == at_fault


def test_a_program_error_next_to_a_foreign_process_is_assigned_to_no_worker(tmp_path: Path) -> None:
    node = two_gpus(tmp_path, plan=((0,), (1,)))
    use_gpus(node, (0, 0), (1, 1))
    node.gpu_use.publish(dataclasses.replace(node.gpu_use.value, shared=frozenset({uuid(0)})))
    node.xid(0, 31)
    node.xid(1, 31)
    assert [end_of(node, rank)[0] for rank in (0, 1)] == ["app_error", "gpu_fault"]


def test_a_worker_that_has_just_ended_still_counts_as_a_user_of_the_gpu(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    use_gpus(node, (0, 1), (1, 1))
    node.xid(1, 31)
    node.run_only({1: frozenset({1001})})
    node.use(1, 1001)
    node.page(5)
    assert end_of(node, 1)[0] == "app_error"
    node.page(120)
    node.xid(1, 31)
    assert end_of(node, 1)[0] == "gpu_fault"


def test_an_error_before_the_start_of_a_worker_does_not_count_for_it(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    use_gpus(node, (0, 0))
    node.xid(0, 31)
    node.clock.advance(5)
    assert end_of(node, 0, ran_s=4.0)[0] == "app_error"
    assert end_of(node, 0, ran_s=6.0)[0] == "gpu_fault"


def test_a_device_error_counts_before_the_worker_is_seen_on_its_mig_instance(tmp_path: Path) -> None:
    node = Node(tmp_path, mig_gpu(0), instance(0, 0), gpu(1), plan=((0,), (1,)))
    node.page()
    node.xid(0, 79)
    assert [end_of(node, rank)[0] for rank in (0, 1)] == ["gpu_fault", "app_error"]


@pytest.mark.parametrize("processes", [(), None])
def test_without_known_processes_the_plan_decides_who_uses_a_gpu(tmp_path: Path, processes: Any) -> None:
    node = Node(tmp_path, gpu(0, processes=processes), gpu(1), plan=((0,), (0,), (1,)))
    node.page()
    node.xid(0, 13)
    assert [end_of(node, rank)[0] for rank in (0, 1)] == ["app_error", "app_error"]
    node.xid(1, 13)
    assert end_of(node, 2)[0] == "gpu_fault"


def test_a_program_error_is_not_assigned_when_the_process_list_is_unknown(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0, processes=None))
    node.page()
    node.xid(0, 13)
    assert end_of(node, 0)[0] == "app_error"


def test_a_program_error_is_not_assigned_before_the_first_process_list(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0))
    node.read_gpus()
    node.xid(0, 13)
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
        (79, None, ["gpu_fault", "gpu_fault"]),
        (31, None, ["app_error", "app_error"]),
    ],
)
@pytest.mark.parametrize("by", ["driver", "kernel"])
def test_an_error_of_an_instance_is_assigned_to_its_worker(
    tmp_path: Path, by: str, code: int, number: int | None, reasons: list[str]
) -> None:
    node = mig_node(tmp_path)
    if by == "driver":
        node.xid(0, code, gpu_instance=number)
    else:
        node.log_xid("0000:18:00", code, gpu_instance=number)
    assert [end_of(node, rank)[0] for rank in (0, 1)] == reasons


def test_a_contained_error_affects_all_workers_of_the_instance(tmp_path: Path) -> None:
    node = mig_node(tmp_path, plan=((0,), (0,)))
    for number in (6, 5):
        assert [end_of(node, rank)[0] for rank in (0, 1)] == ["app_error", "app_error"]
        node.xid(0, 94, gpu_instance=number)
    assert [end_of(node, rank)[0] for rank in (0, 1)] == ["gpu_fault", "gpu_fault"]


# Driver events and kernel log together


def test_a_gpu_fallen_off_the_bus_is_the_exit_reason_of_its_worker(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    use_gpus(node, (0, 0), (1, 1))
    node.log_xid("0000:18:00", 79)
    node.clock.advance(1)
    node.log_xid("0000:18:00", 45, pid=1000)
    assert facts_of(node, 0) == [
        f"Xid 79 on GPU 0 ({uuid(0)}): fallen off the bus",
        f"Xid 45 on GPU 0 ({uuid(0)}), process 1000",
    ]
    assert [end_of(node, rank)[0] for rank in (0, 1)] == ["gpu_fault", "app_error"]


def test_driver_and_kernel_reports_of_one_xid_are_merged_with_the_pid(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    use_gpus(node, (0, 0), (1, 1))
    node.xid(0, 31)
    node.xid(0, 79)
    node.clock.advance(1)
    node.log_xid("0000:18:00", 31, pid=1000)
    node.log_xid("0000:18:00", 79)
    node.log_xid("0000:19:00", 79)
    assert facts_of(node, 0) == [
        f"Xid 79 on GPU 0 ({uuid(0)}): fallen off the bus",
        f"Xid 31 on GPU 0 ({uuid(0)}), process 1000",
    ]
    node.clock.advance(60)
    node.xid(0, 79)
    assert len(facts_of(node, 0)) == 3


def test_without_a_gpu_reading_there_are_no_gpu_facts(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    node.xid(0, 79)
    assert node.node_facts.gpu_facts(node.tasks[0], frozenset(), 0.0) == {}


def test_contained_errors_of_unlisted_instances_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = instance(0, 1), instance(0, 5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own.gpu.uuid)
    node = Node(tmp_path, mig_gpu(0), own, other)
    for instance_id, code in ((5, 94), (1, 13), (None, 79), (5, 95)):
        node.xid(0, code, gpu_instance=instance_id)
    for instance_id, code in ((5, 31), (1, 32)):
        node.log_xid("0000:18:00", code, 7, gpu_instance=instance_id)
    assert counts(node) == {"13": 1, "32": 1, "79": 1, "95": 1}


# Lost GPUs without an Xid


def end_after_four_seconds(node: Node, rank: int) -> tuple[str, tuple[str, ...]]:
    """Exit reason and evidence of a worker that ends four seconds after the last reading."""
    node.clock.advance(4)
    return end_of(node, rank)


@pytest.mark.parametrize(("state", "message"), [("lost", "GPU is lost"), ("reset_required", "GPU requires reset")])
def test_a_lost_gpu_explains_the_end_of_its_worker_seconds_later(tmp_path: Path, state: str, message: str) -> None:
    node = two_gpus(tmp_path)
    use_gpus(node, (0, 0), (1, 1))
    node.change(0, state=state, message=message)
    node.page(1)
    reason, evidence = end_after_four_seconds(node, 0)
    assert (reason, evidence[-1]) == ("gpu_fault", f"GPU 0 ({uuid(0)}) was lost 4 s before its end: {message}")
    assert end_of(node, 1) == ("app_error", ("exit status 1",))


def test_a_loss_after_the_last_reading_is_found_at_the_end_of_the_worker(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    use_gpus(node, (0, 0), (1, 1))
    node.change(0, state="lost", message=None)
    assert end_of(node, 0)[0] == "gpu_fault"
    assert node.job_gpus.value.lost == {}


def test_an_old_loss_is_evidence_next_to_another_exit_reason(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    use_gpus(node, (0, 0))
    node.change(0, state="lost", message="GPU is lost")
    node.page(1)
    node.clock.advance(100)
    facts = node.node_facts.gpu_facts(node.tasks[0], frozenset(), 0.0)
    assert facts == {"gpu_lost": [{"time": node.clock.now - 100, "gpu": f"GPU 0 ({uuid(0)})", "words": "GPU is lost"}]}
    record = {"end": node.clock.now, "code": None, "signal": 15, "signals": [[node.clock.now, 15, 1]], **facts}
    result = find_exit_reason(evidence_from_record(record))
    assert result.reason == "cancelled"
    assert result.evidence[-1] == f"GPU 0 ({uuid(0)}) was lost 100 s before its end: GPU is lost"


def test_a_recovered_gpu_does_not_explain_an_end(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    use_gpus(node, (0, 0))
    for state in ("lost", "ok"):
        node.change(0, state=state)
        node.page(1)
    assert end_after_four_seconds(node, 0)[0] == "app_error"


def test_the_loss_of_a_mig_gpu_affects_all_its_instances(tmp_path: Path) -> None:
    node = mig_node(tmp_path)
    node.change(0, state="lost", message="GPU is lost")
    node.page(1)
    for rank in (0, 1):
        reason, evidence = end_of(node, rank)
        assert reason == "gpu_fault"
        assert evidence[-1] == f"GPU 0 ({uuid(0)}) was lost 0 s before its end: GPU is lost"


def test_an_end_seen_by_an_earlier_sidecar_is_not_explained_by_a_newly_lost_gpu(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    node.change(0, state="lost", message="GPU is lost")
    node.read_gpus()
    assert end_of(node, 0)[0] == "app_error"
    node.run(0)
    assert end_of(node, 0)[0] == "gpu_fault"
