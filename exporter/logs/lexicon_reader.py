"""The words of one job's logs, out of its manifest and the packs beside this package."""

import time
from collections.abc import Iterable
from functools import lru_cache

from exporter.logs.lexicon import AUTO, Lexicon, compile_job_pattern
from exporter.logs.patterns import Pattern, PatternError
from exporter.contract.identity import safe_label
from exporter.contract.manifest import LogPattern, Manifest
from exporter.logs.packs_reader import pack_names, read_error_patterns, read_packs


@lru_cache(4)
def lexicon_of_job(manifest: Manifest) -> Lexicon:
    """The patterns of a job, of its pack, and of all jobs; one lexicon for all who ask.

    A pack of another version's is found out from the lines.
    """
    pack = manifest.pack if manifest.pack in pack_names() else AUTO
    return build_lexicon(pack, manifest.progress, manifest.errors)


def build_lexicon(pack: str = AUTO, progress: Iterable[LogPattern] = (), errors: Iterable[LogPattern] = ()) -> Lexicon:
    """The patterns of a pack or, with ``auto``, of all packs, and those of a user, by the names that series show."""
    return Lexicon(read_packs(), read_error_patterns(), compile_job_patterns(progress, errors), pack, time.monotonic)


def compile_job_patterns(progress: Iterable[LogPattern], errors: Iterable[LogPattern] = ()) -> tuple[Pattern, ...]:
    """The patterns of a user, without those that cannot be used: the launcher refuses them before a job starts."""
    given = [(pattern, None) for pattern in progress]
    found: list[Pattern] = []
    for pattern, severity in [*given, *((pattern, pattern.severity or "warning") for pattern in errors)]:
        try:
            found.append(compile_job_pattern(safe_label(pattern.name), pattern.pattern, severity))
        except PatternError:
            continue
    return tuple(found)
