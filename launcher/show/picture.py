"""The plan as text: a picture of nodes and GPUs in 80 columns, commands, files. Pure."""

import shlex
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import Task
from launcher.plan.container import container_mounts
from launcher.plan.placeholders import task_argv
from launcher.plan.plan import WORKERS, Plan, RunFacts, TaskPlan
from launcher.rundir.files import file_names
from launcher.steps.hostlist import fold_hostlist

WIDTH = 80
IDLE, SAME = ".", ":"
MOST_EQUAL_ROWS = 4  # of more rows of one shape, only the first is drawn
MOST_HOST_WIDTH = 24


@dataclass(frozen=True)
class _NodeRow:
    """One node, or several identical ones."""

    hosts: tuple[str, ...]
    cells: tuple[str, ...]  # worker label of each GPU
    names: tuple[str, ...]  # workers and services in rank order
    shape: tuple[tuple[str, int], ...]  # role of each name, and name index of each GPU; rows of equal shape are folded


def draw_plan(plan: Plan, script: str, facts: RunFacts) -> str:
    """The whole plan, as `gpujob plan` shows it."""
    parts = [
        "\n".join(draw_nodes(plan, facts.hosts)),
        "\n".join(_command_lines(plan, facts)),
        f"run directory: {facts.run_dir}\n" + _wrap_words("files: ", file_names(plan)),
        script,
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def draw_nodes(plan: Plan, hosts: Sequence[str]) -> Iterator[str]:
    """Lines of nodes with the worker on each GPU; equal nodes and rows of one shape are folded."""
    shown: list[tuple[str, Sequence[str], Sequence[str]]] = []
    for _, same in groupby(_rows(plan, hosts), key=lambda row: row.shape):
        group = list(same)
        head = group[: len(group) if len(group) <= MOST_EQUAL_ROWS else 1]
        shown.extend((fold_hostlist(row.hosts), row.cells, row.names) for row in head)
        if rest := group[len(head) :]:
            names = list(dict.fromkeys(name for row in rest for name in row.names))
            others = fold_hostlist([host for row in rest for host in row.hosts])
            shown.append((others, (SAME,) * plan.gpus_per_node, names))
    cell = max([len(str(plan.gpus_per_node - 1)), *(len(mark) for _, marks, _ in shown for mark in marks)])
    left = max(4, *(min(len(host), MOST_HOST_WIDTH) for host, _, _ in shown))
    word = max((len(name) + 2 for _, _, names in shown for name in _fold_names(names, 0)), default=0)
    broad = left + 2 + (cell + 1) * plan.gpus_per_node + max(12, word) > WIDTH
    numbers = [] if broad else [f"{gpu:<{cell}}" for gpu in range(plan.gpus_per_node)]
    yield f"{'node':<{left}}  {' '.join(numbers)}".rstrip()
    for host, marks, words in shown:
        if len(host) > left:
            yield host
            host = ""
        picture = _spans_text(marks) if broad else " ".join(f"{mark:<{cell}}" for mark in marks)
        start = f"{host:<{left}}  " + (f"{picture}  " if picture else "")
        if broad and picture:
            yield from textwrap.wrap(
                picture, WIDTH, initial_indent=f"{host:<{left}}  ", subsequent_indent=" " * (left + 2)
            )
            start = " " * (left + 2)
        yield _wrap_words(start, _fold_names(words, WIDTH - len(start))) if words else start.rstrip()


def _rows(plan: Plan, hosts: Sequence[str]) -> Iterator[_NodeRow]:
    """A row for each run of identical nodes, such as those of a worker on several nodes."""
    labels = _labels(plan)
    tasks_of: dict[int, list[TaskPlan]] = {}
    for planned in plan.tasks:
        tasks_of.setdefault(planned.task.node_index, []).append(planned)
    pictures = []
    for index in range(plan.nodes):
        tasks = [planned.task for planned in tasks_of.get(index, ())]
        names = list(dict.fromkeys(task.worker for task in tasks))
        place = {name: position for position, name in enumerate(names)}
        owners: list[Task | None] = [None] * plan.gpus_per_node
        for task in tasks:
            for gpu in task.gpus:
                owners[gpu] = task
        cells = tuple(IDLE if owner is None else f"{labels[owner.role]}{owner.index}" for owner in owners)
        roles = {task.worker: task.role for task in tasks}
        shape = [(roles[name], place[name]) for name in names]
        shape += [("", -1) if owner is None else ("", place[owner.worker]) for owner in owners]
        pictures.append((cells, tuple(names), tuple(shape)))
    index = 0
    for picture, same in groupby(pictures):
        count = len(list(same))
        yield _NodeRow(tuple(hosts[index : index + count]), *picture)
        index += count


def _labels(plan: Plan) -> dict[str, str]:
    """A label for each role with GPUs: the shortest unique prefixes."""
    roles = list(dict.fromkeys(planned.task.role for planned in plan.tasks if planned.task.gpus))
    longest = max(map(len, roles), default=1)
    for length in range(1, longest + 1):
        labels = {role: role[:length].upper() for role in roles}
        if len(set(labels.values())) == len(roles):
            return labels
    return {role: role for role in roles}


def _spans_text(cells: Sequence[str]) -> str:
    """``0-3 P0, 4-7 D0``, for nodes with more GPUs than fit in a line."""
    words, start = [], 0
    for label, same in groupby(cells):
        count = len(list(same))
        words.append(f"{start}-{start + count - 1} {label}" if count > 1 else f"{start} {label}")
        start += count
    return ", ".join(words)


def _fold_names(names: Sequence[str], width: int) -> list[str]:
    """The names, folded like ``w[0-3]`` if they do not fit in ``width`` characters."""
    if len(", ".join(names)) <= max(width, 0):
        return list(names)
    by_kind: dict[str, list[str]] = {}
    for name in names:
        by_kind.setdefault(name.rstrip("0123456789"), []).append(name)
    return [part for kind in by_kind.values() for part in _split_names(fold_hostlist(kind))]


def _split_names(folded: str) -> list[str]:
    """Split a folded list at commas outside brackets."""
    parts, start, depth = [], 0, 0
    for index, character in enumerate(folded):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append(folded[start:index])
            start = index + 1
    return [*parts, folded[start:]]


def _wrap_words(start: str, words: Sequence[str]) -> str:
    """Wrap words after a prefix, indented below the first word."""
    indent = " " * min(len(start), WIDTH // 2)
    lines, line = [], start
    for number, word in enumerate(words):
        piece = word + ("," if number < len(words) - 1 else "")
        if number and len(line) + 1 + len(piece) > WIDTH:
            lines.append(line)
            line = indent + piece
        else:
            line += (" " if number else "") + piece
    return "\n".join([*lines, line])


def _command_lines(plan: Plan, facts: RunFacts) -> Iterator[str]:
    first: dict[str, TaskPlan] = {}
    counts: dict[str, int] = {}
    for planned in plan.tasks:
        role = planned.task.role
        first.setdefault(role, planned)
        counts[role] = counts.get(role, 0) + 1
    for role, planned in first.items():
        noun = "process" if counts[role] == 1 else "processes"
        what = f"rank {planned.task.rank}" if planned.stage == WORKERS else planned.stage
        words = task_argv(plan, planned, facts)
        yield f"{role}: {counts[role]} {noun}, here {planned.task.worker} ({what})"
        yield f"  {shlex.join(words) if words else 'no command yet: this plan shows only the topology'}"
        if planned.contained and plan.container is not None:
            count = len(container_mounts(plan, planned, facts))
            mounts = f"{count} mount{'s' if count != 1 else ''}"
            yield f"  in {plan.container.image} by {plan.container.runtime}, {mounts}"
