"""The board of a job of 64 nodes with 8 GPUs each stays readable."""

import asyncio
import gzip
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.series import complete_page, start_job
from exporter.contract.manifest import NORMAL
from launcher.boards.assets import write_assets
from tests.fakenvml import compiler
from tests.grafana.browser import browser_unavailable, open_browser
from tests.grafana.test_page import ALL_DRAWN, OPEN_ROWS
from tests.realstack.stack import Stack, prometheus_unavailable
from tests.support.simulated_sidecars import WORKERS, simulated_sidecars

pytestmark = [pytest.mark.prometheus, pytest.mark.browser]

NODES = 64
MOST_LINES = 24  # that a person tells apart by their colours
NUMBERS = (
    "[...document.querySelectorAll('.panel')]"
    ".map(panel => [panel.querySelector('h3').textContent, panel.querySelectorAll('{}').length])"
)
CELLS = "(r => [r.x, r.y, r.width, r.height])(document.querySelector('.heatmap .cells').getBoundingClientRect())"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Prometheus with the sidecars of the job."""
    if reason := prometheus_unavailable() or browser_unavailable() or (None if compiler() else "needs a C compiler"):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("large")
    with ExitStack() as job:
        (folder / "page").write_bytes(gzip.decompress(complete_page(start_job(job, NORMAL, WORKERS), WORKERS)))
    (folder / "targets").mkdir()
    write_assets(folder / "assets")
    with (
        Stack(folder / "stack", targets_dir=folder / "targets", user_assets=folder / "assets", rules=[]) as stack,
        simulated_sidecars(folder / "page", folder / "targets" / "large.json", [NODES], interval=5),
    ):
        stack.wait_for(lambda: stack.query(f"count(gpujob_info offset 20s) == {NODES}"), 60, "the sidecars")
        yield stack


def test_many_gpus_are_heat_maps_and_no_legend_is_long(stack: Stack, tmp_path: Path) -> None:
    async def work() -> None:
        async with open_browser(1400, 1400) as page:
            await page.open(f"{stack.url()}/user/index.html?board=gpujob-job&from=now-1m&to=now")
            await page.run(OPEN_ROWS)
            await page.wait(ALL_DRAWN)
            assert await page.run("document.querySelectorAll('.error').length") == 0
            for part in (".legend button", ".state-timeline text:has(title)", ".bar"):
                for title, number in await page.run(NUMBERS.format(part)):
                    assert number <= MOST_LINES, title
            heights = dict(
                await page.run(
                    "[...document.querySelectorAll('.heatmap')]"
                    ".map(p => [p.querySelector('h3').textContent, p.querySelector('canvas.cells')?.height])"
                )
            )
            assert heights["Utilization of each GPU"] == heights["Rate of each worker"] == NODES * WORKERS
            assert heights["GPU power"] == NODES
            await page.run("document.querySelector('.heatmap .area').scrollIntoView({block: 'center'})")
            x, y, width, height = await page.run(CELLS)
            await page.mouse("mouseMoved", x + width * 0.9, y + height * (7.5 / (NODES * WORKERS)))
            tip = "[...document.querySelectorAll('#tip tr')].map(row => row.firstChild.textContent)"
            assert await page.run(tip) == ["worker_w7"]
            await page.picture(tmp_path / "large.png")
            assert page.log == []

    asyncio.run(work())
