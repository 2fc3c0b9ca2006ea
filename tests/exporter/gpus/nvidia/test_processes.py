"""Processes on NVIDIA's GPUs, read through the real binding."""

from typing import Any

import pytest

from exporter.gpus.records import GpuProcess
from tests.exporter.gpus.nvidia.nvml_driver import Machine, Start, one, start
from tests.fakenvml import FakeProcess, FakeSample, Fault, compiler
from tests.fakenvml.profiles import h200, mig, old

__all__ = ["start"]

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C compiler")

GIB = 1 << 30


def processes(machine: Machine, later: float = 5.0) -> tuple[GpuProcess, ...] | None:
    """Those of the first GPU, some seconds later."""
    machine.clock.advance(later)
    return machine.reader.processes(machine.gpu)


def test_processes_are_told_with_memory_and_share(start: Start) -> None:
    machine = start(one(processes=[FakeProcess(101, GIB, 75), FakeProcess(99, 2 * GIB)]))
    assert processes(machine, 0) == (GpuProcess(99, 2 * GIB, 0.0), GpuProcess(101, GIB, 0.75))


def test_memory_that_is_not_available_is_not_known(start: Start) -> None:
    assert processes(start(one(processes=[FakeProcess(7, None)]))) == (GpuProcess(7, None, 0.0),)


@pytest.mark.parametrize("pid", [0, 4294967295, 4194305, 2147483648])
def test_a_pid_that_cannot_be_is_dropped(pid: int, start: Start) -> None:
    told = [FakeProcess(pid, GIB, 5), FakeProcess(7, GIB), FakeProcess(pid, GIB, kind="mps")]
    assert [p.pid for p in processes(start(one(processes=told))) or ()] == [7]


def test_a_process_on_several_lists_is_one(start: Start) -> None:
    told = [
        FakeProcess(7, 5, kind="compute"),
        FakeProcess(7, 9, kind="graphics"),
        FakeProcess(8, 3, kind="mps"),
        FakeProcess(8, None, kind="compute"),
        FakeProcess(9, 1, kind="graphics"),
    ]
    assert processes(start(one(processes=told))) == (
        GpuProcess(7, 9, 0.0, "compute"),
        GpuProcess(8, 3, 0.0, "mps"),
        GpuProcess(9, 1, 0.0, "graphics"),
    )


def test_graphics_are_looked_for_once_a_minute_where_there_are_none(start: Start) -> None:
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
def test_a_list_that_is_not_told_is_no_empty_list(code: str, start: Start) -> None:
    machine = start(h200(1))
    machine.driver.change(lambda scenario: scenario.fail("nvmlDeviceGetComputeRunningProcesses_v3", code))
    assert processes(machine) is None
    assert processes(machine) is None
    assert machine.calls("nvmlDeviceGetComputeRunningProcesses_v3") == (2 if code == "UNKNOWN" else 1)


def test_compute_goes_on_without_the_other_lists(start: Start) -> None:
    machine = start(one(processes=[FakeProcess(7, 9)]))
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
    machine = start(one(processes=[FakeProcess(7, 9, 50)]))
    machine.driver.change(lambda scenario: scenario.faults.append(Fault(name, race=races)))
    found = processes(machine, 0)
    if "Running" in name:
        assert found == ((GpuProcess(7, 9, 0.5),) if known else None)
    else:
        assert found == (GpuProcess(7, 9, 0.5 if known else None),)


def test_a_long_list_is_read_whole_and_costs_one_call_the_next_time(start: Start) -> None:
    machine = start(one(processes=[FakeProcess(1000 + i, i, 1) for i in range(300)]))
    assert len(processes(machine, 0) or ()) == 300
    before = machine.driver.calls()
    assert len(processes(machine) or ()) == 300
    after = machine.driver.calls()
    for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetProcessUtilization"):
        assert after[name] - before[name] == 1


def test_nothing_new_is_no_use(start: Start) -> None:
    machine = start(one(processes=[FakeProcess(7, 9, 50)]))
    machine.driver.scenario.sample_period_s = 1000.0  # the driver has no new sample for long
    machine.driver.write()
    machine.clock.now = machine.clock.now // 1000 * 1000
    assert processes(machine, 0) == (GpuProcess(7, 9, 0.5),)
    assert processes(machine) == (GpuProcess(7, 9, 0.0),)


def test_a_clock_that_was_set_back_is_followed(start: Start) -> None:
    machine = start(one(processes=[FakeProcess(7, 9, 50)]))
    machine.clock.advance(10_000)
    assert processes(machine, 0) == (GpuProcess(7, 9, 0.0),)
    machine.clock.advance(-10_000)
    assert processes(machine, 0) == (GpuProcess(7, 9, 0.5),)


def test_no_samples_at_all_is_no_use(start: Start) -> None:
    machine = start(one(processes=[FakeProcess(7, 9)]))
    machine.driver.change(lambda scenario: scenario.fail("nvmlDeviceGetProcessUtilization", 0))
    assert processes(machine) == (GpuProcess(7, 9, 0.0),)


def test_samples_that_are_old_or_make_no_sense_are_dropped(start: Start) -> None:
    told: list[Any] = [FakeSample(7, 90, age_s=100), FakeSample(8, 101), FakeSample(8, 4294967295), FakeSample(0, 5)]
    told.append(FakeSample(9, 90, age_s=100))
    there = [FakeProcess(7, 9, 30), FakeProcess(8, 9), FakeProcess(9, 9)]
    found = processes(start(one(processes=there, samples=told)), 0) or ()
    assert [(p.pid, p.sm_ratio) for p in found] == [(7, 0.3), (8, 0.0), (9, 0.0)]


def test_of_several_samples_the_newest_counts(start: Start) -> None:
    machine = start(one(processes=[FakeProcess(7, 9, 30)], samples=[FakeSample(7, 90, age_s=2)]))
    assert processes(machine, 0) == (GpuProcess(7, 9, 0.3),)


def test_use_of_time_that_is_not_told_is_not_known(start: Start) -> None:
    machine = start(one(processes=[FakeProcess(7, 9, 30)]))
    machine.driver.change(lambda scenario: scenario.fail("nvmlDeviceGetProcessUtilization", "NOT_SUPPORTED"))
    for _ in range(3):
        assert processes(machine) == (GpuProcess(7, 9, None),)
    assert machine.calls("nvmlDeviceGetProcessUtilization") == 1


def test_processes_of_instances_are_told_at_the_instance(start: Start) -> None:
    scenario = mig()
    scenario.gpus[0].migs[1].processes = [FakeProcess(7, 9, 30)]
    machine = start(scenario)
    found = [machine.reader.processes(gpu) for gpu in machine.gpus]
    assert found == [(), (), (GpuProcess(7, 9, None),), (), ()]
    assert machine.calls("nvmlDeviceGetProcessUtilization") == 0


def test_the_oldest_form_of_the_list_is_read(start: Start) -> None:
    scenario = old()
    scenario.gpus[0].processes = [FakeProcess(7, GIB, 40), FakeProcess(8, None)]
    assert processes(start(scenario), 0) == (GpuProcess(7, GIB, 0.4), GpuProcess(8, None, 0.0))
