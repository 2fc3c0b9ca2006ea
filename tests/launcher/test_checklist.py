"""The whole list: its text, its object, and that one thing wrong does not hide another."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from exporter.readers.inventory import Gpu, Inventory
from exporter.readers.space import SpaceFacts
from launcher import checklist, machine
from launcher.checklist import broken_checklist, findings, make_checklist, render, to_json
from launcher.errors import ConfigError
from launcher.machine import GIB
from tests.launcher.conftest import Golden
from tests.launcher.fakes import BIN, FakeSlurm
from tests.launcher.subjects import subject_of

PYTHON = sys.executable

GOOD: dict[str, Any] = {
    "name": "embed",
    "resources": {"nodes": 2, "gpus_per_node": 2},
    "workers": [{"count": 4, "gpus": 1, "command": [PYTHON, "-u", "train.py", "--shard", "{rank}"]}],
    "environment": {"packages": ["json"], "required": ["DATA"]},
    "inputs": ["in/part_{rank}.jsonl"],
    "slurm": {"time_limit": "04:00:00"},
    "paths": {"output_dir": "out", "checkpoint_dir": "ckpt"},
    "progress": {"sample": "Processed 12/50 items"},
    "errors": [{"pattern": "lost connection"}],
}
BAD: dict[str, Any] = {
    "name": "embed",
    "resources": {"nodes": 9, "gpus_per_node": 4},
    "workers": [
        {"count": 3, "gpus": 2, "command": "python3 trian.py --shard {rnk} --data $DATA"},
        {"role": "helper", "command": "./helper"},
    ],
    "environment": {"required": ["DATA", "HF_HOME"]},
    "inputs": ["in/part_{rank}.jsonl", "in/table.csv", "in/none/*.json"],
    "slurm": {"partition": "gup"},
    "paths": {"output_dir": "out"},
    "patterns": {"output": "part_*", "checkpoints": None},
    "progress": {"sample": "step 12 of 50", "patterns": {"items": r"Processed (\d+)", "lr": r"lr=(\S+)"}},
    "monitoring": {"enabled": False},
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job in it, on a machine of which all that differs is held fixed."""
    FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(tmp_path / "slurm"))
    monkeypatch.setattr(checklist, "read_inventory", lambda: Inventory("550.54.15", (12, 4), (Gpu(0, "H200", 1, 2),)))
    monkeypatch.setattr(machine, "read_space", lambda _: SpaceFacts(500 * GIB, 1000 * GIB))
    folder = tmp_path / "job"
    (folder / "in").mkdir(parents=True)
    (folder / "train.py").write_text("")
    for rank in range(4):
        (folder / f"in/part_{rank}.jsonl").write_text('{"id": 1}\n')
    return folder


def text_of(sections: tuple[checklist.Section, ...], folder: Path) -> str:
    text = "\n".join(render(sections)) + "\n"
    for place, name in ((str(folder), "FOLDER"), (f'"{PYTHON}"', '"PYTHON"'), (f"{PYTHON} ", "PYTHON ")):
        text = text.replace(place, name)
    return text.replace(os.path.dirname(PYTHON), "BIN")


def test_a_good_job_has_a_list_of_what_is_in_order(site: Path, golden: Golden) -> None:
    sections = make_checklist(subject_of(site, local=False, environ={"DATA": "/d"}, **GOOD))
    assert not findings(sections)
    golden("launcher/check-good.txt", text_of(sections, site))


def test_a_bad_job_is_told_all_that_is_wrong_at_once(site: Path, golden: Golden) -> None:
    (site / "out").mkdir()
    (site / "out/part_1").write_text("old")
    (site / "in/table.csv").write_text("a,b\n1\n")
    (site / "in/part_0.jsonl").write_text("")
    urls = {"target_dir": "/no/such/targets", "prometheus_url": "http://127.0.0.1:9"}
    sections = make_checklist(subject_of(site, local=False, environ={"DATA": "/d"}, cluster=urls, **BAD))
    golden("launcher/check-bad.txt", text_of(sections, site))


def test_a_file_that_cannot_be_used_is_all_that_is_told(golden: Golden) -> None:
    errors = [
        ConfigError("gpujob.yaml", ["partitions: unknown key"]),
        ConfigError("job.yaml", ["name: is missing", "x"]),
    ]
    sections = broken_checklist(errors)
    golden("launcher/check-broken.txt", text_of(sections, Path("/none")))
    assert [item.place for item in findings(sections)] == ["gpujob.yaml", "job.yaml", "job.yaml"]


def test_the_object_holds_the_findings_and_all_sections(site: Path) -> None:
    sections = make_checklist(subject_of(site, local=False, **BAD))
    body = json.loads(json.dumps(to_json(sections)))
    assert (body["schema"], body["ok"]) == (1, False)
    assert [section["name"] for section in body["sections"]] == list(checklist.NAMES)
    items = [item for section in body["sections"] for item in section["items"]]
    assert {tuple(item) for item in items} == {("code", "status", "place", "message")}
    wrong = [item for item in items if item["status"] in ("warning", "error")]
    assert [(item["code"], item["status"], item["place"], item["message"]) for item in wrong] == [
        (found["code"], found["level"], found["place"], found["message"]) for found in body["findings"]
    ]
    good = to_json(make_checklist(subject_of(site, local=False, environ={"DATA": "/d"}, **GOOD)))
    assert (good["ok"], good["findings"]) == (True, [])


@pytest.mark.parametrize(
    ("command", "env", "held"),
    [
        ("python3 train.py", {}, True),
        ("python3 train.py -u", {}, True),
        ("/venv/bin/python3.11 -m train", {}, True),
        ("python3 -u train.py", {}, False),
        ("python3 -Bu train.py", {}, False),
        ("python3 --check-hash-based-pycs always x.py", {}, True),
        ("python3 train.py", {"PYTHONUNBUFFERED": "1"}, False),
        ("torchrun train.py", {}, False),
        (["bash", "-c", "cd x && python3 train.py"], {}, True),
        (["bash", "-c", "cd x && python3 -u train.py"], {}, False),
        (["bash", "-c", "PYTHONUNBUFFERED=1 python3 train.py"], {}, False),
        (["bash", "-c", "./train"], {}, False),
    ],
)
def test_python_that_holds_back_its_output_is_doubtful(
    command: str | list[str], env: dict[str, str], held: bool, site: Path
) -> None:
    (job,) = (
        section
        for section in make_checklist(subject_of(site, env=env, workers=[{"command": command}]))
        if section.name == "Job"
    )
    assert ("buffered" in [item.code for item in job.items]) is held
