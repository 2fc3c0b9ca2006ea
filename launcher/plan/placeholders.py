"""Placeholders in commands, files and variables, and the environment of a task. Pure."""

import re
from collections.abc import Mapping, Sequence

from exporter.logs.log_files_reader import progress_path
from launcher.plan.plan import Plan, RunFacts, TaskPlan
from launcher.plan.shell_text import ANSI, CODE, LITERAL_DOCUMENT, SINGLE, shell_tokens

MOST_WORD_BYTES = 120_000  # of a variable or a word of a command: Linux takes 128 KiB (execve(2), MAX_ARG_STRLEN)
SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
VARIABLES = {
    "rank": "GPUJOB_RANK",
    "world_size": "GPUJOB_WORLD_SIZE",
    "local_rank": "GPUJOB_LOCAL_RANK",
    "index": "GPUJOB_WORKER_INDEX",
    "role": "GPUJOB_ROLE",
    "worker": "GPUJOB_WORKER",
    "node_index": "GPUJOB_NODE_INDEX",
    "nodes": "GPUJOB_NODE_COUNT",
    "gpus": "GPUJOB_GPUS",
    "job_id": "GPUJOB_JOB_ID",
    "attempt": "GPUJOB_ATTEMPT",
    "job_dir": "GPUJOB_JOB_DIR",
    "run_dir": "GPUJOB_RUN_DIR",
    "output_dir": "GPUJOB_OUTPUT_DIR",
    "checkpoint_dir": "GPUJOB_CHECKPOINT_DIR",
    "checkpoint": "GPUJOB_CHECKPOINT",
    "log_dir": "GPUJOB_LOG_DIR",
}  # variable in the task's environment for each placeholder
# placeholders whose values are one word without quotes, which the arithmetic of dash refuses
_WORDS = ("rank", "world_size", "local_rank", "index", "node_index", "nodes", "job_id", "attempt")
# Variables that the user's environment and the job file override. Python would hold back what it prints into a log.
DEFAULT_VARIABLES = {"PYTHONUNBUFFERED": "1"}

_PLACEHOLDER = re.compile(r"\{\{(?P<literal>[A-Za-z_][A-Za-z0-9_]*)\}\}|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}")
# placeholders of a node's address, of its IP address, and of a port, by number
NUMBERED = re.compile(r"(?P<kind>host|ip|port)_(?P<number>0|[1-9][0-9]{0,5})")
_SAFE = re.compile(r"[A-Za-z0-9._:%-]+")  # hosts, addresses and ports: text without meaning to a shell
_cached_job_values: tuple[Plan, RunFacts, Mapping[str, str]] | None = None  # cache of `job_placeholder_values`


class PlaceholderValues(dict[str, str]):
    """Values of placeholders. The numbered ones, as ``host_N`` and ``port_N``, are made on demand."""

    def __init__(self, values: Mapping[str, str], facts: RunFacts) -> None:
        super().__init__(values)
        self._facts = facts

    def __missing__(self, name: str) -> str:
        match = NUMBERED.fullmatch(name)
        if match is None:
            raise KeyError(name)
        number = int(match["number"])
        if match["kind"] == "port":
            return str(number + self._facts.port_offset)
        if number >= len(self._facts.hosts):
            raise KeyError(name)
        return self._facts.ip_address(number) if match["kind"] == "ip" else self._facts.address(number)

    def hosts_and_ports(self) -> "PlaceholderValues":
        """Only the hosts and ports, which are safe to insert into a shell's text."""
        plain = {name: value for name, value in self.items() if name not in VARIABLES and _SAFE.fullmatch(value)}
        return PlaceholderValues(plain, self._facts)


def task_argv(plan: Plan, planned: TaskPlan, facts: RunFacts) -> list[str]:
    """Words that start one task. A placeholder's value is data: it is never split or evaluated.

    In the text of ``bash -c``, a placeholder becomes the variable with its value: a shell never treats that as code,
    whatever quotes, comments or here documents surround it. Hosts and ports are safe and inserted directly. Other
    braces are kept.
    """
    values = placeholder_values(plan, planned, facts)
    # most words have no brace; calling for each word of thousands of tasks would be slow
    words = [fill_placeholders(word, values) if "{" in word else word for word in planned.argv]
    text = shell_text_index(planned.argv)
    if text is not None:
        words[text] = fill_shell_text(planned.argv[text], values.hosts_and_ports())
    return words


def shell_text_index(argv: Sequence[str]) -> int | None:
    """Index of the word that a shell will read as a program, as in ``bash -c TEXT``, or None."""
    for start, word in enumerate(argv):
        if word.endswith(SHELLS) and word.rpartition("/")[2] in SHELLS:
            for index in range(start + 1, len(argv) - 1):
                if re.fullmatch(r"-[A-Za-z]*c[A-Za-z]*", argv[index]):
                    return index + 1
                if not argv[index].startswith(("-", "+")) and not re.fullmatch(r"-[A-Za-z]*o", argv[index - 1]):
                    return None  # a script file
    return None


def fill_placeholders(word: str, values: Mapping[str, str]) -> str:
    """Replace each ``{name}`` that is in ``values``; ``{{name}}`` gives a literal ``{name}``."""
    if "{" not in word:
        return word

    def part(match: re.Match[str]) -> str:
        if match["literal"]:
            return f"{{{match['literal']}}}"
        try:
            return values[match["name"]]
        except KeyError:
            return match[0]

    return _PLACEHOLDER.sub(part, word)


def escape_placeholders(text: str) -> str:
    """Escape a text so that `fill_placeholders` gives it back unchanged."""
    return re.sub(r"\{([A-Za-z_][A-Za-z0-9_]*)\}", r"{{\1}}", text)


def fill_shell_text(text: str, safe_values: Mapping[str, str]) -> str:
    """Replace each placeholder by its variable, in double quotes unless it is a number, so that it stays one word.

    ``safe_values`` are values without meaning to a shell; they are inserted directly. Kept are ``${name}``, which is
    the shell's own variable, comments, and in a here document after ``<<'EOF'`` what is not safe.
    """
    parts, end = list[str](), 0
    for match, around in shell_tokens(text):
        if match["variable"] or (around == LITERAL_DOCUMENT and match["name"] in VARIABLES):
            continue  # the shell's own `${rank}`, or where it expands nothing
        if match["name"] in VARIABLES:
            variable = f"${{{VARIABLES[match['name']]}}}"
            quoted = f'"{variable}"'
            code = variable if match["name"] in _WORDS else quoted
            filled = {CODE: code, SINGLE: f"'{quoted}'", ANSI: f"'{quoted}$'"}.get(around, variable)
        else:
            filled = fill_placeholders(match[0], safe_values)
        parts += (text[end : match.start()], filled)
        end = match.end()
    return "".join((*parts, text[end:]))


def unfilled_placeholders(text: str) -> tuple[str, ...]:
    """Placeholders of a shell's text that it cannot get a value for: those in a here document after ``<<'EOF'``."""
    found = (match["name"] for match, around in shell_tokens(text) if around == LITERAL_DOCUMENT)
    return tuple(dict.fromkeys(name for name in found if name in VARIABLES))


def fill_template(plan: Plan, text: str, facts: RunFacts) -> str:
    """Fill in a file of ``plan.templates`` with values of the whole job: directories, and numbered hosts and ports."""
    return fill_placeholders(text, PlaceholderValues(job_placeholder_values(plan, facts), facts))


def job_placeholder_values(plan: Plan, facts: RunFacts) -> Mapping[str, str]:
    """Values of the placeholders that are the same for all tasks, cached for one job."""
    global _cached_job_values
    if _cached_job_values is None or _cached_job_values[0] is not plan or _cached_job_values[1] is not facts:
        _cached_job_values = (plan, facts, _build_job_values(plan, facts))
    return _cached_job_values[2]


def _build_job_values(plan: Plan, facts: RunFacts) -> dict[str, str]:
    run_dir, logs = facts.run_dir, plan.manifest.logs
    return {
        "world_size": str(plan.world_size),
        "nodes": str(plan.nodes),
        "job_id": facts.job_id,
        "attempt": str(facts.attempt),
        "job_dir": plan.job_dir,
        "checkpoint": facts.checkpoint,
        "head": facts.address(0),
        "run_dir": str(run_dir),
        "log_dir": str(run_dir / logs.directory if logs else run_dir),
        **{f"{group.name}_dir": str(run_dir / group.directory) for group in plan.manifest.groups},
    }


def placeholder_values(plan: Plan, planned: TaskPlan, facts: RunFacts) -> PlaceholderValues:
    task = planned.task
    values = {
        **job_placeholder_values(plan, facts),
        "rank": str(task.rank),
        "local_rank": str(task.local_rank),
        "index": str(task.index),
        "role": task.role,
        "worker": task.worker,
        "node_index": str(task.node_index),
        "gpus": ",".join(map(str, task.gpus)),
        "leader": facts.address(planned.leader_node),
        "worker_size": str(planned.worker_size),
        "worker_nodes": str(planned.worker_nodes),
    }
    for name, port in planned.ports.items():
        values[f"{name}_port"] = str(port + facts.port_offset)
    return PlaceholderValues(values, facts)


def nodes_variable(hosts: Sequence[str]) -> dict[str, str]:
    """The variable with all host names, without which each node goes by ``SLURM_NODEID``; empty if it is too long."""
    text = ",".join(hosts)
    return {"GPUJOB_NODES": text} if len(text) <= MOST_WORD_BYTES else {}


def task_environment(plan: Plan, planned: TaskPlan, facts: RunFacts, restart: int) -> dict[str, str]:
    """Variables that one task gets in addition to the user's environment."""
    values = placeholder_values(plan, planned, facts)
    hosts, node = facts.hosts, facts.hosts[planned.task.node_index]
    progress = progress_path(planned.task, facts.run_dir, node, facts.attempt, restart)
    return {
        **DEFAULT_VARIABLES,
        "GPUJOB_JOB_NAME": plan.job_name,
        "GPUJOB_NODE": node,
        **nodes_variable(hosts),
        "GPUJOB_RESTART": str(restart),
        "GPUJOB_PROGRESS_FILE": str(progress),
        **{name: fill_placeholders(value, values) for name, value in planned.env.items()},
        **{variable: values[name] for name, variable in VARIABLES.items()},
    }
