"""Whose an error of a GPU is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.gpus.analysis.attribution import FaultAttribution, GpuError, WorkerGpuRelation, normal_pci_address

WHOLE = WorkerGpuRelation("GPU-a", "0", pci="0000:3b:00.0", is_own=True, is_exclusive=True)
PARTS = (
    WorkerGpuRelation("GPU-b", "1", pci="0000:5e:00.0"),
    WorkerGpuRelation(
        "MIG-5", "1:0", pci="0000:5e:00.0", parent="GPU-b", gpu_instance=5, is_own=True, is_exclusive=True
    ),
    WorkerGpuRelation("MIG-6", "1:1", pci="0000:5e:00.0", parent="GPU-b", gpu_instance=6),
)


def words(*told: GpuError) -> list[str]:
    """What is said of the errors that are those of a worker with process 7; process 8 is another worker's."""
    return [text for _, text in FaultAttribution((WHOLE, *PARTS), {7}, {8}).errors(told)]


@pytest.mark.parametrize("pci", ["0000:3b:00", "0000:3B:00.0", "00000000:3b:00.0", "0:3b:00"])
def test_a_place_on_the_bus_is_the_same_however_it_is_written(pci: str) -> None:
    assert normal_pci_address(pci) == "0000:3b:00"


def test_of_a_gpu_that_is_not_known_what_names_the_worker_counts() -> None:
    assert words(GpuError(1.0, 31, pci="0000:99:00", pid=7), GpuError(1.0, 79, pci="0000:99:00")) == [
        "Xid 31 on the GPU at 0000:99:00, process 7"
    ]
    assert words(GpuError(1.0, 79, uuid="GPU-z"), GpuError(1.0, 79)) == []


def test_errors_at_two_places_that_are_not_known_are_two() -> None:
    assert len(words(GpuError(1.0, 31, pci="0000:99:00", pid=7), GpuError(1.0, 31, pci="0000:98:00", pid=7))) == 2


def test_one_error_told_of_two_processes_is_that_of_the_one_that_is_the_workers() -> None:
    assert words(GpuError(1.0, 13, uuid="GPU-a", pid=8), GpuError(1.5, 13, uuid="GPU-a", pid=7)) == [
        "Xid 13 on GPU 0 (GPU-a), process 7"
    ]
    assert words(GpuError(1.0, 13, uuid="GPU-a", pid=8), GpuError(1.5, 13, uuid="GPU-a")) == []


def test_an_error_that_comes_again_is_another_one() -> None:
    assert len(words(GpuError(1.0, 79, uuid="GPU-a"), GpuError(5.0, 79, uuid="GPU-a"))) == 1
    assert len(words(GpuError(1.0, 79, uuid="GPU-a"), GpuError(7.0, 79, uuid="GPU-a"))) == 2


def test_an_instance_is_told_with_its_number() -> None:
    assert words(GpuError(1.0, 13, pci="0000:5e:00", gpu_instance=5)) == ["Xid 13 on GPU 1 (GPU-b), instance 5"]
    assert words(GpuError(1.0, 13, pci="0000:5e:00", gpu_instance=6)) == []


def test_errors_of_two_instances_are_two_also_at_the_same_time() -> None:
    assert words(GpuError(1.0, 94, uuid="GPU-b", gpu_instance=6), GpuError(1.0, 94, uuid="GPU-b", gpu_instance=5)) == [
        "Xid 94 on GPU 1 (GPU-b), instance 5: uncorrectable memory error that only this program has met"
    ]


def test_a_gpu_that_is_not_divided_has_no_instances_whatever_the_driver_tells() -> None:
    assert words(GpuError(1.0, 79, uuid="GPU-a", gpu_instance=0)) != []


def losses(*uuids: str) -> list[tuple[str, float, str]]:
    """Which of these GPUs, lost one after the other, are told as lost by the worker."""
    return FaultAttribution((WHOLE, *PARTS), {7}, {8}).losses(
        {uuid: (9.0 - at, "lost") for at, uuid in enumerate(uuids)}
    )


def test_the_loss_of_a_gpu_is_that_of_its_worker_and_the_first_is_told_first() -> None:
    assert losses("GPU-b", "GPU-a", "GPU-z") == [("GPU 0 (GPU-a)", 8.0, "lost"), ("GPU 1 (GPU-b)", 9.0, "lost")]


def test_the_loss_of_a_divided_gpu_is_that_of_its_instances_and_told_once() -> None:
    assert losses("MIG-5", "GPU-b") == [("GPU 1 (GPU-b)", 8.0, "lost")]
    assert losses("MIG-5", "MIG-6") == [("GPU 1:0 (MIG-5)", 9.0, "lost")]


def test_the_loss_of_a_gpu_of_others_is_not_the_workers() -> None:
    assert (
        FaultAttribution((WorkerGpuRelation("GPU-c", "2", is_exclusive=True),), {7}, {8}).losses(
            {"GPU-c": (9.0, "lost")}
        )
        == []
    )


ERRORS = st.builds(
    GpuError,
    st.floats(0, 100),
    st.sampled_from([13, 31, 45, 74, 79, 94, 999]),
    uuid=st.sampled_from([None, "GPU-a", "GPU-b", "GPU-z"]),
    pci=st.sampled_from([None, "0000:3b:00", "0000:5e:00", "0000:99:00"]),
    pid=st.sampled_from([None, 7, 8, 9]),
    gpu_instance=st.sampled_from([None, 5, 6]),
)


@given(st.lists(ERRORS, max_size=6))
def test_what_is_the_workers_is_in_order_and_nothing_that_names_it_is_lost(told: list[GpuError]) -> None:
    found = FaultAttribution((WHOLE, *PARTS), {7}, {8}).errors(told)
    times = [error.time for error, _ in found]
    assert times == sorted(times)
    assert {error.xid for error in told if error.pid == 7} <= {error.xid for error, _ in found}
    assert all(text for _, text in found)
