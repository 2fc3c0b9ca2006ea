"""Change the alert rules one detail at a time: each change must fail a promtool test.

``python -m tests.alertmanager.mutations [RULE...]`` lists the changes that no test notices, neither a case nor one of
its variants, and fails if they are more than a twentieth. Thresholds, ``for``, ``keep_firing_for``, guards (``and``,
``unless``, ``or`` with their operands), comparisons, matchers of labels and grouping labels are changed. A 0 becomes 1
or -1. It takes some minutes; ``--again FILE`` tries only what survived in the output of an earlier run.
"""

import argparse
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.alertmanager.promtool_cases import (
    alert_rules,
    end_of_operand,
    expected_of,
    file_of,
    files_about,
    hide_strings,
    promtool_output,
    variants,
)

LEAST_SHARE = 0.95  # of all changes that a test must notice
PARALLEL = 2
OF_ONE_ALERT = 8  # changes in a sample: most of the time goes into the cases of an alert, not into changes

# A number, or the two of a clamp, which both stand for its result
# Not that of vector(), which no one reads
_NUMBER = re.compile(r"(?<!vector\()(?<![\w.\[{])(\d+(?:\.\d+)?)(?:, (\1)(?=\)))?(?![\w.\]])")
_COMPARISON = re.compile(r"(?<![=!<>~])(>=|<=|==|!=|>|<)(?![=~])")
_GUARD = re.compile(r"\b(and|unless|or)\b")
_MATCHER = re.compile(r'\w+\s*(?:=~|!~|!=|=)\s*"(?:[^"\\]|\\.)*"\s*,?')
_GROUPING = re.compile(r"\b(?:on|by|without|ignoring|group_left)\s*\(([^()]*)\)")
_NAME = re.compile(r"Changed\d+Rule")  # of a changed rule
_OPPOSITE = {">": "<", "<": ">", ">=": "<", "<=": ">", "==": "!=", "!=": "=="}


class Mutation(NamedTuple):
    """A changed rule."""

    alert: str
    change: str
    rule: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.alert}: {self.change}"


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
        value = float(found[1])
        for number in (value * 0.5, value * 2) if value else (-1, 1):
            yield _replaced(expr, found.start(), found.end(), ", ".join([f"{number:g}"] * (2 if found[2] else 1)))
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


def noticed(alert: str, changed: Mapping[str, dict[str, Any]], files: Sequence[dict[str, Any]]) -> set[str]:
    """The names of those changed rules that fail these test files of an alert.

    All are tested at once, each as an alert of its name.
    """
    found: set[str] = set()
    while left := [name for name in changed if name not in found]:
        rules = [{**changed[name], "alert": name} for name in left]
        output = promtool_output(rules, expected_of(left, alert, files))
        if output is None:
            break
        found |= (new := set(_NAME.findall(output)))
        assert new, output
        if "err:" not in output:  # where the evaluation of one rule fails, promtool compares no other
            break
    return found


def valid(changed: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Those of the rules that Prometheus would load."""
    left = dict(changed)
    while left:
        with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
            rules = [{**rule, "alert": name} for name, rule in left.items()]
            yaml.safe_dump({"groups": [{"name": "changed", "rules": rules}]}, file)
            file.flush()
            done = subprocess.run(["promtool", "check", "rules", file.name], capture_output=True, text=True)
        if done.returncode == 0:
            break
        bad = set(_NAME.findall(done.stdout + done.stderr))
        assert bad, done.stderr
        left = {name: rule for name, rule in left.items() if name not in bad}
    return left


def survivors(alert: str, chosen: Sequence[Mutation]) -> tuple[list[Mutation], int]:
    """Those changes of an alert that no test notices, and how many there are that Prometheus would load."""
    same = Mutation(alert, "nothing", alert_rules()[alert])
    by_name = {f"Changed{number}Rule": mutation for number, mutation in enumerate([*chosen, same])}
    loaded = valid({name: mutation.rule for name, mutation in by_name.items()})
    left = loaded
    for files in (files_about(alert), variants(alert)):
        seen = noticed(alert, left, files)
        left = {name: rule for name, rule in left.items() if name not in seen}
    found = [by_name[name] for name in left]
    assert same in found, f"{alert} fails its tests unchanged"
    return found[:-1], len(loaded) - 1


def chosen_mutations(wanted: set[str], again: Path | None, sample: int | None) -> dict[str, list[Mutation]]:
    """The changes to try, by alert."""
    lines = again.read_text(encoding="utf-8").splitlines() if again else None
    found = {
        alert: [each for each in mutations(rule) if lines is None or str(each) in lines]
        for alert, rule in alert_rules().items()
        if not wanted or wanted & {alert, file_of(alert)}
    }
    found = {alert: each for alert, each in found.items() if each}
    if sample is None:
        return found
    dice = random.Random(0)
    alerts = dice.sample(list(found), min(-(-sample // OF_ONE_ALERT), len(found)))
    return {alert: dice.sample(found[alert], min(OF_ONE_ALERT, len(found[alert]))) for alert in alerts}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wanted", nargs="*", metavar="RULE", help="alerts or rule files, as gpujob-disk (default: all)")
    parser.add_argument("--again", type=Path, metavar="FILE", help="only the changes that an output of this names")
    parser.add_argument("--sample", type=int, metavar="N", help="only about N changes, the same each time")
    options = parser.parse_args(arguments)
    chosen = chosen_mutations(set(options.wanted), options.again, options.sample)
    tried = survived = 0
    with ThreadPoolExecutor(PARALLEL) as pool:
        for left, count in pool.map(survivors, chosen.keys(), chosen.values()):
            tried += count
            survived += len(left)
            for mutation in left:
                print(mutation, flush=True)
    share = (tried - survived) / max(1, tried)
    print(f"{tried - survived} of {tried} changes are noticed ({share:.1%})")
    return share < LEAST_SHARE


if __name__ == "__main__":
    sys.exit(main())
