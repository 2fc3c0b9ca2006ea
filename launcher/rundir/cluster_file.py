"""Location of the cluster file, and the logs directory that it names: all that commands on a running job need."""

import os
from collections.abc import Mapping
from pathlib import Path

import yaml

from launcher.errors import ConfigError

CLUSTER_FILE = "gpujob.yaml"
CLUSTER_VARIABLE = "GPUJOB_CONFIG"
LOGS_DIR = "logs"  # default, below the working directory


def find_cluster_file(environ: Mapping[str, str], workdir: Path) -> Path | None:
    """Find the cluster file: by ``GPUJOB_CONFIG``, in or above the working directory, or in the user's home."""
    if named := environ.get(CLUSTER_VARIABLE):
        return Path(named)
    places = [folder / CLUSTER_FILE for folder in (workdir, *workdir.parents)]
    home = environ.get("XDG_CONFIG_HOME") or (f"{environ['HOME']}/.config" if environ.get("HOME") else None)
    if home:
        places.append(Path(home, "gpujob", "config.yaml"))
    return next((place for place in places if _is_file(place)), None)


def read_yaml_text(path: Path) -> str:
    """Text of a job file or cluster file. Raises ConfigError if it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [f"is not UTF-8 at byte {error.start}"]) from error


def find_logs_dir(environ: Mapping[str, str], workdir: Path) -> Path:
    """Directory with the run directories of jobs submitted from here.

    Only ``logs_dir`` is read; the rest of the cluster file is checked at launch. Raises ConfigError if the file
    cannot be read or names no directory.
    """
    path = find_cluster_file(environ, workdir)
    if path is None:
        return workdir / LOGS_DIR
    try:
        body = yaml.safe_load(read_yaml_text(path))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(str(path), [f"not YAML that can be used: {' '.join(str(error).split())}"]) from error
    named = body.get("logs_dir") if isinstance(body, dict) else None
    if named is not None and not isinstance(named, str):
        raise ConfigError(str(path), [f"logs_dir: {named!r} is not a directory; write a path"])
    return Path(resolve_directory(named, workdir) or workdir / LOGS_DIR)


def resolve_directory(text: str | None, workdir: Path) -> str | None:
    """Make a directory absolute, with ``~`` expanded."""
    return None if text is None else os.path.normpath(workdir / Path(text).expanduser())


def _is_file(path: Path) -> bool:
    """Whether the file exists, or False if it is in a directory that this user may not enter."""
    try:
        return path.is_file()
    except OSError:
        return False
