"""Files of a checkpoint that state which others it has, and how long they are."""

import io
import itertools
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from exporter.files.checkpoints.entries import CheckpointIndex
from exporter.files.formats import safetensors, torch_file, zip_file
from exporter.files.formats.pickles import PICKLE_ERRORS, walk_pickle
from exporter.files.formats.source import (
    OPEN_FLAGS,
    CheckUndecided,
    FileDamaged,
    FileSource,
    NotRegularFile,
    open_source,
)

MOST_INDEXES = 64  # read of one entry
MOST_INDEX_BYTES = 8 << 20
MOST_WALKED_BYTES = 1 << 20  # longest .metadata whose lengths are read: the walk takes a second for each 2 MiB
MOST_SEARCHED_BYTES, SEARCHED_BYTES = 256 << 20, 1 << 20  # of a longer one searched for names, and of it at once
LONGEST_SHARD_NAME = 64  # more than the longest name, which may lie across two of these pieces
MOST_SHARDS = 20_000
TENSOR_INDEXES = (".safetensors.index.json", ".bin.index.json")
INDEX, DISTCP_INDEX, ORBAX_TREE = ".index.json", ".metadata", "_METADATA"
ARRAYS = (".zarray", "zarr.json")
CORE = "metadata.json"  # of Megatron core, beside the files of PyTorch

_DISTCP_SHARD = re.compile(rb"__\d{1,9}_\d{1,9}\.distcp")
_DEEPSPEED_STATES = re.compile(r"(?:bf16_)?(?:zero_pp_rank_\d+_)?mp_rank_(\d\d)_model_states\.pt")
_DEEPSPEED_RANK = re.compile(r"((?:bf16_)?zero_pp_rank_)\d+(_mp_rank_\d\d_(?:model|optim)_states\.pt)")
_MEGATRON_RANK = re.compile(r"(?:^|/)mp_rank_\d\d(?:_\d\d\d){0,2}/model_(?:optim_)?rng\.pt$")
_MEGATRON_KINDS = ("tensor", "pipeline", "expert")  # of parallelism, in the order of a folder's name
_OF_RANKS = re.compile(rf"(?:^|/)(?:{_DEEPSPEED_STATES.pattern})$|{_MEGATRON_RANK.pattern}")


def index_paths(paths: Iterable[str]) -> Iterator[str]:
    """Yield the paths of files that name others: all indexes, and of files of ranks the first in each folder."""
    seen = set()
    for path in sorted(paths):
        if path.endswith((INDEX, *(f"/{name}" for name in (DISTCP_INDEX, CORE, *ARRAYS, ORBAX_TREE)))):
            yield path
        elif _OF_RANKS.search(path) and (folder := _ranks_folder(path)) not in seen:
            seen.add(folder)
            yield path


def index_ends(indexes: Iterable[CheckpointIndex]) -> dict[str, int]:
    """Where each file must end, by its path."""
    return {path: end for index in indexes for path, end in index.lengths}


def read_index(directory: str, path: str, paths: Collection[str]) -> CheckpointIndex:
    """Read one index; without shards if it cannot be read, and without lengths if it is a very long ``.metadata``."""
    folder = path.rpartition("/")[0]
    prefix = f"{folder}/" if folder else ""
    try:
        if _OF_RANKS.search(path):
            return CheckpointIndex(path, tuple(_rank_paths(directory, path, paths)))
        if path.endswith(f"/{DISTCP_INDEX}") and os.path.getsize(os.path.join(directory, path)) > MOST_WALKED_BYTES:
            return CheckpointIndex(path, tuple(prefix + name for name in _find_distcp_shards(directory, path)))
        text = read_text(directory, path)
    except (OSError, NotRegularFile, FileDamaged, CheckUndecided, *PICKLE_ERRORS):
        return CheckpointIndex(path, ())
    lengths: dict[str, int] = {}
    chunks: Sequence[str] = ()
    if path.endswith(INDEX):
        names: Sequence[str] = parse_index(text) or ()
    elif path.endswith(f"/{CORE}"):
        names = parse_core_metadata(text)
    elif path.endswith(ORBAX_TREE):
        names = parse_orbax_tree(text)
    elif path.endswith(ARRAYS):
        found = parse_array(text)
        names = found.chunks if found is not None and found.is_full else ()
        chunks = found.chunks if found is not None and not found.is_full else ()
        if found is not None and found.chunk_bytes is not None:
            lengths = dict.fromkeys(found.chunks, found.chunk_bytes)
    else:
        names = [name.decode() for name in _DISTCP_SHARD.findall(text)]
        lengths = parse_distcp_metadata(text) or {}
    return CheckpointIndex(
        path,
        tuple(prefix + name for name in sorted({*names, *lengths} - {*chunks})),
        tuple((prefix + name, end) for name, end in sorted(lengths.items())),
        tuple(prefix + name for name in chunks),
    )


def parse_index(text: str | bytes) -> tuple[str, ...] | None:
    """Return the sorted shard names of a Hugging Face ``*.index.json``; None for any other content."""
    tensors = parse_tensor_index(text)
    return tuple(sorted(tensors)) if tensors is not None and len(tensors) <= MOST_SHARDS else None


def parse_core_metadata(text: bytes) -> Sequence[str]:
    """Return what a checkpoint of Megatron core has besides its shards; nothing for any other ``metadata.json``."""
    try:
        return ("common.pt", DISTCP_INDEX) if json.loads(text)["sharded_backend"] == "torch_dist" else ()
    except (ValueError, LookupError, TypeError, RecursionError):
        return ()


def parse_tensor_index(text: str | bytes) -> dict[str, set[str]] | None:
    """Return the tensors in each shard according to a Hugging Face ``*.index.json``; None for any other content."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return None
    weights = body.get("weight_map") if isinstance(body, dict) else None
    if not isinstance(weights, dict):
        return None
    tensors: dict[str, set[str]] = {}
    for tensor, shard in weights.items():
        if isinstance(shard, str) and shard:
            tensors.setdefault(shard, set()).add(tensor)
    return tensors


def tensor_names(source: FileSource) -> set[str] | None:
    """Return the names of the tensors in a shard; None if its format does not show them."""
    if safetensors.claims(source):
        return safetensors.read_names(source)
    held = torch_file.read_object(source).value if source.head(4) == zip_file.LOCAL_MARK else None
    if not isinstance(held, dict) or not held or "_metadata" in held:  # an attribute of an OrderedDict
        return None
    return {name for name in held if isinstance(name, str)}


def parse_distcp_metadata(text: bytes) -> dict[str, int] | None:
    """Return where each file of a PyTorch distributed checkpoint ends, from its ``.metadata``; None if that is damaged.

    Each item has ``_StorageInfo(relative_path, offset, length)``. Nothing is unpickled.
    """
    stream = io.BytesIO(text)
    try:
        states = walk_pickle(stream).states
    except PICKLE_ERRORS:
        return None
    if stream.tell() < len(text):
        return None
    ends: dict[str, int] = {}
    for state in states:
        name, offset, length = (state.get(key) for key in ("relative_path", "offset", "length"))
        if isinstance(name, str) and isinstance(offset, int) and isinstance(length, int):
            ends[name] = max(ends.get(name, 0), offset + length)
    return ends


def parse_shard_index(text: bytes) -> int | None:
    """Return the length of the index at the end of each shard of a Zarr 3 array, from its ``zarr.json``.

    None if it has no shards. Raises CheckUndecided for an index in another place or without checksum.
    """
    try:
        body = json.loads(text)
        codec, *others = body["codecs"]
        if codec["name"] != "sharding_indexed":
            return None
        settings = codec["configuration"]
        sides = zip(body["chunk_grid"]["configuration"]["chunk_shape"], settings["chunk_shape"], strict=True)
        index = [codec["name"] for codec in settings["index_codecs"]]
        place = settings.get("index_location", "end")
        chunks = math.prod(int(outer) // int(inner) for outer, inner in sides)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None
    if others or index != ["bytes", "crc32c"] or place != "end" or chunks < 1:
        raise CheckUndecided("is a Zarr shard of a form that is not checked")
    return 16 * chunks + 4


def ends_with_checksum(text: bytes) -> bool:
    """Whether each chunk of a Zarr 3 array ends with a CRC-32C, by its ``zarr.json``."""
    try:
        return bool(json.loads(text)["codecs"][-1]["name"] == "crc32c")
    except (ValueError, LookupError, TypeError, RecursionError):
        return False


class ZarrArray(NamedTuple):
    """Files of one Zarr array."""

    chunks: tuple[str, ...]  # their names
    is_full: bool  # whether all of them must exist: without a fill value
    chunk_bytes: int | None  # length of each, if they are not compressed


def parse_array(text: bytes) -> ZarrArray | None:
    """Return the chunks of an array of Zarr 2 or 3, from its ``.zarray`` or ``zarr.json``; None for other content."""
    try:
        body = json.loads(text)
        second = body["zarr_format"] == 2
        grid, shape = (body["chunks"] if second else body["chunk_grid"]["configuration"]["chunk_shape"]), body["shape"]
        counts = [-(-length // chunk) for length, chunk in zip(shape, grid, strict=True)]
        if math.prod(counts) > MOST_SHARDS:
            return None
        if second:
            separator, start = body.get("dimension_separator", "."), []
            is_plain = body["compressor"] is None and not body["filters"]
        else:
            encoding = body["chunk_key_encoding"]
            separator = encoding.get("configuration", {}).get("separator", "/")
            start = ["c"] if encoding["name"] == "default" else []
            is_plain = [codec["name"] for codec in body["codecs"]] == ["bytes"]
        names = [separator.join([*start, *map(str, place)]) or "0" for place in itertools.product(*map(range, counts))]
        digits = re.search(r"(?<!\d)\d{1,6}$", str(body["dtype" if second else "data_type"]))
        item = int(digits[0]) // (1 if second else 8) if digits else None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None
    length = math.prod(grid) * item if is_plain and item else None
    return ZarrArray(tuple(names), body.get("fill_value") is None, length)


def parse_orbax_tree(text: bytes) -> tuple[str, ...]:
    """Return the files that Orbax's ``_METADATA`` demands beside it."""
    try:
        body = json.loads(text)
        if body.get("use_ocdbt", True):
            return ("manifest.ocdbt",)
        metadata = ARRAYS[bool(body.get("use_zarr3"))]
        keys = [leaf["key_metadata"] for leaf in body["tree_metadata"].values()]
        return tuple(f"{'.'.join(str(part['key']) for part in key)}/{metadata}" for key in keys)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ()


def read_text(directory: str, path: str) -> bytes:
    """Read an index as a whole. Raises CheckUndecided if it is too long, NotRegularFile if there is none."""
    with open_source(directory, path) as source:
        if source.size > MOST_INDEX_BYTES:
            raise CheckUndecided("is too long")
    with open(os.open(os.path.join(directory, path), OPEN_FLAGS), "rb") as file:
        return file.read(MOST_INDEX_BYTES)


def _find_distcp_shards(directory: str, path: str) -> Iterator[str]:
    """Yield the sorted names of shards in a ``.metadata``, which is searched in pieces instead of walked."""
    names: set[bytes] = set()
    with open(os.open(os.path.join(directory, path), OPEN_FLAGS), "rb") as file:
        end = b""
        while file.tell() < MOST_SEARCHED_BYTES and (piece := file.read(SEARCHED_BYTES)):
            names.update(_DISTCP_SHARD.findall(end + piece))
            end = piece[-LONGEST_SHARD_NAME:]
    yield from (name.decode() for name in sorted(names))


def _ranks_folder(path: str) -> str:
    folder = path.rpartition("/")[0]
    return folder.rpartition("/")[0] if _MEGATRON_RANK.search(path) else folder


def _rank_paths(directory: str, path: str, paths: Collection[str]) -> Iterator[str]:
    """Yield the files of all ranks, of which one states how many there are."""
    with open_source(directory, path) as source:
        contents = torch_file.read_object(source)
    folder, _, name = path.rpartition("/")
    sizes = contents.value if isinstance(contents.value, dict) else {}
    if match := _DEEPSPEED_STATES.fullmatch(name):
        families = {
            found.groups()
            for other in paths
            if other.startswith(f"{folder}/") and (found := _DEEPSPEED_RANK.fullmatch(other[len(folder) + 1 :]))
        }
        for before, after in families:
            yield from (f"{folder}/{before}{rank}{after}" for rank in range(_count(sizes.get("dp_world_size"))))
        if f"{folder}/{name}" == f"{folder}/mp_rank_{match[1]}_model_states.pt":
            world = range(_count(sizes.get("mp_world_size")))
            yield from (f"{folder}/mp_rank_{rank:02}_model_states.pt" for rank in world)
        return
    for state in contents.states:
        stated = {"expert_model_parallel_size": 1, **state}  # older versions have no experts
        tensor, pipeline, expert = (_count(stated.get(f"{kind}_model_parallel_size")) for kind in _MEGATRON_KINDS)
        if expert > 1 and stated.get("expert_tensor_parallel_size") not in (None, tensor):
            continue  # not each rank of experts meets each tensor rank
        if tensor * pipeline * expert > MOST_SHARDS:
            continue
        ranks = itertools.product(range(tensor), range(pipeline), range(expert))
        names = (f"mp_rank_{t:02}" + f"_{p:03}" * (pipeline > 1) + f"_{e:03}" * (expert > 1) for t, p, e in ranks)
        written = [f"{_ranks_folder(path)}/{rank}/{name}" for rank in names]
        if path in written:  # otherwise the program names them in another way
            yield from written


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 < value <= MOST_SHARDS else 0
