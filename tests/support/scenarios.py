"""Scenarios: jobs that run once, in parallel, while several tests check the result of each."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest

from tests.support.launcher import kill_all_with, read_events, read_json

RESULT_S = 600.0  # for one scenario and the wait for earlier ones

GivenT = TypeVar("GivenT")
ResultT = TypeVar("ResultT")
Results = Callable[[str], ResultT]  # the result of a scenario, by name


@dataclass
class Ended:
    """A job that has ended. Its outcome is the exit status of the command, or the state in Slurm."""

    run_dir: Path
    outcome: int | str
    seen: dict[str, Any] = field(default_factory=dict)  # observed meanwhile

    @property
    def report(self) -> dict[str, Any]:
        found = read_json(self.run_dir / "report.json")
        assert found, self.logs()
        return found

    def worker(self, name: str) -> dict[str, Any]:
        """The entry of a worker in the report."""
        (found,) = [worker for worker in self.report["workers"] if worker["worker"] == name]
        return dict(found)

    def reasons(self) -> list[str]:
        return [worker["exit"]["reason"] for worker in self.report["workers"]]

    def events(self, kind: str, **facts: Any) -> list[dict[str, Any]]:
        """Events with this name and these facts."""
        return [event for event in read_events(self.run_dir, kind) if facts.items() <= event.items()]

    def has_run(self, worker: str) -> bool:
        """Whether a worker has a start record."""
        return any((self.run_dir / "workers").glob(f"{worker}_rank*.start.json"))

    def records(self) -> set[str]:
        """Names of the exit records of all runs."""
        return {path.name.removesuffix(".exit.json") for path in (self.run_dir / "workers").glob("*.exit.json")}

    def log(self, name: str = "log.out") -> str:
        return (self.run_dir / name).read_text()

    def logs(self) -> str:
        """The job log and the error log."""
        return self.log() + self.log("log.err")


class Scenarios(Generic[GivenT, ResultT]):
    """The scenarios of a test module: functions that are also fixtures with their results.

    Only those that a collected test has as a fixture or parameter are run, in the order of the file.
    """

    def __init__(self, results_fixture: str) -> None:
        """``results_fixture`` is the name of the fixture that runs them."""
        self._results_fixture = results_fixture
        self._functions: dict[str, Callable[[GivenT], ResultT]] = {}

    def __call__(self, run_scenario: Callable[[GivenT], ResultT]) -> Any:
        """Decorates a scenario, and makes it the fixture with its result."""
        name = run_scenario.__name__
        self._functions[name] = run_scenario

        @pytest.fixture(scope="module", name=name)
        def result(request: pytest.FixtureRequest) -> ResultT:
            results: Results[ResultT] = request.getfixturevalue(self._results_fixture)
            return results(name)

        return result

    def needed(self, request: pytest.FixtureRequest) -> list[str]:
        """Scenarios that collected tests of this module need."""
        names = set()
        for item in request.session.items:
            if isinstance(item, pytest.Function) and item.module is request.module:
                params = item.callspec.params.values() if hasattr(item, "callspec") else ()
                names |= {*item.fixturenames, *(value for value in params if isinstance(value, str))}
        return [name for name in self._functions if name in names]

    @contextlib.contextmanager
    def run(
        self, names: list[str], prepare: Callable[[str], GivenT], stop: Callable[[], object], at_once: int
    ) -> Iterator[Results[ResultT]]:
        """Run these scenarios with what ``prepare`` returns for each. ``stop`` ends those that still run."""

        def play(name: str) -> ResultT:
            return self._functions[name](prepare(name))

        with ThreadPoolExecutor(max(1, at_once)) as pool:
            futures = {name: pool.submit(play, name) for name in names}
            try:
                yield lambda name: futures[name].result(RESULT_S)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                stop()

    def run_in(
        self: "Scenarios[Path, ResultT]", folder: Path, request: pytest.FixtureRequest, at_once: int
    ) -> contextlib.AbstractContextManager[Results[ResultT]]:
        """Run the needed scenarios, each with its own path in this folder."""
        return self.run(self.needed(request), lambda name: folder / name, lambda: kill_all_with(folder), at_once)
