"""The end of a job on a terminal."""

from pathlib import Path

import pytest

from exporter.contract.report import Report
from exporter.workers.exit_reason import REASONS
from launcher.watch.ending import LOG_LINES, NEXT_STEPS, STEPS_OF_CHECKS, STEPS_OF_REQUEUE, render_ending
from tests.launcher.conftest import Golden
from tests.support.builders import TERM_SENT, RunDir

pytestmark = pytest.mark.usefixtures("utc")


def ending(job: RunDir) -> str:
    """The text, with the run directory as RUN_DIR."""
    text = "\n".join(render_ending(Report.from_json(job.report())))
    return text.replace(str(job.path), "RUN_DIR") + "\n"


def failed_job(folder: Path) -> RunDir:
    """One worker of eight fails, the others are ended for it."""
    job = RunDir(folder, count=8)
    log = "".join(f"step {n}\n" for n in range(30)) + "10%\r20%\rValueError: no [b]such[/b] file\n"
    job.ended(3, end=50.0, log=log, code=3)
    for rank in (0, 1, 2, 4, 5, 6):
        job.ended(rank, **TERM_SENT)
    cause = "worker_w3 rank 3 on cn01 ended by app_error"
    return job.stop("terminated_peer", cause, rank=3, restart=0).write("report.md", "")


def test_a_failed_job_matches_its_golden_page(tmp_path: Path, golden: Golden) -> None:
    text = ending(failed_job(tmp_path))
    golden("launcher/ending-failed.txt", text)
    assert text.splitlines().count("  | step 29") == 1
    assert "  | step 20\n" not in text
    assert sum(line.startswith("  | ") for line in text.splitlines()) == LOG_LINES


def test_the_end_of_a_log_is_shown_without_its_colours_and_tabs(tmp_path: Path) -> None:
    log = "50%\r100%\r\n\x1b[1;31mRuntimeError\x1b[0m:\tshape mismatch\x1b]0;title\x07\n\x1b[0m\n"
    job = RunDir(tmp_path, count=1)
    job.ended(0, end=50.0, log=log, code=3)
    text = ending(job.write("report.md", ""))
    assert [line for line in text.splitlines() if line.startswith("  | ")] == [
        *("  | 100%", "  | RuntimeError:   shape mismatch"),
    ]


def test_long_lines_are_wrapped_between_words_and_paths_below_here_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Report.from_json(failed_job(tmp_path).report())
    monkeypatch.chdir(tmp_path)
    lines = render_ending(report, 60)
    assert "cause: worker_w3 (rank 3) on cn01: app_error at 2025-11-22" in lines
    assert "    04:00:50: exit status 3" in lines
    assert lines[-1] == f"full report: {Path(report.run_dir).relative_to(tmp_path)}/report.md"


def test_the_log_with_the_error_is_shown_even_if_another_one_is_newer(tmp_path: Path) -> None:
    job = failed_job(tmp_path).write("cn01_worker_w3.err", "bye\n")
    assert (job.path / "cn01_worker_w3.err").stat().st_mtime >= (job.path / "cn01_worker_w3.out").stat().st_mtime
    assert "last lines of RUN_DIR/cn01_worker_w3.out:\n" in ending(job)


def test_a_job_that_was_stopped_says_so_before_an_earlier_failure(tmp_path: Path) -> None:
    job = RunDir(tmp_path).ended(0, end=10.0, code=3).ended(1, **TERM_SENT).stop("cancelled", "gpujob stop by ada")
    text = ending(job)
    assert "\nits log is empty: RUN_DIR/cn01_worker_w0.out\n" in text
    assert "CANCELLED: job 4459 job, took 3m 20s\nstopped: gpujob stop by ada\ncause: worker_w0 " in text
    assert text.endswith("\nrun directory: RUN_DIR\n"), "it has no report.md"
    assert "next: " not in text, "nothing is to be fixed before the next run"


@pytest.mark.parametrize(
    ("log", "output", "step"),
    [
        ("Processed 6/10 items\n", "1\n" * 6, "run the rest, or lower `verify.complete_share` if this is enough"),
        ("Processed 10/10 items\n", "1\n" * 6, "repair the files, then `gpujob report 4459 --verify`"),
        ("Processed 10/10 items\nTotal generated tokens: 0\n", "1\n" * 10, STEPS_OF_CHECKS["tokens"]),
        ("", "1\n" * 6, "let a log or a progress file show the items, or remove `progress.total_items`"),
    ],
)
def test_the_next_step_after_an_incomplete_job_is_that_of_the_failed_check(
    log: str, output: str, step: str, tmp_path: Path
) -> None:
    job = RunDir(tmp_path, count=1, progress={"total_items": 10}).ended(0, log=log)
    text = ending(job.write("output_worker_0.jsonl", output))
    assert text.startswith("INCOMPLETE: ")
    assert f"\nnext: {step}\n" in text


@pytest.mark.parametrize(
    ("reason", "requeue", "requeued", "step"),
    [
        ("time_limit", None, False, NEXT_STEPS["time_limit"]),
        ("time_limit", {"preempted": True}, False, NEXT_STEPS["time_limit"]),
        ("time_limit", {"time_limit": True}, False, STEPS_OF_REQUEUE["time_limit"]),
        ("time_limit", {"time_limit": True}, True, "gpujob watch 4459"),
        ("preempted", {"time_limit": True}, False, NEXT_STEPS["preempted"]),
        ("preempted", {"preempted": True}, False, STEPS_OF_REQUEUE["preempted"]),
    ],
)
def test_the_next_step_is_nothing_that_the_job_file_asks_for_already(
    reason: str, requeue: dict[str, bool] | None, requeued: bool, step: str, tmp_path: Path
) -> None:
    job = RunDir(tmp_path, 1, slurm={} if requeue is None else {"requeue": requeue})
    report = Report.from_json(job.ended(0, **TERM_SENT).stop(reason, "Slurm ends it").report())
    assert f"next: {step}" in render_ending(report.replace(requeued=requeued))


def test_a_completed_job_matches_its_golden_page(tmp_path: Path, golden: Golden) -> None:
    golden("launcher/ending-completed.txt", ending(RunDir(tmp_path).ended(0).ended(1).write("report.md", "")))


def test_the_end_of_a_moved_run_directory_has_no_log_lines(tmp_path: Path) -> None:
    job = failed_job(tmp_path)
    report = Report.from_json(job.report())
    job.path.rename(job.path.with_name("elsewhere"))
    assert not any("last lines" in line for line in render_ending(report))


def test_the_next_steps_are_for_exit_reasons() -> None:
    assert set(STEPS_OF_REQUEUE) < set(NEXT_STEPS) < set(REASONS)
