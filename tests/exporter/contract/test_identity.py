"""The identity of a sidecar, from its environment and manifest."""

import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.contract.identity import LABEL_LENGTH, Identity, identify, safe_label
from tests.support.exporter import make_manifest
from tests.support.strategies import PATH_TEXT

MANIFEST = make_manifest(Path("/runs/1"))
NAMES = (
    *("GPUJOB_NODE", "GPUJOB_NODES", "GPUJOB_NODE_INDEX", "GPUJOB_JOB_ID", "GPUJOB_ATTEMPT", "GPUJOB_START_TIME"),
    *("GPUJOB_FIRST_GPU", "GPUJOB_SUPERVISED"),
    *("SLURM_JOB_ID", "SLURM_NODEID", "SLURMD_NODENAME", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME"),
    *("SLURM_JOB_USER", "SLURM_JOB_PARTITION", "SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME"),
)


@given(PATH_TEXT)
@example("")
@example("a" * 1000)
def test_a_safe_label_has_only_safe_characters(text: str) -> None:
    safe = safe_label(text)
    assert re.fullmatch(r"[\w.:@+-]*", safe)
    assert safe.encode("utf-8").decode("utf-8") == safe
    assert len(safe) == min(len(text), LABEL_LENGTH)
    assert safe_label(safe) == safe


def test_a_hard_name_becomes_a_safe_label(hard_name: str) -> None:
    assert not set(safe_label(hard_name)) & set(" \"'\n()[]\\,{}<>&`$")


def test_letters_of_any_language_stay_in_a_label() -> None:
    assert safe_label("Übung-日本.v2:a@b+c") == "Übung-日本.v2:a@b+c"


def test_the_constant_labels_are_safe() -> None:
    identity = Identity("c 1", "12", 'a"b', "ada lovelace", "gpu\n", "n[1]", 0, 0)
    assert identity.constant_labels() == {
        "cluster": "c_1",
        "job_id": "12",
        "job_name": "a_b",
        "user": "ada_lovelace",
        "partition": "gpu_",
        "node": "n_1_",
    }


def test_an_empty_environment_leaves_the_values_of_the_manifest() -> None:
    assert identify(MANIFEST, {}, "host7.example.org") == Identity(
        cluster="c1",
        job_id="unknown",
        job_name="embed",
        user="ada",
        partition="gpu",
        node="host7",
        node_index=0,
        attempt=0,
    )


def test_slurm_variables_give_job_node_attempt_and_times() -> None:
    environ = {
        "SLURM_CLUSTER_NAME": "big",
        "SLURM_JOB_ID": "4459",
        "SLURM_JOB_USER": "grace",
        "SLURM_JOB_PARTITION": "long",
        "SLURMD_NODENAME": "node03",
        "SLURM_NODEID": "2",
        "SLURM_RESTART_COUNT": "1",
        "SLURM_JOB_START_TIME": "1700000000",
        "SLURM_JOB_END_TIME": "1700003600",
    }
    expected = Identity("c1", "4459", "embed", "grace", "long", "node03", 2, 1, 1_700_000_000.0, 1_700_003_600.0)
    assert identify(MANIFEST, environ, "other") == expected


@pytest.mark.parametrize(
    ("given", "slurm", "cluster"), [("c1", "big", "c1"), ("", "big", "big"), ("", "", "slurm"), ("c1", "", "c1")]
)
def test_the_cluster_name_of_the_site_takes_precedence_over_slurm(given: str, slurm: str, cluster: str) -> None:
    manifest = make_manifest(Path("/runs/1"), cluster=given)
    assert identify(manifest, {"SLURM_CLUSTER_NAME": slurm}, "h").cluster == cluster


def test_launcher_variables_take_precedence_over_slurm_variables() -> None:
    environ = {
        "GPUJOB_JOB_ID": "local-1",
        "GPUJOB_NODE": "b",
        "GPUJOB_NODES": "a,b,c",
        "GPUJOB_ATTEMPT": "3",
        "GPUJOB_START_TIME": "1700000000.5",
        "SLURM_JOB_ID": "4459",
        "SLURMD_NODENAME": "c",
        "SLURM_NODEID": "0",
        "SLURM_RESTART_COUNT": "1",
        "SLURM_JOB_START_TIME": "1600000000",
    }
    identity = identify(MANIFEST, environ, "host")
    assert (identity.job_id, identity.node, identity.node_index) == ("local-1", "b", 1)
    assert (identity.attempt, identity.start) == (3, 1_700_000_000.5)


@pytest.mark.parametrize(
    ("environ", "index"),
    [
        ({"GPUJOB_NODES": "a,b", "SLURMD_NODENAME": "b", "SLURM_NODEID": "0"}, 1),
        ({"GPUJOB_NODES": "a,b", "SLURMD_NODENAME": "x", "SLURM_NODEID": "1"}, 1),
        ({"GPUJOB_NODES": "", "SLURM_NODEID": "3"}, 3),
        ({"GPUJOB_NODE_INDEX": "2", "SLURM_NODEID": "3"}, 2),
        ({"SLURM_NODEID": "what"}, 0),
    ],
)
def test_the_node_index_is_the_position_in_the_plan_if_known(environ: dict[str, str], index: int) -> None:
    assert identify(MANIFEST, environ, "host").node_index == index


def test_the_end_follows_from_start_and_time_limit_without_slurm() -> None:
    manifest = make_manifest(Path("/runs/1"), time_limit_s=600.0)
    assert identify(manifest, {"GPUJOB_START_TIME": "1000"}, "h").end == 1600.0
    assert identify(manifest, {"GPUJOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "1500"}, "h").end == 1500.0
    assert identify(manifest, {}, "h").end is None
    assert identify(MANIFEST, {"GPUJOB_START_TIME": "1000"}, "h").end is None


@pytest.mark.parametrize(("text", "first"), [("8", 8), ("0", 0), ("", None), ("-4", 0), ("many", None)])
def test_a_virtual_node_knows_its_first_gpu(text: str, first: int | None) -> None:
    assert identify(MANIFEST, {"GPUJOB_FIRST_GPU": text}, "h").first_gpu == first


@pytest.mark.parametrize(("text", "supervised"), [("1", True), ("0", False), ("", False), (None, False)])
def test_a_sidecar_knows_whether_it_is_supervised(text: str | None, supervised: bool) -> None:
    environ = {} if text is None else {"GPUJOB_SUPERVISED": text}
    assert identify(MANIFEST, environ, "h").supervised is supervised


@given(st.dictionaries(st.sampled_from(NAMES), PATH_TEXT | st.sampled_from(["", "-1", "1e3", " 2 "])), PATH_TEXT)
def test_any_environment_gives_an_identity(environ: dict[str, str], hostname: str) -> None:
    identity = identify(MANIFEST, environ, hostname)
    assert isinstance(identity.node_index, int)
    assert "".join(identity.constant_labels().values()).encode("utf-8") is not None


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_a_number_that_is_not_finite_counts_as_absent(text: str) -> None:
    identity = identify(MANIFEST, {"SLURM_NODEID": text, "GPUJOB_START_TIME": text}, "h")
    assert (identity.node_index, identity.start) == (0, None)
