"""Slurm's queue out of slurmrestd, as the same rows as those of squeue, and the choice between the two."""

import shutil
from collections.abc import Iterable, Mapping, Sequence

from exporter.contract.errors import ExporterError
from exporter.slurm.commands_reader import DEADLINE_S, SlurmReader, SlurmUnansweredError
from exporter.slurm.queue import MOST_GARBLED, QueueRow, parse_row, propagate_never
from exporter.slurm.sources.http_reader import NoAnswerError, check_address, read_json

SOURCE = "GPUJOB_SLURM_SOURCE"  # one of SOURCES
ADDRESS = "GPUJOB_SLURMRESTD"  # where slurmrestd listens
SOURCES = ("auto", "commands", "rest")
REST = "slurmrestd"
VERSIONS = tuple(f"v0.0.{number}" for number in range(45, 37, -1))  # Slurm 26.05 to 22.05; each serves three or more
NOT_FOUND, UNAUTHORIZED = 404, 401
JWT_FILE = "SLURM_JWT_FILE"  # in place of SLURM_JWT, read for each question: tokens of half an hour are usual
MOST_TOKEN = 64 * 1024  # characters; servers refuse shorter headers already
NO_TASK = 0xFFFFFFFE  # what %a becomes for the tasks of an array that wait together
_BAR = "\0"  # stands for | where a line of squeue separates with it; no path contains it
_UNSET = 0xFFFFFFFE  # NO_VAL, and INFINITE above it, as numbers of v0.0.38
# of several flags squeue prints the first of these
_FLAGS = ("COMPLETING", "STAGE_OUT", "CONFIGURING", "RESIZING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD")
_OTHER_FLAGS = ("SPECIAL_EXIT", "STOPPED", "REVOKED", "RESV_DEL_HOLD", "SIGNALING")


def slurm_reader(
    user: str | None, cluster: str | None, environ: Mapping[str, str], partitions: Sequence[str] = ()
) -> SlurmReader:
    """The reader of the source that the environment names. Raises ExporterError if it cannot be used."""
    source = environ.get(SOURCE) or SOURCES[0]
    address = environ.get(ADDRESS)
    if source not in SOURCES:
        raise ExporterError(f"{SOURCE}: {source!r} is none of {', '.join(SOURCES)}")
    if source == "auto":  # commands cost less everywhere
        source = "rest" if address and shutil.which("squeue") is None else "commands"
    if source == "commands":
        return SlurmReader(user, cluster, environ, partitions)
    if not address:
        raise ExporterError(f"{ADDRESS} is not set; give the address of slurmrestd, such as unix:/run/slurmrestd.sock")
    try:
        check_address(address)
    except ValueError as error:
        raise ExporterError(f"{ADDRESS}: {error}") from error
    return RestReader(user, cluster, environ, partitions, address)


class RestReader(SlurmReader):
    """Reads the queue from slurmrestd, and all else with Slurm's commands."""

    source = REST

    def __init__(
        self,
        user: str | None,
        cluster: str | None,
        environ: Mapping[str, str],
        partitions: Sequence[str],
        address: str,
    ) -> None:
        super().__init__(user, cluster, environ, partitions)
        self._address, self._environ = address, environ
        self._versions = VERSIONS

    def queue(self) -> tuple[QueueRow, ...]:
        """All jobs that the controller remembers, ended ones too. Raises SlurmUnansweredError."""
        body = self._read_jobs()
        rows = parse_rest_jobs(body)
        self.unparsed["squeue"] += len(_jobs_in(body)) - len(rows)
        wanted = frozenset(self.partitions)
        return tuple(
            row
            for row in rows
            if self.user in (None, row.user) and (not wanted or wanted & set(row.partition.split(",")))
        )

    def _headers(self) -> dict[str, str]:
        """The token of this moment. Without one, the socket identifies the user. Raises SlurmUnansweredError."""
        token, name = self._environ.get("SLURM_JWT"), self._environ.get("USER")
        if path := self._environ.get(JWT_FILE):
            try:
                with open(path, encoding="ascii") as file:
                    token = file.read(MOST_TOKEN).strip()
            except (OSError, ValueError) as error:
                problem = getattr(error, "strerror", None) or error
                raise SlurmUnansweredError(REST, f"is not asked: {JWT_FILE}: {path}: {problem}") from error
        if not token:
            return {}
        return {"X-SLURM-USER-TOKEN": token, **({"X-SLURM-USER-NAME": name} if name else {})}

    def _read_jobs(self) -> Mapping[str, object]:
        headers = self._headers()
        for version in self._versions:
            try:
                body = read_json(self._address, f"/slurm/{version}/jobs", DEADLINE_S, headers)
            except NoAnswerError as error:
                if error.status == NOT_FOUND:
                    continue
                hint = f"; has the token expired? {JWT_FILE} takes new ones" if error.status == UNAUTHORIZED else ""
                raise SlurmUnansweredError(REST, f"at {error}{hint}") from error
            self._versions = (version,)
            return body
        raise SlurmUnansweredError(REST, f"at {self._address} serves none of {VERSIONS[-1]} to {VERSIONS[0]}")


def parse_rest_jobs(body: Mapping[str, object]) -> tuple[QueueRow, ...]:
    """Parse an answer of ``/slurm/VERSION/jobs``. Raises SlurmUnansweredError if it is none."""
    found = [_parse_job(job) for job in _jobs_in(body)]
    rows = [row for row in found if row is not None]
    if (garbled := len(found) - len(rows)) > MOST_GARBLED * len(found):
        problem = f"{garbled} of the {len(found)} jobs in it cannot be parsed"
        raise SlurmUnansweredError(REST, f"gave an answer that cannot be used: {problem}")
    return propagate_never(rows)


def _jobs_in(body: Mapping[str, object]) -> list[object]:
    jobs = body.get("jobs")
    if body.get("errors") or not isinstance(jobs, list):
        raise SlurmUnansweredError(REST, f"answers with an error: {error_text(body) or 'there are no jobs in it'}")
    return jobs


def error_text(body: Mapping[str, object]) -> str:
    """The errors in an answer."""
    errors = body.get("errors")
    found = [each for each in errors if isinstance(each, dict)] if isinstance(errors, list) else []
    return "; ".join(str(each.get("description") or each.get("error") or "unknown") for each in found)


def _parse_job(job: object) -> QueueRow | None:
    if not isinstance(job, dict) or not _number(job, "job_id"):
        return None
    row = parse_row(_row_text(job))
    return row if row is None or row.output is None else row._replace(output=row.output.replace(_BAR, "|"))


def _row_text(job: Mapping[str, object]) -> str:
    """The job as a line of squeue, so that one parser decides what it means."""
    job_id, array, task = _number(job, "job_id"), _number(job, "array_job_id"), _number(job, "array_task_id")
    tasks, het = _text(job, "array_task_string"), _number(job, "het_job_id")
    shown = f"{job_id}"
    if array and tasks:
        shown = f"{array}_[{tasks}]"
    elif array and task is not None:
        shown = f"{array}_{task}"
    elif het:
        shown = f"{het}+{_number(job, 'het_job_offset') or 0}"
    limit = _number(job, "time_limit")
    fields = (
        *(shown, _state(job.get("job_state")), _text(job, "state_description") or _text(job, "state_reason")),
        *(_number(job, name) or "N/A" for name in ("submit_time", "start_time", "end_time")),
        "UNLIMITED" if limit is None else f"{limit * 60}",
        *(_number(job, "restart_cnt") or 0, _text(job, "nodes"), _text(job, "partition")),
        *(_text(job, "tres_alloc_str") or _text(job, "tres_req_str"), job_id, _text(job, "user_name")),
        *(_text(job, "account"), _text(job, "qos"), _number(job, "node_count") or 0, _text(job, "dependency")),
        *(_output(job, is_task=bool(array)), _text(job, "name")),
    )
    return "|".join(map(str, fields))


def _number(job: Mapping[str, object], name: str) -> int | None:
    """A number, plain as in v0.0.38 or an object as in later versions; None if it is not set or infinite."""
    value: object = job.get(name)
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") and not value.get("infinite") else None
    return int(value) if isinstance(value, int | float) and 0 <= value < _UNSET else None


def _text(job: Mapping[str, object], name: str) -> str:
    value = job.get(name)
    return value if isinstance(value, str) else ""


def _output(job: Mapping[str, object], *, is_task: bool) -> str:
    """The file of the standard output; v0.0.38 leaves out the one that sbatch takes by default."""
    named = _text(job, "standard_output")  # from v0.0.42 on with its patterns filled in
    if _text(job, "array_task_string") and f"{NO_TASK}" in named:
        return ""  # each task has its own
    if named or not job.get("batch_flag"):
        return named.replace("|", _BAR)
    return f"{_text(job, 'current_working_directory')}/slurm-{'%A_%a' if is_task else '%j'}.out"


def _state(value: object) -> str:
    """The word that squeue prints: of a state and its flags the first flag."""
    words = [str(word) for word in value] if isinstance(value, list) else [str(value)]
    flags: Iterable[str] = (flag for flag in (*_FLAGS, *_OTHER_FLAGS) if flag in words)
    return next(iter(flags), words[0] if words else "")
