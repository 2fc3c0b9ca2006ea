"""Ends of runs that were followed by a restart, for the report and its text."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from exporter.workers.exit_reason import PEER_WINDOW_S, first_failure
from launcher.words import end_line, plain_text

RESTARTS_SHOWN = 8  # ends shown in the text; the JSON has all


def restart_causes(workers: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """End of each run that was followed by a restart, earliest first.

    If several tasks restart together, the first failure represents the run.
    """
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for worker in workers:
        who = {key: worker[key] for key in ("worker", "rank", "node")}
        for end in worker["exits"]:
            if end["restart"] < worker["restarts"]:
                runs.setdefault((worker["worker"], end["restart"]), []).append(who | _end_entry(end))
    return sorted(map(_first_end, runs.values()), key=_end_time)


def _end_entry(end: Mapping[str, Any]) -> dict[str, Any]:
    facts = {key: end[key] for key in ("reason", "code", "signal", "time", "restart", "evidence")}
    return facts | {"run": end["restart"] + 1}


def _first_end(ends: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """First failure among the ends of one run, else the first end."""
    index = first_failure([(_end_time(end), end["reason"]) for end in ends])
    return min(ends, key=_end_time) if index is None else ends[index]


def _end_time(end: Mapping[str, Any]) -> float:
    return float("inf") if end["time"] is None else float(end["time"])


def add_earlier_failures(cause: dict[str, Any], restarted: Iterable[Mapping[str, Any]]) -> None:
    """Add recent failures of other, restarted workers to the evidence of a failure."""
    if cause["time"] is None:
        return
    before = [
        f"{end['worker']} (run {end['run']}) had ended by {end['reason']} {cause['time'] - end['time']:.1f} s before"
        for end in restarted
        if end["worker"] != cause["worker"] and 0.0 <= cause["time"] - _end_time(end) <= PEER_WINDOW_S
    ]
    cause["evidence"] = [*cause["evidence"], *before]


def restart_text(end: Mapping[str, Any]) -> str:
    """Describe a restart: ``decode_w0 on cn01 restarted (run 2) after killed_unknown (killed by SIGKILL)``."""
    evidence = "; ".join(end["evidence"])
    return f"{end['worker']} on {end['node']} restarted (run {end['run'] + 1}) after {end['reason']} ({evidence})"


def restart_lines(restarted: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Markdown lines, one for each end."""
    for end in restarted[:RESTARTS_SHOWN]:
        yield f"- restarted: {plain_text(end_line(end))}"
    if len(restarted) > RESTARTS_SHOWN:
        yield f"- restarted: {len(restarted) - RESTARTS_SHOWN} more, in report.json"
