"""JSON of a service on this machine or another one: of a hub, or of slurmrestd."""

import json
import re
import socket
from collections.abc import Mapping

from exporter.contract.errors import ExporterError
from exporter.contract.records import NOTHING

UNIX = "unix:"
OK = 200
HTTPS_PORT = 443
MOST_BYTES = 256 << 20  # of an answer: 5,000 jobs of slurmrestd are 42 MB
_URL = re.compile(r"(https?)://([^/?#@\s]+)(/[^?#\s]*)?")
FORMS = "unix:/run/user/1000/gpujob/hub.sock, http://localhost:9420 or https://HOST:PORT"


class NoAnswerError(ExporterError):
    """A service that is not there, or whose answer is no JSON object."""

    def __init__(self, problem: str, status: int | None = None) -> None:
        self.status = status  # of HTTP
        super().__init__(problem)


def check_address(text: str) -> None:
    """Raise ValueError, with what would be right, unless this is the address of a service."""
    if not (text.startswith(f"{UNIX}/") or _URL.fullmatch(text)):
        raise ValueError(f"{text!r} is no address; write it as in {FORMS}")


def read_json(address: str, path: str, deadline_s: float, headers: Mapping[str, str] = NOTHING) -> Mapping[str, object]:
    """Read the JSON at a path. ``deadline_s`` bounds each wait. Raises NoAnswerError."""
    return read_json_text(address, path, deadline_s, headers)[0]


def read_json_text(
    address: str, path: str, deadline_s: float, headers: Mapping[str, str] = NOTHING
) -> tuple[Mapping[str, object], bytes]:
    """Read the JSON at a path, and its text. ``deadline_s`` bounds each wait. Raises NoAnswerError."""
    from http.client import HTTPConnection, HTTPException  # lazy: 20 ms, and most have no service

    try:
        connection, prefix = HTTPConnection("localhost"), ""
        if address.startswith(UNIX):
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(deadline_s)
            connection.sock.connect(address.removeprefix(UNIX))
        else:
            found = _URL.fullmatch(address)
            if found is None:
                raise NoAnswerError(f"{address!r} is no address")
            connection, prefix = HTTPConnection(found[2]), (found[3] or "").rstrip("/")
            connection.sock = _connect(connection.host, connection.port, found[1] == "https", found[2], deadline_s)
        try:
            connection.request("GET", prefix + path, headers={"Accept": "application/json", **headers})
            response = connection.getresponse()
            text = response.read(MOST_BYTES)
        finally:
            connection.close()
        if response.status != OK:
            raise NoAnswerError(f"{address} answers with status {response.status}", response.status)
        body = json.loads(text)
    except (OSError, HTTPException, ValueError, RecursionError) as error:
        words = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise NoAnswerError(f"{address} does not answer: {words}") from error
    if not isinstance(body, dict):
        raise NoAnswerError(f"{address} does not answer with a JSON object")
    return body, text


def _connect(host: str, port: int, is_tls: bool, place: str, deadline_s: float) -> socket.socket:
    """A connection. A hub that was loaded without TLS lacks the HTTPSConnection of http.client."""
    named = re.search(r":\d+$", place) is not None
    plain = socket.create_connection((host, port if named or not is_tls else HTTPS_PORT), deadline_s)
    if not is_tls:
        return plain
    import ssl  # lazy: 20 ms, and few addresses are https

    try:
        return ssl.create_default_context().wrap_socket(plain, server_hostname=host)
    except OSError:
        plain.close()
        raise
