"""Files of others are not used, unless the user names them or the site trusts their owner."""

import grp
import os
import pwd
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launcher.errors import ConfigError, LauncherError
from launcher.jobfile.jobfile import load_cluster
from launcher.rundir import cluster_file
from launcher.rundir.cluster_file import find_logs_dir, require_trusted
from launcher.rundir.trust import FileFacts, find_problem, read_facts
from launcher.steps.steps import PYTHON_FLAGS
from tests.support.launcher import clean_environment, gpujob

ANA, BOB, SW = 1001, 1002, 900
NOBODY = 65534  # owns nothing that a test needs
JOB = {"name": "job", "workers": [{"command": "true"}]}

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.mark.parametrize(
    ("owner", "mode", "private", "problem"),
    [
        (ANA, 0o644, False, None),
        (0, 0o755, False, None),
        (SW, 0o644, False, None),
        (ANA, 0o664, True, None),
        (ANA, 0o664, False, "/f belongs to 1001 and can be written by the group nlp; run `chmod go-w /f`"),
        (ANA, 0o646, True, "/f belongs to 1001 and can be written by everyone; run `chmod go-w /f`"),
        (0, 0o1777, False, "/f belongs to 0 and can be written by everyone; move the file out of there"),
        (BOB, 0o600, True, "/f belongs to 1002"),
    ],
)
def test_a_file_is_trusted_if_only_trusted_owners_can_write_it(
    owner: int, mode: int, private: bool, problem: str | None
) -> None:
    facts = FileFacts("/f", owner, mode, str(owner), "nlp", private)
    assert find_problem(facts, (ANA, 0, SW)) == problem


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a job file, below a directory that may be another's."""
    folder = tmp_path / "scratch/ana"
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    return folder


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


COMMANDS = ["plan job.yaml", "check job.yaml", "submit job.yaml", "run job.yaml", "watch 1", "report 1", "sweep 1"]


@as_root
@pytest.mark.parametrize("command", COMMANDS)
def test_the_cluster_file_of_another_user_is_refused(command: str, folder: Path) -> None:
    planted = folder.parent / "gpujob.yaml"
    planted.write_text("preamble: id > OWNED\n")
    os.chown(planted, NOBODY, NOBODY)
    before = files_in(folder.parent)
    done = gpujob(*command.split(), cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"gpujob: {planted}: is not used: {planted} belongs to nobody; "
        "set GPUJOB_CONFIG to the cluster file that you want\n"
    )
    assert files_in(folder.parent) == before


@as_root
@pytest.mark.parametrize("command", COMMANDS[:4])
def test_the_job_file_of_another_user_is_refused(command: str, folder: Path) -> None:
    os.chown(folder / "job.yaml", NOBODY, NOBODY)
    (folder / "link.yaml").symlink_to("job.yaml")
    before = files_in(folder.parent)
    for name in ("job.yaml", "link.yaml"):
        done = gpujob(command.split()[0], name, cwd=folder)
        assert (done.returncode, done.stdout, files_in(folder.parent)) == (2, "", before)
        assert done.stderr == (
            f"gpujob: {name}: is not used: {folder}/job.yaml belongs to nobody; "
            "its commands would run as you, so read it and use a copy of your own\n"
        )


@as_root
def test_a_cluster_file_that_the_user_names_may_be_of_anyone_who_alone_can_replace_it(folder: Path) -> None:
    shared = folder / "site"
    shared.mkdir()
    (shared / "gpujob.yaml").write_text("partition: gpu\n")
    os.chown(shared / "gpujob.yaml", NOBODY, NOBODY)
    environment = clean_environment(GPUJOB_CONFIG=str(shared / "gpujob.yaml"))
    done = gpujob("plan", "job.yaml", cwd=folder, env=environment)
    named = f"gpujob: cluster file {shared}/gpujob.yaml (environment: GPUJOB_CONFIG; owner nobody)\n"
    assert (done.returncode, done.stderr) == (0, named)
    shared.chmod(0o777)
    done = gpujob("plan", "job.yaml", cwd=folder, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{shared} belongs to root and can be written by everyone" in done.stderr


def test_a_group_with_other_members_is_not_private(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "job.yaml"
    user = pwd.getpwuid(path.stat().st_uid).pw_name
    group = grp.struct_group((user, "x", path.stat().st_gid, []))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: pwd.struct_passwd((user, "x", 0, group.gr_gid, "", "", "")))
    for members, is_private in (([], True), ([user], True), ([user, "bob"], False)):
        group.gr_mem[:] = members
        monkeypatch.setattr(grp, "getgrgid", lambda _: group)
        assert read_facts(path).has_private_group is is_private


@pytest.mark.parametrize("rights", [os.R_OK, os.R_OK | os.W_OK])
def test_a_file_that_its_acl_lets_others_write_is_refused(rights: int, folder: Path) -> None:
    path = folder / "job.yaml"
    own = (0x02, 7, os.geteuid())
    entries = ((0x01, 6, -1), own, (0x02, rights, NOBODY), (0x04, 4, -1), (0x10, 6, -1), (0x20, 4, -1))  # acl(5)
    acl = b"\x02\0\0\0" + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(path, "system.posix_acl_access", acl)
    except OSError:
        pytest.skip("this file system has no ACLs")
    os.chown(path, -1, pwd.getpwuid(os.geteuid()).pw_gid)
    done = gpujob("plan", "job.yaml", cwd=folder)
    if rights & os.W_OK:
        assert f"can be written by others in its ACL; run `chmod go-w {path}`" in done.stderr
        path.chmod(0o644)
        done = gpujob("plan", "job.yaml", cwd=folder)
    assert done.returncode == 0


@as_root
def test_only_the_system_file_names_trusted_owners(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = folder / "etc/config.yaml"
    system.parent.mkdir()
    monkeypatch.setattr(cluster_file, "SYSTEM_FILE", system)
    found = folder / "gpujob.yaml"
    found.write_text("logs_dir: /all\n")
    os.chown(found, NOBODY, NOBODY)
    with pytest.raises(LauncherError, match="belongs to nobody"):
        find_logs_dir({}, folder)
    system.write_text("trusted_owners: [nobody]\nlogs_dir: /system\n")
    assert find_logs_dir({}, folder) == Path("/all")
    found.unlink()
    assert find_logs_dir({}, folder) == Path("/system")
    system.write_text("trusted_owners: [no-such-user]\n")
    found.write_text("trusted_owners: [nobody]\n")
    with pytest.raises(ConfigError, match=r"trusted_owners: only .*config\.yaml may have this key"):
        load_cluster({}, folder)
    os.chown(found, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match="'no-such-user' is not the name of a user"):
        find_logs_dir({}, folder)
    os.chown(system, NOBODY, NOBODY)
    with pytest.raises(LauncherError, match="only root may be able to write it"):
        find_logs_dir({}, folder)


def test_a_file_that_others_can_write_is_refused_wherever_it_is_named(folder: Path) -> None:
    job, cluster = folder / "job.yaml", folder / "gpujob.yaml"
    cluster.write_text("partition: gpu\n")
    done = gpujob("plan", "job.yaml", cwd=folder)
    assert done.returncode == 0
    assert f"gpujob: cluster file {cluster} (in or above the working directory; owner " in done.stderr
    for path in (job, cluster, folder):
        mode = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode | 0o002)
        done = gpujob("plan", "job.yaml", cwd=folder)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"run `chmod go-w {path}`" in done.stderr
        path.chmod(mode)


def test_a_link_is_as_trusted_as_its_target(folder: Path) -> None:
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    (folder / "open/config.yaml").write_text("")
    (folder / "link.yaml").symlink_to("open/config.yaml")
    with pytest.raises(LauncherError, match=r"link\.yaml: is not used: .*/open belongs to .* by everyone; .*; do this"):
        require_trusted(folder / "link.yaml", "do this")


@as_root
def test_the_setup_script_of_another_user_is_refused(folder: Path) -> None:
    script = folder / "env.sh"
    script.write_text("")
    (folder / "job.yaml").write_text(yaml.safe_dump({**JOB, "setup": {"script": "env.sh"}}))
    os.chown(script, NOBODY, NOBODY)
    refused = f"setup.script: is not used: {script} belongs to nobody; use a copy of your own"
    for command in ("check", "submit"):
        done = gpujob(command, "job.yaml", cwd=folder)
        assert done.returncode == 2
        assert refused in done.stdout + done.stderr
    assert f"{refused}; submit refuses it" in gpujob("plan", "job.yaml", cwd=folder).stderr


@as_root
def test_run_directories_are_not_put_where_another_user_made_a_directory_in_a_public_place(folder: Path) -> None:
    logs = folder / "logs"
    logs.mkdir()
    os.chown(logs, NOBODY, NOBODY)
    assert gpujob("plan", "job.yaml", cwd=folder).returncode == 0, "the directory of a team has any owner"
    folder.chmod(0o1777)
    before = files_in(folder)
    refused = f"logs_dir: is not used: {logs} belongs to nobody, and everyone can make directories in {folder}"
    for command in ("check", "submit", "run"):
        done = gpujob(command, "job.yaml", cwd=folder)
        assert (done.returncode, files_in(folder)) == (2, before)
        assert f"{refused}; name one of your own as logs_dir" in done.stdout + done.stderr
    logs.rmdir()
    logs.symlink_to("/")
    os.lchown(logs, NOBODY, NOBODY)
    assert refused in gpujob("run", "job.yaml", cwd=folder).stderr


@as_root
@pytest.mark.parametrize("planted", [".", "plan.json"])
def test_the_plan_of_another_user_in_the_place_of_a_submitted_one_is_not_run(folder: Path, planted: str) -> None:
    job = {**JOB, "workers": [{"command": "touch ran", "shell": True}], "monitoring": {"enabled": False}}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    assert gpujob("run", "job.yaml", "--quiet", cwd=folder).returncode == 0
    (run_dir,) = (folder / "logs").iterdir()

    def begin_again() -> subprocess.CompletedProcess[str]:
        (folder / "ran").unlink()
        guard = [sys.executable, *PYTHON_FLAGS, "launcher.guard", str(run_dir), "--local"]
        return subprocess.run(guard, env=clean_environment(), capture_output=True, text=True, timeout=60)

    (run_dir / planted).chmod(0o770)  # what its owner allows to a group is no danger
    assert (begin_again().returncode, (folder / "ran").exists()) == (0, True)
    os.chown(run_dir / planted, NOBODY, NOBODY)
    done = begin_again()
    assert (done.returncode, (folder / "ran").exists()) == (1, False)
    assert f"{run_dir}/plan.json: is not used: " in done.stderr
    assert " belongs to nobody" in done.stderr


@as_root
def test_the_job_file_of_a_sweep_in_the_directory_of_another_user_is_not_resumed(folder: Path) -> None:
    job = {
        "name": "job",
        "workers": [{"command": "false"}],
        "sweep": {"list": [{"env.X": "1"}]},
        "monitoring": {"enabled": False},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    assert gpujob("run", "job.yaml", "--quiet", cwd=folder).returncode == 1
    (kept,) = (folder / "logs").glob("*/job.yaml")
    os.chown(kept, NOBODY, NOBODY)
    before = files_in(folder)
    done = gpujob("sweep", kept.parent, "--resume", cwd=folder)
    assert (done.returncode, files_in(folder)) == (2, before)
    assert f"{kept}: is not used: {kept} belongs to nobody; name a job file of your own" in done.stderr
