"""Tests that every ``GpuReader`` must pass, whatever the vendor.

A test module derives a class from ``GpuReaderContract`` and defines the fixture ``make``: a function that returns a new
reader of a machine with GPUs. It may also define ``calls``: the number of calls of each library function so far.
"""

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping

import pytest

from exporter.gpus.records import (
    THROTTLE_REASONS,
    Gpu,
    GpuActivity,
    GpuCondition,
    GpuDriver,
    GpuEvent,
    GpuFailed,
    GpuReader,
)
from tests.support.exporter import SOON_S

BUS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
VERSION = re.compile(r"\d+\.\d+")
LARGEST_SENTINELS = (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)
LARGEST: Mapping[str, float] = {
    "power_average_w": 20_000,
    "power_instant_w": 20_000,
    "power_limit_w": 20_000,
    "temperature_c": 150,
    "memory_temperature_c": 150,
    "sm_clock_hz": 1e10,
    "memory_clock_hz": 1e11,
    "pcie_generation": 8,
    "pcie_generation_max": 8,
    "pcie_width": 32,
    "pcie_width_max": 32,
}  # a larger number means a wrong unit or a placeholder

Make = Callable[[], GpuReader]


def numbers(record: GpuActivity | GpuCondition) -> dict[str, float]:
    """The known numbers of a record, without those of the throttle reasons."""
    values = {each.name: getattr(record, each.name) for each in dataclasses.fields(record)}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def check_numbers(record: GpuActivity | GpuCondition) -> None:
    """Check that no number is below 0, a ratio above 1, a placeholder or in a wrong unit."""
    for name, value in numbers(record).items():
        assert math.isfinite(value), name
        assert value >= 0, name
        assert value not in LARGEST_SENTINELS, name
        most = 1.0 if name.endswith("_ratio") else LARGEST.get(name, math.inf)
        assert value <= most, f"{name} = {value}"


class GpuReaderContract:
    """Tests that each reader must pass."""

    @pytest.fixture
    def make(self) -> Make:
        raise NotImplementedError

    @pytest.fixture
    def calls(self) -> Callable[[], Mapping[str, int]] | None:
        """Number of calls by function, or None if the library does not count them."""
        return None

    @pytest.fixture
    def reader(self, make: Make) -> Iterator[GpuReader]:
        reader = make()
        reader.open()
        yield reader
        reader.close()

    def test_opening_returns_the_driver_of_the_vendor(self, make: Make) -> None:
        reader = make()
        driver = reader.open()
        reader.close()
        assert isinstance(driver, GpuDriver)
        assert driver.vendor == reader.vendor
        assert driver.cuda_version is None or VERSION.fullmatch(driver.cuda_version)

    def test_gpus_have_unique_uuids_and_indices(self, reader: GpuReader) -> None:
        gpus = reader.gpus()
        assert gpus
        assert len({gpu.uuid for gpu in gpus}) == len(gpus)
        assert len({gpu.index for gpu in gpus}) == len(gpus)
        for gpu in gpus:
            assert gpu.uuid
            assert gpu.vendor == reader.vendor
            assert re.fullmatch(r"\d+(:\d+)?", gpu.index)
            assert gpu.pci_bus_id is None or BUS.fullmatch(gpu.pci_bus_id)
            assert gpu.memory_total_bytes is None or gpu.memory_total_bytes > 1 << 20

    def test_an_instance_is_listed_after_its_gpu(self, reader: GpuReader) -> None:
        seen: dict[str, Gpu] = {}
        for gpu in reader.gpus():
            if gpu.parent is not None:
                assert seen[gpu.parent].mig
                assert gpu.index.startswith(f"{seen[gpu.parent].index}:")
            seen[gpu.uuid] = gpu

    def test_a_gpu_keeps_its_uuid_and_index(self, make: Make, reader: GpuReader) -> None:
        def identities(each: GpuReader) -> list[tuple[str, str]]:
            return [(gpu.uuid, gpu.index) for gpu in each.gpus()]

        other = make()
        other.open()
        again = identities(other)
        other.close()
        assert identities(reader) == identities(reader) == again

    def test_activity_is_in_base_units(self, reader: GpuReader) -> None:
        for gpu in reader.gpus():
            activity = reader.activity(gpu)
            check_numbers(activity)
            if activity.memory_used_bytes is not None and activity.memory_total_bytes is not None:
                assert activity.memory_used_bytes <= activity.memory_total_bytes
            assert set(activity.throttle_s) <= set(THROTTLE_REASONS)
            assert all(math.isfinite(held) and held >= 0 for held in activity.throttle_s.values())

    def test_counters_never_fall(self, reader: GpuReader) -> None:
        for gpu in reader.gpus():
            first, second = reader.activity(gpu), reader.activity(gpu)
            assert (second.energy_j or 0.0) >= (first.energy_j or 0.0)
            for reason, held in first.throttle_s.items():
                assert second.throttle_s[reason] >= held

    def test_condition_is_in_base_units(self, reader: GpuReader) -> None:
        for gpu in reader.gpus():
            condition = reader.condition(gpu)
            check_numbers(condition)
            for now, most in (
                (condition.pcie_generation, condition.pcie_generation_max),
                (condition.pcie_width, condition.pcie_width_max),
            ):
                assert now is None or most is None or now <= most

    def test_a_process_is_listed_once_with_its_memory(self, reader: GpuReader) -> None:
        for gpu in reader.gpus():
            processes = reader.processes(gpu) or ()
            assert len({process.pid for process in processes}) == len(processes)
            for process in processes:
                assert 0 < process.pid <= 1 << 22
                assert process.memory_bytes is None or 0 <= process.memory_bytes <= (gpu.memory_total_bytes or math.inf)
                assert process.sm_ratio is None or 0.0 <= process.sm_ratio <= 1.0

    def test_unsupported_values_are_not_requested_again(
        self, reader: GpuReader, calls: Callable[[], Mapping[str, int]] | None
    ) -> None:
        def count_calls() -> dict[str, int]:
            before = {} if calls is None else dict(calls())
            for gpu in reader.gpus():
                reader.activity(gpu)
                reader.processes(gpu)
                reader.condition(gpu)
            after = {} if calls is None else dict(calls())
            return {name: count - before.get(name, 0) for name, count in after.items()}

        first = count_calls()
        unsupported = dict(reader.unsupported_calls())
        assert all(name and reason for name, reason in unsupported.items())
        second = count_calls()
        assert reader.unsupported_calls() == unsupported
        assert count_calls() == second
        assert all(count <= first[name] for name, count in second.items())
        assert not unsupported or calls is None or sum(second.values()) < sum(first.values())

    def test_a_wait_for_events_returns_in_time(self, reader: GpuReader) -> None:
        begin = time.monotonic()
        events = reader.wait_event(0.05)
        assert time.monotonic() - begin < SOON_S
        assert all(isinstance(event, GpuEvent) for event in events)

    def test_a_reader_may_be_closed_twice(self, make: Make) -> None:
        reader = make()
        reader.close()
        reader.open()
        reader.close()
        reader.close()

    def test_a_closed_reader_can_be_reopened(self, make: Make) -> None:
        reader = make()
        reader.open()
        first = reader.gpus()
        reader.close()
        reader.open()
        assert reader.gpus() == first
        reader.activity(first[0])
        reader.close()

    def test_a_gpu_of_another_machine_is_lost(self, reader: GpuReader) -> None:
        other_gpu = Gpu("GPU-00000000-dead-beef-0000-000000000000", "99", reader.vendor)
        with pytest.raises(GpuFailed) as failed:
            reader.activity(other_gpu)
        assert failed.value.state == "lost"
