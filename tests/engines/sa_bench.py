"""Stands for sa-bench: requests at several concurrencies, a block of results and a file for each.

    sa_bench.py --host H --port P --model M --isl 128 --osl 16 --concurrencies 2x4 --result-dir DIR
                [--req-rate inf] [--rounds 4] [--tries 100]

Each concurrency is warmed up and then measured with ``rounds`` requests for each client. A request that fails is
tried again and is not counted; it ends with 1 when none at all succeeded.
"""

import argparse
import http.client
import json
import signal
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

RETRY_S = 0.1


def one_request(options: argparse.Namespace, number: int) -> tuple[float, int, str]:
    """Seconds, tokens and last error of one request."""
    body = json.dumps({"model": options.model, "prompt": "word " * options.isl, "max_tokens": options.osl, "n": 1})
    error = ""
    for _ in range(options.tries):
        start = time.perf_counter()
        connection = http.client.HTTPConnection(options.host, options.port, timeout=60)
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
            if answer.status == 200:
                return time.perf_counter() - start, int(json.loads(content)["usage"]["completion_tokens"]), error
            error = f"status {answer.status}"
        except (OSError, http.client.HTTPException) as problem:
            error = str(problem)
        finally:
            connection.close()
        time.sleep(RETRY_S)
    print(f"request {number} failed: {error}", file=sys.stderr, flush=True)
    return 0.0, 0, error


def measure(options: argparse.Namespace, concurrency: int, count: int) -> dict[str, object]:
    """The result of one run, with the keys of the result file."""
    print(f"Traffic request rate: {options.req_rate}\nMaximum request concurrency: {concurrency}", flush=True)
    start, times, tokens = time.perf_counter(), [], 0
    with ThreadPoolExecutor(concurrency) as pool:
        pending = [pool.submit(one_request, options, number) for number in range(count)]
        for done, future in enumerate(as_completed(pending), start=1):
            seconds, size, _ = future.result()
            if size:
                times.append(seconds * 1000)
                tokens += size
            passed = max(time.perf_counter() - start, 1e-6)
            bar = f"{100 * done // count:3d}%|{'#' * (10 * done // count):10}| {done}/{count}"
            print(f"\r{bar} [00:{int(passed):02d}<00:00, {done / passed:.2f}it/s]", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr, flush=True)
    duration = max(time.perf_counter() - start, 1e-6)
    found: dict[str, object] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai",
        "model_id": options.model,
        "num_prompts": count,
        "request_rate": options.req_rate,
        "max_concurrency": concurrency,
        "duration": duration,
        "completed": len(times),
        "total_input_tokens": len(times) * options.isl,
        "total_output_tokens": tokens,
        "request_throughput": len(times) / duration,
        "output_throughput": tokens / duration,
        "total_token_throughput": (tokens + len(times) * options.isl) / duration,
    }
    for name, share in (("ttft", 0.2), ("tpot", 0.8 / options.osl), ("itl", 0.8 / options.osl), ("e2el", 1.0)):
        scaled = sorted(value * share for value in times) or [0.0]
        found[f"mean_{name}_ms"] = statistics.fmean(scaled)
        found[f"median_{name}_ms"] = statistics.median(scaled)
        found[f"p99_{name}_ms"] = scaled[min(len(scaled) - 1, len(scaled) * 99 // 100)]
    return found


def block(found: dict[str, object]) -> str:
    """The result as printed text."""
    lines = ["{s:{c}^{n}}".format(s=" Serving Benchmark Result ", n=50, c="=")]
    lines += [f"{label:<40} {found[key]:<10}" for label, key in (("Successful requests:", "completed"),)]
    for label, key in (
        ("Benchmark duration (s):", "duration"),
        ("Total input tokens:", "total_input_tokens"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Request throughput (req/s):", "request_throughput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Total Token throughput (tok/s):", "total_token_throughput"),
    ):
        value = found[key]
        lines.append(f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}")
    for name, title in (
        ("ttft", "Time to First Token"),
        ("tpot", "Time per Output Token (excl. 1st token)"),
        ("itl", "Inter-token Latency"),
        ("e2el", "End-to-end Latency"),
    ):
        lines.append(f"{title:-^50}")
        for kind, label in (("mean", "Mean"), ("median", "Median"), ("p99", "P99")):
            lines.append(f"{f'{label} {name.upper()} (ms):':<40} {found[f'{kind}_{name}_ms']:<10.2f}")
    return "\n".join([*lines, "=" * 50])


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="model")
    parser.add_argument("--isl", type=int, required=True)
    parser.add_argument("--osl", type=int, required=True)
    parser.add_argument("--concurrencies", required=True)
    parser.add_argument("--req-rate", default="inf")
    parser.add_argument("--result-dir", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tries", type=int, default=100)
    return parser.parse_args(argv)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = parse(sys.argv[1:])
    print(
        f"SA-Bench Config: endpoint=http://{options.host}:{options.port}; isl={options.isl}; osl={options.osl}; "
        f"concurrencies={options.concurrencies}; req_rate={options.req_rate}; model={options.model}",
        flush=True,
    )
    completed = 0
    for concurrency in map(int, options.concurrencies.split("x")):
        print(f"Warming up model with concurrency {concurrency}", flush=True)
        measure(options, concurrency, concurrency)
        print(f"Running benchmark with concurrency: {concurrency}", flush=True)
        found = measure(options, concurrency, concurrency * options.rounds)
        print(block(found), flush=True)
        name = f"isl_{options.isl}_osl_{options.osl}_concurrency_{concurrency}_req_rate_{options.req_rate}.json"
        (options.result_dir / name).write_text(json.dumps(found))
        print(f"Completed benchmark with concurrency: {concurrency}\n{'-' * 41}", flush=True)
        completed += int(str(found["completed"]))
    print(f"SA-Bench complete. Results in {options.result_dir}", flush=True)
    return 0 if completed else 1


if __name__ == "__main__":
    sys.exit(main())
