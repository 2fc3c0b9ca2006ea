"""Stages of a serving job: their start, missing services, and messages."""

import dataclasses
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from exporter.contract import run_files
from exporter.contract.records import to_json
from launcher.plan.plan import Plan, ReadinessPlan, ReadyRule, RunFacts
from launcher.report.verification import EndedJob, result_logs
from launcher.run.before.nodes_survey import needs_survey
from launcher.run.before.readiness import MOST_NAMED, RuleStatus, missing_text, worker_totals
from launcher.run.job_log import access_lines, launch_lines, place_lines
from launcher.run.orchestrator import locate_job
from launcher.run.stages import ReadinessState, Stages, unready_workers
from launcher.steps.steps import Steps
from tests.support.launcher import job_readiness, job_spec, plan_of

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


class ServingJob:
    """Stages of a serving job whose readiness the test sets."""

    def __init__(self, folder: Path, plan: Plan | None = None) -> None:
        self.folder = folder
        steps = Mock(spec=Steps)
        steps.start_program.return_value = Mock(spec=subprocess.Popen, poll=Mock(return_value=None))
        plan = plan or serving_plan()
        self.rules = plan.readiness.rules if plan.readiness is not None else ()
        self.readiness = ReadinessState(plan, facts_in(folder), steps)
        self.stages = Stages(plan, facts_in(folder), self.readiness)

    def set_ready(self, ready: Sequence[bool], attempt: int = 0) -> None:
        """Write the readiness of each rule and poll it."""
        rules = self.rules
        statuses = [
            RuleStatus(is_ready, rule.expected if is_ready else {}) for is_ready, rule in zip(ready, rules, strict=True)
        ]
        seen, expected = worker_totals(rules, statuses)
        waiting = missing_text(rules, statuses, seen, expected)
        found = job_readiness(*({"ready": is_ready} for is_ready in ready), attempt=attempt, ready=all(ready))
        found = found._replace(waiting=waiting, seen=seen, expected=expected)
        run_files.write_json(self.folder / "readiness.json", to_json(found))
        self.readiness._next_read_at = 0.0
        self.readiness.poll()

    def missing(self) -> tuple[str, dict[str, Any], list[str]]:
        """What a job that is not ready in time reports."""
        return self.stages.describe_missing_services(dict)

    def start_stages(self) -> list[str]:
        """Start and return the stages that may begin now."""
        started_stages = []
        while tasks := self.stages.advance():
            started_stages.append(tasks[0].stage)
        return started_stages

    def overdue_after(self, monkeypatch: pytest.MonkeyPatch, *after_s: float) -> list[bool]:
        """Whether readiness has timed out in turns so many seconds from now."""
        now, found = time.monotonic(), []
        for moment in (now + seconds for seconds in after_s):
            monkeypatch.setattr("launcher.run.stages.time.monotonic", lambda moment=moment: moment)
            found.append(self.stages.is_overdue())
        return found


def test_a_stage_begins_when_its_services_are_ready(tmp_path: Path) -> None:
    job = ServingJob(tmp_path)
    assert job.start_stages() == ["infra"]
    job.set_ready([True, False, False])
    assert job.start_stages() == ["workers", "frontends", "balancer"]
    job.set_ready([True, True, False])
    assert job.start_stages() == []
    job.set_ready([True, True, True])
    assert job.start_stages() == ["benchmark"]
    assert job.stages.remaining_tasks == []


def test_readiness_of_another_attempt_does_not_count(tmp_path: Path) -> None:
    job = ServingJob(tmp_path)
    job.start_stages()
    job.set_ready([True, True, True], attempt=3)
    assert job.start_stages() == []


@pytest.mark.parametrize(("attempt", "name"), [(0, "benchmark.out"), (2, "benchmark_a2.out")])
def test_each_attempt_has_its_own_benchmark_log(attempt: int, name: str, tmp_path: Path) -> None:
    steps = Mock(spec=Steps)
    ReadinessState(serving_plan(), facts_in(tmp_path, attempt=attempt), steps).poll()
    ((_, output), _) = steps.start_program.call_args
    assert output == tmp_path / name
    manifest = dataclasses.replace(serving_plan().manifest, run_dir=tmp_path)
    assert result_logs(EndedJob(manifest, attempt, None, {}, ())) == [tmp_path / name]


def test_all_stages_start_immediately_without_rules(tmp_path: Path) -> None:
    job = ServingJob(tmp_path, dataclasses.replace(serving_plan(), readiness=None))
    assert job.start_stages() == ["infra", "workers", "frontends", "balancer", "benchmark"]


def test_a_job_that_is_not_ready_in_time_names_the_missing_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ServingJob(tmp_path)
    job.start_stages()
    job.set_ready([True, False, False])
    job.start_stages()
    assert job.overdue_after(monkeypatch, 0, 50, 70) == [False, False, True]
    cause, failed, lines = job.missing()
    assert cause == "not ready after 60 s: missing decode_w0"
    assert (failed["worker"], failed["reason"]) == ("decode_w0", "launch_failed")
    assert any("decode_w0" in line for line in lines)


@pytest.mark.parametrize(
    ("ready", "expected", "missing_text"),
    [
        ((True, False, False), 3, "decode_w0 (waiting for 0 prefills and 3 decodes)"),
        ((False, True, False), 1, "etcd (waiting for 0 prefills and 1 decodes)"),
        ((False, False, True), 1, "etcd, decode_w0"),
    ],
    ids=["more of its role", "another", "all"],
)
def test_other_awaited_workers_are_named_after_the_missing_services(
    ready: Sequence[bool], expected: int, missing_text: str, tmp_path: Path
) -> None:
    rules = (*RULES[:2], dataclasses.replace(RULES[2], expected={"decode": expected}))
    job = ServingJob(tmp_path, dataclasses.replace(serving_plan(), readiness=ReadinessPlan(rules, 60.0)))
    job.set_ready(ready)
    cause, failed, _ = job.missing()
    assert cause == f"not ready after 60 s: missing {missing_text}"
    assert failed["evidence"][0] == cause.replace(f": missing {missing_text.partition(' (')[0]}", "")


def test_a_front_end_without_counts_is_named_as_the_model(tmp_path: Path) -> None:
    rules = (*RULES[:2], ReadyRule("", "vllm", 0, 8000, "/health"))
    job = ServingJob(tmp_path, dataclasses.replace(serving_plan(), readiness=ReadinessPlan(rules, 60.0)))
    job.set_ready((True, False, False))
    assert job.missing()[0] == "not ready after 60 s: missing decode_w0 (waiting for the model)"


def missing_services(
    folder: Path, count: int, *, has_readiness_file: bool = False
) -> tuple[str, dict[str, Any], list[str]]:
    """Missing services of a job with ``count`` decode workers, none of which was ever ready."""
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
    job = ServingJob(folder, changed)
    if has_readiness_file:
        job.set_ready([False] * count)
        assert job.readiness.found is not None
        assert job.readiness.found.waiting.startswith("decode_w0")
    return job.missing()


def test_all_missing_workers_are_in_the_cause(tmp_path: Path) -> None:
    cause, failed, lines = missing_services(tmp_path, 3)
    assert cause == "not ready after 60 s: missing decode_w0, decode_w1 and 1 more"
    assert [(entry["worker"], entry["rank"], entry["node"]) for entry in failed["missing"]] == [
        (f"decode_w{index}", index, "cn01") for index in range(3)
    ]
    assert (failed["worker"], failed["rank"], failed["missing_total"]) == ("decode_w0", 0, 3)
    assert failed["evidence"] == ["not ready after 60 s", *lines]
    assert lines[3:5] == ["w0.out:", "    loading; a shard is not ready: wait"]


def test_only_the_first_of_many_missing_workers_are_named(tmp_path: Path) -> None:
    cause, failed, lines = missing_services(tmp_path, 200)
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
def test_missing_workers_are_named_once(count: int, tmp_path: Path) -> None:
    cause, failed, _ = missing_services(tmp_path, count, has_readiness_file=True)
    names = {1: "decode_w0", 2: "decode_w0, decode_w1", 12: "decode_w0, decode_w1 and 10 more"}
    assert cause == f"not ready after 60 s: missing {names[count]}"
    assert failed["evidence"][0] == "not ready after 60 s"
    assert [entry["worker"] for entry in failed["missing"]] == [f"decode_w{n}" for n in range(min(count, MOST_NAMED))]


def test_the_model_is_missing_if_only_front_ends_have_rules(tmp_path: Path) -> None:
    rules = (ReadyRule("", "dynamo", 0, 8000, "/health", {"decode": 1}),)
    job = ServingJob(tmp_path, dataclasses.replace(serving_plan(), readiness=ReadinessPlan(rules, 60.0)))
    job.set_ready([False])
    cause, failed, _ = job.missing()
    assert (cause, failed["evidence"][0]) == ("not ready after 60 s: missing 0 prefills and 1 decodes", cause)
    assert failed["missing"] == [{"worker": "the model", "rank": None, "node": "cn00"}]


def test_a_job_that_was_ready_is_never_overdue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = ServingJob(tmp_path)
    job.set_ready([True, True, True])
    job.start_stages()
    assert not job.stages.is_overdue()
    job.set_ready([True, False, True])
    assert not any(job.overdue_after(monkeypatch, *range(0, 600, 50)))


def test_a_stop_of_the_job_does_not_count_for_readiness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = ServingJob(tmp_path)
    job.start_stages()
    assert job.overdue_after(monkeypatch, 0, 30, 3630, 3650, 3670) == [False, False, False, False, True]


def test_only_services_with_their_own_rule_are_named_as_unready() -> None:
    assert unready_workers(serving_plan(), None) == ["etcd", "decode_w0"]
    found = job_readiness({"ready": True}, {"ready": False}, {"ready": False})
    assert unready_workers(serving_plan(), found) == ["decode_w0"]


def test_nodes_and_addresses_of_all_services_are_logged(tmp_path: Path) -> None:
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


def test_a_job_without_services_logs_only_its_node(tmp_path: Path) -> None:
    plan, facts = plan_of(), RunFacts("1", tmp_path, ("cn00",))
    assert place_lines(plan, facts) == ["Node 0: cn00"]
    assert launch_lines(plan.tasks[0], facts) == ["Launching worker worker 0, node 0 (local_rank 0): cn00"]
    assert access_lines(plan, facts, local=False) == []
    assert not needs_survey(plan)


def test_slurm_messages_from_before_the_survey_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "cn[00-04]")
    earlier = "slurmstepd: error: *** JOB 4459 ON cn00 CANCELLED AT 2025-01-01T00:00:00 DUE TO PREEMPTION ***"
    (tmp_path / "log.err").write_text(f"{earlier}\n")
    facts, steps = locate_job(serving_plan(), tmp_path, 0.0, local=False)
    with (tmp_path / "log.err").open("a") as log:
        log.write("slurmstepd: error: *** JOB 4459 ON cn00 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\n")
    steps.update_facts(dataclasses.replace(facts, port_offset=17))
    assert steps.query_end().reason == "time_limit"
