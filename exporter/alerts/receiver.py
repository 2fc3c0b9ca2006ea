"""The receiver of alerts: takes what Alertmanager posts, writes the log, and reports when the heartbeat stops."""

import asyncio
import contextlib
import logging
import shlex
import shutil
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from exporter.alerts.log_file import AlertLog
from exporter.alerts.messages import (
    FIRING,
    WATCHDOG,
    Alert,
    Firing,
    Heartbeats,
    alert_json,
    iso,
    parse_message,
)
from exporter.collecting.families import TEXT_TYPE, Family, Samples
from exporter.contract import run_files
from exporter.contract.errors import ExporterError
from exporter.contract.file_locks import FileLockedError, lock_file
from exporter.contract.records import RecordError
from exporter.contract.user_state import make_own_folder, user_state_folder
from exporter.web import limits
from exporter.web.access import Access, Needs
from exporter.web.addresses import Listener, OwnNames, open_socket, parse_listen_address
from exporter.web.aiohttp_server import web
from exporter.web.config_file import WebConfigFile

PATH = "/gpujob"  # where Alertmanager posts
REPEAT_S = 3600.0  # between two reports of the same silence
CHECK_S = 1.0  # between two looks at the heartbeat
HOOK_S = 60.0  # for the command that reports a silence; then it is killed
END_S = 1.0  # for open requests at the end
BROKEN = "ALERTING IS BROKEN"
NEEDS = {
    **dict.fromkeys(("/", "/-/healthy", "/-/ready"), Needs.NOTHING),
    "/metrics": Needs.WHAT_THE_SITE_ASKS,
}  # others need credentials

LAST_HEARTBEAT = Family(
    "alerts_heartbeat_timestamp_seconds",
    "When the alert that always fires last arrived; of several clusters the oldest.",
)
HEARTBEAT_OK = Family(
    "alerts_heartbeat_ok", "Whether the heartbeat of each cluster arrives; 0 means that no alert is delivered."
)
RECEIVED = Family(
    "alerts_received_total", "Alerts that Alertmanager reported as firing or resolved.", ("status",), "counter"
)
REFUSED = Family(
    "alerts_messages_refused_total", "Requests that did not contain a message of Alertmanager.", (), "counter"
)
LOG_FAILURES = Family("alerts_log_failures_total", "Lines of the log that could not be written.", (), "counter")
FIRING_NOW = Family("alerts_firing", "Alerts that fire.", ("severity",))
FAMILIES = (LAST_HEARTBEAT, HEARTBEAT_OK, RECEIVED, REFUSED, LOG_FAILURES, FIRING_NOW)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = logging.getLogger("gpujob.alerts")


class Options(NamedTuple):
    """What the command line asks for."""

    listen: str
    log_file: Path | None
    silence_s: float
    on_silence: str | None  # a command; its standard input is the text
    state_dir: Path | None
    web_config: str | None


class Receiver:
    """State of received alerts, and the pages that show it."""

    def __init__(self, alert_log: AlertLog, options: Options, clock: Callable[[], float] = time.time) -> None:
        self._log, self._options, self._clock = alert_log, options, clock
        self._firing = Firing(alert_log.alerts(), clock())
        self._heartbeats = Heartbeats(options.silence_s, REPEAT_S, clock())
        self._received = Counter[str]()
        self._refused = 0
        self._hooks = set[asyncio.Task[None]]()

    def application(self, access: Access) -> web.Application:
        """The web application: routes and access rules."""
        application = limits.make_application(
            [
                web.post(PATH, self._take),
                web.get("/api/v1/alerts", self._list),
                web.get("/metrics", self._metrics),
                web.get("/-/healthy", self._healthy),
                web.get("/-/ready", self._healthy),
                web.get("/", self._landing),
            ]
        )
        access.protect(application)
        return application

    async def _take(self, request: web.Request) -> web.Response:
        try:
            alerts, left_out = parse_message((await request.read()).decode())
        except (RecordError, UnicodeDecodeError) as error:
            self._refused += 1
            return web.Response(status=400, text=f"400: {error}\n")
        try:
            self.take(alerts)
            if left_out:
                self._log.say(f"{iso(self._clock())} and {left_out} more alerts of this message, which it left out")
        except OSError as error:
            log.error("%s cannot be written: %s", self._log.path, error.strerror)
            return web.Response(status=503, text="503: the log cannot be written\n")  # Alertmanager tries again
        return web.Response(text="ok\n")

    def take(self, alerts: tuple[Alert, ...]) -> None:
        """Note the alerts of a message, and log what is new. Raises OSError."""
        now = self._clock()
        for alert in alerts:
            if alert.name == WATCHDOG:
                cluster = alert.labels.get("cluster", "")
                if alert.status == FIRING and self._heartbeats.beat(cluster, now):
                    words = f"alerting works again: the heartbeat{_of(cluster)} arrives"
                    self._say(f"{iso(now)} {words}", logging.WARNING)
                    self._run_hook(words)
            elif self._firing.take(alert, now):
                self._received[alert.status] += 1
                self._log.write(alert, now)

    async def _list(self, _: web.Request) -> web.Response:
        beat = self._heartbeats.worst
        facts = {"last": iso(beat.last), "silent": beat.is_silent}
        alerts = [alert_json(alert) for alert in self._firing.all()]
        return web.json_response({"schema": 1, "heartbeat": facts, "alerts": alerts})

    async def _metrics(self, _: web.Request) -> web.Response:
        out, beat = Samples({}), self._heartbeats.worst
        out.add(LAST_HEARTBEAT, beat.last)
        out.add(HEARTBEAT_OK, int(not beat.is_silent))
        for status in ("firing", "resolved"):
            out.add(RECEIVED, self._received[status], status=status)
        out.add(REFUSED, self._refused)
        out.add(LOG_FAILURES, self._log.failures)
        for severity, number in Counter(alert.severity for alert in self._firing.all()).items():
            out.add(FIRING_NOW, number, severity=severity)
        return web.Response(body=out.page().encode(), headers={"Content-Type": TEXT_TYPE})

    async def _healthy(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _landing(self, _: web.Request) -> web.Response:
        return web.Response(text="gpujob receiver of alerts: POST /gpujob, /api/v1/alerts, /metrics\n")

    def check(self) -> None:
        """Report a heartbeat that has stopped: in the log of alerts, in our own, and by the command of the user."""
        now = self._clock()
        for alert in self._firing.lost_ends(now):
            with contextlib.suppress(OSError):  # counted, and logged with the next message
                self._log.write(alert, now)
        for cluster, lasted in self._heartbeats.silences(now).items():
            words = (
                f"{BROKEN}: no heartbeat{_of(cluster)} for {lasted:.0f} s; see Prometheus, its rules, and Alertmanager"
            )
            self._say(f"{iso(now)} {words}", logging.CRITICAL)
            self._run_hook(words)

    def _say(self, line: str, level: int) -> None:
        log.log(level, "%s", line.partition(" ")[2])
        try:
            self._log.say(line)
        except OSError as error:
            log.error("%s cannot be written: %s", self._log.path, error.strerror)

    def _run_hook(self, words: str) -> None:
        if self._options.on_silence is not None and len(self._hooks) < 2:  # one at a time, and the latest news
            task = asyncio.ensure_future(_run(self._options.on_silence, words))
            self._hooks.add(task)
            task.add_done_callback(self._hooks.discard)

    async def run(self, listener: Listener, access: Access) -> None:
        """Serve until a signal."""
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        runner = web.AppRunner(self.application(access), access_log=None, handle_signals=False)
        await runner.setup()
        servers = await limits.serve(runner, [(listener.listening, listener.context)])
        try:
            while not stop.is_set():
                self.check()
                try:
                    await asyncio.wait_for(stop.wait(), CHECK_S)
                except TimeoutError:
                    continue
        finally:
            for server in servers:
                server.close()
            try:
                await asyncio.wait_for(runner.cleanup(), END_S)
            except TimeoutError:
                pass  # a slow client does not delay the end


def _of(cluster: str) -> str:
    return f" of cluster {cluster}" if cluster else ""


async def _run(command: str, words: str) -> None:
    """Run the user's command with the text as its input. What goes wrong is logged."""
    try:
        process = await asyncio.create_subprocess_exec(*shlex.split(command), stdin=asyncio.subprocess.PIPE)
    except OSError as error:
        log.error("--on-silence %s: %s", command, error.strerror)
        return
    try:
        await asyncio.wait_for(process.communicate(f"{words}\n".encode()), HOOK_S)
    except TimeoutError:
        process.kill()
        log.error("--on-silence %s: killed after %g s", command, HOOK_S)
    else:
        if process.returncode:
            log.error("--on-silence %s: exit status %s", command, process.returncode)


def run_receiver(options: Options, environ: Mapping[str, str]) -> None:
    """Run until a signal. Raises ExporterError before it listens if anything is not as it should be."""
    if options.on_silence is not None:
        _check_command(options.on_silence)
    own = user_state_folder(environ)
    if options.state_dir is None and own is None:
        raise ExporterError("HOME is not set, so there is no place for the log; give --state-dir")
    folder = (options.state_dir or Path(str(own), "alerts")).absolute()
    try:
        make_own_folder(folder)
        lock_file(folder / "receiver.lock")
        alert_log = AlertLog((options.log_file or folder / "alerts.log").absolute())
        run_files.make_token(folder)
        web_file = None if options.web_config is None else WebConfigFile(options.web_config)
        host, port = parse_listen_address(options.listen)
        listener = Listener(open_socket(host, port), None if web_file is None else web_file.server_context())
        alert_log.say(f"{iso(time.time())} gpujob receives alerts on {listener}")
    except FileLockedError as error:
        raise ExporterError(f"{folder} already has a receiver: {error}") from error
    except OSError as error:
        raise ExporterError(
            f"{error.filename or folder}: {error.strerror}; give another --state-dir or --log"
        ) from error
    if web_file is not None:
        web_file.watch()
    names = OwnNames()
    names.learn()
    where = f"the receiver's token as `Authorization: Bearer TOKEN`; it is in the file `token` of {folder}"
    token = run_files.read_token(folder)
    access = Access(NEEDS, names=names, token=token, web_file=web_file, other_paths=Needs.CREDENTIALS, place=where)
    run_files.write_json(
        folder / "receiver.json", {"url": f"http{'s' if listener.context else ''}://{_reach(listener)}"}
    )
    log.info("listening on %s; the log is %s", listener, alert_log.path)
    asyncio.run(Receiver(alert_log, options).run(listener, access))


def _reach(listener: Listener) -> str:
    host = str(listener.listening.getsockname()[0])
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"{host}:{listener.port}"


def _check_command(command: str) -> None:
    """Raise ExporterError if a command cannot be run."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ExporterError(f"--on-silence: {command!r}: {error}; close the quote") from error
    if not words or shutil.which(words[0]) is None:
        raise ExporterError(
            f"--on-silence: {command!r} is not a program that can be run; write its path and its arguments"
        )
