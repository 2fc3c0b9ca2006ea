"""HTTP of the hub: series, scrape targets, jobs, and changes as they come."""

import asyncio
import contextlib
import json
import math
import pwd
import re
import signal
import socket
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from exporter import __version__
from exporter.collecting.families import TEXT_TYPE, Samples
from exporter.contract.errors import ExporterError
from exporter.contract.records import NOTHING, JsonValue
from exporter.hub.api import answers
from exporter.hub.api.answers import Head, WrongQueryError
from exporter.hub.api.listeners import UnixListener, peer_uid
from exporter.hub.costs import attempts_of_active
from exporter.hub.engine import Engine
from exporter.hub.jobs import Job
from exporter.hub.page.series import SelfFacts, render_controller, render_nodes, render_self, render_user_budgets
from exporter.hub.registry_reader import RegistryReader
from exporter.hub.store import JOBS_KEPT_S, Store, name_of
from exporter.web import limits, negotiation
from exporter.web.access import Access, Needs
from exporter.web.addresses import Listener
from exporter.web.aiohttp_server import web

POLL_S = 30.0  # longest wait for a change
MOST_POLLS = 256  # requests that wait for changes at the same time
NODES_WAIT_S = 1.0  # for sinfo, before the nodes are answered as they were
NODES_POLL_S = 0.02
USER_WAIT_S = 1.0  # for the name of a user: clients wait 2 s for an answer
FOLDER_EACH_S = 5.0  # between looks at the folder of the socket, which is in memory
END_S = 1.0  # for open requests at the end
NEEDS = {"/": Needs.NOTHING, "/-/healthy": Needs.NOTHING, "/-/ready": Needs.NOTHING}  # others need credentials

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Viewer(NamedTuple):
    """Whose jobs a client may see."""

    user: str | None  # None for those of all users

    def sees(self, user: str) -> bool:
        return self.user in (None, user)


EVERYTHING = Viewer(None)


class HubService:
    """The web server of one hub."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        registry: RegistryReader,
        *,
        own_uid: int,
        whole_cluster: bool,
    ) -> None:
        self._engine, self._store, self._registry = engine, store, registry
        self._own_uid, self._whole_cluster = own_uid, whole_cluster
        self._requests = Counter[tuple[str, int]]()
        self._request_s: dict[str, float] = {}
        self._changed = asyncio.Event()
        self._born = f"{time.time_ns():x}"  # an earlier process has had the same numbers
        # A directory service that hangs takes this thread alone: pages and answers need those of the event loop.
        self._user_thread = ThreadPoolExecutor(1, "users")
        self._users: dict[int, asyncio.Future[pwd.struct_passwd]] = {}  # by uid: those that have asked
        self._polls = 0
        self._queue_text = answers.QueueText()
        self._ends = False

    def admits(self, uid: int) -> bool:
        """Whether this user may connect to the socket."""
        return self._whole_cluster or uid in (0, self._own_uid)

    async def _viewer_of(self, uid: int) -> Viewer | None:
        """What a user of this machine may see: what squeue would show; None if it is nothing.

        Raises HTTPServiceUnavailable while its name is not known.
        """
        if uid in (0, self._own_uid):
            return EVERYTHING
        facts = self._engine.facts
        if facts is not None and not (facts.hides_jobs or facts.hides_usage):
            return EVERYTHING
        if uid not in self._users:
            self._users[uid] = asyncio.get_running_loop().run_in_executor(self._user_thread, pwd.getpwuid, uid)
        try:
            user = await asyncio.wait_for(asyncio.shield(self._users[uid]), USER_WAIT_S)
        except KeyError:
            self._users.pop(uid, None)  # an account may be made later
            return None
        except TimeoutError:
            raise web.HTTPServiceUnavailable(text="503: the name of this user is not known yet\n") from None
        return Viewer(user.pw_name)

    def application(self, access: Access | None) -> web.Application:
        """The application for TCP with its access rules, or without any for the socket."""
        application = limits.make_application([web.get(path, handler) for path, handler in self._routes().items()])
        application.middlewares.append(self._count)
        if access is None:
            application.middlewares.append(self._identify)
        else:
            access.protect(application)
        return application

    def _routes(self) -> dict[str, Handler]:
        return {
            "/metrics": self._metrics,
            "/targets": self._targets,
            "/api/v1/jobs": self._tagged(self._jobs),
            "/api/v1/jobs/{job_id}": self._job,
            "/api/v1/queue": self._tagged(self._queue),
            "/api/v1/runs": self._tagged(self._runs),
            "/api/v1/fleet": self._tagged(self._fleet),
            "/api/v1/usage": self._tagged(self._usage),
            "/api/v1/changes": self._changes,
            "/api/v1/index": self._index,
            "/-/healthy": self._healthy,
            "/-/ready": self._ready,
            "/": self._landing,
        }

    @web.middleware
    async def _count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        name = resource.canonical if resource is not None else "other"
        begun = time.monotonic()
        try:
            response = await handler(request)
        except web.HTTPException as error:
            self._requests[name, error.status] += 1
            raise
        finally:
            self._request_s[name] = self._request_s.get(name, 0.0) + time.monotonic() - begun
        self._requests[name, response.status] += 1
        return response

    @web.middleware
    async def _identify(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = request.transport.get_extra_info("socket") if request.transport is not None else None
        viewer = await self._viewer_of(peer_uid(connection)) if connection is not None else None
        if viewer is None:
            return web.Response(status=403, text="403: this user has no jobs\n")
        request["viewer"] = viewer
        return await handler(request)

    def _head(self, request: web.Request) -> Head:
        # the second ones name run directories
        problems = [*self._engine.problems, *(self._registry.problems if self._viewer(request).user is None else ())]
        return Head(time.time(), self._engine.view.as_of, problems, self._engine.scope)

    async def _metrics(self, request: web.Request) -> web.Response:
        self._require_everything(request)
        out = Samples({"cluster": self._engine.label})
        size, works = self._store.last_size_bytes, self._store.problem is None
        engine, mounts = self._engine, self._registry.mounts()
        commands, unparsed, interval_s = engine.commands, engine.unparsed, engine.interval_s
        facts = SelfFacts(commands, unparsed, interval_s, size, works, self._requests, self._request_s, mounts)
        render_self(facts, out)
        render_user_budgets(engine.budget_use, out)
        if engine.controller is not None:
            render_controller(engine.controller, engine.clock_offset_s, out)
        if self._whole_cluster:
            render_nodes(engine.nodes or (), engine.prices, out)
        own = out.page().encode("utf-8")
        headers = {"Content-Type": TEXT_TYPE, "Vary": "Accept-Encoding"}
        jobs = await asyncio.to_thread(engine.page)
        if not negotiation.accepts_gzip(request.headers.get("Accept-Encoding", "")):
            return web.Response(body=zlib.decompress(jobs, 31) + own, headers=headers)
        packer = zlib.compressobj(1, zlib.DEFLATED, 31)
        # two members of a gzip file are one file (RFC 1952)
        body = jobs + packer.compress(own) + packer.flush()
        return web.Response(body=body, headers={**headers, "Content-Encoding": "gzip"})

    def _require_everything(self, request: web.Request) -> None:
        if self._viewer(request).user is not None:
            raise web.HTTPForbidden(text="403: this has the jobs of all users, and Slurm hides them from you\n")

    def _viewer(self, request: web.Request) -> Viewer:
        viewer: Viewer = request.get("viewer", EVERYTHING)  # over TCP whoever has credentials
        return viewer

    async def _targets(self, request: web.Request) -> web.Response:
        self._require_everything(request)
        kind = request.query.get("kind", "sidecar")
        if kind not in ("sidecar", "engine"):
            return _wrong(WrongQueryError(f"kind: {kind[:40]!r} is neither sidecar nor engine"))
        groups = self._registry.targets(kind)
        if groups is None:  # Prometheus then keeps the targets that it has
            return web.Response(status=503, text="Not ready: the jobs of gpujob have not been read.\n")
        return web.json_response(groups)

    def _tagged(self, handler: Handler) -> Handler:
        """The handler with an entity tag, which changes with each answer of Slurm: a client gets nothing twice."""

        async def answer(request: web.Request) -> web.StreamResponse:
            what = f"{request.path_qs} {self._viewer(request).user} {self._head(request).problems}"
            tag = f'"{self._born}-{self._engine.view.number}-{zlib.crc32(what.encode("utf-8", "replace")):x}"'
            if tag in re.findall(r'"[^"]*"', request.headers.get("If-None-Match", "")):
                return web.Response(status=304, headers={"ETag": tag})
            response = await handler(request)
            if response.status == 200:
                response.headers["ETag"] = tag
            return response

        return answer

    def _user(self, request: web.Request, wanted: str | None) -> str | None:
        """Whose jobs are wanted and may be seen; None for those of all users. Raises HTTPForbidden."""
        own = self._viewer(request).user
        if own is not None and wanted not in (None, own):
            text = json.dumps({"error": "Slurm hides the jobs of other users from you"})
            raise web.HTTPForbidden(text=text, content_type="application/json")
        return own or wanted

    async def _usage(self, request: web.Request) -> web.Response:
        """What jobs took that ended since a time, or run now."""
        try:
            query = answers.parse_usage_query(request.query, time.time())
        except WrongQueryError as error:
            return _wrong(error)
        user, view = self._user(request, query.user), self._engine.view
        sums = await asyncio.to_thread(self._store.sums_since, query.since, query.by, user)
        active = [job for job in view.jobs.values() if job.tracked.is_active and user in (None, job.user)]
        groups = answers.usage_json(sums, active, query.by, view.as_of or 0.0, await self._idle(active))
        return web.json_response(self._head(request).with_body(by=query.by, since=query.since, groups=groups))

    async def _idle(self, jobs: Sequence[Job]) -> Mapping[str, float]:
        """Idle GPU seconds so far of those of these jobs that run, by run directory."""
        attempts = attempts_of_active(jobs)
        return await asyncio.to_thread(self._registry.idle_s, attempts) if attempts else NOTHING

    async def _fleet(self, request: web.Request) -> web.Response:
        last, end = self._engine.commands["sinfo"].last_success, time.monotonic() + NODES_WAIT_S
        if self._engine.want_nodes():
            while self._engine.commands["sinfo"].last_success == last and time.monotonic() < end:
                await asyncio.sleep(NODES_POLL_S)
        nodes = self._engine.nodes
        if nodes is None:
            return web.json_response(self._head(request).with_body(error="the nodes have not been read"), status=503)
        return web.json_response(
            self._head(request)
            ._replace(as_of=self._engine.commands["sinfo"].last_success)
            .with_body("sinfo", instances=answers.fleet_json(nodes, self._engine.prices))
        )

    async def _runs(self, request: web.Request) -> web.Response:
        return await self._answer_jobs(request, "runs", answers.runs_json)

    async def _jobs(self, request: web.Request) -> web.Response:
        return await self._answer_jobs(request, "jobs", lambda jobs, now: [answers.job_json(job, now) for job in jobs])

    async def _queue(self, request: web.Request) -> web.Response:
        return await self._answer_jobs(request, "queue", lambda jobs, _now: self._queue_text.of_jobs(jobs))

    async def _answer_jobs(
        self, request: web.Request, name: str, to_json: Callable[[list[Job], float], list[JsonValue] | str]
    ) -> web.Response:
        """Answer with the jobs that match the query, under a name; ``to_json`` may give text that is JSON."""
        try:
            query = answers.parse_query(request.query, time.time())
        except WrongQueryError as error:
            return _wrong(error)
        query = query._replace(user=self._user(request, query.user))
        found = answers.matching(self._engine.view.jobs.values(), query)
        if query.since is not None:
            since, most = query.since, query.limit + 1
            past = await asyncio.to_thread(self._store.jobs_since, since, query.user, query.state, most)
            known = {name_of(job) for job in past}
            found = [job for job in found if not job.tracked.is_over and name_of(job) not in known] + past
        entries = to_json(found[: query.limit], self._engine.view.as_of or 0.0)
        covers_since = None if query.since is None else max(self._engine.covers_since, time.time() - JOBS_KEPT_S)
        body = self._head(request).with_body(is_all=len(found) <= query.limit, covers_since=_moment(covers_since))
        if isinstance(entries, list):
            return web.json_response(body | {name: entries})
        text = f'{json.dumps(body)[:-1]}, "{name}": {entries}}}'
        return web.Response(text=text, content_type="application/json")

    async def _job(self, request: web.Request) -> web.Response:
        job_id, viewer = request.match_info["job_id"], self._viewer(request)
        found = answers.parts_of(self._engine.view.jobs, job_id)
        if not found:
            found = await asyncio.to_thread(self._store.jobs_by_id, [job_id])
        found, as_of = [job for job in found if viewer.sees(job.user)], self._engine.view.as_of or 0.0
        idle = await self._idle(found)
        jobs = [answers.job_json(job, as_of, idle) for job in found]
        if not jobs:
            return web.json_response(
                self._head(request).with_body(error=f"no job {job_id[:40]!r} is known"), status=404
            )
        return web.json_response(self._head(request).with_body(jobs=list[JsonValue](jobs)))

    async def _index(self, request: web.Request) -> web.Response:
        """What is in the hub's file."""
        self._require_everything(request)
        facts = await asyncio.to_thread(self._store.facts)
        return web.json_response(self._head(request).with_body(**facts._asdict()))

    async def _changes(self, request: web.Request) -> web.Response:
        """Changes with higher numbers than ``after``; waits for one at most ``POLL_S``."""
        viewer = self._viewer(request)
        try:
            after = answers.parse_number(request.query, "after", self._engine.last_number)
        except WrongQueryError as error:
            return _wrong(error)
        after = min(after, self._engine.last_number)  # the number is of a file that was lost
        if after == self._engine.last_number and self._polls < MOST_POLLS:
            self._polls += 1
            try:
                async with asyncio.timeout(POLL_S):
                    while after == self._engine.last_number and not self._ends:
                        await self._changed.wait()
            except TimeoutError:
                pass  # an answer without changes
            finally:
                self._polls -= 1
        recent, most = list(self._engine.recent), answers.MOST_CHANGES
        if recent and recent[0].number <= after + 1:
            found = [change for change in recent if change.number > after][:most]
        elif after < self._engine.last_number:
            found = await asyncio.to_thread(self._store.changes_after, after, most)
        else:
            found = []
        last = found[-1].number if found else after
        changes = [answers.change_row(change) for change in found if viewer.sees(change.user)]
        return web.json_response(self._head(request).with_body(changes=list[JsonValue](changes), last=last))

    async def _healthy(self, request: web.Request) -> web.Response:
        return web.Response(text="The hub is healthy.\n")

    async def _ready(self, request: web.Request) -> web.Response:
        if self._engine.view.is_ready:
            return web.Response(text="The hub is ready.\n")
        return web.Response(status=503, text="Not ready: Slurm's queue has not been read.\n")

    async def _landing(self, request: web.Request) -> web.Response:
        paths = [path for path in self._routes() if path != "/"]
        return web.Response(text="\n".join((f"gpujob hub {__version__}", *paths, "")))

    async def run(
        self,
        local: UnixListener,
        listeners: Sequence[Listener],
        access: Access | None,
        reopen: Callable[[], UnixListener] | None = None,
    ) -> None:
        """Serve until a signal. ``reopen`` opens the socket of this machine again when its folder is gone."""
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        self._engine.on_change = lambda: _call(loop, self._wake)
        servers, runners = list[asyncio.Server](), list[web.AppRunner]()
        local_server: asyncio.Server | None = None
        try:
            runners.append(await _runner(self.application(None)))
            local_server = await _serve_local(runners[-1], local)
            if access is not None:
                runners.append(await _runner(self.application(access)))
                servers += await limits.serve(
                    runners[-1], [(listener.listening, listener.context) for listener in listeners]
                )
            while not await _is_set_within(stop, FOLDER_EACH_S):
                if reopen is None or local.has_folder():
                    continue
                local_server.close()
                local.unlock()
                with contextlib.suppress(ExporterError):  # until the user logs in again
                    local = reopen()
                    local_server = await _serve_local(runners[0], local)
        finally:
            self._ends = True
            self._wake()
            for server in (local_server, *servers):
                if server is not None:
                    server.close()
            for runner in runners:
                try:
                    await asyncio.wait_for(runner.cleanup(), END_S)
                except TimeoutError:
                    pass  # a slow client does not delay the end

    def _wake(self) -> None:
        """Wake the requests that wait for changes."""
        self._changed.set()
        self._changed = asyncio.Event()


async def _runner(application: web.Application) -> web.AppRunner:
    runner = web.AppRunner(application, access_log=None, handle_signals=False)
    await runner.setup()
    return runner


async def _serve_local(runner: web.AppRunner, local: socket.socket) -> asyncio.Server:
    server: Any = runner.server
    return await asyncio.get_running_loop().create_unix_server(lambda: limits.Connection(server), sock=local)


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(event.wait(), seconds)
    return False


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Call a function in the loop's thread, unless the loop has ended."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        pass  # closed


def _moment(time_s: float | None) -> float | None:
    return None if time_s is None or math.isinf(time_s) else time_s


def _wrong(error: WrongQueryError) -> web.Response:
    return web.json_response({"error": str(error)}, status=400)
