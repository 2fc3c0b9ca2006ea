"""What a hub takes from the site's cluster file: list prices."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from exporter.contract.errors import ExporterError
from exporter.slurm.prices import Prices, parse_prices

SYSTEM_FILE = Path("/etc/gpujob/config.yaml")


class Site(NamedTuple):
    """Prices of the cluster file; None without any."""

    prices: Prices | None = None
    source: str | None = None  # the file


def find_cluster_file(named: str | None, environ: Mapping[str, str]) -> Path | None:
    """The named file, else that of the user, else that of the system. A service has no working directory to search."""
    if named or environ.get("GPUJOB_CONFIG"):
        return Path(named or environ["GPUJOB_CONFIG"])
    home = environ.get("XDG_CONFIG_HOME") or (f"{environ['HOME']}/.config" if environ.get("HOME") else None)
    places = [*([Path(home, "gpujob", "config.yaml")] if home else []), SYSTEM_FILE]
    return next((place for place in places if place.is_file()), None)


def read_site(path: Path | None) -> Site:
    """Read the cluster file. Raises ExporterError."""
    if path is None:
        return Site()
    from exporter.contract.bounded_yaml import MOST_BYTES, parse_yaml  # lazy: many users have no cluster file

    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1).decode("utf-8-sig")
        if len(text) > MOST_BYTES:
            raise ExporterError(f"{path}: has more than {MOST_BYTES:,} bytes, the limit; is it the right file?")
        body = parse_yaml(text)
        value = body.get("prices") if isinstance(body, dict) else None
        return Site() if value is None else Site(parse_prices(value), str(path))
    except OSError as error:
        raise ExporterError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ExporterError(f"{path}: is not UTF-8 at byte {error.start}") from error
    except ValueError as error:
        raise ExporterError(f"{path}: {error}") from error
