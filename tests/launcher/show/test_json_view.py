"""The JSON of `gpujob plan --json`."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from exporter.contract.records import Record
from launcher.plan.plan import Plan
from launcher.rundir.files import plan_files
from launcher.show.json_view import ENTRIES_PER_CHUNK, describe_plan, dump_json_chunks, planned_facts
from launcher.show.records import PlannedWorker, PlanRecord
from launcher.steps import slurm_steps
from launcher.steps.batch_script import render_sbatch
from tests.support.launcher import gpujob, job_spec, plan_of
from tests.support.record_schema import problems, published_schema


def described(*args: Any) -> dict[str, Any]:
    """The JSON view of a plan, with this script, on these hosts."""
    return describe_plan(*args).to_json()


def view_of(resources: Mapping[str, Any], *hosts: str, **over: Any) -> dict[str, Any]:
    """The JSON view of a job with workers counted in `resources`."""
    plan = plan_of(job_spec(resources=dict(resources), workers=over.pop("workers", []), **over))
    return described(plan, render_sbatch(plan), hosts)


def two_roles() -> Plan:
    spec = job_spec(
        resources={"nodes": 2, "gpus_per_node": 2},
        workers=[{"role": "pre", "count": 1, "gpus": 4, "command": "x {node_index}"}, {"role": "ctl", "command": "y"}],
    )
    return plan_of(spec)


def test_the_json_view_has_all_workers_tasks_and_files() -> None:
    found = described(two_roles(), "#!script\n", ("n1", "n2"))
    assert PlanRecord.from_json(json.loads(json.dumps(found))).to_json() == found
    assert not list(problems(found, published_schema("plan")))
    assert set(found) == {
        *("schema", "job_name", "sbatch_nodes", "gpus_per_node", "cpus_per_node"),
        *("workers", "processes", "run_dir", "files", "targets", "script", "srun"),
    }
    assert (found["sbatch_nodes"], found["script"]) == (2, "#!script\n")
    assert found["run_dir"] == "/home/ana/work/logs/{job_id}_job_20251122_041341"
    assert found["workers"] == [
        {
            "worker": "pre_w0",
            "role": "pre",
            "index": 0,
            "nodes": ["n1", "n2"],
            "gpus": {"n1": [0, 1], "n2": [0, 1]},
        },
        {"worker": "ctl_w0", "role": "ctl", "index": 0, "nodes": ["n1"], "gpus": {"n1": []}},
    ]
    second = found["processes"][1]
    assert {key: value for key, value in second.items() if key != "environment"} == {
        "worker": "pre_w0",
        "role": "pre",
        "worker_index": 0,
        "rank": 1,
        "local_rank": 1,
        "leader": False,
        "node": "n2",
        "node_index": 1,
        "gpus": [0, 1],
        "cuda_visible_devices": None,
        "ports": {},
        "command": ["x", "1"],
        "stage": "workers",
        "service": False,
        "critical": True,
    }
    assert found["processes"][2]["cuda_visible_devices"] == "", "it sees none of those of its neighbours"
    assert "RANK" in second["environment"]


@pytest.mark.parametrize(
    ("resources", "visible"),
    [
        ({"gpus_per_node": 8, "decode_workers": 2, "gpus_per_decode": 4}, ["0,1,2,3", "4,5,6,7"]),
        ({"gpus_per_node": 4, "agg_workers": 1}, [None]),
        ({"gpus_per_node": 1, "agg_workers": 1, "gpus_per_agg": 2}, [None, None]),
        ({"gpus_per_node": 0, "agg_workers": 1}, [None]),
        (
            {"gpus_per_node": 12, "prefill_workers": 2, "gpus_per_prefill": 5},
            ["0,1,2,3,4", "5,6,7,8,9"],
        ),
    ],
)
def test_visible_devices_are_listed_for_tasks_with_part_of_a_node(
    resources: dict[str, int], visible: list[str | None]
) -> None:
    processes = view_of(resources)["processes"]
    assert [process["cuda_visible_devices"] for process in processes] == visible
    assert ["CUDA_VISIBLE_DEVICES" in process["environment"] for process in processes] == [
        devices is not None for devices in visible
    ]


def test_tasks_of_one_worker_on_one_node_share_a_gpu_list() -> None:
    resources = {"gpus_per_node": 2, "agg_workers": 1, "gpus_per_agg": 4, "process_granularity": "gpu"}
    found = view_of(resources, "b", "a")
    assert found["workers"][0]["nodes"] == ["b", "a"]
    assert found["workers"][0]["gpus"] == {"b": [0, 1], "a": [0, 1]}
    places = [(process["local_rank"], process["node"], process["gpus"]) for process in found["processes"]]
    assert places == [(0, "b", [0]), (1, "b", [1]), (2, "a", [0]), (3, "a", [1])]
    assert [process["leader"] for process in found["processes"]] == [True, False, False, False]


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer", "enroot"])
def test_the_command_of_a_task_is_shown_without_its_container(runtime: str) -> None:
    container = {"image": "/images/i.sqsh", "runtime": runtime}
    spec = job_spec(workers=[{"count": 2, "command": "serve -- {rank}"}], container=container)
    found = described(plan_of(spec), "")
    assert [process["command"] for process in found["processes"]] == [["serve", "--", "0"], ["serve", "--", "1"]]


class Entry(NamedTuple):
    rank: int
    texts: tuple[str, ...]


class Chunked(Record):
    SCHEMA = 1

    text: str
    none: str | None
    entries: tuple[Entry, ...]
    workers: tuple[PlannedWorker, ...] = (PlannedWorker(worker="a", role="b", index=0, nodes=("n",), gpus={"n": (1,)}),)
    lines: tuple[tuple[str, ...], ...] = (("srun", "a b"),)


@pytest.mark.parametrize("count", [0, 1, ENTRIES_PER_CHUNK, ENTRIES_PER_CHUNK + 1, 3 * ENTRIES_PER_CHUNK])
def test_json_in_chunks_equals_json_as_a_whole(count: int, hard_name: str) -> None:
    record = Chunked(text=hard_name, none=None, entries=tuple(Entry(rank, (hard_name,)) for rank in range(count)))
    assert "".join(dump_json_chunks(record)) == json.dumps(record.to_json(), ensure_ascii=False)


def test_hosts_are_used_in_the_order_given_and_no_more_than_needed() -> None:
    found = view_of({"gpus_per_node": 1, "agg_workers": 2, "nodes": 2}, "z", "b", "a")
    assert [process["node"] for process in found["processes"]] == ["z", "b"]
    assert found["sbatch_nodes"] == 2
    assert len(found["targets"]) == 2


def test_ports_are_those_of_the_plan() -> None:
    plan = two_roles()
    first = dataclasses.replace(plan.tasks[0], ports={"http": 6100})
    found = described(dataclasses.replace(plan, tasks=(first, *plan.tasks[1:])), "")
    assert [process["ports"] for process in found["processes"]] == [{"http": 6100}, {}, {}]


def test_services_are_tasks_but_not_workers() -> None:
    plan = two_roles()
    service = dataclasses.replace(plan.tasks[2], stage="balancer", service=True)
    found = described(dataclasses.replace(plan, tasks=(*plan.tasks[:2], service)), "")
    assert [worker["worker"] for worker in found["workers"]] == ["pre_w0"]
    assert [(process["stage"], process["service"]) for process in found["processes"]][1:] == [
        ("workers", False),
        ("balancer", True),
    ]


def test_the_json_view_has_no_values_of_variables() -> None:
    plan = plan_of(job_spec(env={"HF_TOKEN": "hunter2"}))
    text = json.dumps(described(plan, render_sbatch(plan)))
    assert "hunter2" not in text
    assert "HF_TOKEN" in text


def test_the_listed_files_are_those_that_are_written() -> None:
    plan = dataclasses.replace(two_roles(), templates={"nginx.conf": "x"})
    assert set(described(plan, "")["files"]) == {*plan_files(plan, ""), "nginx.conf", "token"}


def option_value(line: list[str], option: str) -> str:
    """The value of an option of srun."""
    return next(word.partition("=")[2] for word in line if word.startswith(f"{option}="))


def test_each_step_has_its_srun_line() -> None:
    lines = described(two_roles(), "", ("n1", "n2"))["srun"]
    assert [(option_value(line, "--job-name"), option_value(line, "--nodelist")) for line in lines] == [
        ("nodes", "n1,n2"),
        ("sidecar", "n1,n2"),
        ("pre_w0-0", "n1"),
        ("pre_w0-1", "n2"),
        ("ctl_w0", "n1"),
    ]
    assert all(line[0] == "srun" for line in lines)
    assert lines[3][-3:] == ["--", "x", "1"]


@pytest.mark.parametrize("step", ["", "together"])
@pytest.mark.parametrize("contained", [False, True])
def test_the_srun_lines_equal_those_of_the_real_steps(
    step: str, contained: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = job_spec(
        resources={"gpus_per_node": 4, "agg_workers": 1, "gpus_per_agg": 8, "process_granularity": "gpu"},
        workers=[{"role": "agg", "command": "serve {rank}"}, {"role": "aside", "gpus": 1, "command": "x"}],
        container={"image": "i.sqsh"} if contained else None,
    )
    plan = plan_of(spec, workdir=str(tmp_path))
    tasks = tuple(
        dataclasses.replace(planned, step=step if planned.task.role == "agg" else "") for planned in plan.tasks
    )
    plan = dataclasses.replace(plan, tasks=tasks, slurm=plan.slurm._replace(mpi="pmi2"))
    facts = planned_facts(plan)
    (facts.run_dir / "workers").mkdir(parents=True)
    started: list[list[str]] = []
    monkeypatch.setattr("launcher.steps.slurm_steps.shutil.which", lambda name: None)
    monkeypatch.setattr("launcher.steps.slurm_steps.subprocess.Popen", lambda argv, **_: started.append(argv))
    steps = slurm_steps.SlurmSteps(plan, facts)
    steps.start_sidecars()
    task_groups = [list(tasks[:-1])] if step else [[planned] for planned in tasks[:-1]]
    for task_group in [*task_groups, [tasks[-1]]]:
        steps.start_tasks(task_group, 0)
    _survey, *lines = described(plan, "")["srun"]
    assert lines == started
    modes = [path.stat().st_mode & 0o777 for path in (facts.run_dir / "workers").glob("*.step.json")]
    assert modes == ([0o600] if step else []), "it holds the words and variables of the tasks"
    assert len(started) == (3 if step else 10)


def test_a_job_without_monitoring_has_no_sidecars_and_targets() -> None:
    found = view_of({"gpus_per_node": 1, "agg_workers": 1}, monitoring={"enabled": False})
    assert found["targets"] == []
    assert len(found["srun"]) == 1


def test_targets_are_the_sidecars_with_the_labels_of_their_series() -> None:
    found = view_of({"gpus_per_node": 1, "agg_workers": 1}, "cn 1", slurm={"partition": "gpu"})
    assert found["targets"] == [
        {
            "targets": ["cn 1:{port}"],
            "labels": {
                "cluster": "slurm",
                "job_id": "{job_id}",
                "job_name": "job",
                "user": "ana",
                "partition": "gpu",
                "node": "cn_1",
                "job": "gpujob-sidecar",
            },
        }
    ]
    assert view_of({"gpus_per_node": 0, "agg_workers": 1}, monitoring={"listen_address": ":9410"})["targets"][0][
        "targets"
    ] == ["node0:9410"]


def plan_json(folder: Path, job: Mapping[str, Any], *options: str, idle_gpus: str = "") -> dict[str, Any]:
    """What the command prints for a job file; ``idle_gpus`` is its warning about them."""
    (folder / "job.yaml").write_text(yaml.safe_dump(dict(job)))
    done = gpujob("plan", "job.yaml", "--json", *options, cwd=folder)
    assert done.returncode == 0
    no_command = "has no command; give it one, or use a backend that has one; submit and run refuse it"
    others = [line for line in done.stderr.splitlines() if not line.endswith(no_command)]
    assert others == ([f"gpujob: warning: resources.gpus_per_node: {idle_gpus}"] if idle_gpus else [])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_command_plans_roles_without_any_command_on_the_hosts_given(tmp_path: Path) -> None:
    resources = {"gpus_per_node": 8, "cpus_per_node": 96, "prefill_workers": 1, "decode_workers": 1} | dict.fromkeys(
        ("gpus_per_prefill", "gpus_per_decode"), 4
    )
    job = {"name": "serve", "resources": resources}
    shared = plan_json(tmp_path, job, "--nodes", "cn7")
    assert [(process["node"], process["gpus"][0]) for process in shared["processes"]] == [("cn7", 0), ("cn7", 4)]
    assert [process["command"] for process in shared["processes"]] == [[], []]
    idle = "the job asks for 16 GPUs and its workers use 8; add workers, or ask for fewer"
    apart = plan_json(tmp_path, job, "--nodes", "cn[3,1]", idle_gpus=idle)
    assert [(process["node"], process["gpus"][0]) for process in apart["processes"]] == [("cn3", 0), ("cn1", 0)]
    assert "#SBATCH --nodes=2\n" in apart["script"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml"]


def test_plan_refuses_workers_that_cannot_be_placed(tmp_path: Path) -> None:
    resources = {"gpus_per_node": 8, "prefill_workers": 1, "gpus_per_prefill": 4, "decode_workers": 1}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"name": "serve", "resources": resources}))
    done = gpujob("plan", "job.yaml", "--json", "--nodes", "a", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "gpujob: job.yaml: 1 problem\n  resources.nodes: 1 prefill x 4 GPUs, 1 decode x 8 GPUs need 2 nodes of 8 GPUs "
        "and the job has 1; name 1 more, or fewer or smaller workers\n"
    )
