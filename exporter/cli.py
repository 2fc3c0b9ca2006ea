"""Command line of ``gpujob-exporter``. The only place of this package that prints and exits."""

import argparse
import asyncio
import logging
import os
import resource
import socket
import sys
from typing import NoReturn

from exporter import __version__
from exporter.clock import SystemClock
from exporter.collectors.base import Context
from exporter.errors import ExporterError
from exporter.identity import identify
from exporter.manifest import read_manifest
from exporter.sidecar import Sidecar, parse_listen_address

USAGE = 2


def main() -> None:
    """Run the command given in ``sys.argv``."""
    arguments = _parser().parse_args()
    logging.basicConfig(
        level=arguments.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        arguments.run(arguments)
    except ExporterError as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    print(f"gpujob-exporter: {message}", file=sys.stderr)
    sys.exit(USAGE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpujob-exporter",
        description="Prometheus exporter of a GPU job.",
        epilog="example: gpujob-exporter sidecar --run-dir logs/4459_embed_20251122_041341 --web.listen-address :9410",
    )
    parser.add_argument("--version", action="version", version=f"gpujob-exporter {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    sidecar = commands.add_parser(
        "sidecar",
        help="watch the workers of one node",
        description="Watch the workers of one node and serve /metrics and /status until the job is over.",
        epilog="example: gpujob-exporter sidecar --run-dir logs/4459_embed_20251122_041341",
    )
    sidecar.add_argument("--run-dir", required=True, metavar="DIR", help="run directory with manifest.json")
    sidecar.add_argument(
        "--web.listen-address",
        dest="listen",
        metavar="ADDRESS",
        help="host:port; port 0 picks a free one (default: what the manifest says)",
    )
    sidecar.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    sidecar.set_defaults(run=_sidecar)

    check = commands.add_parser(
        "check-config",
        help="check a manifest",
        description="Read a manifest and say what it holds; exit status 2 when it cannot be used.",
    )
    check.add_argument("manifest", metavar="MANIFEST", help="manifest.json, or its run directory")
    check.add_argument("--log-level", default="info", help=argparse.SUPPRESS)
    check.set_defaults(run=_check_config)
    return parser


def _sidecar(arguments: argparse.Namespace) -> None:
    from exporter import service  # aiohttp is needed by this command alone

    manifest = read_manifest(arguments.run_dir)
    identity = identify(manifest, os.environ, socket.gethostname())
    sidecar = Sidecar(Context(manifest, identity, SystemClock()))
    host, port = parse_listen_address(arguments.listen or manifest.listen_address)
    sidecar.host = host
    _be_modest()
    listening = None
    if port == 0 and (known := service.known_port(sidecar)) is not None:
        try:
            listening = service.open_socket(host, known)
        except ExporterError:
            listening = None  # somebody else has it now
    if listening is None:
        listening = service.open_socket(host, port)
    asyncio.run(service.Service(sidecar).run(listening))
    sys.stderr.flush()
    os._exit(0)  # a collector's thread that hangs in the kernel must not hold the end of the step


def _be_modest() -> None:
    """Low priority, and the first that the kernel takes when memory runs out: the job comes first."""
    try:
        # processes and logs are watched on kept descriptors, and the usual soft limit is 1024
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 65536), most))
    except (OSError, ValueError):
        pass  # then some processes are looked at less often
    try:
        os.nice(10)
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as out:
            out.write("1000")
    except OSError:
        pass  # not everywhere allowed, and nothing depends on it


def _check_config(arguments: argparse.Namespace) -> None:
    manifest = read_manifest(arguments.manifest)
    print(
        f"{manifest.run_dir}: job {manifest.job_name!r}, {len(manifest.tasks)} worker tasks on "
        f"{manifest.nodes} nodes, {len(manifest.groups)} path groups"
    )
