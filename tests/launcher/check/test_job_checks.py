"""Preflight checks of models, containers, secrets and Slurm options."""

from pathlib import Path
from typing import Any

import pytest

from launcher.check.job_checks import (
    check_benchmark,
    check_container,
    check_groups,
    check_launchers,
    check_model,
    check_notify,
    check_readiness,
    check_roles,
    check_secrets,
    check_setup,
    check_slurm,
    check_slurm_signal,
)
from launcher.check.plan_checks import check_cpus, check_step_cpus
from launcher.check.preflight import check_commands, check_plan
from tests.launcher.check.planned_jobs import planned_job, summaries

SERVING: dict[str, Any] = {
    "backend": {"type": "sglang"},
    "resources": {"gpus_per_node": 8, "agg_workers": 1},
    "workers": [],
}


ONE_GPU_EACH = [{"count": 8, "gpus": 1, "command": "x"}]
SITE_FIX = "with gpus_per_node and cpus_per_node in the cluster file, jobs that take whole nodes ask for all CPUs"


@pytest.mark.parametrize(
    ("cluster", "fix"),
    [
        ({}, f"or `slurm: {{exclusive: true}}` for exclusive nodes; {SITE_FIX}"),
        ({"cpus_per_node": 96}, SITE_FIX),
        ({"gpus_per_node": 16, "cpus_per_node": 96}, "its share of a node is 48, so set how many the job may use, or"),
    ],
)
@pytest.mark.parametrize("kind", ["sglang", "torchrun", "deepspeed", "command"])
def test_one_cpu_per_gpu_is_a_warning(cluster: dict[str, Any], fix: str, kind: str, tmp_path: Path) -> None:
    training = {"resources": {"gpus_per_node": 8}, "workers": [{"gpus": 8, "command": "x.py"}]}
    parts = SERVING | {"model": {"path": "hf:a/b"}} if kind == "sglang" else {**training, "backend": {"type": kind}}
    (item,) = check_cpus(planned_job(tmp_path, local=False, cluster=cluster, **parts))
    assert (item.code, item.status, item.place) == ("few-cpus", "warning", "resources.cpus_per_node")
    begin = "9 CPUs for 8 GPUs of a node: one for each GPU or process and one more; "
    assert item.message.startswith(f"{begin}engines and data loaders can use several for each GPU; ")
    assert fix in item.message


@pytest.mark.parametrize(
    ("over", "cluster", "local"),
    [
        ({"resources": {**SERVING["resources"], "cpus_per_node": 9}}, {}, False),
        ({"slurm": {"exclusive": True}}, {"gpus_per_node": 8, "cpus_per_node": 96}, False),
        ({"workers": [{"role": "agg", "cpus": 8}]}, {}, False),
        ({"backend": {"type": "command"}, "resources": {"gpus_per_node": 8}, "workers": ONE_GPU_EACH}, {}, False),
        ({}, {}, True),
    ],
)
def test_no_cpu_warning_for_explicit_cpus_or_other_programs(
    over: dict[str, Any], cluster: dict[str, Any], local: bool, tmp_path: Path
) -> None:
    job = SERVING | {"model": {"path": "hf:a/b"}} | over
    assert not list(check_cpus(planned_job(tmp_path, local=local, cluster=cluster, **job)))


@pytest.mark.parametrize(
    ("over", "cpus"),
    [
        ({"workers": [{"count": 65, "command": "x"}]}, 66),
        ({"workers": [{"count": 8, "gpus": 1, "cpus": 9, "command": "x"}], "resources": {"gpus_per_node": 8}}, 73),
        ({"resources": {"cpus_per_node": 65}}, 65),
        ({"resources": {"cpus_per_node": 64}}, None),
        ({"workers": [{"count": 64, "command": "x"}]}, None),
    ],
)
def test_more_cpus_than_a_node_has_are_a_warning(over: dict[str, Any], cpus: int | None, tmp_path: Path) -> None:
    cluster = {"gpus_per_node": 8, "cpus_per_node": 64}
    found = list(check_cpus(planned_job(tmp_path, local=False, cluster=cluster, **over)))
    message = (
        f"resources.cpus_per_node: {cpus} CPUs, and by the cluster file a node has 64; "
        "unless the partition has larger nodes, use more nodes, or fewer workers or `cpus`"
    )
    assert [str(item) for item in found] == ([message] if cpus else [])
    assert summaries(found) == [("too-many-cpus", "warning", "resources.cpus_per_node")] * bool(cpus)
    assert not list(check_cpus(planned_job(tmp_path, cluster=cluster, **over)))


@pytest.mark.parametrize(
    ("kind", "cpus", "slurm", "is_refused"),
    [
        ("mpi", 4, {}, True),
        ("mpi", 8, {}, False),
        ("mpi", None, {}, False),
        ("mpi", 4, {"exclusive": True}, False),
        ("deepspeed", 4, {}, False),  # each process is a step of its own
    ],
)
def test_a_step_with_more_processes_than_cpus_is_a_warning(
    kind: str, cpus: int | None, slurm: dict[str, Any], is_refused: bool, tmp_path: Path
) -> None:
    resources = {"gpus_per_node": 8, "cpus_per_node": cpus}
    spec: dict[str, Any] = {"backend": {"type": kind}, "workers": [{"gpus": 16, "command": "x"}], "slurm": slurm}
    found = list(check_step_cpus(planned_job(tmp_path, local=False, resources=resources, **spec)))
    message = (
        "resources.cpus_per_node: 4 CPUs, and the step of worker_w0 has 8 processes on a node; "
        "srun refuses it with fewer CPUs than processes; use at least 9"
    )
    assert [str(item) for item in found] == ([message] if is_refused else [])
    assert summaries(found) == [("step-cpus", "warning", "resources.cpus_per_node")] * is_refused


def test_engines_on_whole_nodes_have_all_cpus(tmp_path: Path) -> None:
    job, cluster = SERVING | {"model": {"path": "hf:a/b"}}, {"gpus_per_node": 8, "cpus_per_node": 96}
    (item,) = check_cpus(planned_job(tmp_path, local=False, cluster=cluster, **job))
    assert (item.status, item.message) == ("ok", "96 CPUs, all of a node")


@pytest.mark.parametrize(
    ("path", "expected", "message"),
    [
        ("dsr1", ("model", "ok"), '"dsr1" is FOLDER/DSR1, which exists'),
        ("DSR1", ("model", "ok"), '"DSR1" exists'),
        ("hf:org/name", ("model", "not checked"), "the engine downloads hf:org/name when it starts"),
        ("hub", ("model", "not checked"), "the engine downloads hf:a/b when it starts"),
        ("dsr2", ("no-model-alias", "error"), 'did you mean "dsr1"? (known: dsr1, gone, hub)'),
        ("gone", ("no-model", "error"), '"gone" is /no/such/model, which does not exist'),
        ("/no/model", ("no-model", "error"), '"/no/model" does not exist'),
        ("./file", ("no-model", "error"), '"./file" is not a directory'),
    ],
)
def test_a_model_is_an_alias_a_directory_or_a_download(
    path: str, expected: tuple[str, str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "DSR1").mkdir()
    (tmp_path / "file").write_text("")
    models = {"dsr1": str(tmp_path / "DSR1"), "gone": "/no/such/model", "hub": "hf:a/b"}
    (item,) = check_model(planned_job(tmp_path, cluster={"models": models}, model={"path": path}))
    assert (item.code, item.status, item.place) == (*expected, "model.path")
    assert message.replace("FOLDER", str(tmp_path)) in item.message


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("sgl", ("image", "ok")),
        ("here.sif", ("image", "ok")),
        ("none.sif", ("no-image", "error")),
        ("/no/image", ("no-image", "warning")),  # a disk that only the nodes have
        ("gone", ("no-image", "error")),
        ("sgll", ("no-image-alias", "warning")),
        ("ubuntu:22.04", ("image", "not checked")),
        ("docker://ubuntu", ("image", "not checked")),
    ],
)
def test_an_image_is_an_alias_a_file_or_a_download(image: str, expected: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "here.sif").write_text("")
    images = {"sgl": str(tmp_path / "here.sif"), "gone": str(tmp_path / "none.sqsh")}
    job = planned_job(tmp_path, local=False, cluster={"containers": images}, container={"image": image})
    assert [(item.code, item.status) for item in check_container(job)] == [expected]


@pytest.mark.parametrize(
    ("runtime", "image", "cure"),
    [
        ("apptainer", "nvcr.io/nvidia/pytorch:24.12-py3", "write docker:// before the name"),
        ("apptainer", "docker://ubuntu", None),
        ("enroot", "nvcr.io#nvidia/pytorch", "make a file by `enroot import`"),
        ("apptainer", "images/sandbox", None),  # a directory that is there
        ("enroot", "made-on-each-node", None),
        ("pyxis", "nvcr.io/nvidia/pytorch:24.12-py3", "write nvcr.io#nvidia/pytorch:24.12-py3"),
        ("pyxis", "docker://localhost:5000/own", "write localhost:5000#own"),
        ("pyxis", "nvcr.io#nvidia/pytorch:24.12-py3", None),
        ("pyxis", "nvidia/cuda:12", None),
        ("pyxis", "dockerd://own:latest", None),
    ],
)
def test_a_name_that_its_runtime_cannot_pull_is_an_error(
    runtime: str, image: str, cure: str | None, tmp_path: Path
) -> None:
    (tmp_path / "images/sandbox").mkdir(parents=True)
    items = list(check_container(planned_job(tmp_path, local=False, container={"image": image, "runtime": runtime})))
    message = next((item.message for item in items if item.code == "image-name"), "")
    assert (bool(message), (cure or "") in message) == (cure is not None, True)


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer", "enroot"])
def test_an_image_file_has_an_absolute_path(runtime: str, tmp_path: Path) -> None:
    job = planned_job(tmp_path, container={"image": "images/a.sqsh", "runtime": runtime})
    assert job.plan.container is not None
    assert job.plan.container.image == str(tmp_path / "images/a.sqsh")


@pytest.mark.parametrize(
    ("runtime", "local", "expected"),
    [
        ("pyxis", True, [("container-local", "error", "container.runtime")]),
        ("pyxis", False, []),
        ("apptainer", True, [("no-runtime", "error", "container.runtime")]),
        ("enroot", False, [("no-runtime", "warning", "container.runtime")]),
    ],
)
def test_a_container_runtime_must_exist(
    runtime: str, local: bool, expected: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    job = planned_job(
        tmp_path, local=local, environ={"PATH": "/nowhere"}, container={"image": "a:1", "runtime": runtime}
    )
    assert summaries(check_container(job))[1:] == expected


def test_missing_and_duplicate_mounts_name_their_key(tmp_path: Path) -> None:
    container = {"image": "a:1", "mounts": ["{job_dir}:/x", "/no/such:/y", f"{tmp_path}:/x"]}
    cluster = {"mounts": ["/nor/this:/z"]}
    for local, status in ((True, "error"), (False, "warning")):
        items = list(check_container(planned_job(tmp_path, local=local, cluster=cluster, container=container)))
        assert [entry for entry in summaries(items) if "mount" in entry[0]] == [
            ("no-mount", status, "mounts"),
            ("no-mount", status, "container.mounts"),
            ("mount-twice", "warning", "container.mounts"),
        ]


@pytest.mark.parametrize(
    ("name", "runtime"), [("a:b", "pyxis"), ("a,b", "apptainer"), ("a b", "enroot"), ("a b", "pyxis")]
)
def test_a_job_directory_that_cannot_be_mounted_is_an_error(name: str, runtime: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    items = list(check_container(planned_job(folder, local=False, container={"image": "a:1", "runtime": runtime})))
    assert ("mount-path", "error", "container.mounts") in summaries(items)


def test_programs_of_a_container_are_not_searched_on_the_host(tmp_path: Path) -> None:
    spec: dict[str, Any] = {"container": {"image": "a:1"}, "workers": [{"command": "only-in-the-image"}]}
    assert summaries(check_commands(planned_job(tmp_path, **spec))) == [
        ("program", "not checked", "workers (worker).command")
    ]


def test_a_setup_script_must_exist_and_is_not_used_locally(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("")
    for script, code in (("env.sh", "setup-script"), ("none.sh", "no-setup-script")):
        items = list(check_setup(planned_job(tmp_path, local=False, setup={"script": script})))
        assert [item.code for item in items] == [code]
    assert summaries(check_setup(planned_job(tmp_path, setup={"modules": ["a"]}))) == [
        ("setup-local", "warning", "setup")
    ]
    assert summaries(check_setup(planned_job(tmp_path, setup={"script": "none.sh"}))) == [
        ("setup-local", "warning", "setup")
    ]
    assert not list(check_setup(planned_job(tmp_path)))


@pytest.mark.parametrize(("local", "fix"), [(True, "or load its module in this shell"), (False, "`setup.modules`")])
def test_the_fix_for_a_missing_runtime_depends_on_local_or_slurm(local: bool, fix: str, tmp_path: Path) -> None:
    container = {"image": "a:1", "runtime": "apptainer"}
    items = list(check_container(planned_job(tmp_path, local=local, environ={"PATH": "/nowhere"}, container=container)))
    (item,) = (item for item in items if item.code == "no-runtime")
    assert fix in item.message


def test_secrets_must_be_set(tmp_path: Path) -> None:
    items = list(check_secrets(planned_job(tmp_path, environ={"A": "a"}, secrets=["A", "B"])))
    assert summaries(items) == [("secret", "ok", "secrets"), ("no-secret", "error", "secrets")]


@pytest.mark.parametrize(
    ("spec", "cluster", "place"),
    [
        ({"env": {"HF_TOKEN": "hf_abc"}}, {}, "env.HF_TOKEN"),
        ({"workers": [{"command": "true", "env": {"MY_PASSWORD": "p"}}]}, {}, "workers[0].env.MY_PASSWORD"),
        (
            {"backend": {"decode": {"env": {"API_KEY": "k"}}}, "workers": [{"role": "decode", "command": "true"}]},
            {},
            "backend.decode.env.API_KEY",
        ),
        ({"benchmark": {"env": {"API_KEY": "k"}}}, {}, "benchmark.env.API_KEY"),
        ({"setup": {"preamble": "set -e; export HF_TOKEN='hf_abc'"}}, {}, "setup.preamble"),
        ({}, {"preamble": "A_SECRET=abc"}, "preamble"),
        ({"env": {"TOKENIZERS_PARALLELISM": "false", "SSH_AUTH_SOCK": "/tmp/x", "KEY_COUNT": "3"}}, {}, None),
        ({"setup": {"preamble": "export HF_TOKEN=$(cat ~/t)"}}, {}, None),
    ],
)
def test_a_value_that_looks_like_a_secret_is_a_warning(
    spec: dict[str, Any], cluster: dict[str, Any], place: str | None, tmp_path: Path
) -> None:
    items = list(check_secrets(planned_job(tmp_path, cluster=cluster, **spec)))
    assert summaries(items) == ([("secret-value", "warning", place)] if place else [])
    assert all("hf_abc" not in item.message for item in items)


@pytest.mark.parametrize(
    ("slurm", "expected"),
    [
        ({"signal": "USR1@120", "time_limit": "00:10:00"}, []),
        ({"signal": "USR1@120", "time_limit": "2"}, [("signal-early", "error", "slurm.signal")]),
        ({"signal": "USR1@120"}, []),
        ({"requeue": {"time_limit": True}}, [("requeue-no-checkpoints", "warning", "slurm.requeue")]),
        ({"requeue": {}}, []),
        ({"time_limit": "4:00"}, [("minutes-and-seconds", "warning", "slurm.time_limit")]),
        ({"time_limit": "4h"}, []),
        ({"segment": 2}, [("segment", "warning", "slurm.segment")]),
    ],
)
def test_slurm_options_must_be_consistent(
    slurm: dict[str, Any], expected: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    job = planned_job(tmp_path, local=False, slurm=slurm, patterns={"checkpoints": None})
    assert summaries(check_slurm(job)) == expected


@pytest.mark.parametrize(
    ("spec", "parent"),
    [
        ({"backend": {"type": "torchrun"}, "workers": [{"command": "train.py"}]}, "torchrun"),
        ({"backend": {"type": "accelerate"}, "workers": [{"command": "train.py"}]}, "accelerate"),
        ({"backend": {"type": "deepspeed"}, "workers": [{"command": "python train.py"}]}, None),
        ({"workers": [{"command": "deepspeed train.py"}]}, "deepspeed"),
        ({"workers": [{"command": "mpirun -n 8 train"}]}, None),
        ({"workers": [{"command": "python train.py"}]}, None),
        ({"workers": [{"command": "python train.py | tee x", "shell": True}]}, "the shell"),
        ({"workers": [{"command": "cd x && python train.py", "shell": True}]}, "the shell"),
        ({"workers": [{"command": "cd x && torchrun train.py", "shell": True}]}, "torchrun"),
        ({"workers": [{"command": "cd x && exec python train.py", "shell": True}]}, None),
        ({"workers": [{"command": "python train.py \\\n  > x 2>&1\n", "shell": True}]}, None),
        ({"workers": [{"command": "trap save USR1; python train.py & wait", "shell": True}]}, None),
        ({"workers": [{"command": "python train.py --name 'a|b' # x; y", "shell": True}]}, None),
        ({"workers": [{"command": "a; b", "shell": True, "service": True}]}, None),
    ],
)
def test_a_signal_that_ends_the_parent_of_the_program_is_a_warning(
    spec: dict[str, Any], parent: str | None, tmp_path: Path
) -> None:
    job = planned_job(tmp_path, local=False, slurm={"signal": "USR1@120"}, **spec)
    messages = [item.message.partition(",")[0] for item in check_slurm_signal(job)]
    assert messages == ([f"USR1 may end {parent} of worker"] if parent else [])


def test_the_readiness_timeout_must_be_below_the_time_limit(tmp_path: Path) -> None:
    serving = {**SERVING, "model": {"path": "hf:a/b"}, "frontend": {"type": "sglang-router"}}
    for timeout, codes in ((600.0, ["readiness-timeout"]), (60.0, [])):
        spec = {**serving, "slurm": {"time_limit": "00:10:00"}, "readiness": {"timeout": timeout}}
        assert [item.code for item in check_readiness(planned_job(tmp_path, local=False, **spec))] == codes
        assert not list(check_readiness(planned_job(tmp_path, **spec)))


def test_only_prefill_workers_are_a_warning(tmp_path: Path) -> None:
    workers = [{"role": "prefill", "command": "true"}]
    for roles, codes in (
        (workers, ["topology-aggregated-style"]),
        ([*workers, {"role": "decode", "command": "true"}], []),
        ([{"role": "agg", "command": "true"}], []),
    ):
        assert [item.code for item in check_roles(planned_job(tmp_path, workers=roles))] == codes


def test_a_benchmark_needs_a_front_end(tmp_path: Path) -> None:
    for benchmark, expected in (
        ({"type": "custom", "command": "true"}, [("no-frontend", "warning", "benchmark.type")]),
        ({"type": "manual"}, []),
    ):
        assert summaries(check_benchmark(planned_job(tmp_path, benchmark=benchmark))) == expected


@pytest.mark.parametrize("kind", ["router", "sa-bench", "custom"])
def test_a_benchmark_may_use_the_only_vllm_worker(kind: str, tmp_path: Path) -> None:
    sizes = {"isl": 1, "osl": 1, "concurrencies": [1]} if kind != "custom" else {}
    spec = {**SERVING, "backend": {"type": "vllm"}, "model": {"path": "hf:a/b"}, "frontend": {"type": "vllm"}}
    benchmark = {"type": kind, "command": "bench", **sizes}
    assert not list(check_benchmark(planned_job(tmp_path, local=False, benchmark=benchmark, **spec)))


@pytest.mark.parametrize(
    ("kind", "per_node", "worker", "message"),
    [
        ("torchrun", 8, {"count": 2, "gpus": 8}, " over both nodes write count: 1, gpus: 16"),
        ("accelerate", 8, {"count": 3, "gpus": 8}, " over all 3 nodes write count: 1, gpus: 24"),
        ("deepspeed", 8, {"count": 2, "gpus": 4}, " write count: 1, gpus: 8"),
        ("mpi", 8, {"count": 3, "gpus": 4}, " over both nodes write count: 1"),
        ("torchrun", 8, {"count": 1, "gpus": 16}, None),
        ("command", 8, {"count": 2, "gpus": 8}, None),
    ],
)
def test_several_training_workers_are_separate_trainings(
    kind: str, per_node: int, worker: dict[str, int], message: str | None, tmp_path: Path
) -> None:
    spec: dict[str, Any] = {"backend": {"type": kind}, "resources": {"gpus_per_node": per_node}}
    items = list(check_groups(planned_job(tmp_path, local=False, workers=[{"command": "x.py", **worker}], **spec)))
    assert summaries(items) == ([("separate-workers", "warning", "workers (worker).count")] if message else [])
    count = worker["count"]
    for item in items:
        assert item.message == f"{count} workers of {kind} are {count} separate trainings; for a single one{message}"


ONLY_SCRIPT = "write only the script and its arguments"
TORCHRUN, MPI = (f"{ONLY_SCRIPT}, and `backend: {{type: {kind}}}`" for kind in ("torchrun", "mpi"))
WITH_OTHERS = "each of the 2 processes of a worker starts {}, which knows nothing of the others; "
AT_ONE_PORT = "several processes on a node start torchrun, all with its default port; "


@pytest.mark.parametrize(
    ("kind", "gpus", "count", "command", "message"),
    [
        (*("torchrun", 8, 1), "torchrun --standalone x.py", f"each process of torchrun starts torchrun; {ONLY_SCRIPT}"),
        (*("deepspeed", 8, 1), "deepspeed x.py", f"each process of deepspeed starts deepspeed; {ONLY_SCRIPT}"),
        (*("command", 4, 2), "/opt/bin/torchrun --nproc-per-node 4 x.py", AT_ONE_PORT + TORCHRUN),
        (*("command", 16, 1), "torchrun --nnodes 2 x.py", WITH_OTHERS.format("torchrun") + TORCHRUN),
        (
            *("command", 16, 1),
            "cd x && python3 -u -m torch.distributed.run x.py",
            WITH_OTHERS.format("python3 -u -m torch.distributed.run") + TORCHRUN,
        ),
        (*("command", 16, 1), "mpirun -np 16 solver", WITH_OTHERS.format("mpirun") + MPI),
        (*("command", 8, 1), "torchrun --nproc-per-node 8 x.py", None),
        (*("command", 8, 2), "accelerate launch x.py", None),  # on nodes of their own
        (*("command", 4, 2), "mpirun -np 4 solver", None),
        (*("command", 4, 2), "torchrun --standalone x.py", None),
        (*("command", 16, 1), "torchrun --nnodes 2 --node_rank {rank} --master_addr {head} x.py", None),
        (*("command", 16, 1), "pip install deepspeed && python x.py", None),
    ],
)
def test_a_launcher_in_a_command_is_noticed(
    kind: str, gpus: int, count: int, command: str, message: str | None, tmp_path: Path
) -> None:
    worker = {"gpus": gpus, "count": count, "command": command, "shell": "&&" in command}
    spec: dict[str, Any] = {"backend": {"type": kind}, "resources": {"gpus_per_node": 8}}
    items = list(check_launchers(planned_job(tmp_path, local=False, workers=[worker], **spec)))
    assert [str(item) for item in items] == ([f"workers (worker).command: {message}"] if message else [])
    assert summaries(items) == [("launcher-in-command", "warning", "workers (worker).command")] * len(items)


def test_two_launchers_meet_on_the_machine_of_a_local_run(tmp_path: Path) -> None:
    workers = [{"role": role, "gpus": 8, "command": "torchrun train.py"} for role in "ab"]
    spec: dict[str, Any] = {"resources": {"gpus_per_node": 8}, "workers": workers}
    found = {local: len(list(check_launchers(planned_job(tmp_path, local=local, **spec)))) for local in (False, True)}
    assert found == {False: 0, True: 2}


def test_who_is_notified_must_be_a_channel_of_the_site(tmp_path: Path) -> None:
    site = {"notify": {"channels": {"oncall": {"pagerduty": {"key_file": "/k"}}}}}

    def found(name: str | None, cluster: dict[str, Any]) -> list[str]:
        alerts = {} if name is None else {"notify": name}
        return [str(item) for item in check_notify(planned_job(tmp_path, cluster=cluster, alerts=alerts))]

    message = '"oncal" is not a channel of the cluster file; did you mean "oncall"? (known: owner, none, oncall)'
    assert found("oncal", site) == [f"alerts.notify: {message}"]
    assert found("oncal", {}) == found("oncall", site) == found("none", site) == found(None, site) == []


def test_every_start_runs_these_checks(tmp_path: Path) -> None:
    spec: dict[str, Any] = {"model": {"path": "./none"}, "secrets": ["NOT_SET"], "setup": {"script": "none.sh"}}
    codes = {item.code for item in check_plan(planned_job(tmp_path, local=False, **spec)) if item.status == "error"}
    assert {"no-model", "no-secret", "no-setup-script"} <= codes
