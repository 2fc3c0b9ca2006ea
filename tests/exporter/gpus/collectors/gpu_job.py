"""A one-node job on fake GPUs: the real sidecar, read over HTTP, and real workers under wrappers."""

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import parser as text_parser

from exporter.contract import run_files
from exporter.contract.manifest import FULL
from tests.exporter.gpus.fake_gpus import DEVICE_LISTS
from tests.exporter.sidecar.test_sidecar_process import EXPORTER, environment
from tests.fakenvml import Scenario, calls
from tests.realstack.waiting import wait_for
from tests.support.duration import took_s
from tests.support.exporter import NODE, Wrappers, make_manifest, make_task, write_manifest

PREFIX = "gpujob_"
SUPERVISOR = (sys.executable, "-I", "-m", "launcher.programs.supervisor", "--")
USE_GPU = str(Path(__file__).parents[3] / "fakenvml" / "use_gpu.py")
READ_INTERVAL_S = 1.0  # between two reads of the GPUs
POLL_S = 0.15
Labels = dict[str, str]


class Page:
    """One page of metrics."""

    def __init__(self, text: str) -> None:
        found = text_parser.text_string_to_metric_families(text)
        self._samples = [
            (sample.name.removeprefix(PREFIX), sample.labels, sample.value) for each in found for sample in each.samples
        ]

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Values of a family by one of its labels, for series with the other labels."""
        return {found[label]: value for found, value in self._having(name, labels)}

    def value(self, name: str, **labels: str) -> float | None:
        """The value of the only such series, or None if it does not exist."""
        values = [value for _, value in self._having(name, labels)]
        assert len(values) <= 1, f"{len(values)} series of {name} have {labels}"
        return values[0] if values else None

    def labels(self, name: str, **labels: str) -> Labels | None:
        """All labels of the only such series, or None if it does not exist."""
        found = self._having(name, labels)
        assert len(found) <= 1
        return found[0][0] if found else None

    def of_gpu(self, gpu: str) -> set[str]:
        """Families with series of a GPU, without those of workers."""
        return {
            name for name, labels, _ in self._samples if labels.get("gpu") == gpu and not name.startswith("worker_")
        }

    def _having(self, name: str, labels: Labels) -> list[tuple[Labels, float]]:
        return [
            (found, value)
            for sample_name, found, value in self._samples
            if sample_name == name and all(found.get(key) == wanted for key, wanted in labels.items())
        ]


class GpuJob:
    """One job. With ``scenario`` None, no driver library exists."""

    def __init__(self, run_dir: Path, scenario: Scenario | None, gpus: int, **manifest: Any) -> None:
        """Plan one worker for each of this number of GPUs."""
        self.run_dir = run_dir
        self.tasks = tuple(make_task(rank) for rank in range(gpus))
        self.log = run_dir / "sidecar.log"
        self._processes, self._calls = run_dir / "processes", run_dir / "calls"
        self._processes.mkdir()
        self._calls.mkdir()
        self._environment: dict[str, str] = {}
        if scenario is not None:
            self.scenario = scenario
            self.write()
            self._environment = scenario.environment(self._scenario_path)
            self._environment |= {"FAKENVML_PROCESSES": str(self._processes), "FAKENVML_CALLS": str(self._calls)}
        write_manifest(
            make_manifest(run_dir, *self.tasks, **{"check_interval_s": READ_INTERVAL_S, "detail": FULL, **manifest})
        )
        run_files.write_job_state(str(run_dir), "running")
        self.wrappers = Wrappers(run_dir)
        self._started: list[subprocess.Popen[bytes]] = []

    # -- the GPUs ------------------------------------------------------------------------------------

    @property
    def _scenario_path(self) -> Path:
        return self.run_dir / "scenario"

    def write(self) -> None:
        """Pass the current scenario to the library."""
        self.scenario.write(self._scenario_path)

    # -- the sidecar ---------------------------------------------------------------------------------

    def start(self, *above: str) -> None:
        """Start the sidecar, optionally under another program, and wait for its address."""
        kept = {name: value for name, value in environment().items() if name not in DEVICE_LISTS}
        before, self._waits = self._address(), self._waits_for_events()
        argv = [*above, *EXPORTER, "sidecar", "--run-dir", str(self.run_dir), "--web.listen-address", "127.0.0.1:0"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                argv, env={**kept, **self._environment}, stdout=log, stderr=log, cwd=self.run_dir
            )
        self._started.append(self.process)
        wait_for(lambda: self._address() not in (None, before), 60, "the sidecar's address", logs=self.log)

    def until_ready(self) -> None:
        """Wait until every collector has read once."""
        wait_for(
            lambda: self._request("/-/ready")[0] == 200,
            60,
            "the first reads",
            retry=(OSError,),
            logs=self.log,
            interval=POLL_S,
        )

    def until_it_waits_for_events(self) -> None:
        """Wait until the sidecar waits for driver events. The driver does not report earlier ones."""
        wait_for(lambda: self._waits_for_events() > self._waits, 60, "a wait for events", logs=self.log)

    def _waits_for_events(self) -> int:
        return calls(self._calls)["nvmlEventSetWait_v2"]

    def _address(self) -> dict[str, object] | None:
        return run_files.read_json(self.run_dir / run_files.SIDECARS_DIR / f"{NODE}.json")

    def _request(self, path: str, encoding: str = "identity") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", int(str((self._address() or {})["port"])), timeout=60)
        try:
            token = run_files.read_token(self.run_dir)
            headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": encoding}
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def page(self) -> Page:
        """The metrics now."""
        return Page(self.body().decode())

    def body(self, encoding: str = "identity") -> bytes:
        """The page of metrics as it is sent."""
        return self._request("/metrics", encoding)[1]

    def status(self) -> dict[str, Any]:
        """The status now."""
        found: dict[str, Any] = json.loads(self._request("/status")[1])
        return found

    def until(self, condition: Callable[[Page], object], what: str, timeout_s: float = 90.0) -> Page:
        """The first page for which the condition is true."""
        return wait_for(
            lambda: page if condition(page := self.page()) else None,
            timeout_s,
            what,
            logs=self.log,
            interval=POLL_S,
            retry=(OSError, http.client.HTTPException),
        )

    def scrape_durations(self, number: int = 20) -> list[float]:
        """Durations of this number of scrapes, sorted."""
        return sorted(took_s(self.process.pid, lambda: self._request("/metrics")) for _ in range(number))

    def events(self, kind: str) -> list[tuple[str, str]]:
        """Level and detail of all events of a kind."""
        return [(event["level"], event["detail"]) for event in self.status()["events"] if event["event"] == kind]

    def of_gpu(self, gpu: int) -> dict[str, Any]:
        """Status entry of one GPU."""
        found: dict[str, Any] = self.status()["gpus"]["gpus"][gpu]
        return found

    def of_worker(self, rank: int) -> dict[str, Any]:
        """Status entry of one worker."""
        found: dict[str, Any] = next(worker for worker in self.status()["workers"] if worker["rank"] == rank)
        return found

    # -- workers -------------------------------------------------------------------------------------

    def use_gpu(self, devices: object, *options: str) -> list[str]:
        """The command of a program that uses these GPUs."""
        variables = {**self._environment, "CUDA_VISIBLE_DEVICES": str(devices)}
        assigned = [f"{name}={value}" for name, value in variables.items()]
        return ["env", *assigned, sys.executable, USE_GPU, *options]

    def work(self, rank: int, *command: str) -> None:
        """Start a worker."""
        self.wrappers.start(self.tasks[rank], *command)

    def run_foreign(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a program that does not belong to the job."""
        others = {name: value for name, value in environment().items() if not name.startswith("GPUJOB")}
        self._started.append(subprocess.Popen(command, env=others, stdout=subprocess.DEVNULL))
        return self._started[-1]

    def stop(self) -> None:
        """Terminate everything that was started."""
        if hasattr(self, "scenario"):
            self.scenario.release()
            self.write()
        for process in self._started:
            process.terminate()

    def close(self) -> None:
        """Stop everything and wait for its end."""
        self.stop()
        for process in self._started:
            process.wait(timeout=60)
        self.wrappers.close()
        for path in self._processes.iterdir():
            self._end_child(path.name)

    @staticmethod
    def _end_child(pid: str) -> None:
        """Kill the child that a killed worker left behind."""
        try:
            if USE_GPU.encode() in Path("/proc", pid, "cmdline").read_bytes():
                os.kill(int(pid), signal.SIGKILL)
        except (OSError, ValueError):
            pass  # it has ended, or the file is a temporary one

    def kill(self) -> None:
        """Kill the sidecar with SIGKILL."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
