"""Progress in logs that hold the lines of several programs, as most logs do: the pack is chosen from all of them."""

from typing import NamedTuple

import pytest

from exporter.logs.lexicon_reader import build_lexicon
from exporter.progress.track import ProgressTrack

LEXICON = build_lexicon()
RECORD_S = 10.0  # time between two records


class Progress(NamedTuple):
    pack: str
    done: float | None
    total: float | None
    processed: float | None


def progress(lines: list[str], total: int | None) -> Progress:
    """The progress of one worker whose log these lines are, read one at a time; its share is ``total`` items."""
    pack = LEXICON.choose_pack("\n".join(lines).encode())
    track = ProgressTrack(LEXICON.preferred_positions(pack), epoch_bases=LEXICON.epoch_bases(pack), share=total)
    track.began = 0.0
    offset = 0
    for number, line in enumerate(lines, 1):
        found = LEXICON.engine(pack).scan(line.encode())
        for mark in found.marks:
            track.apply_activity(mark, number * RECORD_S)
        for position in found.positions:
            track.update("log", position._replace(offset=position.offset + offset), number * RECORD_S)
        offset += len(line.encode()) + 1
    track.decide_starts()
    return Progress(pack, track.done, track.total, track.processed)


def bar(done: int, total: int, name: str = "", after: str = "") -> str:
    """A bar of tqdm."""
    head = f"{name}: " if name else ""
    drawn = f"{100 * done // total:3d}%|{'█' * (10 * done // total):10}|"
    return f"{head}{drawn} {done}/{total} [01:09<13:23,  1.15it/s{after}]"


def bars(counts: list[int], total: int, name: str = "", after: str = "") -> list[str]:
    return [bar(count, total, name, after) for count in counts]


HF = "{'loss': 0.5, 'grad_norm': 1.25, 'learning_rate': 4e-05, 'epoch': 0.3}"
VLLM = ["INFO 07-10 12:30:00 [core.py:69] Initializing a V1 LLM engine (v0.9.2) with config: model='m'"] * 3
SPEED = ", est. speed input: 9.10 toks/s, output: 8.20 toks/s"  # behind the bar of vLLM's offline inference
SGLANG = ["[2026-03-01 05:26:00 TP0] Load weight begin. avail mem=180.10 GB"]
TRTLLM = ["[TensorRT-LLM] TensorRT-LLM version: 1.0.0"]
DEEPSPEED = ["[2026-03-01 21:03:21,037] [INFO] [logging.py:128:log_dist] [Rank 0] DeepSpeed info: version=0.16.4"]
DEEPSPEED_STEP = (
    "[2026-03-01 21:03:21,037] [INFO] [logging.py:128:log_dist] [Rank 0] step=10, skipped=0, lr=[2e-06], mom=[0.9]"
)
LIGHTGBM = ["[LightGBM] [Info] Number of positive: 212, number of negative: 357"]
LIGHTNING = ["GPU available: True (cuda), used: True"]


# (lines, total) -> (pack, done, total, processed)
TABLE: dict[str, tuple[list[str], int | None, tuple[str, float | None, float | None, float | None]]] = {
    "offline inference with vLLM": (
        [*VLLM, *bars([0, 500, 1000], 1000, "Processed prompts", SPEED)],
        None,
        ("vllm", 1000, 1000, 1000),
    ),
    "a trainer that generates with vLLM": ([*VLLM, *bars([0, 10, 30], 1000)], None, ("vllm", 30, 1000, 30)),
    "a trainer of ray that generates with vLLM": (
        [*VLLM, *bars([0, 1, 3], 100, "(TaskRunner pid=3) Training Progress")],
        None,
        ("vllm", 3, 100, 3),
    ),
    "offline inference with SGLang": ([*SGLANG, *bars([0, 8, 16], 64)], None, ("sglang", 16, 64, 16)),
    "offline inference with TensorRT-LLM": (
        [*TRTLLM, *bars([0, 8, 16], 64, "Processed requests")],
        None,
        ("trtllm", 16, 64, 16),
    ),
    "the bar of an own loop around DeepSpeed": (
        [*DEEPSPEED, bar(0, 400), bar(5, 400), DEEPSPEED_STEP, bar(20, 400)],
        None,
        ("deepspeed", 20, 400, 20),
    ),
    "LightGBM in a search": ([*LIGHTGBM, *bars([0, 3, 6], 50)], None, ("lightgbm", 6, 50, 6)),
    "an own loop that has only the setup of Lightning": (
        [*LIGHTNING, *bars([0, 5, 9], 100, "Embedding")],
        None,
        ("lightning", 9, 100, 9),
    ),
    "the bars of Lightning count batches of all epochs": (
        [*LIGHTNING, *(bar(done, 8, f"Epoch {epoch}", ", v_num=0") for epoch in (0, 1) for done in (4, 8))],
        None,
        ("lightning", 16, None, 16),
    ),
    "prompts that are added before they are processed": (
        [*VLLM, bar(1000, 1000, "Adding requests"), *bars([0, 500, 1000], 1000, "Processed prompts", SPEED)],
        None,
        ("vllm", 1000, 1000, 1000),
    ),
    "a data set that is prepared before the training": (
        [
            *bars([0, 50000], 50000, "Tokenizing train dataset"),
            *bars([0, 400], 400, "Map (num_proc=8)"),
            *bars([0, 5], 1000),
            HF,
            bar(10, 1000),
        ],
        None,
        ("hf-trainer", 10, 1000, 10),
    ),
    "the contexts and the deviations of an evaluation": (
        [
            bar(10042, 10042, "Building contexts"),
            *bars([0, 9000, 10000], 10000, "Running loglikelihood requests"),
            *bars([50, 100], 100, "bootstrapping for stddev"),
        ],
        None,
        ("tqdm", 10000, 10000, 10000),
    ),
    "an evaluation after the training": (
        [
            *bars([0, 50, 100], 100),
            "{'train_runtime': 123.4, 'train_samples_per_second': 89.2, 'train_loss': 0.42, 'epoch': 4.0}",
            *bars([0, 250, 500], 500),
        ],
        None,
        ("hf-trainer", 100, 100, 100),
    ),
    "an iterable data set in Lightning": (
        [
            *LIGHTNING,
            *(
                f"Epoch {epoch}: |          | {done}/? [00:02<00:00,  4.50it/s, v_num=0]"
                for epoch in (0, 1)
                for done in (5, 10)
            ),
        ],
        None,
        ("lightning", 20, None, 20),
    ),
    "a training whose bar has the loss of the validation": (
        [
            *bars([0, 10], 100, "epoch 3 | loss 0.31 | val_loss 0.35"),
            *bars([0, 5, 10], 10, "Val"),
            bar(20, 100, "epoch 3 | loss 0.30 | val_loss 0.33"),
        ],
        None,
        ("tqdm", 20, 100, 20),
    ),
    "the share of a worker that writes no total": (
        ["Processed 3 items", "3it [00:10, 1.0it/s]"],
        20,
        ("tqdm", 3, 20, 3),
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_progress_of_programs_that_share_a_log(case: str) -> None:
    lines, total, expected = TABLE[case]
    assert progress(lines, total) == Progress(*expected)
