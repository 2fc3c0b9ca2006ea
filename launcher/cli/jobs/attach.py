"""The command `gpujob attach`: watch processes that gpujob did not start."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from launcher.cli.about.completion import complete_files
from launcher.cli.parts import ASCII, INTERVAL, NO_COLOR, fail, print_report
from launcher.cli.watch import show_job
from launcher.errors import LauncherError

if TYPE_CHECKING:
    from launcher.attach.guess import JobGuess

LISTEN_ADDRESS = "127.0.0.1:0"
CHECK_INTERVAL_S = 2.0  # somebody looks at it, so it is shorter than the sidecar's own default
LOG_FLAGS = {"log_dir", "log_pattern", "config"}  # who gives one of them says which files are logs


class _AttachCommand(click.Command):
    """Takes ``--gpu-ids 0 1 2`` as the sidecar does, and ``--gpu-ids 0,1,2`` as in CUDA_VISIBLE_DEVICES."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words, is_gpu = list[str](), False
        for word in args:
            numbers = word.split(",")
            is_number = is_gpu and all(number.isdigit() for number in numbers)
            is_gpu = word == "--gpu-ids" or is_number
            if word != "--gpu-ids":
                words += [part for number in numbers for part in ("--gpu-ids", number)] if is_number else [word]
        return super().parse_args(ctx, words)


@click.command(cls=_AttachCommand, epilog="example: gpujob attach 4711")
@click.argument("words", metavar="[PID... | CONFIG.YAML]", nargs=-1, shell_complete=complete_files)
@click.option("--job", "slurm_job_id", metavar="ID", help="Slurm job whose processes on this node are the workers.")
@click.option("--job-name", metavar="NAME", help="Name of the job, a word in its workers' command lines.")
@click.option("--num-workers", type=int, metavar="N", help="Expected number of workers.")
@click.option("--gpu-ids", type=int, multiple=True, metavar="N...", help="GPUs that the workers use.")
@click.option("--output-dir", metavar="DIR", type=click.Path(), help="Directory of output files.")
@click.option("--output-pattern", metavar="GLOB", help="Names of output files.")
@click.option("--log-dir", metavar="DIR", type=click.Path(), help="Directory of log files.")
@click.option("--log-pattern", metavar="GLOB", help="Names of log files.")
@click.option("--checkpoint-dir", metavar="DIR", type=click.Path(), help="Directory of checkpoints.")
@click.option("--checkpoint-pattern", metavar="GLOB", help="Names of checkpoints.")
@click.option("--total-items", type=int, metavar="N", help="Items of the whole job, for the ETA.")
@click.option("--check-interval", type=float, metavar="S", help="Seconds between checks.")
@click.option("--launch-timeout", type=float, metavar="S", help="Seconds within which workers must start.")
@click.option("--stall-timeout", type=float, metavar="S", help="Seconds without progress until a stall.")
@click.option("--state-dir", metavar="DIR", type=click.Path(), help="Run directory to create or to continue.")
@click.option("--web.listen-address", "listen", metavar="ADDRESS", help="host:port of the series; default loopback.")
@click.option("--interval", type=INTERVAL, default=1.0, show_default=True, help="Seconds between two refreshes.")
@NO_COLOR
@ASCII
def attach(
    words: tuple[str, ...],
    listen: str | None,
    interval: float,
    no_color: bool,
    ascii_only: bool,
    gpu_ids: tuple[int, ...],
    **options: object,
) -> None:
    """Watch processes that already run on this machine, without touching them.

    Name them by PIDs, a Slurm job or a job name. What you leave out is guessed from /proc and printed: the logs, for
    example, are the files to which the processes write their output and errors.

    On a terminal this shows the live view; Ctrl-C ends the watching, not the job. The exit status is
    that of `gpujob run`.
    """
    flags = {name: value for name, value in options.items() if value is not None}
    pids = tuple(int(word) for word in words if word.isdigit())
    files = [word for word in words if not word.isdigit()]
    if len(files) > 1 or (files and not files[0].endswith((".yaml", ".yml"))):
        fail(f"{files[-1]!r} is neither a process id nor a monitor_config.yaml")
    if files:
        flags["config"] = files[0]
    else:
        flags.setdefault("check_interval", CHECK_INTERVAL_S)
    if gpu_ids:
        flags["gpu_ids"] = list(gpu_ids)
    if pids and "slurm_job_id" in flags:
        fail("--job: give pids or a Slurm job, not both")
    found: dict[str, object] = {}
    if pids or not ("config" in flags or {"job_name", "num_workers", "output_dir", "log_dir"} <= flags.keys()):
        found = _guess(flags, pids)
    request = {
        "flags": flags,
        "found": found,
        "page": {"listen_address": listen or LISTEN_ADDRESS},
        "log_level": "info",
    }
    if sys.stdout.isatty():
        _watch(request, interval, no_color, ascii_only)
    os.execv(sys.executable, _program(request))  # noqa: S606 - no shell


def _guess(flags: dict[str, object], pids: tuple[int, ...]) -> dict[str, object]:
    """Complete the flags by what /proc says, print that, and return what has no flag."""
    from launcher.attach.guess import Sought, guess_job

    job, name = flags.get("slurm_job_id"), flags.get("job_name")
    if not (pids or job or name):
        raise click.UsageError("say what to watch: PID..., --job ID, --job-name NAME or a monitor_config.yaml")
    guess = guess_job(Sought(pids, str(job) if job else None, str(name) if name else None), os.environ)
    given = {"GPUs": {"gpu_ids"}, "output": {"output_dir"}, "logs": LOG_FLAGS}  # flags in place of a guess
    for line in guess.lines():
        if not given.get(line.partition(":")[0], set()) & flags.keys():
            click.echo(f"gpujob: {line}", err=True)
    has_output_dir = "output_dir" in flags or guess.output_dir is not None
    logs = () if LOG_FLAGS & flags.keys() else guess.logs
    gpus = () if "gpu_ids" in flags else guess.gpus
    _complete(flags, guess)
    pids = guess.pids if pids or job else ()
    return {"pids": pids, "logs": logs, "gpus": gpus, "has_output_dir": has_output_dir}


def _complete(flags: dict[str, object], guess: "JobGuess") -> None:
    if "output_dir" not in flags and guess.output_dir is not None:
        flags.setdefault("output_pattern", "*")
    if guess.checkpoint_dir is not None and "checkpoint_dir" not in flags:
        flags["checkpoint_dir"] = guess.checkpoint_dir
        flags.setdefault("checkpoint_pattern", "*")
    flags.setdefault("job_name", guess.name)
    flags.setdefault("num_workers", len(guess.pids))
    flags.setdefault("output_dir", guess.output_dir or guess.directory)
    flags.setdefault("log_dir", guess.directory)
    if guess.gpu_ids:
        flags.setdefault("gpu_ids", list(guess.gpu_ids))


def _program(request: dict[str, object]) -> list[str]:
    return [sys.executable, "-I", "-m", "launcher.attach.prepare", json.dumps(request)]


def _watch(request: dict[str, object], interval: float, no_color: bool, ascii_only: bool) -> NoReturn:
    """Run the sidecar as a child, and show the job until it ends."""
    from exporter.contract import run_files
    from launcher.watch.view import JobClient

    reading, writing = os.pipe()
    child = subprocess.Popen(_program({**request, "view_fd": writing}), pass_fds=[writing], start_new_session=True)
    run_dir, received = Path(), list[int]()

    def end(number: int, _frame: object) -> None:
        received.append(number)
        child.send_signal(number if run_dir != Path() else signal.SIGTERM)  # without a traceback

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    os.close(writing)
    with open(reading, "rb") as source:
        run_dir = Path(os.fsdecode(source.read()))
    if run_dir == Path():
        status = child.wait()  # it has said why
        sys.exit(128 + received[0] if received else status)
    try:
        client = JobClient(run_dir)
        ends_watching = "ends the watching, not the job"
        show_job(client, interval, lambda _: child.poll() is not None, no_color, ascii_only, on_interrupt=ends_watching)
    except (LauncherError, OSError) as error:
        click.echo(f"gpujob: the view has ended ({error}); the watching continues, see {run_dir}", err=True)
    status = child.wait()
    if received and not (run_dir / run_files.REPORT_FILE).exists():
        sys.exit(128 + received[0])  # the sidecar had not begun
    print_report(JobClient(run_dir).report(), as_json=False, after_view=True)
    sys.exit(status)
