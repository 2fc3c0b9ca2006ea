"""Stands for ``python3 -m sglang_router.launch_router``.

    router.py --port 8000 [--pd-disaggregation --prefill URL [BOOTSTRAP] --decode URL ... | --worker-urls URL ...]

Workers that no option names are those of ``GPUJOB_PREFILL_URLS``, ``GPUJOB_DECODE_URLS`` and ``GPUJOB_WORKER_URLS``.
Which of them there are it finds out by asking for their health each time. A request goes to a prefill and then to
a decode worker, or to a worker that does both; one that does not answer is passed over.
"""

import argparse
import http.client
import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

ASK_S = 2.0


class Router:
    """Workers by mode, used in turn."""

    def __init__(self, workers: dict[str, list[str]]) -> None:
        self.workers = workers
        self.turn = 0
        self.lock = threading.Lock()

    def alive(self) -> dict[str, list[str]]:
        """Workers whose health check succeeds."""
        every = [(mode, url) for mode, urls in self.workers.items() for url in urls]
        with ThreadPoolExecutor(max(len(every), 1)) as pool:
            well = list(pool.map(lambda entry: request(entry[1], "GET", "/health", b"", ASK_S)[0] == 200, every))
        found: dict[str, list[str]] = {mode: [] for mode in self.workers}
        for (mode, url), fine in zip(every, well, strict=True):
            if fine:
                found[mode].append(url)
        return found

    def complete(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Response of the workers to a request."""
        if self.workers["prefill"]:
            asked = json.loads(body)
            status, answer = self.forward("prefill", path, json.dumps({**asked, "max_tokens": 1}).encode())
            if status != 200:
                return status, answer
        return self.forward("decode" if self.workers["decode"] else "regular", path, body)

    def forward(self, mode: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Response of the first worker that answers, starting with the next in turn."""
        urls = self.workers[mode]
        with self.lock:
            self.turn += 1
            first = self.turn % max(len(urls), 1)
        for url in urls[first:] + urls[:first]:
            status, answer = request(url, "POST", path, body, 60.0)
            if status == 200:
                return status, answer
            print(f"WARN {url} does not answer ({status}), trying the next", file=sys.stderr, flush=True)
        return 503, json.dumps({"error": f"no {mode} worker is available"}).encode()


def request(url: str, method: str, path: str, body: bytes, timeout: float) -> tuple[int, bytes]:
    """Status and body of a response, or status 0 without a response."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def handler(router: Router, model: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if path == "/workers":
                stats = {f"{mode}_count": len(urls) for mode, urls in router.alive().items()}
                self.answer(200, {"workers": [], "total": sum(stats.values()), "stats": stats})
            elif path == "/health":
                self.answer(200, {"status": "healthy"})
            elif path == "/v1/models":
                alive = any(router.alive().values())
                self.answer(200, {"object": "list", "data": [{"id": model, "object": "model"}] if alive else []})
            else:
                self.answer(404, {})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, answer = router.complete(self.path, body)
            self.answer(status, answer)

        def answer(self, status: int, body: bytes | dict[str, object]) -> None:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, list[str]]]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", "--http-port", type=int, required=True)
    parser.add_argument("--model", default=os.environ.get("GPUJOB_MODEL") or "model")
    parser.add_argument("--prefill", nargs="+", action="append", default=[])
    parser.add_argument("--decode", action="append", default=[])
    parser.add_argument("--worker-urls", nargs="*", default=[])
    options, _ = parser.parse_known_args(argv)

    def urls(name: str) -> list[str]:
        return [url for url in os.environ.get(f"GPUJOB_{name}_URLS", "").split(",") if url]

    if options.prefill or options.decode or options.worker_urls:
        prefill = [entry[0] for entry in options.prefill]
        return options, {"prefill": prefill, "decode": options.decode, "regular": options.worker_urls}
    return options, {"prefill": urls("PREFILL"), "decode": urls("DECODE"), "regular": urls("WORKER")}


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    options, workers = parse(sys.argv[1:])
    ThreadingHTTPServer.request_queue_size = 128
    server = ThreadingHTTPServer((options.host, options.port), handler(Router(workers), options.model))
    print(f"INFO Starting router on {options.host}:{options.port} | workers: {workers}", flush=True)
    server.serve_forever(poll_interval=0.1)


if __name__ == "__main__":
    main()
