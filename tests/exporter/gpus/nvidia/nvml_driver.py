"""The stand-in for NVIDIA's driver library, loaded into this process."""

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.contract.clock import Clock
from exporter.gpus.nvidia import reader as nvml
from exporter.gpus.nvidia.reader import NvmlReader
from exporter.gpus.records import Gpu, GpuActivity, GpuCondition
from tests.fakenvml import Scenario, calls, library
from tests.fakenvml.profiles import h200
from tests.support.exporter import FakeClock

pynvml = pytest.importorskip("pynvml")


class FakeDriver:
    """One scenario, and readers of it; those of one test at a time."""

    def __init__(self, scenario: Scenario, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scenario = scenario
        self._path = folder / "scenario"
        self._counts = folder / "calls"
        self._counts.mkdir()
        self._readers: list[NvmlReader] = []
        path = str(library(scenario.without) / nvml.LIBRARY)
        for name, value in scenario.environment(self._path).items():
            if name != "LD_LIBRARY_PATH":
                monkeypatch.setenv(name, value)
        monkeypatch.setenv("FAKENVML_CALLS", str(self._counts))
        monkeypatch.setattr(nvml, "LIBRARY", path)
        monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(path))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        self.write()

    def write(self) -> None:
        """Let the library tell what the scenario says now."""
        self.scenario.write(self._path)

    def change(self, changing: Callable[[Scenario], object]) -> None:
        """Change the scenario."""
        changing(self.scenario)
        self.write()

    def make(self, clock: Clock | None = None) -> NvmlReader:
        """A reader that is closed at the end."""
        reader = NvmlReader(clock)
        self._readers.append(reader)
        return reader

    def calls(self) -> Counter[str]:
        """How often each function was called."""
        return calls(self._counts)

    def end(self) -> None:
        """Let go of the library, whatever hangs in it."""
        self.scenario.broken = 0
        self.scenario.init = 0
        self.scenario.release()
        self.write()
        time.sleep(0.02)
        for reader in self._readers:
            reader.close()


class Machine:
    """A driver, its reader, and a clock for it."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.clock = FakeClock(time.time())
        self.reader = driver.make(self.clock)
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
        """That of the first GPU, a second later."""
        self.clock.advance(1)
        return self.reader.activity(self.gpu)

    def condition(self) -> GpuCondition:
        return self.reader.condition(self.gpu)

    def calls(self, name: str) -> int:
        return self.driver.calls()[name]


Start = Callable[[Scenario], Machine]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Opens a reader of a scenario."""
    started: list[FakeDriver] = []

    def begin(scenario: Scenario) -> Machine:
        started.append(FakeDriver(scenario, tmp_path, monkeypatch))
        return Machine(started[-1])

    yield begin
    for driver in started:
        driver.end()


def one(**changes: Any) -> Scenario:
    """A machine with one H200, changed."""
    scenario = h200(1)
    for name, value in changes.items():
        setattr(scenario.gpus[0], name, value)
    return scenario
