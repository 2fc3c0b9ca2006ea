"""What the board page draws of Grafana's JSON: each option with the values that it draws.

`ANY` is drawn whatever it says. `NO_EFFECT` are values with which Grafana, too, shows nothing else.
A list is written as its elements: `targets.expr` is that of each target.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.grafana.substitute import panels_of

Json = dict[str, Any]
ANY = None
Values = set[Any] | None

UNITS = re.compile(r"short|percentunit|bytes|binBps|watt|kwatth|celsius|s|dtdhms|dateTimeAsIso|(suffix|count):.+")
VARIABLE_QUERY = re.compile(r"label_values\((.*,)?\s*\w+\s*\)", re.DOTALL)
LINK = re.compile(r"/d/[\w-]+\?.*|https?://.*")
COLOUR = re.compile(
    r"((semi-)?dark-|(super-)?light-)?(green|yellow|orange|red|blue|purple)|gray|text|transparent|#[0-9a-fA-F]{6}"
)
REDUCE = {"lastNotNull"}
HAVE_OVERRIDES = {"table", "timeseries"}
LEGEND: dict[str, Values] = {
    "options.legend.displayMode": {"list"},
    "options.legend.placement": {"bottom"},
    "options.legend.showLegend": {True},
    "options.tooltip.mode": {"multi"},
    "options.tooltip.sort": {"asc", "desc", "none"},  # the page has the highest first
    "options.tooltip.maxHeight": ANY,
}
REDUCED: dict[str, Values] = {
    "options.reduceOptions.calcs": REDUCE,
    "options.reduceOptions.fields": {""},
    "options.reduceOptions.values": {False},
    "options.orientation": {"auto"},
    "options.sizing": {"auto"},
    "options.minVizHeight": ANY,
    "options.minVizWidth": ANY,
    "options.maxVizHeight": ANY,
}
COMMON: dict[str, Values] = {
    **dict.fromkeys(("id", "type", "title", "description", "gridPos.h", "gridPos.w", "gridPos.x", "gridPos.y"), ANY),
    **dict.fromkeys(("datasource.type", "datasource.uid", "pluginVersion"), ANY),
    "transparent": {False},
    "repeatDirection": ANY,  # says nothing without `repeat`
    **dict.fromkeys(("targets.datasource.type", "targets.datasource.uid", "targets.expr", "targets.refId"), ANY),
    **dict.fromkeys(("targets.legendFormat", "targets.instant", "targets.range"), ANY),
    "targets.interval": {"1m"},  # the page asks no query more often than the slowest scrape, here that of the hub
    "targets.format": {"time_series", "table"},
}
FIELD: dict[str, Values] = {
    **dict.fromkeys(("unit", "decimals", "min", "max", "noValue", "links.title", "links.url"), ANY),
    "links.targetBlank": ANY,
    "color.mode": {"thresholds", "palette-classic", "fixed"},
    "color.fixedColor": ANY,
    "thresholds.mode": {"absolute"},
    "thresholds.steps.value": ANY,
    "thresholds.steps.color": ANY,
    "mappings.type": {"value"},
    "mappings.options": ANY,
}
CUSTOM: dict[str, dict[str, Values]] = {
    "timeseries": {
        "drawStyle": {"line"},
        "lineInterpolation": {"linear", "stepAfter"},
        **dict.fromkeys(("lineWidth", "fillOpacity", "axisSoftMax"), ANY),
        "showPoints": {"never"},
        "spanNulls": {False},
        "stacking.mode": {"none", "normal"},
        "stacking.group": {"A"},
        "axisPlacement": {"auto"},
        "thresholdsStyle.mode": {"off", "dashed"},
    },
    "table": {
        "align": {"auto"},
        "inspect": {False},
    },
    "state-timeline": {"fillOpacity": ANY, "lineWidth": {0, 1}},
    "stat": {},
    "gauge": {},
    "bargauge": {},
    "heatmap": {},
}
OPTIONS: dict[str, dict[str, Values]] = {
    "timeseries": LEGEND,
    "state-timeline": {
        **LEGEND,
        "options.legend.showLegend": {False},
        "options.mergeValues": {True},
        "options.showValue": {"auto"},
        "options.alignValue": {"left"},
        "options.rowHeight": ANY,
    },
    "heatmap": {
        "options.calculate": {False},
        "options.color.mode": {"scheme"},
        "options.color.scheme": {"Turbo"},
        **dict.fromkeys(("options.color.min", "options.color.max"), ANY),
        "options.color.reverse": {False},
        **dict.fromkeys(("options.color.steps", "options.color.fill", "options.color.exponent"), ANY),
        **dict.fromkeys(("options.cellValues.unit", "options.cellGap"), ANY),
        "options.filterValues.le": {-1},  # none: the page shows cells of 0
        "options.showValue": {"never"},
        "options.legend.show": ANY,
        "options.exemplars.color": ANY,  # the queries have none
        "options.selectionMode": {"x"},
        "options.tooltip.mode": {"single"},
    },
    "stat": {
        **REDUCED,
        "options.textMode": {"value", "value_and_name"},
        "options.colorMode": {"value"},
        "options.graphMode": {"none"},
        "options.justifyMode": {"auto", "center"},
        "options.wideLayout": ANY,
        "options.showPercentChange": {False},
        "options.percentChangeColorMode": {"standard"},
    },
    "gauge": {**REDUCED, "options.showThresholdLabels": {False}, "options.showThresholdMarkers": {False}},
    "bargauge": {
        **REDUCED,
        "options.displayMode": {"basic"},
        "options.valueMode": {"text"},
        "options.namePlacement": {"auto", "left"},
        "options.showUnfilled": {True},
        "options.orientation": {"horizontal"},
        **{f"options.legend.{name}": ANY for name in ("displayMode", "placement", "showLegend", "calcs")},
    },
    "table": {
        "options.showHeader": {True},
        "options.sortBy.displayName": ANY,
        "options.sortBy.desc": ANY,
        "options.cellHeight": {"sm"},
        "options.frameIndex": {0},
        "options.showTypeIcons": {False},
        "options.footer.show": {False},
        "options.footer.countRows": {False},
        "options.footer.reducer": ANY,
        "transformations.id": {"merge", "organize"},
        "transformations.options": ANY,
    },
    "row": {"collapsed": ANY, "panels": ANY},
}
BOARD: dict[str, Values] = {
    **dict.fromkeys(("uid", "title", "description", "tags", "editable", "refresh", "schemaVersion", "version"), ANY),
    **dict.fromkeys(("time.from", "time.to", "timezone", "fiscalYearStartMonth", "graphTooltip", "weekStart"), ANY),
    "links.type": {"link"},
    **{f"links.{name}": ANY for name in ("title", "url", "tooltip", "icon", "targetBlank")},
    "links.keepTime": {True},
    **{f"links.{name}": {False} for name in ("asDropdown", "includeVars")},
    "links.tags": ANY,
    "templating.list.type": {"query", "datasource"},
    **{
        f"templating.list.{name}": ANY
        for name in (
            *(
                "name",
                "label",
                "description",
                "query",
                "definition",
                "sort",
                "multi",
                "includeAll",
                "allValue",
            ),
            *("current", "options", "refresh", "hide", "datasource", "allowCustomValue", "skipUrlSync"),
            *("auto", "auto_count", "auto_min"),
        )
    },
    "annotations.list.builtIn": {0},
    **{
        f"annotations.list.{name}": ANY
        for name in (
            *("name", "expr", "target", "datasource", "enable", "hide", "iconColor", "placement", "tagKeys"),
            *("textFormat", "titleFormat", "useValueForTime", "step"),
        )
    },
}


def leaves(value: object, known: dict[str, Values], path: str = "") -> Iterator[tuple[str, object]]:
    """Each value with its path. What is drawn as a whole is one."""
    if path in known and known[path] is ANY:
        yield path, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, known, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, known, path)
    else:
        yield path, value


def unknown(value: object, known: dict[str, Values], where: str) -> Iterator[str]:
    """What is not among the known options and values."""
    for path, found in leaves(value, known):
        if path not in known:
            yield f"{where}: {path}"
        elif (values := known[path]) is not None and found not in values:
            yield f"{where}: {path} = {found!r}"


def wrong_words(field: object, where: str) -> Iterator[str]:
    """Units, colours and links that the page does not know, at any depth."""
    if isinstance(field, list):
        for inner in field:
            yield from wrong_words(inner, where)
    if not isinstance(field, dict):
        return
    pairs = [(field["id"], field.get("value"))] if "matcher" not in field and "id" in field else []
    for name, inner in (*field.items(), *pairs):
        check = {"unit": UNITS, "color": COLOUR, "fixedColor": COLOUR, "iconColor": COLOUR, "url": LINK}.get(name)
        if isinstance(inner, str) and check is not None and not check.fullmatch(inner):
            yield f"{where}: {name} = {inner!r}"
        yield from wrong_words(inner, where)


def not_drawn(board: Json) -> list[str]:
    """What of a board the page does not draw."""
    found = list(unknown({name: value for name, value in board.items() if name != "panels"}, BOARD, "board"))
    found += wrong_words([board.get("links"), board.get("annotations")], "board")
    for variable in board["templating"]["list"]:
        query = variable["query"].get("query") if isinstance(variable.get("query"), dict) else variable.get("query", "")
        if variable["type"] == "query" and not VARIABLE_QUERY.fullmatch(query):
            found.append(f"variable {variable['name']}: query = {query!r}")
    for panel in panels_of(board):
        kind, where = panel["type"], f"{panel['title']} ({panel['type']})"
        if kind not in OPTIONS:
            found.append(where)
            continue
        config = panel.get("fieldConfig", {})
        rest = {name: value for name, value in panel.items() if name != "fieldConfig"}
        found += unknown(rest, {**COMMON, **OPTIONS[kind]}, where)
        field = {**FIELD, **{f"custom.{name}": values for name, values in CUSTOM.get(kind, {}).items()}}
        found += unknown(config.get("defaults", {}), field, where)
        found += wrong_words([config, panel.get("links"), panel.get("options")], where)
        for override in config.get("overrides", []):
            if kind not in HAVE_OVERRIDES:
                found.append(f"{where}: overrides")
            if override["matcher"]["id"] != "byName":
                found.append(f"{where}: matcher {override['matcher']['id']}")
            for item in override["properties"]:
                inner = item["value"]
                for part in reversed(item["id"].split(".")):
                    inner = {part: inner}
                found += unknown(inner, field, where)
    return found
