"""Wrong command lines and bad states of the disk: one error and exit status 2, without side effects.

The cases and their answers are a page: a command, and what it prints to standard error.
"""

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.cli.main import commands, main
from tests.conftest import GOLDEN
from tests.launcher.conftest import Golden
from tests.support.cases import answered

PAGE = "launcher/mistakes-commands.txt"
NOBODY = 65534
OF_CLICK = ("Usage: ", "Try ")  # lines before its error
FILES = {
    "job.yaml": 'name: job\nworkers: [{command: "true"}]\n',
    "two.yaml": "name: job\nworkers: [{role: a, command: 'true'}, {role: b, command: 'true'}]\n",
    "sweep.yaml": "name: s\nworkers: [{command: 'true {lr}'}]\nsweep: {grid: {lr: [1, 2]}}\n",
    "jobs.yaml": "name: p\njobs: {a: {file: sweep.yaml, after: b}, b: {file: none.yaml, after: [a, c]}}\n",
    "quote.yaml": 'name: job\nworkers:\n  - command: "python train.py\nslurm: {time_limit: 4h}\n',
    "late.yaml": "name: job\nworkers: [{command: 'true}]\nslurm: {partition: 'gpu'}\n",
    "monitor_config.yaml": "job: {name: x, num_workers: 4}\npaths: {output_dir: o, log_dir: l}\n",
    "empty.yaml": "",
    "binary.yaml": "\0\1\2",
    "closed.yaml": "name: job\n",
    "closed.log": "Processed 1/2 items\n",
    "train.py": "print()\n",
    "folder/file": "",
    "logs/file": "",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with these files, which a user other than root reads."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o444)
    (tmp_path / "dangling.yaml").symlink_to("none")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    for name in ("closed.yaml", "closed.log", "closed"):
        path = tmp_path / name
        path.touch() if "." in name else path.mkdir()
        path.chmod(0)
    for name in list(os.environ):
        if name.startswith(("GPUJOB", "XDG", "SLURM", "VIRTUAL_ENV")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    for program in ("true", "bash"):
        (tmp_path / "bin" / program).symlink_to(str(shutil.which(program)))
    (tmp_path / "bin/python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o555)
    (tmp_path / "logs").chmod(0o777)  # so that only what a case is about is wrong
    yield tmp_path
    for name in ("closed.yaml", "closed.log", "closed", "."):
        (tmp_path / name).chmod(0o755)


@contextlib.contextmanager
def not_as_root() -> Iterator[None]:
    """Root may read and write everything, so its tests run as another user."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    yield
    if is_root:
        os.seteuid(0)


def test_every_wrong_command_is_answered_by_an_error(
    folder: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))

    def errors(case: str) -> Iterator[str]:
        monkeypatch.setattr(sys, "argv", shlex.split(case.strip()))
        with pytest.raises(SystemExit) as ended:
            main()
        if ended.value.code != 2:
            yield f"exit status {ended.value.code}"
        out, err = capsys.readouterr()
        for line in (*err.splitlines(), *(line for line in out.splitlines() if "ERROR" in line)):
            if line and not line.startswith(OF_CLICK):
                yield line.replace(str(folder), "FOLDER")

    with not_as_root():
        page = answered(PAGE, errors)
    golden(PAGE, page)
    assert sorted(folder.rglob("*")) == before


def test_every_command_has_wrong_input_on_the_page() -> None:
    page = (GOLDEN / PAGE).read_text(encoding="utf-8")
    named = {line.split()[1] for line in page.splitlines() if line.startswith("gpujob ")}
    assert {name for name, command in commands.all_commands().items() if not command.hidden} == named - {"lunch"}
