"""Checkpoints as frameworks lay them out: each function writes one save."""

import json
import pickle
from collections.abc import Callable

from tests.exporter.files.checkpoints.checkpoint_trees import Folder

Write = Callable[[Folder, int], None]


def one_file(folder: Folder, step: int) -> None:
    folder.write(f"checkpoint_{step}.pt")


def epochs(folder: Folder, step: int) -> None:
    folder.write(f"ckpt_epoch_{step}.pt")


def short_epochs(folder: Folder, step: int) -> None:
    folder.write(f"model_ep{step}.pth")


def keras(folder: Folder, step: int) -> None:
    folder.write(f"model.{step:02}-0.{step:02}.keras")


def composer(folder: Folder, step: int) -> None:
    folder.write_all(f"ep{step // 2}-ba{step}-rank{rank}.pt" for rank in range(2))


def composer_directory(folder: Folder, step: int) -> None:
    folder.write(f"ep{step // 2}-ba{step}/__0_0.distcp")
    folder.write(f"ep{step // 2}-ba{step}/.metadata", pickle.dumps({"w": "__0_0.distcp"}))


def step_directory(folder: Folder, step: int) -> None:
    folder.write(f"step_{step}/model.pt")


def epoch_directory(folder: Folder, step: int) -> None:
    folder.write(f"epoch_{step}/model.pt")


def hugging_face(folder: Folder, step: int) -> None:
    shards = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    folder.write_all(f"checkpoint-{step}/{name}" for name in shards)
    index = {"metadata": {}, "weight_map": {f"layers.{number}": name for number, name in enumerate(shards)}}
    folder.write(f"checkpoint-{step}/model.safetensors.index.json", json.dumps(index))
    folder.write_all(f"checkpoint-{step}/{name}" for name in ("optimizer.pt", "trainer_state.json", "rng_state_0.pth"))


def megatron(folder: Folder, step: int) -> None:
    for rank in range(2):
        folder.write(f"iter_{step:07}/mp_rank_{rank:02}/model_optim_rng.pt")
    folder.write("latest_checkpointed_iteration.txt", str(step))


def deepspeed(folder: Folder, step: int) -> None:
    folder.write(f"global_step{step}/mp_rank_00_model_states.pt")
    for rank in range(4):
        folder.write(f"global_step{step}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    folder.write("latest", f"global_step{step}")


def torch_distributed(folder: Folder, step: int) -> None:
    folder.write_all(f"step-{step}/__{rank}_0.distcp" for rank in range(4))
    folder.write(f"step-{step}/.metadata", pickle.dumps({f"w{rank}": f"__{rank}_0.distcp" for rank in range(4)}))


def orbax(folder: Folder, step: int) -> None:
    folder.write(f"{step}/state/ocdbt.process_0/d/0f3a9c2b7d11e4f5a6b7{step:04x}")
    folder.write_all([f"{step}/_CHECKPOINT_METADATA", f"{step}/commit_success.txt"])


def lightning(folder: Folder, step: int) -> None:
    folder.write(f"epoch={step // 10}-step={step}.ckpt")
    folder.write("last.ckpt")


def ranks(folder: Folder, step: int) -> None:
    folder.write_all(f"ckpt_step{step}_rank{rank}.pt" for rank in range(8))


def tensorflow(folder: Folder, step: int) -> None:
    folder.write_all(f"model.ckpt-{step}.{end}" for end in ("index", "meta", "data-00000-of-00001"))
    folder.write("checkpoint", f'model_checkpoint_path: "model.ckpt-{step}"')


LAYOUTS: dict[str, Write] = {
    write.__name__: write
    for write in (
        *(one_file, epochs, step_directory, epoch_directory, hugging_face, megatron, deepspeed, torch_distributed),
        *(orbax, lightning, ranks, tensorflow, short_epochs, keras, composer, composer_directory),
    )
}
