"""The search for the workers of an attached job, on fixture files and on real processes."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.attach.workers_reader import (
    CLOCK_SLACK_S,
    WorkerSearch,
    WorkerSearchCriteria,
    WorkerSearchResult,
    find_by_name,
    find_by_slurm_step,
    parse_pids,
    read_boot_time,
    read_pid_file,
    read_processes,
)
from tests.support.exporter import until

Start = Callable[..., "subprocess.Popen[str]"]
OWN_PID = 9000
BOOT = 1_700_000_000.0


class Machine:
    """A ``/proc`` of fixture files: a shell (800) that started this program (9000), and added processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.proc = str(root)
        self.add(1, "init", parent=0)
        self.add(800, "bash")
        self.add(OWN_PID, "python -I -m exporter sidecar --job-name embed", parent=800, ticks=801)

    def add(self, pid: int, command: str, *, parent: int = 1, ticks: int | None = None, **environ: str) -> None:
        """Add a process. By default a higher pid started later."""
        folder = self.root / str(pid)
        folder.mkdir()
        ticks = pid if ticks is None else ticks
        after = f"S {parent} 1 1 0 -1 0 0 0 0 0 1 2 0 0 20 0 1 0 {ticks} 1000 50 0 0 0"
        (folder / "stat").write_text(f"{pid} (a) b ({after.replace('(', '')}) {after}\n", encoding="ascii")
        argv = command.split(" ") if command else []
        (folder / "cmdline").write_bytes(b"".join(os.fsencode(word) + b"\0" for word in argv))
        (folder / "environ").write_bytes(b"".join(f"{k}={v}\0".encode() for k, v in environ.items()))

    def criteria(self, workers: int = 2, name: str = "embed", **more: Any) -> WorkerSearchCriteria:
        gpus = tuple((index,) for index in range(workers))
        return WorkerSearchCriteria(name, gpus, self.root / "worker_pids.txt", **more)

    def by_name(self, workers: int = 2, name: str = "embed", **environ: str) -> list[tuple[int, int | None]]:
        """(pid, number) of the processes that are found by name."""
        candidates = find_by_name(
            read_processes(self.proc), self.criteria(workers, name), environ, {OWN_PID, 800, 1}, BOOT, self.proc
        )
        assert {candidate.found_by for candidate in candidates} <= {"name"}
        return [(candidate.pid, candidate.number) for candidate in candidates]

    def by_step(self, workers: int = 2, job: str = "77", **environ: str) -> list[tuple[int, int | None]]:
        criteria = self.criteria(workers, slurm_job_id=job)
        candidates = find_by_slurm_step(read_processes(self.proc), criteria, environ, {OWN_PID}, BOOT, self.proc)
        return [(candidate.pid, candidate.number) for candidate in candidates]

    def search(self, workers: int = 2, *, known: tuple[int, ...] = (), **more: Any) -> WorkerSearchResult:
        return WorkerSearch(self.criteria(workers, **more), {}, self.proc, OWN_PID).find(known)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# -- pids -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "pids"),
    [
        ("101 102 103\n", [101, 102, 103]),
        ("101\n102\n", [101, 102]),
        ("  101,102,\t103  \n\n", [101, 102, 103]),
        ("", []),
        ("\n", []),
    ],
)
def test_pids_are_separated_by_blanks_newlines_or_commas(text: str, pids: list[int]) -> None:
    assert parse_pids(text, is_complete=True) == parse_pids(text, is_complete=False) == pids


def test_an_unterminated_last_pid_counts_only_if_the_file_is_complete() -> None:
    assert parse_pids("101 102 10", is_complete=False) == [101, 102]
    assert parse_pids("101 102 10", is_complete=True) == [101, 102, 10]


@pytest.mark.parametrize("text", ["pid", "-5", "0", "12.5", "4194305", "1" * 5000, "١٢", "\0"])
def test_an_invalid_pid_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a process id"):
        parse_pids(f"101 {text} \n", is_complete=True)


@given(st.lists(st.integers(1, 1 << 22)), st.sampled_from([" ", "\n", ", ", "\r\n"]))
def test_written_pids_are_read(pids: list[int], separator: str) -> None:
    assert parse_pids(separator.join(map(str, pids)) + "\n", is_complete=False) == pids


def pid_file(machine: Machine, text: str, *, mtime: float = BOOT + 60) -> WorkerSearchResult:
    path = machine.root / "worker_pids.txt"
    path.write_text(text, encoding="ascii")
    os.utime(path, (mtime, mtime))
    return read_pid_file(machine.criteria(4), {OWN_PID, 800, 1}, BOOT, machine.proc)


def test_the_position_in_the_pid_file_is_the_number_of_the_worker(machine: Machine) -> None:
    machine.add(300, "python worker.py")
    machine.add(200, "python worker.py")
    result = pid_file(machine, "300 200\n")
    assert [(s.pid, s.number, s.found_by, s.start_ticks) for s in result.candidates] == [
        (300, 0, "pid_file", 300),
        (200, 1, "pid_file", 200),
    ]
    assert result.candidates[0].start == pytest.approx(BOOT + 300 / os.sysconf("SC_CLK_TCK"))
    assert (result.gone, result.problems) == ({}, ())


def test_the_clock_of_the_file_server_may_be_minutes_behind(machine: Machine) -> None:
    machine.add(300, "python worker.py", ticks=int((60 + 290) * os.sysconf("SC_CLK_TCK")))
    assert [found.pid for found in pid_file(machine, "300\n").candidates] == [300]


def test_stale_pids_are_reported_with_their_reasons(machine: Machine) -> None:
    machine.add(300, "python worker.py")
    later = int((60 + CLOCK_SLACK_S + 1) * os.sysconf("SC_CLK_TCK"))
    machine.add(301, "python other.py", ticks=later)
    result = pid_file(machine, "302 301 300 300 800 9000\n")
    assert [(s.pid, s.number) for s in result.candidates] == [(300, 2)]
    assert result.gone == {
        0: "pid 302 from worker_pids.txt is gone",
        1: "pid 301 from worker_pids.txt seems to have ended: the process with that pid is newer than the file",
        3: "pid 300 is in worker_pids.txt twice",
        4: "pid 800 from worker_pids.txt is this program or one of its ancestors",
        5: "pid 9000 from worker_pids.txt is this program or one of its ancestors",
    }


def test_an_invalid_pid_file_is_reported_and_not_used(machine: Machine) -> None:
    machine.add(300, "python worker.py")
    result = pid_file(machine, "worker 0: 300\n")
    assert result.candidates == ()
    assert result.problems == (f"{machine.root / 'worker_pids.txt'}: 'worker' is not a process id",)


def test_a_pid_file_that_is_still_being_written_is_read_again(machine: Machine) -> None:
    machine.add(30, "python a.py")
    machine.add(300, "python b.py")
    assert [s.pid for s in pid_file(machine, "300 30", mtime=time.time() + 60).candidates] == [300]
    assert [s.pid for s in pid_file(machine, "300 30").candidates] == [300, 30]


def test_a_missing_pid_file_is_a_problem_only_if_it_was_given(machine: Machine) -> None:
    assert machine.search() == WorkerSearchResult()
    assert machine.search(must_exist=True).problems == (f"{machine.root / 'worker_pids.txt'}: does not exist",)


# -- Slurm ----------------------------------------------------------------------------------------------


def step(step: object, task: object, job: object = 77) -> dict[str, Any]:
    return {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "SLURM_PROCID": str(task)}


def test_the_topmost_process_of_each_task_is_a_worker(machine: Machine) -> None:
    machine.add(101, "bash worker.sh", **step(0, 1))
    machine.add(102, "python worker.py", parent=101, **step(0, 1))
    machine.add(100, "python worker.py", **step(0, 0))
    machine.add(110, "python orphan.py", **step(0, 0))
    machine.add(120, "python other.py", **step(0, 0, job=78))
    assert machine.by_step() == [(100, 0), (101, 1)]


def test_special_steps_and_the_step_of_the_sidecar_have_no_workers(machine: Machine) -> None:
    machine.add(100, "bash slurm_script", SLURM_JOB_ID="77", SLURM_PROCID="0")
    machine.add(101, "sleep 9", **step("batch", 0))
    machine.add(102, "bash", **step(0xFFFFFFFA, 0))
    machine.add(103, "python worker.py", **step(1, 0))
    machine.add(104, "gpujob-exporter", **step(2, 0))
    assert machine.by_step(SLURM_JOB_ID="77", SLURM_STEP_ID="2") == [(103, 0)]
    assert machine.by_step(SLURM_JOB_ID="76", SLURM_STEP_ID="2") == [(103, None), (104, None)]


def test_tasks_with_other_numbers_are_listed_in_order(machine: Machine) -> None:
    for pid, task in ((101, 5), (102, 4), (103, 7)):
        machine.add(pid, "python worker.py", **step(0, task))
    assert machine.by_step(3) == [(102, None), (101, None), (103, None)]


def test_steps_are_searched_only_for_a_known_job(machine: Machine) -> None:
    machine.add(100, "python worker.py", **step(0, 0))
    assert machine.search().candidates == ()
    assert [s.found_by for s in machine.search(slurm_job_id="77").candidates] == ["slurm_step"]


# -- names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "is_worker"),
    [
        ("python worker.py --name embed", True),
        ("python /home/ada/embed/worker.py", True),
        ("python worker.py --name=embed", True),
        ("embed", True),
        ("/opt/bin/embed.bin --x", True),
        ("python worker.py --name embed-v2", False),
        ("python worker.py --name embedding", False),
        ("python worker.py --name my_embed", False),
        ("python worker.py --no-embed", False),
        ("", False),
        ("vim embed.py", False),
        ("tail -f embed.log", False),
        ("grep embed x", False),
        ("ssh gn01 python worker.py embed", False),
        ("sbatch embed.sh", False),
        ("srun --name embed python worker.py", False),
        ("screen -S embed", False),
        ("tmux new -s embed", False),
        ("/usr/bin/python3.11 -I -m exporter sidecar --job-name embed", False),
        ("python -I -m launcher watch embed", False),
        ("python /usr/bin/tensorboard --logdir embed", False),
        ("-bash embed", False),
        ("bash launch.sh --job-name embed", False),
        ("timeout 60 embed", False),
        ("python -X dev -u worker.py embed", True),
    ],
)
def test_a_worker_has_the_job_name_as_a_word_of_its_own_command(
    machine: Machine, command: str, is_worker: bool
) -> None:
    machine.add(100, command)
    assert machine.by_name() == ([(100, None)] if is_worker else [])


@pytest.mark.parametrize("name", ["a) b (", "e.m+b*d", "x[1]", "Übung"])
def test_a_job_name_is_not_a_pattern(machine: Machine, name: str) -> None:
    machine.add(100, "python worker.py exmbbd x1")
    folder = machine.root / "100"
    assert machine.by_name(name=name) == []
    (folder / "cmdline").write_bytes(b"python\0worker.py\0" + name.encode() + b"\0")
    assert machine.by_name(name=name) == [(100, None)]


def test_this_program_and_its_parents_are_not_workers(machine: Machine) -> None:
    (machine.root / "800" / "cmdline").write_bytes(b"python\0launch.py\0--name\0embed\0")
    machine.add(100, "python worker.py embed", parent=800)
    assert [candidate.pid for candidate in machine.search().candidates] == [100]


def test_descendants_of_a_worker_are_not_workers(machine: Machine) -> None:
    machine.add(100, "python worker.py embed", RANK="1")
    machine.add(101, "python worker.py embed", parent=100, RANK="1")
    machine.add(102, "python worker.py embed", parent=101, RANK="1")
    machine.add(103, "python worker.py embed", RANK="0")
    assert machine.by_name() == [(100, 1), (103, 0)]


@pytest.mark.parametrize("starter", ["bash launch.sh embed", "python launch.py embed", "mpirun -n 2 embed"])
def test_the_parent_of_numbered_workers_is_not_a_worker(machine: Machine, starter: str) -> None:
    machine.add(100, starter)
    machine.add(101, "python worker.py --worker-id 1", parent=100)
    machine.add(102, "python worker.py --worker-id 0", parent=100)
    machine.add(103, "python helper.py", parent=100)
    machine.add(104, "tail -f worker_0.log", parent=100, RANK="1")
    assert machine.by_name() == [(101, 1), (102, 0)]


def test_an_unnamed_unnumbered_child_of_a_script_is_not_a_worker(machine: Machine) -> None:
    machine.add(100, "bash launch.sh --job-name embed")
    machine.add(101, "python prepare.py", parent=100)
    assert machine.by_name() == []


def test_a_shell_with_a_number_is_the_worker(machine: Machine) -> None:
    for pid, number in ((100, 0), (110, 1)):
        machine.add(pid, f"bash worker.sh embed --rank {number}")
        machine.add(pid + 1, "python worker.py", parent=pid)
    assert machine.by_name() == [(100, 0), (110, 1)]


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        (("--worker-id 1", "--worker-id 0"), ({}, {})),
        (("--rank=1", "--rank=0"), ({}, {})),
        (("--shard 1/2", "--shard 0/2"), ({}, {})),
        (("--local_rank 1", "--local-rank=0"), ({}, {})),
        (("", ""), ({"RANK": "1"}, {"RANK": "0"})),
        (("", ""), ({"LOCAL_RANK": "1"}, {"LOCAL_RANK": "0"})),
        (("", ""), ({"GPUJOB_RANK": "1"}, {"GPUJOB_RANK": "0"})),
        (("", ""), ({"OMPI_COMM_WORLD_RANK": "1"}, {"OMPI_COMM_WORLD_RANK": "0"})),
        (("", ""), (step(0, 1), step(0, 0))),
        (("", ""), ({"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "0"})),
        (("--rank 1", "--rank 0"), ({"RANK": "0"}, {"RANK": "1"})),
        (("", ""), ({"RANK": "5", "LOCAL_RANK": "1"}, {"RANK": "4", "LOCAL_RANK": "0"})),
    ],
)
def test_numbers_come_from_arguments_and_variables(
    machine: Machine, flags: tuple[str, str], variables: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    machine.add(100, f"python worker.py embed {flags[0]}".strip(), **variables[0])
    machine.add(101, f"python worker.py embed {flags[1]}".strip(), **variables[1])
    assert machine.by_name() == [(100, 1), (101, 0)]


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "0"},  # the same for all workers
        {"SLURM_PROCID": "0"},  # from a batch script
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "GPU-4f2"},
        {"RANK": "x"},
        {},
    ],
)
def test_workers_without_distinct_numbers_are_ordered_by_their_start(
    machine: Machine, variables: dict[str, Any]
) -> None:
    machine.add(101, "python worker.py embed", ticks=5, **variables)
    machine.add(100, "python worker.py embed", ticks=7, **variables)
    assert machine.by_name() == [(101, None), (100, None)]


def test_a_task_number_counts_only_within_a_step(machine: Machine) -> None:
    machine.add(100, "python worker.py embed", SLURM_PROCID="1")
    assert machine.by_name() == [(100, None)]
    machine.add(101, "python worker.py embed", **step(0, 1))
    assert machine.by_name() == [(100, None), (101, 1)]


def test_an_inherited_variable_gives_no_number(machine: Machine) -> None:
    machine.add(100, "python worker.py embed", RANK="1")
    assert machine.by_name() == [(100, 1)]
    assert machine.by_name(RANK="1") == [(100, None)]


# -- combined search -------------------------------------------------------------------------------------


def test_the_pid_file_takes_precedence_and_relatives_are_not_workers(machine: Machine) -> None:
    machine.add(100, "bash worker.sh embed --rank 0")
    machine.add(101, "python worker.py embed --rank 0", parent=100)
    machine.add(102, "python worker.py embed --rank 1")
    machine.add(103, "python worker.py embed --rank 1", parent=102)
    assert [s.pid for s in machine.search(known=(101,)).candidates] == [102]
    assert [s.pid for s in machine.search(known=(101, 103)).candidates] == []
    machine.add(104, "bash run.sh", **step(0, 1))
    machine.add(105, "python worker.py embed --rank 1", parent=104, **step(0, 1))
    path = machine.root / "worker_pids.txt"
    path.write_text("101\n", encoding="ascii")
    found = machine.search(slurm_job_id="77").candidates
    assert [(s.pid, s.number, s.found_by) for s in found] == [(101, 0, "pid_file"), (104, 1, "slurm_step")]
    path.write_text("101 104\n", encoding="ascii")
    assert [s.pid for s in machine.search(known=(102,)).candidates] == [101, 104]


def test_names_are_not_searched_if_the_pid_file_names_a_worker(machine: Machine) -> None:
    machine.add(100, "python worker.py --rank 0")
    machine.add(101, "python other.py embed --worker-id 1")
    path = machine.root / "worker_pids.txt"
    path.write_text("50 51\n", encoding="ascii")
    assert [s.pid for s in machine.search().candidates] == [101], "a file without a running process is ignored"
    path.write_text("100 51\n", encoding="ascii")
    assert [s.pid for s in machine.search().candidates] == [100]
    assert [s.pid for s in machine.search(known=(100,)).candidates] == []
    path.unlink()
    search = WorkerSearch(machine.criteria(), {}, machine.proc, OWN_PID)
    assert search.find((100,), by_name=False).candidates == ()
    assert [s.pid for s in search.find((100,)).candidates] == [101]


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("/usr/bin/python3 -u /home/ada/worker.py embed --token x", "python3 worker.py"),
        ("python -m train embed", "python train"),
        ("/opt/embed --token x", "embed"),
        ("my\x1btool sub embed", "my?tool sub"),
    ],
)
def test_a_process_is_shown_by_the_first_words_of_its_command(machine: Machine, command: str, shown: str) -> None:
    machine.add(100, command)
    assert [s.command for s in machine.search().candidates] == [shown]


def test_a_candidate_has_a_directory_and_a_session(machine: Machine) -> None:
    machine.add(100, "python worker.py embed")
    machine.add(101, "python worker.py embed", parent=800)
    (machine.root / "100" / "cwd").symlink_to("/scratch/a")
    for pid, session in ((800, 700), (101, 101)):
        path = machine.root / str(pid) / "stat"
        head, _, rest = path.read_text("ascii").rpartition(") ")
        fields = rest.split(" ")
        path.write_text(f"{head}) {' '.join([*fields[:3], str(session), *fields[4:]])}", encoding="ascii")
    first, second = machine.search().candidates
    assert (first.directory, first.session) == ("/scratch/a", None)
    assert (second.directory, second.session) == (None, 700)
    assert first.is_related("/scratch/a", 5)
    assert second.is_related("/scratch/a", 700)
    assert not first.is_related(None, None)
    assert not second.is_related(None, 5)


def test_vanished_processes_and_other_files_are_skipped(machine: Machine) -> None:
    machine.add(100, "python worker.py embed")
    machine.add(101, "python worker.py embed")
    (machine.root / "101" / "stat").write_text("", encoding="ascii")
    machine.add(102, "python worker.py embed")
    (machine.root / "102" / "stat").unlink()
    (machine.root / "self").mkdir()
    (machine.root / "103").mkdir()
    assert machine.by_name() == [(100, None)]


def test_real_processes_are_found_by_their_name(start: Start, tmp_path: Path) -> None:
    """Read ``/proc`` of this machine, with a shell around the workers."""
    name = f"job{os.getpid()}x{time.monotonic_ns()}"
    program = "import os, time; os.write(1, bytes((49, 10))); time.sleep(600)"
    python = f"{shlex.quote(sys.executable)} -c '{program}'"
    script = f"{python} --name {name} --worker-id 1 & {python} {name} & wait"
    shell = start("bash", "-c", script, name)
    assert shell.stdout is not None
    assert [shell.stdout.readline() for _ in range(2)] == ["1\n", "1\n"]
    search = WorkerSearch(WorkerSearchCriteria(name, ((0,), (1,)), tmp_path / "none"), os.environ)
    first, second = until(lambda: len(found := search.find().candidates) == 2 and found, "both workers")
    assert {first.number, second.number} == {1, None}
    assert {first.found_by, second.found_by} == {"name"}
    assert all(abs(time.time() - candidate.start) < 60 for candidate in (first, second))
    assert shell.pid not in (first.pid, second.pid)


def test_the_boot_time_is_read_from_the_kernel() -> None:
    line = next(line for line in Path("/proc/stat").read_text("ascii").splitlines() if line.startswith("btime"))
    assert read_boot_time() == pytest.approx(float(line.split()[1]), abs=2)
