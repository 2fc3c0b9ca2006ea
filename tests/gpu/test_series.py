"""Series of a real GPU, compared with ``nvidia-smi`` or with a known load."""

import time

import pytest

from exporter.gpus.nvidia.activity import SLOW_EVERY_S
from tests.gpu import nvidia_smi
from tests.gpu.comparison import SOURCES, Line, columns, compare, faults, table
from tests.gpu.conftest import Show
from tests.gpu.hardware import HardwareJob, torch_python

ROUNDS, PAUSE_S = 8, 0.5
SETTLED_S = 4.0  # time for clocks and averages to follow a change of load
PARTS_SETTLED_S = SETTLED_S + 2 * SLOW_EVERY_S
"""The same for values that are read less often and cover the time between two readings."""
ENERGY_S = 10.0

pytestmark = pytest.mark.gpu


def side_by_side(job: HardwareJob) -> list[Line]:
    """Comparison of alternating samples of both."""
    pages, answers = [], []
    for _ in range(ROUNDS):
        pages.append(job.page())
        answers.append(nvidia_smi.ask(job.device, SOURCES))
        time.sleep(PAUSE_S)
    return compare(job.device.index, pages, answers)


def start(job: HardwareJob) -> None:
    """Start the sidecar under the current load, so that values read once a minute are current too."""
    time.sleep(SETTLED_S)
    job.start()
    job.until_ready()
    job.until(lambda page: page.value("gpu_utilization_ratio", gpu=job.device.index) is not None, "its activity")
    time.sleep(2 * PAUSE_S)


def unit_activity(job: HardwareJob, name: str) -> float:
    """Activity of a unit of the GPU under the current load."""
    time.sleep(PARTS_SETTLED_S)
    value = job.page().value(f"gpu_{name}_activity_ratio", gpu=job.device.index)
    if value is None:
        pytest.skip("needs a GPU that reports the activity of its units")
    return value


def energy(job: HardwareJob) -> tuple[float, float]:
    """The energy counter at the time of a change, and that time."""
    before = job.page().value("gpu_energy_joules_total", gpu=job.device.index)
    page = job.until(
        lambda page: page.value("gpu_energy_joules_total", gpu=job.device.index) != before, "a rise of its energy"
    )
    value = page.value("gpu_energy_joules_total", gpu=job.device.index)
    if value is None:
        pytest.skip("needs a GPU that counts its energy")
    return value, time.monotonic()


def test_series_of_an_idle_gpu_agree_with_nvidia_smi(job: HardwareJob, show: Show) -> None:
    start(job)
    lines = side_by_side(job)
    show("series-idle", table(lines))
    assert faults(lines) == []


def test_series_of_a_busy_gpu_agree_with_nvidia_smi(job: HardwareJob, show: Show) -> None:
    job.work(0, *job.cuda("--seconds", "120", "--memory-mib", "4096"))
    job.until_printed("holds 4096 MiB")
    start(job)
    lines = side_by_side(job)
    show("series-busy", table(lines))
    assert faults(lines) == []
    utilization = next(line for line in lines if line.series == "gpu_utilization_ratio")
    assert isinstance(utilization.ours, float)
    assert utilization.ours > 0.9


def test_the_rise_of_energy_agrees_with_the_power_of_nvidia_smi(job: HardwareJob, show: Show) -> None:
    job.work(0, *job.cuda("--seconds", "120"))
    job.until_printed("holds")
    start(job)
    first, began = energy(job)
    watts: list[float] = []
    while time.monotonic() - began < ENERGY_S:
        power = nvidia_smi.ask(job.device, ("power.draw",)).number(("power.draw",))
        if power is not None:
            watts.append(power)
        time.sleep(PAUSE_S)
    last, ended = energy(job)
    ours, theirs = (last - first) / (ended - began), sum(watts) / len(watts)
    show("energy", columns((("", "W"), ("rise of the energy", f"{ours:.1f}"), ("nvidia-smi", f"{theirs:.1f}"))))
    assert ours == pytest.approx(theirs, rel=0.1)


def test_a_kernel_on_all_multiprocessors_has_high_sm_activity(job: HardwareJob) -> None:
    job.work(0, *job.cuda("--seconds", "60"))
    job.until_printed("holds")
    start(job)
    assert unit_activity(job, "sm") > 0.9
    assert unit_activity(job, "tensor") < 0.05
    assert unit_activity(job, "dram") < 0.2


def test_a_single_block_has_high_utilization_and_low_sm_activity(job: HardwareJob) -> None:
    job.work(0, *job.cuda("--seconds", "60", "--blocks", "1"))
    job.until_printed("holds")
    start(job)
    activity = unit_activity(job, "sm")
    page = job.page()
    assert 0 < activity < 0.1
    assert (page.value("gpu_utilization_ratio", gpu=job.device.index) or 0) > 0.9


def test_matrix_products_have_tensor_activity(job: HardwareJob) -> None:
    if torch_python() is None:
        pytest.skip("needs a GPU and PyTorch")
    job.work(0, *job.torch("--seconds", "60"))
    job.until_printed("holds")
    start(job)
    assert unit_activity(job, "tensor") > 0.1
