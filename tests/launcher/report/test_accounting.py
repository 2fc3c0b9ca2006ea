"""Slurm's accounting in the report of an ended job, with a fake sacct on PATH."""

import json
import os
import time
from pathlib import Path

import pytest

from exporter.contract import run_files
from exporter.contract.report import GpuReport, Report
from exporter.contract.slurm_accounting import SlurmAccounting
from launcher.report.accounting import ask
from launcher.report.accounting.ask import with_accounting
from launcher.report.accounting.text import accounting_lines
from launcher.report.text import render_report
from launcher.watch.ending import render_ending
from tests.support.launcher import clean_environment, gpujob

JOB = "0:125|||00:10.481|12|ada|COMPLETED|0:0|{submitted}|101|109|8|10|4|00:10.481|cpu=4,gres/gpu:h100=2,mem=600M||job"
STEP = "|165675008||00:10|12.0||COMPLETED|0:0|101|101|{end}|8||4|00:10|cpu=4,mem=600M|mem=128061440|train"
REPORT = Report(
    job_id="12",
    job_name="job",
    state="COMPLETED",
    exit_status=0,
    start=101.0,
    end=109.0,
    gpus=GpuReport(energy_j=7.2e6, seen_s=12.0, idle_s=3.0),
)


class Sacct:
    """A sacct that prints a text, and counts its calls."""

    def __init__(self, folder: Path) -> None:
        self.path, self.calls_file = folder / "sacct", folder / "calls"

    def say(self, *lines: str, after: str = "") -> None:
        text = "\n".join(lines)
        self.path.write_text(f"#!/bin/sh\necho \"$*\" >> {self.calls_file}\n{after}\ncat <<'END'\n{text}\nEND\n")
        self.path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []


@pytest.fixture
def sacct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sacct:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    fake = Sacct(tmp_path)
    fake.say(JOB.format(submitted=100), STEP.format(end=109))
    return fake


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "12_job_20251122_041341"
    folder.mkdir()
    run_files.write_json(folder / "12.json", {"job_id": "12", "user": "ada", "submitted": 100.5, "cluster": None})
    run_files.write_json(folder / run_files.REPORT_FILE, REPORT.to_json())
    (folder / "report.md").write_text(render_report(REPORT))
    return folder


def asked(run_dir: Path, report: Report = REPORT) -> SlurmAccounting:
    found = with_accounting(run_dir, report, os.environ).accounting
    assert found is not None
    return found


def test_accounting_is_asked_once_and_kept_beside_the_report(sacct: Sacct, run_dir: Path) -> None:
    found = asked(run_dir)
    assert (found.derived_exit_code, found.cpu_ratio, found.max_rss_bytes) == ("0:125", 10 / 32, 165675008.0)
    (call,) = sacct.calls
    assert call.startswith("-n -P -D --noconvert -S uts40 -j 12 -o DerivedExitCode,MaxRSS,")
    kept = run_dir / run_files.ACCOUNTING_FILE
    assert json.loads(kept.read_text()) == found.to_json()
    assert kept.stat().st_mode & 0o777 == 0o640
    assert asked(run_dir) == found
    assert len(sacct.calls) == 1
    assert json.loads((run_dir / run_files.REPORT_FILE).read_text())["accounting"] is None
    assert (run_dir / "report.md").read_text() == render_report(REPORT.replace(accounting=found))
    asked(run_dir, REPORT.replace(attempt=1))  # an administrator requeued the job after its end
    assert len(sacct.calls) == 2


def test_the_figures_are_in_every_form_of_the_report(sacct: Sacct, run_dir: Path) -> None:
    report = with_accounting(run_dir, REPORT, os.environ)
    assert report.accounting is not None
    assert accounting_lines(report.accounting) == [
        "state: COMPLETED, ExitCode 0:0, DerivedExitCode 0:125",
        "allocated: cpu=4,gres/gpu:h100=2,mem=600M",
        "time: 8s of 10m 00s",
        "CPU: 31.25 % of 4 CPUs, 10.481 s",
        "memory: 122.13 MiB of 600.00 MiB, 20.35 %",
        "MaxRSS: 158.00 MiB, the largest task",
        "GPU hours: 0.004 h100",
        "GPUs idle: 25 % of the time in which a sidecar looked (seen 75 %)",
        "energy (gpu): 2.0 kWh, by the counters of the boards",
    ]
    assert "- CPU: 31.25 % of 4 CPUs, 10.481 s\n" in render_report(report)
    summary = (
        "accounting: CPU 31.25 % of 4 CPUs, 10.481 s, memory 122.13 MiB of 600.00 MiB, 20.35 %, 0.004 h100 GPU hours"
    )
    assert summary in render_ending(report)
    assert "accounting" not in "\n".join(render_ending(REPORT))


def test_what_is_absent_is_not_measured() -> None:
    lines = accounting_lines(
        SlurmAccounting(state="FAILED", complete=True, attempts=2, lower_bound=True, cpu_ratio=0.5)
    )
    assert lines == [
        "state: FAILED, ExitCode -, DerivedExitCode -",
        "allocated: not measured",
        "time: - of no limit, the last of 2 attempts",
        "CPU: at least 50.00 % of 0 CPUs",
        "memory: not measured",
        "MaxRSS: not measured",
    ]


def test_a_sacct_that_is_missing_or_hangs_is_one_line(
    sacct: Sacct, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask, "DEADLINE_S", 1.0)
    sacct.say(after="sleep 60")
    start = time.monotonic()
    report = with_accounting(run_dir, REPORT, os.environ)
    assert time.monotonic() - start < 50
    assert "accounting: not measured: sacct did not answer in 1 s" in render_ending(report)
    sacct.path.unlink()
    monkeypatch.setenv("PATH", str(run_dir))
    assert asked(run_dir).problem == "sacct is not on PATH; load the Slurm module"
    assert not (run_dir / run_files.ACCOUNTING_FILE).exists()


@pytest.mark.parametrize(
    "lines",
    [(), (JOB.format(submitted=20),), (JOB.format(submitted=900),), (JOB.replace("ada", "bob").format(submitted=100),)],
)
def test_another_job_with_the_id_is_not_taken(sacct: Sacct, run_dir: Path, lines: tuple[str, ...]) -> None:
    sacct.say(*lines)
    assert asked(run_dir) == SlurmAccounting(problem="sacct does not know this job")
    assert not (run_dir / run_files.ACCOUNTING_FILE).exists()


def test_accounting_that_lags_is_asked_again(sacct: Sacct, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "RETRY_S", 0.05)
    now = time.time()
    ended_now = REPORT.replace(end=now)
    late = "\n".join((JOB, STEP)).format(submitted=100, end=109).replace("'", "")
    sacct.say(
        JOB.format(submitted=100),
        STEP.format(end="Unknown"),
        after=f"[ $(wc -l < {sacct.calls_file}) -gt 2 ] && echo '{late}' && exit",
    )
    assert asked(run_dir, ended_now).complete
    assert len(sacct.calls) == 3
    (run_dir / run_files.ACCOUNTING_FILE).unlink()
    sacct.say(JOB.format(submitted=100), STEP.format(end="Unknown"))
    some_time_ago = asked(run_dir, REPORT.replace(end=now - 100))  # asked once, and again by the next command
    assert len(sacct.calls) == 4
    assert accounting_lines(some_time_ago)[-1] == "not complete: accounting does not know the ends of all steps"
    assert not (run_dir / run_files.ACCOUNTING_FILE).exists()
    asked(run_dir)  # long ago: what is missing no longer comes
    assert (run_dir / run_files.ACCOUNTING_FILE).exists()


def test_what_cannot_be_kept_is_shown(sacct: Sacct, run_dir: Path) -> None:
    (run_dir / run_files.ACCOUNTING_FILE).mkdir()
    assert asked(run_dir).complete


@pytest.mark.parametrize("slurm", [{"exclusive": True}, {"exclusive": False, "directives": {"exclusive": True}}, {}])
def test_slurms_energy_is_shown_of_a_job_with_whole_nodes(
    sacct: Sacct, run_dir: Path, slurm: dict[str, object]
) -> None:
    sacct.say(JOB.format(submitted=100).replace("0:125|||", "0:125||3600000|"))
    run_files.write_json(run_dir / "plan.json", {"slurm": slurm})
    shown = "energy (slurm): 1.0 kWh of the whole nodes, by Slurm" in accounting_lines(asked(run_dir))
    assert shown == bool(slurm)


def test_a_local_job_has_no_accounting(sacct: Sacct, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: job\nworkers: [{command: 'true'}]\n")
    environment = clean_environment(XDG_STATE_HOME=str(tmp_path / "state"))
    gpujob("run", "job.yaml", "--quiet", cwd=tmp_path, env=environment)
    done = gpujob("report", "job", "--json", cwd=tmp_path, env=environment)
    assert (done.returncode, json.loads(done.stdout)["accounting"]) == (0, None), done.stderr
    assert sacct.calls == []
