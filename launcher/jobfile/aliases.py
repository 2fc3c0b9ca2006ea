"""Aliases of the cluster file for models and container images. Pure."""

import os

from launcher.jobfile.jobfile import ClusterSpec

HUB = "hf:"  # prefix of a model that the engine fetches from a hub, such as ``hf:Qwen/Qwen3-32B``


def resolve_model(text: str, cluster: ClusterSpec) -> str:
    """Resolve an alias of a model; return any other text unchanged."""
    return cluster.models.get(text, text)


def model_path(text: str, cluster: ClusterSpec) -> str:
    """The model as an engine takes it: a directory, or its bare name on a hub."""
    found = resolve_model(text, cluster)
    return found.removeprefix(HUB) if found.startswith(HUB) else os.path.expanduser(found)


def resolve_image(text: str, cluster: ClusterSpec) -> str:
    """The image as a runtime takes it: a file, or a name in a registry."""
    return os.path.expanduser(cluster.containers.get(text, text))
