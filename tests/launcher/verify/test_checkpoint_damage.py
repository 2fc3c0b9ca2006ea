"""The verdict on checkpoints: damage at any place is never called whole, and what is whole is never called damaged."""

import argparse
import json
import os
import pickle
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exporter.files.checkpoints.layouts_reader import SEARCHED_BYTES, read_index
from exporter.files.checkpoints.parts_reader import check_part
from launcher.verify.files import CheckedCheckpoint, LastCheckpoint
from launcher.verify.paths import verify_path
from tests.exporter.files.checkpoints.checkpoint_trees import START, Folder, safetensors_bytes
from tests.launcher.verify.checkpoint_files import LAYOUTS, ZSTD_CHUNK, Files, torch_bytes, write_checkpoint

DAMAGES = ("cut", "emptied", "erased", "continued", "removed")
# values without a checksum: any bytes of the right length are values
UNDETECTABLE = (("erased", "/plain/"),)

LONG_TEXT = json.dumps({"log_history": [{"step": step, "loss": 0.5} for step in range(30_000)]}, indent=2).encode()


def damaged(content: bytes, damage: str, chance: random.Random) -> bytes | None:
    """The content with this damage at a random place; None if the file is removed."""
    if damage == "removed":
        return None
    if damage == "continued":
        return content + chance.randbytes(chance.randrange(1, 500))
    return {"cut": content[: chance.randrange(1, len(content))], "emptied": b"", "erased": bytes(len(content))}[damage]


def judge(folder: Path) -> CheckedCheckpoint:
    """The newest checkpoint in a folder, by the check at the end of a job."""
    search = LastCheckpoint(str(folder), "*", 0.0)
    while not (found := search.poll(0.0)).done:
        pass
    assert found.last is not None
    return found.last


def write_two(folder: Path, layout: str) -> Files:
    """Write two checkpoints, the second an hour later, and return the files of the second."""
    for step in (100, 200):
        write_checkpoint(folder, files := LAYOUTS[layout](step))
        set_times(folder, files, step)
    return files


def set_times(folder: Path, files: Files, step: int) -> None:
    for name in files:
        if (folder / name).exists():
            os.utime(folder / name, (START + 36 * step, START + 36 * step))


def sidecar(folder: Path) -> Folder:
    """The folder as a sidecar sees it after some minutes."""
    found = Folder(folder, verify=True)
    found.now = START + 7300.0
    found.poll_for(150)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_checkpoint_is_no_alarm(layout: str, tmp_path: Path) -> None:
    write_two(tmp_path, layout)
    found, seen = judge(tmp_path).checkpoint, sidecar(tmp_path)
    expected = None if layout == "orbax" else True
    assert (found.state, found.valid, "200" in found.name) == ("complete", expected, True), found.reason
    assert (seen.last.state, seen.last.valid, seen.last.reason) == ("complete", expected, found.reason)
    assert not {event.kind for event in seen.happened} & {"damaged", "incomplete"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("trainer_state.json", LONG_TEXT),
        ("tokenizer.json", LONG_TEXT),
        ("tokenizer.model", b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\2"),
        ("sentencepiece.bpe.model", b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\2"),
        ("chat_template.jinja", b"{%- if messages %}{{ messages }}{% endif %}\n"),
        ("qwen.tiktoken", b"IQ== 0\nIg== 1\n"),
        (".gitattributes", b"*.bin filter=lfs\n"),
        ("latest", b"global_step200"),
    ],
)
def test_what_a_trainer_saves_beside_its_model_leaves_it_whole(name: str, content: bytes, tmp_path: Path) -> None:
    files = write_two(tmp_path, "hugging_face")
    path = f"checkpoint-200/{name}"
    write_checkpoint(tmp_path, {path: content})
    set_times(tmp_path, {**files, path: content}, 200)
    found, seen = judge(tmp_path).checkpoint, sidecar(tmp_path).last
    assert (found.name, found.valid, found.reason) == ("checkpoint-200", True, None)
    assert (seen.name, seen.valid, seen.reason) == ("checkpoint-200", True, None)


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chance=st.randoms(use_true_random=False), damage=st.sampled_from(DAMAGES))
def test_a_damaged_checkpoint_is_never_whole(
    layout: str, chance: random.Random, damage: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damage")
    files = write_two(folder, layout)
    name = chance.choice(sorted(files))
    content = damaged(files[name], damage, chance)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    set_times(folder, files, 200)
    if any(damage == kind and place in f"/{name}" for kind, place in UNDETECTABLE):
        return
    found = judge(folder).checkpoint
    assert found.valid is not True or "100" in found.name, (damage, name)
    seen = sidecar(folder).last
    assert (seen.state, seen.valid) == (found.state, found.valid), (damage, name, seen.reason, found.reason)


CASES = {
    "erased shard of a .bin": ("hugging_face_bin", "model-00002-of-00003.bin", bytes(500), "contains only zeros"),
    "empty shard of a .bin": ("hugging_face_bin", "model-00002-of-00003.bin", b"", "is empty"),
    "shard of other tensors": (
        "hugging_face",
        "model-00002-of-00003.safetensors",
        safetensors_bytes(50, "layers.1"),
        "names the tensor 'layers.2' in model-00002-of-00003.safetensors, which has none of this name",
    ),
    "shard of other tensors of a .bin": (
        "hugging_face_bin",
        "model-00002-of-00003.bin",
        torch_bytes({"layers.1": 7}),
        "names the tensor 'layers.2' in model-00002-of-00003.bin",
    ),
    "cut long text": ("hugging_face", "trainer_state.json", LONG_TEXT[:-2], "begins with { but does not end with }"),
    "index of nothing": ("hugging_face", "model.safetensors.index.json", b"{}", "names no tensor"),
    "no common part": ("megatron_core", "common.pt", None, "common.pt is missing"),
    "no metadata of the core": ("megatron_core", "metadata.json", None, "metadata.json is missing"),
    "empty optimizer": ("hugging_face_bin", "optimizer.bin", b"", "is empty"),
    "erased .distcp": ("torch_distributed", "__1_0.distcp", bytes(2000), "contains only zeros"),
    "short .distcp": ("torch_distributed", "__1_0.distcp", b"PK\3\4", "bytes too early"),
    "no .metadata": ("torch_distributed", ".metadata", None, ".metadata is missing"),
    "cut _METADATA": ("orbax", "_METADATA", b'{"tree_m', "ends in the middle of a value"),
    "no _METADATA": ("orbax_zarr", "_METADATA", None, "_METADATA is missing"),
    "empty manifest": ("orbax", "manifest.ocdbt", b"", "is empty"),
    "empty chunk": ("zarr", "packed/1.0", b"", "is empty"),
    "no array of chunks": ("zarr", "packed/.zarray", None, "packed/.zarray is missing"),
    "no array of chunks in Zarr 3": ("zarr_sharded", "w/zarr.json", None, "w/zarr.json is missing"),
    "chunk twice": ("orbax_zarr", "w/c/0", ZSTD_CHUNK * 2, "continues for 49 bytes after its values"),
    "shard of chunks with a wrong index": ("zarr_sharded", "w/c/1", bytes(99), "an index of chunks whose checksum is"),
    "chunk with a wrong checksum": ("zarr_checksums", "w/c/1", ZSTD_CHUNK, "has a wrong checksum"),
    "short chunk": ("zarr", "plain/1.0", bytes(799), "ends 1 bytes too early"),
    "no rank 0 of ZeRO": ("deepspeed", "zero_pp_rank_0_mp_rank_00_optim_states.pt", None, "is missing"),
    "no last rank of ZeRO": ("deepspeed", "zero_pp_rank_3_mp_rank_00_optim_states.pt", None, "is missing"),
    "no first stage": ("megatron", "mp_rank_00_000/model_optim_rng.pt", None, "is missing"),
    "no last stage": ("megatron", "mp_rank_01_001/model_optim_rng.pt", None, "is missing"),
    "no last rank of experts": ("megatron_experts", "mp_rank_01_003/model_optim_rng.pt", None, "is missing"),
    "no rank 0": ("ranks", "rank0.pt", None, "rank0.pt is missing"),
    "bytes after the end": (
        "one_file",
        ".pt",
        LAYOUTS["one_file"](200)["checkpoint_200.pt"] + b"x" * 9,
        "9 bytes after",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_damage_is_named(case: tuple[str, str, bytes | None, str], tmp_path: Path) -> None:
    layout, ending, content, reason = case
    files = write_two(tmp_path, layout)
    (name,) = (name for name in files if name.endswith(ending if "/" not in name else f"/{ending}"))
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(content)
    set_times(tmp_path, files, 200)
    found = judge(tmp_path)
    assert found.is_damaged
    assert reason in (found.checkpoint.reason or "")


def test_a_lost_rank_is_missed_beside_the_files_of_a_distributed_optimizer(tmp_path: Path) -> None:
    args = argparse.Namespace(tensor_model_parallel_size=4, pipeline_model_parallel_size=1)
    for step in (100, 200):
        for rank in range(3):
            parts = {"model_optim_rng.pt": torch_bytes({"args": args}), "distrib_optim.pt": torch_bytes({})}
            write_checkpoint(tmp_path / f"iter_{step:07}/mp_rank_{rank:02}", parts)
    assert judge(tmp_path).checkpoint.missing == ("iter_0000200/mp_rank_03/model_optim_rng.pt",)


@pytest.mark.parametrize(("expert_tensor_size", "is_stated"), [(None, True), (2, True), (1, False)])
def test_experts_that_are_split_otherwise_state_no_ranks(
    expert_tensor_size: int | None, is_stated: bool, tmp_path: Path
) -> None:
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 2}
    content = torch_bytes({"args": argparse.Namespace(**sizes, expert_tensor_parallel_size=expert_tensor_size)})
    name, others = "iter_0000100/mp_rank_{}/model_optim_rng.pt", ("00_000", "00_001", "01_000", "01_001")
    write_checkpoint(tmp_path, {name.format("00_000"): content, "iter_0000100/mp_rank_00/model_optim_rng.pt": content})
    expected = tuple(map(name.format, others)) if is_stated else ()
    assert read_index(str(tmp_path), name.format("00_000"), ()).shards == expected
    assert read_index(str(tmp_path), name.format("00"), ()).shards == ()


def test_a_missing_tensorflow_shard_is_named_by_its_own_number(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {f"model.ckpt-7.{end}": b"x" for end in ("index", "data-00001-of-00002")})
    assert judge(tmp_path).checkpoint.missing == ("model.ckpt-7.data-00000-of-00002",)


@pytest.mark.parametrize(
    ("lacking", "reason"),
    [
        ("index.json", "checkpoint-100/model.safetensors.index.json may be missing"),
        ("model", "has no file of weights"),
    ],
)
def test_a_lone_checkpoint_without_its_model_is_undecided(lacking: str, reason: str, tmp_path: Path) -> None:
    files = {name: content for name, content in LAYOUTS["hugging_face"](100).items() if lacking not in name}
    files["checkpoint-100/optimizer_0/__0_0.pt"] = torch_bytes({})
    files["checkpoint-100/tokenizer.model"] = b"\n\x0e"
    write_checkpoint(tmp_path, files)
    found = judge(tmp_path).checkpoint
    assert (found.state, found.valid, found.reason) == ("complete", None, reason)


def test_an_index_that_is_too_long_to_be_read_is_a_doubt(tmp_path: Path) -> None:
    files = write_two(tmp_path, "hugging_face")
    (index,) = (name for name in files if name.endswith("model.safetensors.index.json"))
    (tmp_path / index).write_text(json.dumps({**json.loads(files[index]), "note": "x" * (8 << 20)}))
    set_times(tmp_path, files, 200)
    assert judge(tmp_path).checkpoint.reason == f"{index}: only its beginning and end were checked"


def test_the_metadata_of_ranks_that_save_on_their_own_is_a_doubt(tmp_path: Path) -> None:
    files = write_two(tmp_path, "torch_distributed")
    (tmp_path / "step-200/.metadata").rename(tmp_path / "step-200/__0.metadata")
    set_times(tmp_path, files, 200)
    found = judge(tmp_path).checkpoint
    assert (found.name, found.state, found.valid) == ("step-200", "complete", None)


@pytest.mark.parametrize("mark", ["step-200-unfinished", "step-200.unfinished"])
def test_a_checkpoint_that_its_writer_marks_as_unfinished_is_a_doubt(mark: str, tmp_path: Path) -> None:
    files = write_two(tmp_path, "torch_distributed")
    (tmp_path / mark).touch()
    set_times(tmp_path, {**files, mark: b""}, 200)
    reason = f"{mark} says that its writer has not finished it"
    folder = sidecar(tmp_path)
    folder.poll_for(700)
    assert judge(tmp_path).checkpoint.reason == folder.last.reason == reason
    assert verify_path(tmp_path).resume == str(tmp_path / "step-100")
    folder.remove(mark)
    folder.poll()
    assert folder.last.valid is True


@pytest.mark.parametrize("items", [12_000, 70_000], ids=["1 MiB", "9 MiB"])
def test_a_shard_that_a_long_metadata_names_is_missed(items: int, tmp_path: Path) -> None:
    files = write_two(tmp_path, "torch_distributed")
    named = {f"{'model.layers.weight.' * 5}{item}": f"__{item % 3}_0.distcp" for item in range(items)}
    (tmp_path / "step-200/.metadata").write_bytes(pickle.dumps({**named, "last": "__3_0.distcp"}))
    set_times(tmp_path, files, 200)
    assert judge(tmp_path).checkpoint.missing == ("step-200/__3_0.distcp",)
    assert verify_path(tmp_path).resume == str(tmp_path / "step-100")


def test_a_name_between_two_pieces_of_a_long_metadata_is_found(tmp_path: Path) -> None:
    name = b"__12_0.distcp"
    for before in (0, 1, 7, len(name) - 1, len(name)):
        text = bytes(SEARCHED_BYTES - before) + name + bytes(100)
        write_checkpoint(tmp_path, {"step-1/.metadata": text})
        assert read_index(str(tmp_path), "step-1/.metadata", ()).shards == ("step-1/__12_0.distcp",)


def test_a_tensor_that_its_shard_may_share_with_another_is_a_doubt(tmp_path: Path) -> None:
    files = write_two(tmp_path, "hugging_face")
    (index,) = (name for name in files if name.endswith("model.safetensors.index.json"))
    index_of_shards = json.loads(files[index])
    index_of_shards["weight_map"]["head"] = "model-00001-of-00003.safetensors"
    (tmp_path / index).write_text(json.dumps(index_of_shards))
    set_times(tmp_path, files, 200)
    found = judge(tmp_path).checkpoint
    reason = "names the tensor 'head' in model-00001-of-00003.safetensors, which has none of this name"
    assert (found.valid, reason in (found.reason or "")) == (None, True), found.reason


def test_shards_at_the_top_of_the_folder_are_compared_with_their_index(tmp_path: Path) -> None:
    for path, content in LAYOUTS["hugging_face"](100).items():
        (tmp_path / path.rpartition("/")[2]).write_bytes(content)
    index = "model.safetensors.index.json"
    assert check_part(str(tmp_path), index, inside=False).state == "valid"
    (tmp_path / "model-00002-of-00003.safetensors").rename(tmp_path / "model-00001-of-00003.safetensors")
    assert check_part(str(tmp_path), index, inside=False).state == "invalid"


@pytest.mark.parametrize("note", ["checkpoint_200.yaml", "checkpoint_200.pt.sha256", "checkpoint_200.png"])
def test_a_note_beside_a_checkpoint_needs_no_proof(note: str, tmp_path: Path) -> None:
    write_two(tmp_path, "one_file")
    (tmp_path / note).write_bytes(b"\x89 note")
    set_times(tmp_path, {note: b""}, 200)
    found, seen = judge(tmp_path).checkpoint, sidecar(tmp_path).last
    assert verify_path(tmp_path).flaws == []
    assert (found.name, found.valid, found.reason) == ("checkpoint_200.pt", True, None)
    assert (seen.name, seen.valid, seen.reason) == ("checkpoint_200.pt", True, None)


def test_a_lone_set_of_ranks_is_undecided(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LAYOUTS["ranks"](100))
    found = judge(tmp_path).checkpoint
    assert (found.state, found.valid) == ("complete", None)
    assert found.reason == "nothing states how many files like checkpoint_step100_rank0.pt there must be"


def test_a_resume_avoids_a_checkpoint_that_lacks_files_of_an_earlier_one(tmp_path: Path) -> None:
    for name in list(write_two(tmp_path, "ranks"))[2:]:
        (tmp_path / name).unlink()
    found = verify_path(tmp_path)
    assert (found.name, found.verdict) == ("checkpoint_step200_rank*.pt", "cannot tell")
    assert (found.resume, found.resume_is_whole) == (str(tmp_path / "checkpoint_step100_rank*.pt"), False)
