"""Is the work all there: workers, items or steps, output files and what is in them, the last checkpoint."""

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from exporter.clock import SystemClock
from exporter.derive.checkpoints import Checkpoint
from exporter.derive.work import ITEMS, Work
from exporter.manifest import Manifest, PathGroup, Verification
from exporter.readers.file_host import FileHost
from exporter.readers.formats.source import shown
from launcher.checksums import CHECKSUMS_FILE, read_checksums, write_checksums
from launcher.verify_files import CheckpointFacts, Flaw, LastCheckpoint, LogFacts, LogResults, OutputFacts, OutputFiles
from launcher.verify_looks import Answer, Make, OutOfTime, ProgressOf, look_at_all

CLOCK_SLACK_S = 60.0
"""How far the clock of a file server may be behind."""
NAMED = 5
"""Files and workers that a line names."""
NO_TIME = "there was no time to look at"

OUTPUT, CHECKPOINT, LOGS = "output", "checkpoint", "logs"


@dataclass(frozen=True)
class Check:
    """One question about the finished job; ``passed`` is None when there was nothing to ask about."""

    name: str
    passed: bool | None
    detail: str
    files: tuple[Flaw, ...] = ()
    """What is wrong with single files, of many some,"""
    files_total: int = 0
    """and how many there are."""

    def to_json(self) -> dict[str, Any]:
        """As an object; with ``files`` where single files are at fault."""
        body: dict[str, Any] = {"name": self.name, "passed": self.passed, "detail": self.detail}
        if self.files_total:
            body |= {"files": [flaw._asdict() for flaw in self.files], "files_total": self.files_total}
        return body


def verify(
    manifest: Manifest,
    *,
    work: Work,
    reasons: Sequence[str | None],
    since: float = 0.0,
    idle: Collection[int] = (),
    logs: Collection[Path] = (),
    out_of_time: OutOfTime = lambda: False,
    progress: ProgressOf | None = None,
    again: bool = False,
    host: FileHost | None = None,
) -> list[Check]:
    """Checks of a finished job that started at ``since``, its ``work`` as the logs say.

    ``reasons`` are those of its critical tasks, ``idle`` the ranks that had nothing to do, ``logs`` where benchmarks
    print their results. ``again`` compares checksums with those that were written at the end of the job.
    """
    files = verify_files(
        manifest,
        work=work,
        since=since,
        idle=idle,
        logs=logs,
        out_of_time=out_of_time,
        progress=progress,
        again=again,
        host=host,
    )
    return [_workers(reasons), *_work(manifest, work), *files]


def verify_files(
    manifest: Manifest,
    *,
    work: Work,
    since: float,
    idle: Collection[int] = (),
    logs: Collection[Path] = (),
    out_of_time: OutOfTime = lambda: False,
    progress: ProgressOf | None = None,
    again: bool = False,
    host: FileHost | None = None,
) -> list[Check]:
    """Those of the checks that look at files."""
    groups = {group.name: group for group in manifest.groups if group.pattern is not None}
    known = read_checksums(manifest.run_dir) if again else None
    summed = manifest.verify.checksums if not again else known is not None
    makes = _makes(manifest, groups, since - CLOCK_SLACK_S, logs, checksums=summed)
    own = FileHost(SystemClock()) if host is None else host
    try:
        answers = look_at_all(makes, own, out_of_time, progress)
    finally:
        if host is None:
            own.close()
    checks = []
    if OUTPUT in groups:
        checks += _outputs(manifest, groups[OUTPUT], answers[OUTPUT], work, idle)
    if CHECKPOINT in groups:
        checks.append(_checkpoint(manifest, groups[CHECKPOINT], answers[CHECKPOINT]))
    checks += _tokens(answers.get(OUTPUT, Answer()).facts, answers.get(LOGS, Answer()).facts)
    if OUTPUT in groups and again and (known is not None or manifest.verify.checksums):
        checks.append(_compared(answers[OUTPUT], known))
    elif OUTPUT in groups and manifest.verify.checksums:
        checks.append(_written(manifest.run_dir, answers[OUTPUT]))
    return checks


def _makes(
    manifest: Manifest, groups: Mapping[str, PathGroup], since: float, logs: Collection[Path], *, checksums: bool
) -> dict[str, Make]:
    """What looks at the files of each kind."""
    makes: dict[str, Make] = {}
    for name, group in groups.items():
        directory = os.path.abspath(manifest.directory(group))
        if name == OUTPUT:
            makes[name] = partial(
                OutputFiles,
                directory,
                group.pattern or "",
                since,
                manifest.ranks_of_roles(),
                resumes=manifest.resumes,
                counts=manifest.verify.records_per_item is not None,
                checksums=checksums,
            )
        elif name == CHECKPOINT:
            makes[name] = partial(LastCheckpoint, directory, group.pattern or "", since)
    if logs:
        makes[LOGS] = partial(LogResults, os.path.abspath(manifest.run_dir), tuple(map(str, logs)))
    return makes


# Workers and items


def _workers(reasons: Sequence[str | None]) -> Check:
    done = sum(reason == "completed" for reason in reasons)
    return Check("workers", done == len(reasons), f"{done} of {len(reasons)} workers completed")


def enough_of(wanted: Verification, total: int) -> int:
    """The least number of items, of so many, that counts as all."""
    return math.ceil(round(wanted.complete_share * total, 6))


def _work(manifest: Manifest, work: Work) -> list[Check]:
    total, done, told, wanted = manifest.total_items, work.done, work.expected, manifest.verify
    if work.counts_items and total is not None:
        if done is None:
            return [Check(ITEMS, False, f"no log said how many of {total} items were done")]
        return [_count(ITEMS, done, total, work.processed, wanted)]
    checks = []
    if work.in_step and done is not None and told:
        checks.append(_count(str(work.unit), done, told, work.processed, wanted))
    if total is None:
        if not checks:
            counted = "" if work.counts_items else f" {work.unit}"
            lacks = (done or 0) < enough_of(wanted, told or 0)
            short = f"; the logs say {done or 0} of {told}{counted}" if lacks else ""
            checks.append(Check(ITEMS, None, f"the job file gives no progress.total_items{short}"))
    else:
        checks.append(Check(ITEMS, None, _no_items(work)))
    return checks


def _no_items(work: Work) -> str:
    """Why items cannot be told from the logs."""
    if work.unit is not None:
        return f"the log counts {work.unit}, not items"
    return f"the logs count {' and '.join(work.units)}, which do not add up"


def _count(unit: str, done: int, total: int, processed: int | None, wanted: Verification) -> Check:
    again = f" ({processed} with those done again)" if processed is not None and processed > done else ""
    words = f"{done} of {total} {unit} done{again}"
    passed = done >= enough_of(wanted, total)
    if unit == ITEMS:
        enough = "" if done >= total else f"; {100 * wanted.complete_share:g}% are enough"
        return Check(unit, passed, words + enough)
    if passed:
        return Check(unit, True, words)
    # logs count from 0, skip lines, and training stops early: a program that ends well decides itself what is enough
    return Check(unit, None, f"{words}, as far as the logs say; the job file gives no total of them")


# Output files


def _place(manifest: Manifest, group: PathGroup) -> str:
    """The directory of a group, for people."""
    return "the run directory" if group.directory == "." else shown(str(manifest.directory(group)))


def _trouble(name: str, what: str, directory: Path, answer: Answer) -> Check | None:
    """The check of files that could not be looked at."""
    if answer.silent is not None:
        return Check(name, False, f"the {what} directory does not answer ({answer.silent})")
    if answer.error is not None:
        return Check(name, False, f"{shown(str(directory))} cannot be read: {answer.error}")
    if answer.unable is not None:
        return Check(name, None, f"the {what} files could not be looked at: {answer.unable}")
    return None


def _outputs(manifest: Manifest, group: PathGroup, answer: Answer, work: Work, idle: Collection[int]) -> list[Check]:
    directory, wanted = manifest.directory(group), manifest.verify.outputs
    trouble = _trouble("outputs", "output", directory, answer)
    if trouble is not None:
        return [trouble]
    facts: OutputFacts | None = answer.facts
    if facts is None or not facts.listed:
        return [Check("outputs", None, f"{NO_TIME} them")]
    place = _place(manifest, group)
    least = f"; at least {wanted} are expected (verify.outputs)" if wanted is not None else ""
    missing = None if wanted is None else False
    if not facts.files and not facts.older:
        return [Check("outputs", missing, f"no file matches {group.pattern} in {place}{least}")]
    if not facts.written:
        # some may be: a job that goes on where an earlier one has ended need not write to all of them
        count = max(facts.files, facts.older)
        return [Check("outputs", missing, f"{count} files in {place}, none written since the job started{least}")]
    return [
        _complete(manifest, facts, work, idle, wanted),
        _valid(facts),
        *_records(manifest, facts, work),
    ]


def _complete(manifest: Manifest, facts: OutputFacts, work: Work, idle: Collection[int], wanted: int | None) -> Check:
    """Whether all files are there, and something in each."""
    problems = []
    if facts.empty:
        problems.append(f"empty: {_named(facts.empties, facts.empty)}")
    if wanted is not None:
        if facts.files < wanted:
            problems.append(f"at least {wanted} are expected (verify.outputs)")
    elif lacking := _workers_without(manifest, facts.owners, work, idle):
        more = f" and {len(lacking) - NAMED} more" if len(lacking) > NAMED else ""
        problems.append(f"none of {', '.join(lacking[:NAMED])}{more}; verify.outputs tells how many are enough")
    if problems and facts.older and not manifest.resumes:
        problems.append(f"{facts.older} older ones count with `resume: true`")
    words = f"{facts.files} files, {facts.bytes} bytes"
    return Check("outputs", not problems, "; ".join((words, *problems)), facts.empties, facts.empty)


def _workers_without(manifest: Manifest, owners: Collection[int], work: Work, idle: Collection[int]) -> list[str]:
    """Workers without a file while others of their role have some; none where names do not tell the worker."""
    firsts = set(manifest.ranks_of_roles().values())
    lacking = []
    for role in dict.fromkeys(task.role for task in manifest.tasks):
        tasks = [task for task in manifest.tasks if task.role == role and task.critical]
        there = {task.rank for task in tasks} & set(owners)
        if not there:
            continue
        expected = [task for task in tasks if task.rank in firsts or not there <= firsts]
        if work.in_step and there == {min(task.rank for task in expected)}:
            continue  # of workers that do the same work the first one often writes for all
        lacking += [task.worker for task in expected if task.rank not in there and task.rank not in idle]
    return lacking


def _named(flaws: Sequence[Flaw], total: int) -> str:
    """Some names, and how many more there are."""
    more = f" and {total - NAMED} more" if total > NAMED else ""
    return ", ".join(flaw.file for flaw in flaws[:NAMED]) + more


def _files(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"


def _valid(facts: OutputFacts) -> Check:
    others = []
    if facts.unknown:
        others.append(f"{_files(facts.unknown)} of no known format")
    if facts.undecided:
        others.append(f"{_files(facts.undecided)} of which it cannot be told")
    if facts.looked < facts.files:
        others.append(f"{NO_TIME} {facts.files - facts.looked} of {facts.files}")
    if facts.flawed:
        words = f"{facts.flawed} of {_files(facts.files)} damaged: {_named(facts.flaws, facts.flawed)}"
        return Check("valid", False, "; ".join((words, *others)), facts.flaws, facts.flawed)
    passed = True if facts.valid and facts.looked == facts.files else None
    words = f"{_files(facts.valid)} whole ({', '.join(facts.formats)})" if facts.valid else ""
    return Check("valid", passed, "; ".join(filter(None, (words, *others))) or "no file that is not empty")


def _records(manifest: Manifest, facts: OutputFacts, work: Work) -> list[Check]:
    """Records against the items done, or against those of the job file where the logs do not tell."""
    wanted, total = manifest.verify, manifest.total_items
    times = wanted.records_per_item
    if times is None or not facts.counted:
        return []
    if work.counts_items and work.done is not None and work.whole:
        items, least = work.done, work.done
    elif total is not None:
        items, least = total, enough_of(wanted, total)
    elif facts.records:
        why = "not all workers have told their items" if work.counts_items else _no_items(work)
        return [Check("records", None, why)]
    else:
        items = least = 0
    words = f"{facts.records} records for {items} items" if items else f"0 records in {_files(facts.files)}"
    all_counted = facts.looked == facts.files and not facts.uncounted
    if facts.records >= math.ceil(round(least * times, 6)) and facts.records:
        return [Check("records", True, words)]
    if facts.looked < facts.files or not facts.done:
        return [Check("records", None, f"{words}; there was no time to count them all")]
    if not all_counted:
        return [Check("records", None, f"{words}; {_files(facts.uncounted)} without any that can be counted")]
    asked = f" (verify.records_per_item: {times:g})" if items else ""
    return [Check("records", False, f"{words}{asked}")]


# Checkpoints


def _checkpoint(manifest: Manifest, group: PathGroup, answer: Answer) -> Check:
    directory = manifest.directory(group)
    trouble = _trouble("checkpoint", "checkpoint", directory, answer)
    if trouble is not None:
        return trouble
    facts: CheckpointFacts | None = answer.facts
    if facts is None or (facts.last is None and not facts.done):
        return Check("checkpoint", None, f"{NO_TIME} them")
    last = facts.last
    if last is None:
        return Check("checkpoint", None, f"no checkpoint like {group.pattern} in {_place(manifest, group)}")
    name = shown(last.name)
    if facts.flawed:
        if last.state == "incomplete":
            problem = f"{name} is incomplete: {shown(last.reason or '')}"
        else:
            problem = f"{name} is damaged: {_reason(last, facts.flaws[0])}"
        return Check("checkpoint", False, f"{problem}; {_last_good(facts)}", facts.flaws, facts.flawed)
    size = f"{_files(last.files)}, {last.bytes} bytes"
    if not facts.valid:
        return Check("checkpoint", None, f"{name}: {size}, of no format that tells whether they are whole")
    return Check("checkpoint", True, f"{name} is whole: {size}")


def _reason(last: Checkpoint, flaw: Flaw) -> str:
    return flaw.reason if flaw.file == shown(last.name) else f"{flaw.file}: {flaw.reason}"


def _last_good(facts: CheckpointFacts) -> str:
    if facts.good is not None:
        return f"the last good one is {shown(facts.good.name)}"
    return "there is no good one" if facts.done else f"{NO_TIME} the ones before"


# Results of benchmarks


def _tokens(outputs: OutputFacts | None, logs: LogFacts | None) -> list[Check]:
    """Whether benchmarks have produced something; nothing where no result is found."""
    flaws = (*(outputs.without_tokens if outputs else ()), *(logs.without_tokens if logs else ()))
    if flaws:
        words = "; ".join(f"{flaw.file}: {flaw.reason}" for flaw in flaws[:NAMED])
        return [Check("tokens", False, f"the benchmark produced no tokens: {words}", flaws, len(flaws))]
    results = (outputs.results if outputs else 0) + (logs.results if logs else 0)
    requests = outputs.requests if outputs else 0
    if outputs is not None and requests and not outputs.requests_with_tokens:
        return [Check("tokens", False, f"the benchmark produced no tokens: 0 in each of {requests} requests")]
    told = [f"{count} {what}" for count, what in ((results, "results"), (requests, "requests")) if count]
    return [Check("tokens", True, f"{' and '.join(told)} with tokens")] if told else []


# Checksums


def _written(run_dir: Path, answer: Answer) -> Check:
    """Write the checksums, as many as there are."""
    facts: OutputFacts | None = answer.facts
    if not answer.sums or facts is None:
        return Check("checksums", None, "none of the files has been read")
    try:
        write_checksums(run_dir, answer.sums)
    except OSError as error:
        return Check("checksums", None, f"{CHECKSUMS_FILE} cannot be written: {error.strerror}")
    words = f"SHA-256 of {len(answer.sums)} of {_files(facts.files)} in {CHECKSUMS_FILE}"
    return Check("checksums", True if facts.done and len(answer.sums) == facts.files else None, words)


def _compared(answer: Answer, known: Mapping[str, str] | None) -> Check:
    """Whether the files are as they were at the end of the job."""
    if known is None:
        return Check("checksums", None, f"there is no {CHECKSUMS_FILE} in the run directory")
    now = dict(answer.sums)
    flaws = [
        Flaw(shown(name), None, "has changed") for name, digest in known.items() if now.get(name, digest) != digest
    ]
    done = answer.facts is not None and answer.facts.done
    if done:
        flaws += [Flaw(shown(name), None, "is gone or cannot be read") for name in known if name not in now]
    if flaws:
        words = f"{len(flaws)} of {_files(len(known))} not as in {CHECKSUMS_FILE}: {_named(flaws, len(flaws))}"
        return Check("checksums", False, words, tuple(flaws), len(flaws))
    same = sum(name in now for name in known)
    return Check("checksums", True if done else None, f"{same} of {_files(len(known))} as in {CHECKSUMS_FILE}")


__all__ = ["Check", "enough_of", "verify", "verify_files"]
