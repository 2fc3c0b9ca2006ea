"""Start of the stack: files, programs, and the wait until the address answers."""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from exporter.contract import run_files
from exporter.contract.file_locks import FileLockedError, lock_file
from exporter.contract.python_flags import ISOLATED
from exporter.contract.stack_gate import GATE_FILE, GATE_LOCK
from exporter.contract.user_state import make_private_folder
from launcher.boards.assets import write_assets
from launcher.errors import LauncherError
from launcher.registry.entries import read_own_entries
from launcher.registry.own_stack import STACK_FILE, TARGETS_DIR, StackProgram, StackRecord
from launcher.rundir.yaml_files import dump_yaml
from launcher.stack.ask import answers
from launcher.stack.files import (
    GRAFANA_PATH,
    Settings,
    alertmanager_arguments,
    gate_file,
    grafana_files,
    prometheus_arguments,
    prometheus_config,
    web_config,
)
from launcher.stack.processes import (
    Start,
    end_programs,
    is_alive,
    last_words,
    reload_programs,
    start_program,
)
from launcher.stack.programs import Program, find_promtool

COMMAND_LOCK = "command.lock"
OPTIONAL = "grafana"  # the stack is of use without it
COLLECTED_FILE = "collected_targets.json"
COLLECT_S = 5  # between two reads of a target directory; Prometheus reads the result as often
PORTS = ("gate", "prometheus", "alertmanager", "receiver")
READY_S = 30.0  # until all answer; Prometheus first reads the samples of the last hours, a new Grafana makes its tables
CHECK_S = 30.0  # for promtool
POLL_S = 0.02

PRIVATE = 0o600


class Grafana(NamedTuple):
    """A Grafana that draws the boards too."""

    program: Program
    home: str
    provisioning: Mapping[str, object]  # grafana/provisioning/datasources/gpujob.yml
    boards: str  # folder


class Wanted(NamedTuple):
    """Desired state of the stack."""

    folder: Path
    programs: Mapping[str, Program]  # without alertmanager in agent mode
    shipped: Mapping[str, object]  # docker/prometheus.yml
    rules: Path
    targets: str | None  # target directory of the cluster file
    collects: bool  # whether Prometheus reads its files through `gpujob targets`, since others can write there
    settings: Settings
    alerting: Callable[[StackRecord], Mapping[str, str]]  # alertmanager.yml and its templates
    warn: Callable[[str], None]
    grafana: Grafana | None = None
    job: str | None = None
    prepare: Callable[[], None] | None = None  # called in each new process


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """The folder, for one command at a time. Raises LauncherError."""
    descriptor = -1
    try:
        make_private_folder(folder)
        facts = folder.stat()
        if {facts.st_uid, folder.lstat().st_uid} != {os.geteuid()}:
            raise LauncherError(f"{folder}: the directory or a link to it belongs to another user; give another --dir")
        if facts.st_mode & 0o077:
            raise LauncherError(f"{folder}: others can read or write it; run chmod 700 on it, or give another --dir")
        descriptor = lock_file(folder / COMMAND_LOCK)
        yield
    except FileLockedError as error:
        raise LauncherError(f"another command changes {folder} just now: {error}") from error
    except OSError as error:
        raise LauncherError(f"{error.filename or folder}: {error.strerror}") from error
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def start_stack(wanted: Wanted) -> StackRecord:
    """Start what does not run, and wait until all answers. Raises LauncherError, and then ends what it has started."""
    with locked_folder(wanted.folder):
        before = StackRecord.read(wanted.folder / STACK_FILE)
        if before is not None:
            require_this_host(before, wanted.folder)
        record = _with_free_ports(before or _new_record(), [*PORTS, *(("grafana",) if wanted.grafana else ())])
        targets = wanted.targets or str(wanted.folder / TARGETS_DIR)
        record = record.replace(targets=targets, job=wanted.job)
        starts, changed = _write_files(wanted, record)
        return _start(wanted, record, starts, changed)


def require_this_host(record: StackRecord, folder: Path) -> None:
    """Raise LauncherError if the stack runs on another machine."""
    host = next((program.host for program in record.programs.values()), "")
    if host in ("", socket.gethostname()):
        return
    try:
        descriptor = lock_file(folder / GATE_LOCK, shared=True)
    except FileLockedError as error:
        inside = f", in job {record.job}" if record.job else ""
        raise LauncherError(
            f"the stack in {folder} runs on {host}{inside}; use it there, or give another --dir"
        ) from error
    if descriptor >= 0:
        os.close(descriptor)


def _new_record() -> StackRecord:
    import bcrypt  # lazy: only the first start needs it

    password = secrets.token_hex(32)
    # few rounds: a random password of 256 bits is not guessed, and each start of Prometheus computes it
    hashed = bcrypt.hashpw(password.encode(), bcrypt.gensalt(4, b"2a")).decode()
    ports = dict.fromkeys(PORTS, 0)
    return StackRecord(token=secrets.token_urlsafe(24), password=password, password_hash=hashed, ports=ports)


def _with_free_ports(record: StackRecord, names: Iterable[str]) -> StackRecord:
    """The record with its earlier ports where they are free or its own, else new ones."""
    ports, held = {}, []
    try:
        for name in names:
            port = record.ports.get(name, 0)
            if port and (program := record.programs.get(name)) is not None and is_alive(program):
                ports[name] = port
                continue
            trial = _bind(port) or _bind(0)
            if trial is None:
                raise LauncherError("no port of 127.0.0.1 is free")
            held.append(trial)
            ports[name] = trial.getsockname()[1]
    finally:
        for each in held:
            each.close()
    return record.replace(ports=ports)


def _bind(port: int) -> socket.socket | None:
    trial = socket.socket()
    trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        trial.bind(("127.0.0.1", port))
    except OSError:
        trial.close()
        return None
    return trial


def running_target_files() -> list[str]:
    """Target files in the run directories of the user's jobs: those that began before the stack."""
    files = (Path(entry.run_dir, run_files.TARGETS_FILE) for entry in read_own_entries(os.environ))
    return [str(file) for file in files if file.is_file()]


def _write_files(wanted: Wanted, record: StackRecord) -> tuple[dict[str, Start], set[str]]:
    """Write all files, checked. Return how to start each program, and the names of the files that changed."""
    folder, settings = wanted.folder, wanted.settings
    config = prometheus_config(wanted.shipped, str(folder), record, settings)
    arguments = {"prometheus": prometheus_arguments(str(folder), record, settings)}
    files = {"prometheus.yml": dump_yaml(config), "web.yml": web_config(record)}
    for name in ("rules", "assets", "log", TARGETS_DIR):
        (folder / name).mkdir(0o700, exist_ok=True)
    files |= {f"rules/{path.name}": path.read_text("utf-8") for path in sorted(wanted.rules.glob("*.yml"))}
    if not settings.agent:
        arguments["alertmanager"] = alertmanager_arguments(str(folder), record)
        files |= wanted.alerting(record)
        write_assets(folder / "assets")
    grafana, of_grafana = wanted.grafana, dict[str, str]()
    if grafana is not None:
        of_grafana = grafana_files(grafana.provisioning, grafana.boards, str(folder), record)
        files |= of_grafana
    gate = gate_file(record, agent=settings.agent, hub=settings.hub, grafana=grafana is not None).to_json()
    files |= {f"{name}.args": text for name, text in arguments.items()}
    changed = {name for name, text in files.items() if _is_different(folder / name, text)}
    if "prometheus.yml" in changed:
        _check(wanted.programs["prometheus"], folder, files["prometheus.yml"], agent=settings.agent)
    for old in (folder / "rules").glob("*.yml"):
        if f"rules/{old.name}" not in files:
            old.unlink()
            changed.add(f"rules/{old.name}")
    for name in changed & files.keys():
        (folder / name).parent.mkdir(0o700, parents=True, exist_ok=True)
        run_files.replace_file(folder / name, files[name].encode(), durable=False, mode=PRIVATE)
    run_files.write_json(folder / GATE_FILE, gate, durable=False, mode=PRIVATE)
    python = (sys.executable, *ISOLATED, "-m", "exporter")
    starts = {"gate": Start((*python, "stack-gate", str(folder)), repr(gate))}
    if not settings.agent:
        address = f"127.0.0.1:{record.ports['receiver']}"
        places = ("--state-dir", f"{folder}/receiver", "--log", f"{folder}/alerts.log")
        starts["receiver"] = Start((*python, "receive-alerts", *places, "--web.listen-address", address), "")
    if wanted.collects:
        words = ("targets", f"--output={folder / COLLECTED_FILE}", f"--every={COLLECT_S}", record.targets)
        starts["targets"] = Start((sys.executable, *ISOLATED, "-m", "launcher", *words), "")
    for name, text in arguments.items():
        command = (*wanted.programs[name].command, f"@{folder}/{name}.args")
        starts[name] = Start(command, text + files["web.yml"] + wanted.programs[name].version_text)
    if grafana is not None:
        given = (f"--homepath={grafana.home}", f"--config={folder}/grafana/grafana.ini")
        reads = "".join(of_grafana.values()) + grafana.program.version_text
        starts["grafana"] = Start((*grafana.program.command, "server", *given), reads)
    return starts, changed


def _is_different(path: Path, text: str) -> bool:
    try:
        return path.read_text("utf-8") != text
    except (OSError, UnicodeDecodeError):
        return True


def _check(prometheus: Program, folder: Path, text: str, *, agent: bool) -> None:
    """Raise LauncherError if promtool refuses a configuration."""
    promtool = find_promtool(prometheus, os.environ)
    if promtool is None:
        return
    trial = folder / "prometheus.new.yml"
    run_files.replace_file(trial, text.encode(), durable=False, mode=PRIVATE)
    try:
        flags = ["--agent"] if agent else ["--syntax-only"]
        done = subprocess.run(
            [*promtool, "check", "config", *flags, str(trial)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CHECK_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LauncherError(f"promtool has not checked {trial} within {CHECK_S:.0f} s") from error
    finally:
        trial.unlink(missing_ok=True)
    if done.returncode:
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if "FAILED" in line or "rror" in line]
        raise LauncherError(
            "promtool refuses the configuration of Prometheus; see `stack` in the cluster file\n"
            + "\n".join(f"  {line}" for line in said)
        )


def _start(wanted: Wanted, record: StackRecord, starts: Mapping[str, Start], changed: set[str]) -> StackRecord:
    folder, programs = wanted.folder, dict(record.programs)
    stale = [name for name, program in programs.items() if name not in starts or program.digest != starts[name].digest]
    end_programs(programs.pop(name) for name in stale)
    own: dict[str, StackProgram] = {}
    try:
        for name, start in starts.items():
            if name not in programs or not is_alive(programs[name]):
                own[name] = start_program(start, folder / "log" / f"{name}.log", folder, wanted.prepare)
        programs |= own
        record = record.replace(programs=programs)
        run_files.write_json(folder / STACK_FILE, record.to_json(), durable=False, mode=PRIVATE)
        reload_programs(programs, _to_reload(changed, own))
        _wait(folder, record, [name for name in programs if name != OPTIONAL])
        if OPTIONAL in programs:
            record = _without_failed(wanted, record)
    except BaseException:
        end_programs(own.values())
        rest = {name: program for name, program in programs.items() if name not in own}
        run_files.write_json(folder / STACK_FILE, record.replace(programs=rest).to_json(), durable=False, mode=PRIVATE)
        raise
    return record


def _without_failed(wanted: Wanted, record: StackRecord) -> StackRecord:
    """The record once the optional program answers; without it, and with a warning, if it does not."""
    try:
        _wait(wanted.folder, record, [OPTIONAL])
    except LauncherError as error:
        wanted.warn(f"{error}\n  the boards work without it; `stack: {{grafana: false}}` leaves it out")
        end_programs([record.programs[OPTIONAL]])
        record = record.replace(programs={name: each for name, each in record.programs.items() if name != OPTIONAL})
        run_files.write_json(wanted.folder / STACK_FILE, record.to_json(), durable=False, mode=PRIVATE)
    return record


def _to_reload(changed: set[str], own: Mapping[str, StackProgram]) -> list[str]:
    """Programs that run and whose configuration has changed."""
    reads = {"prometheus": ("prometheus.yml", "rules/"), "alertmanager": ("alertmanager.yml", "templates/")}
    return [
        name for name, files in reads.items() if name not in own and any(each.startswith(files) for each in changed)
    ]


def ready_urls(record: StackRecord) -> dict[str, str]:
    """Address of each program that answers once it is ready."""
    return {
        "gate": f"{record.url}-/healthy",  # of Prometheus, through the gate
        "receiver": f"http://127.0.0.1:{record.ports['receiver']}/-/ready",
        "alertmanager": f"{record.url}alertmanager/-/ready",
        "prometheus": f"{record.url}-/ready",
        "grafana": f"{record.url}{GRAFANA_PATH}api/health",
    }


def _wait(folder: Path, record: StackRecord, names: Iterable[str]) -> None:
    """Wait until these programs answer. Raises LauncherError with the last lines of the one that does not."""
    urls = ready_urls(record)
    waiting = {name: urls[name] for name in names if name in urls}
    end = time.monotonic() + READY_S
    while waiting:
        for name in list(waiting):
            log = folder / "log" / f"{name}.log"
            if not is_alive(record.programs[name]):
                raise LauncherError(f"{name} has ended:\n{last_words(log)}")
            if answers(waiting[name]):
                del waiting[name]
            elif time.monotonic() > end:
                raise LauncherError(f"{name} has not answered for {READY_S:.0f} s:\n{last_words(log)}")
        time.sleep(POLL_S)
