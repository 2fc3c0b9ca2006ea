"""The command `gpujob completion`, and values that shells complete, without the schema, which loads slowly."""

import re
from pathlib import Path

import click
from click.shell_completion import BashComplete, CompletionItem, FishComplete, ZshComplete

KEYS_FILE = Path(__file__).parents[2] / "jobfile" / "keys.yaml"
SHELLS = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
_KEY = re.compile(r"(?m)^  ([a-z][\w.{}\[\]]*):")


@click.command(epilog="example: gpujob completion fish > ~/.config/fish/completions/gpujob.fish")
@click.argument("shell", metavar="SHELL", type=click.Choice(list(SHELLS)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script with which a shell completes commands, options, keys and files.

    bash and zsh read it with `eval "$(gpujob completion bash)"` in ~/.bashrc or ~/.zshrc.
    """
    made = SHELLS[shell](context.find_root().command, {}, "gpujob", "_GPUJOB_COMPLETE")
    click.echo(made.source())


def complete_files(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete names of files."""
    return [CompletionItem(incomplete, type="file")]


def complete_keys(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Keys of the job file, as ``--set`` takes them."""
    return [CompletionItem(f"{key.value}=") for key in complete_key_names(context, parameter, incomplete)]


def complete_key_names(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Keys of the job file; the first entry stands for each of a list."""
    job, _, _ = KEYS_FILE.read_text(encoding="utf-8").partition("\ncluster:\n")
    keys = (key.replace("[]", "[0]").replace("{}", ".") for key in _KEY.findall(job))
    return [CompletionItem(key) for key in keys if key.startswith(incomplete)]
