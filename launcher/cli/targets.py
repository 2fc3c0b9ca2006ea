"""The command `gpujob targets`: collect the target files of all users for Prometheus."""

import time
from pathlib import Path

import click

from launcher.cli.parts import INTERVAL


@click.command(epilog="example: gpujob targets /srv/prometheus/gpujob --output /run/gpujob/targets.json --every 10")
@click.argument("target_dir", metavar="TARGET_DIR", type=click.Path(path_type=Path))
@click.option("--output", required=True, metavar="FILE", type=click.Path(path_type=Path), help="File for Prometheus.")
@click.option("--every", type=INTERVAL, metavar="SECONDS", help="Repeat until a signal; by default once.")
def targets(target_dir: Path, output: Path, every: float | None) -> None:
    """Collect the target files of all users into one file for Prometheus. For administrators.

    The label `user` of each target becomes the owner of its file. Links, pipes and files that are too large
    or no target files are left out and named on standard error.
    """
    from exporter.contract import run_files
    from exporter.contract.records import to_json
    from launcher.errors import LauncherError
    from launcher.rundir.site_targets import read_site_targets
    from launcher.watch.text import printable_line

    published, known = None, set[str]()
    while True:
        try:
            groups, problems = read_site_targets(target_dir)
            if groups != published:
                run_files.write_json(output, to_json(groups), mode=0o644, durable=False)
                published = groups
        except OSError as error:
            problems = [f"{error.filename}: {error.strerror}"]
            if every is None:
                raise LauncherError(problems[0]) from error
        for problem in problems:
            if problem not in known:
                click.echo(f"gpujob: {printable_line(problem)}", err=True)
        known = set(problems)
        if every is None:
            return
        time.sleep(every)
