"""YAML files of users: their text, and its value within the limits of ``exporter.contract.bounded_yaml.py``."""

import re
from pathlib import Path

import yaml

from exporter.contract.bounded_yaml import MOST_BYTES, parse_yaml
from launcher.errors import ConfigError

_BREAKS = re.compile("[\x85\u2028\u2029]")  # line breaks that PyYAML writes as they are and reads as spaces


def read_yaml_text(path: Path) -> str:
    """Text of a file of the user. Raises ConfigError if it cannot be read, is too large or is not UTF-8."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise ConfigError(str(path), [f"has more than {MOST_BYTES:,} bytes, the limit; is it the right file?"])
        return raw.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [f"is not UTF-8 at byte {error.start}"]) from error


def load_yaml(text: str, source: str) -> object:
    """Value of a YAML text. Raises ConfigError if it is not YAML, or beyond a limit."""
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise ConfigError(source, [str(error)]) from error


def dump_yaml(value: object) -> str:
    """Text of a value, which ``load_yaml`` reads as the same value. Other scripts than Latin stay readable."""
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    return yaml.safe_dump(value, sort_keys=False) if not text.isascii() and _BREAKS.search(text) else text
