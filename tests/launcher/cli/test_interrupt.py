"""Commands that end early: Ctrl-C, a closed pipe, a full disk."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launcher import GPUJOB, clean_environment


def python(program: str) -> "subprocess.CompletedProcess[str]":
    """Run a program in its own interpreter."""
    argv = [sys.executable, "-I", "-c", program]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, start_new_session=True)


def test_ctrl_c_while_modules_are_loaded_ends_without_a_traceback() -> None:
    done = python(
        "import os, runpy, signal, sys\n"
        "class Loading:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'launcher.cli.main':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Loading())\n"
        "runpy.run_module('launcher', run_name='__main__', alter_sys=True)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_in_a_command_ends_with_130() -> None:
    """click itself would print "Aborted!" and end with 1."""
    done = python(
        "import sys, launcher.cli.main\n"
        "@launcher.cli.main.commands.command('hang')\n"
        "def hang():\n"
        "    raise KeyboardInterrupt\n"
        "sys.argv = ['gpujob', 'hang']\n"
        "launcher.cli.main.main()\n"
    )
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "")


@pytest.mark.parametrize("arguments", ["schema", "--help", "plan --help"])
def test_a_closed_pipe_ends_with_141_without_output(arguments: str) -> None:
    script = f'{{ "$0" {arguments}; echo $? >&2; }} | true'
    done = subprocess.run(["sh", "-c", script, str(GPUJOB)], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr in ("141\n", "0\n"), "0 if all output fits into the pipe before its reader ends"


@pytest.mark.parametrize("arguments", ["schema", "--help", "--version"])
def test_output_that_cannot_be_written_is_reported_in_one_line(arguments: str) -> None:
    script = f'"$0" {arguments} > /dev/full'
    done = subprocess.run(["sh", "-c", script, str(GPUJOB)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "gpujob: cannot write: No space left on device\n")


@pytest.mark.parametrize(
    ("arguments", "redirection", "status"),
    [
        ("run -- false", "2>&1 | true", 1),
        ("run --quiet -- false", "> /dev/full", 1),
        ("run -- false", ">&- 2>&-", 1),
        ("no-such-command", "2>&1 | true", 2),
        ("no-such-command", "2> /dev/full", 2),
        ("report no-such-job", ">&-", 2),
    ],
)
def test_lost_output_changes_no_exit_status(arguments: str, redirection: str, status: int, tmp_path: Path) -> None:
    command = f'{{ "$0" {arguments}; echo $? > status; }} {redirection}'
    subprocess.run(["sh", "-c", command, str(GPUJOB)], cwd=tmp_path, timeout=60, check=False, env=clean_environment())
    assert (tmp_path / "status").read_text() == f"{status}\n"


def test_a_missing_file_is_not_mistaken_for_the_working_directory() -> None:
    done = python(
        "import sys, launcher.cli.main\n"
        "@launcher.cli.main.commands.command('lose')\n"
        "def lose():\n"
        "    raise FileNotFoundError(2, 'No such file or directory', '/x/y')\n"
        "sys.argv = ['gpujob', 'lose']\n"
        "launcher.cli.main.main()\n"
    )
    assert done.stderr == "gpujob: /x/y: No such file or directory; if it was moved, name its new place\n"
    assert done.returncode == 2
