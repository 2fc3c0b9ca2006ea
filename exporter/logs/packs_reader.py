"""Read the packs that come with the package, one file each."""

import json
from functools import cache
from pathlib import Path

from exporter.logs.packs import KnownLiterals, Pack, parse_pack, resolve_inheritance
from exporter.logs.patterns import Pattern
from exporter.logs.search.literals import RequiredLiterals

PACKS = Path(__file__).resolve().parents[1] / "packs"
ERRORS = "errors"  # file with the error patterns that apply to all logs
# The literals of all patterns, which take 100 ms to find; written by tests/exporter/logs/test_packs.py. A pattern that
# is absent there is analyzed on first use.
LITERALS = PACKS / "literals.json"


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


@cache
def read_known_literals() -> KnownLiterals:
    """Read the literals of all patterns."""
    rows = json.loads(LITERALS.read_text(encoding="utf-8")).items()
    return {
        regex: RequiredLiterals(_as_bytes(texts), is_sufficient, _as_bytes(second))
        for regex, (texts, is_sufficient, second) in rows
    }


def _as_bytes(texts: list[str]) -> tuple[bytes, ...]:
    return tuple(text.encode("latin-1") for text in texts)


def _read(name: str) -> Pack:
    return parse_pack((PACKS / f"{name}.toml").read_text(encoding="utf-8"), name, read_known_literals())
