"""The command `gpujob init`: write a job file to start from."""

import json
import os
import shlex
from contextlib import suppress

import click

from launcher.cli.about.completion import complete_files
from launcher.cli.job_source import WORDS, WordsCommand, program_name
from launcher.cli.parts import fail

NAME = "name: my-job\n"
COMMAND = """\
    # your own command, in place of these two lines: "python3 train.py --shard {rank} --shards {world_size}"
    shell: true
    command: 'for i in $(seq 1 100); do echo "Processed $i/100 items"; sleep 0.2; done'
"""
TOTAL = """\
progress:
  total_items: 400            # of all workers; logs say `Processed 12/100 items`
"""
TEMPLATE = f"""\
# A job of gpujob. Check it with `gpujob check job.yaml`, run it here with
# `gpujob run job.yaml`, or on Slurm with `gpujob submit job.yaml`.
{NAME}resources:
  nodes: 1
  gpus_per_node: 0            # GPUs asked for on each node
workers:
  - role: worker
    count: 4
    gpus: 0                   # GPUs of one worker
    # {{rank}} {{world_size}} {{output_dir}} {{checkpoint_dir}} {{job_dir}} are filled in
{COMMAND}\
    critical: true            # the failure of one ends the job
    # restart: {{max: 2, backoff: 10}}
slurm:
  time_limit: 1h
  # partition: gpu
  # account: nlp
paths: {{output_dir: null, checkpoint_dir: null}}   # null: the run directory under ./logs
patterns:
  output: "output_worker_*.jsonl"
  checkpoints: "checkpoint_*"
{TOTAL}\
# verify: {{complete_share: 0.99, outputs: 4, records_per_item: 1}}   # required results of the finished job
monitoring: {{check_interval: 5, stall_timeout: 300, linger: 30}}
"""


@click.command(cls=WordsCommand, epilog="example: gpujob init && gpujob run job.yaml")
@click.argument("path", metavar="[FILE] [-- COMMAND...]", default="job.yaml", shell_complete=complete_files)
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def init(path: str, force: bool) -> None:
    """Write a job file to start from, with a small command that prints its progress, or with your own after --."""
    words = click.get_current_context().meta.get(WORDS)
    text = TEMPLATE if words is None else _with_command(words)
    if path.isprintable():
        text = text.replace(" job.yaml`", f" {shlex.quote(path)}`")
    try:
        with open(path, "w" if force else "x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        fail(f"{path} already exists; choose another name, or use --force to replace it")
    except OSError as error:
        if not force:
            with suppress(OSError):
                os.unlink(path)
        fail(f"{path} cannot be written: {error.strerror}")
    put, name = "put your command into it, then " if words is None else "", shlex.quote(path)
    click.echo(f"Wrote {path}. Try it: `gpujob run {name}`. Next: {put}`gpujob check {name}`.")


def _with_command(words: tuple[str, ...]) -> str:
    """The template with one worker that runs this command, and no total, which only its author knows."""
    from launcher.rundir.yaml_files import dump_yaml

    if not any(words):
        fail("the command after -- is empty; write for example gpujob init -- python train.py")
    name = dump_yaml({"name": program_name(words)})
    command = json.dumps(words, ensure_ascii=False)  # YAML, on one line
    total = TOTAL.replace("  total_items: 400 ", "  # total_items: 100").replace(
        "progress:\n", "progress:\n  pack: auto\n"
    )
    text = TEMPLATE.replace("    count: 4\n", "    count: 1\n").replace(TOTAL, total)
    return text.replace(NAME, name).replace(COMMAND, f"    command: {command}\n")
