"""Commands that read Slurm, with executables on PATH."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from exporter.slurm.accounting import Attempt
from exporter.slurm.commands_reader import (
    SlurmReader,
    SlurmUnansweredError,
    clean_environment,
    parse_cluster_facts,
    run_reading,
)
from exporter.slurm.queue import QueueRow
from exporter.slurm.usage import UsageRow
from tests.support.exporter import SOON_S, until
from tests.support.fake_slurm import PRINT_ROWS

ROW = (
    "7|RUNNING|None|100|110|N/A|5:00|0|n1|gpu|cpu=4,mem=600M,node=1,billing=4,gres/gpu=4|"
    "7|ada|lab|normal|1|(null)|/dev/null|job|"
)


def script(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{PRINT_ROWS}{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_each_question_is_one_command_in_a_pinned_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    script(folder, "squeue", f'echo "$*" > {folder}/asked; env >> {folder}/asked; echo "{ROW}" | rows')
    (row,) = SlurmReader("ada", None, os.environ).queue()
    assert (row.job_id, row.snapshot.started) == ("7", 110.0)
    arguments, *variables = (folder / "asked").read_text().splitlines()
    assert arguments.startswith("--local -h -a -t all -u ada -O JobArrayID:|,State:|,")
    assert {"LC_ALL=C", "SLURM_TIME_FORMAT=%s", "SLURM_BITSTR_LEN=0"} <= {*variables}
    assert not [variable for variable in variables if variable.startswith("SQUEUE_")]
    script(folder, "sacct", f'echo "$*" > {folder}/asked')
    assert SlurmReader("ada", "other", {"PATH": os.environ["PATH"]}).accounting(["7", "8"], 1234.5) == ()
    asked = (folder / "asked").read_text()
    assert asked.startswith("--clusters=other -n -P -D --noconvert -S uts1234 -j 7,8 -o JobID,User,")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("echo 'slurm_load_jobs error: Socket timed out' >&2; exit 1", "exited with 1: slurm_load_jobs error: Socket"),
        ("echo 'Invalid user: nobody' >&2", "exited with 0: Invalid user"),  # no answer, though it exits with 0
        ("printf '7|RUNN'", "gave an answer that cannot be used: its last line is not complete"),
    ],
)
def test_a_failed_or_damaged_answer_is_no_answer(folder: Path, text: str, problem: str) -> None:
    script(folder, "squeue", text)
    with pytest.raises(SlurmUnansweredError, match=f"^squeue {problem}"):
        SlurmReader("ada", None, os.environ).queue()


def test_a_command_that_hangs_is_killed_with_its_children(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    communicate = subprocess.Popen.communicate

    def communicate_with_children(process: "subprocess.Popen[str]", *, timeout: float) -> tuple[str, str]:
        until(lambda: (folder / "child").exists() and (folder / "child").read_text(), "the child")
        return communicate(process, timeout=timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate_with_children)
    script(folder, "sacct", f"sleep 600 & echo $! > {folder}/child; wait")
    start = time.monotonic()
    with pytest.raises(SlurmUnansweredError, match=r"^sacct did not answer in 2 s$"):
        run_reading(["sacct"], clean_environment(os.environ), 1.99999)  # what is left of some budget
    assert time.monotonic() - start < SOON_S
    child = Path(f"/proc/{(folder / 'child').read_text().strip()}/stat")

    def has_ended() -> bool:
        try:
            return child.read_text().rpartition(")")[2].split()[0] in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return True

    until(has_ended, "the end of the child")


def test_only_an_accounting_that_is_absent_is_a_lasting_problem(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    reader = SlurmReader("ada", None, os.environ)
    with pytest.raises(SlurmUnansweredError, match=r"^sacct is not on PATH") as absent:
        reader.accounting(["7"], 0.0)
    script(folder, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    with pytest.raises(SlurmUnansweredError) as disabled:
        reader.accounting(["7"], 0.0)
    script(folder, "sacct", "echo 'Connection refused' >&2; exit 1")
    with pytest.raises(SlurmUnansweredError) as refused:
        reader.accounting(["7"], 0.0)
    assert [found.value.is_lasting for found in (absent, disabled, refused)] == [True, True, False]


def test_all_users_of_some_partitions_are_one_question_too(folder: Path) -> None:
    script(folder, "squeue", f'echo "$*" > {folder}/asked; echo "{ROW}" | rows')
    attempt = "7|eve|COMPLETED|0:0|1|2|3|1|5|1|0|cpu=1||job"
    script(folder, "sacct", f'echo "$*" >> {folder}/asked; echo "{attempt}" | rows')
    everybody = SlurmReader(None, None, os.environ, ("gpu", "long"))
    assert [row.user for row in everybody.queue()] == ["ada"]
    assert [attempt.user for attempt in everybody.accounting(["7"], 0.0)] == ["eve"]
    assert SlurmReader("ada", None, os.environ).accounting(["7"], 0.0) == ()
    assert everybody.ended_since(100.0) == ()
    queue, accounting, own, ended = (folder / "asked").read_text().splitlines()
    assert queue.startswith("--local -h -a -t all -p gpu,long -O JobArrayID")
    assert " -a -j 7 " in accounting
    assert " -X -r gpu,long -S uts100 -a " in ended
    assert " -a " not in own


QUESTIONS: Mapping[str, Callable[[SlurmReader], Sequence[QueueRow | Attempt | UsageRow]]] = {
    ROW: SlurmReader.queue,
    "7|ada|FAILED|0:0|1|2|3|1|5|1|0|cpu=1||job": lambda slurm: slurm.accounting(["7"], 0.0),
    "gpu|lab|normal|1|n1|7|ada|FAILED|0:0|1|2|3|1|5|1|0|cpu=1||job": lambda slurm: slurm.ended_since(0.0),
    "7|ada|lab|gpu|FAILED|9|9|gres/gpu=9|job": lambda slurm: slurm.usage_since(0.0),
}


@pytest.mark.parametrize("row", QUESTIONS)
def test_a_name_with_lines_makes_no_jobs_of_other_users(folder: Path, row: str) -> None:
    """Slurm prints names as they are."""
    end = "|" if row.endswith("|") else ""
    forged = row.replace("7|ada", "8|bob").replace("|7|", "|8|").removesuffix("|").replace("|", "^")
    text = f"printf '%s\\n' '{row.removesuffix('|')}^' '{forged}{end}' '{row}' | rows | tr ^ '|'"
    for command in ("squeue", "sacct"):
        script(folder, command, text)
    reader = SlurmReader(None, None, os.environ)
    assert [found.user for found in QUESTIONS[row](reader)] == ["ada", "ada"]
    assert not reader.unparsed.total()


def test_what_the_controller_says_of_itself(folder: Path) -> None:
    script(folder, "scontrol", "printf 'ClusterName = c1\\nPrivateData = accounts,jobs\\nMinJobAge = 2 sec\\n'")
    assert SlurmReader(None, None, os.environ).cluster_facts() == ("c1", True, 2.0, False)
    assert parse_cluster_facts("ClusterName = c1\nPrivateData             = none\n") == ("c1", False, None, False)
    assert parse_cluster_facts("") == (None, True, None, False)
    hidden = {what: parse_cluster_facts(f"PrivateData={what}\n")[1::2] for what in ("users,usage", "Jobs", "nodes")}
    assert hidden == {"users,usage": (False, True), "Jobs": (True, False), "nodes": (False, False)}
