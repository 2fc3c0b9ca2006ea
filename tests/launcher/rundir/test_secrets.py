"""Secrets by name: in one private file and in the environment of tasks."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from launcher.errors import LauncherError
from launcher.jobfile.redaction import redacted_job
from launcher.rundir.secrets_file import SECRETS_FILE, read_secrets, write_secrets
from tests.support.fake_slurm import FakeSlurm
from tests.support.launcher import HARD_NAMES, LocalJob, clean_environment, gpujob, job_spec, poll

SECRET = "hunter2-of-nobody-else"
JOB = {
    "name": "secretive",
    "workers": [{"command": "true"}],
    "secrets": ["HF_TOKEN", "WANDB_API_KEY"],
    "monitoring": {"enabled": False},
}


def files_with(folder: Path, text: str) -> list[str]:
    """Files under a folder that contain a text."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes())


def test_secrets_survive_writing_and_reading(tmp_path: Path) -> None:
    environ = {f"SECRET_{index}": value for index, value in enumerate((*HARD_NAMES, "", "\udcff"))}
    write_secrets(tmp_path, tuple(environ), {**environ, "OTHER": "x"})
    assert read_secrets(tmp_path, tuple(environ)) == environ
    assert read_secrets(tmp_path, ("SECRET_1",)) == {"SECRET_1": environ["SECRET_1"]}
    assert (tmp_path / SECRETS_FILE).stat().st_mode & 0o777 == 0o600


def test_a_job_without_secrets_has_no_file(tmp_path: Path) -> None:
    write_secrets(tmp_path, (), {"A": "a"})
    assert not list(tmp_path.iterdir())
    assert read_secrets(tmp_path, ()) == {}


def test_unset_and_lost_secrets_are_reported(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match=r"secrets: B, C is not set here; export it, or leave it out"):
        write_secrets(tmp_path, ("A", "B", "C"), {"A": "a"})
    assert not list(tmp_path.iterdir())
    with pytest.raises(LauncherError, match=r"secrets\.json is missing or does not contain A; submit the job again"):
        read_secrets(tmp_path, ("A",))


def test_only_the_secrets_file_of_a_submitted_job_contains_secrets(tmp_path: Path) -> None:
    slurm, folder = FakeSlurm(tmp_path / "fake"), tmp_path / "work"
    folder.mkdir()
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    environ = slurm.environment(HF_TOKEN=SECRET, WANDB_API_KEY=SECRET)
    done = gpujob("submit", "job.yaml", "--json", cwd=folder, env=environ)
    assert done.returncode == 0, done.stderr
    run_dir = Path(json.loads(done.stdout)["run_dir"])
    assert files_with(folder, SECRET) == [SECRETS_FILE]
    assert (run_dir / SECRETS_FILE).stat().st_mode & 0o777 == 0o600
    (call,) = slurm.calls("sbatch")
    assert SECRET not in " ".join(call["argv"]) + call["script"]
    assert SECRET not in gpujob("plan", "job.yaml", "--json", cwd=folder, env=environ).stdout


def test_a_secret_that_is_not_set_stops_the_submission(tmp_path: Path) -> None:
    slurm, folder = FakeSlurm(tmp_path / "fake"), tmp_path / "work"
    folder.mkdir()
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    done = gpujob("submit", "job.yaml", cwd=folder, env=slurm.environment(HF_TOKEN=SECRET))
    assert done.returncode == 2
    assert "secrets: WANDB_API_KEY is not set here; export it first, or leave it out" in done.stderr
    assert slurm.calls("sbatch") == []
    assert [path.name for path in folder.iterdir()] == ["job.yaml"]


def test_workers_of_a_local_job_have_its_secrets_which_are_removed_at_the_end(tmp_path: Path) -> None:
    command = 'test "$HF_TOKEN" = "$EXPECTED" && test "$WANDB_API_KEY" = "$EXPECTED"'
    job = {**JOB, "workers": [{"command": command, "shell": True}], "env": {"EXPECTED": "{role}"}}
    environ = clean_environment(HF_TOKEN="worker", WANDB_API_KEY="worker")
    with LocalJob(tmp_path / "job", job, "--quiet", env=environ) as running:
        assert running.wait() == 0, running.output
        assert files_with(running.run_dir, '"WANDB_API_KEY": "worker"') == []
        assert not (running.run_dir / SECRETS_FILE).exists()


def test_secrets_of_an_interrupted_local_job_are_removed(tmp_path: Path) -> None:
    job = {**JOB, "workers": [{"command": "sleep 600"}]}
    with LocalJob(tmp_path / "job", job, "--quiet", env=clean_environment(HF_TOKEN="a", WANDB_API_KEY="b")) as running:
        poll(lambda: list((running.run_dir / "workers").glob("*.start.json")), "the start of the worker")
        assert (running.run_dir / SECRETS_FILE).exists()
        running.process.send_signal(signal.SIGINT)
        running.wait()
        assert not (running.run_dir / SECRETS_FILE).exists()


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ({"env": {"A_KEY": "x"}}, "env"),
        ({"workers": [{"command": "x"}, {"role": "b", "command": "x", "env": {"A_KEY": "x"}}]}, r"workers\[1\].env"),
    ],
)
def test_a_secret_may_not_have_a_value_in_the_job_file(spec: dict[str, Any], place: str) -> None:
    with pytest.raises(ValidationError, match=rf"secrets\n  A_KEY has a value in {place}; remove it there"):
        job_spec(secrets=["A_KEY"], **spec)


def test_values_of_secret_names_are_redacted_in_readable_files() -> None:
    spec = job_spec(
        env={"HF_TOKEN": SECRET, "PLAIN": "p"},
        workers=[{"command": "x", "env": {"MY_PASSWORD": SECRET}}],
        backend={
            "env": {"API_KEY": SECRET},
            "args": {"api-key": SECRET, "max-total-tokens": 8192, "tokenizer-path": "/models/t"},
            "decode": {"env": {"AWS_SECRET": SECRET}, "config": {"auth": {"token": SECRET}, "key": 1}},
        },
        sweep={"grid": {"env.HF_TOKEN": [SECRET, SECRET], "resources.nodes": [1, 2]}},
    )
    body: Any = redacted_job(spec)
    assert SECRET not in json.dumps(body)
    assert body["env"] == {"HF_TOKEN": "<redacted>", "PLAIN": "p"}
    args = {"api-key": "<redacted>", "max-total-tokens": 8192, "tokenizer-path": "/models/t"}
    assert body["backend"]["args"] == args
    assert body["sweep"]["grid"]["resources.nodes"] == [1, 2]
    assert body["backend"]["decode"]["config"]["key"] == 1
