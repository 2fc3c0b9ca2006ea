"""Each series of a real GPU beside what ``nvidia-smi`` tells in the same seconds, or what the GPU was made to do."""

import time

import pytest

from exporter.gpus.nvidia.activity import SLOW_EVERY_S
from tests.gpu import nvidia_smi
from tests.gpu.comparison import SOURCES, Line, columns, compare, faults, table
from tests.gpu.conftest import Show
from tests.gpu.hardware import HardwareJob, torch_python

ROUNDS, PAUSE_S = 8, 0.5
SETTLED_S = 4.0  # after which clocks and averages have followed a change of load
PARTS_SETTLED_S = SETTLED_S + 2 * SLOW_EVERY_S
"""The same of what is read less often, and is a mean of the time between two readings."""
ENERGY_S = 10.0

pytestmark = pytest.mark.gpu


def side_by_side(job: HardwareJob) -> list[Line]:
    """Samples of both in turn, compared."""
    pages, answers = [], []
    for _ in range(ROUNDS):
        pages.append(job.page())
        answers.append(nvidia_smi.ask(job.device, SOURCES))
        time.sleep(PAUSE_S)
    return compare(job.device.index, pages, answers)


def begin(job: HardwareJob) -> None:
    """Start the sidecar now, so that what it reads once a minute is of now too."""
    time.sleep(SETTLED_S)
    job.start()
    job.until_ready()
    job.until(lambda page: page.value("gpu_utilization_ratio", gpu=job.device.index) is not None, "its activity")
    time.sleep(2 * PAUSE_S)


def part(job: HardwareJob, name: str) -> float:
    """How busy a part of the GPU is, once that is of the present load."""
    time.sleep(PARTS_SETTLED_S)
    value = job.page().value(f"gpu_{name}_activity_ratio", gpu=job.device.index)
    if value is None:
        pytest.skip("needs a GPU that tells how busy its parts are")
    return value


def energy(job: HardwareJob) -> tuple[float, float]:
    """The count of energy at the moment at which it changes, and that moment."""
    before = job.page().value("gpu_energy_joules_total", gpu=job.device.index)
    page = job.until(
        lambda page: page.value("gpu_energy_joules_total", gpu=job.device.index) != before, "a rise of its energy"
    )
    value = page.value("gpu_energy_joules_total", gpu=job.device.index)
    if value is None:
        pytest.skip("needs a GPU that counts its energy")
    return value, time.monotonic()


def test_an_idle_gpu_is_as_nvidia_smi_tells(job: HardwareJob, show: Show) -> None:
    begin(job)
    lines = side_by_side(job)
    show("series-idle", table(lines))
    assert faults(lines) == []


def test_a_busy_gpu_is_as_nvidia_smi_tells(job: HardwareJob, show: Show) -> None:
    job.work(0, *job.cuda("--seconds", "120", "--memory-mib", "4096"))
    job.until_printed("holds 4096 MiB")
    begin(job)
    lines = side_by_side(job)
    show("series-busy", table(lines))
    assert faults(lines) == []
    utilization = next(line for line in lines if line.series == "gpu_utilization_ratio")
    assert isinstance(utilization.ours, float)
    assert utilization.ours > 0.9


def test_the_energy_rises_by_the_power_that_nvidia_smi_tells(job: HardwareJob, show: Show) -> None:
    job.work(0, *job.cuda("--seconds", "120"))
    job.until_printed("holds")
    begin(job)
    first, began = energy(job)
    watts: list[float] = []
    while time.monotonic() - began < ENERGY_S:
        told = nvidia_smi.ask(job.device, ("power.draw",)).number(("power.draw",))
        if told is not None:
            watts.append(told)
        time.sleep(PAUSE_S)
    last, ended = energy(job)
    ours, theirs = (last - first) / (ended - began), sum(watts) / len(watts)
    show("energy", columns((("", "W"), ("rise of the energy", f"{ours:.1f}"), ("nvidia-smi", f"{theirs:.1f}"))))
    assert ours == pytest.approx(theirs, rel=0.1)


def test_all_multiprocessors_are_busy_with_a_kernel_that_fills_them(job: HardwareJob) -> None:
    job.work(0, *job.cuda("--seconds", "60"))
    job.until_printed("holds")
    begin(job)
    assert part(job, "sm") > 0.9
    assert part(job, "tensor") < 0.05
    assert part(job, "dram") < 0.2


def test_one_block_keeps_the_gpu_in_use_and_its_multiprocessors_idle(job: HardwareJob) -> None:
    job.work(0, *job.cuda("--seconds", "60", "--blocks", "1"))
    job.until_printed("holds")
    begin(job)
    activity = part(job, "sm")
    page = job.page()
    assert 0 < activity < 0.1
    assert (page.value("gpu_utilization_ratio", gpu=job.device.index) or 0) > 0.9


def test_tensor_cores_are_busy_with_products_of_matrices(job: HardwareJob) -> None:
    if torch_python() is None:
        pytest.skip("needs a GPU and PyTorch")
    job.work(0, *job.torch("--seconds", "60"))
    job.until_printed("holds")
    begin(job)
    assert part(job, "tensor") > 0.1
