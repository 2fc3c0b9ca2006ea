"""What `gpujob plan` shows of a sweep, and how points become arrays."""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.cli_sweep import describe_sweep, render_sweep
from launcher.config import ClusterSpec
from launcher.errors import ConfigError
from launcher.job_ids import task_ranges
from launcher.sweep_plan import PlannedSweep, check_sweep, place_array, plan_arrays, plan_sweep
from tests.launcher.support import gpujob

BODY: dict[str, Any] = {
    "name": "embed v2",
    "resources": {"nodes": 1, "gpus_per_node": 2},
    "workers": [{"count": 2, "gpus": 1, "command": "train --lr {lr} --bs {bs} --shard {rank}"}],
    "slurm": {"partition": "gpu", "time_limit": "01:00:00"},
    "sweep": {"max_parallel": 2, "grid": {"lr": [1e-05, 0.001], "bs": [8, 16, 32]}},
}


def planned(**over: Any) -> PlannedSweep:
    return plan_sweep(
        {**BODY, **over},
        "job.yaml",
        ClusterSpec(),
        job_dir=Path("/home/ana/jobs"),
        workdir=Path("/home/ana/work"),
        timestamp="20251122_041341",
        local=False,
    )


def described(sweep: PlannedSweep) -> str:
    text = "\n".join(render_sweep(describe_sweep(sweep, local=False))) + "\n"
    return text.replace(f"exec {shlex.quote(sys.executable)} ", "exec /opt/gpujob/bin/python3 ")


def test_a_sweep_is_shown_as_a_table_and_one_array(golden: Callable[[str, str], Path]) -> None:
    golden("launcher/sweep-plan.txt", described(planned()))


def test_points_that_ask_for_other_things_are_arrays_of_their_own(golden: Callable[[str, str], Path]) -> None:
    sweep = {"max_parallel": 1, "grid": {"lr": [0.1, 0.2], "bs": [8]}, "list": [{}, {"resources": {"nodes": 2}}]}
    golden("launcher/sweep-arrays.txt", described(planned(sweep=sweep)))


def test_a_later_array_waits_for_the_one_before_in_the_directory_of_the_first() -> None:
    sweep = planned(slurm={"dependency": "afterok:7"}, sweep={"max_parallel": 1, "zip": {"lr": [1, 2], "bs": [1, 2]}})
    (array,) = plan_arrays(sweep, [1])
    _, script = place_array(array, Path("/logs"), "4459_embed", ["4459"])
    assert "#SBATCH --dependency=afterok:7,afterany:4459" in script
    assert "#SBATCH --array=1\n" in script
    assert "#SBATCH --output=/logs/4459_embed/tasks/%A_%a/log.out" in script
    assert 'run_dir=/logs/4459_embed/tasks/"$SLURM_ARRAY_JOB_ID"_"$SLURM_ARRAY_TASK_ID"\n' in script


def test_without_a_limit_all_points_may_run_at_once() -> None:
    (array,) = plan_arrays(planned(sweep={"grid": {"lr": [1, 2], "bs": [1]}}), [0, 1])
    assert (array.tasks, array.throttled) == ("0-1", False)


def test_what_does_not_fit_is_told_for_all_points() -> None:
    with pytest.raises(ConfigError) as raised:
        planned(sweep={"grid": {"lr": [1], "bs": [1], "workers[0].gpus": [1, 3, 5]}})
    problems = raised.value.problems
    assert [problem.partition(":")[0] for problem in problems] == ["embed_v2_lr1_bs1_gpus3", "embed_v2_lr1_bs1_gpus5"]
    assert all("neither at most gpus_per_node = 2" in problem for problem in problems)


def test_points_that_would_write_the_same_files_are_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        planned(paths={"output_dir": "out"})
    (problem,) = raised.value.problems
    cure = "leave paths.output_dir out (each has its run directory), or write {point} into it"
    assert problem == f'paths.output_dir: points would write the same files; {cure}: "/home/ana/work/out"'
    planned(paths={"output_dir": "out/{point}"})
    planned(paths={"output_dir": "out"}, patterns={"output": "{point}_*.json", "checkpoints": None, "logs": None})


def test_what_is_found_at_every_point_is_told_once() -> None:
    with pytest.raises(ConfigError) as raised:
        check_sweep(planned())
    told = [problem for problem in raised.value.problems if "workdir" in problem]
    assert told == [
        'all 6 points: workdir: "/home/ana/work" is not a directory; create it or leave workdir out',
    ]


@given(st.sets(st.integers(0, 60)))
def test_ranges_name_each_index_once(indexes: set[int]) -> None:
    named = [
        range(int(first), int(last or first) + 1)
        for first, _, last in (part.partition("-") for part in task_ranges(indexes).split(",") if part)
    ]
    assert [index for part in named for index in part] == sorted(indexes)


# The command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(BODY, sort_keys=False))
    return tmp_path


def test_plan_has_every_point_and_writes_nothing(folder: Path) -> None:
    done = gpujob("plan", "job.yaml", "--json", cwd=folder)
    body = json.loads(done.stdout)
    assert (done.returncode, [point["index"] for point in body["points"]]) == (0, list(range(6)))
    first = body["points"][0]
    assert (first["values"], first["nodes"], first["gpus"]) == ({"lr": 1e-05, "bs": 8}, 1, 2)
    assert (first["time_limit"], first["array"]) == ("01:00:00", 0)
    assert [(array["tasks"], array["points"]) for array in body["arrays"]] == [("0-5%2", list(range(6)))]
    assert [path.name for path in folder.iterdir()] == ["job.yaml"]


@pytest.mark.parametrize("point", ["4", "embed_v2_lr0.001_bs16"])
def test_one_point_is_planned_as_any_job(folder: Path, point: str) -> None:
    done = gpujob("plan", "job.yaml", "--json", "--point", point, cwd=folder)
    body = json.loads(done.stdout)
    assert (done.returncode, body["job_name"]) == (0, "embed_v2_lr0.001_bs16")
    assert body["processes"][1]["command"] == ["train", "--lr", "0.001", "--bs", "16", "--shard", "1"]
    assert "#SBATCH --array=4\n" in body["script"]


def test_a_point_that_is_not_there_is_told(folder: Path) -> None:
    done = gpujob("plan", "job.yaml", "--point", "7", cwd=folder)
    assert done.returncode == 2
    assert "--point: job.yaml has no point '7'; name one or give its number (embed_v2_lr1e-05_bs8, " in done.stderr
    (folder / "job.yaml").write_text(yaml.safe_dump({"name": "j", "workers": [{"command": "true"}]}))
    done = gpujob("plan", "job.yaml", "--point", "7", cwd=folder)
    assert (done.returncode, done.stderr) == (2, "gpujob: --point: job.yaml has no sweep; leave --point out\n")


def test_check_tells_what_is_wrong_with_points(folder: Path) -> None:
    sweep = {"grid": {"lr": [1], "bs": [2], "resources.nodes": [1, "x"]}}
    (folder / "job.yaml").write_text(yaml.safe_dump({**BODY, "sweep": sweep}, sort_keys=False))
    done = gpujob("check", "job.yaml", "--local", cwd=folder)
    assert done.returncode == 2
    assert 'embed_v2_lr1_bs2_nodesx: resources.nodes: "x" is not a whole number' in done.stdout
