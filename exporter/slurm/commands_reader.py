"""Slurm's commands that only read, in a pinned environment and with a deadline."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from exporter.contract.errors import ExporterError
from exporter.slurm import accounting, nodes, queue, usage
from exporter.slurm.accounting import Attempt, parse_accounting, parse_history, plain_lines
from exporter.slurm.nodes import NodeRow, parse_nodes
from exporter.slurm.queue import GarbledAnswerError, QueueParser, QueueRow
from exporter.slurm.usage import RunningUse, UsageRow, parse_running_use, parse_usage

if TYPE_CHECKING:
    from exporter.slurm.diagnostics import Diagnostics

DEADLINE_S = 30.0  # sacct hangs for ever while slurmdbd does
INTERACTIVE_DEADLINE_S = 10.0  # while a person waits
AFTER_KILL_S = 1.0  # for the rest of the output: a child that has left the group may keep it open
_MARK_BYTES = 6  # of a word that nobody guesses; longer ones make long answers of sacct
MOST_ASKED = 200  # ids in one question to accounting, which takes 50 ms of its daemon
# prefixes of user variables that change the output or queries of Slurm's commands
_OUTPUT_PREFIXES = ("SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SCONTROL_")
NO_CLUSTER = "finds no Slurm cluster here: no slurm.conf and no SLURM_CONF; run this where jobs are submitted"
_SEARCH_FAILED = re.compile(r"configuration source|resolve_ctls_from_dns_srv|slurm\.conf.*No such file", re.IGNORECASE)
WITHOUT_ACCOUNTING = ("is not on PATH", "accounting storage is disabled")  # problems of sacct that no retry mends


class SlurmUnansweredError(ExporterError):
    """A Slurm command is missing, fails, or does not answer. It says nothing about any job."""

    def __init__(self, command: str, problem: str) -> None:
        self.command = command
        super().__init__(f"{command} {problem}")

    @property
    def is_lasting(self) -> bool:
        """Whether no retry can help."""
        return any(words in str(self) for words in WITHOUT_ACCOUNTING)

    @property
    def is_local(self) -> bool:
        """Whether the cause is on this machine: other processes of the user may have an answer."""
        return self.finds_no_cluster or "is not on PATH" in str(self)

    @property
    def finds_no_cluster(self) -> bool:
        """Whether this machine has no cluster, as far as it knows: its configuration may be away for a while."""
        return NO_CLUSTER in str(self)


def finds_no_cluster(problem: str) -> bool:
    """Whether this is Slurm's message about a missing configuration."""
    return _SEARCH_FAILED.search(problem) is not None


def clean_environment(environ: Mapping[str, str], time_format: str = "standard") -> dict[str, str]:
    """Return an environment in which Slurm's commands print their documented output."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_OUTPUT_PREFIXES)}
    return {**kept, "LC_ALL": "C", "SLURM_TIME_FORMAT": time_format}


def run_reading(argv: Sequence[str], environment: Mapping[str, str], deadline_s: float = DEADLINE_S) -> str:
    """Run a command that reads, and return its output. Raises SlurmUnansweredError.

    It has a process group of its own, so that Ctrl-C does not end it, and all of it is killed at the deadline.
    """
    program = shutil.which(argv[0])
    if program is None:
        raise SlurmUnansweredError(argv[0], "is not on PATH; load the Slurm module")
    with subprocess.Popen(
        [program, *argv[1:]],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=deadline_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # not reaped, so the group is still its own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=AFTER_KILL_S)
            if isinstance(error, subprocess.TimeoutExpired):
                raise SlurmUnansweredError(argv[0], f"did not answer in {deadline_s:.3g} s") from error
            raise
    text, problem = out.decode("utf-8", "replace"), "; ".join(err.decode("utf-8", "replace").split("\n")).strip("; ")
    if process.returncode != 0 or (problem and not text):  # some exit with 0 after an error
        if finds_no_cluster(problem):
            raise SlurmUnansweredError(argv[0], NO_CLUSTER)
        raise SlurmUnansweredError(argv[0], f"exited with {process.returncode}: {problem or text.strip()}")
    return text


def _mark() -> str:
    """A word that no name of a job contains; a new one for each answer, since others see the arguments of commands."""
    return os.urandom(_MARK_BYTES).hex()


class ClusterFacts(NamedTuple):
    """What the controller says of itself."""

    name: str | None
    hides_jobs: bool  # whether users see only their own jobs (PrivateData)
    ended_listed_s: float | None = None  # how long the queue has ended jobs (MinJobAge)
    hides_usage: bool = False  # whether users see only their own usage, in sreport; squeue and sacct show all jobs


class SlurmReader:
    """Reads the queue and the accounting of one user's jobs, the queue of some jobs of anybody, and the nodes.

    Without a user, queue and accounting are of everybody, as far as Slurm shows them.
    """

    source = "squeue"  # of the queue

    def __init__(
        self, user: str | None, cluster: str | None, environ: Mapping[str, str], partitions: Sequence[str] = ()
    ) -> None:
        """``user`` is None for all users. ``partitions`` are those of the queue; without any it is all of them."""
        self.user, self.cluster, self.partitions = user, cluster, partitions
        self._of_user = ["-u", user] if user is not None else []
        self._in = ["-p", ",".join(partitions)] if partitions else []
        self._on = [f"--clusters={cluster}"] if cluster else []
        # by default squeue cuts the indexes of an array after 64 bytes
        self._environment = {**clean_environment(environ, "%s"), "SLURM_BITSTR_LEN": "0"}
        self.unparsed = Counter[str]()  # lines that were skipped, by command
        self._queue = QueueParser()  # most lines of one answer are those of the answer before

    def queue(self) -> tuple[QueueRow, ...]:
        """All jobs that the controller remembers, ended ones too. Raises SlurmUnansweredError."""
        return self._read_queue("-t", "all", *self._of_user, *self._in, parser=self._queue)

    def queue_of(self, job_ids: Sequence[str]) -> tuple[QueueRow, ...]:
        """Those of these jobs that have not ended. Raises SlurmUnansweredError."""
        try:
            job_list = ",".join(job_ids)
            return self._read_queue("-j", job_list, parser=QueueParser(), deadline_s=INTERACTIVE_DEADLINE_S)
        except SlurmUnansweredError as error:
            if "Invalid job id" in str(error):  # said of a single id only
                return ()
            raise

    def _read_queue(self, *which: str, parser: QueueParser, deadline_s: float = DEADLINE_S) -> tuple[QueueRow, ...]:
        local = [] if self._on else ["--local"]
        mark = _mark()
        argv = ["squeue", *self._on, *local, "-h", "-a", *which, "-O", f"{queue.FORMAT}{mark}"]
        before = parser.garbled
        try:
            return parser.parse(run_reading(argv, self._environment, deadline_s), f"|{mark}\n")
        except GarbledAnswerError as error:
            raise SlurmUnansweredError(argv[0], f"gave an answer that cannot be used: {error}") from error
        finally:
            self.unparsed["squeue"] += parser.garbled - before

    def accounting(self, job_ids: Sequence[str], since: float) -> tuple[Attempt, ...]:
        """All attempts of these jobs, of this user if there is one, and their steps. Raises SlurmUnansweredError.

        ``since`` bounds the search; 0 stands for the whole history.
        """
        start = ["-S", f"uts{int(since)}"] if since else []
        everybody = ["-a"] if self.user is None else []  # else sacct takes the jobs of who asks
        argv = ["sacct", *self._on, "-n", "-P", "-D", "--noconvert", *everybody, *start, "-j", ",".join(job_ids)]
        text = self._run_sacct([*argv, "-o", accounting.FORMAT])
        attempts = parse_accounting(text)
        self._count_lines("sacct", text, sum(1 + len(attempt.steps) for attempt in attempts))
        return tuple(attempt for attempt in attempts if self.user in (None, attempt.user))

    def cluster_facts(self) -> ClusterFacts:
        """What the controller is and shows. Raises SlurmUnansweredError."""
        text = run_reading(["scontrol", *self._on, "show", "config"], self._environment)
        return parse_cluster_facts(text)

    def ended_since(self, since: float) -> tuple[QueueRow, ...]:
        """Last attempts of jobs of the queue's partitions that ran after ``since``, as rows of the queue.

        Raises SlurmUnansweredError.
        """
        in_partitions = ["-r", ",".join(self.partitions)] if self.partitions else []
        text = self._read_window(since, accounting.ROW_FORMAT, "-X", *in_partitions)
        rows = [row for row, _ in parse_history(text)]
        self._count_lines("sacct", text, len(rows))
        return tuple(row for row in rows if self.user in (None, row.user))

    def history(self, since: float, until: float | None = None) -> tuple[tuple[QueueRow, Attempt], ...]:
        """All attempts that ran or waited in a window, and their steps. Raises SlurmUnansweredError."""
        end = [] if until is None else ["-E", f"uts{int(until)}"]
        found = parse_history(self._read_window(since, accounting.ROW_FORMAT, *end))
        return tuple((row, attempt) for row, attempt in found if self.user in (None, row.user))

    def usage_since(self, since: float) -> tuple[UsageRow, ...]:
        """Every attempt after ``since``, with only the time after it. Raises SlurmUnansweredError."""
        return parse_usage(self._read_window(since, usage.FORMAT, "-X", "-T"))

    def _read_window(self, since: float, fields: str, *how: str) -> str:
        whose = self._of_user or ["-a"]
        argv = ["sacct", *self._on, "-n", "-P", "-D", "--noconvert", *how, "-S", f"uts{int(since)}", *whose]
        return self._run_sacct([*argv, "-o", fields])

    def _run_sacct(self, argv: Sequence[str]) -> str:
        mark = _mark()
        return plain_lines(run_reading([*argv, f"--delimiter={mark}"], self._environment), mark)

    def nodes(self) -> tuple[NodeRow, ...]:
        """All nodes, once for each of their partitions. Raises SlurmUnansweredError."""
        argv = ["sinfo", *self._on, "-h", "-N", "-a", "-O", nodes.FORMAT]
        text = run_reading(argv, self._environment)
        rows = parse_nodes(text)
        self._count_lines("sinfo", text, len(rows))
        return rows

    def _count_lines(self, command: str, text: str, parsed: int) -> None:
        lines = sum(1 for line in text.split("\n") if line and not line.startswith("CLUSTER:"))
        self.unparsed[command] += lines - parsed

    def diagnostics(self) -> "Diagnostics":
        """Load and clock of the controller. Raises SlurmUnansweredError."""
        from exporter.slurm.diagnostics import parse_diagnostics  # lazy: only a hub asks for it

        found = parse_diagnostics(run_reading(["sdiag", *self._on], self._environment), os.geteuid())
        if found is None:
            raise SlurmUnansweredError("sdiag", "gave an answer that cannot be used: it has no time")
        return found

    def running_use(self, job_id: str) -> RunningUse:
        """CPU time and memory of the steps of a running job. Raises SlurmUnansweredError."""
        argv = ["sstat", *self._on, "-n", "-P", "-a", "--noconvert", "-j", job_id, "-o", usage.RUNNING_FORMAT]
        return parse_running_use(run_reading(argv, self._environment, INTERACTIVE_DEADLINE_S))


def parse_cluster_facts(text: str) -> ClusterFacts:
    """Parse ``scontrol show config``."""
    values = {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in text.splitlines())}
    private = values.get("PrivateData", "jobs").lower().split(",")  # without an answer nobody sees the jobs of others
    age = values.get("MinJobAge", "").partition(" ")[0]
    ended_listed_s = float(age) if age.isdecimal() else None
    return ClusterFacts(values.get("ClusterName") or None, "jobs" in private, ended_listed_s, "usage" in private)
