"""Hanging calls and events of the fake driver library."""

import time
from pathlib import Path

import pytest

from tests.fakenvml import Scenario, profiles
from tests.fakenvml.client import THREADS, StartClient
from tests.fakenvml.scenario import CODES

GPU = profiles.uuid_of(0)
OTHER = profiles.uuid_of(1)


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


def test_without_a_scenario_there_is_no_driver(start_client: StartClient, path: Path) -> None:
    client = start_client(Scenario(), init=False)
    path.unlink()
    assert client.code("nvml.nvmlInit()") == CODES["DRIVER_NOT_LOADED"]


WATCH = """
def watch():
    events = nvml.nvmlEventSetCreate()
    for i in range(nvml.nvmlDeviceGetCount()):
        nvml.nvmlDeviceRegisterEvents(nvml.nvmlDeviceGetHandleByIndex(i), nvml.nvmlEventTypeXidCriticalError, events)
    return events
def next_event(events, wait=nvml.nvmlEventSetWait_v2):
    it = wait(events, 300)
    return nvml.nvmlDeviceGetUUID(it.device), it.eventType, it.eventData, it.gpuInstanceId, it.computeInstanceId
"""


def test_an_event_is_returned_once_to_each_set(start_client: StartClient, path: Path) -> None:
    scenario = profiles.h200(2)
    scenario.xid(13, scenario.gpus[0])
    client = start_client(scenario)
    client.ask(WATCH)
    client.ask("first, second = watch(), watch()")
    # Events from before the creation of the set are never returned.
    assert client.code("next_event(first)") == CODES["TIMEOUT"]
    scenario.xid(79, scenario.gpus[1])
    scenario.xid(48, scenario.gpus[0], gpu_instance=5, compute_instance=0)
    scenario.write(path)
    expected = [[OTHER, 8, 79, 0xFFFFFFFF, 0xFFFFFFFF], [GPU, 8, 48, 5, 0]]
    assert [client.ask("next_event(first)"), client.ask("next_event(first)")] == expected
    assert client.code("next_event(first)") == CODES["TIMEOUT"]
    assert [client.ask("next_event(second)"), client.ask("next_event(second)")] == expected


def test_a_wait_for_events_does_not_block_other_calls(start_client: StartClient) -> None:
    scenario = profiles.h200(2)
    scenario.global_lock = True
    client = start_client(scenario)
    client.ask(THREADS + WATCH)
    client.ask("later('nvml.nvmlEventSetWait_v2(watch(), 60_000)', 'event')")
    client.ask("time.sleep(0.1)")
    client.ask("later('nvml.nvmlDeviceGetPowerUsage(gpu)', 'power')")
    assert client.ask("wait_for(1)") == {"power": 630_000}
