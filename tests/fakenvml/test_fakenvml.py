"""Build, call counts and consistency of the fake driver library."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pynvml
import pytest

from tests.fakenvml import Fault, Scenario, calls, functions, library, profiles, seconds_inside
from tests.fakenvml.client import StartClient

HERE = Path(__file__).parent


def test_an_unknown_function_cannot_be_left_out() -> None:
    with pytest.raises(ValueError, match="nvmlDeviceGetColour"):
        library(["nvmlDeviceGetColour"])


def test_several_processes_may_build_the_library_at_once(tmp_path: Path) -> None:
    code = "from tests.fakenvml import library; print(library(['nvmlDeviceGetFanSpeed']))"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    builders = [
        subprocess.Popen(command, cwd=HERE.parents[1], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in "123"
    ]
    (folder,) = {builder.communicate()[0].strip() for builder in builders}
    assert [builder.returncode for builder in builders] == [0, 0, 0]
    assert [entry.name for entry in Path(folder).iterdir()] == ["libnvidia-ml.so.1"]
    assert [entry.name for entry in Path(folder).parent.iterdir()] == [Path(folder).name]


def test_calls_and_their_cpu_time_are_counted(start_client: StartClient, tmp_path: Path) -> None:
    folder = tmp_path / "calls"
    folder.mkdir()
    scenario = profiles.h200(1)
    scenario.faults.append(Fault("nvmlDeviceGetFanSpeed", slow_ms=500))
    client = start_client(scenario, environment={"FAKENVML_CALLS": str(folder)})
    for _ in range(12):
        client.ask("nvml.nvmlDeviceGetPowerUsage(gpu)")
    client.ask("nvml.nvmlDeviceGetFieldValues(gpu, [185, 186, 185])")
    client.code("nvml.nvmlDeviceGetFanSpeed(gpu)")
    found = calls(folder)
    assert found["nvmlDeviceGetPowerUsage"] == 12
    assert (found["field[185]"], found["field[186]"], found["nvmlDeviceGetFanSpeed"]) == (2, 1, 1)
    assert found["nvmlInitWithFlags"] == 1
    assert found["nvmlDeviceGetName"] == 0
    # A call that only waits uses no CPU time.
    assert 0 < seconds_inside(folder) < 0.5
    assert [entry.name for entry in folder.iterdir()] == [str(client.process.pid)]


def test_each_write_takes_effect_with_the_next_call(start_client: StartClient, path: Path) -> None:
    scenario = Scenario(cuda=(10, 0))
    client = start_client(scenario)
    versions = []
    for minor in range(9):
        scenario.cuda = (10, minor)
        scenario.write(path)
        versions.append(client.ask("nvml.nvmlSystemGetCudaDriverVersion_v2()") - 10_000)
    assert versions == [0, 10, 20, 30, 40, 50, 60, 70, 80]
    # This holds even if only the content differs, as after two writes within one clock tick.
    ahead = time.time_ns() + 60 * 10**9
    for minor in (1, 2):
        scenario.cuda = (10, minor)
        path.write_text(scenario.text())
        os.utime(path, ns=(ahead, ahead))
        assert client.ask("nvml.nvmlSystemGetCudaDriverVersion_v2()") == 10_000 + 10 * minor


def test_threads_may_make_calls_while_the_scenario_changes(start_client: StartClient, path: Path) -> None:
    scenario = profiles.h200(4)
    client = start_client(scenario)
    client.ask(
        """
import threading
stop, wrong = threading.Event(), []
def work(number):
    it = nvml.nvmlDeviceGetHandleByIndex(number % 4)
    while not stop.is_set():
        if nvml.nvmlDeviceGetUUID(it) != nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(number % 4)):
            wrong.append(number)
        if nvml.nvmlDeviceGetFieldValues(it, [185])[0].value.uiVal not in range(1000, 1100):
            wrong.append(number)
threads = []
"""
    )
    for round_ in range(100):
        for gpu in scenario.gpus:
            gpu.fields[185] = 1000 + round_
        scenario.write(path)
        if not round_:
            client.ask("threads += [threading.Thread(target=work, args=(i,), daemon=True) for i in range(8)]")
            client.ask("for thread in threads: thread.start()")
        time.sleep(0.005)
    client.ask("stop.set()")
    client.ask("for thread in threads: thread.join()")
    assert client.ask("wrong") == []


def test_the_binding_calls_every_function_of_the_library() -> None:
    text = Path(pynvml.__file__).read_text()
    called = {name for name in functions() if f'_nvmlGetFunctionPointer("{name}")' in text}
    # Older names that real drivers still have.
    assert functions() - called == {
        "nvmlInit_v2",
        "nvmlEventSetWait",
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetGraphicsRunningProcesses",
        "nvmlDeviceGetMPSComputeRunningProcesses",
    }
