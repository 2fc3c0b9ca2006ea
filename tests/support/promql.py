"""Names of the metrics that rules, their texts and panels read."""

import re
from pathlib import Path

import promql_parser
import yaml

PROMETHEUS_SERIES = {  # of Prometheus and Alertmanager, about themselves
    "up",
    "prometheus_rule_evaluation_failures_total",
    "prometheus_notifications_errors_total",
    "prometheus_sd_file_read_errors_total",
    "alertmanager_notifications_failed_total",
}
BOARD_SERIES = PROMETHEUS_SERIES | {  # that boards read too
    *("ALERTS", "ALERTS_FOR_STATE", "scrape_duration_seconds", "scrape_samples_scraped"),
    *("prometheus_notifications_sent_total", "prometheus_notifications_dropped_total"),
    *("prometheus_rule_group_iterations_missed_total", "prometheus_rule_group_last_duration_seconds"),
    *("prometheus_sd_file_mtime_seconds", "alertmanager_notifications_total"),
}
_IN_TEMPLATE = re.compile(r"\b(?:gpujob_\w+|\w+:gpujob_\w+:\w+)")


def metric_names(expr: str) -> set[str]:
    """Metric names that a PromQL expression selects.

    Raises ValueError for an invalid expression, and for a selector without a fixed name, which cannot be
    checked. The variables of Grafana must already be replaced.
    """
    names: set[str] = set()

    def visit(node: promql_parser.Expr) -> bool:
        if isinstance(node, promql_parser.MatrixSelector):
            node = node.vector_selector  # the inner selector is not visited separately
        if isinstance(node, promql_parser.VectorSelector):
            names.add(_selected_name(node))
        return True

    try:
        tree = promql_parser.parse(expr)
    except ValueError as error:
        raise ValueError(f"not PromQL ({error}): {expr}") from error
    promql_parser.walk(tree, visit)
    return names


def _selected_name(selector: promql_parser.VectorSelector) -> str:
    if selector.name is not None:
        return selector.name
    for matcher in selector.matchers.matchers:
        if matcher.name == "__name__" and matcher.op == promql_parser.MatchOp.Equal:
            return matcher.value
    raise ValueError(f"selector without a fixed metric name: {selector.prettify()}")


def template_metric_names(text: str) -> set[str]:
    """Metric names in the queries of an annotation."""
    return set(_IN_TEMPLATE.findall(text))


def rule_metric_names(folder: Path, *, for_boards: bool = False) -> set[str]:
    """Metrics in expressions and annotations of the rule files of a folder, except recorded metrics.

    They are of alerts and what alerts read, or of the rules that record series for boards.
    """
    needed: set[str] = set()
    recorded: set[str] = set()
    for path in sorted(folder.glob("*.yml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            if (group["name"] == "gpujob-boards") is not for_boards:
                continue
            for rule in group["rules"]:
                needed |= metric_names(rule["expr"])
                for text in rule.get("annotations", {}).values():
                    needed |= template_metric_names(text)
                if "record" in rule:
                    recorded.add(rule["record"])
    return needed - recorded
