"""The plan of `gpujob run`: processes on this machine."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from launcher.plan.plan import Plan
from launcher.programs.wrapper import task_visible_devices
from launcher.show.local_view import describe_local, local_facts, render_local
from launcher.steps import local_steps
from tests.support.launcher import clean_environment, gpujob, job_spec, plan_of


def two_nodes(**over: Any) -> Plan:
    workers = [{"role": "a", "count": 4, "gpus": 1, "command": "x {rank} {leader}"}]
    workers += [{"role": "ctl", "command": "y", "env": {"OWN": "1"}}]
    return plan_of(job_spec(resources={"nodes": 2, "gpus_per_node": 2}, workers=workers, **over), local=True)


def test_one_machine_stands_for_all_nodes_and_their_gpus() -> None:
    plan = two_nodes()
    found = describe_local(plan, local_facts(plan, "lab.example.org"))
    assert (found.script, found.srun) == (None, ())
    assert [(process.node, process.cuda_visible_devices) for process in found.processes] == [
        *(("lab-n0", "0"), ("lab-n0", "1"), ("lab-n1", "2"), ("lab-n1", "3"), ("lab-n0", ""))
    ]
    assert found.processes[2].command == ("x", "2", "127.0.0.1")
    named = local_facts(plan, "lab", ("p", "q", "r"))
    assert (named.hosts, named.address(1)) == (("p", "q"), "127.0.0.1")


@pytest.mark.parametrize("runtime", [None, "apptainer", "enroot"])
def test_the_local_view_equals_the_started_processes(runtime: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    container = {"container": {"image": "i.sif", "runtime": runtime}} if runtime else {}
    plan = two_nodes(env={"A": "1"}, secrets=["HF_TOKEN"], **container)
    monkeypatch.setattr("launcher.steps.steps.read_secrets", lambda _, names: dict.fromkeys(names, "hunter2"))
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    started: list[tuple[list[str], dict[str, str]]] = []

    def start(self: local_steps.LocalSteps, argv: list[str], environment: dict[str, str], *_: object) -> Any:
        started.append((argv, environment))
        return type("Process", (), {"pid": 1})()

    monkeypatch.setattr(local_steps.LocalSteps, "_start", start)
    facts = local_facts(plan, "lab")
    local_steps.LocalSteps(plan, facts).start_tasks(plan.tasks, 0)
    body = describe_local(plan, facts)
    for (argv, environment), process in zip(started, body.processes, strict=True):
        assert (process.command[0] == runtime) == (runtime is not None)
        assert argv[argv.index("--") + 1 :] == list(process.command)
        assert argv[argv.index("--gpus") + 1] == process.cuda_visible_devices
        names = set(process.environment) - {"CUDA_VISIBLE_DEVICES"}
        changed = {name for name, value in environment.items() if os.environ.get(name) != value}
        assert names == {name for name in changed if not name.startswith("APPTAINERENV_")}


@pytest.mark.parametrize("devices", ["4,5,6,7", "GPU-a,GPU-b,GPU-c,GPU-d", "4,5", "", None])
def test_visible_gpus_equal_those_of_the_wrappers(devices: str | None) -> None:
    plan = two_nodes()
    found = describe_local(plan, local_facts(plan, "lab"), devices)
    visible = [process.cuda_visible_devices for process in found.processes]
    assert visible == [
        task_visible_devices(word, None if devices is None else devices.encode()).decode()
        for word in ("0", "1", "2", "3", "")
    ]
    assert visible == {
        "4,5,6,7": ["4", "5", "6", "7", ""],
        "GPU-a,GPU-b,GPU-c,GPU-d": ["GPU-a", "GPU-b", "GPU-c", "GPU-d", ""],
        "4,5": ["4", "5", "2", "3", ""],
    }.get(devices or "", ["0", "1", "2", "3", ""])


def test_visible_devices_of_the_job_file_have_precedence() -> None:
    plan = two_nodes(env={"CUDA_VISIBLE_DEVICES": "7,6,5,4"})
    found = describe_local(plan, local_facts(plan, "lab"), "0,1,2,3")
    assert [process.cuda_visible_devices for process in found.processes] == ["7", "6", "5", "4", ""]


def test_gpus_of_parallel_points_depend_on_their_slot() -> None:
    plan = two_nodes()
    body = describe_local(plan, local_facts(plan, "lab"))
    expected = "2 points of the sweep run at once, each on its own GPUs; the GPUs shown are those of the first"
    assert expected in " ".join(render_local(body, 2).split())
    assert "slot" not in render_local(body)
    assert "slot" not in render_local(body.replace(gpus_per_node=0), 2)


def test_plan_local_uses_visible_devices_and_mentions_parallel_points(tmp_path: Path) -> None:
    workers = [{"count": 2, "gpus": 1, "command": "x {v}"}]
    job = {"name": "j", "resources": {"gpus_per_node": 2}, "workers": workers}
    (tmp_path / "job.yaml").write_text(json.dumps({**job, "sweep": {"max_parallel": 2, "grid": {"v": [1, 2]}}}))
    arguments = ("plan", "job.yaml", "--local", "--point", "0")
    environment = clean_environment(CUDA_VISIBLE_DEVICES="4,5,6,7")
    body = json.loads(gpujob(*arguments, "--json", cwd=tmp_path, env=environment).stdout)
    assert [process["cuda_visible_devices"] for process in body["processes"]] == ["4", "5"]
    shown = gpujob(*arguments, cwd=tmp_path, env=environment).stdout
    assert "GPUs 4, dist_init port 8300\n  x 1\n" in shown
    assert "2 points of the sweep run at once" in " ".join(shown.split())


def test_shared_variables_are_listed_once() -> None:
    plan = two_nodes(env={"A": "1"})
    text = render_local(describe_local(plan, local_facts(plan, "lab")))
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("variables in addition to the user's own: A CUDA_VISIBLE_DEVICES GPUJOB_ATTEMPT") == 2
    assert text.count("variables in addition to the user's own: ") == 2, (
        "one list for the GPU workers and one for the other"
    )
    assert text.count(" OWN") == 1
    assert "\na_w1: rank 1, on lab-n0, GPUs 1\n  x 1 127.0.0.1\n" in text
    assert "\nctl_w0: rank 4, on lab-n0\n  y\n" in text
