"""All patterns that apply to one job's logs: its own, its pack's, and the generic ones."""

from collections.abc import Callable, Iterable, Sequence

from exporter.logs.packs import Evidence, Pack, PackDetector
from exporter.logs.patterns import Pattern, PatternKind, compile_pattern
from exporter.logs.search.engine import SearchEngine
from exporter.logs.search.findings import UNITS

AUTO, GENERIC = "auto", "generic"

# unit of a position by the name of its pattern
UNIT_BY_NAME = {word: unit for unit in UNITS for word in (unit, unit.removesuffix("s"))} | {"batch": "batches"}


def compile_job_pattern(name: str, text: str, severity: str | None = None) -> Pattern:
    """Compile a pattern of a job file; raise PatternError if that fails.

    With a severity it is an error. ``resume`` marks the position of a resume. A group ``done``, or a unit as its name
    (``items``, ``step``, ``batches``), makes it a position; ``epochs`` also needs two groups. All others are values.
    """
    if severity is not None:
        return compile_pattern(name, text, severity, kind=PatternKind.ERROR, is_user_defined=True)
    unit = UNIT_BY_NAME.get(name)
    if name == "resume":
        return compile_pattern(name, text, kind=PatternKind.RESUME, unit=unit, is_user_defined=True)
    pattern = compile_pattern(name, text, kind=PatternKind.VALUE, is_user_defined=True)
    groups = pattern.regex.groupindex
    counts = unit is not None and not groups and pattern.regex.groups >= (2 if unit == "epochs" else 1)
    if name == UNITS[0] or "done" in groups or counts:
        # most programs count epochs from 1; the counter corrects this when it sees an epoch 0
        return compile_pattern(name, text, kind=PatternKind.POSITION, unit=unit, epoch_base=1, is_user_defined=True)
    return pattern


class Lexicon:
    """The search engines of one job, built on first use."""

    def __init__(
        self,
        packs: Sequence[Pack],
        errors: Iterable[Pattern],
        own: Iterable[Pattern] = (),
        pack: str = AUTO,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """``clock`` gives monotonic seconds and bounds the time of patterns."""
        self.pack = pack
        self._clock = clock
        own = tuple(own)
        named = {pattern.name: pattern for pattern in (*errors, *own) if pattern.kind is PatternKind.ERROR}
        self.errors = tuple(named.values())
        # by name of the error pattern
        self.severities = {pattern.name: pattern.severity or "warning" for pattern in self.errors}
        self._own = tuple(pattern for pattern in own if pattern.kind is not PatternKind.ERROR)
        self._packs = {found.name: found for found in packs}
        self._evidence = Evidence(tuple(packs))
        self._confirmed: dict[str, set[str | None]] = {}  # packs of logs that were read in full, by role
        self.engines: dict[str, SearchEngine] = {}  # built so far, by pack

    def new_detector(self, role: str | None = None) -> PackDetector | None:
        """Return a detector of one log's pack; None if the job file names the pack.

        With the role of its worker, less is read if another log of this role has the same pack.
        """
        confirmed = None if role is None else self._confirmed.setdefault(role, set())
        return PackDetector(tuple(self._packs.values()), self._evidence, confirmed) if self.pack == AUTO else None

    def choose_pack(self, *texts: bytes) -> str:
        """Return the pack of a log with these parts: from the job file, or detected."""
        auto = self.new_detector()
        if auto is None:
            return self.pack
        for text in texts:
            auto.feed(text)
        return auto.choice or GENERIC

    def progress_patterns(self, pack: str) -> tuple[Pattern, ...]:
        """All patterns except errors, positions in order of preference.

        The job's patterns hide those of the pack with the same name, and both hide the generic ones.
        """
        layers = [self._own, self._packs[pack].patterns]
        if pack != GENERIC:
            layers.append(self._packs[GENERIC].patterns)
        found: list[Pattern] = []
        hidden: set[str] = set()
        for layer in layers:
            found += [pattern for pattern in layer if pattern.name not in hidden]
            hidden |= {pattern.name for pattern in layer}
        return tuple(found)

    def preferred_positions(self, pack: str) -> tuple[str, ...]:
        """Names of the position patterns, preferred first; epochs, the coarsest, come last."""
        positions = [pattern for pattern in self.progress_patterns(pack) if pattern.kind is PatternKind.POSITION]
        return tuple(dict.fromkeys(p.name for p in sorted(positions, key=lambda p: p.unit == "epochs")))

    def epoch_bases(self, pack: str) -> dict[str, int]:
        """Number of the first epoch, by pattern."""
        return {p.name: p.epoch_base for p in self.progress_patterns(pack) if p.kind is PatternKind.POSITION}

    def value_names(self, pack: str) -> set[str]:
        """Names of the values that logs of this pack may give."""
        return {name for unit in self.engine(pack).last_match_units if unit.is_value for name in unit.extractor.names}

    def engine(self, pack: str) -> SearchEngine:
        """Return the engine for logs of this pack."""
        if pack not in self.engines:
            self.engines[pack] = SearchEngine((*self.progress_patterns(pack), *self.errors), self._clock)
        return self.engines[pack]
