"""Which module may import which: data goes one way, and what stands beside every worker stays small."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Import:
    """One import of one module, with the place where it stands."""

    importer: str
    imported: str
    place: str


@dataclass(frozen=True)
class Rule:
    """What these modules may import besides the standard library, and what not even of that."""

    modules: tuple[str, ...]
    may: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    besides: tuple[str, ...] = ()
    """Modules among them that another rule is for."""

    def governs(self, importer: str) -> bool:
        """Whether the rule is about this module."""
        return within(importer, *self.modules) and importer not in self.besides

    def permits(self, imported: str) -> bool:
        """Whether it lets its modules import this one."""
        if within(imported, *self.never):
            return False
        standard = imported.partition(".")[0] in sys.stdlib_module_names
        return standard or imported == "exporter" or within(imported, *self.may)


def within(module: str, *packages: str) -> bool:
    """Whether a module is one of these or lies in one of them."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


MACHINE = ("os", "time", "logging", "pathlib", "io", "socket", "subprocess", "threading", "shutil", "tempfile", "glob")
"""Modules by which a calculation would reach the machine or ask what time it is."""
FOUNDATION = (
    "exporter.contract.manifest",
    "exporter.contract.identity",
    "exporter.contract.run_files",
    "exporter.contract.oom_kills",
    "exporter.contract.clock",
    "exporter.contract.errors",
    "exporter.contract.events",
)
BELOW_COLLECTORS = (
    *(*FOUNDATION, "exporter.collecting.families", "exporter.readers", "exporter.derive"),
    *("exporter.collecting.collector", "exporter.workers.runs_reader"),
    *("exporter.progress.worker_logs_reader", "exporter.progress.job_eta"),
    *(
        "exporter.gpus.collectors.page",
        "exporter.gpus.collectors.faults_reader",
        "exporter.gpus.collectors.owners_reader",
    ),
    *("exporter.gpus.collectors.totals_reader", "exporter.workers.exit_facts_reader"),
)
BELOW_SERVICE = (
    *BELOW_COLLECTORS,
    "exporter.sidecar.collectors",
    "exporter.sidecar.background_reads",
    "exporter.sidecar.sidecar",
)
LIST = "exporter.sidecar.collectors.__init__"
PACKS = ("exporter.logs.packs_reader", "exporter.logs.lexicon_reader")
"""Readers of what derive makes patterns of."""
SEARCH = ("exporter.logs.search.automata", "exporter.logs.search.time_budget")
"""Parts of the search in logs that are built on a package."""

SERVING = (
    *("launcher.assembly", "launcher.assembly_checks"),
    *("launcher.backends", "launcher.frontends", "launcher.benchmarks"),
)
"""What a serving job runs: all of it is words and text."""

RULES = {
    "foundation": Rule(FOUNDATION, FOUNDATION),
    "package": Rule(
        ("exporter.__init__", "launcher.__init__", "exporter.readers.__init__", "exporter.derive.__init__")
    ),
    "families": Rule(("exporter.collecting.families",), ("prometheus_client",), never=MACHINE),
    "readers": Rule(
        ("exporter.readers",), (*FOUNDATION, "exporter.readers", "amdsmi", "psutil", "pynvml"), besides=PACKS
    ),
    "packs": Rule(PACKS, (*FOUNDATION, "exporter.readers", "exporter.derive")),
    "derive": Rule(("exporter.derive",), ("exporter.derive",), never=MACHINE, besides=SEARCH),
    "automata": Rule(SEARCH[:1], ("exporter.derive", "ahocorasick_rs"), never=MACHINE),
    "patience": Rule(SEARCH[1:], ("exporter.derive", "regex"), never=MACHINE),
    "collectors": Rule(("exporter.sidecar.collectors",), BELOW_COLLECTORS, besides=(LIST,)),
    "list of collectors": Rule((LIST,), ("exporter.sidecar.collectors",)),
    "refresh": Rule(("exporter.sidecar.background_reads",), BELOW_COLLECTORS),
    "sidecar": Rule(("exporter.sidecar.sidecar",), BELOW_SERVICE),
    "service": Rule(("exporter.sidecar.service",), (*BELOW_SERVICE, "aiohttp")),
    "all but service": Rule(
        ("exporter",),
        ("exporter", "prometheus_client", "psutil", "amdsmi", "pynvml", "ahocorasick_rs", "regex"),
        never=("aiohttp", "launcher"),
        besides=("exporter.sidecar.service", "exporter.attach.monitor_config"),
    ),
    "monitor config": Rule(
        ("exporter.attach.monitor_config",),
        ("exporter.contract.errors", "exporter.contract.manifest", "exporter.derive", "yaml"),
    ),
    "attach": Rule(("exporter.attach.settings",), (*FOUNDATION, "exporter.readers")),
    "finder": Rule(("exporter.attach.finder",), (*BELOW_SERVICE, "exporter.attach.outcome")),
    "outcome": Rule(("exporter.attach.outcome",), ("exporter.derive",), never=MACHINE),
    "launcher": Rule(
        ("launcher",),
        (
            *(*FOUNDATION, "exporter.readers", "exporter.derive", "launcher"),
            *("click", "pydantic", "pydantic_core", "requests", "rich", "yaml"),
        ),
    ),
    "wrapper": Rule(
        ("launcher.wrap", "launcher.environment", "launcher.port_claims"),
        ("exporter.contract.run_files", "exporter.contract.oom_kills", "launcher.environment", "launcher.port_claims"),
        never=("dataclasses", "argparse", "typing", "logging"),
    ),
    "supervisor": Rule(("launcher.supervise",), ("launcher.environment",)),
    "guard": Rule(
        ("launcher.guard",),
        ("exporter.contract.run_files", "launcher.environment", "launcher.wrap"),
        never=("dataclasses", "argparse", "typing", "logging", "subprocess"),
    ),
    "placement": Rule(("launcher.topology", "launcher.hostlist"), (*FOUNDATION, "launcher"), never=MACHINE),
    "serving": Rule(SERVING, (*FOUNDATION, "launcher", "yaml"), never=MACHINE),
    "batch script": Rule(
        ("launcher.sbatch",),
        (*FOUNDATION, "launcher"),
        never=tuple(module for module in MACHINE if module != "pathlib"),  # for the types of its arguments
    ),
}
PURE = ("exporter.derive", "launcher.topology", "launcher.hostlist", "launcher.sbatch", *SERVING)


def is_module(name: str) -> bool:
    """Whether this is a module or package of this repository."""
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imports(text: str, importer: str, place: str) -> Iterator[Import]:
    """Every import in a source text, inside functions too; ``from a import b`` is ``a.b`` where that is a module.

    A relative import keeps its dots and so is none that a rule permits.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer, alias.name, f"{place}:{node.lineno}")
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield Import(importer, name if is_module(name) else base, f"{place}:{node.lineno}")


def sources() -> dict[str, Path]:
    """Every module of exporter and launcher with its file."""
    paths = [path for folder in ("exporter", "launcher") for path in sorted((ROOT / folder).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}


def all_imports() -> Iterator[Import]:
    """Every import of every module of exporter and launcher."""
    for importer, path in sources().items():
        yield from imports(path.read_text(encoding="utf-8"), importer, str(path.relative_to(ROOT)))


@pytest.mark.parametrize("name", RULES)
def test_a_layer_imports_only_what_lies_below_it(name: str) -> None:
    rule = RULES[name]
    wrong = [entry for entry in all_imports() if rule.governs(entry.importer) and not rule.permits(entry.imported)]
    assert not wrong, "\n".join(f"{entry.place}: {name} may not import {entry.imported}" for entry in wrong)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_about_some_module(name: str) -> None:
    assert any(RULES[name].governs(importer) for importer in sources()), f"no module is governed by {name}"


def test_pure_modules_open_and_print_nothing() -> None:
    wrong = []
    for importer, path in sources().items():
        if within(importer, *PURE):
            names = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Name)]
            wrong += [f"{path}:{name.lineno}: {name.id}" for name in names if name.id in ("open", "print", "input")]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "imported"),
    [
        ("import os.path", "os.path"),
        ("from os import environ", "os"),
        ("from exporter import records, __version__", "exporter.contract.run_files exporter"),
        ("from exporter.collecting import collector as base", "exporter.collecting.collector"),
        ("def late():\n    import aiohttp", "aiohttp"),
        ("if TYPE_CHECKING:\n    from launcher.plan import Plan", "launcher.plan"),
        ("from . import eta", "."),
        ("from ..readers import tail", "..readers"),
    ],
)
def test_every_way_to_import_is_seen(text: str, imported: str) -> None:
    assert " ".join(entry.imported for entry in imports(text, "exporter.progress.eta", "eta.py")) == imported


@pytest.mark.parametrize(
    ("name", "imported"),
    [
        ("derive", "os.path"),
        ("derive", "time"),
        ("derive", "exporter.logs.tail_reader"),
        ("readers", "exporter.collecting.collector"),
        ("readers", "exporter.progress.eta"),
        ("collectors", "exporter.workers.collector"),
        ("collectors", "exporter.sidecar.background_reads"),
        ("foundation", "psutil"),
        ("foundation", "exporter.collecting.families"),
        ("all but service", "aiohttp.web"),
        ("all but service", "launcher.plan"),
        ("all but service", "yaml"),
        ("service", "launcher.plan"),
        ("monitor config", "pydantic"),
        ("monitor config", "exporter.machine.folders"),
        ("attach", "exporter.sidecar.sidecar"),
        ("finder", "exporter.sidecar.service"),
        ("outcome", "time"),
        ("launcher", "exporter.workers.collector"),
        ("launcher", "exporter.sidecar.service"),
        ("wrapper", "exporter.contract.manifest"),
        ("wrapper", "argparse"),
        ("placement", "subprocess"),
        ("serving", "os"),
        ("serving", "pathlib"),
        ("batch script", "os"),
    ],
)
def test_a_rule_refuses_what_lies_beside_or_above(name: str, imported: str) -> None:
    assert not RULES[name].permits(imported)


def loaded_by(*modules: str) -> set[str]:
    """Modules in a fresh isolated interpreter after it has imported these."""
    program = f"import sys\nbefore = set(sys.modules)\nimport {', '.join(modules)}\nprint(*(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=30, check=True, cwd="/"
    )
    return set(done.stdout.split())


HEAVY = {
    *{"aiohttp", "asyncio", "psutil", "pydantic", "prometheus_client", "amdsmi", "pynvml", "launcher", "rich", "yaml"},
    "click",
}


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        (
            ("exporter.contract.manifest", "exporter.contract.run_files"),
            HEAVY | {"exporter.collecting.families", "exporter.sidecar.collectors"},
        ),
        (
            ("launcher.wrap",),
            (HEAVY - {"launcher"})
            | {"dataclasses", "argparse", "typing", "inspect", "logging", "pathlib", "subprocess", "threading"}
            | {"exporter.contract.manifest", "launcher.plan", "launcher.config"},
        ),
        (
            ("exporter.cli",),
            {
                "aiohttp",
                "pydantic",
                "launcher",
                "rich",
                "yaml",
                "click",
                "exporter.sidecar.service",
                "exporter.attach.settings",
            },
        ),
        (
            ("exporter.attach.settings", "exporter.attach.finder"),
            {"aiohttp", "pydantic", "launcher", "rich", "yaml", "click"},
        ),
        (("exporter.attach.monitor_config",), HEAVY - {"yaml"}),
        (
            ("exporter.gpus.vendors_reader",),
            HEAVY | {"ctypes", "exporter.gpus.nvidia.reader", "exporter.gpus.amd.reader"},
        ),
    ],
    ids=["foundation", "wrapper", "command line", "running job", "monitor config", "vendors"],
)
def test_importing_loads_nothing_heavy(modules: tuple[str, ...], unwanted: set[str]) -> None:
    loaded = loaded_by(*modules)
    assert loaded >= set(modules)
    assert not loaded & unwanted
