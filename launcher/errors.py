"""Errors that the command line shows as one message."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence


class LauncherError(Exception):
    """Base: the message says where, what was found and what would be right."""


class ConfigError(LauncherError):
    """A file with problems, all of them."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in self.problems)]))


class ConfigErrors(LauncherError):
    """Files with problems, reported together."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(map(str, self.errors)))


class TopologyError(LauncherError):
    """Workers that do not fit the nodes; each problem shows role, required and available resources, and a fix."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class SlurmError(LauncherError):
    """A Slurm command is missing, refused or did not answer."""


class SlurmTimeoutError(SlurmError):
    """A Slurm command did not answer, though Slurm may have done what it says."""


def did_you_mean(name: str, known: Iterable[str], likeness: float = 0.5) -> str:
    """``; did you mean "vllm"?``, with the known name most like this one; empty if none is like it."""
    import difflib  # lazy: 2 ms, and only mistakes need it

    near = difflib.get_close_matches(name, list(known), 1, likeness)
    return f'; did you mean "{near[0]}"?' if near else ""


@contextlib.contextmanager
def os_errors(problem: str) -> Iterator[None]:
    """Raise an OSError as LauncherError, with its reason behind the ``problem``."""
    try:
        yield
    except OSError as error:
        raise LauncherError(f"{problem}: {error.strerror}") from error
