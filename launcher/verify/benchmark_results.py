"""Results of a serving job's benchmark, read from its files.

Known formats: one JSON object per concurrency from sa-bench, vLLM or SGLang, in its own file or as a line of JSON
Lines; the summary of AIPerf (https://docs.nvidia.com/aiperf/reference/json-export-schema) and GenAI-Perf.
"""

import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from exporter.contract.manifest import Manifest
from exporter.contract.records import JsonObject, JsonValue
from exporter.contract.report import WorkerReport
from exporter.progress.progress_file import PATTERN as PROGRESS_FILE
from launcher.verify.tokens import generates_no_text, part_generates_no_text

ROLE = "benchmark"
REQUESTS = "requests"  # unit of a benchmark
RESULT_FILES = "result_files"  # pattern name of a position that comes from these files, not from a log
# Folders with results in the run directory: the ``result_dir`` of each benchmark type.
RESULT_FOLDERS = re.compile(r"sa-bench_isl_\d+_osl_\d+|artifacts")
RUN_FOLDER = re.compile(r"concurrency_(\d{1,7})")  # folder of one AIPerf run
# Concurrency in a file name such as ``results_concurrency_4_gpus_8.json``, if its content has none.
CONCURRENCY_IN_NAME = re.compile(r"concurrency[_-]?(\d{1,7})(?!\d)")
LINES_SUFFIX = ".jsonl"  # name ending of files with a result per line
SUMMARY_SUFFIXES = ("_aiperf.json", "_genai_perf.json")  # name endings of AIPerf summaries
MOST_FILES = 100  # results in a report
MOST_NAMES = 10_000  # names read in one folder
FULL_READ_BYTES = 1 << 20  # larger files contain every request; their totals are at the start or end
PART_BYTES = 64 << 10
LINES_BYTES = 256 << 20  # read limit for a file with a result per line

SCALARS = {
    "max_concurrency": "concurrency",
    "request_rate": "request_rate_per_second",
    "duration": "duration_s",
    "num_prompts": "requests_expected",
    "completed": "requests",
    "total_input": "input_tokens",
    "total_input_tokens": "input_tokens",
    "total_output": "output_tokens",
    "total_output_tokens": "output_tokens",
    "request_throughput": "requests_per_second",
    "request_goodput": "good_requests_per_second",
    "output_throughput": "output_tokens_per_second",
    "total_token_throughput": "total_tokens_per_second",
    "total_throughput": "total_tokens_per_second",
}  # sa-bench's names, and ours
COUNTS = ("concurrency", "requests", "requests_expected", "input_tokens", "output_tokens")
MOST_COUNT = 1 << 53  # counts up to this are exact as a double, in any JSON reader
MOST_MEASURED = 1e15  # upper bound of other values, in any unit
RESULT_KEYS = ("completed", "request_throughput", "output_throughput")  # every sa-bench result has one of these keys
# Time to the first token, per output token, between tokens, and of the whole request: sa-bench's names, and ours.
LATENCIES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2el", "e2e_latency": "e2el"}
STATISTICS = ("mean", "median", "p90", "p95", "p99")
_TIMES = {
    f"{statistic}_{name}_ms": f"{ours}_{statistic}_s" for name, ours in LATENCIES.items() for statistic in STATISTICS
}
_NUMBER_IN_PART = re.compile(
    rb'"(%b)"\s{0,8}:\s{0,8}([-+.\deE]{1,40})\s{0,8}[,}]' % "|".join([*SCALARS, *_TIMES]).encode()
)

AIPERF_SCALARS = {
    "benchmark_duration": "duration_s",
    "request_count": "requests",
    "request_throughput": "requests_per_second",
    "goodput": "good_requests_per_second",
    "output_token_throughput": "output_tokens_per_second",
    "total_token_throughput": "total_tokens_per_second",
    "total_isl": "input_tokens",
    "total_osl": "output_tokens",
}
AIPERF_TIMES = {"time_to_first_token": "ttft", "inter_token_latency": "itl", "request_latency": "e2el"}
AIPERF_STATISTICS = {"avg": "mean", "p50": "median", "p90": "p90", "p95": "p95", "p99": "p99"}
FEW_DIGITS = 20  # digits shown of a number that is too large
DIGITS = 9  # decimals of seconds: exact nanoseconds
SECONDS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


Figures = dict[str, float]  # numbers of one result, under our names
Entry = dict[str, Any]  # entry of a report: the figures of a result with its `file`, or a `problem`
Result = Mapping[str, Any]  # the same, read
Results = Sequence[Result]

# Reason for a file that is not a result, such as other files in the folder.
UNKNOWN_FORMAT = "contains no result of a known benchmark"


class NoBenchmarkResult(Exception):
    """Why a file contains no benchmark result, for display."""


def has_benchmark(manifest: Manifest) -> bool:
    """Whether the job has a benchmark. Other jobs may use folders of these names for their own files."""
    return any(task.role == ROLE for task in manifest.tasks)


def read_benchmark_results(manifest: Manifest) -> list[Entry]:
    """Results of the benchmark, sorted by concurrency: rates per second, times in seconds.

    Each entry has its ``file`` and the numbers found there, or a ``problem``.
    """
    found: list[Entry] = []
    paths = _result_files(manifest.run_dir)
    for path, concurrency in paths:
        entry: Entry = {"file": str(path.relative_to(manifest.run_dir))}
        if concurrency is None and (named := CONCURRENCY_IN_NAME.search(path.name)) is not None:
            concurrency = int(named[1])
        if concurrency is not None:
            entry["concurrency"] = concurrency
        found += [entry | result for result in _read_results(path, MOST_FILES - len(found))]
        if len(found) >= MOST_FILES:
            break
    if more := sum(1 for _ in paths):
        found.append(
            {"file": "", "problem": f"{more} more files were not read; a report lists at most {MOST_FILES} results"}
        )
    last = math.inf
    return sorted(found, key=lambda entry: ("problem" in entry, entry.get("concurrency", last), entry["file"]))


def _read_results(path: Path, most: int) -> list[Entry]:
    """At most ``most`` results of one file, and its problem, if any."""
    found: list[Entry] = []
    try:
        if path.name.endswith(LINES_SUFFIX):
            with _opened(path) as source:
                results = _read_lines(source)
                found.extend(islice(results, most))  # keeps those before a truncated line
                if next(results, None) is not None:
                    raise NoBenchmarkResult(f"has too many results; a report lists at most {MOST_FILES}")
        else:
            found.append(_read_result(path))
    except NoBenchmarkResult as why:
        found.append({"problem": str(why)})
    except OSError as error:
        found.append({"problem": f"cannot be read: {error.strerror}"})
    return found


def _result_files(run_dir: Path) -> Iterator[tuple[Path, int | None]]:
    """Result files with the concurrency of their folder; for a run without results, its folder."""
    for folder in _entry_names(run_dir, RESULT_FOLDERS):
        for name in _entry_names(run_dir / folder):
            run = RUN_FOLDER.fullmatch(name)
            if run is not None:
                yield from ((path, int(run[1])) for path in _summaries(run_dir / folder / name))
            elif name.endswith((".json", LINES_SUFFIX)):
                yield run_dir / folder / name, None


def _summaries(folder: Path) -> list[Path]:
    """Summaries of one run, in its folder or one level below; the folder itself without any."""
    names = _entry_names(folder)
    below = [folder / name for name in names if os.path.isdir(folder / name)]
    folders = [(folder, names), *((path, _entry_names(path)) for path in below)]
    return [path / name for path, found in folders for name in found if name.endswith(SUMMARY_SUFFIXES)] or [folder]


def _entry_names(folder: Path, pattern: re.Pattern[str] = re.compile(".*", re.DOTALL)) -> list[str]:
    try:
        with os.scandir(folder) as entries:  # with many workers, the run directory also contains many logs
            return sorted(islice((entry.name for entry in entries if pattern.fullmatch(entry.name)), MOST_NAMES))
    except OSError:
        return []


def _read_result(path: Path) -> Figures:
    """The result in one file. Raises NoBenchmarkResult, OSError."""
    if path.is_dir():
        if RUN_FOLDER.fullmatch(path.name) is None:
            raise NoBenchmarkResult("is not a regular file")
        raise NoBenchmarkResult("contains no AIPerf summary (profile_export_aiperf.json): did this run end early?")
    with _opened(path) as source:
        size = os.fstat(source.fileno()).st_size
        if size <= FULL_READ_BYTES:
            return parse_benchmark_result(source.read(FULL_READ_BYTES))
        begin = source.read(PART_BYTES)
        source.seek(-PART_BYTES, os.SEEK_END)
        return parse_partial_result(begin, source.read(PART_BYTES))


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file without blocking. Raises NoBenchmarkResult, OSError."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as source:
        if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
            raise NoBenchmarkResult("is not a regular file")
        yield source


def _read_lines(source: BinaryIO) -> Iterator[Figures]:
    """The result on each line. Other lines are skipped if there are results. Raises NoBenchmarkResult."""
    found, others = False, None
    for number, line in enumerate(_lines(source), 1):
        try:
            yield parse_benchmark_result(line[0]) if len(line) == 1 else parse_partial_result(*line)
            found = True
        except NoBenchmarkResult as why:
            if not str(why).startswith(UNKNOWN_FORMAT):
                raise NoBenchmarkResult(f"line {number} {why}") from why
            others = why
    if not found:
        raise others or NoBenchmarkResult("is empty")


def _lines(source: BinaryIO) -> Iterator[tuple[bytes, ...]]:
    """Each line that is not blank; of a very long one, its start and its end. Raises NoBenchmarkResult."""
    while line := source.readline(FULL_READ_BYTES):
        end = b""
        while len(line) == FULL_READ_BYTES and not line.endswith(b"\n") and not end.endswith(b"\n"):
            piece = source.readline(PART_BYTES)
            if not piece:
                break
            if source.tell() > LINES_BYTES:
                raise NoBenchmarkResult(f"is too large; only the first {LINES_BYTES >> 20} MiB were read")
            end = (end + piece)[-PART_BYTES:]
        if end:
            yield line[:PART_BYTES], (line + end)[-PART_BYTES:]
        elif line.strip():
            yield (line,)
        if source.tell() > LINES_BYTES:
            raise NoBenchmarkResult(f"is too large; only the first {LINES_BYTES >> 20} MiB were read")


def parse_benchmark_result(text: bytes) -> Figures:
    """The numbers of a complete result. Raises NoBenchmarkResult."""
    if not text.strip():
        raise NoBenchmarkResult("is empty")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NoBenchmarkResult("is not complete JSON: was it cut off?") from error
    found: Figures = {}
    if isinstance(body, dict):
        found = _parse_sa_bench(body) or _parse_aiperf(body)
    if not found:
        raise NoBenchmarkResult(f"{UNKNOWN_FORMAT} (sa-bench, vLLM, SGLang, AIPerf)")
    return found


def parse_partial_result(begin: bytes, end: bytes) -> Figures:
    """The numbers of a result, from the start and the end of its text. Raises NoBenchmarkResult."""
    if not end.rstrip().endswith(b"}"):
        raise NoBenchmarkResult("is not complete JSON: was it cut off?")
    body: dict[str, JsonValue] = {}
    for key, number in [*reversed(_NUMBER_IN_PART.findall(begin)), *_NUMBER_IN_PART.findall(end)]:
        try:
            body[key.decode()] = float(number)
        except ValueError:
            continue
    found = _parse_sa_bench(body)
    if part_generates_no_text(begin) or part_generates_no_text(end):
        _drop_zero_tokens(found)
    if not found:
        raise NoBenchmarkResult(f"{UNKNOWN_FORMAT} at its beginning or its end")
    return found


def _parse_sa_bench(body: JsonObject) -> Figures:
    """Numbers under our names; empty for another format. Raises NoBenchmarkResult."""
    if not any(_number(body.get(key)) is not None for key in RESULT_KEYS):
        return {}
    found: Figures = {}
    for key, ours in SCALARS.items():
        if (value := _bounded(key, body.get(key), ours)) is not None:
            found[ours] = value
    for key, ours in _TIMES.items():
        if (value := _bounded(key, body.get(key))) is not None:
            found[ours] = round(value / 1000, DIGITS)
    for name, ours in LATENCIES.items():  # older versions: [[99, 12.5]]
        for pair in _pairs(f"percentiles_{name}_ms", body):
            if pair[0] in (50, 90, 95, 99):
                found.setdefault(
                    f"{ours}_{'median' if pair[0] == 50 else f'p{pair[0]:.0f}'}_s", round(pair[1] / 1000, DIGITS)
                )
    if generates_no_text(body):
        _drop_zero_tokens(found)
    return _with_integer_counts(found)


def _drop_zero_tokens(found: Figures) -> None:
    """Drop 0 tokens from results that generate none, such as embeddings: the 0 means nothing."""
    for key in ("output_tokens", "output_tokens_per_second"):
        if found.get(key) == 0:
            del found[key]


def _pairs(key: str, body: JsonObject) -> Iterator[tuple[float, float]]:
    value = body.get(key)
    for pair in value if isinstance(value, list) else ():
        numbers = [_bounded(key, number) for number in pair] if isinstance(pair, list) else []
        if len(numbers) == 2 and numbers[0] is not None and numbers[1] is not None:
            yield numbers[0], numbers[1]


def _parse_aiperf(body: JsonObject) -> Figures:
    """Numbers under our names; empty for another format. Raises NoBenchmarkResult.

    Each metric is an object with its unit and its statistics.
    """
    metrics = {key: value for key, value in body.items() if isinstance(value, dict)}
    found: Figures = {}
    for key, ours in AIPERF_SCALARS.items():
        if (value := _bounded(key, metrics.get(key, {}).get("avg"), ours)) is not None:
            found[ours] = value
    for key, ours in AIPERF_TIMES.items():
        metric = metrics.get(key, {})
        scale = SECONDS.get(str(metric.get("unit", "ms")).lower())
        for statistic, name in AIPERF_STATISTICS.items():
            if scale is not None and (value := _bounded(key, metric.get(statistic))) is not None:
                found[f"{ours}_{name}_s"] = round(value * scale, DIGITS)
    failed = _bounded("error_request_count", metrics.get("error_request_count", {}).get("avg"), REQUESTS)
    if failed is not None and "requests" in found:
        found["requests_expected"] = found["requests"] + failed
    return _with_integer_counts(found)


def _number(value: object) -> float | None:
    """A finite number of at least 0, else None. A whole number beyond floats becomes infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) and value >= 0 else None
    except OverflowError:
        return math.inf if value > 0 else None


def _bounded(key: str, value: object, ours: str = "") -> float | None:
    """The number under ``key`` in a file; ``ours`` selects the bound of a count.

    Raises NoBenchmarkResult for an impossible number: it would spoil sums, and cost more than its file.
    """
    number, most = _number(value), MOST_COUNT if ours in COUNTS else MOST_MEASURED
    if number is None or number <= most:
        return number
    digits = str(value)
    shown = digits if len(digits) <= FEW_DIGITS else f"{digits[:FEW_DIGITS]}..."
    raise NoBenchmarkResult(f"{key} is {shown}, more than any benchmark can reach (at most {most:.3g})")


def _with_integer_counts(found: Figures) -> Figures:
    return {key: int(value) if key in COUNTS else value for key, value in found.items()}


def with_counted_requests(workers: list[WorkerReport], results: Results) -> list[WorkerReport]:
    """Return the workers, with the requests of all results for the benchmark: its log shows only the last result.

    An interrupted benchmark that writes its own progress knows more than its results.
    """
    entries = [worker for worker in workers if worker.role == ROLE]
    if len(entries) != 1 or entries[0].unit not in (None, REQUESTS):
        return workers
    own = entries[0]
    missing, done = any("missing" in entry for entry in results), _total(results, "requests")
    if missing and _has_counted_all(own, done or 0):
        return workers
    if done is not None:
        expected = None if missing else _total(results, "requests_expected")
        counted = own.replace(
            unit=REQUESTS, pattern=RESULT_FILES, items=done, items_expected=expected, items_processed=done
        )
    else:
        counted = own.replace(items_expected=None) if missing else own  # the total is unknown
    return [counted if worker is own else worker for worker in workers]


def _has_counted_all(worker: WorkerReport, done: int) -> bool:
    """Whether the benchmark itself reported its total, and at least as many requests as its results."""
    reports_total = worker.pattern == PROGRESS_FILE and worker.items_expected is not None
    return reports_total and (worker.items or 0) >= done


def _total(results: Results, key: str) -> int | None:
    """Sum of a count over all results; None if a result does not have it, or without results."""
    counts = [entry.get(key) for entry in results if "problem" not in entry]
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None
