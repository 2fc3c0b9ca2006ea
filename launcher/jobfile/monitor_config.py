"""``monitor_config.yaml``: a job that others started, with flags of the command line over the file."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from launcher.errors import ConfigError, LauncherError
from launcher.jobfile.alerts.thresholds import AlertThresholds
from launcher.jobfile.monitoring import Detail, ErrorSpec, ProgressPatterns, VerifySpec
from launcher.jobfile.value_types import CheckInterval, Directory, FileModel, Seconds
from launcher.jobfile.yamlfile import read_mapping, validate_model
from launcher.rundir.yaml_files import read_yaml_text

COMMAND_LINE = "the command line"

# Place in the file of each flag that has one.
PLACES = {
    "job_name": "job.name",
    "num_workers": "job.num_workers",
    "gpu_ids": "job.gpu_ids",
    "total_items": "job.total_items",
    "output_dir": "paths.output_dir",
    "log_dir": "paths.log_dir",
    "checkpoint_dir": "paths.checkpoint_dir",
    "output_pattern": "patterns.output",
    "log_pattern": "patterns.logs",
    "checkpoint_pattern": "patterns.checkpoints",
    "check_interval": "monitoring.check_interval",
    "launch_timeout": "monitoring.launch_timeout",
    "stall_timeout": "monitoring.stall_timeout",
    "gpu_metrics": "monitoring.gpu_metrics",
    "detail": "monitoring.detail",
    "alert_email": "alerts.email.address",
    "alert_slack": "alerts.slack.webhook",
}
REQUIRED = ("job_name", "num_workers", "output_dir", "log_dir")

JsonMapping = dict[str, object]


def _glob(pattern: str) -> str:
    if "/" in pattern:
        raise ValueError(f"{pattern!r} is not a pattern of file names; directories go into `paths`")
    return pattern


def _hidden(expected: type, words: str) -> Callable[[object], object]:
    """Check a type without showing the value, which may be a webhook or a password."""

    def check(value: object) -> object:
        if not isinstance(value, expected):
            raise ValueError(f"is not {words}")
        return value

    return check


Text = Annotated[str, Field(min_length=1)]
Glob = Annotated[str, Field(min_length=1), AfterValidator(_glob)]
GpuIndex = Annotated[int, Field(ge=0)]
# The value is unused, and what is not kept cannot leak.
Webhook = Annotated[str, BeforeValidator(_hidden(str, "a text; write it in quotes")), AfterValidator(lambda _: "given")]


class WatchedJob(FileModel):
    """The job; its required keys may come from the command line."""

    name: Text = ""
    num_workers: int = Field(1, ge=1)
    gpu_ids: list[GpuIndex] = []
    total_items: int = Field(0, ge=0)  # 0 is unknown


class WatchedPaths(FileModel):
    """Directories of the job."""

    output_dir: Directory = ""
    log_dir: Directory = ""
    checkpoint_dir: Directory | None = None


class WatchedPatterns(FileModel):
    """Globs of file names."""

    output: Glob = "output_worker_*.json"
    logs: Glob = "worker_*.log"
    checkpoints: Glob = "checkpoint_*.pt"


class WatchSettings(FileModel):
    """Times in seconds."""

    check_interval: CheckInterval = 10.0
    launch_timeout: Seconds = 60.0
    stall_timeout: Seconds = 300.0
    gpu_metrics: bool = False
    detail: Detail = "normal"
    alerts: AlertThresholds = AlertThresholds()


class EmailAlerts(FileModel):
    """Alerts by mail, which Alertmanager sends."""

    enabled: bool = True
    address: Text | None = None
    smtp_server: Text | None = None
    smtp_port: int | None = Field(None, ge=1)


class SlackAlerts(FileModel):
    """Alerts to Slack, which Alertmanager sends."""

    enabled: bool = True
    webhook: Webhook | None = None


class Terminal(FileModel):
    """The display, which is `gpujob watch`."""

    enabled: bool = False
    refresh_rate: Seconds | None = None


class Alerts(FileModel):
    """Where alerts go."""

    email: Annotated[EmailAlerts, BeforeValidator(_hidden(dict, 'a mapping; for example {address: "a@b.org"}'))] = (
        EmailAlerts()
    )
    slack: Annotated[SlackAlerts, BeforeValidator(_hidden(dict, 'a mapping; for example {webhook: "https://..."}'))] = (
        SlackAlerts()
    )
    terminal: Terminal = Terminal()


class MonitorConfig(FileModel):
    """A job that others started, and how to watch it."""

    job: WatchedJob = WatchedJob()
    paths: WatchedPaths = WatchedPaths()
    patterns: WatchedPatterns = WatchedPatterns()
    monitoring: WatchSettings = WatchSettings()
    progress_patterns: ProgressPatterns = {}
    error_patterns: list[ErrorSpec] = []
    verify: VerifySpec = VerifySpec()
    alerts: Annotated[Alerts, BeforeValidator(_hidden(dict, "a mapping with email, slack and terminal"))] = Alerts()


def load_monitor_config(path: str | None, flags: Mapping[str, object]) -> MonitorConfig:
    """Settings from a file, if any, and from flags, which win. Raises LauncherError with every problem."""
    body, twice, text = None, list[str](), ""
    if path is not None:
        text = read_yaml_text(Path(path))
        body, twice = read_mapping(text, path)
        if body is None:
            raise ConfigError(path, ["is empty; examples/monitor/monitor_config.yaml has every key"])
    merged = without_nulls(body or {})
    for name, value in flags.items():
        section, _, key = PLACES[name].rpartition(".")
        _set(merged, section.split("."), key, value)
    if path is None and (missing := [flag for flag in REQUIRED if flag not in flags]):
        raise LauncherError(
            f"missing {', '.join(map(flag_name, missing))}; describe a running job with flags or with --config FILE; "
            "use --run-dir DIR for a job that gpujob launched"
        )
    try:
        return validate_model(merged, path or COMMAND_LINE, MonitorConfig, _missing_keys, twice, text)
    except ConfigError as error:
        raise ConfigError(error.source, [_at_flag(problem, flags) for problem in error.problems]) from error


def _at_flag(problem: str, flags: Collection[str]) -> str:
    """The problem with the flag as its place, if the value is from one."""
    place = problem.partition(":")[0].partition("[")[0]
    flag = next((flag for flag in flags if PLACES[flag] == place), None)
    return problem if flag is None else f"{flag_name(flag)}{problem.removeprefix(place)}"


def flag_name(setting: str) -> str:
    """Flag of a setting."""
    return "--" + setting.replace("_", "-")


def without_nulls(body: Mapping[str, object]) -> JsonMapping:
    """The same without keys that are null, which are as good as missing. Null counts only in ``verify``."""
    return {
        key: without_nulls(value) if isinstance(value, dict) and key != "verify" else value
        for key, value in body.items()
        if value is not None
    }


def _set(body: JsonMapping, sections: list[str], key: str, value: object) -> None:
    """Set a key in a section of a section; a section of another kind stays, because its own problem is reported."""
    for name in sections:
        inner = body.setdefault(name, {})
        if not isinstance(inner, dict):
            return
        body = inner
    body[key] = value


def _missing_keys(body: Mapping[str, object]) -> list[str]:
    """Report required keys that neither the file nor the flags have."""
    problems = []
    for flag in REQUIRED:
        section, _, key = PLACES[flag].partition(".")
        inner = body.get(section, {})
        if isinstance(inner, dict) and key not in inner:
            problems.append(f"{section}.{key}: is missing; set it here or with {flag_name(flag)}")
    return problems
