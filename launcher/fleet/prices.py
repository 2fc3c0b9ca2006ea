"""List prices of the cluster file, and what jobs cost by them."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from exporter.contract.records import JsonValue
from launcher.errors import ConfigError
from launcher.rundir.cluster_file import read_cluster_key

DEFAULT = "default"  # the price of GPUs of other types
HOUR_S = 3600.0


class Prices(NamedTuple):
    """List prices of a site."""

    currency: str
    gpu_hour: Mapping[str, float]  # by type in small letters

    def of_gpu(self, name: str) -> float | None:
        """Price of an hour of a GPU; None if it has none."""
        return self.gpu_hour.get(name.lower(), self.gpu_hour.get(DEFAULT))

    def of_gpus(self, amounts: Mapping[str, float]) -> float | None:
        """Price of an hour of these GPUs by type; None without GPUs, or if one of them has no price."""
        parts = [(amount, self.of_gpu(name)) for name, amount in amounts.items()]
        known = [amount * price for amount, price in parts if price is not None]
        return sum(known) if known and len(known) == len(parts) else None

    def cost(self, gpu_s: Mapping[str, float]) -> float | None:
        """Price of GPU seconds by type; None where it is unknown."""
        price = self.of_gpus(gpu_s)
        return None if price is None else price / HOUR_S

    def text(self, amount: float | None) -> str:
        """``EUR 19.20``; a dash if unknown."""
        return "-" if amount is None else f"{self.currency} {amount:,.2f}".strip()


def read_prices(environ: Mapping[str, str], workdir: Path) -> Prices | None:
    """The prices in the cluster file; None without any. Raises LauncherError if they are wrong."""
    path, value = read_cluster_key("prices", environ, workdir)
    if value is None:
        return None
    currency = value.get("currency", "") if isinstance(value, dict) else None
    by_type = value.get("gpu_hour", {}) if isinstance(value, dict) else None
    if not isinstance(currency, str) or not isinstance(by_type, dict) or not all(map(_is_price, by_type.values())):
        example = "prices: {currency: EUR, gpu_hour: {h100: 2.40, default: 1.80}}"
        raise ConfigError(str(path), [f"prices: {value!r} has no price for each type of GPU; write as in {example}"])
    return Prices(currency, {str(name).lower(): float(price) for name, price in by_type.items()})


def _is_price(value: JsonValue) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
