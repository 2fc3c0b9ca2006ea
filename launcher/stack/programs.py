"""Where Prometheus, Alertmanager and Grafana are on this machine, and what to do where they are not."""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from launcher.errors import LauncherError

BIN_VARIABLE = "GPUJOB_STACK_BIN"
NAMES = {"prometheus": ("prometheus",), "alertmanager": ("alertmanager", "prometheus-alertmanager")}
RUNTIMES = ("apptainer", "singularity")
VERSION_S = 30.0  # a container on a busy file system starts slowly
OLDEST = {  # `keep_firing_for`; the texts of messages; one program for server and tools
    "prometheus": (2, 42),
    "alertmanager": (0, 25),
    "grafana": (10, 0),
}
GRAFANA_HOME = "/usr/share/grafana"  # of its packages and its image
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "armv7"}  # as the projects name their files


class Program(NamedTuple):
    """A program that was found."""

    name: str
    command: tuple[str, ...]
    version: tuple[int, ...]
    where: str

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version))


class Places(NamedTuple):
    """Places to search."""

    folder: str | None  # with the programs
    images: Mapping[str, str]  # by program, for Apptainer
    bound: Sequence[Path]  # folders that a container must see


def find_program(name: str, places: Places, environ: Mapping[str, str]) -> Program:
    """Find a program: its image, else in the folder named, else on PATH. Raises LauncherError."""
    command, where = _find(name, places, environ)
    return _program(name, command, where)


def find_grafana(places: Places, environ: Mapping[str, str]) -> tuple[Program, str] | None:
    """Find Grafana and its home: its image, else in the folder named, else of PATH or a package. None without one.

    Raises LauncherError if its image cannot be run, or if what is found is another program or too old.
    """
    if "grafana" in places.images:
        command, where = _in_container("grafana", places, environ)
        return _program("grafana", command, where), GRAFANA_HOME
    on_path = shutil.which("grafana", path=environ.get("PATH"))
    named = [] if places.folder is None else [Path(places.folder), Path(places.folder).parent]
    found = [] if on_path is None else [Path(on_path).resolve().parents[1]]
    # the program of a home, since that of a package on PATH is a script with settings of its own
    for home in [*named, *found, Path(GRAFANA_HOME)]:
        program = home / "bin" / "grafana"
        if (home / "conf" / "defaults.ini").is_file() and os.access(program, os.X_OK):
            return _program("grafana", [str(program)], str(program)), str(home)
    return None


def _program(name: str, command: Sequence[str], where: str) -> Program:
    """The program that this command runs. Raises LauncherError if it is another one, or too old."""
    try:
        done = subprocess.run(
            [*command, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LauncherError(f"{name}: {where} cannot be run: {getattr(error, 'strerror', None) or error}") from error
    said = done.stdout + done.stderr  # Alertmanager before 0.26 used the latter
    match = re.search(r"version (\d+)\.(\d+)(?:\.(\d+))?", said)
    if match is None or name not in said:
        raise LauncherError(f"{name}: {where} is not {name}: it says {' '.join(said.split())[:200]!r}")
    version = tuple(int(part) for part in match.groups(default="0"))
    if version[:2] < OLDEST[name]:
        oldest = ".".join(map(str, OLDEST[name]))
        raise LauncherError(f"{name}: {where} is version {'.'.join(map(str, version))}; {oldest} or newer is needed")
    return Program(name, tuple(command), version, where)


def find_promtool(prometheus: Program, environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The checker of configurations that belongs to a Prometheus; None without one."""
    *container, program = prometheus.command
    if container:
        return (*container, "promtool")
    beside = Path(program).with_name("promtool")
    found = str(beside) if beside.exists() else shutil.which("promtool", path=environ.get("PATH"))
    return None if found is None else (found,)


def _find(name: str, places: Places, environ: Mapping[str, str]) -> tuple[list[str], str]:
    if name in places.images:
        return _in_container(name, places, environ)
    path = environ.get("PATH") if places.folder is None else places.folder
    for word in NAMES[name]:
        if found := shutil.which(word, path=path):
            return [os.path.abspath(found)], found
    raise LauncherError(_missing(name, places.folder))


def _in_container(name: str, places: Places, environ: Mapping[str, str]) -> tuple[list[str], str]:
    image = os.path.abspath(os.path.expanduser(places.images[name]))
    if not os.path.exists(image):
        raise LauncherError(f"{name}: the image {image} does not exist; `stack.image.{name}` names it")
    for runtime in RUNTIMES:
        if found := shutil.which(runtime, path=environ.get("PATH")):
            binds = [word for folder in places.bound for word in ("--bind", str(folder))]
            program = f"{GRAFANA_HOME}/bin/grafana" if name == "grafana" else f"/bin/{name}"
            return [found, "exec", *binds, image, program], image
    raise LauncherError(f"{name}: its image needs {' or '.join(RUNTIMES)} on PATH; load the module, or use --bin DIR")


def _missing(name: str, folder: str | None) -> str:
    machine = platform.machine()
    file = f"{name}-VERSION.linux-{_ARCHITECTURES.get(machine, machine)}.tar.gz"
    place = "on PATH" if folder is None else f"in {folder}"
    return (
        f"{name} is not {place}. No administrator is needed; do one of these:\n"
        f"  file:      unpack {file} from https://prometheus.io/download/, then `gpujob stack up --bin DIR`\n"
        f"             or `export {BIN_VARIABLE}=DIR`\n"
        f"  container: `apptainer pull {name}.sif docker://prom/{name}`, and in the cluster file\n"
        f"             `stack: {{image: {{{name}: /path/to/{name}.sif}}}}`\n"
        f"  module:    `module avail {name}` shows whether your site has one"
    )
