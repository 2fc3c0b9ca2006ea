"""The GPU worker collector: attribution of processes, foreign processes, conditions and status."""

import dataclasses
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.collecting.collector import StatusParts
from exporter.collecting.published import RECENT_S, WorkerProgress
from exporter.contract import status
from exporter.contract.status import WorkerStatus
from exporter.gpus.collectors.workers_collector import (
    CONDITION,
    FOREIGN,
    FULL,
    MEMORY,
    MISPLACED,
    SM,
    STALE_S,
    USE,
    WORKERS,
)
from exporter.gpus.records import GpuProcess
from tests.exporter.gpus.fake_gpus import DEVICE_LISTS, GIB, Node, gpu, instance, mig_gpu, uuid
from tests.support.exporter import page_of, samples_of
from tests.support.statuses import described, worker_of

FIRST, SECOND = 'worker="worker_w0",role="worker",rank="0"', 'worker="worker_w1",role="worker",rank="1"'
NO_SUCH_PID = 1 << 22  # pids are smaller

Child = Callable[..., int]


@pytest.fixture(autouse=True)
def no_device_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """No device list in the environment."""
    for name in DEVICE_LISTS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    """Starts real processes with a given name and environment, and returns their pids."""
    started: list[subprocess.Popen[bytes]] = []

    def start_child(*, name: str | None = None, **environment: str) -> int:
        program = "import sys; print(flush=True); sys.stdin.read()"
        if name is not None:
            program = f"open('/proc/self/comm', 'w').write({name!r}); {program}"
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", program],
            env={"PATH": os.environ["PATH"], **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    yield start_child
    for process in started:
        process.communicate()


def two_gpus(run_dir: Path, **more: Any) -> Node:
    """A node with two GPUs and a worker on each. The workers have pids 100 and 101."""
    node = Node(run_dir, gpu(0), gpu(1), **{"plan": ((0,), (1,)), "proc": str(run_dir / "proc"), **more})
    (run_dir / "proc").mkdir(exist_ok=True)
    for rank in range(len(node.tasks)):
        node.run(rank, 100 + rank)
    return node


def workers_status(node: Node, seconds: float = 0.0) -> dict[int, WorkerStatus]:
    """Workers of the status, by rank."""
    parts = node.status(seconds)
    return {rank: worker_of(parts, rank) for rank in parts.workers}


# Attribution


def test_a_worker_uses_the_gpus_of_its_processes(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    node.use(0, GpuProcess(100, 5 * GIB, 0.75))
    page = node.page()
    assert samples_of(page, USE) == {f'{FIRST},gpu="0",attribution="process"': 1}
    assert samples_of(page, MEMORY) == {f'{FIRST},gpu="0"': 5 * GIB}
    assert samples_of(page, SM) == {f'{FIRST},gpu="0"': 0.75}
    assert samples_of(page, MISPLACED) == {FIRST: 0, SECOND: 0}
    assert samples_of(page, WORKERS) == {'gpu="0"': 1, 'gpu="1"': 0}
    assert samples_of(page, FOREIGN) == {'gpu="0"': 0, 'gpu="1"': 0}
    assert node.gpu_use.value.workers == {uuid(0): {0}, uuid(1): set()}


def test_unknown_process_values_have_no_series(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    node.use(0, GpuProcess(100))
    page = node.page()
    assert samples_of(page, USE) == {f'{FIRST},gpu="0",attribution="process"': 1}
    assert (samples_of(page, MEMORY), samples_of(page, SM)) == ({}, {})
    node.change(0, processes=None)
    page = node.page(1)
    assert samples_of(page, USE) == {}
    assert samples_of(page, FOREIGN) == {'gpu="1"': 0}


def test_a_worker_on_the_wrong_gpu_is_misplaced_and_reported_once(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    node.use(1, 100, 101)
    assert samples_of(node.page(), MISPLACED) == {FIRST: 1, SECOND: 0}
    detail = f"uses GPU 1 ({uuid(1)}), the plan gives it GPU 0"
    assert workers_status(node)[0].gpu_misplaced == detail
    assert workers_status(node)[1].gpu_misplaced is None
    reported = [event for event in node.status(5).events if event.event == "GPU misplaced"]
    assert [(event.level, event.detail, event.worker, event.rank) for event in reported] == [
        ("warning", detail, "worker_w0", 0)
    ]
    node.use(1, 101)
    node.use(0, 100)
    assert samples_of(node.page(5), MISPLACED) == {FIRST: 0, SECOND: 0}
    assert len([event for event in node.status().events if event.event == "GPU misplaced"]) == 1
    node.use(1, 100)
    assert len([event for event in node.status(5).events if event.event == "GPU misplaced"]) == 2


def test_use_of_a_gpu_outside_the_job_is_shown_for_its_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    node = two_gpus(tmp_path, plan=((0,),))
    node.use(1, 100)
    page = node.page()
    assert samples_of(page, USE) == {f'{FIRST},gpu="1",attribution="process"': 1}
    assert samples_of(page, MISPLACED) == {FIRST: 1}
    assert list(samples_of(page, WORKERS)) == ['gpu="0"']


def test_workers_of_a_job_without_planned_gpus_may_use_those_of_the_device_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    node = two_gpus(tmp_path, plan=((), ()))
    node.use(1, 100)
    node.use(0, 101)
    page = node.page()
    assert samples_of(page, USE)[f'{FIRST},gpu="1",attribution="process"'] == 1
    assert samples_of(page, MISPLACED) == {FIRST: 0, SECOND: 1}


def test_a_missing_planned_gpu_is_reported_by_its_position(tmp_path: Path) -> None:
    node = two_gpus(tmp_path, plan=((1,), (7,)), attached=True)
    node.use(1, 101)
    workers = workers_status(node)
    assert workers[1].gpu_misplaced == (f"uses GPU 1 ({uuid(1)}), the plan gives it GPU 7, which is missing")
    assert [entry.gpu_missing for entry in workers.values()] == [(), ("7",)]
    missing = ("critical", "GPU missing", "GPU 7 of the plan is missing: the driver shows 1")
    assert [event for event in node.events(1) if event[1] == "GPU missing"] == [missing]


def test_gpu_use_is_unknown_in_the_first_seconds_of_a_worker(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    node.run(0, 100, since=5.0)
    assert workers_status(node)[0].gpu_use is None
    node.run_only({})
    assert workers_status(node)[0].gpu_use is None


def test_an_ended_worker_that_never_used_a_gpu_has_empty_gpu_use(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    assert workers_status(node)[0].gpu_use == ()
    node.run_only({})
    assert workers_status(node)[0].gpu_use == ()


def test_workers_on_mig_instances_are_distinguished(tmp_path: Path) -> None:
    node = Node(tmp_path, mig_gpu(0), instance(0, 0), instance(0, 1), plan=((0,), (1,)))
    for rank in (0, 1):
        node.run(rank, 100 + rank)
        node.use(rank + 1, 100 + rank)
    node.use(0, 100, 101)  # the parent GPU lists the processes of its instances too
    page = node.page()
    assert samples_of(page, WORKERS) == {'gpu="0:0"': 1, 'gpu="0:1"': 1}
    assert samples_of(page, FOREIGN) == {'gpu="0:0"': 0, 'gpu="0:1"': 0}
    assert samples_of(page, MISPLACED) == {FIRST: 0, SECOND: 0}
    first, second = (node.host.gpus[at].gpu.uuid for at in (1, 2))
    assert node.gpu_use.value.workers == {first: {0}, second: {1}, uuid(0): {0, 1}}


# Foreign processes and namespaces


def test_a_foreign_process_is_counted_and_reported_with_its_name(tmp_path: Path, child: Child) -> None:
    node = two_gpus(tmp_path, proc="/proc")
    pid = child(name="blender")
    node.run(0, os.getpid())
    node.use(0, GpuProcess(pid, 3 * GIB))
    assert samples_of(node.page(), FOREIGN) == {'gpu="0"': 1, 'gpu="1"': 0}
    (foreign,) = node.node_gpus().gpus[0].foreign
    assert foreign == status.ForeignProcess(pid=pid, memory_bytes=3 * GIB, name="blender", uid=os.geteuid())
    detail = f"GPU 0 ({uuid(0)}) is also used by process {pid} (blender), 3.0 GiB, not of this job"
    reported = ("warning", "GPU foreign process", detail)
    assert [event for event in node.events(5) if event[1].startswith("GPU foreign")] == [reported]
    assert [event for event in node.events(5) if event[1].startswith("GPU foreign")] == [reported]


def test_a_foreign_process_on_only_one_list_is_not_reported(tmp_path: Path, child: Child) -> None:
    node = two_gpus(tmp_path, proc="/proc")
    node.use(0, child())
    assert node.events() == []
    node.use(0)
    assert node.events(5) == []


def test_a_background_process_is_attributed_by_its_environment(tmp_path: Path, child: Child) -> None:
    node = two_gpus(tmp_path, proc="/proc")
    node.use(0, child(GPUJOB_JOB_ID="4459", GPUJOB_RANK="0"))
    page = node.page()
    assert samples_of(page, USE) == {f'{FIRST},gpu="0",attribution="process"': 1}
    assert samples_of(page, FOREIGN)['gpu="0"'] == 0


@pytest.mark.parametrize("environment", [{"GPUJOB_JOB_ID": "4460", "GPUJOB_RANK": "0"}, {"GPUJOB_RANK": "0"}])
def test_a_process_of_another_job_is_foreign(tmp_path: Path, child: Child, environment: dict[str, str]) -> None:
    node = two_gpus(tmp_path, proc="/proc")
    node.use(0, child(**environment))
    page = node.page()
    assert samples_of(page, USE) == {}
    assert samples_of(page, FOREIGN)['gpu="0"'] == 1


def test_other_jobs_on_the_gpus_of_a_shell_are_not_foreign(
    tmp_path: Path, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    node = Node(tmp_path, gpu(0), gpu(1), plan=((),), proc="/proc", first_gpu=0)
    node.run(0, os.getpid())
    node.use(0, child(GPUJOB_JOB_ID="4460", GPUJOB_RANK="0"))
    assert samples_of(node.page(), FOREIGN) == {'gpu="0"': 0}


@pytest.mark.parametrize("rank", ["7", ""])
def test_a_process_of_the_job_without_a_worker_here_is_not_foreign(tmp_path: Path, child: Child, rank: str) -> None:
    node = two_gpus(tmp_path, proc="/proc")
    node.use(0, child(GPUJOB_JOB_ID="4459", GPUJOB_RANK=rank))
    page = node.page()
    assert samples_of(page, USE) == {}
    assert samples_of(page, FOREIGN)['gpu="0"'] == 0


@pytest.mark.parametrize("environment", [{}, {"GPUJOB_JOB_ID": "4459", "GPUJOB_RANK": "0"}])
@pytest.mark.parametrize("name", ["nvidia-cuda-mps-server", "nvidia-cuda-mps-control"])
def test_the_mps_server_is_not_foreign(tmp_path: Path, child: Child, name: str, environment: dict[str, str]) -> None:
    node = two_gpus(tmp_path, proc="/proc", plan=((0,), (0,)))
    server = child(name=name, **environment)
    node.use(0, GpuProcess(server, 30_000_000), GpuProcess(100, GIB, kind="mps"), GpuProcess(101, GIB, kind="mps"))
    page = node.page()
    assert samples_of(page, WORKERS)['gpu="0"'] == 2
    assert samples_of(page, MEMORY) == {f'{FIRST},gpu="0"': GIB, f'{SECOND},gpu="0"': GIB}
    assert samples_of(page, FOREIGN)['gpu="0"'] == 0


def test_the_sidecar_itself_is_not_foreign(tmp_path: Path) -> None:
    node = two_gpus(tmp_path, proc="/proc")
    node.use(0, os.getpid())
    assert samples_of(node.page(), FOREIGN)['gpu="0"'] == 0


def test_an_ended_process_of_a_worker_is_not_foreign(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    node.run(0, 100, 200)
    node.use(0, 100, 200)
    node.page()
    node.run(0, 100)  # the list of the driver is older
    for _ in range(3):
        page = node.page(5)
        assert samples_of(page, FOREIGN)['gpu="0"'] == 0
    assert node.events() == []


def test_a_process_that_left_the_tree_of_its_worker_is_not_foreign(tmp_path: Path, child: Child) -> None:
    node = two_gpus(tmp_path, proc="/proc")
    pid = child()
    node.run(0, 100, pid)
    node.use(0, pid)
    node.page()
    node.run(0, 100)
    for _ in range(3):
        assert samples_of(node.page(5), FOREIGN)['gpu="0"'] == 0
    node.use(0)
    node.page(5)
    node.use(0, pid)  # a reused pid means another process
    assert samples_of(node.page(5), FOREIGN)['gpu="0"'] == 1


def test_pids_of_another_namespace_are_inferred_from_the_plan(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    node.use(0, GpuProcess(NO_SUCH_PID, 5 * GIB))
    page = node.page()
    assert samples_of(page, USE) == {f'{FIRST},gpu="0",attribution="inferred"': 1}
    assert samples_of(page, MEMORY) == {f'{FIRST},gpu="0"': 5 * GIB}
    assert samples_of(page, FOREIGN)['gpu="0"'] == 0
    # an attribution inferred from the plan cannot show whether the plan was followed
    assert FIRST not in samples_of(page, MISPLACED)


def test_a_worker_in_its_own_pid_namespace_is_found_by_its_inner_pid(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    for pid, pids in ((100, "100"), (200, "200\t17")):
        (tmp_path / "proc" / str(pid)).mkdir()
        (tmp_path / "proc" / str(pid) / "status").write_text(f"Name:\ta\nNSpid:\t{pids}\n", encoding="ascii")
    node.run(0, 100, 200)
    node.use(0, 17)
    assert samples_of(node.page(), USE) == {f'{FIRST},gpu="0",attribution="process"': 1}


def test_an_inner_pid_of_two_namespaces_is_not_attributed(tmp_path: Path) -> None:
    node = two_gpus(tmp_path, plan=((0,), (0,)))
    for rank in (0, 1):
        folder = tmp_path / "proc" / str(100 + rank)
        folder.mkdir()
        (folder / "status").write_text(f"NSpid:\t{100 + rank}\t17\n", encoding="ascii")
    node.use(0, 17)
    assert samples_of(node.page(), USE) == {}


def test_gpu_use_is_inferred_from_the_device_list_of_the_worker(tmp_path: Path, child: Child) -> None:
    node = two_gpus(tmp_path, proc="/proc", plan=((0,), ()))
    node.run(0, child(CUDA_VISIBLE_DEVICES=uuid(1)))
    node.run_only({0: node.pids[0]})
    node.use(1, NO_SUCH_PID)
    page = node.page()
    assert samples_of(page, USE) == {f'{FIRST},gpu="1",attribution="inferred"': 1}
    assert samples_of(page, MISPLACED)[FIRST] == 1


# Conditions


def advance(node: Node, seconds: float, step_s: float = 5.0) -> None:
    """Advance the time and read both collectors every `step_s`."""
    for _ in range(int(seconds / step_s)):
        node.page(step_s)


def conditions(node: Node) -> dict[str, float]:
    """Known conditions of the first worker, by name."""
    samples = samples_of(node.page(), CONDITION)
    return {
        labels.rpartition('="')[2].rstrip('"'): value for labels, value in samples.items() if labels.startswith(FIRST)
    }


def test_conditions_are_shown_when_they_can_be_decided(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    node.use(0, 100)
    node.use(1, 101)
    advance(node, 60)
    assert conditions(node) == {"held_idle": 0, "unused": 0, "idle_beside_peers": 0}
    node.report(0, WorkerProgress(node.clock.now, stalled=False))
    node.change(0, throttle_s={"thermal": 0.0})
    advance(node, 60)
    known = conditions(node)
    assert known["busy_without_progress"] == known["busy_without_progress_low_power"] == 0
    assert "throttled" not in known
    advance(node, 300)
    assert conditions(node)["throttled"] == 0
    node.run_only({1: frozenset({101})})
    assert conditions(node) == {}


def test_held_but_idle_memory_is_reported_with_evidence(tmp_path: Path) -> None:
    node = two_gpus(tmp_path, stall_timeout_s=300.0)
    node.use(0, 100)
    advance(node, 60)
    node.change(0, utilization_ratio=0.0)
    advance(node, 295)
    assert conditions(node)["held_idle"] == 0
    advance(node, 10)
    assert conditions(node)["held_idle"] == 1
    text = (workers_status(node)[0].gpu_conditions or {})["held_idle"]
    assert text.startswith("holds memory, GPU idle for")
    (event,) = [event for event in node.status().events if "held_idle" in event.detail]
    assert (event.event, event.level, event.worker, event.rank) == (
        "GPU signature",
        "warning",
        "worker_w0",
        0,
    )
    assert event.detail.startswith("held_idle: holds memory, GPU idle for")


def test_a_gpu_without_processes_of_its_worker_is_unused(tmp_path: Path) -> None:
    node = two_gpus(tmp_path, launch_timeout_s=100.0)
    node.use(1, 101)
    advance(node, 110)
    assert conditions(node)["unused"] == 1
    assert (workers_status(node)[0].gpu_conditions or {})["unused"].startswith("none of its processes on GPU 0 for")
    assert workers_status(node)[1].gpu_conditions == {}


def test_a_busy_gpu_with_a_stalled_log_is_busy_without_progress(tmp_path: Path) -> None:
    node = two_gpus(tmp_path, stall_timeout_s=120.0)
    node.use(0, 100)
    node.change(0, utilization_ratio=1.0, power_average_w=150.0)
    node.report(0, WorkerProgress(node.clock.now - 100, stalled=True))
    advance(node, 180)
    assert conditions(node)["busy_without_progress"] == 1
    assert conditions(node)["busy_without_progress_low_power"] == 1
    assert 0 not in node.gpu_use.value.busy
    for _ in range(int(RECENT_S) // 5 + 1):  # the logs can no longer be read
        node.read_gpus(5)
        snapshot = node.workers.read()
    assert "busy_without_progress" not in page_of(node.workers, snapshot)


def test_growing_memory_has_a_predicted_time_of_being_full(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    node.use(0, 100)
    node.change(0, memory_used_bytes=10 * GIB, memory_total_bytes=141 * GIB)
    for used in range(1, 240):
        node.change(0, memory_used_bytes=10 * GIB + used * GIB // 6)
        page = node.page(10)
    assert conditions(node)["memory_filling"] == 1
    (full_time,) = samples_of(page, FULL).values()
    seconds_left = (141 - 10 - 239 / 6) * 60
    assert full_time - node.clock.now == pytest.approx(seconds_left, rel=0.1)
    entry = workers_status(node)[0]
    assert entry.gpu_memory_full == pytest.approx(full_time, rel=0.1)
    assert "memory_filling" in (entry.gpu_conditions or {})
    assert list(samples_of(page, FULL)) == [FIRST]


def test_the_busy_state_of_gpus_is_published(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    node.use(0, 100)
    node.change(1, utilization_ratio=0.0)
    node.page()
    advance(node, 90)
    assert node.gpu_use.value.busy == {0: True, 1: False}


def test_workers_on_a_shared_gpu_are_busy_by_their_own_utilization(tmp_path: Path) -> None:
    node = two_gpus(tmp_path, plan=((0,), (0,)))
    node.use(0, GpuProcess(100, GIB, 0.9), GpuProcess(101, GIB, 0.0))
    node.change(0, utilization_ratio=0.97)
    node.page()
    advance(node, 90)
    assert node.gpu_use.value.busy == {0: True, 1: False}
    node.use(0, GpuProcess(100, GIB, None), GpuProcess(101, GIB, None))
    advance(node, 90)
    assert node.gpu_use.value.busy == {}


def test_gpu_use_is_unknown_without_process_lists(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    node.change(0, processes=None)
    node.change(1, processes=None)
    page = node.page()
    assert not samples_of(page, WORKERS)
    assert not samples_of(page, FOREIGN)
    assert [entry.gpu_use for entry in workers_status(node).values()] == [None, None]


def test_an_outdated_reading_is_not_used(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    node.use(0, 100)
    node.use(1, 100, 101)
    advance(node, 30)
    assert node.gpu_use.value.busy[0] is True
    before = node.workers.read().events
    assert [event.event for event in before] == ["GPU misplaced"]
    node.clock.advance(STALE_S + 1)  # no more GPU readings
    snapshot = node.workers.read()
    assert page_of(node.workers, snapshot) == ""
    assert node.gpu_use.value.busy == {}
    assert described(node.workers, snapshot) == StatusParts(events=list(before))


def test_there_is_no_output_before_the_first_reading_or_without_gpus(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    snapshot = node.workers.read()
    assert page_of(node.workers, snapshot) == ""
    assert described(node.workers, snapshot) == StatusParts()
    node.host.gpus = []
    node.read_gpus()
    assert page_of(node.workers, node.workers.read()) == ""


# The status


def test_the_status_shows_planned_and_used_gpus_of_each_worker(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    node.use(0, GpuProcess(100, 5 * GIB, 0.75))
    entries = workers_status(node)
    used = status.GpuUse(gpu="0", uuid=uuid(0), memory_bytes=5 * GIB, sm_ratio=0.75, attribution="process")
    assert (entries[0].gpu_plan, entries[0].gpu_use) == ((uuid(0),), (used,))
    assert (entries[1].gpu_plan, entries[1].gpu_use) == ((uuid(1),), ())
    for entry in entries.values():
        assert (entry.gpu_misplaced, entry.gpu_conditions, entry.gpu_memory_full) == (None, {}, None)


def test_an_ended_worker_keeps_its_last_gpu_use(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    node.use(1, GpuProcess(100, 5 * GIB, 0.75))
    used = workers_status(node)[0]
    assert [(use.gpu, use.memory_bytes) for use in used.gpu_use or ()] == [("1", 5 * GIB)]
    assert used.gpu_misplaced
    node.use(1)
    assert workers_status(node)[0].gpu_use == ()
    node.run_only({})
    ended = workers_status(node)
    assert (ended[0].gpu_use, ended[0].gpu_misplaced) == (used.gpu_use, used.gpu_misplaced)
    assert ended[1].gpu_use == (), "it was never seen on a GPU"
    assert "worker_gpu_info{" not in node.page()


def test_gpus_shared_with_foreign_processes_are_published(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    node.use(0, 100, 1)
    node.page()
    assert node.gpu_use.value.shared == {uuid(0)}
    node.use(0, 100)
    node.page()
    assert node.gpu_use.value.shared == frozenset()


def test_planned_gpus_are_uuids_in_the_order_of_the_device_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    node = two_gpus(tmp_path, plan=((0,), (0, 1, 9)))
    assert [entry.gpu_plan for entry in workers_status(node).values()] == [(uuid(1),), (uuid(1), uuid(0))]


def test_a_lost_gpu_is_still_in_the_plan(tmp_path: Path) -> None:
    node = two_gpus(tmp_path)
    node.host.gpus[0] = dataclasses.replace(node.host.gpus[0], state="lost", activity=None, processes=None)
    assert workers_status(node)[0].gpu_plan == (uuid(0),)
    assert node.gpu_use.value.busy.get(0) is None


def test_the_interval_is_the_check_interval_between_five_and_fifteen_seconds(tmp_path: Path) -> None:
    intervals = [two_gpus(tmp_path, check_interval_s=check).workers.interval_s for check in (1.0, 10.0, 60.0)]
    assert intervals == [5.0, 10.0, 15.0]


def test_events_are_bounded(tmp_path: Path, child: Child) -> None:
    node = two_gpus(tmp_path, proc="/proc")
    pid = child()
    for number in itertools.chain.from_iterable([(0, 0, 1, 1)] * 60):
        node.use(number, pid)
        node.use(1 - number)
        node.page(5)
    assert len(node.status().events) == 50
