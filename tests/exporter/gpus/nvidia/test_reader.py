"""Reads NVIDIA GPUs through the real binding, from a fake of the driver library."""

import sys
import time
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from exporter.gpus.inventory_reader import read_gpu_units
from exporter.gpus.nvidia import reader
from exporter.gpus.nvidia.activity import SLOW_EVERY_S
from exporter.gpus.nvidia.calls import NvmlLibrary
from exporter.gpus.nvidia.events import MOST_SPOILED
from exporter.gpus.nvidia.reader import NvmlReader
from exporter.gpus.records import Gpu, GpuActivity, GpuCondition, GpuDriverReplaced, GpuFailed, GpuUnavailable
from tests.exporter.gpus.nvidia.nvml_driver import FakeDriver, Machine, Start, one_h200, start
from tests.fakenvml import ALL_LINKS, FieldValue, Scenario, compiler
from tests.fakenvml.profiles import h200, mig, old, uuid_of
from tests.fakenvml.scenario import CODES

__all__ = ["start"]

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C compiler")

MIB = 1 << 20


def nvml_error(code: str) -> Exception:
    """The library's exception for an error code."""
    error: Exception = pytest.importorskip("pynvml").NVMLError(CODES[code])
    return error


# -- opening and listing -------------------------------------------------------------------------


def test_driver_and_gpus_are_reported(start: Start) -> None:
    machine = start(h200())
    assert (machine.opened.vendor, machine.opened.version, machine.opened.cuda_version) == (
        "nvidia",
        "570.86.15",
        "12.8",
    )
    assert [gpu.index for gpu in machine.gpus] == list("01234567")
    assert [gpu.uuid for gpu in machine.gpus] == [uuid_of(i) for i in range(8)]
    assert machine.gpus[1] == Gpu(
        uuid_of(1), "1", "nvidia", "NVIDIA H200", "0000:29:00.0", persistence=True, memory_total_bytes=143771 * MIB
    )


def test_gpus_of_a_cgroup_are_numbered_from_0(start: Start) -> None:
    scenario = h200()
    scenario.visible = [6, 3]
    assert [(gpu.index, gpu.uuid) for gpu in start(scenario).gpus] == [("0", uuid_of(6)), ("1", uuid_of(3))]


@pytest.mark.parametrize(
    ("init", "state"),
    [
        ("DRIVER_NOT_LOADED", "no_driver"),
        ("NO_PERMISSION", "no_permission"),
        ("LIB_RM_VERSION_MISMATCH", "version_mismatch"),
        ("UNKNOWN", "failing"),
    ],
)
def test_a_driver_that_does_not_open_gives_a_reason(
    init: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver(Scenario(init=init), tmp_path, monkeypatch)
    with pytest.raises(GpuUnavailable) as failure:
        driver.make_reader().open()
    assert failure.value.state == state
    assert str(failure.value)


def test_a_missing_library_is_detected_without_the_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "LIBRARY", "libnvidia-ml.so.no-such-version")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(GpuUnavailable, match="no-such-version") as failure:
        NvmlReader().open()
    assert failure.value.state == "no_library"


def test_a_missing_binding_is_reported_as_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(h200(1), tmp_path, monkeypatch)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(GpuUnavailable, match="nvidia-ml-py is not installed") as failure:
        driver.make_reader().open()
    assert failure.value.state == "no_library"


def test_a_reader_that_was_never_opened_can_be_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unopened = FakeDriver(h200(1), tmp_path, monkeypatch).make_reader()
    assert unopened.unsupported_calls() == {}
    unopened.close()


@pytest.mark.parametrize("code", ["OPERATING_SYSTEM", "NO_PERMISSION"])
def test_an_inaccessible_gpu_is_left_out_and_reported_as_unsupported(code: str, start: Start) -> None:
    scenario = h200(2)
    scenario.fail("nvmlDeviceGetUUID", code, scenario.gpus[0])
    machine = start(scenario)
    assert [gpu.index for gpu in machine.gpus] == ["1"]
    assert "(GPU 0)" in machine.reader.unsupported_calls()["nvmlDeviceGetHandleByIndex_v2"]


@pytest.mark.parametrize("code", [1, 9, 18])
def test_every_read_reports_a_replaced_driver(code: int, start: Start) -> None:
    machine = start(h200(1))
    machine.driver.change(lambda scenario: setattr(scenario, "broken", code))
    for part in (machine.reader.activity, machine.reader.processes, machine.reader.condition):
        with pytest.raises(GpuDriverReplaced):
            part(machine.gpu)
    with pytest.raises(GpuDriverReplaced):
        machine.reader.gpus()
    with pytest.raises(GpuDriverReplaced):
        machine.reader.wait_event(0.01)


@pytest.mark.parametrize("code", [1, 9, 18])
@pytest.mark.parametrize(
    "name", ["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetFieldValues", "nvmlGpmSampleGet", "nvmlGpmMetricsGet"]
)
def test_a_replacement_error_of_one_call_does_not_mean_a_replaced_driver(name: str, code: int, start: Start) -> None:
    machine = start(h200(1))
    machine.activity()
    machine.driver.change(lambda scenario: scenario.fail(name, code))
    time.sleep(0.11)
    assert machine.activity().temperature_c == 61
    machine.driver.change(lambda scenario: scenario.faults.clear())
    time.sleep(0.11)
    machine.activity()
    time.sleep(0.11)
    found = machine.activity()
    assert (found.utilization_ratio, found.power_average_w, found.sm_activity_ratio) == (0.97, 630, 0.8825)


@pytest.mark.parametrize("code", [1, 9, 18])
@pytest.mark.parametrize("known", [True, False])
def test_a_replacement_error_of_one_field_does_not_mean_a_replaced_driver(code: int, known: bool, start: Start) -> None:
    machine = start(h200(1))
    if known:
        machine.activity()
    machine.fake.fields[82] = FieldValue(0, 1, code)
    machine.driver.write()
    found = machine.activity()
    assert (found.memory_temperature_c, found.power_average_w) == (None, 630)
    machine.fake.fields[82] = 70
    machine.driver.write()
    assert machine.activity().memory_temperature_c == 70


@pytest.mark.parametrize("name", ["nvmlDeviceRegisterEvents", "nvmlDeviceGetSupportedEventTypes"])
def test_a_replacement_error_at_registration_does_not_mean_a_replaced_driver(name: str, start: Start) -> None:
    scenario = h200(1)
    scenario.fail(name, "UNINITIALIZED")
    assert start(scenario).reader.wait_event(0.01) == ()


# -- GPUs that fail ------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["lost", "reset_required"])
def test_a_failing_gpu_does_not_affect_the_others(state: str, start: Start) -> None:
    machine = start(h200(2))
    assert machine.activity().utilization_ratio == 0.97
    machine.driver.change(lambda scenario: setattr(scenario.gpus[0], "state", state))
    for part in (machine.reader.activity, machine.reader.processes, machine.reader.condition):
        with pytest.raises(GpuFailed) as failure:
            part(machine.gpu)
        assert failure.value.state == state
        part(machine.gpus[1])
    assert machine.reader.gpus() == machine.gpus
    machine.driver.change(lambda scenario: setattr(scenario.gpus[0], "state", "ok"))
    assert machine.activity().utilization_ratio == 0.97


def test_a_gpu_lost_from_the_start_has_a_placeholder_uuid_until_it_recovers(start: Start) -> None:
    scenario = h200(2)
    scenario.gpus[0].state = "lost"
    machine = start(scenario)
    assert [(gpu.index, gpu.uuid) for gpu in machine.gpus] == [("0", "GPU-unknown-0"), ("1", uuid_of(1))]
    with pytest.raises(GpuFailed, match="lost") as failure:
        machine.activity()
    assert failure.value.state == "lost"
    machine.driver.change(lambda scenario: setattr(scenario.gpus[0], "state", "ok"))
    assert [gpu.uuid for gpu in machine.reader.gpus()] == [uuid_of(0), uuid_of(1)]


@pytest.mark.parametrize("name", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID"])
@pytest.mark.parametrize("code", ["UNKNOWN", "TIMEOUT", "UNINITIALIZED", "INVALID_ARGUMENT"])
def test_a_gpu_that_cannot_be_identified_keeps_its_index(name: str, code: str, start: Start) -> None:
    scenario = h200(3)
    scenario.fail(name, code, scenario.gpus[1])
    machine = start(scenario)
    assert [(gpu.index, gpu.uuid) for gpu in machine.gpus] == [
        ("0", uuid_of(0)),
        ("1", "GPU-unknown-1"),
        ("2", uuid_of(2)),
    ]
    with pytest.raises(GpuFailed) as failure:
        machine.reader.activity(machine.gpus[1])
    assert failure.value.state == "lost"
    assert str(failure.value)
    assert "nvmlDeviceGetHandleByIndex_v2" not in machine.reader.unsupported_calls()
    machine.driver.change(lambda scenario: scenario.faults.clear())
    assert [gpu.uuid for gpu in machine.reader.gpus()] == [uuid_of(0), uuid_of(1), uuid_of(2)]
    machine.reader.activity(machine.reader.gpus()[1])


@pytest.mark.parametrize("code", ["UNKNOWN", "TIMEOUT", "UNINITIALIZED"])
def test_a_gpu_that_fails_every_call_is_lost_whatever_the_error_code(code: str, start: Start) -> None:
    machine = start(h200(2))
    machine.activity()
    machine.driver.change(lambda scenario: scenario.fail("*", code, scenario.gpus[0]))
    for _ in range(2):
        with pytest.raises(GpuFailed) as failure:
            machine.activity()
        assert failure.value.state == "lost"
        assert str(failure.value) == str(nvml_error(code))
    assert machine.reader.activity(machine.gpus[1]).utilization_ratio == 0.97
    machine.driver.change(lambda scenario: scenario.faults.clear())
    assert machine.activity().utilization_ratio == 0.97


def test_a_gpu_is_lost_when_all_its_calls_and_fields_fail(start: Start) -> None:
    machine = start(h200(1))
    machine.activity()
    for name in {*ACTIVITY_CALLS, ENERGY_CALL} - {"nvmlDeviceGetFieldValues"}:
        machine.driver.scenario.fail(name, "UNKNOWN")
    machine.fake.fields = {key: FieldValue(0, 1, "UNKNOWN") for key in machine.fake.fields}
    machine.fake.fields |= {key: FieldValue(0, 1, "UNKNOWN") for key in (74, 76, 269, 270, 271)}
    machine.driver.write()
    with pytest.raises(GpuFailed):
        machine.activity()


def test_a_driver_that_does_not_count_its_gpus_is_not_taken_for_one_without_any(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = start(h200(1))
    later = machine.driver.make_reader()
    later.open()
    monkeypatch.setattr(NvmlLibrary, "call", lambda *_: (999, None))
    with pytest.raises(RuntimeError, match="nvmlDeviceGetCount: Unknown Error"):
        later.gpus()
    assert [gpu.uuid for gpu in machine.reader.gpus()] == [machine.gpu.uuid]


def test_a_gpu_that_was_never_listed_is_lost(start: Start) -> None:
    machine = start(h200(1))
    with pytest.raises(GpuFailed, match="no longer lists it"):
        machine.reader.activity(Gpu("GPU-other", "7", "nvidia"))


# -- activity ------------------------------------------------------------------------------------


def test_activity_is_in_base_units(start: Start) -> None:
    found = start(one_h200(fields={**h200(1).gpus[0].fields, 74: 12_000_000_000, 83: 5_000, 269: 3})).activity()
    assert found == GpuActivity(
        utilization_ratio=0.97,
        memory_utilization_ratio=0.55,
        memory_used_bytes=143771 * MIB * 3 // 4,
        memory_total_bytes=143771 * MIB,
        power_average_w=630,
        power_instant_w=651,
        power_limit_w=700,
        energy_j=5,
        temperature_c=61,
        memory_temperature_c=68,
        sm_clock_hz=1.83e9,
        memory_clock_hz=3.201e9,
        throttle_s={"power_cap": 12, "thermal": 3e-9, "hw_thermal": 0, "hw_power_brake": 0, "sync_boost": 0},
        has_nvlink_rate=True,
    )


def test_used_memory_excludes_memory_reserved_by_the_driver(start: Start) -> None:
    newer = start(one_h200(memory_used=1000 * MIB, memory_reserved=500 * MIB)).activity()
    assert newer.memory_used_bytes == 1000 * MIB


def test_unit_activity_needs_two_reads(start: Start) -> None:
    machine = start(h200(1))
    first = machine.activity()
    assert (first.sm_activity_ratio, first.nvlink_rx_bytes_per_s, first.has_nvlink_rate) == (None, None, True)
    time.sleep(0.11)
    found = machine.activity()
    assert (found.sm_activity_ratio, found.tensor_activity_ratio, found.dram_activity_ratio) == (0.8825, 0.525, 0.4775)
    assert (found.nvlink_rx_bytes_per_s, found.nvlink_tx_bytes_per_s) == (205_000 * MIB, 205_000 * MIB)
    assert (found.pcie_rx_bytes_per_s, found.pcie_tx_bytes_per_s) == (2_400 * MIB, 1_200 * MIB)
    before = machine.calls("nvmlGpmSampleGet")
    machine.clock.advance(0.05)
    assert machine.reader.activity(machine.gpu).sm_activity_ratio == 0.8825
    assert machine.calls("nvmlGpmSampleGet") == before


def test_unit_activity_covers_the_time_between_two_reads(start: Start) -> None:
    machine = start(one_h200(gpm={2: 100.0, 10: 0.0}))
    machine.activity()
    machine.driver.change(lambda scenario: setattr(scenario.gpus[0], "gpm", {2: 50.0, 10: float("nan")}))
    time.sleep(0.11)
    found = machine.activity()  # the fake library gives the mean of both samples
    assert (found.sm_activity_ratio, found.dram_activity_ratio, found.tensor_activity_ratio) == (0.75, None, None)
    before = machine.driver.calls()
    time.sleep(0.11)
    machine.clock.advance(SLOW_EVERY_S)
    assert machine.activity().sm_activity_ratio == 0.5
    after = machine.driver.calls()
    assert (after["gpm[2]"] - before["gpm[2]"], after["gpm[5]"] - before["gpm[5]"]) == (1, 0)


def test_no_ratio_is_above_1(start: Start) -> None:
    machine = start(one_h200(gpm={2: 100.4}))
    machine.activity()
    time.sleep(0.11)
    assert machine.activity().sm_activity_ratio == 1


SLOW_CALLS = ("nvmlDeviceGetTemperature", "nvmlGpmSampleGet")


def start_and_read_twice(start: Start, **changes: Any) -> Machine:
    """A machine after two reads, when every value is available."""
    machine = start(one_h200(**changes))
    machine.activity()
    time.sleep(0.11)
    machine.activity()
    return machine


@pytest.mark.parametrize(
    ("interval_s", "apart_s"), [(1.0, 5), (1.1, 4.4), (1.5, 4.5), (2.0, 4), (2.5, 5), (3.0, 3), (5.0, 5)]
)
def test_slow_values_are_read_at_least_every_five_seconds(interval_s: float, apart_s: float, start: Start) -> None:
    machine = start(old())
    machine.activity()
    machine.clock.advance(60)
    readings = []
    for number in range(30):
        machine.fake.temperature_c, machine.fake.utilization = number, number
        machine.driver.write()
        machine.clock.advance(interval_s)
        found = machine.reader.activity(machine.gpu)
        assert found.utilization_ratio == number / 100
        if found.temperature_c == number:
            readings.append(machine.clock.now)
    # the first one_h200 follows a gap, so the interval was still unknown
    apart = [later - earlier for earlier, later in pairwise(readings[1:])]
    assert apart == [pytest.approx(apart_s, abs=1e-6)] * len(apart)
    assert len(apart) > 1


def test_slightly_late_reads_do_not_make_slow_reads_more_frequent(start: Start) -> None:
    machine = start(old())
    machine.activity()
    machine.activity()
    before = machine.calls("nvmlDeviceGetTemperature")
    for number in range(20):
        machine.clock.advance(1.0 + 0.02 * (number % 3))
        machine.reader.activity(machine.gpu)
    assert machine.calls("nvmlDeviceGetTemperature") - before == 4


@pytest.mark.parametrize("name", SLOW_CALLS)
def test_a_slow_read_that_fails_does_not_repeat_the_old_value(name: str, start: Start) -> None:
    machine = start_and_read_twice(start)
    value = ACTIVITY_CALLS[name]
    assert getattr(machine.activity(), value) is not None
    machine.driver.change(lambda scenario: scenario.fail(name, "UNKNOWN"))
    assert getattr(machine.activity(), value) is not None  # not due yet
    machine.clock.advance(SLOW_EVERY_S)
    assert getattr(machine.activity(), value) is None
    assert getattr(machine.activity(), value) is None


def test_a_recovered_gpu_is_read_again_in_full(start: Start) -> None:
    machine = start_and_read_twice(start)
    machine.driver.change(lambda scenario: setattr(scenario.gpus[0], "state", "lost"))
    machine.clock.advance(SLOW_EVERY_S)
    with pytest.raises(GpuFailed):
        machine.activity()
    machine.driver.change(lambda scenario: scenario.gpus[0].__dict__.update(state="ok", temperature_c=33))
    assert machine.activity().temperature_c == 33


def test_unit_activity_replaces_missing_utilization_and_is_read_each_time(start: Start) -> None:
    machine = start_and_read_twice(start, utilization=None, memory_utilization=None)
    before = machine.calls("nvmlGpmSampleGet")
    for _ in range(3):
        time.sleep(0.11)
        assert machine.activity().busy_ratio == 0.8825
    assert machine.calls("nvmlGpmSampleGet") == before + 3


def test_energy_comes_from_a_call_where_the_field_is_missing(start: Start) -> None:
    rest = {number: value for number, value in h200(1).gpus[0].fields.items() if number != 83}
    machine = start(one_h200(energy_mj=5_000, fields=rest))
    assert machine.activity().energy_j == 5
    machine.driver.change(lambda scenario: setattr(scenario.gpus[0], "fields", {**rest, 83: 7_000}))
    assert machine.activity().energy_j == 5
    assert machine.calls("field[83]") == 1


def test_energy_needs_no_call_where_a_field_reports_it(start: Start) -> None:
    machine = start(one_h200(energy_mj=5_000, fields={**h200(1).gpus[0].fields, 83: 7_000}))
    assert machine.activity().energy_j == 7
    assert machine.calls(ENERGY_CALL) == 0


def test_the_power_limit_is_read_once_a_minute(start: Start) -> None:
    machine = start(h200(1))
    machine.activity()
    machine.driver.change(lambda scenario: setattr(scenario.gpus[0], "power_limit_mw", 400_000))
    assert machine.activity().power_limit_w == 700
    machine.clock.advance(60)
    assert machine.activity().power_limit_w == 400


@pytest.mark.parametrize(("capability", "average"), [((9, 0), True), ((8, 6), True), ((8, 0), False), ((7, 0), False)])
def test_power_is_an_average_on_chips_that_report_one(
    capability: tuple[int, int], average: bool, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pynvml.nvmlDeviceGetCudaComputeCapability", lambda _: capability)
    found = start(one_h200(fields={})).activity()
    assert (found.power_average_w, found.power_instant_w) == ((630, None) if average else (None, 630))


@pytest.mark.parametrize(("kind", "value"), [(0, 68.5), (1, 68), (2, 68), (3, 68), (4, 68), (5, 68), (6, 68), (99, 68)])
def test_a_field_is_decoded_by_its_declared_type(kind: int, value: float, start: Start) -> None:
    assert start(one_h200(fields={82: FieldValue(value, kind)})).activity().memory_temperature_c == value


@pytest.mark.parametrize("code", ["NOT_SUPPORTED", "INVALID_ARGUMENT", "NO_PERMISSION"])
def test_an_unsupported_field_is_requested_once_and_affects_no_other(code: str, start: Start) -> None:
    machine = start(one_h200(fields={**h200(1).gpus[0].fields, 185: FieldValue(0, 1, code)}))
    for _ in range(3):
        found = machine.activity()
        assert (found.power_average_w, found.power_instant_w) == (None, 651)
    assert machine.calls("field[185]") == 1
    assert machine.calls("field[186]") == 4
    assert "(GPU 0)" in machine.reader.unsupported_calls()["field(185)"]


def test_a_field_is_dropped_only_after_a_permanent_error(start: Start) -> None:
    machine = start(h200(1))
    machine.activity()

    def set_error(code: str) -> None:
        machine.fake.fields[82] = FieldValue(0, 1, code)
        machine.driver.write()

    set_error("UNKNOWN")
    assert machine.activity().memory_temperature_c is None
    machine.fake.fields[82] = 70
    machine.driver.write()
    assert machine.activity().memory_temperature_c == 70
    set_error("NOT_SUPPORTED")
    machine.activity()
    before = machine.calls("field[82]")
    found = machine.activity()
    assert (found.memory_temperature_c, found.power_average_w) == (None, 630)
    assert machine.calls("field[82]") == before


def test_a_lost_gpu_error_of_one_field_means_that_the_gpu_is_lost(start: Start) -> None:
    machine = start(one_h200(fields={185: FieldValue(0, 1, "GPU_IS_LOST")}))
    with pytest.raises(GpuFailed) as failure:
        machine.activity()
    assert failure.value.state == "lost"


ACTIVITY_CALLS = {
    "nvmlDeviceGetUtilizationRates": "utilization_ratio",
    "nvmlDeviceGetMemoryInfo_v2": "memory_used_bytes",
    "nvmlDeviceGetFieldValues": "power_average_w",
    "nvmlDeviceGetTemperature": "temperature_c",
    "nvmlDeviceGetClockInfo": "sm_clock_hz",
    "nvmlDeviceGetEnforcedPowerLimit": "power_limit_w",
    "nvmlGpmSampleGet": "sm_activity_ratio",
    "nvmlGpmQueryDeviceSupport": "sm_activity_ratio",
    "nvmlGpmMetricsGet": "dram_activity_ratio",
}
ENERGY_CALL = "nvmlDeviceGetTotalEnergyConsumption"  # called only where no field reports the energy


@pytest.mark.parametrize("name", sorted(ACTIVITY_CALLS))
def test_a_failed_call_affects_only_its_own_values(name: str, start: Start) -> None:
    machine = start(h200(1))
    machine.driver.change(lambda scenario: scenario.fail(name, "UNKNOWN"))
    machine.activity()
    time.sleep(0.11)
    found = machine.activity()
    missing = {field.name for field in fields(found) if getattr(found, field.name) in (None, {})}
    assert ACTIVITY_CALLS[name] in missing
    assert len(missing) <= 7
    machine.driver.change(lambda scenario: scenario.faults.clear())
    for _ in range(2):
        machine.clock.advance(60)
        time.sleep(0.11)
        found = machine.activity()
    assert all(getattr(found, field.name) not in (None, {}) for field in fields(found))


def test_throttle_time_is_summed_where_only_the_current_reasons_are_reported(start: Start) -> None:
    machine = start(one_h200(fields={74: 5_000_000_000, 75: 7_000_000_000}, event_reasons=0xE4))
    first = {"power_cap": 5, "thermal": 7, "hw_thermal": 0, "hw_power_brake": 0, "sync_boost": 0}
    assert machine.activity().throttle_s == first
    assert machine.activity().throttle_s == {**first, "hw_thermal": 1, "hw_power_brake": 1}
    machine.driver.change(lambda scenario: setattr(scenario.gpus[0], "event_reasons", 0x8 | 0x10))
    machine.clock.advance(100)  # only the last 10 s of a gap are counted
    found = machine.activity().throttle_s
    assert found == {**first, "hw_thermal": 11, "hw_power_brake": 1, "sync_boost": 10}


def test_throttle_reasons_are_not_read_where_counters_exist(start: Start) -> None:
    machine = start(h200(1))
    machine.activity()
    assert machine.calls("nvmlDeviceGetCurrentClocksEventReasons") == 0
    assert machine.calls("field[75]") == 1


# -- an old driver -------------------------------------------------------------------------------


def test_an_old_driver_reports_the_values_it_supports(start: Start) -> None:
    machine = start(old())
    machine.fake.event_reasons = 0x44
    machine.driver.write()
    machine.activity()
    found = machine.activity()
    assert (found.power_average_w, found.power_instant_w, found.memory_temperature_c) == (None, 241, 51)
    assert found.memory_used_bytes is not None
    assert found.temperature_c == 58
    assert found.throttle_s == {"power_cap": 1, "hw_thermal": 1, "thermal": 0, "hw_power_brake": 0, "sync_boost": 0}
    assert found.sm_activity_ratio is None
    condition = machine.condition()
    assert (condition.pages_retired_corrected, condition.pages_retired_uncorrected, condition.pages_pending) == (
        2,
        0,
        False,
    )
    assert condition.rows_remapped_corrected is None
    assert condition.recovery_action is None
    assert "nvmlGpmQueryDeviceSupport" in machine.reader.unsupported_calls()


def test_temperature_uses_the_newer_call_where_the_older_is_missing(start: Start) -> None:
    scenario = h200(1)
    scenario.without = ("nvmlDeviceGetTemperature",)
    assert start(scenario).activity().temperature_c == 61


def test_a_function_that_an_older_binding_lacks_costs_only_its_value(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("pynvml.nvmlDeviceGetRemappedRows")
    machine = start(h200(1))
    assert (machine.condition().rows_remapped_corrected, machine.condition().pcie_generation) == (None, 5)
    assert machine.reader.unsupported_calls()["nvmlDeviceGetRemappedRows"] == "Function Not Found (GPU 0)"


# -- condition -----------------------------------------------------------------------------------


def test_condition_includes_every_counter(start: Start) -> None:
    scenario = one_h200(
        ecc_corrected=3, ecc_uncorrected=1, rows_corrected=2, rows_uncorrected=1, rows_pending=1, pcie_replays=9
    )
    gpu = scenario.gpus[0]
    gpu.fan_percent, gpu.pcie_generation, gpu.pcie_width = 40, 4, 8
    gpu.fields |= {230: 1, (139, ALL_LINKS): 3, (138, ALL_LINKS): 5, 160: 4}
    found = start(scenario).condition()
    assert found == GpuCondition(
        ecc_corrected=3,
        ecc_uncorrected=1,
        rows_remapped_corrected=2,
        rows_remapped_uncorrected=1,
        row_remap_pending=True,
        row_remap_failure=False,
        recovery_action="reset",
        pcie_replays=9,
        pcie_generation=4,
        pcie_generation_max=5,
        pcie_width=8,
        pcie_width_max=16,
        nvlink_rx_bytes=3 * 1024,
        nvlink_tx_bytes=5 * 1024,
        nvlink_errors=0,
        fan_ratio=0.4,
    )


@pytest.mark.parametrize(
    ("reported", "action"),
    [(0, "none"), (2, "reboot"), (3, "drain_p2p"), (4, "drain_and_reset"), (5, None), (6, "reset"), (99, None)],
)
def test_recovery_actions_have_names(reported: int, action: str | None, start: Start) -> None:
    assert start(one_h200(fields={230: reported})).condition().recovery_action == action


@pytest.mark.parametrize(
    ("reported", "traffic", "errors"),
    [
        ({}, (None, None), None),
        ({91: 0, (138, ALL_LINKS): 1, (139, ALL_LINKS): 1}, (None, None), None),
        ({91: 2, (202, ALL_LINKS): 7, (204, ALL_LINKS): 9, (208, ALL_LINKS): 2}, (9, 7), 2),
        ({91: 2, (139, 0): 1, (139, 1): 2, (138, 0): 3, (138, 1): 4, 38: 1, 59: 2}, (3072, 7168), 3),
        ({(204, 1): 5, (202, 1): 6, (161, 0): 1, (163, 1): 2}, (5, 6), 3),
    ],
)
def test_nvlink_counters_are_read_from_the_fields_of_each_generation(
    reported: dict[Any, int], traffic: tuple[int | None, int | None], errors: int | None, start: Start
) -> None:
    found = start(one_h200(fields=reported)).condition()
    assert ((found.nvlink_rx_bytes, found.nvlink_tx_bytes), found.nvlink_errors) == (traffic, errors)


def test_a_sum_over_links_is_unknown_when_one_link_fails(start: Start) -> None:
    machine = start(one_h200(fields={91: 2, (139, 0): 1, (139, 1): 2, (138, 0): 3, (138, 1): 4, 38: 1, 45: 1}))
    assert machine.condition().nvlink_rx_bytes == 3 * 1024
    machine.fake.fields |= {(139, 1): FieldValue(0, 3, "UNKNOWN"), 45: FieldValue(0, 3, "UNKNOWN")}
    machine.driver.write()
    found = machine.condition()
    assert (found.nvlink_rx_bytes, found.nvlink_errors) == (None, None)


def test_links_are_found_after_an_interrupted_first_read(start: Start) -> None:
    links = {91: 2, (139, 0): 1, (139, 1): 2, (138, 0): 3, (138, 1): 4, 38: 1, 59: 2}
    machine = start(one_h200(fields={**links, (138, 1): FieldValue(0, 3, "GPU_IS_LOST")}))
    with pytest.raises(GpuFailed):
        machine.condition()
    machine.fake.fields = links
    machine.driver.write()
    found = machine.condition()
    assert (found.nvlink_rx_bytes, found.nvlink_tx_bytes, found.nvlink_errors) == (3072, 7168, 3)


def test_unit_activity_is_reported_after_a_failed_sample_allocation(start: Start) -> None:
    machine = start(h200(1))
    machine.driver.change(lambda scenario: scenario.fail("nvmlGpmSampleAlloc", "UNKNOWN"))
    assert machine.activity().utilization_ratio == 0.97
    machine.driver.change(lambda scenario: scenario.faults.clear())
    machine.activity()
    time.sleep(0.11)
    assert machine.activity().sm_activity_ratio == 0.8825


def test_slow_calls_are_never_made(start: Start) -> None:
    machine = start(h200(1))
    machine.activity()
    machine.condition()
    assert machine.calls("nvmlDeviceGetPcieThroughput") == 0


def test_permanently_failing_calls_are_made_once(start: Start) -> None:
    names = {*ACTIVITY_CALLS, "nvmlDeviceGetRemappedRows", "nvmlDeviceGetFanSpeed", "nvmlDeviceGetPcieReplayCounter"}
    names -= {"nvmlGpmQueryDeviceSupport", "nvmlDeviceGetFieldValues", "nvmlDeviceGetClockInfo", "nvmlGpmMetricsGet"}
    scenario = h200(1)
    machine = start(scenario)
    before = machine.driver.calls()
    for name in names:
        scenario.fail(name, "NOT_SUPPORTED")
    machine.driver.write()
    for _ in range(3):
        machine.clock.advance(100)
        machine.activity()
        machine.condition()
    after = machine.driver.calls()
    assert {name: after[name] - before[name] for name in names} == dict.fromkeys(names, 1)
    assert names <= {name.partition("(")[0] for name in machine.reader.unsupported_calls()}


def test_supported_calls_are_tracked_per_gpu(start: Start) -> None:
    scenario = h200(2)
    scenario.gpus[0].energy_mj = None
    del scenario.gpus[0].fields[83]
    machine = start(scenario)
    for _ in range(2):
        assert machine.reader.activity(machine.gpus[0]).energy_j is None
        assert machine.reader.activity(machine.gpus[1]).energy_j is not None
    assert machine.reader.unsupported_calls()["nvmlDeviceGetTotalEnergyConsumption"] == "Not Supported (GPU 0)"


# -- MIG -----------------------------------------------------------------------------------------


def test_instances_are_listed_after_their_gpu(start: Start) -> None:
    machine = start(mig())
    assert [(gpu.index, gpu.mig, gpu.parent) for gpu in machine.gpus] == [
        ("0", True, None),
        ("0:0", False, uuid_of(0)),
        ("0:1", False, uuid_of(0)),
        ("0:3", False, uuid_of(0)),
        ("1", False, None),
    ]
    assert [gpu.uuid[:4] for gpu in machine.gpus] == ["GPU-", "MIG-", "MIG-", "MIG-", "GPU-"]
    assert [gpu.gpu_instance for gpu in machine.gpus] == [
        None,
        *(it.gpu_instance for it in machine.driver.scenario.gpus[0].migs),
        None,
    ]
    assert machine.gpus[1].name == "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
    assert machine.gpus[1].memory_total_bytes == 40448 * MIB


def test_units_are_instances_and_undivided_gpus(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start(mig())
    assert [unit.index for unit in read_gpu_units()] == ["0:0", "0:1", "0:3", "1"]
    monkeypatch.setattr(reader, "LIBRARY", "libmissing.so.1")
    assert read_gpu_units() == ()


def test_an_instance_reports_its_memory_and_unit_activity(start: Start) -> None:
    machine = start(mig())
    instance = machine.gpus[3]
    machine.reader.activity(instance)
    time.sleep(0.11)
    machine.clock.advance(1)
    assert machine.reader.activity(instance) == GpuActivity(
        memory_used_bytes=9984 * MIB // 4,
        memory_total_bytes=9984 * MIB,
        sm_activity_ratio=0.73,
        tensor_activity_ratio=0.2,
        dram_activity_ratio=0.25,
    )
    assert machine.reader.condition(instance) == GpuCondition()
    assert machine.activity().utilization_ratio is None
    assert machine.activity().power_average_w == 630


def test_each_listing_looks_up_instances_again(start: Start) -> None:
    machine = start(mig())
    known = machine.gpus[1]

    def divide(scenario: Scenario) -> None:
        scenario.gpus[0].partition += 1
        del scenario.gpus[0].migs[1:]

    machine.driver.change(divide)
    assert machine.reader.activity(known).memory_used_bytes is None
    assert [gpu.index for gpu in machine.reader.gpus()] == ["0", "0:0", "1"]
    assert machine.reader.activity(known).memory_used_bytes == 40448 * MIB // 4
    with pytest.raises(GpuFailed):
        machine.reader.activity(machine.gpus[3])


def test_a_gpu_with_mig_turned_off_has_no_instances(start: Start) -> None:
    machine = start(mig())
    machine.driver.change(lambda scenario: setattr(scenario.gpus[0], "mig_mode", 0))
    assert [(gpu.index, gpu.mig) for gpu in machine.reader.gpus()] == [("0", False), ("1", False)]


# -- events --------------------------------------------------------------------------------------


def test_xids_are_reported_with_their_gpu(start: Start) -> None:
    machine = start(h200())
    assert machine.reader.wait_event(0.01) == ()

    def fail(scenario: Scenario) -> None:
        for number, position in ((79, 3), (94, 0), (31, 3), (999, 1)):
            scenario.xid(number, scenario.gpus[position])

    machine.driver.change(fail)
    found = machine.reader.wait_event(0.5)
    assert [(event.uuid, event.xid) for event in found] == [
        (uuid_of(3), 79),
        (uuid_of(0), 94),
        (uuid_of(3), 31),
        (uuid_of(1), 999),
    ]
    assert {event.time for event in found} == {machine.clock.now}
    assert {event.gpu_instance for event in found} == {None}
    assert machine.reader.wait_event(0.01) == ()


def test_an_older_driver_reports_xids_too(start: Start) -> None:
    scenario = h200(1)
    scenario.without = ("nvmlEventSetWait_v2",)
    machine = start(scenario)
    machine.reader.wait_event(0.01)
    machine.driver.change(lambda scenario: scenario.xid(48, scenario.gpus[0]))
    assert [(event.xid, event.gpu_instance) for event in machine.reader.wait_event(0.5)] == [(48, None)]


def test_an_xid_of_an_instance_names_the_instance(start: Start) -> None:
    machine = start(mig())
    machine.reader.wait_event(0.01)

    def fail(scenario: Scenario) -> None:
        scenario.xid(94, scenario.gpus[0], gpu_instance=0, compute_instance=0)
        scenario.xid(95, scenario.gpus[0], gpu_instance=5)
        scenario.xid(79, scenario.gpus[0])

    machine.driver.change(fail)
    found = machine.reader.wait_event(0.5)
    assert [(event.uuid, event.xid, event.gpu_instance) for event in found] == [
        (uuid_of(0), 94, 0),
        (uuid_of(0), 95, 5),
        (uuid_of(0), 79, None),
    ]


def test_events_other_than_xids_are_ignored(start: Start) -> None:
    machine = start(h200(1))
    machine.reader.wait_event(0.01)

    def add_event(scenario: Scenario) -> None:
        scenario.xid(1, scenario.gpus[0])
        scenario.events[-1].type = 2

    machine.driver.change(add_event)
    assert machine.reader.wait_event(0.05) == ()


@pytest.mark.parametrize("code", ["NOT_SUPPORTED", "UNKNOWN", "GPU_IS_LOST"])
@pytest.mark.parametrize("name", ["nvmlDeviceRegisterEvents", "nvmlDeviceGetSupportedEventTypes"])
def test_a_gpu_without_events_does_not_affect_the_others(name: str, code: str, start: Start) -> None:
    scenario = h200(3)
    scenario.fail(name, code, scenario.gpus[1])
    machine = start(scenario)
    for _ in range(3):
        machine.reader.wait_event(0.01)
    for gpu in scenario.gpus:
        scenario.xid(13, gpu)
    machine.driver.write()
    assert [event.uuid for event in machine.reader.wait_event(0.5)] == [uuid_of(0), uuid_of(2)]
    assert machine.calls("nvmlDeviceGetSupportedEventTypes") <= 4
    assert machine.reader.reports_events()
    assert (name in machine.reader.unsupported_calls()) == (code == "NOT_SUPPORTED")
    remade = name == "nvmlDeviceRegisterEvents" and code == "UNKNOWN"  # the contents of the set are then unknown
    assert machine.calls("nvmlEventSetFree") == int(remade)


@pytest.mark.parametrize("code", ["TIMEOUT", "GPU_IS_LOST", "UNKNOWN"])
@pytest.mark.parametrize("name", ["nvmlDeviceRegisterEvents", "nvmlDeviceGetSupportedEventTypes"])
def test_events_recover_after_the_next_listing(name: str, code: str, start: Start) -> None:
    scenario = h200(2)
    scenario.fail(name, code, scenario.gpus[1])
    machine = start(scenario)
    for _ in range(3):
        machine.reader.wait_event(0.01)
    machine.driver.change(lambda scenario: scenario.faults.clear())
    machine.reader.wait_event(0.01)
    before = machine.calls("nvmlDeviceGetSupportedEventTypes")
    machine.reader.gpus()
    machine.reader.wait_event(0.01)
    assert machine.calls("nvmlDeviceGetSupportedEventTypes") == before + 1
    machine.driver.change(lambda scenario: scenario.xid(48, scenario.gpus[1]))
    assert [event.uuid for event in machine.reader.wait_event(0.5)] == [uuid_of(1)]


def test_a_gpu_that_keeps_breaking_the_event_set_is_left_out(start: Start) -> None:
    scenario = h200(2)
    scenario.fail("nvmlDeviceRegisterEvents", "UNKNOWN", scenario.gpus[1])
    machine = start(scenario)
    for _ in range(6):
        machine.reader.gpus()
        machine.reader.wait_event(0.01)
        machine.reader.wait_event(0.01)
    assert machine.calls("nvmlEventSetFree") == MOST_SPOILED
    assert machine.reader.unsupported_calls()["nvmlDeviceRegisterEvents"] == "Unknown Error (GPU 1)"
    assert machine.reader.reports_events()


@pytest.mark.parametrize(
    ("name", "code", "is_unsupported"),
    [
        ("nvmlDeviceGetSupportedEventTypes", "NOT_SUPPORTED", True),
        ("nvmlDeviceRegisterEvents", "NO_PERMISSION", True),
        ("nvmlDeviceRegisterEvents", "TIMEOUT", False),
    ],
)
def test_missing_event_support_is_known_after_the_first_wait(
    name: str, code: str, is_unsupported: bool, start: Start
) -> None:
    scenario = h200(2)
    scenario.fail(name, code)
    machine = start(scenario)
    assert machine.reader.reports_events(), "not tried yet"
    machine.reader.wait_event(0.01)
    assert not machine.reader.reports_events()
    assert (name in machine.reader.unsupported_calls()) == is_unsupported


def test_a_gpu_whose_event_types_lack_xids_reports_no_events(start: Start) -> None:
    machine = start(one_h200(event_types=2))
    machine.reader.wait_event(0.01)
    assert not machine.reader.reports_events()
    assert machine.reader.unsupported_calls()["nvmlDeviceGetSupportedEventTypes"] == "Not Supported (GPU 0)"


def test_a_failed_wait_pauses_and_then_recovers(start: Start) -> None:
    machine = start(h200(2))
    machine.reader.wait_event(0.01)
    machine.driver.change(lambda scenario: scenario.fail("nvmlEventSetWait_v2", "GPU_IS_LOST"))
    began = time.monotonic()
    assert machine.reader.wait_event(0.1) == ()
    assert time.monotonic() - began >= 0.1
    machine.driver.change(lambda scenario: scenario.faults.clear())
    machine.reader.wait_event(0.01)
    machine.driver.change(lambda scenario: scenario.xid(79, scenario.gpus[1]))
    assert [event.xid for event in machine.reader.wait_event(0.5)] == [79]


def test_without_events_the_wait_only_pauses(start: Start) -> None:
    scenario = h200(1)
    scenario.without = ("nvmlEventSetCreate",)
    began = time.monotonic()
    machine = start(scenario)
    assert machine.reader.wait_event(0.05) == ()
    assert time.monotonic() - began >= 0.05
    assert not machine.reader.reports_events()
    assert machine.reader.unsupported_calls()["nvmlEventSetCreate"] == "Function Not Found (GPU 0)"


def test_events_include_a_gpu_that_was_identified_later(start: Start) -> None:
    scenario = h200(2)
    scenario.gpus[1].state = "lost"
    machine = start(scenario)
    machine.reader.wait_event(0.01)
    machine.driver.change(lambda scenario: setattr(scenario.gpus[1], "state", "ok"))
    machine.reader.gpus()
    machine.reader.wait_event(0.01)
    machine.driver.change(lambda scenario: scenario.xid(63, scenario.gpus[1]))
    assert [event.uuid for event in machine.reader.wait_event(0.5)] == [uuid_of(1)]


# -- closing -------------------------------------------------------------------------------------


def test_closing_releases_every_resource(start: Start) -> None:
    machine = start(h200(2))
    machine.activity()
    machine.reader.wait_event(0.01)
    machine.reader.close()
    calls = machine.driver.calls()
    assert calls["nvmlGpmSampleAlloc"] == calls["nvmlGpmSampleFree"] == 2
    assert calls["nvmlEventSetCreate"] == calls["nvmlEventSetFree"] == 1
    assert calls["nvmlInitWithFlags"] == calls["nvmlShutdown"] == 1
    machine.reader.close()
    assert machine.driver.calls()["nvmlShutdown"] == 1
