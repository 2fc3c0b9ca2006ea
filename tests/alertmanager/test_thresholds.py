"""Thresholds of jobs: the default of the rules, the job's own, and off, for each name."""

import re

import pytest

from exporter.contract.alert_thresholds import THRESHOLDS
from launcher.jobfile.alerts.thresholds import default_text, threshold_value
from launcher.jobfile.keys import read_descriptions
from tests.alertmanager.promtool_cases import promtool_output
from tests.alertmanager.test_rules import alerts, needs_tools
from tests.alertmanager.threshold_cases import threshold_case


@needs_tools
@pytest.mark.parametrize("name", THRESHOLDS)
def test_jobs_have_the_default_their_own_threshold_or_none(name: str) -> None:
    rules = [alerts()[alert] for alert in THRESHOLDS[name].alerts]
    assert promtool_output(rules, [{"evaluation_interval": "1m", "tests": [threshold_case(name)]}]) is None


@pytest.mark.parametrize("name", THRESHOLDS)
def test_rules_and_texts_have_the_default_of_the_table(name: str) -> None:
    known = THRESHOLDS[name]
    for alert in known.alerts:
        expr = alerts()[alert]["expr"]
        assert f'alert="{name}"' in expr
        defaults = re.findall(r", ([\d.]+), ([\d.]+)\)", expr) or [("10e9",) * 2] * ("< 10e9" in expr)
        assert {(float(low), float(high)) for low, high in defaults} == {(known.default, known.default)}
    assert known.unit != "bytes" or threshold_value(name, default_text(known)) == known.default
    for file, prefix in (("job", "that of the cluster file, else "), ("cluster", "")):
        text = read_descriptions()[file][f"alerts.{name}"].meaning
        shown = default_text(known)
        assert text.endswith(f"{known.meaning}. Null: {prefix}{shown}.")
