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

UNITS = re.compile(
    r"none|short|percent|percentunit|bytes|decbytes|binBps|Bps|watt|joule|kwatth|celsius|hertz|s|ms|m|h|dtdhms"
    r"|dtdurations|dateTimeAsIso|dateTimeAsLocal|dateTimeFromNow|(suffix|prefix|count):.+"
)
VARIABLE_QUERY = re.compile(r"label_values\((.*,)?\s*\w+\s*\)|query_result\(.*\)", re.DOTALL)
LINK = re.compile(r"/d/[\w-]+(\?.*)?|https?://.*|\$\{__data\.fields\..+:raw\}")
COLOUR = re.compile(
    r"((semi-)?dark-|(super-)?light-)?(green|yellow|orange|red|blue|purple)|gray|text|transparent|#[0-9a-fA-F]{6}"
)
REDUCE = {"lastNotNull", "last", "min", "max", "mean", "sum"}
LEGEND: dict[str, Values] = {
    "options.legend.displayMode": {"list", "table", "hidden"},
    "options.legend.placement": {"bottom", "right"},
    "options.legend.showLegend": ANY,
    "options.legend.calcs": REDUCE,
    "options.tooltip.mode": {"multi"},
    "options.tooltip.sort": {"asc", "desc", "none"},  # the page has the highest first
    "options.tooltip.maxHeight": ANY,
}
REDUCED: dict[str, Values] = {
    "options.reduceOptions.calcs": REDUCE,
    "options.reduceOptions.fields": {""},
    "options.reduceOptions.values": {False},
    "options.orientation": {"auto", "horizontal", "vertical"},
    "options.sizing": {"auto"},
    "options.minVizHeight": ANY,
    "options.minVizWidth": ANY,
    "options.maxVizHeight": ANY,
}
COMMON: dict[str, Values] = {
    **dict.fromkeys(("id", "type", "title", "description", "gridPos.h", "gridPos.w", "gridPos.x", "gridPos.y"), ANY),
    **dict.fromkeys(("datasource.type", "datasource.uid", "pluginVersion", "links.title", "links.url"), ANY),
    "links.targetBlank": ANY,
    "transparent": {False},
    "repeatDirection": ANY,  # says nothing without `repeat`
    **dict.fromkeys(("targets.datasource.type", "targets.datasource.uid", "targets.expr", "targets.refId"), ANY),
    **dict.fromkeys(("targets.legendFormat", "targets.instant", "targets.range", "targets.hide"), ANY),
    "targets.format": {"time_series", "table"},
}
FIELD: dict[str, Values] = {
    **dict.fromkeys(("unit", "decimals", "min", "max", "noValue", "displayName", "links.title", "links.url"), ANY),
    "links.targetBlank": ANY,
    "color.mode": {"thresholds", "palette-classic", "fixed"},
    "color.fixedColor": ANY,
    "thresholds.mode": {"absolute"},
    "thresholds.steps.value": ANY,
    "thresholds.steps.color": ANY,
    "mappings.type": {"value", "range", "special"},
    "mappings.options": ANY,
}
CUSTOM: dict[str, dict[str, Values]] = {
    "timeseries": {
        "drawStyle": {"line", "bars"},
        "lineInterpolation": {"linear", "stepAfter"},
        **dict.fromkeys(("lineWidth", "fillOpacity", "axisSoftMin", "axisSoftMax"), ANY),
        "lineStyle.fill": {"solid", "dash"},
        "lineStyle.dash": ANY,
        "showPoints": {"never"},
        "spanNulls": {True, False},
        "stacking.mode": {"none", "normal"},
        "stacking.group": {"A"},
        "axisPlacement": {"auto"},
        "thresholdsStyle.mode": {"off", "dashed"},
    },
    "table": {
        "align": {"auto"},
        "inspect": {False},
        "width": ANY,
        "hidden": ANY,
        "cellOptions.type": {"auto", "color-text", "color-background", "gauge"},
        "cellOptions.mode": {"basic"},
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
        "options.tooltip.mode": {"single", "multi"},
        "options.perPage": ANY,  # the page shows all rows
        "options.mergeValues": {True},
        "options.showValue": {"auto", "never", "always"},
        "options.alignValue": {"left"},
        "options.rowHeight": ANY,
    },
    "heatmap": {
        "options.calculate": {False},
        "options.color.mode": {"scheme"},
        "options.color.scheme": {"Turbo", "RdYlGn", "Blues"},
        **dict.fromkeys(("options.color.min", "options.color.max", "options.color.reverse"), ANY),
        **dict.fromkeys(("options.color.steps", "options.color.fill", "options.color.exponent"), ANY),
        "options.color.scale": {"exponential"},  # of the opacity, which the page has not
        **dict.fromkeys(("options.cellValues.unit", "options.yAxis.unit", "options.cellGap"), ANY),
        "options.filterValues.le": {-1},  # none: the page shows cells of 0
        "options.yAxis.axisPlacement": {"left"},
        "options.yAxis.reverse": {False},
        "options.rowsFrame.layout": {"auto"},
        "options.showValue": {"never"},
        "options.legend.show": ANY,
        "options.exemplars.color": ANY,  # the queries have none
        "options.selectionMode": {"x"},
        "options.tooltip.mode": {"single"},
        "options.tooltip.yHistogram": {False},
        "options.tooltip.showColorScale": {False},
    },
    "stat": {
        **REDUCED,
        "options.textMode": {"auto", "value", "value_and_name", "name"},
        "options.colorMode": {"value", "none", "background", "background_solid"},
        "options.graphMode": {"none", "area"},
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
        "options.showHeader": ANY,
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
    "text": {"options.mode": {"markdown"}, "options.content": ANY},
    "row": {"collapsed": ANY, "panels": ANY},
}
BOARD: dict[str, Values] = {
    **dict.fromkeys(("uid", "title", "description", "tags", "editable", "refresh", "schemaVersion", "version"), ANY),
    **dict.fromkeys(("time.from", "time.to", "timezone", "fiscalYearStartMonth", "graphTooltip", "weekStart"), ANY),
    "links.type": {"link"},
    **{f"links.{name}": ANY for name in ("title", "url", "tooltip", "keepTime", "includeVars", "icon", "targetBlank")},
    **{f"links.{name}": {False} for name in ("asDropdown",)},
    "links.tags": ANY,
    "templating.list.type": {"query", "textbox", "custom", "datasource"},
    **{
        f"templating.list.{name}": ANY
        for name in (
            *(
                "name",
                "label",
                "description",
                "query",
                "definition",
                "regex",
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
            if override["matcher"]["id"] not in ("byName", "byRegexp"):
                found.append(f"{where}: matcher {override['matcher']['id']}")
            for item in override["properties"]:
                inner = item["value"]
                for part in reversed(item["id"].split(".")):
                    inner = {part: inner}
                found += unknown(inner, field, where)
    return found
