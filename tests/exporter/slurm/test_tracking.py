"""Changes of tracked jobs, against a made-up Slurm whose truth is known."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.slurm.accounting import Attempt, Step
from exporter.slurm.queue import AttemptSnapshot, QueueRow
from exporter.slurm.states import ENDS, RETURNING
from exporter.slurm.tracking import (
    GIVEN_UP_AFTER_S,
    RETURNS_WITHIN_S,
    UNKNOWN_AFTER_S,
    Change,
    Event,
    TrackedJob,
    compare_accounting,
    compare_queue,
    take_figures,
)

SUBMITTED = 1000.0


def job() -> TrackedJob:
    return TrackedJob(job_id="7", name="job", submitted=SUBMITTED)


def row(state: str, *, restarts: int = 0, submitted: float = SUBMITTED, **times: float) -> QueueRow:
    return QueueRow(
        "7", AttemptSnapshot(state, submitted, times.get("started"), times.get("ended"), restarts), "job", None
    )


def attempt(state: str, submitted: float, started: float | None, ended: float | None) -> Attempt:
    return Attempt("7", "ada", "job", AttemptSnapshot(state, submitted, started, ended), "0:0", 60.0, 1, 100.0)


def told(changes: tuple[Change, ...]) -> list[tuple[str, str, float]]:
    return [(change.previous, change.job.state, change.time) for change in changes]


def test_changes_between_two_polls_have_slurms_own_times() -> None:
    known = compare_queue({"7": job()}, [row("COMPLETED", started=1010.0, ended=1050.0)], 1060.0)
    assert told(known.changes) == [("PENDING", "RUNNING", 1010.0), ("RUNNING", "COMPLETED", 1050.0)]
    assert compare_queue(known.jobs, [row("COMPLETED", started=1010.0, ended=1050.0)], 1120.0).changes == ()


def test_a_job_cancelled_while_it_waited_never_ran() -> None:
    assert told(compare_queue({"7": job()}, [row("CANCELLED", ended=1020.0)], 1060.0).changes) == [
        ("PENDING", "CANCELLED", 1020.0)
    ]


def test_a_requeue_is_no_end() -> None:
    known = compare_queue({"7": job()}, [row("RUNNING", started=1010.0)], 1060.0)
    known = compare_queue(known.jobs, [row("RUNNING", restarts=1, submitted=1070.0, started=1080.0)], 1120.0)
    assert told(known.changes) == [("RUNNING", "PENDING", 1070.0), ("PENDING", "RUNNING", 1080.0)]
    assert known.jobs["7"].attempt == 2


def test_an_attempt_between_two_polls_began_before_its_requeue() -> None:
    known = compare_queue({"7": job()}, [row("PENDING", restarts=1, submitted=1070.0)], 1120.0)
    assert told(known.changes) == [("PENDING", "RUNNING", 1070.0), ("RUNNING", "PENDING", 1070.0)]


def test_a_flag_of_a_requeue_before_its_count_is_told_once() -> None:
    known = compare_queue({"7": job()}, [row("RUNNING", started=1010.0)], 1060.0)
    flag = compare_queue(known.jobs, [row("PENDING")], 1120.0)
    assert told(flag.changes) == [("RUNNING", "PENDING", 1120.0)]
    assert compare_queue(flag.jobs, [row("PENDING", restarts=1, submitted=1119.0)], 1180.0).changes == ()


def test_a_lost_node_ends_a_job_only_if_slurm_does_not_requeue_it() -> None:
    running = compare_queue({"7": job()}, [row("RUNNING", started=1010.0)], 1060.0).jobs
    failed = row("NODE_FAIL", started=1010.0, ended=1110.0)
    first = compare_queue(running, [failed], 1120.0)
    assert first.changes == ()
    assert not first.jobs["7"].is_over
    assert told(compare_queue(first.jobs, [failed], 1180.0).changes) == [("RUNNING", "NODE_FAIL", 1110.0)]
    requeued = compare_queue(first.jobs, [row("PENDING", restarts=1, submitted=1115.0)], 1180.0)
    assert told(requeued.changes) == [("RUNNING", "PENDING", 1115.0)]


def test_a_lost_node_is_believed_at_once_when_slurm_would_have_requeued_the_job_before() -> None:
    running = compare_queue({"7": job()}, [row("RUNNING", started=1010.0)], 1060.0).jobs
    missing = compare_queue(running, [], 1180.0).jobs
    late = compare_accounting(missing, [attempt("NODE_FAIL", SUBMITTED, 1010.0, 1110.0)], 1780.0)
    assert told(late.changes) == [("RUNNING", "NODE_FAIL", 1110.0)]


def test_a_missing_job_is_unknown_after_minutes_of_silence_and_still_no_end() -> None:
    known = compare_queue({"7": job()}, [], 1060.0)
    known = compare_accounting(known.jobs, [], 1060.0 + UNKNOWN_AFTER_S - 1)
    assert known.changes == ()
    known = compare_accounting(known.jobs, [], 1060.0 + UNKNOWN_AFTER_S)
    assert told(known.changes) == [("PENDING", "UNKNOWN", 1060.0 + UNKNOWN_AFTER_S)]
    assert not known.jobs["7"].is_over
    late = compare_accounting(known.jobs, [attempt("COMPLETED", SUBMITTED, 1010.0, 1055.0)], 1400.0)
    assert told(late.changes) == [("UNKNOWN", "COMPLETED", 1055.0)]
    assert compare_accounting(known.jobs, None, 1060.0 + GIVEN_UP_AFTER_S).jobs["7"].is_over


def test_an_attempt_that_was_requeued_ends_when_accounting_says() -> None:
    known = {"7": job()}
    for snapshot in (
        row("RUNNING", started=1010.0),
        row("PENDING", restarts=1, submitted=1041.0),  # a second after the end
        row("COMPLETED", restarts=1, submitted=1041.0, started=1050.0, ended=1060.0),
    ):
        known = {**compare_queue(known, [snapshot], 1100.0).jobs}
    attempts = [attempt("REQUEUED", SUBMITTED, 1010.0, 1040.0), attempt("COMPLETED", 1041.0, 1050.0, 1060.0)]
    measured = take_figures(known["7"], attempts, 1100.0)
    assert [(event.state, event.time) for event in measured.history] == [
        *(("RUNNING", 1010.0), ("PENDING", 1040.0)),
        *(("RUNNING", 1050.0), ("COMPLETED", 1060.0)),
    ]
    unknown = (Event(state="RUNNING", seen=1030.0), Event(state="PENDING", time=1041.0, seen=1050.0))
    waited = attempt("CANCELLED", SUBMITTED - 500.0, None, 900.0)  # it never ran, so it says nothing of another
    assert take_figures(known["7"].replace(history=unknown), [waited, *attempts], 1100.0).history == unknown


def test_figures_are_asked_for_twice_and_then_not_measured() -> None:
    ended = job().replace(state="COMPLETED", started=1010.0, ended=1070.0, limit_s=600.0)
    done = attempt("COMPLETED", SUBMITTED, 1010.0, 1070.0)
    late = done._replace(steps=(Step(None, 1.0, 50.0),))
    first = take_figures(ended, [late], 1080.0)
    assert (first.figures, first.figures_asked) == (None, 1080.0)
    partial = take_figures(first, [late], 1110.0).figures
    assert partial is not None
    assert partial.memory_bytes == 50.0
    nothing = take_figures(first, None, 1110.0).figures
    assert nothing is not None
    assert (nothing.elapsed_s, nothing.limit_s, nothing.cpu_ratio) == (60.0, 600.0, None)


# -- a made-up Slurm -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Life:
    """What really happened to a job: its attempts, and how Slurm remembers them."""

    attempts: tuple[Attempt, ...]  # the last one has the final state
    remembered_s: float  # MinJobAge
    lag_s: float  # of accounting
    recycled: bool  # whether a later job gets its id

    def present(self, now: float) -> tuple[int, Attempt]:
        return [(i, one) for i, one in enumerate(self.attempts) if (one.snapshot.submitted or 0) <= now][-1]

    def queue(self, now: float) -> list[QueueRow]:
        restarts, one = self.present(now)
        snapshot = one.snapshot._replace(restarts=restarts)
        if snapshot.ended is not None and now >= snapshot.ended:
            if now >= snapshot.ended + self.remembered_s:
                later = row("RUNNING", submitted=snapshot.ended + 1, started=snapshot.ended + 1)
                return [later] if self.recycled else []
            if snapshot.state == "REQUEUED":
                return [QueueRow("7", snapshot._replace(state="RUNNING", ended=None), "job", None)]  # COMPLETING
            return [QueueRow("7", snapshot, "job", None)]
        if snapshot.started is not None and now >= snapshot.started:
            return [QueueRow("7", snapshot._replace(state="RUNNING", ended=None), "job", None)]
        return [QueueRow("7", snapshot._replace(state="PENDING", started=None, ended=None), "job", None)]

    def accounting(self, now: float) -> list[Attempt]:
        known = [attempt("FAILED", 10.0, 20.0, 30.0)]  # an earlier job with this id
        for one in self.attempts:
            if (one.snapshot.submitted or 0) + self.lag_s <= now:
                has_ended = (one.snapshot.ended or 0) + self.lag_s <= now
                known.append(
                    one if has_ended else one._replace(snapshot=one.snapshot._replace(state="RUNNING", ended=None))
                )
        return known[::-1]


@st.composite
def lives(draw: st.DrawFn) -> Life:
    now, found = SUBMITTED, list[Attempt]()
    seconds = st.integers(1, 200)
    last = draw(st.integers(0, 2))
    for index in range(last + 1):
        submitted = now
        started = now + draw(seconds)
        ended = started + draw(seconds)
        state = draw(st.sampled_from(sorted(ENDS)))
        if index < last:
            state = draw(st.sampled_from(("REQUEUED", *sorted(RETURNING))))
        never_ran = index == last and state == "CANCELLED" and draw(st.booleans())
        found.append(attempt(state, submitted, None if never_ran else started, ended))
        now = ended + draw(st.integers(0, 6))  # Slurm requeues within seconds
    return Life(tuple(found), draw(st.sampled_from((10.0, 300.0))), draw(st.integers(0, 100)), draw(st.booleans()))


@settings(max_examples=150, deadline=None)
@given(life=lives(), gaps=st.lists(st.tuples(st.integers(5, 120), st.booleans(), st.booleans()), max_size=12))
def test_no_end_is_wrong_and_each_change_is_told_once(life: Life, gaps: list[tuple[int, bool, bool]]) -> None:
    end = life.attempts[-1].snapshot.ended or 0.0
    jobs, changes, now = {"7": job()}, list[Change](), SUBMITTED
    rest = [(60, True, True)] * int((end - SUBMITTED + life.lag_s) / 60 + RETURNS_WITHIN_S)
    for gap, queue_answers, accounting_answers in [*gaps, *rest]:
        now += gap
        if queue_answers:
            known = compare_queue(jobs, life.queue(now), now)
            jobs, changes = dict(known.jobs), [*changes, *known.changes]
        if queue_answers and accounting_answers and jobs["7"].missing_since is not None:
            known = compare_accounting(jobs, life.accounting(now), now)
            jobs, changes = dict(known.jobs), [*changes, *known.changes]
        if jobs["7"].is_over:
            assert now >= end
            assert jobs["7"].state == life.attempts[-1].snapshot.state
            if now > end + life.lag_s + life.remembered_s:
                break
    final, last = jobs["7"], life.attempts[-1].snapshot
    assert (final.state, final.ended, final.attempt) == (last.state, last.ended, len(life.attempts))
    states = [change.job.state for change in changes if "UNKNOWN" not in (change.previous, change.job.state)]
    assert len([state for state in states if state in ENDS]) <= 1 + states.count("PENDING")
    assert all(change.previous != change.job.state for change in changes)
    assert [change.previous for change in changes[1:]] == [change.job.state for change in changes[:-1]]
    starts = [
        change.time for change in changes if change.job.state == "RUNNING" and change.job.attempt == final.attempt
    ]
    if last.started is not None and "UNKNOWN" not in {change.previous for change in changes}:
        assert starts == [last.started]
    requeues = {one.snapshot.submitted for one in life.attempts[1:]}
    assert {change.time for change in changes if change.job.state == "PENDING"} <= requeues
