"""HTTP requests to the programs of the stack over loopback, without proxies."""

import json
import urllib.error
import urllib.request

TIMEOUT_S = 5.0
MOST_BYTES = 16 * 1024 * 1024  # of an answer

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def answers(url: str) -> bool:
    """Whether an address answers with success."""
    return get(url) is not None


def get(url: str, token: str | None = None) -> str | None:
    """The text of an answer; None without one."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        with _OPENER.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S) as answer:  # noqa: S310 - of loopback
            body: bytes = answer.read(MOST_BYTES)
    except (OSError, ValueError, urllib.error.URLError):
        return None
    return body.decode("utf-8", "replace")


def get_object(url: str, token: str | None = None) -> dict[str, object]:
    """The JSON object of an answer; empty without one."""
    try:
        value = json.loads(get(url, token) or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
