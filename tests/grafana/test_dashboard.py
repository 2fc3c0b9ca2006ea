"""The committed boards are up to date and follow the rules for boards."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from exporter.collecting.detail import LATE_FAMILIES
from exporter.hub.page.series import FAMILIES as HUB_FAMILIES
from grafana.build import __main__ as build
from grafana.build import job, queries
from grafana.build.board import RUNBOOKS
from tests.grafana.substitute import MAY_BE_EMPTY, VARIABLE, panels_of, substitute, variables
from tests.support.promql import metric_names

ROOT = Path(__file__).resolve().parents[2]
DRAWN = {"timeseries", "stat", "gauge", "bargauge", "table", "row", "state-timeline", "heatmap"}
UIDS = [name.removesuffix(".json") for name in build.texts()]
VALUES = variables(cluster="c1", job_id="42")
WATCHDOG = 'alertname="GpuJobWatchdog"'  # an alert of no cluster
OF_NO_CLUSTER = re.compile(r'^cluster="", alertname=~"GpuJob\.\+"')  # as others on Prometheus itself may be
COUNTED_LATE = {f"gpujob_{name}" for name in LATE_FAMILIES if name.endswith("_total")}  # no series while they are 0
IN_LINKS = {"__url_time_range"}
TIME_OF_A_ROW = "&from=${__data.fields.started.numeric}&to=${__data.fields.ended.numeric}"
RATES = {"rate", "irate", "increase"}
# Windows that belong to the meaning of a panel. All others follow the resolution.
FIXED_WINDOWS = {"$__range", "$__range:$__interval", "5m"}
# The first values of counters that began in the window, beside their increase
FIRST_VALUES = re.compile(
    r"min without \(instance\) \(min_over_time\((?P<series>\S+\{.*?\})\[(?P<window>\S+)\]\)\)"
    r"\s+unless ignoring \(instance\) (?P=series) offset (?P=window)"
    r"(?:\s+and ignoring \(instance\) \(sum without \(instance\) \(count_over_time\((?P=series)\[(?P=window)\]\)\)"
    r"\s+< on \(cluster\) group_left \(\) max by \(cluster\) \(.*\)\))?"
)
WRAPPERS = (
    promql_parser.AggregateExpr,
    promql_parser.ParenExpr,
    promql_parser.SubqueryExpr,
    promql_parser.UnaryExpr,
)

Json = dict[str, Any]


@pytest.fixture(scope="module", params=UIDS)
def board(request: pytest.FixtureRequest) -> Json:
    return load_board(request.param)


@pytest.fixture(scope="module")
def panels(board: Json) -> list[Json]:
    return [panel for panel in panels_of(board) if panel["type"] != "row"]


@pytest.fixture(scope="module")
def job_board() -> Json:
    return load_board(job.UID)


def nodes(value: object) -> Iterator[Json]:
    """Every object within a JSON value."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from nodes(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from nodes(inner)


def load_board(uid: str) -> Json:
    loaded: Json = json.loads((build.DASHBOARDS / f"{uid}.json").read_text(encoding="utf-8"))
    return loaded


def targets_of(board: Json) -> list[Json]:
    """The queries of panels and marks."""
    return [item["target"] for item in board["annotations"]["list"]] + [
        target for item in nodes(board["panels"]) for target in item.get("targets") or []
    ]


def parse(expression: str) -> promql_parser.Expr:
    return promql_parser.parse(substitute(expression, VALUES))


def selectors(node: object, inside: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each metric of a parsed query with its enclosing functions, outermost first."""
    if isinstance(node, promql_parser.VectorSelector):
        yield str(node.name), inside
    elif isinstance(node, promql_parser.MatrixSelector):
        yield str(node.vector_selector.name), inside
    elif isinstance(node, promql_parser.Call):
        for argument in node.args:
            yield from selectors(argument, (*inside, node.func.name))
    elif isinstance(node, promql_parser.BinaryExpr):
        yield from selectors(node.lhs, inside)
        yield from selectors(node.rhs, inside)
    elif isinstance(node, WRAPPERS):
        yield from selectors(node.expr, inside)
    elif not isinstance(node, promql_parser.NumberLiteral | promql_parser.StringLiteral):
        raise TypeError(f"unexpected part of a query: {node!r}")


ALL = pytest.mark.parametrize("query", queries.all_queries(), ids=lambda query: query.name)


def test_committed_files_are_up_to_date() -> None:
    names = build.stale(build.DASHBOARDS)
    assert not names, f"out of date in grafana/dashboards: {names}; {build.REGENERATE}"


def test_check_reports_changed_missing_and_unknown_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "DASHBOARDS", tmp_path)
    assert build.main(["--check"]) == 1
    assert build.main([]) == 0
    assert build.main(["--check"]) == 0
    (tmp_path / "gpujob-job.json").write_text("{}", encoding="utf-8")
    (tmp_path / "old.json").write_text("{}", encoding="utf-8")
    capsys.readouterr()
    assert build.main(["--check"]) == 1
    errors = capsys.readouterr().err
    assert "gpujob-job.json is out of date; run: python -m grafana.build" in errors
    assert "old.json" in errors


@pytest.mark.parametrize("seed", ["1", "2"])
def test_the_build_does_not_depend_on_the_order_of_sets(seed: str) -> None:
    script = "import json; from grafana.build import __main__ as build; print(json.dumps(build.texts()))"
    command = [sys.executable, "-W", "ignore", "-c", script]
    env = os.environ | {"PYTHONHASHSEED": seed}
    found = subprocess.run(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert json.loads(found.stdout) == build.texts()


def test_identity(board: Json) -> None:
    assert board["uid"] in UIDS
    assert (build.DASHBOARDS / f"{board['uid']}.json").exists()
    assert board["tags"] == ["gpujob"]
    assert board["editable"] is False
    assert "id" not in board, "an id belongs to one Grafana server"


def test_panel_ids_are_unique(board: Json) -> None:
    ids = [panel["id"] for panel in panels_of(board)]
    assert len(ids) == len(set(ids))


def test_panel_titles_are_unique(board: Json) -> None:
    titles = [(panel["type"] == "row", panel["title"]) for panel in panels_of(board)]
    assert len(titles) == len(set(titles))


def test_only_known_panel_types(board: Json) -> None:
    assert {panel["type"] for panel in panels_of(board)} <= DRAWN


def test_panels_do_not_overlap_and_fill_the_width(board: Json) -> None:
    used: dict[tuple[int, int], str] = {}
    for panel in panels_of(board):
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in used, f"{panel['title']!r} lies on {used[x, y]!r}"
                used[x, y] = panel["title"]
    height = max(y for _, y in used) + 1
    assert used.keys() == {(x, y) for x in range(24) for y in range(height)}


def test_every_panel_has_a_title_and_a_description(panels: list[Json]) -> None:
    for panel in panels:
        assert panel["title"].strip()
        description = panel["description"]
        assert len(description) > 20, panel["title"]
        assert description.endswith("."), panel["title"]


def test_every_panel_has_a_unit(panels: list[Json]) -> None:
    for panel in panels:
        if panel["type"] != "table":
            assert panel["fieldConfig"]["defaults"].get("unit"), panel["title"]


def test_only_tables_have_more_than_colours_in_overrides(panels: list[Json]) -> None:
    for panel in panels:
        for override in panel["fieldConfig"]["overrides"]:
            assert override["matcher"]["id"] == "byName", panel["title"]
            if panel["type"] != "table":
                assert [item["id"] for item in override["properties"]] == ["color"], panel["title"]


def test_only_tables_have_transformations(panels: list[Json]) -> None:
    for panel in panels:
        assert panel["type"] == "table" or "transformations" not in panel, panel["title"]


def test_overrides_and_sorting_name_existing_columns(panels: list[Json]) -> None:
    for panel in panels:
        if panel["type"] != "table":
            continue
        organized = panel["transformations"][-1]["options"]
        headings = {organized["renameByName"].get(name, name) for name in organized["indexByName"]}
        named = {override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"]}
        named |= {item["displayName"] for item in panel["options"].get("sortBy", [])}
        assert named <= headings, panel["title"]


def test_colour_is_never_the_only_information(panels: list[Json]) -> None:
    """A coloured value also shows its number or text."""
    for panel in panels:
        assert panel["options"].get("colorMode", "value") in ("value", "none"), panel["title"]
        assert panel["options"].get("textMode") not in ("none", "name"), panel["title"]
        for mapping in panel["fieldConfig"]["defaults"].get("mappings", []):
            assert all(result["text"] for result in mapping["options"].values()), panel["title"]


def test_thresholds_rise(panels: list[Json]) -> None:
    for panel in panels:
        first, *others = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert first["value"] is None, panel["title"]
        values = [step["value"] for step in others]
        assert values == sorted(set(values)), panel["title"]


def test_a_target_is_asked_in_one_way(board: Json) -> None:
    assert all(target["range"] != target["instant"] for target in targets_of(board))


def test_every_target_of_the_job_board_is_a_named_query_and_each_is_used(job_board: Json) -> None:
    targets = targets_of(job_board)
    used = {(target["expr"], target["instant"], target["format"] == "table") for target in targets}
    assert used == {(query.expr, query.instant, query.table) for query in queries.all_queries()}


def test_query_names_are_unique() -> None:
    names = [query.name for query in queries.all_queries()]
    assert len(names) == len(set(names))
    assert names, "there are queries"


def test_targets_of_a_panel_have_different_reference_ids(panels: list[Json]) -> None:
    for panel in panels:
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references)), panel["title"]


def test_every_data_source_is_the_variable(board: Json) -> None:
    sources = [node["datasource"] for node in nodes(board) if "datasource" in node]
    assert sources
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)


def test_variables_are_chained_and_follow_the_time_range(job_board: Json) -> None:
    found = {variable["name"]: variable for variable in job_board["templating"]["list"]}
    assert list(found) == ["datasource", "cluster", "job_id", "node"]
    assert (found["datasource"]["type"], found["datasource"]["query"]) == ("datasource", "prometheus")
    for name in ("cluster", "job_id", "node"):
        assert found[name]["refresh"] == 2, f"{name} is asked again when the time range changes"
        assert found[name]["query"]["query"] == found[name]["definition"]
    assert "$cluster" in found["job_id"]["definition"]
    assert "$job_id" in found["node"]["definition"]
    assert found["node"]["multi"] is True
    assert found["node"]["includeAll"] is True
    assert found["job_id"]["multi"] is False


@pytest.mark.parametrize("uid", ["gpujob-fleet", "gpujob-self"])
def test_boards_that_show_the_hub_find_a_cluster_without_jobs(uid: str) -> None:
    (cluster,) = (each for each in load_board(uid)["templating"]["list"] if each["name"] == "cluster")
    question = re.fullmatch(r'label_values\({__name__=~"([^"]*)"}, cluster\)', cluster["definition"])
    assert question
    (of_hub,) = set(question[1].split("|")) - {"gpujob_info"}
    assert of_hub in {family.full_name for family in HUB_FAMILIES}


def test_only_declared_variables_are_used(board: Json) -> None:
    declared = {variable["name"] for variable in board["templating"]["list"]}
    used = set(VARIABLE.findall(re.sub(r"\$\{__data\.fields\.[\w.]+\}|\$\{__value\.raw\}", "", json.dumps(board))))
    assert used - declared <= {"__range", "__interval", "__rate_interval", "__all", *IN_LINKS}


def test_marks_are_moments_or_alerts(board: Json) -> None:
    found = {annotation["name"]: annotation for annotation in board["annotations"]["list"]}
    assert "Alerts" in found
    for name, annotation in found.items():
        assert annotation["useValueForTime"] is (name != "Alerts")
        assert annotation["expr"].endswith("* 1000") is (name != "Alerts"), "Grafana wants milliseconds"


def test_boards_are_linked_and_links_keep_cluster_and_time_range(board: Json) -> None:
    assert {link["url"].partition("?")[0] for link in board["links"]} == {
        f"/d/{uid}" for uid in UIDS if uid != board["uid"]
    }
    assert all(link["keepTime"] for link in board["links"])
    in_cells = [value["url"] for item in nodes(board) if item.get("id") == "links" for value in item["value"]]
    for url in [*in_cells, *(link["url"] for link in board["links"])]:
        assert url.startswith(RUNBOOKS) or (re.match(r"/d/([\w-]+)\?", url) and "${cluster:queryparam}" in url), url
    for url in in_cells:
        assert url.startswith(RUNBOOKS) or "${__url_time_range}" in url or url.endswith(TIME_OF_A_ROW), url


def test_links_to_runbooks_go_where_those_of_the_alerts_go() -> None:
    rules = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "alertmanager/rules").glob("*.yml"))
    assert {url.rpartition("/")[0] for url in re.findall(r"runbook_url: (\S+)", rules)} == {RUNBOOKS}


def test_alerts_in_descriptions_exist(panels: list[Json]) -> None:
    rules = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "alertmanager/rules").glob("*.yml"))
    named = {name for panel in panels for name in re.findall(r"GpuJob\w+", panel["description"])}
    assert named
    assert named <= set(re.findall(r"alert: (\w+)", rules))


def test_the_reference_has_every_row_of_every_board() -> None:
    page = (ROOT / "docs" / "reference" / "boards.md").read_text(encoding="utf-8")
    rows = [(uid, panel["title"]) for uid in UIDS for panel in panels_of(load_board(uid)) if panel["type"] == "row"]
    assert re.findall(r"^\| `([\w-]+)` \| (.+?) \| .*\?.* \|$", page, re.MULTILINE) == rows


def test_no_host_and_no_address_in_the_file() -> None:
    for text in build.texts().values():
        assert "://" not in text.replace(RUNBOOKS, "")
        assert not re.search(r"\d+\.\d+\.\d+\.\d+", text)


@ALL
def test_query_parses(query: queries.Query) -> None:
    names = {name for name, _ in selectors(parse(query.expr))}
    assert names == metric_names(substitute(query.expr, VALUES))
    assert all(name.startswith(("gpujob_", "ALERTS")) for name in names)


def test_queries_of_a_board_read_one_cluster_and_counters_as_rates(board: Json) -> None:
    for expr in (target["expr"] for target in targets_of(board)):
        for metric, inside in selectors(parse(FIRST_VALUES.sub("vector(0)", expr))):
            if metric.endswith("_total"):
                assert inside, expr
                assert inside[-1] in RATES, expr
        for metric, braces in re.findall(r"([\w:]+)\{([^}]*)\}", expr):
            assert (
                'cluster="$cluster"' in braces
                or metric.startswith("prometheus_")
                or (WATCHDOG in braces or OF_NO_CLUSTER.match(braces))
            ), expr
        for window in re.findall(r"\[([^]]+)\]", expr):
            assert window in {"$__rate_interval"} | FIXED_WINDOWS, expr


def test_the_board_of_all_jobs_reads_one_recorded_series_a_job() -> None:
    names = set()
    for target in targets_of(load_board("gpujob-fleet")):
        names |= metric_names(substitute(target["expr"], VALUES))
    hub = {family.full_name for family in HUB_FAMILIES}
    assert {name for name in names if ":" not in name} <= hub | {"up", "ALERTS"}


def test_a_panel_of_what_has_not_happened_yet_says_so(panels: list[Json]) -> None:
    for panel in panels:
        names = {name for each in panel["targets"] for name in metric_names(substitute(each["expr"], VALUES))}
        if names and names <= COUNTED_LATE:
            assert panel["fieldConfig"]["defaults"]["noValue"] in {"none", "never throttled"}, panel["title"]


@ALL
def test_every_selector_names_one_job(query: queries.Query) -> None:
    for braces in re.findall(r"\{([^}]*)\}", query.expr):
        assert 'cluster="$cluster", job_id="$job_id"' in braces
    assert query.expr.count("{") == len(list(selectors(parse(query.expr))))


@ALL
def test_counters_are_read_as_rates_only(query: queries.Query) -> None:
    for metric, inside in selectors(parse(FIRST_VALUES.sub("vector(0)", query.expr))):
        if metric.endswith("_total"):
            assert inside, metric
            assert inside[-1] in RATES, metric
        else:
            assert not RATES & set(inside), metric


@ALL
def test_windows_follow_the_resolution(query: queries.Query) -> None:
    for window in re.findall(r"\[([^]]+)\]", query.expr):
        assert window in {"$__rate_interval"} | FIXED_WINDOWS
    for function, window in re.findall(r"(\w+)\([^()]*\[([^]]+)\]", query.expr):
        assert (window == "$__rate_interval") == (function in {"rate", "irate"})


def test_may_be_empty_names_queries_and_reasons() -> None:
    assert MAY_BE_EMPTY.keys() <= {query.name for query in queries.all_queries()}
    assert all(MAY_BE_EMPTY.values())


def test_substitute_replaces_all_forms_of_a_variable() -> None:
    text = 'a{n=~"$node", j="${job_id}", k="${job_id:regex}"}[$__rate_interval]'
    assert substitute(text, VALUES) == 'a{n=~".*", j="42", k="42"}[60s]'
    with pytest.raises(KeyError):
        substitute("$unknown", VALUES)
