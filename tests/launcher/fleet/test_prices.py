"""List prices of the cluster file."""

from pathlib import Path

import pytest

from exporter.slurm.prices import Prices
from launcher.errors import ConfigError
from launcher.fleet.prices import read_prices

PRICES = Prices("EUR", {"h100": 2.4, "default": 1.8})


def read(folder: Path, text: str) -> Prices | None:
    (folder / "gpujob.yaml").write_text(text)
    return read_prices({"HOME": str(folder)}, folder)


def test_prices_are_by_type(tmp_path: Path) -> None:
    assert read(tmp_path, "prices: {currency: EUR, gpu_hour: {H100: 2.40, default: 1.80}}") == PRICES
    assert PRICES.cost({"h100": 3600.0, "a100": 7200.0}) == pytest.approx(6.0)
    assert (PRICES.text(1234.5), Prices("", {}).text(1.0), PRICES.text(None)) == ("EUR 1,234.50", "1.00", "-")


def test_what_has_no_price_has_no_cost(tmp_path: Path) -> None:
    assert read(tmp_path, "cluster: hal") is None
    assert Prices("EUR", {"h100": 2.4}).cost({"h100": 3600.0, "a100": 1.0}) is None
    assert PRICES.cost({}) is None
    free = read(tmp_path, "prices: {gpu_hour: {default: 0}}")
    assert free is not None
    assert free.cost({"h100": 3600.0}) == 0.0


@pytest.mark.parametrize(
    "value", ["5", "{gpu_hour: 2}", "{gpu_hour: {h100: dear}}", "{gpu_hour: {h100: -1}}", "{currency: 1}"]
)
def test_wrong_prices_are_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match="has no price for each type of GPU; write as in prices: "):
        read(tmp_path, f"prices: {value}")
