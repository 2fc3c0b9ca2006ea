"""Which jobs a tracking run follows."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from exporter.slurm.accounting import Attempt
from exporter.slurm.commands_reader import SlurmReader, SlurmUnansweredError
from exporter.slurm.queue import AttemptSnapshot, QueueRow
from launcher.errors import LauncherError
from launcher.registry.entries import register_job
from launcher.track.selection import Selection, read_new, read_selected, select, selected_jobs

ROWS = (
    QueueRow("4459_[0-1]", AttemptSnapshot("PENDING", 100.0), "arr", "/logs/arr.log"),
    QueueRow("4459_2", AttemptSnapshot("RUNNING", 100.0, 110.0), "arr", None),
    QueueRow("44", AttemptSnapshot("COMPLETED", 100.0, 110.0, 120.0), "eval", None),
    QueueRow("45", AttemptSnapshot("PENDING", 100.0, restarts=2), "eval", None),
)
OLD = (Attempt("46", "ada", "old", AttemptSnapshot("COMPLETED", 50.0), "0:0", 1.0, 1, None),)


def ids(selection: Selection, attempts: tuple[Attempt, ...] = ()) -> set[str]:
    return set(selected_jobs(selection, "ada", "", ROWS, attempts))


def test_ids_arrays_names_and_everything_are_found() -> None:
    assert ids(Selection(("4459",))) == {"4459_0", "4459_1", "4459_2"}
    assert ids(Selection(("4459_1", "44"))) == {"4459_1", "44"}
    assert ids(Selection(names=("eval",))) == {"44", "45"}
    assert ids(Selection()) == {"4459_0", "4459_1", "4459_2", "45"}
    assert ids(Selection(("46",)), OLD) == {"46"}  # it has left the queue


def test_a_run_that_goes_on_gets_the_jobs_that_it_could_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = SlurmReader("ada", None, {})

    def more(selection: Selection, *known: str) -> set[str]:
        return set(read_new(slurm, selection, "", ROWS, known))

    assert more(Selection(), "4459_0", "1") == {"4459_1", "4459_2", "45"}
    assert more(Selection(names=("eval",)), "44") == {"45"}
    assert more(Selection(("4459", "45")), "4459_2", "45") == set()
    assert more(Selection(names=("gone",)), "1") == set(), "its jobs of then have left the queue"
    assert more(Selection(), "4459_0", "4459_1", "4459_2", "45") == set()
    assert more(Selection(("45",), ("eval",)), "44") == {"45"}
    monkeypatch.setattr(SlurmReader, "accounting", lambda *_: ())
    assert more(Selection(("45", "99")), "44") == {"45"}, "the known ones are followed although one is unknown to Slurm"


def test_every_job_begins_as_pending_with_a_name_of_its_own() -> None:
    found = selected_jobs(Selection(), "ada", "r8", ROWS, ())
    assert {job.name for job in found.values()} == {"r8/arr/0", "r8/arr/1", "r8/arr/2", "r8/eval"}
    assert {job.state for job in found.values()} == {"PENDING"}
    assert (found["45"].attempt, found["4459_0"].log) == (3, "/logs/arr.log")


@pytest.mark.parametrize(
    ("selection", "problem"),
    [
        (Selection(("7", "44")), "^7: Slurm knows no such job of ada; give an id"),
        (Selection(names=("evil",)), "^evil: Slurm knows no such job"),
    ],
)
def test_a_job_that_slurm_does_not_know_is_an_error(selection: Selection, problem: str) -> None:
    with pytest.raises(LauncherError, match=problem):
        ids(selection)


@pytest.mark.parametrize("word", ["4459_[0-100000]", "4459_[1-...]"])
def test_all_tasks_of_a_list_are_selected_or_none(word: str, tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="its list is cut, or has more than 100,000 array indexes"):
        select((word,), {}, tmp_path)


def test_a_job_of_gpujob_has_its_own_name_and_directory(tmp_path: Path) -> None:
    run_dir = tmp_path / "logs" / "44_train_20261123_111634"
    run_dir.mkdir(parents=True)
    (run_dir / "manifest.json").write_text("{}")
    (run_dir / "44.json").write_text(json.dumps({"job_name": "my train"}))
    selection = select((str(run_dir),), {}, tmp_path)
    (job,) = selected_jobs(selection, "ada", "", ROWS, ()).values()
    assert (job.job_id, job.name, job.run_dir, job.log) == ("44", "my train", str(run_dir), f"{run_dir}/")
    by_id = QueueRow("44", AttemptSnapshot("RUNNING", 1.0), "train", f"{run_dir}/log.out")
    assert selected_jobs(Selection(("44",)), "ada", "", [by_id], ())["44"].run_dir == str(run_dir)
    local = tmp_path / "logs" / "local-82f2_train"
    run_dir.rename(local)
    with pytest.raises(LauncherError, match="ran without Slurm; follow it with `gpujob watch"):
        select((str(local),), {}, tmp_path)


def test_of_several_jobs_of_gpujob_with_one_name_the_newest_is_followed(tmp_path: Path) -> None:
    """It may have ended since an earlier run with the same words followed it as the only one that ran."""
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    for job_id in ("10", "11"):
        run_dir = tmp_path / f"{job_id}_embed"
        run_dir.mkdir()
        for name in ("manifest.json", "report.json"):
            (run_dir / name).write_text("{}")
        register_job(run_dir, {"job_id": job_id, "job_name": "embed", "submitted": float(job_id)}, environ, tmp_path)
    selection = select(("embed",), environ, tmp_path)
    assert selection.ids == ("11",)
    assert selection.notices == (f"newest of 2 jobs named embed: 11, {run_dir}",)


class Accounting(SlurmReader):
    """An accounting that notes what it is asked, and does not answer."""

    def __init__(self) -> None:
        super().__init__("ada", None, {})
        self.asked: list[str] = []

    def accounting(self, job_ids: Sequence[str], since: float) -> tuple[Attempt, ...]:
        self.asked += job_ids
        raise SlurmUnansweredError("sacct", "did not answer in 30 s")


def test_accounting_is_asked_only_about_what_the_queue_may_lack() -> None:
    accounting = Accounting()
    assert set(read_selected(accounting, Selection(("44", "4459_2")), "", ROWS)) == {"44", "4459_2"}
    with pytest.raises(SlurmUnansweredError):  # some of its tasks may have ended long ago
        read_selected(accounting, Selection(("44", "4459")), "", ROWS)
    assert accounting.asked == ["4459"]
