"""Conditions of workers: GPUs that hang, stay unused or are throttled."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.gpus.analysis.activity_history import GAP_S
from exporter.gpus.analysis.hang_signatures import (
    LOADING_S,
    ConditionDetector,
    Finding,
    GpuSample,
    WorkerSample,
)

START = 1_700_000_000.0
CONDITIONS = (
    *("busy_without_progress", "busy_without_progress_low_power", "held_idle", "unused", "idle_beside_peers"),
    *("throttled", "slow_clock", "memory_filling"),
)
GIB = 2**30
STALL_S, LAUNCH_S, EVERY_S = 300.0, 60.0, 5.0
BUSY = GpuSample(
    "0",
    "NVIDIA H200",
    utilization=0.99,
    memory_used_bytes=100 * GIB,
    memory_total_bytes=140 * GIB,
    power_w=600.0,
    power_limit_w=700.0,
    sm_clock_hz=1.8e9,
    throttle_s={"thermal": 0.0, "power_cap": 5.0},
    used=True,
)
SPINNING: dict[str, Any] = {"utilization": 1.0, "power_w": 130.0}
IDLE: dict[str, Any] = {"utilization": 0.0, "power_w": 90.0}


def gpu(index: int = 0, **changes: Any) -> GpuSample:
    return dataclasses.replace(BUSY, index=str(index), **changes)


def worker(rank: int = 0, *gpus: GpuSample, **changes: Any) -> WorkerSample:
    """A worker that started an hour before the first reading."""
    sample = WorkerSample(
        rank, start=START - 3600, phase="running", last_rise=START, stalled=False, gpus=gpus or (gpu(rank),)
    )
    return dataclasses.replace(sample, **changes)


Behaviour = Callable[[float], WorkerSample]


class Simulation:
    """Feeds samples of workers to a detector. A behaviour gives the sample at each second."""

    def __init__(self, *behaviours: Behaviour) -> None:
        self.detector = ConditionDetector(stall_timeout_s=STALL_S, launch_timeout_s=LAUNCH_S)
        self.behaviours = behaviours
        self.second = 0.0
        self.found: dict[int, dict[str, Finding]] = {}

    def until(self, second: float) -> "Simulation":
        while self.second <= second:
            now = START + self.second
            for behaviour in self.behaviours:
                self.detector.update(now, behaviour(self.second))
            self.found = self.detector.conditions(now)
            self.second += EVERY_S
        return self

    def state(self, name: str, rank: int = 0) -> bool | None:
        return self.found[rank][name].state

    def busy(self, rank: int = 0) -> bool | None:
        return self.detector.is_busy(rank, START + self.second - EVERY_S)


def after(behaviour: Behaviour, seconds: float, name: str, rank: int = 0) -> Finding:
    return Simulation(behaviour).until(seconds).found[rank][name]


def works(rank: int = 0, **changes: Any) -> Behaviour:
    """A worker that makes steady progress."""
    return lambda t: worker(rank, gpu(rank), last_rise=START + t // 20 * 20, **changes)


def hangs(at: float = 600.0, rank: int = 0, like: Mapping[str, Any] = SPINNING, **changes: Any) -> Behaviour:
    """A worker that makes progress until the second `at` and then hangs."""

    def behaviour(t: float) -> WorkerSample:
        if t < at:
            return dataclasses.replace(works(rank)(t), **changes)
        hung = worker(rank, gpu(rank, **like), last_rise=START + at, stalled=t - at > STALL_S)
        return dataclasses.replace(hung, **changes)

    return behaviour


def test_working_workers_have_no_condition() -> None:
    found = Simulation(works(0), works(1), works(2)).until(3600).found
    assert list(found) == [0, 1, 2]
    for conditions in found.values():
        assert tuple(conditions) == CONDITIONS
        assert {name for name, each in conditions.items() if each.state is not False} == set()


def test_a_hung_collective_is_busy_without_progress_at_low_power() -> None:
    simulation = Simulation(hangs())
    for name in ("busy_without_progress", "busy_without_progress_low_power"):
        assert simulation.until(600 + STALL_S).state(name) is False
    simulation.until(600 + STALL_S + 10)
    assert simulation.found[0]["busy_without_progress"] == Finding(
        True, "GPU 0 at 95% and more for 5 min, no progress for 5 min"
    )
    assert simulation.found[0]["busy_without_progress_low_power"] == Finding(
        True,
        "GPU 0 at 95% and more for 5 min, no progress for 5 min, GPU 0 at 132 W, 24% of its usual power under load",
    )


def test_a_long_step_at_full_power_is_not_at_low_power() -> None:
    simulation = Simulation(hangs(like={"utilization": 1.0, "power_w": 580.0})).until(1200)
    assert simulation.state("busy_without_progress") is True
    assert simulation.found[0]["busy_without_progress_low_power"] == Finding(False)


def test_progress_ends_busy_without_progress() -> None:
    simulation = Simulation(lambda t: hangs()(t) if t < 1300 else works()(t)).until(1250)
    assert simulation.state("busy_without_progress") is True
    assert simulation.until(1310).state("busy_without_progress") is False


def test_a_pause_that_is_usual_for_the_log_is_not_a_hang() -> None:
    behaviour = hangs(like={"utilization": 1.0})
    assert (
        after(lambda t: dataclasses.replace(behaviour(t), stalled=False), 3000, "busy_without_progress").state is False
    )


@pytest.mark.parametrize("phase", ["checkpointing", "evaluating", "launching", "completing", "finished", None])
def test_a_job_hangs_only_in_the_running_phase(phase: str | None) -> None:
    simulation = Simulation(lambda t: dataclasses.replace(hangs()(t), phase=phase), works(1)).until(1500)
    for name in ("busy_without_progress", "busy_without_progress_low_power", "held_idle", "idle_beside_peers"):
        assert simulation.state(name) is False


def test_time_in_another_phase_does_not_count() -> None:
    def behaviour(t: float) -> WorkerSample:
        return dataclasses.replace(hangs()(t), phase="evaluating" if 600 <= t < 900 else "running")

    simulation = Simulation(behaviour)
    assert simulation.until(1190).state("busy_without_progress") is False
    assert simulation.until(1210).state("busy_without_progress") is True


def test_work_with_short_idle_times_is_not_busy_without_progress() -> None:
    behaviour = hangs(like={"utilization": 1.0})

    def with_dips(t: float) -> WorkerSample:
        sample = behaviour(t)
        return dataclasses.replace(sample, gpus=(gpu(utilization=0.5),)) if t % 200 < 5 else sample

    assert after(with_dips, 3000, "busy_without_progress").state is False


def test_a_hang_is_unknown_without_progress_in_the_log() -> None:
    found = after(hangs(stalled=None), 1500, "busy_without_progress")
    assert found == Finding(None, "its log shows no progress")
    assert after(hangs(last_rise=None), 1500, "busy_without_progress_low_power").state is None


def test_conditions_are_unknown_without_utilization() -> None:
    unknown = worker(0, gpu(utilization=None), stalled=True)
    found = Simulation(lambda _: unknown).until(1000).found[0]
    names = ("busy_without_progress", "busy_without_progress_low_power", "held_idle", "idle_beside_peers", "slow_clock")
    assert {found[name].state for name in names} == {None}


@pytest.mark.parametrize(
    ("power", "limit", "state"), [(130.0, 700.0, True), (300.0, 700.0, False), (130.0, None, None), (None, 700.0, None)]
)
def test_low_power_is_relative_to_the_limit_when_the_gpu_never_worked(
    power: float | None, limit: float | None, state: bool | None
) -> None:
    spinning = worker(0, gpu(utilization=1.0, power_w=power, power_limit_w=limit), last_rise=START - 900, stalled=True)
    found = Simulation(lambda _: spinning).until(400).found[0]
    assert found["busy_without_progress"].state is True
    assert found["busy_without_progress_low_power"].state is state
    if state:
        assert "130 W, 19% of its limit" in found["busy_without_progress_low_power"].text


def test_work_with_usually_little_power_is_not_at_low_power() -> None:
    def behaviour(t: float) -> WorkerSample:
        sample = hangs(like={"utilization": 1.0})(t)
        return dataclasses.replace(sample, gpus=(gpu(utilization=1.0, power_w=200.0),))

    assert after(behaviour, 1200, "busy_without_progress").state is True
    assert after(behaviour, 1200, "busy_without_progress_low_power").state is False


def test_a_gap_in_the_readings_restarts_the_timer() -> None:
    simulation = Simulation(hangs())
    simulation.until(850)
    simulation.second = 850 + GAP_S + 10
    assert simulation.until(1150).state("busy_without_progress") is False
    assert simulation.until(1250).state("busy_without_progress") is True


def test_a_single_missing_reading_changes_nothing() -> None:
    def behaviour(t: float) -> WorkerSample:
        sample = hangs()(t)
        unknown = gpu(utilization=None, power_w=None)
        return dataclasses.replace(sample, gpus=(unknown,)) if t % 100 == 95 else sample

    for second in (950, 995, 1000):
        for name in ("busy_without_progress", "busy_without_progress_low_power"):
            assert after(behaviour, second, name).state is True
            assert after(behaviour, second, name).text.startswith("GPU 0 at 95%")


def test_held_memory_on_an_idle_gpu_is_held_idle() -> None:
    simulation = Simulation(hangs(like=IDLE))
    assert simulation.until(895).state("held_idle") is False
    assert simulation.until(910).found[0]["held_idle"] == Finding(
        True, "holds memory, GPU idle for 5 min, no progress for 5 min"
    )


def test_held_idle_does_not_need_progress_in_the_log() -> None:
    found = after(hangs(like=IDLE, stalled=None, last_rise=None), 910, "held_idle")
    assert found == Finding(True, "holds memory, GPU idle for 5 min, its log shows no progress")


def test_progress_without_the_gpu_is_not_held_idle() -> None:
    behaviour = works()
    assert after(lambda t: dataclasses.replace(behaviour(t), gpus=(gpu(**IDLE),)), 2000, "held_idle").state is False


def test_a_server_without_requests_is_not_held_idle() -> None:
    found = after(hangs(like=IDLE, waits_for_requests=True, stalled=None, last_rise=None), 2000, "held_idle")
    assert found == Finding(False, "it waits for requests")


def test_a_worker_that_is_done_has_no_condition() -> None:
    simulation = Simulation(hangs(like=IDLE, done=True), works(1), works(2)).until(2000)
    assert {simulation.state(name) for name in ("held_idle", "idle_beside_peers")} == {False}
    assert after(hangs(like={"used": False}, done=True), 2000, "unused").state is False


def test_held_idle_needs_a_process_of_the_worker() -> None:
    assert after(hangs(like={**IDLE, "used": False}), 1000, "held_idle").state is False
    assert after(hangs(like={**IDLE, "used": None}), 1000, "held_idle").state is None


def test_loading_weights_is_not_held_idle() -> None:
    loading = worker(0, gpu(**IDLE), start=START, last_rise=None, stalled=None)
    simulation = Simulation(lambda _: loading)
    assert simulation.until(LOADING_S).state("held_idle") is False
    assert simulation.until(LOADING_S + LAUNCH_S + 10).state("held_idle") is True


def test_a_worker_with_earlier_progress_is_not_loading() -> None:
    stuck = worker(0, gpu(**IDLE), start=START - 100, last_rise=START - 1, stalled=True)
    simulation = Simulation(lambda _: stuck)
    assert simulation.until(STALL_S - 5).state("held_idle") is False
    assert simulation.until(STALL_S + 5).state("held_idle") is True


def test_a_restarted_worker_may_be_loading_despite_progress_of_its_last_run() -> None:
    loading = worker(0, gpu(**IDLE), start=START, last_rise=START - 1, stalled=True)
    simulation = Simulation(lambda _: loading)
    assert simulation.until(LOADING_S).state("held_idle") is False
    assert simulation.until(LOADING_S + LAUNCH_S + 10).state("held_idle") is True


def test_a_gpu_without_a_process_of_its_worker_is_unused() -> None:
    absent = worker(0, gpu(0, used=False), gpu(1, used=True), gpu(2, used=False), start=START, last_rise=None)
    simulation = Simulation(lambda _: absent)
    assert simulation.until(55).state("unused") is False
    assert simulation.until(60).found[0]["unused"] == Finding(True, "none of its processes on GPU 0, 2 for 60 s")


def test_an_abandoned_gpu_is_unused_after_a_while() -> None:
    simulation = Simulation(lambda t: worker(0, gpu(used=t < 1000)))
    assert simulation.until(1050).state("unused") is False
    assert simulation.until(1070).state("unused") is True


@pytest.mark.parametrize("phase", ["launching", "completing", "finished"])
def test_a_gpu_may_be_unused_before_and_after_the_work(phase: str) -> None:
    assert after(lambda _: worker(0, gpu(used=False), phase=phase), 900, "unused").state is False


def test_unused_is_unknown_without_a_process_list() -> None:
    assert after(lambda _: worker(0, gpu(used=None)), 900, "unused").state is None


def test_a_worker_that_idles_while_its_peers_work_is_idle_beside_peers() -> None:
    simulation = Simulation(hangs(like=IDLE), works(1), works(2), works(3))
    assert simulation.until(600 + 175).state("idle_beside_peers") is False
    assert simulation.until(600 + 190).found[0]["idle_beside_peers"] == Finding(
        True, "GPUs idle for 3 min while 3 of 3 peers on this node work, at 99%"
    )
    assert simulation.state("idle_beside_peers", 1) is False


def test_idle_beside_peers_needs_a_majority_of_working_peers() -> None:
    simulation = Simulation(hangs(like=IDLE), hangs(rank=1, like=IDLE), works(2)).until(2000)
    assert simulation.state("idle_beside_peers") is False
    assert Simulation(hangs(like=IDLE)).until(2000).state("idle_beside_peers") is None


def test_workers_of_another_role_are_not_peers() -> None:
    simulation = Simulation(hangs(like=IDLE, role="prefill"), works(1, role="decode"), works(2, role="decode")).until(
        2000
    )
    assert simulation.state("idle_beside_peers") is None


def test_a_restarted_worker_has_the_launch_timeout_to_start_working() -> None:
    def behaviour(t: float) -> WorkerSample:
        return worker(0, gpu(**IDLE), start=START, last_rise=None, stalled=None)

    simulation = Simulation(behaviour, works(1), works(2))
    assert simulation.until(LAUNCH_S + 170).state("idle_beside_peers") is False
    assert simulation.until(LAUNCH_S + 190).state("idle_beside_peers") is True


def throttled(**rates: float) -> Behaviour:
    return lambda t: worker(0, gpu(throttle_s={reason: 7 + rate * t for reason, rate in rates.items()}))


def test_thermal_limits_for_more_than_a_fifth_of_the_time_are_throttling() -> None:
    simulation = Simulation(throttled(thermal=0.34, power_cap=0.8, sync_boost=0.0))
    assert simulation.until(200).state("throttled") is None
    assert simulation.until(320).found[0]["throttled"] == Finding(
        True, "GPU 0 at reduced clocks in the last 5 min: power_cap 80%, thermal 34%"
    )


@pytest.mark.parametrize("reason", ["thermal", "hw_thermal", "hw_power_brake"])
def test_each_hardware_reason_counts_as_throttling(reason: str) -> None:
    assert after(throttled(**{reason: 0.21}), 400, "throttled").state is True
    assert after(throttled(**{reason: 0.19}), 400, "throttled").state is False


def test_the_power_cap_alone_is_not_throttling() -> None:
    assert after(throttled(power_cap=1.0, sync_boost=1.0), 400, "throttled") == Finding(False)


def clocked(*megahertz: float, **changes: Any) -> Iterable[Behaviour]:
    for rank, mhz in enumerate(megahertz):
        sample = worker(rank, gpu(rank, sm_clock_hz=mhz * 1e6, **changes))
        yield lambda _, sample=sample: sample  # type: ignore[misc]


def test_a_lower_clock_at_the_same_work_is_a_slow_clock() -> None:
    simulation = Simulation(*clocked(1800, 1810, 1790, 1200))
    assert simulation.until(100).state("slow_clock", 3) is None
    simulation.until(300)
    assert simulation.found[3]["slow_clock"] == Finding(True, "GPU 3 at 1200 MHz, 33% below its peers (1800)")
    assert [simulation.state("slow_clock", rank) for rank in range(3)] == [False] * 3


def test_a_slow_clock_needs_a_large_difference_and_three_gpus() -> None:
    assert Simulation(*clocked(1800, 1800, 1800, 1600)).until(300).state("slow_clock", 3) is False
    assert Simulation(*clocked(1800, 900)).until(300).state("slow_clock", 1) is None


def test_clocks_of_other_models_and_of_idle_gpus_are_not_compared() -> None:
    *three, last = clocked(1800, 1800, 1800, 900)
    other = dataclasses.replace(last(0), gpus=(gpu(3, sm_clock_hz=9e8, model="NVIDIA L4"),))
    assert Simulation(*three, lambda _: other).until(300).state("slow_clock", 3) is None
    assert Simulation(*clocked(1800, 1800, 900, **IDLE)).until(300).state("slow_clock", 2) is None


def test_clocks_of_one_worker_are_compared_too() -> None:
    sample = worker(0, gpu(0), gpu(1), gpu(2, sm_clock_hz=1.2e9))
    assert after(lambda _: sample, 300, "slow_clock").state is True


def test_growing_memory_has_a_time_of_being_full() -> None:
    simulation = Simulation(lambda t: worker(0, gpu(memory_used_bytes=int((40 + t / 60) * GIB))))
    assert simulation.until(500).state("memory_filling") is None
    found = simulation.until(1800).found[0]["memory_filling"]
    assert found.state is True
    assert found.full_time == pytest.approx(START + 6000, abs=120)
    assert found.text == "the memory of GPU 0 grows by 60.0 GiB an hour and will be full in 70 min"


def test_constant_memory_is_not_filling() -> None:
    simulation = Simulation(works())
    assert simulation.until(1000).found[0]["memory_filling"] == Finding(False)


def test_an_ended_worker_has_no_conditions() -> None:
    simulation = Simulation(lambda t: worker(0, start=None if t > 100 else START - 3600), works(1)).until(110)
    assert list(simulation.found) == [1]
    assert simulation.busy(0) is None


def test_a_worker_without_recent_readings_has_no_conditions() -> None:
    simulation = Simulation(works()).until(100)
    assert simulation.detector.conditions(START + 100 + GAP_S + 1) == {}
    assert simulation.detector._workers == {}


def test_a_new_run_restarts_the_timers() -> None:
    simulation = Simulation(lambda t: hangs()(t) if t < 1000 else dataclasses.replace(hangs()(t), start=START + 1000))
    assert simulation.until(995).state("busy_without_progress") is True
    assert simulation.until(1300).state("busy_without_progress") is False


def test_gpus_that_worked_in_the_last_minute_are_busy() -> None:
    simulation = Simulation(hangs(at=600, like=IDLE)).until(590)
    assert simulation.busy() is True
    assert simulation.until(640).busy() is True
    assert simulation.until(670).busy() is False
    assert simulation.detector.is_busy(0, START + 900) is None
    assert simulation.detector.is_busy(7, START + 600) is None


def test_a_spinning_gpu_at_low_power_has_an_unknown_busy_state() -> None:
    simulation = Simulation(hangs()).until(640)
    assert simulation.busy() is True
    assert simulation.until(900).busy() is None
    assert Simulation(hangs(like={"utilization": 1.0, "power_w": 580.0})).until(900).busy() is True


def test_the_busy_state_is_unknown_at_first() -> None:
    idle = worker(0, gpu(**IDLE))
    assert Simulation(lambda _: idle).until(30).busy() is None
    assert Simulation(lambda _: worker(0, gpu(utilization=None))).until(300).busy() is None


NUMBERS = st.none() | st.floats(0, 1e12)
SAMPLES = st.builds(
    WorkerSample,
    rank=st.integers(0, 3),
    role=st.sampled_from(["a", "b"]),
    start=st.none() | st.just(START - 100) | st.just(START),
    phase=st.sampled_from(["running", "running", "evaluating", "launching", None]),
    last_rise=st.none() | st.floats(START - 1e4, START + 1e4),
    stalled=st.none() | st.booleans(),
    done=st.booleans(),
    waits_for_requests=st.booleans(),
    gpus=st.lists(
        st.builds(
            GpuSample,
            st.sampled_from("01"),
            st.sampled_from(["m", ""]),
            st.none() | st.floats(0, 1),
            st.none() | st.integers(0, 10**12),
            st.none() | st.integers(0, 10**12),
            NUMBERS,
            NUMBERS,
            NUMBERS,
            st.dictionaries(st.sampled_from(["thermal", "power_cap"]), st.floats(0, 1e9)),
            st.none() | st.booleans(),
        ),
        max_size=2,
        unique_by=lambda gpu_sample: gpu_sample.index,
    ).map(tuple),
)


@given(st.lists(st.tuples(st.floats(-10, 400), st.lists(SAMPLES, max_size=4)), max_size=20))
def test_every_true_condition_has_a_text(steps: list[tuple[float, list[WorkerSample]]]) -> None:
    detector, now = ConditionDetector(stall_timeout_s=20, launch_timeout_s=10), START
    for elapsed_s, samples in steps:
        now += elapsed_s
        for sample in samples:
            detector.update(now, sample)
            assert detector.is_busy(sample.rank, now) in (True, False, None)
        for found in detector.conditions(now).values():
            assert tuple(found) == CONDITIONS
            for name, condition in found.items():
                assert condition.state is not True or condition.text
                assert (condition.full_time is not None) == (name == "memory_filling" and condition.state is True)
            if found["busy_without_progress_low_power"].state:
                assert found["busy_without_progress"].state


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.02, 0.5, 0.99, 1.0]), st.booleans()), min_size=80, max_size=300))
def test_a_worker_with_progress_within_the_timeout_never_hangs(
    steps: list[tuple[float, bool]],
) -> None:
    detector, rise = ConditionDetector(stall_timeout_s=STALL_S, launch_timeout_s=LAUNCH_S), START
    for step, (utilization, rises) in enumerate(steps):
        now = START + 5 * step
        rise = now if rises or now - rise >= STALL_S - 10 else rise
        detector.update(now, worker(0, gpu(utilization=utilization), last_rise=rise, stalled=True))
        found = detector.conditions(now)[0]
        assert not found["busy_without_progress"].state
        assert not found["held_idle"].state
