"""The folder of the board page: what Prometheus serves with --web.user-assets, or a browser opens from disk."""

import html
import json
import re
from collections.abc import Mapping
from pathlib import Path

from exporter.contract import run_files
from launcher.errors import LauncherError

PAGE = ("index.html", "page.css", "draw.js", "boards.js")
BOARDS = "dashboards.js"  # a script, since pages on disk may fetch no file
ADDRESS = re.compile(r"https?://[A-Za-z0-9.:\[\]_-]+(/[A-Za-z0-9._~/-]*)?")


def shipped_folder() -> Path:
    """The folder with `page` and `dashboards`: of the clone, or of the installed package."""
    above = Path(__file__).parents
    prefixes = above[5:6]  # of PREFIX/lib/pythonX/site-packages/launcher/boards; a clone may lie less deep
    places = (above[2] / "grafana", *(prefix / "share" / "gpujob" / "grafana" for prefix in prefixes))
    found = next((place for place in places if (place / "page").is_dir()), None)
    if found is None:
        raise LauncherError(f"{places[-1]} has no page; install gpujob again")
    return found


def boards_script(boards: Mapping[str, object]) -> str:
    """All boards as one script; no text in them can end it."""
    text = json.dumps(boards, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
    return f'"use strict";\nconst BOARDS = {text};\n'


def page_for(text: str, prometheus: str) -> str:
    """The page that asks the Prometheus at this address instead of the one that serves it, and may ask no other."""
    if not ADDRESS.fullmatch(prometheus):
        raise LauncherError(
            f"{prometheus!r} is not the address of a Prometheus; write for example http://127.0.0.1:9090"
        )
    prometheus = prometheus.rstrip("/")
    origin = "/".join(prometheus.split("/")[:3])
    text = text.replace("connect-src 'self'", f"connect-src {html.escape(origin)}")
    return text.replace('name="prometheus" content=""', f'name="prometheus" content="{html.escape(prometheus)}"')


def write_assets(folder: Path, prometheus: str | None = None) -> list[str]:
    """Write the page and all boards into `folder`; return the names of the files.

    Without `prometheus` the page asks the server that it came from.
    """
    shipped = shipped_folder()
    files = {name: (shipped / "page" / name).read_text("utf-8") for name in PAGE}
    boards = {
        path.stem: json.loads(path.read_text("utf-8")) for path in sorted((shipped / "dashboards").glob("*.json"))
    }
    files[BOARDS] = boards_script(boards)
    if prometheus is not None:
        files["index.html"] = page_for(files["index.html"], prometheus)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        run_files.replace_file(folder / name, text.encode(), durable=False)
    return sorted(files)
