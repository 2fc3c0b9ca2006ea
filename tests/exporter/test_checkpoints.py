"""What is one checkpoint, when it is whole, and its rhythm, by trees on disk as frameworks write them."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exporter.derive.checkpoint_names import common_name, missing_numbers, missing_ranks, parse_name, shape
from exporter.derive.checkpoints import Checkpoint, Checkpoints
from tests.exporter.checkpoint_trees import START, Folder

Write = Callable[[Folder, int], None]


def one_file(folder: Folder, step: int) -> None:
    folder.write(f"checkpoint_{step}.pt")


def epochs(folder: Folder, step: int) -> None:
    folder.write(f"ckpt_epoch_{step}.pt")


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
        *(orbax, lightning, ranks, tensorflow),
    )
}


@pytest.mark.parametrize("write", LAYOUTS.values(), ids=LAYOUTS)
def test_each_layout_is_one_checkpoint_a_save(tmp_path: Path, write: Write) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    for step in (10, 20, 30, 40):
        began = folder.now
        write(folder, step)
        assert len(folder.looks(100)) == 1
        last = folder.checkpoints.last
        assert last is not None
        assert (last.state, last.end, last.missing_count) == ("complete", began, 0)
        assert step in (last.step, last.epoch)
    assert folder.checkpoints.total == 4
    assert folder.checkpoints.interval_s == 100.0
    assert folder.checkpoints.next_expected == folder.checkpoints.saved[-1] + 100.0
    assert not folder.checkpoints.writing


@pytest.mark.parametrize("write", LAYOUTS.values(), ids=LAYOUTS)
def test_a_new_sidecar_finds_the_same_checkpoints_and_tells_of_none(tmp_path: Path, write: Write) -> None:
    folder = Folder(tmp_path / "ckpt")
    for step in (10, 20, 30, 40):
        write(folder, step)
        folder.looks(100)
    before = (folder.checkpoints.total, folder.checkpoints.saved, folder.checkpoints.last)
    folder.restart()
    assert folder.look() == []
    assert (folder.checkpoints.total, folder.checkpoints.saved) == before[:2]
    assert folder.checkpoints.last is not None
    assert before[2] is not None
    assert folder.checkpoints.last._replace(seconds=None) == before[2]._replace(seconds=None)


@pytest.mark.parametrize("write", LAYOUTS.values(), ids=LAYOUTS)
def test_checkpoints_of_an_earlier_job_are_none_of_this_one(tmp_path: Path, write: Write) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.now = START - 500.0
    write(folder, 10)
    folder.now = START + 100.0
    folder.looks(50)
    assert (folder.checkpoints.total, folder.checkpoints.last, folder.checkpoints.saved) == (0, None, ())
    assert not folder.checkpoints.writing
    write(folder, 20)
    folder.looks(100)
    assert folder.checkpoints.total == 1


def test_a_file_that_grows_is_being_written_until_it_has_settled(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    for size in range(100, 700, 100):
        folder.write("checkpoint_1.pt", size)
        assert folder.look() == []
        assert folder.checkpoints.writing
        assert folder.checkpoints.last is not None
        assert folder.checkpoints.last.state == "writing"
    assert folder.look() == []
    assert folder.look() == ["saved checkpoint_1.pt"]
    assert not folder.checkpoints.writing
    last = folder.checkpoints.last
    assert (last.state, last.bytes, last.seconds) == ("complete", 600, 25.0)  # type: ignore[union-attr]


def test_a_file_that_is_renamed_into_place_is_whole_at_once(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt", "*.pt")
    folder.look()
    folder.write("checkpoint_1.pt.tmp", 100)
    assert folder.look() == []
    assert folder.checkpoints.writing
    assert folder.checkpoints.last is None
    folder.rename("checkpoint_1.pt.tmp", "checkpoint_1.pt")
    assert folder.look() == ["saved checkpoint_1.pt"]
    assert not folder.checkpoints.writing


def test_a_directory_that_is_renamed_into_place_is_whole_at_once(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt", "[0-9]*")
    folder.look()
    folder.write("100.orbax-checkpoint-tmp-1699/state/d/abc")
    folder.look()
    assert folder.checkpoints.writing
    folder.rename("100.orbax-checkpoint-tmp-1699", "100")
    assert folder.look() == ["saved 100"]


def test_a_marker_says_that_a_checkpoint_is_whole(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    folder.write_all(f"step_1/__{rank}_0.distcp" for rank in range(2))
    assert folder.look() == []
    folder.write("step_1/.metadata")
    assert folder.look() == ["saved step_1"]


def test_a_file_beside_it_says_that_it_is_unfinished(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt", "*.ckpt")
    folder.look()
    folder.write("step=5.ckpt-unfinished", b"")
    folder.write("step=5.ckpt/shard.pt")
    assert folder.looks(60) == []
    assert folder.checkpoints.writing
    folder.remove("step=5.ckpt-unfinished")
    assert folder.look() == ["saved step=5.ckpt"]


def test_a_temporary_file_that_nobody_writes_is_no_writing_for_ever(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    folder.write("checkpoint_1.pt.tmp")
    folder.looks(300)
    assert folder.checkpoints.writing
    folder.looks(600)
    assert not folder.checkpoints.writing
    assert folder.checkpoints.total == 0


def test_the_same_name_counts_each_time_that_it_is_written_anew(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    for size in (100, 100, 90, 120):
        folder.write("checkpoint.pt", b"y" * size)
        assert folder.looks(100) == ["saved checkpoint.pt"]
    assert folder.checkpoints.total == 4
    assert folder.checkpoints.interval_s == 100.0


def test_a_name_that_is_replaced_counts_at_once(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    for _ in range(3):
        folder.write("checkpoint.pt.tmp")
        folder.look()
        folder.rename("checkpoint.pt.tmp", "checkpoint.pt")
        assert folder.look() == ["saved checkpoint.pt"]
    assert folder.checkpoints.total == 3


def test_a_writer_that_pauses_counts_once_and_is_waited_for_from_then_on(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    folder.write("checkpoint_1.pt", 100)
    assert folder.looks(25) == ["saved checkpoint_1.pt"]
    folder.write("checkpoint_1.pt", 200)
    assert folder.looks(100) == []
    last = folder.checkpoints.last
    assert (last.bytes, folder.checkpoints.total) == (200, 1)  # type: ignore[union-attr]
    folder.write("checkpoint_2.pt", 100)
    assert folder.looks(25) == []
    folder.write("checkpoint_2.pt", 200)
    assert folder.looks(100) == ["saved checkpoint_2.pt"]


def test_what_is_added_to_a_checkpoint_later_is_no_new_one(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    hugging_face(folder, 10)
    folder.looks(300)
    folder.write("checkpoint-10/README.md")
    folder.write("checkpoint-10/eval.json")
    assert folder.looks(400) == []
    folder.write("checkpoint-20/model.safetensors")
    assert folder.looks(30) != []  # nor is the time between them a pause of the writer


def test_a_step_that_is_written_again_after_a_resume_counts_again(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    for _ in range(2):
        ranks(folder, 10)
        folder.looks(100)
    assert folder.checkpoints.total == 2


def test_a_link_or_copy_called_last_is_no_checkpoint_of_its_own(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    for step in (1, 2, 3):
        path = folder.write(f"epoch={step}-step={step}00.ckpt")
        for name, make in (("last.ckpt", os.link), ("best.ckpt", os.symlink)):
            (folder.path / name).unlink(missing_ok=True)
            make(path, folder.path / name)
        folder.look()
        folder.write("latest.ckpt")
        folder.looks(200)
        last = folder.checkpoints.last
        assert last is not None
        assert (last.step, folder.checkpoints.total) == (step * 100, step)


def test_a_last_one_that_is_written_more_often_counts(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    folder.write("step=1.ckpt")
    folder.looks(300)
    folder.write("last.ckpt")
    folder.looks(300)
    assert folder.checkpoints.total == 2


def test_old_checkpoints_that_are_removed_are_ordinary(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    for step in range(1, 8):
        ranks(folder, step)
        folder.looks(50)
        if step > 2:
            for rank in range(8):
                folder.remove(f"ckpt_step{step - 2}_rank{rank}.pt")
                folder.look(1)
        assert folder.checkpoints.total == step
        assert not folder.checkpoints.writing
    assert {one.kind for one in folder.happened} == {"saved"}


def test_checkpoints_that_do_not_last_until_they_have_settled_count(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    for step in range(1, 11):
        one_file(folder, step)
        if step > 1:
            folder.remove(f"checkpoint_{step - 1}.pt")
        folder.look(3)
    folder.looks(30)
    assert folder.checkpoints.total == 10
    assert folder.checkpoints.interval_s == 3.0


class Part(NamedTuple):
    """A checkpoint of which something is missing."""

    write: Write
    leave_out: str
    missing: int = 1
    before: int = 1
    """Whole ones before it."""


PARTS = {
    "number of many": Part(hugging_face, "checkpoint-{}/model-00002-of-00003.safetensors", before=0),
    "rank": Part(ranks, "ckpt_step{}_rank3.pt"),
    "rank of the first": Part(ranks, "ckpt_step{}_rank3.pt", before=0),
    "deepspeed": Part(deepspeed, "global_step{}/zero_pp_rank_2_mp_rank_00_optim_states.pt", before=0),
    "shard before a marker": Part(torch_distributed, "step-{}/__2_0.distcp", before=0),
    "last shard of its own list": Part(torch_distributed, "step-{}/__3_0.distcp", before=0),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_what_is_missing_is_told_once(tmp_path: Path, part: Part) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    for step in range(1, part.before + 1):
        part.write(folder, step)
        folder.looks(60)
    assert folder.checkpoints.total == part.before
    part.write(folder, 100)
    gone = part.leave_out.format(100)
    folder.remove(gone)
    found = folder.looks(120)
    assert [words.split()[0] for words in found] == ["incomplete"]
    last = folder.checkpoints.last
    assert last is not None
    assert (last.state, last.missing_count) == ("incomplete", part.missing)
    assert last.missing[0].rpartition("/")[2].replace("#", "100") == gone.rpartition("/")[2]
    assert (folder.checkpoints.total, folder.checkpoints.writing) == (part.before, False)
    folder.write(gone)
    assert [words.split()[0] for words in folder.looks(120)] == ["saved"]
    assert folder.checkpoints.last is not None
    assert (folder.checkpoints.last.missing_count, folder.checkpoints.total) == (0, part.before + 1)


def test_a_shard_that_only_the_index_names_is_missing(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    folder.write("checkpoint-1/a.safetensors")
    folder.write(
        "checkpoint-1/model.safetensors.index.json", json.dumps({"weight_map": {"x": "a.safetensors", "y": "b"}})
    )
    assert folder.looks(120) == ["incomplete checkpoint-1"]
    assert folder.checkpoints.last is not None
    assert folder.checkpoints.last.missing == ("checkpoint-1/b",)


def test_ranks_that_are_late_are_waited_for_as_long_as_the_last_ones_took(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    for rank in range(8):
        folder.write(f"ckpt_step1_rank{rank}.pt")
        folder.look()
    folder.looks(50)
    folder.write_all(f"ckpt_step2_rank{rank}.pt" for rank in range(7))
    assert folder.looks(60) == []
    assert folder.checkpoints.writing
    folder.write("ckpt_step2_rank7.pt")
    assert folder.looks(20) == ["saved ckpt_step2_rank*.pt"]


def test_ranks_that_do_not_keep_in_step_have_nothing_missing(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    for step in (500, 1000):
        folder.write_all(f"checkpoint_worker_{rank}_step_{step}.json" for rank in range(4))
        folder.looks(60)
    for rank, step in enumerate((1004, 1003, 1002, 1001)):
        folder.write(f"checkpoint_worker_{rank}_step_{step}.json")
        folder.look(4)
    folder.looks(200)
    assert {one.kind for one in folder.happened} == {"saved"}
    assert len(folder.checkpoints.saved) == 3


HINTS = {
    "last rank": Part(megatron, "iter_{:07}/mp_rank_01/model_optim_rng.pt"),
    "marker": Part(torch_distributed, "step-{}/.metadata"),
    "commit": Part(orbax, "{}/commit_success.txt"),
}


@pytest.mark.parametrize("part", HINTS.values(), ids=HINTS)
def test_what_only_those_before_had_is_a_hint(tmp_path: Path, part: Part) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    part.write(folder, 1)
    folder.looks(60)
    part.write(folder, 100)
    folder.remove(part.leave_out.format(100))
    assert [words.split()[0] for words in folder.looks(120)] == ["saved", "unusual"]
    last = folder.checkpoints.last
    assert last is not None
    assert (last.state, last.missing_count, folder.checkpoints.total) == ("complete", 0, 2)
    assert last.odd is not None
    assert part.leave_out.format(100).rpartition("/")[2] in last.odd


@pytest.mark.parametrize("name", ["checkpoint_final/model.pt", "checkpoint_400/model.pt", "checkpoint_final.pt"])
def test_one_file_in_place_of_many_ranks_is_whole(tmp_path: Path, name: str) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    for step in (100, 200, 300):
        folder.write_all(f"checkpoint_{step}/model_rank{rank}.pt" for rank in range(4))
        folder.looks(60)
    folder.write(name, b"x" * 90)
    assert "saved" in [words.split()[0] for words in folder.looks(200)]
    last = folder.checkpoints.last
    assert last is not None
    assert (last.state, last.missing_count, folder.checkpoints.total) == ("complete", 0, 4)
    assert {one.kind for one in folder.happened} <= {"saved", "unusual"}
    assert (last.odd, last.odd_size) == (None, None) or "final" not in name


def test_fewer_ranks_are_whole(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    told = []
    for step, count in enumerate((8, 4, 4)):
        folder.write_all(f"checkpoint-{step}/rng_state_{rank}.pth" for rank in range(count))
        told.append([words.split()[0] for words in folder.looks(120)])
    assert told == [["saved"], ["saved", "unusual"], ["saved"]]


def test_a_hole_in_the_ranks_of_a_first_checkpoint_is_missing(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    folder.write_all(f"checkpoint_100/model_rank{rank}.pt" for rank in (0, 1, 2, 4, 5, 6, 7))
    assert folder.looks(55) == []
    assert folder.looks(60) == ["incomplete checkpoint_100"]
    last = folder.checkpoints.last
    assert last is not None
    assert last.missing == ("checkpoint_100/model_rank3.pt",)


def test_ranks_that_a_writer_always_leaves_out_are_none_of_it(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    told = []
    for step in (1, 2, 3, 4):
        folder.write_all(f"step_{step}/model_rank{rank}.pt" for rank in (0, 1, 2, 4))
        told.append([words.split()[0] for words in folder.looks(120)])
    assert told == [["incomplete"], ["incomplete"], ["saved"] * 3, ["saved"]]


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


def test_ranks_that_are_not_in_step_are_no_holes(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    for rank, step in enumerate((1004, 1004, 1003, 1004)):
        folder.write(f"ckpt_rank{rank}_step{step}.pt")
    folder.looks(200)
    assert {one.kind for one in folder.happened} == {"saved"}


def test_an_index_of_other_weights_names_nothing_that_is_missing(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    index = json.dumps({"weight_map": {"x": "pytorch_model-1.bin", "y": "pytorch_model-2.bin"}})
    folder.write_all(["checkpoint_100/model.safetensors", "checkpoint_100/optimizer.pt"])
    folder.write("checkpoint_100/pytorch_model.bin.index.json", index)
    assert folder.looks(120) == ["saved checkpoint_100"]
    folder.write("checkpoint_200/optimizer.pt")
    folder.write("checkpoint_200/pytorch_model.bin.index.json", index)
    assert folder.looks(120) == ["incomplete checkpoint_200"]


BESIDE = ("checkpoint_log.txt", "checkpoint_state.json", "checkpoint_metrics.csv", "checkpoint_config.yaml")


def test_texts_beside_checkpoints_are_none(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt", "checkpoint_*")
    folder.look()
    for step in (100, 200, 300, 400):
        folder.write(f"checkpoint_{step}.pt")
        for minute in range(10):
            folder.write_all((*BESIDE, "checkpoint_state_20240512.json"), f"{step} {minute}")
            folder.looks(60)
    last = folder.checkpoints.last
    assert last is not None
    assert (last.name, folder.checkpoints.total) == ("checkpoint_400.pt", 4)
    assert folder.checkpoints.interval_s == 600


def test_texts_that_were_there_first_leave_no_rhythm_behind(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt", "checkpoint_*")
    folder.look()
    for minute in range(5):
        folder.write("checkpoint_state.json", str(minute))
        folder.looks(60)
    assert folder.checkpoints.interval_s == 60
    folder.write("checkpoint_100.pt")
    folder.looks(60)
    assert folder.checkpoints.interval_s is None
    assert folder.checkpoints.last is not None
    assert folder.checkpoints.last.name == "checkpoint_100.pt"


def test_texts_alone_and_texts_with_a_step_are_checkpoints(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt", "checkpoint_*")
    folder.look()
    folder.write("checkpoint_worker_3.json")
    assert folder.looks(60) == ["saved checkpoint_worker_3.json"]
    folder.write("checkpoint_worker_3_step_200.json")
    assert folder.looks(60) == ["saved checkpoint_worker_3_step_200.json"]


def test_what_was_seen_to_be_written_counts_whatever_the_clock_of_the_server(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.write("checkpoint_1.pt", mtime=START - 650)
    folder.write("step_7/x.pt", mtime=START - 650)
    assert folder.looks(30) == []
    folder.write("checkpoint_2.pt", mtime=START - 600)
    assert folder.looks(60) == ["saved checkpoint_2.pt"]
    folder.write("checkpoint_1.pt", b"anew", mtime=START - 500)
    assert folder.looks(60) == ["saved checkpoint_1.pt"]
    folder.write("checkpoint_3.pt", mtime=START - 90_000)  # a copy that keeps the time of an old one
    assert folder.looks(60) == []
    assert folder.checkpoints.total == 2


def test_old_ones_that_are_lost_from_sight_or_thinned_out_stay_old(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.write_all(f"step_7/{number}.pt" for number in range(3))
    folder.write("checkpoint_1.pt", mtime=START - 650)
    for number in range(3):
        folder.touch(folder.path / f"step_7/{number}.pt", START - 600 + number)
    folder.look()
    (tmp_path / "ckpt").rename(tmp_path / "away")
    folder.look()
    (tmp_path / "away").rename(tmp_path / "ckpt")
    folder.looks(60)
    folder.remove("step_7/2.pt")
    folder.looks(60)
    assert (folder.checkpoints.total, folder.happened) == (0, [])


def test_the_count_goes_on_where_old_ones_were_removed(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    for step in range(1, 7):
        one_file(folder, step)
        if step > 2:
            folder.remove(f"checkpoint_{step - 2}.pt")
        folder.looks(60)
    before = (folder.checkpoints.total, folder.checkpoints.saved)
    state = json.loads(json.dumps(folder.checkpoints.state()))
    folder.restart()
    folder.checkpoints.restore(state)
    assert folder.looks(30) == []
    assert (folder.checkpoints.total, folder.checkpoints.saved) == before
    assert folder.checkpoints.state() == state
    one_file(folder, 7)
    assert folder.looks(60) == ["saved checkpoint_7.pt"]
    assert (folder.checkpoints.total, folder.checkpoints.interval_s) == (7, 60)


def test_one_that_was_added_to_is_not_counted_again_by_a_new_sidecar(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    hugging_face(folder, 1)
    folder.looks(60)
    folder.write("checkpoint-1/README.md")
    folder.looks(60)
    state = folder.checkpoints.state()
    folder.restart()
    folder.checkpoints.restore(state)
    folder.looks(60)
    assert folder.checkpoints.total == 1


@pytest.mark.parametrize(
    "change",
    [
        *({"total": -1}, {"total": True}, {"total": 1.5}, {"total": None}, {"beats": [2.0, 1.0]}, {"beats": ["1"]}),
        *({"beats": 3}, {"beats": [float("nan")]}, {"counted": []}, {"counted": {"a": None}}, {"real": 1}),
    ],
)
def test_a_state_of_another_form_is_refused(change: dict[str, object]) -> None:
    checkpoints = Checkpoints(START)
    with pytest.raises(ValueError, match="tells no"):
        checkpoints.restore({**Checkpoints().state(), "total": 3, **change})
    assert (checkpoints.total, checkpoints.saved) == (0, ())


def test_a_file_that_is_written_in_place_with_pauses_is_one_checkpoint(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    for step in (1, 2, 3, 4):
        for size in range(100, 800, 100):
            folder.write(f"checkpoint_{step}.pt", size)
            folder.looks(35 if size % 300 else 80)
        folder.looks(200)
    assert folder.checkpoints.total == 4
    assert [one.kind for one in folder.happened] == ["saved"] * 4


def test_nothing_is_judged_while_names_have_not_been_looked_at(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    ranks(folder, 1)
    found = {entry.name: entry for entry in folder.watch.look(folder.now + 5).entries}
    some = [found[f"ckpt_step1_rank{rank}.pt"] for rank in (0, 1, 3)]
    for seconds in range(5, 200, 5):
        now = folder.now + seconds
        assert folder.checkpoints.update(some, tuple(found), now, now, behind=True) == []
    now += 5
    happened = folder.checkpoints.update(tuple(found.values()), None, now, now)
    assert happened == []
    assert [one.kind for one in folder.checkpoints.update((), None, now + 20, now + 20)] == ["saved"]


def test_a_size_that_differs_is_told_once_three_are_known(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    odd = []
    for step, size in enumerate((1000, 100, 1000, 1100, 400, 2500, 1000)):
        folder.write(f"checkpoint_{step}.pt", size)
        folder.looks(30)
        assert folder.checkpoints.last is not None
        odd.append(folder.checkpoints.last.odd_size)
    assert odd == [None, None, None, None, 0.4, 2.5, None]


def test_a_fixed_interval_is_taken_as_it_is() -> None:
    assert Checkpoints(interval_s=600.0).interval_s == 600.0
    assert Checkpoints(interval_s=600.0).next_expected is None


def test_one_late_checkpoint_does_not_change_the_rhythm(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    for step, pause in enumerate((60, 60, 600, 60, 60)):
        folder.write(f"checkpoint_{step * 50}.pt")
        folder.looks(pause)
    assert (folder.checkpoints.interval_s, folder.checkpoints.interval_steps) == (60.0, 50)


def test_a_folder_that_is_lost_from_sight_for_a_moment_is_not_counted_again(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.look()
    for step in (1, 2):
        ranks(folder, step)
        folder.looks(50)
    (tmp_path / "ckpt").rename(tmp_path / "away")
    folder.look()
    (tmp_path / "away").rename(tmp_path / "ckpt")
    assert folder.looks(60) == []
    assert folder.checkpoints.total == 2


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
        ("checkpoint_12.pt.done", "step 12", 12, None),
    ],
)
def test_a_name_tells_what_is_one_checkpoint(name: str, key: str, step: int | None, epoch: int | None) -> None:
    found = parse_name(name)
    assert found is not None
    assert (found.key, found.step, found.epoch) == (key, step, epoch)


@pytest.mark.parametrize(
    "name",
    [
        *("latest", "latest_checkpointed_iteration.txt", "checkpoint", "config.json", "README.md", "tokenizer.model"),
        *("events.out.tfevents.1700000000.node01", "training_args.bin", "train.log"),
    ],
)
def test_files_beside_checkpoints_are_none(name: str) -> None:
    assert parse_name(name) is None


def test_directories_beside_checkpoints_are_none() -> None:
    assert [parse_name(name, True) for name in ("runs", "logs", "wandb")] == [None] * 3


def test_numbers_of_shards_tell_what_is_missing() -> None:
    assert list(missing_numbers(["d/a-00001-of-00003.x", "d/a-00003-of-00003.x"])) == ["d/a-00002-of-00003.x"]
    assert list(missing_numbers(["a-0-of-2", "b-1-of-1"])) == ["a-1-of-2"]
    assert list(missing_numbers(["model_world_size_2_rank_1.pt"])) == ["model_world_size_2_rank_0.pt"]
    assert list(missing_numbers(["a-1-of-999999999", "a-9-of-3"])) == []


def test_shards_keep_their_numbers_in_a_shape() -> None:
    name = parse_name("ckpt_step3_rank3.pt")
    assert name is not None
    assert shape("ckpt_step3_rank3.pt", name) == "ckpt_step#_rank3.pt"
    assert common_name(["ckpt_step3_rank0.pt", "ckpt_step3_rank1.pt"]) == "ckpt_step3_rank*.pt"


# What must hold always


class File(NamedTuple):
    path: str
    size: int
    mtime: float
    inode: int
    temporary: bool = False


class Damage(NamedTuple):
    path: str
    reason: str | None


class Index(NamedTuple):
    path: str
    shards: tuple[str, ...]


class Entry(NamedTuple):
    name: str
    bare: str
    temporary: bool
    directory: bool
    inode: int
    files: tuple[File, ...]
    whole: bool = True
    indexes: tuple[Index, ...] = ()
    valid: int = 0
    looked_into: int = 0
    damaged: tuple[Damage, ...] = ()


ANY_NAME = st.text(
    st.characters(codec="utf-8", exclude_characters="/\0") | st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF),
    min_size=1,
    max_size=40,
)
PIECES = st.sampled_from(
    [
        *(
            "checkpoint",
            "_",
            "-",
            ".",
            "12",
            "0",
            "00001-of-00004",
            "rank",
            "step",
            "epoch=",
            "=",
            ".pt",
            ".tmp",
            "last",
        ),
        *(".index.json", "\n", "99999999999999999999", "-of-", "999999999", "zero_pp_rank_", "__0_1.distcp", "²", "٣"),
        *("_world_size_", ".done", ".metadata", "1e400", "0.5", "tmp-", "w3"),
    ]
)
HOSTILE = st.lists(PIECES, min_size=1, max_size=8).map("".join) | ANY_NAME


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    name, inode = draw(HOSTILE), draw(st.integers(1, 20))
    directory = draw(st.booleans())
    inner = draw(st.lists(HOSTILE, max_size=4)) if directory else [""]
    files = tuple(
        File(
            f"{name}/{path}" if path else name,
            draw(st.integers(0, 1 << 40)),
            draw(st.floats(START - 100, START + 4000)),
            inode,
            draw(st.booleans()) if directory else False,
        )
        for path in inner
    )
    bad = draw(st.booleans())
    return Entry(
        name,
        draw(st.just(name) | HOSTILE),
        draw(st.booleans()),
        directory,
        inode,
        files,
        draw(st.booleans()),
        tuple(Index(f"{name}/i.index.json", (shard,)) for shard in draw(st.lists(HOSTILE, max_size=3))),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 3)),
        tuple(Damage(file.path, "is cut") for file in files[:1] if bad),
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.lists(entries(), max_size=5), st.booleans(), st.floats(0, 100)), max_size=12))
def test_nothing_that_a_folder_may_hold_breaks_it_and_the_count_never_falls(
    course: list[tuple[list[Entry], bool, float]],
) -> None:
    checkpoints, now, there = Checkpoints(START), START + 10.0, dict[str, Entry]()
    for found, forget, seconds in course:
        now += seconds
        there = {} if forget else there
        there.update((entry.name, entry) for entry in found)
        before = checkpoints.total
        happened = checkpoints.update(found, tuple(there), now, now)
        assert before <= checkpoints.total
        assert all(isinstance(one.checkpoint, Checkpoint) for one in happened)
        assert sum(one.kind == "saved" for one in happened) in (checkpoints.total - before, 0)
        assert list(checkpoints.saved) == sorted(checkpoints.saved)
        assert checkpoints.interval_s is None or checkpoints.interval_s > 0


@given(HOSTILE, st.booleans())
@example("checkpoint_" + "9" * 200 + ".pt", False)
@example("²", False)
def test_every_name_is_read_the_same_each_time(name: str, directory: bool) -> None:
    assert parse_name.__wrapped__(name, directory) == parse_name(name, directory)
    found = parse_name(name, directory)
    if found is not None:
        shape(name, found)
    list(missing_numbers([name]))
    common_name([name, name + "x"])


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(12)), st.integers(0, 11))
def test_what_is_one_checkpoint_does_not_depend_on_the_order(order: list[int], cut: int) -> None:
    names = [f"ckpt_step{number // 4}_rank{number % 4}.pt" for number in range(12)]
    found = [
        Entry(names[n], names[n], False, False, n, (File(names[n], 10, START + 100 * (n // 4), n),)) for n in order
    ]
    checkpoints = Checkpoints(START)
    checkpoints.update(found[:cut], None, START + 500, START + 500, behind=True)
    checkpoints.update(found[cut:], names, START + 500, START + 500)
    assert (checkpoints.total, checkpoints.saved) == (3, (START, START + 100, START + 200))
