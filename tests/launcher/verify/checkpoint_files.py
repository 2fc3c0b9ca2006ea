"""Checkpoints of the common layouts, as small files that their formats accept: each function writes one save."""

import argparse
import gzip
import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from exporter.files.formats.tfrecord import crc32c
from tests.exporter.files.checkpoints.checkpoint_trees import safetensors_bytes

Files = Mapping[str, bytes]
ZSTD_CHUNK = b"\x28\xb5\x2f\xfd\x20\x28\x41\x01\x00" + bytes(range(40))  # a frame with one raw block


def torch_bytes(value: object, size: int = 200) -> bytes:
    """An archive like those of ``torch.save``, whose object is ``value``."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, content in (("data.pkl", pickle.dumps(value, 2)), ("data/0", b"\7" * size), ("version", b"3\n")):
            archive.writestr(f"archive/{name}", content)
    return out.getvalue()


class _StorageInfo:
    """Stands for the class of that name in torch."""

    def __init__(self, relative_path: str, offset: int, length: int) -> None:
        self.relative_path, self.offset, self.length = relative_path, offset, length


def one_file(step: int) -> Files:
    return {f"checkpoint_{step}.pt": torch_bytes({"step": step})}


def one_safetensors(step: int) -> Files:
    return {f"checkpoint_{step}.safetensors": safetensors_bytes(50)}


def hugging_face(step: int, extension: str = "safetensors") -> Files:
    tensors = {f"layers.{number}": f"model-{number:05}-of-00003.{extension}" for number in (1, 2, 3)}
    files = {
        shard: safetensors_bytes(50, tensor) if extension == "safetensors" else torch_bytes({tensor: 7})
        for tensor, shard in tensors.items()
    }
    files[f"model.{extension}.index.json"] = json.dumps({"metadata": {}, "weight_map": tensors}).encode()
    files |= dict.fromkeys(("optimizer.bin", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"), torch_bytes({}))
    files["trainer_state.json"] = json.dumps({"global_step": step, "log_history": []}).encode()
    return {f"checkpoint-{step}/{name}": content for name, content in files.items()}


def hugging_face_bin(step: int) -> Files:
    return hugging_face(step, "bin")


def deepspeed(step: int) -> Files:
    files = {"mp_rank_00_model_states.pt": torch_bytes({"dp_world_size": 4, "mp_world_size": 1})}
    files |= {f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": torch_bytes({}) for rank in range(4)}
    return {f"global_step{step}/{name}": content for name, content in files.items()}


def megatron(step: int) -> Files:
    args = argparse.Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    return {
        f"iter_{step:07}/mp_rank_{tensor:02}_{pipeline:03}/model_optim_rng.pt": torch_bytes({"args": args})
        for tensor in range(2)
        for pipeline in range(2)
    }


def megatron_experts(step: int) -> Files:
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 4}
    args = argparse.Namespace(**sizes)
    return {
        f"iter_{step:07}/mp_rank_{tensor:02}_{expert:03}/model_optim_rng.pt": torch_bytes({"args": args})
        for tensor in range(2)
        for expert in range(4)
    }


def ranks(step: int) -> Files:
    return {f"checkpoint_step{step}_rank{rank}.pt": torch_bytes({}) for rank in range(4)}


def torch_distributed(step: int) -> Files:
    item = torch_bytes({}, 60)
    shards = {f"__{rank}_0.distcp": item * 3 for rank in range(3)}
    infos = [_StorageInfo(name, number * len(item), len(item)) for name in shards for number in range(3)]
    files = shards | {".metadata": pickle.dumps({"storage_data": dict(enumerate(infos))})}
    return {f"step-{step}/{name}": content for name, content in files.items()}


def megatron_core(step: int) -> Files:
    files = {name.replace(f"step-{step}", f"iter_{step:07}"): text for name, text in torch_distributed(step).items()}
    files[f"iter_{step:07}/common.pt"] = torch_bytes({"iteration": step})
    files[f"iter_{step:07}/metadata.json"] = b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    return files


def zarr(step: int) -> Files:
    files = {".zgroup": b'{"zarr_format": 2}'}
    for name, compressor in (("plain", None), ("packed", {"id": "gzip", "level": 1})):
        meta = {"shape": [30, 20], "chunks": [10, 20], "dtype": "<f4", "fill_value": None, "filters": None}
        files[f"{name}/.zarray"] = json.dumps({**meta, "compressor": compressor, "zarr_format": 2}).encode()
        values = bytes(range(200)) * 4
        files |= {f"{name}/{row}.0": gzip.compress(values) if compressor else values for row in range(3)}
    return {f"checkpoint_{step}.zarr/{name}": content for name, content in files.items()}


def zarr_sharded(step: int) -> Files:
    """A group of Zarr 3 with one array, whose two shards hold two chunks each, the second one left out."""
    inner = {"chunk_shape": [10], "codecs": [{"name": "bytes"}, {"name": "zstd"}]}
    array = {
        "shape": [40],
        "data_type": "float32",
        "fill_value": None,
        "zarr_format": 3,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [20]}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {**inner, "index_codecs": [{"name": "bytes"}, {"name": "crc32c"}]},
            }
        ],
    }
    index = struct.pack("<4Q", 0, len(ZSTD_CHUNK), (1 << 64) - 1, (1 << 64) - 1)
    shard = ZSTD_CHUNK + index + crc32c(index).to_bytes(4, "little")
    files = {"w/zarr.json": json.dumps(array).encode(), "w/c/0": shard, "w/c/1": shard}
    return {f"checkpoint_{step}.zarr/{name}": content for name, content in files.items()}


def zarr_checksums(step: int) -> Files:
    """A group of Zarr 3 whose chunks end with a checksum."""
    array = {
        "shape": [20],
        "data_type": "float32",
        "fill_value": None,
        "zarr_format": 3,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [10]}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "bytes"}, {"name": "zstd"}, {"name": "crc32c"}],
    }
    chunk = ZSTD_CHUNK + crc32c(ZSTD_CHUNK).to_bytes(4, "little")
    files = {"w/zarr.json": json.dumps(array).encode(), "w/c/0": chunk, "w/c/1": chunk}
    return {f"checkpoint_{step}.zarr/{name}": content for name, content in files.items()}


def orbax_zarr(step: int) -> Files:
    tree = {"('w',)": {"key_metadata": [{"key": "w", "key_type": 2}]}}
    files = {
        "_METADATA": json.dumps({"tree_metadata": tree, "use_ocdbt": False, "use_zarr3": True}).encode(),
        "_CHECKPOINT_METADATA": b'{"item_handlers": "x"}',
        "w/c/0": gzip.compress(bytes(range(80))),
    }
    array = {
        "shape": [10],
        "data_type": "float64",
        "fill_value": None,
        "zarr_format": 3,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [10]}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "bytes"}, {"name": "gzip"}],
    }
    files["w/zarr.json"] = json.dumps(array).encode()
    return {f"{step}/{name}": content for name, content in files.items()}


def ocdbt_node(magic: int, body: bytes) -> bytes:
    """A node of TensorStore's OCDBT, as far as its frame."""
    head = magic.to_bytes(4, "big") + (len(body) + 16).to_bytes(8, "little") + body
    return head + crc32c(head).to_bytes(4, "little")


def orbax(step: int) -> Files:
    files = {
        "_METADATA": b'{"tree_metadata": {}, "use_ocdbt": true}',
        "_CHECKPOINT_METADATA": b'{"item_handlers": "x"}',
        "manifest.ocdbt": ocdbt_node(0x0CDB3A2A, b"\0\1" + bytes(60)),
        f"d/{step:032x}": ocdbt_node(0x0CDB20DE, b"\0\1" + bytes(90)),
    }
    return {f"{step}/{name}": content for name, content in files.items()}


LAYOUTS: dict[str, Callable[[int], Files]] = {
    write.__name__: write
    for write in (
        *(one_file, one_safetensors, hugging_face, hugging_face_bin, deepspeed, megatron, megatron_experts, ranks),
        *(torch_distributed, megatron_core, zarr, zarr_sharded, zarr_checksums, orbax_zarr, orbax),
    )
}


def write_checkpoint(folder: Path, files: Files) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
