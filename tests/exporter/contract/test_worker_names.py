"""The worker to which a file belongs, from its name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.contract.worker_names import rank_in_file_name

ROLES = ("prefill", "decode", "agg_server")
RANKS = {(role, 0): 100 * position for position, role in enumerate(ROLES)}  # rank of the first worker of each role


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("output_worker_3.jsonl", 3),
        ("worker_0.log", 0),
        ("worker12.log", 12),
        ("WORKER-7.out", 7),
        ("embeddings.rank-1.npy", 1),
        ("rank_00031.pt", 31),
        ("shard_5_of_8.bin", 5),
        ("part-00003.parquet", 3),
        ("gpu1.csv", 1),
        ("node01_worker_w4.out", 4),
        ("2025_worker_9.log", 9),
        ("prefill_w0.out", 0),
        ("decode_w0.out", 100),
        ("node01_agg_server_w2_r1.err", 2),
        ("decode3", 3),
        ("output_gpu5.jsonl", 5),
        ("output_node1_gpu3_rank7.jsonl", 7),
        ("output_node1_rank3.jsonl", 3),
        ("output_local_rank_3.jsonl", 3),
    ],
)
def test_the_number_after_a_worker_word_is_the_rank(name: str, number: int) -> None:
    assert rank_in_file_name(name, RANKS) == number


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint_500.pt",
        "output.jsonl",
        "worker.log",
        "workers_3.log",
        "coworker_3.log",
        "step_7.pt",
        "3_worker",
        "department_4.csv",
        "worker__3.log",
        "decode_server_3.log",
        "output_node0_gpu3.jsonl",
        "node-12.gpu-3.npy",
        "output_node1_local_rank2.jsonl",
        "",
    ],
)
def test_other_numbers_belong_to_no_worker(name: str) -> None:
    assert rank_in_file_name(name, RANKS) is None


def test_other_words_count_only_if_they_are_roles() -> None:
    assert rank_in_file_name("trainer_4.log", {}) is None
    assert rank_in_file_name("trainer_4.log", {("trainer", 4): 9}) == 9
    assert rank_in_file_name("a.b_4.log", {("a.b", 4): 9}) == 9
    assert rank_in_file_name("aXb_4.log", {("a.b", 4): 9}) is None


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("output_worker_3.jsonl", 3),
        ("rank_00031.pt", 31),
        ("decode_w0.out", 100),
        ("shard_3_worker_1.jsonl", 1),
        ("shard_3.jsonl", None),
        ("part-00003.parquet", None),
        ("gpu1.csv", None),
        ("task_2.json", None),
    ],
)
def test_ambiguous_words_do_not_count_in_sure_mode(name: str, number: int | None) -> None:
    assert rank_in_file_name(name, RANKS, sure=True) == number


@given(st.integers(0, 10**9), st.sampled_from(["worker", "rank", "shard", "part", "prefill"]), st.sampled_from("_-"))
def test_every_number_is_found_completely(number: int, word: str, sign: str) -> None:
    assert rank_in_file_name(f"out_{word}{sign}{number}.jsonl", RANKS) == number


@given(st.text(max_size=40))
def test_any_file_name_is_accepted(name: str) -> None:
    number = rank_in_file_name(name, RANKS)
    assert number is None or number >= 0
