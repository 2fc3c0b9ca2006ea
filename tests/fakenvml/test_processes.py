"""Process lists and process utilization of the fake driver library."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fakenvml import (
    FakeGpu,
    FakeProcess,
    FakeSample,
    Fault,
    Scenario,
    profiles,
)
from tests.fakenvml.client import StartClient
from tests.fakenvml.scenario import CODES

GPU = profiles.uuid_of(0)
OTHER = profiles.uuid_of(1)
HERE = Path(__file__).parent


def two_gpus(**values: Any) -> Scenario:
    """A scenario with two_gpus equal GPUs."""
    return Scenario(gpus=[FakeGpu(uuid=GPU, **values), FakeGpu(uuid=OTHER, pci_bus_id="00000001:3b:00.0", **values)])


def test_processes_are_listed_by_kind(start_client: StartClient) -> None:
    client = start_client(
        two_gpus(
            processes=[
                FakeProcess(100, 1 << 33),
                FakeProcess(101, None),
                FakeProcess(4294967295, 7),
                FakeProcess(0, 7),
                FakeProcess(102, 5, kind="graphics"),
                FakeProcess(103, 6, kind="mps"),
            ]
        )
    )
    no_instance = {"gpuInstanceId": 0xFFFFFFFF, "computeInstanceId": 0xFFFFFFFF}
    for version in ("v2", "v3"):
        found = client.ask(f"nvml.nvmlDeviceGetComputeRunningProcesses_{version}(gpu)")
        assert found[0] == {"pid": 100, "usedGpuMemory": 1 << 33, **no_instance}
        assert [(each["pid"], each["usedGpuMemory"]) for each in found[1:]] == [(101, None), (4294967295, 7), (0, 7)]
    assert [each["pid"] for each in client.ask("nvml.nvmlDeviceGetGraphicsRunningProcesses_v3(gpu)")] == [102]
    assert [each["pid"] for each in client.ask("nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3(gpu)")] == [103]


def test_the_oldest_process_list_has_a_shorter_record(start_client: StartClient) -> None:
    client = start_client(two_gpus(processes=[FakeProcess(100, 7), FakeProcess(101, 8)]))
    client.ask("count = ctypes.c_uint(4)")
    client.ask("buffer = (ctypes.c_ulonglong * 8)()")
    assert client.ask("nvml.nvmlLib.nvmlDeviceGetComputeRunningProcesses(gpu, ctypes.byref(count), buffer)") == 0
    assert client.ask("count.value") == 2
    assert client.ask("buffer") == [100, 7, 101, 8, 0, 0, 0, 0]


USED = "[(s.pid, s.smUtil, s.memUtil, s.timeStamp) for s in nvml.nvmlDeviceGetProcessUtilization(gpu, {})]"


def test_process_utilization_is_returned_once_per_sample_period(start_client: StartClient) -> None:
    scenario = two_gpus(utilization=90, processes=[FakeProcess(100, 1, 80, 30), FakeProcess(101, 1, 0)])
    scenario.sample_period_s = 0.5
    client = start_client(scenario)
    ((pid, sm, memory, stamp),) = client.ask(USED.format(0))
    assert (pid, sm, memory) == (100, 80, 30)
    assert abs(stamp / 1e6 - time.time()) < 20
    end = time.monotonic() + 10
    while (code := client.code(USED.format(stamp))) == 0 and time.monotonic() < end:
        stamp = client.ask(USED.format(0))[0][3]
    assert code == CODES["NOT_FOUND"]
    time.sleep(0.6)
    assert client.ask(USED.format(stamp))[0][3] > stamp


def test_process_utilization_includes_stale_and_impossible_samples_of_the_scenario(start_client: StartClient) -> None:
    client = start_client(
        two_gpus(utilization=90, samples=[FakeSample(100, 40, age_s=3600), FakeSample(4294967295, 7331)])
    )
    old, wrong = client.ask(USED.format((1 << 63) - 1))
    assert old[:2] == [100, 40]
    assert time.time() - old[3] / 1e6 > 3500
    assert wrong[:2] == [4294967295, 7331]


def test_the_newer_call_returns_the_same_utilization(start_client: StartClient) -> None:
    client = start_client(two_gpus(utilization=90, processes=[FakeProcess(100, 1, 80, 30)]))
    (found,) = client.ask("nvml.nvmlDeviceGetProcessesUtilizationInfo(gpu, 0)")
    assert (found["pid"], found["smUtil"], found["memUtil"], found["jpgUtil"]) == (100, 80, 30, 0)
    assert abs(found["timeStamp"] / 1e6 - time.time()) < 20
    assert client.code("nvml.nvmlDeviceGetProcessesUtilizationInfo(gpu, (1 << 63) - 1)") == CODES["NOT_FOUND"]


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("nvmlDeviceGetProcessUtilization", "gpu, 0"),
        ("nvmlDeviceGetProcessesUtilizationInfo", "gpu, 0"),
        ("nvmlDeviceGetComputeRunningProcesses_v3", "gpu"),
    ],
)
def test_a_buffer_is_too_small_the_given_number_of_times(
    function: str, arguments: str, start_client: StartClient
) -> None:
    scenario = two_gpus(utilization=90, processes=[FakeProcess(100, 1, 80)])
    scenario.faults.append(Fault(function, GPU, race=2))
    client = start_client(scenario)
    call = f"nvml.{function}({arguments})"
    assert [client.code(call) for _ in range(3)] == [CODES["INSUFFICIENT_SIZE"]] * 2 + [0]


def test_a_success_code_without_data_makes_the_binding_raise_success(start_client: StartClient) -> None:
    scenario = two_gpus(utilization=90, processes=[FakeProcess(100, 1, 80)])
    scenario.fail("nvmlDeviceGetProcessUtilization", 0)
    client = start_client(scenario)
    client.ask("try:\n nvml.nvmlDeviceGetProcessUtilization(gpu, 0)\nexcept nvml.NVMLError as it: code = it.value")
    assert client.ask("code") == 0


def test_a_process_with_a_file_counts_until_it_ends(start_client: StartClient, tmp_path: Path) -> None:
    folder = tmp_path / "processes"
    folder.mkdir()
    client = start_client(
        two_gpus(memory_total=1000, memory_used=10, utilization=5), environment={"FAKENVML_PROCESSES": str(folder)}
    )
    process = subprocess.Popen(["sleep", "60"])
    (folder / str(process.pid)).write_text(f"{GPU} 300 40\n{OTHER} 1 1\n")
    (folder / ".being-written").write_text(f"{GPU} 300 40\n")
    (folder / "4194305").write_text(f"{GPU} 300 40\n")  # above the largest pid
    pids = "[(p.pid, p.usedGpuMemory) for p in nvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu)]"
    try:
        assert client.ask(pids) == [[process.pid, 300]]
        assert client.ask(USED.format(0))[0][:2] == [process.pid, 40]
        assert client.ask("nvml.nvmlDeviceGetMemoryInfo(gpu).used") == 310
        assert client.ask("nvml.nvmlDeviceGetUtilizationRates(gpu).gpu") == 45
    finally:
        process.kill()
    # It has not been reaped yet.
    end = time.monotonic() + 10
    while client.ask(pids) and time.monotonic() < end:
        time.sleep(0.01)
    assert client.ask(pids) == []
    process.wait()
    assert client.ask(pids) == []
    assert client.ask("nvml.nvmlDeviceGetMemoryInfo(gpu).used") == 10


@pytest.mark.parametrize(
    ("visible_devices", "numbers"),
    [("1", [1]), ("2,0", [2, 0]), (f"{profiles.uuid_of(1)[:12]}", [1]), ("0,9,1", [0]), ("", []), (None, [0, 1, 2])],
)
def test_the_worker_uses_the_gpus_that_cuda_would_select(
    visible_devices: str | None, numbers: list[int], path: Path, tmp_path: Path
) -> None:
    scenario = profiles.h200(3)
    scenario.write(path)
    environment = {**os.environ, **scenario.environment(path), "FAKENVML_PROCESSES": str(tmp_path)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if visible_devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible_devices
    command = [sys.executable, str(HERE / "use_gpu.py"), "--items", "100", "--seconds", "10", "--memory", "5"]
    with subprocess.Popen([*command, "--silent-after", "1"], env=environment, stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        assert it.stdout.readline() == "Processed 1/100 items\n"
        found = (tmp_path / str(it.pid)).read_text()
        assert found == "".join(f"{profiles.uuid_of(number)} 5 90\n" for number in numbers)
        it.terminate()
        assert it.stdout.read() == ""
    assert it.returncode == 143
    assert not (tmp_path / str(it.pid)).exists()
