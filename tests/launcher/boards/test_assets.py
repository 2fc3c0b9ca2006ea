"""The folder of the board page."""

import json
import os
from pathlib import Path

import pytest

from launcher.boards.assets import boards_script, page_for, write_assets
from launcher.errors import LauncherError

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "grafana" / "page" / "index.html").read_text("utf-8")


def test_the_folder_has_the_page_and_every_board(tmp_path: Path) -> None:
    names = write_assets(tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == names
    script = (tmp_path / "new" / "dashboards.js").read_text("utf-8")
    boards = json.loads(script.partition("BOARDS = ")[2].rstrip(";\n"))
    assert boards == {
        path.stem: json.loads(path.read_text("utf-8")) for path in (ROOT / "grafana" / "dashboards").glob("*.json")
    }
    assert (tmp_path / "new" / "index.html").read_text("utf-8") == PAGE


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    """Others may write in a shared folder, and can guess a name that has nothing but the id of our process."""
    page, precious = tmp_path / "page", tmp_path / "precious"
    page.mkdir()
    precious.write_text("mine")
    for name in ("index.html", f".index.html.{os.getpid()}"):
        (page / name).symlink_to(precious)
    write_assets(page)
    assert precious.read_text() == "mine"
    assert (page / "index.html").read_text("utf-8") == PAGE


def test_a_page_of_another_origin_may_ask_that_prometheus_alone(tmp_path: Path) -> None:
    write_assets(tmp_path, "http://127.0.0.1:9090/prefix/")
    text = (tmp_path / "index.html").read_text("utf-8")
    assert '<meta name="prometheus" content="http://127.0.0.1:9090/prefix">' in text
    assert "connect-src http://127.0.0.1:9090;" in text
    assert "connect-src 'self'" not in text


@pytest.mark.parametrize(
    "address", ["", "ftp://x", "http://a b", 'http://x"><script>', "http://x; script-src *", "//x"]
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(LauncherError, match="is not the address of a Prometheus"):
        page_for(PAGE, address)


def test_no_text_of_a_board_ends_the_script() -> None:
    assert "</script" not in boards_script({"a": {"title": "</script><script>alert(1)"}})


def test_the_page_runs_no_script_of_others_and_asks_its_own_server_alone() -> None:
    (policy,) = [line for line in PAGE.splitlines() if "Content-Security-Policy" in line]
    assert "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';" in policy
    assert "<style" not in PAGE
    assert "style=" not in PAGE
    for name in ("draw.js", "boards.js"):
        text = (ROOT / "grafana" / "page" / name).read_text("utf-8")
        assert not [
            word for word in ("innerHTML", "outerHTML", "insertAdjacent", "eval(", "document.write") if word in text
        ]
