"""What gpujob says about itself: its version, the groups of its help, and completion for shells."""

import os
import shutil
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from exporter import __version__
from launcher.cli.about.command_group import OTHER_WORDS
from launcher.cli.about.completion import complete_keys
from launcher.cli.about.version import driver_text
from launcher.cli.main import commands
from launcher.jobfile.keys import job_keys, plain_path
from launcher.registry.entries import register_job
from tests.support.builders import RunDir
from tests.support.fake_slurm import FakeSlurm
from tests.support.launcher import GPUJOB, gpujob

NVIDIA = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15\n"


def test_the_version_names_what_a_helper_asks_for(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path / "slurm")
    slurm.say("sinfo", "out", "slurm-wlm 22.05.8\n")
    done = gpujob("--version", cwd=tmp_path, env=slurm.environment())
    assert done.stdout.startswith(f"gpujob {__version__} (Python 3.")
    assert ", Slurm 22.05.8, " in done.stdout


def test_the_driver_is_the_one_that_the_kernel_has_loaded(tmp_path: Path) -> None:
    nvidia, amd = tmp_path / "nvidia", tmp_path / "amd"
    assert driver_text(nvidia, amd) == "no GPU driver"
    amd.write_text("6.10.5\n")
    assert driver_text(nvidia, amd) == "AMD driver 6.10.5"
    nvidia.write_text(NVIDIA)
    assert driver_text(nvidia, amd) == "NVIDIA driver 550.54.15"


def test_every_command_has_a_place_in_the_help() -> None:
    shown = CliRunner().invoke(commands, ["--help"]).output
    for name, command in commands.all_commands().items():
        if not command.hidden:
            assert f"\n  {name} " in shown


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("wacth", '; did you mean "watch"?'),
        ("stopp", '; did you mean "stop"?'),
        ("kill", '; did you mean "stop"?'),
        ("tail", '; did you mean "logs -f"?'),
        ("nothing-like-it", ""),
    ],
)
def test_an_unknown_command_is_answered_with_the_one_that_is_meant(word: str, hint: str) -> None:
    done = CliRunner().invoke(commands, [word])
    assert (done.exit_code, done.output.splitlines()[-1]) == (2, f"Error: No such command '{word}'{hint}")


def test_words_of_other_programs_lead_to_commands() -> None:
    for other, meant in OTHER_WORDS.items():
        assert other not in commands.all_commands()
        assert meant.startswith("--") or meant.split()[0] in commands.all_commands()


def test_the_options_of_a_job_are_in_groups() -> None:
    shown = CliRunner().invoke(commands, ["submit", "--help"]).output
    titles = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["The job:", "Workers and resources:", "Slurm:", "Output and progress:", "Options:"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_valid(shell: str, tmp_path: Path) -> None:
    script = gpujob("completion", shell, cwd=tmp_path)
    assert (script.returncode, script.stderr) == (0, "")
    assert "_GPUJOB_COMPLETE" in script.stdout
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script.stdout, text=True, check=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("gpujob wat", "plain,watch"),
        ("gpujob run --qu", "plain,--quiet"),
        ("gpujob run --set slurm.time", "plain,slurm.time_limit="),
        ("gpujob run jo", "file,jo"),
        ("gpujob plan -f jo", "file,jo"),
        ("gpujob run --output ou", "file,ou"),
        ("gpujob watch local-", "file,local- plain,local-1"),
        ("gpujob sweep emb", "file,emb plain,embed"),
        ("gpujob logs embed wor", "plain,worker_w0 plain,worker_w1"),
        ("gpujob verify logs/lo", "file,logs/lo"),
        ("gpujob alerts mu", "plain,mute"),
    ],
)
def test_a_shell_completes(words: str, expected: str, tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    for job_id, name in (("local-1", "embed"), ("4459", "two words")):
        run_dir = RunDir(tmp_path / job_id).path
        register_job(run_dir, {"job_id": job_id, "job_name": name, "submitted": 1.0}, state, tmp_path)
    variables = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1), "_GPUJOB_COMPLETE": "bash_complete"}
    environment = {**os.environ, **state, **variables}
    done = subprocess.run([GPUJOB], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == expected.split()


def test_every_key_of_the_job_file_is_completed() -> None:
    context = click.Context(commands)
    found = [str(item.value) for item in complete_keys(context, context.command.params[0], "")]
    assert len(found) == len(job_keys())
    assert [plain_path(key) for key in found[:3]] == ["name=", "workdir=", "resources="]
