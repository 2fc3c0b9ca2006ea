"""Two runs of the measurements, compared."""

import json
from pathlib import Path

import pytest

from bench.compare import compare


def written(path: Path, *results: dict[str, object]) -> str:
    path.write_text("\n".join(map(json.dumps, results)) + "\n")
    return str(path)


def test_changed_figures_and_lost_goals_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = written(
        tmp_path / "old",
        {"bench": "tail", "cpu": {"median": 2.0, "least": 1.0}, "tenths": [1, 2], "goals": {"fast": True}},
        {"bench": "files", "goals": {}},
    )
    new = written(
        tmp_path / "new",
        {"bench": "tail", "cpu": {"median": 3.0, "least": 1.02}, "tenths": [1, 4], "goals": {"fast": False}},
    )
    assert compare(old, new) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["files:", "only", "in", old],
        ["tail", "cpu.median", "2", "->", "3", "1.50x"],
        ["tail", "tenths.1", "2", "->", "4", "2.00x"],
        ["tail", "goals.fast", "met", "->", "missed"],
    ]
    assert compare(new, old) == 0  # a goal that is met now is no loss


@pytest.mark.parametrize("text", ["{", '{"figures": 1}'])
def test_a_file_of_something_else_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "else"
    path.write_text(text)
    with pytest.raises(SystemExit, match="cannot be read as what `python -m bench` prints"):
        compare(str(path), str(path))
