"""Whether the work is complete: workers, progress, output files, records, and the last checkpoint."""

import functools
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from pathlib import Path

from exporter.contract.clock import SystemClock
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import Manifest, PathGroup, Verification
from exporter.contract.report import CheckResult, FileCoverage
from exporter.contract.status import DamagedFile, NodeStatus, TaskPosition
from exporter.contract.worker_names import rank_in_file_name
from exporter.files.checkpoints.sets import Checkpoint
from exporter.files.formats.source import printable
from exporter.machine.file_host import FileWatchHost
from exporter.machine.mounts import is_node_local, mount_of
from exporter.progress.work import ITEMS, JobWork
from launcher.verify.checksums import CHECKSUMS_FILE, read_checksums, write_checksums
from launcher.verify.files import (
    LastCheckpoint,
    LogResults,
    OutputFiles,
    VerifiedCheckpoint,
    VerifiedFiles,
    VerifiedLogs,
    VerifiedOutput,
)
from launcher.verify.timed_reads import FileWorkResult, OutOfTime, ReportProgress, WatchFactory, run_file_work
from launcher.verify.tokens import NO_TOKENS, add_token_counts, token_check_text
from launcher.words import count_text, names_text

CLOCK_SLACK_S = 60.0  # tolerated clock lag of a file server
_MAY_BE_EMPTY = re.compile(r"err|warn|fail|skip|reject|invalid|log", re.IGNORECASE)  # names of what is best empty
MOST_UNLOGGED_SHARE = 0.05  # of the work, after the last position in a log: at most each 20th step is logged
MOST_NAMED = 5  # files and workers named in one line
NO_TIME = "there was no time to check"
TIME_LIMIT, UNREADABLE, OTHER_NODES = "time limit of verification", "others unreadable", "others on other nodes"

OUTPUT, CHECKPOINT, LOGS = "output", "checkpoint", "logs"
# Default patterns, copied: importing the schema of the job file takes too long.
DEFAULT_PATTERNS = {OUTPUT: "output_worker_*.json*", CHECKPOINT: "checkpoint_*"}


@dataclass(frozen=True)
class VerificationCheck:
    """One check of the finished job; ``passed`` is None if undecided, or without anything to check."""

    name: str
    passed: bool | None
    detail: str
    files: tuple[DamagedFile, ...] = ()  # damaged files, at most `MOST_FLAWS`
    files_total: int = 0  # their number
    is_inapplicable: bool = False  # whether the job file asks for no such thing, and none exists
    coverage: FileCoverage | None = None  # of output files

    def result(self) -> CheckResult:
        """The check as it stands in the report."""
        files = tuple(DamagedFile(*flaw) for flaw in self.files)
        return CheckResult(
            name=self.name,
            passed=self.passed,
            detail=self.detail,
            files=files,
            files_total=self.files_total,
            coverage=self.coverage,
        )


@dataclass(frozen=True)
class FinishedJob:
    """What is known about a job before its files are read."""

    manifest: Manifest
    work: JobWork
    exit_reasons: Sequence[str | None] | None  # of the critical tasks; None checks only the files
    work_source: str = "the logs"  # where the work is reported
    since: float = 0.0  # when it started
    idle_ranks: Collection[int] = ()  # ranks without work
    busy_ranks: Collection[int] = ()  # ranks with work
    done_by_rank: Mapping[int, float] = field(default_factory=dict)  # what each rank has done of ``work``
    logs: Collection[Path] = ()  # logs with printed benchmark results
    statuses: Mapping[str, NodeStatus] = field(default_factory=dict)  # last statuses of the sidecars, by node
    is_repeated: bool = False  # whether to compare the files with the checksums from the end of the job
    files_before: int = 0  # number of output files at the end of the job, if repeated
    incomplete: str | None = None  # why `work_source` may lack some of the work
    short: Sequence[TaskPosition] = ()  # workers that completed short of the total of their own log
    has_own_totals: bool = False  # whether the logs state the total of the whole work
    warning: str | None = None  # signal before the time limit after which workers ended, and may have saved


def verify_results(
    job: FinishedJob,
    *,
    out_of_time: OutOfTime = lambda: False,
    progress: ReportProgress | None = None,
    host: FileWatchHost | None = None,
) -> list[VerificationCheck]:
    """Check the results of a job."""
    manifest = job.manifest
    groups = {group.name: group for group in manifest.groups if group.pattern is not None}
    known = read_checksums(manifest.run_dir) if job.is_repeated else None
    summed = known is not None if job.is_repeated else manifest.verify.checksums
    makes = _watch_factories(job, groups, checksums=summed)
    own = FileWatchHost(SystemClock()) if host is None else host
    try:
        answers = run_file_work(makes, own, out_of_time, progress)
        shared = mount_of(os.path.abspath(manifest.run_dir), own.mounts.current())
    finally:
        if host is None:
            own.close()
    checks: list[VerificationCheck] = []
    doubt = job.incomplete
    if OUTPUT in groups:
        apart = is_node_local(answers[OUTPUT].mount, shared)
        # on one machine that simulates several nodes, all files are visible
        nodes = _sum_node_outputs(manifest, job.statuses) if manifest.nodes > 1 and apart else None
        checks += _output_checks(job, groups[OUTPUT], answers[OUTPUT], nodes, is_elsewhere=apart)
        doubt = doubt or (_unlogged_items_reason(job, answers[OUTPUT].facts) if nodes is None else None)
    if CHECKPOINT in groups:
        checks.append(_checkpoint_check(manifest, groups[CHECKPOINT], answers[CHECKPOINT]))
    checks += _token_checks([answer.facts for answer in answers.values()])
    if OUTPUT in groups and job.is_repeated and (known is not None or manifest.verify.checksums):
        checks.append(_changed_files_check(answers[OUTPUT], known))
    elif OUTPUT in groups and manifest.verify.checksums:
        checks.append(_saved_checksums_check(manifest.run_dir, answers[OUTPUT]))
    if job.exit_reasons is None:
        return checks
    some = any(not task.critical for task in manifest.tasks)
    work = [_undecided(check, doubt) if doubt else check for check in _work_checks(job)]
    warning = None if any(check.passed for check in work) else job.warning
    return [_workers_check(job.exit_reasons, warning=warning, has_others=some), *work, *checks]


def _watch_factories(job: FinishedJob, groups: Mapping[str, PathGroup], *, checksums: bool) -> dict[str, WatchFactory]:
    manifest, makes = job.manifest, dict[str, WatchFactory]()
    for name, group in groups.items():
        directory = os.path.abspath(manifest.directory(group))
        if name == OUTPUT:
            makes[name] = partial(
                OutputFiles,
                directory,
                group.pattern or "",
                job.since - CLOCK_SLACK_S,
                manifest.ranks_of_roles(),
                resumes=manifest.resumes,
                counts_records=manifest.verify.records_per_item is not None,
                checksums=checksums,
                has_gpu_metrics=manifest.gpu_metrics,
                suspected={
                    flaw.file
                    for status in job.statuses.values()
                    for entry in status.outputs
                    if entry.group == OUTPUT
                    for flaw in entry.invalid
                },
            )
        elif name == CHECKPOINT:
            # the exact start: a checkpoint from just before it is an earlier job's; a slow clock can only hide ours
            makes[name] = partial(LastCheckpoint, directory, group.pattern or "", job.since)
    if job.logs:
        makes[LOGS] = partial(LogResults, os.path.abspath(manifest.run_dir), tuple(map(str, job.logs)))
    return makes


# Workers and items


def _workers_check(exit_reasons: Sequence[str | None], *, warning: str | None, has_others: bool) -> VerificationCheck:
    """Whether all critical workers completed; ``has_others`` means that there are others.

    After the ``warning``, a signal before the time limit, those that ended with 0 may have saved their state.
    """
    done = sum(reason == "completed" for reason in exit_reasons)
    text = f"{done} of {len(exit_reasons)} {'critical ' if has_others else ''}workers completed"
    if warning is not None and done == len(exit_reasons):
        why = (
            f"after {warning} before the time limit they may have saved and ended; nothing shows that all work is done"
        )
        return VerificationCheck("workers", None, f"{text}; {why}")
    return VerificationCheck("workers", done == len(exit_reasons), text)


def required_count(share: float, total: float) -> int:
    """Number of items of ``total`` that counts as all."""
    return math.ceil(round(share * total, 6))


def _work_checks(job: FinishedJob) -> list[VerificationCheck]:
    manifest, work = job.manifest, job.work
    total, done, expected, wanted = manifest.total_items, work.done, work.expected, manifest.verify
    is_total_counted = total is not None and work.counts_total_items(total)
    if job.warning is not None and not is_total_counted and _is_work_left(work, wanted):
        return [VerificationCheck(str(work.unit), False, f"{done} of {expected} {work.unit} done")]
    if is_total_counted and total is not None:
        if done is None:
            # others started an attached job: which of its logs are read was guessed
            passed = None if manifest.attached else False
            return [VerificationCheck(ITEMS, passed, f"no log shows how many of {total} items were done")]
        return [_count_check(ITEMS, done, total, work.processed, wanted)]
    checks = []
    if work.is_in_step and done is not None and expected:
        given = manifest.total_epochs is not None or manifest.total_steps is not None
        checks.append(_count_check(str(work.unit), done, expected, work.processed, wanted, is_total_given=given))
    if total is None:
        if job.short:
            checks.append(_short_check(job.short))
        elif job.has_own_totals and (done or 0) >= required_count(wanted.complete_share, expected or 0):
            check = _count_check(ITEMS, done or 0, expected or 0, work.processed, wanted)
            checks.append(replace(check, detail=f"{check.detail}, by the totals in {job.work_source}"))
        elif not checks:
            counted = "" if work.counts_items else f" {work.unit}"
            option = "--total-items" if manifest.attached else "--total, or progress.total_items in the job file"
            lacking = f"no total is given ({option})"
            is_short = (done or 0) < required_count(wanted.complete_share, expected or 0)
            short = f"; {job.work_source} show {done or 0} of {expected}{counted}" if is_short else ""
            checks.append(VerificationCheck(ITEMS, None, f"{lacking}{short}", is_inapplicable=True))
    else:
        checks.append(VerificationCheck(ITEMS, None, _unknown_items_reason(work, total)))
    return checks


def _is_work_left(work: JobWork, wanted: Verification) -> bool:
    """Whether the logs leave no doubt that a program that was warned of the time limit had work left.

    A program that completed may count from 0, and may not have logged its last position.
    """
    if work.unit is None or work.done is None or not work.expected:
        return False
    return work.done + 1 < (1 - MOST_UNLOGGED_SHARE) * wanted.complete_share * work.expected


def _short_check(short: Sequence[TaskPosition]) -> VerificationCheck:
    """The check of a job with workers that completed short of the totals of their logs."""
    names = names_text(
        [f"{each.worker} {each.items} of {each.items_expected}" for each in short], MOST_NAMED, len(short)
    )
    text = f"completed short of the total in its log: {names}; verify.complete_share says how much is enough"
    return VerificationCheck(ITEMS, False, text)


def _undecided(check: VerificationCheck, why: str) -> VerificationCheck:
    """The check of a source that may lack some of the work: what it lacks proves nothing."""
    return replace(check, passed=None, detail=f"{check.detail}; {why}") if check.passed is False else check


def _unlogged_items_reason(job: FinishedJob, facts: VerifiedFiles | None) -> str | None:
    """Why the logs may lack items, as those of a program that logs every 100th one; None if they show what was done.

    The output files then have a record for each item, and no more: one item may have several records.
    """
    wanted, total = job.manifest.verify, job.manifest.total_items
    times = wanted.records_per_item
    if total is None or times is None or job.short or not isinstance(facts, VerifiedOutput):
        return None
    is_whole = facts.done and facts.checked == facts.files and not (facts.damaged or facts.unreadable)
    least = _required_records(required_count(wanted.complete_share, total), times)
    if not is_whole or not least <= facts.records <= _required_records(total, times):
        return None
    return f"the output files have {facts.records} records, so the logs may not show all items"


def _required_records(items: float, times: float) -> int:
    """Number of records for ``items``, with ``times`` records for each."""
    return math.ceil(round(items * times, 6))


def _unknown_items_reason(work: JobWork, total: int | None) -> str:
    """Why the number of items is unknown."""
    if work.has_only_bars and work.counts_items:
        return f"the progress bars count {work.done or 0} of {work.expected} iterations, not the {total} items"
    if work.unit is not None:
        return f"{work.unit} are counted, not items"
    return f"{' and '.join(work.units)} are counted, which have no common total"


def _count_check(
    unit: str, done: float, total: float, processed: float | None, wanted: Verification, *, is_total_given: bool = False
) -> VerificationCheck:
    """Whether enough of ``total`` is done; ``is_total_given`` means that the job file gives the total."""
    repeated = f" ({processed} including repeated ones)" if processed is not None and processed > done else ""
    text = f"{done} of {total} {unit} done{repeated}"
    passed = done >= required_count(wanted.complete_share, total)
    if unit == ITEMS:
        enough = "" if done >= total else f"; {100 * wanted.complete_share:g}% are enough"
        return VerificationCheck(unit, passed, text + enough)
    if passed:
        return VerificationCheck(unit, True, text)
    # undecided: logs count from 0 and skip lines, and training may stop early
    reason = "the program may have stopped early" if is_total_given else "the job file gives no total"
    return VerificationCheck(unit, None, f"{text}, according to the logs; {reason}")


# Output files


def _is_default(name: str, group: PathGroup) -> bool:
    """Whether the job file leaves this path group at its default."""
    return group.directory == "." and group.pattern == DEFAULT_PATTERNS[name]


def _directory_text(manifest: Manifest, group: PathGroup) -> str:
    return "the run directory" if group.directory == "." else printable(str(manifest.directory(group)))


def _unreadable_check(name: str, file_kind: str, directory: Path, result: FileWorkResult) -> VerificationCheck | None:
    """The failed check of a path group that could not be read, or None."""
    if result.silent_mount is not None:
        return VerificationCheck(name, False, f"the {file_kind} directory does not answer ({result.silent_mount})")
    if result.error is not None:
        return VerificationCheck(name, False, f"{printable(str(directory))} cannot be read: {result.error}")
    if result.unread_reason is not None:
        return VerificationCheck(name, None, f"the {file_kind} files could not be read: {result.unread_reason}")
    return None


@dataclass(frozen=True)
class _NodeOutputs:
    """Output files on the nodes' own disks, according to the sidecars."""

    silent_nodes: int  # nodes without a report
    files: int
    bytes: int
    records: int | None  # None if not all are counted
    checked: int  # files whose contents have been checked
    is_valid: bool  # whether all were checked and are valid
    invalid: tuple[str, ...]  # damaged files, of this or an earlier job
    has_new_files: bool  # whether any were written since the start of the job


def _sum_node_outputs(manifest: Manifest, statuses: Mapping[str, NodeStatus]) -> _NodeOutputs:
    """Sum the output files over the final statuses of the sidecars."""
    entries = [
        entry
        for status in statuses.values()
        if status.final
        for entry in status.outputs
        if entry.group == OUTPUT and not entry.counting
    ]
    records = [entry.records for entry in entries if entry.files]
    counts = [count for count in records if count is not None]
    return _NodeOutputs(
        silent_nodes=max(0, len({task.node_index for task in manifest.tasks}) - len(entries)),
        files=sum(entry.files for entry in entries),
        bytes=sum(entry.bytes for entry in entries),
        records=sum(counts) if len(counts) == len(records) else None,
        checked=sum(entry.files_checked or 0 for entry in entries),
        is_valid=all(entry.valid and entry.files_checked == entry.files for entry in entries if entry.files),
        invalid=tuple(flaw.file for entry in entries for flaw in entry.invalid),
        has_new_files=any(entry.first_output is not None for entry in entries),
    )


def _output_checks(
    job: FinishedJob, group: PathGroup, result: FileWorkResult, nodes: _NodeOutputs | None, *, is_elsewhere: bool
) -> list[VerificationCheck]:
    """Checks of the output files.

    ``nodes`` is set if each node has its own. With ``is_elsewhere``, those seen here may not be the job's.
    """
    manifest, wanted = job.manifest, job.manifest.verify.outputs
    unreadable = _unreadable_check("outputs", "output", manifest.directory(group), result)
    if unreadable is not None:
        return [unreadable]
    facts = result.facts
    if not isinstance(facts, VerifiedOutput) or not facts.listed:
        return [VerificationCheck("outputs", None, f"{NO_TIME} them")]
    if nodes is not None:
        return _node_output_checks(job, nodes, facts)
    place = _directory_text(manifest, group)
    least = f"; at least {wanted} are expected (verify.outputs)" if wanted is not None else ""
    missing = None if wanted is None else False
    if not facts.written and not (manifest.resumes and facts.files):
        before = _file_count_text(job.files_before)
        if job.files_before and is_elsewhere:
            return [VerificationCheck("outputs", None, f"none of the {before} can be seen from this machine")]
        if job.files_before:
            verb = "is" if job.files_before == 1 else "are"
            return [VerificationCheck("outputs", False, f"{before} {verb} gone from {place}")]
    if not facts.files and not facts.older:
        text = f"no file matches {group.pattern} in {place}{least}"
        absent = missing is None and _is_default(OUTPUT, group)
        coverage = FileCoverage(0, 0) if absent else None
        return [VerificationCheck("outputs", missing, text, is_inapplicable=absent, coverage=coverage)]
    if not facts.written:
        # a resumed job need not write all files again
        count = max(facts.files, facts.older)
        text = f"{count_text(count, 'file')} in {place}, none written since the job started{least}"
        return [VerificationCheck("outputs", missing, text)]
    records = _records_check(job, facts)
    checks = [_completeness_check(job, facts, records), _validity_check(facts)]
    return checks if records is None else [*checks, records]


def _node_output_checks(job: FinishedJob, nodes: _NodeOutputs, facts: VerifiedOutput) -> list[VerificationCheck]:
    """Checks for files on the disks of several nodes. This node reads its own; sidecars counted the others."""
    wanted = job.manifest.verify.outputs
    text = f"{count_text(nodes.files, 'file')}, {count_text(nodes.bytes, 'byte')} on the nodes' disks"
    text += ", according to their sidecars"
    doubts = []
    if nodes.silent_nodes:
        doubts.append(f"no file report from {nodes.silent_nodes} node{'' if nodes.silent_nodes == 1 else 's'}")
    if not nodes.has_new_files:
        doubts.append("unknown whether any was written since the job started")
    if wanted is not None and nodes.files < wanted:
        doubts.append(f"at least {wanted} are expected (verify.outputs)")
    if facts.empty:
        doubts.append(f"empty: {_flaw_names(facts.empty_files, facts.empty)}")
    valid = own = _validity_check(facts)
    if own.passed is not False and nodes.invalid:
        names = ", ".join(nodes.invalid[:MOST_NAMED])
        valid = VerificationCheck(
            "valid", None, f"the sidecars found damaged files, from this job or an earlier one: {names}"
        )
    elif own.passed is not False and (nodes.silent_nodes or not nodes.is_valid):
        valid = VerificationCheck("valid", None, f"{own.detail}; unknown for the files of other nodes")
    seen = min(nodes.files, max(nodes.checked, facts.checked - facts.unreadable))
    valid = replace(valid, coverage=FileCoverage(seen, nodes.files, OTHER_NODES if seen < nodes.files else None))
    checks = [VerificationCheck("outputs", None if doubts else True, "; ".join((text, *doubts))), valid]
    records = _records_check(job, facts, nodes)
    return checks if records is None else [*checks, records]


def _completeness_check(
    job: FinishedJob, facts: VerifiedOutput, records: VerificationCheck | None
) -> VerificationCheck:
    """Whether all files exist and are not empty. Gaps do not matter if all records are there."""
    wanted, manifest = job.manifest.verify.outputs, job.manifest
    complete = records is not None and records.passed is True
    short = records is not None and records.passed is False
    is_conclusive = facts.done and facts.checked == facts.files
    failed, is_open, notes = False, False, []
    if facts.empty:
        notes.append(f"empty: {_flaw_names(facts.empty_files, facts.empty)}")
        ranks = manifest.ranks_of_roles()
        owners = [rank_in_file_name(flaw.file, ranks) for flaw in facts.empty_files]
        suspect_ranks = [rank for rank in owners if rank is None or rank not in job.idle_ranks]
        if suspect_ranks and not complete:
            all_empty = facts.empty == facts.files and is_conclusive
            counts_records = manifest.verify.records_per_item is not None
            lacks_work = counts_records and any(
                rank in job.busy_ranks or (rank is None and job.busy_ranks and not _MAY_BE_EMPTY.search(flaw.file))
                for rank, flaw in zip(owners, facts.empty_files, strict=True)
            )
            failed = short or all_empty or (is_conclusive and lacks_work)
            is_open = not failed
    if wanted is not None:
        if facts.files < wanted:
            failed = True
            notes.append(f"at least {wanted} are expected (verify.outputs)")
    elif found := _workers_without_output(job, +facts.owners):
        lacking, is_certain = list(found), any(found.values())
        more = f" and {len(lacking) - MOST_NAMED} more" if len(lacking) > MOST_NAMED else ""
        text = f"none of {', '.join(lacking[:MOST_NAMED])}{more}"
        if not complete and (short or is_conclusive):
            failed = failed or short or is_certain
            text += "; set verify.outputs if fewer are enough"
        is_open = is_open or not complete
        notes.append(text)
    if failed and facts.older and not manifest.resumes:
        notes.append(f"{facts.older} older ones would count with `resume: true`")
    text = "; ".join((f"{count_text(facts.files, 'file')}, {count_text(facts.bytes, 'byte')}", *notes))
    if failed:
        return VerificationCheck("outputs", False, text, tuple(facts.empty_files), facts.empty)
    return VerificationCheck("outputs", None if is_open else True, text)


def _workers_without_output(job: FinishedJob, owners: Collection[int]) -> dict[str, bool]:
    """Workers without a file although others of their role have one, and whether each certainly should have one.

    Empty if file names do not identify workers.
    """
    manifest, firsts = job.manifest, set(job.manifest.ranks_of_roles().values())
    has_total = manifest.total_items is not None and job.work.counts_total_items(manifest.total_items)
    lacking: dict[str, bool] = {}
    for role in dict.fromkeys(task.role for task in manifest.tasks):
        tasks = [task for task in manifest.tasks if task.role == role and task.critical]
        owning_ranks = {task.rank for task in tasks} & set(owners)
        if not owning_ranks:
            continue
        expected = [task for task in tasks if task.rank in firsts or not owning_ranks <= firsts]
        ranks = [task.rank for task in expected]
        if job.work.is_in_step and owning_ranks == {min(ranks)}:
            continue  # often only the first of several workers with the same work writes
        widths = [width for width in range(2, len(ranks) // 2 + 1) if not len(ranks) % width]
        is_grouped = any(owning_ranks == set(ranks[::width]) for width in widths)
        if is_grouped and _did_all_items(job, owners):
            continue  # likewise the first of each group that does one work together
        is_certain = has_total or not is_grouped  # without a total, the items of a group may be the same ones
        settled = owning_ranks.union(job.idle_ranks)
        lacking |= {task.worker: is_certain for task in expected if task.rank not in settled}
    return lacking


def _did_all_items(job: FinishedJob, ranks: Collection[int]) -> bool:
    """Whether the job needs only the work of these ranks. That of the others is then none, or the same."""
    work, total = job.work, job.manifest.total_items
    if work.is_in_step or work.done is None:
        return True
    needed = min(work.done, total) if total is not None and work.counts_total_items(total) else work.done
    others = sum(done for rank, done in job.done_by_rank.items() if rank not in ranks)
    return work.done - others >= required_count(job.manifest.verify.complete_share, needed)


def _flaw_names(flaws: Sequence[DamagedFile], total: int) -> str:
    more = f" and {total - MOST_NAMED} more" if total > MOST_NAMED else ""
    return ", ".join(flaw.file for flaw in flaws[:MOST_NAMED]) + more


def _file_count_text(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"


def _validity_check(facts: VerifiedOutput) -> VerificationCheck:
    others = []
    if facts.unknown:
        others.append(f"{_file_count_text(facts.unknown)} of unknown format")
    if facts.undecided:
        others.append(f"{_file_count_text(facts.undecided)} whose check was inconclusive")
    if facts.unreadable:
        others.append(f"{_file_count_text(facts.unreadable)} that could not be read ({facts.unreadable_reason})")
    if facts.checked < facts.files:
        others.append(f"{NO_TIME} {facts.files - facts.checked} of {facts.files}")
    reason = TIME_LIMIT if facts.checked < facts.files else UNREADABLE if facts.unreadable else None
    coverage = FileCoverage(facts.checked - facts.unreadable, facts.files, reason)
    if facts.damaged:
        flaws = tuple(sorted(facts.flaws, key=lambda flaw: flaw.file))
        text = f"{facts.damaged} of {_file_count_text(facts.files)} damaged: {_flaw_names(flaws, facts.damaged)}"
        return VerificationCheck("valid", False, "; ".join((text, *others)), flaws, facts.damaged, coverage=coverage)
    passed = True if facts.valid and facts.checked == facts.files and not facts.unreadable else None
    formats = ", ".join(name for name, _ in facts.formats.most_common())
    text = f"{_file_count_text(facts.valid)} valid ({formats})" if facts.valid else ""
    detail = "; ".join(filter(None, (text, *others))) or "all files are empty"
    return VerificationCheck("valid", passed, detail, coverage=coverage)


def _records_check(
    job: FinishedJob, facts: VerifiedOutput, nodes: _NodeOutputs | None = None
) -> VerificationCheck | None:
    """Whether there are enough records for the items done, or for the job file's total if the logs report none.

    Returns None if there is nothing to count.
    """
    records: int | None = facts.records
    if nodes is not None:
        records = None if nodes.silent_nodes else nodes.records
    manifest, work = job.manifest, job.work
    wanted, total = manifest.verify, manifest.total_items
    times = wanted.records_per_item
    if times is None or not (facts.counted or (nodes is not None and records)):
        return None
    if work.counts_total_items(total) and work.done is not None and work.has_all_positions:
        items = work.done
    elif total is not None:
        items = total
    elif records != 0:
        reason = (
            "not all workers have reported their items" if work.counts_items else _unknown_items_reason(work, total)
        )
        return VerificationCheck("records", None, reason)
    else:
        items = 0
    if records is None:
        return VerificationCheck("records", None, f"the records for {items} items have not all been counted")
    text = f"{records} records for {items} items" if items else f"0 records in {_file_count_text(facts.files)}"
    if records >= _required_records(required_count(wanted.complete_share, items), times) and records:
        return VerificationCheck("records", True, text)
    if nodes is not None:
        return VerificationCheck("records", None, f"{text}, according to the sidecars")
    if facts.checked < facts.files or not facts.done:
        return VerificationCheck("records", None, f"{text}; there was no time to count them all")
    if facts.uncounted:
        return VerificationCheck(
            "records", None, f"{text}; {_file_count_text(facts.uncounted)} without countable records"
        )
    asked = f" (verify.records_per_item: {times:g})" if items else ""
    return VerificationCheck("records", False, f"{text}{asked}")


# Checkpoints


def _checkpoint_check(manifest: Manifest, group: PathGroup, result: FileWorkResult) -> VerificationCheck:
    directory = manifest.directory(group)
    unreadable = _unreadable_check("checkpoint", "checkpoint", directory, result)
    if unreadable is not None:
        return unreadable
    facts = result.facts
    if not isinstance(facts, VerifiedCheckpoint) or (facts.last is None and not facts.done):
        return VerificationCheck("checkpoint", None, f"{NO_TIME} them")
    if facts.last is None:
        text = f"no checkpoint matches {group.pattern} in {_directory_text(manifest, group)}"
        return VerificationCheck("checkpoint", None, text, is_inapplicable=_is_default(CHECKPOINT, group))
    found, last = facts.last, facts.last.checkpoint
    name = printable(last.name)
    if found.is_damaged:
        state = "incomplete" if last.state == "incomplete" else "damaged"
        text = f"{name} is {state}: {_damage_text(last)}; {_newest_undamaged_text(facts)}"
        count = last.missing_count + sum(len(entry.damaged) for entry in found.entries)
        return VerificationCheck("checkpoint", False, text, tuple(found.flaws), count)
    size = f"{_file_count_text(last.files)}, {last.bytes} bytes"
    if last.valid is None:
        return VerificationCheck("checkpoint", None, f"{name}: {size}; cannot tell: {printable(last.reason or '')}")
    return VerificationCheck("checkpoint", True, f"{name} is valid: {size}")


def _damage_text(last: Checkpoint) -> str:
    return printable(last.reason or "").removeprefix(f"{printable(last.name)}: ")


def _newest_undamaged_text(facts: VerifiedCheckpoint) -> str:
    if facts.undamaged is not None:
        return f"the newest undamaged one is {printable(facts.undamaged.checkpoint.name)}"
    return "there is no undamaged one" if facts.done else f"{NO_TIME} earlier ones"


# Results of benchmarks


def _token_checks(facts: Iterable[VerifiedFiles | None]) -> list[VerificationCheck]:
    """Whether benchmarks generated tokens; empty without a result."""
    of_results = [each for each in facts if isinstance(each, VerifiedOutput | VerifiedLogs)]
    counts = functools.reduce(add_token_counts, (each.tokens for each in of_results), NO_TOKENS)
    flaws = tuple(flaw for each in of_results for flaw in each.without_tokens)
    zeros = "; ".join(f"{flaw.file}: {flaw.reason}" for flaw in flaws[:MOST_NAMED])
    if not counts.results and not counts.requests:
        return []
    found = token_check_text(counts)
    if counts.results_with_tokens or counts.requests_with_tokens:
        return [VerificationCheck("tokens", True, "; ".join(filter(None, (f"{found} with tokens", zeros))))]
    if counts.results_undecided or counts.requests_undecided:
        return [VerificationCheck("tokens", None, f"{found}, none with tokens; results of their kinds may have none")]
    zeros = zeros or f"0 in each of {counts.requests} requests"
    return [VerificationCheck("tokens", False, f"the benchmark produced no tokens: {zeros}", flaws, len(flaws))]


# Checksums


def _saved_checksums_check(run_dir: Path, result: FileWorkResult) -> VerificationCheck:
    facts = result.facts
    if not result.sums or facts is None:
        return VerificationCheck("checksums", None, "no file was read")
    try:
        write_checksums(run_dir, result.sums)
    except OSError as error:
        return VerificationCheck("checksums", None, f"{CHECKSUMS_FILE} cannot be written: {error.strerror}")
    text = f"SHA-256 of {len(result.sums)} of {_file_count_text(facts.files)} in {CHECKSUMS_FILE}"
    return VerificationCheck("checksums", True if facts.done and len(result.sums) == facts.files else None, text)


def _changed_files_check(result: FileWorkResult, known: Mapping[str, str] | None) -> VerificationCheck:
    """Whether the files are unchanged since the end of the job."""
    if known is None:
        return VerificationCheck("checksums", None, f"there is no {CHECKSUMS_FILE} in the run directory")
    now = dict(result.sums)
    flaws = [
        DamagedFile(printable(name), None, "has changed")
        for name, digest in known.items()
        if now.get(name, digest) != digest
    ]
    done = result.facts is not None and result.facts.done
    if done:
        flaws += [
            DamagedFile(printable(name), None, "is missing or cannot be read") for name in known if name not in now
        ]
    if flaws:
        differing = f"{len(flaws)} of {_file_count_text(len(known))} differ from {CHECKSUMS_FILE}"
        detail = f"{differing}: {_flaw_names(flaws, len(flaws))}"
        return VerificationCheck("checksums", False, detail, tuple(flaws), len(flaws))
    same = sum(name in now for name in known)
    return VerificationCheck(
        "checksums", True if done else None, f"{same} of {_file_count_text(len(known))} as in {CHECKSUMS_FILE}"
    )
