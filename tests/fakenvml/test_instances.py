"""Visible GPUs and MIG instances."""

from pathlib import Path

from tests.fakenvml import (
    FakeProcess,
    profiles,
)
from tests.fakenvml.client import StartClient
from tests.fakenvml.scenario import CODES

GPU = profiles.uuid_of(0)


def test_hidden_gpus_are_unknown_and_the_others_are_renumbered(start_client: StartClient) -> None:
    scenario = profiles.h200(4)
    scenario.visible = (3, 1)
    client = start_client(scenario)
    uuids = "[nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(nvml.nvmlDeviceGetCount())]"
    assert client.ask(uuids) == [profiles.uuid_of(3), profiles.uuid_of(1)]
    assert client.ask("nvml.nvmlDeviceGetIndex(gpu)") == 0
    assert client.ask("nvml.nvmlDeviceGetMinorNumber(gpu)") == 3
    assert client.code(f"nvml.nvmlDeviceGetHandleByUUID(b'{GPU}')") == CODES["NOT_FOUND"]


def test_instances_are_found_in_their_slots(start_client: StartClient) -> None:
    client = start_client(profiles.mig())
    assert client.ask("nvml.nvmlDeviceGetMigMode(gpu)") == [1, 1]
    assert client.ask("nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)") == 7
    slots = [client.code(f"nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, {slot})") for slot in range(8)]
    assert slots == [0, 0, 6, 0, 6, 6, 6, 2]
    client.ask("it = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 3)")
    uuid = profiles.uuid_of(0x13, "MIG")
    assert client.ask("(nvml.nvmlDeviceGetUUID(it), nvml.nvmlDeviceGetIndex(it))") == [uuid, 3]
    assert client.ask("(nvml.nvmlDeviceGetGpuInstanceId(it), nvml.nvmlDeviceGetComputeInstanceId(it))") == [13, 0]
    assert client.ask("(nvml.nvmlDeviceIsMigDeviceHandle(it), nvml.nvmlDeviceIsMigDeviceHandle(gpu))") == [1, 0]
    parent = "nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(it)"
    assert client.ask(f"nvml.nvmlDeviceGetUUID({parent})") == GPU
    assert client.ask(f"nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByUUID(b'{uuid}'))") == uuid
    assert client.ask("nvml.nvmlDeviceGetPciInfo(it)")["busId"] == "00000000:18:00.0"
    assert client.ask("nvml.nvmlDeviceGetMemoryInfo(it)")["total"] == 9984 << 20
    attributes = client.ask("nvml.nvmlDeviceGetAttributes_v2(it)")
    assert attributes["multiprocessorCount"] == 16
    assert (attributes["gpuInstanceSliceCount"], attributes["computeInstanceSliceCount"]) == (1, 1)
    assert attributes["memorySizeMB"] == 9984
    assert client.code("nvml.nvmlDeviceGetUtilizationRates(it)") == CODES["NOT_SUPPORTED"]
    assert client.code("nvml.nvmlDeviceGetProcessUtilization(it, 0)") == CODES["NOT_SUPPORTED"]


def test_processes_of_an_instance_are_also_listed_on_its_gpu(start_client: StartClient) -> None:
    scenario = profiles.mig()
    scenario.gpus[0].migs[1].processes = [FakeProcess(100, 5)]
    client = start_client(scenario)
    found = [{"pid": 100, "usedGpuMemory": 5, "gpuInstanceId": 5, "computeInstanceId": 0}]
    assert client.ask("nvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu)") == found
    for slot, expected in ((0, []), (1, found)):
        client.ask(f"it = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, {slot})")
        assert client.ask("nvml.nvmlDeviceGetComputeRunningProcesses_v3(it)") == expected


def test_instance_handles_are_stale_after_repartitioning(start_client: StartClient, path: Path) -> None:
    scenario = profiles.mig()
    client = start_client(scenario)
    client.ask("it = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)")
    scenario.gpus[0].partition += 1
    scenario.write(path)
    assert client.code("nvml.nvmlDeviceGetName(it)") == CODES["INVALID_ARGUMENT"]
    assert client.code("nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0))") == 0
    assert client.code("nvml.nvmlDeviceGetName(gpu)") == 0


def test_instances_are_lost_with_their_gpu(start_client: StartClient, path: Path) -> None:
    scenario = profiles.mig()
    client = start_client(scenario)
    client.ask("it = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)")
    scenario.gpus[0].state = "lost"
    scenario.write(path)
    assert client.code("nvml.nvmlDeviceGetMemoryInfo(it)") == CODES["GPU_IS_LOST"]
