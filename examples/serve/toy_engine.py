#!/usr/bin/env python3
"""A stand-in for a serving engine: its endpoints, log lines and timing, without model or GPU.

    toy_engine.py --port 6100 [--disaggregation-mode prefill|decode] [--load-seconds 4]
                  [--prefill-rate 2000] [--step-ms 15] [--step-ms-each 1]

A prefill worker takes one prompt at a time, one word per token. A decode worker has all its requests in one batch, of
which each step gives every request one token, and takes longer the more there are. So the latencies that a benchmark
measures are real ones, of a queue and of a batch, and the text is nothing but ``word word word``.

It imitates SGLang's interfaces: ``/health`` (503 while it loads), ``/v1/models``, ``/metrics``,
``/v1/completions`` with and without ``stream``, and the lines of its log. Standard library alone.
"""

import argparse
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "toy"
LOG_STEPS = 20  # after so many steps a batch of decoding is told; SGLang does so after 40
EVENT_STREAM = "text/event-stream"


def log(text: str) -> None:
    """A line as SGLang writes it."""
    print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')} TP0] {text}", file=sys.stderr, flush=True)


class Request:
    """One request in the batch: how many tokens it still gets, and those that its client has not taken yet."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens
        self.made: queue.SimpleQueue[str] = queue.SimpleQueue()


class Engine:
    """One worker: its queue of prompts, its batch and its counters."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.mode: str = options.disaggregation_mode
        self.ready = False
        self.tokens = 0
        self.requests = 0
        self.rate = 0.0
        self.batch: list[Request] = []
        self._options = options
        self._one_prompt = threading.Lock()
        self._changed = threading.Condition()

    def load(self) -> None:
        """Take the time that loading a model takes."""
        log("Load weight begin. This is a toy: there are no weights.")
        time.sleep(self._options.load_seconds)
        log("Load weight end. type=Toy")
        self.ready = True
        log("The server is fired up and ready to roll!")

    def complete(self, prompt: str, most: int) -> Iterator[str]:
        """The tokens of an answer, each when it is made; a prefill worker makes none."""
        with self._changed:
            self.requests += 1
        if self.mode != "decode":
            self._prefill(len(prompt.split()))
        if self.mode != "prefill":
            yield from self._decode(most)

    def _prefill(self, size: int) -> None:
        """Read a prompt, after those that came before."""
        with self._one_prompt:
            begin = time.monotonic()
            time.sleep(size / self._options.prefill_rate)
            rate = size / (time.monotonic() - begin)
        log(
            f"Prefill batch, #new-seq: 1, #new-token: {size}, #cached-token: 0, token usage: 0.00, "
            f"#running-req: 0, #queue-req: 0, input throughput (token/s): {rate:.2f}, "
        )

    def _decode(self, most: int) -> Iterator[str]:
        """Join the batch; a client that goes away leaves it."""
        request = Request(most)
        with self._changed:
            self.batch.append(request)
            self._changed.notify()
        try:
            for _ in range(most):
                yield request.made.get()
        finally:
            with self._changed:
                request.left = 0

    def run_batch(self) -> None:
        """Step after step, for ever; nothing while there is no request."""
        begin, steps, made = 0.0, 0, 0
        while True:
            with self._changed:
                if not self.batch:
                    self.rate = 0.0
                    self._changed.wait_for(lambda: self.batch)
                    begin, steps, made = 0.0, 0, 0  # time without requests does not count
            begin = begin or time.monotonic()
            running = self._step()
            steps, made = steps + 1, made + running
            if steps % LOG_STEPS == 0:
                self.rate = made / (time.monotonic() - begin)
                log(
                    f"Decode batch, #running-req: {running}, #token: {made}, token usage: 0.00, "
                    f"gen throughput (token/s): {self.rate:.2f}, #queue-req: 0, "
                )
                begin, made = time.monotonic(), 0

    def _step(self) -> int:
        """One token for each request of the batch; how many there were."""
        size = len(self.batch)
        time.sleep((self._options.step_ms + self._options.step_ms_each * size) / 1000)
        with self._changed:
            served = [request for request in self.batch[:size] if request.left > 0]
            for request in served:
                request.left -= 1
                request.made.put("word ")
            self.tokens += len(served)
            self.batch = [request for request in self.batch if request.left > 0]
        return len(served)

    def metrics(self) -> str:
        """For Prometheus, by SGLang's names."""
        label = f'{{model_name="{MODEL}"}}'
        return (
            f"# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs{label} {len(self.batch)}\n"
            f"# TYPE sglang:gen_throughput gauge\nsglang:gen_throughput{label} {self.rate}\n"
            f"# TYPE sglang:num_requests_total counter\nsglang:num_requests_total{label} {self.requests}\n"
            f"# TYPE sglang:generation_tokens_total counter\nsglang:generation_tokens_total{label} {self.tokens}\n"
        )


def handler(engine: Engine) -> type[BaseHTTPRequestHandler]:
    """What answers the requests of one engine; each has a connection of its own, whose end is that of the answer."""

    class Handler(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True  # a token must not wait for the next one

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, engine.metrics().encode(), "text/plain; version=0.0.4")
            elif not engine.ready:
                self._answer(503)
            elif self.path == "/v1/models":
                models = [{"id": MODEL, "object": "model"}]
                self._answer(200, json.dumps({"object": "list", "data": models}).encode())
            else:
                self._answer(200 if self.path == "/health" else 404)

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            try:
                asked = json.loads(text)
                prompt, most = str(asked["prompt"]), int(asked.get("max_tokens", 16))
            except (ValueError, KeyError, TypeError, AttributeError):
                self._answer(400, b'{"error": "a completion needs a JSON object with a prompt"}')
                return
            if not engine.ready or self.path != "/v1/completions":
                self._answer(404 if engine.ready else 503)
                return
            tokens = engine.complete(prompt, most)
            size = len(prompt.split())
            if asked.get("stream"):
                self._stream(tokens, size)
            else:
                words = list(tokens)
                self._answer(200, json.dumps(completion("".join(words), usage(size, len(words)))).encode())

        def _stream(self, tokens: Iterator[str], size: int) -> None:
            self._head(200, EVENT_STREAM)
            made = 0
            try:
                for word in tokens:
                    made += 1
                    self._event(json.dumps(completion(word, None)))
                self._event(json.dumps({**completion("", usage(size, made)), "choices": []}))
                self._event("[DONE]")
            except OSError:
                pass  # the client has gone, and with it the request

        def _event(self, text: str) -> None:
            self.wfile.write(f"data: {text}\n\n".encode())

        def _head(self, status: int, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()

        def _answer(self, status: int, body: bytes = b"", kind: str = "application/json") -> None:
            self._head(status, kind)
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing of each request: the lines of the batches tell enough."""

    return Handler


def completion(text: str, used: dict[str, int] | None) -> dict[str, object]:
    """An answer, or a part of it, as the API of OpenAI has it."""
    return {"object": "text_completion", "model": MODEL, "choices": [{"index": 0, "text": text}], "usage": used}


def usage(prompt: int, made: int) -> dict[str, int]:
    """How many tokens a request had and got."""
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="A stand-in for a serving engine.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--disaggregation-mode", default="null", choices=("null", "prefill", "decode"))
    parser.add_argument("--load-seconds", type=float, default=4.0, help="until it is ready")
    parser.add_argument("--prefill-rate", type=float, default=2000.0, help="tokens of prompts per second")
    parser.add_argument("--step-ms", type=float, default=15.0, help="milliseconds of each step of decoding")
    parser.add_argument("--step-ms-each", type=float, default=1.0, help="and more for each request in the batch")
    return parser.parse_args(argv)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    options = parse(sys.argv[1:])
    engine = Engine(options)
    ThreadingHTTPServer.request_queue_size = 128
    server = ThreadingHTTPServer(("", options.port), handler(engine))
    for work in (engine.load, engine.run_batch):
        threading.Thread(target=work, daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
