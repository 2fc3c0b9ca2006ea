"""The terminal view of a job: a live picture, one picture, or plain lines when piped."""

import time

from rich.console import Console, Group, RenderableType
from rich.text import Text

from exporter.contract.status import DamagedFile
from exporter.contract.view import JobView
from exporter.gpus.analysis.node_status import GpuProblem
from exporter.progress.work import job_work, unit_word
from launcher.report.restarts import restart_causes, restart_text
from launcher.watch.gpus import (
    clearable_problems,
    gpu_problems,
    mean_utilization,
)
from launcher.watch.text import (
    clock_time_text,
    end_text,
    not_ready_reasons,
    printable_line,
    size_text,
    token_rate_text,
)
from launcher.watch.waiting import is_pending, job_only_serves, job_state, stop_text, wait_text
from launcher.watch.worker_table import LEAST_LAG, worker_state, worker_table
from launcher.words import duration_text, names_text

BAR_CELLS = 28
MOST_WORKERS = 32
LEAST_WORKERS = 8  # shown in a window too small for the events as well
MOST_EVENTS = 6
VALUES_SHOWN = ("loss", "eval_loss", "accuracy", "learning_rate", "lr", "grad_norm")  # of a training, in this order
LIKELY = 0.99  # a lower chance to meet the time limit is shown with the margin
STALLED_SHOWN = 4  # stalled workers named in one line
GPU_PROBLEMS_SHOWN = 8  # nodes and workers with GPU problems shown


def progress_text(view: JobView) -> str:
    """``34.5% 2070/6000 items``; a phrase instead if there is no progress yet or units differ."""
    items, expected, unit = view.items, view.items_expected, unit_word(view.unit)
    if items is None:
        units = job_work(view.workers).units
        return f"{' and '.join(units)}, which have no common total" if len(units) > 1 else "no progress yet"
    return f"{100 * items / expected:.1f}% {items}/{expected} {unit}" if expected else f"{items} {unit}"


def _rate_text(view: JobView) -> str:
    """``37.5 items/s``; empty while the rate is unknown."""
    return f"{view.rate:.1f} {unit_word(view.unit)}/s" if view.rate else ""


def eta_text(view: JobView) -> str:
    """The ETA with its interval, and the margin to the time limit."""
    eta, now, limit = view.eta, view.time, view.limit_end
    if view.report is not None:
        return f"took {duration_text(view.report.duration_s)}"
    if eta is None:
        stalled = [worker.worker for worker in view.workers if worker.up and worker.stalled]
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


def fit_picture(
    view: JobView, console: Console, *, ascii_only: bool = False, interrupt_kills: bool = False
) -> RenderableType:
    """The picture with as many workers as the height of the window allows; a small one loses old events first."""

    def picture(workers: int, events: int = MOST_EVENTS) -> RenderableType:
        return render_picture(
            view, ascii_only=ascii_only, most_workers=workers, most_events=events, interrupt_kills=interrupt_kills
        )

    spare = console.height - len(console.render_lines(picture(0), pad=False))
    events = MOST_EVENTS if spare >= LEAST_WORKERS else max(1, MOST_EVENTS - LEAST_WORKERS + spare)
    return picture(max(LEAST_WORKERS, spare), events)


def render_picture(
    view: JobView,
    *,
    ascii_only: bool = False,
    most_workers: int = MOST_WORKERS,
    most_events: int = MOST_EVENTS,
    interrupt_kills: bool = False,
) -> RenderableType:
    parts: list[RenderableType] = [_head(view)]
    if stops := stop_text(view, interrupt_kills=interrupt_kills):
        parts.append(Text(stops, style="yellow"))
    if waits := "  ".join(filter(None, (wait_text(view), token_rate_text(view.output_tokens_per_second)))):
        parts.append(Text(printable_line(waits)))
    if _has_work(view):
        parts.append(_bar(view, ascii_only))
    if facts := _facts(view):
        parts.append(Text(facts))
    parts += [Text(""), worker_table(view, most_workers, ascii_only)]
    if view.events:
        parts += [Text(""), _events(view, most_events, ascii_only)]
    if view.launch.lacking:
        faults = "; ".join(printable_line(line) for line in view.launch.lacking)
        parts += [Text(f"! launch not verified: {faults}", style="red")]
    return Group(*parts)


def _has_eta(view: JobView) -> bool:
    return view.report is not None or (_has_work(view) and view.stop is None)


def _has_work(view: JobView) -> bool:
    """Whether the job has, or will soon have, progress to show."""
    return not is_pending(view) and not job_only_serves(view)


def _head(view: JobView) -> Text:
    state, style = job_state(view)
    head = Text()
    head.append(f"job {printable_line(view.job_id)} {printable_line(view.job_name)}", style="bold")
    head.append(f"  {printable_line(view.user)}  ")
    head.append(printable_line(state), style=style)
    if view.start:
        end = view.end or view.time
        head.append(f"  started {clock_time_text(view.start)}, {duration_text(end - view.start)}")
    return head


def _bar(view: JobView, ascii_only: bool) -> Text:
    full, empty = ("#", "-") if ascii_only else ("█", "░")
    items, expected = view.items, view.items_expected
    text = "  ".join(filter(None, (progress_text(view), _rate_text(view))))
    if items is not None and not expected:
        return Text(printable_line(text))  # an empty bar would look like no progress
    cells = int(min(1.0, (items or 0) / expected) * BAR_CELLS) if expected else 0
    return Text(f"[{full * cells}{empty * (BAR_CELLS - cells)}]  {printable_line(text)}")


def _checkpoint_text(view: JobView) -> str:
    """Age of the last checkpoint, and when the next one is due."""
    found, now = view.checkpoints, view.time
    if found is None:
        return ""
    last = found.last_complete
    if last is None:
        return "first checkpoint is being written" if found.writing else ""
    text = f"checkpoint {last.name} {duration_text(max(0.0, now - (last.time or now)))} ago"
    if found.interval_s:
        text += f", every {duration_text(found.interval_s)}"
    due = found.next_expected
    if view.phase == "finished":
        return text
    if found.writing:
        return f"{text}, the next one is being written"
    if due is None:
        return text
    late = now - due
    return f"{text}, " + (f"next in {duration_text(-late)}" if late < 0 else f"late by {duration_text(late)}")


def _values_text(view: JobView) -> str:
    """``worker_w0: loss 1.826, grad_norm 0.44``: the last values of the first worker that logs any of them."""
    for worker in view.workers:
        known = [f"{name} {worker.values[name]:.4g}" for name in VALUES_SHOWN if name in worker.values]
        if known:
            return f"{worker.worker}: {', '.join(known)}"
    return ""


def _file_problem_lines(view: JobView) -> list[str]:
    """Lines for files that stopped growing, are damaged, or are missing from a checkpoint."""
    names = {worker.rank: worker.worker for worker in view.workers}
    lines = []
    for group in view.outputs:
        stalled = [names.get(rank, f"rank {rank}") for rank in sorted(group.stalled_ranks)]
        if stalled or group.stalled:
            writers = f"{', '.join(stalled[:STALLED_SHOWN])}{' ...' if len(stalled) > STALLED_SHOWN else ''}"
            lines.append(f"! {group.group}: " + (f"no longer written by {writers}" if stalled else "no longer growing"))
        if group.files_invalid:
            bad = group.invalid[0] if group.invalid else DamagedFile("", None, "")
            lines.append(f"! {group.group}: {group.files_invalid} damaged: {bad.file}: {bad.reason}")
    last = view.checkpoints.last if view.checkpoints is not None else None
    if last is not None and last.state in ("invalid", "incomplete"):
        lines.append(f"! checkpoint {last.name} is {last.state}: {last.reason or ''}".rstrip(": "))
    return lines


def _gpu_problem_lines(view: JobView) -> list[str]:
    """Lines for the GPU problems of nodes and workers, at most `GPU_PROBLEMS_SHOWN`."""
    found = gpu_problems(view)
    lines = [f"! {who}: {'; '.join(map(_problem_text, what))}" for who, what in found[:GPU_PROBLEMS_SHOWN]]
    return (
        [*lines, f"! and {len(found) - GPU_PROBLEMS_SHOWN} more with GPUs"]
        if len(found) > GPU_PROBLEMS_SHOWN
        else lines
    )


def _problem_text(problem: GpuProblem) -> str:
    return problem.text + (f" at {clock_time_text(problem.time)}" if problem.time is not None else "")


def _facts(view: JobView) -> str:
    """Lines of facts below the progress bar, with control characters of names and values escaped."""
    lines = [eta_text(view)] if _has_eta(view) else []
    outputs = [
        f"{group.group} {group.files} {'file' if group.files == 1 else 'files'} {size_text(group.bytes)}"
        + (" so far (still counting)" if group.counting else "")
        + (f" {group.records} records" if group.records is not None else "")
        + (f" (+{size_text(group.growth_bytes_per_second)}/s)" if group.growth_bytes_per_second else "")
        for group in view.outputs
        if group.files
    ]
    spaces = sorted(
        {
            f"disk {size_text(space.available_bytes)} free"
            for space in view.filesystems
            if space.group == "output" and space.available_bytes is not None
        }
        | {
            f"{space.mount or 'the file system'} of {space.group} does not answer"
            for space in view.filesystems
            if space.responding is False
        }
    )
    if outputs or spaces:
        lines.append(", ".join([*outputs, *spaces]))
    if checkpoint := _checkpoint_text(view):
        lines.append(checkpoint)
    if values := _values_text(view):
        lines.append(values)
    lines += [*_file_problem_lines(view), *_gpu_problem_lines(view)]
    lagging = max(view.workers, key=lambda worker: worker.lag or 0.0, default=None)
    if lagging is not None and (lagging.lag or 0.0) >= LEAST_LAG:
        lines.append(f"{lagging.worker} on {lagging.node} is {100 * (lagging.lag or 0.0):.0f}% behind the others")
    if view.first_to_stop:
        lines.append(f"of the workers without progress, {view.first_to_stop} stopped first")
    silent = {node.node: node.error for node in view.nodes if node.error}
    if silent:
        why = next((f" ({error})" for error in silent.values() if "no answer" not in error), "")
        lines.append(f"no answer from the sidecar on {', '.join([*silent][:8])}{why}; showing its last status")
    if since := view.orchestrator_silent_since:
        lines.append(f"the orchestrator has not responded since {clock_time_text(since)}; the workers go on")
    if view.cause:
        cause = view.cause
        # with several workers not ready, the other evidence is their last log lines
        shown_evidence = cause.evidence[:1] if cause.missing else cause.evidence
        evidence = "; ".join(shown_evidence)
        lines.append(f"cause: {cause.worker} on {cause.node} ended by {cause.reason}: {evidence}")
    return "\n".join(map(printable_line, lines))


def _events(view: JobView, most: int, ascii_only: bool) -> Text:
    lines = []
    for event in view.events[-most:]:
        mark = "!" if event.level == "critical" else " "
        owner = " ".join(filter(None, (event.event, event.worker)))
        lines.append(printable_line(f"{clock_time_text(event.time)} {mark} {owner}: {event.detail}"))
    return Text("\n".join(lines), no_wrap=True, overflow="crop" if ascii_only else "ellipsis")


class LineView:
    """Plain lines for pipes and files: one per change, and a heartbeat without changes."""

    EVERY_S = 5.0
    HEARTBEAT_S = 60.0

    def __init__(self, console: Console) -> None:
        self._console = console
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
            self._print_line(view.time, self._summary(view))
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
                self._print_line(view.time, f"{owner}: {_problem_text(problem)}")
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
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
        self._console.print(f"{stamp} {printable_line(text)}", markup=False, highlight=False, soft_wrap=True)

    def _summary(self, view: JobView) -> str:
        up = sum(worker.up for worker in view.workers)
        workers = f"{len(view.workers)} planned" if is_pending(view) else f"{up}/{len(view.workers)} up"
        parts = [f"job {view.job_id} {job_state(view)[0]}", f"workers {workers}", wait_text(view)]
        if _has_work(view):
            parts += [progress_text(view), _rate_text(view)]
        parts.append(token_rate_text(view.output_tokens_per_second))
        parts.append(eta_text(view) if _has_eta(view) else stop_text(view))
        busy = mean_utilization(view)
        parts.append("" if busy is None else f"GPUs {100 * busy:.0f}% busy")
        if len(view.workers) <= 8:
            parts.append(
                " ".join(f"{worker.worker} {worker.items}" for worker in view.workers if worker.items is not None)
            )
        return " | ".join(word for word in parts if word)
