"""Health of the GPUs of a node."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.gpus.analysis.node_health import (
    ACTION_TEXT,
    DRIVER_REASONS,
    HEALTHS,
    HealthReason,
    HealthResult,
    NodeHealthTracker,
    counter_offset,
)
from exporter.gpus.analysis.xid import XIDS
from exporter.gpus.records import STATE_TEXT, Gpu, GpuActivity, GpuCondition, GpuEntry, GpuState, XidCount
from tests.exporter.gpus.fake_gpus import changed

START = 1_700_000_000.0
CONDITION = GpuCondition(
    row_remap_pending=False,
    row_remap_failure=False,
    recovery_action="none",
    pcie_replays=12,
    pcie_width=16,
    pcie_width_max=16,
    pcie_generation=5,
    pcie_generation_max=5,
    nvlink_errors=0,
)


def facts(index: Any = "0", **changes: Any) -> GpuEntry:
    """A healthy GPU with these changes. Memory errors are those since the start of the job."""
    errors = {"corrected": changes.pop("ecc_corrected", 3), "uncorrected": changes.pop("ecc_uncorrected", 0)}
    xids = changes.pop("xids", {31: (2, START), 45: (5, START), 63: (1, START)})
    healthy = GpuState(
        Gpu(f"GPU-{index}", index, "nvidia"),
        activity=GpuActivity(utilization_ratio=1.0),
        condition=CONDITION,
        condition_time=START,
    )
    return GpuEntry(
        changed(healthy, **changes),
        {kind: count for kind, count in errors.items() if count is not None},
        {code: XidCount(*found) for code, found in xids.items()},
    )


def health_of(*gpus: GpuEntry, driver: str = "ok", message: str | None = None) -> HealthResult:
    return NodeHealthTracker().update(START, driver, gpus, message)


def test_gpus_without_problems_are_healthy() -> None:
    assert health_of(facts(), facts(index="1")) == HealthResult("healthy")


def test_a_gpu_without_known_values_is_healthy() -> None:
    assert health_of(GpuEntry(GpuState(Gpu("GPU-0", "0", "nvidia")))) == HealthResult("healthy")


@pytest.mark.parametrize(
    ("changes", "severity", "text"),
    [
        ({"state": "lost", "message": "GPU is lost"}, "failure", "it is lost: GPU is lost"),
        ({"state": "reset_required"}, "failure", "it needs a reset"),
        ({"state": "hanging"}, "failure", "it does not answer"),
        ({"ecc_uncorrected": 1}, "failure", "1 uncorrectable memory error since the job's start"),
        ({"ecc_uncorrected": 2}, "failure", "2 uncorrectable memory errors since the job's start"),
        ({"row_remap_failure": True}, "failure", "a row of its memory could not be remapped"),
        ({"recovery_action": "reboot"}, "failure", "the driver asks for a reboot of the node"),
        ({"xids": {79: (1, START - 9e5)}}, "failure", "Xid 79 since the job's start: fallen off the bus"),
        (
            {"xids": {119: (3, START)}},
            "failure",
            "Xid 119, 3 times since the job's start: its firmware (GSP) does not answer",
        ),
        (
            {"xids": {94: (1, START)}},
            "warning",
            "Xid 94 since the job's start: uncorrectable memory error that affected only this program",
        ),
        ({"row_remap_pending": True}, "warning", "a row of its memory will be remapped at the next reset"),
        (
            {"pages_pending": True},
            "warning",
            "a page of its memory will be retired when the driver is reloaded",
        ),
        ({"pcie_width": 8}, "warning", "PCIe uses 8 of 16 lanes"),
        ({"pcie_width": 8, "utilization_ratio": 0.0}, "warning", "PCIe uses 8 of 16 lanes"),
        (
            {"xids": {109: (1, START - 3600)}},
            "warning",
            "Xid 109 since the job's start: context switch took too long",
        ),
        ({"xids": {143: (1, START + 5)}}, "warning", "Xid 143 since the job's start: it could not be initialized"),
    ],
)
def test_each_problem_has_a_severity_and_a_text(changes: dict[str, Any], severity: str, text: str) -> None:
    assert health_of(facts(**changes)) == HealthResult(severity, (HealthReason("0", severity, text),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"xids": {79: (0, START)}},
        {"xids": dict.fromkeys((13, 31, 43, 45, 63, 92, 154, 999), (9, START))},
        {"xids": dict.fromkeys((54, 94, 109, 143, 144, 150), (1, START - 3601))},
        {"pcie_generation": 1},
        {"pcie_width_max": None, "pcie_generation_max": None},
        {"ecc_corrected": 10**6, "pcie_replays": 10**6, "nvlink_errors": 10**6},
    ],
)
def test_ordinary_values_are_healthy(changes: dict[str, Any]) -> None:
    assert health_of(facts(**changes)).health == "healthy"


def test_the_worst_gpu_decides_the_health_and_failures_are_listed_first() -> None:
    health_result = health_of(
        facts(row_remap_pending=True, xids={79: (1, START)}), facts(index="1", pcie_width=4), facts(index="2")
    )
    assert health_result.health == "failure"
    assert [(reason.gpu, reason.severity) for reason in health_result.reasons] == [
        ("0", "failure"),
        ("0", "warning"),
        ("1", "warning"),
    ]


@pytest.mark.parametrize("action", ACTION_TEXT)
def test_every_recovery_action_is_a_failure(action: str) -> None:
    assert health_of(facts(recovery_action=action)).health == "failure"


def test_a_hanging_driver_is_a_failure_with_and_without_gpus() -> None:
    reason = HealthReason(None, "failure", "the driver does not answer: nvmlDeviceGetCount for 12 s")
    assert health_of(driver="hanging", message="nvmlDeviceGetCount for 12 s") == HealthResult("failure", (reason,))
    assert health_of(facts(), driver="hanging").reasons[0].text == "the driver does not answer"
    assert health_of(driver="version_mismatch").health == "warning"


@pytest.mark.parametrize("driver", ["no_library", "no_driver", "no_permission"])
def test_health_is_unknown_without_gpus_or_permission(driver: str) -> None:
    assert health_of(driver=driver) == HealthResult(None)
    assert health_of() == HealthResult(None)


def test_a_recovery_action_is_the_only_reason_after_an_old_recoverable_error() -> None:
    result = health_of(facts(recovery_action="reset", xids={109: (1, START - 9e5)}))
    assert result == HealthResult("failure", (HealthReason("0", "failure", "the driver asks for a reset of the GPU"),))


SLOW = {"pcie_generation": 3}
IDLE = {"pcie_generation": 1, "utilization_ratio": 0.1}


@pytest.mark.parametrize(
    ("readings", "warns"),
    [
        ([SLOW], False),
        ([SLOW, SLOW], True),
        ([SLOW, SLOW, SLOW], True),
        ([SLOW, SLOW, {}], False),
        ([SLOW, {}, SLOW], False),
        ([SLOW, IDLE, SLOW], False),
        ([SLOW, {**SLOW, "utilization_ratio": None}], False),
        ([SLOW, {**SLOW, "condition_time": None}, SLOW], False),
        ([{**SLOW, "condition_time": None}] * 3, False),
    ],
)
def test_a_slow_link_is_a_warning_after_two_readings_under_load(readings: list[dict[str, Any]], warns: bool) -> None:
    node, health_result = NodeHealthTracker(), HealthResult(None)
    for minute, changes in enumerate(readings):
        for second in range(0, 60, 5):
            now = START + 60 * minute
            health_result = node.update(now + second, "ok", [facts(**{"condition_time": now, **changes})])
    texts = ["PCIe runs at generation 3 of 5 while the GPU works"] if warns else []
    assert [reason.text for reason in health_result.reasons] == texts


def test_a_link_read_while_idle_is_not_slow_when_work_begins() -> None:
    node = NodeHealthTracker()
    node.update(START, "ok", [facts(**IDLE)])
    for second in range(5, 60, 5):
        assert node.update(START + second, "ok", [facts(pcie_generation=1)]).health == "healthy"
    assert node.update(START + 60, "ok", [facts(condition_time=START + 60)]).health == "healthy"


COUNTERS = ("ecc_corrected", "pcie_replays", "nvlink_errors")


@pytest.mark.parametrize(
    ("name", "rate", "health"),
    [
        ("ecc_corrected", 10, "healthy"),
        ("ecc_corrected", 12, "warning"),
        ("pcie_replays", 8, "healthy"),
        ("pcie_replays", 10, "warning"),
        ("nvlink_errors", 1, "healthy"),
        ("nvlink_errors", 2, "warning"),
    ],
)
@pytest.mark.parametrize("interval_s", [5.0, 60.0])
def test_a_counter_that_rises_fast_is_a_warning(name: str, rate: int, health: str, interval_s: float) -> None:
    node, health_result = NodeHealthTracker(), HealthResult(None)
    for step in range(int(600 / interval_s)):
        count = 1000 + rate * int(step * interval_s // 60)
        health_result = node.update(START + step * interval_s, "ok", [facts(**{name: count})])
        assert health_result.health == "healthy" or step * interval_s >= 55
    assert health_result.health == health


def test_the_text_of_a_rate_contains_its_value() -> None:
    node = NodeHealthTracker()
    node.update(START, "ok", [facts(pcie_replays=0)])
    health_result = node.update(START + 60, "ok", [facts(pcie_replays=120)])
    assert health_result.reasons == (HealthReason("0", "warning", "120 PCIe replays a minute in the last minutes"),)


def test_an_old_rise_is_no_longer_a_warning() -> None:
    node, health_result = NodeHealthTracker(), HealthResult(None)
    for minute in range(30):
        health_result = node.update(START + 60 * minute, "ok", [facts(pcie_replays=min(minute, 5) * 100)])
        assert (health_result.health == "warning") == (1 <= minute < 15)
    assert health_result.health == "healthy"


@pytest.mark.parametrize("name", COUNTERS)
def test_a_falling_counter_or_a_clock_set_back_restarts_the_rate(name: str) -> None:
    node = NodeHealthTracker()
    node.update(START, "ok", [facts(**{name: 10**6})])
    assert node.update(START + 60, "ok", [facts(**{name: 0})]).health == "healthy"
    assert node.update(START - 3600, "ok", [facts(**{name: 10**6})]).health == "healthy"
    assert node.update(START - 3540, "ok", [facts(**{name: 2 * 10**6})]).health == "warning"


def test_the_first_reading_is_not_a_rise_however_late() -> None:
    node = NodeHealthTracker()
    node.update(START, "ok", [facts(ecc_corrected=None)])
    assert node.update(START + 600, "ok", [facts(ecc_corrected=10**6)]).health == "healthy"


def test_a_gpu_that_disappears_and_returns_restarts_its_rates() -> None:
    node = NodeHealthTracker()
    node.update(START, "ok", [facts(ecc_corrected=0)])
    node.update(START + 30, "ok", [])
    assert node.update(START + 60, "ok", [facts(ecc_corrected=10**6)]).health == "healthy"


def test_the_history_is_bounded() -> None:
    node = NodeHealthTracker()
    for second in range(5000):
        node.update(START + second, "ok", [facts(pcie_replays=second)])
    assert len(node._histories["0"].pcie._readings) <= 64


def test_errors_before_the_job_do_not_count() -> None:
    offset = counter_offset(None, None, 40)
    assert offset == 40
    assert counter_offset(offset, 40, 42) == 40


def test_errors_of_the_job_are_kept_when_the_driver_is_reloaded() -> None:
    offset = counter_offset(40, 43, 1)
    assert 1 - offset == 4


def test_the_offset_is_kept_without_a_last_count() -> None:
    assert counter_offset(7, None, 3) == 7


@given(st.integers(0, 1000), st.lists(st.tuples(st.booleans(), st.integers(0, 50)), max_size=30))
def test_the_count_since_the_start_is_the_sum_of_all_rises(first: int, steps: list[tuple[bool, int]]) -> None:
    offset, last, total = counter_offset(None, None, first), first, 0
    for reloaded, errors in steps:
        count = errors if reloaded else last + errors
        # a count above the previous one does not show that the driver was reloaded
        total += count - last if count >= last else count
        offset = counter_offset(offset, last, count)
        last = count
        assert count - offset == total


COUNTS = st.none() | st.integers(0, 10**9)
FLAGS = st.none() | st.booleans()
FACTS = st.builds(
    facts,
    index=st.sampled_from(["0", "1", "0:1"]),
    state=st.sampled_from(["ok", *STATE_TEXT]),
    message=st.none() | st.just("words"),
    ecc_corrected=COUNTS,
    ecc_uncorrected=st.integers(0, 3),
    row_remap_pending=FLAGS,
    row_remap_failure=FLAGS,
    pages_pending=FLAGS,
    recovery_action=st.none() | st.sampled_from(["none", *ACTION_TEXT]),
    pcie_replays=COUNTS,
    pcie_width=st.none() | st.integers(0, 16),
    pcie_width_max=st.none() | st.integers(0, 16),
    pcie_generation=st.none() | st.integers(0, 6),
    pcie_generation_max=st.none() | st.integers(0, 6),
    nvlink_errors=COUNTS,
    utilization_ratio=st.none() | st.floats(0, 1),
    condition_time=st.none() | st.floats(0, 100),
    xids=st.dictionaries(
        st.sampled_from([*XIDS, 999]), st.tuples(st.integers(0, 3), st.floats(START - 1e4, START + 1e3)), max_size=3
    ),
)


@given(
    st.lists(
        st.tuples(
            st.floats(-1e3, 1e3),
            st.sampled_from(["ok", "no_driver", *DRIVER_REASONS]),
            st.lists(FACTS, max_size=3, unique_by=lambda gpu: gpu.state.gpu.index),
        ),
        max_size=6,
    )
)
def test_health_is_the_worst_of_the_reasons(steps: list[tuple[float, str, list[GpuEntry]]]) -> None:
    node, now = NodeHealthTracker(), START
    for elapsed_s, driver, gpus in steps:
        now += elapsed_s
        health_result = node.update(now, driver, gpus)
        worst = max((HEALTHS.index(reason.severity) for reason in health_result.reasons), default=None)
        if worst is not None:
            assert health_result.health == HEALTHS[worst] != "healthy"
        else:
            assert health_result.health in ("healthy", None)
        assert all(reason.text for reason in health_result.reasons)
        if any(gpu.state.state != "ok" for gpu in gpus):
            assert health_result.health == "failure"
