"""The comparison with ``nvidia-smi``, on a fake driver library and a fake ``nvidia-smi``."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter.gpus.collectors import page
from tests.exporter.gpus.collectors.gpu_job import GpuJob
from tests.fakenvml import compiler, profiles
from tests.gpu import nvidia_smi
from tests.gpu.comparison import ELSEWHERE, PAIRS, SOURCES, TEXTS, Line, compare, faults, table
from tests.gpu.nvidia_smi import Answer, Device

H200 = profiles.h200(1).gpus[0]
FIELDS = {
    "index": "0",
    "uuid": H200.uuid,
    "name": H200.name,
    "pci.bus_id": H200.pci_bus_id,
    "driver_version": profiles.h200(1).driver,
    "persistence_mode": "Enabled",
    "mig.mode.current": "Disabled",
    "utilization.gpu": "97",
    "utilization.memory": "55",
    "memory.used": "107828",
    "memory.total": "143771",
    "power.draw": "630.00",
    "power.draw.average": "630.00",
    "power.draw.instant": "651.00",
    "enforced.power.limit": "700.00",
    "temperature.gpu": "61",
    "temperature.memory": "68",
    "clocks.current.sm": "1830",
    "clocks.sm": "1830",
    "clocks.current.memory": "3201",
    "ecc.errors.corrected.volatile.total": "0",
    "ecc.errors.uncorrected.volatile.total": "0",
    "remapped_rows.correctable": "0",
    "remapped_rows.uncorrectable": "0",
    "remapped_rows.pending": "No",
    "remapped_rows.failure": "No",
    "retired_pages.single_bit_ecc.count": "[N/A]",
    "retired_pages.double_bit.count": "[N/A]",
    "retired_pages.pending": "[N/A]",
    "pcie.link.width.current": "16",
    "pcie.link.width.max": "16",
    "pcie.link.gen.current": "5",
    "pcie.link.gen.max": "5",
    "fan.speed": "[N/A]",
}
XML = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
    <cuda_version>12.8</cuda_version>
    <gpu id="00000000:18:00.0">
        <gpu_recovery_action>None</gpu_recovery_action>
        <pci><replay_counter>0</replay_counter></pci>
        <clocks_event_reasons_counters>
            <clocks_event_reasons_counters_sync_boost>0 us</clocks_event_reasons_counters_sync_boost>
        </clocks_event_reasons_counters>
    </gpu>
</nvidia_smi_log>
"""
PROGRAM = """#!/usr/bin/env python3
import json, sys
fields, xml = json.load(open({path!r}))
for argument in sys.argv[1:]:
    if argument == "--help-query-gpu":
        print("\\n".join(f'"{{name}}"' for name in fields))
    elif argument == "-x":
        print(xml)
    elif argument.startswith("--query-gpu="):
        names = argument.partition("=")[2].split(",")
        if not fields.keys() >= set(names):
            sys.exit(f"Field {{set(names) - fields.keys()}} is not a valid field to query.")
        print(", ".join(fields[name] for name in names))
    elif argument.startswith("--query-compute-apps="):
        print("4711, 1024\\n4712, [N/A]")
"""


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """The GPU of a fake ``nvidia-smi`` on PATH that prints the texts above."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    answers = tmp_path / "answers.json"
    answers.write_text(json.dumps((FIELDS, XML)))
    program = tmp_path / "nvidia-smi"
    program.write_text(PROGRAM.format(path=str(answers)))
    program.chmod(0o755)
    nvidia_smi.known_fields.cache_clear()
    (found,) = nvidia_smi.devices()
    yield found
    nvidia_smi.known_fields.cache_clear()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuJob]:
    """A job on the same fake GPU."""
    if compiler() is None:
        pytest.skip("no C compiler")
    job = GpuJob(tmp_path_factory.mktemp("job"), profiles.h200(1), 1)
    job.start()
    job.until_ready()
    job.until(lambda page: page.value("gpu_pcie_link_width_ratio", gpu="0"), "its condition")
    yield job
    job.close()


def test_equal_values_agree_in_every_line(job: GpuJob, device: Device) -> None:
    pages, answers = [job.page()], [nvidia_smi.ask(device, SOURCES)]
    lines = compare("0", pages, answers)
    assert faults(lines) == []
    assert sum(line.outcome == "agrees" for line in lines) >= 25
    outcomes = {line.series: line.outcome for line in lines}
    assert outcomes["gpu_throttle_seconds_total{reason=sync_boost}"] == "agrees"
    assert outcomes["gpu_throttle_seconds_total{reason=power_cap}"] == "only ours"
    assert outcomes["gpu_fan_ratio"] == outcomes["gpu_pages_pending"] == "unknown to both"
    assert len(table(lines).splitlines()) == len(lines) + 1


@pytest.mark.parametrize(
    ("field", "wrong", "series"),
    [
        ("utilization.gpu", "80", "gpu_utilization_ratio"),
        ("memory.used", "107000", "gpu_memory_used_bytes"),
        ("power.draw.average", "500", "gpu_power_watts{kind=average}"),
        ("remapped_rows.pending", "Yes", "gpu_row_remap_pending"),
        ("pcie.link.width.current", "8", "gpu_pcie_link_width_ratio"),
        ("persistence_mode", "Disabled", "gpu_info.persistence_mode"),
        ("fan.speed", "30", "gpu_fan_ratio"),
    ],
)
def test_a_difference_is_found(job: GpuJob, device: Device, field: str, wrong: str, series: str) -> None:
    answer = nvidia_smi.ask(device, SOURCES)
    changed = Answer({**answer.texts, field: wrong})
    assert [text.partition(": ")[0] for text in faults(compare("0", [job.page()], [changed]))] == [series]


def test_each_gpu_family_is_compared_or_has_a_reason_not_to_be() -> None:
    compared = {pair.family for pair in PAIRS} | {family for family, _, _ in TEXTS}
    assert not compared & ELSEWHERE.keys()
    assert compared | ELSEWHERE.keys() == set(page.FAMILIES)


def test_a_difference_is_ours_minus_theirs() -> None:
    line = Line("x", 3.0, 5.0, 1.0, "differs")
    assert (line.difference, faults([line])) == (-2.0, ["x: differs: 3.0 and 5.0"])
    assert Line("x", "a", "b", 0, "differs").difference is None


def test_processes_have_their_memory_where_it_is_known(device: Device) -> None:
    assert nvidia_smi.processes(device) == {4711: 1 << 30, 4712: None}


def test_there_are_no_gpus_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_smi.devices() == ()
