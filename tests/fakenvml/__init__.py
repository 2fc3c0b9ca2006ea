"""A fake of the NVIDIA driver library. Its values come from a scenario file.

    scenario = profiles.h200(8)
    scenario.write(path)
    subprocess.Popen(command, env={**os.environ, **scenario.environment(path)})
    scenario.gpus[3].state = "lost"
    scenario.write(path)  # takes effect with the next call

Other environment variables are directories. ``FAKENVML_PROCESSES`` has a file for each process that uses GPUs, written
by ``use_gpu.py``. ``FAKENVML_VISIBLE`` has device files such as ``nvidia0``: only GPUs whose file can be opened under
the device cgroup are visible. ``FAKENVML_CALLS`` is for ``calls``.
"""

from .build import compiler, functions, library
from .scenario import (
    ALL_LINKS,
    FakeEvent,
    FakeGpu,
    FakeMig,
    FakeProcess,
    FakeSample,
    Fault,
    FieldValue,
    Rate,
    Scenario,
    calls,
    seconds_inside,
)

__all__ = [
    "ALL_LINKS",
    "FakeEvent",
    "FakeGpu",
    "FakeMig",
    "FakeProcess",
    "FakeSample",
    "Fault",
    "FieldValue",
    "Rate",
    "Scenario",
    "calls",
    "compiler",
    "functions",
    "library",
    "seconds_inside",
]
