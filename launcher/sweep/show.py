"""The plan of a sweep as text and JSON, for `gpujob plan`. Nothing is written or submitted."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence

from launcher.errors import LauncherError
from launcher.jobfile.redaction import REDACTED, is_secret_name
from launcher.jobfile.yamlfile import yaml_text
from launcher.show.records import (
    ExplainedPointRecord,
    PlannedArray,
    PlannedPointRecord,
    SweepPlanRecord,
    ValueSource,
)
from launcher.show.sources import SourceNames, explain_values, name_options, render_sources
from launcher.steps.hostlist import fold_hostlist
from launcher.sweep.directory import align_columns
from launcher.sweep.plan import PlannedPoint, PlannedSweep, place_array, plan_arrays
from launcher.sweep.points import ExpandedSweep, PointSpec
from launcher.sweep.values import Path, find_placeholders, format_place, parse_place, value_at

MOST_KNOWN = 8  # points that an error names
INDEX_PREFIX = (
    "index:"  # prefix of a point's number if another point has that number as its name; names contain no colon
)


def choose_point(planned: PlannedSweep, point: str) -> PlannedPoint:
    """Find a point by name or number. Raises LauncherError if there is none, or if two match."""
    named = next((one for one in planned.points if one.point.name == point), None)
    number = point.removeprefix(INDEX_PREFIX)
    numbered = next((one for one in planned.points if str(one.point.index) == number), None)
    if named and numbered and named is not numbered:
        raise LauncherError(
            f"--point: {planned.source}: {point!r} is the name of point {named.point.index} and the number of point "
            f"{numbered.point.name!r}; write --point {INDEX_PREFIX}{named.point.index} for the name, "
            f"or --point {INDEX_PREFIX}{point} for the number"
        )
    if found := named or numbered:
        return found
    known = ", ".join(one.point.name for one in planned.points[:MOST_KNOWN])
    more = ", ..." if len(planned.points) > MOST_KNOWN else ""
    raise LauncherError(f"--point: {planned.source} has no point {point!r}; give a name or a number ({known}{more})")


def script_of_point(planned: PlannedSweep, planned_point: PlannedPoint) -> str:
    """The batch script of one point, as an array of its own."""
    (array,) = plan_arrays(planned, [planned_point.point.index])
    return place_array(array, planned.logs_dir, planned.directory_name)[1]


def describe_sweep(
    planned: PlannedSweep, *, local: bool, hosts: Sequence[str] = (), sources: SourceNames | None = None
) -> SweepPlanRecord:
    """The planned sweep; ``sources`` adds the source of each value."""
    arrays = () if local else plan_arrays(planned, range(len(planned.points)))
    array_of = {index: number for number, array in enumerate(arrays) for index in array.indexes}
    points = []
    for one in planned.points:
        point = PlannedPointRecord(
            index=one.point.index,
            name=one.point.name,
            values=one.point.values,
            nodes=one.plan.nodes,
            hosts=tuple(hosts[: one.plan.nodes]),
            gpus_per_node=one.plan.gpus_per_node,
            gpus=one.plan.nodes * one.plan.gpus_per_node,
            time_limit=one.plan.slurm.time_limit,
            run_dir=str(one.plan.run_dir("{job_id}")),
            array=array_of.get(one.point.index),
        )
        if sources is not None:
            point = ExplainedPointRecord(**vars(point), explain=explain_point(planned, one, sources))
        points.append(point)
    return SweepPlanRecord(
        sweep=planned.sweep.name,
        max_parallel=planned.sweep.max_parallel or (1 if local else None),
        sweep_dir=str(planned.logs_dir / planned.directory_name),
        points=tuple(points),
        arrays=tuple(
            PlannedArray(array.tasks, array.indexes, place_array(array, planned.logs_dir, planned.directory_name)[1])
            for array in arrays
        ),
    )


def render_sweep(record: SweepPlanRecord) -> list[str]:
    named = any(point.hosts for point in record.points)
    rows = [("", "point", "values", "nodes", *(["on"] if named else []), "GPUs", "time limit")]
    for point in record.points:
        values = " ".join(
            f"{key}={json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else yaml_text(value)}"
            for key, value in point.values.items()
        )
        where = [fold_hostlist(point.hosts)] if named else []
        limit = point.time_limit or "-"
        rows.append((str(point.index), point.name, values, str(point.nodes), *where, str(point.gpus), limit))
    most, arrays = record.max_parallel, record.arrays
    at_once = f"at most {most} at once" if most else "as many at once as resources allow"
    lines = [*align_columns(rows), "", f"{len(record.points)} points, {at_once}", f"directory: {record.sweep_dir}"]
    for number, array in enumerate(arrays):
        lines.append("")
        if len(arrays) > 1:
            after = "; it starts after the previous one" if number and most else ""
            points = array.tasks.partition("%")[0]
            lines.append(f"array {number + 1} of {len(arrays)}: points {points}, with the same Slurm options{after}")
        lines.append(array.script.rstrip("\n"))
    return lines


# -- sources of values ---------------------------------------------------------------------------


def render_point_sources(planned: PlannedSweep, sources: SourceNames) -> list[str]:
    """Lines of values and sources: those common to all points, then those of each point."""
    rows_of = [{repr(row): row for row in explain_point(planned, one, sources)} for one in planned.points]
    several = len(rows_of) > 1
    common = set(rows_of[0]).intersection(*rows_of[1:]) if several else set()
    parts = [[f"all {len(rows_of)} points", *_render_rows(rows_of[0], common)]] if several else []
    for one, rows in zip(planned.points, rows_of, strict=True):
        parts.append([f"point {one.point.index}: {one.point.name}", *_render_rows(rows, rows.keys() - common)])
    return [line for part in parts for line in ("", *part)][1:]


def _render_rows(rows: Mapping[str, ValueSource], chosen: Collection[str]) -> list[str]:
    return render_sources(tuple(row for key, row in rows.items() if key in chosen))


def explain_point(planned: PlannedSweep, planned_point: PlannedPoint, sources: SourceNames) -> tuple[ValueSource, ...]:
    """Every value of a point with its source, preceded by values of the sweep that no other row shows."""
    rows = [
        _with_sweep_source(row, planned.sweep, planned_point.point, sources)
        for row in explain_values(planned_point.planned_job, sources)
    ]
    shown = {row.source for row in rows}
    own = (row for row in _sweep_sources(planned.sweep, planned_point.point, sources) if row.source not in shown)
    return name_options((*own, *rows), sources)


def _sweep_sources(sweep: ExpandedSweep, point: PointSpec, sources: SourceNames) -> Iterator[ValueSource]:
    for key, value in point.values.items():
        path = sweep.paths[key]
        shown = REDACTED if is_secret_name(key.rpartition(".")[2]) else value
        yield ValueSource(format_place(path) if path else f"{{{key}}}", shown, f"{sources.job}: {point.sources[key]}")


def _with_sweep_source(row: ValueSource, sweep: ExpandedSweep, point: PointSpec, sources: SourceNames) -> ValueSource:
    """The row of a value, with the sweep as source if the sweep sets it or a part of it."""
    place = row.source.removeprefix(f"{sources.job}: ")
    if place == row.source:
        return row
    steps = parse_place(place)
    for key, path in reversed(list(sweep.paths.items())):  # the last key that sets it wins
        if key not in point.values or not path:
            continue
        if steps[: len(path)] == path and _has_value_at(point.values[key], steps[len(path) :]):
            rest = format_place(steps[len(path) :]) if len(steps) > len(path) else ""
            within = rest if not rest or rest.startswith("[") else f".{rest}"
            return row._replace(source=f"{sources.job}: {point.sources[key]}{within}")
        if path[: len(steps)] == steps:
            return row._replace(source=f"{row.source} with {point.sources[key]}")
    names = sorted(_placeholders_in(value_at(sweep.base, steps)) & point.sources.keys())
    used = ", ".join(f"{{{name}}} of {point.sources[name]}" for name in names)
    return row._replace(source=f"{row.source} with {used}") if used else row


def _has_value_at(value: object, steps: Path) -> bool:
    return not steps or value_at(value, steps) is not None


def _placeholders_in(value: object) -> set[str]:
    if isinstance(value, str):
        return find_placeholders(value)
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return {name for one in inner for name in _placeholders_in(one)}
