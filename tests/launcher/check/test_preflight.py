"""Preflight checks of a plan on this machine."""

import os
import shutil
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from launcher.check.preflight import (
    check_commands,
    check_directories,
    check_gpus_here,
    check_modules,
    check_output_files,
    check_page,
    check_plan,
    check_sample,
    check_target_directory,
    check_variables,
)
from launcher.check.unknown_placeholders import check_placeholders
from tests.launcher.check.planned_jobs import planned_job, summaries


def worker(command: str | list[str], **over: Any) -> dict[str, Any]:
    return {"workers": [{"command": command, **over}]}


def test_a_good_job_has_no_warnings_and_errors(tmp_path: Path) -> None:
    items = check_plan(planned_job(tmp_path))
    assert not summaries(items, "error")
    assert not summaries(items, "warning")
    assert not list(tmp_path.iterdir())


def test_missing_programs_and_scripts_are_reported_once_per_role(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "here.py").write_text("")
    roles = {
        "a": "no-such-program",
        "b": "python3 -u missing.py",
        "c": "./file",
        "d": "python3 here.py",
        "e": "sh -c 'x'",
        "f": "python3 -m mod",
    }
    workers = [{"role": role, "count": 3, "command": command} for role, command in roles.items()]
    assert summaries(check_commands(planned_job(tmp_path, workers=workers))) == [
        ("no-program", "error", "workers (a).command"),
        ("no-script", "error", "workers (b).command"),
        ("no-program", "error", "workers (c).command"),
        ("program", "ok", "workers (d).command"),
        ("program", "ok", "workers (e).command"),
        ("program", "ok", "workers (f).command"),
    ]


def engines(folder: Path, **over: Any) -> dict[str, Any]:
    """A job with two SGLang workers and its router. Python finds their packages in ``folder``."""
    serving = {"resources": {"gpus_per_node": 2, "agg_workers": 2}, "frontend": {"type": "sglang-router"}}
    return {**SERVED, **serving, "env": {"PYTHONPATH": str(folder)}, **over}


def test_missing_engine_packages_are_reported_once(tmp_path: Path) -> None:
    python = shutil.which("python3", path=os.path.dirname(sys.executable))
    (router, engine) = (f"{python} does not find {name}" for name in ("sglang_router", "sglang"))
    fix = "activate the environment that has it"
    here = list(check_modules(planned_job(tmp_path, **engines(tmp_path))))
    assert [(item.code, item.status, item.place, item.message) for item in here] == [
        ("no-module", "error", "backend.type", f"{engine}; {fix}, or install it"),
        ("no-module", "error", "frontend.type", f"{router}; {fix}, or install it"),
    ]
    away = list(check_modules(planned_job(tmp_path, local=False, **engines(tmp_path))))
    assert [(item.status, item.message) for item in away] == [
        ("warning", f"{engine} here; unless the nodes have it, {fix}"),
        ("warning", f"{router} here; unless the nodes have it, {fix}"),
    ]
    codes = [item.code for item in check_plan(planned_job(tmp_path, **engines(tmp_path)))]
    assert codes.count("no-module") == 2
    assert "no-module" not in [i.code for i in check_plan(planned_job(tmp_path, local=False, **engines(tmp_path)))]


def test_engine_packages_are_found_without_import(tmp_path: Path) -> None:
    for name in ("sglang", "sglang_router"):
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").write_text("raise SystemExit('it must not be run')")
    items = list(check_modules(planned_job(tmp_path, **engines(tmp_path / "site"))))
    assert summaries(items) == [("module", "ok", "backend.type"), ("module", "ok", "frontend.type")]
    assert items[0].message.endswith("/python3 finds sglang")


def test_a_module_is_searched_with_the_python_flags_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/__init__.py").write_text("")
    commands = ["python3 -u -m mine.sub --x", "python3 -I -m mine.sub", "python3 x.py -m mine", "python3 -c x -m mine"]
    workers = [{"role": role, "command": command} for role, command in zip("abcd", commands, strict=True)]
    assert summaries(check_modules(planned_job(tmp_path, workers=workers))) == [
        ("module", "ok", "workers (a).command"),
        ("no-module", "error", "workers (b).command"),  # -I ignores the working directory
    ]


def test_a_broken_python_leaves_modules_unchecked(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    (tmp_path / "python").chmod(0o755)
    (item,) = check_modules(planned_job(tmp_path, **worker("./python -m mine")))
    assert (item.code, item.status) == ("module", "not checked")
    assert item.message.endswith("/python ended with 3: broken")
    assert not list(check_modules(planned_job(tmp_path, **worker("no-such-python -m mine"))))


def make_package(folder: Path, name: str = "mine") -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text("")


def test_modules_and_programs_are_searched_in_paths_of_the_job_file(tmp_path: Path) -> None:
    make_package(tmp_path / "src" / "worker")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/tool").write_text("#!/bin/sh\n")
    (tmp_path / "bin/tool").chmod(0o755)
    path = f"{{job_dir}}/bin:{os.path.dirname(sys.executable)}"
    env = {"PYTHONPATH": "{job_dir}/src/{role}", "PATH": path}
    job = planned_job(tmp_path, **worker("python3 -m mine.sub", env=env))
    (item,) = check_modules(job)
    assert (item.status, item.message.endswith("/python3 finds mine")) == ("ok", True)
    assert summaries(check_commands(planned_job(tmp_path, **worker("tool", env=env)))) == [
        ("program", "ok", "workers (worker).command")
    ]
    (item,) = check_modules(planned_job(tmp_path, **worker("python3 -m mine", env=env, role="other")))
    assert (item.code, item.status) == ("no-module", "error")


@pytest.mark.parametrize("place", ["{run_dir}/src", "/site/{job_id}", "{output_dir}", "{log_dir}:{job_dir}/none"])
def test_modules_in_paths_known_at_run_time_are_not_checked(place: str, tmp_path: Path) -> None:
    reason = "a path in `env` that is known only at run time"
    job = planned_job(tmp_path, **worker("python3 -m mine", env={"PYTHONPATH": place}))
    (item,) = check_modules(job)
    assert (item.code, item.status, item.message) == ("module", "not checked", f"mine may be in {reason}")
    job = planned_job(tmp_path, **worker("tool --fast", env={"PATH": place}))
    (item,) = check_commands(job)
    assert (item.status, item.message) == ("not checked", f'"tool" is searched for in {reason}')
    elsewhere = worker("python3 -m mine", env={"OUT": place})
    assert [item.status for item in check_modules(planned_job(tmp_path, **elsewhere))] == ["error"]
    make_package(tmp_path / "work")
    assert [item.status for item in check_modules(planned_job(tmp_path / "work", **elsewhere))] == ["ok"]
    there = worker("python3 -m mine", env={"PYTHONPATH": place})
    assert [item.status for item in check_modules(planned_job(tmp_path / "work", **there))] == ["ok"]


def test_modules_in_a_fixed_output_directory_are_checked(tmp_path: Path) -> None:
    spec = {**worker("python3 -m mine", env={"PYTHONPATH": "{output_dir}"}), "paths": {"output_dir": str(tmp_path)}}
    assert summaries(check_modules(planned_job(tmp_path / "elsewhere", **spec)), "error") == []
    (tmp_path / "work").mkdir()
    (item,) = check_modules(planned_job(tmp_path / "work", **spec))
    assert (item.code, item.status) == ("no-module", "error")


def test_output_of_python_start_up_files_is_ignored(tmp_path: Path) -> None:
    make_package(tmp_path)
    (tmp_path / "sitecustomize.py").write_text("print('site 2 of 3: mine loaded', end='')\n")
    workers = [{"role": role, "command": f"python3 -m {name}"} for role, name in (("a", "mine"), ("b", "other"))]
    found = list(check_modules(planned_job(tmp_path, workers=workers, env={"PYTHONPATH": str(tmp_path)})))
    assert [(item.status, item.message.partition("/python3 ")[2]) for item in found] == [
        ("ok", "finds mine"),
        ("error", "does not find other; activate the environment that has it, or install it"),
    ]


@pytest.mark.parametrize("text", ["import sys\nsys.stdout = None\n", "import os\nos._exit(0)\n"])
def test_modules_are_not_checked_when_python_prints_no_result(text: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(text)
    (item,) = check_modules(planned_job(tmp_path, **worker("python3 -m mine", env={"PYTHONPATH": str(tmp_path)})))
    assert (item.code, item.status) == ("module", "not checked")


@pytest.mark.parametrize(
    "command",
    ["bash -lc 'python3 -m mine'", "conda run -n x python3 -m mine", "env PYTHONPATH=x python3 -m mine", "uv run mine"],
)
def test_modules_are_not_checked_behind_shells_and_environment_wrappers(command: str, tmp_path: Path) -> None:
    assert not list(check_modules(planned_job(tmp_path, **worker(command))))
    shell_worker = {"command": "python3 -m mine", "shell": True}
    assert not list(check_modules(planned_job(tmp_path, workers=[shell_worker])))


@pytest.mark.parametrize("kind", ["custom", "sa-bench", "router"])
@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        ("python3 nobench.py", "no-script", '"nobench.py" does not exist in '),
        ("no-such-bench --fast", "no-program", '"no-such-bench" is not a program on this machine'),
        ("./file", "no-program", '"./file" is not executable'),
        ("python3 -u here.py", "program", '"python3" and "here.py" exist'),
        ("python3 {job_dir}/here.py", "program", '/here.py" exist'),
    ],
)
def test_the_program_of_a_benchmark_is_checked(kind: str, command: str, code: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "here.py").write_text("")
    benchmark = {"type": kind, "command": command, "isl": 128, "osl": 8, "concurrencies": "1x4"}
    job = planned_job(tmp_path, **{**SERVED, "benchmark": benchmark})
    (item,) = [item for item in check_commands(job) if item.place == "benchmark.command"]
    assert (item.code, item.status) == (code, "ok" if code == "program" else "error")
    assert text in item.message
    assert (item in check_plan(job)) is True


def test_the_program_of_a_built_in_benchmark_is_checked(tmp_path: Path) -> None:
    benchmark = {"type": "router", "isl": 128, "osl": 8, "concurrencies": [1]}
    job = planned_job(tmp_path, environ={"PATH": "/nowhere"}, **{**SERVED, "benchmark": benchmark})
    items = [item for item in check_commands(job) if item.place == "benchmark.type"]
    assert [(item.code, item.message) for item in items] == [
        ("no-program", 'router needs "aiperf" on PATH; activate the environment that has it')
    ]


def test_a_variable_in_the_command_of_a_benchmark_is_not_expanded(tmp_path: Path) -> None:
    benchmark = {"type": "sa-bench", "command": "b $DATA", "isl": 128, "osl": 8, "concurrencies": [1]}
    items = list(check_variables(planned_job(tmp_path, **{**SERVED, "benchmark": benchmark})))
    assert summaries(items, "warning") == [("not-expanded", "warning", "benchmark.command")]


def test_a_program_is_searched_on_the_path_of_the_worker(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("#!/bin/sh\n")
    (tmp_path / "mine").chmod(0o755)
    assert summaries(check_commands(planned_job(tmp_path, **worker("mine"))), "error")
    assert not summaries(check_commands(planned_job(tmp_path, **worker("mine", env={"PATH": str(tmp_path)}))), "error")
    assert not summaries(
        check_commands(planned_job(tmp_path, environ={"PATH": str(tmp_path)}, **worker("mine"))), "error"
    )


@pytest.mark.parametrize("command", ["/raid/env/bin/python -V", "python3 /raid/train.py"])
@pytest.mark.parametrize(("local", "status"), [(False, "warning"), (True, "error")])
def test_a_path_that_only_the_nodes_may_have_is_a_warning(
    command: str, local: bool, status: str, tmp_path: Path
) -> None:
    job = planned_job(tmp_path, local=local, workers=[{"command": command}])
    items = [item for item in check_commands(job) if item.code in ("no-program", "no-script")]
    assert [item.status for item in items] == [status]


def test_a_missing_script_and_a_missing_workdir_are_both_reported(tmp_path: Path) -> None:
    workers = [{"command": f"python3 {tmp_path}/train.py"}]
    job = planned_job(tmp_path, local=False, workdir="$SCRATCH/run", workers=workers)
    found = {(item.code, item.place) for item in check_plan(job) if item.status == "error"}
    assert found >= {("not-expanded", "workdir"), ("no-script", "workers (worker).command")}


def test_a_variable_that_the_setup_may_set_is_a_warning(tmp_path: Path) -> None:
    job = planned_job(tmp_path, local=False, setup={"modules": ["cuda"]}, environment={"required": ["CUDA_HOME"]})
    assert [item.status for item in check_variables(job)] == ["warning"]


def test_a_program_missing_on_the_login_node_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    items = list(check_commands(planned_job(tmp_path, local=False, **worker("no-such-program"))))
    assert summaries(items) == [("no-slurm", "error", "sbatch"), ("no-program", "warning", "workers (worker).command")]


@pytest.mark.parametrize(
    ("environ", "env", "status"),
    [
        ({}, {}, "error"),
        ({"DATA": ""}, {}, "error"),
        ({"DATA": "/d"}, {}, "ok"),
        ({}, {"DATA": "/d"}, "ok"),
    ],
)
def test_a_required_variable_must_be_set(
    environ: dict[str, str], env: dict[str, str], status: str, tmp_path: Path
) -> None:
    job = planned_job(tmp_path, environ=environ, env=env, environment={"required": ["DATA"]})
    assert [item.status for item in check_variables(job)] == [status]


@pytest.mark.parametrize(
    ("command", "warned"),
    [
        ("python3 train.py $DATA", "$DATA is not expanded, since no shell is involved"),
        ("echo '${DATA}/x'", "$DATA is not expanded"),
        ("echo 5$ a$", None),
    ],
)
def test_a_variable_in_a_command_without_a_shell_is_not_expanded(
    command: str, warned: str | None, tmp_path: Path
) -> None:
    items = list(check_variables(planned_job(tmp_path, environ={"DATA": "/d"}, **worker(command))))
    assert [item.status for item in items] == (["warning"] if warned else [])
    assert all(warned is not None and item.message.startswith(warned) for item in items)


@pytest.mark.parametrize(
    ("over", "place", "fix"),
    [
        (worker("x $DATA"), "workers (worker).command", "`shell: true`"),
        ({"backend": {"type": "sglang", "args": {"x": "$DATA"}}}, "workers (agg).command", "write its value"),
        ({"benchmark": {"type": "custom", "command": "x $DATA"}}, "benchmark.command", "the command `bash -c 'TEXT'`"),
        ({"frontend": {"type": "custom", "command": "x $DATA"}}, "frontend.command", "the command `bash -c 'TEXT'`"),
    ],
)
def test_the_suggested_fix_for_a_variable_fits_its_command(
    over: dict[str, Any], place: str, fix: str, tmp_path: Path
) -> None:
    serving = {"backend": {"type": "sglang"}, "model": {"path": "/m"}, "workers": []}
    serving |= {"resources": {"gpus_per_node": 1, "agg_workers": 1}}
    job = planned_job(tmp_path, environ={"DATA": "/d"}, **({} if "workers" in over else serving) | over)
    message = f"$DATA is not expanded, since no shell is involved; use a placeholder, or {fix}"
    assert [(item.place, item.message) for item in check_variables(job) if item.status == "warning"] == [
        (place, message)
    ]


@pytest.mark.parametrize(
    ("text", "unset"),
    [
        ("cat $DATA ${OTHER}/x", ["$DATA", "$OTHER"]),
        ("DATA=/d; cat $DATA", []),
        ("export DATA=/d && cat $DATA", []),
        ("for DATA in a b; do cat $DATA; done", []),
        ("cat $HOME ${GPUJOB_RUN_DIR} $SLURM_JOB_ID $$ $? $1 \\$DATA", []),
        ("cat $RANK", ["$RANK"]),
    ],
)
def test_a_variable_of_a_shell_command_should_be_set(text: str, unset: list[str], tmp_path: Path) -> None:
    items = list(check_variables(planned_job(tmp_path, workers=[{"command": text, "shell": True}])))
    assert [item.message.partition(" ")[0] for item in items] == unset
    assert all(item.status == "warning" for item in items)


@pytest.mark.parametrize(
    "over",
    [
        {"workers": [{"count": 2, "command": "cat $RANK $MASTER_ADDR", "shell": True}]},
        {
            "workers": [{"gpus": 1, "command": "cat $RANK", "shell": True}],
            "resources": {"gpus_per_node": 1},
            "backend": {"type": "torchrun"},
        },
    ],
)
def test_variables_that_connect_processes_are_known(over: dict[str, Any], tmp_path: Path) -> None:
    assert list(check_variables(planned_job(tmp_path, **over))) == []


@pytest.mark.parametrize(("second", "status"), [("1", "ok"), ("GPU-b", "error"), ("0", "error")])
def test_roles_may_name_their_own_gpus_by_number(second: str, status: str, tmp_path: Path) -> None:
    roles = [
        {"role": role, "command": "true", "gpus": 1, "env": {"CUDA_VISIBLE_DEVICES": devices}}
        for role, devices in (("a", "0"), ("b", second))
    ]
    assert check_gpus_here(planned_job(tmp_path, workers=roles, resources={"gpus_per_node": 2}), 2).status == status


def test_requested_gpus_are_compared_with_those_of_this_machine(tmp_path: Path) -> None:
    gpus = {"resources": {"gpus_per_node": 4}, **worker("true", gpus=4)}
    assert check_gpus_here(planned_job(tmp_path)).status == "ok"
    for known, code in ((0, "few-gpus"), (3, "few-gpus"), (4, "gpus")):
        assert check_gpus_here(planned_job(tmp_path, **gpus), known).code == code
    assert check_gpus_here(planned_job(tmp_path, local=False, **gpus)).status == "not checked"
    assert check_gpus_here(planned_job(tmp_path, **gpus | worker("true", gpus=1)), 1).code == "gpus"


@pytest.mark.parametrize(
    ("devices", "found"),
    [
        ("MIG-1,MIG-2,MIG-3,MIG-4", ("ok", "those that CUDA_VISIBLE_DEVICES names by UUID")),
        (
            "0,1,2,3",
            ("warning", "the plan uses 4 GPUs and this machine has 1; some workers will not find theirs"),
        ),
    ],
)
def test_gpus_that_a_list_names_by_uuid_are_not_counted(devices: str, found: tuple[str, str], tmp_path: Path) -> None:
    gpus = {"resources": {"gpus_per_node": 4}, **worker("true", gpus=4)}
    one = check_gpus_here(planned_job(tmp_path, environ={"CUDA_VISIBLE_DEVICES": devices}, **gpus), 1)
    assert (one.status, one.message) == found


@pytest.mark.parametrize(
    ("files", "status"),
    [
        (["kfd"], "not checked"),
        (["dxg"], "not checked"),
        (["dxg", "nvidia0", "nvidiactl"], "ok"),
        (["nvidiactl"], "warning"),
    ],
    ids=["AMD", "WSL", "NVIDIA", "none"],
)
def test_only_gpus_of_nvidia_are_counted(
    files: list[str], status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dev").mkdir()
    for name in files:
        (tmp_path / "dev" / name).touch()
    monkeypatch.setattr("launcher.check.preflight._DEV", tmp_path / "dev")
    gpus = {"resources": {"gpus_per_node": 1}, **worker("true", gpus=1)}
    assert check_gpus_here(planned_job(tmp_path, **gpus)).status == status


@pytest.mark.parametrize(
    ("devices", "status"),
    [
        ("2,3", "error"),
        ("3", "error"),
        ("GPU-a,GPU-b,GPU-c", "error"),
        ("0,1,NoDevFiles", "error"),
        ("4,5,6,7", "ok"),
        ("MIG-1,MIG-2,MIG-3,MIG-4,MIG-5", "ok"),
        ("", "ok"),
        (None, "ok"),
    ],
)
def test_workers_do_not_get_gpus_that_the_shell_leaves_out(devices: str | None, status: str, tmp_path: Path) -> None:
    gpus: dict[str, Any] = {"resources": {"gpus_per_node": 4}, "workers": [{"count": 2, "command": "true", "gpus": 2}]}
    variables = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    found = check_gpus_here(planned_job(tmp_path, environ=variables, **gpus), 8)
    in_file = check_gpus_here(planned_job(tmp_path, environ={"CUDA_VISIBLE_DEVICES": "0"}, env=variables, **gpus), 8)
    assert (found.status, in_file.status) == (status, "error" if devices is None else status)
    if status == "error":
        problem = f"the plan uses 4 GPUs, more than CUDA_VISIBLE_DEVICES={devices} has; "
        assert found.message == problem + "use fewer, or set that variable to 4 GPUs"


def test_a_list_of_devices_that_each_worker_fills_in_itself_is_not_counted(tmp_path: Path) -> None:
    gpus: dict[str, Any] = {"resources": {"gpus_per_node": 2}, "workers": [{"count": 2, "command": "true", "gpus": 1}]}
    found = check_gpus_here(planned_job(tmp_path, env={"CUDA_VISIBLE_DEVICES": "{rank}"}, **gpus), 2)
    assert (found.status, found.message) == ("ok", "2 of the 2 GPUs of this machine")


def test_directories_must_exist_or_be_creatable(tmp_path: Path, locked: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "out").mkdir()
    paths = {"output_dir": "file/out", "checkpoint_dir": str(locked / "ckpt"), "log_dir": "out"}
    items = list(check_directories(planned_job(tmp_path, paths=paths)))
    assert summaries(items) == [
        ("writable", "ok", "logs_dir"),
        ("not-writable", "error", "paths.output_dir"),
        ("not-writable", "error", "paths.checkpoint_dir"),
        ("writable", "ok", "paths.log_dir"),
    ]
    assert items[1].message == f'"{tmp_path}/file" is not a directory; choose another one'
    assert items[2].message.startswith(f'no permission to write to "{locked}", so "{locked}/ckpt" cannot be created; ')
    assert summaries(check_directories(planned_job(tmp_path, workdir="none")), "error") == [
        ("no-workdir", "error", "workdir")
    ]


def test_slurm_cannot_write_to_a_path_with_a_backslash(tmp_path: Path) -> None:
    for local, errors in ((True, []), (False, [("backslash", "error", "logs_dir")])):
        job = planned_job(tmp_path, local=local, cluster={"logs_dir": str(tmp_path / "a\\b")})
        assert summaries(check_directories(job), "error") == errors


def test_existing_output_is_a_warning_unless_the_job_resumes(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    out: dict[str, Any] = {"paths": {"output_dir": "out"}}
    assert check_output_files(planned_job(tmp_path)).message == "a fresh run directory"
    assert check_output_files(planned_job(tmp_path, **out)).status == "ok"
    (tmp_path / "out/output_worker_0.json").write_text("{}")
    item = check_output_files(planned_job(tmp_path, **out))
    assert (item.code, item.status) == ("output-exists", "warning")
    assert "already contains 1 file like output_worker_0.json" in item.message
    item = check_output_files(planned_job(tmp_path, resume=True, **out))
    assert (item.status, item.message) == ("ok", f'the job continues from 1 file in "{tmp_path}/out" (resume: true)')


def test_a_million_existing_files_would_take_no_memory(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for number in range(2000):
        (tmp_path / f"out/output_worker_{number}.json").touch()
    job = planned_job(tmp_path, paths={"output_dir": "out"})
    tracemalloc.start()
    try:
        item = check_output_files(job)
        assert tracemalloc.get_traced_memory()[1] < 200_000  # a list of the files takes three times as much
    finally:
        tracemalloc.stop()
    assert "already contains 2000 files like output_worker_0.json" in item.message


@pytest.mark.parametrize("pattern", ["*", "*.csv"])
def test_gpu_metrics_of_an_earlier_job_are_not_output(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/gpu_metrics.csv").write_text("time\n")
    (tmp_path / "out/gpu_metrics_cn02.csv.1").write_text("time\n")
    out: dict[str, Any] = {"paths": {"output_dir": "out"}, "patterns": {"output": pattern}}
    with_gpu_metrics = {**out, "monitoring": {"gpu_metrics": True}}
    assert check_output_files(planned_job(tmp_path, **with_gpu_metrics)).status == "ok"
    item = check_output_files(planned_job(tmp_path, **out))
    assert "like gpu_metrics.csv" in item.message
    (tmp_path / "out/results.csv").write_text("1\n")
    item = check_output_files(planned_job(tmp_path, **with_gpu_metrics))
    assert "already contains 1 file like results.csv" in item.message


@pytest.mark.parametrize(
    ("word", "suggestion"),
    [
        ("{rnk}", "{rank}"),
        ("a/{Rank}", "{rank}"),
        ("{worldsize}", "{world_size}"),
        ("{outputdir}", "{output_dir}"),
        ("{rank}", None),
        ("{{rnk}}", None),
        ("${rnk}", None),
        ("{print}", None),
        ("{}", None),
        ('{"a": 1}', None),
    ],
)
def test_a_misspelled_placeholder_is_an_error(word: str, suggestion: str | None, tmp_path: Path) -> None:
    for spec, place in (
        (worker(["echo", word]), "workers (worker).command"),
        (worker("true", env={"A": word}), "workers (worker).env.A"),
        ({"inputs": [word]}, "inputs[0]"),
    ):
        items = list(check_placeholders(planned_job(tmp_path, **spec)))
        assert summaries(items) == ([("placeholder", "error", place)] if suggestion else [])
        assert all(f'did you mean "{suggestion}"?' in item.message for item in items)


SERVED: dict[str, Any] = {
    "resources": {"gpus_per_node": 8, "agg_workers": 1},
    "backend": {"type": "sglang"},
    "workers": [],
    "model": {"path": "hf:a/b"},
    "frontend": {"type": "custom", "command": "front --port {http_port}"},
}


@pytest.mark.parametrize(
    ("over", "place", "text"),
    [
        (worker("echo {host_1}"), "workers (worker).command", "not a node of the job, which has {host_0}"),
        (worker("echo {ip_1}"), "workers (worker).command", "not a node of the job, which has {ip_0}"),
        (worker("a {public_port}"), "workers (worker).command", "not a port of this process; it can use {etcd_port}"),
        (worker("a {http_portt}"), "workers (worker).command", 'did you mean "{http_port}"?'),
        (worker("a", env={"B": "{x_port}"}), "workers (worker).env.B", "it can use "),
        ({"env": {"B": "{rnk}"}}, "env.B", 'did you mean "{rank}"?'),
        (
            {**SERVED, "frontend": {"type": "custom", "command": "f {http_port} {internal_port}"}},
            "frontend.command",
            "{internal_port} is not a port of this process",
        ),
        (
            {**SERVED, "benchmark": {"type": "custom", "command": "b {http_port}"}},
            "benchmark.command",
            "a benchmark has none: its requests go to GPUJOB_ENDPOINT",
        ),
        (
            {**SERVED, "backend": {"type": "sglang", "args": {"x": "{host_9}"}}},
            "backend.args.x",
            "not a node of the job",
        ),
        (
            {**SERVED, "backend": {"type": "sglang", "agg": {"config": {"x": ["{http_port}"]}}}},
            "backend.agg.config",
            "the number of a port here, as in {port_6100}",
        ),
        (
            {"container": {"image": "i:1", "mounts": ["/a:/b", "/{jobdir}:/c"]}},
            "container.mounts[1]",
            'did you mean "{job_dir}"?; to keep the braces write {{jobdir}}',
        ),
    ],
)
def test_an_unknown_placeholder_is_an_error_everywhere(
    over: dict[str, Any], place: str, text: str, tmp_path: Path
) -> None:
    items = list(check_placeholders(planned_job(tmp_path, local=False, **over)))
    assert summaries(items) == [("placeholder", "error", place)]
    assert text in items[0].message


def test_known_placeholders_and_other_braces_are_accepted(tmp_path: Path) -> None:
    text = "{host_0} {ip_0} {port_6100} {head} {http_port} {nixl_port} {{rnk}} {{host_9}} "
    text += "${rnk} '{print $1}' '{\"a\": 1}' {lr}"
    config = {"x": "{host_0} {port_1} {run_dir}", "y": {"{z}": 1}}
    spec = {**SERVED, "workers": [{"role": "agg", "command": f"serve {text}"}]}
    spec["backend"] = {"type": "sglang", "config": config}
    assert not list(check_placeholders(planned_job(tmp_path, local=False, env={"A": "{http_port}"}, **spec)))


@pytest.mark.parametrize(
    ("over", "place", "message"),
    [
        (
            {"workers": [{"gpus": 1, "command": "x.py"}], "backend": {"type": "torchrun"}},
            "backend.type",
            'torchrun needs "torchrun" on PATH; activate the environment that has it',
        ),
        (
            {**SERVED, "backend": {"type": "vllm"}},
            "backend.type",
            'vllm needs "vllm" on PATH; activate the environment that has it',
        ),
        (
            {**SERVED, "frontend": {"type": "dynamo"}},
            "frontend.type",
            'dynamo needs "nats-server" on PATH; activate the environment that has it',
        ),
        (
            {**SERVED, "frontend": {"type": "sglang-router", "count": 2}},
            "frontend.nginx",
            'the balancer needs "nginx" on PATH; activate the environment that has it',
        ),
    ],
)
def test_a_missing_program_of_a_backend_names_the_backend_key(
    over: dict[str, Any], place: str, message: str, tmp_path: Path
) -> None:
    spec = {"resources": {"gpus_per_node": 8}, **over}
    items = list(check_commands(planned_job(tmp_path, environ={"PATH": "/nowhere"}, **spec)))
    assert (place, message) in [(item.place, item.message) for item in items]


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        ({}, ("sample", "not checked")),
        ({"patterns": {"items": r"(\d+) done"}}, ("sample", "not checked")),
        ({"sample": "Processed 12/50 items"}, ("sample", "ok")),
        ({"sample": ["epoch 1", "Processed 12/50 items"]}, ("sample", "ok")),
        ({"sample": "12 done"}, ("no-position", "error")),
        ({"sample": "12 done", "patterns": {"items": r"(\d+) done"}}, ("sample", "ok")),
        ({"sample": "Processed 1/2 items", "patterns": {"items": r"(\d+) done"}}, ("no-position", "error")),
        ({"sample": "log.txt"}, ("sample", "ok")),
        ({"sample": "no.txt"}, ("no-position", "error")),
        ({"sample": "x" * 5000}, ("no-position", "error")),
    ],
)
def test_a_log_sample_must_contain_a_position(
    progress: dict[str, Any], expected: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "log.txt").write_text("starting\nProcessed 3/9 items\n")
    (item,) = check_sample(planned_job(tmp_path, progress=progress))
    assert (item.code, item.status) == expected


def test_a_log_sample_is_read_with_the_pack_of_the_job(tmp_path: Path) -> None:
    bar = "Training:  10%|#         | 10/100 [00:05<00:45,  2.00it/s]"
    (item,) = check_sample(planned_job(tmp_path, progress={"sample": bar}))
    assert (item.status, item.message) == ("ok", "position 10 of 100 found by the pack tqdm")
    (item,) = check_sample(planned_job(tmp_path, progress={"sample": bar, "pack": "tqdm"}))
    assert (item.status, item.message) == ("ok", "position 10 of 100 found")
    (item,) = check_sample(planned_job(tmp_path, progress={"sample": bar, "pack": "generic"}))
    assert item.code == "no-position"
    (item,) = check_sample(planned_job(tmp_path, progress={"pack": "tqdm"}))
    assert item.message.startswith("the patterns of the pack tqdm, without a sample")


def test_own_patterns_without_a_match_in_the_sample_are_a_warning(tmp_path: Path) -> None:
    progress = {"sample": "Processed 1/2 items, lr=0.5", "patterns": {"lr": r"lr=([\d.]+)", "gnorm": r"gnorm=(\d+)"}}
    items = list(check_sample(planned_job(tmp_path, progress=progress)))
    assert summaries(items) == [
        ("sample", "ok", "progress.sample"),
        ("no-match", "warning", "progress.patterns.gnorm"),
    ]
    assert items[0].message == "position 1 of 2 found"


def test_an_own_position_pattern_without_a_match_is_a_warning(tmp_path: Path) -> None:
    progress = {"sample": "Processed 1/2 items", "patterns": {"step": r"at (\d+) of (\d+)", "resume": r"from (\d+)"}}
    items = list(check_sample(planned_job(tmp_path, progress=progress)))
    assert summaries(items, "warning") == [("no-match", "warning", "progress.patterns.step")]


def test_the_target_directory_must_be_writable(tmp_path: Path) -> None:
    for directory, status in ((None, "not checked"), (str(tmp_path), "ok"), ("/no/such", "warning")):
        item = check_target_directory(planned_job(tmp_path, cluster={"target_dir": directory}))
        assert item.status == status


@pytest.mark.parametrize(("mode", "code"), [(0o755, "targets"), (0o1777, "targets"), (0o777, "open-target-dir")])
def test_others_may_not_replace_files_in_the_target_directory(mode: int, code: str, tmp_path: Path) -> None:
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets").chmod(mode)
    item = check_target_directory(planned_job(tmp_path, cluster={"target_dir": str(tmp_path / "targets")}))
    assert item.code == code


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({}, "the sidecars listen on the node's address and 127.0.0.1, on a free port"),
        ({"listen_address": "10.0.0.1:9410"}, "the sidecars listen on 10.0.0.1:9410"),
        ({"listen_address": ":9410"}, "the sidecars listen on :9410, which is every interface"),
        ({"listen_address": "0.0.0.0:0"}, "the sidecars listen on 0.0.0.0:0, which is every interface"),
    ],
)
def test_the_address_of_the_sidecars_is_reported(tmp_path: Path, cluster: dict[str, str], message: str) -> None:
    (found,) = check_page(planned_job(tmp_path, local=False, cluster=cluster))
    assert (found.status, found.message) == ("ok", message)


def test_an_invalid_web_configuration_is_found_before_the_start(tmp_path: Path) -> None:
    path = tmp_path / "web.yml"
    job = planned_job(tmp_path, cluster={"web_config_file": str(path)})
    for text, problem in ((None, "cannot be read"), ("a: 1", "unknown key"), ("", None)):
        if text is not None:
            path.write_text(text)
        _, *found = check_page(job)
        if problem is None:
            assert found == []
        else:
            assert [item.status for item in found] == ["warning"]
            assert f"the job would run without sidecars: {path}: " in found[0].message
            assert problem in found[0].message


def test_the_checks_of_every_start_use_no_network_and_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks of `submit` and `run` must not wait for a network or a program."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("this takes time")

    monkeypatch.setattr("subprocess.Popen", fail)
    monkeypatch.setattr("socket.socket", fail)
    urls = {"prometheus_url": "http://127.0.0.1:9", "alertmanager_url": "http://127.0.0.1:9"}
    job = planned_job(tmp_path, local=False, cluster=urls, environment={"packages": ["os"]})
    assert check_plan(job)
    assert os.listdir(tmp_path) == []
