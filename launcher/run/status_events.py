"""Events of the sidecars and milestones of progress, copied to ``events.jsonl``."""

import time
from collections.abc import Callable, Mapping

from exporter.contract.events import EventFilter, EventLog, event_title
from exporter.contract.status import NodeStatus, WorkerStatus
from exporter.progress.work import (
    counting_workers,
    job_eta,
    job_rate,
    job_work,
    speed_text,
    unit_word,
    with_current_eta,
)
from launcher.words import duration_text, percent_text

# events that the orchestrator writes itself
ORCHESTRATOR_EVENTS = frozenset(("worker started", "worker restarted", "worker ended", "worker daemonised"))
MILESTONES = 10  # a milestone for each tenth of the work
NEARLY_DONE = 0.95  # share of the work at which the job is near completion
PROGRESS_S = 300.0  # between two reports of progress
Log = Callable[[str], None]  # writes a line to `log.out`


class StatusEvents:
    """Copies each new event of the sidecars' statuses once."""

    def __init__(self, events: EventLog, total_items: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._events = events
        self._total_items = total_items
        self._filter = EventFilter()
        self._milestone = 0
        self._is_nearly_done = False
        self._clock = clock
        self._next_progress_at = clock() + PROGRESS_S

    def copy_new_events(self, statuses: Mapping[str, NodeStatus], log: Log = lambda _: None) -> None:
        """Write the new events of all nodes, and pass a line for each to ``log``."""
        found = ((node, event) for node, status in statuses.items() for event in status.events)
        for node, event in self._filter.find_new(found):
            if event.event in ORCHESTRATOR_EVENTS:
                continue
            facts = {name: value for name, value in event.to_json().items() if name != "event" and value is not None}
            self._events.write(event.event, **{**facts, "node": node})
            log(f"{event.level.upper()} {node}: {event_title(event)}: {event.detail}")
        self._record_progress([worker for status in statuses.values() for worker in status.workers], log)

    def _record_progress(self, workers: list[WorkerStatus], log: Log) -> None:
        """Record milestones, that the job is nearly done, and at intervals how far it is."""
        work = job_work(workers)
        done, expected = work.done, work.expected_total(self._total_items)
        if done is None:
            return

        def record(level: str, event: str, detail: str) -> None:
            self._events.write(event, level=level, detail=detail, items=done, items_expected=expected)
            log(f"{level.upper()} {event}: {detail}")

        reached = min(MILESTONES, int(done * MILESTONES // expected)) if expected else 0
        if reached > self._milestone:
            self._milestone = reached
            record("info", "milestone", f"{100 * reached // MILESTONES}% done")
        if expected and NEARLY_DONE * expected <= done < expected and not self._is_nearly_done:
            self._is_nearly_done = True
            record("info", "near completion", f"{done} of {expected} {unit_word(work.unit)} done")
        at_work = [worker for worker in counting_workers(workers) if worker.up]
        if self._clock() < self._next_progress_at or not at_work:
            return
        self._next_progress_at = self._clock() + PROGRESS_S
        rate, now = job_rate(at_work, work), time.time()
        eta = job_eta([with_current_eta(worker, now) for worker in workers], self._total_items)
        texts = [f"{done} of {expected} {unit_word(work.unit)}" if expected else f"{done} {unit_word(work.unit)}"]
        texts += [percent_text(done, expected)] if expected else []
        texts += [speed_text(rate)] if rate else []
        texts += [f"ETA {duration_text(eta.seconds)}"] if eta else []
        record("progress", "progress", ", ".join(texts))
