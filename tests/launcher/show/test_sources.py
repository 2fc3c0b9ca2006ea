"""Where each value of a plan comes from."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.show.sources import SourceNames, explain_values, render_sources, source_names
from tests.launcher.check.planned_jobs import planned_job
from tests.launcher.conftest import Golden
from tests.support.launcher import clean_environment, gpujob

CLUSTER: dict[str, Any] = {
    "partition": "gpu",
    "account": "site",
    "directives": {"nice": 5, "mail-type": "END"},
    "gpus_per_node": 8,
    "gpu_type": "h100",
    "cpus_per_node": 96,
    "models": {"dsr1": "/models/DSR1"},
    "containers": {"sgl": "/images/sgl.sqsh"},
    "mounts": ["/data:/data:ro", "/scratch:/scratch"],
    "modules": ["cuda/12.4"],
    "preamble": "ulimit -n 65536",
}
JOB: dict[str, Any] = {
    "name": "job",
    "workers": [{"gpus": 8, "command": "true", "env": {"A": "2", "MY_TOKEN": "hunter2"}}],
    "slurm": {"partition": "debug", "directives": {"nice": 1}},
    "model": {"path": "dsr1"},
    "container": {"image": "sgl", "mounts": ["/mine:/data"]},
    "setup": {"modules": ["openmpi"], "preamble": "a\nb"},
    "env": {"A": "1"},
    "secrets": ["HF_TOKEN"],
}
SOURCES = SourceNames("job.yaml", "gpujob.yaml", "in or above the working directory")


def test_every_value_is_shown_with_its_source(tmp_path: Path, golden: Golden) -> None:
    job = planned_job(tmp_path, local=False, cluster=CLUSTER, environ={"SBATCH_EXPORT": "x"}, **JOB)
    rows = explain_values(job, SOURCES)
    checkout = str(Path(__file__).resolve().parents[3])
    table = "\n".join(render_sources(tuple(row for row in rows if checkout not in str(row.value)))) + "\n"
    golden("launcher/explain.txt", re.sub(" {2,}", "  ", table.replace(str(tmp_path), "FOLDER")))
    assert "hunter2" not in str(rows)


@pytest.mark.parametrize(
    ("slurm", "cluster", "value", "source"),
    [
        ({"partition": "a"}, {"partition": "b"}, "a", "job.yaml: slurm.partition"),
        ({}, {"partition": "b"}, "b", "gpujob.yaml: partition"),
        ({}, {}, None, "default"),
    ],
)
def test_the_job_file_has_precedence(
    slurm: dict[str, Any], cluster: dict[str, Any], value: str | None, source: str, tmp_path: Path
) -> None:
    job = planned_job(tmp_path, local=False, cluster=cluster, slurm=slurm)
    (row,) = (row for row in explain_values(job, SOURCES) if row.key == "slurm.partition")
    assert (row.value, row.source) == (value, source)
    assert job.plan.slurm.partition == value


def test_the_cluster_file_is_named_with_how_it_was_found(tmp_path: Path) -> None:
    assert source_names("j", {}, tmp_path).cluster is None
    home = tmp_path / "home/.config/gpujob"
    home.mkdir(parents=True)
    (home / "config.yaml").write_text("")
    environ = {"HOME": str(tmp_path / "home")}
    found_by = "in the user's configuration directory"
    assert source_names("j", environ, tmp_path) == SourceNames("j", str(home / "config.yaml"), found_by)
    (tmp_path / "gpujob.yaml").write_text("")
    assert source_names("j", environ, tmp_path).found_by == "in or above the working directory"
    named = {**environ, "GPUJOB_CONFIG": str(home / "config.yaml")}
    assert source_names("j", named, tmp_path).found_by == "environment: GPUJOB_CONFIG"


def test_plan_explain_prints_text_and_json(tmp_path: Path) -> None:
    (tmp_path / "gpujob.yaml").write_text(yaml.safe_dump({"partition": "gpu"}))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"name": "job", "workers": [{"command": "true"}]}))
    environ = clean_environment()
    result = gpujob("plan", "job.yaml", "--explain", cwd=tmp_path, env=environ)
    assert (result.returncode, len(result.stderr.splitlines())) == (0, 1)
    assert result.stderr.startswith(f"gpujob: cluster file {tmp_path}/gpujob.yaml (in or above the working directory; ")
    assert [line.split() for line in result.stdout.splitlines() if line.startswith("slurm.partition")] == [
        ["slurm.partition", "gpu", f"{tmp_path}/gpujob.yaml:", "partition"]
    ]
    body = json.loads(gpujob("plan", "job.yaml", "--explain", "--json", cwd=tmp_path, env=environ).stdout)
    row = {"key": "slurm.partition", "value": "gpu", "source": f"{tmp_path}/gpujob.yaml: partition"}
    assert row in body["explain"]
    assert body["processes"]
    assert "explain" not in json.loads(gpujob("plan", "job.yaml", "--json", cwd=tmp_path, env=environ).stdout)
