"""Check whether a worker's Python finds modules, importing only their parent packages."""

import subprocess
from collections.abc import Mapping, Sequence
from functools import lru_cache

FIND_TIMEOUT_S = 20.0  # for an interpreter to start and search its path

_ANSWER_PREFIX = "gpujob: modules missing:"
_FIND_SCRIPT = f"""
import importlib.util, sys
missing = []
for number, name in enumerate(sys.argv[1:]):
    try:
        found = importlib.util.find_spec(name)
    except Exception:
        found = None
    if found is None:
        missing.append(number)
print()
print({_ANSWER_PREFIX!r}, *missing)
"""  # prints indexes of missing modules on a marked line, because start-up files may print too


class InterpreterSilent(Exception):
    """Why an interpreter did not report which modules it finds, for users."""


def missing_modules(
    program: str, names: Sequence[str], environment: Mapping[str, str], workdir: str, flags: Sequence[str] = ()
) -> list[str]:
    """Modules that the interpreter ``program``, run with these flags, does not find. Raises InterpreterSilent."""
    found = _find_missing((program, *flags, "-c", _FIND_SCRIPT, *names), tuple(sorted(environment.items())), workdir)
    return [names[number] for number in found]


@lru_cache(maxsize=64)  # points of a sweep repeat the question
def _find_missing(argv: tuple[str, ...], environment: tuple[tuple[str, str], ...], workdir: str) -> tuple[int, ...]:
    program = argv[0]
    try:
        done = subprocess.run(
            argv,
            env=dict(environment),
            cwd=workdir,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=FIND_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InterpreterSilent(f"{program} did not answer in {FIND_TIMEOUT_S:g} s") from error
    except OSError as error:
        raise InterpreterSilent(f"{program} cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        raise InterpreterSilent(f"{program} ended with {done.returncode}: {done.stderr.strip()[-200:]}")
    answer = next((line for line in done.stdout.splitlines() if line.startswith(_ANSWER_PREFIX)), None)
    if answer is None:
        raise InterpreterSilent(f"{program} did not report which modules it finds")
    return tuple(map(int, answer.removeprefix(_ANSWER_PREFIX).split()))


def python_module(argv: Sequence[str]) -> tuple[str, ...] | None:
    """Flags of an interpreter and, last, the package of the module that it runs: ``python3 -u -m sglang.x``.

    None if it runs something other than a module.
    """
    for index, word in enumerate(argv[1:-1], start=1):
        if word == "-m":
            return *argv[1:index], argv[index + 1].partition(".")[0]
        if not word.startswith("-") or word == "-c":
            break
    return None
