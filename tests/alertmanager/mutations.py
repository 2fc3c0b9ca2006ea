"""Change the alert rules one detail at a time: each change must fail a promtool test.

``python -m tests.alertmanager.mutations [ALERT...]`` lists the changes that no test notices, alone or among
bystanders. Thresholds, ``for``, ``keep_firing_for``, guards (``and``, ``unless``, ``or`` with their operands),
comparisons, matchers of labels and grouping labels are changed. It takes some minutes.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import yaml

from tests.alertmanager.promtool_cases import (
    alert_rules,
    end_of_operand,
    files_about,
    hide_strings,
    promtool_output,
    variants,
)

LEAST_SHARE = 0.95  # of all changes that a test must notice
PARALLEL = 2

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
    hidden = hide_strings(expr)
    for found in _NUMBER.finditer(hidden):
        for factor in (0.5, 2.0):
            number = float(found[1]) * factor if float(found[1]) else factor
            yield _replaced(expr, found.start(), found.end(), f"{number:g}")
    for found in _COMPARISON.finditer(hidden):
        if not _is_within_braces(hidden, found.start()):
            yield _replaced(expr, found.start(), found.end(), _OPPOSITE[found[1]])
    for found in _GUARD.finditer(hidden):
        yield _replaced(expr, found.start(), end_of_operand(hidden, found.end()), "")
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
    rules = [rule for name, rule in alert_rules().items() if not wanted or name in wanted]
    files = {rule["alert"]: [*files_about(rule["alert"]), *variants(rule["alert"])] for rule in rules}
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
