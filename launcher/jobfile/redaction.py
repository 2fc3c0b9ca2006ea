"""Secrets recognized by name, whose values stay out of files that others can read. Pure."""

import re
from typing import TYPE_CHECKING

from exporter.contract.records import JsonObject, JsonValue

if TYPE_CHECKING:
    from launcher.jobfile.jobfile import JobSpec

_SECRET = re.compile(r"(?i)(token(?!iz)|secret|passw|passphrase|credential|cookie|auth|api_?key|(?:^|_)key(?:_|$))")
# only the last word counts, because options also count tokens and name tokenizers
_SECRET_OPTION = re.compile(r"(?i)(?:^|[-_.])(token|secret|passw\w*|passphrase|credentials?|cookie|auth|key)$")
_HARMLESS = re.compile(r"(?i)|true|false|yes|no|on|off|none|[-+.\d]+|[/~].*")
REDACTED = "<redacted>"


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name must be redacted."""
    return bool(_SECRET.search(name))


def is_secret_option(name: str) -> bool:
    """Whether a program's option of this name, in ``args`` or a ``config``, must be redacted."""
    return bool(_SECRET_OPTION.search(name))


def is_harmless(value: str) -> bool:
    """Whether a value is no secret despite its name: ``TOKENIZERS_PARALLELISM=false``, a number, a path."""
    return bool(_HARMLESS.fullmatch(value))


def redacted_job(spec: "JobSpec") -> JsonObject:
    """The resolved job, with the values of secret-looking variables and options redacted."""
    return _redacted_mapping(spec.model_dump(mode="json"), "")


def _redacted(value: JsonValue, within: str) -> JsonValue:
    """Redact values that are secret by their name in an ``env``, ``args``, ``config`` or sweep."""
    if isinstance(value, list):
        return [_redacted(inner, within) for inner in value]
    return _redacted_mapping(value, within) if isinstance(value, dict) else value


def _redacted_mapping(value: JsonObject, within: str) -> dict[str, JsonValue]:
    body: dict[str, JsonValue] = {}
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
