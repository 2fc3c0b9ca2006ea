"""Build the lexicon of a job from its manifest and the packs."""

import time
from collections.abc import Iterable
from functools import lru_cache

from exporter.contract.identity import safe_label
from exporter.contract.manifest import LogPattern, Manifest
from exporter.logs.lexicon import AUTO, Lexicon, compile_job_pattern
from exporter.logs.packs_reader import pack_names, read_error_patterns, read_packs
from exporter.logs.patterns import Pattern, PatternError


@lru_cache(4)
def lexicon_of_job(manifest: Manifest) -> Lexicon:
    """Patterns of a job, of its pack, and of all jobs; cached.

    An unknown pack (of another version) is detected from the lines.
    """
    pack = manifest.pack if manifest.pack in pack_names() else AUTO
    return build_lexicon(pack, manifest.progress, manifest.errors)


def build_lexicon(pack: str = AUTO, progress: Iterable[LogPattern] = (), errors: Iterable[LogPattern] = ()) -> Lexicon:
    """Build a lexicon from a pack (``auto``: all packs) and a user's patterns, named as in series."""
    return Lexicon(read_packs(), read_error_patterns(), compile_job_patterns(progress, errors), pack, time.monotonic)


def compile_job_patterns(progress: Iterable[LogPattern], errors: Iterable[LogPattern] = ()) -> tuple[Pattern, ...]:
    """Compile a user's patterns, skipping unusable ones: the launcher rejects those before a job starts."""
    given = [(pattern, None) for pattern in progress]
    found: list[Pattern] = []
    for pattern, severity in [*given, *((pattern, pattern.severity or "warning") for pattern in errors)]:
        try:
            found.append(compile_job_pattern(safe_label(pattern.name), pattern.pattern, severity))
        except PatternError:
            continue
    return tuple(found)
