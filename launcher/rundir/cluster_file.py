"""Where the cluster file is, and the logs directory that it names: all that a command on a running job needs of it."""

import os
from collections.abc import Mapping
from pathlib import Path

import yaml

from launcher.errors import ConfigError

CLUSTER_FILE = "gpujob.yaml"
CLUSTER_VARIABLE = "GPUJOB_CONFIG"
LOGS_DIR = "logs"  # below the working directory, where no cluster file names another


def find_cluster_file(environ: Mapping[str, str], workdir: Path) -> Path | None:
    """The cluster file that counts: of ``GPUJOB_CONFIG``, in or above the working directory, or the user's own."""
    if named := environ.get(CLUSTER_VARIABLE):
        return Path(named)
    places = [folder / CLUSTER_FILE for folder in (workdir, *workdir.parents)]
    home = environ.get("XDG_CONFIG_HOME") or (f"{environ['HOME']}/.config" if environ.get("HOME") else None)
    if home:
        places.append(Path(home, "gpujob", "config.yaml"))
    return next((place for place in places if _is_file(place)), None)


def read_cluster_text(path: Path) -> str:
    """Text of a cluster or job file; raises ConfigError when it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [f"is not UTF-8 at byte {error.start}"]) from error


def find_logs_dir(environ: Mapping[str, str], workdir: Path) -> Path:
    """The directory with the run directories of jobs that were submitted here.

    Only ``logs_dir`` of the cluster file counts: whether all of it is right is checked where a job is launched.
    Raises ConfigError when the file cannot be read or names no directory.
    """
    path = find_cluster_file(environ, workdir)
    if path is None:
        return workdir / LOGS_DIR
    try:
        body = yaml.safe_load(read_cluster_text(path))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(str(path), [f"not YAML that can be used: {' '.join(str(error).split())}"]) from error
    named = body.get("logs_dir") if isinstance(body, dict) else None
    if named is not None and not isinstance(named, str):
        raise ConfigError(str(path), [f"logs_dir: {named!r} is not a directory; write a path"])
    return Path(os.path.normpath(workdir / Path(named).expanduser())) if named else workdir / LOGS_DIR


def _is_file(path: Path) -> bool:
    """Whether there is a file; one in a directory that this user may not enter does not count."""
    try:
        return path.is_file()
    except OSError:
        return False
