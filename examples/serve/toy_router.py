#!/usr/bin/env python3
"""A stand-in for SGLang's router: hands each request to a prefill worker, then to a decode worker.

    toy_router.py --port 8000

The addresses of the workers are in GPUJOB_PREFILL_URLS and GPUJOB_DECODE_URLS, or in GPUJOB_WORKER_URLS if each worker
does both. ``/workers`` counts the healthy ones, as the readiness of SGLang's router is asked. No model is moved between
the workers; the second one just starts to answer.
"""

import argparse
import http.client
import itertools
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

ROLES = {"prefill": "GPUJOB_PREFILL_URLS", "decode": "GPUJOB_DECODE_URLS", "regular": "GPUJOB_WORKER_URLS"}
HEALTH_S = 2.0
ANSWER_S = 600.0


class NoWorker(Exception):
    """No worker of a role has taken a request."""


@contextmanager
def asked(url: str, method: str, path: str, body: bytes, timeout: float) -> Iterator[http.client.HTTPResponse]:
    """The answer of a worker, whose body may still come. Raises OSError, HTTPException."""
    at = urlsplit(url)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=timeout)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        yield connection.getresponse()
    finally:
        connection.close()


def is_well(url: str) -> bool:
    """Whether a worker is ready for requests."""
    try:
        with asked(url, "GET", "/health", b"", HEALTH_S) as answer:
            return answer.status == 200
    except (OSError, http.client.HTTPException):
        return False


class Router:
    """The workers by role, and whose turn it is."""

    def __init__(self, workers: Mapping[str, Sequence[str]]) -> None:
        self._workers = workers
        self._turns = {role: itertools.count() for role in workers}  # next() of these is one step, also among threads

    def counts(self) -> dict[str, int]:
        """Workers of each role that are well now."""
        with ThreadPoolExecutor(8) as pool:
            return {role: sum(pool.map(is_well, urls)) for role, urls in self._workers.items()}

    def answer(self, path: str, body: bytes) -> AbstractContextManager[http.client.HTTPResponse]:
        """What the workers make of a request. Raises NoWorker, OSError, HTTPException, ValueError."""
        if not self._workers["prefill"]:
            return self._forward("regular", path, body)
        prompt = json.dumps({**json.loads(body), "max_tokens": 1, "stream": False}).encode()
        with self._forward("prefill", path, prompt) as done:
            done.read()
        return self._forward("decode", path, body)

    @contextmanager
    def _forward(self, role: str, path: str, body: bytes) -> Iterator[http.client.HTTPResponse]:
        """The answer of the worker whose turn it is, or of the next that takes the request."""
        urls = self._workers[role]
        first = next(self._turns[role]) % max(1, len(urls))
        for url in (*urls[first:], *urls[:first]):
            try:
                with asked(url, "POST", path, body, ANSWER_S) as answer:
                    if answer.status != 503:
                        yield answer
                        return
            except (ConnectionRefusedError, http.client.RemoteDisconnected) as why:
                print(f"WARN {url} does not answer ({why}); trying the next", file=sys.stderr, flush=True)
        raise NoWorker(f"no {role} worker takes requests")


def handler(router: Router) -> type[BaseHTTPRequestHandler]:
    """What answers the clients; each request has a connection of its own, whose end is that of the answer."""

    class Handler(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True  # a token must not wait for the next one

        def do_GET(self) -> None:
            if self.path == "/workers":
                counts = router.counts()
                stats = {f"{role}_count": count for role, count in counts.items()}
                self._answer(200, {"workers": [], "total": sum(counts.values()), "stats": stats})
            else:
                self._answer(200 if self.path == "/health" else 404, {})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            begun = False
            try:
                with router.answer(self.path, body) as answer:
                    self._head(answer.status, answer.headers.get("Content-Type", ""))
                    begun = True
                    while line := answer.readline():
                        self.wfile.write(line)
            except (NoWorker, ValueError, OSError, http.client.HTTPException) as why:
                # an answer that has begun ends without its last line, by which the client knows
                if not begun:
                    self._answer(400 if isinstance(why, ValueError) else 503, {"error": str(why)})

        def _head(self, status: int, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()

        def _answer(self, status: int, body: Mapping[str, object]) -> None:
            self._head(status, "application/json")
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            """Nothing of each request."""

    return Handler


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    parser = argparse.ArgumentParser(allow_abbrev=False, description="A stand-in for SGLang's router.")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    workers = {role: [url for url in os.environ.get(name, "").split(",") if url] for role, name in ROLES.items()}
    ThreadingHTTPServer.request_queue_size = 128
    server = ThreadingHTTPServer(("", options.port), handler(Router(workers)))
    told = ", ".join(f"{len(urls)} {role}" for role, urls in workers.items() if urls)
    print(f"INFO router on port {options.port} before {told or 'no workers'}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
