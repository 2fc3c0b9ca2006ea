"""The command `gpujob completion`, and values that shells complete, without the schema, which loads slowly."""

import os
import re
import shlex
from pathlib import Path

import click
from click.shell_completion import BashComplete, CompletionItem, FishComplete, ZshComplete

KEYS_FILE = Path(__file__).parents[2] / "jobfile" / "keys.yaml"
SHELLS = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
MOST_JOBS = 50  # of those that fit, offered by a shell
_KEY = re.compile(r"(?m)^  ([a-z][\w.{}\[\]]*):")


@click.command(epilog="example: gpujob completion fish > ~/.config/fish/completions/gpujob.fish")
@click.argument("shell", metavar="SHELL", type=click.Choice(list(SHELLS)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script with which a shell completes commands, options, jobs, workers, keys and files.

    bash and zsh read it with `eval "$(gpujob completion bash)"` in ~/.bashrc or ~/.zshrc.
    """
    made = SHELLS[shell](context.find_root().command, {}, "gpujob", "_GPUJOB_COMPLETE")
    click.echo(made.source())


def complete_files(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete names of files."""
    return [CompletionItem(incomplete, type="file")]


def complete_jobs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ids and names of this user's jobs, the newest first, else names of files."""
    from launcher.registry.entries import read_own_entries

    entries = read_own_entries(os.environ)
    words = dict.fromkeys(word for entry in entries for word in (entry.job_id, entry.job_name))
    found = [CompletionItem(word) for word in words if word.startswith(incomplete) and shlex.quote(word) == word]
    return [*complete_files(context, parameter, incomplete), *found[:MOST_JOBS]]


def complete_workers(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the workers of the job that is named before."""
    from exporter.contract.errors import ExporterError
    from exporter.contract.manifest import read_manifest
    from launcher.errors import LauncherError
    from launcher.registry.search import find_job

    try:
        job = find_job(context.params.get("job"), os.environ, Path.cwd(), takes_newest=True)
        names = dict.fromkeys(task.worker for task in read_manifest(job.directory).tasks)
    except (LauncherError, ExporterError, OSError):
        return []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def complete_keys(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Keys of the job file, as ``--set`` takes them."""
    return [CompletionItem(f"{key.value}=") for key in complete_key_names(context, parameter, incomplete)]


def complete_key_names(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Keys of the job file; the first entry stands for each of a list."""
    job, _, _ = KEYS_FILE.read_text(encoding="utf-8").partition("\ncluster:\n")
    keys = (key.replace("[]", "[0]").replace("{}", ".") for key in _KEY.findall(job))
    return [CompletionItem(key) for key in keys if key.startswith(incomplete)]
