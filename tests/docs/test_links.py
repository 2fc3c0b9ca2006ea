"""Links of the documentation."""

from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.docs.pages import ROOT, anchors, links, pages


def link_problem(page: Path, link: str) -> str | None:
    """Problem of a link on a page, or None."""
    if link.startswith(("http://", "https://", "mailto:")):
        return None
    path, _, anchor = link.partition("#")
    target = (page.parent / unquote(path)).resolve() if path else page
    if not target.is_relative_to(ROOT):
        return f"{link}: outside of the repository"
    if not target.exists():
        return f"{link}: no such file"
    if anchor and target.suffix == ".md" and anchor not in anchors(target):
        return f"{link}: no such heading"
    return None


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_has_an_existing_target(page: Path) -> None:
    wrong = [problem for link in links(page) if (problem := link_problem(page, link))]
    assert not wrong, "\n".join(wrong)


def test_every_page_of_docs_is_in_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    listed = {(index.parent / link.partition("#")[0]).resolve() for link in links(index)}
    assert {page for page in pages() if page.is_relative_to(index.parent)} - {index} <= listed


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = ROOT / "README.md"
    assert link_problem(page, "https://example.org") is None
    assert link_problem(page, "docs/index.md") is None
    assert link_problem(page, "docs/indecks.md") == "docs/indecks.md: no such file"
    assert link_problem(page, "docs/index.md#nowhere") == "docs/index.md#nowhere: no such heading"
    assert link_problem(page, "../elsewhere") == "../elsewhere: outside of the repository"
    page = tmp_path / "page.md"
    page.write_text("# A `key`, or two\n## Twice\n## Twice\n[a](#x) `[b](c)`\n```text\n[d](e)\n```\n", encoding="utf-8")
    assert anchors(page) == {"a-key-or-two", "twice", "twice-1"}
    assert links(page) == ["#x"]
