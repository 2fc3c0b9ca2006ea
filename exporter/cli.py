"""Command line of ``gpujob-exporter``, the only module of this package that prints and exits."""

import argparse
import asyncio
import json
import logging
import os
import pwd
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from exporter import __version__
from exporter.collecting.collector import CollectorContext
from exporter.contract import run_files
from exporter.contract.clock import SystemClock
from exporter.contract.errors import ExporterError
from exporter.contract.file_locks import FileLockedError, lock_file
from exporter.contract.identity import Identity, identify
from exporter.contract.manifest import DETAILS, METRICS_ACCESS, NORMAL, OPEN, Manifest, read_manifest
from exporter.contract.python_flags import ISOLATED
from exporter.gpus.host_reader import GpuHost
from exporter.gpus.vendors_reader import READERS
from exporter.machine.file_host import FileWatchHost
from exporter.machine.kernel_log import KernelLog
from exporter.machine.own_process import allow_many_descriptors, limit_reserved_memory
from exporter.sidecar.background_reads import CollectorSlot
from exporter.sidecar.log_limit import LogLimit
from exporter.sidecar.sidecar import Sidecar
from exporter.web.addresses import Listener, OwnNames, open_socket, parse_listen_address
from exporter.web.config_file import WebConfigFile

if TYPE_CHECKING:
    from exporter.sidecar.service import HttpService

USAGE = 2
ATTACHED_LISTEN_ADDRESS = "127.0.0.1:9410"
RECEIVER_LISTEN_ADDRESS = "127.0.0.1:9499"
# Exit status of a sidecar that only a new process can replace; ``launcher.programs.supervisor`` starts one.
RESTART_STATUS = 75
# arguments not about an attached job
NO_FLAGS = ("command", "run", "usage", "run_dir", "listen", "web_config", "metrics_access", "log_level")
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


def _fail(message: str, status: int = USAGE) -> NoReturn:
    print(f"gpujob-exporter: {message}", file=sys.stderr)
    sys.exit(status)


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
        help="host:port; :port is every interface, and port 0 picks a free one (default: the address in the manifest, "
        f"or {ATTACHED_LISTEN_ADDRESS}, or another port if that one is taken)",
    )
    sidecar.add_argument(
        "--web.config.file",
        dest="web_config",
        metavar="FILE",
        help="TLS and users of the page, in the format of Prometheus' exporters (default: that in the manifest)",
    )
    sidecar.add_argument(
        "--web.metrics-access",
        dest="metrics_access",
        choices=METRICS_ACCESS,
        help=f"who may read /metrics if that file names no users or client certificates (default: {OPEN})",
    )
    sidecar.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="lowest level of messages that are logged (default: info)",
    )
    _add_attach_flags(sidecar)
    sidecar.set_defaults(run=_run_sidecar, usage=sidecar.error)

    _add_hub(commands)
    _add_receiver(commands)
    _add_gate(commands)

    check = commands.add_parser(
        "check-config",
        help="check a manifest or a monitor_config.yaml",
        description="Check a file and print a summary of it. The exit status is 2 when the file cannot be used.",
    )
    check.add_argument("file", metavar="FILE", help="manifest.json, its run directory, or a monitor_config.yaml")
    check.add_argument("--log-level", default="info", help=argparse.SUPPRESS)
    check.set_defaults(run=_check_config)
    return parser


def _add_hub(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    hub = commands.add_parser(
        "hub",
        help="follow all jobs of a user or a cluster",
        description="Follow all Slurm jobs of a user or a cluster. Serve series, scrape targets and JSON.",
        epilog="examples: gpujob-exporter hub; gpujob-exporter hub --scope cluster --web.listen-address :9420",
    )
    add = hub.add_argument
    add("--scope", choices=("user", "cluster"), default="user", help="whose jobs: your own or all (default: user)")
    add("--partition", action="append", metavar="NAME", help="follow jobs of this partition only; may be repeated")
    add("--cluster", metavar="NAME", help="cluster of Slurm (default: that of this machine)")
    add(
        "--source",
        choices=("auto", "commands", "rest"),
        help="where to read the queue: Slurm's commands, or slurmrestd (rest) (default: auto)",
    )
    add("--interval", type=_interval, metavar="S", help="seconds between two reads of the queue (default: 60)")
    add(
        "--jobs-at-most",
        type=int,
        default=10_000,
        metavar="N",
        help="most jobs with their own series; beyond that, only the newest (default: 10000)",
    )
    add(
        "--registry-dir",
        action="append",
        metavar="DIR",
        help="the site's directory of jobs, `registry_dir` in its cluster file; may be repeated",
    )
    add(
        "--cluster-file",
        metavar="FILE",
        help="cluster file with list prices (default: GPUJOB_CONFIG, that of the user, or /etc/gpujob/config.yaml)",
    )
    add("--state-dir", metavar="DIR", help="folder of the hub's file (default: ~/.local/state/gpujob/hub)")
    add(
        "--web.listen-address",
        dest="listen",
        metavar="ADDRESS",
        help="also listen on this host:port, for clients with the token of the state folder (default: only a socket)",
    )
    add("--web.config.file", dest="web_config", metavar="FILE", help="TLS and users for that address")
    add(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="lowest level of messages that are logged (default: info)",
    )
    hub.set_defaults(run=_run_hub)


def _add_receiver(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    receiver = commands.add_parser(
        "receive-alerts",
        help="take alerts from Alertmanager, and report when they stop",
        description="Take the webhooks of Alertmanager, write them into a log, and report when the heartbeat of the "
        "alerting stops. `gpujob alerts receive` is the same.",
        epilog='example: gpujob-exporter receive-alerts --on-silence "mail -s gpujob ada@example.org"',
    )
    add = receiver.add_argument
    add("--log", metavar="FILE", help="lines for people; FILE.jsonl has JSON (default: alerts.log in the state folder)")
    add(
        "--silence-after",
        type=_silence,
        default=180.0,
        metavar="S",
        help="seconds without the alert GpuJobWatchdog after which alerting counts as broken (default: 180)",
    )
    add(
        "--on-silence",
        metavar="COMMAND",
        help="program to run when the heartbeat stops; it gets the text on standard input",
    )
    add("--state-dir", metavar="DIR", help="folder of the log and the token (default: ~/.local/state/gpujob/alerts)")
    add(
        "--web.listen-address",
        dest="listen",
        metavar="ADDRESS",
        default=RECEIVER_LISTEN_ADDRESS,
        help=f"host:port; clients need the token of the state folder (default: {RECEIVER_LISTEN_ADDRESS})",
    )
    add("--web.config.file", dest="web_config", metavar="FILE", help="TLS and users for that address")
    add(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="lowest level of messages that are logged (default: info)",
    )
    receiver.set_defaults(run=_run_receiver)


def _add_gate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    gate = commands.add_parser(
        "stack-gate",
        help="serve a user's own stack below a secret path",
        description="Serve the Prometheus and the Alertmanager of `gpujob stack` below a secret path of one port. "
        "`gpujob stack up` starts it.",
        epilog="example: gpujob-exporter stack-gate ~/.local/share/gpujob/stack",
    )
    gate.add_argument("folder", metavar="STACK_DIR", type=Path, help="folder of the stack, with gate.json")
    gate.add_argument("--log-level", default="info", help=argparse.SUPPRESS)
    gate.set_defaults(run=_run_gate)


def _run_gate(arguments: argparse.Namespace) -> None:
    from exporter.gate.gate import run_gate  # aiohttp is needed by this command alone

    run_gate(arguments.folder)


def _silence(text: str) -> float:
    seconds = float(text)
    if not 1.0 <= seconds <= 86400.0:
        raise argparse.ArgumentTypeError(f"{text} is not from 1 to 86400")
    return seconds


def _run_receiver(arguments: argparse.Namespace) -> None:
    from exporter.alerts.receiver import Options, run_receiver  # aiohttp is needed by this command alone

    for handler in logging.getLogger().handlers:
        handler.addFilter(LogLimit())
    run_receiver(
        Options(
            listen=arguments.listen,
            log_file=None if arguments.log is None else Path(arguments.log),
            silence_s=arguments.silence_after,
            on_silence=arguments.on_silence,
            state_dir=None if arguments.state_dir is None else Path(arguments.state_dir),
            web_config=arguments.web_config,
        ),
        os.environ,
    )


def _interval(text: str) -> float:
    seconds = float(text)
    if not 1.0 <= seconds <= 3600.0:
        raise argparse.ArgumentTypeError(f"{text} is not from 1 to 3600")
    return seconds


def _run_hub(arguments: argparse.Namespace) -> None:
    from exporter.hub.polling import INTERVAL_S
    from exporter.hub.process import Options, run_hub  # aiohttp and SQLite are needed by this command alone
    from exporter.slurm.sources.rest_reader import SOURCE

    for handler in logging.getLogger().handlers:
        handler.addFilter(LogLimit())
    options = Options(
        user=_own_name() if arguments.scope == "user" else None,
        cluster=arguments.cluster,
        partitions=tuple(arguments.partition or ()),
        interval_s=arguments.interval or INTERVAL_S,
        most_jobs=arguments.jobs_at_most,
        state_dir=None if arguments.state_dir is None else Path(arguments.state_dir),
        registries=tuple(map(Path, arguments.registry_dir or ())),
        listen=arguments.listen,
        web_config=arguments.web_config,
        cluster_file=arguments.cluster_file,
    )
    chosen = {} if arguments.source is None else {SOURCE: arguments.source}
    run_hub(options, {**os.environ, **chosen})


def _own_name() -> str:
    """Name of this user. Raises ExporterError."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError as error:
        raise ExporterError(
            f"user {os.geteuid()} has no name here (passwd), so its jobs are not found; use --scope cluster"
        ) from error


def _add_attach_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags without defaults: given flags override the file, whose model has the defaults."""
    group = parser.add_argument_group("a running job that gpujob did not launch")
    add = group.add_argument
    add("--config", metavar="FILE", help="monitor_config.yaml; flags override it")
    add("--job-name", metavar="NAME", help="name of the job, a word in its workers' command lines")
    add("--num-workers", type=int, metavar="N", help="expected number of worker processes")
    add("--gpu-ids", type=int, nargs="*", metavar="N", help="GPUs used by the workers (default: none)")
    add("--output-dir", metavar="DIR", help="directory of output files")
    add("--log-dir", metavar="DIR", help="directory of log files")
    add("--checkpoint-dir", metavar="DIR", help="directory of checkpoint files (default: that of the output files)")
    add("--total-items", type=int, metavar="N", help="number of items of the whole job, for the ETA")
    add("--check-interval", type=float, metavar="S", help="seconds between checks (default: 10)")
    add("--launch-timeout", type=float, metavar="S", help="seconds within which workers must start (default: 60)")
    add("--stall-timeout", type=float, metavar="S", help="seconds without progress until a stall (default: 300)")
    add("--alert-email", metavar="ADDRESS", help="print the command that sends alerts to this address")
    add("--alert-slack", metavar="URL", help="print the command that sends alerts there; others can see the URL")
    add("--output-pattern", metavar="GLOB", help="output files (default: output_worker_*.json)")
    add("--log-pattern", metavar="GLOB", help="log files (default: worker_*.log)")
    add("--checkpoint-pattern", metavar="GLOB", help="checkpoint files (default: checkpoint_*.pt)")
    add(
        "--gpu-metrics",
        action=argparse.BooleanOptionalAction,
        help="also write GPU readings to gpu_metrics.csv in the output directory (default: no)",
    )
    add("--detail", choices=DETAILS, help=f"how many series the page has (default: {NORMAL})")
    add("--pid-file", metavar="FILE", help="pids in the order of the workers (default: worker_pids.txt of the log dir)")
    add("--slurm-job-id", metavar="ID", help="Slurm job of the workers (default: the one in which this command runs)")
    add("--state-dir", metavar="DIR", help="run directory to create or to continue (default: a new one below logs/)")


def _run_sidecar(arguments: argparse.Namespace) -> None:
    flags = {name: value for name, value in vars(arguments).items() if name not in NO_FLAGS and value is not None}
    given = [f"--{name.replace('_', '-')}" for name in flags]
    if arguments.run_dir is not None and given:
        _fail(
            f"--run-dir is for a job that gpujob launched, {', '.join(given)} for any other job; use one or the other"
        )
    if arguments.run_dir is not None:
        _watch(arguments)
    if not given:
        arguments.usage("no job is given; use --run-dir DIR, --config FILE or the flags of a running job")
    address = arguments.listen or _free_attached_address()
    host, port = parse_listen_address(address)
    if port and arguments.listen:
        open_socket(host, port).close()  # before anything is written
    if arguments.web_config is not None:
        WebConfigFile(arguments.web_config)  # likewise
    page = {
        "listen_address": address,
        "web_config_file": None if arguments.web_config is None else os.path.abspath(arguments.web_config),
        "metrics_access": arguments.metrics_access or OPEN,
    }
    _prepare({"flags": flags, "page": page, "log_level": arguments.log_level})


def _free_attached_address() -> str:
    """The default address, or one with a free port if another sidecar of this machine has it."""
    try:
        open_socket(*parse_listen_address(ATTACHED_LISTEN_ADDRESS)).close()
    except ExporterError as error:
        print(f"gpujob-exporter: {error}; a free port is used instead", file=sys.stderr)
        return f"{ATTACHED_LISTEN_ADDRESS.rpartition(':')[0]}:0"
    return ATTACHED_LISTEN_ADDRESS


def _prepare(request: Mapping[str, object]) -> NoReturn:
    """Become the launcher's program for attached jobs, which then becomes their sidecar."""
    _become("launcher.attach.prepare", json.dumps(request))


def _become(module: str, *arguments: str) -> NoReturn:
    flags = (*ISOLATED, *(("-B",) if sys.dont_write_bytecode else ()))
    os.execv(sys.executable, [sys.executable, *flags, "-m", module, *arguments])  # noqa: S606 - no shell is involved


def _watch(arguments: argparse.Namespace) -> NoReturn:
    """Watch a job that has a run directory."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogLimit())
    limit_reserved_memory()
    manifest = read_manifest(arguments.run_dir)
    if arguments.web_config is None and manifest.web_config_file is not None:
        # Once more as a process that may use OpenSSL; see `exporter.__main__`.
        _become("exporter", *sys.argv[1:], f"--web.config.file={manifest.web_config_file}")
    web_file = None if arguments.web_config is None else WebConfigFile(arguments.web_config)
    identity = identify(manifest, os.environ, socket.gethostname())
    _lock_node(manifest, identity)
    sidecar = _make_sidecar(manifest, identity)
    if manifest.search is not None:
        from exporter.attach.finder import WorkerFinder
        from exporter.attach.workers_reader import WorkerSearch, WorkerSearchCriteria

        criteria = WorkerSearchCriteria.of_node(manifest, manifest.search, identity.node_index)
        finder = WorkerFinder(sidecar, WorkerSearch(criteria, os.environ))
        sidecar.slots.append(CollectorSlot(finder, sidecar.context.clock))
    server, listeners = _open_page(sidecar, arguments, web_file)
    _lower_priority()
    asyncio.run(server.run(listeners))
    if manifest.search is not None and identity.node_index == 0:
        _conclude(sidecar, server)
    _exit_now(sidecar, RESTART_STATUS if server.should_restart else 0)


def _lock_node(manifest: Manifest, identity: Identity) -> None:
    """Make sure that no other sidecar writes the files of this node; the lock lasts until the end of this process."""
    folder = manifest.run_dir / run_files.SIDECARS_DIR
    try:
        folder.mkdir(run_files.FOLDER_MODE, exist_ok=True)
        lock_file(folder / f"{identity.node}.lock")
    except FileLockedError as error:
        message = f"{manifest.run_dir} already has a sidecar for {identity.node}: {error}; end that one first"
        _fail(f"--run-dir: {message}", 1 if identity.supervised else USAGE)  # a supervisor tries again
    except OSError as error:
        logging.getLogger("gpujob.sidecar").warning("%s cannot be locked: %s", folder, error.strerror)


def _open_page(
    sidecar: Sidecar, arguments: argparse.Namespace, web_file: WebConfigFile | None
) -> "tuple[HttpService, list[Listener]]":
    """The page of a sidecar, and the sockets on which it already listens."""
    from exporter.sidecar.listeners import open_listeners
    from exporter.sidecar.service import HttpService, needs_of_pages  # aiohttp is needed by this command alone
    from exporter.web.access import Access

    manifest, identity = sidecar.context.manifest, sidecar.context.identity
    tls = None if web_file is None else web_file.server_context()
    listeners = open_listeners(sidecar, arguments.listen or manifest.listen_address, tls)
    if web_file is not None:
        sidecar.certificate = lambda: web_file.latest.certificate
        web_file.watch()
    names = OwnNames(identity.node, sidecar.host)
    names.learn()
    needs = needs_of_pages(arguments.metrics_access or manifest.metrics_access)
    token = run_files.read_token(manifest.run_dir)
    return HttpService(sidecar, Access(needs, names=names, token=token, web_file=web_file)), listeners


def _conclude(sidecar: Sidecar, server: "HttpService") -> NoReturn:
    """Become the launcher's program that writes the report of an attached job. It gets the rest of KillWait."""
    manifest, clock, options = sidecar.context.manifest, sidecar.context.clock, list[str]()
    if server.stopped_by is not None:
        options = ["--stopped-by", str(server.stopped_by)]
    if server.stopped_by == signal.SIGTERM:
        options += ["--seconds", f"{server.stopped_at + manifest.kill_wait_s - clock.monotonic():.1f}"]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # until it has handlers of its own
    _release(sidecar)
    _become("launcher.attach.conclude", str(manifest.run_dir), *options)


def _make_sidecar(manifest: Manifest, identity: Identity) -> Sidecar:
    clock = SystemClock()
    kernel, files, gpus = KernelLog(clock, identity.start), FileWatchHost(clock), GpuHost(READERS, clock)
    return Sidecar(CollectorContext(manifest, identity, clock, kernel=kernel, files=files, gpus=gpus))


def _release(sidecar: Sidecar) -> None:
    sidecar.context.files.close()
    if sidecar.context.gpus is not None:
        sidecar.context.gpus.close(GPUS_CLOSE_S)  # nothing routine is pending in the driver
    sys.stderr.flush()


def _exit_now(sidecar: Sidecar, status: int) -> NoReturn:
    _release(sidecar)
    os._exit(status)  # a thread that hangs in the kernel must not delay the end of the step


def _lower_priority() -> None:
    """Lower our priority, and become the OOM killer's first choice: the job comes first."""
    allow_many_descriptors()  # processes and logs need them; without, some processes are read less often
    try:
        os.nice(10)
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as out:
            out.write("1000")
    except OSError:
        pass  # not allowed everywhere, and optional


def _check_config(arguments: argparse.Namespace) -> None:
    if arguments.file.endswith((".yaml", ".yml")):
        _prepare({"check": arguments.file})
    manifest = read_manifest(arguments.file)
    print(
        f"{manifest.run_dir}: job {manifest.job_name!r}, {len(manifest.tasks)} worker tasks on "
        f"{manifest.nodes} nodes, {len(manifest.groups)} path groups"
    )
