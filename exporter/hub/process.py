"""The process of a hub: its lock, its file, the thread that asks Slurm, and its pages."""

import asyncio
import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from exporter.contract import run_files
from exporter.contract.clock import SystemClock
from exporter.contract.errors import ExporterError
from exporter.contract.file_locks import FileLockedError, lock_file
from exporter.contract.user_state import HUB_FOLDER, HUB_SOCKET, hub_socket, make_own_folder, user_state_folder
from exporter.hub.api.listeners import open_local
from exporter.hub.api.service import NEEDS, HubService
from exporter.hub.engine import Engine, Settings
from exporter.hub.registry_reader import RegistryReader
from exporter.hub.site_reader import find_cluster_file, read_site
from exporter.hub.store import Store
from exporter.machine.own_process import limit_reserved_memory, name_thread
from exporter.slurm.sources.rest_reader import slurm_reader
from exporter.web.access import Access, Needs
from exporter.web.addresses import Listener, OwnNames, open_socket, parse_listen_address
from exporter.web.config_file import WebConfigFile

AFTER_FAULT_S = 60.0  # until the next step after one that failed by a fault of ours
END_S = 2.0  # for a step in progress at the end; a command of Slurm that hangs is left alone
_UNSAFE = re.compile(r"[^\w.-]")

log = logging.getLogger("gpujob.hub")


class Options(NamedTuple):
    """What the command line asks for."""

    user: str | None  # whose jobs; None for those of all users
    cluster: str | None
    partitions: Sequence[str]
    interval_s: float
    most_jobs: int
    state_dir: Path | None
    registries: Sequence[Path]  # the site's, where all users register their jobs
    listen: str | None  # address for TCP
    web_config: str | None
    cluster_file: str | None = None

    @property
    def scope(self) -> str:
        return "cluster" if self.user is None else "user"

    @property
    def name(self) -> str:
        """The name of this hub's files: one for each scope and cluster."""
        return f"hub-{self.scope}" + (f"-{_UNSAFE.sub('_', self.cluster)}" if self.cluster else "")


def run_hub(options: Options, environ: Mapping[str, str]) -> None:
    """Run until a signal. Raises ExporterError if another hub runs, or if an address is taken."""
    limit_reserved_memory()
    cluster_file = find_cluster_file(options.cluster_file, environ)
    folder, site = _state_dir(options, environ), read_site(cluster_file)
    log.info("cluster file: %s", cluster_file or "none")
    try:
        lock_file(folder / f"{options.name}.lock")
    except FileLockedError as error:
        raise ExporterError(f"{folder} already has a hub of the scope {options.scope!r}: {error}") from error
    except OSError as error:
        raise ExporterError(f"{folder}: {error.strerror}; give another --state-dir") from error
    web_file = None if options.web_config is None else WebConfigFile(options.web_config)
    listeners = _open_listeners(options, web_file)
    store, clock = Store(folder / f"{options.name}.sqlite"), SystemClock()
    slurm = slurm_reader(options.user, options.cluster, environ, options.partitions)
    is_whole = options.user is None
    registry = RegistryReader(_registry_folders(options, environ), only_own=not is_whole, target_dir=site.target_dir)
    settings = Settings(is_whole, options.cluster, options.interval_s, options.most_jobs)
    engine = Engine(slurm, store, settings, clock, runs=registry.runs, site=site)
    registry.live, registry.stale, registry.ends = engine.live_run_dirs, engine.stale_targets, engine.ends_of_stale
    registry.tasks, registry.cluster = engine.array_tasks, engine.known_cluster
    stop = threading.Event()
    thread = threading.Thread(target=_ask, args=(engine, stop), name="ask_slurm", daemon=True)
    try:
        asyncio.run(_serve(options, environ, folder, engine, store, registry, listeners, web_file, thread))
    finally:
        stop.set()
        engine.wake.set()
        if thread.is_alive():
            thread.join(END_S)
        store.close()


def _state_dir(options: Options, environ: Mapping[str, str]) -> Path:
    own = user_state_folder(environ)
    if options.state_dir is None and own is None:
        raise ExporterError("HOME is not set, so there is no place for the hub's file; give --state-dir")
    folder = (options.state_dir or Path(str(own), HUB_FOLDER)).absolute()
    try:
        make_own_folder(folder)
    except OSError as error:
        raise ExporterError(f"{folder} cannot be made: {error.strerror}; give another --state-dir") from error
    return folder


def _registry_folders(options: Options, environ: Mapping[str, str]) -> list[Path]:
    """Folders of the entries of jobs: the user's own, and the site's."""
    own = user_state_folder(environ)
    return [*([Path(own, "runs")] if own is not None else []), *options.registries]


def _open_listeners(options: Options, web_file: WebConfigFile | None) -> list[Listener]:
    if options.listen is None:
        return []
    listening = open_socket(*parse_listen_address(options.listen))
    return [Listener(listening, None if web_file is None else web_file.server_context())]


async def _serve(
    options: Options,
    environ: Mapping[str, str],
    folder: Path,
    engine: Engine,
    store: Store,
    registry: RegistryReader,
    listeners: Sequence[Listener],
    web_file: WebConfigFile | None,
    thread: threading.Thread,
) -> None:
    is_whole = options.user is None
    service = HubService(engine, store, registry, own_uid=os.geteuid(), whole_cluster=is_whole)
    name = HUB_SOCKET if options.name == "hub-user" else f"{options.name}.sock"
    path = Path(hub_socket(environ, str(folder), name))
    open_socket_file = partial(open_local, path, service.admits, for_all=is_whole)
    local = open_socket_file()
    access = _access(folder, web_file) if listeners else None
    if web_file is not None:
        web_file.watch()
    registry.start()
    thread.start()
    log.info("listening on %s", ", ".join([str(path), *map(str, listeners)]))
    try:
        # not beside the hub's file, where a look at the folder may hang
        await service.run(local, listeners, access, open_socket_file if path.parent != folder else None)
    finally:
        path.unlink(missing_ok=True)


def _access(folder: Path, web_file: WebConfigFile | None) -> Access:
    """Admission over TCP: whoever has the token of the hub's folder, or what the web configuration asks for."""
    try:
        run_files.make_token(folder)
    except OSError as error:
        raise ExporterError(f"{folder}: a token cannot be written: {error.strerror}") from error
    place = f"the hub's token as `Authorization: Bearer TOKEN`; it is in the file `token` of {folder}"
    names = OwnNames()
    names.learn()
    token = run_files.read_token(folder)
    return Access(NEEDS, names=names, token=token, web_file=web_file, other_paths=Needs.CREDENTIALS, place=place)


def _ask(engine: Engine, stop: threading.Event) -> None:
    """Ask Slurm until the end."""
    name_thread("ask_slurm")
    wait_s = 0.0
    while not stop.is_set():
        engine.wake.wait(wait_s)
        engine.wake.clear()
        try:
            wait_s = engine.step()
        except Exception:
            log.exception("the hub failed; it continues in %g s", AFTER_FAULT_S)
            wait_s = AFTER_FAULT_S
