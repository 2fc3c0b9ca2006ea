"""Words of a command that only a shell would understand: variables, redirections, built-in commands."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from launcher.check import finding
from launcher.check.finding import CheckFinding
from launcher.check.role_programs import environment_of, program_command
from launcher.jobfile.redaction import is_secret_name
from launcher.jobfile.resources import command_argv
from launcher.plan.placeholders import SHELLS, VARIABLES, shell_text_index, unfilled_placeholders
from launcher.plan.plan import BENCHMARK, FRONTENDS, WORKERS, TaskPlan
from launcher.plan.shell_text import expanded_variables
from launcher.planner.planned_job import PlannedJob

_VARIABLE = re.compile(r"(?<!\\)\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
_ASSIGNMENT = re.compile(r"(?:^|[\s;&|(`])([A-Za-z_]\w*)(?=(?:\[[^]\s]*\])?\+?=)|\$\{([A-Za-z_]\w*):?=")
# commands whose words are names of variables, as in `for NAME in`, `read -r NAME NAME` and `printf -v NAME`
_NAMING = re.compile(
    r"(?:^|[\s;&|(`])(?:for|select|read|export|local|declare|typeset|readonly|mapfile|readarray|getopts|printf\s+-v)"
    r"(?=\s)([^;|&<>\n]*)"
)
_NAMED = re.compile(r"(?<=\s)[A-Za-z_]\w*(?![^\s=])")
_SLURM_PREFIXES = ("SLURM_", "GPUJOB_", "CUDA_VISIBLE_DEVICES")
_SHELL_VARIABLES = {
    *("HOME", "PWD", "OLDPWD", "RANDOM", "SECONDS", "HOSTNAME", "UID", "IFS", "LINENO", "BASHPID", "REPLY"),
    *("EUID", "PPID", "OPTARG", "OPTIND", "EPOCHSECONDS"),
}
_LAUNCHER_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}

_OPERATOR = re.compile(r"\|{1,2}&?|&{1,2}|;{1,2}|<{1,3}|[0-9&]?>{1,2}(?:&[0-9-])?|[0-9&]?>{1,2}[\w./~-][^>]*|~/.*")
_SETTING = re.compile(r"([A-Za-z_]\w*)=.*", re.DOTALL)
_ENVIRONMENT_COMMANDS = ("source", ".", "module", "ml", "conda", "activate")
_COMMANDS = (
    *("cd", "pushd", "export", "unset", "set", "ulimit", "umask", "eval", "exec", "alias", "trap", "wait", "exit"),
    *("if", "for", "while", "until", "case", "function", "{", "(", "[[", "!"),
)  # of shells; no program has these names, or it would do nothing for the job


def is_shell_word(program: str) -> bool:
    """Whether a missing program is a word of shells, which no other machine has either."""
    return program in (*_COMMANDS, "source", ".") or _SETTING.fullmatch(program) is not None


def shell_word_problem(planned_job: PlannedJob, planned: TaskPlan, program: str) -> str | None:
    """What is wrong with a program that was not found, if it is a word of shells or a file that cannot be started."""
    fix, place = fix_without_shell(planned_job, planned), Path(planned_job.plan.workdir, program)
    if setting := _SETTING.fullmatch(program):
        return (
            f'"{program}" sets a variable, which is shell syntax; put `env` before it, or set {setting[1]} under `env`'
        )
    if program == "cd":
        return f'"cd" is a command of the shell and no shell is involved; set `workdir`, or use {fix}'
    if program in _ENVIRONMENT_COMMANDS:
        done_before = "activate the environment in this shell before you start gpujob"
        return f'"{program}" is a command of the shell and no shell is involved; {done_before}, or use {fix}'
    if program in _COMMANDS:
        return f'"{program}" is a command of the shell and no shell is involved; use {fix}'
    if " " in program:
        return f'"{program}" is one word with spaces in it; leave out the quotes around the command'
    if "/" in program and place.is_file():
        interpreter = {".py": "python", ".sh": "bash"}.get(place.suffix)
        by = f", or start it with `{interpreter} {program}`" if interpreter else ""
        return f'"{program}" is not executable; make it so with `chmod +x {program}`{by}'
    if "/" not in program and place.is_file():
        return f'"{program}" is not on PATH, but in the working directory; write "./{program}"'
    return None


def check_shell_words(planned_job: PlannedJob, place: str, planned: TaskPlan) -> Iterator[CheckFinding]:
    """Warn about words that no shell will read, and about variables that are empty in a shell's text."""
    argv = program_command(planned_job, planned, planned.argv)
    text_index = shell_text_index(argv)
    known, fix = {*environment_of(planned_job, planned)}, fix_without_shell(planned_job, planned)
    if argv and os.path.basename(argv[0]) not in (*SHELLS, "env"):  # a launcher such as torchrun starts the shell
        known |= _LAUNCHER_VARIABLES
    if text_index is not None:
        text = argv[text_index]
        for name in unfilled_placeholders(text):
            message = f"{{{name}}} stays as it is after <<'EOF'; leave out its quotes, or read {VARIABLES[name]} there"
            yield finding.warning("not-expanded", place, message)
        own = _own_variables(text) | _SHELL_VARIABLES | known
        for name in expanded_variables(text):
            if name not in own and not name.startswith(_SLURM_PREFIXES):
                message = f"${name} is not set here and would be empty; export it, or set it in `env`"
                yield finding.warning("no-variable", place, message)
        return
    for word in argv:
        for name in _variables_in(word):
            message = f"{_unexpanded(name)}; use a placeholder, or {fix}"
            yield finding.warning("not-expanded", place, message)
    if found := dict.fromkeys(word for word in argv[1:] if _OPERATOR.fullmatch(word)):
        shown = ", ".join(f'"{word}"' for word in found)
        message = f"{shown} {'reaches' if len(found) == 1 else 'reach'} the program as text, since no shell is involved"
        yield finding.warning("shell-syntax", place, f"{message}; for shell syntax use {fix}")


def check_unexpanded_values(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Warn about ``$NAME`` in values of variables, which programs get as they are."""
    spec = planned_job.spec
    parts = [("env", spec.env), *((f"workers ({workers.role}).env", workers.env) for workers in spec.workers)]
    parts += [(f"{key}.env", part.env) for key, part in spec.processes()]
    for place, variables in parts:
        for variable, value in variables.items():
            for name in () if is_secret_name(variable) else _variables_in(value):
                yield finding.warning("not-expanded", f"{place}.{variable}", f"{_unexpanded(name)}; write its value")


def check_unexpanded_paths(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Refuse ``$NAME`` in directories, the model and the image: it would be part of the name."""
    spec, cluster, container = planned_job.spec, planned_job.cluster, planned_job.spec.container
    texts = {
        "workdir": spec.workdir,
        **{f"paths.{key}": getattr(spec.paths, key) for key in ("output_dir", "checkpoint_dir", "log_dir")},
        **{key: getattr(cluster, key) for key in ("logs_dir", "target_dir", "registry_dir")},
        "model.path": spec.model.path if spec.model else None,
        "container.image": container.image if container else None,
    }
    for place, text in texts.items():
        for name in _variables_in(text or ""):
            message = f'{_unexpanded(name)}; write its value, or "~" for a home directory'
            yield finding.error("not-expanded", place, message)


def _unexpanded(name: str) -> str:
    return f"${name} is not expanded, since no shell is involved"


def _variables_in(text: str) -> tuple[str, ...]:
    """Variables of a text that a shell would expand."""
    return tuple(dict.fromkeys(first or second for first, second in _VARIABLE.findall(text)))


def _own_variables(text: str) -> set[str]:
    """Variables that a shell's text may set itself."""
    given = {first or second for first, second in _ASSIGNMENT.findall(text)}
    return given.union(*(_NAMED.findall(words) for words in _NAMING.findall(text)))


def fix_without_shell(planned_job: PlannedJob, planned: TaskPlan) -> str:
    """How to get a shell for these words, or their result; only commands of roles have `shell: true`."""
    spec = planned_job.spec
    if planned.stage == WORKERS:
        own = [workers for workers in spec.workers if workers.role == planned.task.role and command_argv(workers)]
        if own:
            return "`shell: true`" if isinstance(own[0].command, str) else "the command `bash -c 'TEXT'`"
        return "write its value"
    part = {FRONTENDS: spec.frontend, BENCHMARK: spec.benchmark}.get(planned.stage)
    return "the command `bash -c 'TEXT'`" if part is not None and part.command is not None else "write its value"
