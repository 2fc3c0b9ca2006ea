"""Alertmanager, Prometheus and our receiver over HTTP: what fires, and silences."""

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from exporter.contract.records import JsonValue
from launcher.alerts.firing import Found, Silence, parse_alertmanager, parse_prometheus, parse_receiver, parse_silences
from launcher.errors import LauncherError
from launcher.registry.own_stack import StackRecord

TIMEOUT_S = 5.0
MOST_BYTES = 16 * 1024 * 1024  # of an answer

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy must not see tokens and secret paths


class UnansweredError(LauncherError):
    """A server does not answer, or not as it should."""


class Source(NamedTuple):
    """A server with alerts."""

    kind: str  # alertmanager, prometheus or receiver
    url: str
    token: str | None = None

    def __str__(self) -> str:
        return f"{self.kind} at {self.url}"


def ask(source: Source, path: str, body: JsonValue = None, method: str | None = None) -> str:
    """The text of an answer. Raises UnansweredError."""
    headers = {"Accept": "application/json", **({"Authorization": f"Bearer {source.token}"} if source.token else {})}
    data = None
    if body is not None:
        data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
    request = urllib.request.Request(source.url.rstrip("/") + path, data, headers, method=method)  # noqa: S310 - http alone, see `find_sources`
    try:
        with _OPENER.open(request, timeout=TIMEOUT_S) as answer:
            text: bytes = answer.read(MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        said = error.read(300).decode("utf-8", "replace").strip()
        raise UnansweredError(f"{source} answered {error.code}: {' '.join(said.split())}") from error
    except (OSError, ValueError, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or error
        raise UnansweredError(f"{source} does not answer: {reason}") from error
    if len(text) > MOST_BYTES:
        raise UnansweredError(f"{source} answered more than {MOST_BYTES} bytes")
    return text.decode("utf-8", "replace")


def read_alerts(source: Source) -> list[Found]:
    """The alerts that fire. Raises UnansweredError."""
    paths = {"alertmanager": "/api/v2/alerts", "prometheus": "/api/v1/alerts", "receiver": "/api/v1/alerts"}
    parse = {"alertmanager": parse_alertmanager, "prometheus": parse_prometheus, "receiver": parse_receiver}
    text = ask(source, paths[source.kind])
    try:
        return parse[source.kind](text)
    except ValueError as error:
        raise UnansweredError(f"{source} answered something else than alerts: {error}") from error


def read_silences(source: Source) -> list[Silence]:
    """The silences that are active. Raises UnansweredError."""
    try:
        return parse_silences(ask(source, "/api/v2/silences"))
    except ValueError as error:
        raise UnansweredError(f"{source} answered something else than silences: {error}") from error


def read_config(source: Source) -> str:
    """The configuration with which Alertmanager runs, without its secrets. Raises UnansweredError."""
    try:
        return str(json.loads(ask(source, "/api/v2/status"))["config"]["original"])
    except (ValueError, KeyError, TypeError) as error:
        raise UnansweredError(f"{source} did not say its configuration") from error


def add_silence(source: Source, silence: JsonValue) -> str:
    """Add a silence; returns its id. Raises UnansweredError."""
    try:
        return str(json.loads(ask(source, "/api/v2/silences", silence))["silenceID"])
    except (ValueError, KeyError, TypeError) as error:
        raise UnansweredError(f"{source} did not say the id of the silence") from error


def end_silence(source: Source, silence_id: str) -> None:
    """End a silence. Raises UnansweredError."""
    ask(source, f"/api/v2/silence/{quote(silence_id)}", method="DELETE")


def find_sources(urls: Mapping[str, object], state_folder: str | None, own: StackRecord | None = None) -> list[Source]:
    """Servers to ask, the best one first: those of the cluster file, then this user's stack and receiver."""
    found = [
        Source(kind, url)
        for kind in ("alertmanager", "prometheus")
        if isinstance(url := urls.get(kind), str) and url.startswith(("http://", "https://"))
    ]
    if own is not None and "alertmanager" in own.programs:
        found.append(Source("alertmanager", f"{own.url}alertmanager"))
    folder = Path(state_folder or "/nonexistent", "alerts")
    try:
        url = json.loads((folder / "receiver.json").read_text("utf-8"))["url"]
        token = (folder / "token").read_text("utf-8").strip()
        found.append(Source("receiver", str(url), token))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # nobody has started one
    return found
