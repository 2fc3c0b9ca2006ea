"""Which patterns apply to the logs of a job: those of its job file, its pack and the generic pack."""

import pytest

from exporter.logs.lexicon import GENERIC, Lexicon, compile_job_pattern
from exporter.logs.packs import Pack, parse_pack
from exporter.logs.patterns import PatternError, PatternKind, compile_pattern
from exporter.progress.track import ProgressTrack

GENERIC_PACK = """
name = "generic"
title = "any program"
about = "x"
level = 0
detect = ["Processed"]
position = [
    { name = "items", unit = "items", regex = 'generic items (\\d+)' },
    { name = "step", unit = "steps", regex = 'generic step (\\d+)' },
]
value = [{ name = "loss", regex = 'generic loss (\\d+)' }, { name = "rate", regex = 'generic rate (\\d+)' }]
"""
TRAINER_PACK = """
name = "trainer"
title = "a trainer"
about = "x"
level = 2
detect = ["TRAINER"]
position = [
    { name = "global", unit = "steps", regex = 'trainer global (\\d+)' },
    { name = "step", unit = "steps", regex = 'trainer step (\\d+)' },
    { name = "epoch", unit = "epochs", regex = 'trainer epoch (?P<epoch>\\d+)', epoch_base = 1 },
]
value = [{ name = "loss", regex = 'trainer loss (\\d+)' }]
"""
PACKS: tuple[Pack, ...] = (parse_pack(GENERIC_PACK, "generic"), parse_pack(TRAINER_PACK, "trainer"))
ERRORS = (
    compile_pattern("oom", "out of memory", "critical", kind=PatternKind.ERROR),
    compile_pattern("net", "no network", "warning", kind=PatternKind.ERROR),
)


def lexicon(*own: tuple[str, str] | tuple[str, str, str], pack: str = "auto") -> Lexicon:
    """A lexicon of the two packs, with patterns of a job file."""
    return Lexicon(PACKS, ERRORS, [compile_job_pattern(*entry) for entry in own], pack)


def expressions(job_lexicon: Lexicon, pack: str) -> dict[str, str]:
    """The expression of each progress pattern, by its name."""
    return {
        pattern.name: pattern.regex.pattern.decode().rpartition(" (")[0]
        for pattern in job_lexicon.progress_patterns(pack)
    }


def test_job_patterns_override_the_pack_and_both_override_the_generic_pack() -> None:
    job_lexicon = lexicon(("loss", r"own loss (\d+)"))
    assert expressions(job_lexicon, "trainer") == {
        "loss": "own loss",
        "global": "trainer global",
        "step": "trainer step",
        "epoch": "trainer epoch",
        "items": "generic items",
        "rate": "generic rate",
    }
    assert expressions(job_lexicon, GENERIC) == {
        "loss": "own loss",
        "items": "generic items",
        "step": "generic step",
        "rate": "generic rate",
    }


def test_two_patterns_of_one_layer_may_have_one_name() -> None:
    packs = (parse_pack(GENERIC_PACK.replace('"rate"', '"step"'), "generic"), PACKS[1])
    kinds = [p.kind for p in Lexicon(packs, ()).progress_patterns(GENERIC) if p.name == "step"]
    assert kinds == [PatternKind.POSITION, PatternKind.VALUE]
    assert [p.kind for p in Lexicon(packs, ()).progress_patterns("trainer") if p.name == "step"] == [
        PatternKind.POSITION
    ]


def test_positions_are_preferred_in_the_order_of_the_layers() -> None:
    assert lexicon().preferred_positions("trainer") == ("global", "step", "items", "epoch")
    assert lexicon(("items", r"own (\d+)"), ("loss", r"own (\d+)")).preferred_positions("trainer") == (
        *("items", "global", "step", "epoch"),
    )
    assert lexicon().preferred_positions(GENERIC) == ("items", "step")


def test_each_pattern_has_its_number_of_the_first_epoch() -> None:
    assert lexicon().epoch_bases("trainer") == {"global": 0, "step": 0, "epoch": 1, "items": 0}


@pytest.mark.parametrize(
    ("name", "text", "severity", "kind", "unit"),
    [
        ("items", r"(\d+)", None, PatternKind.POSITION, "items"),
        ("resume", r"(\d+)", None, PatternKind.RESUME, "items"),
        ("step", r"(\d+)/(\d+)", None, PatternKind.POSITION, "steps"),
        ("batch", r"(\d+)/(\d+)", None, PatternKind.POSITION, "batches"),
        ("tokens", r"(?P<done>\d+)", None, PatternKind.POSITION, "tokens"),
        ("documents", r"(?P<done>\d+)/(?P<total>\d+)", None, PatternKind.POSITION, "items"),
        ("step", r"(\d+)", None, PatternKind.POSITION, "steps"),
        ("epoch", r"(\d+)", None, PatternKind.VALUE, None),
        ("ratio", r"(\d+)/(\d+)", None, PatternKind.VALUE, None),
        ("step", r"(?P<loss>\S+) (?P<lr>\S+)", None, PatternKind.VALUE, None),
        ("items", "lost items", "warning", PatternKind.ERROR, None),
    ],
)
def test_name_and_groups_decide_the_kind_of_a_job_pattern(
    name: str, text: str, severity: str | None, kind: PatternKind, unit: str | None
) -> None:
    pattern = compile_job_pattern(name, text, severity)
    assert (pattern.kind, pattern.unit, pattern.severity, pattern.is_user_defined) == (kind, unit, severity, True)


def test_an_unusable_job_pattern_is_refused() -> None:
    with pytest.raises(PatternError):
        compile_job_pattern("items", "(")


def test_an_error_pattern_of_the_job_file_overrides_one_of_the_same_name() -> None:
    job_lexicon = lexicon(("net", "cable cut", "critical"), ("disk", "disk full", "info"))
    assert [(p.name, p.regex.pattern) for p in job_lexicon.errors] == [
        *(("oom", b"out of memory"), ("net", b"cable cut"), ("disk", b"disk full")),
    ]
    assert job_lexicon.severities == {"oom": "critical", "net": "critical", "disk": "info"}
    assert job_lexicon.engine("trainer").scan(b"no network\ncable cut\nout of memory\n").errors == {"net": 1, "oom": 1}


def test_a_pack_named_in_the_job_file_is_not_detected() -> None:
    job_lexicon = lexicon(pack="generic")
    assert job_lexicon.new_detector() is None
    assert job_lexicon.choose_pack(b"TRAINER 1.0\n") == "generic"


def test_the_pack_is_detected_if_the_job_file_names_none() -> None:
    job_lexicon = lexicon()
    assert job_lexicon.new_detector() is not None
    assert job_lexicon.choose_pack(b"Processed\n", b"TRAINER 1.0\n") == "trainer"
    assert job_lexicon.choose_pack(b"hello\n") == GENERIC


def test_the_search_engine_of_a_pack_is_built_once_for_this_pack_only() -> None:
    job_lexicon = lexicon()
    assert job_lexicon.engines == {}
    engine = job_lexicon.engine("trainer")
    assert job_lexicon.engine("trainer") is engine
    assert job_lexicon.engines == {"trainer": engine}
    text = b"trainer global 5\ngeneric items 7\ngeneric step 9\n"
    assert [position.done for position in engine.scan(text).positions] == [5, 7]
    assert [position.done for position in job_lexicon.engine(GENERIC).scan(text).positions] == [7, 9]


@pytest.mark.parametrize(
    ("lines", "done"), [(((1, 40),), 40.0), (((1, 100), (2, 40)), 140.0), (((0, 100), (1, 40)), 140.0)]
)
def test_epochs_of_a_job_pattern_count_from_one_unless_there_is_an_epoch_zero(
    lines: tuple[tuple[int, int], ...], done: float
) -> None:
    known = lexicon(("items", r"\[epoch (?P<epoch>\d+)\] >> (?P<done>\d+) of (?P<total>\d+)"))
    track = ProgressTrack(known.preferred_positions(GENERIC), epoch_bases=known.epoch_bases(GENERIC), epochs=3)
    for line in lines:
        for position in known.engine(GENERIC).scan(b"[epoch %d] >> %d of 100\n" % line).positions:
            track.update("log", position, 0.0)
    assert (track.done, track.total) == (done, 300.0)
