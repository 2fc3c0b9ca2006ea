"""The command `gpujob verify`: judge files and checkpoints, whoever wrote them."""

import sys
from typing import TYPE_CHECKING

import click

from launcher.cli.about.completion import complete_files
from launcher.cli.parts import JSON, print_json

if TYPE_CHECKING:
    from launcher.verify.paths import PathVerdict

DAMAGED_STATUS, UNDECIDED_STATUS = 8, 9
MOST_NAMED = 10  # parts in the text


@click.command(epilog="example: gpujob verify checkpoints/ outputs/part_3.jsonl")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, shell_complete=complete_files)
@click.option("--deep", is_flag=True, help="Read everything: checksums in archives, every record of JSON Lines.")
@JSON
def verify(paths: tuple[str, ...], deep: bool, as_json: bool) -> None:
    """Check whether files, checkpoints and folders are whole or damaged, whoever wrote them.

    In a folder of checkpoints, the newest one is checked. For a checkpoint, the newest good one of its folder is
    named too: the one to resume from. Without --deep, at most 1 MiB of each file is read. Nothing is loaded or
    unpickled.

    The exit status is 0 if all are whole, 8 if one is damaged, and 9 if a check could not decide.
    """
    from launcher.verify.paths import DAMAGED, UNDECIDED, verify_path

    found = [verify_path(path) for path in paths]  # all of them, before one is read as a whole
    if deep:
        total = sum(verdict.bytes for verdict in found)
        with click.progressbar(length=total, label="Reading", file=sys.stderr, hidden=not sys.stderr.isatty()) as bar:
            found = [verify_path(path, deep=True, progress=bar.update) for path in paths]
    if as_json:
        print_json({"schema": 1, "paths": [verdict.to_json() for verdict in found]})
    else:
        for verdict in found:
            click.echo("\n".join(_lines(verdict)))
    verdicts = {verdict.verdict for verdict in found}
    sys.exit(DAMAGED_STATUS if DAMAGED in verdicts else UNDECIDED_STATUS if UNDECIDED in verdicts else 0)


def _lines(found: "PathVerdict") -> list[str]:
    from launcher.watch.text import printable_line
    from launcher.words import count_text

    lines = [": ".join(filter(None, (printable_line(found.path), found.verdict, found.reason)))]
    facts = [f"checkpoint {printable_line(found.name)}"] if found.name is not None else []
    facts += [count_text(found.files, "file"), f"{found.bytes} bytes"]
    facts += [count_text(found.records, "record")] if found.records is not None else []
    lines.append(f"  {', '.join(facts)}{'; everything was read' if found.deep else ''}")
    lines += [f"  {flaw.file}: {flaw.reason}" for flaw in found.flaws[:MOST_NAMED] if len(found.flaws) > 1]
    if len(found.flaws) > MOST_NAMED:
        lines.append(f"  and {len(found.flaws) - MOST_NAMED} more; --json has all")
    if found.kind == "checkpoint":
        doubt = "" if found.resume_is_whole else " (undamaged, but not fully checkable)"
        resume = f"  resume from {printable_line(found.resume)}{doubt}" if found.resume else ""
        lines.append(resume or "  no checkpoint to resume from")
    return lines
