"""Backends: commands of the tasks of a worker, and combinations that do not fit."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from exporter.contract.manifest import Task
from launcher.jobfile.backend_kinds import BACKEND_KINDS
from launcher.jobfile.jobfile import parse_job
from launcher.jobfile.serving import Arguments
from launcher.plan.placeholders import task_argv, task_environment
from launcher.plan.plan import dump_plan, parse_plan
from launcher.planner.backends import BACKENDS
from launcher.planner.backends.base import BackendWorker, merge_configs, option_argv, torch_environment
from launcher.planner.backends.engine import divisors_text
from launcher.run.before.nodes_survey import needs_survey
from launcher.steps.srun_lines import task_line, tasks_by_step
from tests.launcher.conftest import Golden
from tests.launcher.planner.backends.serving_jobs import (
    argv_of,
    environment_of,
    job,
    option,
    plan_from,
    plan_text,
    planned,
    problems_of,
    rule_text,
)
from tests.support.launcher import ROOT, facts_of

MODEL = {"path": "/models/r1", "name": "r1"}
PD = {"gpus_per_node": 8, "prefill_workers": 1, "decode_workers": 1, "gpus_per_prefill": 4, "gpus_per_decode": 16}
ROUTER = {"type": "sglang-router"}

GOLDEN = {
    "sglang_4p1d": job(
        resources={
            "gpus_per_node": 8,
            "prefill_workers": 4,
            "decode_workers": 1,
            "gpus_per_prefill": 8,
            "gpus_per_decode": 32,
        },
        model=MODEL,
        backend={
            "type": "sglang",
            "args": {"mem_fraction_static": 0.85, "trust-remote-code": True},
            "prefill": {"config": {"chunked-prefill-size": 16384}},
            "decode": {
                "args": {"enable-dp-attention": True, "dp-size": 32, "ep-size": 32},
                "env": {"SGLANG_LOG_MS": "1"},
            },
        },
        frontend={"type": "sglang-router", "count": 3, "args": {"policy": "cache_aware"}},
        benchmark={
            "type": "sa-bench",
            "command": "python3 /opt/sa-bench/bench.py",
            "isl": 1024,
            "osl": 1024,
            "concurrencies": "128x512",
        },
    ),
    "sglang_packed": job(
        resources={
            "gpus_per_node": 8,
            "prefill_workers": 1,
            "decode_workers": 2,
            "gpus_per_prefill": 8,
            "gpus_per_decode": 4,
        },
        model={"path": "hf:Qwen/Qwen3-32B"},
        backend={"type": "sglang"},
        frontend=ROUTER,
    ),
    "vllm_data_parallel": job(
        resources={"gpus_per_node": 8, "agg_workers": 1, "gpus_per_agg": 16},
        model={"path": "hf:deepseek-ai/DeepSeek-R1", "name": "r1"},
        backend={"type": "vllm", "args": {"data_parallel_size": 16, "enable-expert-parallel": True}},
        frontend={"type": "vllm"},
        benchmark={"type": "router", "isl": 1000, "osl": 100, "concurrencies": [4, 8]},
    ),
    "trtllm_16_gpus": job(
        resources=PD,
        model=MODEL,
        backend={
            "type": "trtllm",
            "config": {"print_iter_log": True, "kv_cache_config": {"dtype": "fp8"}},
            "decode": {
                "config": {"kv_cache_config": {"free_gpu_memory_fraction": 0.8}, "moe_expert_parallel_size": 16}
            },
        },
        frontend={"type": "custom", "command": "trtllm-serve disaggregated -c front.yaml"},
    ),
    "torchrun_2_nodes": job(
        resources={"gpus_per_node": 8},
        workers=[{"role": "train", "gpus": 16, "command": "python train.py --lr 1e-4"}],
        backend={"type": "torchrun", "args": {"max-restarts": 0}},
    ),
    "dynamo": job(
        resources={**PD, "infra_node": True},
        model=MODEL,
        backend={"type": "sglang"},
        frontend={"type": "dynamo", "count": 2},
        benchmark={"type": "custom", "command": "python3 load.py", "concurrencies": [64]},
    ),
}


def test_the_example_can_be_planned() -> None:
    plan = plan_from((ROOT / "examples" / "serve" / "job.yaml").read_text())
    assert [entry.task.worker for entry in plan.tasks if entry.stage != "workers"] == [
        *("frontend_0", "frontend_1", "frontend_2", "nginx", "benchmark"),
    ]
    assert plan.nodes == 8


@pytest.mark.parametrize("name", GOLDEN)
def test_all_tasks_of_a_job_match_the_golden_file(name: str, golden: Golden) -> None:
    plan = plan_from(GOLDEN[name])
    golden(f"launcher/serving/{name}.txt", plan_text(plan))
    assert plan_text(parse_plan(dump_plan(plan), plan.manifest)) == plan_text(plan)


def engine(kind: str, gpus: int, args: dict[str, Any] | None = None, **over: Any) -> str:
    """A job with one agg worker of an engine, on nodes with 8 GPUs."""
    backend = {"type": kind, "args": args or {}, **over}
    return job(resources={"gpus_per_node": 8, "agg_workers": 1, "gpus_per_agg": gpus}, model=MODEL, backend=backend)


@pytest.mark.parametrize(
    ("kind", "gpus", "args", "expected"),
    [
        ("sglang", 8, {}, {"--tp-size": "8", "--nnodes": None, "--dp-size": None, "--dist-init-addr": None}),
        ("sglang", 1, {}, {"--tp-size": "1", "--nccl-port": "17500"}),
        ("sglang", 8, {"dp_size": 2}, {"--tp-size": "4", "--dp-size": "2", "--nccl-port": None}),
        (
            "sglang",
            8,
            {"dp-size": 8, "enable_dp_attention": True},
            {"--tp-size": "8", "--dp-size": "8", "--nccl-port": "17500"},
        ),
        ("sglang", 16, {"pp-size": 2}, {"--tp-size": "8", "--pp-size": "2", "--nnodes": "2", "--node-rank": "0"}),
        ("sglang", 8, {"tensor-parallel-size": 8, "ep": 4}, {"--tp-size": "8", "--ep-size": "4"}),
        ("vllm", 8, {"data-parallel-size": 4}, {"--tensor-parallel-size": "2", "--data-parallel-size-local": None}),
        ("vllm", 16, {}, {"--tensor-parallel-size": "16", "--nnodes": "2", "--master-port": "8300"}),
        ("vllm", 16, {"pipeline_parallel_size": 2}, {"--tensor-parallel-size": "8", "--pipeline-parallel-size": "2"}),
        ("trtllm", 4, {"pp_size": 2}, {"--tp_size": "2", "--pp_size": "2"}),
        ("trtllm", 8, {"ep_size": 8}, {"--tp_size": "8", "--ep_size": "8"}),
    ],
)
def test_parallel_sizes_use_the_gpus_of_a_worker(
    kind: str, gpus: int, args: dict[str, Any], expected: dict[str, Any]
) -> None:
    argv = argv_of(plan_from(engine(kind, gpus, args)), "agg_w0")
    assert {name: option(argv, name) for name in expected} == expected


@given(
    st.sampled_from(["sglang", "vllm", "trtllm"]),
    st.sampled_from([1, 2, 4, 8, 16, 24, 32]),
    st.sampled_from([None, 1, 2, 3, 4, 8]),
    st.sampled_from([None, 1, 2, 3]),
)
def test_a_plan_uses_each_gpu_of_a_worker_or_has_a_problem(
    kind: str, gpus: int, data: int | None, pipeline: int | None
) -> None:
    args = {name: value for name, value in (("dp-size", data), ("pp-size", pipeline)) if value}
    names = {"sglang": ("--tp-size", "--pp-size", "--dp-size"), "trtllm": ("--tp_size", "--pp_size", "--dp_size")}
    own = names.get(kind, ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"))
    text = engine(kind, gpus, args)
    if problems := problems_of(text):
        assert all(problem.startswith("backend.args: ") for problem in problems)
        return
    argv = argv_of(plan_from(text), "agg_w0")
    product = 1
    for name in own:
        product *= int(option(argv, name) or 1)
    assert product == gpus


def test_an_own_command_keeps_ports_and_readiness_of_the_backend() -> None:
    text = job(
        resources={"gpus_per_node": 0, "prefill_workers": 1, "decode_workers": 2, "nodes": 1},
        workers=[
            {"role": "prefill", "command": "mine --port {http_port} --boot {bootstrap_port}"},
            {"role": "decode", "command": "mine --port={http_port}", "shell": True},
        ],
        backend={"type": "sglang", "env": {"A": "1"}, "decode": {"env": {"A": "{http_port}"}}},
        frontend=ROUTER,
    )
    plan = plan_from(text)
    assert argv_of(plan, "prefill_w0") == ["mine", "--port", "6100", "--boot", "7200"]
    assert argv_of(plan, "decode_w1") == ["bash", "-c", "mine --port=6164"]
    assert (environment_of(plan, "prefill_w0")["A"], environment_of(plan, "decode_w0")["A"]) == ("1", "6132")
    assert [entry.service for entry in plan.tasks] == [True] * 4
    assert [task.service for task in plan.manifest.tasks] == [True] * 4
    assert plan.readiness is not None
    assert [rule_text(rule) for rule in plan.readiness.rules] == [
        "prefill_w0: http node 0 port 6100 /health, before benchmark",
        "decode_w0: http node 0 port 6132 /health, before benchmark",
        "decode_w1: http node 0 port 6164 /health, before benchmark",
        "model: sglang node 0 port 8000 expects 1 prefill 2 decode, before benchmark",
    ]


def test_every_task_of_a_worker_knows_the_ports_of_the_first() -> None:
    text = job(
        resources={"gpus_per_node": 8, "agg_workers": 1, "gpus_per_agg": 16},
        workers=[{"role": "agg", "command": "mine {leader}:{dist_init_port} {http_port} {worker_nodes} {{nats_port}}"}],
        backend={"type": "sglang"},
    )
    plan = plan_from(text)
    assert argv_of(plan, "agg_w0", 0) == ["mine", "cn00:8300", "6100", "2", "{nats_port}"]
    assert argv_of(plan, "agg_w0", 1) == ["mine", "cn00:8300", "6100", "2", "{nats_port}"]
    assert [dict(entry.ports) for entry in plan.tasks] == [{"http": 6100, "dist_init": 8300}, {"http": 6100}]


def test_a_plain_job_has_no_ports_no_rules_and_no_files() -> None:
    plan = plan_from(job(workers=[{"role": role, "command": "true"} for role in "abc"]))
    assert [dict(entry.ports) for entry in plan.tasks] == [{}, {}, {}]
    assert (plan.readiness, plan.templates) == (None, {})
    assert not any(entry.service or entry.step or entry.metrics for entry in plan.tasks)


def test_a_command_that_names_a_port_gets_one() -> None:
    text = job(resources={"nodes": 1}, workers=[{"command": "serve {http_port} {kv_events_port}", "count": 2}])
    plan = plan_from(text)
    assert [argv_of(plan, f"worker_w{index}") for index in (0, 1)] == [
        ["serve", "6100", "5200"],
        ["serve", "6132", "5201"],
    ]
    assert plan.readiness is not None
    assert [rule.kind for rule in plan.readiness.rules] == ["http", "http"]
    assert not any(entry.service for entry in plan.tasks)


def test_a_variable_of_the_shell_that_is_named_like_a_port_gets_none() -> None:
    plan = plan_from(job(workers=[{"command": "http_port=80; serve ${http_port}", "shell": True}]))
    assert (argv_of(plan, "worker_w0")[2], plan.readiness) == ("http_port=80; serve ${http_port}", None)


@pytest.mark.parametrize(
    ("readiness", "expected"),
    [
        ({"kind": "none"}, []),
        ({"kind": "tcp"}, ["worker_w0: tcp node 0 port 6100, before benchmark"]),
        ({"path": "/up"}, ["worker_w0: http node 0 port 6100 /up, before benchmark"]),
    ],
)
def test_readiness_rules_follow_the_job_file(readiness: dict[str, Any], expected: list[str]) -> None:
    plan = plan_from(job(workers=[{"command": "serve {http_port}"}], readiness=readiness))
    assert [rule_text(rule) for rule in (plan.readiness.rules if plan.readiness else ())] == expected


@pytest.mark.parametrize(("kind", "expected"), [("sglang", "the job has none"), ("http", "needs a port")])
def test_an_impossible_readiness_kind_is_a_problem(kind: str, expected: str) -> None:
    assert expected in problems_of(job(workers=[{"command": "true"}], readiness={"kind": kind}))[0]


def test_ports_on_one_machine_are_unique() -> None:
    text = job(
        resources={**PD, "gpus_per_decode": 8},
        model=MODEL,
        backend={"type": "sglang"},
        frontend={"type": "dynamo", "count": 3},
    )
    plan = plan_from(text, local=True)
    used = Counter(port for entry in plan.tasks for port in entry.ports.values())
    assert set(used.values()) == {1}
    apart = plan_from(text)
    on_nodes = Counter((entry.task.node_index, port) for entry in apart.tasks for port in entry.ports.values())
    assert set(on_nodes.values()) == {1}


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        ("train.py --x 1", ["train.py", "--x", "1"]),
        ("python3 train.py", ["train.py"]),
        ("/opt/py/bin/python3.11 -m my.train a", ["-m", "my.train", "a"]),
        ("python -u train.py", ["--no-python", "python", "-u", "train.py"]),
        ("./train", ["--no-python", "./train"]),
        ("python", ["--no-python", "python"]),
    ],
)
def test_torchrun_gets_a_script_a_module_or_a_program(command: str, argv: list[str]) -> None:
    workers = [{"role": "train", "gpus": 4, "command": command}]
    plan = plan_from(job(resources={"gpus_per_node": 4}, workers=workers, backend={"type": "torchrun"}))
    assert argv_of(plan, "train_w0")[6:] == argv


def test_torchrun_uses_a_requested_rendezvous() -> None:
    text = job(
        resources={"gpus_per_node": 4},
        workers=[{"role": "train", "gpus": 8, "command": "train.py"}],
        backend={"type": "torchrun", "args": {"rdzv_backend": "c10d", "nproc-per-node": 2}},
    )
    assert argv_of(plan_from(text), "train_w0", 1) == [
        "torchrun",
        "--nnodes=2",
        "--nproc-per-node=2",
        "--rdzv-id=4459",
        "--rdzv-endpoint=cn00:8300",
        "--rdzv-backend",
        "c10d",
        "train.py",
    ]


def test_torchrun_runs_a_shell_command_in_a_shell() -> None:
    workers = [{"role": "train", "gpus": 1, "command": "train {rank} | tee {log_dir}/x", "shell": True}]
    plan = plan_from(job(resources={"gpus_per_node": 4}, workers=workers, backend={"type": "torchrun"}))
    assert argv_of(plan, "train_w0")[-3:] == ["bash", "-c", 'train ${GPUJOB_RANK} | tee "${GPUJOB_LOG_DIR}"/x']


def test_accelerate_gets_the_number_of_processes_and_a_configuration() -> None:
    text = job(
        resources={"gpus_per_node": 4},
        workers=[{"role": "train", "gpus": 8, "command": "python -m my.train"}],
        backend={"type": "accelerate", "args": {"mixed-precision": "bf16"}},
    )
    argv = argv_of(plan_from(text), "train_w0", 1)
    assert argv == [
        *("accelerate", "launch", "--num_machines=2", "--machine_rank=1", "--main_process_ip=cn00"),
        *("--main_process_port=8300", "--num_processes=8", "--multi_gpu", "--mixed_precision", "bf16"),
        *("--module", "my.train"),
    ]
    body = yaml.safe_load(text)
    for gpus, config, kind in (
        (8, {"distributed_type": "FSDP"}, "FSDP"),
        (8, {"deepspeed_config": {"zero_stage": 3}}, "DEEPSPEED"),
        (8, {"fsdp_config": {"fsdp_version": 2}}, "FSDP"),
        (8, {"downcast_bf16": False}, "MULTI_GPU"),  # accelerate accepts no file without a type
        (1, {"downcast_bf16": False}, "NO"),
    ):
        body["backend"]["config"], body["workers"][0]["gpus"] = config, gpus
        plan = plan_from(yaml.safe_dump(body))
        argv = argv_of(plan, "train_w0")
        assert "--multi_gpu" not in argv
        assert str(option(argv, "--config_file")).endswith("/accelerate_config_train.yaml")
        written = yaml.safe_load(plan.templates["accelerate_config_train.yaml"])
        assert written == {**config, "distributed_type": kind}


@pytest.mark.parametrize(
    ("gpus", "backend", "launcher"),
    [
        (8, {"args": {"use_deepspeed": True}}, ["--deepspeed_multinode_launcher=standard"]),
        (8, {"config": {"distributed_type": "DEEPSPEED"}}, ["--deepspeed_multinode_launcher=standard"]),
        (
            8,
            {"args": {"use-deepspeed": True, "deepspeed-multinode-launcher": "openmpi"}},
            ["--deepspeed_multinode_launcher"],
        ),
        (
            8,
            {
                "config": {
                    "distributed_type": "DEEPSPEED",
                    "deepspeed_config": {"deepspeed_multinode_launcher": "standard"},
                }
            },
            [],
        ),
        (8, {"config": {"distributed_type": "FSDP"}}, []),
        (4, {"args": {"use_deepspeed": True}}, []),  # one node
    ],
)
def test_accelerate_starts_deepspeed_without_ssh(gpus: int, backend: dict[str, Any], launcher: list[str]) -> None:
    text = job(
        resources={"gpus_per_node": 4},
        workers=[{"role": "train", "gpus": gpus, "command": "python train.py"}],
        backend={"type": "accelerate", **backend},
    )
    argv = argv_of(plan_from(text), "train_w0")
    assert [word for word in argv if word.startswith("--deepspeed")] == launcher


def test_deepspeed_has_one_task_per_gpu_with_torch_variables() -> None:
    text = job(
        resources={"gpus_per_node": 4},
        workers=[{"role": "train", "count": 2, "gpus": 8, "command": "train.py --deepspeed ds.json"}],
        backend={"type": "deepspeed"},
    )
    plan = plan_from(text)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [environment_of(plan, "train_w1", 5)[name] for name in names] == ["5", "1", "8", "4", "cn02", "8300"]
    assert environment_of(plan, "train_w1", 5)["GPUJOB_RANK"] == "13"
    entry = planned(plan, "train_w1", 5)
    assert (entry.task.gpus, entry.visible, entry.narrowed, entry.step) == ((1,), (0, 1, 2, 3), False, "")


CONNECTING = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def connections(**parts: Any) -> dict[str, list[str | None]]:
    """What connects each process of a job, by worker and local rank."""
    plan = plan_from(job(**parts))
    found = {}
    for entry in plan.tasks:
        variables = environment_of(plan, entry.task.worker, entry.task.local_rank)
        found[f"{entry.task.worker}-{entry.task.local_rank}"] = [variables.get(name) for name in CONNECTING]
    return found


def test_the_processes_of_a_role_connect_and_one_process_alone_has_nothing_to_connect() -> None:
    assert connections(
        resources={"nodes": 2},
        workers=[
            {"role": "one", "command": "x"},
            {"role": "train", "count": 3, "command": "x"},
            {"role": "eval", "count": 2, "command": "x", "env": {"MASTER_PORT": "29500", "RANK": "{rank}"}},
        ],
    ) == {
        "one_w0-0": [None] * 6,
        "train_w0-0": ["0", "3", "0", "2", "cn00", "8300"],
        "train_w1-0": ["1", "3", "1", "2", "cn00", "8300"],
        "train_w2-0": ["2", "3", "0", "1", "cn00", "8300"],
        "eval_w0-0": ["4", "2", "0", "1", "cn00", "29500"],
        "eval_w1-0": ["5", "2", "0", "1", "cn00", "29500"],
    }


def test_a_process_that_sees_only_its_own_gpus_is_alone_on_its_node() -> None:
    workers = [{"role": "train", "count": 2, "gpus": 2, "command": "x"}]
    for more in ({}, {"process_granularity": "gpu"}):
        found = connections(resources={"nodes": 2, "gpus_per_node": 2, **more}, workers=workers)
        size = str(len(found))
        assert list(found.values()) == [[str(rank), size, "0", "1", "cn00", "8300"] for rank in range(len(found))]


@pytest.mark.parametrize("kind", ["torchrun", "accelerate"])
def test_a_launcher_connects_the_processes_that_it_starts(kind: str) -> None:
    workers = [{"role": "train", "gpus": 4, "command": "x.py"}]
    found = connections(resources={"gpus_per_node": 2}, workers=workers, backend={"type": kind})
    assert found == {"train_w0-0": [None] * 6, "train_w0-1": [None] * 6}


def test_the_ranks_of_an_mpi_worker_are_one_step_and_see_its_gpus() -> None:
    text = job(
        resources={"gpus_per_node": 8},
        workers=[{"role": "solve", "count": 2, "gpus": 4, "command": "solver"}],
        backend={"type": "mpi"},
    )
    plan = plan_from(text)
    assert [entry.step for entry in plan.tasks] == ["solve_w0"] * 4 + ["solve_w1"] * 4
    assert [(entry.visible, entry.narrowed) for entry in plan.tasks] == [((0, 1, 2, 3), True)] * 4 + [
        ((4, 5, 6, 7), True)
    ] * 4
    assert plan.tasks[5].task.gpus == (5,)


@pytest.mark.parametrize(("kind", "mpi"), [("mpi", "--mpi=pmix"), ("trtllm", "--mpi=pmix"), ("torchrun", "--mpi=none")])
def test_a_worker_of_one_mpi_rank_is_a_step_of_the_mpi_type(kind: str, mpi: str) -> None:
    """Programs built with Open MPI 4 end in MPI_Init under srun without it, with one rank too."""
    role = "agg" if kind == "trtllm" else "solve"
    workers = [{"role": role, "count": 2, "gpus": 1, "command": "solver"}]
    plan = plan_from(job(resources={"gpus_per_node": 2}, workers=workers, model=MODEL, backend={"type": kind}))
    steps = list(tasks_by_step(plan))
    assert [name for name, _ in steps] == [f"{role}_w0", f"{role}_w1"]
    for name, tasks in steps:
        argv = task_line(plan, name, tasks, facts_of(plan), 0)
        assert {mpi, "--ntasks=1"} <= set(argv)


class Counted(tuple[Task, ...]):
    """Tasks that count their iterations."""

    rounds = 0

    def __iter__(self) -> Iterator[Task]:
        self.rounds += 1
        return super().__iter__()


def test_the_tasks_of_a_worker_are_iterated_once() -> None:
    tasks = Counted(Task("w", "w", 0, rank, rank, rank // 4, (rank % 4,), ()) for rank in range(64))
    worker = BackendWorker(Mock(), "w", tasks, {"dist_init": 8300})
    local_ranks = [torch_environment(worker, tasks[rank])["LOCAL_RANK"] for rank in range(64)]
    assert local_ranks == [str(rank % 4) for rank in range(64)]
    assert worker.nodes == tuple(range(16))
    assert tasks.rounds == 1


def test_each_trtllm_server_on_a_node_has_its_own_port() -> None:
    resources = {"gpus_per_node": 8, "agg_workers": 4, "gpus_per_agg": 4}
    plan = plan_from(job(resources=resources, model=MODEL, backend={"type": "trtllm"}))
    ports = {worker: option(argv_of(plan, worker, 3), "--port") for worker in ("agg_w0", "agg_w1", "agg_w2", "agg_w3")}
    assert ports == {"agg_w0": "6100", "agg_w1": "6132", "agg_w2": "6100", "agg_w3": "6132"}


@pytest.mark.parametrize(
    ("over", "pages"),
    [
        ({}, [None, None]),
        ({"config": {"return_perf_metrics": False}}, [None, None]),
        ({"config": {"return_perf_metrics": True}}, ["http_port/prometheus/metrics", None]),
        ({"agg": {"config": {"return_perf_metrics": True}}}, ["http_port/prometheus/metrics", None]),
    ],
)
def test_trtllm_has_a_page_for_prometheus_only_with_its_option(over: dict[str, Any], pages: list[str | None]) -> None:
    assert [planned.metrics for planned in plan_from(engine("trtllm", 2, **over)).tasks] == pages


def test_all_ranks_of_a_trtllm_step_get_the_same_arguments() -> None:
    plan = plan_from(engine("trtllm", 16))
    argv = {tuple(argv_of(plan, "agg_w0", rank)) for rank in range(16)}
    assert len(argv) == 1
    assert argv.pop()[:3] == ("trtllm-llmapi-launch", "trtllm-serve", "/models/r1")
    assert argv_of(plan_from(engine("trtllm", 1)), "agg_w0")[0] == "trtllm-serve"


@pytest.mark.parametrize(("kind", "visible"), [("trtllm", (0, 1, 2, 3)), ("command", ())])
def test_a_task_that_selects_its_gpu_by_rank_sees_all_gpus_of_the_worker(kind: str, visible: tuple[int, ...]) -> None:
    text = job(
        resources={"gpus_per_node": 8, "agg_workers": 1, "gpus_per_agg": 4, "process_granularity": "gpu"},
        workers=[{"role": "agg", "command": "mine"}],
        backend={"type": kind},
    )
    plan = plan_from(text)
    assert [(entry.task.gpus, entry.visible, entry.narrowed) for entry in plan.tasks] == [
        ((gpu,), visible, True) for gpu in range(4)
    ]
    assert [task.visible_gpus for task in plan.manifest.tasks] == [len(visible)] * 4  # the launch check expects them


def test_each_data_parallel_rank_of_vllm_may_be_a_task() -> None:
    """Each task has one GPU and the first one serves. vLLM adds the rank to the side channel port."""
    resources = {**PD, "gpus_per_prefill": 2, "process_granularity": "gpu"}
    ranks = {"prefill": {"args": {"data-parallel-size": 2}}, "decode": {"args": {"data-parallel-size": 16}}}
    plan = plan_from(
        job(resources=resources, model=MODEL, backend={"type": "vllm", **ranks}, frontend={"type": "dynamo"})
    )
    workers = [entry for entry in plan.tasks if entry.task.role == "decode"]
    assert [(entry.task.node_index, entry.task.gpus, entry.narrowed) for entry in workers] == [
        (1 + rank // 8, (rank % 8,), True) for rank in range(16)
    ]
    for rank in (0, 1, 9):
        argv = argv_of(plan, "decode_w0", rank)
        assert option(argv, "--tensor-parallel-size") == option(argv, "--data-parallel-size-local") == "1"
        assert option(argv, "--data-parallel-size") == "16"
        assert option(argv, "--data-parallel-start-rank") == (str(rank) if rank else None)
        assert ("--headless" in argv) == (rank > 0)
        variables = environment_of(plan, "decode_w0", rank)
        assert variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] == facts_of(plan).hosts[1 + rank // 8]
        assert int(variables["VLLM_NIXL_SIDE_CHANNEL_PORT"]) + rank == workers[rank].ports["nixl"]
    used = [port for entry in workers if entry.task.node_index == 1 for port in entry.ports.values()]
    assert len(used) == len(set(used))


NIXL_HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"


@pytest.mark.parametrize(
    ("kind", "args", "name", "value", "variables"),
    [
        ("vllm", {"data-parallel-size": 16}, "--data-parallel-address", "10.0.0.1", ["VLLM_HOST_IP", NIXL_HOST]),
        ("vllm", {}, "--master-addr", "cn01", ["VLLM_HOST_IP", NIXL_HOST]),
        ("sglang", {"dp-size": 16, "enable-dp-attention": True}, "--dist-init-addr", "10.0.0.1:8300", []),
    ],
)
def test_an_engine_gets_ip_addresses_where_it_listens_with_zeromq(
    kind: str, args: dict[str, Any], name: str, value: str, variables: list[str]
) -> None:
    """libzmq before 4.3.5 binds to no host name."""
    backend = {"type": kind, "decode": {"args": args}}
    plan = plan_from(job(resources=PD, model=MODEL, backend=backend, frontend={"type": "dynamo"}))
    addresses = tuple(f"10.0.0.{node}" for node in range(plan.nodes))
    facts = dataclasses.replace(facts_of(plan), ip_addresses=addresses)
    for entry in (entry for entry in plan.tasks if entry.task.role == "decode"):
        assert option(task_argv(plan, entry, facts), name) == value
        environment, own = task_environment(plan, entry, facts, 0), addresses[entry.task.node_index]
        assert {variable: environment[variable] for variable in variables} == dict.fromkeys(variables, own)
    assert needs_survey(plan)
    assert "VLLM_HOST_IP" not in environment_of(plan, "prefill_w0")


def test_a_helper_next_to_an_engine_gets_no_engine_options() -> None:
    text = job(
        resources={"gpus_per_node": 8, "agg_workers": 1},
        workers=[{"role": "watcher", "command": "watch", "critical": False}],
        model=MODEL,
        backend={"type": "sglang", "env": {"A": "1"}, "config": {"log-level": "info"}},
        frontend=ROUTER,
    )
    plan = plan_from(text)
    watcher = planned(plan, "watcher_w0")
    assert (watcher.argv, watcher.service, dict(watcher.ports), dict(watcher.env)) == (("watch",), False, {}, {})
    assert list(plan.templates) == ["sglang_config_agg.yaml"]
    assert plan.readiness is not None
    assert plan.readiness.rules[-1].expected == {"agg": 1}


def test_configurations_are_merged_key_by_key() -> None:
    first = {"a": {"x": 1, "y": {"z": 1}}, "b": [1], "c": 1}
    assert merge_configs(first, {"a": {"y": {"w": 2}}, "b": [2], "c": {"d": 1}}) == {
        "a": {"x": 1, "y": {"z": 1, "w": 2}},
        "b": [2],
        "c": {"d": 1},
    }
    assert first == {"a": {"x": 1, "y": {"z": 1}}, "b": [1], "c": 1}


def test_options_become_arguments() -> None:
    args: Arguments = {
        "flag": True,
        "off": False,
        "none": None,
        "list": [1, "a b"],
        "float": 0.5,
        "zero": 0,
        "text": "",
    }
    assert option_argv(args) == ["--flag", "--list", "1", "a b", "--float", "0.5", "--zero", "0", "--text", ""]


def test_divisors_are_listed_as_text() -> None:
    assert [divisors_text(number) for number in (1, 2, 12)] == ["1", "1 or 2", "1, 2, 3, 4, 6 or 12"]


def test_each_type_of_the_file_is_a_backend() -> None:
    assert list(BACKENDS) == list(BACKEND_KINDS)
    body = {"name": "n", "workers": [{"command": "true"}]}
    for kind, backend in BACKENDS.items():
        spec = parse_job(yaml.safe_dump({**body, "backend": {"type": kind}}), "job.yaml")
        assert backend.name == kind
        assert backend.granularity in (None, spec.backend.granularity)
