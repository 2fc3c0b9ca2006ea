"""A server that plays chat, pagers, webhooks and a mail server for Alertmanager, and an Alertmanager for it."""

import contextlib
import http.server
import shutil
import socketserver
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.ports import free_port

ALERTMANAGER = shutil.which("alertmanager") or shutil.which("prometheus-alertmanager")
CHANNELS = ("discord", "hook", "log", "mail", "opsgenie", "pagerduty", "slack")
START_S = 60.0
MESSAGE_S = 60.0  # from an alert to its messages, with waits of a second


class Message(NamedTuple):
    """What a service has got."""

    channel: str
    body: str


class Services:
    """All services on loopback, and what they have got."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.refuses = set[str]()  # channels that answer with an error
        services = self

        class Http(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                channel = self.path.strip("/").partition("/")[0]
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                if channel in services.refuses:
                    self.send_error(400, "refused")
                    return
                services.messages.append(Message(channel, body))
                self.send_response(202 if channel in ("pagerduty", "opsgenie") else 200)
                self.end_headers()
                self.wfile.write(b"ok" if channel == "slack" else b'{"status":"success"}')

            def log_message(self, *_: object) -> None:
                """Stay silent."""

        class Mail(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self._say("220 hello")
                while line := self.rfile.readline().decode().strip():
                    word = line.partition(" ")[0].upper()
                    if word == "DATA":
                        self._say("354 go on")
                        services.messages.append(Message("mail", "".join(self._text())))
                    self._say({"QUIT": "221 bye"}.get(word, "250 ok"))
                    if word == "QUIT":
                        return

            def _text(self) -> Iterator[str]:
                while (line := self.rfile.readline().decode()) != ".\r\n":
                    yield line.replace("\r\n", "\n")

            def _say(self, text: str) -> None:
                self.wfile.write(f"{text}\r\n".encode())

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Http)
        self.mail = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Mail)
        for server in (self.http, self.mail):
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}"

    @property
    def mail_server(self) -> str:
        return f"127.0.0.1:{self.mail.server_address[1]}"

    def cluster_file(self, folder: Path) -> str:
        """The text of a cluster file with all channels, whose secrets are files of ``folder``."""
        for name in ("slack", "discord", "hook"):
            _secret(folder / name, f"{self.url}/{name}")
        _secret(folder / "key", "k3y")
        return f"""\
notify:
  smtp: {{smarthost: "{self.mail_server}", from: gpujob@example.org, require_tls: false}}
  board_url: https://grafana.example.org/d/gpujob-job
  channels:
    slack: {{slack: {{url_file: {folder}/slack, channel: "#gpu"}}}}
    discord: {{discord: {{url_file: {folder}/discord}}}}
    pagerduty: {{pagerduty: {{key_file: {folder}/key, url: "{self.url}/pagerduty"}}}}
    opsgenie: {{opsgenie: {{key_file: {folder}/key, url: "{self.url}/opsgenie/"}}}}
    hook: {{webhook: {{url_file: {folder}/hook}}}}
    log: {{log: {{token_file: {folder}/key, url: "{self.url}/log"}}}}
    mail: {{email: {{to: oncall@example.org}}}}
"""

    def wait(self, wanted: Callable[[Message], bool], count: int) -> list[Message]:
        """Messages that are wanted, as soon as there are ``count``."""
        end = time.monotonic() + MESSAGE_S
        while len(found := [each for each in list(self.messages) if wanted(each)]) < count:
            assert time.monotonic() < end, f"{len(found)} of {count} messages: {[each.channel for each in found]}"
            time.sleep(0.05)
        return found

    def close(self) -> None:
        for server in (self.http, self.mail):
            server.shutdown()
            server.server_close()


def _secret(path: Path, text: str) -> None:
    path.write_text(f"{text}", encoding="utf-8")
    path.chmod(0o600)


@contextlib.contextmanager
def running_alertmanager(config: Path, data: Path) -> Iterator[str]:
    """The URL of an Alertmanager with this configuration, which waits a second at most before it sends."""
    text = config.read_text(encoding="utf-8")
    for old, new in (("group_wait: 10s", "group_wait: 1s"), ("group_wait: 30s", "group_wait: 1s")):
        text = text.replace(old, new)
    config.write_text(text.replace("group_interval: 5m", "group_interval: 2s"), encoding="utf-8")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    assert ALERTMANAGER is not None
    process = subprocess.Popen(
        [
            ALERTMANAGER,
            f"--config.file={config}",
            f"--storage.path={data}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--web.external-url=http://alertmanager.example.org/",
            "--web.route-prefix=/",
            "--cluster.listen-address=",
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + START_S
        while not _is_ready(url):
            assert process.poll() is None, "Alertmanager has ended"
            assert time.monotonic() < end, "Alertmanager does not start"
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait(START_S)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=2):
            return True
    except OSError:
        return False
