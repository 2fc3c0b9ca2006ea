"""The verdict on any file, checkpoint or folder, whoever wrote it."""

import contextlib
import glob
import gzip
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import IO

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.records import JsonObject
from exporter.contract.run_files import MANIFEST_FILE
from exporter.contract.status import DamagedFile
from exporter.files.checkpoints.layouts_reader import CORE, index_paths
from exporter.files.checkpoints.names import is_checkpoint, is_part, is_sharded, is_weights, open_ranks, parse_name
from exporter.files.formats import check_file, json_lines, json_text
from exporter.files.formats.record_count import UTF_16, record_kind
from exporter.files.formats.source import CheckUndecided, FileDamaged, NotRegularFile, open_source, printable
from exporter.machine.folders import file_names
from launcher.errors import LauncherError
from launcher.rundir.rundir import PIPELINE_FILE, SWEEP_FILE
from launcher.verify.files import CheckedCheckpoint, Facts, LastCheckpoint, OutputFiles, SlicedWork, VerifiedOutput

WHOLE, DAMAGED, UNDECIDED = "whole", "damaged", "cannot tell"
RECORDS = (MANIFEST_FILE, SWEEP_FILE, PIPELINE_FILE)  # of a job, whose name may end in a number like a checkpoint's
MARKS = (".zgroup", "_CHECKPOINT_METADATA", "manifest.ocdbt")  # names by which a directory is a checkpoint
MOST_TRACKER_BYTES = 4096  # of a file that names the newest checkpoint
_STEP = re.compile(r"(?<![a-z])(?:checkpoint|ckpt|global_?step|step|epoch|iter(?:ation)?)[-_=]?\d", re.IGNORECASE)
_JOB_ID = re.compile(r"\d+_")  # begins the name of a run directory, as in `4460_step2_train`
_TRACKERS = (
    ("latest", r"([\w.=+-]{1,255})$", ("{}",)),  # of DeepSpeed; many programs link it
    ("latest_checkpointed_iteration.txt", r"(\d{1,18})$", ("iter_{:0>7}", "global_step_{}")),  # of Megatron, of verl
    ("checkpoint", r'model_checkpoint_path: "([^"/]{1,250})"', ("{}.index",)),  # of TensorFlow
)
PIECE_BYTES = 4 << 20  # read between two reports of progress
MOST_TEXT_BYTES = 256 << 20  # longest JSON text that is parsed: it takes some times its length of memory

Progress = Callable[[int], None]  # called with the bytes read since the previous call


@dataclass
class PathVerdict:
    """Whether one path is whole."""

    path: str
    kind: str  # file, checkpoint, or folder of files
    verdict: str = WHOLE
    reason: str | None = None  # why it is not whole, or why nobody can tell
    name: str | None = None  # of the checkpoint
    step: int | None = None
    files: int = 0
    bytes: int = 0
    records: int | None = None
    parts: list[str] = field(default_factory=list)  # its files, relative to ``folder``
    flaws: list[DamagedFile] = field(default_factory=list)  # damaged, missing and doubtful parts
    folder: str = ""
    resume: str | None = None  # newest whole checkpoint of the folder, otherwise the newest that is not damaged
    resume_is_whole: bool = False
    deep: bool = False  # whether everything in it was read

    def to_json(self) -> JsonObject:
        """Return it for ``--json``."""
        texts = {key: printable(value) for key, value in vars(self).items() if isinstance(value, str)}
        lists = {"parts": list(map(printable, self.parts)), "flaws": [flaw._asdict() for flaw in self.flaws]}
        return {**vars(self), **texts, **lists}


def verify_path(path: str | os.PathLike[str], *, deep: bool = False, progress: Progress | None = None) -> PathVerdict:
    """Judge a file, a checkpoint, or a folder of checkpoints or output files. Raises LauncherError if there is none.

    The newest checkpoint of a folder of checkpoints counts. With ``deep`` everything is read, not only 1 MiB of each
    file. Nothing is loaded or unpickled.
    """
    place = Path(os.path.realpath(path))
    if not (place.is_file() or place.is_dir()):
        absent = "does not exist; check the name (`gpujob report --verify` checks a job by its id or name)"
        what = "is neither a file nor a folder" if place.exists() else absent
        raise LauncherError(f"{printable(os.fspath(path))}: {what}")
    if os.path.isfile(place / MANIFEST_FILE):
        command = f"`gpujob report --verify {printable(os.fspath(path))}`"
        raise LauncherError(
            f"{printable(os.fspath(path))} is the run directory of a job; check its files with {command}"
        )
    try:
        names = os.listdir(place) if place.is_dir() else []
    except OSError as error:
        return PathVerdict(os.fspath(path), "folder of files", UNDECIDED, f"cannot be read: {error.strerror}")

    def read(found: PathVerdict) -> PathVerdict:
        found.path = os.fspath(path)
        if deep and found.verdict != DAMAGED:
            _read_all(found, progress)
        return found

    runs = [
        name
        for name in names
        if (_JOB_ID.match(name) or not _STEP.search(name))
        and any(os.path.isfile(place / name / record) for record in RECORDS)
    ]
    inner = [name for name in names if name not in runs and is_checkpoint(name, (place / name).is_dir())]
    if runs and not inner and all((place / name).is_dir() for name in names):
        raise LauncherError(
            f"{printable(os.fspath(path))} has the run directories of jobs; check the files of one with "
            f"`gpujob report --verify {printable(os.path.join(path, runs[0]))}`"
        )
    if _is_of_checkpoint(names, inner) or (
        is_checkpoint(place.name, place.is_dir()) and not _is_folder(place, names, inner)
    ):
        found = _verify_checkpoint(place.parent, place.name, read)
    elif inner:
        found = _verify_checkpoint(place, None, read, ignored=runs)
    else:
        found = read(_verify_files(place, _name_of_format(place, path)))
    if found.kind == "checkpoint" and place.is_dir() and found.verdict == WHOLE and (flaw := _lost_target(place)):
        found.verdict, found.reason = UNDECIDED, f"{flaw.file}: {flaw.reason}"
        found.flaws.append(flaw)
    return found


def _is_of_checkpoint(names: list[str], inner: list[str]) -> bool:
    """Whether the directory with these names is a checkpoint, whatever its own name.

    ``inner`` are the names of checkpoints among them.
    """
    # results have a `metadata.json` too, and one file of each rank
    is_marked = any(name in MARKS for name in names) or any(index_paths(f"x/{name}" for name in names if name != CORE))
    shards = (
        name
        for name in names
        if is_weights(name) and is_sharded(name) and open_ranks((name,)) is None and not record_kind(name)
    )
    return is_marked or (not inner and any(shards))


def _is_folder(place: Path, names: list[str], inner: list[str]) -> bool:
    """Whether a directory such as ``run_3`` holds checkpoints or output files, rather than being checkpoint 3."""
    if _STEP.search(place.name) or not names:
        return False
    if any(_STEP.search(name) for name in inner):
        return True
    return all(record_kind(name) and (place / name).is_file() for name in names)


def _verify_checkpoint(
    folder: Path, name: str | None, read: Callable[[PathVerdict], PathVerdict], *, ignored: Collection[str] = ()
) -> PathVerdict:
    """Judge a checkpoint, or the newest of the folder, and find the one to resume from.

    If ``read`` finds it damaged, it reads the one to resume from too, until one is not.
    """
    is_alone = name is not None and not is_checkpoint(name, (folder / name).is_dir())
    pattern = glob.escape(name) if name is not None and is_alone else "*"
    checkpoints = partial(LastCheckpoint, str(folder), pattern, 0.0, ignored=ignored)
    facts = _finished(checkpoints(name=name))
    if facts.last is None:
        return read(PathVerdict("", "checkpoint", UNDECIDED, "has no file of a checkpoint"))
    found = read(_checkpoint_verdict(folder, facts.last))
    damaged = {entry.name for entry in facts.last.entries} if found.verdict == DAMAGED else set[str]()

    def search() -> CheckedCheckpoint | None:
        alone = name if is_alone else None
        return _finished(checkpoints(name=alone, wants_whole=True, without=damaged)).resume

    resume = search() or (None if damaged else facts.last)
    while damaged and resume is not None and read(_checkpoint_verdict(folder, resume)).verdict == DAMAGED:
        damaged.update(entry.name for entry in resume.entries)
        resume = search()
    if is_alone:
        found.name = name
    if resume is not None:
        found.resume = str(folder / (name if name is not None and is_alone else resume.checkpoint.name))
        found.resume_is_whole = resume.checkpoint.valid is True
    return found


def _checkpoint_verdict(folder: Path, found: CheckedCheckpoint) -> PathVerdict:
    last, entries = found.checkpoint, found.entries
    return PathVerdict(
        path="",
        kind="checkpoint",
        verdict=DAMAGED if found.is_damaged else WHOLE if last.valid else UNDECIDED,
        reason=None if last.reason is None else printable(last.reason),
        name=last.name,
        step=last.step,
        files=last.files,
        bytes=last.bytes,
        parts=[file.path for entry in entries for file in entry.files],
        flaws=[] if last.valid else [*found.flaws, *(flaw for entry in entries for flaw in entry.unproven)],
        folder=str(folder),
    )


def _lost_target(folder: Path) -> DamagedFile | None:
    """The file or link in a folder of checkpoints that says which one is the newest, if that one is not there."""
    for name, form, targets in _TRACKERS:
        with contextlib.suppress(OSError):  # cannot be read, or names what no file can be called
            if reason := _tracker_flaw(folder / name, form, targets):
                return DamagedFile(name, None, reason)
    return None


def _tracker_flaw(tracker: Path, form: str, targets: tuple[str, ...]) -> str | None:
    if tracker.is_symlink():
        return None if tracker.exists() else f"leads to {printable(os.readlink(tracker))}, which is not there"
    if not tracker.is_file() or tracker.stat().st_size > MOST_TRACKER_BYTES:
        return None
    text = tracker.read_text("utf-8", "replace").strip()
    if not text:
        return "is empty"
    named = [target.format(found[1]) for target in targets] if (found := re.match(form, text)) else []
    if not named or any((tracker.parent / target).exists() for target in named):
        return None
    wanted = parse_name(named[0])
    if wanted is None or not wanted.versioned:
        return None  # any word
    # `500` may stand for `step_500`, and `model_500` for `model_500.pt`
    there = filter(None, map(parse_name, os.listdir(tracker.parent)))
    is_there = any((found.step, found.epoch) == (wanted.step, wanted.epoch) for found in there)
    return None if is_there else f"names {printable(named[0])}, which is not there"


def _name_of_format(place: Path, path: str | os.PathLike[str]) -> str:
    """The name that says which format a file has: that of a link to it, if its own has no extension.

    Caches of data, as of DVC and the Hugging Face hub, name a file by its checksum.
    """
    return place.name if place.suffix else Path(path).name


def _verify_files(place: Path, called: str) -> PathVerdict:
    folder, pattern = (place, "*") if place.is_dir() else (place.parent, glob.escape(place.name))
    found = _finished(OutputFiles(str(folder), pattern, 0.0, {}, called=None if place.is_dir() else called))
    verdict = PathVerdict("", "folder" if place.is_dir() else "file", files=found.files, bytes=found.bytes)
    verdict.folder, verdict.parts = str(folder), sorted(file_names(folder, pattern))
    verdict.flaws = [*found.flaws, *found.empty_files]
    verdict.records = found.records if found.counted and not found.uncounted else None
    verdict.verdict, verdict.reason = _verdict_on_files(found, verdict.flaws)
    if verdict.verdict == UNDECIDED and verdict.kind == "file" and not found.unreadable:
        with contextlib.suppress(NotRegularFile), open_source(place.parent, place.name) as source:
            source.name = called
            verdict.reason = check_file(source).reason or verdict.reason
    return verdict


def _finished(work: SlicedWork[Facts]) -> Facts:
    while not (facts := work.poll(0.0)).done:
        pass
    return facts


def _verdict_on_files(found: VerifiedOutput, flaws: list[DamagedFile]) -> tuple[str, str | None]:
    if flaws:
        first = flaws[0]
        return DAMAGED, first.reason if found.files == 1 else f"{first.file}: {first.reason}"
    if found.unreadable:
        return UNDECIDED, found.unreadable_reason
    if undecided := found.unknown + found.undecided:
        return UNDECIDED, f"{undecided} of {found.files} files in a form that is not checked, or not within 1 MiB"
    return (WHOLE, None) if found.valid else (UNDECIDED, "has no output file")


# Everything


def _read_all(found: PathVerdict, progress: Progress | None) -> None:
    """Read every byte, with the checksums of archives, each record of JSON Lines, and JSON texts."""
    found.deep = True
    for part in found.parts:
        is_beside = "/" in part and not is_part(part)
        place = Path(found.folder, part)
        called = _name_of_format(place, found.path) if found.kind == "file" else place.name
        try:
            for count in _deep_pieces(place, called, is_beside=is_beside):
                if progress is not None:
                    progress(count)
        except OSError as error:
            reason, is_damaged = error.strerror or str(error), True
        except (FileDamaged, zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
            reason, is_damaged = str(error) or type(error).__name__, True
        except CheckUndecided as error:
            reason, is_damaged = str(error), False
        else:
            continue
        reason = printable(reason)
        found.flaws.append(DamagedFile(printable(part), None, reason))
        if is_damaged or found.verdict == WHOLE:
            found.verdict = DAMAGED if is_damaged else UNDECIDED
            found.reason = reason if found.files == 1 else f"{printable(part)}: {reason}"
        if is_damaged:
            return


def _deep_pieces(path: Path, called: str, *, is_beside: bool) -> Iterator[int]:
    """Yield the bytes read of a file. Raises an error of its library if a checksum or a record is wrong.

    Raises CheckUndecided, after reading the rest, if a part cannot be read by Python.
    """
    try:
        with open_source(path.parent, path.name) as source:
            source.name = called
            check = check_file(source)
            is_utf_16 = source.head(2) in UTF_16
    except NotRegularFile:
        return
    if is_beside:
        yield from _pieces(path, None)
    elif check.format == json_lines.NAME and not is_utf_16:
        yield from _json_lines(path)
    elif check.format == json_text.NAME and path.stat().st_size <= MOST_TEXT_BYTES:
        yield len(text := path.read_bytes())
        json_text.parse_json(json_text.decode(text))
    elif zipfile.is_zipfile(path):
        yield from _zip_members(path)
    else:
        yield from _pieces(path, check.format)


def _json_lines(path: Path) -> Iterator[int]:
    doubt = None
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                json_text.parse_json(line.decode("utf-8", "surrogatepass")) if line.strip() else None
            except (FileDamaged, UnicodeDecodeError) as error:
                raise FileDamaged(f"line {number} is not JSON") from error
            except CheckUndecided as error:
                doubt = CheckUndecided(f"line {number} {error}")
            yield len(line)
    if doubt is not None:
        raise doubt


def _zip_members(path: Path) -> Iterator[int]:
    doubt = None
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if any(member.file_size for member in members) and not any(member.CRC for member in members):
            yield from _pieces(path, None)
            raise CheckUndecided("has no checksums")  # torch.serialization.set_crc32_options(False)
        for member in members:
            try:
                with archive.open(member) as content:
                    while content.read(PIECE_BYTES):
                        pass
            except RuntimeError as error:  # encrypted, or packed by a method that Python does not have
                what = "is encrypted" if member.flag_bits & 1 else f"cannot be unpacked: {error}"
                doubt = CheckUndecided(f"its member {member.filename[:80]!r} {what}")
            yield member.compress_size
    if doubt is not None:
        raise doubt


def _pieces(path: Path, file_format: str | None) -> Iterator[int]:
    with path.open("rb") as raw:
        unpacked: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=raw) if file_format == "gzip" else raw
        before = 0
        while unpacked.read(PIECE_BYTES):
            yield raw.tell() - before
            before = raw.tell()
