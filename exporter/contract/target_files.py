"""Prometheus target files (file_sd) of jobs: one in each run directory while its sidecars run.

Links, pipes and large files are not read: Prometheus would open whatever lies there, and believe it.
"""

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from exporter.contract.records import RecordError, from_json

# ``job`` label of sidecar targets, whatever the scrape configuration is called; our rules need it
SCRAPE_JOB = "gpujob-sidecar"
ENGINE_JOB = "gpujob-engine"  # ``job`` label of the metrics that workers' own programs serve; none of our rules uses it
SITE_PREFIX = "gpujob-"  # of the files in the site's target directory
MOST_BYTES = 4 * 1024 * 1024  # of a target file: a job of 10,000 nodes
MOST_TARGETS = 10_000  # of one user, so that nobody uses up the `target_limit` of all
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]{0,63}")  # with two leading underscores: instructions to Prometheus
_PATH_LABEL = "__metrics_path__"  # the only such label in our own files
_VALUE_LENGTH = 256


class TargetGroup(NamedTuple):
    """Targets with the same labels, as in a file_sd file."""

    targets: tuple[str, ...]
    labels: Mapping[str, str]


def read_target_file(path: str | os.PathLike[str]) -> tuple[int, str]:
    """The owner and the text of a regular file. Raises OSError and ValueError."""
    source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(source, encoding="utf-8") as lines:
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        text = lines.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ValueError(f"larger than {MOST_BYTES} bytes")
    return status.st_uid, text


def remove_site_targets(directory: str | os.PathLike[str], groups: Sequence[TargetGroup], uid: int, end: float) -> None:
    """Remove the file with these groups from a target directory: that of a job of this user, which ended at ``end``.

    A file that was written later is of another attempt. Raises OSError.
    """
    with os.scandir(directory) as found:
        paths = [entry.path for entry in found if entry.name.startswith(SITE_PREFIX) and entry.name.endswith(".json")]
    for path in paths:
        try:
            status = os.stat(path, follow_symlinks=False)
            if status.st_uid != uid or status.st_mtime >= end:
                continue
            owner, text = read_target_file(path)
            if owner == uid and parse_targets(text, with_path=True) == list(groups):
                os.unlink(path)
        except (ValueError, RecursionError, FileNotFoundError):
            continue  # not of gpujob, or its job has just removed it


def parse_targets(text: str, *, with_path: bool = False) -> list[TargetGroup]:
    """Parse a target file, without labels that are instructions to Prometheus. Raises ValueError.

    ``with_path`` also keeps the path of the metrics, in the files of somebody who is trusted.
    """
    found = []
    for group in from_json(list[TargetGroup], json.loads(text), "targets"):
        labels = {
            name: value
            for name, value in group.labels.items()
            if _LABEL.fullmatch(name) or (with_path and name == _PATH_LABEL)
        }
        if labels.get("job") not in (SCRAPE_JOB, ENGINE_JOB):
            raise RecordError(f"label job: expected {SCRAPE_JOB} or {ENGINE_JOB}")
        if any(len(value) > _VALUE_LENGTH for value in labels.values()):
            raise RecordError(f"a label is longer than {_VALUE_LENGTH} characters")
        "".join(labels.values()).encode()  # half a character (a surrogate) is in no file that we write
        for address in group.targets:
            if not _ADDRESS.fullmatch(address):
                raise RecordError(f"{address[:80]!r} is not host:port")
        found.append(TargetGroup(group.targets, labels))
    return found
