"""Helpers of the launcher tests: hard names, plans, and real commands with timeouts."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml

from launcher.jobfile.jobfile import ClusterSpec, JobSpec
from launcher.plan.plan import Plan, RunFacts
from launcher.planner.planner import Invocation, make_plan
from launcher.run.before.readiness import JobReadiness, RuleReadiness
from launcher.rundir import rundir
from launcher.steps.batch_script import render_sbatch

ROOT = Path(__file__).resolve().parents[2]
GPUJOB = Path(sys.executable).with_name("gpujob")
EMBED = ROOT / "examples" / "embed" / "embed.py"
FAULTY_EMBED = ROOT / "tests" / "engines" / "faulty_embed.py"

HARD_NAMES = (
    "a space",
    "it's",
    'a "quote"',
    "$(touch pwned)",
    "`touch pwned`",
    "'; touch pwned; '",
    "two\nlines",
    "Übung 日本",
    "a) b (",
    "node[01-03,7]",
    "-n",
    "%j",
    "#SBATCH --hold",
    "*?~&|<>!",
    "{rank}",
    "back\\slash",
)  # names that users may give to a job or a folder; none contains a slash

OURS = (
    *("GPUJOB_", "SLURM_", "SBATCH_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_"),
    *("CUDA_VISIBLE_DEVICES", "PYTHONUNBUFFERED", "XDG_", "NO_COLOR"),
)

T = TypeVar("T")


def job_spec(**over: Any) -> JobSpec:
    """A job with one worker and these changes."""
    return JobSpec.model_validate({"name": "job", "workers": [{"command": "true"}], **over})


def invocation_in(folder: Path, *, local: bool = False) -> Invocation:
    """A command in this folder, with fixed values for everything that depends on the machine."""
    return Invocation(folder, folder, "ana", "20251122_041341", "/opt/gpujob/bin/python3", local)


def plan_of(
    spec: JobSpec | None = None,
    cluster: Mapping[str, Any] | None = None,
    *,
    job_dir: str = "/home/ana/jobs",
    workdir: str = "/home/ana/work",
    local: bool = False,
) -> Plan:
    """The plan of a job, with fixed values for everything that depends on the machine."""
    return make_plan(
        spec or job_spec(),
        ClusterSpec.model_validate(cluster or {}),
        invocation_in(Path(workdir), local=local)._replace(job_dir=Path(job_dir)),
    )


def facts_of(plan: Plan, *hosts: str) -> RunFacts:
    """The run facts of this plan as job 4459."""
    return RunFacts("4459", plan.run_dir("4459"), hosts or tuple(f"cn{index:02}" for index in range(plan.nodes)))


def job_readiness(*rules: Mapping[str, Any], **over: Any) -> JobReadiness:
    """Published readiness with these results of rules."""
    empty = {"subject": "", "kind": "http", "seen": {}, "expected": {}, "before": "", "detail": ""}
    entries = tuple(RuleReadiness(**{**empty, **rule}) for rule in rules)
    return JobReadiness(**{**JobReadiness(1, 0, False, None, 60.0, "", {}, {}, entries)._asdict(), **over})


def settled_run_dir(
    folder: Path, spec: Mapping[str, Any], *, kill_wait_s: float = 5.0, job_id: str = "local-1"
) -> Path:
    """A run directory as ``gpujob run`` creates it, before the job starts."""
    here = invocation_in(folder, local=True)._replace(python=sys.executable, kill_wait_s=kill_wait_s)
    plan = make_plan(job_spec(**spec), ClusterSpec(), here)
    return rundir.finalize_run_dir(rundir.stage_run_dir(plan, render_sbatch(plan)), plan, job_id)


def clean_environment(**over: str) -> dict[str, str]:
    """The environment of the tests without variables of a surrounding job or launcher."""
    state = {} if "HOME" in over else {"XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}
    return {name: value for name, value in os.environ.items() if not name.startswith(OURS)} | state | over


def poll(condition: Callable[[], T | None], what: str, timeout: float = 120.0) -> T:
    """The first true value of ``condition``. Fails after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"{what}: not within {timeout:g} s"
        time.sleep(0.04)


def processes_with(text: str | Path) -> dict[int, list[str]]:
    """Command lines, by pid, of other processes with ``text`` in their arguments or environment."""
    needle, found = os.fsencode(text), {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            cmdline, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
        except OSError:
            continue  # it has ended, or belongs to another user
        if needle in cmdline or needle in environment:
            found[int(entry.name)] = [os.fsdecode(argument) for argument in cmdline.split(b"\0")[:-1]]
    return found


def kill_all_with(folder: Path) -> None:
    """Kill all processes that a test has started with files in its own folder."""
    for _ in range(3):
        for pid in processes_with(f"{folder}/"):  # with the slash, because another folder may have the same prefix
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Empty if there is none."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_events(run_dir: Path, *names: str) -> list[dict[str, Any]]:
    """Events with these names so far, oldest first, or all events."""
    path = run_dir / "events.jsonl"
    text = path.read_text() if path.exists() else ""
    events = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # the last may be half-written
    return [event for event in events if not names or event["event"] in names]


def gpujob(
    *arguments: str | Path, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run a ``gpujob`` command to its end, with output through pipes."""
    return subprocess.run(
        [str(GPUJOB), *map(str, arguments)],
        cwd=cwd,
        env=clean_environment() if env is None else dict(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=timeout,
        check=False,
    )


class LocalJob:
    """``gpujob run`` of a job in its own folder. Leftover processes are killed at the end."""

    def __init__(
        self,
        folder: Path,
        spec: Mapping[str, Any],
        *options: str,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.output_file = folder / ".output"
        (folder / "job.yaml").write_text(yaml.safe_dump(dict(spec), allow_unicode=True))
        with self.output_file.open("wb") as out:
            self.process = subprocess.Popen(
                [*prefix, str(GPUJOB), "run", "job.yaml", *options],
                cwd=folder,
                env=clean_environment() if env is None else dict(env),
                stdin=stdin,
                stdout=out if stdout is None else stdout,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        kill_all_with(self.folder)

    def wait(self, timeout: float = 90.0) -> int:
        """Exit status of the command."""
        return self.process.wait(timeout)

    @property
    def output(self) -> str:
        """Output of the command so far."""
        return self.output_file.read_text(errors="surrogateescape")

    @property
    def run_dir(self) -> Path:
        """The run directory. Waits until it exists."""
        return poll(lambda: next(self.folder.glob("logs/local-*"), None), f"a run directory in {self.folder}")

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file of the run directory."""
        return read_json(self.run_dir / name)

    def report(self) -> dict[str, Any]:
        """The report of the ended job."""
        report = self.json("report.json")
        assert report, self.output + (self.run_dir / "log.out").read_text() + (self.run_dir / "log.err").read_text()
        return report

    def log(self) -> str:
        """The job log and the error log."""
        return (self.run_dir / "log.out").read_text() + (self.run_dir / "log.err").read_text()

    def worker(self, rank: int, restart: int = 0, role: str = "worker") -> dict[str, Any]:
        """The start record of one run of a worker. Waits until it exists."""
        path = self.run_dir / "workers" / f"{role}_w{rank}_rank{rank}_a0_r{restart}.start.json"
        return poll(lambda: read_json(path), f"{path.name} of {self.folder}")

    def sidecar_pid(self) -> int:
        """Pid of the sidecar. Waits until it runs."""

        def find_sidecar() -> int | None:
            processes = processes_with(self.run_dir)
            wanted = ["-m", "exporter", "sidecar", "--run-dir", str(self.run_dir)]
            sidecar_pids = (
                pid
                for pid, argv in processes.items()
                if argv[-5:] == wanted and "launcher.programs.supervisor" not in argv
            )
            return next(sidecar_pids, None)

        return poll(find_sidecar, f"a sidecar of {self.run_dir}")

    def phase(self, name: str, timeout: float = 120.0) -> None:
        """Wait until the job is in this phase. A short phase can be missed between two polls."""
        poll(lambda: self.json("state.json").get("phase") == name, f"phase {name} of {self.run_dir}", timeout)

    def lines(self) -> int:
        """Records in the output files."""
        return sum(path.read_bytes().count(b"\n") for path in self.run_dir.glob("output_worker_*.jsonl"))

    def lines_of(self, rank: int) -> int:
        """Records in the output file of one worker."""
        path = self.run_dir / f"output_worker_{rank}.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def left_over(self) -> dict[int, list[str]]:
        """Leftover processes of the job."""
        return processes_with(f"{self.folder}/")


def embed_job(
    faults: str = "", *, items: int = 300, rate: float = 100, count: int = 2, options: str = "", **over: Any
) -> dict[str, Any]:
    """A job of the example workload that takes ``items / count / rate`` seconds and a little more.

    ``faults`` are options of ``faulty_embed.py``.
    """
    program, corpus = shlex.quote(str(FAULTY_EMBED if faults else EMBED)), shlex.quote(str(EMBED))
    command = (
        f"python3 {program} --corpus {corpus} --items {items} --rate {rate:g} --log-every 10 --checkpoint-every 20"
    )
    return {
        "name": "embed",
        "workers": [{"role": "worker", "count": count, "command": f"{command} {options} {faults}".strip()}],
        "patterns": {"output": "output_worker_*.jsonl", "checkpoints": "checkpoint_*.json"},
        "progress": {"total_items": items},
        "monitoring": {"check_interval": 0.5, "linger": 0},
        **over,
    }
