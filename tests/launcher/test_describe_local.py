"""The plan of `gpujob run`: what it starts on this machine."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from launcher import local
from launcher.describe_local import describe_local, local_facts, render_local
from launcher.plan import Plan
from tests.launcher.support import job_spec, plan_of


def two_nodes(**over: Any) -> Plan:
    workers = [{"role": "a", "count": 4, "gpus": 1, "command": "x {rank} {leader}"}]
    workers += [{"role": "ctl", "command": "y", "env": {"OWN": "1"}}]
    return plan_of(job_spec(resources={"nodes": 2, "gpus_per_node": 2}, workers=workers, **over), local=True)


def test_one_machine_plays_all_nodes_and_their_gpus() -> None:
    plan = two_nodes()
    found = describe_local(plan, local_facts(plan, "lab.example.org"))
    assert json.loads(json.dumps(found)) == found
    assert (found["script"], found["srun"]) == (None, [])
    assert [(process["node"], process["cuda_visible_devices"]) for process in found["processes"]] == [
        *(("lab-n0", "0"), ("lab-n0", "1"), ("lab-n1", "2"), ("lab-n1", "3"), ("lab-n0", ""))
    ]
    assert found["processes"][2]["command"] == ["x", "2", "127.0.0.1"]
    named = local_facts(plan, "lab", ("p", "q", "r"))
    assert (named.hosts, named.address(1)) == (("p", "q"), "127.0.0.1")


def test_what_is_told_is_what_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = two_nodes(env={"A": "1"}, secrets=["HF_TOKEN"])
    monkeypatch.setattr("launcher.steps.read_secrets", lambda _, names: dict.fromkeys(names, "hunter2"))
    started: list[tuple[list[str], dict[str, str]]] = []

    def start(self: local.LocalSteps, argv: list[str], environment: dict[str, str], *_: object) -> Any:
        started.append((argv, environment))
        return type("Process", (), {"pid": 1})()

    monkeypatch.setattr(local.LocalSteps, "_start", start)
    monkeypatch.setattr("launcher.local.log_files", lambda *_: (str(tmp_path / "out"), str(tmp_path / "err")))
    facts = local_facts(plan, "lab")
    local.LocalSteps(plan, facts).start_tasks(plan.tasks, 0)
    body = describe_local(plan, facts)
    for (argv, environment), process in zip(started, body["processes"], strict=True):
        assert argv[argv.index("--") + 1 :] == process["command"]
        assert argv[argv.index("--gpus") + 1] == process["cuda_visible_devices"]
        names = set(process["environment"]) - {"CUDA_VISIBLE_DEVICES"}
        assert names == {name for name, value in environment.items() if os.environ.get(name) != value}


def test_variables_that_processes_share_are_told_once() -> None:
    plan = two_nodes(env={"A": "1"})
    text = render_local(describe_local(plan, local_facts(plan, "lab")))
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("variables beside the user's own: A CUDA_VISIBLE_DEVICES GPUJOB_ATTEMPT") == 2
    assert text.count("variables beside the user's own: ") == 2, "those of the GPUs' workers, and of the other"
    assert text.count(" OWN") == 1
    assert "\na_w1: rank 1, on lab-n0, GPUs 1\n  x 1 127.0.0.1\n" in text
    assert "\nctl_w0: rank 4, on lab-n0\n  y\n" in text
