"""Ctrl-C while a command is loaded and while it works: the status of a shell, and no traceback."""

import signal
import subprocess
import sys


def python(program: str) -> "subprocess.CompletedProcess[str]":
    """A program of ours, in an interpreter of its own."""
    argv = [sys.executable, "-I", "-c", program]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False, start_new_session=True)


def test_ctrl_c_while_modules_are_loaded_ends_without_a_traceback() -> None:
    done = python(
        "import os, runpy, signal, sys\n"
        "class Loading:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'launcher.cli':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Loading())\n"
        "runpy.run_module('launcher', run_name='__main__', alter_sys=True)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_in_a_command_is_130() -> None:
    """click alone would say "Aborted!" and end with 1."""
    done = python(
        "import sys, launcher.cli\n"
        "@launcher.cli.commands.command('hang')\n"
        "def hang():\n"
        "    raise KeyboardInterrupt\n"
        "sys.argv = ['gpujob', 'hang']\n"
        "launcher.cli.main()\n"
    )
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "")
