"""Rows of Slurm's queue, from the text of squeue, which is alike in all versions from 22.05 on."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from exporter.slurm.states import (
    ENDS,
    JOB_ID,
    NEVER,
    array_of,
    base_state,
    is_part_of,
    known_limit,
    parse_duration,
    parse_moment,
    task_ids,
    waits_with,
)

# the last two are the user's text and may contain `|`
FIELDS = (
    *("JobArrayID", "State", "Reason", "SubmitTime", "StartTime", "EndTime", "TimeLimit", "RestartCnt", "NodeList"),
    *("Partition", "tres-alloc", "JobID", "UserName", "Account", "QOS", "NumNodes", "Dependency", "STDOUT", "Name"),
)
FORMAT = ",".join(f"{field}:|" for field in FIELDS)
_NOTHING = ("", "(null)")
NO_REASON = (*_NOTHING, "None")  # printed if nothing holds the job back
SAME_SUBMISSION_S = 600.0  # most difference of a job's submit times by the clocks of Slurm and of the login node
MOST_GARBLED = 0.01  # share of rows; with more the answer cannot be trusted to be whole

_ROW = re.compile(rf"{JOB_ID}\|")
_DEPENDENCY = re.compile(r":(\d+)")  # ids in `afterok:4459_*(unfulfilled),afterany:4460(unfulfilled)`
_TASK_PATTERN = re.compile(r"%\d*a")
_PATTERN = re.compile(r"%(\d*)([Aajux%])")
_MOST_PADDING = 10  # digits to which Slurm fills a number up with zeros


class GarbledAnswerError(ValueError):
    """An answer of Slurm that cannot be trusted to be whole."""


class AttemptSnapshot(NamedTuple):
    """State of a job in one answer of Slurm."""

    state: str
    submitted: float | None = None  # of this attempt, epoch seconds
    started: float | None = None  # None before the job starts, also where Slurm forecasts the start
    ended: float | None = None  # None before it ends
    restarts: int = 0
    reason: str | None = None
    limit_s: float | None = None  # None without a limit


def is_of_submission(found: float | None, restarts: int, submitted: float | None) -> bool:
    """Whether the job of Slurm that was submitted at ``found`` is the one that the login node submitted.

    Another job may have had its id before, or got it later. A requeue changes the submit time in Slurm, and counts as a
    restart. None is an unknown time, with which any job may be the one.
    """
    if found is None or submitted is None:
        return True
    return abs(found - submitted) <= SAME_SUBMISSION_S or (found > submitted and restarts > 0)


class QueueRow(NamedTuple):
    """One job, array task, or several tasks of an array that wait."""

    job_id: str
    snapshot: AttemptSnapshot
    name: str
    output: str | None  # file of the standard output, its patterns filled in; None if there is none
    partition: str = ""  # several while it waits for one of them
    resources: str = ""  # trackable resources such as `cpu=4,mem=600M`; of a waiting job what it asks for
    user: str = ""
    account: str = ""
    qos: str = ""
    node_count: int = 0  # of a waiting job what it asks for
    nodes: str = ""  # names such as `cn[01-04]`; empty before it starts
    dependency: str = ""  # what it waits for, such as `afterok:1(unfulfilled)`
    expected_start: float | None = None  # Slurm's forecast for a waiting job


def parse_queue(text: str) -> tuple[QueueRow, ...]:
    """Parse ``squeue -h -O FORMAT``, with times in epoch seconds. Raises GarbledAnswerError."""
    return QueueParser().parse(text)


class QueueParser:
    """Parses successive answers; an unchanged line yields the same object."""

    def __init__(self) -> None:
        self._known: Mapping[str, QueueRow] = {}
        self.garbled = 0  # lines of all answers that could not be parsed

    def parse(self, text: str, end: str = "|\n") -> tuple[QueueRow, ...]:
        """Parse an answer as ``parse_queue`` does, whose rows have this end.

        A name may contain newlines, and so whole rows of other users, unless nobody can guess the end. Despite ``-h``,
        a line with the cluster's name comes first if one was selected.
        """
        known, rows = self._known, list[str]()
        *parts, rest = text.split(end)
        if "|" in rest or (rest and not rest.endswith("\n")):
            raise GarbledAnswerError("its last line is not complete")
        others = rest.split("\n")
        for part in parts:
            before, newline, _ = part.partition("|")[0].rpartition("\n")
            rows.append(part.removeprefix(before + newline))
            others += before.split("\n")
        clusters = sum(line.startswith("CLUSTER:") for line in others)
        garbled = sum(map(bool, others)) - clusters
        found = [known.get(row) or parse_row(row) for row in rows]
        lines, garbled = len(rows) + garbled, found.count(None) + garbled
        self.garbled += garbled
        if garbled > MOST_GARBLED * lines:
            raise GarbledAnswerError(f"{garbled} of its {lines} lines cannot be parsed")
        if clusters > 1:
            raise GarbledAnswerError("it is of several clusters; set SLURM_CLUSTERS to one of them")
        self._known = {row: parsed for row, parsed in zip(rows, found, strict=True) if parsed is not None}
        return propagate_never(row for row in found if row is not None)


def propagate_never(rows: Iterable[QueueRow]) -> tuple[QueueRow, ...]:
    """Copy the reason ``NEVER`` to all rows that wait for a row with it.

    Slurm itself gives it only to the first one behind the job whose end decided.
    """
    found = list(rows)
    never = {array_of(row.job_id) for row in found if row.snapshot.reason == NEVER and row.snapshot.state == "PENDING"}
    if not never:
        return tuple(found)
    waiting = [index for index, row in enumerate(found) if row.dependency and row.snapshot.state == "PENDING"]
    while never:
        more = {index for index in waiting if found[index].snapshot.reason != NEVER and _waits_for(found[index], never)}
        if not more:
            break
        for index in more:
            found[index] = found[index]._replace(snapshot=found[index].snapshot._replace(reason=NEVER))
        never = {array_of(found[index].job_id) for index in more}
    return tuple(found)


def part_rows(rows: Iterable[QueueRow], job_id: str) -> list[QueueRow]:
    """Rows of a job, of the tasks of an array, or of the tasks that wait together with this one."""
    return [row for row in rows if is_part_of(row.job_id, job_id) or waits_with(row.job_id, job_id)]


def _waits_for(row: QueueRow, job_ids: Collection[str]) -> bool:
    """Whether the row waits for one of these jobs, whatever else ends; not if any of several will do."""
    return "?" not in row.dependency and any(job_id in job_ids for job_id in _DEPENDENCY.findall(row.dependency))


def parse_row(text: str) -> QueueRow | None:
    """Parse one job, without the last separator; None if it is none."""
    parts = text.split("|", len(FIELDS) - 1)
    if len(parts) < len(FIELDS) or not _ROW.match(text):
        return None
    *first, user, account, qos, node_count, dependency, output, name = parts
    job_id, word, reason, submit, start, end, limit, restarts, nodes, partition, tres, raw_id = first
    try:
        task_ids(job_id)
    except ValueError:
        return None
    if not restarts.isdecimal() or not node_count.isdecimal():
        return None
    state = base_state(word)
    has_started = state != "PENDING" and bool(nodes)  # a job that was cancelled while it waited has no nodes
    snapshot = AttemptSnapshot(
        state,
        parse_moment(submit),
        parse_moment(start) if has_started else None,
        parse_moment(end) if state in ENDS else None,
        int(restarts),
        None if reason in NO_REASON else reason,
        known_limit(parse_duration(limit)),
    )
    values = {
        "A": array_of(job_id),
        "a": job_id.partition("_")[2],
        "j": raw_id,
        "J": raw_id,
        "x": name,
        "u": user,
        "%": "%",
    }
    path = _PATTERN.sub(lambda found: _padded(values[found[2]], found), output)
    is_of_tasks = job_id.endswith("]") and _TASK_PATTERN.search(output) is not None  # each has its own
    file = path if path.startswith("/") and path != "/dev/null" and not is_of_tasks else None
    return QueueRow(
        job_id,
        snapshot,
        name,
        file,
        partition,
        tres,
        user=user,
        account="" if account in _NOTHING else account,
        qos="" if qos in _NOTHING else qos,
        node_count=int(node_count),
        nodes=nodes,
        dependency="" if dependency in _NOTHING else dependency,
        expected_start=parse_moment(start) if state == "PENDING" else None,
    )


def _padded(value: str, pattern: re.Match[str]) -> str:
    """A number as wide as its pattern says; Slurm ignores the width of texts."""
    return value.zfill(min(int(pattern[1] or 0), _MOST_PADDING)) if pattern[2] in "AajJ" else value
