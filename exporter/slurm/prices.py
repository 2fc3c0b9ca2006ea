"""List prices of GPUs, and what jobs cost by them."""

from collections.abc import Mapping
from typing import NamedTuple

DEFAULT = "default"  # the price of GPUs of other types
HOUR_S = 3600.0
EXAMPLE = "prices: {currency: EUR, gpu_hour: {h100: 2.40, default: 1.80}}"


class Price(NamedTuple):
    """List price of all GPUs of a job."""

    per_hour: float
    currency: str


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


def parse_prices(value: object) -> Prices:
    """Parse the value of ``prices`` in a cluster file. Raises ValueError, which says what would be right."""
    currency = value.get("currency", "") if isinstance(value, dict) else None
    by_type = value.get("gpu_hour", {}) if isinstance(value, dict) else None
    if not isinstance(currency, str) or not isinstance(by_type, dict) or not all(map(is_amount, by_type.values())):
        raise ValueError(f"prices: {value!r} has no price for each type of GPU; write as in {EXAMPLE}")
    return Prices(currency, {str(name).lower(): float(price) for name, price in by_type.items()})


def is_amount(value: object) -> bool:
    """Whether a value is a number that a price or a budget may have."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
