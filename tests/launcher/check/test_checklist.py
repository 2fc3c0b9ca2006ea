"""The checklist as text and JSON, and that one problem does not hide another."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from exporter.files.disks.space_reader import SpaceFacts
from exporter.gpus.inventory_reader import GpuInventory, InventoryGpu
from launcher.check import checklist, finding, site_facts
from launcher.check.checklist import (
    ChecklistSection,
    checklist_findings,
    checklist_of_broken_job,
    checklist_to_json,
    make_checklist,
    render_preflight_checklist,
    verdict,
)
from launcher.check.finding import CheckFinding, Status
from launcher.check.preflight import check_plan
from launcher.check.site_facts import GIB
from launcher.cli.partial_check import load_partial_job
from launcher.errors import ConfigError, ConfigErrors
from launcher.planner.planned_job import read_job_text, read_planned_job
from tests.launcher.check.planned_jobs import planned_job
from tests.launcher.conftest import Golden
from tests.support.fake_slurm import BIN, FakeSlurm
from tests.support.launcher import gpujob

PYTHON = sys.executable
OFF = {"PYTHONUNBUFFERED": ""}

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
    """A folder with a job, on a machine whose facts are fixed."""
    FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(tmp_path / "slurm"))
    monkeypatch.setattr(
        checklist,
        "read_gpu_inventory",
        lambda: GpuInventory("550.54.15", (12, 4), (InventoryGpu(0, "H200", 1, 2, "GPU-a"),)),
    )
    monkeypatch.setattr(site_facts, "read_space", lambda _: SpaceFacts(500 * GIB, 1000 * GIB))
    monkeypatch.setattr(site_facts, "_is_in_virtual_environment", lambda _: False)
    folder = tmp_path / "job"
    (folder / "in").mkdir(parents=True)
    (folder / "train.py").write_text("")
    for rank in range(4):
        (folder / f"in/part_{rank}.jsonl").write_text('{"id": 1}\n')
    return folder


def text_of(sections: tuple[checklist.ChecklistSection, ...], folder: Path) -> str:
    text = "\n".join(render_preflight_checklist(sections, show_all=True)) + "\n"
    for place, name in (
        (site_facts.PACKAGE, "PACKAGE"),
        (str(folder), "FOLDER"),
        (f'"{PYTHON}"', '"PYTHON"'),
        (f"{PYTHON} ", "PYTHON "),
    ):
        text = text.replace(place, name)
    return text.replace(os.path.dirname(PYTHON), "BIN")


def test_the_checklist_of_a_good_job_has_no_findings(site: Path, golden: Golden) -> None:
    sections = make_checklist(planned_job(site, local=False, environ={"DATA": "/d"}, **GOOD))
    assert not checklist_findings(sections)
    golden("launcher/check-good.txt", text_of(sections, site))


def test_the_checklist_of_a_bad_job_has_all_problems(site: Path, golden: Golden) -> None:
    (site / "out").mkdir()
    (site / "out/part_1").write_text("old")
    (site / "in/table.csv").write_text("a,b\n1\n")
    (site / "in/part_0.jsonl").write_text("")
    urls = {"target_dir": "/no/such/targets", "prometheus_url": "http://127.0.0.1:9"}
    sections = make_checklist(planned_job(site, local=False, environ={"DATA": "/d"}, cluster=urls, **BAD))
    golden("launcher/check-bad.txt", text_of(sections, site))


@pytest.mark.parametrize("workers", [BAD["workers"], [{"count": 2, "gpus": 2, "command": "torchrun train.py"}]])
def test_the_checklist_has_every_finding_of_a_start(workers: list[dict[str, Any]], site: Path) -> None:
    job = planned_job(site, local=False, **{**BAD, "workers": workers})
    at_start = {str(item) for item in check_plan(job) if item.status in ("warning", "error")}
    assert at_start <= {str(item) for item in checklist_findings(make_checklist(job))}


def test_only_errors_of_unusable_files_are_listed(golden: Golden) -> None:
    errors = [
        ConfigError("gpujob.yaml", ["partitions: unknown key"]),
        ConfigError("job.yaml", ["name: is missing", "x"]),
    ]
    sections = checklist_of_broken_job(errors)
    golden("launcher/check-broken.txt", text_of(sections, Path("/none")))
    assert [item.place for item in checklist_findings(sections)] == ["gpujob.yaml", "job.yaml", "job.yaml"]


THIRTEEN_MISTAKES = """\
name: embed
workdir: 7
resources: {nodes: 1, gpus_per_node: 8, memory_per_node: lots}
workers:
  - {count: 4, gpus: 2, command: "python3 trian.py --shard {rnk}", restrat: {max: 2}}
secrets: [HF_TOKEN]
setup: {script: env.sh}
model: {path: dsr2}
inputs: [data/none.jsonl]
slurm: {time_limit: 14400, signal: "USR1", dependency: "4459"}
paths: {output_dir: out}
monitoring: {stall_timeout: -5}
"""


def test_thirteen_mistakes_are_all_listed_in_their_sections(
    site: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Format errors do not hide problems that only checks on the machine find."""
    (site / "job.yaml").write_text(THIRTEEN_MISTAKES)
    (site / "gpujob.yaml").write_text("models: {dsr1: /models/DSR1}\n")
    monkeypatch.chdir(site)
    monkeypatch.setenv("VIRTUAL_ENV", "/venv")
    with pytest.raises(ConfigErrors) as caught:
        read_planned_job(read_job_text(Path("job.yaml")), local=False)
    sections = checklist_of_broken_job(
        caught.value.errors, load_partial_job(read_job_text(Path("job.yaml")), local=False)
    )
    golden("launcher/check-thirteen.txt", text_of(sections, site))
    errors = [item for item in checklist_findings(sections) if item.status == "error"]
    assert len(errors) == 13


@pytest.mark.parametrize(
    ("text", "removed"),
    [
        ("name: j\nworkers: [{command: x}]\nmonitoring: {linger: -1}\n", {"monitoring.linger"}),
        ("name: 7\nworkers: [{command: x, gpsu: 1}]\n", {"name", "workers[0].gpsu"}),
        ("workers: [{command: x}]\n", {"name"}),
        ("name: j\nworkers: [{command: x}]\ninputs: [a, 1, b, 2]\n", {"inputs[1]", "inputs[3]"}),
        ("name: j\nworkers: [{command: x}]\nslurm: {directives: {array: 1}}\n", {"slurm.directives"}),
        ("name: j\nworkers: [{command: x}]\nwrokdir: /x\nslurm: 5\n", {"wrokdir", "slurm"}),
        ("name: j\nworkers: [{count: 2}]\n", {"workers[0].command", "workers (worker).command"}),
        ("name: j\nworkers: [{role: a, command: ''}]\n", {"workers[0].command", "workers (a).command"}),
        ("name: j\nworkers: [{command: x}]\nmodel: {name: a}\n", {"model.path"}),
        (
            "name: j\nworkers: [{command: x, count: 3, gpus: 1}]\nresources: {nodes: 1, gpus_per_node: 2}\n",
            {"resources.nodes"},
        ),
        ("name: j\nworkers: [{command: x}]\nenv: {A B: 1}\n", {"env", "env.A B"}),
        (
            "name: j\nresources: {gpus_per_node: 4, prefill_nodes: 1, decode_nodes: 2}\n",
            {"resources.prefill_workers", "resources.decode_workers", "workers"},
        ),
        ("name: j\nname: k\nworkers: [{command: x}]\n", set()),
        ("name: [\n", None),
        ("- 1\n", None),
        ("name: j\nworkers: 5\n", {"workers"}),
        (
            "name: j\nworkers: [{command: x, gpus: 3}]\nresources: {gpus_per_node: eight}\n",
            {"resources.gpus_per_node", "workers[0].gpus"},
        ),
    ],
)
def test_invalid_keys_are_removed_and_the_rest_is_checked(
    text: str, removed: set[str] | None, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "job.yaml").write_text(text)
    monkeypatch.chdir(site)
    rest = load_partial_job(read_job_text(Path("job.yaml")), local=True)
    assert (None if rest is None else rest[1]) == removed


@pytest.mark.parametrize(
    ("text", "place", "code"),
    [
        ("errors: [{pattern: '(', severity: bad}]\n", "errors", "errors"),
        ("errors: [{patern: x}]\n", "errors", "errors"),
        ("workers: [{command: 'true', restrat: {max: 2}}]\n", "workers", "workers"),
        ("workers: [{command: 'true', restrat: {max: 2}}]\n", "workers (worker)", "policy"),
        ("progress: {sample: 'Processed 1/2 items', patterns: {lr: '('}}\n", "progress.sample", "sample"),
    ],
)
def test_a_key_with_a_mistake_has_no_ok_finding(
    text: str, place: str, code: str, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(site)
    minimal = "name: j\n" + ("" if "workers" in text else "workers: [{command: 'true'}]\n")

    def ok_findings(file: str) -> list[tuple[str, str]]:
        (site / "job.yaml").write_text(file)
        rest = load_partial_job(read_job_text(Path("job.yaml")), local=True)
        sections = checklist_of_broken_job([ConfigError("job.yaml", ["x"])], rest)
        return [(item.code, item.place) for entry in sections for item in entry.items if item.status == "ok"]

    valid = "progress: {sample: 'Processed 1/2 items'}\n"
    assert (code, place) in ok_findings(f"name: j\nworkers: [{{command: 'true'}}]\n{valid}")
    assert (code, place) not in ok_findings(minimal + text)


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ("10", "10 minutes"),
        ("1", "1 minute"),
        ("10:30", "10:30 (minutes:seconds)"),
        ("04:00:00", "04:00:00"),
        ("2-12", "2-12 (days-hours)"),
        ("2-12:00", "2-12:00"),
    ],
)
def test_a_time_limit_is_listed_with_its_unit(limit: str, text: str, site: Path) -> None:
    sections = make_checklist(planned_job(site, local=False, slurm={"time_limit": limit}))
    ok_findings = [item for entry in sections for item in entry.items if item.status == "ok"]
    assert [item.message for item in ok_findings if item.place == "slurm.time_limit"] == [text]
    sections = make_checklist(planned_job(site, local=True, slurm={"time_limit": limit}))
    found = next(item for entry in sections for item in entry.items if item.code == "time-limit")
    assert (found.status, found.message) == ("not checked", "a run on this machine has no time limit")


@pytest.mark.parametrize(
    ("statuses", "text"),
    [
        ([], "ok"),
        (["ok", "not checked"], "ok"),
        (["warning"], "ok, 1 warning"),
        (["warning", "error", "warning"], "not ready: 1 error, 2 warnings"),
    ],
)
def test_the_verdict_counts_errors_and_warnings(statuses: list[Status], text: str) -> None:
    assert verdict([ChecklistSection("Job", tuple(CheckFinding("x", status, "-", "") for status in statuses))]) == text


def test_what_was_not_checked_is_only_counted() -> None:
    sections = [
        ChecklistSection("A", (finding.ok("x", "a", "fine"), finding.not_checked("x", "b", "why"))),
        ChecklistSection("B", (finding.not_checked("x", "c", "why"),)),
    ]
    assert render_preflight_checklist(sections) == [
        "1 A",
        "  ok      a: fine",
        "not checked: 2; --all shows what, and why",
    ]
    assert "  -       c: not checked: why" in render_preflight_checklist(sections, show_all=True)


@pytest.mark.parametrize("option", ["--local", "--json"])
def test_a_role_without_a_command_is_reported(option: str, site: Path) -> None:
    (site / "job.yaml").write_text("name: j\nresources: {gpus_per_node: 4, agg_workers: 1}\n")
    done = gpujob("check", "job.yaml", option, cwd=site)
    assert (done.returncode, done.stderr) == (2, "")
    assert "agg has no command; give it one, or use a backend that has one" in done.stdout


def test_workers_that_do_not_fit_do_not_hide_other_problems(site: Path) -> None:
    resources, worker = "{nodes: 1, gpus_per_node: 4}", "{count: 8, gpus: 1, command: no-such-program}"
    (site / "job.yaml").write_text(f"name: j\nresources: {resources}\nworkers: [{worker}]\n")
    done = gpujob("check", "job.yaml", "--local", cwd=site)
    assert "has mistakes" not in done.stdout
    for text in ("and the job has 1; set nodes: 2", '"no-such-program" is not a program', "6 Monitoring"):
        assert text in done.stdout


def test_a_mistake_of_the_cluster_file_does_not_hide_the_job(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "gpujob.yaml").write_text("partitions: gpu\naccount: nlp\n")
    (site / "job.yaml").write_text("name: j\nworkers: [{command: no-such-program}]\n")
    monkeypatch.chdir(site)
    done = gpujob("check", "job.yaml", "--local", "--json", cwd=site)
    body = json.loads(done.stdout)
    assert done.returncode == 2
    errors = [(found["code"], found["place"]) for found in body["findings"] if found["level"] == "error"]
    assert errors == [("no-program", "workers (worker).command"), ("job-file", str(site / "gpujob.yaml"))]


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ("workers: []", "topology-missing"),
        ("resources: {gpus_per_node: 8}", "topology-missing"),
        ("resources: {gpus_per_node: 8, agg_workers: 1, decode_workers: 1}", "topology-mixed"),
        ("resources: {gpus_per_node: 8, agg_workers: 1, prefill_nodes: 1}", "topology-no-workers"),
        ("resources: {gpus_per_node: 8, agg_workers: 1, agg_nodes: 0}", "topology-no-nodes"),
        ("resources: {gpus_per_node: 8, agg_workers: 1, gpus_per_agg: 12}", "topology"),
        ("resources: {gpus_per_node: 8, agg_workers: 1}\nslurm: {het: true}", "het"),
    ],
)
def test_workers_that_do_not_fit_have_a_code(spec: str, code: str, site: Path) -> None:
    engine = "backend: {type: sglang}\nmodel: {path: hf:a/b}\n"
    (site / "job.yaml").write_text(f"name: j\n{engine}{spec}\n")
    body = json.loads(gpujob("check", "job.yaml", "--json", cwd=site).stdout)
    assert code in [found["code"] for found in body["findings"]], body["findings"]
    assert not body["ok"]


@pytest.mark.parametrize(("serves_only", "status"), [(True, "not checked"), (False, "warning")])
def test_a_job_that_only_serves_needs_no_output_pattern(serves_only: bool, status: str, site: Path) -> None:
    spec: dict[str, Any] = {
        "patterns": {"output": None, "checkpoints": None},
        "slurm": {"requeue": {"preempted": True}},
    }
    if serves_only:
        spec |= {
            "workers": [{"role": "agg", "command": "engine --port {http_port}"}],
            "backend": {"type": "sglang"},
            "model": {"path": "hf:a/b"},
            "benchmark": {"type": "custom", "command": "bench"},
        }
    items = [item for entry in make_checklist(planned_job(site, local=False, **spec)) for item in entry.items]
    (output,) = [item for item in items if item.place == "patterns.output"]
    assert (output.code, output.status) == ("no-output-pattern", status)
    codes = ("no-checkpoints", "requeue-no-checkpoints")
    assert [item.code for item in items if item.code in codes] == ([] if serves_only else list(codes))


def test_services_are_not_counted_among_gpu_workers(site: Path) -> None:
    serving: dict[str, Any] = {
        "resources": {"gpus_per_node": 1, "agg_workers": 2},
        "frontend": {"type": "sglang-router"},
    }
    spec: dict[str, Any] = {**serving, "backend": {"type": "sglang"}, "model": {"path": "hf:a/b"}, "workers": []}
    (job,) = (entry for entry in make_checklist(planned_job(site, local=False, **spec)) if entry.name == "Job")
    assert "no-gpu" not in [item.code for item in job.items]
    assert "2 GPUs for 2 worker tasks" in [item.message for item in job.items]


def test_the_json_has_the_findings_and_all_sections(site: Path) -> None:
    sections = make_checklist(planned_job(site, local=False, **BAD))
    body = json.loads(json.dumps(checklist_to_json(sections)))
    assert (body["schema"], body["ok"]) == (1, False)
    assert [section["name"] for section in body["sections"]] == list(checklist.SECTION_NAMES)
    items = [item for section in body["sections"] for item in section["items"]]
    assert {tuple(item) for item in items} == {("code", "status", "place", "message")}
    wrong = [item for item in items if item["status"] in ("warning", "error")]
    assert [(item["code"], item["status"], item["place"], item["message"]) for item in wrong] == [
        (found["code"], found["level"], found["place"], found["message"]) for found in body["findings"]
    ]
    good = checklist_to_json(make_checklist(planned_job(site, local=False, environ={"DATA": "/d"}, **GOOD)))
    assert (good["ok"], good["findings"]) == (True, [])


@pytest.mark.parametrize(
    ("command", "env", "buffered"),
    [
        ("python3 train.py", {}, False),
        ("python3 train.py", {"PYTHONUNBUFFERED": "1"}, False),
        ("python3 train.py", OFF, True),
        ("python3 train.py -u", OFF, True),
        ("/venv/bin/python3.11 -m train", OFF, True),
        ("python3 -u train.py", OFF, False),
        ("python3 -Bu train.py", OFF, False),
        ("python3 --check-hash-based-pycs always x.py", OFF, True),
        ("torchrun train.py", OFF, False),
        (["bash", "-c", "cd x && python3 train.py"], OFF, True),
        (["bash", "-c", "cd x && python3 -u train.py"], OFF, False),
        (["bash", "-c", "PYTHONUNBUFFERED=1 python3 train.py"], OFF, False),
        (["bash", "-c", "./train"], OFF, False),
    ],
)
def test_python_with_buffered_output_is_a_warning(
    command: str | list[str], env: dict[str, str], buffered: bool, site: Path
) -> None:
    (job,) = (
        section
        for section in make_checklist(planned_job(site, env=env, workers=[{"command": command}]))
        if section.name == "Job"
    )
    assert ("buffered" in [item.code for item in job.items]) is buffered
