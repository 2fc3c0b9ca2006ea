"""What runs of the stack, and whether alerts would arrive."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from exporter.alerts.messages import FIRING, WATCHDOG
from exporter.contract import run_files
from launcher.errors import LauncherError
from launcher.registry.own_stack import STACK_FILE, StackRecord
from launcher.stack.ask import answers, get_object
from launcher.stack.processes import end_programs, is_alive
from launcher.stack.up import PRIVATE, locked_folder, ready_urls, require_this_host

UP, DOWN, SILENT = "up", "down", "does not answer"


class StackStatus(NamedTuple):
    """The stack now."""

    programs: Mapping[str, str]  # state by name
    heartbeat: str | None  # time of the last one, ISO 8601; None before it
    is_silent: bool  # whether the dead man's switch has raised the alarm
    targets_up: int | None  # None if Prometheus does not say
    targets: int | None
    firing: int | None  # alerts

    @property
    def is_sound(self) -> bool:
        """Whether all programs are up and alerts would arrive."""
        return bool(self.programs) and all(state == UP for state in self.programs.values()) and not self.is_silent


def read_record(folder: Path) -> StackRecord:
    """The record of a stack. Raises LauncherError if there is none, or if it runs on another machine."""
    record = StackRecord.read(folder / STACK_FILE)
    if record is None:
        raise LauncherError(f"there is no stack in {folder}; start one with `gpujob stack up`")
    require_this_host(record, folder)
    return record


def read_status(folder: Path, record: StackRecord) -> StackStatus:
    """Ask all programs."""
    urls = ready_urls(record)
    states = {
        name: (UP if name not in urls or answers(urls[name]) else SILENT) if is_alive(program) else DOWN
        for name, program in record.programs.items()
    }
    beat: object = None
    if states.get("receiver") == UP:
        token = run_files.read_token(folder / "receiver")
        beat = get_object(f"http://127.0.0.1:{record.ports['receiver']}/api/v1/alerts", token).get("heartbeat")
    facts = beat if isinstance(beat, dict) else {}
    up = query_values(record, 'up{job=~"gpujob-(sidecar|engine)"}')
    return StackStatus(
        programs=states,
        heartbeat=None if (last := facts.get("last")) is None else str(last),
        is_silent=bool(facts.get("silent")),
        targets_up=None if up is None else up.count("1"),
        targets=None if up is None else len(up),
        firing=_firing(record),
    )


def _firing(record: StackRecord) -> int | None:
    """Number of alerts that fire. The series ALERTS would be late: Prometheus writes it from the second minute on."""
    data = get_object(f"{record.url}api/v1/alerts").get("data")
    alerts = data.get("alerts") if isinstance(data, dict) else None
    if not isinstance(alerts, list):
        return None
    return len([each for each in alerts if each["state"] == FIRING and each["labels"]["alertname"] != WATCHDOG])


def query_values(record: StackRecord, query: str) -> list[str] | None:
    """Values of an instant query; None if Prometheus does not answer it."""
    data = get_object(f"{record.url}api/v1/query?query={quote(query)}").get("data")
    result = data.get("result") if isinstance(data, dict) else None
    return [str(each["value"][1]) for each in result] if isinstance(result, list) else None


def stop_stack(folder: Path) -> list[str]:
    """End what runs, and only that. Return the names. The data stay. Raises LauncherError."""
    read_record(folder)
    with locked_folder(folder):
        record = read_record(folder)
        living = [name for name, program in record.programs.items() if is_alive(program)]
        end_programs(record.programs.values())
        down = record.replace(programs={}, job=None)
        run_files.write_json(folder / STACK_FILE, down.to_json(), durable=False, mode=PRIVATE)
    return living
