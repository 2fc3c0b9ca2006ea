"""What the names of checkpoint files show: which form one checkpoint, its step, and missing ranks."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.files.checkpoints.names import (
    common_name,
    is_copy_of,
    is_part,
    is_weights,
    missing_numbers,
    missing_ranks,
    name_shape,
    parse_name,
)
from tests.exporter.files.checkpoints.checkpoint_entries import HOSTILE


@pytest.mark.parametrize(
    ("numbers", "missing"),
    [
        ((0, 1, 2, 4, 5, 6, 7), [3]),
        ((0, 2, 3), [1]),
        ((0, 1, 4, 5), []),  # one of two replicas
        ((*range(8), *range(16, 24)), []),
        ((0, 8, 16), []),  # the first of each node
        ((1, 2, 4, 5, 6), []),
        ((4, 5, 7), []),  # those of another node
        ((0, 1, 2), []),
        ((0, 20_001), []),
    ],
)
def test_ranks_between_others_are_missing_unless_only_some_write(numbers: tuple[int, ...], missing: list[int]) -> None:
    assert list(missing_ranks([f"s/model_rank{number}.pt" for number in numbers])) == [
        f"s/model_rank{number}.pt" for number in missing
    ]
    assert list(missing_ranks([f"s/rank_{number:03}.pt" for number in numbers])) == [
        f"s/rank_{number:03}.pt" for number in missing
    ]
    assert list(missing_ranks([f"checkpoint_node{number}.pt" for number in numbers])) == []


@pytest.mark.parametrize(
    ("name", "key", "step", "epoch"),
    [
        ("checkpoint_12.pt", "step 12", 12, None),
        ("ckpt_epoch_3.pt", "epoch 3", None, 3),
        ("iter_0000100", "step 100", 100, None),
        ("global_step100", "step 100", 100, None),
        ("epoch=3-step=100.ckpt", "epoch 3 step 100", 100, 3),
        ("epoch=3-val_loss=0.25.ckpt", "epoch 3", None, 3),
        ("resnet50_epoch_3.pt", "epoch 3", None, 3),
        ("llama-7b-step-20.pt", "step 20", 20, None),
        ("model_world_size_8_rank_3.pt", "fixed model", None, None),
        ("model-00001-of-00004.safetensors", "fixed model", None, None),
        ("model.safetensors.index.json", "fixed model", None, None),
        ("checkpoint_worker_3.json", "fixed checkpoint", None, None),
        ("checkpoint_20240512_101010.pt", "numbers 20240512 101010", None, None),
        ("2025-11-30_12-00-05.pt", "numbers 2025 11 30 12 00 05", None, None),
        ("CKPT+2025-11-30+12-00-00+00", "numbers 2025 11 30 12 00 00 00", None, None),
        ("rl_model_20000000_steps.zip", "step 20000000", 20_000_000, None),
        ("global_step500_universal", "universal of step 500", 500, None),
        ("checkpoint-500-merged", "merged of step 500", 500, None),
        ("checkpoint_500_merged_rank0.safetensors", "merged of step 500", 500, None),
        ("merged_model_step_3.pt", "step 3", 3, None),
        ("llama-2-7b-hf_step_3.pt", "step 3", 3, None),
        ("epoch=3-step=100-v1.ckpt", "epoch 3 step 100 v1", 100, 3),
        ("checkpoint_12.pt.done", "step 12", 12, None),
        ("model_ep5.pth", "epoch 5", None, 5),
        ("ep039-loss0.02-val_loss0.03.h5", "epoch 39", None, 39),
        ("model_step5_ep2.pt", "step 5", 5, None),
        ("model_tp0_pp1_ep2.pt", "fixed model", None, None),
        ("cp-0004.weights.h5", "step 4", 4, None),
        ("cp-0004.ckpt.index", "step 4", 4, None),
        ("cp-0004.ckpt.data-00000-of-00001", "step 4", 4, None),
        ("step_100_dp1_cp0.pt", "step 100", 100, None),
        ("model.01-0.50.keras", "step 1", 1, None),
        ("weights.02.hdf5", "step 2", 2, None),
        ("model.12.weights.h5", "step 12", 12, None),
        ("model.1.pt", "fixed model", None, None),
        ("model.1000.pt", "step 1000", 1000, None),
        ("ckpt.10.pt", "step 10", 10, None),
        ("snapshot.3.tar", "step 3", 3, None),
        ("model.step.20.pt", "step 20", 20, None),
        ("epoch.10.pt", "epoch 10", None, 10),
        ("pytorch_model.1.bin", "fixed model", None, None),
        ("model_200.ema.1.pt", "step 200", 200, None),
        ("checkpoint.pt.1", "fixed checkpoint.pt.1", None, None),
        ("ep0-ba100-rank3.pt", "epoch 0 step 100", 100, 0),
    ],
)
def test_a_name_shows_checkpoint_step_and_epoch(name: str, key: str, step: int | None, epoch: int | None) -> None:
    found = parse_name(name)
    assert found is not None
    assert (found.key, found.step, found.epoch) == (key, step, epoch)


@pytest.mark.parametrize(
    ("name", "original", "is_copy"),
    [
        ("global_step500_universal", "global_step500", True),
        ("checkpoint-500-merged.safetensors", "checkpoint-500", True),
        ("model-5-merged-00001-of-00002.safetensors", "model-5-00001-of-00003.safetensors", True),
        ("checkpoint-500.hf", "checkpoint-500.pt", True),
        ("step_5_hf.done", "step_5", True),
        ("epoch=3-step=100.ckpt.consolidated", "epoch=3-step=100.ckpt", True),
        ("step_500.pt.merged", "step_500.pt", True),
        ("iter_500_hf", "iter_0000500", True),
        ("checkpoint-5-hf", "checkpoint-0005.pt", True),
        ("step5_hf", "global_step5", True),
        ("actor_step_5_hf", "step_5", False),
        ("actor_5_hf", "critic_5", False),
        ("model_5_hf", "model_5_hf", False),
        ("checkpoint-500", "checkpoint-500-merged", False),
    ],
)
def test_a_copy_has_the_name_of_its_original(name: str, original: str, is_copy: bool) -> None:
    assert is_copy_of(name, original) == is_copy


@pytest.mark.parametrize(
    "name",
    [
        *("latest", "latest_checkpointed_iteration.txt", "checkpoint", "config.json", "README.md", "tokenizer.model"),
        *("events.out.tfevents.1700000000.node01", "training_args.bin", "train.log"),
    ],
)
def test_other_files_next_to_checkpoints_are_not_checkpoints(name: str) -> None:
    assert parse_name(name) is None


def test_other_directories_next_to_checkpoints_are_not_checkpoints() -> None:
    assert [parse_name(name, True) for name in ("runs", "logs", "wandb")] == [None] * 3


def test_shard_numbers_reveal_missing_shards() -> None:
    assert list(missing_numbers(["d/a-00001-of-00003.x", "d/a-00003-of-00003.x"])) == ["d/a-00002-of-00003.x"]
    assert list(missing_numbers(["a-0-of-2", "b-1-of-1"])) == ["a-1-of-2"]
    assert list(missing_numbers(["model_world_size_2_rank_1.pt"])) == ["model_world_size_2_rank_0.pt"]
    assert list(missing_numbers(["a-1-of-999999999", "a-9-of-3"])) == []


def test_a_pipeline_rank_of_nanotron_has_layers_of_its_own() -> None:
    names = [
        f"9/model/decoder/{layer}/w_pp-rank-{layer}-of-2_tp-rank-{rank}-of-2.safetensors"
        for layer in range(2)
        for rank in range(2)
    ]
    assert list(missing_numbers(names)) == []
    assert list(missing_numbers(names[:3])) == [names[3]]
    assert list(missing_numbers(names[:2])) == [name.replace("pp-rank-0", "pp-rank-1") for name in names[1:2]]
    assert list(missing_numbers(names[2:])) == [name.replace("pp-rank-1", "pp-rank-0") for name in names[3:]]


def test_shards_keep_their_numbers_in_a_shape() -> None:
    name = parse_name("ckpt_step3_rank3.pt")
    assert name is not None
    assert name_shape("ckpt_step3_rank3.pt", name) == "ckpt_step#_rank3.pt"
    assert common_name(["ckpt_step3_rank0.pt", "ckpt_step3_rank1.pt"]) == "ckpt_step3_rank*.pt"


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (("checkpoint_500.pt", "opt_500.pt"), "checkpoint_500.pt"),
        (("optimizer_500.pt", "epoch_500.pt"), "epoch_500.pt"),
        (("ckpt_500.safetensors", "ckpt_500.yaml"), "ckpt_500.safetensors"),
        (("ckpt_500.json", "ckpt_500.pkl"), "ckpt_500.pkl"),
        (("checkpoint-500", "checkpoint-500.json"), "checkpoint-500"),
        (("model.ckpt-7.index", "model.ckpt-7.data-00000-of-00001"), "model.ckpt-7"),
    ],
)
def test_a_checkpoint_has_the_name_of_its_model(names: tuple[str, ...], name: str) -> None:
    assert common_name(names) == common_name(names[::-1]) == name


@given(HOSTILE, st.booleans())
@example("checkpoint_" + "9" * 200 + ".pt", False)
@example("²", False)
def test_parsing_any_name_is_deterministic(name: str, directory: bool) -> None:
    assert parse_name.__wrapped__(name, directory) == parse_name(name, directory)
    found = parse_name(name, directory)
    if found is not None:
        name_shape(name, found)
    list(missing_numbers([name]))
    common_name([name, name + "x"])


def test_logs_are_no_parts_of_a_checkpoint() -> None:
    names = ("step-5/events.out.tfevents.17.gn1", "step-5/train.log", "step-5/config.json", "step-5/optimizer.pt")
    assert [is_part(name) for name in names] == [False, False, True, True]


def test_the_state_of_an_optimizer_is_no_model() -> None:
    names = ("step-5/optimizer.pt", "step-5/optim_states.pt", "step-5/optimal.pt")
    assert [is_weights(name) for name in names] == [False, False, True]
