"""Command line of ``gpujob-exporter``, the only module of this package that prints and exits."""

import argparse
import asyncio
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from typing import NoReturn

from exporter import __version__
from exporter.collecting.collector import CollectorContext
from exporter.contract.clock import SystemClock
from exporter.contract.errors import ExporterError
from exporter.contract.identity import Identity, identify
from exporter.contract.manifest import Manifest, read_manifest
from exporter.gpus.host_reader import GpuHost
from exporter.gpus.vendors_reader import READERS
from exporter.machine.file_host import FileWatchHost
from exporter.machine.kernel_log import KernelLog
from exporter.sidecar.background_reads import CollectorSlot
from exporter.sidecar.sidecar import Sidecar, parse_listen_address

USAGE = 2
INTERRUPTED = 130
# Exit status of a sidecar that only a new process can replace; ``launcher.programs.supervisor`` starts one.
RESTART_STATUS = 75
GPUS_CLOSE_S = 1.0  # limit of a driver call at the end; a hanging call is abandoned


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
        epilog="examples: gpujob-exporter sidecar --run-dir logs/4459_embed_20251122_041341; gpujob-exporter sidecar "
        "--job-name embed --num-workers 4 --gpu-ids 0 1 2 3 --output-dir out --log-dir logs --total-items 100000",
    )
    sidecar.add_argument("--run-dir", metavar="DIR", help="run directory with manifest.json")
    sidecar.add_argument(
        "--web.listen-address",
        dest="listen",
        metavar="ADDRESS",
        help="host:port; port 0 picks a free one (default: the address in the manifest, or :9410)",
    )
    sidecar.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="lowest level of messages that are logged (default: info)",
    )
    _add_attach_flags(sidecar)
    sidecar.set_defaults(run=_run_sidecar, usage=sidecar.error)

    check = commands.add_parser(
        "check-config",
        help="check a manifest or a monitor_config.yaml",
        description="Check a file and print a summary of it. The exit status is 2 when the file cannot be used.",
    )
    check.add_argument("file", metavar="FILE", help="manifest.json, its run directory, or a monitor_config.yaml")
    check.add_argument("--log-level", default="info", help=argparse.SUPPRESS)
    check.set_defaults(run=_check_config)
    return parser


def _add_attach_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags without defaults: given flags override the file, and the settings have the defaults."""
    group = parser.add_argument_group("a running job that gpujob did not launch")
    add = group.add_argument
    add("--config", metavar="FILE", help="monitor_config.yaml; flags override it")
    add("--job-name", metavar="NAME", help="name of the job, a word in its workers' command lines")
    add("--num-workers", type=_count, metavar="N", help="expected number of worker processes")
    add("--gpu-ids", type=_index, nargs="*", metavar="N", help="GPUs used by the workers (default: none)")
    add("--output-dir", metavar="DIR", help="directory of output files")
    add("--log-dir", metavar="DIR", help="directory of log files")
    add("--checkpoint-dir", metavar="DIR", help="directory of checkpoint files (default: that of the output files)")
    add("--total-items", type=_index, metavar="N", help="number of items of the whole job, for the ETA")
    add("--check-interval", type=_seconds, metavar="S", help="seconds between checks (default: 10)")
    add("--launch-timeout", type=_seconds, metavar="S", help="seconds within which workers must start (default: 60)")
    add("--stall-timeout", type=_seconds, metavar="S", help="seconds without progress until a stall (default: 300)")
    add("--alert-email", metavar="ADDRESS", help="print where to put this address in the files of Alertmanager")
    add("--alert-slack", metavar="URL", help="print where to put this webhook in the files of Alertmanager")
    add("--output-pattern", type=_glob, metavar="GLOB", help="output files (default: output_worker_*.json)")
    add("--log-pattern", type=_glob, metavar="GLOB", help="log files (default: worker_*.log)")
    add("--checkpoint-pattern", type=_glob, metavar="GLOB", help="checkpoint files (default: checkpoint_*.pt)")
    add(
        "--gpu-metrics",
        action=argparse.BooleanOptionalAction,
        help="also write GPU readings to gpu_metrics.csv in the output directory (default: no)",
    )
    add("--pid-file", metavar="FILE", help="pids in the order of the workers (default: worker_pids.txt of the log dir)")
    add("--slurm-job-id", metavar="ID", help="Slurm job of the workers (default: the one in which this command runs)")
    add("--state-dir", metavar="DIR", help="run directory to create or to continue (default: a new one below logs/)")


def _index(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _count(text: str) -> int:
    if (number := _index(text)) == 0:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return number


def _glob(text: str) -> str:
    if not text or "/" in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a pattern of file names; give the directory with its own flag"
        )
    return text


def _run_sidecar(arguments: argparse.Namespace) -> None:
    from exporter.attach.settings import FLAGS, flag_name

    flags = {name: getattr(arguments, name, None) for name in (*FLAGS, "config")}
    given = [flag_name(name) for name, value in flags.items() if value is not None]
    if arguments.run_dir is not None and given:
        _fail(
            f"--run-dir is for a job that gpujob launched, {', '.join(given)} for any other job; use one or the other"
        )
    if arguments.run_dir is not None:
        _watch_launched(arguments)
    if not given:
        arguments.usage("no job is given; use --run-dir DIR, --config FILE or the flags of a running job")
    _watch_attached(arguments, flags)


def _watch_launched(arguments: argparse.Namespace) -> NoReturn:
    """Watch a job that gpujob has launched."""
    from exporter.sidecar import service  # aiohttp is needed by this command alone

    manifest = read_manifest(arguments.run_dir)
    identity = identify(manifest, os.environ, socket.gethostname())
    sidecar = _make_sidecar(manifest, identity)
    sidecar.host, port = parse_listen_address(arguments.listen or manifest.listen_address)
    _lower_priority()
    server = service.HttpService(sidecar)
    asyncio.run(server.run(_open_sidecar_socket(sidecar, port)))
    _exit_now(sidecar, RESTART_STATUS if server.should_restart else 0)


def _watch_attached(arguments: argparse.Namespace, flags: Mapping[str, object]) -> NoReturn:
    """Watch a job that others started, and report how it ended."""
    from exporter.attach import outcome
    from exporter.attach import settings as attach
    from exporter.attach.finder import WorkerFinder
    from exporter.sidecar import service

    file, config = flags["config"], dict[str, object]()
    if isinstance(file, str):
        from exporter.attach.monitor_config import read_monitor_config  # yaml is needed for this file alone

        config = read_monitor_config(file, [name for name, value in flags.items() if value is not None])
    settings = attach.merge_settings({name: flags[name] for name in attach.FLAGS}, config)
    address = arguments.listen or attach.LISTEN_ADDRESS
    host, port = parse_listen_address(address)
    listening = service.open_socket(host, port) if port else None  # before anything is written
    for notice in attach.setting_notices(settings):
        print(f"gpujob-exporter: {notice}", file=sys.stderr)
    attached = attach.attach_to_job(settings, os.environ, address)
    run_dir = attached.manifest.run_dir
    print(f"gpujob-exporter: the run directory is {run_dir}; gpujob watch {run_dir} shows the job", file=sys.stderr)
    sidecar = _make_sidecar(attached.manifest, attached.identity)
    sidecar.host = host
    finder = WorkerFinder(sidecar, attached.search)
    sidecar.slots.append(CollectorSlot(finder, sidecar.context.clock))
    _lower_priority()
    server = service.HttpService(sidecar)
    asyncio.run(server.run(listening or _open_sidecar_socket(sidecar, port)))
    if finder.outcome is None:
        finder.write_unfinished_report()
        print("gpujob-exporter: the sidecar was stopped; the job itself was not touched", file=sys.stderr)
        _exit_now(sidecar, INTERRUPTED if server.stopped_by == signal.SIGINT else 0)
    try:
        print(outcome.end_summary(sidecar.status(), finder.outcome, str(run_dir)), flush=True)
    except (OSError, UnicodeError):
        pass  # stdout is closed or the locale cannot encode it; the report has everything
    _exit_now(sidecar, finder.outcome.exit_status)


def _make_sidecar(manifest: Manifest, identity: Identity) -> Sidecar:
    clock = SystemClock()
    kernel, files, gpus = KernelLog(clock, identity.start), FileWatchHost(clock), GpuHost(READERS, clock)
    return Sidecar(CollectorContext(manifest, identity, clock, kernel=kernel, files=files, gpus=gpus))


def _open_sidecar_socket(sidecar: Sidecar, port: int) -> socket.socket:
    """Open a listening socket; for port 0, reuse the port of the previous sidecar if possible."""
    from exporter.sidecar import service

    if port == 0 and (known := service.find_earlier_port(sidecar)) is not None:
        try:
            return service.open_socket(sidecar.host, known)
        except ExporterError:
            pass  # the port is taken
    return service.open_socket(sidecar.host, port)


def _exit_now(sidecar: Sidecar, status: int) -> NoReturn:
    sidecar.context.files.close()
    if sidecar.context.gpus is not None:
        sidecar.context.gpus.close(GPUS_CLOSE_S)  # nothing routine is pending in the driver
    sys.stderr.flush()
    os._exit(status)  # a thread that hangs in the kernel must not delay the end of the step


def _lower_priority() -> None:
    """Lower our priority, and become the OOM killer's first choice: the job comes first."""
    try:
        # Watching processes and logs needs many descriptors, and the usual soft limit is 1024.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 65536), most))
    except (OSError, ValueError):
        pass  # some processes are then read less often
    try:
        os.nice(10)
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as out:
            out.write("1000")
    except OSError:
        pass  # not allowed everywhere, and optional


def _check_config(arguments: argparse.Namespace) -> None:
    if arguments.file.endswith((".yaml", ".yml")):
        _check_monitor_config(arguments.file)
        return
    manifest = read_manifest(arguments.file)
    print(
        f"{manifest.run_dir}: job {manifest.job_name!r}, {len(manifest.tasks)} worker tasks on "
        f"{manifest.nodes} nodes, {len(manifest.groups)} path groups"
    )


def _check_monitor_config(file: str) -> None:
    from exporter.attach import settings as attach
    from exporter.attach.monitor_config import read_monitor_config

    settings = attach.merge_settings({}, read_monitor_config(file))
    for notice in attach.setting_notices(settings):
        print(f"gpujob-exporter: {notice}", file=sys.stderr)
    print(
        f"{file}: job {settings.job_name!r}, {settings.num_workers} workers, {len(settings.gpu_ids)} GPUs, "
        f"{len(settings.progress_patterns)} progress patterns, {len(settings.error_patterns)} error patterns"
    )
