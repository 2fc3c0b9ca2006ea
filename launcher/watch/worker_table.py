"""The table of workers in the terminal view: those with problems first, healthy ones that do not fit in one line."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from exporter.contract.view import JobView, WorkerView
from exporter.progress.work import position_units, speed_text, unit_word
from exporter.workers.exit_reason import CONSEQUENCES
from launcher.report.state import UNFINISHED
from launcher.watch.gpus import gpu_cells, gpus_by_node, has_gpus, is_done
from launcher.watch.table import FittedTable
from launcher.watch.text import not_ready_reasons, printable_line, size_text, throughput_text, worker_state
from launcher.watch.waiting import is_pending
from launcher.words import duration_text

LEAST_LAG = 0.2  # a worker with at least this lag has a problem
LEAST_SLOWDOWN = 1.25  # the alert on slow jobs has the same value
CRITICAL, WARNING = "red", "yellow"  # styles
LEAST_NODE_WIDTH = 8  # minimum width of the node column, which shrinks before other columns are dropped
GPU_COLUMNS = ("GPU", "GPU%", "GPU GiB")
_COLUMNS = ("WORKER", "NODE", "GPU", "STATE", "GPU%", "GPU GiB", "ITEMS", "RATE/s", "ETA", "OUTPUT", "RSS", "LAST")
_LEFT_ALIGNED = ("WORKER", "NODE", "GPU", "STATE")
# Columns dropped in a narrow window, in this order; worker, state and position stay.
_DROP_ORDER = ("OUTPUT", "RSS", "LAST", "RATE/s", "ETA", "NODE", "GPU GiB", "GPU%", "GPU")


def worker_table(view: JobView, most: int, ascii_only: bool) -> RenderableType:
    """The workers in the order of the plan, or ``most`` of them and one line for the others."""
    ordered = sorted(view.workers, key=lambda worker: (_KINDS.index(_kind(worker)), worker.rank))
    shown, folded = (view.workers, []) if len(ordered) <= most else (ordered[:most], ordered[most:])
    mixed = len(position_units(view.workers)) > 1
    gpus, hidden = gpus_by_node(view), set(() if has_gpus(view) else GPU_COLUMNS)
    if not gpus:  # without a sidecar, only the plan is known
        hidden |= {"GPU%", "GPU GiB"}
    if not any(worker.output for worker in view.workers):
        hidden.add("OUTPUT")
    rows, late = [], not_ready_reasons(view)
    for worker in shown:
        failed = late.get(worker.rank) if worker.exit else None
        if view.state not in UNFINISHED and worker.state == "not_found":
            worker = worker.replace(state="not_started")
        row = _worker_row(worker, view, shows_unit=mixed, failure_reason=failed)
        cells = map(printable_line, gpu_cells(worker, gpus.get(worker.node)))
        rows.append(row | dict(zip(GPU_COLUMNS, cells, strict=True)))
    table = FittedTable(
        [column for column in _COLUMNS if column not in hidden],
        rows,
        headings={"ITEMS": "POSITION" if mixed else printable_line(unit_word(view.unit)).upper()},
        left_aligned=_LEFT_ALIGNED,
        drop_order=_DROP_ORDER,
        least_widths={"NODE": LEAST_NODE_WIDTH},
        overflow="crop" if ascii_only else "ellipsis",
    )
    if not folded:
        return table
    text = Text(_folded_text(folded, is_planned=is_pending(view), mixed=mixed), no_wrap=True, overflow="crop")
    return Group(table, text)


def has_failed(worker: WorkerView) -> bool:
    """Whether a worker is gone without completing, and not as a consequence of the end of the job."""
    if worker.up or worker.state == "not_started" or (worker.exit is None and worker.start is None):
        return False
    return worker.exit is None or worker.exit.reason not in CONSEQUENCES


def _is_slow(worker: WorkerView) -> bool:
    return worker.up and (worker.slowdown or 0.0) >= LEAST_SLOWDOWN


def _is_behind(worker: WorkerView) -> bool:
    return worker.up and (worker.lag or 0.0) >= LEAST_LAG


def _is_idle(worker: WorkerView) -> bool:
    return worker.up and (bool(worker.stalled) or worker.state == "stopped")


class _Kind(NamedTuple):
    """A kind of workers; those of the first kinds are shown first, and a worker is of the first that applies."""

    applies: Callable[[WorkerView], bool]
    word: str = ""  # for the head of the picture; empty if it is no problem
    style: str = ""


_KINDS = (
    _Kind(has_failed, "failed", CRITICAL),
    _Kind(_is_idle, "stalled", CRITICAL),
    _Kind(_is_behind, "behind", WARNING),
    _Kind(
        lambda worker: worker.up and bool(worker.gpu_misplaced or worker.gpu_conditions), "with GPU problems", WARNING
    ),
    _Kind(_is_slow, "slow", WARNING),
    _Kind(lambda worker: not worker.up and not is_done(worker) and worker.state != "waiting"),
    _Kind(lambda worker: worker.up),
    _Kind(lambda _: True),
)


def _kind(worker: WorkerView) -> _Kind:
    return next(kind for kind in _KINDS if kind.applies(worker))


def problem_counts(workers: Iterable[WorkerView]) -> list[tuple[str, int, str]]:
    """Problems of workers with their numbers and styles, the worst first."""
    counts = Counter(map(_kind, workers))
    return [(kind.word, counts[kind], kind.style) for kind in _KINDS if kind.word and counts[kind]]


def _folded_text(workers: Sequence[WorkerView], *, is_planned: bool, mixed: bool) -> str:
    """``33 more running, 4.8 to 5.0/s``, with the number of each state."""
    states = Counter("planned" if is_planned else worker_state(worker).partition(" (run ")[0] for worker in workers)
    counts = ", ".join(f"{count} {state}" for state, count in states.items()).replace(" ", " more ", 1)
    rates = [worker.rate for worker in workers if worker.up and worker.rate]
    if not rates or mixed:
        return printable_line(counts)
    low, high = speed_text(min(rates)), speed_text(max(rates))
    return printable_line(f"{counts}, {low if low == high else f'{low.removesuffix(high[-2:])} to {high}'}")


def _state_cell(worker: WorkerView, state: str, now: float, *, is_failed: bool) -> Text:
    """The state, marked and coloured if the worker has a problem."""
    kind = _KINDS[0] if is_failed else _kind(worker)
    if _is_idle(worker) and worker.last_progress:
        state += f" {duration_text(max(0.0, now - worker.last_progress))}"
    elif _is_behind(worker):
        state += f", {100 * (worker.lag or 0.0):.0f}% behind"
    elif _is_slow(worker):
        state += f", {worker.slowdown:.1f}x slower"
    return Text(f"! {state}", style=kind.style) if kind.word else Text(state)


def _output_cell(worker: WorkerView) -> Text:
    """Size of the output files of a worker, marked if it no longer writes them."""
    if worker.output is None:
        return Text("-")
    stalled = worker.up and worker.output.stalled
    return Text(f"{'! ' if stalled else ''}{size_text(worker.output.bytes)}", style=WARNING if stalled else "")


def _worker_row(
    worker: WorkerView, view: JobView, *, shows_unit: bool, failure_reason: str | None
) -> dict[str, str | Text]:
    """The cells of a worker by column.

    ``shows_unit`` adds the unit to the position. ``failure_reason`` is set if the job ended because of this worker; it
    replaces the worker's own exit reason.
    """
    state = "planned" if is_pending(view) else printable_line(failure_reason or worker_state(worker))
    items = "-" if worker.items is None else str(worker.items)
    if worker.items is not None and worker.items_expected:
        items += f"/{worker.items_expected}"
    if shows_unit and worker.items is not None:
        items += f" {printable_line(unit_word(worker.unit))}"
    last, goes_on = worker.last_progress, view.state == "RUNNING" and view.stop is None
    return {
        "WORKER": printable_line(worker.worker),
        "NODE": printable_line(worker.node),
        "STATE": _state_cell(worker, state, view.time, is_failed=failure_reason is not None),
        "ITEMS": items,
        "RATE/s": throughput_text(worker),
        "ETA": duration_text(worker.eta.seconds) if worker.up and worker.eta and goes_on else "-",
        "OUTPUT": _output_cell(worker),
        "RSS": size_text(worker.rss_bytes) if worker.up else "-",
        "LAST": f"{duration_text(max(0.0, view.time - last))} ago" if last and worker.up else "-",
    }
