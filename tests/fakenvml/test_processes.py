"""Programs that use GPUs of the fake driver library."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fakenvml import FakeGpu, Scenario, profiles
from tests.fakenvml.client import StartClient

GPU = profiles.uuid_of(0)
HERE = Path(__file__).parent


def test_a_process_with_a_file_counts_until_it_ends(start_client: StartClient, tmp_path: Path) -> None:
    folder = tmp_path / "processes"
    folder.mkdir()
    scenario = Scenario(gpus=[FakeGpu(uuid=GPU, memory_total=1000, memory_used=10, utilization=5)])
    client = start_client(scenario, environment={"FAKENVML_PROCESSES": str(folder)})
    process = subprocess.Popen(["sleep", "60"])
    (folder / str(process.pid)).write_text(f"{GPU} 300 40\nGPU-other 1 1\n")
    (folder / ".being-written").write_text(f"{GPU} 300 40\n")
    (folder / "4194305").write_text(f"{GPU} 300 40\n")  # above the largest pid
    shares = "[(s.pid, s.smUtil) for s in nvml.nvmlDeviceGetProcessUtilization(gpu, 0)]"
    pids = "[(p.pid, p.usedGpuMemory) for p in nvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu)]"
    try:
        assert client.ask(pids) == [[process.pid, 300]]
        assert client.ask(shares) == [[process.pid, 40]]
        assert client.ask("nvml.nvmlDeviceGetMemoryInfo(gpu).used") == 310
        assert client.ask("nvml.nvmlDeviceGetUtilizationRates(gpu).gpu") == 45
    finally:
        process.kill()
    # It has not been reaped yet.
    end = time.monotonic() + 60
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
