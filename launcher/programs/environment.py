"""The user's environment, without additions of the Python interpreter or of pyxis."""

import os

COERCED_VARIABLE = "LC_CTYPE"
GIVEN_PREFIX = "GPUJOB_ENV_"  # before the names of variables that reach a task through pyxis unchanged


def remove_coerced_locale() -> None:
    """Remove ``LC_CTYPE`` if this interpreter set it.

    In a C locale Python sets it (PEP 538), and every child would inherit it. ``/proc/self/environ`` shows the
    original.
    """
    if COERCED_VARIABLE in os.environ and COERCED_VARIABLE.encode() not in original_environment():
        del os.environ[COERCED_VARIABLE]


def original_environment(path: str = "/proc/self/environ") -> dict[bytes, bytes]:
    """Environment with which this process was started."""
    try:
        with open(path, "rb") as source:
            block = source.read()
    except OSError:
        return dict(os.environb)
    pairs = (entry.partition(b"=") for entry in block.split(b"\0") if b"=" in entry)
    return {name: value for name, _, value in pairs if name}


def restore_given(environment: dict[bytes, bytes]) -> None:
    """Give a task in a container of pyxis the job's variables, which stand beside those that pyxis has changed.

    pyxis lets variables of the image win and removes the locale. For an image of PyTorch it sets ``RANK`` and
    ``LOCAL_RANK`` to the place in the step, which is 0 in a step with one task.
    """
    prefix = GIVEN_PREFIX.encode()
    given = {name[len(prefix) :]: environment.pop(name) for name in [*environment] if name.startswith(prefix)}
    if given:
        environment.pop(b"RANK", None)
        environment.pop(b"LOCAL_RANK", None)
        environment.update(given)
    if b"PATH" in given:  # where posix_spawnp(3) looks for the task's program
        os.environb[b"PATH"] = given[b"PATH"]
