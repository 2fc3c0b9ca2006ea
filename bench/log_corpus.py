"""Logs of a made-up job, always the same bytes, and what they say, counted while they are written."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SHARES = {"dense": 0.7, "typical": 0.2, "sparse": 0.001}  # records of each profile that a pattern matches
FLOOD = "flood"  # profile in which every record is an error, as of a loop that tries again without a pause

_LIBRARY_LINES = (
    "{time} DEBUG prefetcher: row group {a} of part-{b:05d}.parquet is in the page cache ({c} us)",
    "{time} INFO  gateway: POST /v1/embeddings 200 in {c} ms, {a} bytes out, keep-alive {b}",
    "{time} DEBUG comm.ring: channel {b} uses nic mlx5_{d} with chunk size {a}",
    "{time} WARN  tokenizer: text {a} was cut from {b} to {c} tokens",
    "{time} INFO  store: flushed segment {a}, {b} rows, {d} pending writers",
    "    at layer {d}, in forward, hidden = self.block_{b}(hidden, mask, scale={c})",
    "{time} TRACE scheduler: slot {d} free, {a} waiting, budget {b}",
)
_KINDS = {
    "documents": 30,
    "step": 20,
    "round": 3,
    "loss": 20,
    "stats": 20,
    "bar": 30,
    "oom": 0.1,
    "net": 0.5,
    "data": 0.3,
}
_ERRORS = {
    "oom": ("CUDA failure: cannot allocate", "process ran out of memory", "OOM score 998"),
    "net": ("connection refused", "request timed out", "network is down"),
    "data": ("corrupt page", "bad checksum", "parse error"),
}


@dataclass
class Truth:
    """What a log says: matching records of each error, and the last numbers of everything else."""

    records: int = 0
    errors: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_ERRORS, 0))
    positions: dict[str, tuple[int, int]] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)


def write_log(path: Path, profile: str, size: int, seed: int = 1) -> Truth:
    """Write about ``size`` bytes of a profile, whole records only."""
    truth, random_source = Truth(), random.Random(f"{profile} {seed}")
    lines = _flood(random_source, truth) if profile == FLOOD else _work(random_source, truth, SHARES[profile])
    with path.open("wb") as log:
        written, held, pending = 0, list[bytes](), 0
        for line in lines:
            held.append(line)
            pending += len(line)
            truth.records += 1
            if pending >= 1 << 20:
                log.write(b"".join(held))
                written, held, pending = written + pending, [], 0
                if written >= size:
                    break
    return truth


def _time(tick: int) -> str:
    seconds, thousandths = divmod(tick, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"2031-05-{1 + days % 28:02d}T{hours:02d}:{minutes:02d}:{seconds:02d}.{thousandths:03d}"


def _flood(source: random.Random, truth: Truth) -> Iterator[bytes]:
    below, tick = source.randrange, 0
    kinds = list(_ERRORS)
    while True:
        tick += below(3)
        kind = kinds[below(3)]
        truth.errors[kind] += 1
        what = f"{_ERRORS[kind][below(3)]}, attempt {below(10**6)} to 10.0.3.{below(255)}"
        yield f"{_time(tick)} ERROR client {below(64)}: {what}\n".encode()


def _work(source: random.Random, truth: Truth, share: float) -> Iterator[bytes]:
    chance, below = source.random, source.randrange
    kinds, weights = list(_KINDS), list(_KINDS.values())
    documents = step = rounds = bar = tick = 0
    while True:
        tick += below(300)
        time = _time(tick)
        if chance() >= share:
            line = _LIBRARY_LINES[below(len(_LIBRARY_LINES))]
            yield line.format(time=time, a=below(200_000), b=below(4000), c=below(900), d=below(16)).encode() + b"\n"
            continue
        kind = source.choices(kinds, weights)[0]
        if kind == "documents":
            documents += below(50)
            rate = below(90_000) / 100
            truth.positions["documents"], truth.values["rate"] = (documents, 90_000_000), rate
            yield f"{time} INFO  embed: Encoded {documents} of 90000000 documents, {rate:.2f} docs/s\n".encode()
        elif kind == "step":
            step += 1
            truth.positions["step"] = (step, 5_000_000)
            yield f"{time} INFO  loop: Step {step}/5000000 took {below(900)} ms\n".encode()
        elif kind == "round":
            rounds += 1
            truth.values["round"] = rounds
            yield f"{time} INFO  loop: Round {rounds} begins\n".encode()
        elif kind == "loss":
            loss = below(30_000) / 10_000
            truth.values["loss"] = loss
            yield f"{time} INFO  loop: at {step} train_loss={loss:.4f} scale=1024\n".encode()
        elif kind == "stats":
            running, speed = below(256), below(500_000) / 100
            truth.values |= {"running": running, "speed": speed}
            what = f"waiting {below(90)}, running: {running}, cache 0.{below(100):02d}, tokens/s: {speed:.2f}, graph on"
            yield f"[{time[:19]} r0] Engine stats: {what}\n".encode()
        elif kind == "bar":
            bar += 1
            truth.positions["bar"] = (bar, 2_000_000)
            part = bar * 100 // 2_000_000
            drawn = f"{part:3d}%|{'█' * (part // 10):10s}| {bar}/2000000"
            yield f"Warming: {drawn} [{bar // 60:02d}:{bar % 60:02d}<1:44, 7.1it/s]\r".encode()
        else:
            truth.errors[kind] += 1
            yield f"{time} ERROR worker: {_ERRORS[kind][below(3)]} (shard {below(4000)})\n".encode()
