"""The cases of the promtool tests as data, and the same cases among jobs, nodes and workers that are not theirs."""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "alertmanager" / "rules"
TESTS = Path(__file__).resolve().parent

Case = dict[str, Any]
Labels = Mapping[str, str]
NO_LABELS: Labels = {}

ELSEWHERE = "elsewhere"  # value of the label by which a bystander differs
WITHOUT_NOTIFY = ("job", "self")  # components of alerts from series of the hub and of Prometheus itself
COUNTS_TWICE = {"GpuJobWorkersLost", "GpuJobHubBlind"}  # alerts that count workers, or hubs, of two ports as two
STEPS = 10_000  # samples of a bystander
OTHER_VALUES = {"gpujob_alert_threshold": "1000000000"}  # of bystanders, where 1 would change nothing
# An operator's labels, before its right-hand side; that of `or` counts by itself. Strings are hidden first.
_GUARD = re.compile(r"(?<!\bor )\bon\s*\(([^()]*)\)(?:\s*group_left\s*\([^()]*\))?")
_SELECTOR = re.compile(r"\b([a-zA-Z_:][\w:]*)\s*(\{[^{}]*\})?(?=[\s)\[{]|$)")
_MATCHER = re.compile(r'(\w+)\s*(=~|=)\s*"([^"]*)"')
_COMPARED = re.compile(r"[\s)]*(?:\[\w+\]\s*\))?[\s)]*(==|>=|>)\s*(\d+(?:\.\d+)?)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SERIES = re.compile(r"gpujob_|up$")  # not of a recording rule, which would make it again


@cache
def all_files() -> tuple[dict[str, Any], ...]:
    """All promtool test files."""
    found = []
    for path in sorted(TESTS.glob("*.test.yml")):
        text = path.read_text(encoding="utf-8")
        file, as_text = yaml.safe_load(text), yaml.load(text, yaml.BaseLoader)  # noqa: S506  0x90 is no number
        for case, texts in zip(file["tests"], as_text["tests"], strict=True):
            case["input_series"] = texts["input_series"]
        found.append(file)
    return tuple(found)


@cache
def alert_rules() -> Mapping[str, dict[str, Any]]:
    """Every alert rule by its name."""
    groups = [group for path in sorted(RULES.glob("*.yml")) for group in yaml.safe_load(path.read_text())["groups"]]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def files_about(alert: str) -> list[dict[str, Any]]:
    """Test files with the cases of this alert, and only with what they expect of it."""
    found = []
    for file in all_files():
        cases = [_only(case, alert) for case in file["tests"]]
        cases = [case for case in cases if case["alert_rule_test"] or case["promql_expr_test"]]
        if cases:
            found.append({**file, "tests": cases})
    return found


def _only(case: Case, alert: str) -> Case:
    rows = list(case.get("promql_expr_test", ()))
    mine = [row for row in rows if _names_in(row) == [alert]]
    if any(alert in _names_in(row) for row in rows):  # counts of all alerts by name
        counts = [row for row in rows if "by (alertname" in row["expr"] and row not in mine]
        mine += [
            {**row, "exp_samples": [each for each in row.get("exp_samples") or () if alert in each["labels"]]}
            for row in counts
        ]
    return {
        **case,
        "alert_rule_test": [row for row in case.get("alert_rule_test", ()) if row["alertname"] == alert],
        "promql_expr_test": mine,
    }


def _names_in(row: Case) -> list[str]:
    return re.findall(r'alertname="(\w+)"', row["expr"] + str(row.get("exp_samples", "")))


def promtool_output(rule: dict[str, Any], files: list[dict[str, Any]]) -> str | None:
    """What promtool says of this rule and its test files; None if all is as expected."""
    recording = yaml.safe_load((RULES / "gpujob-recording.yml").read_text(encoding="utf-8"))["groups"]
    order = [*(group["name"] for group in recording), "changed"]
    with tempfile.TemporaryDirectory() as folder:
        rules = Path(folder, "rules.yml")
        rules.write_text(yaml.safe_dump({"groups": [*recording, {"name": "changed", "rules": [rule]}]}))
        names = [Path(folder, f"{number}.yml") for number in range(len(files))]
        for name, file in zip(names, files, strict=True):
            name.write_text(yaml.safe_dump({**file, "rule_files": [str(rules)], "group_eval_order": order}))
        done = subprocess.run(["promtool", "test", "rules", *names], capture_output=True, text=True, check=False)
        return None if done.returncode == 0 else done.stdout + done.stderr


def variants(alert: str) -> list[dict[str, Any]]:
    """The cases of an alert in other circumstances, which change nothing of what they expect.

    Among bystanders: each is in the state that the right-hand side of an operator looks for, and differs in one of the
    operator's labels. It is of another cluster, job, user, node or worker. With a label `notify`, which the alert has
    then too. With all series twice, as those of a sidecar that was restarted on another port.
    """
    found = []
    guards = list(_guards(str(alert_rules()[alert]["expr"])))
    for file in files_about(alert):
        cases = [case for case in file["tests"] if case["alert_rule_test"]]
        made = [_among(case, sorted(set(_bystanders(case, guards))), alert) for case in cases]
        if alert_rules()[alert]["labels"]["component"] not in WITHOUT_NOTIFY:
            made += [_notified(case, alert) for case in cases]
        if alert not in COUNTS_TWICE:
            made += [_twice(case, alert) for case in cases]
        if made:
            found.append({**file, "tests": made})
    return found


def _guards(expr: str) -> Iterator[tuple[tuple[str, ...], str, Labels, str]]:
    """Labels, series, matched labels and value of each series in a guard."""
    hidden = hide_strings(expr)
    for guard in _GUARD.finditer(hidden):
        labels = tuple(re.findall(r"\w+", guard[1]))
        end = end_of_operand(hidden, guard.end())
        for series in _SELECTOR.finditer(expr, guard.end(), end):
            if not _SERIES.match(series[1]):
                continue
            compared = _COMPARED.match(expr, series.end())
            value = (
                OTHER_VALUES.get(series[1], "1")
                if compared is None
                else f"{float(compared[2]) + (compared[1] == '>'):g}"
            )
            matchers = [
                (name, text.split("|") if kind == "=~" else [text])
                for name, kind, text in _MATCHER.findall(series[2] or "")
            ]
            for chosen in product(*(texts for _, texts in matchers)):
                yield labels, series[1], dict(zip((name for name, _ in matchers), chosen, strict=True)), value


def _bystanders(case: Case, guards: list[tuple[tuple[str, ...], str, Labels, str]]) -> Iterator[tuple[str, str]]:
    """Series and values of the bystanders of a case."""
    present = [dict(_LABEL.findall(series["series"])) for series in case["input_series"]]
    for labels, name, matched, value in guards:
        for own in present:
            if not set(labels) <= own.keys():
                continue
            for label in labels:
                if label in matched:
                    continue
                text = {**{key: own[key] for key in labels}, **matched, label: ELSEWHERE}
                yield (
                    f"{name}{{{','.join(f'{key}={json.dumps(text[key])}' for key in sorted(text))}}}",
                    f"{value}x{STEPS}",
                )


def _among(case: Case, bystanders: list[tuple[str, str]], alert: str) -> Case:
    series = [{"series": text, "values": values} for text, values in bystanders]
    return _varied(case, alert, "among bystanders", [*case["input_series"], *series])


def _notified(case: Case, alert: str) -> Case:
    label = {"notify": "oncall"}
    series = [{**each, "series": _with_labels(each["series"], label)} for each in case["input_series"]]
    return _varied(case, alert, "with notify", series, label)


def _twice(case: Case, alert: str) -> Case:
    port = {"instance": "n1:2", "job": "gpujob-other"}
    again = [{**each, "series": _with_labels(each["series"], port)} for each in case["input_series"]]
    return _varied(
        case,
        alert,
        "on two ports",
        [*case["input_series"], *(each for each in again if each not in case["input_series"])],
    )


def _with_labels(series: str, labels: Labels) -> str:
    """The name of a series of ours with these labels instead of its own of these names."""
    if not series.startswith("gpujob_"):
        return series
    name, _, rest = series.partition("{")
    own = dict(_LABEL.findall(rest))
    return f"{name}{{{_text({**own, **labels})}}}"


def _varied(case: Case, alert: str, how: str, series: list[Case], more: Labels = NO_LABELS) -> Case:
    own = {"alertname": alert, "alertstate": "firing"}
    others = "".join(f',{label}!="{ELSEWHERE}"' for label in ("cluster", "job_id", "user", "node", "worker", "rank"))
    return {
        "name": f"{case.get('name')} ({how})",
        "interval": case.get("interval", "1m"),
        "input_series": series,
        "promql_expr_test": [
            {
                "expr": f"ALERTS{{{_text(own)}{others}}}",
                "eval_time": row["eval_time"],
                "exp_samples": [
                    {"labels": f"ALERTS{{{_text({**own, **expected.get('exp_labels', {}), **more})}}}", "value": 1}
                    for expected in row.get("exp_alerts") or ()
                ],
            }
            for row in case["alert_rule_test"]
        ],
    }


def _text(labels: Mapping[str, object]) -> str:
    return ",".join(f"{name}={json.dumps(str(value))}" for name, value in labels.items())


def hide_strings(expr: str) -> str:
    """The expression with its strings blanked: what they contain is no code."""
    return _STRING.sub(lambda found: '"' + "_" * (len(found[0]) - 2) + '"', expr)


def end_of_operand(hidden: str, at: int) -> int:
    """Where the right-hand side of a set operator ends: before the next one, or where its parenthesis closes.

    ``hidden`` is the expression with its strings blanked.
    """
    depth = 0
    for found in re.finditer(r"[()]|\b(?:and|unless|or)\b", hidden[at:]):
        if found[0] == "(":
            depth += 1
        elif found[0] == ")":
            depth -= 1
            if depth < 0:
                return at + found.start()
        elif depth == 0:
            return at + found.start()
    return len(hidden)
