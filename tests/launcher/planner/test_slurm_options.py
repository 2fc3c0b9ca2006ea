"""Slurm options from the job file and the cluster file."""

from typing import Any

import pytest
import yaml

from launcher.jobfile.slurm import SlurmSpec, check_dependency, parse_signal
from launcher.plan.plan import dump_plan, parse_plan
from launcher.planner.slurm_options import with_dependency
from launcher.rundir.files import plan_files
from launcher.steps.batch_script import job_directives
from tests.support.launcher import job_spec, plan_of

SERVING: dict[str, Any] = {
    "resources": {"gpus_per_node": 8, "prefill_workers": 1, "decode_workers": 1},
    "workers": [{"role": "prefill", "command": "p"}, {"role": "decode", "command": "d"}],
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("USR1@120", ("USR1", 120)), ("SIGUSR2@1", ("USR2", 1)), ("B:USR2@65535", ("USR2", 65535))],
)
def test_a_signal_has_a_name_and_seconds(text: str, expected: tuple[str, int]) -> None:
    assert parse_signal(text) == expected
    assert SlurmSpec.model_validate({"signal": text}).signal == f"{expected[0]}@{expected[1]}"


@pytest.mark.parametrize(
    "text",
    ["afterok:1", "afterany:1:2_3:4_*", "after:7+5,afternotok:8", "afterok:1?afterany:2", "singleton", "aftercorr:5"],
)
def test_a_dependency_of_sbatch_is_accepted(text: str) -> None:
    assert check_dependency(text) == text


@pytest.mark.parametrize(("value", "word"), [(True, "yes"), (False, "no"), ("yes", "yes")])
def test_an_option_with_yes_or_no_keeps_its_word(value: bool | str, word: str) -> None:
    plan = plan_of(job_spec(slurm={"directives": {"kill-on-invalid-dep": value}}))
    assert dict(job_directives(plan))["kill-on-invalid-dep"] == word


def test_a_dependency_of_the_command_replaces_that_of_the_job_file() -> None:
    plan = plan_of(job_spec(slurm={"dependency": "afterok:1"}))
    assert dict(job_directives(plan))["dependency"] == "afterok:1"
    plan = with_dependency(plan, "singleton")
    assert dict(job_directives(plan))["dependency"] == "singleton"
    assert yaml.safe_load(plan_files(plan, "")["config.yaml"])["slurm"]["dependency"] == "singleton"


@pytest.mark.parametrize(
    ("slurm", "option"),
    [
        ({}, None),
        ({"requeue": {}}, "no-requeue"),
        ({"requeue": {"preempted": True}}, "requeue"),
        ({"requeue": {"time_limit": True, "max": 1}}, "requeue"),
        ({"directives": {"requeue": True}}, "requeue"),
    ],
)
def test_requeue_options_follow_the_job_file(slurm: dict[str, Any], option: str | None) -> None:
    names = [name for name, _ in job_directives(plan_of(job_spec(slurm=slurm))) if "requeue" in name]
    assert names == ([option] if option else [])


def test_the_sidecars_know_how_many_attempts_may_reach_the_time_limit() -> None:
    rules: list[dict[str, Any]] = [{}, {"preempted": True}, {"time_limit": True, "max": 2}]
    assert [plan_of(job_spec(slurm={"requeue": rule})).manifest.requeues for rule in rules] == [0, 0, 2]


def test_requeue_of_the_job_file_has_precedence_over_the_cluster_file() -> None:
    site = {"directives": {"no-requeue": True, "nice": 5}}
    plan = plan_of(job_spec(slurm={"requeue": {"preempted": True}}), site)
    assert [name for name, _ in job_directives(plan)][-2:] == ["requeue", "nice"]
    assert "no-requeue" in dict(job_directives(plan_of(job_spec(), site)))


def test_exclusive_and_segment_are_requested_once() -> None:
    plan = plan_of(job_spec(slurm={"exclusive": True, "segment": 4}), {"directives": {"exclusive": "user"}})
    options = job_directives(plan)
    assert [entry for entry in options if entry[0] in ("exclusive", "segment")] == [
        ("exclusive", None),
        ("segment", "4"),
    ]


def test_components_of_a_heterogeneous_job_have_all_nodes() -> None:
    spec = {
        **SERVING,
        "slurm": {"het": True},
        "resources": {**SERVING["resources"], "client_node": True, "prefill_workers": 3},
    }
    plan = plan_of(job_spec(**spec))
    assert plan.slurm.het == (3, 2)
    assert sum(plan.slurm.het) == plan.nodes


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (SERVING, "{job_id}_1P_1D_20251122_041341"),
        ({"name": "a b"}, "{job_id}_a_b_20251122_041341"),
        (
            {**SERVING, "resources": {"gpus_per_node": 8, "decode_workers": 3}, "workers": SERVING["workers"][1:]},
            "{job_id}_0P_3D_20251122_041341",
        ),
    ],
)
def test_a_run_directory_name_has_the_numbers_of_prefill_and_decode(spec: dict[str, Any], name: str) -> None:
    assert plan_of(job_spec(**spec)).run_dir_name == name


@pytest.mark.parametrize(
    ("spec", "gpus"),
    [
        ({}, 0),
        ({"workers": [{"gpus": 4, "command": "x"}]}, 4),
        ({"workers": [{"gpus": 2, "command": "x"}], "resources": {"gpus_per_node": 2}}, 2),
        ({"resources": {"agg_workers": 1}, "workers": [{"role": "agg", "command": "x"}]}, 4),
    ],
)
def test_gpus_per_node_come_from_the_cluster_file_if_a_job_uses_gpus(spec: dict[str, Any], gpus: int) -> None:
    assert plan_of(job_spec(**spec), {"gpus_per_node": 4}).gpus_per_node == gpus


def test_slurm_options_survive_writing_and_reading_a_plan() -> None:
    spec = job_spec(
        **SERVING,
        slurm={"het": True, "signal": "USR1@9", "requeue": {"preempted": True}},
        container={"image": "i", "mounts": ["/a:/b"]},
        setup={"modules": ["m"], "preamble": "x"},
        secrets=["A"],
    )
    plan = plan_of(spec, {"modules": ["c"], "network_interface": "ib0"})
    again = parse_plan(dump_plan(plan), plan.manifest)
    assert (again.slurm, again.setup, again.container) == (plan.slurm, plan.setup, plan.container)
    assert (again.secrets, again.network_interface) == (("A",), "ib0")
