"""The commands about queue, nodes and accounting, with fake Slurm commands."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.cli.main import main
from tests.support.fake_slurm import BIN, FakeSlurm

COMMAND = f"""#!{sys.executable}
import sys
sys.path.insert(0, {str(BIN)!r})
import fake_slurm
fake_slurm.note()
fake_slurm.answer()
"""  # of those that other tests lack
Gpujob = Callable[..., tuple[int | str | None, str, str]]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "fake")
    for name, value in fake.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GPUJOB_HUB", "none")
    monkeypatch.setenv("USER", "ada")
    monkeypatch.setenv("LOGNAME", "ada")
    own = tmp_path / "bin"
    own.mkdir()
    for name in ("sacct", "sstat"):
        (own / name).write_text(COMMAND)
        (own / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{own}:{BIN}:{Path(sys.executable).parent}")
    monkeypatch.chdir(tmp_path)
    return fake


@pytest.fixture
def gpujob(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Gpujob:
    """Run a command in this process: exit status, standard output and standard error."""

    def run(*words: str) -> tuple[int | str | None, str, str]:
        monkeypatch.setattr(sys, "argv", ["gpujob", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return run
