"""The targets of all users in one file for Prometheus, each with the owner of its file as the user.

Prometheus opens whatever lies in a directory of ``file_sd``, and believes it. Here, links, pipes and large files are
not read, and a file decides about nothing but addresses and the labels of its owner's targets.
"""

import contextlib
import os
import pwd
from collections import Counter
from pathlib import Path

from exporter.contract.identity import safe_label
from exporter.contract.target_files import MOST_TARGETS, TargetGroup, parse_targets, read_target_file


def read_site_targets(directory: Path) -> tuple[list[TargetGroup], list[str]]:
    """Targets of all files in a target directory, and why others were left out. Raises OSError if it is unreadable."""
    groups: list[TargetGroup] = []
    problems: list[str] = []
    counts = Counter[str]()
    for name in sorted(os.listdir(directory)):
        if name.startswith(".") or not name.endswith(".json"):
            continue
        try:
            uid, text = read_target_file(directory / name)
            user = _user_name(uid)
            found = [group._replace(labels={**group.labels, "user": user}) for group in parse_targets(text)]
            counts[user] += sum(len(group.targets) for group in found)
            if counts[user] > MOST_TARGETS:
                raise ValueError(f"{user} has more than {MOST_TARGETS} targets")
            groups += found
        except FileNotFoundError:
            continue  # its job has ended
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{directory / name}: {getattr(error, 'strerror', None) or error}; not used")
    return groups, problems


def _user_name(uid: int) -> str:
    user = str(uid)
    with contextlib.suppress(KeyError):
        user = pwd.getpwuid(uid).pw_name
    return safe_label(user)
