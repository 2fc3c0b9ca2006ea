"""Which files form one checkpoint: missing, added, rewritten and linked ones."""

import json
import os
from typing import NamedTuple

import pytest

from tests.exporter.files.checkpoints.checkpoint_layouts import (
    Write,
    deepspeed,
    hugging_face,
    megatron,
    orbax,
    ranks,
    torch_distributed,
)
from tests.exporter.files.checkpoints.checkpoint_trees import Folder


def test_a_marker_file_makes_a_checkpoint_complete(folder: Folder) -> None:
    folder.write_all(f"step_1/__{rank}_0.distcp" for rank in range(2))
    assert folder.poll() == []
    folder.write("step_1/.metadata")
    assert folder.poll() == ["saved step_1"]


def test_each_rewrite_of_the_same_name_counts(folder: Folder) -> None:
    for size in (100, 100, 90, 120):
        folder.write("checkpoint.pt", b"y" * size)
        assert folder.poll_for(100) == ["saved checkpoint.pt"]
    assert folder.history.total == 4
    assert folder.history.interval_s == 100.0


def test_a_replaced_file_counts_at_once(folder: Folder) -> None:
    for _ in range(3):
        folder.write("checkpoint.pt.tmp")
        folder.poll()
        folder.rename("checkpoint.pt.tmp", "checkpoint.pt")
        assert folder.poll() == ["saved checkpoint.pt"]
    assert folder.history.total == 3


def test_a_pausing_writer_counts_once_and_later_pauses_are_waited_for(folder: Folder) -> None:
    folder.write("checkpoint_1.pt", 100)
    assert folder.poll_for(25) == ["saved checkpoint_1.pt"]
    folder.write("checkpoint_1.pt", 200)
    assert folder.poll_for(100) == []
    last = folder.last
    assert (last.bytes, folder.history.total) == (200, 1)
    folder.write("checkpoint_2.pt", 100)
    assert folder.poll_for(25) == []
    folder.write("checkpoint_2.pt", 200)
    assert folder.poll_for(100) == ["saved checkpoint_2.pt"]


def test_files_added_later_do_not_make_a_new_checkpoint(folder: Folder) -> None:
    hugging_face(folder, 10)
    folder.poll_for(300)
    folder.write("checkpoint-10/README.md")
    folder.write("checkpoint-10/eval.json")
    assert folder.poll_for(400) == []
    folder.write("checkpoint-20/model.safetensors")
    assert folder.poll_for(30) != []  # nor does the time between them count as a pause of the writer


@pytest.mark.parametrize("name", ["eval_results.json", "results.bin"])
def test_files_added_to_an_older_checkpoint_do_not_make_it_the_newest(folder: Folder, name: str) -> None:
    for step in (10, 20):
        hugging_face(folder, step)
        folder.poll_for(300)
    folder.write(f"checkpoint-10/{name}")
    assert folder.poll_for(100) == []
    assert (folder.last.step, folder.last_complete.step) == (20, 20)
    folder.restart()
    folder.poll()
    assert (folder.last.step, folder.last_complete.step) == (20, 20)


def test_a_step_rewritten_after_a_resume_counts_again(folder: Folder) -> None:
    for _ in range(2):
        ranks(folder, 10)
        folder.poll_for(100)
    assert folder.history.total == 2


def test_a_link_or_copy_named_last_is_no_separate_checkpoint(folder: Folder) -> None:
    for step in (1, 2, 3):
        path = folder.write(f"epoch={step}-step={step}00.ckpt")
        for name, make in (("last.ckpt", os.link), ("best.ckpt", os.symlink)):
            (folder.path / name).unlink(missing_ok=True)
            make(path, folder.path / name)
        folder.poll()
        folder.write("latest.ckpt")
        folder.poll_for(200)
        last = folder.last
        assert (last.step, folder.history.total) == (step * 100, step)


def test_a_copy_in_another_form_is_no_separate_checkpoint(folder: Folder) -> None:
    for step in (100, 200, 300):
        deepspeed(folder, step)
        folder.poll_for(100)
        folder.write(f"global_step{step}_universal/zero/fp32.pt")
        folder.poll_for(100)
    assert [event.kind for event in folder.happened] == ["saved"] * 3
    assert (folder.last.name, folder.history.interval_s) == ("global_step300", 200.0)


@pytest.mark.parametrize("size", [30, 900])
@pytest.mark.parametrize("pause_s", [5, 60, 300])
def test_an_original_after_its_copy_is_the_same_checkpoint(size: int, pause_s: int, folder: Folder) -> None:
    for step in (100, 200, 300, 400):
        folder.write(f"step_{step}_hf/model.safetensors")
        found = folder.poll_for(pause_s)
        folder.write_all((f"step_{step}/model_rank{rank}.pt" for rank in range(2)), size)
        found += folder.poll_for(25)
        last = folder.last
        assert [event.split()[0] for event in found] == ["saved"]
        assert (last.name, last.state, last.files, last.odd) == (f"step_{step}", "complete", 2, None)
        assert not folder.checkpoints.writing
        assert folder.poll_for(1000) == []
    assert (folder.history.total, folder.history.interval_steps) == (4, 100.0)


@pytest.mark.parametrize(
    ("model", "other"),
    [
        ("model_{}_hf/model.safetensors", "optimizer_{}.pt"),
        ("step_{}_hf/model.safetensors", "step_{}/optimizer.pt"),
        ("step_{}_hf/model.safetensors", "step_{}.done"),
        ("actor_{}_merged.safetensors", "critic_{}.safetensors"),
    ],
)
def test_what_is_named_like_a_copy_is_part_of_a_save_without_its_original(
    model: str, other: str, folder: Folder
) -> None:
    for step in (100, 200, 300):
        for name in sorted((model, other), reverse=step == 200):
            folder.write(name.format(step))
            folder.poll_for(5)
        folder.poll_for(100)
    assert [event.kind for event in folder.happened] == ["saved"] * 3
    assert (folder.last.step, folder.last.files) == (300, 2)


def test_a_last_file_that_is_written_more_often_counts(folder: Folder) -> None:
    folder.write("step=1.ckpt")
    folder.poll_for(300)
    folder.write("last.ckpt")
    folder.poll_for(300)
    assert folder.history.total == 2


class Part(NamedTuple):
    """An incomplete checkpoint."""

    write: Write
    leave_out: str
    missing: int = 1
    before: int = 1  # complete checkpoints before it


PARTS = {
    "number of many": Part(hugging_face, "checkpoint-{}/model-00002-of-00003.safetensors", before=0),
    "rank": Part(ranks, "ckpt_step{}_rank3.pt"),
    "rank of the first": Part(ranks, "ckpt_step{}_rank3.pt", before=0),
    "deepspeed": Part(deepspeed, "global_step{}/zero_pp_rank_2_mp_rank_00_optim_states.pt", before=0),
    "shard before a marker": Part(torch_distributed, "step-{}/__2_0.distcp", before=0),
    "last shard of its own list": Part(torch_distributed, "step-{}/__3_0.distcp", before=0),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_missing_files_are_reported_once(folder: Folder, part: Part) -> None:
    for step in range(1, part.before + 1):
        part.write(folder, step)
        folder.poll_for(60)
    assert folder.history.total == part.before
    part.write(folder, 100)
    gone = part.leave_out.format(100)
    folder.remove(gone)
    found = folder.poll_for(120)
    assert [event.split()[0] for event in found] == ["incomplete"]
    last = folder.last
    assert (last.state, last.missing_count) == ("incomplete", part.missing)
    assert last.missing[0].rpartition("/")[2].replace("#", "100") == gone.rpartition("/")[2]
    assert (folder.history.total, folder.checkpoints.writing) == (part.before, False)
    folder.write(gone)
    assert [event.split()[0] for event in folder.poll_for(120)] == ["saved"]
    assert (folder.last.missing_count, folder.history.total) == (0, part.before + 1)


def test_a_shard_named_only_in_the_index_is_missing(folder: Folder) -> None:
    folder.write("checkpoint-1/a.safetensors")
    folder.write(
        "checkpoint-1/model.safetensors.index.json", json.dumps({"weight_map": {"x": "a.safetensors", "y": "b"}})
    )
    assert folder.poll_for(120) == ["incomplete checkpoint-1"]
    assert folder.last.missing == ("checkpoint-1/b",)


def test_late_ranks_get_as_long_as_those_of_the_previous_checkpoint_took(folder: Folder) -> None:
    for rank in range(8):
        folder.write(f"ckpt_step1_rank{rank}.pt")
        folder.poll()
    folder.poll_for(50)
    folder.write_all(f"ckpt_step2_rank{rank}.pt" for rank in range(7))
    assert folder.poll_for(60) == []
    assert folder.checkpoints.writing
    folder.write("ckpt_step2_rank7.pt")
    assert folder.poll_for(20) == ["saved ckpt_step2_rank*.pt"]


def test_ranks_out_of_step_are_not_missing(folder: Folder) -> None:
    for step in (500, 1000):
        folder.write_all(f"checkpoint_worker_{rank}_step_{step}.json" for rank in range(4))
        folder.poll_for(60)
    for rank, step in enumerate((1004, 1003, 1002, 1001)):
        folder.write(f"checkpoint_worker_{rank}_step_{step}.json")
        folder.poll(4)
    folder.poll_for(200)
    assert {event.kind for event in folder.happened} == {"saved"}
    assert len(folder.history.save_times) == 3


HINTS = {
    "last rank": Part(megatron, "iter_{:07}/mp_rank_01/model_optim_rng.pt"),
    "commit": Part(orbax, "{}/commit_success.txt"),
}


@pytest.mark.parametrize("part", HINTS.values(), ids=HINTS)
def test_a_file_that_only_earlier_checkpoints_had_is_a_hint(folder: Folder, part: Part) -> None:
    part.write(folder, 1)
    folder.poll_for(60)
    part.write(folder, 100)
    folder.remove(part.leave_out.format(100))
    assert [event.split()[0] for event in folder.poll_for(120)] == ["saved", "unusual"]
    last = folder.last
    assert (last.state, last.missing_count, folder.history.total) == ("complete", 0, 2)
    assert last.odd is not None
    assert part.leave_out.format(100).rpartition("/")[2] in last.odd


@pytest.mark.parametrize("name", ["checkpoint_final/model.pt", "checkpoint_400/model.pt", "checkpoint_final.pt"])
def test_one_file_instead_of_many_ranks_is_complete(folder: Folder, name: str) -> None:
    for step in (100, 200, 300):
        folder.write_all(f"checkpoint_{step}/model_rank{rank}.pt" for rank in range(4))
        folder.poll_for(60)
    folder.write(name, b"x" * 90)
    assert "saved" in [event.split()[0] for event in folder.poll_for(200)]
    last = folder.last
    assert (last.state, last.missing_count, folder.history.total) == ("complete", 0, 4)
    assert {event.kind for event in folder.happened} <= {"saved", "unusual"}
    assert (last.odd, last.odd_size) == (None, None) or "final" not in name


def test_fewer_ranks_are_complete(folder: Folder) -> None:
    events = []
    for step, count in enumerate((8, 4, 4)):
        folder.write_all(f"checkpoint-{step}/rng_state_{rank}.pth" for rank in range(count))
        events.append([event.split()[0] for event in folder.poll_for(120)])
    assert events == [["saved"], ["saved", "unusual"], ["saved"]]


def test_a_gap_in_the_ranks_of_a_first_checkpoint_is_missing(folder: Folder) -> None:
    folder.write_all(f"checkpoint_100/model_rank{rank}.pt" for rank in (0, 1, 2, 4, 5, 6, 7))
    assert folder.poll_for(55) == []
    assert folder.poll_for(60) == ["incomplete checkpoint_100"]
    last = folder.last
    assert last.missing == ("checkpoint_100/model_rank3.pt",)


def test_ranks_that_are_never_written_are_not_missing(folder: Folder) -> None:
    events = []
    for step in (1, 2, 3, 4):
        folder.write_all(f"step_{step}/model_rank{rank}.pt" for rank in (0, 1, 2, 4))
        events.append([event.split()[0] for event in folder.poll_for(120)])
    assert events == [["incomplete"], ["incomplete"], ["saved"] * 3, ["saved"]]


def test_ranks_out_of_step_are_no_gaps(folder: Folder) -> None:
    for rank, step in enumerate((1004, 1004, 1003, 1004)):
        folder.write(f"ckpt_rank{rank}_step{step}.pt")
    folder.poll_for(200)
    assert {event.kind for event in folder.happened} == {"saved"}


def test_shards_in_an_index_of_other_weights_are_not_missing(folder: Folder) -> None:
    index = json.dumps({"weight_map": {"x": "pytorch_model-1.bin", "y": "pytorch_model-2.bin"}})
    folder.write_all(["checkpoint_100/model.safetensors", "checkpoint_100/optimizer.pt"])
    folder.write("checkpoint_100/pytorch_model.bin.index.json", index)
    assert folder.poll_for(120) == ["saved checkpoint_100"]
    folder.write("checkpoint_200/optimizer.pt")
    folder.write("checkpoint_200/pytorch_model.bin.index.json", index)
    assert folder.poll_for(120) == ["incomplete checkpoint_200"]


def test_a_file_written_in_place_with_pauses_is_one_checkpoint(folder: Folder) -> None:
    for step in (1, 2, 3, 4):
        for size in range(100, 800, 100):
            folder.write(f"checkpoint_{step}.pt", size)
            folder.poll_for(35 if size % 300 else 80)
        folder.poll_for(200)
    assert folder.history.total == 4
    assert [event.kind for event in folder.happened] == ["saved"] * 4
