"""The cases of the promtool tests as data, and the same cases among jobs, nodes and workers that are not theirs."""

import json
import re
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from exporter.contract.alert_thresholds import THRESHOLDS
from tests.alertmanager.threshold_cases import threshold_case

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "alertmanager" / "rules"
TESTS = Path(__file__).resolve().parent

Case = dict[str, Any]
Labels = Mapping[str, str]
NO_LABELS: Labels = {}
NOTIFY: Labels = {"notify": "me"}
OWNER: Labels = {"cluster": "c1", "user": "ada"}

ELSEWHERE = "elsewhere"  # value of the label by which a bystander differs
STEPS = 10_000  # samples of a bystander
OTHER_VALUES = {
    "gpujob_alert_threshold": "1000000000000000000",
    "gpujob_gpus_allocated": "8",
}  # of bystanders, where 1 would change nothing
# An operator's labels, before its right-hand side; that of `or` counts by itself. Strings are hidden first.
_GUARD = re.compile(r"(?<!\bor )\bon\s*\(([^()]*)\)(?:\s*group_left\s*\([^()]*\))?")
_SELECTOR = re.compile(r"\b([a-zA-Z_:][\w:]*)\s*(\{[^{}]*\})?(?=[\s)\[{]|$)")
_MATCHER = re.compile(r'(\w+)\s*(=~|=)\s*"([^"]*)"')
_COMPARED = re.compile(r"[\s)]*(?:\[\w+\]\s*\))?[\s)]*(==|>=|>)\s*(\d+(?:\.\d+)?)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_OF_ALERTS = re.compile(r'ALERTS\{(?:alertname(?:=~|!~|!=|=)"[^"]*",?)?')  # selectors start with the name, if at all
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
        found.append({**file, "tests": [_with_owner(case) for case in file["tests"]]})
    thresholds = [{**threshold_case(name), "alert_rule_test": []} for name in THRESHOLDS]
    return (*found, {"evaluation_interval": "1m", "tests": thresholds})


def _with_owner(case: Case) -> Case:
    """The case with the labels that it leaves out: series of jobs have an owner, all of ours an address."""

    def complete(labels: dict[str, str]) -> dict[str, str]:
        return {**OWNER, **labels} if "job_id" in labels else labels

    series = []
    for each in case["input_series"]:
        name, labels = each["series"].partition("{")[0], complete(_labels(each["series"]))
        if name.startswith("gpujob_"):
            labels = {**_address(labels), **labels}
        series.append({**each, "series": _series(name, labels)})
    rows = [
        {**row, "exp_alerts": [{**each, "exp_labels": complete(each["exp_labels"])} for each in row["exp_alerts"]]}
        if row.get("exp_alerts")
        else row
        for row in case.get("alert_rule_test", ())
    ]
    return {**case, "input_series": series, "alert_rule_test": rows}


def _address(labels: Labels) -> Labels:
    if node := labels.get("node"):
        return {"instance": f"{node}:9410", "job": "gpujob-sidecar"}
    return {"instance": "h:9400", "job": "gpujob-hub"}


@cache
def alert_rules() -> Mapping[str, dict[str, Any]]:
    """Every alert rule by its name."""
    groups = [group for path in sorted(RULES.glob("*.yml")) for group in yaml.safe_load(path.read_text())["groups"]]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def file_of(alert: str) -> str:
    """The name of the rule file with this alert."""
    return next(path.stem for path in RULES.glob("*.yml") if f"alert: {alert}\n" in path.read_text(encoding="utf-8"))


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
    counts = [row for row in rows if "by (alertname" in row["expr"] and row not in mine]  # of all alerts, or of several
    if not any(alert in _names_in(row) for row in rows):  # a count of all says that this one is silent
        is_about = any(each["series"].partition("{")[0] in _series_of(alert) for each in case["input_series"])
        counts = [row for row in counts if is_about and not re.search("alertname[=!]", row["expr"])]
    mine += [
        {**row, "exp_samples": [each for each in row.get("exp_samples") or () if alert in each["labels"]]}
        for row in counts
    ]
    return {
        **case,
        "alert_rule_test": [row for row in case.get("alert_rule_test", ()) if row["alertname"] == alert],
        "promql_expr_test": mine,
    }


@cache
def _series_of(alert: str) -> set[str]:
    names = {found[1] for found in _SELECTOR.finditer(str(alert_rules()[alert]["expr"]))}
    return {name for name in names if name.startswith("gpujob_") and name != "gpujob_phase"}


def _names_in(row: Case) -> list[str]:
    return re.findall(r'alertname="(\w+)"', row["expr"] + str(row.get("exp_samples", "")))


def promtool_output(rules: Sequence[dict[str, Any]], files: Sequence[dict[str, Any]]) -> str | None:
    """What promtool says of these alert rules and test files; None if all is as expected."""
    recording = yaml.safe_load((RULES / "gpujob-recording.yml").read_text(encoding="utf-8"))["groups"]
    order = [*(group["name"] for group in recording), "changed"]
    with tempfile.TemporaryDirectory() as folder:
        loaded = Path(folder, "rules.yml")
        loaded.write_text(yaml.safe_dump({"groups": [*recording, {"name": "changed", "rules": list(rules)}]}))
        names = [Path(folder, f"{number}.yml") for number in range(len(files))]
        for name, file in zip(names, files, strict=True):
            name.write_text(yaml.safe_dump({**file, "rule_files": [str(loaded)], "group_eval_order": order}))
        done = subprocess.run(["promtool", "test", "rules", *names], capture_output=True, text=True, check=False)
        return None if done.returncode == 0 else done.stdout + done.stderr


def expected_of(names: Sequence[str], alert: str, files: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The test files of an alert, with what they expect of it expected of an alert of each of these names."""
    return [{**file, "tests": [_of_names(names, alert, case) for case in file["tests"]]} for file in files]


def _of_names(names: Sequence[str], alert: str, case: Case) -> Case:
    rows = case.get("alert_rule_test", ())
    expected = case.get("promql_expr_test", ())
    return {
        **case,
        "alert_rule_test": [{**row, "alertname": name} for name in names for row in rows],
        "promql_expr_test": [
            {
                **row,
                "expr": _OF_ALERTS.sub(f'ALERTS{{alertname="{name}",', row["expr"]),
                "exp_samples": [
                    {**each, "labels": each["labels"].replace(f'alertname="{alert}"', f'alertname="{name}"')}
                    for each in row.get("exp_samples") or ()
                ],
            }
            for name in names
            for row in expected
        ],
    }


def variants(alert: str) -> list[dict[str, Any]]:
    """The cases of an alert in other circumstances, which change nothing of what they expect.

    Among bystanders: each is in the state that the right-hand side of an operator looks for, and differs in one of the
    operator's labels, so it is of another cluster, job, user, node or worker. Among other kinds: for each series that
    the rule selects by a label, one whose label has another value, and the states that are not. With a label `notify`,
    which the alert has then too. With all series twice, as those of a sidecar that was restarted on another port.
    """
    found = []
    expr = str(alert_rules()[alert]["expr"])
    guards = list(_guards(expr))
    for file in files_about(alert):
        cases = [case for case in file["tests"] if case["alert_rule_test"] or _counts(case)]
        made = [_among(case, _bystanders(case, guards), alert, "bystanders") for case in cases]
        made += [_among(case, _other_kinds(case, guards, expr), alert, "other kinds") for case in cases]
        made += [_notified(case, alert) for case in cases]
        made += [_twice(case) for case in cases]
        if made:
            found.append({**file, "tests": made})
    return found


class _Guard(NamedTuple):
    """A series on the right-hand side of an operator."""

    labels: tuple[str, ...]  # those of the operator
    name: str
    matched: Labels
    value: str  # with which it is true
    is_state: bool  # compared with 1


def _guards(expr: str) -> Iterator[_Guard]:
    hidden = hide_strings(expr)
    spans = [(found, end_of_operand(hidden, found.end())) for found in _GUARD.finditer(hidden)]
    for series in _SELECTOR.finditer(expr):
        around = [guard for guard, end in spans if guard.end() <= series.start() < end]
        if not around or not _SERIES.match(series[1]):
            continue
        labels = tuple(re.findall(r"\w+", around[-1][1]))  # of the innermost operator
        compared = _COMPARED.match(expr, series.end())
        value = (
            OTHER_VALUES.get(series[1], "1") if compared is None else f"{float(compared[2]) + (compared[1] == '>'):g}"
        )
        matchers = [
            (name, text.split("|") if kind == "=~" else [text])
            for name, kind, text in _MATCHER.findall(series[2] or "")
        ]
        for chosen in product(*(texts for _, texts in matchers)):
            matched = dict(zip((name for name, _ in matchers), chosen, strict=True))
            yield _Guard(labels, series[1], matched, value, compared is not None and compared[0].endswith("== 1"))


def _bystanders(case: Case, guards: list[_Guard]) -> Iterator[tuple[str, str]]:
    """Series and values of the bystanders of a case."""
    for guard in guards:
        for own in _labels_of(case, guard.labels):
            for label in own.keys() - guard.matched.keys():
                yield _series(guard.name, {**own, **guard.matched, label: ELSEWHERE}), guard.value


def _other_kinds(case: Case, guards: list[_Guard], expr: str) -> Iterator[tuple[str, str]]:
    """Series and values that differ from those that the rule looks for in one selected label, or in the value."""
    for guard in guards:
        for own in _labels_of(case, guard.labels):
            if guard.is_state:
                yield _series(guard.name, {**own, **guard.matched}), "0"
            for label in guard.matched:
                yield _series(guard.name, {**own, **guard.matched, label: ELSEWHERE}), guard.value
    for series in _SELECTOR.finditer(expr):
        compared = _COMPARED.match(expr, series.end())
        for label, kind, text in re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', series[2] or ""):
            other = text.split("|")[0] if kind.startswith("!") else ELSEWHERE
            for row in case["input_series"]:
                name = row["series"].partition("{")[0]
                if name == series[1]:
                    yield (
                        _series(name, {**_labels(row["series"]), label: other}),
                        "0+1000" if compared is None or compared[1] == ">" else compared[2],
                    )


def _labels_of(case: Case, labels: Collection[str]) -> list[dict[str, str]]:
    """The values that series of a case have of these labels."""
    present = [_labels(series["series"]) for series in case["input_series"]]
    return [{label: own[label] for label in labels} for own in present if set(labels) <= own.keys()]


def _series(name: str, labels: Labels) -> str:
    return f"{name}{{{_text(dict(sorted(labels.items())))}}}" if labels else name


def _counts(case: Case) -> list[dict[str, Any]]:
    """Counts of alerts that a case expects."""
    return [row for row in case.get("promql_expr_test", ()) if re.match(r"count[^{]*\(ALERTS{", row["expr"])]


def _among(case: Case, others: Iterator[tuple[str, str]], alert: str, how: str) -> Case:
    present = {series["series"] for series in case["input_series"]}
    series = [
        {"series": text, "values": f"{value}x{STEPS}"}
        for text, value in sorted(dict(others).items())
        if text not in present
    ]
    return _varied(case, alert, f"among {how}", [*case["input_series"], *series])


def _labels(series: str) -> dict[str, str]:
    return {name: json.loads(f'"{text}"') for name, text in _LABEL.findall(series)}


def _notified(case: Case, alert: str) -> Case:
    series = [_labelled(each, NOTIFY) if 'job_id="' in each["series"] else each for each in case["input_series"]]
    return _varied(case, alert, "with notify", series, NOTIFY)


def _twice(case: Case) -> Case:
    port = {"instance": "n1:2", "job": "gpujob-other"}
    again = [_labelled(each, port) for each in case["input_series"] if each["series"].startswith("gpujob_")]
    series = [*case["input_series"], *(each for each in again if each not in case["input_series"])]
    return {**case, "name": f"{case['name']} (on two ports)", "input_series": series, "promql_expr_test": _counts(case)}


def _labelled(series: dict[str, str], labels: Labels) -> dict[str, str]:
    """The series with these labels instead of its own of these names."""
    text = series["series"]
    return {**series, "series": _series(text.partition("{")[0], {**_labels(text), **labels})}


def _varied(case: Case, alert: str, how: str, series: list[Case], more: Labels = NO_LABELS) -> Case:
    own = {"alertname": alert, "alertstate": "firing"}
    others = "".join(f',{label}!="{ELSEWHERE}"' for label in ("cluster", "job_id", "user", "node", "worker", "rank"))
    rows = [
        {
            "expr": f"ALERTS{{{_text(own)}{others}}}",
            "eval_time": row["eval_time"],
            "exp_samples": [
                {
                    "labels": f"ALERTS{{{_text({**own, **_labels_expected(expected, more)})}}}",
                    "value": 1,
                }
                for expected in row.get("exp_alerts") or ()
            ],
        }
        for row in case["alert_rule_test"]
    ]
    counts = [{**row, "expr": re.sub(r"(ALERTS{[^}]*)", rf"\1{others}", row["expr"])} for row in _counts(case)]
    return {
        "name": f"{case.get('name')} ({how})",
        "interval": case.get("interval", "1m"),
        "input_series": series,
        "promql_expr_test": rows + counts,
    }


def _labels_expected(alert: dict[str, Any], of_a_job: Labels) -> Labels:
    own = alert["exp_labels"]
    return {**own, **of_a_job} if "job_id" in own else own


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
