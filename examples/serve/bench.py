#!/usr/bin/env python3
"""A small benchmark of a server of completions: requests at several concurrencies, and a file of results for each.

    bench.py --host H --port P --isl 128 --osl 32 --concurrencies 2x4 --result-dir DIR [--model NAME]
             [--req-rate inf] [--requests-each 12] [--patience 30]

These are the options that gpujob gives to a benchmark of type sa-bench, and results and log have its form. Answers are
streamed, so that the time to the first token and the time between tokens are measured, not calculated. It asks any
server with the ``/v1/completions`` of OpenAI, the toy as well as SGLang and vLLM. Standard library alone.

A prompt is ``--isl`` random words, about as many tokens for a real tokenizer. A request that nobody takes
(503, connection refused) is sent again for ``--patience`` seconds; one that fails is counted as not completed. With
none completed at some concurrency the exit status is 1.

If gpujob sets an output directory, each completed request is a line of ``requests.jsonl`` there.
"""

import argparse
import http.client
import json
import os
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 600.0
RETRY_S = 0.2
TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


class RequestFailed(Exception):
    """Why a request was not completed."""


class NotTaken(Exception):
    """No server accepted the request, for example while a worker restarts."""


@dataclass(frozen=True)
class Completed:
    """One request: its tokens, and the moments in seconds."""

    tokens_in: int
    tokens_out: int
    begin: float
    arrivals: tuple[float, ...]  # when each piece of text came

    def times_ms(self, name: str) -> list[float]:
        """What this request adds to a statistic, in milliseconds."""
        first, last = self.arrivals[0], self.arrivals[-1]
        seconds = {
            "ttft": [first - self.begin],
            "tpot": [(last - first) / (self.tokens_out - 1)] if self.tokens_out > 1 else [],
            "itl": [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)],
            "e2el": [last - self.begin],
        }[name]
        return [1000 * each for each in seconds]


def request(options: argparse.Namespace) -> Completed:
    """Request one completion. Retries while no server accepts it; that time counts. Raises RequestFailed."""
    begin = time.perf_counter()
    while True:
        try:
            return answered(options, begin)
        except NotTaken as why:
            if time.perf_counter() - begin > options.patience:
                raise RequestFailed(str(why)) from why
        time.sleep(RETRY_S)


def answered(options: argparse.Namespace, begin: float) -> Completed:
    """Ask for one completion and take its tokens as they come. Raises NotTaken, RequestFailed."""
    body = {
        "model": options.model,
        "prompt": " ".join(random.choices(("red", "tree", "stone", "river", "bird"), k=options.isl)),
        "max_tokens": options.osl,
        "ignore_eos": True,  # of SGLang and vLLM: as many tokens as are asked for
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection(options.host, options.port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            words = f"{answer.status} {answer.reason}: {answer.read(200).decode('utf-8', 'replace')}"
            raise NotTaken(words) if answer.status == 503 else RequestFailed(words)
        return taken(iter(answer.readline, b""), begin)
    except ConnectionRefusedError as why:
        raise NotTaken(str(why)) from why
    except (OSError, http.client.HTTPException, ValueError) as why:
        raise RequestFailed(str(why) or type(why).__name__) from why
    finally:
        connection.close()


def taken(lines: Iterator[bytes], begin: float) -> Completed:
    """What a stream of events holds, by the moments when its lines come. Raises RequestFailed, ValueError."""
    arrivals: list[float] = []
    used: dict[str, int] = {}
    for line in lines:
        field, _, text = line.strip().partition(b":")
        if field != b"data":
            continue  # a comment that keeps the connection alive, the name of an event, or the end of one
        text = text.strip()
        if text == b"[DONE]":
            if not arrivals:
                raise RequestFailed("an answer without text")
            made = used.get("completion_tokens", len(arrivals))
            return Completed(used.get("prompt_tokens", 0), made, begin, tuple(arrivals))
        if text:
            event = json.loads(text)
            if any(choice.get("text") for choice in event.get("choices") or ()):
                arrivals.append(time.perf_counter())
            used = event.get("usage") or used
    raise RequestFailed(f"the answer broke off after {len(arrivals)} pieces")


def show_bar(done: int, count: int, seconds: float) -> None:
    """Print a progress bar like tqdm's."""
    bar = f"{100 * done // count:3d}%|{'#' * (10 * done // count):10}| {done}/{count}"
    print(f"\r{bar} [00:{int(seconds):02d}<00:00, {done / seconds:.2f}it/s]", end="", file=sys.stderr, flush=True)


class Journal:
    """Reports progress to gpujob while the benchmark runs; does nothing without gpujob.

    Its position goes to the progress file: gpujob estimates the end from it, since a bar shows one run only.
    """

    def __init__(self, total: int) -> None:
        self._ended, self._total = 0, total
        self._position = os.environ.get("GPUJOB_PROGRESS_FILE")
        folder = os.environ.get("GPUJOB_OUTPUT_DIR")
        self._requests = os.path.join(folder, "requests.jsonl") if folder else None
        self._append(self._position, {"done": 0, "total": total, "unit": "requests"})

    def note(self, concurrency: int, completed: Completed | None) -> None:
        """A request has ended, None: without having been completed."""
        self._ended += 1
        self._append(self._position, {"done": self._ended, "total": self._total, "unit": "requests"})
        if completed is not None:
            tokens = {"input_tokens": completed.tokens_in, "output_tokens": completed.tokens_out}
            times = {f"{name}_ms": completed.times_ms(name)[0] for name in ("ttft", "e2el")}
            self._append(self._requests, {"concurrency": concurrency, **tokens, **times})

    @staticmethod
    def _append(path: str | None, facts: dict[str, object]) -> None:
        if path:
            with open(path, "a") as out:
                out.write(json.dumps(facts) + "\n")


def run(options: argparse.Namespace, concurrency: int, count: int, journal: Journal | None = None) -> dict[str, object]:
    """Send ``count`` requests, ``concurrency`` at a time; return the result with the keys of the result file."""
    print(f"Traffic request rate: {options.req_rate}\nMaximum request concurrency: {concurrency}", flush=True)
    begin, completed, failures = time.perf_counter(), list[Completed](), list[str]()
    turns = threading.Lock()
    due = [begin]

    def one() -> Completed:
        with turns:  # requests begin no closer than the rate allows
            time.sleep(max(0.0, due[0] - time.perf_counter()))
            due[0] += 1 / float(options.req_rate)
        return request(options)

    with ThreadPoolExecutor(concurrency) as pool:
        for done, future in enumerate(as_completed([pool.submit(one) for _ in range(count)]), start=1):
            found = None
            try:
                found = future.result()
                completed.append(found)
            except RequestFailed as why:
                failures.append(str(why))
            show_bar(done, count, time.perf_counter() - begin)
            if journal is not None:
                journal.note(concurrency, found)
    print(file=sys.stderr, flush=True)
    for reason, times in Counter(failures).items():
        print(f"{times} requests failed: {reason}", file=sys.stderr, flush=True)
    return result(options, concurrency, count, completed, time.perf_counter() - begin)


def result(
    options: argparse.Namespace, concurrency: int, count: int, completed: Sequence[Completed], seconds: float
) -> dict[str, object]:
    """What one run has measured."""
    tokens_in = sum(each.tokens_in for each in completed)
    tokens_out = sum(each.tokens_out for each in completed)
    found: dict[str, object] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "model_id": options.model,
        "num_prompts": count,
        "request_rate": options.req_rate,
        "max_concurrency": concurrency,
        "duration": seconds,
        "completed": len(completed),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(completed) / seconds,
        "output_throughput": tokens_out / seconds,
        "total_token_throughput": (tokens_in + tokens_out) / seconds,
    }
    for name in TITLES:
        times = sorted(each for entry in completed for each in entry.times_ms(name))
        if times:
            found[f"mean_{name}_ms"] = statistics.fmean(times)
            found[f"median_{name}_ms"] = statistics.median(times)
            found[f"p99_{name}_ms"] = times[min(len(times) - 1, len(times) * 99 // 100)]
    return found


def block(found: dict[str, object]) -> str:
    """A result for people, as sa-bench and the benchmarks of SGLang and vLLM print it."""
    rows = [
        ("Successful requests:", "completed"),
        ("Benchmark duration (s):", "duration"),
        ("Total input tokens:", "total_input_tokens"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Request throughput (req/s):", "request_throughput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Total Token throughput (tok/s):", "total_token_throughput"),
    ]
    lines = [f"{' Serving Benchmark Result ':=^50}"]
    for label, key in rows:
        value = found[key]
        lines.append(f"{label:<40} {f'{value:.2f}' if isinstance(value, float) else value}")
    for name, title in TITLES.items():
        if f"mean_{name}_ms" in found:
            lines.append(f"{title:-^50}")
            lines += [
                f"{f'{kind.capitalize()} {name.upper()} (ms):':<40} {found[f'{kind}_{name}_ms']:.2f}"
                for kind in ("mean", "median", "p99")
            ]
    return "\n".join([*lines, "=" * 50])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="A small benchmark of a server of completions.")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="toy", help="the name that the server knows it by")
    parser.add_argument("--isl", type=int, required=True, help="tokens of each prompt")
    parser.add_argument("--osl", type=int, required=True, help="tokens of each answer")
    parser.add_argument("--concurrencies", required=True, help="requests at once, one run after the other: 2x4")
    parser.add_argument("--req-rate", default="inf", help="requests per second at most, or inf")
    parser.add_argument("--result-dir", type=Path, required=True)
    parser.add_argument("--requests-each", type=int, default=12, help="requests for each one that is on its way")
    parser.add_argument("--patience", type=float, default=30.0, help="seconds for which a request is sent again")
    return parser.parse_args(argv)


def main() -> int:
    options = parse(sys.argv[1:])
    runs = [
        (concurrency, concurrency * options.requests_each) for concurrency in map(int, options.concurrencies.split("x"))
    ]
    journal = Journal(sum(count for _, count in runs))
    print(
        f"SA-Bench Config: endpoint=http://{options.host}:{options.port}; isl={options.isl}; osl={options.osl}; "
        f"concurrencies={options.concurrencies}; req_rate={options.req_rate}; model={options.model}",
        flush=True,
    )
    fewest = sys.maxsize
    for concurrency, count in runs:
        print(f"Warming up model with concurrency {concurrency}", flush=True)
        run(options, concurrency, concurrency)
        print(f"Running benchmark with concurrency: {concurrency}", flush=True)
        found = run(options, concurrency, count, journal)
        print(block(found), flush=True)
        name = f"isl_{options.isl}_osl_{options.osl}_concurrency_{concurrency}_req_rate_{options.req_rate}.json"
        (options.result_dir / name).write_text(json.dumps(found))
        print(f"Completed benchmark with concurrency: {concurrency}\n{'-' * 41}", flush=True)
        fewest = min(fewest, int(str(found["completed"])))
    print(f"SA-Bench complete. Results in {options.result_dir}", flush=True)
    return 0 if fewest else 1


if __name__ == "__main__":
    sys.exit(main())
