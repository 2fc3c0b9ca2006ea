"""Read the packs that come with the package, one file each."""

from functools import cache
from pathlib import Path

from exporter.logs.packs import Pack, parse_pack, resolve_inheritance
from exporter.logs.patterns import Pattern

PACKS = Path(__file__).resolve().parents[1] / "packs"
ERRORS = "errors"  # file with the error patterns that apply to all logs


def pack_names() -> tuple[str, ...]:
    """Names of all packs, sorted."""
    return tuple(sorted(path.stem for path in PACKS.glob("*.toml") if path.stem != ERRORS))


@cache
def read_packs() -> tuple[Pack, ...]:
    """Read all packs, with inherited patterns."""
    return resolve_inheritance(_read(name) for name in pack_names())


@cache
def read_error_patterns() -> tuple[Pattern, ...]:
    """Read the error patterns of every job."""
    return _read(ERRORS).patterns


def _read(name: str) -> Pack:
    return parse_pack((PACKS / f"{name}.toml").read_text(encoding="utf-8"), name, lazy=True)
