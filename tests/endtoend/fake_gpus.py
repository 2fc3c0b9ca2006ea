"""The GPUs of the test cluster's nodes."""

GPUS = 4  # of each node


def uuid_of(node: int, gpu: int) -> str:
    """UUID of a GPU: no two of the cluster are alike."""
    return f"GPU-{node:08x}-0000-4000-8000-{gpu:012x}"
