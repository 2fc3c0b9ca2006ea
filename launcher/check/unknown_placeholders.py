"""Words in braces that look like placeholders but have no value: a program would get them unchanged."""

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping

from exporter.contract.lazy_dataclass import dataclass
from launcher.check import finding
from launcher.check.finding import CheckFinding
from launcher.jobfile.resources import command_argv
from launcher.plan.placeholders import NUMBERED, PlaceholderValues, job_placeholder_values, placeholder_values
from launcher.plan.plan import BENCHMARK, FRONTENDS, WORKERS, RunFacts, TaskPlan
from launcher.plan.ports import TABLE
from launcher.planner.planned_job import PlannedJob

LIKENESS = 0.7  # difflib ratio from which a word counts as a misspelled placeholder
HIDDEN_PORTS = ("public", "internal")  # ports of the table whose placeholder is `http_port`

_WORD = re.compile(r"(?<![{$])\{([A-Za-z_][A-Za-z0-9_]*)\}(?!\})")
_HOST_OR_PORT = re.compile(r"(?:host|ip|port)_[0-9]+|[a-z][a-z0-9_]*_port")


@dataclass(frozen=True)
class FilledText:
    """A text with placeholders, its place in the job file, and the values available there."""

    place: str
    text: str
    values: PlaceholderValues
    stage: str = ""  # stage of the process that the text belongs to; empty if it belongs to none


def check_placeholders(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Report each word without a value, once for each place."""
    plan = planned_job.plan
    sweep, done = planned_job.spec.sweep, set[tuple[str, str]]()
    swept = set(itertools.chain(sweep.grid, sweep.zip, *sweep.list)) if sweep is not None else set()
    for text in _filled_texts(planned_job, plan.facts_before_run()):
        for name in dict.fromkeys(_WORD.findall(text.text)):
            if name in swept or (text.place, name) in done or not (why := _unfilled_reason(name, text, plan.nodes)):
                continue
            done.add((text.place, name))
            yield finding.error("placeholder", text.place, f"{why}; to keep the braces write {{{{{name}}}}}")
    for section in ("paths", "patterns"):
        for key, text in getattr(planned_job.spec, section):
            for name in dict.fromkeys(_WORD.findall(text or "")):
                if name not in swept:
                    why = f"{{{name}}} stays as it is: {section} have no placeholders"
                    yield finding.warning("placeholder", f"{section}.{key}", why)


def _unfilled_reason(name: str, text: FilledText, nodes: int) -> str | None:
    """Why a word has no value, with suggestions; None if it has one or is no placeholder."""
    if text.values.get(name) is not None or _is_numbered(name, nodes):
        return None
    if name.startswith(("host_", "ip_")) and _HOST_OR_PORT.fullmatch(name):
        kind = name.partition("_")[0]
        hosts = f"{{{kind}_0}}" if nodes == 1 else f"{{{kind}_0}} to {{{kind}_{nodes - 1}}}"
        return f"{{{name}}} is not a node of the job, which has {hosts}"
    if _HOST_OR_PORT.fullmatch(name):
        near = difflib.get_close_matches(name, text.values, 1, 0.9)
        meant = f'; did you mean "{{{near[0]}}}"?' if near else ""
        return f"{{{name}}} is not a port of this process{meant}; {_ports_text(text)}"
    known = [*text.values, "host_0", *([f"{port}_port" for port in _available_ports(text)])]
    near = difflib.get_close_matches(name.lower(), known, 1, LIKENESS)
    return f'{{{name}}} is not a placeholder; did you mean "{{{near[0]}}}"?' if near else None


def _is_numbered(name: str, nodes: int) -> bool:
    match = NUMBERED.fullmatch(name)
    return match is not None and (match["kind"] == "port" or int(match["number"]) < nodes)


def _available_ports(text: FilledText) -> list[str]:
    """Ports that a process gets because its command names them."""
    return [name for name in TABLE if name not in HIDDEN_PORTS] if text.stage in (WORKERS, FRONTENDS) else []


def _ports_text(text: FilledText) -> str:
    if text.stage == BENCHMARK:
        return "a benchmark has none: its requests go to GPUJOB_ENDPOINT"
    if names := _available_ports(text):
        return "it can use " + " ".join(f"{{{name}_port}}" for name in names)
    return "use the number of a port here, as in {port_6100}"


def _filled_texts(planned_job: PlannedJob, facts: RunFacts) -> Iterator[FilledText]:
    plan, seen = planned_job.plan, set[str]()
    owned_texts = list(_owned_texts(planned_job))
    for planned in plan.tasks:
        if planned.task.role in seen:
            continue
        seen.add(planned.task.role)
        values = placeholder_values(plan, planned, facts)
        texts = (*planned.argv, *_variables(planned_job, planned).values())
        for name in dict.fromkeys(itertools.chain.from_iterable(map(_WORD.findall, texts))):
            yield FilledText(_find_place(owned_texts, planned, name), f"{{{name}}}", values, planned.stage)
        if planned.contained and plan.container is not None:
            first = len(planned_job.cluster.mounts)
            for index, mount in enumerate(plan.container.mounts):
                place = f"container.mounts[{index - first}]" if index >= first else f"mounts[{index}]"
                yield FilledText(place, mount, values)
    first_task = placeholder_values(plan, plan.tasks[0], facts)
    for number, pattern in enumerate(planned_job.spec.inputs):
        yield FilledText(f"inputs[{number}]", pattern, first_task)
    of_job = PlaceholderValues(job_placeholder_values(plan, facts), facts)
    for key, part in planned_job.spec.processes():
        for text in _strings(part.config):
            yield FilledText(f"{key}.config", text, of_job)


def _variables(planned_job: PlannedJob, planned: TaskPlan) -> Mapping[str, str]:
    """Variables of a process. Those of the whole job count for workers only; others may lack their ports."""
    if planned.stage == WORKERS:
        return planned.env
    own = {BENCHMARK: planned_job.spec.benchmark, FRONTENDS: planned_job.spec.frontend}.get(planned.stage)
    return own.env if own is not None else {}


def _find_place(owned_texts: list[tuple[str, str, str]], planned: TaskPlan, name: str) -> str:
    """Place of the job file from which a process has a word; its own part comes first."""
    role, word = planned.task.role, f"{{{name}}}"
    owner = role if planned.stage == WORKERS else planned.stage
    places = [place for text_owner, place, text in owned_texts if text_owner in (owner, "") and word in text]
    return places[0] if places else role


def _owned_texts(planned_job: PlannedJob) -> Iterator[tuple[str, str, str]]:
    """Owner of each text (a role, a stage, or empty for every worker), its place, and the text."""
    spec = planned_job.spec
    for workers in spec.workers:
        for word in command_argv(workers):
            yield workers.role, f"workers ({workers.role}).command", word
        for name, value in workers.env.items():
            yield workers.role, f"workers ({workers.role}).env.{name}", value
    owners = {"backend": "", "frontend": FRONTENDS, "benchmark": BENCHMARK}
    for key, part in spec.processes():
        owner = owners.get(key, key.removeprefix("backend."))
        yield owner, f"{key}.command", getattr(part, "command", None) or ""
        for name, value in part.env.items():
            yield owner, f"{key}.env.{name}", value
        for name, argument in part.args.items():
            yield owner, f"{key}.args.{name}", str(argument)
    for name, value in spec.env.items():
        yield "", f"env.{name}", value


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _strings(key)
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)
