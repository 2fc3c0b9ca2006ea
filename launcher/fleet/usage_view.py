"""GPU hours, CPU hours and list prices by user, account, partition or name: `gpujob usage`."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from exporter.contract.records import JsonValue
from exporter.slurm.prices import HOUR_S, Prices
from exporter.slurm.usage import Usage, UsageRow, sum_usage
from launcher.fleet.columns import render_table
from launcher.watch.text import printable_line

GROUPS = ("user", "account", "partition", "name")
NO_GPUS = "no job has GPUs in accounting; sites list them with gres/gpu in AccountingStorageTRES of slurm.conf"


class UsageTable(NamedTuple):
    """What each user, account, partition or name took, most GPU hours first."""

    by: str
    groups: Mapping[str, Usage]
    total: Usage

    @property
    def has_gpus(self) -> bool:
        return bool(self.total.gpu_s)

    def gpu_hours(self, usage: Usage) -> float | None:
        """GPU hours; None where accounting has no GPUs at all, so that nothing is known of them."""
        return sum(usage.gpu_s.values()) / HOUR_S if self.has_gpus else None


def usage_table(rows: Sequence[UsageRow], by: str) -> UsageTable:
    """The sums of all attempts. Jobs that did not run in the time are left out."""
    groups: dict[str, list[UsageRow]] = {}
    for row in rows:
        groups.setdefault(str(getattr(row, by)), []).append(row)
    sums = {name: sum_usage(found) for name, found in groups.items()}
    order = sorted(sums.items(), key=lambda pair: (-sum(pair[1].gpu_s.values()), -pair[1].cpu_s, pair[0]))
    return UsageTable(by, {name: usage for name, usage in order if usage.jobs}, sum_usage(rows))


def render_usage(table: UsageTable, prices: Prices | None = None) -> list[str]:
    """A line for each group below the head, and the total."""
    head = (table.by.upper(), "JOBS", "GPU_H", "IDLE", "CPU_H", "COST")
    rows = [_cells(table, name, usage, prices) for name, usage in table.groups.items()]
    if len(rows) > 1:
        rows.append(_cells(table, "TOTAL", table.total, prices))
    lines = render_table(head, rows, optional=("IDLE", "COST"))
    return lines if table.has_gpus or not rows else [*lines, "", NO_GPUS]


def _cells(table: UsageTable, name: str, usage: Usage, prices: Prices | None) -> tuple[str, ...]:
    hours = table.gpu_hours(usage)
    return (
        printable_line(name) or "-",
        str(usage.jobs),
        "-" if hours is None else f"{hours:,.2f}",
        "-" if usage.idle_s is None else f"{usage.idle_s / HOUR_S:,.2f}",
        f"{usage.cpu_s / HOUR_S:,.2f}",
        "-" if prices is None else prices.text(_cost(usage, prices)),
    )


def _cost(usage: Usage, prices: Prices | None) -> float | None:
    return None if prices is None else prices.cost(usage.gpu_s)


def usage_json(table: UsageTable, since: float, until: float, prices: Prices | None = None) -> dict[str, JsonValue]:
    """The sums as a JSON object."""
    return {
        "schema": 1,
        "since": since,
        "until": until,
        "by": table.by,
        "groups": [{table.by: name, **_values(table, usage, prices)} for name, usage in table.groups.items()],
        "total": _values(table, table.total, prices),
    }


def _values(table: UsageTable, usage: Usage, prices: Prices | None) -> dict[str, JsonValue]:
    hours, cost = table.gpu_hours(usage), _cost(usage, prices)
    return {
        "jobs": usage.jobs,
        "attempts": usage.attempts,
        "gpu_hours": None if hours is None else round(hours, 4),
        "gpu_hours_by_type": {name or "unknown": round(gpu_s / HOUR_S, 4) for name, gpu_s in usage.gpu_s.items()},
        "gpu_idle_hours": None if usage.idle_s is None else round(usage.idle_s / HOUR_S, 4),
        "cpu_hours": round(usage.cpu_s / HOUR_S, 4),
        "cost": None if cost is None else round(cost, 4),
        "currency": None if cost is None or prices is None else prices.currency,
    }


def usage_csv(table: UsageTable, prices: Prices | None = None) -> str:
    """The sums as CSV with a header; what is unknown is empty."""
    columns = ("jobs", "attempts", "gpu_hours", "cpu_hours", *(("cost", "currency") if prices is not None else ()))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow((table.by, *columns))
    for name, usage in table.groups.items():
        values = _values(table, usage, prices)
        writer.writerow((name, *_written(values[column] for column in columns)))
    return out.getvalue()


def _written(values: Iterable[JsonValue]) -> list[str]:
    return ["" if value is None else str(value) for value in values]
