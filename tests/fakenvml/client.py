"""A child process that calls the fake driver library through the real binding, one line at a time.

The library is never loaded into the test process, where it would stay loaded for later tests.
"""

import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .scenario import Scenario

SERVER = r"""
import ast, ctypes, sys
import pynvml as nvml

def plain(value):
    if isinstance(value, nvml.c_nvmlFieldValue_t):
        fields = {name: getattr(value, name) for name, *_ in value._fields_}
        members = "dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal"
        return fields | {"value": None if value.nvmlReturn else getattr(value.value, members[value.valueType])}
    if isinstance(value, ctypes.Structure):
        return {name: plain(getattr(value, name)) for name, *_ in value._fields_}
    if isinstance(value, nvml.nvmlFriendlyObject):
        return vars(value)
    if isinstance(value, (ctypes.Array, list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, ctypes._SimpleCData):
        return value.value
    if isinstance(value, ctypes._Pointer):
        return None
    return value

names = {"nvml": nvml, "ctypes": ctypes}
for line in sys.stdin:
    code = ast.literal_eval(line)
    try:
        try:
            answer = plain(eval(code, names))
        except SyntaxError:
            answer = exec(code, names)
    except nvml.NVMLError as error:
        answer = Ellipsis, error.value
    print(repr(answer).replace("Ellipsis", "..."), flush=True)
"""

THREADS = """
import threading, time
def later(call, name):
    def work():
        try: value = eval(call)
        except nvml.NVMLError as error: value = -error.value
        ended[name] = value
    threading.Thread(target=work, daemon=True).start()
def wait_for(number):
    end = time.monotonic() + 60
    while len(ended) < number and time.monotonic() < end:
        time.sleep(0.01)
    return ended
ended = {}
other = nvml.nvmlDeviceGetHandleByIndex(1)
"""  # for calls that may hang; `ended` has their results, with failures below 0


class Failed(Exception):
    """The library returned an error code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Client:
    """A process with the initialized library of a scenario. ``gpu`` is the handle of its first GPU."""

    def __init__(
        self, scenario: Scenario, path: Path, *, environment: Mapping[str, str] | None = None, init: bool = True
    ) -> None:
        scenario.write(path)
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, **scenario.environment(path), **(environment or {})},
        )
        if init:
            self.ask("nvml.nvmlInit()")
            if self.ask("nvml.nvmlDeviceGetCount()"):
                self.ask("gpu = nvml.nvmlDeviceGetHandleByIndex(0)")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, it: BaseException | None, where: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def send(self, code: str) -> None:
        """Start the evaluation of an expression or a statement."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{code!r}\n")

    def answered(self, timeout_s: float) -> bool:
        """Whether an answer arrives within this time."""
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], timeout_s)[0])

    def answer(self) -> Any:
        """Value of the oldest pending expression, without ctypes. Raises Failed."""
        assert self.process.stdout is not None
        assert self.answered(90), "no answer for 90 s"
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait()}"
        value = eval(line)  # noqa: S307
        if isinstance(value, tuple) and value[0] is ...:
            raise Failed(value[1])
        return value

    def ask(self, code: str) -> Any:
        """Value of an expression, or None for a statement."""
        self.send(code)
        return self.answer()

    def code(self, code: str) -> int:
        """Result of a call: 0 or its error code."""
        try:
            self.ask(code)
        except Failed as failed:
            return failed.code
        return 0


StartClient = Callable[..., Client]  # value of the fixture `start_client`
