"""Health of a node by its GPUs."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.gpus.analysis.node_health import (
    ACTION_TEXT,
    DRIVER_REASONS,
    HEALTHS,
    GpuHealthFacts,
    HealthReason,
    HealthResult,
    NodeHealthTracker,
    counter_offset,
)
from exporter.gpus.analysis.xid import XIDS

START = 1_700_000_000.0
SOUND = GpuHealthFacts(
    "0",
    ecc_corrected=3,
    ecc_uncorrected=0,
    row_remap_pending=False,
    row_remap_failure=False,
    recovery_action="none",
    pcie_replays=12,
    pcie_width=16,
    pcie_width_max=16,
    pcie_generation=5,
    pcie_generation_max=5,
    nvlink_errors=0,
    utilization=1.0,
    condition_time=START,
    xids={31: (2, START), 45: (5, START), 63: (1, START)},
)


def facts(**changes: Any) -> GpuHealthFacts:
    return dataclasses.replace(SOUND, **changes)


def judged(*gpus: GpuHealthFacts, driver: str = "ok", words: str | None = None) -> HealthResult:
    return NodeHealthTracker().update(START, driver, gpus, words)


def test_gpus_with_nothing_wrong_are_healthy() -> None:
    assert judged(SOUND, facts(index="1")) == HealthResult("healthy")


def test_a_gpu_that_tells_nothing_is_not_ill() -> None:
    assert judged(GpuHealthFacts("0")) == HealthResult("healthy")


@pytest.mark.parametrize(
    ("changes", "severity", "words"),
    [
        (
            {"state": "lost", "words": "GPU is lost"},
            "failure",
            "it is lost: GPU is lost",
        ),
        ({"state": "reset_required"}, "failure", "it needs a reset"),
        ({"state": "hanging"}, "failure", "it does not answer"),
        ({"ecc_uncorrected": 1}, "failure", "1 uncorrectable memory error since the job's start"),
        ({"ecc_uncorrected": 2}, "failure", "2 uncorrectable memory errors since the job's start"),
        ({"row_remap_failure": True}, "failure", "a row of its memory could not be remapped"),
        ({"recovery_action": "reboot"}, "failure", "the driver asks for a reboot of the node"),
        ({"recovery_action": "pray"}, "failure", "the driver asks for pray"),
        ({"xids": {79: (1, START - 9e5)}}, "failure", "Xid 79 since the job's start: fallen off the bus"),
        (
            {"xids": {119: (3, START)}},
            "failure",
            "Xid 119, 3 times since the job's start: its firmware (GSP) does not answer",
        ),
        (
            {"xids": {94: (1, START)}},
            "warning",
            "Xid 94 since the job's start: uncorrectable memory error that only this program has met",
        ),
        ({"row_remap_pending": True}, "warning", "a row of its memory is remapped at the next reset"),
        (
            {"pages_pending": True},
            "warning",
            "a page of its memory is retired once the driver is loaded again",
        ),
        ({"pcie_width": 8}, "warning", "PCIe has 8 lanes of 16"),
        ({"pcie_width": 8, "utilization": 0.0}, "warning", "PCIe has 8 lanes of 16"),
        (
            {"xids": {109: (1, START - 3600)}},
            "warning",
            "Xid 109 since the job's start: change of programs took too long",
        ),
        ({"xids": {143: (1, START + 5)}}, "warning", "Xid 143 since the job's start: it could not be initialized"),
    ],
)
def test_what_is_wrong_is_told(changes: dict[str, Any], severity: str, words: str) -> None:
    assert judged(facts(**changes)) == HealthResult(severity, (HealthReason("0", severity, words),))  # type: ignore[arg-type]


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
def test_what_is_ordinary_is_not(changes: dict[str, Any]) -> None:
    assert judged(facts(**changes)).health == "healthy"


def test_a_node_is_as_well_as_its_worst_gpu_and_failures_come_first() -> None:
    found = judged(
        facts(row_remap_pending=True, xids={79: (1, START)}), facts(index="1", pcie_width=4), facts(index="2")
    )
    assert found.health == "failure"
    assert [(reason.gpu, reason.severity) for reason in found.reasons] == [
        ("0", "failure"),
        ("0", "warning"),
        ("1", "warning"),
    ]


@pytest.mark.parametrize("action", ACTION_TEXT)
def test_every_action_that_the_driver_asks_for_is_a_failure(action: str) -> None:
    assert judged(facts(recovery_action=action)).health == "failure"


def test_a_driver_that_hangs_is_the_nodes_failure_with_and_without_gpus() -> None:
    reason = HealthReason(None, "failure", "the driver does not answer: nvmlDeviceGetCount for 12 s")
    assert judged(driver="hanging", words="nvmlDeviceGetCount for 12 s") == HealthResult("failure", (reason,))
    assert judged(SOUND, driver="hanging").reasons[0].text == "the driver does not answer"
    assert judged(driver="version_mismatch").health == "warning"


@pytest.mark.parametrize("driver", ["no_library", "no_driver", "no_permission"])
def test_of_a_node_without_gpus_or_without_leave_to_ask_nothing_is_known(driver: str) -> None:
    assert judged(driver=driver) == HealthResult(None)
    assert judged() == HealthResult(None)


def test_an_error_that_leaves_a_gpu_of_use_counts_as_long_as_the_driver_asks_for_recovery() -> None:
    asked = judged(facts(recovery_action="reset", xids={109: (1, START - 9e5)}))
    assert asked == HealthResult("failure", (HealthReason("0", "failure", "the driver asks for a reset of it"),))


SLOW = {"pcie_generation": 3}
IDLE = {"pcie_generation": 1, "utilization": 0.1}


@pytest.mark.parametrize(
    ("readings", "warns"),
    [
        ([SLOW], False),
        ([SLOW, SLOW], True),
        ([SLOW, SLOW, SLOW], True),
        ([SLOW, SLOW, {}], False),
        ([SLOW, {}, SLOW], False),
        ([SLOW, IDLE, SLOW], False),
        ([SLOW, {**SLOW, "utilization": None}], False),
        ([SLOW, {**SLOW, "condition_time": None}, SLOW], False),
        ([{**SLOW, "condition_time": None}] * 3, False),
    ],
)
def test_a_slow_link_is_told_after_two_readings_at_work(readings: list[dict[str, Any]], warns: bool) -> None:
    node, found = NodeHealthTracker(), HealthResult(None)
    for minute, changes in enumerate(readings):
        for second in range(0, 60, 5):
            now = START + 60 * minute
            found = node.update(now + second, "ok", [facts(**{"condition_time": now, **changes})])
    words = ["PCIe runs as generation 3 of 5 while the GPU works"] if warns else []
    assert [reason.text for reason in found.reasons] == words


def test_a_gpu_that_has_begun_to_work_since_its_link_was_read_has_no_slow_one() -> None:
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
@pytest.mark.parametrize("every", [5.0, 60.0])
def test_a_counter_that_rises_fast_is_a_warning(name: str, rate: int, health: str, every: float) -> None:
    node, found = NodeHealthTracker(), HealthResult(None)
    for step in range(int(600 / every)):
        count = 1000 + rate * int(step * every // 60)
        found = node.update(START + step * every, "ok", [facts(**{name: count})])
        assert found.health == "healthy" or step * every >= 55
    assert found.health == health


def test_the_words_of_a_rate_have_its_figure() -> None:
    node = NodeHealthTracker()
    node.update(START, "ok", [facts(pcie_replays=0)])
    found = node.update(START + 60, "ok", [facts(pcie_replays=120)])
    assert found.reasons == (HealthReason("0", "warning", "120 repeats on PCIe a minute in the last minutes"),)


def test_what_rose_long_ago_rises_no_more() -> None:
    node, found = NodeHealthTracker(), HealthResult(None)
    for minute in range(30):
        found = node.update(START + 60 * minute, "ok", [facts(pcie_replays=min(minute, 5) * 100)])
        assert (found.health == "warning") == (1 <= minute < 15)
    assert found.health == "healthy"


@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_that_fell_or_a_clock_set_back_begins_anew(name: str) -> None:
    node = NodeHealthTracker()
    node.update(START, "ok", [facts(**{name: 10**6})])
    assert node.update(START + 60, "ok", [facts(**{name: 0})]).health == "healthy"
    assert node.update(START - 3600, "ok", [facts(**{name: 10**6})]).health == "healthy"
    assert node.update(START - 3540, "ok", [facts(**{name: 2 * 10**6})]).health == "warning"


def test_the_first_reading_is_no_rise_however_late_it_comes() -> None:
    node = NodeHealthTracker()
    node.update(START, "ok", [facts(ecc_corrected=None)])
    assert node.update(START + 600, "ok", [facts(ecc_corrected=10**6)]).health == "healthy"


def test_a_gpu_that_is_gone_and_comes_back_begins_anew() -> None:
    node = NodeHealthTracker()
    node.update(START, "ok", [facts(ecc_corrected=0)])
    node.update(START + 30, "ok", [])
    assert node.update(START + 60, "ok", [facts(ecc_corrected=10**6)]).health == "healthy"


def test_readings_that_are_kept_are_few() -> None:
    node = NodeHealthTracker()
    for second in range(5000):
        node.update(START + second, "ok", [facts(pcie_replays=second)])
    assert len(node._histories["0"].pcie._readings) <= 64


def test_errors_before_the_job_do_not_count() -> None:
    base = counter_offset(None, None, 40)
    assert base == 40
    assert counter_offset(base, 40, 42) == 40


def test_errors_of_the_job_stay_when_the_driver_is_loaded_again() -> None:
    base = counter_offset(40, 43, 1)
    assert 1 - base == 4


def test_what_was_kept_without_a_last_count_stays() -> None:
    assert counter_offset(7, None, 3) == 7


@given(st.integers(0, 1000), st.lists(st.tuples(st.booleans(), st.integers(0, 50)), max_size=30))
def test_the_count_since_the_start_is_the_sum_of_what_was_seen_to_rise(
    first: int, steps: list[tuple[bool, int]]
) -> None:
    base, last, total = counter_offset(None, None, first), first, 0
    for reloaded, errors in steps:
        count = errors if reloaded else last + errors
        # where more has come than was there before, nobody can tell that the driver was loaded again
        total += count - last if count >= last else count
        base = counter_offset(base, last, count)
        last = count
        assert count - base == total


FACTS = st.builds(
    GpuHealthFacts,
    index=st.sampled_from(["0", "1", "0:1"]),
    state=st.sampled_from(["ok", "lost", "reset_required", "hanging", "odd"]),
    words=st.none() | st.just("words"),
    ecc_corrected=st.none() | st.integers(0, 10**9),
    ecc_uncorrected=st.none() | st.integers(0, 3),
    row_remap_pending=st.none() | st.booleans(),
    row_remap_failure=st.none() | st.booleans(),
    pages_pending=st.none() | st.booleans(),
    recovery_action=st.none() | st.sampled_from(["none", *ACTION_TEXT]),
    pcie_replays=st.none() | st.integers(0, 10**9),
    pcie_width=st.none() | st.integers(0, 16),
    pcie_width_max=st.none() | st.integers(0, 16),
    pcie_generation=st.none() | st.integers(0, 6),
    pcie_generation_max=st.none() | st.integers(0, 6),
    nvlink_errors=st.none() | st.integers(0, 10**9),
    utilization=st.none() | st.floats(0, 1),
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
            st.lists(FACTS, max_size=3, unique_by=lambda gpu: gpu.index),
        ),
        max_size=6,
    )
)
def test_health_is_the_worst_of_the_reasons(looks: list[tuple[float, str, list[GpuHealthFacts]]]) -> None:
    node, now = NodeHealthTracker(), START
    for passed, driver, gpus in looks:
        now += passed
        found = node.update(now, driver, gpus)
        worst = max((HEALTHS.index(reason.severity) for reason in found.reasons), default=None)
        if worst is not None:
            assert found.health == HEALTHS[worst] != "healthy"
        else:
            assert found.health in ("healthy", None)
        assert all(reason.text for reason in found.reasons)
        if any(gpu.state != "ok" for gpu in gpus):
            assert found.health == "failure"
