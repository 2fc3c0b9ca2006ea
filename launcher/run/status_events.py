"""Events of the sidecars and milestones of progress, copied to ``events.jsonl``."""

from collections.abc import Callable, Iterable, Mapping

from exporter.contract.events import EventFilter, EventLog
from exporter.contract.status import NodeStatus, TaskPosition
from exporter.progress.work import job_work

# events that the orchestrator writes itself
ORCHESTRATOR_EVENTS = frozenset(("worker started", "worker restarted", "worker ended", "worker daemonised"))
MILESTONES = 10  # a milestone for each tenth of the work


class StatusEvents:
    """Copies each new event of the sidecars' statuses once."""

    def __init__(self, events: EventLog, total_items: int | None) -> None:
        self._events = events
        self._total_items = total_items
        self._filter = EventFilter()
        self._milestone = 0

    def copy_new_events(self, statuses: Mapping[str, NodeStatus], log: Callable[[str], None] = lambda _: None) -> None:
        """Write the new events of all nodes, and pass a line for each to ``log``."""
        found = ((node, event) for node, status in statuses.items() for event in status.events)
        for node, event in self._filter.find_new(found):
            if event.event in ORCHESTRATOR_EVENTS:
                continue
            facts = {name: value for name, value in event.to_json().items() if name != "event" and value is not None}
            self._events.write(event.event, **{**facts, "node": node})
            log(f"{node}: {' '.join(filter(None, (event.event, event.worker)))}: {event.detail}")
        self._record_milestone(worker for status in statuses.values() for worker in status.workers)

    def _record_milestone(self, workers: Iterable[TaskPosition]) -> None:
        work = job_work(workers)
        expected = work.expected_total(self._total_items)
        if work.done is None or not expected:
            return
        reached = min(MILESTONES, int(work.done * MILESTONES // expected))
        if reached > self._milestone:
            self._milestone = reached
            share = f"{100 * reached // MILESTONES}%"
            self._events.write(
                "milestone", level="info", detail=f"{share} done", items=work.done, items_expected=expected
            )
