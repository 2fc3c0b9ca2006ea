"""Chromium without a window, driven by its DevTools protocol."""

import asyncio
import base64
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

READY_S = 60.0  # longest wait for a condition; the machine may be busy
LOGGED = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening")


def browser_unavailable() -> str | None:
    """Reason why no browser can be started here, for a skip, or None."""
    return None if shutil.which("chromium") else "chromium is not installed (run tests/realstack/packages.sh)"


class Page:
    """One tab. `log` has what the console would show, `requests` every address that was asked."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0
        self.log: list[str] = []
        self.requests: list[str] = []
        self.open_queries: set[str] = set()
        self.most_queries = 0

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Result of one command; events that come before it are kept."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            message = json.loads((await self._socket.receive(timeout=READY_S)).data)
            if message.get("id") == self._number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._event(message.get("method", ""), message.get("params", {}))

    def _event(self, method: str, parameters: dict[str, Any]) -> None:
        if method in LOGGED:
            self.log.append(json.dumps(parameters)[:500])
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
            if "/api/v1/" in self.requests[-1]:
                self.open_queries.add(parameters["requestId"])
                self.most_queries = max(self.most_queries, len(self.open_queries))
        if method in ("Network.loadingFinished", "Network.loadingFailed"):
            self.open_queries.discard(parameters["requestId"])

    async def run(self, script: str) -> Any:
        """Value of an expression in the page."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def wait(self, script: str) -> Any:
        """First true value of an expression in the page."""
        end = time.monotonic() + READY_S
        while not (value := await self.run(script)):
            assert time.monotonic() < end, (script, self.log, await self.run("document.body.innerText.slice(0, 500)"))
            await asyncio.sleep(0.05)
        return value

    async def open(self, url: str) -> None:
        """Show a board and wait until all its panels are drawn."""
        await self.call("Page.navigate", url=url)
        await self.wait("document.body?.dataset.drawn || document.body?.dataset.errors")

    async def size(self, width: int, height: int, theme: str = "dark") -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    async def mouse(self, kind: str, x: float, y: float) -> None:
        button = "none" if kind == "mouseMoved" else "left"
        await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)

    async def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key)

    async def picture(self, path: Path) -> None:
        shot = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def open_browser(width: int = 1400, height: int = 900) -> AsyncIterator[Page]:
    """An empty tab of a fresh profile."""
    with tempfile.TemporaryDirectory(prefix="gpujob-chromium-", ignore_cleanup_errors=True) as profile:
        command = ["chromium", "--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        command += ["--no-sandbox"]  # it only opens our own page; root and containers have no sandbox
        command += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr
            host = next(found[1] for line in process.stderr if (found := re.search(r"ws://([^/]+)/", line)))
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://{host}/json") as answer:
                    tabs = await answer.json()
                tab = next(each for each in tabs if each["type"] == "page")
                async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Runtime", "Log", "Page", "Network"):
                        await page.call(f"{domain}.enable")
                    await page.call(
                        "Performance.enable", timeDomain="threadTicks"
                    )  # what a busy machine adds is left out
                    await page.size(width, height)
                    yield page
        finally:
            process.terminate()
            process.wait(20)
            if process.stderr:
                process.stderr.close()
