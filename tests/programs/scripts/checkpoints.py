"""Write one checkpoint of each kind at the step given into the folder given, as the library itself writes it."""

import argparse
import json
import os
import pickle
import sys
import tarfile
from pathlib import Path

import accelerate
import joblib
import keras
import lightgbm
import lightning
import numpy
import orbax.checkpoint
import tensorflow
import torch
import torch.distributed.checkpoint
import transformers
import xgboost
import zarr
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

ROOT, STEP = Path(sys.argv[1]), int(sys.argv[2])
CHANCE = numpy.random.default_rng(STEP)


def place(kind: str, name: str) -> Path:
    path = ROOT / kind / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def distributed(rank: int, folder: str) -> None:
    """One rank of two that save a PyTorch distributed checkpoint together."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + STEP % 100)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    state = {f"w{number}": distribute_tensor(torch.randn(32, 16), mesh, [Shard(0)]) for number in range(3)}
    torch.distributed.checkpoint.save({**state, "step": STEP}, checkpoint_id=folder)
    torch.distributed.destroy_process_group()


def of_torch() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    weights, state = model.state_dict(), optimizer.state_dict()
    torch.save({"model": weights, "optimizer": state}, place("torch", f"checkpoint_{STEP}.pt"))
    old = place("torch before 1.6", f"checkpoint_{STEP}.pt")
    torch.save({"model": weights}, old, _use_new_zipfile_serialization=False)
    save_file(weights, place("safetensors", f"checkpoint_{STEP}.safetensors"))
    names = list(weights)
    for kind, extension, save in (("hf bin", "bin", torch.save), ("hf", "safetensors", save_file)):
        index = {}
        for number, part in enumerate((names[:2], names[2:]), 1):
            name = f"model-{number:05}-of-00002.{extension}"
            save({key: weights[key].clone() for key in part}, place(kind, f"checkpoint-{STEP}/{name}"))
            index |= dict.fromkeys(part, name)
        folder = place(kind, f"checkpoint-{STEP}/x").parent
        (folder / f"model.{extension}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
        torch.save(state, folder / "optimizer.bin")
        torch.save({"last_epoch": 1}, folder / "scheduler.pt")
        (folder / "config.json").write_text(json.dumps({"model_type": "x"}))
    sizes = {"module": weights, "dp_world_size": 4, "mp_world_size": 1}
    torch.save(sizes, place("deepspeed", f"global_step{STEP}/mp_rank_00_model_states.pt"))
    arguments = argparse.Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=1)
    for rank in range(4):
        shard = {"optimizer_state_dict": {"fp32": [torch.randn(100)]}}
        torch.save(shard, place("deepspeed", f"global_step{STEP}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
    for rank in range(2):
        shard = {"args": arguments, "model": weights}
        torch.save(shard, place("megatron", f"iter_{STEP:07}/mp_rank_{rank:02}/model_optim_rng.pt"))
    with tarfile.open(place("nemo", f"model_{STEP}.nemo"), "w:") as archive:  # as NeMo's save_restore_connector does
        for name in ("config.json", "optimizer.bin"):
            archive.add(place("hf bin", f"checkpoint-{STEP}/{name}"), arcname=f"./{name}")
    torch.multiprocessing.spawn(distributed, args=(str(place("dcp", f"step-{STEP}")),), nprocs=2)


def of_others() -> None:
    tree = {"w": CHANCE.normal(size=(64, 64)).astype("f4"), "b": numpy.arange(10.0)}
    checkpointer = orbax.checkpoint.StandardCheckpointer()
    checkpointer.save(place("orbax", str(STEP)).absolute(), tree)
    checkpointer.wait_until_finished()
    handler = orbax.checkpoint.PyTreeCheckpointHandler(use_ocdbt=False)
    orbax.checkpoint.Checkpointer(handler).save(place("orbax zarr", str(STEP)).absolute(), tree)
    for version in (2, 3):
        group = zarr.open_group(place(f"zarr {version}", f"checkpoint_{STEP}.zarr"), mode="w", zarr_format=version)
        group.create_array("packed", shape=(50, 40), chunks=(20, 20), dtype="f4")[:] = CHANCE.normal(size=(50, 40))
        raw = group.create_array("raw", shape=(50,), chunks=(20,), dtype="f8", compressors=None)
        raw[:] = CHANCE.normal(size=50)
    joblib.dump({"coefficients": CHANCE.normal(size=100)}, place("joblib", f"model_{STEP}.pkl"))
    place("pickle", f"model_{STEP}.pkl").write_bytes(pickle.dumps({"coefficients": list(CHANCE.normal(size=100))}))
    numpy.savez(place("npz", f"checkpoint_{STEP}.npz"), a=CHANCE.normal(size=(9, 9)), b=numpy.arange(5))


def of_trees() -> None:
    values, target = CHANCE.normal(size=(200, 5)), CHANCE.normal(size=200)
    booster = xgboost.train({"max_depth": 3}, xgboost.DMatrix(values, target), num_boost_round=4)
    for extension in ("ubj", "json"):
        booster.save_model(place(f"xgboost {extension}", f"model_{STEP}.{extension}"))
    trees = lightgbm.train({"verbose": -1, "min_data_in_leaf": 5}, lightgbm.Dataset(values, target), 4)
    trees.save_model(place("lightgbm", f"model_{STEP}.txt"))


class Model(lightning.LightningModule):
    """Trained by Lightning and by the Trainer of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return self(batch[0])["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def of_trainers() -> None:
    model: torch.nn.Module = torch.nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, _ = accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    accelerator.backward(model(torch.randn(4, 16)).sum())
    optimizer.step()
    accelerator.save_state(str(place("accelerate", f"checkpoint_{STEP}")))
    rows = torch.randn(STEP, 16)
    saver = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=place("lightning", "x").parent, save_top_k=-1, every_n_train_steps=STEP
    )
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=1)
    trainer = lightning.Trainer(max_epochs=1, logger=False, accelerator="cpu", callbacks=[saver])
    trainer.fit(Model(), batches)
    arguments = transformers.TrainingArguments(
        str(place("hf trainer", "x").parent), max_steps=STEP, save_steps=STEP, report_to="none", use_cpu=True
    )
    transformers.Trainer(Model(), arguments, train_dataset=[{"x": row} for row in rows]).train()


def of_tensorflow() -> None:
    model = keras.Sequential([keras.layers.Input((16,)), keras.layers.Dense(64), keras.layers.Dense(4)])
    model.compile("adam", "mse")
    model.save(place("keras", f"checkpoint_{STEP}.keras"))
    model.save_weights(place("keras weights", f"checkpoint_{STEP}.weights.h5"))
    checkpoint = tensorflow.train.Checkpoint(model=model, step=tensorflow.Variable(STEP))
    checkpoint.write(str(place("tensorflow", f"ckpt-{STEP}")))


if __name__ == "__main__":
    of_torch()
    of_trees()
    of_trainers()
    of_tensorflow()
    of_others()
