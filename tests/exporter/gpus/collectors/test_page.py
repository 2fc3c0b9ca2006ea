"""Whole GPU pages, from the vendor library to the text."""

import dataclasses
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.collecting.families import Samples
from exporter.gpus.amd.reader import AmdReader
from exporter.gpus.collectors import gpus_collector
from exporter.gpus.host_reader import GpuHost
from exporter.gpus.nvidia import reader
from exporter.gpus.records import GpuReader
from tests.exporter.gpus.amd.fake_amdsmi import GIB, FakeAmdGpu, FakeAmdSmi, process
from tests.exporter.gpus.fake_gpus import DEVICE_LISTS, Node
from tests.exporter.gpus.nvidia.nvml_driver import FakeDriver
from tests.fakenvml import FakeGpu, FakeMig, FakeProcess, Rate, Scenario, profiles
from tests.support.exporter import FakeClock

MOST_SERIES = 45  # of one GPU
TIMEOUT_S = 60.0  # enough for a slow machine
READS, STEP_S = 4, 0.25  # ratios need two readings, with real time between them

Makes = tuple[Callable[[], GpuReader], ...]
Plan = tuple[tuple[int, ...], ...]
Show = Callable[[Scenario, Plan], str]
Golden = Callable[[str, str], Path]


def freeze(scenario: Scenario) -> Scenario:
    """The scenario with constant numbers and a driver that samples processes all the time."""
    scenario.sample_period_s = 0.05
    for unit in [unit for gpu in scenario.gpus for unit in (gpu, *gpu.migs)]:
        for each in dataclasses.fields(unit):
            setattr(unit, each.name, _freeze(getattr(unit, each.name)))
    return scenario


def _freeze(value: Any) -> Any:
    if isinstance(value, Rate):
        return value.base
    if isinstance(value, dict):
        return {key: _freeze(inner) for key, inner in value.items()}
    return value


def page(run_dir: Path, makes: Makes, clock: FakeClock, plan: Plan) -> str:
    """The page of both collectors after some reads. Worker ``n`` has the process ``100 + n``."""
    host = GpuHost(makes, clock, fast_s=STEP_S, medium_s=STEP_S, call_timeout_s=TIMEOUT_S)
    (run_dir / "proc").mkdir()
    node = Node(run_dir, plan=plan, host=host, clock=clock, proc=str(run_dir / "proc"))
    for rank in range(len(plan)):
        node.run(rank, 100 + rank)
    out = Samples({})
    try:
        for _ in range(READS):
            out.page()
            time.sleep(STEP_S)
            clock.now = time.time()
            node.gpus.render(node.gpus.read(), out)
            node.workers.render(node.workers.read(), out)
    finally:
        assert host.close(TIMEOUT_S)
    return out.page()


@pytest.fixture(autouse=True)
def isolate(monkeypatch: pytest.MonkeyPatch) -> None:
    """No device list in the environment, and collectors wait for each poll."""
    for name in DEVICE_LISTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpus_collector, "WAIT_S", TIMEOUT_S)


@pytest.fixture
def nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Show]:
    """Renders the page of a scenario."""
    drivers: list[FakeDriver] = []

    def show(scenario: Scenario, plan: Plan) -> str:
        driver, clock = FakeDriver(freeze(scenario), tmp_path, monkeypatch), FakeClock(time.time())
        drivers.append(driver)
        return page(tmp_path, (lambda: driver.make_reader(clock),), clock, plan)

    yield show
    for driver in drivers:
        driver.close()


def series(text: str) -> Counter[str]:
    """Number of series per GPU, without the series of workers."""
    lines = [line for line in text.splitlines() if line.startswith("gpujob_gpu_") and '{gpu="' in line]
    return Counter(line.partition('gpu="')[2].partition('"')[0] for line in lines)


def one_each(scenario: Scenario) -> Plan:
    """Plan one worker for each GPU or MIG instance, with a process on it."""
    units: list[FakeGpu | FakeMig] = [unit for gpu in scenario.gpus for unit in (gpu.migs or (gpu,))]
    for rank, unit in enumerate(units):
        assert isinstance(unit.memory_used, int)
        unit.processes.append(FakeProcess(100 + rank, unit.memory_used // 2, 90, 40))
    return tuple((rank,) for rank in range(len(units)))


def check(name: str, text: str, indices: list[str], golden: Golden) -> None:
    """Check that the page is the golden one, and that no GPU has too many series."""
    counts = series(text)
    assert list(counts) == indices
    assert max(counts.values(), default=0) <= MOST_SERIES
    golden(f"exporter/gpu_{name}.txt", text)
    if shutil.which("promtool") is not None:
        result = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=30, check=False
        )
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    monkeypatch.setattr(reader, "LIBRARY", "libnvidia-ml.so.no-such-version")
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    clock = FakeClock()
    text = page(tmp_path, (lambda: reader.NvmlReader(clock), lambda: AmdReader(clock)), clock, ((0,),))
    check("no_driver", text, [], golden)


def test_one_gpu_with_an_old_driver(nvidia: Show, golden: Golden) -> None:
    scenario = profiles.old(1)
    check("old_driver", nvidia(scenario, one_each(scenario)), ["0"], golden)


def test_eight_gpus_with_a_current_driver(nvidia: Show, golden: Golden) -> None:
    scenario = profiles.h200(8)
    check("h200", nvidia(scenario, one_each(scenario)), [str(number) for number in range(8)], golden)


def test_mig(nvidia: Show, golden: Golden) -> None:
    scenario = profiles.mig()
    check("mig", nvidia(scenario, one_each(scenario)), ["0", "0:0", "0:1", "0:3", "1"], golden)


def test_amd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    busy = {
        "amdsmi_get_gpu_activity": {"gfx_activity": 93, "umc_activity": 41, "mm_activity": "N/A"},
        "amdsmi_get_gpu_memory_usage": 65 * GIB,
        "amdsmi_get_gpu_process_list": [process(100, 64 * GIB)],
    }
    package = FakeAmdSmi(FakeAmdGpu(0, answers=busy), FakeAmdGpu(1))
    monkeypatch.setitem(sys.modules, "amdsmi", package)
    clock = FakeClock()
    check("amd", page(tmp_path, (lambda: AmdReader(clock),), clock, ((0,), (1,))), ["0", "1"], golden)
