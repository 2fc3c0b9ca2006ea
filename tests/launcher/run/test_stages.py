"""When a stage may begin, what is said of a serving job, and which ports it gets."""

import dataclasses
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from exporter.contract import run_files
from launcher.plan.plan import Plan, ReadinessPlan, ReadyRule, RunFacts
from launcher.report.verification import result_logs
from launcher.run.before.nodes_survey import needs_survey
from launcher.run.before.readiness import MOST_NAMED, RuleStatus, missing_text, worker_totals
from launcher.run.job_log import access_lines, launch_lines, place_lines
from launcher.run.orchestrator import locate_job
from launcher.run.stages import ReadinessState, Stages, unready_workers
from launcher.steps.steps import Steps
from tests.support.launcher import job_spec, plan_of

RULES = (
    ReadyRule("etcd", "tcp", 0, 2379, before="workers"),
    ReadyRule("decode_w0", "http", 0, 6100, "/health"),
    ReadyRule("", "dynamo", 0, 8000, "/health", {"decode": 1}),
)


def serving_plan() -> Plan:
    """etcd, a decode worker, a front end, nginx and a benchmark."""
    roles = ("etcd", "decode", "frontend", "nginx", "benchmark")
    plan = plan_of(job_spec(resources={"nodes": 5}, workers=[{"role": role, "command": "x"} for role in roles]))
    changed: dict[str, dict[str, Any]] = {
        "etcd": {"stage": "infra", "ports": {"etcd": 2379}},
        "decode": {"ports": {"http": 6100}},
        "frontend": {"stage": "frontends", "ports": {"http": 8180}},
        "nginx": {"stage": "balancer", "ports": {"http": 8000}},
        "benchmark": {"stage": "benchmark"},
    }
    tasks = tuple(dataclasses.replace(planned, **changed[planned.task.role]) for planned in plan.tasks)
    tasks = tuple(
        dataclasses.replace(planned, task=dataclasses.replace(planned.task, node_index=index), leader_node=index)
        for index, planned in enumerate(sorted(tasks, key=lambda planned: roles.index(planned.task.role)))
    )
    return dataclasses.replace(plan, tasks=tasks, readiness=ReadinessPlan(RULES, 60.0))


def facts_in(folder: Path, **over: Any) -> RunFacts:
    return RunFacts("4459", folder, tuple(f"cn0{index}" for index in range(5)), **over)


class Made:
    """Stages of a serving job, with what is ready as the test says it."""

    def __init__(self, folder: Path, plan: Plan | None = None) -> None:
        self.folder = folder
        steps = Mock(spec=Steps)
        steps.start_beside.return_value = Mock(spec=subprocess.Popen, poll=Mock(return_value=None))
        plan = plan or serving_plan()
        self.rules = plan.readiness.rules if plan.readiness is not None else ()
        self.readiness = ReadinessState(plan, facts_in(folder), steps)
        self.stages = Stages(plan, facts_in(folder), self.readiness)

    def tell(self, ready: Sequence[bool], attempt: int = 0) -> None:
        """Which rules hold."""
        rules = self.rules
        standings = [RuleStatus(one, rule.expected if one else {}) for one, rule in zip(ready, rules, strict=True)]
        seen, expected = worker_totals(rules, standings)
        body = {"attempt": attempt, "ready": all(ready), "waiting": missing_text(rules, standings, seen, expected)}
        body |= {"seen": seen, "expected": expected, "rules": [{"ready": one} for one in ready]}
        run_files.write_json(self.folder / "readiness.json", body)
        self.readiness._next_read_at = 0.0
        self.readiness.poll()

    def take(self) -> list[str]:
        """The stages that may begin now."""
        found = []
        while tasks := self.stages.advance():
            found.append(tasks[0].stage)
        return found


def test_a_stage_begins_when_what_it_waits_for_is_ready(tmp_path: Path) -> None:
    made = Made(tmp_path)
    assert made.take() == ["infra"]
    made.tell([True, False, False])
    assert made.take() == ["workers", "frontends", "balancer"]
    made.tell([True, True, False])
    assert made.take() == []
    made.tell([True, True, True])
    assert made.take() == ["benchmark"]
    assert made.stages.remaining_tasks == []


def test_what_was_ready_in_an_earlier_attempt_is_not(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.take()
    made.tell([True, True, True], attempt=3)
    assert made.take() == []


@pytest.mark.parametrize(("attempt", "name"), [(0, "benchmark.out"), (2, "benchmark_a2.out")])
def test_each_attempt_has_a_log_of_its_benchmark(attempt: int, name: str, tmp_path: Path) -> None:
    steps = Mock(spec=Steps)
    ReadinessState(serving_plan(), facts_in(tmp_path, attempt=attempt), steps).poll()
    ((_, output), _) = steps.start_beside.call_args
    assert output == tmp_path / name
    manifest = dataclasses.replace(serving_plan().manifest, run_dir=tmp_path)
    assert result_logs(manifest, [], attempt) == [tmp_path / name]


def test_without_rules_everything_starts_at_once(tmp_path: Path) -> None:
    made = Made(tmp_path, dataclasses.replace(serving_plan(), readiness=None))
    assert made.take() == ["infra", "workers", "frontends", "balancer", "benchmark"]


def test_a_job_that_is_not_ready_in_time_names_who_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(tmp_path)
    made.take()
    made.tell([True, False, False])
    made.take()
    assert not made.stages.is_overdue()
    monkeypatch.setattr("launcher.run.stages.time.monotonic", lambda: float("inf"))
    assert made.stages.is_overdue()
    cause, failed, lines = made.stages.describe_missing_services(dict)
    assert cause == "not ready after 60 s: missing decode_w0"
    assert (failed["worker"], failed["reason"]) == ("decode_w0", "launch_failed")
    assert any("decode_w0" in line for line in lines)


@pytest.mark.parametrize(
    ("ready", "expected", "words"),
    [
        ((True, False, False), 3, "decode_w0 (waiting for 0 prefills and 3 decodes)"),
        ((False, True, False), 1, "etcd (waiting for 0 prefills and 1 decodes)"),
        ((False, False, True), 1, "etcd, decode_w0"),
    ],
    ids=["more of its role", "another", "all"],
)
def test_who_else_is_waited_for_is_said_beside_who_is_missing(
    ready: Sequence[bool], expected: int, words: str, tmp_path: Path
) -> None:
    rules = (*RULES[:2], dataclasses.replace(RULES[2], expected={"decode": expected}))
    made = Made(tmp_path, dataclasses.replace(serving_plan(), readiness=ReadinessPlan(rules, 60.0)))
    made.tell(ready)
    cause, failed, _ = made.stages.describe_missing_services(dict)
    assert cause == f"not ready after 60 s: missing {words}"
    assert failed["evidence"][0] == cause.replace(f": missing {words.partition(' (')[0]}", "")


def test_a_front_end_that_counts_nothing_is_waited_for_as_the_model(tmp_path: Path) -> None:
    rules = (*RULES[:2], ReadyRule("", "vllm", 0, 8000, "/health"))
    made = Made(tmp_path, dataclasses.replace(serving_plan(), readiness=ReadinessPlan(rules, 60.0)))
    made.tell((True, False, False))
    assert (
        made.stages.describe_missing_services(dict)[0]
        == "not ready after 60 s: missing decode_w0 (waiting for the model)"
    )


def missing_of(folder: Path, count: int, *, told: bool = False) -> tuple[str, dict[str, Any], list[str]]:
    """What is said of a job of so many decode workers that were never ready, as it was ``told`` before or not."""
    plan = serving_plan()
    decode = next(planned for planned in plan.tasks if planned.task.role == "decode")
    tasks = tuple(
        dataclasses.replace(
            decode,
            task=dataclasses.replace(decode.task, worker=f"decode_w{index}", rank=index, logs=(f"w{index}.out",)),
        )
        for index in range(count)
    )
    rules = tuple(ReadyRule(f"decode_w{index}", "http", 1, 6100 + index, "/health") for index in range(count))
    changed = dataclasses.replace(plan, tasks=tasks, readiness=ReadinessPlan(rules, 60.0))
    for index in range(count):
        (folder / f"w{index}.out").write_text("loading; a shard is not ready: wait\n")
    made = Made(folder, changed)
    if told:
        made.tell([False] * count)
        assert (made.readiness.content or {})["waiting"].startswith("decode_w0")
    return made.stages.describe_missing_services(dict)


def test_all_who_are_missing_are_the_cause(tmp_path: Path) -> None:
    cause, failed, lines = missing_of(tmp_path, 3)
    assert cause == "not ready after 60 s: missing decode_w0, decode_w1 and 1 more"
    assert [(entry["worker"], entry["rank"], entry["node"]) for entry in failed["missing"]] == [
        (f"decode_w{index}", index, "cn01") for index in range(3)
    ]
    assert (failed["worker"], failed["rank"], failed["missing_total"]) == ("decode_w0", 0, 3)
    assert failed["evidence"] == ["not ready after 60 s", *lines]
    assert lines[3:5] == ["w0.out:", "    loading; a shard is not ready: wait"]


def test_of_many_who_are_missing_the_first_are_named(tmp_path: Path) -> None:
    cause, failed, lines = missing_of(tmp_path, 200)
    named = [f"decode_w{index}" for index in range(MOST_NAMED)]
    assert cause == "not ready after 60 s: missing decode_w0, decode_w1 and 198 more"
    assert [entry["worker"] for entry in failed["missing"]] == named
    assert failed["missing_total"] == 200
    evidence = failed["evidence"]
    assert [line for line in evidence if line.endswith("no answer yet")] == lines[:MOST_NAMED]
    assert evidence[MOST_NAMED + 1] == f"and {200 - MOST_NAMED} more are not ready"
    assert evidence[MOST_NAMED + 2] == "w0.out:"
    assert len(evidence) < 4 * MOST_NAMED


@pytest.mark.parametrize("count", [1, 2, 12])
def test_who_is_missing_is_said_once(count: int, tmp_path: Path) -> None:
    cause, failed, _ = missing_of(tmp_path, count, told=True)
    names = {1: "decode_w0", 2: "decode_w0, decode_w1", 12: "decode_w0, decode_w1 and 10 more"}
    assert cause == f"not ready after 60 s: missing {names[count]}"
    assert failed["evidence"][0] == "not ready after 60 s"
    assert [entry["worker"] for entry in failed["missing"]] == [f"decode_w{n}" for n in range(min(count, MOST_NAMED))]


def test_where_front_ends_alone_are_asked_the_model_is_missing(tmp_path: Path) -> None:
    rules = (ReadyRule("", "dynamo", 0, 8000, "/health", {"decode": 1}),)
    made = Made(tmp_path, dataclasses.replace(serving_plan(), readiness=ReadinessPlan(rules, 60.0)))
    made.tell([False])
    cause, failed, _ = made.stages.describe_missing_services(dict)
    assert (cause, failed["evidence"][0]) == ("not ready after 60 s: missing 0 prefills and 1 decodes", cause)
    assert failed["missing"] == [{"worker": "the model", "rank": None, "node": "cn00"}]


def test_a_job_that_was_ready_once_may_take_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(tmp_path)
    made.tell([True, True, True])
    made.take()
    assert not made.stages.is_overdue()
    made.tell([True, False, True])
    monkeypatch.setattr("launcher.run.stages.time.monotonic", lambda: float("inf"))
    assert not made.stages.is_overdue()


def test_only_who_is_asked_for_by_name_can_be_named() -> None:
    assert unready_workers(serving_plan(), {}) == ["etcd", "decode_w0"]
    assert unready_workers(serving_plan(), {"rules": [{"ready": True}, {"ready": False}, {"ready": False}]}) == [
        "decode_w0"
    ]


def test_where_everything_is_is_told(tmp_path: Path) -> None:
    facts = facts_in(tmp_path, addresses=tuple(f"10.0.0.{index}" for index in range(5)), port_offset=17)
    plan = serving_plan()
    assert place_lines(plan, facts)[5:] == ["Master IP address (node 0): 10.0.0.0", "Nginx node (node 3): cn03"]
    assert launch_lines(plan.tasks[1], facts) == [
        "Decode worker 0 leader: cn01 (10.0.0.1)",
        "Launching decode worker 0, node 1 (local_rank 0): cn01",
    ]
    assert launch_lines(plan.tasks[2], facts, 1) == ["Launching frontend_w0, node 2: cn02, run 2"]
    assert access_lines(plan, facts, local=False) == [
        "Frontend available at: http://cn03:8017",
        "Connect to the nginx node: srun --jobid 4459 -w cn03 --overlap --pty bash",
        "Connect to the master node: srun --jobid 4459 -w cn00 --overlap --pty bash",
    ]


def test_a_job_that_serves_nobody_says_no_more_than_where_it_is(tmp_path: Path) -> None:
    plan, facts = plan_of(), RunFacts("1", tmp_path, ("cn00",))
    assert place_lines(plan, facts) == ["Node 0: cn00"]
    assert launch_lines(plan.tasks[0], facts) == ["Launching worker worker 0, node 0 (local_rank 0): cn00"]
    assert access_lines(plan, facts, local=False) == []
    assert not needs_survey(plan)


def test_words_of_slurm_from_before_the_survey_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "cn[00-04]")
    earlier = "slurmstepd: error: *** JOB 4459 ON cn00 CANCELLED AT 2025-01-01T00:00:00 DUE TO PREEMPTION ***"
    (tmp_path / "log.err").write_text(f"{earlier}\n")
    facts, steps = locate_job(serving_plan(), tmp_path, 0.0, local=False)
    with (tmp_path / "log.err").open("a") as log:
        log.write("slurmstepd: error: *** JOB 4459 ON cn00 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\n")
    steps.update_facts(dataclasses.replace(facts, port_offset=17))
    assert steps.query_end().reason == "time_limit"
