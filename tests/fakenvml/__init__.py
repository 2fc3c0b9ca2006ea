"""A stand-in for NVIDIA's driver library, which tells what a scenario says.

    scenario = profiles.h200(8)
    scenario.write(path)
    subprocess.Popen(command, env={**os.environ, **scenario.environment(path)})
    scenario.gpus[3].state = "lost"
    scenario.write(path)  # seen by the next call

More of the environment: ``FAKENVML_PROCESSES``, a folder with a file for each process that uses GPUs, as
``use_gpu.py`` writes it; ``FAKENVML_VISIBLE``, a folder of device files ``nvidia0`` and so on, to see only the GPUs
whose file a device cgroup lets be opened; ``FAKENVML_CALLS``, a folder for ``calls``.
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
