"""Parse names of checkpoint files: which form one checkpoint, its step, and missing shards."""

import itertools
import re
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import NamedTuple

from exporter.contract.lazy_regex import lazy_regex

MOST_SHARDS = 20_000  # larger shard numbers in a name are ignored

_SHARD_OF_TOTAL = lazy_regex(r"(?<!\d)(\d{1,9})([-_]of[-_])(\d{1,9})(?!\d)", re.IGNORECASE)
_WORLD_SIZE = lazy_regex(r"(?<![A-Za-z])world[-_]?size[-_]?(\d{1,9})(?!\d)", re.IGNORECASE)
_RANK = lazy_regex(
    r"(?<![A-Za-z])(?:rank|shard|worker|process|proc|gpu|task|part|node|host|replica|rng[-_]states?|random[-_]states?"
    r"|tp|pp|dp)[-_=]?w?(\d{1,9})(?![0-9A-Za-z])",
    re.IGNORECASE,
)
# the rank of expert or context parallelism after a step or a rank, as in `tp0_ep1` and `step5_cp1`;
# elsewhere the number of an epoch or a checkpoint, as in `model_ep5` and `cp-0004`
_EP_OR_CP = lazy_regex(r"(?<![A-Za-z])(?:ep|cp)[-_=]?(\d{1,9})(?![0-9A-Za-z])", re.IGNORECASE)
_STEP_WORD = r"(?:global[-_]?)?(?:steps?|iter(?:ation)?s?|it|ba(?:tch(?:es)?)?|updates?)"
_BEFORE_EP_OR_CP = lazy_regex(rf"(?<![A-Za-z])(?:{_STEP_WORD}|epochs?|tp|pp|dp)[-_=]?\d", re.IGNORECASE)
_WORKER = lazy_regex(r"(?<![A-Za-z0-9])w(\d{1,9})(?![0-9A-Za-z])")
_DISTCP = lazy_regex(r"__(\d{1,9})_(\d{1,9})(?=\.distcp)")
_CONSOLIDATED = lazy_regex(r"(?<=consolidated\.)(\d{2})(?=\.)")
_SHARDS = (_SHARD_OF_TOTAL, _WORLD_SIZE, _RANK, _WORKER, _DISTCP, _CONSOLIDATED)
_CONTIGUOUS_RANK = lazy_regex(
    r"(?<![A-Za-z])(?:rank|shard|rng[-_]states?|random[-_]states?|tp|pp)[-_=]?(\d{1,9})(?![0-9A-Za-z])", re.IGNORECASE
)  # these run from 0 without gaps; numbers of nodes, workers and tasks need not
# frameworks that always write rank 0: DeepSpeed, Megatron, Trainer and Accelerate
_HAS_FIRST_RANK = lazy_regex(r"(?:zero_pp_rank|mp_rank|rng[-_]states?|random[-_]states?)[-_]?\d+", re.IGNORECASE)
_OPEN_RANK = lazy_regex(r"(?<![A-Za-z])(?:rank|tp|pp)[-_=]?(\d{1,9})(?![0-9A-Za-z])", re.IGNORECASE)
_PIPELINE_RANK = lazy_regex(r"(?<=mp_rank_\d\d_)(\d{3})(?!\d)")
_COMPANION_FILES = (
    (lazy_regex(r"^(.*/)__\d+_\d+\.distcp$"), r"\1.metadata"),
    (lazy_regex(r"^(.*)\.data-\d{5}-of-\d{5}$"), r"\1.index"),
    (lazy_regex(r"^((?:(?!ocdbt\.process_).)*/)(?:manifest\.ocdbt|_sharding|array_metadatas/.*)$"), r"\1_METADATA"),
)  # files, and what reads them
_METADATA_OF_RANK = lazy_regex(r"/__\d{1,9}\.metadata$")  # instead of .metadata, if ranks save without collectives
_ZARR3_CHUNK = lazy_regex(r"(?<=/)c(?:[/.]\d+)+$")
_ZARR_CHUNK = lazy_regex(r"(?:/\d+(?:\.\d+)*)+$")
_INDEXED_SHARD = lazy_regex(
    r"^(.*/(?:pytorch_|adapter_|diffusion_pytorch_)?model)-\d{5}-of-\d{5}(\.safetensors|\.bin)$"
)
_TENSORFLOW_PART = lazy_regex(r"\.(?:index|meta|data-\d{5}-of-\d{5})$")  # its programs ask for the name before it
_NANOTRON_RANK = lazy_regex(r"(?:pp|exp)-rank-$")  # each of these has layers or experts of its own
_COUNTED_FROM_0 = lazy_regex(r"(?:\.data|(?:pp|exp)-rank)-$")  # of TensorFlow and Nanotron
_STEP = lazy_regex(rf"(?<![A-Za-z]){_STEP_WORD}[-_=.]?(\d{{1,18}})(?!\d)", re.IGNORECASE)
_EPOCH = lazy_regex(r"(?<![A-Za-z])(?:epochs?|ep)[-_=.]?(\d{1,18})(?!\d)", re.IGNORECASE)
_DECIMAL = lazy_regex(r"(?<![\d.])\d+\.\d+(?![\d.]*\.\d)")
# also after a dot as in Keras's `model.01-0.50.keras`; that of `model.1.pt`, unlike `model.100.pt`, is rather of a part
_PLAIN_NUMBER = lazy_regex(
    r"(?:(?<![A-Za-z\d.])|(?<=ckpt\.)|(?<=checkpoint\.)|(?<=weights\.)|(?<=snapshot\.)"
    r"|(?<=[A-Za-z]\.)(?=\d+(?:[-_]|(?:\.weights)?\.(?:keras|h5|hdf5)$)|0*[1-9]\d\d))(\d{1,18})(?![A-Za-z\d])"
)
_DATE = lazy_regex(
    r"(?<!\d)(?:19|20)\d\d([-_.]?)(?:0[1-9]|1[0-2])\1(?:0[1-9]|[12]\d|3[01])(?:\d{1,6})?(?!\d)"
)  # `20251130`, `2025-11-30`, and with a time `20251130120005`
# a copy in another form, as in `global_step500_universal` and `checkpoint-500-merged.safetensors`
_COPY = lazy_regex(
    r"[-_.](universal|unsharded|merged|consolidated|converted|hf)[-_.]*(?:\.[a-z]\w*)?$", re.ASCII | re.IGNORECASE
)
_LEADING_ZEROS = lazy_regex(r"(?<![\d.])0+(?=\d)")
_COPY_OF = " of "  # in the key of a copy, before that of its original
_VERSION = lazy_regex(r"-(v\d{1,9})\.ckpt$")  # Lightning adds it where the name is taken
_CHANGING_PART = lazy_regex(r"(?<![0-9a-f])(?=[0-9a-f]*\d)[0-9a-f]{12,}(?![0-9a-f])|\d+", re.ASCII)

_EXTENSION = lazy_regex(r"\.[A-Za-z][A-Za-z0-9]{0,11}$")
_TEXT = (
    *(".json", ".jsonl", ".txt", ".md", ".yaml", ".yml", ".toml", ".csv", ".tsv", ".log", ".out", ".err"),
    *(".lock", ".py", ".sh", ".html", ".png", ".pid", ".sha256", ".md5", ".jinja", ".tiktoken", ".gitattributes"),
)
NEEDED_TEXT = lazy_regex(
    r"(?:^|/)(?:[\w.-]+\.index\.json|(?:(?:generation_|adapter_|preprocessor_|tokenizer_)?config|tokenizer|trainer_state"
    r"|metadata|zarr|universal_checkpoint_info)\.json|\.z(?:array|attrs|group|metadata)|_METADATA|_CHECKPOINT_METADATA"
    r"|_sharding|array_metadatas/process_\d+)$"
)  # JSON texts without which a checkpoint cannot be loaded
# DeepSpeed's tracker and vocabularies of SentencePiece: no format proves them, and weights do not depend on them
FORMLESS = lazy_regex(r"(?:^|/)(?:latest|(?:tokenizer|spiece|spm|sentencepiece[\w.]*)\.model)$")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".distcp", ".ckpt", ".h5", ".msgpack", ".gguf")
_NO_WEIGHTS = lazy_regex(r"optim(?!al|um)|scheduler|scaler|rng_state|random_states|training_args", re.IGNORECASE)
_TRACKERS = {"latest", "latest_universal", "latest_checkpointed_iteration.txt", "latest_train_state.pt"}
_MARKERS = {
    *("commit_success.txt", "_success", "_complete", "_completed", "complete", "completed", "done", "success"),
    *(".done", ".complete", ".completed", ".success", "_committed", "committed", ".metadata"),
}
_MARKER_ENDINGS = (".done", ".complete", ".completed", ".success", ".finished", ".committed")
_CHECKPOINT_WORD = lazy_regex(
    r"checkpoint|ckpt|model|last|best|latest|final|epoch|state|weights|adapter", re.IGNORECASE
)
_ALIAS = lazy_regex(r"(?<![A-Za-z])(?:last|latest|best|final|current|newest)(?![A-Za-z])", re.IGNORECASE)
_MODEL_PART = lazy_regex(
    r"(?:(?:pytorch|adapter|ema|diffusion_pytorch)_)?"
    r"(?:model|optimizer|optim|scheduler|lr_scheduler|scaler|rng_states?|random_states?|trainer_state|consolidated)",
    re.IGNORECASE,
)
_COMPANIONS = lazy_regex(
    r"tfevents|^tokenizer|^vocab|^merges|^training_args|^special_tokens|^added_tokens", re.IGNORECASE
)


class CheckpointName(NamedTuple):
    """Parsed name of one entry in a checkpoint folder."""

    key: str  # shared by all entries of one checkpoint
    step: int | None = None
    epoch: int | None = None
    versioned: bool = False  # whether the next checkpoint gets another name
    alias: bool = False  # whether it may be a second name of a checkpoint, such as `last.ckpt`
    marker: bool = False  # whether it only marks the checkpoint as complete


@lru_cache(maxsize=256)  # of present checkpoints: more would only fill with the names of removed ones
def parse_name(name: str, is_directory: bool = False) -> CheckpointName | None:
    """Parse the name of a file or directory; None if it is no checkpoint.

    ``name`` must have no temporary marks. The key omits ranks and shard numbers, so ``ckpt_step100_rank0.pt`` and
    ``optim_step100_rank7.pt`` form one checkpoint. Words for step and epoch take precedence over other numbers;
    decimals such as ``val_loss=0.25`` are ignored.
    """
    if name.lower() in _TRACKERS or (name == "checkpoint" and not is_directory) or _COMPANIONS.search(name):
        return None
    stem, marker = _without_marker(name)
    bare = _without_ranks(stem)
    step, epoch = _last_number(_STEP, bare), _last_number(_EPOCH, bare)
    if step is None and epoch is None:
        numbers = _PLAIN_NUMBER.findall(_DECIMAL.sub("", bare))
        is_date = _DATE.search(bare) is not None
        if len(numbers) == 1 and not is_date:
            step = int(numbers[0])
        elif numbers:
            step = None if is_date else int(numbers[-1])
            return CheckpointName(f"numbers {' '.join(numbers)}", step, versioned=True, marker=marker)
    if step is not None or epoch is not None:
        key = " ".join(f"{word} {number}" for word, number in (("epoch", epoch), ("step", step)) if number is not None)
        key = f"{key} {version[1]}" if (version := _VERSION.search(bare)) else key
        key = f"{copy[1].lower()}{_COPY_OF}{key}" if (copy := _COPY.search(bare)) else key
        return CheckpointName(key, step, epoch, versioned=True, marker=marker)
    return _fixed_name(stem, bare, is_directory, marker)


def original_key(key: str) -> str:
    """Key of the checkpoint of which the one with this key may be a copy in another form; empty if it is no copy."""
    return key.partition(_COPY_OF)[2]


def is_copy_of(name: str, original: str) -> bool:
    """Whether one of two names with the same step is the other and the word for a copy.

    Extensions, ranks, shard numbers and the spelling of the step do not count. ``actor_5_hf`` is no copy of
    ``critic_5``: a step may have several models.
    """
    bare, other = _without_ranks(_without_marker(name)[0]), _without_ranks(original)
    copy = _COPY.search(bare)
    return copy is not None and _model_words(bare[: copy.start()]) in (
        _model_words(other),
        _model_words(_EXTENSION.sub("", other)),
    )


def _model_words(bare: str) -> str:
    """Return a name without words for step and epoch, and other numbers without leading zeros."""
    return _LEADING_ZEROS.sub("", _EPOCH.sub("", _STEP.sub("", bare))).strip("-_.")


def is_checkpoint(name: str, is_directory: bool) -> bool:
    """Whether a name is surely that of a checkpoint, unlike ``result_3.parquet``, which only has a number."""
    found = parse_name(name, is_directory)
    if found is None or found.marker:
        return False
    words = any(pattern.search(name) for pattern in (_CHECKPOINT_WORD, _STEP, _EPOCH))
    return found.versioned and (is_directory or words or is_weights(name))


def _fixed_name(stem: str, bare: str, is_directory: bool, marker: bool) -> CheckpointName | None:
    """Parse a name without a step, which each checkpoint overwrites."""
    checkpoint_word = _CHECKPOINT_WORD.search(stem)
    text = is_text(stem)
    if (is_directory or (text and not marker)) and not checkpoint_word:
        return None
    if text and not is_directory and not re.search("checkpoint|ckpt", stem, re.IGNORECASE):
        return None
    if _MODEL_PART.match(bare) and not is_directory:
        return CheckpointName("fixed model", marker=marker)
    while (shorter := _EXTENSION.sub("", bare)) != bare and shorter:
        bare = shorter
    return CheckpointName(f"fixed {bare.strip('-_.')}", alias=_ALIAS.search(bare) is not None, marker=marker)


def _without_ranks(stem: str) -> str:
    if before := _BEFORE_EP_OR_CP.search(stem):
        stem = stem[: before.end()] + _EP_OR_CP.sub("", stem[before.end() :])
    for pattern in _SHARDS:
        stem = pattern.sub("", stem)
    return stem


def _shards(path: str, patterns: Iterable[re.Pattern[str]] = _SHARDS) -> Iterator[re.Match[str]]:
    """Yield the numbers of ranks and shards."""
    for pattern in patterns:
        yield from pattern.finditer(path)
    if before := _BEFORE_EP_OR_CP.search(path):
        yield from _EP_OR_CP.finditer(path, before.end())


def _without_marker(name: str) -> tuple[str, bool]:
    for ending in _MARKER_ENDINGS:
        if name.lower().endswith(ending) and len(name) > len(ending):
            return name[: -len(ending)], True
    return name, False


def _last_number(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.findall(text)
    return int(found[-1]) if found else None


def is_marker(path: str) -> bool:
    """Whether a file in a checkpoint's directory marks that all others are written."""
    return path.rpartition("/")[2].lower() in _MARKERS


def is_text(path: str) -> bool:
    """Whether a path is named like text beside checkpoints: logs, settings, figures, but no shard index."""
    name = path.lower()
    return name.endswith(_TEXT) and not name.endswith(".index.json")


def is_part(path: str) -> bool:
    """Whether a file in a checkpoint's directory belongs to it by its name, rather than being a log or a note."""
    return NEEDED_TEXT.search(path) is not None or not (is_text(path) or "tfevents" in path)


def is_weights(path: str) -> bool:
    """Whether a path is named like a file of model weights."""
    name = path.rpartition("/")[2]
    return name.lower().endswith(_WEIGHTS) and not _NO_WEIGHTS.search(name)


def is_state_of_training(path: str) -> bool:
    """Whether a path is named like what a trainer saves beside the model, as ``optimizer.pt``."""
    inner = path.partition("/")[2]  # without the name of the checkpoint
    return _NO_WEIGHTS.search(inner) is not None and "model" not in inner


def is_sharded(path: str) -> bool:
    """Whether a path contains a rank or a shard number."""
    return any(_shards(path))


def name_shape(path: str, name: CheckpointName) -> str:
    """Return the path with ``#`` for step, epoch and hashes, so that it matches in the next checkpoint."""
    numbers = {number for number in (name.step, name.epoch) if number is not None}
    kept = [match.span() for match in _shards(path)]
    parts, end = [], 0
    for match in _CHANGING_PART.finditer(path):
        inside = any(start <= match.start() < stop for start, stop in kept)
        number = int(match[0]) if match[0].isdecimal() and len(match[0]) <= 18 else None
        if inside or (number is not None and number not in numbers and (numbers or not name.versioned)):
            continue
        parts += [path[end : match.start()], "#"]
        end = match.end()
    return "".join((*parts, path[end:]))


def missing_numbers(paths: Collection[str]) -> Iterator[str]:
    """Yield missing shards that other names imply: ``…-00003-of-00004…`` if only 1, 2 and 4 exist.

    Shards count from 1, unless number 0 exists; ranks of a world size count from 0.
    """
    yield from _missing_of_total(paths)
    yield from _missing_of_world(paths)


def _missing_of_total(paths: Iterable[str]) -> Iterator[str]:
    seen: dict[tuple[str, str], set[int]] = {}
    written: dict[tuple[str, str], tuple[str, re.Match[str], str]] = {}
    for path in sorted(paths):
        for match in _SHARD_OF_TOTAL.finditer(path):
            place = before, after = path[: match.start()], path[match.end(1) :]
            if kind := _NANOTRON_RANK.search(before):
                place = "/".join(path.split("/")[:-1][:2]), kind[0] + match[3]
            seen.setdefault(place, set()).add(int(match[1]))
            written[place] = before, match, after
    for place, numbers in seen.items():
        before, match, after = written[place]
        total, width = int(match[3]), len(match[1])
        if 0 < total <= MOST_SHARDS and max(numbers) <= total:
            first = 0 if 0 in numbers or _COUNTED_FROM_0.search(before) else 1
            for number in range(first, first + total):
                if number not in numbers:
                    yield f"{before}{number:0{width}}{after}"


def _missing_of_world(paths: Iterable[str]) -> Iterator[str]:
    seen: dict[tuple[str, str], set[int]] = {}
    totals: dict[tuple[str, str], int] = {}
    for path in paths:
        world, ranks = _WORLD_SIZE.search(path), list(_shards(path, (_RANK,)))
        if world and len(ranks) == 1 and not _SHARD_OF_TOTAL.search(path):
            place = (path[: ranks[0].start(1)], path[ranks[0].end(1) :])
            seen.setdefault(place, set()).add(int(ranks[0][1]))
            totals[place] = int(world[1])
    for (before, after), numbers in seen.items():
        total = totals[before, after]
        if total <= MOST_SHARDS and max(numbers) < total:
            for number in range(total):
                if number not in numbers:
                    yield f"{before}{number}{after}"


def missing_ranks(paths: Iterable[str]) -> Iterator[str]:
    """Yield paths of ranks missing between others: 3 if 0, 1, 2 and 4 to 7 exist.

    Only if most others exist. Rank 0 is missed only in names of frameworks that always write it. Runs of equal length
    (0, 1, 4, 5) are left out: there only some ranks write, such as one per group of replicas. Missing ranks after the
    last one are never detected.
    """
    for (before, after), (numbers, width) in _ranks(paths).items():
        last = max(numbers)
        has_first = 0 in numbers or _HAS_FIRST_RANK.search(f"{before}0") is not None
        if not has_first or last > MOST_SHARDS or not len(numbers) <= last < max(2, 2 * len(numbers) - 1):
            continue
        runs = [1]
        for one, other in itertools.pairwise(sorted(numbers)):
            runs.append(1) if other > one + 1 else runs.append(runs.pop() + 1)
        if len(set(runs)) > 1 or 0 not in numbers:
            for number in range(last):
                if number not in numbers:
                    yield f"{before}{number:0{width}}{after}"


def missing_companions(paths: AbstractSet[str]) -> Iterator[str]:
    """Yield files without which others cannot be read: ``.metadata`` beside ``__0_0.distcp``."""
    groups = tuple(path.removesuffix(".zgroup") for path in paths if path.endswith("/.zgroup"))
    is_zarr3 = any(path.endswith("/zarr.json") for path in paths)
    trees = {path.rpartition("/")[0] for path in paths if path.endswith("/_CHECKPOINT_METADATA")}
    there = paths | {_METADATA_OF_RANK.sub("/.metadata", path) for path in paths}
    for path in paths:
        folder, _, name = path.rpartition("/")
        if name == "common.pt" and f"{folder}/.metadata" in paths and (core := f"{folder}/metadata.json") not in paths:
            yield core  # of Megatron core
        elif (
            name in (".zarray", "zarr.json")
            and (tree := folder.rpartition("/")[0]) in trees
            and f"{tree}/_METADATA" not in paths
        ):
            yield f"{tree}/_METADATA"  # of Orbax
        elif (chunk := _ZARR3_CHUNK.search(path)) and (is_zarr3 or ".zarr/" in path):
            if paths.isdisjoint((array := f"{path[: chunk.start()]}zarr.json", *_zarr_arrays(path, chunk.start() + 1))):
                yield array
        elif (
            path.startswith(groups)
            and (chunk := _ZARR_CHUNK.search(path))
            and paths.isdisjoint(_zarr_arrays(path, chunk.start()))
        ):
            yield f"{path[: chunk.start()]}/.zarray"
        for pattern, companion in _COMPANION_FILES:
            if (match := pattern.search(path)) and (lacking := match.expand(companion)) not in there:
                yield lacking


def _zarr_arrays(path: str, begin: int) -> Iterator[str]:
    """Yield where the array of a chunk may be described, whose numbers begin at ``begin``."""
    yield f"{path[:begin]}/.zarray"
    for match in re.finditer("/", path[begin + 1 :]):
        yield f"{path[: begin + 1 + match.start()]}/.zarray"


def missing_indexes(paths: Collection[str]) -> Iterator[str]:
    """Yield the indexes of Hugging Face that most programs need to find the shards beside them."""
    for path in paths:
        if (match := _INDEXED_SHARD.search(path)) and (lacking := match.expand(r"\1\2.index.json")) not in paths:
            yield lacking


def missing_first_ranks(paths: Iterable[str]) -> Iterator[str]:
    """Yield the path of rank 0 wherever only higher ranks exist, which earlier checkpoints may show to be missing."""
    for (before, after), (numbers, width) in _ranks(paths).items():
        if 0 not in numbers:
            yield f"{before}{0:0{width}}{after}"


def open_ranks(paths: Iterable[str]) -> str | None:
    """The first path numbered by a rank where no name says how many ranks there are; None without one."""
    return next(
        (
            path
            for path in sorted(paths)
            if _OPEN_RANK.search(path) and not (_SHARD_OF_TOTAL.search(path) or _WORLD_SIZE.search(path))
        ),
        None,
    )


def _ranks(paths: Iterable[str]) -> dict[tuple[str, str], tuple[set[int], int]]:
    """Numbers of ranks, and the width of the narrowest, by the text before and after them."""
    found: dict[tuple[str, str], tuple[set[int], int]] = {}
    for path in paths:
        if _SHARD_OF_TOTAL.search(path) or _WORLD_SIZE.search(path):
            continue
        for pattern in (_CONTIGUOUS_RANK, _PIPELINE_RANK, _CONSOLIDATED):
            for match in pattern.finditer(path):
                numbers, width = found.get(place := (path[: match.start(1)], path[match.end(1) :]), (set(), 9))
                numbers.add(int(match[1]))
                found[place] = (numbers, min(len(match[1]), width))
    return found


def common_name(names: Collection[str]) -> str:
    """Return one name for all entries of a checkpoint: that of the model, with ``*`` for shard numbers."""
    main = min(names, key=_rank_as_model)
    if len(names) == 1:
        return main
    main = _TENSORFLOW_PART.sub("", main)
    spans = sorted(match.span(1) for match in _shards(main, (_RANK, _WORKER, _SHARD_OF_TOTAL, _CONSOLIDATED)))
    parts, end = [], 0
    for start, stop in spans:
        if start >= end:
            parts += [main[end:start], "*"]
            end = stop
    return "".join((*parts, main[end:]))


def _rank_as_model(name: str) -> tuple[bool, bool, bool, int, str]:
    """Sort key by which ``checkpoint_5.pt`` precedes ``opt_5.pt``, ``optimizer_5.pt`` and ``checkpoint_5.yaml``."""
    return is_text(name), not is_weights(name), not _CHECKPOINT_WORD.search(name), len(name), name
