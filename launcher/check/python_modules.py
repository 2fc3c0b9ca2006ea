"""Whether the Python of a worker finds modules, without importing more of them than it takes to look."""

import subprocess
from collections.abc import Mapping, Sequence
from functools import lru_cache

FIND_TIMEOUT_S = 20.0

_ANSWER = "gpujob: modules missing:"
_FIND = f"""
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
print({_ANSWER!r}, *missing)
"""  # tells by their numbers which modules are not found, on a line of its own: start-up files print what they like


class InterpreterSilent(Exception):
    """Why an interpreter has not said which modules it finds, for people."""


def missing_modules(
    program: str, names: Sequence[str], environment: Mapping[str, str], workdir: str, flags: Sequence[str] = ()
) -> list[str]:
    """Those of the modules that the interpreter ``program``, with these flags, does not find. Raises NoAnswer."""
    found = _missing((program, *flags, "-c", _FIND, *names), tuple(sorted(environment.items())), workdir)
    return [names[number] for number in found]


@lru_cache(maxsize=64)  # the points of a sweep ask the same
def _missing(argv: tuple[str, ...], environment: tuple[tuple[str, str], ...], workdir: str) -> tuple[int, ...]:
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
    answer = next((line for line in done.stdout.splitlines() if line.startswith(_ANSWER)), None)
    if answer is None:
        raise InterpreterSilent(f"{program} does not say what it finds")
    return tuple(map(int, answer.removeprefix(_ANSWER).split()))


def module_of(argv: Sequence[str]) -> tuple[str, ...] | None:
    """The flags of an interpreter and, last, the package of the module that it is to run: ``python3 -u -m sglang.x``.

    None where it is given something else.
    """
    for index, word in enumerate(argv[1:-1], start=1):
        if word == "-m":
            return *argv[1:index], argv[index + 1].partition(".")[0]
        if not word.startswith("-") or word == "-c":
            break
    return None
