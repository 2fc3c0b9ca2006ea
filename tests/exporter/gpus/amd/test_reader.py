"""The AMD reader, with a fake ``amdsmi`` package."""

import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from exporter.gpus.amd import values
from exporter.gpus.amd.reader import METRICS_INTERVAL_S, TRIES, AmdReader
from exporter.gpus.records import (
    DriverState,
    Gpu,
    GpuActivity,
    GpuCondition,
    GpuDriver,
    GpuDriverReplaced,
    GpuFailed,
    GpuProcess,
    GpuReader,
    GpuUnavailable,
    ThrottleReason,
)
from exporter.gpus.vendors_reader import open_amd
from tests.exporter.gpus.amd import fake_amdsmi
from tests.exporter.gpus.amd.fake_amdsmi import GIB, MIB, FakeAmdGpu, FakeAmdSmi, links, metrics, process
from tests.exporter.gpus.gpu_reader_contract import GpuReaderContract, Make
from tests.support.exporter import SOON_S, FakeClock

Install = Callable[..., FakeAmdSmi]
StartedReader = tuple[AmdReader, Gpu]
Start = Callable[..., StartedReader]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Replaces ``amdsmi`` by a fake package with these GPUs."""

    def install_package(*gpus: FakeAmdGpu, without: tuple[str, ...] = ()) -> FakeAmdSmi:
        package = FakeAmdSmi(*gpus, without=without)
        monkeypatch.setitem(sys.modules, "amdsmi", package)
        return package

    return install_package


def open_reader(clock: FakeClock | None = None) -> AmdReader:
    """A reader after `open`."""
    reader = AmdReader(FakeClock() if clock is None else clock)
    reader.open()
    return reader


@pytest.fixture
def start(install: Install) -> Start:
    """Opens a reader of these GPUs; returns it with its first GPU."""

    def open_with(*gpus: FakeAmdGpu, clock: FakeClock | None = None, without: tuple[str, ...] = ()) -> StartedReader:
        install(*gpus, without=without)
        reader = open_reader(clock)
        return reader, reader.gpus()[0]

    return open_with


class TestKeepsTheContract(GpuReaderContract):
    """A machine with a busy MI300X, an idle one, and an older card that reports less."""

    @pytest.fixture
    def package(self, install: Install) -> FakeAmdSmi:
        busy = {
            "amdsmi_get_gpu_process_list": [process(4242, 100 * GIB), process(4243, 0)],
            "amdsmi_get_gpu_memory_usage": 101 * GIB,
            "amdsmi_get_gpu_activity": {"gfx_activity": 100, "umc_activity": 37, "mm_activity": "N/A"},
        }
        return install(FakeAmdGpu(0, answers=busy), FakeAmdGpu(1), FakeAmdGpu(2, answers=fake_amdsmi.MI210))

    @pytest.fixture
    def make(self, package: FakeAmdSmi) -> Make:
        return AmdReader

    @pytest.fixture
    def calls(self, package: FakeAmdSmi) -> Callable[[], Mapping[str, int]] | None:
        return lambda: package.fake_calls


def test_the_vendor_list_contains_amd() -> None:
    reader: GpuReader = open_amd()
    assert isinstance(reader, AmdReader)


def test_open_returns_the_versions_of_driver_and_rocm(install: Install) -> None:
    install(FakeAmdGpu())
    assert AmdReader().open() == GpuDriver("amd", "6.14.14", "7.0")


def test_the_rocm_version_is_unknown_with_an_older_package(install: Install) -> None:
    install(FakeAmdGpu(), without=("amdsmi_get_rocm_version",))
    assert AmdReader().open() == GpuDriver("amd", "6.14.14", None)


def test_a_machine_without_gpus_has_none(install: Install) -> None:
    install()
    assert open_reader().gpus() == ()


def test_gpus_are_in_hip_order_and_not_in_bus_order(install: Install) -> None:
    install(FakeAmdGpu(0, hip_id=1), FakeAmdGpu(1, hip_id=0))
    assert [(gpu.index, gpu.pci_bus_id) for gpu in open_reader().gpus()] == [
        ("0", "0000:25:00.0"),
        ("1", "0000:05:00.0"),
    ]


def test_gpus_are_in_bus_order_unless_all_have_a_hip_id(install: Install) -> None:
    install(FakeAmdGpu(0, hip_id=1), FakeAmdGpu(1, hip_id="N/A"))
    assert [gpu.pci_bus_id for gpu in open_reader().gpus()] == ["0000:05:00.0", "0000:25:00.0"]


@pytest.mark.parametrize(
    ("hip_uuid", "uuid"),
    [
        ("GPU-4b2c1a9f8d3e6f7a", "GPU-4b2c1a9f8d3e6f7a"),
        ("GPU-0000000000000000", "00ff74a1-0000-1000-80ff-52c7ee01df8f"),
        ("GPU-XX", "00ff74a1-0000-1000-80ff-52c7ee01df8f"),
        ("", "00ff74a1-0000-1000-80ff-52c7ee01df8f"),
    ],
)
def test_the_hip_uuid_is_used_if_it_is_valid(install: Install, hip_uuid: str, uuid: str) -> None:
    install(FakeAmdGpu(answers={"amdsmi_get_gpu_enumeration_info": {"hip_id": 0, "hip_uuid": hip_uuid}}))
    assert open_reader().gpus()[0].uuid == uuid


def test_partitions_of_one_gpu_have_different_uuids(install: Install) -> None:
    whole = {"hip_uuid": "GPU-4b2c1a9f8d3e6f7a"}
    install(
        *(
            FakeAmdGpu(
                number,
                answers={
                    "amdsmi_get_gpu_enumeration_info": {**whole, "hip_id": number},
                    "amdsmi_get_gpu_device_bdf": f"0000:05:00.{number}",
                },
            )
            for number in range(3)
        )
    )
    uuids = [gpu.uuid for gpu in open_reader().gpus()]
    assert uuids == ["GPU-4b2c1a9f8d3e6f7a", *(f"GPU-4b2c1a9f8d3e6f7a@0000:05:00.{number}" for number in (1, 2))]


def test_a_gpu_without_identifiers_is_named_by_its_bus_address(install: Install) -> None:
    none = dict.fromkeys(
        ("amdsmi_get_gpu_enumeration_info", "amdsmi_get_gpu_device_uuid", "amdsmi_get_gpu_asic_info"),
        fake_amdsmi.NOT_SUPPORTED,
    )
    install(FakeAmdGpu(answers=none))
    gpu = open_reader().gpus()[0]
    assert (gpu.uuid, gpu.name) == ("GPU-0000:05:00.0", "")


def test_an_mi300x_is_read_in_base_units(start: Start) -> None:
    reader, gpu = start(
        FakeAmdGpu(
            answers={
                "amdsmi_get_gpu_activity": {"gfx_activity": 87, "umc_activity": 31, "mm_activity": "N/A"},
                "amdsmi_get_gpu_total_ecc_count": {
                    "correctable_count": 3,
                    "uncorrectable_count": 1,
                    "deferred_count": 0,
                },
                "amdsmi_get_gpu_bad_page_info": [
                    {"value": number, "page_address": 4096 * number, "page_size": 4096, "status": status}
                    for number, status in enumerate((0, 0, 1))
                ],
            }
        )
    )
    assert (gpu.name, gpu.index, gpu.vendor) == ("AMD Instinct MI300X", "0", "amd")
    assert reader.activity(gpu) == GpuActivity(
        utilization_ratio=0.87,
        memory_utilization_ratio=0.31,
        memory_used_bytes=283 * MIB,
        memory_total_bytes=192 * GIB,
        power_instant_w=142.0,
        power_limit_w=750.0,
        energy_j=1_000_000_000 * 15.25899982452392578 / 1e6,
        temperature_c=41.0,
        memory_temperature_c=33.0,
        sm_clock_hz=132e6,
        memory_clock_hz=900e6,
        throttle_s={"power_cap": 0.0, "thermal": 0.0, "hw_thermal": 0.0},
    )
    assert reader.condition(gpu) == GpuCondition(
        ecc_corrected=3,
        ecc_uncorrected=1,
        pages_retired_uncorrected=2,
        pages_pending=True,
        pcie_replays=0,
        pcie_generation=5,
        pcie_generation_max=5,
        pcie_width=16,
        pcie_width_max=16,
        nvlink_rx_bytes=7000 * 1024,
        nvlink_tx_bytes=14000 * 1024,
    )


def test_an_older_card_reports_average_power_fan_and_edge_temperature(start: Start) -> None:
    reader, gpu = start(FakeAmdGpu(answers=fake_amdsmi.MI210))
    activity = reader.activity(gpu)
    assert (activity.power_average_w, activity.power_instant_w, activity.power_limit_w) == (39.0, None, 300.0)
    assert (activity.temperature_c, activity.throttle_s) == (38.0, {})
    assert "amdsmi_get_gpu_metrics_info" in reader.unsupported_calls()
    assert reader.condition(gpu).fan_ratio == 0.2
    assert reader.condition(gpu).nvlink_rx_bytes is None


def test_placeholders_are_not_values(start: Start) -> None:
    reader, gpu = start(
        FakeAmdGpu(
            answers={
                "amdsmi_get_gpu_activity": {"gfx_activity": 0xFFFF, "umc_activity": "N/A", "mm_activity": 0xFFFF},
                "amdsmi_get_power_info": {
                    "current_socket_power": 0xFFFF,
                    "average_socket_power": fake_amdsmi.LARGEST_32,
                    "power_limit": 0xFFFF,
                },
                "amdsmi_get_clock_info GFX": {"clk": "N/A", "max_clk": fake_amdsmi.LARGEST_32},
                "amdsmi_get_energy_count": {"energy_accumulator": fake_amdsmi.LARGEST_64, "counter_resolution": 15.3},
                "amdsmi_get_gpu_total_ecc_count": {
                    "correctable_count": fake_amdsmi.LARGEST_64,
                    "uncorrectable_count": fake_amdsmi.LARGEST_64,
                },
                "amdsmi_get_pcie_info": {
                    "pcie_static": {"max_pcie_width": "N/A", "max_pcie_speed": "N/A"},
                    "pcie_metric": {
                        "pcie_width": 0xFFFF,
                        "pcie_speed": fake_amdsmi.LARGEST_32,
                        "pcie_replay_count": "N/A",
                    },
                },
                "amdsmi_get_link_metrics": links(fake_amdsmi.LARGEST_64, fake_amdsmi.LARGEST_64),
                "amdsmi_get_gpu_asic_info": {"market_name": "N/A"},
                "amdsmi_get_gpu_memory_usage": fake_amdsmi.NOT_SUPPORTED,
                "amdsmi_get_clock_info MEM": fake_amdsmi.NOT_SUPPORTED,
                "amdsmi_get_temp_metric HOTSPOT": fake_amdsmi.NOT_SUPPORTED,
                "amdsmi_get_temp_metric VRAM": fake_amdsmi.NOT_SUPPORTED,
                "amdsmi_get_gpu_bad_page_info": fake_amdsmi.NO_PERM,
                "amdsmi_get_gpu_metrics_info": metrics("N/A"),
            }
        )
    )
    assert gpu.name == ""
    assert reader.activity(gpu) == GpuActivity(memory_total_bytes=192 * GIB)
    assert reader.condition(gpu) == GpuCondition()


def test_several_processes_are_listed_with_their_video_memory(install: Install) -> None:
    listed = [
        process(100, 5 * GIB),
        {**process(200, 0), "mem": 3 * GIB},
        {**process(300, fake_amdsmi.LARGEST_64, "N/A"), "mem": fake_amdsmi.LARGEST_64},
        process(0, GIB),
    ]
    install(FakeAmdGpu(answers={"amdsmi_get_gpu_process_list": listed}))
    reader = open_reader()
    assert reader.processes(reader.gpus()[0]) == (
        GpuProcess(100, 5 * GIB),
        GpuProcess(200, 3 * GIB),
        GpuProcess(300, None),
    )


def test_an_unsupported_process_list_is_unknown(install: Install) -> None:
    install(FakeAmdGpu(answers={"amdsmi_get_gpu_process_list": fake_amdsmi.NOT_SUPPORTED}))
    reader = open_reader()
    assert reader.processes(reader.gpus()[0]) is None
    assert "amdsmi_get_gpu_process_list" in reader.unsupported_calls()


def test_a_process_list_that_fails_once_keeps_the_previous_one(start: Start) -> None:
    gpu = FakeAmdGpu(answers={"amdsmi_get_gpu_process_list": [process(100, GIB)]})
    reader, listed_gpu = start(gpu)
    assert reader.processes(listed_gpu) == (GpuProcess(100, GIB),)
    gpu.answers["amdsmi_get_gpu_process_list"] = fake_amdsmi.NO_PERM
    assert reader.processes(listed_gpu) == (GpuProcess(100, GIB),)
    gpu.answers["amdsmi_get_gpu_process_list"] = []
    assert reader.processes(listed_gpu) == ()
    assert "amdsmi_get_gpu_process_list" not in reader.unsupported_calls()


def test_a_process_list_that_keeps_failing_is_unknown(start: Start) -> None:
    gpu = FakeAmdGpu(answers={"amdsmi_get_gpu_process_list": [process(100, GIB)]})
    reader, listed_gpu = start(gpu)
    reader.processes(listed_gpu)
    for _ in range(2):
        gpu.answers["amdsmi_get_gpu_process_list"] = fake_amdsmi.NO_PERM
        for _ in range(TRIES - 1):
            assert reader.processes(listed_gpu) == (GpuProcess(100, GIB),)
        gpu.answers["amdsmi_get_gpu_process_list"] = [process(100, GIB)]
        assert reader.processes(listed_gpu) == (GpuProcess(100, GIB),)
    gpu.answers["amdsmi_get_gpu_process_list"] = fake_amdsmi.NO_PERM
    assert [reader.processes(listed_gpu) for _ in range(TRIES)][-1] is None


def test_an_unsupported_value_is_requested_once(install: Install) -> None:
    package = install(
        FakeAmdGpu(0, answers={"amdsmi_get_energy_count": fake_amdsmi.NOT_YET_IMPLEMENTED}),
        FakeAmdGpu(1),
    )
    reader = open_reader()
    for _ in range(5):
        activities = [reader.activity(gpu) for gpu in reader.gpus()]
    assert package.fake_calls["amdsmi_get_energy_count 0"] == 1
    assert package.fake_calls["amdsmi_get_energy_count 1"] == 5
    assert [activity.energy_j is None for activity in activities] == [True, False]
    assert reader.unsupported_calls() == {
        "amdsmi_get_energy_count": "AMDSMI_STATUS_NOT_YET_IMPLEMENTED - Feature not yet implemented (GPU 0)"
    }


def test_a_call_that_always_fails_is_abandoned_after_some_tries(install: Install) -> None:
    package = install(FakeAmdGpu(answers={"amdsmi_get_gpu_bad_page_info": fake_amdsmi.NO_PERM}))
    reader = open_reader()
    for _ in range(TRIES + 3):
        assert reader.condition(reader.gpus()[0]).pages_pending is None
    assert package.fake_calls["amdsmi_get_gpu_bad_page_info 0"] == TRIES


def test_a_busy_device_is_read_again(install: Install) -> None:
    gpu = FakeAmdGpu(answers={"amdsmi_get_power_info": fake_amdsmi.BUSY})
    install(gpu)
    reader = open_reader()
    for _ in range(TRIES + 1):
        assert reader.activity(reader.gpus()[0]).power_instant_w is None
    gpu.answers["amdsmi_get_power_info"] = {"current_socket_power": 700}
    assert reader.activity(reader.gpus()[0]).power_instant_w == 700.0
    assert "amdsmi_get_power_info" not in reader.unsupported_calls()


def test_a_call_that_fails_for_a_while_recovers(start: Start) -> None:
    gpu = FakeAmdGpu()
    reader, listed_gpu = start(gpu)
    known = reader.activity(listed_gpu)
    power, gpu.answers["amdsmi_get_power_info"] = gpu.answers["amdsmi_get_power_info"], fake_amdsmi.NOT_SUPPORTED
    for _ in range(TRIES + 1):
        assert reader.activity(listed_gpu) == dataclasses.replace(known, power_instant_w=None, power_limit_w=None)
    gpu.answers["amdsmi_get_power_info"] = power
    assert reader.activity(listed_gpu) == known


@pytest.mark.parametrize("name", ["amdsmi_get_link_metrics", "AmdSmiClkType", "amdsmi_get_gpu_enumeration_info"])
def test_functions_missing_from_the_package_are_unsupported(start: Start, name: str) -> None:
    reader, gpu = start(FakeAmdGpu(), without=(name,))
    assert reader.activity(gpu).utilization_ratio == 0.0
    assert reader.condition(gpu).ecc_corrected == 0
    assert any(name in call for call in reader.unsupported_calls())


def test_an_error_inside_the_package_affects_one_value(install: Install) -> None:
    install(FakeAmdGpu(answers={"amdsmi_get_gpu_asic_info": ValueError("invalid literal for int() with base 16: ''")}))
    reader = open_reader()
    assert reader.gpus()[0].name == ""
    assert reader.activity(reader.gpus()[0]).temperature_c == 41.0


@pytest.mark.parametrize("part", ["activity", "processes", "condition"])
def test_a_gpu_that_stops_answering_is_lost(install: Install, part: str) -> None:
    failing, other = FakeAmdGpu(0), FakeAmdGpu(1)
    install(failing, other)
    reader = open_reader()
    first, second = reader.gpus()
    read = getattr(reader, part)
    read(first)
    failing.lost = True
    with pytest.raises(GpuFailed, match="NOT_SUPPORTED") as failed:
        read(first)
    assert failed.value.state == "lost"
    assert reader.gpus() == (first, second)
    assert reader.activity(second).temperature_c == 41.0


def test_a_recovered_gpu_is_read_in_full(start: Start) -> None:
    gpu = FakeAmdGpu()
    reader, listed_gpu = start(gpu)
    known = reader.activity(listed_gpu)
    condition = reader.condition(listed_gpu)
    unsupported = dict(reader.unsupported_calls())
    gpu.lost = True
    for _ in range(TRIES + 1):
        with pytest.raises(GpuFailed):
            reader.activity(listed_gpu)
        with pytest.raises(GpuFailed):
            reader.condition(listed_gpu)
    gpu.lost = False
    assert (reader.activity(listed_gpu), reader.condition(listed_gpu)) == (known, condition)
    assert reader.unsupported_calls() == unsupported


def test_a_gpu_that_is_in_reset_at_the_start_is_read_later(start: Start) -> None:
    gpu = FakeAmdGpu(lost=True)
    reader, listed_gpu = start(gpu)
    reader.activity(listed_gpu)
    gpu.lost = False
    assert reader.activity(listed_gpu).power_instant_w == 142.0


@pytest.mark.parametrize("status", [fake_amdsmi.NOT_INIT, fake_amdsmi.DRIVER_NOT_LOADED])
def test_an_unusable_library_means_a_replaced_driver(install: Install, status: fake_amdsmi.Refusal) -> None:
    package = install(FakeAmdGpu())
    reader = open_reader()
    gpu = reader.gpus()[0]
    package.fake_broken = status
    with pytest.raises(GpuDriverReplaced):
        reader.activity(gpu)


@pytest.mark.parametrize("status", [fake_amdsmi.NOT_INIT, fake_amdsmi.DRIVER_NOT_LOADED])
def test_a_single_unexpected_status_does_not_mean_a_replaced_driver(start: Start, status: fake_amdsmi.Refusal) -> None:
    gpu = FakeAmdGpu()
    reader, listed_gpu = start(gpu)
    known = reader.activity(listed_gpu)
    gpu.answers["amdsmi_get_gpu_activity"] = status
    assert reader.activity(listed_gpu) == dataclasses.replace(
        known, utilization_ratio=None, memory_utilization_ratio=None
    )


def test_the_no_bad_pages_message_means_zero_bad_pages(install: Install) -> None:
    install(FakeAmdGpu(answers={"amdsmi_get_gpu_bad_page_info": fake_amdsmi.NO_BAD_PAGES}))
    reader = open_reader()
    found = reader.condition(reader.gpus()[0])
    assert (found.pages_retired_uncorrected, found.pages_pending, found.ecc_corrected) == (0, False, 0)


@pytest.mark.parametrize("form", ["N/A", "words", 7, None, [], ["N/A"], [None], {"links": "N/A"}, {"links": [7]}])
@pytest.mark.parametrize("name", sorted(fake_amdsmi.mi300x(0, 0)))
def test_an_answer_in_an_unexpected_form_affects_only_its_own_values(start: Start, name: str, form: object) -> None:
    reader, gpu = start(FakeAmdGpu(answers={name: form}))
    activity, condition = reader.activity(gpu), reader.condition(gpu)
    reader.processes(gpu)
    reported = [activity.temperature_c, activity.sm_clock_hz, condition.ecc_corrected, condition.pcie_width]
    reported += [activity.power_instant_w, condition.nvlink_rx_bytes]
    assert reported.count(None) <= 1


def test_the_reader_does_not_report_events(install: Install) -> None:
    install(FakeAmdGpu())
    assert not open_reader().reports_events()


def test_throttle_time_is_the_firmware_share_of_the_elapsed_time(start: Start) -> None:
    gpu, clock = FakeAmdGpu(), FakeClock()
    reader, listed_gpu = start(gpu, clock=clock)

    def after(seconds: float, answer: Mapping[str, object]) -> Mapping[ThrottleReason, float]:
        clock.advance(seconds)
        gpu.answers["amdsmi_get_gpu_metrics_info"] = answer
        return reader.activity(listed_gpu).throttle_s

    begin = after(0.0, metrics(1000, ppt=600, hbm_thm=10))
    assert begin == {"power_cap": 0.0, "thermal": 0.0, "hw_thermal": 0.0}
    held = after(20.0, metrics(21_000, ppt=10_600, hbm_thm=2_010, socket_thm=5_000))
    assert held == {"power_cap": 10.0, "thermal": 5.0, "hw_thermal": 0.0}
    assert after(METRICS_INTERVAL_S, metrics(21_000, ppt=10_600, hbm_thm=2_010, socket_thm=5_000)) == held
    assert after(10.0, metrics(31_000, ppt=20_600, hbm_thm=2_010, socket_thm=5_000))["power_cap"] == 30.0
    assert after(10.0, metrics(100, ppt=50))["power_cap"] == 30.0, "all counters were reset"
    assert after(10.0, metrics(10_100, ppt=5_050))["power_cap"] == 35.0
    assert after(10.0, metrics(20_100, ppt=50))["power_cap"] == 35.0, "one counter was reset"
    assert after(10.0, metrics(100, ppt=150))["power_cap"] == 35.0, "all counters but one were reset"


def test_the_metrics_table_is_read_only_once_per_interval(install: Install) -> None:
    package, clock = install(FakeAmdGpu()), FakeClock()
    reader = open_reader(clock)
    for _ in range(30):
        assert reader.activity(reader.gpus()[0]).throttle_s
        clock.advance(1.0)
    assert package.fake_calls["amdsmi_get_gpu_metrics_info 0"] == 30 / METRICS_INTERVAL_S


def test_a_wait_for_events_lasts_until_its_limit(install: Install) -> None:
    install(FakeAmdGpu())
    reader = open_reader()
    begin = time.monotonic()
    assert reader.wait_event(0.2) == ()
    assert time.monotonic() - begin >= 0.2


def test_closing_ends_a_wait_for_events(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(FakeAmdGpu())
    reader, begun = open_reader(), threading.Event()
    wait = reader._closed.wait

    def begin_wait(timeout_s: float) -> bool:
        begun.set()
        return wait(timeout_s)

    monkeypatch.setattr(reader._closed, "wait", begin_wait)
    waiting = threading.Thread(target=reader.wait_event, args=(2 * SOON_S,))
    waiting.start()
    assert begun.wait(SOON_S)
    reader.close()
    waiting.join(SOON_S)
    assert not waiting.is_alive()


def test_the_library_is_closed_as_often_as_it_was_opened(install: Install) -> None:
    package = install(FakeAmdGpu())
    reader = open_reader()
    reader.open()
    assert package.fake_running == 1
    reader.close()
    assert package.fake_running == 0


def test_a_missing_package_is_reported_as_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(GpuUnavailable) as missing:
        AmdReader().open()
    assert missing.value.state == "no_library"


@pytest.mark.parametrize(
    ("program", "state", "message"),
    [
        (
            "print('Unable to find libamd_smi.so library')\nlibraries = {}\nlibraries['libamd_smi.so']",
            "no_library",
            "Unable to find libamd_smi.so library",
        ),
        ("raise OSError('libamd_smi.so: cannot open')", "no_library", "OSError: libamd_smi.so: cannot open"),
        (
            "raise AttributeError('libamd_smi.so: undefined symbol: amdsmi_get_npm_info')",
            "version_mismatch",
            "amdsmi and its library have different versions: libamd_smi.so: undefined symbol: amdsmi_get_npm_info",
        ),
    ],
)
def test_a_package_without_its_library_gives_a_reason_and_prints_nothing(
    program: str,
    state: DriverState,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "amdsmi.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    with pytest.raises(GpuUnavailable) as broken:
        AmdReader().open()
    assert (broken.value.state, str(broken.value)) == (state, message)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("status", "driver", "state"),
    [
        (34, True, "no_driver"),
        (10, True, "no_permission"),
        (4, True, "no_library"),
        (5, True, "version_mismatch"),
        (18, False, "no_driver"),
        (18, True, "failing"),
    ],
)
def test_a_failed_start_has_a_state(
    install: Install, status: int, driver: bool, state: DriverState, tmp_path: Path
) -> None:
    package = install(FakeAmdGpu())
    package.fake_init = fake_amdsmi.Refusal(status)
    folder = tmp_path / "amdgpu"
    if driver:
        folder.mkdir()
    with pytest.raises(GpuUnavailable) as failed:
        AmdReader(driver_folder=str(folder)).open()
    assert failed.value.state == state


def test_unavailable_handles_mean_a_failing_driver(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    package = install(FakeAmdGpu())

    def fail() -> None:
        raise fake_amdsmi.AmdSmiLibraryException(12)

    monkeypatch.setattr(package, "amdsmi_get_processor_handles", fail)
    with pytest.raises(GpuUnavailable) as failed:
        AmdReader().open()
    assert failed.value.state == "failing"
    assert package.fake_running == 0


@pytest.mark.parametrize(("percent", "ratio"), [(0, 0.0), (100, 1.0), (101, None), (0xFFFF, None), ("N/A", None)])
def test_a_ratio_is_at_most_one(percent: object, ratio: float | None) -> None:
    assert values.ratio_value(percent) == ratio


@pytest.mark.parametrize(
    ("speed", "generation"),
    [(2500, 1), (5000, 2), (8000, 3), (16000, 4), (32000, 5), (64000, 6), (16, 4), (32, 5), (64, 6), (0, None)],
)
def test_the_pcie_generation_follows_from_the_speed(speed: int, generation: int | None) -> None:
    assert values.pcie_generation(speed) == generation


@pytest.mark.parametrize(
    ("reported", "limit"),
    [(750, 750.0), (750_000_000, 750.0), (1_400_000_000, 1400.0), (0xFFFFFFFF, None), ("N/A", None)],
)
def test_a_power_limit_is_in_watts_for_every_package_version(reported: object, limit: float | None) -> None:
    assert values.limit_w(reported) == limit
