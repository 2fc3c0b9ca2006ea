"""What a hub takes from the site's cluster file: prices, budgets, the name of the cluster, and the target directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from exporter.contract.budget import Budget
from exporter.contract.errors import ExporterError
from exporter.contract.records import NOTHING, RecordError, from_json
from exporter.slurm.prices import Prices, is_amount, parse_prices

EXAMPLE = "budgets: {default: {gpu_hours: 2000}}"
TARGET_DIR_EXAMPLE = "target_dir: /srv/prometheus/gpujob"
SYSTEM_FILE = Path("/etc/gpujob/config.yaml")


class Site(NamedTuple):
    """Values of the cluster file."""

    prices: Prices | None = None
    budgets: Mapping[str, Budget] = NOTHING  # by user; those of all others are under DEFAULT
    cluster: str | None = None  # label of all series; None: Slurm's name
    target_dir: Path | None = None  # of all jobs; None also if it is relative to a working directory


NO_SITE = Site()


def parse_budgets(value: object) -> dict[str, Budget]:
    """Parse the value of ``budgets`` in a cluster file. Raises ValueError, which says what would be right."""
    try:
        budgets = from_json(dict[str, Budget], value, "budgets")
    except RecordError as error:
        raise ValueError(f"{error}; write as in {EXAMPLE}") from None
    for name, budget in budgets.items():
        limits = [limit for limit in (budget.gpu_hours, budget.cost) if limit is not None]
        if budget.unknown_keys or not limits or not all(map(is_amount, limits)) or 0 in limits:
            raise ValueError(f"budgets.{name}: it has no limit above 0 in gpu_hours or cost; write as in {EXAMPLE}")
    return budgets


def _absolute(path: str | None) -> Path | None:
    found = None if path is None else Path(path)
    return found if found is not None and found.is_absolute() else None


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
        known = body if isinstance(body, dict) else {}
        prices, budgets, cluster = known.get("prices"), known.get("budgets"), known.get("cluster")
        if cluster is not None and not isinstance(cluster, str):
            raise ValueError(f"cluster: {cluster!r} is not a name; write it as in cluster: hal")
        target_dir = known.get("target_dir")
        if target_dir is not None and not isinstance(target_dir, str):
            raise ValueError(f"target_dir: {target_dir!r} is not a directory; write it as in {TARGET_DIR_EXAMPLE}")
        return Site(
            None if prices is None else parse_prices(prices),
            {} if budgets is None else parse_budgets(budgets),
            cluster or None,
            _absolute(target_dir),
        )
    except OSError as error:
        raise ExporterError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ExporterError(f"{path}: is not UTF-8 at byte {error.start}") from error
    except ValueError as error:
        raise ExporterError(f"{path}: {error}") from error
