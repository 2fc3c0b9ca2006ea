"""Words of a command that only a shell would understand."""

from pathlib import Path
from typing import Any

import pytest

from launcher.check.preflight import check_commands, check_directories, check_variables
from tests.launcher.check.planned_jobs import planned_job, summaries

NO_SHELL = "is a command of the shell and no shell is involved"
ACTIVATE = "activate the environment in this shell before you start gpujob"
BASH = "the command `bash -c 'TEXT'`"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["cd", "/data"], f'"cd" {NO_SHELL}; set `workdir`, or use {BASH}'),
        ("cd /data", f'"cd" {NO_SHELL}; set `workdir`, or use `shell: true`'),
        (["source", "env.sh"], f'"source" {NO_SHELL}; {ACTIVATE}, or use {BASH}'),
        (["conda", "activate", "x"], f'"conda" {NO_SHELL}; {ACTIVATE}, or use {BASH}'),
        (["export", "A=1"], f'"export" {NO_SHELL}; use {BASH}'),
        (
            ["A=1", "python3", "x"],
            '"A=1" sets a variable, which is shell syntax; put `env` before it, or set A under `env`',
        ),
        (
            ["./run.sh"],
            '"./run.sh" is not executable; make it so with `chmod +x ./run.sh`, or start it with `bash ./run.sh`',
        ),
        (["bin/tool"], '"bin/tool" is not executable; make it so with `chmod +x bin/tool`'),
        (["run.sh"], '"run.sh" is not on PATH, but in the working directory; write "./run.sh"'),
        (["./none"], '"./none" is not a program on this machine; check its spelling, or give its full path'),
    ],
)
def test_a_word_that_is_no_program_is_named_with_its_fix(
    command: str | list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("run.sh", "bin/tool"):
        (tmp_path / name).write_text("echo hello")
    (found,) = check_commands(planned_job(tmp_path, workers=[{"command": command}]))
    assert (found.status, found.message) == ("error", message)


@pytest.mark.parametrize("word", ["cd", "source", "A=1"])
def test_a_word_of_the_shell_is_no_program_on_the_nodes_either(word: str, tmp_path: Path) -> None:
    found = check_commands(planned_job(tmp_path, local=False, workers=[{"command": [word, "x"]}]))
    assert [item.status for item in found if item.code == "no-program"] == ["error"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python3 train.py > out.txt 2>&1", '">", "2>&1" reach'),
        ("python3 train.py >out.txt", '">out.txt" reaches'),
        ("python3 a.py | tee log", '"|" reaches'),
        ("python3 a.py && python3 b.py", '"&&" reaches'),
        ("python3 a.py &", '"&" reaches'),
        ("cat ~/data", '"~/data" reaches'),
        ("bash run.sh > out", '">" reaches'),
        ("bash -c 'python3 a.py > out'", None),
        ("python3 a.py --when 'loss > 3' --prompt '<s>' '>=2' 'a;b' '|x|' -", None),
    ],
)
def test_shell_syntax_that_no_shell_reads_is_a_warning(command: str, words: str | None, tmp_path: Path) -> None:
    found = list(check_variables(planned_job(tmp_path, workers=[{"command": command}])))
    message = f"{words} the program as text, since no shell is involved; for shell syntax use `shell: true`"
    assert [(item.code, item.message) for item in found] == ([] if words is None else [("shell-syntax", message)])


def test_a_placeholder_in_a_quoted_here_document_is_a_warning(tmp_path: Path) -> None:
    text = "cat <<'EOF' <<B\n{rank} {host_0} {{role}} $X\nEOF\n{rank}\nB\n# {role}"
    found = list(check_variables(planned_job(tmp_path, workers=[{"command": text, "shell": True}])))
    message = "{rank} stays as it is after <<'EOF'; leave out its quotes, or read GPUJOB_RANK there"
    assert ("not-expanded", message) in [(item.code, item.message) for item in found]
    assert [item.code for item in found].count("not-expanded") == 1


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("free | awk '{print $NF}'; echo \"$NF\" '$X'", ["NF"]),
        ("read -r a b < f; echo $a $b ${c}", ["c"]),
        ("while IFS=, read -r -p 'which? ' a b; do echo \"$a$b\"; done", []),
        ("for x in $ALL; do echo $x; done", ["ALL"]),
        ('mkdir "/tmp/$$dir" /tmp/$$dir', []),
        ("export A=$B C; A+=1 D=2; echo $A $C $D", ["B"]),
        ("local a b=$c; mapfile -t lines; printf -v text %s x; echo $a $b $lines $text", ["c"]),
        (": ${CACHE:=/tmp}; echo $CACHE", []),
        ("cat <<'EOF'\n$X\nEOF\ncat <<EOF\n$Y \\$Z 'it' $V\nEOF\n# don't $W", ["Y", "V"]),
        ("while getopts ab: flag; do echo $flag $OPTARG; done", []),
        ("echo A; echo $A", ["A"]),
    ],
)
def test_a_variable_that_nothing_sets_is_a_warning(text: str, names: list[str], tmp_path: Path) -> None:
    found = list(check_variables(planned_job(tmp_path, workers=[{"command": text, "shell": True}])))
    message = "is not set here and would be empty; export it, or set it in `env`"
    assert [(item.code, item.message) for item in found] == [("no-variable", f"${name} {message}") for name in names]


def test_a_variable_in_a_value_of_a_variable_is_a_warning(tmp_path: Path) -> None:
    over: dict[str, Any] = {
        "env": {"HF_HOME": "$SCRATCH/hf", "PLAIN": "5$ \\\\$X", "MY_TOKEN": "pa$word"},
        "workers": [{"command": "true", "env": {"PYTHONPATH": "/x:${PYTHONPATH}:$PYTHONPATH"}}],
        "backend": {"env": {"A": "$1 $B"}},
    }
    found = [
        (item.code, item.status, item.place, item.message) for item in check_variables(planned_job(tmp_path, **over))
    ]
    assert found == [
        ("not-expanded", "warning", place, f"${name} is not expanded, since no shell is involved; write its value")
        for place, name in (
            ("env.HF_HOME", "SCRATCH"),
            ("workers (worker).env.PYTHONPATH", "PYTHONPATH"),
            ("backend.env.A", "B"),
        )
    ]


def test_a_variable_in_a_directory_is_an_error(tmp_path: Path) -> None:
    over: dict[str, Any] = {
        "paths": {"output_dir": "$SCRATCH/out", "log_dir": "l$"},
        "container": {"image": "$IMAGES/a.sif"},
    }
    cluster = {"logs_dir": "/tmp/$USER/logs", "target_dir": "${T}", "registry_dir": "$R"}
    items = list(check_directories(planned_job(tmp_path, cluster=cluster, model={"path": "$M/m"}, **over)))
    places = ("paths.output_dir", "logs_dir", "target_dir", "registry_dir", "model.path", "container.image")
    assert summaries(items) == [
        *(("not-expanded", "error", place) for place in places),
        ("writable", "ok", "paths.log_dir"),
    ]
    why = 'is not expanded, since no shell is involved; write its value, or "~" for a home directory'
    assert [items[0].message, items[2].message] == [f"$SCRATCH {why}", f"$T {why}"]
    assert summaries(check_directories(planned_job(tmp_path, workdir="$W")), "error") == [
        ("not-expanded", "error", "workdir")
    ]


def test_a_program_that_is_not_on_the_path_of_the_job_file_is_searched_for_there(tmp_path: Path) -> None:
    over: dict[str, Any] = {"env": {"PATH": "/opt/bin:$PATH"}, "workers": [{"command": "python3 x.py"}]}
    messages = [item.message for item in check_commands(planned_job(tmp_path, **over)) if item.code == "no-program"]
    assert messages == ['"python3" is not in "/opt/bin:$PATH", the PATH of `env`; correct that, or give its full path']
