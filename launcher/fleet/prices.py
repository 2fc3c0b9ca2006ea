"""List prices of the cluster file."""

from collections.abc import Mapping
from pathlib import Path

from exporter.slurm.prices import Prices, parse_prices
from launcher.errors import ConfigError
from launcher.rundir.cluster_file import read_cluster_key


def read_prices(environ: Mapping[str, str], workdir: Path) -> Prices | None:
    """The prices in the cluster file; None without any. Raises LauncherError if they are wrong."""
    path, value = read_cluster_key("prices", environ, workdir)
    try:
        return None if value is None else parse_prices(value)
    except ValueError as error:
        raise ConfigError(str(path), [str(error)]) from None
