"""Partial check of a job whose files have mistakes: everything but the wrong parts."""

import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from launcher.errors import ConfigError, LauncherError, TopologyError
from launcher.jobfile.jobfile import ClusterSpec, parse_cluster, parse_job
from launcher.planner.planned_job import JobText, PlannedJob, make_invocation, plan_job
from launcher.rundir.cluster_file import find_cluster_file
from launcher.rundir.yaml_files import load_yaml, read_yaml_text
from launcher.sweep.points import expand_sweep, is_sweep

ROUNDS = 8  # removing a part may reveal another mistake
NO_OP_COMMAND = "true"  # a command that does nothing
REPLACEMENTS = {"name": "job", "workers": [{"command": NO_OP_COMMAND}]}  # replacements for required keys

_PLACE = re.compile(r"([A-Za-z_][\w-]*(?:\.[^.:\[\]]+|\[\d+\])*): ")
_STEP = re.compile(r"[^.\[\]]+|\[\d+\]")

Made = TypeVar("Made")


def load_partial_job(job: JobText, *, local: bool) -> tuple[PlannedJob, frozenset[str]] | None:
    """The job without the mistakes in its files, and the places removed; None if too little is left."""
    try:
        found = find_cluster_file(os.environ, Path.cwd())
        text = read_yaml_text(found.path) if found is not None else ""
        cluster, removed = (
            _remove_mistakes(load_yaml(text, ""), parse_cluster) if text else (ClusterSpec(), frozenset())
        )

        def planned(body: str, source: str) -> PlannedJob:
            return plan_job(parse_job(body, source), cluster, make_invocation(job.job_dir, local=local))

        planned_job, more = _remove_mistakes(_first_job(load_yaml(job.text, "")), planned)
    except (ValueError, LookupError, TypeError, LauncherError):
        return None
    return planned_job, removed | more


def _first_job(body: object) -> object:
    """The content of a job file; for a sweep that can be expanded, its first point, with all values in place."""
    if isinstance(body, Mapping) and is_sweep(body):
        try:
            return dict(expand_sweep(body, "").points[0].body)
        except ConfigError:
            return body
    return body


def _remove_mistakes(body: object, make: Callable[[str, str], Made]) -> tuple[Made, frozenset[str]]:
    """Remove mistakes from a file until ``make`` accepts it. Returns its result and the places removed.

    Raises ConfigError, TopologyError, LookupError or TypeError if nothing usable is left.
    """
    removed_places = set[str]()
    for _ in range(ROUNDS):
        try:
            return make(yaml.safe_dump(body), ""), frozenset(removed_places)
        except (ConfigError, TopologyError) as error:
            places = [match[1] for problem in error.problems if (match := _PLACE.match(problem))]
            if len(places) < len(error.problems):
                raise
            for place in reversed(dict.fromkeys(places)):  # last list entries first, so that indexes stay valid
                removed_places.update(_remove_place(body, place))
            removed_places.update(places)
    raise TopologyError(["too many mistakes"])


def _remove_place(body: object, place: str) -> Iterator[str]:
    """Remove a value, or replace a required one. Yields other places that this makes meaningless."""
    steps: list[str | int] = [int(part[1:-1]) if part[0] == "[" else part for part in _STEP.findall(place)]
    inner: Any = body  # a part of the YAML, and only its indexing shows which
    if len(steps) == 1 and steps[0] in REPLACEMENTS:
        inner[steps[0]] = copy.deepcopy(REPLACEMENTS[str(steps[0])])
        return
    for step in steps[:-1]:
        if isinstance(inner, Mapping) and step not in inner:
            return  # removed with its parent
        inner = inner[step]
    if steps[0] == "workers" and steps[-1] == "command":
        inner["command"] = NO_OP_COMMAND
        yield f"workers ({inner.get('role', 'worker')}).command"
    elif isinstance(inner, Mapping) and steps[-1] not in inner:
        yield from _remove_place(body, place[: place.rindex(str(steps[-1])) - 1])  # its parent
    else:
        del inner[steps[-1]]
