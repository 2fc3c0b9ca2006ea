"""`gpujob fleet`, `usage` and `metrics` themselves, with fake Slurm commands."""

import json
import os
import pwd
import time
from pathlib import Path

import pytest

from launcher.cli.cluster.usage import GROUP_NAMES
from launcher.fleet.usage_view import GROUPS
from tests.launcher.fleet.conftest import Gpujob
from tests.launcher.fleet.run_dirs import run_directory
from tests.support.fake_slurm import FakeSlurm

JOB = "7|RUNNING|None|100|110|N/A|5:00|0|n1|gpu|cpu=4,mem=1G,gres/gpu=4|7|ada|lab|normal|1|(null)|{log}|job|\n"
NODES = """n1|mixed|gpu*|gpu:4|gpu:4|4/4/0/8|1000|none|
n2|idle|gpu*|gpu:4|gpu:0|0/8/0/8|1000|none|
c1|idle|cpu|(null)|gpu:0|0/8/0/8|1000|none|
"""
GONE = "Unable to contact slurm controller"


def test_fleet_asks_once_and_knows_the_health_that_sidecars_reported(
    slurm: FakeSlurm, gpujob: Gpujob, tmp_path: Path
) -> None:
    run_dir = run_directory(tmp_path / "logs" / "7_job", "failure")
    slurm.say("squeue", "out", JOB.format(log=run_dir / "log.out"))
    slurm.say("sinfo", "out", NODES)
    status, out, err = gpujob("fleet")
    assert (status, err) == (0, "")
    assert [line.split() for line in out.splitlines()[:4]] == [
        ["FLEET", "INSTANCE", "BACKEND", "RESOURCES", "STATUS", "JOBS"],
        ["cpu", "c1", "slurm", "8", "CPUs,", "1000.0", "MiB", "idle", "0"],
        ["gpu", "n1", "slurm", "GPU:4,", "8", "CPUs,", "1000.0", "MiB", "busy", "4/4", "(failure)", "1"],
        ["n2", "slurm", "GPU:4,", "8", "CPUs,", "1000.0", "MiB", "idle", "0"],
    ]
    drain = "  scontrol update NodeName=n1 State=DRAIN Reason='gpujob: GPU 1: uncorrectable ECC error'\n"
    assert drain in gpujob("fleet", "-v", "--partition", "gpu")[1]
    body = json.loads(gpujob("fleet", "--json", "--partition", "gpu")[1])
    assert [node["jobs"] for node in body["instances"]] == [["7"], []]
    both = json.loads(gpujob("fleet", "--json", "--partition", "gpu, cpu,")[1])
    assert {node["fleet"] for node in both["instances"]} == {"cpu", "gpu"}
    assert [call["command"] for call in slurm.calls()] == ["sinfo", "squeue"]


HISTORY = "gpu|lab|normal|1|n1|{id}|ada|{state}|0:0|{at}|{at}|{end}|20|5|4|00:08|cpu=4,mem=1G,gres/gpu=2||train\n"


def test_index_is_rebuilt_from_accounting_and_run_directories(
    slurm: FakeSlurm, gpujob: Gpujob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no hub has run yet" in gpujob("index")[1]
    now = int(time.time()) - 1000
    for job_id in ("7", "8"):
        run_dir = tmp_path / "logs" / f"{job_id}_train"
        run_dir.mkdir(parents=True)
        submission = {"job_id": job_id, "job_name": "train", "submitted": now - 1.0}
        (run_dir / f"{job_id}.json").write_text(json.dumps(submission))
        report = {"job_id": job_id, "state": "INCOMPLETE", "exit_status": 8, "start": now, "end": now + 20}
        (run_dir / "report.json").write_text(json.dumps(report))
    (tmp_path / "logs" / "other").mkdir()
    user = pwd.getpwuid(os.geteuid()).pw_name
    slurm.say("sacct", "out", HISTORY.format(id=7, state="COMPLETED", at=now, end=now + 20).replace("ada", user))
    monkeypatch.setenv("USER", user)
    monkeypatch.setenv("LOGNAME", user)
    status, out, err = gpujob("index", "--rebuild", "--since", "40d", "logs")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "added 2 jobs: 1 in accounting, 1 only in run directories"
    assert lines[2].startswith("2 jobs, 2 of them launched by gpujob, since ")
    assert lines[3:] == ["0 changes of states", "no hub runs"]
    windows = [call["argv"][call["argv"].index("-S") + 1] for call in slurm.calls("sacct")]
    assert len(windows) == 2  # of 30 days each
    assert gpujob("index", "--rebuild", "logs")[1].startswith("added 0 jobs")
    body = json.loads(gpujob("index", "--json")[1])
    assert (body["index"]["jobs"], body["index"]["hub"], body["rebuilt"]) == (2, None, None)


def test_fleet_without_an_answer(slurm: FakeSlurm, gpujob: Gpujob) -> None:
    slurm.say("sinfo", "out", NODES)
    slurm.say("squeue", "err", GONE)
    slurm.say("squeue", "status", 1)
    status, out, err = gpujob("fleet")
    assert (status, out.splitlines()[1].split()[-1]) == (0, "-")
    assert err == f"gpujob: warning: squeue exited with 1: {GONE}; the jobs of the nodes are unknown\n"


def test_nothing_known_of_the_fleet_is_status_9(slurm: FakeSlurm, gpujob: Gpujob) -> None:
    slurm.say("sinfo", "err", GONE)
    slurm.say("sinfo", "status", 1)
    assert gpujob("fleet") == (9, "", f"gpujob: sinfo exited with 1: {GONE}\n")


def test_usage_asks_accounting_for_attempts_within_the_time(slurm: FakeSlurm, gpujob: Gpujob, tmp_path: Path) -> None:
    slurm.say("sacct", "out", "7|ada|nlp|gpu|COMPLETED|7200|8|cpu=8,gres/gpu:h100=2,gres/gpu=2|train\n")
    (tmp_path / "gpujob.yaml").write_text("prices: {currency: EUR, gpu_hour: {h100: 2.40}}\n")
    status, out, err = gpujob("usage")
    assert (status, err) == (0, "")
    assert [line.split() for line in out.splitlines()] == [
        ["USER", "JOBS", "GPU_H", "CPU_H", "COST"],
        ["ada", "1", "4.00", "16.00", "EUR", "9.60"],
        [],
        ["from", "accounting"],
    ]
    (call,) = slurm.calls("sacct")
    begin = float(call["argv"][call["argv"].index("-S") + 1].removeprefix("uts"))
    assert abs(time.time() - 7 * 86400 - begin) < 60
    words = ["-n", "-P", "-D", "--noconvert", "-X", "-T", "-S"]
    assert (call["argv"][:7], call["argv"][8:10]) == (words, ["-u", "ada"])
    assert gpujob("usage", "--csv", "--by", "account", "--all-users")[1].splitlines()[1] == "nlp,1,1,4.0,16.0,9.6,EUR"
    assert "-a" in slurm.calls("sacct")[1]["argv"]
    body = json.loads(gpujob("usage", "--json", "--since", "1h")[1])
    assert body["until"] - body["since"] == pytest.approx(3600, abs=1)
    assert body["groups"][0]["gpu_hours_by_type"] == {"h100": 4.0}


def test_usage_without_accounting(slurm: FakeSlurm, gpujob: Gpujob) -> None:
    assert GROUP_NAMES == GROUPS
    assert gpujob("usage", "--since", "2100-01-01")[0] == 2
    slurm.say("sacct", "err", "Connection refused")
    slurm.say("sacct", "status", 1)
    assert gpujob("usage") == (9, "", "gpujob: sacct exited with 1: Connection refused\n")
    slurm.say("sacct", "err", "Slurm accounting storage is disabled")
    assert gpujob("usage")[0] == 2


def test_metrics_of_a_job_of_gpujob_are_those_of_its_sidecars(slurm: FakeSlurm, gpujob: Gpujob, tmp_path: Path) -> None:
    slurm.say("squeue", "out", "7|RUNNING\n")
    run_dir = run_directory(tmp_path / "logs" / "7_job")
    status, out, err = gpujob("metrics", str(run_dir))
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[1].split() == [
        "embed",
        "running",
        "350%",
        "6.00GiB/8.00GiB",
        "gpu=0",
        "mem=20.00GiB/80.00GiB",
        "util=0%",
    ]
    assert lines[2].split() == ["gpu=1", "mem=20.00GiB/80.00GiB", "util=50%"]
    assert lines[4].startswith("from the sidecars of the job, ")
    assert slurm.calls("sstat") == []
    (run_dir / "status" / "n1.json").unlink()
    status, _, err = gpujob("metrics", str(run_dir))
    assert (status, err) == (2, f"gpujob: {run_dir}: neither a sidecar nor a report has left values there\n")


def test_metrics_of_other_jobs_are_those_of_slurm(slurm: FakeSlurm, gpujob: Gpujob) -> None:
    slurm.say("squeue", "out", JOB.format(log="/dev/null"))
    slurm.say("sstat", "out", "7.0|00:00:01|4|cpu=00:00:07,mem=268435456\n")
    out = gpujob("metrics", "7")[1]
    assert out.splitlines()[1].split()[3:] == ["256MiB/1.00GiB", "4", "allocated,", "use", "unknown"]
    assert "from sstat" in out
    slurm.say("squeue", "out", JOB.format(log="/dev/null").replace("7|", "7_3|", 1))
    gpujob("metrics", "7")
    assert "7_3" in slurm.calls("sstat")[-1]["argv"]  # one task runs: its array has no steps
    slurm.say("squeue", "out", "")
    slurm.say("sacct", "out", "7|ada|FAILED|1:0|50|60|160|100|5|4|00:01:40|cpu=4,gres/gpu=2,mem=1000M||early\n")
    out = gpujob("metrics", "7")[1]
    assert out.splitlines()[1].split()[:2] == ["early", "failed"]
    assert "from accounting" in out
    slurm.say("sacct", "out", "")
    status, _, err = gpujob("metrics", "7")
    assert (status, err.startswith("gpujob: 7: Slurm knows no such job of ada that has started")) == (2, True)
