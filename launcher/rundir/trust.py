"""Trust in files that decide what a job executes: only their owner can write them, and whose they may be."""

import contextlib
import grp
import os
import pwd
import stat
import struct
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

ROOT = 0
_ACL = "system.posix_acl_access"  # acl(5): after 4 bytes a kind, rights and an id for each entry
_ACL_USER, _ACL_GROUP, _ACL_MASK = 0x02, 0x08, 0x10  # kinds: a user or group by id; rights that none of them exceeds
_ACL_NAMED = (_ACL_USER, _ACL_GROUP)


class FileFacts(NamedTuple):
    """Owner and rights of a file or directory."""

    path: str
    owner: int
    mode: int
    owner_name: str
    group_name: str
    has_private_group: bool  # its group is the owner's primary one, has the owner's name, and has no other members
    has_acl_writers: bool = False  # its ACL lets other users or groups by name write


def other_writers(facts: FileFacts) -> str | None:
    """Who can write a file besides its owner and root, or None."""
    if facts.mode & stat.S_IWOTH:
        return "everyone"
    if facts.has_acl_writers:
        return "others in its ACL"
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


def read_facts(path: Path, *, of_link: bool = False) -> FileFacts:
    """Owner and rights of a file, behind links unless ``of_link``. Raises OSError."""
    status = path.stat(follow_symlinks=not of_link)
    user, group, primary, members = str(status.st_uid), str(status.st_gid), None, list[str]()
    with contextlib.suppress(KeyError):
        group, _, _, members = grp.getgrgid(status.st_gid)
    with contextlib.suppress(KeyError):
        known = pwd.getpwuid(status.st_uid)
        user, primary = known.pw_name, known.pw_gid
    is_private = primary == status.st_gid and user == group and not set(members) - {user}
    return FileFacts(
        str(path), status.st_uid, status.st_mode, user, group, is_private, _has_acl_writers(path, status.st_uid)
    )


def _has_acl_writers(path: Path, owner: int) -> bool:
    try:
        entries = list(struct.iter_unpack("<HHI", os.getxattr(path, _ACL)[4:]))
    except OSError:
        return False  # it has none, as on a file system without any
    mask = next((rights for kind, rights, _ in entries if kind == _ACL_MASK), 0)
    trusted = ((_ACL_USER, owner), (_ACL_USER, ROOT))  # as in the files of a directory that gives its users all rights
    others = (rights for kind, rights, who in entries if kind in _ACL_NAMED and (kind, who) not in trusted)
    return any(rights & mask & os.W_OK for rights in others)


def distrust(path: Path, read_site_owners: Callable[[], Collection[int]], *, is_named: bool = False) -> str | None:
    """Why a file is not trusted, or None. The target of a link counts, and the directory unless the user named it.

    What others put in the place of a named file is theirs, and so is not trusted either.
    The owners trusted by the site are read only if they matter. Missing files and pipes are no danger.
    """
    real = Path(os.path.realpath(path))
    for place in (real,) if is_named else dict.fromkeys((real, real.parent, path.parent)):
        try:
            facts = read_facts(place)
        except OSError:
            return None  # the reader of the file says why it cannot be read
        if place == real and not stat.S_ISREG(facts.mode):
            return None
        own = (os.geteuid(), ROOT)
        owners = own if facts.owner in own else (*own, *read_site_owners())
        if (problem := find_problem(facts, owners)) is not None:
            return problem
    return None


def distrust_directory(path: Path, read_site_owners: Callable[[], Collection[int]]) -> str | None:
    """Why run directories are not safe in this directory, or None. Its owner could replace any of them.

    Another user's directory counts as shared with a team, unless everyone can make directories beside it.
    """
    real = Path(os.path.realpath(path))
    try:
        found = [(read_facts(real), read_facts(real.parent))]
        if path.is_symlink():
            found.append((read_facts(path, of_link=True), read_facts(path.parent)))
    except OSError:
        return None  # it is made later, or the one who writes there says why that fails
    for facts, parent in found:
        is_public = parent.mode & stat.S_IWOTH and facts.owner not in (os.geteuid(), ROOT)
        if is_public and facts.owner not in read_site_owners():
            return f"{facts.path} belongs to {facts.owner_name}, and everyone can make directories in {parent.path}"
    return None


def foreign_owner(*paths: Path) -> str | None:
    """The first of these that belongs to neither this user nor root, and to whom; None without one, or if missing."""
    with contextlib.suppress(OSError):
        for facts in map(read_facts, paths):
            if facts.owner not in (os.geteuid(), ROOT):
                return f"{facts.path} belongs to {facts.owner_name}"
    return None


def is_own_directory(path: Path) -> bool:
    """Whether a directory exists, and only this user and root can put files there."""
    try:
        return find_problem(read_facts(path), (os.geteuid(), ROOT)) is None
    except OSError:
        return False
