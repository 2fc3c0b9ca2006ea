"""Attribution of GPU processes to workers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.gpus.analysis.users import (
    GpuUse,
    GpuUsers,
    NodeGpuUsage,
    WorkerAssignment,
    WorkerPlacement,
    gpu_usage,
    parse_visible_devices,
    visible_gpu_positions,
)
from exporter.gpus.records import Gpu, GpuProcess, GpuState

GIB = 2**30
UUIDS = ("GPU-a0", "GPU-b1", "GPU-b2", "GPU-c3")


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("", ()),
        (" ", ()),
        ("0", ("0",)),
        ("0, 3", ("0", "3")),
        ("+1", ("1",)),
        ("00", ("0",)),
        ("1gpu2,2ampere", ("1", "2")),
        ("0,-1,2", ("0",)),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("void", ()),
        ("1,,2", ("1",)),
        ("1,x,2", ("1",)),
        ("1,1", ()),
        ("0,1,01", ()),
        ("GPU-8f9a,GPU-1", ("GPU-8f9a", "GPU-1")),
        ("GPU-8f9a,MIG-1", ("GPU-8f9a",)),
        ("GPU-8f9a,1", ("GPU-8f9a",)),
        ("1,GPU-8f9a", ("1",)),
        ("GPU-8f9a,GPU-8f9a", ()),
        ("MIG-1,MIG-GPU-2/3/0", ("MIG-1", "MIG-GPU-2/3/0")),
    ],
)
def test_device_lists_are_parsed_as_by_cuda(text: str, devices: tuple[str, ...]) -> None:
    assert parse_visible_devices(text) == devices


@pytest.mark.parametrize(
    ("text", "uuids", "positions"),
    [
        ("0,1", UUIDS, (0, 1)),
        ("3,1", UUIDS, (3, 1)),
        ("0,4,1", UUIDS, (0,)),
        ("0,0", UUIDS, ()),
        ("", UUIDS, ()),
        ("-1", UUIDS, ()),
        ("NoDevFiles", UUIDS, ()),
        ("0", (), ()),
        ("GPU-c3,GPU-a0", UUIDS, (3, 0)),
        ("GPU-c", UUIDS, (3,)),
        ("GPU-b", UUIDS, ()),
        ("GPU-a,GPU-b,GPU-c", UUIDS, (0,)),
        ("GPU-a,GPU-a0", UUIDS, ()),
        ("GPU-", UUIDS[:1], (0,)),
        ("GPU-x", UUIDS, ()),
        ("GPU-a", ("GPU-a", "GPU-ab"), (0,)),
        ("MIG-2", ("GPU-a", "MIG-1", "MIG-22"), (2,)),
        ("MIG-GPU-a/3/0", ("MIG-GPU-a/1/0", "MIG-GPU-a/3/0"), (1,)),
        ("MIG-GPU-a/1", ("MIG-GPU-a/1/0", "MIG-GPU-a/3/0"), (0,)),
        ("MIG-GPU-a", ("MIG-GPU-a/1/0", "MIG-GPU-a/3/0"), ()),
    ],
)
def test_a_device_list_selects_gpus(text: str, uuids: tuple[str, ...], positions: tuple[int, ...]) -> None:
    assert visible_gpu_positions(text, uuids) == positions


@given(st.text(alphabet="0123456789,- GPUMIGabc/x", max_size=40), st.lists(st.sampled_from(UUIDS), unique=True))
def test_any_device_list_selects_existing_gpus_at_most_once(text: str, uuids: list[str]) -> None:
    result = visible_gpu_positions(text, uuids)
    assert len(set(result)) == len(result)
    assert all(0 <= at < len(uuids) for at in result)


@given(st.lists(st.integers(0, 3), unique=True))
def test_uuids_and_indices_select_the_same_gpus(positions: list[int]) -> None:
    numbers = ",".join(map(str, positions))
    names = ",".join(UUIDS[at] for at in positions)
    assert visible_gpu_positions(numbers, UUIDS) == visible_gpu_positions(names, UUIDS) == tuple(positions)


def gpu(index: int, *processes: GpuProcess | int, **changes: Any) -> GpuState:
    """A GPU with these processes. A bare pid uses 1 GiB."""
    listed = tuple(GpuProcess(each, GIB, 0.25) if isinstance(each, int) else each for each in processes)
    return GpuState(Gpu(UUIDS[index], str(index), "nvidia"), **{"processes": listed, **changes})


def worker(rank: int, *pids: int, **changes: Any) -> WorkerAssignment:
    """A worker with each exclusive GPU."""
    return dataclasses.replace(WorkerAssignment(rank, (rank,), frozenset(pids)), **changes)


def usage(
    gpus: Sequence[GpuState], *workers: WorkerAssignment, own_gpus: Sequence[str] = UUIDS, **changes: Any
) -> NodeGpuUsage:
    """Usage with all pids of the workers visible, and others only if given."""
    own = {pid for each in workers for pid in each.pids}
    changes["visible_pids"] = own | set(changes.get("visible_pids", ()))
    return gpu_usage(gpus, own_gpus, workers, **changes)


def placement_of(result: NodeGpuUsage, rank: int = 0) -> WorkerPlacement:
    return next(each for each in result.workers if each.rank == rank)


def users_of(result: NodeGpuUsage, index: int) -> GpuUsers:
    return next(each for each in result.gpus if each.index == str(index))


def test_child_processes_count_for_their_worker() -> None:
    result = usage([gpu(0, 100, 101), gpu(1, 200)], worker(0, 100, 101), worker(1, 200))
    assert result.uses == (
        GpuUse(0, "GPU-a0", "0", "process", True, 2 * GIB, 0.5),
        GpuUse(1, "GPU-b1", "1", "process", True, GIB, 0.25),
    )
    assert placement_of(result) == WorkerPlacement(0, False, "", ())
    assert users_of(result, 0) == GpuUsers("GPU-a0", "0", (0,), ())


def test_values_that_no_process_reports_are_unknown() -> None:
    (use,) = usage([gpu(0, GpuProcess(100), GpuProcess(101))], worker(0, 100, 101)).uses
    assert (use.memory_bytes, use.sm_ratio) == (None, None)
    (use,) = usage([gpu(0, GpuProcess(100, GIB), GpuProcess(101, None, 0.5))], worker(0, 100, 101)).uses
    assert (use.memory_bytes, use.sm_ratio) == (GIB, 0.5)


def test_the_utilization_of_a_worker_is_at_most_one() -> None:
    (use,) = usage([gpu(0, GpuProcess(100, 0, 0.75), GpuProcess(101, 0, 0.5))], worker(0, 100, 101)).uses
    assert (use.memory_bytes, use.sm_ratio) == (0, 1.0)


def test_a_process_on_two_lists_of_the_driver_counts_once() -> None:
    both = gpu(0, GpuProcess(100, GIB, None, "graphics"), GpuProcess(100, GIB, 0.5))
    (use,) = usage([both], worker(0, 100)).uses
    assert (use.memory_bytes, use.sm_ratio) == (GIB, 0.5)
    both = gpu(0, GpuProcess(7, GIB, None, "graphics"), GpuProcess(7, GIB, 0.5))
    assert users_of(usage([both], worker(0), visible_pids=[7]), 0).foreign == (GpuProcess(7, GIB, 0.5),)


def test_several_workers_on_one_gpu_are_listed() -> None:
    result = usage([gpu(0, 100, 200)], worker(0, 100), worker(1, 200, positions=(0,)))
    assert users_of(result, 0).workers == (0, 1)
    assert not any(each.misplaced for each in result.workers)


def test_a_worker_on_the_gpu_of_another_worker_is_misplaced() -> None:
    result = usage([gpu(0), gpu(1, 100, 200)], worker(0, 100), worker(1, 200))
    assert placement_of(result, 0) == WorkerPlacement(0, True, "uses GPU 1 (GPU-b1), the plan gives it GPU 0", ("0",))
    assert placement_of(result, 1) == WorkerPlacement(1, False, "", ())
    assert [use.planned for use in result.uses] == [False, True]


def test_a_worker_that_uses_an_additional_gpu_is_misplaced() -> None:
    result = placement_of(usage([gpu(0, 100), gpu(1, 100)], worker(0, 100)))
    assert result == WorkerPlacement(0, True, "uses GPU 1 (GPU-b1), the plan gives it GPU 0", ())


def test_a_worker_without_planned_gpus_is_misplaced_on_any_gpu() -> None:
    result = usage([gpu(0, 100)], worker(0, 100, positions=()))
    assert placement_of(result) == WorkerPlacement(0, True, "uses GPU 0 (GPU-a0), the plan gives it none", ())


def test_a_gpu_outside_the_job_counts_only_for_the_worker_that_uses_it() -> None:
    result = usage([gpu(0), gpu(3, 100, 7)], worker(0, 100), own_gpus=UUIDS[:1], visible_pids=[7])
    assert placement_of(result).text == "uses GPU 3 (GPU-c3), the plan gives it GPU 0"
    assert [each.index for each in result.gpus] == ["0"]


def test_positions_refer_to_the_gpus_of_the_job_and_not_to_indices() -> None:
    result = usage([gpu(0), gpu(2, 100), gpu(3)], worker(0, 100), own_gpus=("GPU-b2", "GPU-a0"))
    assert placement_of(result) == WorkerPlacement(0, False, "", ())
    assert [each.index for each in result.gpus] == ["2", "0"]


def test_a_position_without_a_gpu_is_ignored() -> None:
    result = usage([gpu(0), gpu(1, 100)], worker(0, 100, positions=(0, 1, 7)), own_gpus=("", "GPU-b1"))
    assert placement_of(result) == WorkerPlacement(0, False, "", None)
    assert [each.index for each in result.gpus] == ["1"]
    result = usage([gpu(0, 100), gpu(1)], worker(0, 100, positions=(0,)), own_gpus=("", "GPU-b1"))
    assert placement_of(result) == WorkerPlacement(0, True, "uses GPU 0 (GPU-a0), the plan gives it none", None)


def test_planned_gpus_without_a_process_are_unused() -> None:
    result = usage([gpu(0, 100), gpu(1), gpu(2)], worker(0, 100, positions=(0, 1, 2)))
    assert placement_of(result).unused == ("1", "2")
    assert placement_of(result).misplaced is False


def test_a_foreign_process_is_listed_with_its_memory() -> None:
    result = users_of(usage([gpu(0, 100, GpuProcess(7, 3 * GIB))], worker(0, 100), visible_pids=[7]), 0)
    assert result.foreign == (GpuProcess(7, 3 * GIB),)
    assert result.workers == (0,)


def test_a_graphics_process_is_not_foreign() -> None:
    shown = gpu(0, GpuProcess(7, GIB, None, "graphics"))
    assert users_of(usage([shown], worker(0), visible_pids=[7]), 0) == GpuUsers("GPU-a0", "0", (), ())


def test_the_mps_server_is_ignored_but_its_clients_count() -> None:
    shared = gpu(0, GpuProcess(50, GIB), GpuProcess(100, GIB, None, "mps"), GpuProcess(7, GIB, None, "mps"))
    result = usage([shared], worker(0, 100), visible_pids=[50, 7], ignored=[50])
    assert users_of(result, 0) == GpuUsers("GPU-a0", "0", (0,), (GpuProcess(7, GIB, None, "mps"),))
    assert users_of(usage([gpu(0, 50)], worker(0), visible_pids=[50], ignored=[50]), 0) == GpuUsers("GPU-a0", "0")


def test_pids_of_the_host_are_translated() -> None:
    result = usage([gpu(0, 4711), gpu(1, 4712)], worker(0, 100), worker(1, 200), local_pids={4711: 100, 4712: 200})
    assert [(use.rank, use.attribution) for use in result.uses] == [(0, "process"), (1, "process")]


def test_pids_of_another_namespace_are_attributed_to_the_only_planned_worker() -> None:
    result = usage([gpu(0, 4711, 4712), gpu(1, 4713)], worker(0, 100), worker(1, 200))
    assert [(use.rank, use.index, use.attribution) for use in result.uses] == [
        (0, "0", "inferred"),
        (1, "1", "inferred"),
    ]
    assert result.uses[0].memory_bytes == 2 * GIB
    assert placement_of(result) == WorkerPlacement(0, None, "", ())
    assert users_of(result, 0) == GpuUsers("GPU-a0", "0", (0,), ())


def test_nothing_is_inferred_with_several_planned_workers_or_none() -> None:
    result = usage([gpu(0, 4711), gpu(1, 4712)], worker(0, 100), worker(1, 200, positions=(0,)))
    assert result.uses == ()
    assert [each.foreign for each in result.gpus] == [None, None]
    assert placement_of(result) == WorkerPlacement(0, None, "", None)


def test_nothing_is_inferred_for_an_ended_worker() -> None:
    result = usage([gpu(0, 4711)], worker(0, 100, is_running=False), worker(1, 200, positions=(0,)))
    assert [use.rank for use in result.uses] == [1]
    assert placement_of(result) == WorkerPlacement(0)


def test_nothing_is_inferred_on_a_gpu_with_a_visible_process() -> None:
    result = usage([gpu(0, 4711, 7)], worker(0, 100), visible_pids=[7])
    assert result.uses == ()
    assert [each.pid for each in users_of(result, 0).foreign or ()] == [4711, 7]


def test_hidden_processes_are_foreign_when_a_worker_is_found_by_pid() -> None:
    result = usage([gpu(0, 100), gpu(1, 4711)], worker(0, 100), worker(1, 200))
    assert [use.rank for use in result.uses] == [0]
    assert [each.pid for each in users_of(result, 1).foreign or ()] == [4711]


def test_uuids_in_the_environment_of_a_worker_select_its_gpu() -> None:
    result = usage(
        [gpu(0, 4711), gpu(1, 4712)], worker(0, 100, visible_devices="GPU-b1"), worker(1, 200, visible_devices="GPU-a")
    )
    assert [(use.rank, use.index, use.planned) for use in result.uses] == [(0, "1", False), (1, "0", False)]
    assert placement_of(result).text == "uses GPU 1 (GPU-b1), the plan gives it GPU 0"
    right = usage([gpu(0, 4711)], worker(0, 100, visible_devices="GPU-a0"))
    assert placement_of(right).misplaced is False


def test_indices_in_the_environment_may_be_relative_to_a_device_cgroup() -> None:
    result = usage(
        [gpu(0, 4711), gpu(1, 4712)], worker(0, 100, visible_devices="0"), worker(1, 200, visible_devices="0")
    )
    assert [(use.rank, use.index) for use in result.uses] == [(0, "0"), (1, "1")]
    assert placement_of(result, 1).misplaced is None


def test_users_are_unknown_without_a_process_list() -> None:
    result = usage([gpu(0, processes=None), gpu(1, 200)], worker(0, 100), worker(1, 200))
    assert users_of(result, 0) == GpuUsers("GPU-a0", "0", (), None)
    assert placement_of(result, 0) == WorkerPlacement(0, None, "", None)
    assert placement_of(result, 1) == WorkerPlacement(1, False, "", ())


def test_without_gpus_nothing_is_known() -> None:
    assert usage([], worker(0, 100)) == NodeGpuUsage(workers=(WorkerPlacement(0, None, "", None),))


MIG_GPU = (
    Gpu("GPU-p", "0", "nvidia", mig=True),
    *(Gpu(f"MIG-{name}", f"0:{at}", "nvidia", parent="GPU-p") for at, name in enumerate("xy")),
)


def mig_gpu(*pids: Sequence[int] | None) -> list[GpuState]:
    """A divided GPU and its instances with these processes."""
    lists = [None if listed is None else tuple(GpuProcess(pid, GIB) for pid in listed) for listed in pids]
    return [GpuState(each, processes=on) for each, on in zip(MIG_GPU, lists, strict=True)]


def test_a_process_in_a_mig_instance_counts_only_there() -> None:
    result = usage(mig_gpu([100, 200], [100], [200]), worker(0, 100), worker(1, 200), own_gpus=("MIG-x", "MIG-y"))
    assert [(use.rank, use.index, use.attribution, use.planned) for use in result.uses] == [
        (0, "0:0", "process", True),
        (1, "0:1", "process", True),
    ]
    assert [each.workers for each in result.gpus] == [(0,), (1,)]


def test_a_worker_in_the_instance_of_another_worker_is_misplaced() -> None:
    result = usage(mig_gpu([100], [], [100]), worker(0, 100), own_gpus=("MIG-x", "MIG-y"))
    assert placement_of(result).text == "uses GPU 0:1 (MIG-y), the plan gives it GPU 0:0"


def test_a_process_listed_only_on_the_mig_gpu_is_inferred_in_the_planned_instance() -> None:
    result = usage(mig_gpu([100], None, None), worker(0, 100), own_gpus=("MIG-x", "MIG-y"))
    assert [(use.index, use.attribution, use.planned) for use in result.uses] == [("0:0", "inferred", True)]
    assert placement_of(result).misplaced is None


def test_with_several_planned_instances_a_process_stays_on_the_mig_gpu() -> None:
    result = usage(mig_gpu([100], None, None), worker(0, 100, positions=(0, 1)), own_gpus=("MIG-x", "MIG-y"))
    assert [(use.index, use.attribution, use.planned) for use in result.uses] == [("0", "process", True)]
    assert placement_of(result).misplaced is False


def test_the_owner_of_a_mig_gpu_may_use_its_instances() -> None:
    result = usage(mig_gpu([100], [100], []), worker(0, 100), own_gpus=("GPU-p",))
    assert [(use.index, use.planned) for use in result.uses] == [("0:0", True)]
    assert placement_of(result) == WorkerPlacement(0, False, "", ())


def test_workers_are_inferred_per_instance_in_another_namespace() -> None:
    result = usage(mig_gpu([], [4711], [4712]), worker(0, 100), worker(1, 200), own_gpus=("MIG-x", "MIG-y"))
    assert [(use.rank, use.index, use.attribution) for use in result.uses] == [
        (0, "0:0", "inferred"),
        (1, "0:1", "inferred"),
    ]


PIDS = st.integers(1, 12)
PROCESSES = st.lists(
    st.builds(
        GpuProcess,
        PIDS,
        st.none() | st.integers(0, GIB),
        st.none() | st.floats(0, 1),
        st.sampled_from(["compute", "graphics", "mps"]),
    ),
    max_size=4,
).map(tuple)
WORKERS = st.lists(
    st.builds(
        WorkerAssignment,
        st.integers(0, 3),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
        st.frozensets(PIDS, max_size=3),
        st.none() | st.sampled_from(["0", "GPU-a0", "GPU-b", "", "GPU-c3,GPU-a"]),
        st.booleans(),
    ),
    max_size=4,
    unique_by=lambda each: each.rank,
)


@given(
    st.tuples(*(st.none() | PROCESSES for _ in UUIDS)),
    WORKERS,
    st.frozensets(PIDS),
    st.dictionaries(PIDS, PIDS),
    st.frozensets(PIDS),
    st.permutations(UUIDS).map(lambda uuids: uuids[:3]),
)
def test_every_worker_has_one_placement_and_every_process_one_owner(
    lists: tuple[tuple[GpuProcess, ...] | None, ...],
    workers: list[WorkerAssignment],
    visible: frozenset[int],
    pid_here: dict[int, int],
    ignored: frozenset[int],
    own_gpus: list[str],
) -> None:
    gpus = [gpu(at, processes=on) for at, on in enumerate(lists)]
    result = gpu_usage(gpus, own_gpus, workers, visible_pids=visible, local_pids=pid_here, ignored=ignored)
    assert [each.uuid for each in result.gpus] == own_gpus
    assert {each.rank for each in result.workers} == {each.rank for each in workers}
    assert len({(use.rank, use.uuid) for use in result.uses}) == len(result.uses)
    for use in result.uses:
        assert use.sm_ratio is None or 0 <= use.sm_ratio <= 1
    own = {pid for each in workers for pid in each.pids}
    for each in result.gpus:
        assert each.workers == tuple(sorted(use.rank for use in result.uses if use.uuid == each.uuid))
        listed = {pid_here.get(p.pid, p.pid) for p in gpus[UUIDS.index(each.uuid)].processes or ()} - ignored
        assert {process.pid for process in each.foreign or ()} <= listed - own
        if any(use.attribution == "inferred" and use.uuid == each.uuid for use in result.uses):
            assert not listed & (visible | own)
            assert len(each.workers) == 1
    for placement in result.workers:
        assert bool(placement.text) == bool(placement.misplaced)
