"""Programs that nobody wrote for gpujob: a script, a binary and the Python of an environment, each as one process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.support.launcher import clean_environment, gpujob, read_json

DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def variables(log: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in log.read_text().splitlines() if "=" in line)


def test_programs_run_as_they_are(tmp_path: Path) -> None:
    """A process that is alone finds no other ones to wait for, in the words of any framework."""
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/sh\nenv\necho Processed 3/3 items\n")
    script.chmod(0o755)
    shutil.copy(str(shutil.which("env")), tmp_path / "solver")
    venv = tmp_path / "my env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    prefix = "import sys; print('prefix=' + sys.prefix); print('Processed 2/2 items')"
    roles: dict[str, dict[str, Any]] = {
        "script": {"command": "./run.sh"},
        "binary": {"command": "./solver"},
        "python": {"command": [str(venv / "bin/python"), "-c", prefix]},
        "pair": {"command": "./run.sh", "count": 2},
    }
    job = {
        "name": "programs",
        "workers": [{"role": role, **keys} for role, keys in roles.items()],
        "monitoring": {"linger": 0},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    done = gpujob("run", "job.yaml", "--quiet", cwd=tmp_path, env=clean_environment(PATH=os.environ["PATH"]))
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = (tmp_path / "logs").glob("local-*")
    report = read_json(run_dir / "report.json")
    assert (report["state"], report["items"]) == ("COMPLETED", 3 + 2 + 3 + 3)
    found = {role: variables(next(run_dir.glob(f"*_{role}_w0.out"))) for role in roles}
    assert found["python"]["prefix"] == str(venv)
    for role in ("script", "binary"):
        assert not set(DISTRIBUTED) & set(found[role])
        assert found[role]["PYTHONUNBUFFERED"] == "1"
    assert set(DISTRIBUTED) <= set(found["pair"])
