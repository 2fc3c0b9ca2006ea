"""Packs: every sample line of every pack, which pack a log fits, and files that are refused."""

import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exporter.contract.records import NOTHING, JsonObject, Record
from exporter.logs.packs import (
    ALIKE_READ_BYTES,
    END_BYTES,
    ENOUGH_RECORDS,
    FULL_READ_BYTES,
    LEVELS,
    RECORD_BYTES,
    SPREAD_BYTES,
    Evidence,
    Pack,
    PackDetector,
    PackError,
    looks_like_progress,
    parse_pack,
    resolve_inheritance,
)
from exporter.logs.packs_reader import ERRORS, LITERALS, PACKS, pack_names, read_error_patterns, read_packs
from exporter.logs.patterns import Pattern, PatternKind
from exporter.logs.search import automata
from exporter.logs.search.engine import SearchEngine
from exporter.logs.search.extraction import NumberExtractor
from exporter.logs.search.findings import MARKS, UNITS, LogFindings
from exporter.logs.search.literals import find_literals, safe_length
from exporter.logs.tail_reader import CHUNK_BYTES
from tests.conftest import UPDATE_GOLDEN

ALL = read_packs()
ERROR_PACK = parse_pack((PACKS / f"{ERRORS}.toml").read_text("utf-8"), ERRORS)
EVERY = (*ALL, ERROR_PACK)
NAMED = {pack.name: pack for pack in EVERY}
ENGINES = {pack.name: SearchEngine(pack.patterns) for pack in EVERY}
ENGINES_WITH_AUTOMATA = {pack.name: SearchEngine(pack.patterns) for pack in EVERY}
for _engine in ENGINES_WITH_AUTOMATA.values():
    _engine.short_texts.left_bytes = 0
SAMPLES = [(pack.name, index) for pack in EVERY for index in range(len(pack.samples))]
PATTERNS = [(pack.name, pattern) for pack in EVERY for pattern in (*pack.patterns, *pack.detect)]


def _as_text(texts: tuple[bytes, ...]) -> list[str]:
    return [text.decode("latin-1") for text in texts]


def test_the_known_literals_are_those_of_the_patterns(request: pytest.FixtureRequest) -> None:
    found = {pattern.text.decode(): find_literals(pattern.regex) for _, pattern in PATTERNS}
    rows = {
        text: [_as_text(of.texts), of.is_sufficient, _as_text(of.second_texts)] for text, of in sorted(found.items())
    }
    text = "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()) + "\n}\n"
    if request.config.getoption(UPDATE_GOLDEN):
        LITERALS.write_text(text, encoding="utf-8")
    assert text == LITERALS.read_text(encoding="utf-8"), f"pytest {UPDATE_GOLDEN} writes {LITERALS} anew"


class SampleFindings(Record):
    position: tuple[JsonObject, ...] | JsonObject = ()  # fields of `LogPosition`
    values: Mapping[str, Any] = NOTHING  # NaN and infinity too, which no other record may hold
    rank: int | None = None  # data-parallel rank of these values
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Number:
    """A number that equals itself and close neighbours, including NaN."""

    number: float

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Number) and (
            math.isclose(self.number, other.number) or (math.isnan(self.number) and math.isnan(other.number))
        )

    def __hash__(self) -> int:
        return 0


@pytest.mark.parametrize(("name", "index"), SAMPLES)
def test_a_sample_gives_exactly_the_values_in_its_pack(name: str, index: int) -> None:
    sample = NAMED[name].samples[index]
    gives = SampleFindings.from_json(sample.gives)
    assert not gives.unknown_keys
    for engine in (ENGINES[name], ENGINES_WITH_AUTOMATA[name]):
        assert_gives(engine.scan(sample.text.encode()), gives)


def assert_gives(found: LogFindings, gives: SampleFindings) -> None:
    positions = (gives.position,) if isinstance(gives.position, Mapping) else gives.position
    assert len(found.positions) == len(positions)
    for position in positions:
        assert any(all(getattr(one, key) == value for key, value in position.items()) for one in found.positions)
    values = {key: {rank: Number(value.number) for rank, value in of.items()} for key, of in found.values.items()}
    assert values == {key: {gives.rank: Number(value)} for key, value in gives.values.items()}
    assert [mark.name for mark in found.marks if mark.begins] == list(gives.begins)
    assert [mark.name for mark in found.marks if not mark.begins] == list(gives.ends)
    assert found.errors == Counter(gives.errors)


DRESSES = {
    "after a rank": lambda line: b"[default0]:" + line,
    "in colour": lambda line: b"\x1b[32m" + line + b"\x1b[0m",
    "ended by a return": lambda line: line + b"\r",
    "between others": lambda line: b"plain\n" + line + b"\nplain",
}


@pytest.mark.parametrize("dress", DRESSES)
@pytest.mark.parametrize("name", [pack.name for pack in ALL])
def test_text_around_a_line_hides_no_match(name: str, dress: str) -> None:
    engine = ENGINES[name]
    for sample in NAMED[name].samples:
        if sample.text.encode().startswith((b"[rank", b"[default")) or name == "torchrun":
            continue
        plain = engine.scan(b"\n".join(line for line in re.split(rb"[\r\n]+", sample.text.encode())))
        dressed = engine.scan(b"\n".join(DRESSES[dress](line) for line in re.split(rb"[\r\n]+", sample.text.encode())))
        assert [(p.pattern, p.done, p.total, p.epoch) for p in dressed.positions] == [
            (p.pattern, p.done, p.total, p.epoch) for p in plain.positions
        ], sample.text.encode()
        assert dressed.values.keys() == plain.values.keys(), sample.text.encode()
        assert [mark.name for mark in dressed.marks] == [mark.name for mark in plain.marks], sample.text.encode()


@pytest.mark.parametrize("name", NAMED)
def test_a_pack_has_enough_samples_including_one_without_findings(name: str) -> None:
    samples = NAMED[name].samples
    assert len(samples) >= 6
    assert any(not sample.gives for sample in samples)


def test_samples_are_the_last_part_of_a_pack() -> None:
    for pack in EVERY:
        assert "\n[[" not in pack.text.partition("\n[[sample]]")[2].replace("\n[[sample]]", ""), pack.name


@pytest.mark.parametrize("name", NAMED)
def test_every_pattern_of_a_pack_matches_in_some_sample(name: str) -> None:
    pack = NAMED[name]
    own = parse_pack((PACKS / f"{name}.toml").read_text("utf-8"), name).patterns
    records = [
        re.sub(rb"\x1b\[[0-9;]*[A-Za-z]", b"", record)
        for sample in pack.samples
        for record in re.split(rb"[\r\n]+", sample.text.encode())
    ]
    idle = [f"{p.kind} {p.name}" for p in own if not any(p.regex.search(record) for record in records)]
    assert not idle


COUNTS = {"done", "total", "epoch", "epochs", "percent", "rank"}
GROUPS = {PatternKind.POSITION: COUNTS, PatternKind.RESUME: COUNTS, PatternKind.PAIRS: {"rank", "skip"}}


@pytest.mark.parametrize(("name", "pattern"), PATTERNS, ids=[f"{name}-{p.kind}-{p.name}" for name, p in PATTERNS])
def test_a_pattern_is_cheap_and_has_a_safe_name(name: str, pattern: Pattern) -> None:
    assert pattern.literals
    assert safe_length(pattern.regex) > 0
    for label in (
        pattern.name,
        *(NumberExtractor(pattern).names if pattern.kind in (PatternKind.VALUE, PatternKind.PAIRS) else ()),
    ):
        assert re.fullmatch("[a-z][a-z0-9_]*", label)
    assert pattern.kind is not PatternKind.MARK or pattern.name in MARKS
    assert pattern.kind is not PatternKind.POSITION or pattern.unit in UNITS
    assert pattern.kind is not PatternKind.ERROR or pattern.error_class
    assert pattern.severity in (None, "critical", "warning", "info")
    assert pattern.epoch_base in (0, 1)
    if pattern.kind is not PatternKind.VALUE:  # whose groups are names of values
        assert GROUPS.get(pattern.kind, set()) >= set(pattern.regex.groupindex)


def test_the_table_of_values_lists_exactly_those_of_the_packs() -> None:
    table = (PACKS / "README.md").read_text("utf-8").partition("| Of | Values |")[2]
    listed = re.findall(r"`([a-z0-9_]+)`", table)
    given = {
        name
        for pack in ALL
        for pattern in pack.patterns
        if pattern.kind in (PatternKind.VALUE, PatternKind.PAIRS)
        for name in NumberExtractor(pattern).names
    }
    assert sorted(listed) == sorted(given)


BAR = {"tqdm", "hf-trainer", "sa-bench", "aiperf", "deepspeed", "lightning", "nemo", "vllm", "trtllm"}
SHARED = {
    **dict.fromkeys(("tqdm", "hf-trainer", "sa-bench", "aiperf", "srtctl"), BAR),
    **dict.fromkeys(("vllm", "sglang", "trtllm", "deepspeed", "lightgbm", "lightning", "nemo"), BAR),
    "generic": {"keras", "lightning", "megatron", "nemo", "tqdm"},
}  # packs in whose samples a pack finds positions: those of a library of both, or the plainest words


@pytest.mark.parametrize("name", [pack.name for pack in ALL])
def test_a_pack_finds_no_position_in_the_lines_of_others(name: str) -> None:
    engine = SearchEngine(
        [pattern for pattern in NAMED[name].patterns if pattern.kind in (PatternKind.POSITION, PatternKind.RESUME)]
    )
    found = {
        (other.name, sample.text.encode())
        for other in EVERY
        if other.name != name and other.name not in SHARED.get(name, ())
        for sample in other.samples
        if engine.scan(sample.text.encode()).positions
    }
    assert not found


NOISE = b"""\
2026-03-01 12:00:00,100 [INFO] worker 3: fetched shard s3-00017 in 12 ms, queue depth 4
INFO:     127.0.0.1:51234 - "POST /v1/completions HTTP/1.1" 200 OK
[1/4] Building CUDA object fused_adam.o
Compiling model: 45% of kernels in cache
Traceback (most recent call last):
  File "/opt/app/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1501, in _call_impl
RuntimeError: CUDA error: an illegal memory access was encountered
model:
  timeout: 30
  epochs: 10
  batch_size: 64
  loss: cross_entropy
  lr: 1.0e-4
  progress_bar: tqdm
TrainingArguments(max_steps=-1, eval_steps=500)
node-a:141:158 [0] NCCL INFO Channel 00/04 : 0 1 2 3
| 0  GPU  On | 00000000:3B:00.0 Off | 0 | 45% 31C P0 70W / 700W | 10/100 |
Downloading https://host.example/2026/03/01/1/2.tar
"""


def test_noise_is_no_progress_and_no_pack() -> None:
    for pack in ALL:
        found = ENGINES[pack.name].scan(NOISE)
        assert (found.positions, found.values, found.marks) == ([], {}, []), pack.name
    auto = PackDetector(ALL)
    auto.feed(NOISE)
    assert (auto.choice, auto.is_final) == (None, False)


def test_a_configuration_dump_holds_no_error() -> None:
    assert SearchEngine(read_error_patterns()).scan(NOISE).errors == {"python_traceback": 1, "cuda_error": 1}


TODAY = {
    "cuda_oom": "critical",
    "cuda_error": "critical",
    "nccl_timeout": "critical",
    "disk_full": "critical",
    "host_oom": "critical",
    "connection": "warning",
    "peer_lost": "warning",
    "data_error": "warning",
    "python_traceback": "warning",
}


def test_errors_have_the_names_and_severities_used_in_rules() -> None:
    severities = {pattern.name: pattern.severity for pattern in read_error_patterns()}
    assert {name: severities[name] for name in TODAY} == TODAY
    assert len(severities) == len(read_error_patterns())


def test_the_generic_pack_has_the_names_that_job_files_override() -> None:
    names = {pattern.name for pattern in NAMED["generic"].patterns}
    assert names >= {"items", "resume", "batch", "epoch", "throughput", "loss"}


@pytest.mark.parametrize(
    ("name", "pattern", "base"),
    [("lightning", "epoch_bar", 0), ("keras", "epochs", 1), ("generic", "epochs", 1), ("tqdm", "epoch_bar", 1)],
)
def test_a_pack_knows_the_number_of_the_first_epoch_of_its_program(name: str, pattern: str, base: int) -> None:
    assert [found.epoch_base for found in NAMED[name].patterns if found.name == pattern] == [base]


def test_a_position_in_epochs_declares_the_number_of_the_first_epoch() -> None:
    for name, pattern in PATTERNS:
        asked = tomllib.loads((PACKS / f"{name}.toml").read_text("utf-8")).get("position", ())
        for table in asked:
            if table["name"] == pattern.name and "epoch" in pattern.regex.groupindex:
                assert "epoch_base" in table, f"{name} {pattern.name}"


# -- which pack a log fits ---------------------------------------------------------------------------


def choice(*pieces: bytes) -> str | None:
    auto = PackDetector(ALL)
    for piece in pieces:
        auto.feed(piece)
    return auto.choice


@pytest.mark.parametrize("name", [pack.name for pack in ALL])
def test_the_lines_of_a_program_choose_its_pack(name: str) -> None:
    samples = [sample.text.encode() + b"\n" for sample in NAMED[name].samples]
    assert choice(b"".join(samples)) == name
    assert choice(*samples) == name
    assert choice(*(NOISE + sample for sample in reversed(samples))) == name


@pytest.mark.parametrize(("name", "index"), [case for case in SAMPLES if case[0] != ERRORS])
def test_one_sample_chooses_its_pack_or_a_more_general_one(name: str, index: int) -> None:
    chosen = choice(NAMED[name].samples[index].text.encode() + b"\n")
    if chosen is not None and chosen not in (name, *NAMED[name].also):
        assert NAMED[chosen].level < NAMED[name].level


@pytest.mark.parametrize("name", [pack.name for pack in ALL])
def test_at_least_one_sample_alone_chooses_its_pack(name: str) -> None:
    assert sum(choice(sample.text.encode()) == name for sample in NAMED[name].samples) >= 2


def test_the_more_specific_evidence_decides() -> None:
    auto = PackDetector(ALL)
    auto.feed(b"  8%|###  | 80/1000 [01:09<13:23,  1.15it/s]\r" * 20)
    assert (auto.choice, auto.is_final) == ("tqdm", False)
    auto.feed(b"{'loss': 0.5, 'learning_rate': 4e-05, 'epoch': 0.3}\n")
    assert auto.choice == "hf-trainer"


def test_colour_codes_hide_no_evidence() -> None:
    assert (
        choice(b"\x1b[1m 35/100\x1b[0m \x1b[32m\xe2\x94\x81\x1b[0m \x1b[1m3s\x1b[0m 10ms/step - loss: 1.5\n") == "keras"
    )


@pytest.mark.parametrize("line", [b"Epoch 1/3\n", b"  Epoch 1/10\n", b"Epoch 2/10\nloss 0.5\n"])
def test_a_line_with_an_epoch_is_no_evidence_of_a_framework(line: bytes) -> None:
    assert choice(line * 3) in (None, "generic")


def test_an_epoch_line_and_a_bar_together_mean_keras() -> None:
    for sample in NAMED["keras"].samples[1:6]:
        assert choice(b"Epoch 1/10\n", sample.text.encode() + b"\n") == "keras"


def test_the_variety_of_evidence_counts_more_than_the_number_of_records() -> None:
    deepspeed = b"[2026-03-01 00:00:00,000] [INFO] [logging.py:96:log_dist] [Rank 0] step=1, skipped=0, lr=[1e-05], \n"
    lightning = b"GPU available: True (cuda), used: True\nLOCAL_RANK: 0 - CUDA_VISIBLE_DEVICES: [0,1]\n"
    assert choice(deepspeed * 3, lightning) == "lightning"


def test_a_choice_is_final_only_after_much_text() -> None:
    auto = PackDetector(ALL)
    line = NAMED["sglang"].samples[1].text.encode() + b"\n"
    auto.feed(line * 3)
    assert (auto.choice, auto.is_final) == ("sglang", False)
    auto.feed(line * (SPREAD_BYTES // len(line)))
    assert auto.is_final
    auto.feed(NAMED["vllm"].samples[0].text.encode() * 9)
    assert auto.choice == "sglang"


def test_the_choice_of_a_library_is_final_after_enough_text() -> None:
    auto = PackDetector(ALL)
    auto.feed(b"120it [00:10, 11.9it/s]\n" + b"x" * FULL_READ_BYTES)
    assert (auto.choice, auto.is_final) == ("tqdm", True)


def test_evidence_after_a_long_compilation_still_counts() -> None:
    auto = PackDetector(ALL)
    auto.feed((b"gcc -c file.c -o file.o\n" * 1000) * (FULL_READ_BYTES // 24000 + 1))
    assert (auto.choice, auto.is_final) == (None, False)
    auto.feed(b"-" * END_BYTES + b"\n" + NAMED["megatron"].samples[0].text.encode() + b"\n")
    assert auto.choice == "megatron"


def test_one_chunk_is_enough_of_a_log_whose_choice_a_similar_log_confirms() -> None:
    assert ALIKE_READ_BYTES <= CHUNK_BYTES - RECORD_BYTES


def test_less_is_read_of_a_log_whose_choice_a_similar_log_confirms() -> None:
    bar, other = b"120it [00:10, 11.9it/s]\n", NAMED["megatron"].samples[0].text.encode() + b"\n"
    chunk = bar + b"x" * ALIKE_READ_BYTES + b"\n"
    hidden, late = (bar + part + b"\n" for part in (other + b"x" * END_BYTES, b"x" * END_BYTES + b"\n" + other))
    shared: set[str | None] = set()
    for first, then, found in (
        (chunk, hidden, "megatron"),  # nothing is confirmed yet: all is read
        (bar + b"x" * FULL_READ_BYTES, b"", "tqdm"),
        (chunk, hidden, "tqdm"),
        (chunk, late, "megatron"),  # ends of chunks are still read
        (hidden, b"", "megatron"),
    ):
        auto = PackDetector(ALL, confirmed=shared)
        auto.feed(first)
        auto.feed(then)
        assert auto.choice == found


@pytest.mark.parametrize(("line", "of_any_program"), [(b"no progress\n", None), (b"Epoch 1/3\n", "generic")])
def test_less_is_read_of_a_log_of_an_own_program_if_a_similar_log_fits_no_pack(
    line: bytes, of_any_program: str | None
) -> None:
    other = NAMED["megatron"].samples[0].text.encode() + b"\n"
    chunk = line + b"x" * ALIKE_READ_BYTES + b"\n"
    hidden, late = other + b"x" * END_BYTES + b"\n", b"x" * END_BYTES + b"\n" + other
    shared: set[str | None] = set()
    for first, then, found in (
        (chunk, hidden, "megatron"),  # nothing is confirmed yet: all is read
        (line + b"x" * FULL_READ_BYTES, b"", of_any_program),
        (chunk, hidden, of_any_program),
        (chunk, late, "megatron"),  # ends of chunks are still read
        (hidden, b"", "megatron"),
    ):
        auto = PackDetector(ALL, confirmed=shared)
        auto.feed(first)
        auto.feed(then)
        assert auto.choice == found


def test_a_log_that_fits_no_pack_gets_the_nearest_one() -> None:
    near = PackDetector(ALL).find_nearest(
        b"start\nit 10/500 | consumed samples 640 | elapsed 1.2 | lm loss 10.5\nend\n"
    )
    assert near is not None
    assert near[0] == "megatron"
    assert '"consumed"' in near[1]
    assert PackDetector(ALL).find_nearest(b"nothing here\n") is None
    assert PackDetector(ALL).find_nearest(b"Processed 5/9 items by worker 3\n") is None
    assert PackDetector(ALL).find_nearest(b"consumed samples, but no number\n") is None


@pytest.mark.parametrize(
    "record",
    [
        *("done 5/10", "[10/100] x", "67,300/100,000", "35 of 100", "45%", "12.5 %", "epoch=3", "Step 7", "step: 12"),
        *("global_step: 10", "iter [5]", "1.5 it/s", "300 tokens/s", "3 steps done", "batch #4", '{"step": 5}'),
    ],
)
def test_a_count_looks_like_progress(record: str) -> None:
    assert looks_like_progress(record.encode())


@pytest.mark.parametrize(
    "record",
    [
        *("", "hello", "2026/03/01 12:00:00 begin", "/a/b/1/2.txt", "HTTP/1.1 200", "10.0.0.1/24", "v1.2.3"),
        *("port 8000", "batch_size: 32", "learning rate 0.1", "12:00:00", "stepping", "epochs", "node-1/2"),
    ],
)
def test_other_numbers_do_not(record: str) -> None:
    assert not looks_like_progress(record.encode())


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(st.binary(max_size=80), st.sampled_from([s.text.encode() for p in ALL for s in p.samples])),
        max_size=5,
    )
)
@example([b"\x1b[", b"\r\n\xff"])
def test_any_bytes_can_be_fed(pieces: list[bytes]) -> None:
    auto = PackDetector(ALL)
    for piece in pieces:
        auto.feed(piece)
        looks_like_progress(piece)
    near = auto.find_nearest(b"\n".join(pieces))
    assert auto.choice is None or auto.choice in NAMED
    assert near is None or near[0] in NAMED


# -- files ---------------------------------------------------------------------------------------------

HEAD = 'name = "mine"\ntitle = "t"\nabout = "a"\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name = ", "mine.toml: "),
        ('title = "t"\nabout = "a"\n', "name is missing"),
        (HEAD + "colour = 3\n", "colour: unknown key"),
        (HEAD + "detect = ['(']\n", "detect[0]: "),
        (HEAD + "[[position]]\nname = 'n'\nunit = 'items'\nregexp = 'a'\n", "position[0].regexp: unknown key"),
        (HEAD + "[[position]]\nname = 'n'\nunit = 'miles'\nregex = 'a(1)'\n", 'unknown unit "miles"'),
        (HEAD + "[[value]]\nname = 'n'\n", "value[0].regex: is missing"),
        (HEAD + "[[value]]\nname = 'n'\nregex = 'a'\nsets = { n = '0' }\n", "sets.n: expected a number"),
        (HEAD + "[[mark]]\nname = 'loading'\nregex = 'a'\nbegins = true\nsets = {}\n", "mark[0].sets: unknown key"),
        (HEAD + "[[sample]]\ntext = 'a'\n", "gives is missing"),
    ],
)
def test_an_invalid_pack_is_refused_with_the_location(text: str, problem: str) -> None:
    with pytest.raises(PackError, match=re.escape(problem)):
        parse_pack(text, "mine")


def pack(text: str, name: str = "mine") -> Pack:
    return parse_pack(f'name = "{name}"\ntitle = "t"\nabout = "a"\n{text}', name)


BASE = "[[position]]\nname = 'n'\nunit = 'items'\nregex = 'done (?P<done>@count@)'\n"


def test_a_pack_inherits_patterns_and_sets_their_unit() -> None:
    own = "also = ['base']\nalso_unit = 'steps'\n[[value]]\nname = 'v'\nregex = 'v=(@number@)'\n"
    mine = {found.name: found for found in resolve_inheritance([pack(own), pack(BASE, "base")])}["mine"]
    found = SearchEngine(mine.patterns).scan(b"done 5 v=-1.5e3\n")
    assert [(position.unit, position.done) for position in found.positions] == [("steps", 5)]
    assert found.values["v"][None].number == -1500


def test_own_patterns_override_inherited_ones_of_the_same_name() -> None:
    own = "also = ['base']\n[[position]]\nname = 'n'\nunit = 'steps'\nregex = 'step (?P<done>@count@)'\n"
    mine = {found.name: found for found in resolve_inheritance([pack(own), pack(BASE, "base")])}["mine"]
    assert [pattern.regex.pattern for pattern in mine.patterns] == [rb"step (?P<done>\d{1,18})"]


@pytest.mark.parametrize("also", ["absent", "mine"])
def test_a_pack_cannot_inherit_from_an_unknown_pack_or_itself(also: str) -> None:
    with pytest.raises(PackError, match=f'also: "{also}" is unknown'):
        resolve_inheritance([pack(f"also = ['{also}']\n")])


def test_every_file_in_the_packs_folder_is_a_pack() -> None:
    assert set(pack_names()) == {path.stem for path in PACKS.glob("*.toml")} - {ERRORS}
    assert [found.name for found in ALL] == list(pack_names())
    assert {found.level for found in ALL} <= set(LEVELS)


EVIDENCE, EVIDENCE_WITH_AUTOMATA = Evidence(ALL), Evidence(ALL)
EVIDENCE_WITH_AUTOMATA.short_texts.left_bytes = 0
_SAMPLE_RECORDS = [
    line.encode() for pack in ALL for sample in pack.samples for line in sample.text.splitlines() if line
]


@given(st.lists(st.sampled_from(_SAMPLE_RECORDS), max_size=20))
def test_one_pass_for_all_packs_counts_the_records_that_match_each_kind_of_evidence(records: list[bytes]) -> None:
    for evidence in (EVIDENCE, EVIDENCE_WITH_AUTOMATA):
        counts = [0] * len(evidence.units)
        evidence.count(b"\n".join(records), counts)
        assert counts == [
            min(ENOUGH_RECORDS, sum(pattern.regex.search(record) is not None for record in records))
            for pack in ALL
            for pattern in pack.detect
        ]


SHARED_EVIDENCE = Evidence(ALL)  # of all logs of the next test
SHARED_EVIDENCE.short_texts.left_bytes = 0


@given(st.lists(st.lists(st.sampled_from(_SAMPLE_RECORDS), max_size=8), max_size=5), st.integers(1, 3))
def test_what_useless_hits_of_one_log_teach_holds_for_other_logs(logs: list[list[bytes]], times: int) -> None:
    """Once a log has enough records of one kind, hits of that kind are useless in it, but not in others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(automata, "MANY_USELESS_HITS", 1)
        for records in logs:
            counts = [0] * len(SHARED_EVIDENCE.units)
            for _ in range(times):
                SHARED_EVIDENCE.count(b"\n".join(records) + b"\n", counts)
            assert counts == [
                min(ENOUGH_RECORDS, times * sum(pattern.regex.search(record) is not None for record in records))
                for pack in ALL
                for pattern in pack.detect
            ]


def test_useless_hits_are_rejected_though_they_are_of_evidence_already_found() -> None:
    evidence, line = Evidence(ALL), b"Processed 7/100000 items (10.0 items/s)\n"
    evidence.short_texts.left_bytes = 0
    counts = [0] * len(evidence.units)
    evidence.count(line * 2 * automata.MANY_USELESS_HITS, counts)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(automata.AutomatonGroup, "units_at")
        evidence.count(line * 10, counts)


def test_a_short_text_is_searched_with_the_automata_that_a_long_one_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = Evidence(ALL)
    counts = [0] * len(evidence.units)
    evidence.count(b"nothing\n" * 4096, counts)
    monkeypatch.delattr(Evidence, "_search_each")
    evidence.count(b"120it [00:10, 11.9it/s]\n", counts)
    assert sum(counts) > 0


def test_evidence_searched_in_vain_in_each_record_is_soon_rejected_by_what_must_follow() -> None:
    evidence = Evidence(ALL)
    (number,) = (unit.number for name, unit in evidence.units if name == "vllm" and b".py:" in unit.literals)
    unit, tried = evidence.units[number][1], list[bytes]()
    search = unit.search
    unit.search = lambda record: tried.append(record) or search(record)  # type: ignore[func-returns-value]
    counts = [0] * len(evidence.units)
    for _ in range(9):
        evidence.count(b"11:22:33 INFO trainer.py:88 [1] loss=0.5\n" * 1000, counts)
    assert len(tried) == 1000
    assert not counts[number]
    evidence.count(NAMED["vllm"].samples[0].text.encode(), counts)
    assert counts[number]
