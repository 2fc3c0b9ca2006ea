"""Processes on NVIDIA GPUs, read through the real binding."""

from typing import Any

import pytest

from exporter.gpus.records import GpuProcess
from tests.exporter.gpus.nvidia.nvml_driver import Machine, Start, one_h200, start
from tests.fakenvml import FakeProcess, FakeSample, Fault, compiler
from tests.fakenvml.profiles import h200, mig, old

__all__ = ["start"]

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C compiler")

GIB = 1 << 30


def processes(machine: Machine, after_s: float = 5.0) -> tuple[GpuProcess, ...] | None:
    """Processes of the first GPU, some seconds later."""
    machine.clock.advance(after_s)
    return machine.reader.processes(machine.gpu)


def test_processes_have_memory_and_utilization(start: Start) -> None:
    machine = start(one_h200(processes=[FakeProcess(101, GIB, 75), FakeProcess(99, 2 * GIB)]))
    assert processes(machine, 0) == (GpuProcess(99, 2 * GIB, 0.0), GpuProcess(101, GIB, 0.75))


def test_unavailable_process_memory_is_unknown(start: Start) -> None:
    assert processes(start(one_h200(processes=[FakeProcess(7, None)]))) == (GpuProcess(7, None, 0.0),)


@pytest.mark.parametrize("pid", [0, 4294967295, 4194305, 2147483648])
def test_an_impossible_pid_is_dropped(pid: int, start: Start) -> None:
    listed = [FakeProcess(pid, GIB, 5), FakeProcess(7, GIB), FakeProcess(pid, GIB, kind="mps")]
    assert [p.pid for p in processes(start(one_h200(processes=listed))) or ()] == [7]


def test_a_process_on_several_lists_is_returned_once(start: Start) -> None:
    listed = [
        FakeProcess(7, 5, kind="compute"),
        FakeProcess(7, 9, kind="graphics"),
        FakeProcess(8, 3, kind="mps"),
        FakeProcess(8, None, kind="compute"),
        FakeProcess(9, 1, kind="graphics"),
    ]
    assert processes(start(one_h200(processes=listed))) == (
        GpuProcess(7, 9, 0.0, "compute"),
        GpuProcess(8, 3, 0.0, "mps"),
        GpuProcess(9, 1, 0.0, "graphics"),
    )


def test_an_empty_list_of_graphics_processes_is_read_once_a_minute(start: Start) -> None:
    name = "nvmlDeviceGetGraphicsRunningProcesses_v3"
    machine = start(h200(1))
    for _ in range(3):
        processes(machine)
    assert machine.calls(name) == 1
    machine.fake.processes = [FakeProcess(7, 9, kind="graphics")]
    machine.driver.write()
    assert [p.pid for p in processes(machine, 60) or ()] == [7]
    assert [p.pid for p in processes(machine) or ()] == [7]
    assert machine.calls(name) == 3


@pytest.mark.parametrize("code", ["NO_PERMISSION", "NOT_SUPPORTED", "UNKNOWN"])
def test_an_unavailable_list_is_unknown_and_not_empty(code: str, start: Start) -> None:
    machine = start(h200(1))
    machine.driver.change(lambda scenario: scenario.fail("nvmlDeviceGetComputeRunningProcesses_v3", code))
    assert processes(machine) is None
    assert processes(machine) is None
    assert machine.calls("nvmlDeviceGetComputeRunningProcesses_v3") == (2 if code == "UNKNOWN" else 1)


def test_compute_processes_are_read_without_the_other_lists(start: Start) -> None:
    machine = start(one_h200(processes=[FakeProcess(7, 9)]))
    for kind in ("Graphics", "MPSCompute"):
        machine.driver.scenario.fail(f"nvmlDeviceGet{kind}RunningProcesses_v3", "NOT_SUPPORTED")
    machine.driver.write()
    for _ in range(3):
        machine.clock.advance(100)
        assert processes(machine) == (GpuProcess(7, 9, 0.0),)
    assert machine.calls("nvmlDeviceGetMPSComputeRunningProcesses_v3") == 1
    assert machine.calls("nvmlDeviceGetGraphicsRunningProcesses_v3") == 1


@pytest.mark.parametrize("name", ["nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetProcessUtilization"])
@pytest.mark.parametrize(("races", "known"), [(1, True), (3, True), (9, False)])
def test_a_list_that_grows_while_it_is_read_is_read_again(name: str, races: int, known: bool, start: Start) -> None:
    machine = start(one_h200(processes=[FakeProcess(7, 9, 50)]))
    machine.driver.change(lambda scenario: scenario.faults.append(Fault(name, race=races)))
    found = processes(machine, 0)
    if "Running" in name:
        assert found == ((GpuProcess(7, 9, 0.5),) if known else None)
    else:
        assert found == (GpuProcess(7, 9, 0.5 if known else None),)


def test_a_long_list_is_read_completely_and_later_with_one_call(start: Start) -> None:
    machine = start(one_h200(processes=[FakeProcess(1000 + i, i, 1) for i in range(300)]))
    assert len(processes(machine, 0) or ()) == 300
    before = machine.driver.calls()
    assert len(processes(machine) or ()) == 300
    after = machine.driver.calls()
    for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetProcessUtilization"):
        assert after[name] - before[name] == 1


def test_no_new_sample_means_zero_utilization(start: Start) -> None:
    machine = start(one_h200(processes=[FakeProcess(7, 9, 50)]))
    machine.driver.scenario.sample_period_s = 1000.0  # the driver has no new sample for long
    machine.driver.write()
    machine.clock.now = machine.clock.now // 1000 * 1000
    assert processes(machine, 0) == (GpuProcess(7, 9, 0.5),)
    assert processes(machine) == (GpuProcess(7, 9, 0.0),)


def test_samples_are_read_again_after_the_clock_was_set_back(start: Start) -> None:
    machine = start(one_h200(processes=[FakeProcess(7, 9, 50)]))
    machine.clock.advance(10_000)
    assert processes(machine, 0) == (GpuProcess(7, 9, 0.0),)
    machine.clock.advance(-10_000)
    assert processes(machine, 0) == (GpuProcess(7, 9, 0.5),)


def test_no_samples_at_all_mean_zero_utilization(start: Start) -> None:
    machine = start(one_h200(processes=[FakeProcess(7, 9)]))
    machine.driver.change(lambda scenario: scenario.fail("nvmlDeviceGetProcessUtilization", 0))
    assert processes(machine) == (GpuProcess(7, 9, 0.0),)


def test_old_and_impossible_samples_are_dropped(start: Start) -> None:
    samples: list[Any] = [FakeSample(7, 90, age_s=100), FakeSample(8, 101), FakeSample(8, 4294967295), FakeSample(0, 5)]
    samples.append(FakeSample(9, 90, age_s=100))
    running = [FakeProcess(7, 9, 30), FakeProcess(8, 9), FakeProcess(9, 9)]
    found = processes(start(one_h200(processes=running, samples=samples)), 0) or ()
    assert [(p.pid, p.sm_ratio) for p in found] == [(7, 0.3), (8, 0.0), (9, 0.0)]


def test_the_newest_of_several_samples_counts(start: Start) -> None:
    machine = start(one_h200(processes=[FakeProcess(7, 9, 30)], samples=[FakeSample(7, 90, age_s=2)]))
    assert processes(machine, 0) == (GpuProcess(7, 9, 0.3),)


def test_unsupported_process_utilization_is_unknown(start: Start) -> None:
    machine = start(one_h200(processes=[FakeProcess(7, 9, 30)]))
    machine.driver.change(lambda scenario: scenario.fail("nvmlDeviceGetProcessUtilization", "NOT_SUPPORTED"))
    for _ in range(3):
        assert processes(machine) == (GpuProcess(7, 9, None),)
    assert machine.calls("nvmlDeviceGetProcessUtilization") == 1


def test_processes_of_a_mig_instance_are_listed_on_the_instance(start: Start) -> None:
    scenario = mig()
    scenario.gpus[0].migs[1].processes = [FakeProcess(7, 9, 30)]
    machine = start(scenario)
    found = [machine.reader.processes(gpu) for gpu in machine.gpus]
    assert found == [(), (), (GpuProcess(7, 9, None),), (), ()]
    assert machine.calls("nvmlDeviceGetProcessUtilization") == 0


def test_the_oldest_list_format_is_read(start: Start) -> None:
    scenario = old()
    scenario.gpus[0].processes = [FakeProcess(7, GIB, 40), FakeProcess(8, None)]
    assert processes(start(scenario), 0) == (GpuProcess(7, GIB, 0.4), GpuProcess(8, None, 0.0))
