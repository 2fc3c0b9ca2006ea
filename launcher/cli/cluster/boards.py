"""The command `gpujob boards`."""

from pathlib import Path

import click

from launcher.cli.parts import JSON, print_json
from launcher.errors import LauncherError


@click.command(epilog="example: gpujob boards ~/boards --prometheus http://127.0.0.1:9090")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--prometheus", metavar="URL", help="Prometheus that the page reads (default: the server of the page).")
@JSON
def boards(folder: Path, prometheus: str | None, as_json: bool) -> None:
    """Write the board page, which needs no Grafana, into a directory.

    Start Prometheus with `--web.user-assets=DIR` and open /user/index.html on it.
    With --prometheus, open DIR/index.html.
    """
    from launcher.boards.assets import write_assets

    try:
        files = write_assets(folder, prometheus)
    except OSError as error:
        raise LauncherError(f"{folder}: cannot be written: {error.strerror or error}") from error
    if as_json:
        print_json({"schema": 1, "folder": str(folder), "files": files, "prometheus": prometheus})
    elif prometheus is None:
        click.echo(f"start Prometheus with --web.user-assets={folder.absolute()}, and open /user/index.html on it")
    else:
        click.echo(f"open {(folder / 'index.html').absolute()}")
