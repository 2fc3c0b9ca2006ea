"""Compiles the fake NVIDIA driver library."""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
NAME = "libnvidia-ml.so.1"
OPTIONS = (
    "-std=gnu11",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-O1",
    "-g",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-pthread",
)


def compiler() -> str | None:
    """The C compiler, or None."""
    return shutil.which("cc") or shutil.which("gcc")


def functions() -> frozenset[str]:
    """All functions of the library."""
    text = "".join(path.read_text() for path in SOURCES.glob("*.c"))
    return frozenset(re.findall(r"^(?:NVML |WORDS |GIVES_U32\(|GIVES_U64\(|RUNNING\()(nvml\w+)", text, re.MULTILINE))


def library(without: Sequence[str] = ()) -> Path:
    """Directory of the library without these functions, like that of an old driver.

    Built once per content and kept. Every user of the machine can load it. Several processes may call this.
    """
    unknown = set(without) - functions()
    if unknown:
        raise ValueError(f"the library has no {', '.join(sorted(unknown))} to leave out")
    found = compiler()
    if not found:
        raise FileNotFoundError("no C compiler (cc or gcc)")
    sources = sorted(SOURCES.glob("*.[ch]"))
    script = "".join(f"{name};" for name in sorted(without))
    content = b"".join(path.read_bytes() for path in sources) + " ".join((found, *OPTIONS, script)).encode()
    folder = _cache() / hashlib.sha256(content).hexdigest()[:16]
    if (folder / NAME).exists():
        return folder
    # Built under another name and moved, so that no process loads a partial library.
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        version = Path(work, "version")
        version.write_text(f"{{ global: nvml*; local: {script} *; }};\n")
        built = Path(work, NAME)
        code = [str(path) for path in sources if path.suffix == ".c"]
        linking = [f"-Wl,-soname,{NAME}", f"-Wl,--version-script={version}", "-lm"]
        subprocess.run([found, *OPTIONS, "-o", str(built), *code, *linking], check=True)
        built.chmod(0o755)
        folder.mkdir(mode=0o755, exist_ok=True)
        built.rename(folder / NAME)
    return folder


def _cache() -> Path:
    folder = Path(tempfile.gettempdir(), f"fakenvml-{os.geteuid()}")
    folder.mkdir(mode=0o755, exist_ok=True)
    if folder.lstat().st_uid != os.geteuid():
        raise PermissionError(f"{folder} is somebody else's")
    return folder
