"""Values of the fake driver library, read through the real binding."""

import time
from pathlib import Path
from typing import Any

from tests.fakenvml import FakeGpu, Rate, Scenario, profiles
from tests.fakenvml.client import StartClient
from tests.fakenvml.scenario import CODES, VALUES

GPU = profiles.uuid_of(0)


def one_gpu(**values: Any) -> Scenario:
    """A scenario with a GPU that has these values."""
    return Scenario(gpus=[FakeGpu(uuid=GPU, **values)])


def test_an_unknown_line_makes_every_call_fail(start_client: StartClient, path: Path) -> None:
    client = start_client(one_gpu())
    path.write_text(one_gpu().text() + "colour green\n")
    assert client.code("nvml.nvmlDeviceGetCount()") == CODES["UNKNOWN"]


NUMBERS = {
    "PowerUsage(gpu)": "power_mw",
    "EnforcedPowerLimit(gpu)": "power_limit_mw",
    "TotalEnergyConsumption(gpu)": "energy_mj",
    "Temperature(gpu, 0)": "temperature_c",
    "TemperatureV(gpu, 0)": "temperature_c",
    "ClockInfo(gpu, nvml.NVML_CLOCK_GRAPHICS)": "clock_graphics_mhz",
    "ClockInfo(gpu, nvml.NVML_CLOCK_SM)": "clock_sm_mhz",
    "ClockInfo(gpu, nvml.NVML_CLOCK_MEM)": "clock_memory_mhz",
    "ClockInfo(gpu, nvml.NVML_CLOCK_VIDEO)": "clock_video_mhz",
    "CurrentClocksEventReasons(gpu)": "event_reasons",
    "CurrentClocksThrottleReasons(gpu)": "event_reasons",
    "SupportedEventTypes(gpu)": "event_types",
    "TotalEccErrors(gpu, 0, 0)": "ecc_corrected",
    "TotalEccErrors(gpu, 1, 0)": "ecc_uncorrected",
    "RemappedRows(gpu)[0]": "rows_corrected",
    "RemappedRows(gpu)[1]": "rows_uncorrected",
    "RemappedRows(gpu)[2]": "rows_pending",
    "RemappedRows(gpu)[3]": "rows_failure",
    "RetiredPages(gpu, 0).__len__()": "pages_single_bit",
    "RetiredPages(gpu, 1).__len__()": "pages_double_bit",
    "RetiredPagesPendingStatus(gpu)": "pages_pending",
    "PcieReplayCounter(gpu)": "pcie_replays",
    "CurrPcieLinkGeneration(gpu)": "pcie_generation",
    "MaxPcieLinkGeneration(gpu)": "pcie_generation_max",
    "CurrPcieLinkWidth(gpu)": "pcie_width",
    "MaxPcieLinkWidth(gpu)": "pcie_width_max",
    "PcieThroughput(gpu, nvml.NVML_PCIE_UTIL_TX_BYTES)": "pcie_tx_kib_s",
    "PcieThroughput(gpu, nvml.NVML_PCIE_UTIL_RX_BYTES)": "pcie_rx_kib_s",
    "FanSpeed(gpu)": "fan_percent",
    "PersistenceMode(gpu)": "persistence",
    "MigMode(gpu)[0]": "mig_mode",
    "MaxMigDeviceCount(gpu)": "mig_max",
    "UtilizationRates(gpu).gpu": "utilization",
    "UtilizationRates(gpu).memory": "memory_utilization",
    "CudaComputeCapability(gpu)[1] + 10 * nvml.nvmlDeviceGetCudaComputeCapability(gpu)[0]": "compute_capability",
    "GpuInstanceId(gpu)": "gpu_instance",
}


def test_each_value_is_returned_by_its_call(start_client: StartClient) -> None:
    numbers: dict[str, Any] = {name: 11 + place for place, name in enumerate(VALUES)}
    numbers["energy_mj"] = (1 << 62) + 1  # no bit is lost
    client = start_client(one_gpu(**numbers))
    found = {call: client.ask(f"nvml.nvmlDeviceGet{call}") for call in NUMBERS}
    assert found == {call: numbers[name] for call, name in NUMBERS.items()}


def test_a_missing_value_is_not_supported(start_client: StartClient) -> None:
    client = start_client(one_gpu())
    found = {call: client.code(f"nvml.nvmlDeviceGet{call}") for call in NUMBERS}
    assert found == dict.fromkeys(NUMBERS, CODES["NOT_SUPPORTED"])


def test_the_first_memory_call_counts_reserved_memory_as_used(start_client: StartClient) -> None:
    client = start_client(one_gpu(memory_total=1000, memory_used=300, memory_reserved=50))
    assert client.ask("nvml.nvmlDeviceGetMemoryInfo(gpu)") == {"total": 1000, "free": 650, "used": 350}
    assert client.ask("nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2)") == {
        "version": 0x02000028,
        "total": 1000,
        "reserved": 50,
        "free": 650,
        "used": 300,
    }


def test_counters_continue_when_the_scenario_is_rewritten(start_client: StartClient, path: Path) -> None:
    scenario = one_gpu(energy_mj=Rate(1000, 500_000))
    client, begun = start_client(scenario), time.monotonic()
    first = client.ask("nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)")
    time.sleep(0.1)
    scenario.gpus[0].temperature_c = 50
    scenario.write(path)
    rise = client.ask("nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)") - first
    assert first >= 1000
    assert 50_000 <= rise <= 500_000 * (time.monotonic() - begun)
