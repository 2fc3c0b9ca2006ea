"""Who uses which GPU."""

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
    ProcessOnGpu,
    VisibleGpu,
    WorkerAssignment,
    WorkerPlacement,
    gpu_usage,
    parse_visible_devices,
    visible_gpu_positions,
)

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
def test_devices_are_those_that_cuda_would_see(text: str, devices: tuple[str, ...]) -> None:
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
def test_a_list_of_devices_names_gpus(text: str, uuids: tuple[str, ...], positions: tuple[int, ...]) -> None:
    assert visible_gpu_positions(text, uuids) == positions


@given(st.text(alphabet="0123456789,- GPUMIGabc/x", max_size=40), st.lists(st.sampled_from(UUIDS), unique=True))
def test_any_list_names_gpus_that_are_there_and_none_twice(text: str, uuids: list[str]) -> None:
    found = visible_gpu_positions(text, uuids)
    assert len(set(found)) == len(found)
    assert all(0 <= at < len(uuids) for at in found)


@given(st.lists(st.integers(0, 3), unique=True))
def test_names_and_numbers_name_the_same(positions: list[int]) -> None:
    numbers = ",".join(map(str, positions))
    names = ",".join(UUIDS[at] for at in positions)
    assert visible_gpu_positions(numbers, UUIDS) == visible_gpu_positions(names, UUIDS) == tuple(positions)


def gpu(index: int, *processes: ProcessOnGpu | int, **changes: Any) -> VisibleGpu:
    """A GPU with processes, or pids of some that use a GiB each."""
    on = tuple(ProcessOnGpu(one, GIB, 0.25) if isinstance(one, int) else one for one in processes)
    return dataclasses.replace(VisibleGpu(UUIDS[index], str(index), processes=on), **changes)


def worker(rank: int, *pids: int, **changes: Any) -> WorkerAssignment:
    """A worker with one GPU of its own."""
    return dataclasses.replace(WorkerAssignment(rank, (rank,), frozenset(pids)), **changes)


def usage(
    gpus: Sequence[VisibleGpu], *workers: WorkerAssignment, ours: Sequence[str] = UUIDS, **changes: Any
) -> NodeGpuUsage:
    """All pids of the workers are visible, and nobody else's unless it is said."""
    own = {pid for one in workers for pid in one.pids}
    changes["visible_pids"] = own | set(changes.get("visible_pids", ()))
    return gpu_usage(gpus, ours, workers, **changes)


def standing(found: NodeGpuUsage, rank: int = 0) -> WorkerPlacement:
    return next(one for one in found.workers if one.rank == rank)


def on(found: NodeGpuUsage, index: int) -> GpuUsers:
    return next(one for one in found.gpus if one.index == str(index))


def test_a_workers_children_use_its_gpu() -> None:
    found = usage([gpu(0, 100, 101), gpu(1, 200)], worker(0, 100, 101), worker(1, 200))
    assert found.uses == (
        GpuUse(0, "GPU-a0", "0", "process", True, 2 * GIB, 0.5),
        GpuUse(1, "GPU-b1", "1", "process", True, GIB, 0.25),
    )
    assert standing(found) == WorkerPlacement(0, False, "", ())
    assert on(found, 0) == GpuUsers("GPU-a0", "0", (0,), ())


def test_what_no_process_tells_is_not_known() -> None:
    (use,) = usage([gpu(0, ProcessOnGpu(100), ProcessOnGpu(101))], worker(0, 100, 101)).uses
    assert (use.memory_bytes, use.sm_ratio) == (None, None)
    (use,) = usage([gpu(0, ProcessOnGpu(100, GIB), ProcessOnGpu(101, None, 0.5))], worker(0, 100, 101)).uses
    assert (use.memory_bytes, use.sm_ratio) == (GIB, 0.5)


def test_shares_of_time_come_to_one_at_most() -> None:
    (use,) = usage([gpu(0, ProcessOnGpu(100, 0, 0.75), ProcessOnGpu(101, 0, 0.5))], worker(0, 100, 101)).uses
    assert (use.memory_bytes, use.sm_ratio) == (0, 1.0)


def test_a_process_on_two_lists_of_the_driver_counts_once() -> None:
    both = gpu(0, ProcessOnGpu(100, GIB, None, "graphics"), ProcessOnGpu(100, GIB, 0.5))
    (use,) = usage([both], worker(0, 100)).uses
    assert (use.memory_bytes, use.sm_ratio) == (GIB, 0.5)
    both = gpu(0, ProcessOnGpu(7, GIB, None, "graphics"), ProcessOnGpu(7, GIB, 0.5))
    assert on(usage([both], worker(0), visible_pids=[7]), 0).foreign == (ProcessOnGpu(7, GIB, 0.5),)


def test_several_workers_on_one_gpu_are_told() -> None:
    found = usage([gpu(0, 100, 200)], worker(0, 100), worker(1, 200, positions=(0,)))
    assert on(found, 0).workers == (0, 1)
    assert not any(one.misplaced for one in found.workers)


def test_a_worker_on_the_gpu_of_another_is_misplaced() -> None:
    found = usage([gpu(0), gpu(1, 100, 200)], worker(0, 100), worker(1, 200))
    assert standing(found, 0) == WorkerPlacement(0, True, "uses GPU 1 (GPU-b1), the plan gives it GPU 0", ("0",))
    assert standing(found, 1) == WorkerPlacement(1, False, "", ())
    assert [use.planned for use in found.uses] == [False, True]


def test_a_worker_that_uses_one_gpu_more_is_misplaced() -> None:
    found = standing(usage([gpu(0, 100), gpu(1, 100)], worker(0, 100)))
    assert found == WorkerPlacement(0, True, "uses GPU 1 (GPU-b1), the plan gives it GPU 0", ())


def test_a_worker_without_gpus_in_the_plan_has_none_to_use() -> None:
    found = usage([gpu(0, 100)], worker(0, 100, positions=()))
    assert standing(found) == WorkerPlacement(0, True, "uses GPU 0 (GPU-a0), the plan gives it none", ())


def test_a_gpu_that_is_not_the_jobs_counts_for_a_worker_and_for_nothing_else() -> None:
    found = usage([gpu(0), gpu(3, 100, 7)], worker(0, 100), ours=UUIDS[:1], visible_pids=[7])
    assert standing(found).text == "uses GPU 3 (GPU-c3), the plan gives it GPU 0"
    assert [one.index for one in found.gpus] == ["0"]


def test_positions_are_those_of_the_jobs_gpus_whatever_their_numbers() -> None:
    found = usage([gpu(0), gpu(2, 100), gpu(3)], worker(0, 100), ours=("GPU-b2", "GPU-a0"))
    assert standing(found) == WorkerPlacement(0, False, "", ())
    assert [one.index for one in found.gpus] == ["2", "0"]


def test_a_position_without_a_gpu_is_nobodys() -> None:
    found = usage([gpu(0), gpu(1, 100)], worker(0, 100, positions=(0, 1, 7)), ours=("", "GPU-b1"))
    assert standing(found) == WorkerPlacement(0, False, "", None)
    assert [one.index for one in found.gpus] == ["1"]
    found = usage([gpu(0, 100), gpu(1)], worker(0, 100, positions=(0,)), ours=("", "GPU-b1"))
    assert standing(found) == WorkerPlacement(0, True, "uses GPU 0 (GPU-a0), the plan gives it none", None)


def test_gpus_of_the_plan_without_a_process_are_unused() -> None:
    found = usage([gpu(0, 100), gpu(1), gpu(2)], worker(0, 100, positions=(0, 1, 2)))
    assert standing(found).unused == ("1", "2")
    assert standing(found).misplaced is False


def test_a_process_of_others_is_foreign_with_its_memory() -> None:
    found = on(usage([gpu(0, 100, ProcessOnGpu(7, 3 * GIB))], worker(0, 100), visible_pids=[7]), 0)
    assert found.foreign == (ProcessOnGpu(7, 3 * GIB),)
    assert found.workers == (0,)


def test_a_display_is_not_foreign() -> None:
    shown = gpu(0, ProcessOnGpu(7, GIB, None, "graphics"))
    assert on(usage([shown], worker(0), visible_pids=[7]), 0) == GpuUsers("GPU-a0", "0", (), ())


def test_the_mps_server_is_nobodys_and_its_clients_are_who_they_are() -> None:
    shared = gpu(0, ProcessOnGpu(50, GIB), ProcessOnGpu(100, GIB, None, "mps"), ProcessOnGpu(7, GIB, None, "mps"))
    found = usage([shared], worker(0, 100), visible_pids=[50, 7], ignored=[50])
    assert on(found, 0) == GpuUsers("GPU-a0", "0", (0,), (ProcessOnGpu(7, GIB, None, "mps"),))
    assert on(usage([gpu(0, 50)], worker(0), visible_pids=[50], ignored=[50]), 0) == GpuUsers("GPU-a0", "0")


def test_pids_of_the_host_are_brought_here() -> None:
    found = usage([gpu(0, 4711), gpu(1, 4712)], worker(0, 100), worker(1, 200), local_pids={4711: 100, 4712: 200})
    assert [(use.rank, use.attribution) for use in found.uses] == [(0, "process"), (1, "process")]


def test_pids_of_another_namespace_are_those_of_the_only_worker_there() -> None:
    found = usage([gpu(0, 4711, 4712), gpu(1, 4713)], worker(0, 100), worker(1, 200))
    assert [(use.rank, use.index, use.attribution) for use in found.uses] == [
        (0, "0", "inferred"),
        (1, "1", "inferred"),
    ]
    assert found.uses[0].memory_bytes == 2 * GIB
    assert standing(found) == WorkerPlacement(0, None, "", ())
    assert on(found, 0) == GpuUsers("GPU-a0", "0", (0,), ())


def test_nobody_is_inferred_where_several_workers_belong_or_none() -> None:
    found = usage([gpu(0, 4711), gpu(1, 4712)], worker(0, 100), worker(1, 200, positions=(0,)))
    assert found.uses == ()
    assert [one.foreign for one in found.gpus] == [None, None]
    assert standing(found) == WorkerPlacement(0, None, "", None)


def test_a_worker_that_has_ended_inherits_nothing() -> None:
    found = usage([gpu(0, 4711)], worker(0, 100, is_running=False), worker(1, 200, positions=(0,)))
    assert [use.rank for use in found.uses] == [1]
    assert standing(found) == WorkerPlacement(0)


def test_nothing_is_inferred_where_somebody_can_be_seen() -> None:
    found = usage([gpu(0, 4711, 7)], worker(0, 100), visible_pids=[7])
    assert found.uses == ()
    assert [one.pid for one in on(found, 0).foreign or ()] == [4711, 7]


def test_once_a_worker_is_found_by_its_pid_hidden_processes_are_not_the_jobs() -> None:
    found = usage([gpu(0, 100), gpu(1, 4711)], worker(0, 100), worker(1, 200))
    assert [use.rank for use in found.uses] == [0]
    assert [one.pid for one in on(found, 1).foreign or ()] == [4711]


def test_uuids_in_the_environment_tell_where_a_worker_belongs() -> None:
    found = usage(
        [gpu(0, 4711), gpu(1, 4712)], worker(0, 100, visible_devices="GPU-b1"), worker(1, 200, visible_devices="GPU-a")
    )
    assert [(use.rank, use.index, use.planned) for use in found.uses] == [(0, "1", False), (1, "0", False)]
    assert standing(found).text == "uses GPU 1 (GPU-b1), the plan gives it GPU 0"
    right = usage([gpu(0, 4711)], worker(0, 100, visible_devices="GPU-a0"))
    assert standing(right).misplaced is False


def test_numbers_in_the_environment_may_be_those_of_a_device_cgroup() -> None:
    found = usage(
        [gpu(0, 4711), gpu(1, 4712)], worker(0, 100, visible_devices="0"), worker(1, 200, visible_devices="0")
    )
    assert [(use.rank, use.index) for use in found.uses] == [(0, "0"), (1, "1")]
    assert standing(found, 1).misplaced is None


def test_what_the_driver_does_not_list_is_not_known() -> None:
    found = usage([gpu(0, processes=None), gpu(1, 200)], worker(0, 100), worker(1, 200))
    assert on(found, 0) == GpuUsers("GPU-a0", "0", (), None)
    assert standing(found, 0) == WorkerPlacement(0, None, "", None)
    assert standing(found, 1) == WorkerPlacement(1, False, "", ())


def test_without_gpus_nothing_is_known() -> None:
    assert usage([], worker(0, 100)) == NodeGpuUsage(workers=(WorkerPlacement(0, None, "", None),))


PARENT = VisibleGpu("GPU-p", "0")
MIGS = (VisibleGpu("MIG-x", "0:0", "GPU-p"), VisibleGpu("MIG-y", "0:1", "GPU-p"))


def divided(parent: Sequence[int] | None, *parts: Sequence[int] | None) -> list[VisibleGpu]:
    lists = [None if pids is None else tuple(ProcessOnGpu(pid, GIB) for pid in pids) for pids in (parent, *parts)]
    return [dataclasses.replace(one, processes=on) for one, on in zip((PARENT, *MIGS), lists, strict=True)]


def test_a_process_in_an_instance_counts_there_and_not_on_the_whole_gpu() -> None:
    found = usage(divided([100, 200], [100], [200]), worker(0, 100), worker(1, 200), ours=("MIG-x", "MIG-y"))
    assert [(use.rank, use.index, use.attribution, use.planned) for use in found.uses] == [
        (0, "0:0", "process", True),
        (1, "0:1", "process", True),
    ]
    assert [one.workers for one in found.gpus] == [(0,), (1,)]


def test_a_worker_in_the_instance_of_another_is_misplaced() -> None:
    found = usage(divided([100], [], [100]), worker(0, 100), ours=("MIG-x", "MIG-y"))
    assert standing(found).text == "uses GPU 0:1 (MIG-y), the plan gives it GPU 0:0"


def test_a_process_on_the_list_of_the_whole_gpu_alone_is_in_the_instance_of_the_plan() -> None:
    found = usage(divided([100], None, None), worker(0, 100), ours=("MIG-x", "MIG-y"))
    assert [(use.index, use.attribution, use.planned) for use in found.uses] == [("0:0", "inferred", True)]
    assert standing(found).misplaced is None


def test_with_several_instances_it_is_on_the_gpu_and_not_misplaced() -> None:
    found = usage(divided([100], None, None), worker(0, 100, positions=(0, 1)), ours=("MIG-x", "MIG-y"))
    assert [(use.index, use.attribution, use.planned) for use in found.uses] == [("0", "process", True)]
    assert standing(found).misplaced is False


def test_the_owner_of_a_whole_gpu_may_use_its_instances() -> None:
    found = usage(divided([100], [100], []), worker(0, 100), ours=("GPU-p",))
    assert [(use.index, use.planned) for use in found.uses] == [("0:0", True)]
    assert standing(found) == WorkerPlacement(0, False, "", ())


def test_instances_in_another_namespace_are_inferred_each() -> None:
    found = usage(divided([], [4711], [4712]), worker(0, 100), worker(1, 200), ours=("MIG-x", "MIG-y"))
    assert [(use.rank, use.index, use.attribution) for use in found.uses] == [
        (0, "0:0", "inferred"),
        (1, "0:1", "inferred"),
    ]


PIDS = st.integers(1, 12)
PROCESSES = st.lists(
    st.builds(
        ProcessOnGpu,
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
    unique_by=lambda one: one.rank,
)


@given(
    st.tuples(*(st.none() | PROCESSES for _ in UUIDS)),
    WORKERS,
    st.frozensets(PIDS),
    st.dictionaries(PIDS, PIDS),
    st.frozensets(PIDS),
    st.permutations(UUIDS).map(lambda uuids: uuids[:3]),
)
def test_everybody_has_one_place(
    lists: tuple[tuple[ProcessOnGpu, ...] | None, ...],
    workers: list[WorkerAssignment],
    visible: frozenset[int],
    pid_here: dict[int, int],
    ignored: frozenset[int],
    ours: list[str],
) -> None:
    gpus = [VisibleGpu(uuid, str(at), processes=on) for at, (uuid, on) in enumerate(zip(UUIDS, lists, strict=True))]
    found = gpu_usage(gpus, ours, workers, visible_pids=visible, local_pids=pid_here, ignored=ignored)
    assert [one.uuid for one in found.gpus] == ours
    assert {one.rank for one in found.workers} == {one.rank for one in workers}
    assert len({(use.rank, use.uuid) for use in found.uses}) == len(found.uses)
    for use in found.uses:
        assert use.sm_ratio is None or 0 <= use.sm_ratio <= 1
    own = {pid for one in workers for pid in one.pids}
    for one in found.gpus:
        assert one.workers == tuple(sorted(use.rank for use in found.uses if use.uuid == one.uuid))
        listed = {pid_here.get(p.pid, p.pid) for p in gpus[UUIDS.index(one.uuid)].processes or ()} - ignored
        assert {process.pid for process in one.foreign or ()} <= listed - own
        if any(use.attribution == "inferred" and use.uuid == one.uuid for use in found.uses):
            assert not listed & (visible | own)
            assert len(one.workers) == 1
    for stand in found.workers:
        assert bool(stand.text) == bool(stand.misplaced)
