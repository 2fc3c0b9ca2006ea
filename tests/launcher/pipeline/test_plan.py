"""Planning of pipelines: every problem of every file at once, and the order of the jobs."""

from pathlib import Path

import pytest

from launcher.cli.sweep import read_planned_sweep
from launcher.errors import ConfigErrors
from launcher.pipeline.plan import PlannedPipeline, find_cycle, plan_pipeline, sorted_names
from launcher.plan.plan import Plan
from launcher.planner.planned_job import JobText, read_planned_job
from launcher.sweep.plan import PlannedSweep

JOB = "name: {name}\nworkers: [{{command: 'true'}}]\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("prep", "train"):
        (tmp_path / f"{name}.yaml").write_text(JOB.format(name=name))
    return tmp_path


def check(job: JobText) -> Plan | PlannedSweep:
    return read_planned_sweep(job, local=False) or read_planned_job(job, local=False).plan


def plan(folder: Path, jobs: str) -> PlannedPipeline:
    return plan_pipeline(JobText("p.yaml", f"name: p\njobs:\n{jobs}", folder), check)


def test_each_job_comes_after_those_it_needs(folder: Path) -> None:
    found = plan(
        folder,
        "  eval: {file: prep.yaml, after: {train: any, prep: notok}}\n"
        "  train: {file: train.yaml, after: [prep, fetch]}\n"
        "  fetch: {file: prep.yaml, after: {prep: start}}\n"
        "  prep: {file: prep.yaml}\n",
    )
    assert [part.name for part in found.parts] == ["prep", "fetch", "train", "eval"]
    ids = {"prep": "1", "fetch": "2", "train": "3"}
    dependencies = [part.dependency(ids) for part in found.parts]
    assert dependencies == [None, "after:1", "afterok:1,afterok:2", "afterany:3,afternotok:1"]


def test_the_dependency_of_a_job_file_counts_too(folder: Path) -> None:
    (folder / "train.yaml").write_text(JOB.format(name="train") + "slurm: {dependency: singleton}\n")
    jobs = "  prep: {file: prep.yaml}\n  train: {file: train.yaml, after: prep}\n"
    assert plan(folder, jobs).parts[1].dependency({"prep": "1"}) == "singleton,afterok:1"
    (folder / "train.yaml").write_text(JOB.format(name="train") + "slurm: {dependency: 'afterok:7?afterok:8'}\n")
    with pytest.raises(ConfigErrors, match=r"jobs\.train\.after: train\.yaml has slurm\.dependency 'afterok:7\?"):
        plan(folder, jobs)


def test_all_problems_of_all_files_are_reported_at_once(folder: Path) -> None:
    (folder / "bad.yaml").write_text("name: bad\nworkrs: []\n")
    (folder / "points.yaml").write_text(JOB.format(name="s") + "sweep: {grid: {lr: []}}\n")
    jobs = (
        "  a: {file: bad.yaml, after: [b, a]}\n"
        "  b: {file: bad.yaml, after: {c: any}}\n"
        "  c: {file: none.yaml, after: b}\n"
        "  prep: {file: points.yaml, after: prpe}\n"
    )
    with pytest.raises(ConfigErrors) as raised:
        plan(folder, jobs)
    own, *files = raised.value.errors
    assert own.problems == (
        "jobs.a.after: 'a' waits for itself; name another job or leave it out",
        "jobs.prep.after: no job is named 'prpe'; did you mean \"prep\"? (known: a, b, c)",
        "jobs.b.after: b -> c -> b wait for each other; remove one of these",
    )
    assert [Path(error.source).name for error in files] == ["bad.yaml", "none.yaml", "points.yaml"]
    assert "sweep.grid.lr" in files[2].problems[0]


SWEEP = "sweep: {{grid: {{x: [{values}]}}}}\nenv: {{X: '{{x}}'}}\n"
TWO_ARRAYS = "sweep: {grid: {slurm.time_limit: [1h, 2h]}}\n"


def sweeps(folder: Path) -> None:
    for name, values in (("two", "1, 2"), ("pair", "3, 4"), ("three", "1, 2, 3")):
        (folder / f"{name}.yaml").write_text(JOB.format(name=name) + SWEEP.format(values=values))
    (folder / "mixed.yaml").write_text(JOB.format(name="mixed") + TWO_ARRAYS)


def test_a_sweep_is_a_part_and_all_its_arrays_are_waited_for(folder: Path) -> None:
    sweeps(folder)
    found = plan(
        folder,
        "  a: {file: mixed.yaml}\n  b: {file: two.yaml, after: {a: any}}\n  c: {file: pair.yaml, after: {b: each}}\n"
        "  d: {file: prep.yaml, after: {a: ok, c: notok}}\n",
    )
    assert [part.points for part in found.parts] == [2, 2, 2, None]
    ids = {"a": "1:2", "b": "3", "c": "4"}
    assert [part.dependency(ids) for part in found.parts] == [
        None,
        "afterany:1:2",
        "aftercorr:3",
        "afterok:1:2,afternotok:4",
    ]


@pytest.mark.parametrize(
    ("after", "problem"),
    [
        ("{file: two.yaml, after: {prep: each}}", "not the job 'prep' and 2 points of 'last'; use ok or any"),
        ("{file: prep.yaml, after: {two: each}}", "not 2 points of 'two' and the job 'last'; use ok or any"),
        ("{file: three.yaml, after: {two: each}}", "not 2 points of 'two' and 3 points of 'last'; use ok or any"),
        ("{file: mixed.yaml, after: {two: each}}", "each needs points with the same Slurm options within each sweep"),
        ("{file: prep.yaml, after: {mixed: notok}}", "'mixed' is a sweep of several arrays"),
    ],
)
def test_conditions_that_cannot_be_those_of_a_sweep(folder: Path, after: str, problem: str) -> None:
    sweeps(folder)
    jobs = "".join(f"  {name}: {{file: {name}.yaml}}\n" for name in ("prep", "two", "mixed"))
    with pytest.raises(ConfigErrors) as raised:
        plan(folder, f"{jobs}  last: {after}\n")
    (found,) = raised.value.errors[0].problems
    assert found.startswith("jobs.last.after: ")
    assert problem in found


@pytest.mark.parametrize(
    ("jobs", "problem"),
    [
        ("  a: {file: prep.yaml, after: {b: okay}}\n", 'jobs.a.after.b: "okay" is not one of "ok", "any", "notok"'),
        ("  a: {after: b}\n", "jobs.a.file: is missing"),
        ("  {}\n", "jobs: "),
    ],
)
def test_a_wrong_value_has_its_place(folder: Path, jobs: str, problem: str) -> None:
    with pytest.raises(ConfigErrors) as raised:
        plan(folder, jobs)
    assert problem in str(raised.value)


def test_a_cycle_is_found_behind_other_jobs() -> None:
    needs = {"x": ("a",), "a": ("b",), "b": ("c",), "c": ("a", "d"), "d": ()}
    assert find_cycle(needs) == ("a", "b", "c")
    assert find_cycle({"a": ("b",), "b": ()}) == ()
    assert sorted_names({"a": ("b",), "c": (), "b": ()}) == ("c", "b", "a")
