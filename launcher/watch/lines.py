"""The state of a job as plain lines, for pipes and files."""

import time
from typing import TextIO

from exporter.contract.view import JobView
from exporter.gpus.analysis.node_status import GpuProblem
from exporter.progress.work import job_work, speed_text, unit_word
from launcher.report.restarts import restart_causes, restart_text
from launcher.watch.gpus import clearable_problems, gpu_problems, mean_utilization
from launcher.watch.text import (
    clock_time_text,
    end_text,
    not_ready_reasons,
    printable_line,
    problem_text,
    token_rate_text,
    worker_state,
)
from launcher.watch.waiting import is_pending, job_only_serves, job_state, stop_text, wait_text
from launcher.words import clock_text, duration_text, names_text, percent_text

LIKELY = 0.99  # a lower chance to meet the time limit is shown with the margin
STALLED_SHOWN = 4  # stalled workers named in one line


def progress_text(view: JobView) -> str:
    """``34.5% 2,070/6,000 items``; a phrase instead if there is no progress yet or units differ."""
    items, expected, unit = view.items, view.items_expected, unit_word(view.unit)
    if items is None:
        units = job_work(view.workers).units
        unseen = "no progress seen" if view.report is not None else "no progress yet"
        return f"{' and '.join(units)}, which have no common total" if len(units) > 1 else unseen
    return f"{percent_text(items, expected)} {items:,}/{expected:,} {unit}" if expected else f"{items:,} {unit}"


def rate_text(view: JobView) -> str:
    """``37.5 items/s (average 35.1)``; empty while the rate is unknown."""
    if not view.rate:
        return ""
    rate = speed_text(view.rate, unit_word(view.unit))
    average = speed_text(view.average_rate).removesuffix(rate[-len("/s") :]) if view.average_rate else ""
    return f"{rate} (average {average})" if average else rate


def eta_text(view: JobView) -> str:
    """The ETA with its interval, and the margin to the time limit."""
    eta, now, limit = view.eta, view.time, view.limit_end
    if view.report is not None:
        return f"took {duration_text(view.report.duration_s)}"
    if view.suspended:
        return "ETA unknown while suspended"
    if eta is None:
        stalled = [worker.worker for worker in view.workers if worker.up and worker.stalled]
        if not stalled and view.workers and all(worker.exit is not None for worker in view.workers):
            return "all workers have ended"
        return f"ETA unknown while stalled: {names_text(stalled, STALLED_SHOWN)}" if stalled else "ETA unknown yet"
    text = f"ETA {duration_text(eta.seconds)} ({duration_text(eta.low)} to {duration_text(eta.high)})"
    text += f", at {clock_time_text(now + eta.seconds)}"
    if limit:
        margin = limit - now - eta.seconds
        text += f", margin to the limit {'-' if margin < 0 else '+'}{duration_text(abs(margin))}"
        met = view.time_limit_met_probability
        if met is not None and met < LIKELY:
            text += f" ({100 * met:.0f}% likely in time)"
    return text


def has_eta(view: JobView) -> bool:
    return view.report is not None or (has_work(view) and view.stop is None and view.state != "UNKNOWN")


def has_work(view: JobView) -> bool:
    """Whether the job has, or will soon have, progress to show."""
    return not is_pending(view) and not job_only_serves(view)


class LineView:
    """One line per change, and a heartbeat without changes."""

    EVERY_S = 5.0
    HEARTBEAT_S = 60.0

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last_summary_at = 0.0
        self._items: object = None
        self._states: dict[int, str] = {}
        self._phase: tuple[object, ...] | None = None
        self._waiting_text = ""
        self._shown_restarts: set[tuple[object, ...]] = set()  # restarts already shown: attempt, worker, run
        self._shown_gpu_problems: dict[
            tuple[str, str], GpuProblem
        ] = {}  # open GPU problems already shown, by owner and key

    def show(self, view: JobView) -> None:
        now = time.monotonic()
        readiness = view.readiness
        phase = (job_state(view), view.pending_reason, readiness.ready if readiness is not None else None)
        waits = readiness.waiting if readiness is not None else ""
        states = {worker.rank: worker_state(worker) for worker in view.workers}
        late = not_ready_reasons(view)
        for worker in view.workers:
            if worker.exit is not None and self._states.get(worker.rank) != states[worker.rank]:
                text = end_text(worker, view.cause if worker.rank in late else None)
                self._print_line(worker.exit.time or view.time, f"{worker.worker} on {worker.node} {text}")
        self._show_restarts(view)
        self._show_gpu_problems(view)
        moved = (view.items, waits) != (
            self._items,
            self._waiting_text,
        ) and now - self._last_summary_at >= self.EVERY_S
        if phase != self._phase or moved or now - self._last_summary_at >= self.HEARTBEAT_S:
            end = view.report.end if view.report is not None else None
            self._print_line(end or view.time, self._summary(view))
            self._last_summary_at, self._items, self._waiting_text = now, view.items, waits
        self._phase, self._states = phase, states

    def _show_restarts(self, view: JobView) -> None:
        """Print each new restart with its cause and the time of the end, which may be long before the first poll."""
        found = {(view.attempt, end.worker, end.restart): end for end in restart_causes(view.workers)}
        for key, end in found.items():
            if key not in self._shown_restarts:
                self._print_line(view.time if end.time is None else end.time, restart_text(end))
        self._shown_restarts = set(found)

    def _show_gpu_problems(self, view: JobView) -> None:
        """Print each new GPU problem, and each that is over."""
        problems = {(owner, problem.key): problem for owner, found in gpu_problems(view) for problem in found}
        for (owner, key), problem in problems.items():
            if (owner, key) not in self._shown_gpu_problems:
                self._print_line(view.time, f"{owner}: {problem_text(problem)}")
        known, lasting = (
            clearable_problems(view),
            {(owner, problem.resolved_text) for (owner, _), problem in problems.items()},
        )
        for (owner, key), problem in self._shown_gpu_problems.items():
            if (owner, key) in problems:
                continue
            if owner not in known:
                problems[owner, key] = problem
            elif (owner, problem.resolved_text) not in lasting:
                self._print_line(view.time, f"{owner}: {problem.resolved_text}")
        self._shown_gpu_problems = problems

    def _print_line(self, moment: float, text: str) -> None:
        print(f"{clock_text(moment)} {printable_line(text)}", file=self._out, flush=True)

    def _summary(self, view: JobView) -> str:
        up = sum(worker.up for worker in view.workers)
        workers = f"{len(view.workers)} planned" if is_pending(view) else f"{up}/{len(view.workers)} up"
        parts = [f"job {view.job_id} {job_state(view)[0]}", f"workers {workers}", wait_text(view)]
        if has_work(view):
            parts += [progress_text(view), rate_text(view)]
        parts.append(token_rate_text(view.output_tokens_per_second))
        parts.append(eta_text(view) if has_eta(view) else stop_text(view))
        busy = mean_utilization(view)
        parts.append("" if busy is None else f"GPUs {100 * busy:.0f}% busy")
        if len(view.workers) <= 8:
            parts.append(
                " ".join(f"{worker.worker} {worker.items}" for worker in view.workers if worker.items is not None)
            )
        return " | ".join(word for word in parts if word)
