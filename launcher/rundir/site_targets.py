"""The targets of all users in one file for Prometheus, each with the owner of its file as the user.

Prometheus opens whatever lies in a directory of ``file_sd``, and believes it. Here, links, pipes and large files are
not read, and a file decides about nothing but addresses and the labels of its owner's targets.
"""

import contextlib
import json
import os
import pwd
import re
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from exporter.contract.identity import safe_label
from exporter.contract.records import RecordError, from_json
from launcher.rundir.targets import ENGINE_JOB, SCRAPE_JOB, TargetGroup

MOST_BYTES = 4 * 1024 * 1024  # of a target file: a job of 10,000 nodes
MOST_TARGETS = 10_000  # of one user, so that nobody uses up the `target_limit` of all
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]{0,63}")  # those with two underscores are orders to Prometheus
_VALUE_LENGTH = 256


def read_site_targets(directory: Path) -> tuple[list[TargetGroup], list[str]]:
    """Targets of all files in a target directory, and why others were left out. Raises OSError if it is unreadable."""
    groups: list[TargetGroup] = []
    problems: list[str] = []
    counts = Counter[str]()
    for name in sorted(os.listdir(directory)):
        if name.startswith(".") or not name.endswith(".json"):
            continue
        try:
            user, text = _read_file(directory / name)
            found = list(_own_groups(text, user))
            counts[user] += sum(len(group.targets) for group in found)
            if counts[user] > MOST_TARGETS:
                raise ValueError(f"{user} has more than {MOST_TARGETS} targets")
            groups += found
        except FileNotFoundError:
            continue  # its job has ended
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{directory / name}: {getattr(error, 'strerror', None) or error}; not used")
    return groups, problems


def _read_file(path: Path) -> tuple[str, str]:
    """The owner and the text of a regular file. Raises OSError and ValueError."""
    source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(source, encoding="utf-8") as lines:
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        text = lines.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ValueError(f"larger than {MOST_BYTES} bytes")
    user = str(status.st_uid)
    with contextlib.suppress(KeyError):
        user = pwd.getpwuid(status.st_uid).pw_name
    return safe_label(user), text


def _own_groups(text: str, user: str) -> Iterator[TargetGroup]:
    """The groups of a target file, with the name of its owner. Raises ValueError."""
    for group in from_json(list[TargetGroup], json.loads(text), "targets"):
        labels = {name: value for name, value in group.labels.items() if _LABEL.fullmatch(name)}
        if labels.get("job") not in (SCRAPE_JOB, ENGINE_JOB):
            raise RecordError(f"label job: expected {SCRAPE_JOB} or {ENGINE_JOB}")
        if any(len(value) > _VALUE_LENGTH for value in labels.values()):
            raise RecordError(f"a label is longer than {_VALUE_LENGTH} characters")
        for address in group.targets:
            if not _ADDRESS.fullmatch(address):
                raise RecordError(f"{address[:80]!r} is no host and port")
        yield TargetGroup(group.targets, labels | {"user": user})
