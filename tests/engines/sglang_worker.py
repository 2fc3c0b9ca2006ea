"""Stands for ``python3 -m sglang.launch_server``: health after a while, log lines, metrics, completions.

    sglang_worker.py --port 6100 [--disaggregation-mode prefill|decode] [--ready-after 2] [--token-seconds 0.001]
                     [--log-interval 0.5]

A batch is logged as SGLang does, to standard error.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

PREFILL_LINE = (
    "Prefill batch, #new-seq: {seqs}, #new-token: {tokens}, #cached-token: 0, token usage: {usage:.2f}, "
    "#running-req: {running}, #queue-req: 0, #prealloc-req: 0, #inflight-req: 0, "
    "input throughput (token/s): {rate:.2f}, "
)
DECODE_LINE = (
    "Decode batch, #running-req: {running}, #token: {tokens}, token usage: {usage:.2f}, "
    "pre-allocated usage: 0.00, #prealloc-req: 0, #transfer-req: 0, #retracted-req: 0, cuda graph: True, "
    "gen throughput (token/s): {rate:.2f}, #queue-req: 0, "
)
STARTING = (
    "server_args=ServerArgs(tp_size={tp}, dp_size=1, model_path={model}, port={port}, disaggregation_mode={mode})",
    "Load weight end. type=StandInForCausalLM, dtype=torch.bfloat16, avail mem=75.11 GB, mem usage=107.07 GB.",
    "KV Cache is allocated. #tokens: 524288, KV size: 17.16 GB",
)
KV_TOKENS = 524288


class Engine:
    """State of the worker, behind one lock."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ready_at = time.monotonic() + options.ready_after
        self.running = 0
        self.requests = 0
        self.tokens = 0
        self.rate = 0.0
        self.logged_tokens = 0
        self.lock = threading.RLock()  # the signal handler acquires it, too

    @property
    def prefills(self) -> bool:
        return str(self.options.disaggregation_mode) == "prefill"

    @property
    def ready(self) -> bool:
        return bool(time.monotonic() >= self.ready_at)

    def complete(self, asked: dict[str, object]) -> dict[str, object]:
        """Answer a request with the requested tokens, each after its time."""
        size = int(str(asked.get("max_tokens", 16)))
        words = len(str(asked.get("prompt", "")).split())
        with self.lock:
            self.running += 1
        try:
            time.sleep((words / 10 if self.prefills else size) * self.options.token_seconds)
        finally:
            with self.lock:
                self.running -= 1
                self.requests += 1
                self.tokens += words if self.prefills else size
        usage = {"prompt_tokens": words, "completion_tokens": size, "total_tokens": words + size}
        choice = {"index": 0, "text": "token " * size, "finish_reason": "length"}
        return {
            "object": "text_completion",
            "model": self.options.served_model_name,
            "choices": [choice],
            "usage": usage,
        }

    def write_log(self) -> None:
        """Log each batch until the process ends."""
        while True:
            time.sleep(self.options.log_interval)
            self.log_batch()

    def log_batch(self) -> None:
        """Log the work since the last line, or nothing while idle."""
        with self.lock:
            done, running = self.tokens - self.logged_tokens, self.running
            self.logged_tokens = self.tokens
        self.rate = done / self.options.log_interval
        if not (done or running) or not self.ready:
            return
        facts = {"running": running, "tokens": done, "usage": min(1.0, done / KV_TOKENS), "rate": self.rate}
        log((PREFILL_LINE if self.prefills else DECODE_LINE).format(seqs=max(running, 1), **facts))

    def metrics(self) -> str:
        """The most important metrics of SGLang."""
        label = f'{{model_name="{self.options.served_model_name}"}}'
        return (
            f"# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs{label} {self.running}\n"
            f"# TYPE sglang:gen_throughput gauge\nsglang:gen_throughput{label} {self.rate}\n"
            f"# TYPE sglang:num_requests_total counter\nsglang:num_requests_total{label} {self.requests}\n"
            f"# TYPE sglang:generation_tokens_total counter\nsglang:generation_tokens_total{label} {self.tokens}\n"
        )


def log(text: str) -> None:
    """A line as SGLang writes it."""
    print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')} DP0 TP0 EP0] {text}", file=sys.stderr, flush=True)


def handler(engine: Engine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if path == "/metrics":
                self.answer(200, engine.metrics().encode(), "text/plain; version=0.0.4")
            elif not engine.ready:
                self.answer(503, b"")
            elif path == "/v1/models":
                models = [{"id": engine.options.served_model_name, "object": "model"}]
                self.answer(200, json.dumps({"object": "list", "data": models}).encode())
            else:
                self.answer(200 if path == "/health" else 404, b"")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if not engine.ready:
                self.answer(503, b"")
            else:
                asked = json.loads(body or b"{}")
                answer = json.dumps(engine.complete(asked)).encode()
                if asked.get("stream"):  # all tokens at once
                    self.answer(200, b"data: %s\n\ndata: [DONE]\n\n" % answer, "text/event-stream")
                else:
                    self.answer(200, answer)

        def answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model-path", default="model")
    parser.add_argument("--served-model-name", default="model")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--disaggregation-mode", default="null", choices=("null", "prefill", "decode"))
    parser.add_argument("--ready-after", type=float, default=0.0)
    parser.add_argument("--token-seconds", type=float, default=0.001)
    parser.add_argument("--log-interval", type=float, default=0.5)
    return parser.parse_known_args(argv)[0]


def main() -> None:
    options = parse(sys.argv[1:])
    engine = Engine(options)

    def ends(number: int, frame: object) -> None:
        engine.log_batch()
        log(f"SIGTERM received. signum={number} frame={frame!r:.20}. Draining requests and shutting down...")
        os._exit(0)

    signal.signal(signal.SIGTERM, ends)
    for line in STARTING:
        facts = {"tp": options.tp_size, "model": options.model_path, "port": options.port}
        log(line.format(mode=options.disaggregation_mode, **facts))
    threading.Thread(target=engine.write_log, daemon=True).start()
    ThreadingHTTPServer.request_queue_size = 128
    server = ThreadingHTTPServer((options.host, options.port), handler(engine))
    threading.Thread(target=announce, args=(engine,), daemon=True).start()
    server.serve_forever(poll_interval=0.1)


def announce(engine: Engine) -> None:
    while not engine.ready:
        time.sleep(0.02)
    log("The server is fired up and ready to roll!")


if __name__ == "__main__":
    main()
