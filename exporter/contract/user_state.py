"""Where the user's files are that last beyond a job: run histories, reports without a place, locks of outputs,
the index of jobs, and answers of Slurm that may be lost."""

import os
from collections.abc import Mapping

from exporter.contract.errors import ExporterError

HUB_SOCKET = "hub.sock"  # of the hub of one user, for the cluster of its machine
HUB_FOLDER = "hub"  # of its file, in the state folder


def user_state_folder(environ: Mapping[str, str]) -> str | None:
    """The folder (XDG Base Directory); None if there is no place for one."""
    if os.path.isabs(environ.get("XDG_STATE_HOME", "")):  # others are to be ignored (XDG Base Directory)
        return f"{environ['XDG_STATE_HOME']}/gpujob"
    return f"{environ['HOME']}/.local/state/gpujob" if os.path.isabs(environ.get("HOME", "")) else None


def hub_socket(environ: Mapping[str, str], state_dir: str, name: str = HUB_SOCKET) -> str:
    """Where a hub listens for users of its machine: in the folder that the login made, else beside the hub's file."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and os.path.isdir(runtime):
        return f"{runtime}/gpujob/{name}"
    return f"{state_dir}/{name}"


def user_cache_folder(environ: Mapping[str, str]) -> str | None:
    """The folder of files that may be lost (XDG Base Directory); None if there is no place for one."""
    if os.path.isabs(environ.get("XDG_CACHE_HOME", "")):
        return f"{environ['XDG_CACHE_HOME']}/gpujob"
    return f"{environ['HOME']}/.cache/gpujob" if os.path.isabs(environ.get("HOME", "")) else None


def make_private_folder(folder: str | os.PathLike[str]) -> None:
    """Make a folder and the missing ones above it, for this user alone whatever the umask. Raises OSError."""
    above = os.path.dirname(folder)
    if above and not os.path.isdir(above):
        make_private_folder(above)
    try:
        os.mkdir(folder, 0o700)
    except OSError:  # NFS may name another fault of a folder that is there, such as that it is read-only
        if not os.path.isdir(folder):
            raise


def make_own_folder(folder: str | os.PathLike[str]) -> None:
    """Make a folder in which nobody else can put a file, such as a token that they know.

    Raises OSError, and ExporterError for a folder of another user, or one that others can write. Root may own it.
    """
    make_private_folder(folder)
    facts, owners = os.stat(folder), (os.geteuid(), 0)
    if facts.st_uid not in owners or os.lstat(folder).st_uid not in owners or facts.st_mode & 0o022:
        raise ExporterError(f"{os.fspath(folder)}: another user owns it, or others can write there; give another one")
