"""The units of systemd."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launcher import ROOT

UNITS = sorted((ROOT / "docker" / "systemd").glob("*.service"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_the_unit(unit: Path, tmp_path: Path) -> None:
    manager = "--user" if "-user" in unit.name else "--system"
    argv = ["systemd-analyze", manager, "verify", str(unit)]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_command_of_a_unit_has_these_options(unit: Path) -> None:
    found = re.search(r"^ExecStart=/usr/bin/env gpujob(-exporter)? (.*)", unit.read_text("utf-8"), re.MULTILINE)
    assert found is not None
    argv = [sys.executable, "-m", "exporter" if found[1] else "launcher", *found[2].split(), "--help"]
    assert subprocess.run(argv, cwd=ROOT, capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize(
    "unit", [unit for unit in UNITS if unit.name.startswith("gpujob-hub")], ids=lambda unit: unit.name
)
def test_the_unit_of_a_hub_has_a_place_for_the_cluster_file_of_the_site(unit: Path) -> None:
    found = dict(re.findall(r"^#Environment=(\w+)=(\S+)$", unit.read_text("utf-8"), re.MULTILINE))
    assert found.keys() == {"GPUJOB_CONFIG", "PATH"}
    page = (ROOT / "docs" / "how-to" / "run-the-hub.md").read_text("utf-8")
    assert all(f"Environment={name}={value}\n" in page for name, value in found.items())
    assert found["GPUJOB_CONFIG"] in (ROOT / "docs" / "admin.md").read_text("utf-8")


def test_prometheus_may_read_the_targets_where_the_unit_writes_them() -> None:
    """Systemd closes the directories of a dynamic account to others, except a runtime directory that ends with it."""
    unit = (ROOT / "docker" / "systemd" / "gpujob-targets.service").read_text("utf-8")
    found = re.search(r"^RuntimeDirectory=(\S+)(?s:.*) --output (\S+)", unit, re.MULTILINE)
    assert found is not None
    assert "\nStartLimitIntervalSec=0\n" in unit
    assert "Preserve=" not in re.sub(r"(?m)^#.*", "", unit)
    assert Path(found[2]).parent == Path("/run", found[1])
    page = (ROOT / "docs" / "how-to" / "connect-prometheus.md").read_text("utf-8")
    assert f'files: ["{Path(found[2]).parent}/*.json"]' in page
