"""Trust in files that decide what a job executes: only their owner can write them, and whose they may be."""

import contextlib
import grp
import os
import pwd
import stat
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from launcher.errors import LauncherError

ROOT = 0


class FileFacts(NamedTuple):
    """Owner and rights of a file or directory."""

    path: str
    owner: int
    mode: int
    owner_name: str
    group_name: str
    has_private_group: bool  # its group is the owner's primary one and has the owner's name


def other_writers(facts: FileFacts) -> str | None:
    """Who can write a file besides its owner and root, or None."""
    if facts.mode & stat.S_IWOTH:
        return "everyone"
    if facts.mode & stat.S_IWGRP and not facts.has_private_group:
        return f"the group {facts.group_name}"
    return None


def find_problem(facts: FileFacts, owners: Collection[int]) -> str | None:
    """Why a file is not trusted, with a fix, or None if it belongs to one of these and nobody else can write it."""
    whose = f"{facts.path} belongs to {facts.owner_name}"
    if facts.owner not in owners:
        return whose
    if (writers := other_writers(facts)) is None:
        return None
    fix = "move the file out of there" if facts.mode & stat.S_ISVTX else f"run `chmod go-w {facts.path}`"
    return f"{whose} and can be written by {writers}; {fix}"


def read_facts(path: Path) -> FileFacts:
    """Owner and rights of a file, behind links. Raises OSError."""
    status = path.stat()
    user, group, primary = str(status.st_uid), str(status.st_gid), None
    with contextlib.suppress(KeyError):
        group = grp.getgrgid(status.st_gid).gr_name
    with contextlib.suppress(KeyError):
        known = pwd.getpwuid(status.st_uid)
        user, primary = known.pw_name, known.pw_gid
    is_private = primary == status.st_gid and user == group
    return FileFacts(str(path), status.st_uid, status.st_mode, user, group, is_private)


def distrust(path: Path, read_site_owners: Callable[[], Collection[int]]) -> str | None:
    """Why a file that nobody named is not trusted, or None. Its directory counts too, and the target of a link.

    The owners trusted by the site are read only if they matter. A missing file is no danger.
    """
    real = Path(os.path.realpath(path))
    for place in dict.fromkeys((real, real.parent, path.parent)):
        try:
            facts = read_facts(place)
        except OSError:
            return None  # the reader of the file says why it cannot be read
        own = (os.geteuid(), ROOT)
        owners = own if facts.owner in own else (*own, *read_site_owners())
        if (problem := find_problem(facts, owners)) is not None:
            return problem
    return None


def foreign_owner(path: Path) -> str | None:
    """Owner of a file that the user has named, if it is another user.

    Raises LauncherError if others than its owner can write it. Missing files and pipes are no danger.
    """
    try:
        facts = read_facts(path)
    except OSError:
        return None
    if not stat.S_ISREG(facts.mode):
        return None
    if other_writers(facts) is not None:
        raise LauncherError(f"{path}: is not used: {find_problem(facts, (facts.owner,))}, or use a copy of your own")
    return None if facts.owner in (os.geteuid(), ROOT) else facts.owner_name
