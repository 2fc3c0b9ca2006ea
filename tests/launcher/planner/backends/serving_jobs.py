"""Shared by the tests of serving jobs: job files, plans, and stand-in engines as processes."""

import http.client
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from launcher.errors import TopologyError
from launcher.jobfile.jobfile import parse_job
from launcher.plan.placeholders import fill_template, task_argv, task_environment
from launcher.plan.plan import Plan, ReadyRule, TaskPlan
from tests.support.launcher import clean_environment, facts_of, plan_of

ENGINES = Path(__file__).resolve().parents[3] / "engines"


def plan_from(text: str, cluster: dict[str, object] | None = None, *, local: bool = False) -> Plan:
    """The plan of a job file."""
    return plan_of(parse_job(text, "job.yaml"), cluster, local=local)


def problems_of(text: str) -> list[str]:
    """Problems of a job file beyond its keys and values."""
    try:
        plan_from(text)
    except TopologyError as error:
        return list(error.problems)
    return []


def planned(plan: Plan, worker: str, local_rank: int = 0) -> TaskPlan:
    """One task of a plan."""
    return next(entry for entry in plan.tasks if entry.task.worker == worker and entry.task.local_rank == local_rank)


def argv_of(plan: Plan, worker: str, local_rank: int = 0) -> list[str]:
    """The arguments that start one task as job 4459 on cn00, cn01, ..."""
    return task_argv(plan, planned(plan, worker, local_rank), facts_of(plan))


def environment_of(plan: Plan, worker: str, local_rank: int = 0) -> dict[str, str]:
    """Environment variables of one task."""
    return task_environment(plan, planned(plan, worker, local_rank), facts_of(plan), 0)


def option(argv: Sequence[str], name: str) -> str | None:
    """The value of an option, or None without the option."""
    return argv[argv.index(name) + 1] if name in argv else None


def rule_text(rule: ReadyRule) -> str:
    """A rule as one line."""
    expected = " ".join(f"{count} {role}" for role, count in rule.expected.items())
    asked = f"{rule.kind} node {rule.node} port {rule.port} {rule.path}".rstrip()
    return f"{rule.subject or 'model'}: {asked}{f' expects {expected}' if expected else ''}, before {rule.before}"


def plan_text(plan: Plan) -> str:
    """All tasks of a serving job as text for golden files."""
    facts, lines = facts_of(plan), []
    common = _common_variables()
    for entry in plan.tasks:
        task = entry.task
        parts = [
            f"node {task.node_index}; rank {task.rank}; {entry.stage}",
            f"gpus {','.join(map(str, task.gpus))}" if task.gpus else "",
            f"sees {','.join(map(str, entry.visible))}" if entry.visible else "",
            f"ports {' '.join(f'{name}={port}' for name, port in entry.ports.items())}" if entry.ports else "",
            "service" if entry.service else "",
            f"step {entry.step}" if entry.step else "",
            f"metrics {entry.metrics}" if entry.metrics else "",
        ]
        lines.append(f"{task.worker} p{task.local_rank}: {'; '.join(part for part in parts if part)}")
        lines.append(f"  logs {' '.join(task.logs)}")
        lines.append(f"  {shlex.join(task_argv(plan, entry, facts))}")
        environment = task_environment(plan, entry, facts, 0)
        lines += [
            f"  {name}={environment[name]}" for name in sorted(environment) if name not in common or name in entry.env
        ]
    lines += ["", "readiness"]
    lines += [f"  {rule_text(rule)}" for rule in (plan.readiness.rules if plan.readiness else ())]
    for name, text in plan.templates.items():
        lines += ["", f"{name}", *(f"  {line}" for line in fill_template(plan, text, facts).splitlines())]
    return "\n".join(lines) + "\n"


def _common_variables() -> set[str]:
    """Variables that every task of every job has."""
    bare = plan_of()
    return set(task_environment(bare, bare.tasks[0], facts_of(bare), 0))


@contextmanager
def running(argv: Sequence[str | Path], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program until the end of the block, with its output in ``log``."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [str(word) for word in argv], stdout=output, stderr=output, env=clean_environment(**environment)
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def engine(name: str, *options: object) -> list[str]:
    """The arguments that start a stand-in."""
    return [sys.executable, str(ENGINES / f"{name}.py"), *map(str, options)]


def ask(url: str, body: bytes | None = None, timeout: float = 60.0) -> tuple[int, bytes]:
    """Status and body of a response, or status 0 without a response."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    try:
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        connection.request("GET" if body is None else "POST", path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def job(**parts: object) -> str:
    """The text of a job file with these parts."""
    return yaml.safe_dump({"name": "serve", **parts}, sort_keys=False)
