"""Ends of runs that were followed by a restart, for the report and its text."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from exporter.contract.report import EndCause, WorkerReport
from exporter.contract.status import WorkerEnd
from exporter.workers.exit_reason import CONSEQUENCES, PEER_WINDOW_S, first_failure
from launcher.words import end_line, plain_text

RESTARTS_SHOWN = 8  # ends shown in the text; the JSON has the last ones of each worker
EARLIER_SHOWN = 3  # failures of other workers named in the cause


def end_cause(worker: WorkerReport, end: WorkerEnd, run: int | None = None) -> EndCause:
    """One end with its worker; ``run`` is the number of the run if a restart followed."""
    return EndCause(
        worker=worker.worker,
        rank=worker.rank,
        node=worker.node,
        reason=end.reason,
        code=end.code,
        signal=end.signal,
        time=end.time,
        restart=end.restart,
        evidence=end.evidence,
        run=run,
    )


def restart_causes(workers: Iterable[WorkerReport]) -> list[EndCause]:
    """End of each run that was followed by a restart, earliest first.

    If several tasks restart together, the first failure represents the run.
    """
    runs: dict[tuple[str, int], list[EndCause]] = {}
    for worker in workers:
        for end in worker.exits:
            if end.restart is not None and end.restart < worker.restarts:
                found = end_cause(worker, end, run=end.restart + 1)
                runs.setdefault((worker.worker, end.restart), []).append(found)
    return sorted(map(_first_end, runs.values()), key=end_time)


def _first_end(ends: Sequence[EndCause]) -> EndCause:
    """First failure among the ends of one run, else the first end."""
    index = first_failure([(end_time(end), end.reason) for end in ends])
    return min(ends, key=end_time) if index is None else ends[index]


def end_time(end: EndCause) -> float:
    """Time of an end for comparisons; infinite if unknown."""
    return float("inf") if end.time is None else end.time


def with_earlier_failures(cause: EndCause, restarted: Iterable[EndCause]) -> EndCause:
    """Return the cause with recent failures of other, restarted workers in its evidence, the nearest ones."""
    if cause.time is None:
        return cause
    lately = [
        end for end in restarted if end.worker != cause.worker and 0.0 <= cause.time - end_time(end) <= PEER_WINDOW_S
    ]
    before = [
        f"{end.worker} (run {end.run}) had ended by {end.reason} {cause.time - end_time(end):.1f} s before"
        for end in lately[-EARLIER_SHOWN:]
    ]
    if (more := len(lately) - len(before)) > 0:
        before.insert(0, f"{more} earlier failures of other workers within {PEER_WINDOW_S:.0f} s")
    return cause.replace(evidence=(*cause.evidence, *before))


def restart_text(end: EndCause) -> str:
    """Describe a restart: ``decode_w0 on cn01 restarted (run 2) after killed_unknown (killed by SIGKILL)``."""
    evidence = "; ".join(end.evidence)
    return f"{end.worker} on {end.node} restarted (run {(end.run or 0) + 1}) after {end.reason} ({evidence})"


def restart_lines(restarted: Sequence[EndCause], workers: Iterable[WorkerReport]) -> Iterator[str]:
    """Markdown lines, one for each end, and the sums if there are more."""
    for end in restarted[:RESTARTS_SHOWN]:
        yield f"- restarted: {plain_text(end_line(end))}"
    times: dict[str, int] = {}  # by worker, whose tasks restart together
    reasons: Counter[str] = Counter()
    for worker in workers:
        times[worker.worker] = max(worker.restarts, times.get(worker.worker, 0))
        reasons.update(worker.exit_counts)
        reasons.subtract([worker.exit.reason] if worker.exit is not None else [])
    total = sum(times.values())
    if total > RESTARTS_SHOWN:
        found = [(reason, count) for reason, count in reasons.most_common() if count > 0]
        causes = [f"{count}x {reason}" for reason, count in found if reason not in CONSEQUENCES]
        yield f"- restarted {total} times: {', '.join(causes or ['reasons unknown'])}"
