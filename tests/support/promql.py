"""Names of the metrics that rules, their texts and panels read."""

import re
from pathlib import Path

import promql_parser
import yaml

_IN_TEMPLATE = re.compile(r"\b(?:gpujob_\w+|\w+:gpujob_\w+:\w+)")


def metric_names(expr: str) -> set[str]:
    """Metric names that a PromQL expression selects.

    Raises ValueError when it does not parse, and for a selector without one fixed name, since nothing
    can then be checked. Grafana's own variables must have been replaced before.
    """
    names: set[str] = set()

    def visit(node: promql_parser.Expr) -> bool:
        if isinstance(node, promql_parser.MatrixSelector):
            node = node.vector_selector  # not visited by itself
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
    """Metric names that stand in the queries of an annotation."""
    return set(_IN_TEMPLATE.findall(text))


def rule_metric_names(folder: Path) -> set[str]:
    """Metrics that the rule files of a folder read, in expressions and in texts, less those they record."""
    needed: set[str] = set()
    recorded: set[str] = set()
    for path in sorted(folder.glob("*.yml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            for rule in group["rules"]:
                needed |= metric_names(rule["expr"])
                for text in rule.get("annotations", {}).values():
                    needed |= template_metric_names(text)
                if "record" in rule:
                    recorded.add(rule["record"])
    return needed - recorded
