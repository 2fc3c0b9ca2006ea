"""Draws a dashboard with the data of a running Prometheus, without Grafana.

python tests/grafana/preview/shot.py grafana/dashboards/gpujob-job.json http://127.0.0.1:9090 out.png \
    --range 900 --var cluster=c1 --var job_id=42

Needs the built page (see README.md) and Chromium. Exits with 1 and says which panel when a
query or a drawing fails.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.parse
from pathlib import Path

HERE = Path(__file__).resolve().parent
LINE = 38  # pixels from one grid line to the next, as in preview.jsx


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


def page_height(dashboard: Path) -> int:
    panels: list[dict[str, dict[str, int]]] = json.loads(dashboard.read_text(encoding="utf-8"))["panels"]
    return max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels) * LINE + 16


def chromium(url: str, profile: str, *arguments: str) -> str:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        sys.exit("no Chromium found on PATH")
    command = [
        program,
        "--headless",
        "--no-sandbox",  # it only opens our own page; containers allow no sandbox
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
        "--virtual-time-budget=20000",
        *arguments,
        url,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw a dashboard to a PNG file.")
    parser.add_argument("dashboard", type=Path)
    parser.add_argument("prometheus", help="its URL")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--range", type=int, default=900, help="seconds shown (default 900)")
    parser.add_argument("--end", type=int, help="last moment shown, in Unix seconds (default now)")
    parser.add_argument("--scrape", type=int, default=15, help="scrape interval in seconds (default 15)")
    parser.add_argument("--width", type=int, default=1400, help="pixels (default 1400)")
    parser.add_argument("--theme", choices=("dark", "light"), default="dark")
    parser.add_argument("--var", action="append", default=[], metavar="NAME=VALUE", help="a dashboard variable")
    options = parser.parse_args()
    if not (HERE / "dist" / "preview.js").exists():
        sys.exit(f"the page is not built; see {HERE / 'README.md'}")

    query = {
        "dashboard": "dash.json",
        "prometheus": options.prometheus.rstrip("/"),
        "range": options.range,
        "scrape": options.scrape,
        "width": options.width,
        "theme": options.theme,
    }
    if options.end is not None:
        query["end"] = options.end
    for pair in options.var:
        name, _, value = pair.partition("=")
        query[f"var-{name}"] = value

    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        shutil.copytree(HERE / "dist", site)
        shutil.copy(options.dashboard, site / "dash.json")
        handler = functools.partial(Quiet, directory=str(site))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{server.server_address[1]}/index.html?{urllib.parse.urlencode(query)}"
            size = f"--window-size={options.width},{page_height(options.dashboard)}"
            profile = str(Path(folder, "profile"))
            chromium(url, profile, size, f"--screenshot={options.picture.resolve()}")
            page = chromium(url, profile, size, "--dump-dom")
            server.shutdown()
    found = re.search(r"<title>([^<]*)", page)
    title = found.group(1) if found else "no page"
    if title != "ready":
        print(f"dashboard not drawn: {title}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
