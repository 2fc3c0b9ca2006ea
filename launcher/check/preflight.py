"""Preflight checks of a plan on this machine. They change nothing."""

import os
import shutil
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from exporter.contract.errors import ExporterError
from exporter.contract.manifest import OWN_ADDRESSES
from exporter.files.outputs.csv_reader import is_sidecar_csv
from exporter.gpus.analysis.users import UUID_FORMS, parse_visible_devices
from exporter.logs.lexicon import AUTO, GENERIC
from exporter.logs.lexicon_reader import lexicon_of_job
from exporter.logs.patterns import Pattern, PatternKind
from exporter.logs.search.extraction import NumberExtractor
from exporter.machine.folders import file_names
from exporter.web.config_file import load_web_config
from launcher.check import finding
from launcher.check.finding import CheckFinding
from launcher.check.inputs import check_inputs
from launcher.check.job_checks import check_planned_job
from launcher.check.plan_checks import check_plan_alone
from launcher.check.python_modules import InterpreterSilent, python_module
from launcher.check.role_programs import (
    RUN_PATH_TEXT,
    UNLESS_ON_NODES,
    environment_of,
    find_program,
    is_known_only_at_run,
    is_python,
    may_be_on_nodes,
    modules_not_found,
    role_commands,
)
from launcher.check.shell_words import (
    check_shell_words,
    check_unexpanded_paths,
    check_unexpanded_values,
    is_shell_word,
    shell_word_problem,
)
from launcher.check.unknown_placeholders import check_placeholders
from launcher.jobfile.resources import command_argv
from launcher.plan.plan import BALANCER, BENCHMARK, FRONTENDS, INFRA, WORKERS, Plan, TaskPlan
from launcher.planner.planned_job import PlannedJob
from launcher.rundir.cluster_file import read_trusted_owners
from launcher.rundir.output_locks import find_output_in_use
from launcher.rundir.trust import distrust_directory, other_writers, read_facts

INTERPRETERS = ("python", "python3", "bash", "sh")
_DEV = Path("/dev")
_OTHER_GPUS = ("kfd", "dxg")  # device files of AMD's driver and of WSL, which do not say how many GPUs there are
MOST_SAMPLE_BYTES = 256 * 1024  # read from a sample file


def check_plan(planned_job: PlannedJob) -> list[CheckFinding]:
    """Run the cheap checks, before every start."""
    return [
        *check_commands(planned_job),
        *(check_modules(planned_job) if planned_job.local else ()),  # the nodes may have modules that are missing here
        *check_variables(planned_job),
        check_gpus_here(planned_job),
        *check_inputs(planned_job.plan, planned_job.spec.inputs, check_contents=False),
        *check_directories(planned_job),
        check_output_files(planned_job),
        *check_output_use(planned_job),
        *check_placeholders(planned_job),
        *check_sample(planned_job),
        check_target_directory(planned_job),
        *check_page(planned_job),
        *check_planned_job(planned_job),
        *check_plan_alone(planned_job),
    ]


# -- environment ---------------------------------------------------------------------------------


def check_commands(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Check that Slurm exists, and each role's program and script."""
    if not planned_job.local and shutil.which("sbatch") is None:
        message = "is not on PATH; load the Slurm module, or use `gpujob run` on this machine"
        yield finding.error("no-slurm", "sbatch", message)
    for place, planned, argv in role_commands(planned_job):
        if not argv:
            message = f"{planned.task.role} has no command; give it one, or use a backend that has one"
            yield finding.error("no-command", place, message)
        elif planned.contained:
            yield finding.not_checked("program", place, f'"{argv[0]}" is in the container')
        else:
            yield from _check_program(planned_job, place, planned, argv)


def _check_program(planned_job: PlannedJob, place: str, planned: TaskPlan, argv: list[str]) -> Iterator[CheckFinding]:
    """Check the program and script of one role on this machine."""
    program, script, workdir = argv[0], _script(argv), planned_job.plan.workdir
    missing = find_program(planned_job, planned, program) is None
    if missing and "/" not in program and is_known_only_at_run(planned_job, planned, "PATH"):
        yield finding.not_checked("program", place, f'"{program}" is searched for in {RUN_PATH_TEXT}')
    elif missing:
        at, message = _missing_program(planned_job, place, planned, program)
        is_path = "/" in program and not may_be_on_nodes(planned_job, program)
        level = finding.error if planned_job.local or is_path or is_shell_word(program) else finding.warning
        yield level("no-program", at, message)
    if script is not None and not Path(workdir, script).exists():
        message = f'"{script}" does not exist in {workdir}; give its path from there, or use {{job_dir}}'
        level = finding.warning if may_be_on_nodes(planned_job, script) else finding.error
        yield level("no-script", place, message)
    elif not missing:
        message = f'"{program}"' + (f' and "{script}" exist' if script is not None else " exists")
        yield finding.ok("program", place, message)


def check_modules(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Check that the Python of engines and front ends finds the package that it will run, once for each."""
    seen = set[tuple[str, ...]]()
    for place, planned, argv in role_commands(planned_job):
        found = python_module(argv) if argv and is_python(argv[0]) and not planned.contained else None
        program = find_program(planned_job, planned, argv[0]) if found is not None else None
        environment = environment_of(planned_job, planned)
        if found is None or program is None or (asked := (program, *found, environment.get("PYTHONPATH", ""))) in seen:
            continue
        seen.add(asked)
        at, _ = _origin(planned_job, planned, argv[0]) or (place, "")
        try:
            missing = modules_not_found(planned_job, planned, program, found[-1:], found[:-1])
        except InterpreterSilent as why:
            yield finding.not_checked("module", at, str(why))
            continue
        problem, fix = f"{program} does not find {found[-1]}", "activate the environment that has it"
        if not missing:
            yield finding.ok("module", at, f"{program} finds {found[-1]}")
        elif planned_job.local:
            yield finding.error("no-module", at, f"{problem}; {fix}, or install it")
        else:
            yield finding.warning("no-module", at, f"{problem} here; unless the nodes have it, {fix}")


def _missing_program(planned_job: PlannedJob, place: str, planned: TaskPlan, program: str) -> tuple[str, str]:
    """Place that requires a missing program, and a message with a fix."""
    at, who = _origin(planned_job, planned, program) or (place, "")
    if not who:
        if problem := shell_word_problem(planned_job, planned, program):
            return at, problem
        if (path := planned.env.get("PATH")) is not None and "/" not in program:
            return at, f'"{program}" is not in "{path}", the PATH of `env`; correct that, or give its full path'
        fix = UNLESS_ON_NODES if may_be_on_nodes(planned_job, program) else ""
        fix += "check its spelling" if os.path.isabs(program) else "check its spelling, or give its full path"
        return at, f'"{program}" is not a program on this machine; {fix}'
    return at, f'{who} needs "{program}" on PATH; activate the environment that has it'


def _origin(planned_job: PlannedJob, planned: TaskPlan, program: str) -> tuple[str, str] | None:
    """Key and name that supply a task's command, or None if the job file contains the command itself."""
    spec = planned_job.spec
    own = [command_argv(workers) for workers in spec.workers if workers.role == planned.task.role]
    if planned.stage == WORKERS and not any(words[:1] == [program] for words in own):
        return "backend.type", spec.backend.type
    if planned.stage == BALANCER:
        return "frontend.nginx", "the balancer"
    frontend = spec.frontend
    if frontend is not None and (planned.stage == INFRA or (planned.stage == FRONTENDS and frontend.command is None)):
        return "frontend.type", frontend.type
    if planned.stage == BENCHMARK and spec.benchmark is not None and spec.benchmark.command is None:
        return "benchmark.type", spec.benchmark.type
    return None


def _script(argv: list[str]) -> str | None:
    """The script that an interpreter runs, or None."""
    name = os.path.basename(argv[0]).rstrip("0123456789.")
    if name not in INTERPRETERS:
        return None
    for word in argv[1:]:
        if word in ("-c", "-m"):
            return None
        if not word.startswith("-"):
            return word if word.endswith((".py", ".sh")) else None
    return None


def check_variables(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Check required variables, and those that commands use."""
    for name in planned_job.spec.environment.required:
        roles = [
            planned.task.role
            for _, planned, _ in role_commands(planned_job)
            if not environment_of(planned_job, planned).get(name)
        ]
        if roles:
            message, fix = f"{name} is not set for {', '.join(roles)}; ", "export it here, or set it in `env`"
            if planned_job.plan.setup.parts and not planned_job.local:
                yield finding.warning("no-variable", "environment.required", f"{message}unless `setup` sets it, {fix}")
            else:
                yield finding.error("no-variable", "environment.required", message + fix)
        else:
            yield finding.ok("variable", "environment.required", f"{name} is set")
    for place, planned, _ in role_commands(planned_job):
        yield from check_shell_words(planned_job, place, planned)
    yield from check_unexpanded_values(planned_job)


# -- resources -----------------------------------------------------------------------------------


def gpu_positions(planned_job: PlannedJob) -> dict[str, set[int]]:
    """GPUs of a local plan, as positions in each CUDA_VISIBLE_DEVICES that a task inherits.

    Empty text: there is none, or one with placeholders, which each task fills in its own way.
    """
    found: dict[str, set[int]] = {}
    name, gpus_per_node = "CUDA_VISIBLE_DEVICES", planned_job.plan.gpus_per_node
    for planned in planned_job.plan.tasks:
        devices = planned.env.get(name, planned_job.environ.get(name, ""))
        positions = {planned.task.node_index * gpus_per_node + gpu for gpu in planned.visible or planned.task.gpus}
        if positions:
            found.setdefault("" if "{" in devices else devices, set()).update(positions)
    return found


def given_devices(devices: str, positions: Collection[int]) -> list[str]:
    """What the wrappers give for these positions of CUDA_VISIBLE_DEVICES; beyond its end, a position is a number."""
    listed = parse_visible_devices(devices)
    return [listed[at] if at < len(listed) else str(at) for at in positions]


def _has_too_few(devices: str, positions: Collection[int]) -> bool:
    """Whether wrappers would give GPUs of this list twice, or others. A role may name its own by its number."""
    listed, given = parse_visible_devices(devices), given_devices(devices, positions)
    return len(set(given)) < len(given) or not set(given) <= set(listed)


def count_gpus(devices: Path = _DEV) -> int:
    """GPUs of this machine by their device files: those of NVIDIA, else those of AMD."""
    nvidia = sum(path.name[6:].isdigit() for path in devices.glob("nvidia*"))
    return nvidia or (sum(1 for _ in devices.glob("dri/renderD*")) if (devices / "kfd").exists() else 0)


def check_gpus_here(planned_job: PlannedJob, gpu_count: int | None = None) -> CheckFinding:
    """Check that this machine has the GPUs of a local plan, and that CUDA_VISIBLE_DEVICES leaves it enough.

    ``gpu_count`` is the number of GPUs here, if already read.
    """
    plan, place = planned_job.plan, "resources.gpus_per_node"
    if not plan.gpus_per_node:
        return finding.ok("gpus", place, "the job asks for no GPUs")
    if not planned_job.local:
        return finding.not_checked("gpus", place, "the job's nodes are not this machine")
    found = gpu_positions(planned_job)
    for devices, positions in found.items():
        if devices and _has_too_few(devices, positions):
            needed = max(positions) + 1
            message = f"the plan uses {needed} GPUs, more than CUDA_VISIBLE_DEVICES={devices} has"
            return finding.error("few-gpus", place, f"{message}; use fewer, or set that variable to {needed} GPUs")
    here = gpu_count if gpu_count is not None else count_gpus(_DEV)
    if not here and any((_DEV / name).exists() for name in _OTHER_GPUS):
        return finding.not_checked("gpus", place, "no file in /dev shows how many GPUs this machine has")
    # A UUID may be that of a MIG instance, and these are not counted either.
    counted = {
        at for devices, positions in found.items() if not devices.lstrip().startswith(UUID_FORMS) for at in positions
    }
    needed = max(counted, default=-1) + 1
    if here < needed:
        message = f"the plan uses {needed} GPUs and this machine has {here}; some workers will not find theirs"
        return finding.warning("few-gpus", place, message)
    if found and not counted:
        return finding.ok("gpus", place, "those that CUDA_VISIBLE_DEVICES names by UUID")
    return finding.ok("gpus", place, f"{needed} of the {here} GPUs of this machine")


# -- output --------------------------------------------------------------------------------------


def check_directories(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Check the directories where the job runs and writes."""
    plan, unexpanded = planned_job.plan, list(check_unexpanded_paths(planned_job))
    yield from unexpanded
    wrong = {item.place for item in unexpanded}
    if "workdir" not in wrong and not Path(plan.workdir).is_dir():
        message = f'"{plan.workdir}" is not a directory; create it or leave workdir out'
        yield finding.error("no-workdir", "workdir", message)
    for place, directory in written_directories(plan):
        if place in wrong:
            continue
        if problem := _unwritable_reason(Path(directory)):
            yield finding.error("not-writable", place, problem)
        elif place == "logs_dir" and (problem := distrust_directory(Path(directory), read_trusted_owners)):
            yield finding.error("untrusted-logs", place, f"is not used: {problem}; name one of your own as logs_dir")
        else:
            state = "can be written to" if Path(directory).is_dir() else "can be created"
            yield finding.ok("writable", place, f'"{directory}" {state}')
    if not planned_job.local and "\\" in plan.logs_dir:
        problem = "contains a backslash, which Slurm's file name patterns cannot express; use another one"
        yield finding.error("backslash", "logs_dir", f'"{plan.logs_dir}" {problem}')


def written_directories(plan: Plan) -> list[tuple[str, str]]:
    """Absolute directories that the job writes to, with their keys."""
    places = [("logs_dir", plan.logs_dir)]
    keys = {"output": "paths.output_dir", "checkpoint": "paths.checkpoint_dir"}
    places += [(keys[group.name], group.directory) for group in plan.manifest.groups if group.name in keys]
    if plan.manifest.logs is not None:
        places.append(("paths.log_dir", plan.manifest.logs.directory))
    seen: dict[str, str] = {}
    for place, directory in places:
        if os.path.isabs(directory):
            seen.setdefault(directory, place)
    return [(place, directory) for directory, place in seen.items()]


def _unwritable_reason(directory: Path) -> str | None:
    for place in (directory, *directory.parents):
        if place.is_dir():
            if os.access(place, os.W_OK | os.X_OK, effective_ids=True):
                return None
            consequence = "" if place == directory else f', so "{directory}" cannot be created'
            return f'no permission to write to "{place}"{consequence}; choose another directory'
        if place.exists():
            return f'"{place}" is not a directory; choose another one'
    return f'"{directory}" has no parent directory'


def check_output_files(planned_job: PlannedJob) -> CheckFinding:
    """Warn about an earlier job's output files: they would be overwritten, or mistaken for this job's."""
    place, group = "paths.output_dir", planned_job.plan.group("output")
    if group.pattern is None or not os.path.isabs(group.directory):
        return finding.ok("output-files", place, "a fresh run directory")
    has_csv, files, first = planned_job.plan.manifest.gpu_metrics, 0, ""
    try:
        for name in file_names(group.directory, group.pattern):
            if not (has_csv and is_sidecar_csv(name)):
                files, first = files + 1, min(first or name, name)
    except OSError as error:
        return finding.not_checked("output-files", place, f'"{group.directory}": {error.strerror}')
    if not files:
        return finding.ok("output-files", place, f'no file matches {group.pattern} in "{group.directory}"')
    count = f"{files} file{'s' if files > 1 else ''}"
    if planned_job.spec.resume:
        return finding.ok(
            "output-files", place, f'the job continues from {count} in "{group.directory}" (resume: true)'
        )
    message = (
        f'"{group.directory}" already contains {count} like {first}; '
        "move them away, choose another directory, or set `resume: true`"
    )
    return finding.warning("output-exists", place, message)


def check_output_use(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Check that no running job writes the same files. Slurm may start this one only after the end of that one."""
    plan = planned_job.plan
    if plan.slurm.dependency is None and (use := find_output_in_use(plan, os.environ)) is not None:
        place, _, message = use.partition(": ")
        make = finding.error if planned_job.local else finding.warning
        yield make("output-in-use", place, message)


# -- monitoring ----------------------------------------------------------------------------------


def check_sample(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Check that the progress patterns match a sample of the log."""
    progress, place, manifest = planned_job.spec.progress, "progress.sample", planned_job.plan.manifest
    if progress.sample is None:
        own = f"{len(manifest.progress)} patterns of the job"
        patterns = own if manifest.progress else _builtin_patterns(manifest.pack)
        message = f"{patterns}, without a sample to test them; give a line of the log, or a file of lines"
        yield finding.not_checked("sample", place, message)
        return
    text = _sample_text(progress.sample, Path(planned_job.plan.workdir))
    lexicon = lexicon_of_job(manifest)
    pack = lexicon.choose_pack(text)
    found = lexicon.engine(pack).scan(text)
    seen = {position.pattern: position for position in found.positions}
    if seen:
        position = next((seen[name] for name in lexicon.preferred_positions(pack) if name in seen), found.positions[-1])
        at = f"{position.done} of {position.total}" if position.total is not None else str(position.done)
        by = f" by the pack {pack}" if lexicon.pack == AUTO and pack != GENERIC else ""
        yield finding.ok("sample", place, f"position {at} found{by}")
    else:
        shown = text.strip().split(b"\n")[0][:80].decode("utf-8", "replace")
        message = (
            f'no position in "{shown}"; give `progress.patterns.items` an expression whose first group is '
            r"the items done and whose second, if any, is the total, as in `(\d+)/(\d+) done`; "
            "`gpujob scan LOG` shows what is found in a complete log"
        )
        yield finding.error("no-position", place, message)
    for pattern in lexicon.progress_patterns(pack):
        if pattern.is_user_defined and not _has_match(pattern, seen, found.values):
            message = f"{pattern.name} finds no number in the sample; does its expression match, and have a group?"
            yield finding.warning("no-match", f"progress.patterns.{pattern.name}", message)


def _builtin_patterns(pack: str) -> str:
    if pack in (AUTO, GENERIC):
        return "the standard patterns (`Processed 120/250 items`)"
    return f"the patterns of the pack {pack}"


def _has_match(pattern: Pattern, positions: Collection[str], values: Collection[str]) -> bool:
    """Whether a pattern found its value. A resume pattern may find none, because a log may have no resume."""
    if pattern.kind is PatternKind.POSITION:
        return pattern.name in positions or not positions
    return pattern.kind is PatternKind.RESUME or any(name in values for name in NumberExtractor(pattern).names)


def check_target_directory(planned_job: PlannedJob) -> CheckFinding:
    """Check that the job can write its target file for Prometheus."""
    directory, place = planned_job.plan.target_dir, "target_dir"
    if directory is None:
        message = "the cluster file names none; Prometheus finds the job only by targets.json in its run directory"
        return finding.not_checked("targets", place, message)
    if os.path.isdir(directory) and os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        facts = read_facts(Path(directory))
        if (writers := other_writers(facts)) is None or facts.mode & stat.S_ISVTX:
            return finding.ok("targets", place, f'"{directory}" can be written to')
        message = f'in "{directory}" {writers} can replace your targets; its owner should run `chmod +t {directory}`'
        return finding.warning("open-target-dir", place, message)
    message = f'"{directory}" is not a directory you can write to; Prometheus will not find this job there'
    return finding.warning("target-dir", place, message)


def check_page(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Check the web configuration file, and report where the sidecars listen."""
    manifest = planned_job.plan.manifest
    address = manifest.listen_address or OWN_ADDRESSES
    if address.startswith((":", "0.0.0.0:", "[::]:")):
        address += ", which is every interface"
    yield finding.ok("listen-address", "listen_address", f"the sidecars listen on {address}")
    if manifest.web_config_file is not None:
        try:
            load_web_config(manifest.web_config_file)
        except ExporterError as error:
            message = f"the job would run without sidecars: {error}"
            yield finding.warning("web-config", "web_config_file", message)


def _sample_text(sample: str | list[str], workdir: Path) -> bytes:
    """The sample lines, read from a file if the text names one."""
    if isinstance(sample, list):
        return "\n".join(sample).encode()
    try:
        with (workdir / Path(sample).expanduser()).open("rb") as source:
            return source.read(MOST_SAMPLE_BYTES)
    except (OSError, ValueError, RuntimeError):
        return sample.encode()  # a line of the log, not a file name
