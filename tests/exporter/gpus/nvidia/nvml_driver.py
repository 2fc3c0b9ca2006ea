"""Loads the fake NVIDIA driver library into this process."""

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.contract.clock import Clock
from exporter.gpus.nvidia import reader
from exporter.gpus.nvidia.reader import NvmlReader
from exporter.gpus.records import Gpu, GpuActivity, GpuCondition
from tests.fakenvml import Scenario, calls, library
from tests.fakenvml.profiles import h200
from tests.support.exporter import FakeClock

pynvml = pytest.importorskip("pynvml")


class FakeDriver:
    """One scenario and its readers. Only one_h200 test uses it at a time."""

    def __init__(self, scenario: Scenario, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scenario = scenario
        self._path = folder / "scenario"
        self._counts = folder / "calls"
        self._counts.mkdir()
        self._readers: list[NvmlReader] = []
        path = str(library(scenario.without) / reader.LIBRARY)
        for name, value in scenario.environment(self._path).items():
            if name != "LD_LIBRARY_PATH":
                monkeypatch.setenv(name, value)
        monkeypatch.setenv("FAKENVML_CALLS", str(self._counts))
        monkeypatch.setattr(reader, "LIBRARY", path)
        monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(path))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        self.write()

    def write(self) -> None:
        """Pass the current scenario to the library."""
        self.scenario.write(self._path)

    def change(self, edit: Callable[[Scenario], object]) -> None:
        """Change the scenario."""
        edit(self.scenario)
        self.write()

    def make_reader(self, clock: Clock | None = None) -> NvmlReader:
        """A reader that `close` closes."""
        nvml_reader = NvmlReader(clock)
        self._readers.append(nvml_reader)
        return nvml_reader

    def calls(self) -> Counter[str]:
        """How often each function was called."""
        return calls(self._counts)

    def close(self) -> None:
        """Release hanging calls and close all readers."""
        self.scenario.broken = 0
        self.scenario.init = 0
        self.scenario.release()
        self.write()
        time.sleep(0.02)
        for nvml_reader in self._readers:
            nvml_reader.close()


class Machine:
    """A driver, its reader and the reader's clock."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.clock = FakeClock(time.time())
        self.reader = driver.make_reader(self.clock)
        self.opened = self.reader.open()
        self.gpus = self.reader.gpus()

    @property
    def gpu(self) -> Gpu:
        return self.gpus[0]

    @property
    def fake(self) -> Any:
        """The first GPU of the scenario."""
        return self.driver.scenario.gpus[0]

    def activity(self) -> GpuActivity:
        """Activity of the first GPU, one_h200 second later."""
        self.clock.advance(1)
        return self.reader.activity(self.gpu)

    def condition(self) -> GpuCondition:
        return self.reader.condition(self.gpu)

    def calls(self, name: str) -> int:
        return self.driver.calls()[name]


Start = Callable[[Scenario], Machine]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a machine from a scenario."""
    started: list[FakeDriver] = []

    def start_machine(scenario: Scenario) -> Machine:
        started.append(FakeDriver(scenario, tmp_path, monkeypatch))
        return Machine(started[-1])

    yield start_machine
    for driver in started:
        driver.close()


def one_h200(**changes: Any) -> Scenario:
    """Scenario with one_h200 H200 and these changes to it."""
    scenario = h200(1)
    for name, value in changes.items():
        setattr(scenario.gpus[0], name, value)
    return scenario
