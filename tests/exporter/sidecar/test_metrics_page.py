"""The README's table of metrics says what the exporter declares."""

from pathlib import Path

import pytest

from exporter.sidecar.sidecar import declared_families

README = Path(__file__).resolve().parents[3] / "README.md"
BEGIN = "<!-- metrics: written by `pytest tests/exporter/sidecar/test_metrics_page.py --update-golden` -->\n"
END = "<!-- end of metrics -->\n"


def table() -> str:
    """The table as it should be."""
    lines = ["| Series | Type | Labels | Meaning |", "|---|---|---|---|"]
    for family in declared_families():
        labels = ", ".join(f"`{label}`" for label in family.labels)
        lines.append(f"| `{family.full_name}` | {family.kind} | {labels} | {family.help} |")
    return "\n".join(lines) + "\n"


def test_the_table_of_metrics_in_the_readme_is_the_declared_one(request: pytest.FixtureRequest) -> None:
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    shown, _, after = rest.partition(END)
    if request.config.getoption("--update-golden"):
        README.write_text(f"{before}{BEGIN}{table()}{END}{after}", encoding="utf-8")
        return
    assert shown == table(), "run pytest tests/exporter/sidecar/test_metrics_page.py --update-golden"
