"""Import rules: the order of rooms, pure calculations by file name, few modules next to each worker."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A room imports only itself and rooms to its left. The exporter never imports the launcher.
ROOMS = {
    "exporter": (
        *("contract", "machine", "slurm", "collecting", "logs", "files", "progress", "gpus", "workers", "launch"),
        *("timeline", "web", "sidecar", "attach", "hub", "alerts", "gate", "cli"),
    ),
    "launcher": (
        *("errors", "words", "programs", "guard", "plan", "scan", "rundir", "jobfile", "verify", "steps"),
        *("registry", "planner", "report", "check", "run", "watch", "show", "attach", "sweep"),
        *("pipeline", "fleet", "track", "alerts", "boards", "stack", "export", "cli"),
    ),
}
COMMANDS = ("launcher.cli", "exporter.cli")  # import lazily, so that `--help` and `watch` are fast
ENTRIES = ("exporter", "exporter.__main__", "launcher", "launcher.__main__", "launcher._entry", "launcher.api")
TYPES_ONLY = {("exporter.collecting.collector", "exporter.gpus")}  # annotations of the inputs of a collector

MOST_MODULES = 12  # in a room, so that a reader can survey it
LARGE_ROOMS = {
    "exporter/contract",  # one file for each thing that one part writes and another reads
    "exporter/files/formats",  # a catalogue: one file per format
    "launcher/run",  # the orchestrator
}
CATALOGUES = {  # their __init__ is the registry; every other one contains only its docstring
    *(
        "exporter/files/formats",
        "launcher/planner/backends",
    ),
}

MACHINE = {"os", "time", "logging", "pathlib", "io", "socket", "subprocess", "threading", "shutil", "tempfile", "glob"}
TOUCHES_MACHINE = (  # rooms whose purpose is to touch the machine
    *("exporter.machine", "exporter.gpus.nvidia", "exporter.gpus.amd", "exporter.files.formats"),
    *(
        "exporter.web",
        "exporter.sidecar",
        "exporter.attach",
        "exporter.contract",
        "exporter.collecting",
        "exporter.cli",
    ),
    *("exporter.hub.store", "exporter.hub.engine", "exporter.hub.api.listeners", "exporter.hub.api.service"),
    *("exporter.hub.process", "exporter.alerts.receiver", "exporter.alerts.log_file", "exporter.gate"),
)
PURE_IN_LAUNCHER = (
    *("launcher.planner.assembly", "launcher.planner.assembly_checks", "launcher.planner.topology"),
    *(
        "launcher.planner.backends",
        "launcher.planner.benchmarks",
        "launcher.planner.frontends",
        "launcher.planner.nginx",
    ),
    "launcher.steps.hostlist",
)
WITH_PATHS = ("launcher.steps.batch_script",)  # pathlib for the types of its arguments

FOR_LAUNCHER = (  # parts of the exporter that the launcher may import
    *("contract", "machine", "slurm", "logs", "files", "progress", "workers", "launch"),
    *("gpus.records", "gpus.inventory_reader", "gpus.analysis", "attach.workers_reader"),
    *("web.config_file", "hub.index_reader", "alerts.messages", "alerts.log_file"),
)
IN_A_JOB = ("programs", "plan", "rundir", "verify", "steps", "registry", "report", "run", "watch")
PACKAGES = {  # third-party package: where it may be imported
    "aiohttp": ("exporter.web.aiohttp_server",),
    "ahocorasick_rs": ("exporter.logs.search.automata",),
    "bcrypt": ("exporter.web", "launcher.stack"),
    "amdsmi": ("exporter.gpus.amd",),
    "click": ("launcher.cli",),
    "pydantic": ("launcher.jobfile",),
    "pydantic_core": ("launcher.jobfile",),
    "psutil": ("launcher.check",),
    "pynvml": ("exporter.gpus",),
    "regex": ("exporter.logs.search.time_budget",),
    "requests": ("launcher.check", "launcher.report.trackers", "launcher.watch"),
    "rich": ("launcher.watch", "launcher.cli"),
    "yaml": (
        *("launcher.jobfile", "launcher.planner", "launcher.rundir"),
        *("launcher.check", "launcher.show", "launcher.sweep", "launcher.cli", "exporter.web.config"),
        "exporter.contract.bounded_yaml",
    ),
}


class Import(NamedTuple):
    """One import of one module, with its place."""

    importer: str
    imported: str
    place: str
    inside_function: bool = False
    reason: str = ""  # the comment on its line


def is_in(module: str, *packages: str) -> bool:
    """Whether a module is one of these or lies in one of them."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def is_module(name: str) -> bool:
    """Whether this is a module or package of this repository."""
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imports(text: str, importer: str, place: str) -> Iterator[Import]:
    """Every import in a source text, inside functions too; ``from a import b`` is ``a.b`` where that is a module."""
    tree, lines = ast.parse(text), text.splitlines()
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names = [f"{base}.{name}" if is_module(f"{base}.{name}") else base for name in names]
        reason = lines[node.lineno - 1].partition("#")[2].strip()
        for name in names:
            yield Import(importer, name, f"{place}:{node.lineno}", id(node) in inside, reason)


@functools.cache
def sources() -> dict[str, Path]:
    """Every module of exporter and launcher with its file."""
    paths = [path for package in ROOMS for path in sorted((ROOT / package).rglob("*.py"))]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


@functools.cache
def all_imports() -> tuple[Import, ...]:
    """Every import of every module of exporter and launcher."""
    return tuple(
        entry
        for importer, path in sources().items()
        for entry in imports(path.read_text(encoding="utf-8"), importer, str(path.relative_to(ROOT)))
    )


def room_of(module: str) -> tuple[str, str]:
    """Package and room of a module, the room empty for the package itself."""
    package, _, rest = module.partition(".")
    return package, rest.partition(".")[0]


def is_collector(module: str) -> bool:
    """Whether, by its file name, the module connects reader, calculation and page."""
    return module.rpartition(".")[2].endswith("collector") and module != "exporter.collecting.collector"


def is_pure(module: str) -> bool:
    """Whether the module must not touch the machine or read the clock."""
    if is_in(module, "launcher"):
        return is_in(module, *PURE_IN_LAUNCHER)
    layer = re.search(r"(^|_)(reader|collector)$", module.rpartition(".")[2])
    return is_in(module, "exporter") and module not in ENTRIES and not layer and not is_in(module, *TOUCHES_MACHINE)


def import_problem(importer: str, imported: str) -> str | None:
    """Reason why a module may not import another, or None."""
    package, room = room_of(importer)
    other, target = room_of(imported)
    if imported.startswith("."):
        return "imports are absolute"
    if other in PACKAGES and not is_in(importer, *PACKAGES[other]):
        return f"{other} is imported in {', '.join(PACKAGES[other])} only"
    if other not in ROOMS:
        if other not in sys.stdlib_module_names and other not in PACKAGES:
            return "an undeclared package"
        if is_pure(importer) and other in MACHINE:
            return "a calculation takes values: a reader or collector touches the machine"
        return (
            f"{other} touches the machine" if is_in(importer, *WITH_PATHS) and other in MACHINE - {"pathlib"} else None
        )
    if package == "exporter" and other == "launcher":
        return "the exporter never imports the launcher"
    if package == "launcher" and other == "exporter":
        shared = not target or is_in(imported, *(f"exporter.{name}" for name in FOR_LAUNCHER))
        return None if shared and not is_collector(imported) else "not for the launcher"
    if importer in ENTRIES or not target:
        return None
    if ROOMS[package].index(target) > ROOMS[package].index(room):
        return f"{target} is to the right of {room}"
    if package == "launcher" and room in IN_A_JOB and target in ("jobfile", "planner"):
        return "the job file's schema is never loaded in a job"
    if is_collector(importer) and is_collector(imported):
        return "collectors do not import one another"
    return None


def test_dataclasses_are_those_that_cost_nothing_at_import() -> None:
    wrong = [
        name
        for name, path in sources().items()
        if re.search(
            r"^from dataclasses import .*\bdataclass\b|@dataclasses\.dataclass", path.read_text("utf-8"), re.MULTILINE
        )
    ]
    assert wrong == [], "import dataclass from exporter.contract.lazy_dataclass"


def test_every_import_is_of_a_room_to_the_left() -> None:
    wrong = [
        f"{entry.place}: {entry.importer} imports {entry.imported}: {reason}"
        for entry in all_imports()
        if (reason := import_problem(entry.importer, entry.imported))
        and not any(entry.importer == name and is_in(entry.imported, room) for name, room in TYPES_ONLY)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_is_in_a_room() -> None:
    misplaced = [name for name in sources() if name not in ENTRIES and room_of(name)[1] not in ROOMS[room_of(name)[0]]]
    assert not misplaced
    assert {room_of(name) for name in sources() if name not in ENTRIES} == {
        (package, room) for package, rooms in ROOMS.items() for room in rooms
    }


def test_no_import_cycles() -> None:
    reaches: dict[str, set[str]] = {name: set() for name in sources()}
    for entry in all_imports():
        target = entry.imported
        if target in reaches and (entry.importer, target) != (target, target) and not entry.inside_function:
            reaches[entry.importer].add(target)
    for importer, room in TYPES_ONLY:
        reaches[importer] = {name for name in reaches[importer] if not is_in(name, room)}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for target in sorted(reaches[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in reaches:
        visit(name, ())


def test_a_room_has_at_most_12_modules() -> None:
    folders = {path.parent for path in sources().values()}
    full = {
        str(folder.relative_to(ROOT))
        for folder in folders
        if len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) > MOST_MODULES
    }
    assert full == LARGE_ROOMS


def test_the_init_of_a_room_contains_only_its_docstring() -> None:
    for path in sources().values():
        folder = str(path.parent.relative_to(ROOT))
        if path.name != "__init__.py" or folder in CATALOGUES or folder == "exporter":
            continue
        body = ast.parse(path.read_text(encoding="utf-8")).body
        assert [type(node) for node in body] == [ast.Expr], folder


def test_calculations_do_not_open_or_print() -> None:
    wrong = []
    for name, path in sources().items():
        if is_pure(name):
            tree = ast.walk(ast.parse(path.read_text("utf-8")))
            calls = [node for node in tree if isinstance(node, ast.Name) and node.id in ("open", "print", "input")]
            wrong += [f"{path}:{node.lineno}: {node.id}" for node in calls]
    assert not wrong, "\n".join(wrong)


def test_an_import_inside_a_function_has_a_reason() -> None:
    wrong = [
        f"{entry.place}: {entry.imported}"
        for entry in all_imports()
        if entry.inside_function and "lazy: " not in entry.reason and not is_in(entry.importer, *COMMANDS)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "imported"),
    [
        ("import os.path", "os.path"),
        ("from os import environ", "os"),
        ("from exporter.contract import run_files, names", "exporter.contract.run_files exporter.contract"),
        ("def late():\n    import aiohttp", "aiohttp"),
        ("if TYPE_CHECKING:\n    from launcher.plan.plan import Plan", "launcher.plan.plan"),
        ("from . import eta", "."),
        ("from ..logs import tail_reader", "..logs"),
    ],
)
def test_all_forms_of_import_are_found(text: str, imported: str) -> None:
    assert " ".join(entry.imported for entry in imports(text, "exporter.progress.eta", "eta.py")) == imported


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("exporter.progress.track", "os.path"),
        ("exporter.logs.search.engine", "time"),
        ("exporter.machine.procfs", "exporter.collecting.families"),
        ("exporter.logs.tail_reader", "exporter.progress.track"),
        ("exporter.logs.tail_reader", "psutils"),
        ("exporter.workers.collector", "exporter.progress.collector"),
        ("exporter.workers.collector", "exporter.sidecar.background_reads"),
        ("exporter.sidecar.sidecar", "aiohttp.web"),
        ("exporter.sidecar.service", "launcher.plan.plan"),
        ("exporter.attach.finder", "pydantic"),
        ("exporter.cli", "launcher.attach.prepare"),
        ("launcher.report.report", "exporter.workers.collector"),
        ("launcher.report.report", "exporter.sidecar.service"),
        ("launcher.run.tasks", "exporter.gpus.nvidia.reader"),
        ("launcher.watch.view", "launcher.jobfile.jobfile"),
        ("launcher.run.orchestrator", "launcher.planner.planner"),
        ("launcher.plan.plan", "launcher.steps.steps"),
        ("launcher.planner.topology", "subprocess"),
        ("launcher.planner.backends.vllm", "os"),
        ("launcher.steps.batch_script", "os"),
        ("launcher.plan.plan", ".ports"),
    ],
)
def test_forbidden_imports_are_refused(importer: str, imported: str) -> None:
    assert import_problem(importer, imported)


HEAVY = {
    *("aiohttp", "asyncio", "psutil", "pydantic", "prometheus_client", "amdsmi", "pynvml", "launcher", "rich", "yaml"),
    "click",
}
SLOW_STDLIB = {"dataclasses", "argparse", "typing", "inspect", "logging", "pathlib", "subprocess", "threading"}
SCHEMA = {"pydantic", "launcher.jobfile", "launcher.planner"}
SLOW_TO_START = {"rich", "http.client", "ssl", "email"}  # 20 to 50 ms each, in every job


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        (
            ("exporter.contract.manifest", "exporter.contract.run_files"),
            HEAVY | {"exporter.collecting", "exporter.sidecar"},
        ),
        (
            ("launcher.programs.wrapper",),
            (HEAVY - {"launcher"}) | SLOW_STDLIB | {"exporter.contract.manifest", "launcher.plan"} | SCHEMA,
        ),
        (("launcher.guard",), (HEAVY - {"launcher"}) | SLOW_STDLIB | SCHEMA),
        (
            ("exporter.cli",),
            {"aiohttp", "pydantic", "launcher", "rich", "yaml", "click", "exporter.sidecar.service", "exporter.attach"}
            | {"exporter.hub", "sqlite3"},
        ),
        (
            ("exporter.attach.finder",),
            {"aiohttp", "pydantic", "launcher", "rich", "yaml", "click"},
        ),
        (
            ("exporter.sidecar.service",),
            SCHEMA | {"aiohttp.client", "yaml", "exporter.hub", "exporter.slurm", "sqlite3"},
        ),
        (("exporter.hub.process",), SCHEMA | {"aiohttp.client", "yaml", "launcher"}),
        (("launcher.attach.conclude",), SCHEMA | {"aiohttp", "click", "rich"}),
        (
            ("exporter.gpus.vendors_reader",),
            HEAVY | {"ctypes", "exporter.gpus.nvidia.reader", "exporter.gpus.amd.reader"},
        ),
        (
            ("launcher.watch.view", "launcher.watch.lines", "launcher.report.report", "launcher.registry.search"),
            SCHEMA | SLOW_TO_START,
        ),
        (
            ("launcher.run.orchestrator", "launcher.run.lost_orchestrator", "launcher.programs.supervisor"),
            SCHEMA | SLOW_TO_START,
        ),
    ],
    ids=[
        "contract",
        "wrapper",
        "guard",
        "command line",
        "attached job",
        "page",
        "hub",
        "attached job's end",
        "vendors",
        "watch",
        "job",
    ],
)
def test_imports_load_no_heavy_modules(modules: tuple[str, ...], unwanted: set[str]) -> None:
    program = f"import sys\nbefore = set(sys.modules)\nimport {', '.join(modules)}\nprint(*(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=30, check=True, cwd="/"
    )
    loaded = set(done.stdout.split())
    assert loaded >= set(modules)
    assert not loaded & unwanted
