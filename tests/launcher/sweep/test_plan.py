"""`gpujob plan` for a sweep, and how points become array jobs."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import ConfigError, LauncherError
from launcher.jobfile.jobfile import ClusterSpec
from launcher.rundir.job_ids import task_ranges
from launcher.show.records import SweepPlanRecord
from launcher.show.sources import SourceNames
from launcher.sweep.plan import PlannedSweep, check_sweep, place_array, plan_arrays, plan_sweep
from launcher.sweep.show import choose_point, describe_sweep, explain_point, render_point_sources, render_sweep
from tests.support.launcher import gpujob, invocation_in
from tests.support.record_schema import problems, published_schema

BODY: dict[str, Any] = {
    "name": "embed v2",
    "resources": {"nodes": 1, "gpus_per_node": 2},
    "workers": [{"count": 2, "gpus": 1, "command": "train --lr {lr} --bs {bs} --shard {rank}"}],
    "slurm": {"partition": "gpu", "time_limit": "01:00:00"},
    "sweep": {"max_parallel": 2, "grid": {"lr": [1e-05, 0.001], "bs": [8, 16, 32]}},
}


def plan_of_sweep(cluster: Mapping[str, Any] | None = None, **over: Any) -> PlannedSweep:
    return plan_sweep(
        {**BODY, **over},
        "job.yaml",
        ClusterSpec.model_validate(cluster or {}),
        invocation_in(Path("/home/ana/work")),
    )


def sweep_text(sweep: PlannedSweep) -> str:
    return "\n".join(render_sweep(describe_sweep(sweep, local=False))) + "\n"


def test_a_sweep_is_shown_as_a_table_and_one_array(golden: Callable[[str, str], Path]) -> None:
    golden("launcher/sweep-plan.txt", sweep_text(plan_of_sweep()))
    record = describe_sweep(plan_of_sweep(), local=False)
    assert SweepPlanRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
    assert not list(problems(record.to_json(), published_schema("sweep-plan")))


def test_points_with_different_resources_have_their_own_arrays(golden: Callable[[str, str], Path]) -> None:
    sweep = {"max_parallel": 1, "grid": {"lr": [0.1, 0.2], "bs": [8]}, "list": [{}, {"resources": {"nodes": 2}}]}
    golden("launcher/sweep-arrays.txt", sweep_text(plan_of_sweep(sweep=sweep)))


def test_a_later_array_depends_on_the_earlier_one() -> None:
    sweep = plan_of_sweep(
        slurm={"dependency": "afterok:7"}, sweep={"max_parallel": 1, "zip": {"lr": [1, 2], "bs": [1, 2]}}
    )
    (array,) = plan_arrays(sweep, [1])
    _, script = place_array(array, Path("/logs"), "4459_embed", ["4459"])
    assert "#SBATCH --dependency=afterok:7,afterany:4459" in script
    assert "#SBATCH --array=1\n" in script
    assert "#SBATCH --output=/logs/4459_embed/tasks/%A_%a/log.out" in script
    assert 'run_dir=/logs/4459_embed/tasks/"$SLURM_ARRAY_JOB_ID"_"$SLURM_ARRAY_TASK_ID"\n' in script


def test_an_array_without_max_parallel_is_not_throttled() -> None:
    (array,) = plan_arrays(plan_of_sweep(sweep={"grid": {"lr": [1, 2], "bs": [1]}}), [0, 1])
    assert (array.tasks, array.is_throttled) == ("0-1", False)


def test_points_that_do_not_fit_are_all_reported() -> None:
    with pytest.raises(ConfigError) as raised:
        plan_of_sweep(sweep={"grid": {"lr": [1], "bs": [1], "workers[0].gpus": [1, 3, 5]}})
    problems = raised.value.problems
    assert [problem.partition(":")[0] for problem in problems] == ["embed_v2_lr1_bs1_gpus3", "embed_v2_lr1_bs1_gpus5"]
    assert all("neither at most gpus_per_node = 2" in problem for problem in problems)


def test_points_with_the_same_output_files_are_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        plan_of_sweep(paths={"output_dir": "out"})
    (problem,) = raised.value.problems
    fix = "leave paths.output_dir out (then each uses its run directory), or write {point} into it"
    assert problem == f'paths.output_dir: points would write the same files; {fix}: "/home/ana/work/out"'
    plan_of_sweep(paths={"output_dir": "out/{point}"})
    plan_of_sweep(paths={"output_dir": "out"}, patterns={"output": "{point}_*.json", "checkpoints": None, "logs": None})


def test_a_problem_of_all_points_is_reported_once() -> None:
    with pytest.raises(ConfigError) as raised:
        check_sweep(plan_of_sweep())
    problems = [problem for problem in raised.value.problems if "workdir" in problem]
    assert problems == [
        'all 6 points: workdir: "/home/ana/work" is not a directory; create it or leave workdir out',
    ]


@given(st.sets(st.integers(0, 60)))
def test_task_ranges_contain_each_index_once(indexes: set[int]) -> None:
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
def test_one_point_is_planned_like_any_job(folder: Path, point: str) -> None:
    done = gpujob("plan", "job.yaml", "--json", "--point", point, cwd=folder)
    body = json.loads(done.stdout)
    assert (done.returncode, body["job_name"]) == (0, "embed_v2_lr0.001_bs16")
    assert body["processes"][1]["command"] == ["train", "--lr", "0.001", "--bs", "16", "--shard", "1"]
    assert "#SBATCH --array=4\n" in body["script"]


def test_an_unknown_point_is_reported(folder: Path) -> None:
    done = gpujob("plan", "job.yaml", "--point", "7", cwd=folder)
    assert done.returncode == 2
    assert "--point: job.yaml has no point '7'; give a name or a number (embed_v2_lr1e-05_bs8, " in done.stderr
    (folder / "job.yaml").write_text(yaml.safe_dump({"name": "j", "workers": [{"command": "true"}]}))
    done = gpujob("plan", "job.yaml", "--point", "7", cwd=folder)
    assert (done.returncode, done.stderr) == (2, "gpujob: --point: job.yaml has no sweep; leave --point out\n")


@pytest.mark.parametrize(
    ("points", "point", "index"),
    [
        *((["a", "b"], "b", 1), (["a", "b"], "1", 1), (["10", "20"], "20", 1), (["x", "1"], "1", 1)),
        *((["2", "1", "0"], "index:0", 0), (["2", "1", "0"], "index:2", 2), (["2", "1", "0"], "1", 1)),
    ],
)
def test_a_point_is_selected_by_name_or_number(points: list[str], point: str, index: int) -> None:
    sweep_plan = plan_of_sweep(sweep={"list": [{"name": name, "lr": 1, "bs": 1} for name in points]})
    assert choose_point(sweep_plan, point).point.index == index


def test_an_ambiguous_point_is_reported_with_both_ways_to_write_it() -> None:
    sweep_plan = plan_of_sweep(sweep={"list": [{"name": name, "lr": 1, "bs": 1} for name in ("2", "1", "0")]})
    with pytest.raises(LauncherError) as raised:
        choose_point(sweep_plan, "2")
    assert str(raised.value) == (
        "--point: job.yaml: '2' is the name of point 0 and the number of point '0'; "
        "write --point index:0 for the name, or --point index:2 for the number"
    )


def test_points_are_planned_for_the_given_nodes(folder: Path) -> None:
    sweep = {"zip": {"lr": [1, 2, 3], "bs": [1, 1, 1]}, "list": [{"resources.nodes": None}, {"resources.nodes": 1}]}
    (folder / "job.yaml").write_text(yaml.safe_dump({**BODY, "sweep": sweep}, sort_keys=False))
    body = json.loads(gpujob("plan", "job.yaml", "--json", "--nodes", "cn[07-08]", cwd=folder).stdout)
    assert [(point["nodes"], point["hosts"]) for point in body["points"][:2]] == [(2, ["cn07", "cn08"]), (1, ["cn07"])]
    result = gpujob("plan", "job.yaml", "--nodes", "cn[07-08]", cwd=folder).stdout.splitlines()
    assert result[0].split() == ["point", "values", "nodes", "on", "GPUs", "time", "limit"]
    assert result[1].split()[-4:] == ["2", "cn[07-08]", "4", "01:00:00"]
    point = json.loads(gpujob("plan", "job.yaml", "--json", "--nodes", "a,b", "--point", "0", cwd=folder).stdout)
    assert [process["node"] for process in point["processes"]] == ["a", "a"]
    assert point["sbatch_nodes"] == 2


@pytest.mark.parametrize("options", [[], ["--json"], ["--explain"]])
def test_a_warning_of_all_points_is_printed_once(options: list[str], folder: Path) -> None:
    worker = {"count": 2, "gpus": 1, "command": "python3 none.py {lr} {bs}"}
    (folder / "job.yaml").write_text(yaml.safe_dump({**BODY, "workers": [worker]}, sort_keys=False))
    done = gpujob("plan", "job.yaml", *options, cwd=folder)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith('gpujob: warning: all 6 points: workers (worker).command: "none.py" does not exist in ')
    assert line.endswith("; submit and run refuse it")


def test_points_that_need_too_many_nodes_are_named(folder: Path) -> None:
    sweep = {"grid": {"lr": [1], "bs": [1], "resources.nodes": [1, 2, 3]}}
    (folder / "job.yaml").write_text(yaml.safe_dump({**BODY, "sweep": sweep}, sort_keys=False))
    for options in ([], ["--point", "0"], ["--explain"]):
        done = gpujob("plan", "job.yaml", "--nodes", "a,b", *options, cwd=folder)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            "gpujob: job.yaml: 1 problem\n  embed_v2_lr1_bs1_nodes3: resources.nodes: "
            "3 nodes for 2 worker x 1 GPUs, and there are 2; name 1 more, or ask for fewer\n"
        )


SOURCES = SourceNames("job.yaml", None, "not found")


def explanation(sweep: PlannedSweep, index: int = 0) -> dict[str, tuple[Any, str]]:
    rows = explain_point(sweep, sweep.points[index], SOURCES)
    return {row.key: (row.value, row.source) for row in rows}


def test_values_of_a_point_have_their_source_in_the_sweep() -> None:
    sweep = {
        "grid": {"lr": [0.1, 0.2], "bs": [8]},
        "zip": {"resources.nodes": [1, 2], "workers[0].env.MY_MODE": ["a", "b"]},
        "list": [{"slurm": {"partition": "big"}, "workers.worker.count": 1, "api_key": "hunter2"}],
    }
    env = {"RATE": "{lr}/{bs}", "MODE": "fast", "OTHER": "{api_key}"}
    rows = explanation(plan_of_sweep(sweep=sweep, env=env), 3)
    expected = {
        "{lr}": (0.2, "job.yaml: sweep.grid.lr[1]"),
        "{bs}": (8, "job.yaml: sweep.grid.bs[0]"),
        "{api_key}": ("<redacted>", "job.yaml: sweep.list[0].api_key"),
        "workers[0].count": (1, "job.yaml: sweep.list[0].workers.worker.count"),
        "resources.nodes": (2, "job.yaml: sweep.zip.resources.nodes[1]"),
        "slurm.partition": ("big", "job.yaml: sweep.list[0].slurm.partition"),
        "slurm.time_limit": ("01:00:00", "job.yaml: slurm.time_limit"),
        "env.RATE": ("0.2/8", "job.yaml: env.RATE with {bs} of sweep.grid.bs[0], {lr} of sweep.grid.lr[1]"),
        "env.MODE": ("fast", "job.yaml: env.MODE"),
        "env.MY_MODE of worker": ("b", "job.yaml: sweep.zip.workers[0].env.MY_MODE[1]"),
    }
    assert {key: rows[key] for key in expected} == expected


def test_an_alias_has_its_source_in_the_sweep() -> None:
    sweep = {"grid": {"lr": [1], "bs": [1], "model.path": ["dsr1"], "resources": [{"nodes": 3}]}, "list": [
        {"resources.nodes": 2}]}  # fmt: skip
    sweep_plan = plan_of_sweep(cluster={"models": {"dsr1": "/models/DSR1"}}, sweep=sweep, model={})
    point = sweep_plan.points[0]
    rows = [
        (row.key, row.value, row.source)
        for row in explain_point(sweep_plan, point, SourceNames("job.yaml", "c.yaml", ""))
    ]
    assert [row for row in rows if row[0] in ("model.path", "resources.nodes")] == [
        ("model.path", "dsr1", "job.yaml: sweep.grid.model.path[0]"),
        ("resources.nodes", 2, "job.yaml: sweep.list[0].resources.nodes"),
        ("model.path", "/models/DSR1", "c.yaml: models.dsr1 (job.yaml: model.path = dsr1)"),
    ]


def test_values_of_all_points_are_shown_once() -> None:
    lines = render_point_sources(plan_of_sweep(sweep={"grid": {"lr": [0.1, 0.2], "bs": [8]}}), SOURCES)
    lines_split = [line.split() for line in lines]
    assert lines_split[0] == ["all", "2", "points"]
    assert lines_split.count(["{bs}", "8", "job.yaml:", "sweep.grid.bs[0]"]) == 1
    assert lines_split[-5:] == [
        *(["point", "0:", "embed_v2_lr0.1_bs8"], ["{lr}", "0.1", "job.yaml:", "sweep.grid.lr[0]"], []),
        *(["point", "1:", "embed_v2_lr0.2_bs8"], ["{lr}", "0.2", "job.yaml:", "sweep.grid.lr[1]"]),
    ]
    (point,) = plan_of_sweep(sweep={"list": [{"lr": 1, "bs": 2}]}).points
    assert (
        render_point_sources(plan_of_sweep(sweep={"list": [{"lr": 1, "bs": 2}]}), SOURCES)[0]
        == f"point 0: {point.point.name}"
    )


def test_plan_explain_covers_all_points_or_one(folder: Path) -> None:
    result = gpujob("plan", "job.yaml", "--explain", cwd=folder)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("all 6 points\n")
    assert "#SBATCH" not in result.stdout
    body = json.loads(gpujob("plan", "job.yaml", "--explain", "--json", cwd=folder).stdout)
    row = {"key": "{lr}", "value": 0.001, "source": "job.yaml: sweep.grid.lr[1]"}
    assert [row in point["explain"] for point in body["points"]] == [False] * 3 + [True] * 3
    point = gpujob("plan", "job.yaml", "--explain", "--point", "5", cwd=folder)
    assert point.stdout.splitlines()[0].split() == ["{lr}", "0.001", "job.yaml:", "sweep.grid.lr[1]"]
    assert (
        row
        in json.loads(gpujob("plan", "job.yaml", "--explain", "--point", "5", "--json", cwd=folder).stdout)["explain"]
    )


def test_a_sweep_on_this_machine_has_no_script(folder: Path) -> None:
    body = json.loads(gpujob("plan", "job.yaml", "--json", "--local", cwd=folder).stdout)
    assert (body["arrays"], len(body["points"])) == ([], 6)
    point = json.loads(gpujob("plan", "job.yaml", "--json", "--local", "--point", "0", cwd=folder).stdout)
    assert (point["script"], point["srun"]) == (None, [])
    for options in ([], ["--point", "0"]):
        result = gpujob("plan", "job.yaml", "--local", *options, cwd=folder)
        assert (result.returncode, "#SBATCH" in result.stdout) == (0, False)


@pytest.mark.parametrize("command", ["check", "plan"])
def test_all_mistakes_are_reported_with_an_invalid_sweep(command: str, folder: Path) -> None:
    (folder / "gpujob.yaml").write_text("partitions: gpu\n")
    text = yaml.safe_dump({**BODY, "sweep": {"grid": {"lr": [1], "bs": [1], "resource.nodes": [1]}}}, sort_keys=False)
    (folder / "job.yaml").write_text(f"{text}monitoring: {{linger: -1}}\nmonitoring: {{linger: -2}}\n")
    done = gpujob(command, "job.yaml", cwd=folder)
    output = done.stdout + done.stderr
    assert done.returncode == 2
    for mistake in (
        'partitions: unknown key "partitions"',
        "the key 'monitoring' is duplicated",
        'sweep.grid.resource.nodes: unknown key "resource"; did you mean "resources"?',
        "monitoring.linger: -2 must",
    ):
        assert output.count(mistake) == 1, output


def test_a_duplicate_key_is_reported_for_a_sweep(folder: Path) -> None:
    with (folder / "job.yaml").open("a") as out:
        out.write("name: other\n")
    done = gpujob("plan", "job.yaml", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gpujob: job.yaml: 1 problem\n  line 22, column 1: not YAML: the key 'name' is duplicated\n"


def test_check_covers_a_valid_point_despite_invalid_ones(folder: Path) -> None:
    sweep = {"grid": {"lr": [1], "bs": [2], "data": ["job.yaml"], "resources.nodes": [1, "x"]}}
    job = {**BODY, "sweep": sweep, "inputs": ["{data}", "none"]}
    (folder / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
    found = json.loads(gpujob("check", "job.yaml", "--local", "--json", cwd=folder).stdout)["findings"]
    errors = {(finding["code"], finding["place"]) for finding in found if finding["level"] == "error"}
    assert errors >= {("job-file", "job.yaml"), ("no-program", "workers (worker).command"), ("no-input", "inputs[1]")}
    assert ("no-input", "inputs[0]") not in errors, "the value of the first point is in its place"


def test_check_reports_problems_of_points(folder: Path) -> None:
    sweep = {"grid": {"lr": [1], "bs": [2], "resources.nodes": [1, "x"]}}
    (folder / "job.yaml").write_text(yaml.safe_dump({**BODY, "sweep": sweep}, sort_keys=False))
    done = gpujob("check", "job.yaml", "--local", cwd=folder)
    assert done.returncode == 2
    assert 'embed_v2_lr1_bs2_nodesx: resources.nodes: "x" is not a whole number' in done.stdout
