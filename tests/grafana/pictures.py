"""Takes the pictures of the docs: the board page with a job of eight workers, in two minutes.

python -m tests.grafana.pictures
"""

import asyncio
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.grafana.browser import browser_unavailable, open_browser
from tests.grafana.watched_job import watched_job
from tests.realstack.stack import prometheus_unavailable

FOLDER = Path(__file__).resolve().parents[2] / "grafana"
SCREEN, PHONE = (1400, 1480), (390, 844)
FAILS_S, ALL_S = 60, 130  # when a worker fails, and when the pictures are taken


async def take(url: str) -> None:
    """The top of the board, on a screen and on a phone."""
    async with open_browser(*SCREEN) as page:
        await page.open(url)
        await page.picture(FOLDER / "job-dashboard-top.png")
        await page.size(*PHONE, theme="light")
        await page.open(url)
        await page.picture(FOLDER / "job-dashboard-phone.png")


def main() -> int:
    if reason := prometheus_unavailable() or browser_unavailable():
        print(reason, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="gpujob-pictures-") as folder, tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state
        with watched_job(Path(folder), items=30000) as (stack, job):
            time.sleep(FAILS_S)
            os.kill(job.worker(2)["pid"], signal.SIGSEGV)
            time.sleep(ALL_S - FAILS_S)
            asyncio.run(take(f"{stack.url()}/user/index.html?board=gpujob-job&from=now-3m&to=now"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
