"""Workers that hang on their GPUs, do not use them, or are held back by them."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.gpus.analysis.activity_history import GAP_S
from exporter.gpus.analysis.hang_signatures import (
    CONDITIONS,
    LOADING_S,
    ConditionDetector,
    GpuSample,
    WorkerGpuCondition,
    WorkerSample,
)

START = 1_700_000_000.0
GIB = 2**30
STALL_S, LAUNCH_S, EVERY_S = 300.0, 60.0, 5.0
AT_WORK = GpuSample(
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
    return dataclasses.replace(AT_WORK, index=str(index), **changes)


def worker(rank: int = 0, *gpus: GpuSample, **changes: Any) -> WorkerSample:
    """A worker that has been at work for an hour when the looks begin."""
    made = WorkerSample(
        rank, start=START - 3600, phase="running", last_rise=START, stalled=False, gpus=gpus or (gpu(rank),)
    )
    return dataclasses.replace(made, **changes)


Course = Callable[[float], WorkerSample]


class Looks:
    """Workers by what they are like so many seconds after the beginning."""

    def __init__(self, *courses: Course) -> None:
        self.health = ConditionDetector(stall_timeout_s=STALL_S, launch_timeout_s=LAUNCH_S)
        self.courses = courses
        self.second = 0.0
        self.found: dict[int, dict[str, WorkerGpuCondition]] = {}

    def until(self, second: float) -> "Looks":
        while self.second <= second:
            now = START + self.second
            for course in self.courses:
                self.health.update(now, course(self.second))
            conditions = self.health.conditions(now)
            self.found = {rank: {one.name: one for one in found} for rank, found in conditions.items()}
            self.second += EVERY_S
        return self

    def state(self, name: str, rank: int = 0) -> bool | None:
        return self.found[rank][name].state

    def busy(self, rank: int = 0) -> bool | None:
        return self.health.is_busy(rank, START + self.second - EVERY_S)


def after(course: Course, seconds: float, name: str, rank: int = 0) -> WorkerGpuCondition:
    return Looks(course).until(seconds).found[rank][name]


def works(rank: int = 0, **changes: Any) -> Course:
    """One that goes on working."""
    return lambda t: worker(rank, gpu(rank), last_rise=START + t // 20 * 20, **changes)


def hangs(at: float = 600.0, rank: int = 0, like: Mapping[str, Any] = SPINNING, **changes: Any) -> Course:
    """One that works, and from one moment on does not."""

    def course(t: float) -> WorkerSample:
        if t < at:
            return dataclasses.replace(works(rank)(t), **changes)
        hung = worker(rank, gpu(rank, **like), last_rise=START + at, stalled=t - at > STALL_S)
        return dataclasses.replace(hung, **changes)

    return course


def test_a_worker_at_work_has_no_condition() -> None:
    found = Looks(works(0), works(1), works(2)).until(3600).found
    assert list(found) == [0, 1, 2]
    for conditions in found.values():
        assert tuple(conditions) == CONDITIONS
        assert {name for name, one in conditions.items() if one.state is not False} == set()


def test_a_hung_collective_is_busy_without_progress_at_low_power() -> None:
    looks = Looks(hangs())
    for name in ("busy_without_progress", "busy_without_progress_low_power"):
        assert looks.until(600 + STALL_S).state(name) is False
    looks.until(600 + STALL_S + 10)
    assert looks.found[0]["busy_without_progress"] == WorkerGpuCondition(
        "busy_without_progress", True, "GPU 0 at 95% and more for 5 min, no progress for 5 min"
    )
    assert looks.found[0]["busy_without_progress_low_power"] == WorkerGpuCondition(
        "busy_without_progress_low_power",
        True,
        "GPU 0 at 95% and more for 5 min, no progress for 5 min, GPU 0 at 132 W, 24% of what its work takes",
    )


def test_a_long_step_at_full_power_is_not_at_low_power() -> None:
    looks = Looks(hangs(like={"utilization": 1.0, "power_w": 580.0})).until(1200)
    assert looks.state("busy_without_progress") is True
    assert looks.found[0]["busy_without_progress_low_power"] == WorkerGpuCondition(
        "busy_without_progress_low_power", False
    )


def test_progress_ends_it() -> None:
    looks = Looks(lambda t: hangs()(t) if t < 1300 else works()(t)).until(1250)
    assert looks.state("busy_without_progress") is True
    assert looks.until(1310).state("busy_without_progress") is False


def test_silence_that_is_usual_for_the_log_is_no_hang() -> None:
    course = hangs(like={"utilization": 1.0})
    assert after(lambda t: dataclasses.replace(course(t), stalled=False), 3000, "busy_without_progress").state is False


@pytest.mark.parametrize("phase", ["checkpointing", "evaluating", "launching", "completing", "finished", None])
def test_only_a_job_that_runs_hangs(phase: str | None) -> None:
    looks = Looks(lambda t: dataclasses.replace(hangs()(t), phase=phase), works(1)).until(1500)
    for name in ("busy_without_progress", "busy_without_progress_low_power", "held_idle", "idle_beside_peers"):
        assert looks.state(name) is False


def test_time_in_another_phase_does_not_count() -> None:
    def course(t: float) -> WorkerSample:
        return dataclasses.replace(hangs()(t), phase="evaluating" if 600 <= t < 900 else "running")

    looks = Looks(course)
    assert looks.until(1190).state("busy_without_progress") is False
    assert looks.until(1210).state("busy_without_progress") is True


def test_work_that_rests_now_and_then_does_not_spin() -> None:
    course = hangs(like={"utilization": 1.0})

    def dips(t: float) -> WorkerSample:
        sample = course(t)
        return dataclasses.replace(sample, gpus=(gpu(utilization=0.5),)) if t % 200 < 5 else sample

    assert after(dips, 3000, "busy_without_progress").state is False


def test_without_progress_in_the_log_nobody_can_tell_a_hang() -> None:
    found = after(hangs(stalled=None), 1500, "busy_without_progress")
    assert found == WorkerGpuCondition("busy_without_progress", None, "its log shows no progress")
    assert after(hangs(last_rise=None), 1500, "busy_without_progress_low_power").state is None


def test_without_utilization_nothing_is_judged_by_it() -> None:
    blind = worker(0, gpu(utilization=None), stalled=True)
    found = Looks(lambda _: blind).until(1000).found[0]
    names = ("busy_without_progress", "busy_without_progress_low_power", "held_idle", "idle_beside_peers", "slow_clock")
    assert {found[name].state for name in names} == {None}


@pytest.mark.parametrize(
    ("power", "limit", "state"), [(130.0, 700.0, True), (300.0, 700.0, False), (130.0, None, None), (None, 700.0, None)]
)
def test_what_has_never_worked_is_judged_by_the_limit(
    power: float | None, limit: float | None, state: bool | None
) -> None:
    spinning = worker(0, gpu(utilization=1.0, power_w=power, power_limit_w=limit), last_rise=START - 900, stalled=True)
    found = Looks(lambda _: spinning).until(400).found[0]
    assert found["busy_without_progress"].state is True
    assert found["busy_without_progress_low_power"].state is state
    if state:
        assert "130 W, 19% of its limit" in found["busy_without_progress_low_power"].text


def test_work_that_ordinarily_draws_little_is_not_at_low_power() -> None:
    def course(t: float) -> WorkerSample:
        sample = hangs(like={"utilization": 1.0})(t)
        return dataclasses.replace(sample, gpus=(gpu(utilization=1.0, power_w=200.0),))

    assert after(course, 1200, "busy_without_progress").state is True
    assert after(course, 1200, "busy_without_progress_low_power").state is False


def test_a_gap_in_the_looks_begins_anew() -> None:
    looks = Looks(hangs())
    looks.until(850)
    looks.second = 850 + GAP_S + 10
    assert looks.until(1150).state("busy_without_progress") is False
    assert looks.until(1250).state("busy_without_progress") is True


def test_a_moment_without_a_reading_changes_nothing() -> None:
    def course(t: float) -> WorkerSample:
        sample = hangs()(t)
        blind = gpu(utilization=None, power_w=None)
        return dataclasses.replace(sample, gpus=(blind,)) if t % 100 == 95 else sample

    for second in (950, 995, 1000):
        for name in ("busy_without_progress", "busy_without_progress_low_power"):
            assert after(course, second, name).state is True
            assert after(course, second, name).text.startswith("GPU 0 at 95%")


def test_memory_that_is_held_without_use_is_told() -> None:
    found = Looks(hangs(like=IDLE))
    assert found.until(895).state("held_idle") is False
    assert found.until(910).found[0]["held_idle"] == WorkerGpuCondition(
        "held_idle", True, "memory held and no use for 5 min, no progress for 5 min"
    )


def test_of_a_worker_whose_log_tells_nothing_it_is_told_too() -> None:
    found = after(hangs(like=IDLE, stalled=None, last_rise=None), 910, "held_idle")
    assert found == WorkerGpuCondition("held_idle", True, "memory held and no use for 5 min, its log shows no progress")


def test_progress_without_the_gpu_is_not_held_idle() -> None:
    course = works()
    assert after(lambda t: dataclasses.replace(course(t), gpus=(gpu(**IDLE),)), 2000, "held_idle").state is False


def test_a_server_without_requests_is_not_held_idle() -> None:
    found = after(hangs(like=IDLE, waits_for_requests=True, stalled=None, last_rise=None), 2000, "held_idle")
    assert found == WorkerGpuCondition("held_idle", False, "it waits for requests")


def test_a_worker_that_has_done_everything_is_left_in_peace() -> None:
    looks = Looks(hangs(like=IDLE, done=True), works(1), works(2)).until(2000)
    assert {looks.state(name) for name in ("held_idle", "idle_beside_peers")} == {False}
    assert after(hangs(like={"used": False}, done=True), 2000, "unused").state is False


def test_without_its_own_process_it_holds_nothing() -> None:
    assert after(hangs(like={**IDLE, "used": False}), 1000, "held_idle").state is False
    assert after(hangs(like={**IDLE, "used": None}), 1000, "held_idle").state is None


def test_loading_weights_is_not_held_idle() -> None:
    loading = worker(0, gpu(**IDLE), start=START, last_rise=None, stalled=None)
    looks = Looks(lambda _: loading)
    assert looks.until(LOADING_S).state("held_idle") is False
    assert looks.until(LOADING_S + LAUNCH_S + 10).state("held_idle") is True


def test_one_that_has_told_progress_is_not_loading() -> None:
    stuck = worker(0, gpu(**IDLE), start=START - 100, last_rise=START - 1, stalled=True)
    looks = Looks(lambda _: stuck)
    assert looks.until(STALL_S - 5).state("held_idle") is False
    assert looks.until(STALL_S + 5).state("held_idle") is True


def test_one_that_was_started_again_may_be_loading_whatever_its_last_run_told() -> None:
    loading = worker(0, gpu(**IDLE), start=START, last_rise=START - 1, stalled=True)
    looks = Looks(lambda _: loading)
    assert looks.until(LOADING_S).state("held_idle") is False
    assert looks.until(LOADING_S + LAUNCH_S + 10).state("held_idle") is True


def test_a_gpu_without_a_process_of_its_worker_is_unused() -> None:
    absent = worker(0, gpu(0, used=False), gpu(1, used=True), gpu(2, used=False), start=START, last_rise=None)
    looks = Looks(lambda _: absent)
    assert looks.until(55).state("unused") is False
    assert looks.until(60).found[0]["unused"] == WorkerGpuCondition(
        "unused", True, "no process of it on GPU 0, 2 for 60 s"
    )


def test_a_gpu_that_is_used_no_more_is_unused_after_a_while() -> None:
    looks = Looks(lambda t: worker(0, gpu(used=t < 1000)))
    assert looks.until(1050).state("unused") is False
    assert looks.until(1070).state("unused") is True


@pytest.mark.parametrize("phase", ["launching", "completing", "finished"])
def test_before_and_after_its_work_a_gpu_may_be_unused(phase: str) -> None:
    assert after(lambda _: worker(0, gpu(used=False), phase=phase), 900, "unused").state is False


def test_where_nobody_tells_of_processes_unused_is_not_known() -> None:
    assert after(lambda _: worker(0, gpu(used=None)), 900, "unused").state is None


def test_one_that_is_idle_while_its_peers_work_is_told() -> None:
    looks = Looks(hangs(like=IDLE), works(1), works(2), works(3))
    assert looks.until(600 + 175).state("idle_beside_peers") is False
    assert looks.until(600 + 190).found[0]["idle_beside_peers"] == WorkerGpuCondition(
        "idle_beside_peers", True, "no use for 3 min while 3 of 3 peers on this node work, at 99%"
    )
    assert looks.state("idle_beside_peers", 1) is False


def test_where_most_rest_nobody_is_left_behind() -> None:
    looks = Looks(hangs(like=IDLE), hangs(rank=1, like=IDLE), works(2)).until(2000)
    assert looks.state("idle_beside_peers") is False
    assert Looks(hangs(like=IDLE)).until(2000).state("idle_beside_peers") is None


def test_workers_of_another_role_are_no_peers() -> None:
    looks = Looks(hangs(like=IDLE, role="prefill"), works(1, role="decode"), works(2, role="decode")).until(2000)
    assert looks.state("idle_beside_peers") is None


def test_a_worker_that_comes_up_again_has_its_time() -> None:
    def course(t: float) -> WorkerSample:
        return worker(0, gpu(**IDLE), start=START, last_rise=None, stalled=None)

    looks = Looks(course, works(1), works(2))
    assert looks.until(LAUNCH_S + 170).state("idle_beside_peers") is False
    assert looks.until(LAUNCH_S + 190).state("idle_beside_peers") is True


def throttled(**rates: float) -> Course:
    return lambda t: worker(0, gpu(throttle_s={reason: 7 + rate * t for reason, rate in rates.items()}))


def test_heat_for_more_than_a_fifth_of_the_time_is_told() -> None:
    looks = Looks(throttled(thermal=0.34, power_cap=0.8, sync_boost=0.0))
    assert looks.until(200).state("throttled") is None
    assert looks.until(320).found[0]["throttled"] == WorkerGpuCondition(
        "throttled", True, "GPU 0 at reduced clocks in the last 5 min: power_cap 80%, thermal 34%"
    )


@pytest.mark.parametrize("reason", ["thermal", "hw_thermal", "hw_power_brake"])
def test_each_fault_of_the_machine_throttles(reason: str) -> None:
    assert after(throttled(**{reason: 0.21}), 400, "throttled").state is True
    assert after(throttled(**{reason: 0.19}), 400, "throttled").state is False


def test_the_power_cap_alone_is_how_gpus_run() -> None:
    assert after(throttled(power_cap=1.0, sync_boost=1.0), 400, "throttled") == WorkerGpuCondition("throttled", False)


def clocked(*megahertz: float, **changes: Any) -> Iterable[Course]:
    for rank, mhz in enumerate(megahertz):
        one = worker(rank, gpu(rank, sm_clock_hz=mhz * 1e6, **changes))
        yield lambda _, one=one: one  # type: ignore[misc]


def test_a_lower_clock_at_the_same_work_is_told() -> None:
    looks = Looks(*clocked(1800, 1810, 1790, 1200))
    assert looks.until(100).state("slow_clock", 3) is None
    looks.until(300)
    assert looks.found[3]["slow_clock"] == WorkerGpuCondition(
        "slow_clock", True, "GPU 3 at 1200 MHz, 33% below its peers (1800)"
    )
    assert [looks.state("slow_clock", rank) for rank in range(3)] == [False] * 3


def test_a_little_less_is_ordinary_and_of_two_neither_is_slow() -> None:
    assert Looks(*clocked(1800, 1800, 1800, 1600)).until(300).state("slow_clock", 3) is False
    assert Looks(*clocked(1800, 900)).until(300).state("slow_clock", 1) is None


def test_other_models_and_gpus_that_rest_are_not_compared() -> None:
    *three, last = clocked(1800, 1800, 1800, 900)
    other = dataclasses.replace(last(0), gpus=(gpu(3, sm_clock_hz=9e8, model="NVIDIA L4"),))
    assert Looks(*three, lambda _: other).until(300).state("slow_clock", 3) is None
    assert Looks(*clocked(1800, 1800, 900, **IDLE)).until(300).state("slow_clock", 2) is None


def test_gpus_of_one_worker_are_compared_too() -> None:
    one = worker(0, gpu(0), gpu(1), gpu(2, sm_clock_hz=1.2e9))
    assert after(lambda _: one, 300, "slow_clock").state is True


def test_memory_that_grows_is_full_at_a_moment() -> None:
    looks = Looks(lambda t: worker(0, gpu(memory_used_bytes=int((40 + t / 60) * GIB))))
    assert looks.until(500).state("memory_filling") is None
    found = looks.until(1800).found[0]["memory_filling"]
    assert found.state is True
    assert found.full_time == pytest.approx(START + 6000, abs=120)
    assert found.text == "the memory of GPU 0 fills by 60.0 GiB an hour, and is full in 70 min"


def test_memory_that_stays_is_not_filling() -> None:
    looks = Looks(works())
    assert looks.until(1000).found[0]["memory_filling"] == WorkerGpuCondition("memory_filling", False)


def test_a_worker_that_is_gone_is_told_no_more() -> None:
    looks = Looks(lambda t: worker(0, start=None if t > 100 else START - 3600), works(1)).until(110)
    assert list(looks.found) == [1]
    assert looks.busy(0) is None


def test_a_worker_that_is_not_looked_at_is_told_no_more() -> None:
    looks = Looks(works()).until(100)
    assert looks.health.conditions(START + 100 + GAP_S + 1) == {}
    assert looks.health._workers == {}


def test_a_new_run_begins_anew() -> None:
    looks = Looks(lambda t: hangs()(t) if t < 1000 else dataclasses.replace(hangs()(t), start=START + 1000))
    assert looks.until(995).state("busy_without_progress") is True
    assert looks.until(1300).state("busy_without_progress") is False


def test_gpus_that_worked_in_the_last_minute_are_busy() -> None:
    looks = Looks(hangs(at=600, like=IDLE)).until(590)
    assert looks.busy() is True
    assert looks.until(640).busy() is True
    assert looks.until(670).busy() is False
    assert looks.health.is_busy(0, START + 900) is None
    assert looks.health.is_busy(7, START + 600) is None


def test_a_gpu_that_spins_may_be_busy_or_not() -> None:
    looks = Looks(hangs()).until(640)
    assert looks.busy() is True
    assert looks.until(900).busy() is None
    assert Looks(hangs(like={"utilization": 1.0, "power_w": 580.0})).until(900).busy() is True


def test_whether_it_is_busy_is_not_known_at_once() -> None:
    idle = worker(0, gpu(**IDLE))
    assert Looks(lambda _: idle).until(30).busy() is None
    assert Looks(lambda _: worker(0, gpu(utilization=None))).until(300).busy() is None


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
        unique_by=lambda one: one.index,
    ).map(tuple),
)


@given(st.lists(st.tuples(st.floats(-10, 400), st.lists(SAMPLES, max_size=4)), max_size=20))
def test_every_condition_has_evidence_and_nothing_else_has(looks: list[tuple[float, list[WorkerSample]]]) -> None:
    health, now = ConditionDetector(stall_timeout_s=20, launch_timeout_s=10), START
    for passed, samples in looks:
        now += passed
        for sample in samples:
            health.update(now, sample)
            assert health.is_busy(sample.rank, now) in (True, False, None)
        for found in health.conditions(now).values():
            assert tuple(one.name for one in found) == CONDITIONS
            for one in found:
                assert one.state is not True or one.text
                assert (one.full_time is not None) == (one.name == "memory_filling" and one.state is True)
            by_name = {one.name: one.state for one in found}
            if by_name["busy_without_progress_low_power"]:
                assert by_name["busy_without_progress"]


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.02, 0.5, 0.99, 1.0]), st.booleans()), min_size=80, max_size=300))
def test_a_worker_that_makes_progress_within_the_timeout_is_never_told_to_hang(
    looks: list[tuple[float, bool]],
) -> None:
    health, rise = ConditionDetector(stall_timeout_s=STALL_S, launch_timeout_s=LAUNCH_S), START
    for step, (utilization, rises) in enumerate(looks):
        now = START + 5 * step
        rise = now if rises or now - rise >= STALL_S - 10 else rise
        health.update(now, worker(0, gpu(utilization=utilization), last_rise=rise, stalled=True))
        states = {one.name: one.state for one in health.conditions(now)[0]}
        assert not states["busy_without_progress"]
        assert not states["held_idle"]
