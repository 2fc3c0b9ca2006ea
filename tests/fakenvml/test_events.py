"""Events and GPM samples of the fake driver library."""

from pathlib import Path
from typing import Any

from tests.fakenvml import (
    FakeGpu,
    Scenario,
    profiles,
)
from tests.fakenvml.client import THREADS, StartClient
from tests.fakenvml.scenario import CODES

GPU = profiles.uuid_of(0)
OTHER = profiles.uuid_of(1)


def two_gpus(**values: Any) -> Scenario:
    """A scenario with two_gpus equal GPUs."""
    return Scenario(gpus=[FakeGpu(uuid=GPU, **values), FakeGpu(uuid=OTHER, pci_bus_id="00000001:3b:00.0", **values)])


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


def test_an_event_ends_a_wait(start_client: StartClient, path: Path) -> None:
    scenario = profiles.h200(1)
    client = start_client(scenario)
    client.ask(WATCH)
    client.ask("events = watch()")
    client.send("nvml.nvmlEventSetWait_v2(events, 60_000).eventData")
    assert not client.answered(0.2)
    scenario.xid(31, scenario.gpus[0])
    scenario.write(path)
    assert client.answer() == 31


def test_a_wait_for_events_does_not_block_other_calls(start_client: StartClient) -> None:
    scenario = profiles.h200(2)
    scenario.global_lock = True
    client = start_client(scenario)
    client.ask(THREADS + WATCH)
    client.ask("later('nvml.nvmlEventSetWait_v2(watch(), 60_000)', 'event')")
    client.ask("time.sleep(0.1)")
    client.ask("later('nvml.nvmlDeviceGetPowerUsage(gpu)', 'power')")
    assert client.ask("wait_for(1)") == {"power": 630_000}


def test_registering_an_unsupported_event_leaves_the_set_usable(start_client: StartClient) -> None:
    scenario = profiles.h200(2)
    scenario.gpus[0].event_types = None
    scenario.gpus[1].event_types = 8
    client = start_client(scenario)
    client.ask("events, other = nvml.nvmlEventSetCreate(), nvml.nvmlDeviceGetHandleByIndex(1)")
    assert client.code("nvml.nvmlDeviceRegisterEvents(gpu, 8, events)") == CODES["NOT_SUPPORTED"]
    assert client.code("nvml.nvmlDeviceRegisterEvents(other, 9, events)") == CODES["NOT_SUPPORTED"]
    assert client.code("nvml.nvmlDeviceRegisterEvents(other, 8, events)") == 0
    client.ask("nvml.nvmlEventSetFree(events)")
    assert client.code("nvml.nvmlEventSetWait_v2(events, 1)") == CODES["INVALID_ARGUMENT"]


GPM = """
import time
def sample(take, *arguments):
    it = nvml.nvmlGpmSampleAlloc()
    take(*arguments, it)
    return it
def metrics(first, second, *ids):
    get = nvml.c_nvmlGpmMetricsGet_t()
    get.version, get.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(ids)
    get.sample1, get.sample2 = first, second
    for place, id in enumerate(ids):
        get.metrics[place].metricId = id
    nvml.nvmlGpmMetricsGet(get)
    return [(it.nvmlReturn, it.value) for it in get.metrics[:len(ids)]]
"""


def test_metrics_cover_the_time_between_two_samples(start_client: StartClient, path: Path) -> None:
    scenario = profiles.h200(1)
    client = start_client(scenario)
    client.ask(GPM)
    assert client.ask("nvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice") == 1
    client.ask("first = sample(nvml.nvmlGpmSampleGet, gpu)")
    assert client.code("metrics(first, first, 2)") == CODES["INVALID_ARGUMENT"]
    scenario.gpus[0].gpm[2] = 68.25
    scenario.write(path)
    client.ask("time.sleep(0.11)")
    client.ask("second = sample(nvml.nvmlGpmSampleGet, gpu)")
    assert client.ask("metrics(first, second, 2, 61, 150)") == [[0, 78.25], [0, 205_000.0], [3, 0.0]]
    assert client.code("metrics(second, first, 2)") == CODES["INVALID_ARGUMENT"]
    client.ask("nvml.nvmlGpmSampleFree(first)")


def test_an_instance_has_its_own_metrics(start_client: StartClient) -> None:
    client = start_client(profiles.mig())
    client.ask(GPM)
    client.ask("it = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 1)")
    client.ask("first, third = sample(nvml.nvmlGpmMigSampleGet, gpu, 5), sample(nvml.nvmlGpmSampleGet, it)")
    client.ask("time.sleep(0.11)")
    client.ask("second, fourth = sample(nvml.nvmlGpmMigSampleGet, gpu, 5), sample(nvml.nvmlGpmSampleGet, it)")
    assert client.ask("metrics(first, second, 2)") == client.ask("metrics(third, fourth, 2)") == [[0, 71.0]]
    assert client.code("sample(nvml.nvmlGpmMigSampleGet, gpu, 4)") == CODES["INVALID_ARGUMENT"]


def test_a_gpu_without_metrics_is_not_supported(start_client: StartClient) -> None:
    client = start_client(two_gpus())
    client.ask(GPM)
    assert client.ask("nvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice") == 0
    assert client.code("sample(nvml.nvmlGpmSampleGet, gpu)") == CODES["NOT_SUPPORTED"]
