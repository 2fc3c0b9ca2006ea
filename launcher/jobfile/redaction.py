"""What is called like a secret: its value is kept out of files that others read. Pure."""

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.jobfile.jobfile import JobSpec

_SECRET = re.compile(r"(?i)(token(?!iz)|secret|passw|passphrase|credential|cookie|auth|api_?key|(?:^|_)key(?:_|$))")
_SECRET_OPTION = re.compile(r"(?i)(?:^|[-_.])(token|secret|passw\w*|passphrase|credentials?|cookie|auth|key)$")
"""Options count tokens and name tokenizers, so only their last word tells."""
_HARMLESS = re.compile(r"(?i)|true|false|yes|no|on|off|none|[-+.\d]+|[/~].*")
REDACTED = "<redacted>"


def is_secret_name(name: str) -> bool:
    """Whether a value under this name is kept out of files that others read."""
    return bool(_SECRET.search(name))


def is_secret_option(name: str) -> bool:
    """The same of an option of a program, as in ``args`` or a ``config``."""
    return bool(_SECRET_OPTION.search(name))


def is_harmless(value: str) -> bool:
    """Whether a value is no secret, whatever it is called: ``TOKENIZERS_PARALLELISM=false``, a number, a path."""
    return bool(_HARMLESS.fullmatch(value))


def redacted_job(spec: "JobSpec") -> dict[str, Any]:
    """The job as it was resolved, with the values of secret-looking variables and options left out."""
    body: dict[str, Any] = _redacted(spec.model_dump(mode="json"))
    return body


def _redacted(value: Any, within: str = "") -> Any:
    """``value`` without what is secret by its name in an ``env``, ``args``, ``config`` or a sweep."""
    if isinstance(value, list):
        return [_redacted(inner, within) for inner in value]
    if not isinstance(value, dict):
        return value
    body: dict[str, Any] = {}
    for name, inner in value.items():
        last = name.rpartition(".")[2]
        variable = within == "env" or f".{name}".endswith(f".env.{last}")
        hidden = is_secret_name(last) if variable else is_secret_option(last)
        if within and hidden and isinstance(inner, str | list):
            body[name] = REDACTED
        else:
            kept = within if within in ("config", "sweep") else ""
            body[name] = _redacted(inner, name if name in ("env", "args", "config", "sweep") else kept)
    return body
