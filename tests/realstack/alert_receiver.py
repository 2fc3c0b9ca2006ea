#!/usr/bin/env python3
"""Receives Alertmanager's webhook calls on loopback and appends each as one line of JSON.

    alert_receiver.py PORT FILE

A line is ``{"received": <Unix time>, "body": <the body as sent>}``. GET answers 200: ready.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Receiver(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, path: Path) -> None:
        super().__init__(("127.0.0.1", port), Webhook)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def record(self, body: object) -> None:
        """Append one line with a single write, so that calls do not mix."""
        line = json.dumps({"received": time.time(), "body": body}) + "\n"
        os.write(self._file, line.encode())


class Webhook(BaseHTTPRequestHandler):
    server: Receiver

    def do_GET(self) -> None:
        self._answer(200)

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            body = json.loads(text)
        except ValueError as error:
            sys.stderr.write(f"not JSON ({error}): {text[:200]!r}\n")
            self._answer(400)
            return
        self.server.record(body)
        self._answer(200)

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Only errors are logged."""


if __name__ == "__main__":
    Receiver(int(sys.argv[1]), Path(sys.argv[2])).serve_forever()
