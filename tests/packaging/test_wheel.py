"""Contents of the wheel, and its use outside the checkout."""

import email
import json
import sys
import zipfile
from pathlib import Path

import pydantic
import pytest
import yaml

from exporter import __version__
from tests.packaging.programs import run

ROOT = Path(__file__).resolve().parents[2]
DEPENDENCIES = Path(pydantic.__file__).parents[1]  # folder of the installed dependencies


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def text_of(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"gpujob-{__version__}.dist-info/{name}").decode()


def test_the_wheel_contains_only_both_packages_and_the_entry(wheel: Path) -> None:
    names = names_in(wheel)
    modules = {
        str(path.relative_to(ROOT)) for package in ("exporter", "launcher") for path in (ROOT / package).rglob("*.py")
    }
    modules.remove("launcher/_entry.py")  # it is gpujob_entry.py in the wheel
    assert modules | {"gpujob_entry.py", "exporter/py.typed", "launcher/py.typed"} <= names
    assert {name.partition("/")[0] for name in names} == {
        *("exporter", "launcher", "gpujob_entry.py", f"gpujob-{__version__}.dist-info", f"gpujob-{__version__}.data")
    }
    assert not [name for name in names if "__pycache__" in name or "/test" in name or name.startswith("test")]
    packs = {str(path.relative_to(ROOT)) for path in (ROOT / "exporter" / "packs").iterdir()}
    assert packs <= names
    assert f"gpujob-{__version__}.data/data/share/man/man1/gpujob.1" in names
    shared = {name.partition("/data/share/gpujob/")[2] for name in names}
    for folder in (
        "alertmanager/rules",
        "alertmanager/runbooks",
        "alertmanager/templates",
        "grafana/dashboards",
        "grafana/page",
        "grafana/provisioning",
    ):
        files = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*") if path.is_file()}
        assert files
        assert files <= shared
    assert "docker/prometheus.yml" in shared
    assert {f"systemd/{path.name}" for path in (ROOT / "docker" / "systemd").iterdir()} <= shared


def test_the_wheel_declares_its_commands_and_dependencies(wheel: Path) -> None:
    assert text_of(wheel, "entry_points.txt").split() == [
        *("[console_scripts]", "gpujob", "=", "gpujob_entry:gpujob"),
        *("gpujob-exporter", "=", "gpujob_entry:exporter"),
    ]
    metadata = email.message_from_string(text_of(wheel, "METADATA"))
    assert metadata["Version"] == __version__
    assert metadata["Requires-Python"] == ">=3.11"
    needs = {need.partition(">")[0] for need in metadata.get_all("Requires-Dist", []) if "extra" not in need}
    assert needs == {
        *("ahocorasick-rs", "aiohttp", "bcrypt", "click", "nvidia-ml-py", "prometheus-client", "psutil", "pydantic"),
        *("pyyaml", "regex", "requests", "rich"),
    }
    assert "py3-none-any" in wheel.name


@pytest.fixture(scope="module", params=["plain", "a space"])
def installed(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a fresh virtual environment with the wheel."""
    folder = tmp_path_factory.mktemp("venv") / str(request.param)
    assert run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=wheel.parent).returncode == 0
    python = folder / "bin" / "python"
    done = run(
        sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel,
        cwd=wheel.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).stdout.strip()
    Path(site, "dependencies.pth").write_text(f"{DEPENDENCIES}\n")
    return folder / "bin"


def test_the_configuration_of_alertmanager_has_the_templates_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "url").write_text("https://hooks.example.org/x\n", encoding="utf-8")
    (tmp_path / "url").chmod(0o600)
    done = run(installed / "gpujob", "alerts", "config", "--alert-slack", "url", cwd=tmp_path, HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    made = (tmp_path / "alerting" / "templates" / "gpujob.tmpl").read_text("utf-8")
    assert made == (ROOT / "alertmanager" / "templates" / "gpujob.tmpl").read_text("utf-8")


def test_the_folder_of_the_board_page_is_written_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = "import pathlib; from launcher.boards.assets import write_assets; write_assets(pathlib.Path('page'))"
    done = run(installed / "python", "-I", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shipped = {path.name: path.read_text("utf-8") for path in (ROOT / "grafana" / "page").iterdir()}
    made = {path.name: path.read_text("utf-8") for path in (tmp_path / "page").iterdir()}
    assert made.pop("dashboards.js").startswith('"use strict";\nconst BOARDS = {"gpujob-')
    assert made == shipped


def test_the_commands_work_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    for name, text in (
        ("gpujob", "Launch GPU jobs on Slurm"),
        ("gpujob-exporter", "Prometheus exporter of a GPU job"),
    ):
        done = run(installed / name, "--help", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert text in done.stdout
        assert run(installed / name, "--version", cwd=tmp_path).stdout.startswith(f"{name} {__version__}")
    found = run(installed / "python", "-I", "-c", "import launcher, exporter; print(launcher.__file__)", cwd=tmp_path)
    assert Path(found.stdout.strip()).is_relative_to(installed.parent)


def test_a_job_runs_from_the_installed_package(installed: Path, tmp_path: Path) -> None:
    for name in ("launcher", "exporter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong package')")
    job = {"name": "job", "workers": [{"command": "sh -c 'echo Processed 5/5 items'"}], "monitoring": {"linger": 0}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    done = run(installed / "gpujob", "run", "job.yaml", "--json", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["state"], report["items"]) == ("COMPLETED", 5)
    assert report["monitoring"]["nodes_without"] == []


def test_a_job_runs_from_a_user_installation(wheel: Path, tmp_path: Path) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / ".local/lib" / version / "site-packages"
    site.mkdir(parents=True)
    (site / "dependencies.pth").write_text(f"{DEPENDENCIES}\n")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    python = Path(sys.base_prefix, "bin", version)
    script = "from gpujob_entry import gpujob; gpujob()"  # written by `pip install --user` to ~/.local/bin
    (tmp_path / "launcher.py").write_text("raise SystemExit('the wrong module')")
    words = ("run", "--json", "--set", "monitoring.linger=0", "--", "echo", "Processed 5/5 items")
    done = run(python, "-c", script, *words, cwd=tmp_path, HOME=str(tmp_path), PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["state"], report["items"], report["monitoring"]["nodes_without"]) == ("COMPLETED", 5, [])
    done = run(python, "-c", script, cwd=tmp_path, HOME="/nowhere", PYTHONPATH=str(site))  # `pip install --target`
    message = f"gpujob: {site} is only on PYTHONPATH, which gpujob ignores; install it into a virtual environment\n"
    assert (done.returncode, done.stderr) == (2, message)
