"""The section `alerts` of the job file and of the cluster file: thresholds of alerts, and who is notified."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator

from exporter.contract.alert_thresholds import OFF, THRESHOLDS, AlertThreshold, Threshold
from launcher.jobfile.value_types import FileModel, check_entry

RECEIVER_NAME = re.compile(r"[A-Za-z0-9][\w-]{0,63}", re.ASCII)  # it becomes a label and a name in Alertmanager
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?([kMGTP]?)(i?)B?", re.ASCII)
_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5}


def threshold_value(name: str, value: object) -> object:
    """The number in the unit of the threshold, or off. Raises ValueError with the fix.

    YAML 1.1 reads an unquoted off as false.
    """
    known = THRESHOLDS[name]
    if value is False or value == OFF:
        return OFF
    number = _size(value) if known.unit == "bytes" else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        raise ValueError(f"{shown} is not a number (unit: {known.unit}); write for example {known.example}, or off")
    if not (known.least < number <= known.most or number == known.default):
        fix = _meant(known, number) or f"; write for example {known.example}, or off"
        raise ValueError(f"{value} is not {_bounds(known)} (unit: {known.unit}){fix}")
    return float(number)


def _size(value: object) -> object:
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    return float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2]] if match else value


def default_text(known: Threshold) -> str:
    """The default of a threshold, as a job file may contain it."""
    bases = {"B": 1000, "iB": 1024} if known.unit == "bytes" else {}
    sizes = {f"{prefix}{unit}": base ** _POWERS[prefix] for unit, base in bases.items() for prefix in "kMGTP"}
    texts = [f"{known.default / size:.15g}{unit}" for unit, size in sizes.items() if not known.default % size]
    return min([*texts, f"{known.default:.15g}"], key=len)


def _bounds(known: Threshold) -> str:
    return f"above {known.least:g}" + (f" and at most {known.most:g}" if known.most < 1e18 else "")


def _meant(known: Threshold, number: float) -> str:
    """What a number of another unit was probably meant to be."""
    if known.unit == "share" and 1 < number <= 100:
        return f"; for {number:g} % write {number / 100:g}"
    if known.unit == "times" and 0 < number < 1:
        return f"; for {number:.0%} less speed write {1 / (1 - number):.3g}"
    return ""


def _of(name: str) -> BeforeValidator:
    return BeforeValidator(lambda value: None if value is None else threshold_value(name, value))


def _receiver_problem(name: str) -> str | None:
    if RECEIVER_NAME.fullmatch(name):
        return None
    return f"{name!r} is not a name of letters, digits, - and _, at most 64; write owner, none, or a name of `notify`"


Value = float | Literal["off"] | None
Size = float | str | None
Receiver = Annotated[str, check_entry(_receiver_problem)]


class AlertThresholds(FileModel):
    """Thresholds of alerts. One that is left out is that of the cluster file, else the default of the rules."""

    slowdown: Annotated[Value, _of("slowdown")] = None
    straggler: Annotated[Value, _of("straggler")] = None
    time_limit_chance: Annotated[Value, _of("time_limit_chance")] = None
    host_memory: Annotated[Value, _of("host_memory")] = None
    disk_free: Annotated[Size, _of("disk_free")] = None
    checkpoint_late: Annotated[Value, _of("checkpoint_late")] = None
    log_burst: Annotated[Value, _of("log_burst")] = None
    log_unread: Annotated[Size, _of("log_unread")] = None
    gpu_idle: Annotated[Value, _of("gpu_idle")] = None
    worker_restarts: Annotated[Value, _of("worker_restarts")] = None


class AlertsSpec(AlertThresholds):
    """Thresholds of the job, and who is notified."""

    notify: Receiver | None = None


def alert_thresholds(*files: AlertThresholds) -> tuple[AlertThreshold, ...]:
    """The thresholds that differ from those of the rules; the first file that sets one counts."""
    return tuple(_first_set(files))


def _first_set(files: tuple[AlertThresholds, ...]) -> Iterator[AlertThreshold]:
    for name in THRESHOLDS:
        value = next((found for file in files if (found := getattr(file, name)) is not None), None)
        if value is not None:
            yield AlertThreshold(name, None if value == OFF else value)
