"""No board uses what the board page does not draw."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from grafana.build import __main__ as build
from tests.grafana.drawn import CUSTOM, OPTIONS, UNITS, Json, not_drawn
from tests.grafana.substitute import panels_of

PAGE = Path(__file__).resolve().parents[2] / "grafana" / "page"
MOST_BYTES = 60_000  # of code that a browser reads at each opening, and a person to change it
BOARDS = sorted(build.DASHBOARDS.glob("*.json"))
JOB: Json = json.loads((build.DASHBOARDS / "gpujob-job.json").read_text("utf-8"))


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_the_page_draws_all_of_the_board(path: Path) -> None:
    assert not_drawn(json.loads(path.read_text("utf-8"))) == []


def first(board: Json, kind: str) -> Json:
    panel: Json = next(panel for panel in panels_of(board) if panel["type"] == kind)
    return panel


def override(name: str, value: object) -> Json:
    return {"matcher": {"id": "byName", "options": "x"}, "properties": [{"id": name, "value": value}]}


CHANGES: dict[str, Callable[[Json], object]] = {
    "type": lambda board: first(board, "stat").update(type="piechart"),
    "option": lambda board: first(board, "stat")["options"].update(new=1),
    "value": lambda board: first(board, "stat")["options"].update(textMode="none"),
    "unit": lambda board: first(board, "stat")["fieldConfig"]["defaults"].update(unit="furlongs"),
    "unit of a column": lambda board: first(board, "table")["fieldConfig"]["overrides"].append(
        override("unit", "acres")
    ),
    "custom": lambda board: first(board, "timeseries")["fieldConfig"]["defaults"]["custom"].update(pointSize=5),
    "override": lambda board: first(board, "table")["fieldConfig"]["overrides"].append(
        override("custom.align", "left")
    ),
    "override of a number": lambda board: first(board, "stat")["fieldConfig"]["overrides"].append(
        override("color.mode", "fixed")
    ),
    "matcher": lambda board: first(board, "table")["fieldConfig"]["overrides"].append(
        {"matcher": {"id": "byType", "options": "number"}, "properties": []}
    ),
    "transformation": lambda board: first(board, "table")["transformations"].append({"id": "limit", "options": {}}),
    "link": lambda board: board["links"][0].update(url="javascript:alert(1)"),
    "colour": lambda board: first(board, "stat")["fieldConfig"]["defaults"]["thresholds"]["steps"][0].update(
        color="puce"
    ),
    "variable": lambda board: board["templating"]["list"][1].update(type="adhoc"),
    "variable's query": lambda board: board["templating"]["list"][1]["query"].update(query="metrics(x)"),
    "repeat": lambda board: first(board, "stat").update(repeat="node"),
    "board": lambda board: board.update(preload=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_drawn_is_found(change: str) -> None:
    board = copy.deepcopy(JOB)
    CHANGES[change](board)
    assert len(not_drawn(board)) == 1


def test_the_page_is_small() -> None:
    assert sum(path.stat().st_size for path in PAGE.iterdir()) <= MOST_BYTES


def test_the_page_has_a_drawing_of_each_type_and_a_word_for_each_option() -> None:
    text = "".join((PAGE / name).read_text("utf-8") for name in ("draw.js", "boards.js"))
    for kind in OPTIONS.keys() - {"row"}:
        assert f"  {kind}(panel" in text or f'  "{kind}"(panel' in text, kind
    for unit in UNITS.pattern.partition("|(")[0].split("|"):
        assert unit in text, unit
    for kind, options in CUSTOM.items():
        for name, values in options.items():
            if values is None or len(values) > 1:
                assert name.partition(".")[0] in text, (kind, name)
