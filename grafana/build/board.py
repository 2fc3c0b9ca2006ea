"""What all boards share: identity, links between them, and rows of panels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grafana_foundation_sdk.builders import bargauge, dashboard, gauge, heatmap, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.models.dashboard import Dashboard, DashboardCursorSync, DashboardLink, DashboardLinkType

from grafana.build import variables
from grafana.build.panels import heading

Panel = bargauge.Panel | gauge.Panel | heatmap.Panel | stat.Panel | statetimeline.Panel | table.Panel | timeseries.Panel
Rows = Sequence[tuple[str, Callable[[], Sequence[Panel]]]]
RUNBOOKS = "https://github.com/gpujob/gpujob/blob/main/alertmanager/runbooks"

# Each board with the question that it answers. All keep the cluster and the time range when one goes to another.
BOARDS = {
    "gpujob-fleet": ("All jobs", "Which job needs a look, what is wasted, and which hardware is ill?"),
    "gpujob-job": ("One job", "One GPU job from start to end: will it finish in time, and if not, why?"),
    "gpujob-node": ("One node", "One node and its GPUs: who has it, and is it well?"),
    "gpujob-self": ("Alerts and monitoring", "What fires, and does the monitoring itself work?"),
}

TO_RUNBOOK = ("What to do", RUNBOOKS + "/${__value.raw}.md")


def to_board(uid: str, **labels: str) -> tuple[str, str]:
    """A link to another board, with the labels of a row as its variables."""
    chosen = "".join(f"&var-{name}=${{__data.fields.{label}}}" for name, label in labels.items())
    return BOARDS[uid][0], f"/d/{uid}?${{cluster:queryparam}}{chosen}&${{__url_time_range}}"


class _Link(dashboard.DashboardLink):
    """A link above the panels; by default the SDK hides it in a menu."""

    def build(self) -> DashboardLink:
        link = super().build()
        link.placement = None  # type: ignore[assignment]
        return link


def _link(uid: str) -> _Link:
    title, question = BOARDS[uid]
    return (
        _Link(title)
        .type(DashboardLinkType.LINK)
        .url(f"/d/{uid}?${{cluster:queryparam}}")
        .tooltip(question)
        .keep_time(True)
    )


def build(
    uid: str,
    rows: Rows,
    choices: Sequence[dashboard.QueryVariable],
    marks: Sequence[dashboard.AnnotationQuery],
    since: str = "now-6h",
    open_rows: int | None = None,
) -> Dashboard:
    """The board, of which the first ``open_rows`` rows (default: all) are open at first; closed ones ask nothing.

    Ids of panels are by row, so that adding one moves no link to another row.
    """
    title, question = BOARDS[uid]
    board = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(question)
        .tags(["gpujob"])
        .readonly()
        .time(since, "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .links([_link(other) for other in BOARDS if other != uid])
        .with_variable(variables.datasource())
    )
    for choice in choices:
        board.with_variable(choice)
    for mark in marks:
        board.annotation(mark)
    for number, (name, panels) in enumerate(rows, start=1):
        row = heading(name).id(number * 100)
        is_open = open_rows is None or number <= open_rows
        if is_open:
            board.with_row(row)
        for index, panel in enumerate(panels(), start=1):
            (board if is_open else row).with_panel(panel.id(number * 100 + index))
        if not is_open:
            board.with_row(row)
    built = board.build()
    for link in built.links or []:
        link.placement = None  # type: ignore[assignment]  # at the top, not in a menu
    return built
