"""Change the alert rules one detail at a time: each change must fail a promtool test.

``python -m tests.alertmanager.mutations [ALERT...]`` lists the changes that no test notices. Thresholds, ``for``,
``keep_firing_for``, guards (``and``, ``unless``, ``or`` with their operands), comparisons, matchers of labels and
grouping labels are changed. It takes some minutes.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "alertmanager" / "rules"
TESTS = Path(__file__).resolve().parent
LEAST_SHARE = 0.95  # of all changes that a test must notice
PARALLEL = 2

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_NUMBER = re.compile(r"(?<![\w.\[{])(\d+(?:\.\d+)?)(?![\w.\]])")
_COMPARISON = re.compile(r"(?<![=!<>~])(>=|<=|==|!=|>|<)(?![=~])")
_GUARD = re.compile(r"\b(and|unless|or)\b")
_MATCHER = re.compile(r'\w+\s*(?:=~|!~|!=|=)\s*"(?:[^"\\]|\\.)*"\s*,?')
_GROUPING = re.compile(r"\b(?:on|by|without|ignoring|group_left)\s*\(([^()]*)\)")
_OPPOSITE = {">": "<", "<": ">", ">=": "<", "<=": ">", "==": "!=", "!=": "=="}


class Mutation(NamedTuple):
    """A changed rule."""

    alert: str
    change: str
    rule: dict[str, Any]


def mutations(rule: dict[str, Any]) -> Iterator[Mutation]:
    """All changed versions of an alert rule, each with one change."""
    name, expr = rule["alert"], str(rule["expr"])
    for key in ("for", "keep_firing_for"):
        text = str(rule.get(key, "0s"))
        if text != "0s":
            yield Mutation(name, f"without {key}: {text}", {k: v for k, v in rule.items() if k != key})
            yield Mutation(name, f"{key}: {text} x 3", {**rule, key: _tripled(text)})
    for change, changed in _changed_expressions(expr):
        if changed != expr:
            yield Mutation(name, change, {**rule, "expr": changed})


def _tripled(duration: str) -> str:
    return re.sub(r"\d+", lambda found: str(3 * int(found[0])), duration)


def _changed_expressions(expr: str) -> Iterator[tuple[str, str]]:
    hidden = _STRING.sub(lambda found: '"' + "_" * (len(found[0]) - 2) + '"', expr)  # texts are no code
    for found in _NUMBER.finditer(hidden):
        for factor in (0.5, 2.0):
            number = float(found[1]) * factor if float(found[1]) else factor
            yield _replaced(expr, found.start(), found.end(), f"{number:g}")
    for found in _COMPARISON.finditer(hidden):
        if not _is_within_braces(hidden, found.start()):
            yield _replaced(expr, found.start(), found.end(), _OPPOSITE[found[1]])
    for found in _GUARD.finditer(hidden):
        yield _replaced(expr, found.start(), _end_of_operand(hidden, found.end()), "")
    for found in _MATCHER.finditer(expr):
        if _is_within_braces(hidden, found.start()):
            yield _replaced(expr, found.start(), found.end(), "")
    for found in _GROUPING.finditer(hidden):
        for label in re.finditer(r"\w+\s*,?\s*", found[1]):
            yield _replaced(expr, found.start(1) + label.start(), found.start(1) + label.end(), "")


def _replaced(expr: str, start: int, end: int, text: str) -> tuple[str, str]:
    around = " ".join(expr[max(0, start - 40) : start].split()[-3:])
    old = " ".join(expr[start:end].split())
    changed = expr[:start] + text + expr[end:]
    return f"{around} [{old} -> {text}]", re.sub(r",\s*([)}])", r"\1", changed)


def _is_within_braces(hidden: str, at: int) -> bool:
    return hidden.rfind("{", 0, at) > hidden.rfind("}", 0, at)


def _end_of_operand(hidden: str, at: int) -> int:
    """Where the right-hand side of a set operator ends: before the next one, or where its parenthesis closes."""
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


def files_about(alert: str) -> list[dict[str, Any]]:
    """Test files with the cases of this alert, and only with what they expect of it."""
    found = []
    for file in all_files():
        cases = [_only(case, alert) for case in file["tests"]]
        cases = [case for case in cases if case["alert_rule_test"] or case["promql_expr_test"]]
        if cases:
            found.append({**file, "tests": cases})
    return found


def _only(case: dict[str, Any], alert: str) -> dict[str, Any]:
    def is_about_it(row: dict[str, Any]) -> bool:
        text = row["expr"] + str(row.get("exp_samples", ""))
        return re.findall(r'alertname="(\w+)"', text) == [alert]

    return {
        **case,
        "alert_rule_test": [row for row in case.get("alert_rule_test", ()) if row["alertname"] == alert],
        "promql_expr_test": [row for row in case.get("promql_expr_test", ()) if is_about_it(row)],
    }


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


def is_valid(rule: dict[str, Any]) -> bool:
    """Whether Prometheus would load this rule."""
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
        yaml.safe_dump({"groups": [{"name": "changed", "rules": [rule]}]}, file)
        file.flush()
        return subprocess.run(["promtool", "check", "rules", file.name], capture_output=True).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("alerts", nargs="*", metavar="ALERT", help="only these (default: all)")
    wanted = set(parser.parse_args().alerts)
    groups = [group for path in sorted(RULES.glob("*.yml")) for group in yaml.safe_load(path.read_text())["groups"]]
    rules = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    rules = [rule for rule in rules if not wanted or rule["alert"] in wanted]
    files = {rule["alert"]: files_about(rule["alert"]) for rule in rules}
    broken = [rule["alert"] for rule in rules if promtool_output(rule, files[rule["alert"]]) is not None]
    assert not broken, f"these fail unchanged: {', '.join(broken)}"

    def survives(mutation: Mutation) -> bool | None:
        if not is_valid(mutation.rule):
            return None
        return promtool_output(mutation.rule, files[mutation.alert]) is None

    changed = [mutation for rule in rules for mutation in mutations(rule)]
    survived = noticed = 0
    with ThreadPoolExecutor(PARALLEL) as pool:
        for mutation, result in zip(changed, pool.map(survives, changed), strict=True):
            survived += result is True
            noticed += result is False
            if result:
                print(f"{mutation.alert}: {mutation.change}", flush=True)
    share = noticed / max(1, survived + noticed)
    print(f"{noticed} of {survived + noticed} changes are noticed ({share:.1%})")
    return share < LEAST_SHARE


if __name__ == "__main__":
    sys.exit(main())
