"""Names that a cluster file gives to models and container images, put in place of what a job file says. Pure."""

import os

from launcher.jobfile.jobfile import ClusterSpec

HUB = "hf:"
"""Beginning of a model that the engine fetches by its name on a hub, such as ``hf:Qwen/Qwen3-32B``."""


def resolve_model(text: str, cluster: ClusterSpec) -> str:
    """What an alias of a model stands for; anything else as it is."""
    return cluster.models.get(text, text)


def model_path(text: str, cluster: ClusterSpec) -> str:
    """What an engine is given as its model: a directory, or the bare name of a model on a hub."""
    found = resolve_model(text, cluster)
    return found.removeprefix(HUB) if found.startswith(HUB) else os.path.expanduser(found)


def resolve_image(text: str, cluster: ClusterSpec) -> str:
    """What a runtime is given as the image: a file, or the name of one in a registry."""
    return os.path.expanduser(cluster.containers.get(text, text))
