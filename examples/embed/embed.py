#!/usr/bin/env python3
"""An example workload: embeds passages of text on the CPU. Easy to launch, watch and resume.

One process is one shard. Item ``id`` is passage ``id % passages`` of the corpus, and shard k of n has the items with
``id % n == k``. The vector of a passage counts its character 3-, 4- and 5-grams, added with a sign into a few slots
(Weinberger et al. 2009, "Feature Hashing"), and has the length 1.

Standard library alone. A launcher sets RANK, WORLD_SIZE, GPUJOB_OUTPUT_DIR, GPUJOB_CHECKPOINT_DIR and
GPUJOB_PROGRESS_FILE; without them the process is shard 0 of 1.
"""

import argparse
import hashlib
import json
import logging
import math
import os
import re
import signal
import sys
import time
import zlib
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter, mul
from pathlib import Path
from typing import Any

LICENSES = Path("/usr/share/common-licenses")
SKIPPED = re.compile(r"\.|(output|checkpoint)_worker_\d")  # hidden, or written by workers, else --corpus . grows
GRAM_LENGTHS = (3, 4, 5)
DECIMALS = 5
NEIGHBOURS = 32  # how many of the shard's last passages are searched for the nearest one
LOG_SECONDS = 1.0  # longest time between two log lines
RATE_SECONDS = 10.0  # the rate in the log is that of this last while
BURST_SECONDS = 0.1  # how far --rate lets a late worker catch up
SLEEP_SECONDS = 0.1  # longest sleep, so that a signal is answered soon
CHECKPOINTS_KEPT = 2

EXAMPLE = """
example: some work, and the same failing half-way and resumed
  python3 -u embed.py --items 100
  python3 -u embed.py --items 2000 --output-dir out --fail-at 1000
  python3 -u embed.py --items 2000 --output-dir out
"""


def read(path: Path, offset: int, size: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)


def corpus_files(paths: Sequence[Path]) -> Iterator[Path]:
    """The files of ``--corpus``, by default the modules of the Python library and the licenses of a Debian machine."""
    if not paths:
        paths = [*sorted(Path(os.__file__).parent.glob("*.py")), *sorted(LICENSES.glob("*"))]
    for path in paths:
        if path.is_file():
            yield path
        elif not path.is_dir():
            raise ValueError(f"--corpus: {str(path)!r} is not a file or folder")
        for found in sorted(path.rglob("*")):
            skipped = any(map(SKIPPED.match, found.relative_to(path).parts))
            readable = not skipped and found.is_file() and os.access(found, os.R_OK)
            if readable and b"\0" not in read(found, 0, 1024):
                yield found


class Corpus:
    """Passages of equal size, read when they are needed.

    The end of a file that fills no passage is left out, so that all items cost alike. A short file is one passage.
    """

    def __init__(self, paths: Sequence[Path], passage_bytes: int) -> None:
        self.passage_bytes = passage_bytes
        self.passages = 0
        files: dict[str, Path] = {}
        self._first: list[int] = []  # the number of each file's first passage
        digest = hashlib.sha256()
        for path in corpus_files(paths):
            size = path.stat().st_size
            if size and path is files.setdefault(os.path.realpath(path), path):  # once, even when links lead to it
                self._first.append(self.passages)
                self.passages += max(1, size // passage_bytes)
                digest.update(os.fsencode(f"{path.name}\0{size}\0"))
        self.files = list(files.values())
        self.digest = digest.hexdigest()
        if not self.passages:
            raise ValueError(f"no text in {', '.join(repr(str(path)) for path in paths) or 'this installation'}")

    def passage(self, item: int) -> tuple[str, str]:
        """Text and source of an item; passages repeat after the last one."""
        number = item % self.passages
        index = bisect_right(self._first, number) - 1
        path, offset = self.files[index], (number - self._first[index]) * self.passage_bytes
        name = os.fsencode("/".join(path.parts[-2:])).decode("utf-8", "backslashreplace")
        data = read(path, offset, self.passage_bytes)
        return data.decode("utf-8", "ignore"), f"{name}:{offset}"  # a character cut in two at either end is dropped


def embed(text: str, dim: int, seed: int) -> list[float]:
    """Signed hashed n-gram counts with length 1; case and the amount of white space do not count."""
    padded = f" {' '.join(text.lower().split())} ".ljust(GRAM_LENGTHS[0])
    data = padded.encode("utf-32-le")  # four bytes a character, so that a slice is a whole number of them
    vector = [0.0] * dim
    for length in GRAM_LENGTHS:
        grams = Counter(data[at : at + 4 * length] for at in range(0, len(data) - 4 * length + 1, 4))
        for gram, count in grams.items():
            mixed = zlib.crc32(gram, seed) * 0x9E3779B1 & 0xFFFFFFFF
            weight = 1.0 + math.log(count)
            vector[(mixed >> 7) % dim] += weight if mixed & 0x80000000 else -weight
    norm = math.sqrt(sum(map(mul, vector, vector)))
    if norm == 0.0:  # a few grams that cancel out
        vector[zlib.crc32(data, seed) % dim] = norm = 1.0
    return [value / norm for value in vector]


def cosine(left: Sequence[float], right: Sequence[float]) -> float:
    """Similarity of two vectors of length 1, from -1 to 1."""
    return math.fsum(map(mul, left, right))


def at_least(least: float, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    """A parser of numbers from ``least`` up."""

    def parse(text: str) -> float:
        try:
            if least <= (value := kind(text)) < math.inf:
                return value
        except ValueError:
            pass
        what = "whole number" if kind is int else "number"
        raise argparse.ArgumentTypeError(f"{text!r} is not a {what} of at least {least:g}")

    return parse


def parse_options(arguments: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
    """Parse the command line; defaults come from the launcher's variables."""
    parser = argparse.ArgumentParser(
        prog="embed.py",
        description="Embeds passages of real text on the CPU: a model of a worker to launch and watch.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(name: str, help_text: str, default: object = None, **settings: Any) -> None:
        parser.add_argument(name, help=help_text, default=default, **settings)

    def count(name: str, help_text: str, default: object = None, least: int = 1) -> None:
        add(name, help_text, default, type=at_least(least), metavar="N")

    count("--items", "of all shards together (%(default)s)", 1000)
    count("--shard", "number of this shard ($RANK, else 0)", environ.get("RANK") or 0, least=0)
    count("--shards", "how many there are ($WORLD_SIZE, else 1)", environ.get("WORLD_SIZE") or 1)
    text = "text files and folders of them (the Python library and the licenses of this machine)"
    add("--corpus", text, [], type=Path, nargs="+", metavar="PATH")
    count("--passage-bytes", "size of an item (%(default)s)", 512, least=16)
    count("--dim", "size of a vector (%(default)s)", 64)
    count("--seed", "seed of the hashing (%(default)s)", 0, least=0)
    add("--rate", "at most R items/s, by sleeping", type=at_least(0.001, float), metavar="R")
    text = "for output_worker_SHARD.jsonl ($GPUJOB_OUTPUT_DIR, else embed-out)"
    add("--output-dir", text, environ.get("GPUJOB_OUTPUT_DIR") or "embed-out", type=Path, metavar="DIR")
    text = "for checkpoint_worker_SHARD_step_DONE.json ($GPUJOB_CHECKPOINT_DIR, else as the output)"
    add("--checkpoint-dir", text, environ.get("GPUJOB_CHECKPOINT_DIR") or None, type=Path, metavar="DIR")
    count("--checkpoint-every", "items between checkpoints (%(default)s)", 250)
    count("--log-every", "items between log lines, in addition to one each second (%(default)s)", 100)
    text = "append a line of JSON for each log line to this file ($GPUJOB_PROGRESS_FILE)"
    add("--progress-file", text, nargs="?", const=environ.get("GPUJOB_PROGRESS_FILE", ""), metavar="FILE")
    add("--fresh", "start with the first item, not from the last checkpoint", False, action="store_true")
    text = "fail with an exception at the item with this number, to see what a failure looks like"
    count("--fail-at", text, least=0)
    options = parser.parse_args(arguments)
    options.checkpoint_dir = options.checkpoint_dir or options.output_dir
    if options.shard >= options.shards:
        parser.error(f"there is no shard {options.shard}: the {options.shards} shards count from 0")
    if options.fail_at is not None and options.fail_at >= options.items:
        parser.error(f"--fail-at: there is no item {options.fail_at}, the last one is {options.items - 1}")
    if options.progress_file == "":
        parser.error("--progress-file: name a file, there is none in GPUJOB_PROGRESS_FILE")
    return options


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically: after a kill or a power cut it is the old or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Worker:
    """One shard's work, from its first item or its last checkpoint to its last item."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.items = range(options.shard, options.items, options.shards)
        self.share = len(self.items)
        self.done = 0
        self.stop: signal.Signals | None = None  # the signal that asked for the end
        for folder in (options.output_dir, options.checkpoint_dir):
            folder.mkdir(parents=True, exist_ok=True)
        self.corpus = Corpus(options.corpus, options.passage_bytes)
        output_path = options.output_dir / f"output_worker_{options.shard}.jsonl"
        self._output = open(output_path, "ab")  # noqa: SIM115 (open until the process ends, as the next one)
        self._progress_file = open(options.progress_file, "a", buffering=1) if options.progress_file else None  # noqa: SIM115
        # Everything that decides the bytes of the output; a checkpoint of other work is of no use.
        work = [options.shard, options.shards, options.items, options.dim, options.seed, options.passage_bytes]
        self._fingerprint = hashlib.sha256(repr((work, self.corpus.digest)).encode()).hexdigest()[:16]
        self._saved: int | None = None  # items in the last checkpoint
        self._recent: deque[tuple[int, list[float]]] = deque(maxlen=NEIGHBOURS)
        self._due = time.monotonic()
        self._logged: deque[tuple[float, int]] = deque()  # time and position of the last log lines

    def run(self) -> None:
        """Do the work. A signal ends it early, with a checkpoint."""
        options = self.options
        for number in (signal.SIGTERM, signal.SIGINT):
            # Signals that the parent ignores stay ignored, as in a shell's background jobs.
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._ask_to_stop)
        logging.info(
            "Worker %d of %d on %s: pid %d, %d of %d items, %d passages in %d files",
            options.shard, options.shards, os.uname().nodename, os.getpid(),
            self.share, options.items, self.corpus.passages, len(self.corpus.files),
        )  # fmt: skip
        self._resume()
        while self.done < self.share:
            self._pace()
            if self.stop is not None:
                logging.info("Received %s, stopping with a checkpoint", self.stop.name)
                break
            item = self.items[self.done]
            if item == options.fail_at:
                raise RuntimeError(f"cannot embed item {item}: --fail-at asks for this failure")
            self._append(self._embed(item))
            self.done += 1
            if self.done % options.checkpoint_every == 0:
                self._save()
            self._log_if_due()
        self._save()
        self._log_progress()
        if self.stop is not None and self.done < self.share:
            # End by the same signal, so that the parent sees that the work was stopped.
            signal.signal(self.stop, signal.SIG_DFL)
            os.kill(os.getpid(), self.stop)
            sys.exit(128 + self.stop)  # the first process of a container outlives its own signals

    def _ask_to_stop(self, number: int, _frame: object) -> None:
        """Signal handler. The current item is finished first."""
        self.stop = signal.Signals(number)

    def _embed(self, item: int) -> dict[str, Any]:
        """The record of an item: its vector and the most similar one of the items before it."""
        text, source = self.corpus.passage(item)
        vector = embed(text, self.options.dim, self.options.seed)
        similar = [(cosine(vector, other), number) for number, other in self._recent]
        similarity, nearest = max(similar, key=itemgetter(0), default=(None, None))
        self._recent.append((item, vector))
        return {
            "id": item,
            "source": source,
            "nearest": nearest,
            "similarity": None if similarity is None else round(similarity, DECIMALS),
            "embedding": [round(value, DECIMALS) + 0.0 for value in vector],  # + 0.0: no -0.0
        }

    def _append(self, record: Mapping[str, Any]) -> None:
        """Write a whole line before the log counts it: a kill at any moment cuts at most the last line."""
        self._output.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        self._output.flush()

    def _checkpoints(self) -> list[Path]:
        """The shard's checkpoint files, the last one first."""
        files = self.options.checkpoint_dir.glob(f"checkpoint_worker_{self.options.shard}_step_*.json")
        steps = {int(step): path for path in files if (step := path.stem.rpartition("_")[2]).isdecimal()}
        return [steps[step] for step in sorted(steps, reverse=True)]

    def _save(self) -> None:
        """Write a checkpoint, after the output that it counts on is on disk, and remove old ones."""
        if self._saved == self.done:
            return
        os.fsync(self._output.fileno())
        state = {"fingerprint": self._fingerprint, "done": self.done, "output_bytes": self._output.tell()}
        path = self.options.checkpoint_dir / f"checkpoint_worker_{self.options.shard}_step_{self.done}.json"
        write_atomically(path, json.dumps(state) + "\n")
        self._saved = self.done
        for old in self._checkpoints()[CHECKPOINTS_KEPT:]:
            old.unlink(missing_ok=True)
        logging.info("Saved %s", path.name)

    def _read_checkpoint(self, path: Path) -> dict[str, Any]:
        """A checkpoint from which the work can continue, else ValueError."""
        try:
            state: dict[str, Any] = json.loads(path.read_text())
            of_this_work = state["fingerprint"] == self._fingerprint
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError("it is damaged") from error
        if not of_this_work:
            raise ValueError("it is of other options or of another corpus")
        if state["output_bytes"] > self._output.tell():
            raise ValueError("the output is shorter than it says")
        return state

    def _resume(self) -> None:
        """Continue from the last usable checkpoint, remove those after it, and cut the output to its size."""
        state = {"done": 0, "output_bytes": 0}
        for path in self._checkpoints():
            try:
                if self.options.fresh:
                    raise ValueError("--fresh was given")
                state = self._read_checkpoint(path)
            except ValueError as error:
                logging.warning("Cannot resume from %s: %s", path.name, error)
                path.unlink()
            else:
                self.done = self._saved = state["done"]
                logging.info("Resuming at %d/%d items from %s", self.done, self.share, path.name)
                self._tell(resumed=True)
                break
        for left_over in self.options.checkpoint_dir.glob(f".checkpoint_worker_{self.options.shard}_step_*.tmp"):
            left_over.unlink()
        if state["output_bytes"] < self._output.tell():
            self._output.truncate(state["output_bytes"])
            self._output.seek(state["output_bytes"])
        self._logged.append((time.monotonic(), self.done))
        for item in self.items[max(0, self.done - NEIGHBOURS) : self.done]:
            self._embed(item)  # again, so that the output is that of an uninterrupted run

    def _pace(self) -> None:
        """Sleep until the next item may begin."""
        if self.options.rate:
            while (left := self._due - time.monotonic()) > 0 and self.stop is None:
                time.sleep(min(left, SLEEP_SECONDS))
                self._log_if_due()
            self._due = max(self._due, time.monotonic() - BURST_SECONDS) + 1 / self.options.rate

    def _log_if_due(self) -> None:
        logged_at, logged = self._logged[-1]
        of_items = self.done != logged and self.done % self.options.log_every == 0
        if self.done < self.share and (of_items or time.monotonic() - logged_at >= LOG_SECONDS):
            self._log_progress()

    def _log_progress(self) -> None:
        """Log the position, which continues after a resume."""
        now = time.monotonic()
        while len(self._logged) > 1 and now - self._logged[1][0] >= RATE_SECONDS:
            self._logged.popleft()
        since, before = self._logged[0]
        rate = (self.done - before) / max(now - since, 1e-6)
        self._logged.append((now, self.done))
        logging.info("Processed %d/%d items (%.1f items/s)", self.done, self.share, rate)
        self._tell(rate=round(rate, 1))

    def _tell(self, **facts: float) -> None:
        """Write the position to the progress file."""
        if self._progress_file:
            self._progress_file.write(json.dumps({"done": self.done, "total": self.share, **facts}) + "\n")


def main(arguments: Sequence[str], worker_class: Callable[[argparse.Namespace], Worker] = Worker) -> None:
    options = parse_options(arguments, os.environ)
    logging.basicConfig(
        stream=sys.stdout,
        level=logging.INFO,
        format="%(asctime)s [%(levelname)s] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as in other commands: `embed.py | head` ends quietly
    try:
        worker = worker_class(options)
    except (OSError, ValueError) as error:
        print(f"embed.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    worker.run()


if __name__ == "__main__":
    main(sys.argv[1:])
