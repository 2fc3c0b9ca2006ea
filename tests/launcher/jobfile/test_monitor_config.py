"""``monitor_config.yaml``: its settings, flags over them, and all its problems at once."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from exporter.contract.manifest import LogPattern
from launcher.errors import ConfigError, LauncherError
from launcher.jobfile.monitor_config import MonitorConfig, load_monitor_config
from launcher.jobfile.monitoring import error_patterns, progress_patterns

EXAMPLE = r"""
# monitor_config.yaml
job:
  name: "embedding_generation_v2"
  num_workers: 4
  gpu_ids: [0, 1, 2, 3]
  total_items: 100000

paths:
  output_dir: "/scratch/outputs"
  log_dir: "/scratch/logs"
  checkpoint_dir: "/scratch/checkpoints"

patterns:
  output: "output_worker_*.json"
  logs: "worker_*.log"
  checkpoints: "checkpoint_epoch_*.pt"

monitoring:
  check_interval: 10
  launch_timeout: 60
  stall_timeout: 300

progress_patterns:
  items_processed: 'Processed (\d+)/(\d+) items'
  throughput: '(\d+\.?\d*) items/s'
  epoch: 'Epoch (\d+)/(\d+)'

error_patterns:
  - pattern: '(out of memory|OOM)'
    severity: 'critical'
  - pattern: '(CUDA error)'
    severity: 'critical'
  - pattern: '(connection refused|timeout)'
    severity: 'warning'

alerts:
  email:
    enabled: true
    address: "user@example.com"
    smtp_server: "smtp.gmail.com"
    smtp_port: 587

  slack:
    enabled: true
    webhook: "https://hooks.slack.com/services/..."

  terminal:
    enabled: true
    refresh_rate: 1  # seconds
"""


REQUIRED: dict[str, Any] = {"job_name": "a", "num_workers": 1, "output_dir": "/o", "log_dir": "/l"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "c.yaml"


def load(path: Path, text: str, **flags: Any) -> MonitorConfig:
    path.write_text(text, encoding="utf-8")
    return load_monitor_config(str(path), flags)


def test_every_key_of_a_complete_file_is_read(path: Path) -> None:
    config = load(path, EXAMPLE)
    assert (config.job.name, config.job.num_workers, config.job.gpu_ids) == ("embedding_generation_v2", 4, [0, 1, 2, 3])
    assert config.job.total_items == 100000
    assert (config.paths.output_dir, config.paths.log_dir) == ("/scratch/outputs", "/scratch/logs")
    assert config.paths.checkpoint_dir == "/scratch/checkpoints"
    patterns = (config.patterns.output, config.patterns.logs, config.patterns.checkpoints)
    assert patterns == ("output_worker_*.json", "worker_*.log", "checkpoint_epoch_*.pt")
    times = (config.monitoring.check_interval, config.monitoring.launch_timeout, config.monitoring.stall_timeout)
    assert times == (10, 60, 300)
    assert progress_patterns(config.progress_patterns) == (
        LogPattern("items", r"Processed (\d+)/(\d+) items"),
        LogPattern("throughput", r"(\d+\.?\d*) items/s"),
        LogPattern("epoch", r"Epoch (\d+)/(\d+)"),
    )
    assert error_patterns(config.error_patterns) == (
        LogPattern("out_of_memory_OOM", "(out of memory|OOM)", "critical"),
        LogPattern("CUDA_error", "(CUDA error)", "critical"),
        LogPattern("connection_refused_timeout", "(connection refused|timeout)", "warning"),
    )
    assert (config.alerts.email.address, config.alerts.terminal.enabled) == ("user@example.com", True)


def test_settings_have_the_defaults_of_the_flags(path: Path) -> None:
    config = load_monitor_config(None, REQUIRED)
    assert config == load(path, "alerts:\n", **REQUIRED)
    assert (config.job.gpu_ids, config.job.total_items) == ([], 0)
    times = (config.monitoring.check_interval, config.monitoring.launch_timeout, config.monitoring.stall_timeout)
    assert times == (10, 60, 300)
    patterns = (config.patterns.output, config.patterns.logs, config.patterns.checkpoints)
    assert patterns == ("output_worker_*.json", "worker_*.log", "checkpoint_*.pt")


def test_the_webhook_is_not_kept(path: Path) -> None:
    config = load(path, EXAMPLE)
    assert "hooks.slack.com" not in repr(config)
    assert config.alerts.slack.webhook == "given"


def test_flags_take_precedence_over_the_file(path: Path) -> None:
    config = load(path, EXAMPLE, job_name="other", log_dir="/elsewhere", gpu_ids=[7], gpu_metrics=True)
    assert (config.job.name, config.job.num_workers, config.paths.log_dir) == ("other", 4, "/elsewhere")
    assert (config.job.gpu_ids, config.monitoring.gpu_metrics) == ([7], True)
    off = load(path, EXAMPLE.replace("check_interval: 10", "gpu_metrics: true"), gpu_metrics=False)
    assert off.monitoring.gpu_metrics is False


def problems(path: Path, text: str, **flags: Any) -> tuple[str, ...]:
    """The problems of a text."""
    with pytest.raises(ConfigError) as caught:
        load(path, text, **(flags or REQUIRED))
    return caught.value.problems


def test_all_problems_are_reported_at_once_with_their_keys(path: Path) -> None:
    text = """
job: {name: 7, num_workers: four, gpu_ids: 0, total_items: -1}
paths: {output_dir: 7, logdir: x, log_dir: y}
patterns: {logs: "logs/*.log"}
monitoring: {chek_interval: 10, launch_timeout: 0, stall_timeout: soon}
progress_patterns: {items_processed: '(\\d+', epoch: 'Epoch \\d+', loss: 3}
error_patterns: [{pattern: '(x', severity: fatal, colour: red}, oom]
alert: {}
"""
    found = problems(path, text, stall_timeout="soon")
    places = [re.split(": ", problem, maxsplit=1)[0] for problem in found]
    assert places == [
        "job.name",
        "job.num_workers",
        "job.gpu_ids",
        "job.total_items",
        "paths.output_dir",
        "paths.logdir",
        "patterns.logs",
        "monitoring.launch_timeout",
        "--stall-timeout",
        "monitoring.chek_interval",
        "progress_patterns.loss",
        "error_patterns[0].pattern",
        "error_patterns[0].severity",
        "error_patterns[0].colour",
        "error_patterns[1]",
        "alert",
    ]
    assert 'job.name: 7 is not a text; write it in quotes: "7"' in found
    assert (
        'monitoring.chek_interval: unknown key "chek_interval"; did you mean "check_interval"? '
        "(known: alerts, check_interval, detail, gpu_metrics, launch_timeout, stall_timeout)"
    ) in found
    assert 'error_patterns[0].severity: "fatal" is not one of "critical", "warning" or "info"' in found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty; examples/monitor/monitor_config.yaml has every key"),
        ("- a\n", "contains a list, not a mapping of keys to values"),
        ("job: {name: a, name: b}\n", "line 1, column 16: not YAML: the key 'name' is duplicated"),
        (
            "job: x\n",
            'job: "x" is not a mapping; give it keys (known: gpu_ids, name, num_workers, total_items)',
        ),
        ("alerts: {email: a@b}\n", 'alerts.email: is not a mapping; for example {address: "a@b.org"}'),
        ("alerts: https://hooks/secret\n", "alerts: is not a mapping with email, slack and terminal"),
        ("alerts: {slack: {webhook: [https://secret]}}\n", "alerts.slack.webhook: is not a text; write it in quotes"),
        ("alerts: {email: {enabled: maybe}}\n", 'alerts.email.enabled: "maybe" is not true or false'),
        ("monitoring: {check_interval: 301}\n", "monitoring.check_interval: 301 must be less than or equal to 300"),
        ("monitoring: {gpu_metrics: 'yes'}\n", 'monitoring.gpu_metrics: "yes" is not true or false'),
        (
            "monitoring: {detail: all}\n",
            'monitoring.detail: "all" is not one of "essential", "normal" or "full"',
        ),
    ],
)
def test_a_single_problem_is_reported_in_one_line(path: Path, text: str, problem: str) -> None:
    assert problems(path, text) == (problem,)


def test_missing_keys_are_reported_with_their_flags(path: Path) -> None:
    text = "job: {name: a, num_workers: x, gpu_ids: null}\npaths: {output_dir: o}\n"
    assert problems(path, text, check_interval=1.0) == (
        'job.num_workers: "x" is not a whole number',
        "paths.log_dir: is missing; set it here or with --log-dir",
    )
    with pytest.raises(LauncherError, match=r"^missing --num-workers, --log-dir; .*--config FILE.*--run-dir DIR"):
        load_monitor_config(None, {"job_name": "a", "output_dir": "/o"})


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("num_workers", "job.num_workers"),
        ("num-workers", "job.num_workers"),
        ("job_name", "job"),
        ("log_dir", "paths.log_dir"),
        ("log_pattern", "patterns"),
        ("stall_timeout", "monitoring.stall_timeout"),
        ("webhook", "alerts.slack.webhook"),
    ],
)
def test_a_misplaced_key_gets_a_suggestion(path: Path, key: str, suggestion: str) -> None:
    (problem,) = problems(path, f"{key}: 4\n")
    assert problem.startswith(f'{key}: unknown key "{key}"; did you mean "{suggestion}"? (known: alerts, ')


def test_an_ambiguous_key_gets_no_suggestion(path: Path) -> None:
    assert "did you mean" not in problems(path, "enabled: true\n")[0]


def test_the_example_has_every_key() -> None:
    path = Path(__file__).parents[3] / "examples" / "monitor" / "monitor_config.yaml"
    config = load_monitor_config(str(path), {})
    assert config.progress_patterns
    assert config.error_patterns
    body = yaml.safe_load(path.read_text("utf-8"))
    assert set(body) == set(MonitorConfig.model_fields)
    for name in ("job", "paths", "patterns", "monitoring", "verify", "alerts"):
        assert set(body[name]) == set(type(getattr(config, name)).model_fields), name


def test_null_is_the_same_as_a_missing_key(path: Path) -> None:
    text = "job: {total_items: null, gpu_ids: }\npaths: {checkpoint_dir: null}\nalerts: null\n"
    assert load(path, text, **REQUIRED) == load_monitor_config(None, REQUIRED)


def test_patterns_with_the_same_text_have_different_names(path: Path) -> None:
    config = load(path, "error_patterns: [{pattern: 'a+'}, {pattern: 'a.'}, {pattern: 'b', name: bad}]", **REQUIRED)
    assert [pattern.name for pattern in error_patterns(config.error_patterns)] == ["a", "a_", "bad"]
    assert {pattern.severity for pattern in config.error_patterns} == {"warning"}
