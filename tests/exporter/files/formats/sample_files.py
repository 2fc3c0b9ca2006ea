"""Small files by the real libraries: ``samples/README.md`` says how each was made."""

from pathlib import Path

FOLDER = Path(__file__).parent / "samples"


def sample(name: str) -> bytes:
    """The content of one sample."""
    return (FOLDER / name).read_bytes()
