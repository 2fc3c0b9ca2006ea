"""A stand-in for the program of Grafana, which reads the settings, data source and boards that Grafana would.

It answers below the path of ``root_url``: ``api/health`` to everybody, and to the user ``api/search`` with the boards
and ``api/datasources/uid/UID/health`` with what the data source says.
"""

import base64
import configparser
import json
import os
import sys
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import yaml

VERSION = "11.2.0"


def install(home: Path, version: str = VERSION) -> None:
    """Make the home of a Grafana which is this module."""
    (home / "conf").mkdir(parents=True)
    (home / "bin").mkdir()
    (home / "conf" / "defaults.ini").touch()
    program = home / "bin" / "grafana"
    program.write_text(f'#!/bin/sh\nVERSION={version} exec {sys.executable} {__file__} "$@"\n')
    program.chmod(0o755)


def main(*arguments: str) -> None:
    if arguments == ("--version",):
        print(f"grafana version {os.environ['VERSION']}")
        return
    command, home, config = arguments
    assert command == "server"
    assert Path(home.removeprefix("--homepath="), "conf", "defaults.ini").is_file()
    settings = configparser.RawConfigParser()
    settings.read(config.removeprefix("--config="))
    server = settings["server"]
    assert server["serve_from_sub_path"] == "true"
    HTTPServer((server["http_addr"], int(server["http_port"])), make_handler(settings)).serve_forever()


def make_handler(settings: configparser.RawConfigParser) -> type[BaseHTTPRequestHandler]:
    root = urllib.parse.urlsplit(settings["server"]["root_url"]).path
    security = settings["security"]
    login = f"Basic {_encode(security['admin_user'], security['admin_password'])}"
    provisioning = Path(settings["paths"]["provisioning"])
    sources = {
        source["uid"]: source
        for path in (provisioning / "datasources").glob("*.yml")
        for source in yaml.safe_load(path.read_text())["datasources"]
    }
    boards = [
        json.loads(board.read_text())["uid"]
        for path in (provisioning / "dashboards").glob("*.yml")
        for provider in yaml.safe_load(path.read_text())["providers"]
        for board in Path(provider["options"]["path"]).glob("*.json")
    ]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == f"{root}api/health":
                return self.answer(200, {"database": "ok"})
            if self.headers["Authorization"] != login:
                return self.answer(401, {})
            if self.path == f"{root}api/search":
                return self.answer(200, sorted(boards))
            uid = self.path.removeprefix(f"{root}api/datasources/uid/").removesuffix("/health")
            return self.answer(*self.ask(sources[uid])) if uid in sources else self.answer(404, {})

        def ask(self, source: dict[str, Any]) -> tuple[int, Any]:
            word = _encode(source["basicAuthUser"], source["secureJsonData"]["basicAuthPassword"])
            request = urllib.request.Request(f"{source['url']}/api/v1/query?query=vector(7)")
            request.add_header("Authorization", f"Basic {word}")
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
                return answer.status, json.loads(answer.read())["data"]["result"][0]["value"][1]

        def answer(self, status: int, body: object) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def _encode(user: str, password: str) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


if __name__ == "__main__":
    main(*sys.argv[1:])
