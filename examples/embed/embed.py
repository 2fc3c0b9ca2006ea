#!/usr/bin/env python3
"""Embeds passages of real text on the CPU: a worker to launch, to watch and to break.

One process is one shard. Item ``id`` is the passage ``id % passages`` of the
corpus, and shard k of n has the items with ``id % n == k``. Each becomes a
vector: counts of its character 3-, 4- and 5-grams, added with a sign into a few
slots (Weinberger et al. 2009, "Feature Hashing"), with the length 1.

Standard library alone. Without options it runs as shard 0 of 1; a launcher sets
RANK, WORLD_SIZE, LOCAL_RANK, GPUJOB_OUTPUT_DIR and GPUJOB_CHECKPOINT_DIR.
"""

import argparse
import hashlib
import json
import logging
import math
import os
import re
import resource
import signal
import sys
import time
import zlib
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import mul
from pathlib import Path
from typing import BinaryIO

LICENSES = Path("/usr/share/common-licenses")
NOT_CORPUS = {"__pycache__", "test", "tests", "idle_test", "site-packages", "dist-packages"}
WRITTEN = re.compile(r"(output|checkpoint|failed_once)_worker_\d")  # else --corpus . grows as it is read
GRAM_LENGTHS = (3, 4, 5)
DECIMALS = 5
NEIGHBOURS = 32  # how many of the shard's last passages are searched for the nearest one
BATCH_LINES, BATCH_SECONDS = 16, 0.2  # at most this much finished work is not yet in the output file
LOG_SECONDS = 1.0
RATE_SECONDS = 10.0  # the rate in the log is that of this last while
BURST_SECONDS = 0.1  # how far --rate lets a late worker catch up
SLICE_SECONDS = 0.1  # the longest sleep, so that a signal is answered soon
CHECKPOINTS_KEPT = 2
CHECKPOINT_SCHEMA = 1
MIB = 1024 * 1024

EXAMPLE = """
example: some work, and the same killed half-way and resumed
  python3 -u embed.py --items 100
  python3 -u embed.py --items 2000 --output-dir out --signal KILL --at 1000
  python3 -u embed.py --items 2000 --output-dir out
"""


class EmbedError(Exception):
    """Something that the user can put right: a bad option, an unusable folder."""


# The corpus


@dataclass(frozen=True)
class Text:
    """One file of the corpus."""

    name: str
    path: Path
    passages: int


class Corpus:
    """Passages of equal size out of files, each read when it is asked for.

    A file gives its whole passages; the shorter rest is left out, so that all
    items cost alike. A file shorter than a passage is one passage.
    """

    def __init__(self, files: Sequence[tuple[str, Path]], passage_bytes: int) -> None:
        self.passage_bytes = passage_bytes
        self.texts: list[Text] = []
        self._first: list[int] = []
        self._open: tuple[int, BinaryIO] | None = None
        self.passages = 0
        digest = hashlib.sha256()
        for name, path in files:
            size = path.stat().st_size
            if size:
                self._first.append(self.passages)
                self.texts.append(Text(name, path, max(1, size // passage_bytes)))
                self.passages += self.texts[-1].passages
                digest.update(f"{name}\0{size}\0".encode())
        self.digest = digest.hexdigest()[:16]

    def passage(self, item: int) -> tuple[str, str]:
        """Text and source of an item; past the last passage it starts again with the first."""
        index = item % self.passages
        place = bisect_right(self._first, index) - 1
        offset = (index - self._first[place]) * self.passage_bytes
        if self._open is None or self._open[0] != place:
            self.close()
            self._open = (place, open(self.texts[place].path, "rb"))  # noqa: SIM115 (open for the next item)
        source = self._open[1]
        source.seek(offset)
        data = source.read(self.passage_bytes)
        # A character cut in two at either end is dropped.
        return data.decode("utf-8", "ignore"), f"{self.texts[place].name}:{offset}"

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None


def text_files(folder: Path) -> Iterator[Path]:
    """Regular files below a folder in a fixed order; not hidden ones, binary ones or what a worker wrote."""
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(here, name)
            if not WRITTEN.match(name) and not name.startswith(".") and path.is_file() and os.access(path, os.R_OK):
                with open(path, "rb") as source:
                    if b"\0" not in source.read(1024):
                        yield path


def installed_texts() -> Iterator[tuple[str, Path]]:
    """What each Debian or Python installation has: the library's sources, pydoc's topics, licenses."""
    library = Path(os.__file__).parent
    for here, folders, names in os.walk(library):
        folders[:] = sorted(name for name in folders if name not in NOT_CORPUS and "." not in name)
        for name in sorted(names):
            if name.endswith(".py"):
                path = Path(here, name)
                yield f"{library.name}/{path.relative_to(library)}", path
    if LICENSES.is_dir():
        for path in text_files(LICENSES):
            yield f"{LICENSES.name}/{path.name}", path


def named_texts(paths: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """The files that ``--corpus`` names, and the text files in the folders that it names."""
    for path in paths:
        if path.is_dir():
            for found in text_files(path):
                yield f"{path.resolve().name}/{found.relative_to(path)}", found
        elif path.is_file():
            yield path.name, path
        else:
            raise EmbedError(f"--corpus: {str(path)!r} is not a file or folder")


def read_corpus(paths: Sequence[Path], passage_bytes: int) -> Corpus:
    """The corpus, each file once even when links lead to it."""
    files: dict[str, tuple[str, Path]] = {}
    for name, path in named_texts(paths) if paths else installed_texts():
        # A file name need not be UTF-8; the output is.
        printable = os.fsencode(name).decode("utf-8", "backslashreplace")
        files.setdefault(os.path.realpath(path), (printable, path))
    corpus = Corpus(list(files.values()), passage_bytes)
    if not corpus.passages:
        raise EmbedError(f"no text in {', '.join(repr(str(path)) for path in paths) or 'this installation'}")
    return corpus


# The embedding


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


# Options


@dataclass(frozen=True)
class Options:
    """What the command line and the environment ask for."""

    shard: int
    shards: int
    items: int
    output_dir: Path
    checkpoint_dir: Path
    corpus: tuple[Path, ...]
    dim: int
    seed: int
    passage_bytes: int
    rate: float | None
    log_every: int
    progress_file: Path | None
    checkpoint_every: int
    checkpoint_seconds: float
    fresh: bool
    local_rank: int
    only_rank: int | None
    at: int
    once: bool
    slow_down: float | None
    stall: float | None
    leak: float | None
    throw: bool
    exit_code: int | None
    signal: signal.Signals | None
    cuda_oom: bool
    ignore_sigterm: bool
    crash_after_ms: float | None
    no_log: bool
    no_output: bool
    cut_checkpoint: bool

    @property
    def share(self) -> int:
        """How many of the items are this shard's."""
        return len(range(self.shard, self.items, self.shards))

    @property
    def to_break(self) -> bool:
        """Whether the failure options are meant for this shard."""
        return self.only_rank in (None, self.shard)

    @property
    def output(self) -> Path:
        return self.output_dir / f"output_worker_{self.shard}.jsonl"

    @property
    def broken_marker(self) -> Path:
        """The file that says that this worker has failed already, for ``--once``."""
        return self.checkpoint_dir / f"failed_once_worker_{self.shard}"

    def fingerprint(self, corpus: Corpus) -> str:
        """Names what decides the bytes of the output; speed, logging and failures do not."""
        parts = (CHECKPOINT_SCHEMA, self.shard, self.shards, self.items, self.dim, self.seed)
        return hashlib.sha256(repr((*parts, corpus.passage_bytes, corpus.digest)).encode()).hexdigest()[:16]


def whole(least: int, most: int = 2**63) -> Callable[[str], int]:
    """A parser of whole numbers in a range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            above = f"of at least {least}" if most == 2**63 else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {above}")
        return value

    return parse


def number(least: float) -> Callable[[str], float]:
    """A parser of finite numbers from ``least`` up; 0 stands for "above 0"."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= least and value > 0):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a number {f'of at least {least:g}' if least else 'above 0'}"
            )
        return value

    return parse


def ending_signal(text: str) -> signal.Signals:
    """A signal by name or number, of those that end or stop a process by default (signal(7))."""
    harmless = {signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH}
    known = {name.removeprefix("SIG"): value for name, value in signal.Signals.__members__.items()}
    known |= {str(int(value)): value for value in signal.Signals}
    found = known.get(text.upper().removeprefix("SIG"))
    if found is None or found in harmless:
        what = "is not a signal" if found is None else "does not end a process"
        raise argparse.ArgumentTypeError(f"{text!r} {what}; KILL, TERM, SEGV, ABRT and STOP do")
    return found


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="embed.py",
        description="Embeds passages of real text on the CPU: a worker to launch, to watch and to break.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = top.add_argument_group("work").add_argument
    add("--items", type=whole(1), default=1000, metavar="N", help="of all shards together (%(default)s)")
    add("--shard", type=whole(0), metavar="K", help="which shard this is ($RANK, else 0)")
    add("--shards", type=whole(1), metavar="N", help="how many there are ($WORLD_SIZE, else 1)")
    help_text = "text files and folders of them (the Python library and the licenses of this machine)"
    add("--corpus", type=Path, nargs="+", default=[], metavar="PATH", help=help_text)
    add("--passage-bytes", type=whole(16, MIB), default=512, metavar="N", help="size of an item (%(default)s)")
    add("--dim", type=whole(1, 65536), default=64, metavar="N", help="size of a vector (%(default)s)")
    add("--seed", type=whole(0, 2**32 - 1), default=0, metavar="N", help="seed of the hashing (%(default)s)")
    add("--rate", type=number(0), metavar="R", help="at most R items/s, by sleeping")

    group = top.add_argument_group("files")
    add = group.add_argument
    help_text = "of output_worker_K.jsonl ($GPUJOB_OUTPUT_DIR, else embed-out)"
    add("--output-dir", type=Path, metavar="DIR", help=help_text)
    help_text = "of checkpoint_worker_K_step_DONE.json ($GPUJOB_CHECKPOINT_DIR, else as the output)"
    add("--checkpoint-dir", type=Path, metavar="DIR", help=help_text)
    add(
        "--checkpoint-every",
        type=whole(1),
        default=250,
        metavar="N",
        help="items between checkpoints (%(default)s)",
    )
    help_text = "how long a checkpoint takes at least, as one of a large model does (0)"
    add("--checkpoint-seconds", type=number(0), default=0.0, metavar="S", help=help_text)
    add(
        "--log-every",
        type=whole(1),
        default=100,
        metavar="N",
        help="items between log lines, and each second (%(default)s)",
    )
    help_text = "a line of JSON for each log line, appended to this file ($GPUJOB_PROGRESS_FILE)"
    add("--progress-file", nargs="?", const="", metavar="FILE", help=help_text)
    add = group.add_mutually_exclusive_group().add_argument
    help_text = "go on from the last checkpoint of the same work, if there is one (the default)"
    add("--resume", dest="fresh", action="store_false", default=False, help=help_text)
    add("--fresh", action="store_true", help="start with the first item, over what is there")

    group = top.add_argument_group("failures", "several may be given; the one that ends the worker comes last")
    add = group.add_argument
    add("--only-rank", type=whole(0), metavar="K", help="fail in this shard alone")
    add("--at", type=whole(0), metavar="ITEM", help="fail when so many of the shard's items are done (0)")
    add(
        "--once",
        action="store_true",
        help="do not fail again after a restart (noted in the checkpoint folder)",
    )
    add("--slow-down", type=number(1), metavar="FACTOR", help="each item takes so many times as long")
    help_text = "alive, without work and log lines (for ever)"
    add("--stall", type=number(0), nargs="?", const=math.inf, metavar="SECONDS", help=help_text)
    add("--leak", type=number(0), metavar="MIB_PER_SECOND", help="keep and touch more and more memory")
    add("--ignore-sigterm", action="store_true", help="so that only SIGKILL ends it")
    add("--no-log", action="store_true", help="work in silence")
    add("--no-output", action="store_true", help="work on and say so, but write no more results")
    add("--cut-checkpoint", action="store_true", help="leave the checkpoints from then on half-written")
    help_text = "exit 3 so long after the start, wherever it is (takes no --at)"
    add("--crash-after-ms", type=whole(0), metavar="MS", help=help_text)
    add = group.add_mutually_exclusive_group().add_argument
    add("--raise", dest="throw", action="store_true", help="an uncaught exception: traceback, exit 1")
    add("--cuda-oom", action="store_true", help="the one that PyTorch raises without GPU memory: exit 1")
    add("--exit-code", type=whole(0, 255), metavar="N", help="exit early with this status")
    add(
        "--signal",
        type=ending_signal,
        metavar="NAME",
        help="be killed by this signal (KILL, SEGV, STOP, ...)",
    )
    return top


def parse_options(arguments: Sequence[str], environ: dict[str, str]) -> Options:
    """Options of a command line; what it leaves out is taken from the environment."""
    top = parser()
    given = top.parse_args(arguments)

    def rank_of(name: str, default: int, least: int = 0) -> int:
        try:
            return whole(least)(environ.get(name) or str(default))
        except argparse.ArgumentTypeError as error:
            top.error(f"{name} in the environment: {error}")

    values = dict(vars(given))
    if given.shard is None:
        values["shard"] = rank_of("RANK", 0)
    if given.shards is None:
        values["shards"] = rank_of("WORLD_SIZE", 1, least=1)
    values["local_rank"] = rank_of("LOCAL_RANK", 0)
    output_dir = given.output_dir or Path(environ.get("GPUJOB_OUTPUT_DIR") or "embed-out")
    checkpoint_dir = given.checkpoint_dir or Path(environ.get("GPUJOB_CHECKPOINT_DIR") or output_dir)
    values |= {"output_dir": output_dir, "checkpoint_dir": checkpoint_dir}
    values["corpus"] = tuple(given.corpus)
    progress_file = given.progress_file or environ.get("GPUJOB_PROGRESS_FILE") or None
    values["progress_file"] = Path(progress_file) if progress_file and given.progress_file is not None else None
    values["at"] = given.at or 0
    options = Options(**values)

    ends = (options.throw, options.cuda_oom, options.exit_code is not None, options.signal)
    stays = (options.slow_down, options.stall, options.leak, options.ignore_sigterm)
    placed = any((*ends, *stays, options.no_log, options.no_output, options.cut_checkpoint))
    most = math.ceil(options.items / options.shards)
    problems = []
    if options.shard >= options.shards:
        problems.append(f"there is no shard {options.shard}: the {options.shards} shards count from 0")
    if options.only_rank is not None and options.only_rank >= options.shards:
        problems.append(f"--only-rank: {options.only_rank} is not one of the {options.shards} shards")
    if options.at > most:
        problems.append(f"--at: {options.at} is never reached, a shard has at most {most} items")
    if given.at is not None and not placed:
        problems.append("--at: no failure that takes place at an item is asked for")
    if (options.only_rank is not None or options.once) and not placed and options.crash_after_ms is None:
        problems.append("--only-rank and --once: no failure is asked for")
    if given.progress_file == "" and not progress_file:
        problems.append("--progress-file: name a file, there is none in GPUJOB_PROGRESS_FILE")
    if problems:
        top.error("; ".join(problems))
    return options


# Checkpoints


@dataclass(frozen=True)
class Checkpoint:
    """How far a shard has come, and the size of its output at that point."""

    fingerprint: str
    done: int
    share: int
    output_bytes: int
    schema: int = CHECKPOINT_SCHEMA


def checkpoint_name(shard: int, done: int) -> str:
    return f"checkpoint_worker_{shard}_step_{done}.json"


def checkpoint_files(folder: Path, shard: int) -> list[Path]:
    """The shard's checkpoint files, the last one first."""
    pattern = re.compile(rf"checkpoint_worker_{shard}_step_(\d+)\.json")
    found = [(int(match[1]), entry) for entry in folder.iterdir() if (match := pattern.fullmatch(entry.name))]
    return [path for _, path in sorted(found, reverse=True)]


def read_checkpoint(path: Path, fingerprint: str, output: Path) -> Checkpoint:
    """A checkpoint that the work can go on from.

    Raises EmbedError when it cannot: a damaged file, one of other options or of
    another corpus, or one that counts on more output than there is.
    """
    try:
        record = json.loads(path.read_text())
        checkpoint = Checkpoint(**{name: record[name] for name in Checkpoint.__dataclass_fields__})
        if checkpoint.fingerprint != fingerprint:
            raise EmbedError("it is of other options or of another corpus")
        with open(output, "rb") as lines:
            if checkpoint.output_bytes:
                lines.seek(checkpoint.output_bytes - 1)
                if lines.read(1) != b"\n":
                    raise EmbedError(f"{output.name} has no line that ends at byte {checkpoint.output_bytes}")
    except FileNotFoundError as error:
        raise EmbedError(f"{output.name} is gone") from error
    except (KeyError, TypeError, ValueError) as error:
        raise EmbedError("it is damaged") from error
    return checkpoint


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that its name never leads to a part of it, whatever is killed or loses power."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError:
        pass  # some network file systems have no fsync of a folder
    finally:
        os.close(folder)


# The worker


class Simulated(RuntimeError):
    """The failure that ``--raise`` asks for."""


class OutOfMemoryError(RuntimeError):
    """Stands in for PyTorch's, so that the traceback reads as a real one does."""

    __module__ = "torch.cuda"


CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU {gpu} has a total capacity of 79.15 GiB of which "
    "1.21 GiB is free. Including non-PyTorch memory, this process has 77.93 GiB memory in use. Of the "
    "allocated memory 75.02 GiB is allocated by PyTorch, and 1.88 GiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
    "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)


def die_by(number: signal.Signals) -> None:
    """End this process by a signal, so that its parent sees that signal; return if it only stopped it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    if number not in (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
        sys.exit(128 + number)  # the first process of a container outlives its own signals


class Worker:
    """One shard's work from its first item, or its last checkpoint, to its last item."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.done = 0
        self.stop: signal.Signals | None = None
        self._output: BinaryIO | None = None
        self._output_bytes = 0
        self._lines: list[str] = []
        self._flushed_at = self._due = time.monotonic()
        self._logged: deque[tuple[float, int]] = deque()
        self._saved: int | None = None
        self._broken = False
        self._slow_down = 1.0
        self._keeps_results = False
        self._cuts_checkpoints = False
        self._leaking_since: float | None = None
        self._leaked: list[bytes] = []
        self._leaked_bytes = 0

    def ask_to_stop(self, number: int, _frame: object) -> None:
        """Signal handler: the item in work is finished first."""
        self.stop = signal.Signals(number)

    def run(self) -> None:
        """Do the work; it ends early, with a checkpoint, once a signal asked for that."""
        options = self.options
        self._break()
        corpus = read_corpus(options.corpus, options.passage_bytes)
        logging.info(
            "Worker %d of %d on %s: pid %d, %d of %d items, %d passages in %d files",
            options.shard, options.shards, os.uname().nodename, os.getpid(),
            options.share, options.items, corpus.passages, len(corpus.texts),
        )  # fmt: skip
        fingerprint = options.fingerprint(corpus)
        self._resume(fingerprint)
        with open(options.output, "r+b" if self._output_bytes else "wb") as self._output:
            if self._output.seek(0, os.SEEK_END) > self._output_bytes:
                self._output.truncate(self._output_bytes)
                self._output.seek(self._output_bytes)
            self._work(corpus, fingerprint)
        corpus.close()
        if self.stop is not None and self.done < options.share:
            die_by(self.stop)
        self._break()
        self._log_progress()

    def _work(self, corpus: Corpus, fingerprint: str) -> None:
        options, share = self.options, self.options.share
        now = time.monotonic()
        self._logged.append((now, self.done))
        self._flushed_at = self._due = now
        # What came before a resume is embedded again, so that the output does not tell that there was one.
        recent: deque[tuple[int, list[float]]] = deque(maxlen=NEIGHBOURS)
        for earlier in range(max(0, self.done - NEIGHBOURS), self.done):
            item = options.shard + earlier * options.shards
            recent.append((item, embed(corpus.passage(item)[0], options.dim, options.seed)))
        while self.done < share:
            self._break()
            if self.stop is not None:
                logging.info("Received %s, stopping with a checkpoint", self.stop.name)
                self._log_progress()
                break
            started = time.monotonic()
            item = options.shard + self.done * options.shards
            text, source = corpus.passage(item)
            vector = embed(text, options.dim, options.seed)
            nearest = max(((cosine(vector, other), -at) for at, other in recent), default=None)
            recent.append((item, vector))
            record = {
                "id": item,
                "source": source,
                "nearest": None if nearest is None else -nearest[1],
                "similarity": None if nearest is None else round(nearest[0], DECIMALS),
                "embedding": [round(value, DECIMALS) + 0.0 for value in vector],  # + 0.0: no -0.0
            }
            self._lines.append(json.dumps(record, separators=(",", ":")) + "\n")
            self.done += 1
            if self.done % options.checkpoint_every == 0 and self.done < share:
                self._save(fingerprint)
            self._tick()
            if self.done < share and (options.rate or self._slow_down > 1):
                self._pace(started)
        self._save(fingerprint)

    # Output and checkpoints

    def _flush(self) -> None:
        """Bring the finished lines into the file: a kill at any moment leaves at most the last one cut."""
        if self._keeps_results:
            self._lines.clear()
        if self._output is not None and self._lines:
            data = "".join(self._lines).encode("ascii")
            self._lines.clear()
            self._output.write(data)
            self._output.flush()
            self._output_bytes += len(data)
        self._flushed_at = time.monotonic()

    def _save(self, fingerprint: str) -> None:
        """Write a checkpoint, after the output that it counts on is on disk, and drop the oldest."""
        if self._saved == self.done or self._output is None:
            return
        self._flush()
        os.fsync(self._output.fileno())
        if self.options.checkpoint_seconds and self.done < self.options.share:
            logging.info("Saving a checkpoint at item %d", self.done)
            self._wait(self.options.checkpoint_seconds)
        checkpoint = Checkpoint(fingerprint, self.done, self.options.share, self._output_bytes)
        name = checkpoint_name(self.options.shard, self.done)
        folder = self.options.checkpoint_dir
        text = json.dumps(asdict(checkpoint)) + "\n"
        if self._cuts_checkpoints:
            (folder / name).write_text(text[: len(text) // 2])
        else:
            write_atomically(folder / name, text)
        self._saved = self.done
        for old in checkpoint_files(folder, self.options.shard)[CHECKPOINTS_KEPT:]:
            old.unlink(missing_ok=True)
        logging.info("Saved %s", name)

    def _resume(self, fingerprint: str) -> None:
        """Find where to start, and remove the checkpoints that this start makes void."""
        options = self.options
        for path in checkpoint_files(options.checkpoint_dir, options.shard):
            if self._saved is None and not options.fresh:
                try:
                    checkpoint = read_checkpoint(path, fingerprint, options.output)
                except EmbedError as error:
                    logging.warning("Cannot resume from %s: %s", path.name, error)
                else:
                    self.done = self._saved = checkpoint.done
                    self._output_bytes = checkpoint.output_bytes
                    logging.info("Resuming at %d/%d items from %s", self.done, options.share, path.name)
                    self._tell(resumed=True)
            if self._saved is None:
                path.unlink(missing_ok=True)
        for left in options.checkpoint_dir.glob(f".checkpoint_worker_{options.shard}_step_*.json.tmp"):
            left.unlink(missing_ok=True)

    # Time

    def _tick(self) -> None:
        """What is due from time to time, in work and in waiting."""
        self._leak()
        now = time.monotonic()
        if len(self._lines) >= BATCH_LINES or now - self._flushed_at >= BATCH_SECONDS:
            self._flush()
        logged_at, logged = self._logged[-1]
        of_items = self.done != logged and self.done % self.options.log_every == 0
        if self.done < self.options.share and (of_items or now - logged_at >= LOG_SECONDS):
            self._log_progress()

    def _log_progress(self) -> None:
        """One line with the position; the file holds what it counts."""
        self._flush()
        now = time.monotonic()
        while len(self._logged) > 1 and now - self._logged[1][0] >= RATE_SECONDS:
            self._logged.popleft()
        since, before = self._logged[0]
        rate = (self.done - before) / max(now - since, 1e-6)
        self._logged.append((now, self.done))
        logging.info("Processed %d/%d items (%.1f items/s)", self.done, self.options.share, rate)
        self._tell(rate=round(rate, 1))

    def _tell(self, **facts: float) -> None:
        """The position for whoever follows the progress file; nothing in silence."""
        path = self.options.progress_file
        if path is not None and logging.getLogger().isEnabledFor(logging.INFO):
            try:
                with open(path, "a") as out:
                    out.write(json.dumps({"done": self.done, "total": self.options.share, **facts}) + "\n")
            except OSError as error:
                raise EmbedError(f"cannot write to {str(path)!r}: {error.strerror}") from error

    def _wait(self, seconds: float) -> None:
        """Do nothing for so long, or until a signal asks for the end."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self.stop is None:
            time.sleep(min(left, SLICE_SECONDS))

    def _pace(self, started: float) -> None:
        """Sleep until the next item may begin."""
        now = time.monotonic()
        period = max(now - started, 1 / self.options.rate if self.options.rate else 0.0) * self._slow_down
        self._due = max(self._due, started - BURST_SECONDS) + period
        while (left := self._due - time.monotonic()) > 0 and self.stop is None:
            time.sleep(min(left, SLICE_SECONDS))
            self._tick()

    # Failures

    def _break(self) -> None:
        """Carry out the failure options, once their item is reached."""
        options = self.options
        if self._broken or self.done < options.at or not options.to_break:
            return
        self._broken = True
        if options.once:
            if options.broken_marker.exists():
                return
            options.broken_marker.touch()
        if options.no_log:
            logging.disable()
        if options.ignore_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if options.leak is not None:
            self._leaking_since = time.monotonic()
        self._slow_down = options.slow_down or 1.0
        self._flush()
        self._keeps_results, self._cuts_checkpoints = options.no_output, options.cut_checkpoint
        if options.stall is not None:
            self._stall(options.stall)
        if options.throw:
            raise Simulated(f"simulated failure of worker {options.shard} at item {self.done}")
        if options.cuda_oom:
            raise OutOfMemoryError(CUDA_OOM.format(gpu=options.local_rank))
        if options.exit_code is not None:
            sys.exit(options.exit_code)
        if options.signal is not None:
            die_by(options.signal)

    def _stall(self, seconds: float) -> None:
        """Neither work nor log, for so long or until a signal."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and self.stop is None:
            time.sleep(min(left, SLICE_SECONDS))
            self._leak()

    def _leak(self) -> None:
        """Take the memory that is due by now."""
        if self._leaking_since is not None and self.options.leak is not None:
            due = int(self.options.leak * MIB * (time.monotonic() - self._leaking_since))
            if (missing := due - self._leaked_bytes) >= MIB // 16:
                self._leaked.append(b"\xa5" * missing)  # written, since untouched pages cost nothing
                self._leaked_bytes = due


def crash_later(options: Options) -> None:
    """Set the alarm of ``--crash-after-ms``."""
    if options.crash_after_ms is None or not options.to_break:
        return
    if options.once:
        if options.broken_marker.exists():
            return
        options.broken_marker.touch()
    if options.crash_after_ms == 0:
        os._exit(3)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(3))
    signal.setitimer(signal.ITIMER_REAL, options.crash_after_ms / 1000)


def main() -> None:
    options = parse_options(sys.argv[1:], dict(os.environ))
    logging.basicConfig(
        stream=sys.stdout,
        level=logging.INFO,
        format="%(asctime)s [%(levelname)s] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as in other commands: `embed.py | head` ends quietly
    worker = Worker(options)
    for number in (signal.SIGTERM, signal.SIGINT):
        # A parent that ignores it means its children too, as a shell does with SIGINT and `&`.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, worker.ask_to_stop)
    try:
        for folder in (options.output_dir, options.checkpoint_dir):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise EmbedError(f"cannot make the folder {str(folder)!r}: {error.strerror}") from error
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                raise EmbedError(f"cannot write in the folder {str(folder)!r}")
        crash_later(options)
        worker.run()
    except EmbedError as error:
        print(f"embed.py: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
