"""Write the dashboards, or with --check only say whether they are up to date.

python -m grafana.build [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from grafana.build import fleet, job, node, watching

DASHBOARDS = Path(__file__).resolve().parents[1] / "dashboards"
REGENERATE = "run: python -m grafana.build"


def texts() -> dict[str, str]:
    """The text of each dashboard file by its name."""
    return {
        f"{board.UID}.json": json.dumps(board.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"
        for board in (fleet, job, node, watching)
    }


def stale(folder: Path) -> list[str]:
    """Names of files in the folder that are missing, not ours, or not what would be written."""
    wanted = texts()
    present = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.json")}
    return sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m grafana.build", description="Write the Grafana dashboards.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a file is out of date")
    options = parser.parse_args(arguments)
    if options.check:
        names = stale(DASHBOARDS)
        for name in names:
            print(f"grafana/dashboards/{name} is out of date; {REGENERATE}", file=sys.stderr)
        return 1 if names else 0
    DASHBOARDS.mkdir(parents=True, exist_ok=True)
    for name, text in texts().items():
        (DASHBOARDS / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
