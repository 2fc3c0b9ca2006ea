"""``monitor_config.yaml``: its settings, and all its problems at once."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import yaml

from exporter.attach.monitor_config import MOST_BYTES, parse_monitor_config, read_monitor_config
from exporter.attach.settings import merge_settings
from exporter.contract.errors import ExporterError
from exporter.contract.manifest import LogPattern

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


def test_every_key_of_a_complete_file_is_read() -> None:
    settings = merge_settings({}, parse_monitor_config(EXAMPLE, "monitor_config.yaml"))
    assert (settings.job_name, settings.num_workers, settings.gpu_ids) == ("embedding_generation_v2", 4, (0, 1, 2, 3))
    assert settings.total_items == 100000
    assert (settings.output_dir, settings.log_dir) == ("/scratch/outputs", "/scratch/logs")
    assert settings.checkpoint_dir == "/scratch/checkpoints"
    assert (settings.output_pattern, settings.log_pattern) == ("output_worker_*.json", "worker_*.log")
    assert settings.checkpoint_pattern == "checkpoint_epoch_*.pt"
    assert (settings.check_interval, settings.launch_timeout, settings.stall_timeout) == (10, 60, 300)
    assert settings.progress_patterns == (
        LogPattern("items", r"Processed (\d+)/(\d+) items"),
        LogPattern("throughput", r"(\d+\.?\d*) items/s"),
        LogPattern("epoch", r"Epoch (\d+)/(\d+)"),
    )
    assert settings.error_patterns == (
        LogPattern("out_of_memory_OOM", "(out of memory|OOM)", "critical"),
        LogPattern("CUDA_error", "(CUDA error)", "critical"),
        LogPattern("connection_refused_timeout", "(connection refused|timeout)", "warning"),
    )
    assert (settings.alert_email, settings.terminal) == ("user@example.com", True)


def test_the_webhook_is_not_kept() -> None:
    config = parse_monitor_config(EXAMPLE, "c")
    assert "hooks.slack.com" not in repr(config)
    assert config["alert_slack"] == "given"


def test_flags_take_precedence_over_the_file() -> None:
    flags = {"job_name": "other", "num_workers": None, "log_dir": "/elsewhere", "gpu_ids": [7]}
    settings = merge_settings(flags, parse_monitor_config(EXAMPLE, "c"))
    assert (settings.job_name, settings.num_workers, settings.log_dir) == ("other", 4, "/elsewhere")
    assert settings.gpu_ids == (7,)


def test_gpu_metrics_are_enabled_by_the_file_or_by_a_flag() -> None:
    assert merge_settings({}, parse_monitor_config(EXAMPLE, "c")).gpu_metrics is False
    config = parse_monitor_config(EXAMPLE.replace("check_interval: 10", "gpu_metrics: true"), "c")
    assert merge_settings({"gpu_metrics": None}, config).gpu_metrics is True
    assert merge_settings({"gpu_metrics": False}, config).gpu_metrics is False
    assert problems("monitoring: {gpu_metrics: 'yes'}") == ['monitoring.gpu_metrics: "yes" is not true or false']


REQUIRED = ("job_name", "num_workers", "output_dir", "log_dir")


def problems(text: str, given: Collection[str] = REQUIRED) -> list[str]:
    """The problems of a text without the heading. The marker of a position belongs to its problem."""
    with pytest.raises(ExporterError) as caught:
        parse_monitor_config(text, "c.yaml", given)
    head, *found = re.split(r"\n(?!    )", str(caught.value))
    if not found:
        return [head.removeprefix("c.yaml: ")]
    assert head == f"c.yaml: {len(found)} problem{'s' if len(found) > 1 else ''}"
    assert all(line.startswith("  ") for line in found)
    return [line[2:] for line in found]


def test_all_problems_are_reported_at_once_with_their_keys() -> None:
    text = """
job: {name: 7, num_workers: four, gpu_ids: 0, total_items: -1}
paths: {output_dir: "", logdir: x}
patterns: {logs: "logs/*.log"}
monitoring: {chek_interval: 10, launch_timeout: 0, stall_timeout: soon}
progress_patterns: {items_processed: '(\\d+', epoch: 'Epoch \\d+', loss: 3}
error_patterns: [{pattern: '(x', severity: fatal, colour: red}, oom]
alert: {}
"""
    assert problems(text) == [
        "job.name: 7 is not a text; write it in quotes",
        'job.num_workers: "four" is not a whole number',
        "job.gpu_ids: 0 is not a list; for example [0, 1, 2, 3]",
        "job.total_items: -1 must be 0 or more",
        'paths.output_dir: "" is empty',
        'paths.logdir: unknown key "logdir"; did you mean "log_dir"? (known: checkpoint_dir, log_dir, output_dir)',
        'patterns.logs: "logs/*.log" is not a pattern of file names; give the directory under paths',
        (
            'monitoring.chek_interval: unknown key "chek_interval"; did you mean "check_interval"? '
            "(known: check_interval, gpu_metrics, launch_timeout, stall_timeout)"
        ),
        "monitoring.launch_timeout: 0 must be above 0",
        'monitoring.stall_timeout: "soon" is not a number of seconds',
        (
            "progress_patterns.items_processed: is not a regular expression: missing ), unterminated subpattern at "
            "position 0; to match such a character literally, put a backslash before it\n    (\\d+\n    ^"
        ),
        (
            'progress_patterns.epoch: "Epoch \\d+" has no group for the number; '
            "put parentheses around it, as in Epoch (\\d+)"
        ),
        "progress_patterns.loss: 3 is not a regular expression",
        'error_patterns[0].colour: unknown key "colour" (known: name, pattern, severity)',
        'error_patterns[0].severity: "fatal" is not one of "critical", "warning", "info"',
        (
            "error_patterns[0].pattern: is not a regular expression: missing ), unterminated subpattern at position 0; "
            "to match such a character literally, put a backslash before it\n    (x\n    ^"
        ),
        'error_patterns[1]: "oom" is not a mapping with a pattern and a severity',
        (
            'alert: unknown key "alert"; did you mean "alerts"? '
            "(known: alerts, error_patterns, job, monitoring, paths, patterns, progress_patterns)"
        ),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("- a\n", "holds a list, not a mapping of keys to values"),
        ("job: {name: a\n", "line 2, column 1: not YAML: expected ',' or '}', but got '<stream end>'"),
        ("job: {name: a, name: b}\n", "line 1, column 16: not YAML: the key 'name' is duplicated"),
        (
            "job: x\n",
            'job: "x" is not a mapping with keys among gpu_ids, name, num_workers, total_items',
        ),
        (
            "alerts: {email: a@b}\n",
            (
                "alerts.email: the value is not a mapping with keys among address, enabled, smtp_port, smtp_server; "
                'for example {address: "user@example.com"}'
            ),
        ),
        (
            "alerts: https://hooks/secret\n",
            (
                "alerts: the value is not a mapping with keys among email, slack, terminal; "
                'for example {email: {address: "user@example.com"}}'
            ),
        ),
        ("alerts: {slack: {webhook: 5}}\n", "alerts.slack.webhook: the value is not a text; write it in quotes"),
        ("alerts: {email: {enabled: maybe}}\n", "alerts.email.enabled: the value is not true or false"),
    ],
)
def test_a_single_problem_is_reported_in_one_line(text: str, problem: str) -> None:
    assert problems(text) == [problem]


def test_missing_keys_are_reported_with_their_flags() -> None:
    assert problems("job: {name: a, num_workers: x, gpu_ids: null}\npaths: {output_dir: o}\n", ()) == [
        'job.num_workers: "x" is not a whole number',
        "paths.log_dir: is missing; set it here or with --log-dir",
    ]
    assert problems("paths: {output_dir: o, log_dir: l}", ("num_workers",)) == [
        "job.name: is missing; set it here or with --job-name"
    ]


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("num_workers", "job.num_workers"),
        ("num-workers", "job.num_workers"),
        ("num_worker", "job.num_workers"),
        ("job_name", "job.name"),
        ("log_dir", "paths.log_dir"),
        ("log_pattern", "patterns.logs"),
        ("stall_timeout", "monitoring.stall_timeout"),
        ("webhook", "alerts.slack.webhook"),
    ],
)
def test_a_misplaced_key_gets_a_suggestion(key: str, suggestion: str) -> None:
    (problem,) = problems(f"{key}: 4\n")
    assert problem.startswith(f'{key}: unknown key "{key}"; did you mean "{suggestion}"? (known: alerts, ')


def test_an_ambiguous_key_gets_no_suggestion() -> None:
    assert "did you mean" not in problems("enabled: true\n")[0]


def test_the_example_has_every_key(tmp_path: Path) -> None:
    path = Path(__file__).parents[3] / "examples" / "monitor" / "monitor_config.yaml"
    settings = merge_settings({}, read_monitor_config(str(path)))
    assert (settings.job_name, settings.num_workers, settings.gpu_ids) == ("embed", 4, (0, 1, 2, 3))
    assert settings.progress_patterns
    assert settings.error_patterns
    body = yaml.safe_load(path.read_text("utf-8"))
    assert {name: set(keys) for name, keys in body.items() if "patterns" not in name} == {
        "job": {"name", "num_workers", "gpu_ids", "total_items"},
        "paths": {"output_dir", "log_dir", "checkpoint_dir"},
        "monitoring": {"check_interval", "gpu_metrics", "launch_timeout", "stall_timeout"},
        "alerts": {"email", "slack", "terminal"},
    }
    assert set(body["patterns"]) == {"output", "logs", "checkpoints"}


@pytest.mark.parametrize("line", ["", "gpu_ids:", "gpu_ids: []"])
def test_a_job_may_have_no_gpus(line: str) -> None:
    text = f"job:\n  name: a\n  num_workers: 2\n  {line}\npaths: {{output_dir: /o, log_dir: /l}}\n"
    assert merge_settings({}, parse_monitor_config(text, "c")).gpu_ids == ()


def test_null_is_the_same_as_a_missing_key() -> None:
    config = parse_monitor_config(
        "job: {total_items: null}\npaths: {checkpoint_dir: null}\nalerts: null\n", "c", REQUIRED
    )
    assert config == {}


def test_patterns_with_the_same_text_have_different_names() -> None:
    text = "error_patterns: [{pattern: 'a+'}, {pattern: 'a.'}, {pattern: '++', name: x}, {pattern: 'b', name: bad}]"
    with pytest.raises(ExporterError, match=r"error_patterns\[2\].pattern"):
        parse_monitor_config(text, "c", REQUIRED)
    config: dict[str, Any] = parse_monitor_config(text.replace("{pattern: '++', name: x}, ", ""), "c", REQUIRED)
    assert [pattern.name for pattern in config["error_patterns"]] == ["a", "a_", "bad"]
    assert {pattern.severity for pattern in config["error_patterns"]} == {"warning"}


def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ExporterError, match=r"none\.yaml: No such file"):
        read_monitor_config(str(tmp_path / "none.yaml"))
    path = tmp_path / "c.yaml"
    path.write_bytes(b"job: \xff\n")
    with pytest.raises(ExporterError, match=r"c\.yaml: is not UTF-8 text: invalid start byte at byte 5"):
        read_monitor_config(str(path))
    path.write_bytes(b"#" * (MOST_BYTES + 1))
    with pytest.raises(ExporterError, match="is larger than"):
        read_monitor_config(str(path))
