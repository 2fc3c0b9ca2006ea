"""Aliases of models and images in the cluster file."""

import os

import pytest

from launcher.jobfile.aliases import model_path, resolve_image
from launcher.jobfile.jobfile import ClusterSpec
from tests.support.launcher import HARD_NAMES

CLUSTER = ClusterSpec(
    models={"dsr1": "/models/DSR1", "qwen": "hf:Qwen/Qwen3-32B", "mine": "~/m"},
    containers={"sgl": "/images/sgl.sqsh", "own": "~/own.sif"},
)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("dsr1", "/models/DSR1"),
        ("qwen", "Qwen/Qwen3-32B"),
        ("mine", os.path.expanduser("~/m")),
        ("hf:a/b", "a/b"),
        ("/x/y", "/x/y"),
        ("other", "other"),
        *((name, name) for name in HARD_NAMES),
    ],
)
def test_a_model_alias_is_replaced_by_its_path(text: str, path: str) -> None:
    assert model_path(text, CLUSTER) == path


@pytest.mark.parametrize(
    ("text", "found"),
    [("sgl", "/images/sgl.sqsh"), ("own", os.path.expanduser("~/own.sif")), ("nvcr.io#a/b:1", "nvcr.io#a/b:1")],
)
def test_an_image_alias_is_replaced_by_its_image(text: str, found: str) -> None:
    assert resolve_image(text, CLUSTER) == found
