"""Location of the cluster file, and the logs directory that it names: all that commands on a running job need."""

import os
import pwd
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from launcher.errors import ConfigError, LauncherError
from launcher.rundir.trust import ROOT, distrust, find_problem, read_facts

CLUSTER_FILE = "gpujob.yaml"
CLUSTER_VARIABLE = "GPUJOB_CONFIG"
SYSTEM_FILE = Path("/etc/gpujob/config.yaml")  # the last one searched, and the only one with trusted owners
LOGS_DIR = "logs"  # default, below the working directory


class ClusterFile(NamedTuple):
    """The cluster file that counts, and why."""

    path: Path
    found_by: str


def find_cluster_file(environ: Mapping[str, str], workdir: Path) -> ClusterFile | None:
    """Find the cluster file: by ``GPUJOB_CONFIG``, in or above the working directory, in the user's home, or in /etc.

    Raises LauncherError if others can write it, or if it belongs to another user whom nobody trusts.
    """
    if named := environ.get(CLUSTER_VARIABLE):
        path = Path(named)
        # any owner is right, since the user has named the file, but nobody else may be able to replace it
        require_trusted(path, "or name a copy of your own", lambda: (path.stat().st_uid,))
        return ClusterFile(path, f"environment: {CLUSTER_VARIABLE}")
    above = "in or above the working directory"
    places = [ClusterFile(folder / CLUSTER_FILE, above) for folder in (workdir, *workdir.parents)]
    home = environ.get("XDG_CONFIG_HOME") or (f"{environ['HOME']}/.config" if environ.get("HOME") else None)
    if home:
        places.append(ClusterFile(Path(home, "gpujob", "config.yaml"), "in the user's configuration directory"))
    places.append(ClusterFile(SYSTEM_FILE, "of the system"))
    found = next((place for place in places if _is_file(place.path)), None)
    if found is not None:
        require_trusted(found.path, f"set {CLUSTER_VARIABLE} to the cluster file that you want")
    return found


def require_trusted(
    path: Path, fix: str, read_owners: Callable[[], Collection[int]] | None = None, *, is_named: bool = False
) -> None:
    """Raise LauncherError if a file, or its directory unless the user named the file, is not trusted.

    It must be this user's, root's or an owner's of the site, or of those that ``read_owners`` returns.
    """
    if problem := distrust(path, read_owners or read_trusted_owners, is_named=is_named):
        raise LauncherError(f"{path}: is not used: {problem}; {fix}")


def read_trusted_owners() -> frozenset[int]:
    """User ids in ``trusted_owners`` of the system file. Raises LauncherError if others than root can write it."""
    if not _is_file(SYSTEM_FILE):
        return frozenset()
    for place in (SYSTEM_FILE, SYSTEM_FILE.parent):
        if problem := find_problem(read_facts(place), (ROOT,)):
            raise LauncherError(f"{SYSTEM_FILE}: is not used: {problem}; only root may be able to write it")
    names = _read_mapping(SYSTEM_FILE).get("trusted_owners")
    return frozenset(map(_user_id, names if isinstance(names, list) else ()))


def _user_id(name: object) -> int:
    try:
        return pwd.getpwnam(str(name)).pw_uid
    except KeyError:
        raise ConfigError(str(SYSTEM_FILE), [f"trusted_owners: {name!r} is not the name of a user here"]) from None


def find_logs_dir(environ: Mapping[str, str], workdir: Path) -> Path:
    """Directory with the run directories of jobs submitted from here.

    Only ``logs_dir`` is read; the rest of the cluster file is checked at launch. Raises ConfigError if the file
    cannot be read or names no directory.
    """
    return _find_directory("logs_dir", environ, workdir) or workdir / LOGS_DIR


def find_registry_dir(environ: Mapping[str, str], workdir: Path) -> Path | None:
    """The site's index of jobs; None without one. Raises as `find_logs_dir` does."""
    return _find_directory("registry_dir", environ, workdir)


def read_cluster_key(key: str, environ: Mapping[str, str], workdir: Path) -> tuple[Path | None, object]:
    """The cluster file that counts, and the unchecked value of one of its keys; None without them."""
    found = find_cluster_file(environ, workdir)
    return (None, None) if found is None else (found.path, _read_mapping(found.path).get(key))


def _find_directory(key: str, environ: Mapping[str, str], workdir: Path) -> Path | None:
    path, named = read_cluster_key(key, environ, workdir)
    if named is not None and not isinstance(named, str):
        raise ConfigError(str(path), [f"{key}: {named!r} is not a directory; write a path"])
    resolved = resolve_directory(named, workdir)
    return None if resolved is None else Path(resolved)


def _read_mapping(path: Path) -> Mapping[str, object]:
    """Content of a cluster file, unchecked. Raises ConfigError if it is not YAML."""
    from launcher.rundir.yaml_files import load_yaml, read_yaml_text  # lazy: 20 ms, and many have no such file

    body = load_yaml(read_yaml_text(path), str(path))
    return body if isinstance(body, dict) else {}


def resolve_directory(text: str | None, workdir: Path) -> str | None:
    """Make a directory absolute, with ``~`` expanded."""
    return None if text is None else os.path.normpath(workdir / Path(text).expanduser())


def _is_file(path: Path) -> bool:
    """Whether the file exists, or False if it is in a directory that this user may not enter."""
    try:
        return path.is_file()
    except OSError:
        return False
