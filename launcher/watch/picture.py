"""The picture of a job on a terminal."""

import sys
from collections.abc import Iterator
from typing import Literal, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from exporter.contract.events import event_title
from exporter.contract.status import DamagedFile, FileSystem
from exporter.contract.view import JobView, MutedAlert, OutputView
from launcher.report.workers import values_text
from launcher.watch.ending import decisive_stop
from launcher.watch.gpus import gpu_problems
from launcher.watch.lines import LIKELY, STALLED_SHOWN, eta_text, has_eta, has_work, progress_text, rate_text
from launcher.watch.text import clock_time_text, printable_line, problem_text, size_text, token_rate_text
from launcher.watch.waiting import STOPS_JOB, job_state, stop_text, wait_text
from launcher.watch.worker_table import CRITICAL, WARNING, problem_counts, worker_table
from launcher.words import clock_text, count_text, duration_text, names_text

LEAST_BAR_CELLS, MOST_BAR_CELLS = 8, 60
LEAST_WORKERS = 8  # shown in a window too small for the events as well
MOST_EVENTS = 6
SILENT_SHOWN = 8  # nodes named in one line
LACKING_SHOWN = 3  # failed launch checks in one line, each of a node and with the names of its workers
GPU_PROBLEMS_SHOWN = 8  # nodes and workers with GPU problems shown
STYLE_OF_LEVEL = {"critical": CRITICAL, "warning": WARNING, "progress": "cyan"}  # of events


class Detail(NamedTuple):
    """How much a picture shows."""

    workers: int = sys.maxsize
    events: int = MOST_EVENTS
    is_short: bool = False  # whether to leave out what is not urgent, and to show problems in one line each


DETAILS = (*(Detail(events=count) for count in (MOST_EVENTS, 3, 1, 0)), Detail(events=0, is_short=True))  # by height


class Row(NamedTuple):
    """One fact about the job."""

    text: str
    style: str = ""
    is_urgent: bool = True


def fit_picture(view: JobView, console: Console, *, ascii_only: bool = False, on_interrupt: str = "") -> RenderableType:
    """The picture with as many workers as the window allows. A small one loses events first, then other facts."""

    def picture(detail: Detail) -> RenderableType:
        return render_picture(view, detail, ascii_only=ascii_only, on_interrupt=on_interrupt)

    for detail in DETAILS:
        spare = console.height - len(console.render_lines(picture(detail._replace(workers=0)), pad=False))
        if spare >= min(LEAST_WORKERS, len(view.workers)):
            break
    return picture(detail._replace(workers=max(1, spare)))


def render_picture(
    view: JobView, detail: Detail = DETAILS[0], *, ascii_only: bool = False, on_interrupt: str = ""
) -> RenderableType:
    """The picture of a job; ``on_interrupt`` is what Ctrl-C does to the command that shows it."""
    parts: list[RenderableType] = [_head(view), *([Text(_start_text(view))] if view.start else [])]
    if stops := stop_text(view, interrupt_kills=on_interrupt == STOPS_JOB):
        parts.append(Text(stops, style=WARNING))
    if waits := "  ".join(filter(None, (wait_text(view), token_rate_text(view.output_tokens_per_second)))):
        parts.append(Text(printable_line(waits)))
    if has_work(view):
        parts.append(_Bar(view, ascii_only))
    overflow: Literal["crop", "ellipsis"] = "crop" if ascii_only else "ellipsis"
    parts += [
        Text(printable_line(row.text), style=row.style, no_wrap=detail.is_short, overflow=overflow)
        for row in (*_facts(view), *sorted(_conditions(view), key=lambda row: row.style != CRITICAL))
        if row.is_urgent or not detail.is_short
    ]
    gap = [] if detail.is_short else [Text("")]
    parts += [*gap, worker_table(view, detail.workers, ascii_only)]
    if view.events and detail.events:
        parts += [*gap, *_events(view, detail.events, overflow)]
    if view.report is None:
        note = f"; Ctrl-C {on_interrupt}" if on_interrupt and view.stop is None else ""
        footer = f"updated {clock_text(view.time)}{note}"
        parts += [*gap, Text(footer, style="dim", no_wrap=True, overflow=overflow)]
    return Group(*parts)


def _head(view: JobView) -> Text:
    state, style = job_state(view)
    head = Text()
    head.append(f"job {printable_line(view.job_id)} {printable_line(view.job_name)}", style="bold")
    head.append(f"  {printable_line(view.user)}  ")
    head.append(printable_line(state), style=style)
    counts = [] if view.report or view.stop else problem_counts(view.workers)
    for number, (word, count, problem_style) in enumerate(entry for entry in counts if entry[0] != state):
        head.append(", " if number else ": ").append(f"{count} {word}", style=problem_style)
    return head


def _start_text(view: JobView) -> str:
    elapsed = duration_text((view.end or view.time) - (view.start or 0.0))
    return f"started {clock_text(view.start)}" + ("" if view.report is not None else f" ({elapsed} ago)")


class _Bar:
    """The progress of the job: a bar as wide as the window allows, and numbers."""

    def __init__(self, view: JobView, ascii_only: bool) -> None:
        self._text = printable_line("  ".join(filter(None, (progress_text(view), rate_text(view)))))
        self._full, self._empty = ("#", "-") if ascii_only else ("█", "░")
        items, expected = view.items, view.items_expected
        # without a total an empty bar would look like no progress
        self._share = None if items is not None and not expected else min(1.0, (items or 0) / (expected or 1))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = min(MOST_BAR_CELLS, options.max_width - cell_len(self._text) - len("[]  "))
        if self._share is None or cells < LEAST_BAR_CELLS:
            yield Text(self._text)
            return
        full = int(self._share * cells)
        yield Text(f"[{self._full * full}{self._empty * (cells - full)}]  {self._text}")


def _facts(view: JobView) -> Iterator[Row]:
    """Facts about work, files and values."""
    if has_eta(view):
        late = view.eta is not None and (view.time_limit_met_probability or 1.0) < LIKELY
        yield Row(eta_text(view), WARNING if late else "")
    outputs = [_output_text(group) for group in view.outputs if group.files]
    spaces = sorted({_space_text(space) for space in view.filesystems if space.group == "output"} - {""})
    for text in (", ".join([*outputs, *spaces]), _checkpoint_text(view), values_text(view.workers)):
        if text:
            yield Row(text, is_urgent=False)
    if view.muted:
        yield Row(f"alerts muted: {', '.join(map(_muted_text, view.muted))}", is_urgent=False)


def _muted_text(muted: MutedAlert) -> str:
    end = "" if muted.until is None else f" until {clock_text(muted.until)}"
    return f"{muted.alert or 'all'}{end} by {muted.by or 'somebody'}"


def _output_text(group: OutputView) -> str:
    return (
        f"{group.group} {count_text(group.files, 'file')} {size_text(group.bytes)}"
        + (" so far (still counting)" if group.counting else "")
        + (f" {group.records} records" if group.records is not None else "")
        + (f" (+{size_text(group.growth_bytes_per_second)}/s)" if group.growth_bytes_per_second else "")
    )


def _space_text(space: FileSystem) -> str:
    if space.available_bytes is None:
        return ""
    if space.quota and space.quota.available_bytes < space.available_bytes:
        left, limit = space.quota.available_bytes, space.quota.limit_bytes
        return f"disk {size_text(left)} left of the {space.quota.kind} quota ({100 * left / limit:.0f}%)"
    share = f" ({100 * space.available_bytes / space.size_bytes:.0f}%)" if space.size_bytes else ""
    return f"disk {size_text(space.available_bytes)} free{share}"


def _checkpoint_text(view: JobView) -> str:
    """Number of checkpoints, age of the last one, and when the next one is due."""
    found, now = view.checkpoints, view.time
    if found is None:
        return ""
    last = found.last_complete
    if last is None:
        return "first checkpoint is being written" if found.writing else ""
    text = f"{count_text(found.count, 'checkpoint')}, last {last.name} {_age_text(now, last.time or now)} ago"
    if found.interval_s:
        text += f", every {duration_text(found.interval_s)}"
    due = found.next_expected
    if view.phase == "finished" or view.suspended:
        return text
    if found.writing:
        return f"{text}, the next one is being written"
    if due is None:
        return text
    late = now - due
    return f"{text}, " + (f"next in {duration_text(-late)}" if late < 0 else f"late by {duration_text(late)}")


def _age_text(now: float, moment: float) -> str:
    return duration_text(max(0.0, now - moment))


def _conditions(view: JobView) -> Iterator[Row]:
    """What needs attention, with the severity of the alert about it. The table of workers shows theirs."""
    if cause := view.cause:
        # with several workers not ready, the other evidence is their last log lines
        evidence = "; ".join(cause.evidence[:1] if cause.missing else cause.evidence)
        yield Row(f"cause: {cause.worker} on {cause.node} ended by {cause.reason}: {evidence}", CRITICAL)
    if view.report and (stop := decisive_stop(view.report)):
        yield Row(f"stopped: {stop.cause}", WARNING)
    if lacking := view.launch.lacking:
        more = len(lacking) - LACKING_SHOWN
        shown = [*lacking[:LACKING_SHOWN], *([f"and {more} more"] if more > 0 else [])]
        yield Row(f"! launch not verified: {'; '.join(shown)}", CRITICAL)
    yield from _file_conditions(view)
    problems = gpu_problems(view)
    for owner, found in problems[:GPU_PROBLEMS_SHOWN]:
        yield Row(f"! {owner}: {'; '.join(map(problem_text, found))}", WARNING)
    if len(problems) > GPU_PROBLEMS_SHOWN:
        yield Row(f"! and {len(problems) - GPU_PROBLEMS_SHOWN} more with GPUs", WARNING)
    if view.first_to_stop and sum(worker.up and bool(worker.stalled) for worker in view.workers) > 1:
        yield Row(f"! of the workers without progress, {view.first_to_stop} stopped first", WARNING)
    silent = {node.node: node.error for node in view.nodes if node.error}
    if silent and not view.suspended:
        why = next((f" ({error})" for error in silent.values() if "no answer" not in error), "")
        nodes = names_text([*silent], SILENT_SHOWN)
        yield Row(f"! no answer from the sidecar on {nodes}{why}; showing its last status", WARNING)
    if since := view.orchestrator_silent_since:
        yield Row(f"! the orchestrator has not responded since {clock_time_text(since)}; the workers continue", WARNING)


def _file_conditions(view: JobView) -> Iterator[Row]:
    names = {worker.rank: worker.worker for worker in view.workers}
    for space in view.filesystems:
        if space.responding is False:
            yield Row(f"! {space.mount or 'the file system'} of {space.group} does not answer", CRITICAL)
        elif space.low:
            yield Row(f"! the disk of {space.group} is almost full: {size_text(space.available_bytes)} free", CRITICAL)
        elif space.full_at and view.eta and space.full_at < view.time + view.eta.seconds:
            full, at = f"out of {space.lacks}" if space.lacks else "full", clock_time_text(space.full_at)
            yield Row(f"! the disk of {space.group} will be {full} at {at}, before the job ends", WARNING)
    for group in view.outputs:
        stalled = [names.get(rank, f"rank {rank}") for rank in sorted(group.stalled_ranks)]
        if stalled:
            yield Row(f"! {group.group}: no longer written by {names_text(stalled, STALLED_SHOWN)}", WARNING)
        elif group.stalled:
            yield Row(f"! {group.group}: no longer growing", WARNING)
        if group.files_invalid:
            bad = group.invalid[0] if group.invalid else DamagedFile("", None, "")
            yield Row(f"! {group.group}: {group.files_invalid} damaged: {bad.file}: {bad.reason}", CRITICAL)
    last = view.checkpoints.last if view.checkpoints is not None else None
    if last is not None and last.state in ("invalid", "incomplete"):
        yield Row(f"! checkpoint {last.name} is {last.state}: {last.reason or ''}".rstrip(": "), CRITICAL)


def _events(view: JobView, most: int, overflow: Literal["crop", "ellipsis"]) -> Iterator[Text]:
    """The last events, with the words of the levels."""
    for event in view.events[-most:]:
        line = f"{clock_time_text(event.time)} {event.level.upper():8} {event_title(event)}: {event.detail}"
        style = STYLE_OF_LEVEL.get(event.level, "")
        yield Text(printable_line(line), style=style, no_wrap=True, overflow=overflow)
