"""Faults of the fake driver library, as of the real one."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.fakenvml import (
    Fault,
    Scenario,
    profiles,
)
from tests.fakenvml.client import THREADS, StartClient
from tests.fakenvml.scenario import CODES

GPU = profiles.uuid_of(0)


@pytest.mark.parametrize("state", ["lost", "reset_required"])
def test_a_lost_gpu_fails_every_call_about_it_and_no_other(state: Any, start_client: StartClient, path: Path) -> None:
    scenario = profiles.h200(2)
    client = start_client(scenario)
    scenario.gpus[0].state = state
    scenario.write(path)
    expected = CODES["GPU_IS_LOST" if state == "lost" else "RESET_REQUIRED"]
    calls = (
        "Name(gpu)",
        "PowerUsage(gpu)",
        "FieldValues(gpu, [185])",
        "HandleByIndex(0)",
        "ComputeRunningProcesses(gpu)",
    )
    assert [client.code(f"nvml.nvmlDeviceGet{each}") for each in calls] == [expected] * len(calls)
    assert client.ask("nvml.nvmlDeviceGetCount()") == 2
    assert client.ask("nvml.nvmlDeviceGetPowerUsage(nvml.nvmlDeviceGetHandleByIndex(1))") == 630_000
    scenario.gpus[0].state = "ok"
    scenario.write(path)
    assert client.ask("nvml.nvmlDeviceGetPowerUsage(gpu)") == 630_000


def test_a_gpu_removed_from_the_scenario_is_lost(start_client: StartClient, path: Path) -> None:
    scenario = profiles.h200(2)
    client = start_client(scenario)
    del scenario.gpus[0]
    scenario.write(path)
    assert client.code("nvml.nvmlDeviceGetName(gpu)") == CODES["GPU_IS_LOST"]


@pytest.mark.parametrize("global_lock", [False, True])
def test_a_hanging_call_returns_after_its_release(global_lock: bool, start_client: StartClient, path: Path) -> None:
    scenario = profiles.h200(2)
    scenario.global_lock = global_lock
    client = start_client(scenario)
    client.ask(THREADS)
    scenario.hang("nvmlDeviceGetPowerUsage", scenario.gpus[0])
    scenario.write(path)
    client.ask("later('nvml.nvmlDeviceGetPowerUsage(gpu)', 'hanging')")
    time.sleep(0.1)
    client.ask("later('nvml.nvmlDeviceGetPowerUsage(other)', 'other')")
    if global_lock:  # like the real driver, which answers one call at a time
        client.ask("time.sleep(0.2)")
        assert client.ask("ended") == {}
    else:
        assert client.ask("wait_for(1)") == {"other": 630_000}
    scenario.release()
    scenario.write(path)
    assert client.ask("wait_for(2)") == {"hanging": 630_000, "other": 630_000}


@pytest.mark.parametrize("code", ["GPU_IS_LOST", "UNINITIALIZED"])
def test_a_gpu_or_the_driver_may_fail_while_a_call_hangs(code: str, start_client: StartClient, path: Path) -> None:
    scenario = profiles.h200(2)
    scenario.hang("*", scenario.gpus[0])
    client = start_client(profiles.h200(2))
    client.ask(THREADS)
    scenario.write(path)
    client.ask("later('nvml.nvmlDeviceGetName(gpu)', 'name')")
    client.ask("time.sleep(0.1)")
    assert client.ask("ended") == {}
    if code == "GPU_IS_LOST":
        scenario.gpus[0].state = "lost"
    else:
        scenario.broken = code
    scenario.release()
    scenario.write(path)
    assert client.ask("wait_for(1)") == {"name": -CODES[code]}


def test_a_slow_call_takes_the_given_time(start_client: StartClient) -> None:
    scenario = profiles.h200(2)
    scenario.faults.append(Fault("nvmlDeviceGetPowerUsage", GPU, slow_ms=3000))
    client = start_client(scenario)
    client.ask(THREADS)
    duration = "(lambda began: (nvml.nvmlDeviceGetPowerUsage({}), time.perf_counter() - began)[1])(time.perf_counter())"
    assert client.ask(duration.format("gpu")) >= 3.0
    assert client.ask(duration.format("other")) < 3.0


def test_a_call_fails_only_for_the_given_gpus(start_client: StartClient) -> None:
    scenario = profiles.h200(2)
    scenario.fail("nvmlDeviceGetPowerUsage", "NO_PERMISSION", scenario.gpus[1])
    scenario.fail("nvmlDeviceGetTemperature", "UNKNOWN")
    scenario.fail("nvmlSystemGetDriverVersion", "NOT_SUPPORTED")
    client = start_client(scenario)
    client.ask("other = nvml.nvmlDeviceGetHandleByIndex(1)")
    assert client.code("nvml.nvmlDeviceGetPowerUsage(gpu)") == 0
    assert client.code("nvml.nvmlDeviceGetPowerUsage(other)") == CODES["NO_PERMISSION"]
    assert client.code("nvml.nvmlDeviceGetTemperature(gpu, 0)") == CODES["UNKNOWN"]
    assert client.code("nvml.nvmlSystemGetDriverVersion()") == CODES["NOT_SUPPORTED"]


@pytest.mark.parametrize("code", ["DRIVER_NOT_LOADED", "LIB_RM_VERSION_MISMATCH", "NO_PERMISSION"])
def test_initialization_may_fail(code: str, start_client: StartClient) -> None:
    client = start_client(Scenario(init=code), init=False)
    assert client.code("nvml.nvmlInit()") == client.code("nvml.nvmlInitWithFlags(0)") == CODES[code]
    assert client.code("nvml.nvmlDeviceGetCount()") == CODES["UNINITIALIZED"]


def test_a_replaced_driver_fails_every_call(start_client: StartClient, path: Path) -> None:
    scenario = profiles.h200(1)
    client = start_client(scenario)
    scenario.broken = "LIB_RM_VERSION_MISMATCH"
    scenario.write(path)
    for call in ("nvmlDeviceGetName(gpu)", "nvmlDeviceGetCount()", "nvmlInit()", "nvmlShutdown()"):
        assert client.code(f"nvml.{call}") == CODES["LIB_RM_VERSION_MISMATCH"]


def test_calls_before_init_and_after_shutdown_fail(start_client: StartClient) -> None:
    client = start_client(profiles.h200(1), init=False)
    assert client.code("nvml.nvmlDeviceGetCount()") == CODES["UNINITIALIZED"]
    client.ask("nvml.nvmlInit()")
    client.ask("nvml.nvmlInit()")
    client.ask("nvml.nvmlShutdown()")
    assert client.ask("nvml.nvmlDeviceGetCount()") == 1
    client.ask("nvml.nvmlShutdown()")
    assert client.code("nvml.nvmlDeviceGetCount()") == client.code("nvml.nvmlShutdown()") == CODES["UNINITIALIZED"]


@pytest.mark.parametrize(("code", "text"), [(9, "Driver Not Loaded"), (15, "GPU is lost"), (999, "Unknown Error")])
def test_error_texts_are_those_of_the_real_library(code: int, text: str, start_client: StartClient) -> None:
    assert start_client(Scenario()).ask(f"nvml.nvmlErrorString({code})") == text


def test_without_a_scenario_there_is_no_driver(start_client: StartClient, path: Path) -> None:
    client = start_client(Scenario(), init=False)
    path.unlink()
    assert client.code("nvml.nvmlInit()") == CODES["DRIVER_NOT_LOADED"]
