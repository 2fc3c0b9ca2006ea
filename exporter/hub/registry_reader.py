"""Jobs that gpujob launched, from the entries that it leaves for each, and the scrape targets of those that run."""

import json
import logging
import os
import pwd
import stat
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from exporter.contract import run_files
from exporter.contract.identity import safe_label
from exporter.contract.records import JsonValue, Record, to_json
from exporter.contract.target_files import (
    ENGINE_JOB,
    MOST_TARGETS,
    SCRAPE_JOB,
    TargetGroup,
    parse_targets,
    read_target_file,
)
from exporter.hub.jobs import Run
from exporter.machine.threads import name_thread

READ_EACH_S = 15.0
MOST_BYTES = 16 * 1024  # of an entry
KINDS = {"sidecar": SCRAPE_JOB, "engine": ENGINE_JOB}

log = logging.getLogger("gpujob.hub")


class Entry(Record):
    """What a hub needs of the entry of a job."""

    job_id: str
    run_dir: str
    submitted: float


class Registry(NamedTuple):
    """What was read last."""

    runs: tuple[Run, ...]
    groups: tuple[TargetGroup, ...]
    problems: tuple[str, ...] = ()


def read_registry(folders: Iterable[Path], own_uid: int, *, only_own: bool) -> Registry:
    """Read all entries, and the target files in their run directories.

    Users are believed about files that are their own: each target has the owner of its file as its user. Own files
    are taken word for word.
    """
    runs, groups, problems = dict[str, Run](), list[TargetGroup](), list[str]()
    counts = Counter[int]()
    for path in _entry_files(folders, problems):
        try:
            uid, entry = _read_entry(path)
        except (OSError, ValueError, RecursionError):
            continue  # of a version that we do not know, or just replaced
        if only_own and uid != own_uid:
            continue
        user = _user_name(uid)
        runs[entry.run_dir] = Run(entry.job_id, user, entry.run_dir, entry.submitted)
    for run in list(runs.values()):
        path = Path(run.run_dir, run_files.TARGETS_FILE)
        try:
            uid, text = read_target_file(path)
            if _user_name(uid) != run.user:
                continue
            is_own = uid == own_uid
            found = parse_targets(text, with_path=is_own)
            counts[uid] += sum(len(group.targets) for group in found)
            if counts[uid] > MOST_TARGETS:
                raise ValueError(f"{run.user} has more than {MOST_TARGETS} targets")
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue  # it has no sidecars now, or shows its directory to nobody
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{path}: {getattr(error, 'strerror', None) or error}; not used")
            continue
        runs[run.run_dir] = run._replace(is_monitored=any(each.labels.get("job") == SCRAPE_JOB for each in found))
        label = safe_label(run.user)
        groups += found if is_own else [each._replace(labels={**each.labels, "user": label}) for each in found]
    return Registry(tuple(runs.values()), tuple(groups), tuple(problems))


def _entry_files(folders: Iterable[Path], problems: list[str]) -> list[Path]:
    found = []
    for folder in folders:
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            continue  # nobody has launched a job yet
        except OSError as error:
            problems.append(f"{folder}: {error.strerror}")
            continue
        found += [folder / name for name in sorted(names) if name.endswith(".json") and not name.startswith(".")]
    return found


def _read_entry(path: Path) -> tuple[int, Entry]:
    """The owner of a file, and its entry. Raises OSError and ValueError."""
    source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(source, encoding="utf-8", errors="surrogateescape") as lines:
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
            raise ValueError("not an entry")
        return status.st_uid, Entry.from_json(json.loads(lines.read()))


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


class RegistryReader:
    """Reads the registry on a thread of its own, since a file system may hang: the last answer stays."""

    def __init__(self, folders: Sequence[Path], *, only_own: bool) -> None:
        self._folders, self._only_own = folders, only_own
        self.latest: Registry | None = None

    def start(self) -> None:
        threading.Thread(target=self._read_on, name="registry", daemon=True).start()

    def _read_on(self) -> None:
        name_thread("registry")
        known = frozenset[str]()
        while True:
            self.latest = read_registry(self._folders, os.geteuid(), only_own=self._only_own)
            for problem in self.latest.problems:
                if problem not in known:
                    log.warning("%s", problem)
            known = frozenset(self.latest.problems)
            threading.Event().wait(READ_EACH_S)

    def runs(self) -> tuple[Run, ...]:
        return self.latest.runs if self.latest is not None else ()

    def targets(self, kind: str) -> list[JsonValue] | None:
        """The groups of one kind; None before the first answer."""
        if self.latest is None:
            return None
        return [to_json(group) for group in self.latest.groups if group.labels["job"] == KINDS[kind]]
