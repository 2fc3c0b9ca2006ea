"""Values of the fake driver library, read through the real binding."""

import time
from pathlib import Path
from typing import Any

from tests.fakenvml import (
    ALL_LINKS,
    FakeGpu,
    FieldValue,
    Rate,
    Scenario,
    profiles,
)
from tests.fakenvml.client import StartClient
from tests.fakenvml.scenario import CODES, DOUBLE, SINT, SLONGLONG, UINT, ULONG, ULONGLONG, USHORT, VALUES

GPU = profiles.uuid_of(0)
OTHER = profiles.uuid_of(1)


def two_gpus(**values: Any) -> Scenario:
    """A scenario with two_gpus equal GPUs."""
    return Scenario(gpus=[FakeGpu(uuid=GPU, **values), FakeGpu(uuid=OTHER, pci_bus_id="00000001:3b:00.0", **values)])


def test_the_library_knows_every_value_of_a_scenario(start_client: StartClient) -> None:
    all_ones: dict[str, Any] = dict.fromkeys(VALUES, 1)
    client = start_client(Scenario(gpus=[FakeGpu(uuid=GPU, **all_ones)]))
    assert client.ask("nvml.nvmlDeviceGetCount()") == 1


def test_an_unknown_line_makes_every_call_fail(start_client: StartClient, path: Path) -> None:
    client = start_client(two_gpus())
    path.write_text(two_gpus().text() + "colour green\n")
    assert client.code("nvml.nvmlDeviceGetCount()") == CODES["UNKNOWN"]


def test_versions_come_from_the_scenario(start_client: StartClient) -> None:
    client = start_client(Scenario(driver="535.104.05", cuda=(12, 2)))
    found = client.ask(
        "(nvml.nvmlSystemGetDriverVersion(), nvml.nvmlSystemGetCudaDriverVersion_v2(), nvml.nvmlDeviceGetCount())"
    )
    assert found == ["535.104.05", 12020, 0]
    assert client.ask("nvml.nvmlSystemGetNVMLVersion()") == "12.535.104.05"


def test_a_gpu_is_found_by_index_uuid_and_pci_address(start_client: StartClient) -> None:
    client = start_client(two_gpus(name="NVIDIA H200", minor=7, pci_device_id=0x233510DE))
    for search in ("ByIndex(1)", f"ByUUID(b'{OTHER}')", "ByPciBusId(b'0001:3B:00.0')"):
        client.ask(f"it = nvml.nvmlDeviceGetHandle{search}")
        assert client.ask("(nvml.nvmlDeviceGetUUID(it), nvml.nvmlDeviceGetIndex(it))") == [OTHER, 1]
    assert client.ask("nvml.nvmlDeviceGetName(it)") == "NVIDIA H200"
    assert client.ask("nvml.nvmlDeviceGetMinorNumber(it)") == 7
    assert client.ask("nvml.nvmlDeviceGetPciInfo(it)") == {
        "busIdLegacy": "0001:3B:00.0",
        "domain": 1,
        "bus": 0x3B,
        "device": 0,
        "pciDeviceId": 0x233510DE,
        "pciSubSystemId": 0,
        "busId": "00000001:3B:00.0",
    }
    assert client.code("nvml.nvmlDeviceGetHandleByUUID(b'GPU-no')") == CODES["NOT_FOUND"]
    assert client.code("nvml.nvmlDeviceGetHandleByIndex(2)") == CODES["INVALID_ARGUMENT"]
    assert client.code("nvml.nvmlDeviceGetName(ctypes.c_void_p(0x1234))") == CODES["INVALID_ARGUMENT"]


NUMBERS = {
    "PowerUsage(gpu)": "power_mw",
    "EnforcedPowerLimit(gpu)": "power_limit_mw",
    "PowerManagementLimit(gpu)": "power_management_limit_mw",
    "TotalEnergyConsumption(gpu)": "energy_mj",
    "Temperature(gpu, 0)": "temperature_c",
    "TemperatureV(gpu, 0)": "temperature_c",
    "ClockInfo(gpu, nvml.NVML_CLOCK_GRAPHICS)": "clock_graphics_mhz",
    "ClockInfo(gpu, nvml.NVML_CLOCK_SM)": "clock_sm_mhz",
    "ClockInfo(gpu, nvml.NVML_CLOCK_MEM)": "clock_memory_mhz",
    "ClockInfo(gpu, nvml.NVML_CLOCK_VIDEO)": "clock_video_mhz",
    "MaxClockInfo(gpu, nvml.NVML_CLOCK_GRAPHICS)": "max_clock_graphics_mhz",
    "MaxClockInfo(gpu, nvml.NVML_CLOCK_SM)": "max_clock_sm_mhz",
    "MaxClockInfo(gpu, nvml.NVML_CLOCK_MEM)": "max_clock_memory_mhz",
    "MaxClockInfo(gpu, nvml.NVML_CLOCK_VIDEO)": "max_clock_video_mhz",
    "CurrentClocksEventReasons(gpu)": "event_reasons",
    "CurrentClocksThrottleReasons(gpu)": "event_reasons",
    "SupportedEventTypes(gpu)": "event_types",
    "TotalEccErrors(gpu, 0, 0)": "ecc_corrected",
    "TotalEccErrors(gpu, 1, 0)": "ecc_uncorrected",
    "TotalEccErrors(gpu, 0, 1)": "ecc_corrected_aggregate",
    "TotalEccErrors(gpu, 1, 1)": "ecc_uncorrected_aggregate",
    "CurrentEccMode(gpu)": "ecc_mode",
    "RemappedRows(gpu)[0]": "rows_corrected",
    "RemappedRows(gpu)[1]": "rows_uncorrected",
    "RemappedRows(gpu)[2]": "rows_pending",
    "RemappedRows(gpu)[3]": "rows_failure",
    "RetiredPages(gpu, 0).__len__()": "pages_single_bit",
    "RetiredPages_v2(gpu, 1).__len__()": "pages_double_bit",
    "RetiredPagesPendingStatus(gpu)": "pages_pending",
    "PcieReplayCounter(gpu)": "pcie_replays",
    "CurrPcieLinkGeneration(gpu)": "pcie_generation",
    "MaxPcieLinkGeneration(gpu)": "pcie_generation_max",
    "CurrPcieLinkWidth(gpu)": "pcie_width",
    "MaxPcieLinkWidth(gpu)": "pcie_width_max",
    "PcieThroughput(gpu, nvml.NVML_PCIE_UTIL_TX_BYTES)": "pcie_tx_kib_s",
    "PcieThroughput(gpu, nvml.NVML_PCIE_UTIL_RX_BYTES)": "pcie_rx_kib_s",
    "FanSpeed(gpu)": "fan_percent",
    "NumFans(gpu)": "fans",
    "PersistenceMode(gpu)": "persistence",
    "MinorNumber(gpu)": "minor",
    "MigMode(gpu)[0]": "mig_mode",
    "MaxMigDeviceCount(gpu)": "mig_max",
    "UtilizationRates(gpu).gpu": "utilization",
    "UtilizationRates(gpu).memory": "memory_utilization",
    "BAR1MemoryInfo(gpu).bar1Total": "bar1_total",
    "BAR1MemoryInfo(gpu).bar1Used": "bar1_used",
    "CudaComputeCapability(gpu)[1] + 10 * nvml.nvmlDeviceGetCudaComputeCapability(gpu)[0]": "compute_capability",
    "GpuInstanceId(gpu)": "gpu_instance",
    "ComputeInstanceId(gpu)": "compute_instance",
}


def test_each_value_is_returned_by_its_call(start_client: StartClient) -> None:
    numbers: dict[str, Any] = {name: 11 + place for place, name in enumerate(VALUES)}
    client = start_client(Scenario(gpus=[FakeGpu(uuid=GPU, **numbers)]))
    found = {call: client.ask(f"nvml.nvmlDeviceGet{call}") for call in NUMBERS}
    assert found == {call: numbers[name] for call, name in NUMBERS.items()}


def test_a_missing_value_is_not_supported(start_client: StartClient) -> None:
    client = start_client(two_gpus())
    found = {call: client.code(f"nvml.nvmlDeviceGet{call}") for call in NUMBERS}
    assert found == dict.fromkeys(NUMBERS, CODES["NOT_SUPPORTED"])


def test_large_counters_keep_all_bits(start_client: StartClient) -> None:
    assert (
        start_client(two_gpus(energy_mj=(1 << 62) + 1)).ask("nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)")
        == (1 << 62) + 1
    )


def test_the_first_memory_call_counts_reserved_memory_as_used(start_client: StartClient) -> None:
    client = start_client(two_gpus(memory_total=1000, memory_used=300, memory_reserved=50))
    assert client.ask("nvml.nvmlDeviceGetMemoryInfo(gpu)") == {"total": 1000, "free": 650, "used": 350}
    assert client.ask("nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2)") == {
        "version": 0x02000028,
        "total": 1000,
        "reserved": 50,
        "free": 650,
        "used": 300,
    }


def test_each_field_has_its_own_type_and_error(start_client: StartClient) -> None:
    fields: dict[int | tuple[int, int], Any] = {
        1: FieldValue(2.5, DOUBLE),
        2: FieldValue(4_000_000_000, UINT),
        3: FieldValue(1 << 40, ULONG),
        4: FieldValue(1 << 60, ULONGLONG),
        5: FieldValue(-(1 << 40), SLONGLONG),
        6: FieldValue(-3, SINT),
        7: FieldValue(65535, USHORT),
        185: 512_000,
        (138, 4): 44,
        (138, ALL_LINKS): 99,
        200: FieldValue(code="NO_PERMISSION"),
    }
    client = start_client(two_gpus(fields=fields))
    found = client.ask(f"nvml.nvmlDeviceGetFieldValues(gpu, [1, 2, 3, 4, 5, 6, 7, 185, (138, 4), (138, {ALL_LINKS})])")
    assert [(each["valueType"], each["value"], each["nvmlReturn"]) for each in found] == [
        (DOUBLE, 2.5, 0),
        (UINT, 4_000_000_000, 0),
        (ULONG, 1 << 40, 0),
        (ULONGLONG, 1 << 60, 0),
        (SLONGLONG, -(1 << 40), 0),
        (SINT, -3, 0),
        (USHORT, 65535, 0),
        (UINT, 512_000, 0),
        (ULONGLONG, 44, 0),
        (ULONGLONG, 99, 0),
    ]
    assert abs(found[0]["timestamp"] / 1e6 - time.time()) < 20
    found = client.ask("nvml.nvmlDeviceGetFieldValues(gpu, [186, (138, 5), 400, 200, 185])")
    assert [each["nvmlReturn"] for each in found] == [3, 3, 2, 4, 0]


def test_violations_and_links_come_from_the_scenario(start_client: StartClient) -> None:
    client = start_client(profiles.h200(1))
    violation = client.ask("nvml.nvmlDeviceGetViolationStatus(gpu, nvml.NVML_PERF_POLICY_POWER)")
    assert 12_000_000_000 <= violation["violationTime"] < 14_000_000_000
    assert abs(violation["referenceTime"] / 1e6 - time.time()) < 20
    assert client.ask("[nvml.nvmlDeviceGetNvLinkState(gpu, link) for link in range(18)]") == [1] * 18
    assert client.code("nvml.nvmlDeviceGetNvLinkState(gpu, 18)") == CODES["NOT_SUPPORTED"]
    client = start_client(two_gpus(nvlink_errors={(2, 3): 17}))
    assert client.ask("nvml.nvmlDeviceGetNvLinkErrorCounter(gpu, 2, 3)") == 17
    assert client.code("nvml.nvmlDeviceGetNvLinkErrorCounter(gpu, 3, 2)") == CODES["NOT_SUPPORTED"]


def test_counters_continue_when_the_scenario_is_rewritten(start_client: StartClient, path: Path) -> None:
    scenario = two_gpus(energy_mj=Rate(1000, 500_000))
    client = start_client(scenario)
    first = client.ask("nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)")
    time.sleep(0.1)
    scenario.gpus[0].temperature_c = 50
    scenario.write(path)
    rise = client.ask("nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)") - first
    assert first >= 1000
    assert 50_000 <= rise < 5_000_000


def test_a_change_of_rate_causes_no_jump(start_client: StartClient, path: Path) -> None:
    scenario = profiles.h200(1)
    scenario.start -= 1000
    client = start_client(scenario)
    first = client.ask("nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)")
    field = client.ask("nvml.nvmlDeviceGetFieldValues(gpu, [74])[0]")["value"]
    scenario.rebase()
    energy = scenario.gpus[0].energy_mj
    assert isinstance(energy, Rate)
    scenario.gpus[0].energy_mj = energy._replace(per_second=0)
    scenario.write(path)
    second = client.ask("nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)")
    assert first >= 80_000_000_000 + 630_000_000
    assert first <= second < first + 20 * 630_000
    assert field <= client.ask("nvml.nvmlDeviceGetFieldValues(gpu, [74])[0]")["value"] < field + 20 * 20_000_000
    assert client.ask("nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)") == second


def test_pcie_throughput_takes_twenty_milliseconds(start_client: StartClient) -> None:
    client = start_client(profiles.h200(1))
    began = time.perf_counter()
    client.ask("nvml.nvmlDeviceGetPcieThroughput(gpu, 0)")
    assert time.perf_counter() - began >= 0.02
