"""Assignment of GPU errors to workers."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.gpus.analysis.attribution import FaultAttribution, GpuError, WorkerGpuRelation, normal_pci_address
from exporter.gpus.records import Gpu


def relation(uuid: str, index: str, pci: str | None = None, *, is_own: bool = False, **more: Any) -> WorkerGpuRelation:
    """A GPU or instance. If it is the worker's own, it is so alone."""
    return WorkerGpuRelation(Gpu(uuid, index, "nvidia", pci_bus_id=pci, **more), is_own, is_exclusive=is_own)


GPU = relation("GPU-a", "0", "0000:3b:00.0", is_own=True)
MIG_GPUS = (
    relation("GPU-b", "1", "0000:5e:00.0"),
    relation("MIG-5", "1:0", "0000:5e:00.0", is_own=True, parent="GPU-b", gpu_instance=5),
    relation("MIG-6", "1:1", "0000:5e:00.0", parent="GPU-b", gpu_instance=6),
)


def texts(*errors: GpuError) -> list[str]:
    """Texts of the errors of a worker with pid 7. Pid 8 belongs to another worker."""
    return [text for _, text in FaultAttribution((GPU, *MIG_GPUS), {7}, {8}).errors(errors)]


@pytest.mark.parametrize("pci", ["0000:3b:00", "0000:3B:00.0", "00000000:3b:00.0", "0:3b:00"])
def test_pci_addresses_are_normalized(pci: str) -> None:
    assert normal_pci_address(pci) == "0000:3b:00"


def test_an_error_of_an_unknown_gpu_counts_if_it_names_the_worker() -> None:
    assert texts(GpuError(1.0, 31, pci="0000:99:00", pid=7), GpuError(1.0, 79, pci="0000:99:00")) == [
        "Xid 31 on the GPU at 0000:99:00, process 7"
    ]
    assert texts(GpuError(1.0, 79, uuid="GPU-z"), GpuError(1.0, 79)) == []


def test_errors_at_two_unknown_addresses_are_separate() -> None:
    assert len(texts(GpuError(1.0, 31, pci="0000:99:00", pid=7), GpuError(1.0, 31, pci="0000:98:00", pid=7))) == 2


def test_an_error_with_two_pids_is_assigned_to_the_process_of_the_worker() -> None:
    assert texts(GpuError(1.0, 13, uuid="GPU-a", pid=8), GpuError(1.5, 13, uuid="GPU-a", pid=7)) == [
        "Xid 13 on GPU 0 (GPU-a), process 7"
    ]
    assert texts(GpuError(1.0, 13, uuid="GPU-a", pid=8), GpuError(1.5, 13, uuid="GPU-a")) == []


def test_a_later_repetition_is_a_separate_error() -> None:
    assert len(texts(GpuError(1.0, 79, uuid="GPU-a"), GpuError(5.0, 79, uuid="GPU-a"))) == 1
    assert len(texts(GpuError(1.0, 79, uuid="GPU-a"), GpuError(7.0, 79, uuid="GPU-a"))) == 2


def test_the_text_contains_the_instance_number() -> None:
    assert texts(GpuError(1.0, 13, pci="0000:5e:00", gpu_instance=5)) == ["Xid 13 on GPU 1 (GPU-b), instance 5"]
    assert texts(GpuError(1.0, 13, pci="0000:5e:00", gpu_instance=6)) == []


def test_simultaneous_errors_of_two_instances_are_separate() -> None:
    assert texts(GpuError(1.0, 94, uuid="GPU-b", gpu_instance=6), GpuError(1.0, 94, uuid="GPU-b", gpu_instance=5)) == [
        "Xid 94 on GPU 1 (GPU-b), instance 5: uncorrectable memory error that affected only this program"
    ]


def test_an_instance_number_is_ignored_on_a_gpu_without_mig() -> None:
    assert texts(GpuError(1.0, 79, uuid="GPU-a", gpu_instance=0)) != []


def losses(*uuids: str) -> list[tuple[str, float, str]]:
    """Losses that concern the worker. The GPUs are lost one after the other, the last first."""
    return FaultAttribution((GPU, *MIG_GPUS), {7}, {8}).losses(
        {uuid: (9.0 - at, "lost") for at, uuid in enumerate(uuids)}
    )


def test_losses_of_the_gpus_of_a_worker_are_in_order_of_time() -> None:
    assert losses("GPU-b", "GPU-a", "GPU-z") == [("GPU 0 (GPU-a)", 8.0, "lost"), ("GPU 1 (GPU-b)", 9.0, "lost")]


def test_the_loss_of_a_mig_gpu_counts_once_for_its_instances() -> None:
    assert losses("MIG-5", "GPU-b") == [("GPU 1 (GPU-b)", 8.0, "lost")]
    assert losses("MIG-5", "MIG-6") == [("GPU 1:0 (MIG-5)", 9.0, "lost")]


def test_the_loss_of_a_foreign_gpu_does_not_concern_the_worker() -> None:
    foreign = WorkerGpuRelation(Gpu("GPU-c", "2", "nvidia"), is_exclusive=True)
    assert FaultAttribution((foreign,), {7}, {8}).losses({"GPU-c": (9.0, "lost")}) == []


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
def test_errors_are_in_order_and_include_all_that_name_the_worker(errors: list[GpuError]) -> None:
    found = FaultAttribution((GPU, *MIG_GPUS), {7}, {8}).errors(errors)
    times = [error.time for error, _ in found]
    assert times == sorted(times)
    assert {error.xid for error in errors if error.pid == 7} <= {error.xid for error, _ in found}
    assert all(text for _, text in found)
