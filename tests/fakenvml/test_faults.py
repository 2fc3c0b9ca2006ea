"""What goes wrong with the stand-in for the driver's library, as with the real one."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.fakenvml import (
    Fault,
    Scenario,
    profiles,
)
from tests.fakenvml.client import THREADS, Begin
from tests.fakenvml.scenario import CODES

GPU = profiles.uuid_of(0)


@pytest.mark.parametrize("state", ["lost", "reset_required"])
def test_a_lost_gpu_fails_every_call_about_it_and_no_other(state: Any, begin: Begin, path: Path) -> None:
    scenario = profiles.h200(2)
    client = begin(scenario)
    scenario.gpus[0].state = state
    scenario.write(path)
    expected = CODES["GPU_IS_LOST" if state == "lost" else "RESET_REQUIRED"]
    about = (
        "Name(gpu)",
        "PowerUsage(gpu)",
        "FieldValues(gpu, [185])",
        "HandleByIndex(0)",
        "ComputeRunningProcesses(gpu)",
    )
    assert [client.code(f"nvml.nvmlDeviceGet{each}") for each in about] == [expected] * len(about)
    assert client.ask("nvml.nvmlDeviceGetCount()") == 2
    assert client.ask("nvml.nvmlDeviceGetPowerUsage(nvml.nvmlDeviceGetHandleByIndex(1))") == 630_000
    scenario.gpus[0].state = "ok"
    scenario.write(path)
    assert client.ask("nvml.nvmlDeviceGetPowerUsage(gpu)") == 630_000


def test_a_gpu_that_is_gone_is_lost(begin: Begin, path: Path) -> None:
    scenario = profiles.h200(2)
    client = begin(scenario)
    del scenario.gpus[0]
    scenario.write(path)
    assert client.code("nvml.nvmlDeviceGetName(gpu)") == CODES["GPU_IS_LOST"]


@pytest.mark.parametrize("global_lock", [False, True])
def test_a_hanging_call_comes_back_when_it_is_let(global_lock: bool, begin: Begin, path: Path) -> None:
    scenario = profiles.h200(2)
    scenario.global_lock = global_lock
    client = begin(scenario)
    client.ask(THREADS)
    scenario.hang("nvmlDeviceGetPowerUsage", scenario.gpus[0])
    scenario.write(path)
    client.ask("later('nvml.nvmlDeviceGetPowerUsage(gpu)', 'hanging')")
    time.sleep(0.1)
    client.ask("later('nvml.nvmlDeviceGetPowerUsage(other)', 'other')")
    if global_lock:  # as in the real driver, where one call at a time is answered
        client.ask("time.sleep(0.2)")
        assert client.ask("ended") == {}
    else:
        assert client.ask("wait_for(1)") == {"other": 630_000}
    scenario.release()
    scenario.write(path)
    assert client.ask("wait_for(2)") == {"hanging": 630_000, "other": 630_000}


@pytest.mark.parametrize("what", ["GPU_IS_LOST", "UNINITIALIZED"])
def test_a_gpu_or_the_driver_may_go_while_a_call_hangs(what: str, begin: Begin, path: Path) -> None:
    scenario = profiles.h200(2)
    scenario.hang("*", scenario.gpus[0])
    client = begin(profiles.h200(2))
    client.ask(THREADS)
    scenario.write(path)
    client.ask("later('nvml.nvmlDeviceGetName(gpu)', 'name')")
    client.ask("time.sleep(0.1)")
    assert client.ask("ended") == {}
    if what == "GPU_IS_LOST":
        scenario.gpus[0].state = "lost"
    else:
        scenario.broken = what
    scenario.release()
    scenario.write(path)
    assert client.ask("wait_for(1)") == {"name": -CODES[what]}


def test_a_slow_call_takes_its_time(begin: Begin) -> None:
    scenario = profiles.h200(2)
    scenario.faults.append(Fault("nvmlDeviceGetPowerUsage", GPU, slow_ms=3000))
    client = begin(scenario)
    client.ask(THREADS)
    duration = "(lambda began: (nvml.nvmlDeviceGetPowerUsage({}), time.perf_counter() - began)[1])(time.perf_counter())"
    assert client.ask(duration.format("gpu")) >= 3.0
    assert client.ask(duration.format("other")) < 3.0


def test_a_call_fails_for_the_gpus_it_is_told_for(begin: Begin) -> None:
    scenario = profiles.h200(2)
    scenario.fail("nvmlDeviceGetPowerUsage", "NO_PERMISSION", scenario.gpus[1])
    scenario.fail("nvmlDeviceGetTemperature", "UNKNOWN")
    scenario.fail("nvmlSystemGetDriverVersion", "NOT_SUPPORTED")
    client = begin(scenario)
    client.ask("other = nvml.nvmlDeviceGetHandleByIndex(1)")
    assert client.code("nvml.nvmlDeviceGetPowerUsage(gpu)") == 0
    assert client.code("nvml.nvmlDeviceGetPowerUsage(other)") == CODES["NO_PERMISSION"]
    assert client.code("nvml.nvmlDeviceGetTemperature(gpu, 0)") == CODES["UNKNOWN"]
    assert client.code("nvml.nvmlSystemGetDriverVersion()") == CODES["NOT_SUPPORTED"]


@pytest.mark.parametrize("code", ["DRIVER_NOT_LOADED", "LIB_RM_VERSION_MISMATCH", "NO_PERMISSION"])
def test_the_driver_may_not_begin_at_all(code: str, begin: Begin) -> None:
    client = begin(Scenario(init=code), init=False)
    assert client.code("nvml.nvmlInit()") == client.code("nvml.nvmlInitWithFlags(0)") == CODES[code]
    assert client.code("nvml.nvmlDeviceGetCount()") == CODES["UNINITIALIZED"]


def test_a_driver_that_is_replaced_answers_nothing_more(begin: Begin, path: Path) -> None:
    scenario = profiles.h200(1)
    client = begin(scenario)
    scenario.broken = "LIB_RM_VERSION_MISMATCH"
    scenario.write(path)
    for call in ("nvmlDeviceGetName(gpu)", "nvmlDeviceGetCount()", "nvmlInit()", "nvmlShutdown()"):
        assert client.code(f"nvml.{call}") == CODES["LIB_RM_VERSION_MISMATCH"]


def test_nothing_is_answered_before_and_after_use(begin: Begin) -> None:
    client = begin(profiles.h200(1), init=False)
    assert client.code("nvml.nvmlDeviceGetCount()") == CODES["UNINITIALIZED"]
    client.ask("nvml.nvmlInit()")
    client.ask("nvml.nvmlInit()")
    client.ask("nvml.nvmlShutdown()")
    assert client.ask("nvml.nvmlDeviceGetCount()") == 1
    client.ask("nvml.nvmlShutdown()")
    assert client.code("nvml.nvmlDeviceGetCount()") == client.code("nvml.nvmlShutdown()") == CODES["UNINITIALIZED"]


@pytest.mark.parametrize(("code", "words"), [(9, "Driver Not Loaded"), (15, "GPU is lost"), (999, "Unknown Error")])
def test_errors_have_the_words_of_the_real_library(code: int, words: str, begin: Begin) -> None:
    assert begin(Scenario()).ask(f"nvml.nvmlErrorString({code})") == words


def test_without_a_scenario_there_is_no_driver(begin: Begin, path: Path) -> None:
    client = begin(Scenario(), init=False)
    path.unlink()
    assert client.code("nvml.nvmlInit()") == CODES["DRIVER_NOT_LOADED"]
