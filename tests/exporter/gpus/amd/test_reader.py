"""The reader of AMD's GPUs, on a fake of the package ``amdsmi``."""

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
from tests.exporter.gpus.amd import fake_amdsmi as fake
from tests.exporter.gpus.amd.fake_amdsmi import GIB, MIB, FakeAmdGpu, FakeAmdSmi, links, metrics, process
from tests.exporter.gpus.gpu_reader_contract import GpuReaderContract, Make
from tests.support.exporter import FakeClock

Install = Callable[..., FakeAmdSmi]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a package with these GPUs in the place of ``amdsmi``."""

    def put(*gpus: FakeAmdGpu, without: tuple[str, ...] = ()) -> FakeAmdSmi:
        package = FakeAmdSmi(*gpus, without=without)
        monkeypatch.setitem(sys.modules, "amdsmi", package)
        return package

    return put


def opened(clock: FakeClock | None = None) -> AmdReader:
    """A reader that has begun."""
    reader = AmdReader(FakeClock() if clock is None else clock)
    reader.open()
    return reader


class TestKeepsTheContract(GpuReaderContract):
    """A machine with two MI300X of which one works, and an older card that tells less."""

    @pytest.fixture
    def package(self, install: Install) -> FakeAmdSmi:
        busy = {
            "amdsmi_get_gpu_process_list": [process(4242, 100 * GIB), process(4243, 0)],
            "amdsmi_get_gpu_memory_usage": 101 * GIB,
            "amdsmi_get_gpu_activity": {"gfx_activity": 100, "umc_activity": 37, "mm_activity": "N/A"},
        }
        return install(FakeAmdGpu(0, answers=busy), FakeAmdGpu(1), FakeAmdGpu(2, answers=fake.MI210))

    @pytest.fixture
    def make(self, package: FakeAmdSmi) -> Make:
        return AmdReader

    @pytest.fixture
    def calls(self, package: FakeAmdSmi) -> Callable[[], Mapping[str, int]] | None:
        return lambda: package.fake_calls


def test_the_list_of_vendors_has_it() -> None:
    reader: GpuReader = open_amd()
    assert isinstance(reader, AmdReader)


def test_the_driver_and_rocm_are_told(install: Install) -> None:
    install(FakeAmdGpu())
    assert AmdReader().open() == GpuDriver("amd", "6.14.14", "7.0")


def test_an_older_package_does_not_tell_rocms_version(install: Install) -> None:
    install(FakeAmdGpu(), without=("amdsmi_get_rocm_version",))
    assert AmdReader().open() == GpuDriver("amd", "6.14.14", None)


def test_a_machine_without_gpus_has_none(install: Install) -> None:
    install()
    assert opened().gpus() == ()


def test_gpus_stand_in_hips_order_not_in_that_of_the_bus(install: Install) -> None:
    install(FakeAmdGpu(0, hip_id=1), FakeAmdGpu(1, hip_id=0))
    assert [(gpu.index, gpu.pci_bus_id) for gpu in opened().gpus()] == [("0", "0000:25:00.0"), ("1", "0000:05:00.0")]


def test_gpus_stand_in_the_order_of_the_bus_where_hips_is_not_told_of_all(install: Install) -> None:
    install(FakeAmdGpu(0, hip_id=1), FakeAmdGpu(1, hip_id="N/A"))
    assert [gpu.pci_bus_id for gpu in opened().gpus()] == ["0000:05:00.0", "0000:25:00.0"]


@pytest.mark.parametrize(
    ("hip_uuid", "uuid"),
    [
        ("GPU-4b2c1a9f8d3e6f7a", "GPU-4b2c1a9f8d3e6f7a"),
        ("GPU-0000000000000000", "00ff74a1-0000-1000-80ff-52c7ee01df8f"),
        ("GPU-XX", "00ff74a1-0000-1000-80ff-52c7ee01df8f"),
        ("", "00ff74a1-0000-1000-80ff-52c7ee01df8f"),
    ],
)
def test_the_uuid_is_hips_where_it_is_one(install: Install, hip_uuid: str, uuid: str) -> None:
    install(FakeAmdGpu(answers={"amdsmi_get_gpu_enumeration_info": {"hip_id": 0, "hip_uuid": hip_uuid}}))
    assert opened().gpus()[0].uuid == uuid


def test_partitions_of_one_gpu_are_told_apart(install: Install) -> None:
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
    uuids = [gpu.uuid for gpu in opened().gpus()]
    assert uuids == ["GPU-4b2c1a9f8d3e6f7a", *(f"GPU-4b2c1a9f8d3e6f7a@0000:05:00.{number}" for number in (1, 2))]


def test_a_gpu_without_any_number_is_named_by_its_place(install: Install) -> None:
    none = dict.fromkeys(
        ("amdsmi_get_gpu_enumeration_info", "amdsmi_get_gpu_device_uuid", "amdsmi_get_gpu_asic_info"),
        fake.NOT_SUPPORTED,
    )
    install(FakeAmdGpu(answers=none))
    gpu = opened().gpus()[0]
    assert (gpu.uuid, gpu.name) == ("GPU-0000:05:00.0", "")


def test_an_mi300x_is_read_in_base_units(install: Install) -> None:
    install(
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
    reader = opened()
    gpu = reader.gpus()[0]
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


def test_an_older_card_tells_average_power_a_fan_and_the_edge(install: Install) -> None:
    install(FakeAmdGpu(answers=fake.MI210))
    reader = opened()
    gpu = reader.gpus()[0]
    activity = reader.activity(gpu)
    assert (activity.power_average_w, activity.power_instant_w, activity.power_limit_w) == (39.0, None, 300.0)
    assert (activity.temperature_c, activity.throttle_s) == (38.0, {})
    assert "amdsmi_get_gpu_metrics_info" in reader.unsupported_calls()
    assert reader.condition(gpu).fan_ratio == 0.2
    assert reader.condition(gpu).nvlink_rx_bytes is None


def test_placeholders_are_no_values(install: Install) -> None:
    install(
        FakeAmdGpu(
            answers={
                "amdsmi_get_gpu_activity": {"gfx_activity": 0xFFFF, "umc_activity": "N/A", "mm_activity": 0xFFFF},
                "amdsmi_get_power_info": {
                    "current_socket_power": 0xFFFF,
                    "average_socket_power": fake.LARGEST_32,
                    "power_limit": 0xFFFF,
                },
                "amdsmi_get_clock_info GFX": {"clk": "N/A", "max_clk": fake.LARGEST_32},
                "amdsmi_get_energy_count": {"energy_accumulator": fake.LARGEST_64, "counter_resolution": 15.3},
                "amdsmi_get_gpu_total_ecc_count": {
                    "correctable_count": fake.LARGEST_64,
                    "uncorrectable_count": fake.LARGEST_64,
                },
                "amdsmi_get_pcie_info": {
                    "pcie_static": {"max_pcie_width": "N/A", "max_pcie_speed": "N/A"},
                    "pcie_metric": {"pcie_width": 0xFFFF, "pcie_speed": fake.LARGEST_32, "pcie_replay_count": "N/A"},
                },
                "amdsmi_get_link_metrics": links(fake.LARGEST_64, fake.LARGEST_64),
                "amdsmi_get_gpu_asic_info": {"market_name": "N/A"},
                "amdsmi_get_gpu_memory_usage": fake.NOT_SUPPORTED,
                "amdsmi_get_clock_info MEM": fake.NOT_SUPPORTED,
                "amdsmi_get_temp_metric HOTSPOT": fake.NOT_SUPPORTED,
                "amdsmi_get_temp_metric VRAM": fake.NOT_SUPPORTED,
                "amdsmi_get_gpu_bad_page_info": fake.NO_PERM,
                "amdsmi_get_gpu_metrics_info": metrics("N/A"),
            }
        )
    )
    reader = opened()
    gpu = reader.gpus()[0]
    assert gpu.name == ""
    assert reader.activity(gpu) == GpuActivity(memory_total_bytes=192 * GIB)
    assert reader.condition(gpu) == GpuCondition()


def test_several_processes_are_listed_with_their_video_memory(install: Install) -> None:
    told = [
        process(100, 5 * GIB),
        {**process(200, 0), "mem": 3 * GIB},
        {**process(300, fake.LARGEST_64, "N/A"), "mem": fake.LARGEST_64},
        process(0, GIB),
    ]
    install(FakeAmdGpu(answers={"amdsmi_get_gpu_process_list": told}))
    reader = opened()
    assert reader.processes(reader.gpus()[0]) == (
        GpuProcess(100, 5 * GIB),
        GpuProcess(200, 3 * GIB),
        GpuProcess(300, None),
    )


def test_processes_that_nobody_tells_are_not_none_at_all(install: Install) -> None:
    install(FakeAmdGpu(answers={"amdsmi_get_gpu_process_list": fake.NOT_SUPPORTED}))
    reader = opened()
    assert reader.processes(reader.gpus()[0]) is None
    assert "amdsmi_get_gpu_process_list" in reader.unsupported_calls()


def test_a_list_of_processes_that_fails_once_leaves_the_last(install: Install) -> None:
    gpu = FakeAmdGpu(answers={"amdsmi_get_gpu_process_list": [process(100, GIB)]})
    install(gpu)
    reader = opened()
    unit = reader.gpus()[0]
    assert reader.processes(unit) == (GpuProcess(100, GIB),)
    gpu.answers["amdsmi_get_gpu_process_list"] = fake.NO_PERM
    assert reader.processes(unit) == (GpuProcess(100, GIB),)
    gpu.answers["amdsmi_get_gpu_process_list"] = []
    assert reader.processes(unit) == ()
    assert "amdsmi_get_gpu_process_list" not in reader.unsupported_calls()


def test_a_list_of_processes_that_keeps_failing_is_none(install: Install) -> None:
    gpu = FakeAmdGpu(answers={"amdsmi_get_gpu_process_list": [process(100, GIB)]})
    install(gpu)
    reader = opened()
    unit = reader.gpus()[0]
    reader.processes(unit)
    for _ in range(2):
        gpu.answers["amdsmi_get_gpu_process_list"] = fake.NO_PERM
        for _ in range(TRIES - 1):
            assert reader.processes(unit) == (GpuProcess(100, GIB),)
        gpu.answers["amdsmi_get_gpu_process_list"] = [process(100, GIB)]
        assert reader.processes(unit) == (GpuProcess(100, GIB),)
    gpu.answers["amdsmi_get_gpu_process_list"] = fake.NO_PERM
    assert [reader.processes(unit) for _ in range(TRIES)][-1] is None


def test_what_a_device_cannot_tell_is_asked_for_once(install: Install) -> None:
    package = install(
        FakeAmdGpu(0, answers={"amdsmi_get_energy_count": fake.NOT_YET_IMPLEMENTED}),
        FakeAmdGpu(1),
    )
    reader = opened()
    for _ in range(5):
        activities = [reader.activity(gpu) for gpu in reader.gpus()]
    assert package.fake_calls["amdsmi_get_energy_count 0"] == 1
    assert package.fake_calls["amdsmi_get_energy_count 1"] == 5
    assert [activity.energy_j is None for activity in activities] == [True, False]
    assert reader.unsupported_calls() == {
        "amdsmi_get_energy_count": "AMDSMI_STATUS_NOT_YET_IMPLEMENTED - Feature not yet implemented (GPU 0)"
    }


def test_a_call_that_always_fails_is_given_up_after_some_tries(install: Install) -> None:
    package = install(FakeAmdGpu(answers={"amdsmi_get_gpu_bad_page_info": fake.NO_PERM}))
    reader = opened()
    for _ in range(TRIES + 3):
        assert reader.condition(reader.gpus()[0]).pages_pending is None
    assert package.fake_calls["amdsmi_get_gpu_bad_page_info 0"] == TRIES


def test_a_busy_device_is_asked_again(install: Install) -> None:
    gpu = FakeAmdGpu(answers={"amdsmi_get_power_info": fake.BUSY})
    install(gpu)
    reader = opened()
    for _ in range(TRIES + 1):
        assert reader.activity(reader.gpus()[0]).power_instant_w is None
    gpu.answers["amdsmi_get_power_info"] = {"current_socket_power": 700}
    assert reader.activity(reader.gpus()[0]).power_instant_w == 700.0
    assert "amdsmi_get_power_info" not in reader.unsupported_calls()


def test_one_call_that_fails_for_a_while_is_not_lost_for_good(install: Install) -> None:
    gpu = FakeAmdGpu()
    install(gpu)
    reader = opened()
    unit = reader.gpus()[0]
    known = reader.activity(unit)
    power, gpu.answers["amdsmi_get_power_info"] = gpu.answers["amdsmi_get_power_info"], fake.NOT_SUPPORTED
    for _ in range(TRIES + 1):
        assert reader.activity(unit) == dataclasses.replace(known, power_instant_w=None, power_limit_w=None)
    gpu.answers["amdsmi_get_power_info"] = power
    assert reader.activity(unit) == known


@pytest.mark.parametrize("name", ["amdsmi_get_link_metrics", "AmdSmiClkType", "amdsmi_get_gpu_enumeration_info"])
def test_what_the_package_lacks_is_absent(install: Install, name: str) -> None:
    install(FakeAmdGpu(), without=(name,))
    reader = opened()
    gpu = reader.gpus()[0]
    assert reader.activity(gpu).utilization_ratio == 0.0
    assert reader.condition(gpu).ecc_corrected == 0
    assert any(name in call for call in reader.unsupported_calls())


def test_the_packages_own_failure_costs_one_value(install: Install) -> None:
    install(FakeAmdGpu(answers={"amdsmi_get_gpu_asic_info": ValueError("invalid literal for int() with base 16: ''")}))
    reader = opened()
    assert reader.gpus()[0].name == ""
    assert reader.activity(reader.gpus()[0]).temperature_c == 41.0


@pytest.mark.parametrize("part", ["activity", "processes", "condition"])
def test_a_gpu_that_answers_nothing_any_more_is_lost(install: Install, part: str) -> None:
    gone, other = FakeAmdGpu(0), FakeAmdGpu(1)
    install(gone, other)
    reader = opened()
    first, second = reader.gpus()
    read = getattr(reader, part)
    read(first)
    gone.lost = True
    with pytest.raises(GpuFailed, match="NOT_SUPPORTED") as failed:
        read(first)
    assert failed.value.state == "lost"
    assert reader.gpus() == (first, second)
    assert reader.activity(second).temperature_c == 41.0


def test_a_gpu_that_comes_back_is_read_in_full(install: Install) -> None:
    gpu = FakeAmdGpu()
    install(gpu)
    reader = opened()
    unit = reader.gpus()[0]
    known = reader.activity(unit)
    condition = reader.condition(unit)
    absent = dict(reader.unsupported_calls())
    gpu.lost = True
    for _ in range(TRIES + 1):
        with pytest.raises(GpuFailed):
            reader.activity(unit)
        with pytest.raises(GpuFailed):
            reader.condition(unit)
    gpu.lost = False
    assert (reader.activity(unit), reader.condition(unit)) == (known, condition)
    assert reader.unsupported_calls() == absent


def test_a_gpu_in_a_reset_at_the_start_is_not_given_up(install: Install) -> None:
    gpu = FakeAmdGpu(lost=True)
    install(gpu)
    reader = opened()
    unit = reader.gpus()[0]
    reader.activity(unit)
    gpu.lost = False
    assert reader.activity(unit).power_instant_w == 142.0


@pytest.mark.parametrize("status", [fake.NOT_INIT, fake.DRIVER_NOT_LOADED])
def test_a_library_that_can_no_longer_be_used_says_so(install: Install, status: fake.Refusal) -> None:
    package = install(FakeAmdGpu())
    reader = opened()
    gpu = reader.gpus()[0]
    package.fake_broken = status
    with pytest.raises(GpuDriverReplaced):
        reader.activity(gpu)


@pytest.mark.parametrize("status", [fake.NOT_INIT, fake.DRIVER_NOT_LOADED])
def test_one_odd_status_is_no_replaced_driver(install: Install, status: fake.Refusal) -> None:
    gpu = FakeAmdGpu()
    install(gpu)
    reader = opened()
    unit = reader.gpus()[0]
    known = reader.activity(unit)
    gpu.answers["amdsmi_get_gpu_activity"] = status
    assert reader.activity(unit) == dataclasses.replace(known, utilization_ratio=None, memory_utilization_ratio=None)


def test_a_sound_gpu_says_in_words_that_it_has_no_bad_pages(install: Install) -> None:
    install(FakeAmdGpu(answers={"amdsmi_get_gpu_bad_page_info": fake.NO_BAD_PAGES}))
    reader = opened()
    found = reader.condition(reader.gpus()[0])
    assert (found.pages_retired_uncorrected, found.pages_pending, found.ecc_corrected) == (0, False, 0)


@pytest.mark.parametrize("form", ["N/A", "words", 7, None, [], ["N/A"], [None], {"links": "N/A"}, {"links": [7]}])
@pytest.mark.parametrize("name", sorted(fake.mi300x(0, 0)))
def test_an_answer_of_another_form_costs_its_own_values(install: Install, name: str, form: object) -> None:
    install(FakeAmdGpu(answers={name: form}))
    reader = opened()
    gpu = reader.gpus()[0]
    activity, condition = reader.activity(gpu), reader.condition(gpu)
    reader.processes(gpu)
    told = [activity.temperature_c, activity.sm_clock_hz, condition.ecc_corrected, condition.pcie_width]
    told += [activity.power_instant_w, condition.nvlink_rx_bytes]
    assert told.count(None) <= 1


def test_nothing_tells_of_errors(install: Install) -> None:
    install(FakeAmdGpu())
    assert not opened().reports_events()


def test_throttling_is_the_firmwares_share_of_our_time(install: Install) -> None:
    gpu, clock = FakeAmdGpu(), FakeClock()
    install(gpu)
    reader = opened(clock)
    unit = reader.gpus()[0]

    def after(seconds: float, answer: Mapping[str, object]) -> Mapping[ThrottleReason, float]:
        clock.advance(seconds)
        gpu.answers["amdsmi_get_gpu_metrics_info"] = answer
        return reader.activity(unit).throttle_s

    begin = after(0.0, metrics(1000, ppt=600, hbm_thm=10))
    assert begin == {"power_cap": 0.0, "thermal": 0.0, "hw_thermal": 0.0}
    held = after(20.0, metrics(21_000, ppt=10_600, hbm_thm=2_010, socket_thm=5_000))
    assert held == {"power_cap": 10.0, "thermal": 5.0, "hw_thermal": 0.0}
    assert after(METRICS_INTERVAL_S, metrics(21_000, ppt=10_600, hbm_thm=2_010, socket_thm=5_000)) == held
    assert after(10.0, metrics(31_000, ppt=20_600, hbm_thm=2_010, socket_thm=5_000))["power_cap"] == 30.0
    assert after(10.0, metrics(100, ppt=50))["power_cap"] == 30.0, "the counters began anew"
    assert after(10.0, metrics(10_100, ppt=5_050))["power_cap"] == 35.0
    assert after(10.0, metrics(20_100, ppt=50))["power_cap"] == 35.0, "one counter began anew"
    assert after(10.0, metrics(100, ppt=150))["power_cap"] == 35.0, "all but one did"


def test_the_long_table_is_read_only_now_and_then(install: Install) -> None:
    package, clock = install(FakeAmdGpu()), FakeClock()
    reader = opened(clock)
    for _ in range(30):
        assert reader.activity(reader.gpus()[0]).throttle_s
        clock.advance(1.0)
    assert package.fake_calls["amdsmi_get_gpu_metrics_info 0"] == 30 / METRICS_INTERVAL_S


def test_a_wait_for_events_lasts_as_long_as_it_may(install: Install) -> None:
    install(FakeAmdGpu())
    reader = opened()
    begin = time.monotonic()
    assert reader.wait_event(0.2) == ()
    assert time.monotonic() - begin >= 0.2


def test_closing_ends_a_wait_for_events(install: Install) -> None:
    install(FakeAmdGpu())
    reader = opened()
    waiting = threading.Thread(target=reader.wait_event, args=(60.0,))
    waiting.start()
    time.sleep(0.1)
    reader.close()
    waiting.join(10.0)
    assert not waiting.is_alive()


def test_the_library_is_let_go_of_as_often_as_it_was_taken(install: Install) -> None:
    package = install(FakeAmdGpu())
    reader = opened()
    reader.open()
    assert package.fake_running == 1
    reader.close()
    assert package.fake_running == 0


def test_no_package_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(GpuUnavailable) as missing:
        AmdReader().open()
    assert missing.value.state == "no_library"


@pytest.mark.parametrize(
    ("text", "state", "words"),
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
            "amdsmi is not of its library's version: libamd_smi.so: undefined symbol: amdsmi_get_npm_info",
        ),
    ],
)
def test_a_package_that_breaks_without_its_library_says_so_and_prints_nothing(
    text: str,
    state: DriverState,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "amdsmi.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    with pytest.raises(GpuUnavailable) as broken:
        AmdReader().open()
    assert (broken.value.state, str(broken.value)) == (state, words)
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
def test_a_start_that_fails_says_why(
    install: Install, status: int, driver: bool, state: DriverState, tmp_path: Path
) -> None:
    package = install(FakeAmdGpu())
    package.fake_init = fake.Refusal(status)
    folder = tmp_path / "amdgpu"
    if driver:
        folder.mkdir()
    with pytest.raises(GpuUnavailable) as failed:
        AmdReader(driver_folder=str(folder)).open()
    assert failed.value.state == state


def test_handles_that_cannot_be_had_are_a_failing_driver(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    package = install(FakeAmdGpu())

    def fail() -> None:
        raise fake.AmdSmiLibraryException(12)

    monkeypatch.setattr(package, "amdsmi_get_processor_handles", fail)
    with pytest.raises(GpuUnavailable) as failed:
        AmdReader().open()
    assert failed.value.state == "failing"
    assert package.fake_running == 0


@pytest.mark.parametrize(("percent", "ratio"), [(0, 0.0), (100, 1.0), (101, None), (0xFFFF, None), ("N/A", None)])
def test_a_share_is_at_most_the_whole(percent: object, ratio: float | None) -> None:
    assert values.ratio_value(percent) == ratio


@pytest.mark.parametrize(
    ("speed", "generation"),
    [(2500, 1), (5000, 2), (8000, 3), (16000, 4), (32000, 5), (64000, 6), (16, 4), (32, 5), (64, 6), (0, None)],
)
def test_pcies_generation_follows_from_its_speed(speed: int, generation: int | None) -> None:
    assert values.pcie_generation(speed) == generation


@pytest.mark.parametrize(
    ("told", "limit"), [(750, 750.0), (750_000_000, 750.0), (1_400_000_000, 1400.0), (0xFFFFFFFF, None), ("N/A", None)]
)
def test_a_power_limit_is_in_watts_whatever_the_version(told: object, limit: float | None) -> None:
    assert values.limit_w(told) == limit
