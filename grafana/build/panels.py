"""Panels of each kind, with what all panels of that kind have in common.

Few kinds and options are used here, so that what draws the boards without Grafana can draw them all.
`tests/grafana/preview` draws all but state timelines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    gauge,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.models.common import (
    AxisPlacement,
    BarGaugeDisplayMode,
    BarGaugeValueMode,
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
    DataSourceRef,
    GraphDrawStyle,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    LineInterpolation,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DataTransformerConfig,
    DynamicConfigValue,
    FieldColorModeId,
    GridPos,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from grafana.build.queries import Query

DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")

# A threshold is a colour from a value on; the first has no value.
Steps = Sequence[tuple[str, float | None]]
NEUTRAL: Steps = (("text", None),)

# What a number stands for: its text and the colour of the text.
Words = Mapping[int, tuple[str, str]]


def target(query: Query, number: int = 0) -> prometheus.Dataquery:
    """The query as the `number`-th of its panel."""
    builder = (
        prometheus.Dataquery()
        .ref_id(chr(ord("A") + number))
        .datasource(DATASOURCE)
        .expr(query.expr)
        .legend_format(query.legend or "__auto")
        .format(PromQueryFormat.TABLE if query.table else PromQueryFormat.TIME_SERIES)
    )
    if query.step:
        builder = builder.interval(query.step)
    return builder.instant() if query.instant else builder.range()


def targets(queries: Sequence[Query]) -> list[prometheus.Dataquery]:
    return [target(query, number) for number, query in enumerate(queries)]


def thresholds(steps: Steps) -> dashboard.ThresholdsConfig:
    return (
        dashboard.ThresholdsConfig()
        .mode(ThresholdsMode.ABSOLUTE)
        .steps([Threshold(value=value, color=color) for color, value in steps])
    )


def mapping(words: Words) -> ValueMap:
    return ValueMap(
        options={
            str(value): ValueMappingResult(text=text, color=color, index=index)
            for index, (value, (text, color)) in enumerate(words.items())
        }
    )


def last() -> common.ReduceDataOptions:
    """The last value that is known."""
    return common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False)


def threshold_color() -> dashboard.FieldColor:
    return dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS)


def tile(
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    width: int,
    unit: str = "short",
    decimals: int | None = None,
    steps: Steps = NEUTRAL,
    words: Words | None = None,
    unknown: str = "unknown",
    height: int = 4,
) -> stat.Panel:
    """One number, or one for each query with its name below it."""
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .targets(list(targets(queries)))
        .unit(unit)
        .no_value(unknown)
        .thresholds(thresholds(steps))
        .color_scheme(threshold_color())
        .mappings([mapping(words)] if words else [])
        .reduce_options(last())
        .color_mode(BigValueColorMode.VALUE)
        .graph_mode(BigValueGraphMode.NONE)
        .text_mode(BigValueTextMode.VALUE if len(queries) == 1 else BigValueTextMode.VALUE_AND_NAME)
        .orientation(VizOrientation.AUTO)
        .span(width)
        .height(height)
    )
    return panel if decimals is None else panel.decimals(decimals)


def share(
    title: str,
    description: str,
    query: Query,
    *,
    width: int,
    steps: Steps,
    unknown: str = "unknown",
    height: int = 4,
) -> gauge.Panel:
    """A ratio from 0 to 1 on a dial."""
    return (
        gauge.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .targets([target(query)])
        .unit("percentunit")
        .decimals(1)
        .min(0)
        .max(1)
        .no_value(unknown)
        .thresholds(thresholds(steps))
        .color_scheme(threshold_color())
        .reduce_options(last())
        .show_threshold_markers(False)
        .show_threshold_labels(False)
        .span(width)
        .height(height)
    )


def bars(
    title: str,
    description: str,
    query: Query,
    *,
    width: int,
    unit: str = "short",
    maximum: float | None = None,
    steps: Steps,
    unknown: str = "unknown",
    height: int = 7,
) -> bargauge.Panel:
    """One bar and number for each series, as of now."""
    panel = (
        bargauge.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .targets([target(query)])
        .unit(unit)
        .min(0)
        .no_value(unknown)
        .thresholds(thresholds(steps))
        .color_scheme(threshold_color())
        .reduce_options(last())
        .display_mode(BarGaugeDisplayMode.BASIC)
        .value_mode(BarGaugeValueMode.TEXT)
        .orientation(VizOrientation.HORIZONTAL)
        .show_unfilled(True)
        .span(width)
        .height(height)
    )
    return panel if maximum is None else panel.max(maximum)


def lines(
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    width: int,
    unit: str = "short",
    decimals: int | None = None,
    minimum: float | None = 0,
    maximum: float | None = None,
    steps: Steps | None = None,
    stacked: bool = False,
    stepped: bool = False,
    shown_up_to: float | None = None,
    colors: Mapping[str, str] | None = None,
    unknown: str = "unknown",
    height: int = 8,
) -> timeseries.Panel:
    """Lines in time. `steps` are drawn as dashed lines at their values.

    The axis reaches at least `shown_up_to`. `colors` are of series that mean the same in every
    job, by their legend; others take the next of the palette.
    """
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .targets(list(targets(queries)))
        .unit(unit)
        .no_value(unknown)
        .color_scheme(dashboard.FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC))
        .draw_style(GraphDrawStyle.LINE)
        .line_interpolation(LineInterpolation.STEP_AFTER if stepped else LineInterpolation.LINEAR)
        .line_width(1 if stacked else 2)
        .fill_opacity(60 if stacked else 0)
        .show_points(VisibilityMode.NEVER)
        .span_nulls(False)
        .stacking(common.StackingConfig().mode(StackingMode.NORMAL if stacked else StackingMode.NONE).group("A"))
        .axis_placement(AxisPlacement.AUTO)
        .thresholds(thresholds(steps or NEUTRAL))
        .thresholds_style(
            common.GraphThresholdsStyleConfig().mode(
                GraphThresholdsStyleMode.DASHED if steps else GraphThresholdsStyleMode.OFF
            )
        )
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs([])
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
        .span(width)
        .height(height)
    )
    if decimals is not None:
        panel = panel.decimals(decimals)
    if minimum is not None:
        panel = panel.min(minimum)
    if shown_up_to is not None:
        panel = panel.axis_soft_max(shown_up_to)
    for legend, color in (colors or {}).items():
        fixed = {"mode": FieldColorModeId.FIXED, "fixedColor": color}
        panel = panel.override_by_name(legend, [DynamicConfigValue(id_val="color", value=fixed)])
    return panel if maximum is None else panel.max(maximum)


def states(
    title: str,
    description: str,
    query: Query,
    *,
    words: Words,
    width: int,
    unknown: str = "unknown",
    height: int = 7,
) -> statetimeline.Panel:
    """A row of coloured stretches for each series, with the word of each value."""
    return (
        statetimeline.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .targets([target(query)])
        .unit("short")
        .no_value(unknown)
        .thresholds(thresholds(NEUTRAL))
        .color_scheme(threshold_color())
        .mappings([mapping(words)])
        .show_value(VisibilityMode.AUTO)
        .row_height(0.9)
        .merge_values(True)
        .disable_pagination()
        .legend(common.VizLegendOptions().show_legend(False))
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
        .span(width)
        .height(height)
    )


def heat(
    title: str,
    description: str,
    query: Query,
    *,
    width: int,
    unit: str,
    minimum: float = 0,
    maximum: float | None = None,
    unknown: str = "unknown",
    height: int = 8,
) -> heatmap.Panel:
    """A row of coloured cells for each series: hundreds can be compared where lines would cover each other."""
    color = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Turbo").steps(64).min(minimum)
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .targets([target(query)])
        .unit(unit)
        .no_value(unknown)
        .thresholds(thresholds(NEUTRAL))
        .color(color if maximum is None else color.max(maximum))
        .cell_values(heatmap.CellValues().unit(unit))
        .filter_values(heatmap.FilterValueRange().le(-1))  # or Grafana hides cells of 0
        .show_value(VisibilityMode.NEVER)
        .cell_gap(0)
        .exemplars_color("red")
        .show_legend()
        .span(width)
        .height(height)
    )


def column(
    name: str,
    *,
    unit: str | None = None,
    decimals: int | None = None,
    words: Words | None = None,
    link: tuple[str, str] | None = None,
) -> tuple[str, list[DynamicConfigValue]]:
    """How the values of one column of a table are written. `link` is a title and an address."""
    properties = []
    if unit is not None:
        properties.append(DynamicConfigValue(id_val="unit", value=unit))
    if decimals is not None:
        properties.append(DynamicConfigValue(id_val="decimals", value=decimals))
    if words is not None:
        properties.append(DynamicConfigValue(id_val="mappings", value=[mapping(words)]))
    if link is not None:
        properties.append(DynamicConfigValue(id_val="links", value=[dict(zip(("title", "url"), link, strict=True))]))
    return name, properties


def rows(
    title: str,
    description: str,
    queries: Mapping[str, Query],
    *,
    labels: Sequence[str],
    columns: Sequence[tuple[str, list[DynamicConfigValue]]] = (),
    first_by: str | None = None,
    width: int,
    unknown: str = "",
    height: int = 7,
) -> table.Panel:
    """A table: first the labels that all queries share, then the value of each query.

    `queries` is by the heading of the value's column. The row with the highest value in the
    column `first_by` comes first.
    """
    values = ["Value"] if len(queries) == 1 else [f"Value #{chr(ord('A') + i)}" for i in range(len(queries))]
    order = {name: index for index, name in enumerate([*labels, *values])}
    panel = (
        table.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .targets(list(targets(list(queries.values()))))
        .no_value(unknown)
        .thresholds(thresholds(NEUTRAL))
        .color_scheme(threshold_color())
        .show_header(True)
        .with_transformation(DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(
            DataTransformerConfig(
                id_val="organize",
                options={
                    "excludeByName": {"Time": True},
                    "indexByName": order,
                    "renameByName": dict(zip(values, queries, strict=True)),
                },
            )
        )
        .span(width)
        .height(height)
    )
    for name, properties in columns:
        panel = panel.override_by_name(name, properties)
    if first_by is not None:
        panel = panel.sort_by([common.TableSortByFieldState().display_name(first_by).desc(True)])
    return panel


def heading(title: str) -> dashboard.Row:
    """The bar above a group of panels; open, unless panels are put into it."""
    return dashboard.Row(title).collapsed(False).grid_pos(GridPos(h=1, w=24))
