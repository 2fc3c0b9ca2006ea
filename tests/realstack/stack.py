"""Prometheus, Alertmanager and a webhook receiver, started by ``prometheus-stack.sh``."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tests.realstack.cluster import HERE, ROOT, Cluster, missing_programs
from tests.realstack.waiting import wait_for

T = TypeVar("T")

SCRIPT = HERE / "prometheus-stack.sh"

_PROGRAMS = ("prometheus", "promtool", "prometheus-alertmanager", "amtool", "curl")


class StackError(RuntimeError):
    """A command failed, or an API did not answer or refused."""


def prometheus_unavailable() -> str | None:
    """Reason why no stack can be started here, for a skip, or None."""
    if missing := missing_programs(_PROGRAMS):
        return f"not installed: {', '.join(missing)} (run {HERE / 'packages.sh'})"
    return None


class Stack:
    """A stack on loopback, or with `cluster` on its head, where nodes can be scraped by name.

    `rules` are globs of rule files (default: those of the project; an empty list: none). A `whole` one
    scrapes itself too and hides alerts as the shipped configuration does. `hub_token` is the file of a hub to scrape.
    Prometheus serves the folder `user_assets` below /user/.
    Use it as a context manager, or call `up` and `down`; take it down before its cluster.
    """

    def __init__(
        self,
        directory: Path,
        cluster: Cluster | None = None,
        *,
        rules: Sequence[str | Path] | None = None,
        targets_dir: Path | None = None,
        port: int = 0,
        whole: bool = False,
        hub_token: Path | None = None,
        user_assets: Path | None = None,
    ) -> None:
        self.directory = directory.resolve()
        self.cluster = cluster
        self.targets_dir = (targets_dir or self.directory / "targets").resolve()
        self._settings = {
            "STACK_DIR": str(self.directory),
            "TARGETS_DIR": str(self.targets_dir),
            "PORT": str(port),
            "HUB_TOKEN": str(hub_token or ""),
            "USER_ASSETS": str(user_assets or ""),
        }
        if whole:
            self._settings["WHOLE"] = "yes"
        if rules is not None:
            self._settings["RULES"] = "\n".join(map(str, rules))

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    # Life

    def up(self, timeout: float = 120) -> None:
        """Start all three, empty, and wait until they answer. On failure nothing is left running."""
        self._script("up", timeout)

    def reload(self, timeout: float = 60) -> None:
        """Let Prometheus read its rule files again."""
        self._script("reload", timeout)

    def down(self, timeout: float = 60) -> None:
        """End all three and wait for their end. Safe to call twice, and after the end of the cluster."""
        self._script("down", timeout)

    # State

    @property
    def log_dir(self) -> Path:
        return self.directory

    def url(self, program: str = "prometheus") -> str:
        """URL of ``prometheus``, ``alertmanager`` or ``receiver`` on its own host."""
        try:
            ports = json.loads((self.directory / "ports.json").read_text())
        except FileNotFoundError:
            raise StackError(f"the stack in {self.directory} is not up") from None
        return f"http://127.0.0.1:{ports[program]}"

    def query(self, promql: str, at: float | None = None) -> list[dict[str, Any]]:
        """Result of an instant query, for each series ``{"metric": {...}, "value": [time, "text"]}``.

        A scalar is one without labels.
        """
        data = self._api("query", {"query": promql, **({} if at is None else {"time": str(at)})})
        if data["resultType"] in {"scalar", "string"}:
            return [{"metric": {}, "value": data["result"]}]
        result: list[dict[str, Any]] = data["result"]
        return result

    def query_range(self, promql: str, start: float, end: float, step: float = 1) -> list[dict[str, Any]]:
        """Result of a range query, for each series ``{"metric": {...}, "values": [[time, "text"], ...]}``."""
        data = self._api("query_range", {"query": promql, "start": str(start), "end": str(end), "step": str(step)})
        result: list[dict[str, Any]] = data["result"]
        return result

    def targets(self) -> list[dict[str, Any]]:
        """Active targets as returned by Prometheus: ``labels``, ``scrapeUrl``, ``health``, ``lastError``, ..."""
        result: list[dict[str, Any]] = self._api("targets", {"state": "active"})["activeTargets"]
        return result

    def alerts(self) -> list[dict[str, Any]]:
        """Every alert of every webhook call so far, in order of arrival; ``received`` is the time it came.

        The rest is Alertmanager's: ``status`` (``firing`` or ``resolved``), ``labels``, ``annotations``,
        ``startsAt``, ``endsAt``, ``fingerprint``, and the call's ``groupKey``. An alert is there again in
        each later call of its group.
        """
        try:
            text = (self.directory / "alerts.jsonl").read_text()
        except FileNotFoundError:
            return []
        lines = text[: text.rfind("\n") + 1].splitlines()  # a reader may see half of a write
        return [
            {**alert, "received": call["received"], "groupKey": call["body"]["groupKey"]}
            for call in map(json.loads, lines)
            for alert in call["body"]["alerts"]
        ]

    def announce(self, name: str, targets: Sequence[str], labels: Mapping[str, str] | None = None) -> Path:
        """Let Prometheus scrape ``host:port`` targets; return the file_sd file. Removing it ends the scrapes."""
        path = self.targets_dir / f"{name}.json"
        new = path.with_suffix(".new")  # renamed, so that no partial file is read
        new.write_text(json.dumps([{"targets": list(targets), "labels": dict(labels or {})}]))
        new.rename(path)
        return path

    def wait_for(self, predicate: Callable[[], T | None], timeout: float, what: str) -> T:
        """The first true value of `predicate`; an API that does not answer means "not yet".

        TimeoutError has `what`, the last value and the log directory.
        """
        return wait_for(predicate, timeout, what, logs=self.log_dir, retry=(StackError,))

    # Internals

    def _script(self, command: str, timeout: float) -> None:
        if self.cluster is not None and (command != "down" or self.cluster.is_up()):
            done = self.cluster.run(
                [SCRIPT, command], user=ROOT, cwd=HERE, env=self._settings, timeout=timeout, in_root=False
            )
        else:
            try:
                done = subprocess.run(
                    [str(SCRIPT), command],
                    env={**os.environ, **self._settings},
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=timeout,
                )
            except subprocess.TimeoutExpired as error:
                raise StackError(f"{SCRIPT.name} {command} did not end within {timeout:g} s") from error
        if done.returncode != 0:
            raise StackError(
                f"{SCRIPT.name} {command} failed: {(done.stdout + done.stderr).strip()}; logs: {self.log_dir}"
            )

    def _api(self, path: str, parameters: Mapping[str, str]) -> Any:
        url = f"{self.url()}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        text = self._get(url)
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise StackError(f"{url}: not JSON: {text[:500]}") from error
        if answer["status"] != "success":
            raise StackError(f"{answer['errorType']}: {answer['error']} (in {dict(parameters)})")
        return answer["data"]

    def _get(self, url: str) -> str:
        if self.cluster is not None:
            done = self.cluster.run(["curl", "-sS", "-m", "30", url], user=ROOT, in_root=False)
            if done.returncode != 0:
                raise StackError(f"{url}: {done.stderr.strip()}")
            return done.stdout
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=30) as response:
                body: bytes = response.read()
        except urllib.error.HTTPError as error:  # the body has the reason as JSON
            body = error.read()
        except (OSError, http.client.HTTPException) as error:
            raise StackError(f"{url}: {error}") from error
        return body.decode()
