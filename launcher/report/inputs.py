"""Inputs of a report besides the run directory."""

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.status import WorkerEnd
from launcher.report.exit_reasons import ExitReasonFinder
from launcher.rundir.job_records import OrchestratorRecord

if TYPE_CHECKING:
    from launcher.verify.timed_reads import OutOfTime, ReportProgress


@dataclass(frozen=True)
class KnownEnds:
    """What an orchestrator knows besides the records in the run directory, whose disk may be full."""

    ends: Mapping[int, WorkerEnd] = field(default_factory=dict)  # last ends by rank, which may lack records
    finder: ExitReasonFinder | None = None  # has already read the logs of ended tasks
    job_end: float | None = None  # end of the time limit
    slurm_state: str | None = None  # of a job whose orchestrator was lost without publishing a reason
    orchestrator: OrchestratorRecord | None = None  # instead of its file
    job_state: Mapping[str, object] | None = None  # instead of `state.json`
    is_past: bool = False  # whether the job ended at some time before now, of which nobody has written a report
    elapsed_s: float | None = None  # since the start, by a clock that nobody sets
    incomplete: str | None = None  # why records, logs or output may be missing


@dataclass(frozen=True)
class ReportPace:
    """How much time a report may take."""

    # whether to read no earlier runs, logs or output files and to verify nothing; statuses have positions
    is_quick: bool = False
    out_of_time: "OutOfTime" = lambda: False  # polled during verification
    # polled while earlier runs are read; the rest is left out once it is true, and the sidecars have counted their ends
    out_of_time_for_runs: "OutOfTime" = lambda: False
    progress: "ReportProgress | None" = None  # called during verification


NOTHING_KNOWN, UNHURRIED = KnownEnds(), ReportPace()
