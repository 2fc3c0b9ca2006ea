"""The terminal view, drawn from hand-written job views."""

import copy
import io
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from exporter.contract.view import JobView, WorkerView
from launcher.watch import lines as plain_lines
from launcher.watch.lines import LineView
from launcher.watch.picture import Detail, fit_picture, render_picture
from launcher.watch.text import clock_time_text, printable_line, size_text, worker_state
from launcher.watch.waiting import STOPS_JOB
from launcher.words import clock_text
from tests.launcher.conftest import Golden
from tests.support.builders import NOW, dead, job_view, worker_end, worker_entry

pytestmark = pytest.mark.usefixtures("utc")

SGR = re.compile(r"\x1b\[[0-9;]*m")
EVIL = "evil\x1b[31m\x07\r\n\x9b2J[red]b[/red]\u202e"


def a_view(**over: Any) -> dict[str, Any]:
    """A job with each worker in a different state."""
    workers = [
        worker_entry(0),
        worker_entry(1, restarts=1, gpus=[1, 2]),
        worker_entry(2, stalled=True, rate=None, eta=None, last_progress=NOW - 432),
        worker_entry(3, **dead("killed_unknown", None, "SIGKILL")),
        worker_entry(4, **dead("completed", 0), items=1500),
        worker_entry(
            5, up=False, state="not_found", start=None, items=None, rate=None, eta=None, gpus=[], last_progress=None
        ),
    ]
    common = {
        "workers": workers,
        "average_rate": 35.1,
        "outputs": [
            {"group": "output", "files": 6, "bytes": 5 * 1024**2, "growth_bytes_per_second": 2048.0, "mtime": NOW},
            {"group": "checkpoint", "files": 0, "bytes": 0, "growth_bytes_per_second": None, "mtime": None},
        ],
        "filesystems": [{"group": "output", "available_bytes": 9 * 1024**4, "size_bytes": 10 * 1024**4}],
        "events": [
            {"time": NOW - 900 + n, "level": level, "event": event, "worker": f"worker_w{n % 6}", "detail": detail}
            for n, (level, event, detail) in enumerate(
                [
                    *(("info", "started", "pid 1"), ("info", "started", "pid 2"), ("info", "restarted", "run 2")),
                    *(("warning", "stalled", "no progress for 300 s"), ("info", "ended", "completed (exit status 0)")),
                    (
                        "critical",
                        "ended",
                        "killed_unknown (killed by SIGKILL; sender unknown), and more words",
                    ),
                    ("critical", "log", "CUDA error: an illegal memory access was encountered at line 12345"),
                ]
            )
        ],
        "nodes": [
            {"node": "cn00", "address": "cn00:9410", "source": "http", "age_s": 0.5, "error": None},
            {"node": "cn01", "address": "cn01:9410", "source": "file", "age_s": 9.0, "error": "no answer"},
        ],
        "cause": {
            **worker_end("killed_unknown", None, "SIGKILL", evidence=["killed by SIGKILL", "sender unknown"]),
            "worker": "worker_w3",
            "rank": 3,
            "node": "cn01",
        },
    }
    return job_view(**{**common, **over})


def ended_view() -> dict[str, Any]:
    workers = [worker_entry(rank, **dead("completed", 0), items=1500) for rank in range(2)]
    report = {"job_id": "4459", "job_name": "j", "exit_status": 0, "state": "COMPLETED", "duration_s": 3715.0}
    return a_view(
        state="COMPLETED", phase="finished", end=NOW - 10, items=3000, items_expected=3000, rate=None, eta=None,
        workers=workers, nodes=[], cause=None, events=[], report=report,
    )  # fmt: skip


def pending_view() -> dict[str, Any]:
    idle: dict[str, Any] = {"up": False, "state": "not_found", "start": None, "items": None, "rate": None, "eta": None}
    return job_view(
        state="PENDING", phase="launching", start=None, limit_end=None, items=None, items_expected=None, rate=None,
        eta=None, workers=[worker_entry(rank, **idle) for rank in range(2)], pending_reason="Dependency",
    )  # fmt: skip


def serving_view(*states: str, **over: Any) -> dict[str, Any]:
    """A job of services without a position, in these worker states. The benchmark is last."""
    idle: dict[str, Any] = {"items": None, "items_expected": None, "rate": None, "eta": None, "last_progress": None}
    workers = [
        worker_entry(rank, state=state, service=rank < len(states) - 1, gpus=[], **idle)
        | ({} if state == "running" else {"up": False, "start": None})
        for rank, state in enumerate(states)
    ]
    return job_view(
        workers=workers, items=None, items_expected=None, rate=None, eta=None,
        readiness={
            "ready": False, "since": None, "not_ready_since": NOW - 130, "waiting": "decode_w0 and the model",
            "workers": {},
        }, **over,
    )  # fmt: skip


def eta_text(view: dict[str, Any]) -> str:
    return plain_lines.eta_text(JobView.from_json(view))


@pytest.mark.parametrize("width", [40, 33, 20])
def test_a_position_is_whole_in_a_narrow_window(width: int) -> None:
    workers = [worker_entry(rank, worker=f"worker_w{rank + 500}") for rank in range(3)]
    workers[1].update(stalled=True, rate=None, eta=None, last_progress=NOW - 1000)
    lines = [line for line in screen(job_view(workers=workers), width).splitlines() if "/1500" in line]
    assert [line.split()[-1] for line in lines] == ["750/1500", "751/1500", "752/1500"]
    assert [line.split()[0][:2] for line in lines] == ["wo", "wo", "wo"]
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize(
    ("rate", "average", "text"),
    [
        (37.5, 35.1, "37.5 items/s (average 35.1)"),
        (1 / 10800, 1 / 7200, "0.333 items/h (average 0.5)"),
        (0.02, 1 / 7200, "0.02 items/s (average 0.5/h)"),
        (2.0, None, "2.0 items/s"),
        (None, 2.0, ""),
    ],
)
def test_slow_work_has_a_rate_by_the_hour(rate: float | None, average: float | None, text: str) -> None:
    assert plain_lines.rate_text(JobView.from_json(job_view(rate=rate, average_rate=average))) == text


def progress_text(**over: Any) -> str:
    return plain_lines.progress_text(JobView.from_json(job_view(**over)))


def screen(view: dict[str, Any], width: int = 80, *, colors: bool = False, **options: Any) -> str:
    """The text on a terminal of this width, without trailing blanks."""
    console = Console(
        file=io.StringIO(), width=width, height=50, highlight=False, force_terminal=colors,
        color_system="standard" if colors else None, legacy_windows=False, _environ={},
    )  # fmt: skip
    console.print(render_picture(JobView.from_json(view), **options))
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


@pytest.mark.parametrize("width", [80, 120])
def test_the_view_matches_the_golden_page(width: int, golden: Golden) -> None:
    golden(f"launcher/watch-{width}.txt", screen(a_view(), width))


def test_other_views_match_their_golden_pages(golden: Golden) -> None:
    golden("launcher/watch-ascii.txt", screen(a_view(), 100, ascii_only=True, detail=Detail(workers=3)))
    golden("launcher/watch-ended.txt", screen(ended_view(), 100))
    golden("launcher/watch-pending.txt", screen(pending_view(), 100))
    golden("launcher/watch-serving.txt", screen(serving_view("running", "running", "waiting", phase="launching"), 100))


def test_muted_alerts_are_shown_with_their_end() -> None:
    rows: list[dict[str, Any]] = [
        {"alert": None, "until": NOW + 3600, "by": "ada"},
        {"alert": "GpuJobSlowdown", "until": None, "by": EVIL},
    ]
    text = screen(a_view(muted=rows), 200)
    assert f"alerts muted: all until {clock_text(NOW + 3600)} by ada, GpuJobSlowdown by evil" in text
    assert "muted" not in screen(a_view())


def test_the_ascii_view_contains_only_ascii() -> None:
    assert screen(a_view(), 100, ascii_only=True).isascii()
    assert not screen(a_view(), 100).isascii()


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, screen(a_view(), width).splitlines())) <= width


def test_workers_and_their_states_are_readable_at_80_columns() -> None:
    shown = screen(a_view(), 80)
    assert all(f"worker_w{rank} " in shown for rank in range(6))
    assert all(f" {state}" in shown for state in ("running (run 2)", "stalled", "killed_unknown", "completed"))


def large_view() -> dict[str, Any]:
    """Forty workers, of which one is stalled, one dead and one slow."""
    workers = [
        worker_entry(rank, node=f"cn{rank // 4:02d}", gpus=[rank % 4], rate=4.8 + rank / 200) for rank in range(40)
    ]
    for rank in range(40):
        workers[rank]["output"] = {"files": 1, "bytes": 2**28 + rank, "stalled": rank == 33}
    workers[17] |= {"slowdown": 2.1, "rate": 2.4}
    workers[29] |= dead("app_error", 3)
    workers[33] |= {"stalled": True, "rate": None, "eta": None, "last_progress": NOW - 432}
    ends = [
        ("critical", "ended", "worker_w29", "app_error (exit status 3)"),
        ("warning", "stalled", "worker_w33", "7m"),
    ]
    events = [
        {"time": NOW - 432 + n, "level": level, "event": event, "worker": worker, "detail": detail}
        for n, (level, event, worker, detail) in enumerate(
            [("progress", "progress", None, "40% complete"), *ends, ("warning", "slow", "worker_w17", "2.1x slower")]
        )
    ]
    return a_view(workers=workers, events=events, cause=None, nodes=[], eta=None)


@pytest.mark.parametrize(("width", "height"), [(60, 15), (80, 24), (120, 40), (200, 50)])
def test_workers_with_problems_are_visible_in_every_window(width: int, height: int, golden: Golden) -> None:
    console = Console(file=io.StringIO(), width=width, height=height, highlight=False, force_terminal=True, _environ={})
    shown = fit_picture(JobView.from_json(large_view()), console)
    lines = console.render_lines(shown, pad=False)
    assert len(lines) <= height
    page = "".join("".join(segment.text for segment in line).rstrip() + "\n" for line in lines)
    assert all(text in page for text in ("! app_error", "stalled", "2.1x slower", " more running, "))
    golden(f"launcher/watch-forty-{width}x{height}.txt", page)


def test_workers_are_shown_by_urgency_when_not_all_fit() -> None:
    workers = [worker_entry(rank) for rank in range(9)]
    idle: dict[str, Any] = {"up": False, "start": None, "rate": None, "eta": None}
    workers[0] |= dead("completed", 0)
    workers[1] |= {**idle, "state": "waiting"}
    workers[2] |= {**idle, "state": "not_found"}
    workers[3] |= {"slowdown": 1.3}
    workers[4] |= {"gpu_misplaced": "uses GPU 0"}
    workers[5] |= {"lag": 0.3}
    workers[6] |= {"stalled": True}
    workers[7] |= dead("app_error", 3)
    for most in range(len(workers)):
        shown = screen(a_view(workers=workers), 120, detail=Detail(workers=most))
        listed = [line.split()[0] for line in shown.splitlines() if line.startswith("worker_w")]
        assert listed == [f"worker_w{rank}" for rank in (7, 6, 5, 4, 3, 2, 8, 0, 1)[:most]]
    assert "\n1 more running, 1 completed, 1 waiting, 12.5/s\n" in screen(
        a_view(workers=workers), 120, detail=Detail(workers=6)
    )


def test_only_the_worker_that_failed_is_marked_not_those_that_were_ended_for_it() -> None:
    workers = [worker_entry(rank, **dead("terminated_peer", None, "SIGTERM")) for rank in range(3)]
    workers.append(worker_entry(3, **dead("app_error", 3)))
    shown = screen(a_view(workers=workers), 120, detail=Detail(workers=1))
    assert [line.split()[0] for line in shown.splitlines() if "! " in line and line.startswith("worker_")] == [
        "worker_w3"
    ]
    assert "\n3 more terminated_peer\n" in shown


def evil_view() -> dict[str, Any]:
    """A view with hostile text in every place that a user or a log controls."""
    view = copy.deepcopy(a_view(job_id=EVIL, job_name=EVIL, user=EVIL))
    for entry in view["workers"]:
        entry["node"] = EVIL
    for event in view["events"]:
        event["detail"] = EVIL
    view["cause"]["evidence"] = [EVIL]
    view["workers"][3]["exit"]["evidence"] = [EVIL]
    return view


@pytest.mark.parametrize("colors", [True, False])
def test_control_characters_do_not_reach_the_terminal(colors: bool) -> None:
    shown = SGR.sub("", screen(evil_view(), 400, colors=colors))
    assert all(character.isprintable() or character == "\n" for character in shown)
    assert r"evil\x1b[31m\x07\r\n\x9b2J[red]b[/red]\u202e" in shown
    assert colors is ("\x1b[" in screen(a_view(), colors=colors))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ä 日本", "plain ä 日本"),
        ("a\nb\tc", r"a\nb\tc"),
        ("\x1b[2J", r"\x1b[2J"),
        ("\x7f\x9b\u2028\u202e\udc80\U000e0001", r"\x7f\x9b\u2028\u202e\udc80\U000e0001"),
        (7, "7"),
    ],
)
def test_control_characters_are_escaped(text: object, shown: str) -> None:
    assert printable_line(text) == shown


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (14.2 * 1024**3, "14.2 GiB"),
        (5000 * 1024**4, "5000.0 TiB"),
    ],
)
def test_sizes_are_in_binary_units(count: float | None, text: str) -> None:
    assert size_text(count) == text


def test_a_time_of_today_has_no_date() -> None:
    assert {clock(moment) for clock in (clock_time_text, clock_text) for moment in (None, 1e17, 1e19)} == {"-"}
    assert clock_time_text(NOW) == "2025-11-22 04:13"
    now = time.time()
    assert clock_time_text(now) == time.strftime("%H:%M:%S", time.localtime(now))


def test_progress_shows_the_known_parts() -> None:
    assert progress_text(items=None, items_expected=10) == "no progress yet"
    assert progress_text(items=5, items_expected=None) == "5 items"
    assert progress_text(items=5, items_expected=10) == "50.0% 5/10 items"
    assert progress_text(items=9999, items_expected=10_000) == "99.9% 9,999/10,000 items"


def test_progress_is_in_the_unit_of_the_job() -> None:
    assert progress_text(items=5, items_expected=None, unit="steps") == "5 steps"
    assert progress_text(items=5, items_expected=10, unit="tokens") == "50.0% 5/10 tokens"
    assert progress_text(items=5, items_expected=10, unit=None) == "50.0% 5/10 items"


def in_units(*units: str, **over: Any) -> dict[str, Any]:
    """A view with workers that count in these units."""
    workers = [worker_entry(rank, unit=unit) for rank, unit in enumerate(units)]
    return a_view(workers=workers, unit=units[0] if len(set(units)) == 1 else None, **over)


def test_each_worker_shows_its_unit_when_units_differ() -> None:
    shown = screen(in_units("steps", "items", items=None, items_expected=None, rate=None), 120)
    assert "]  steps and items, which have no common total\n" in shown
    assert " POSITION " in shown
    assert " 750/1500 steps " in shown
    assert " 751/1500 items " in shown


def test_the_eta_has_its_interval_and_the_margin_to_the_limit() -> None:
    assert eta_text(a_view()) == "ETA 2m 05s (1m 40s to 1h 01m), at 2025-11-22 04:15, margin to the limit +55m 50s"
    late = a_view(limit_end=NOW + 65)
    assert eta_text(late).endswith("margin to the limit -1m 00s")
    doubtful = a_view(limit_end=NOW + 65, time_limit_met_probability=0.123)
    assert eta_text(doubtful).endswith("margin to the limit -1m 00s (12% likely in time)")
    assert eta_text(job_view(eta=None)) == "ETA unknown yet"
    assert eta_text(a_view(eta=None, suspended=True)) == "ETA unknown while suspended"
    assert eta_text(a_view(eta=None)) == "ETA unknown while stalled: worker_w2"
    assert eta_text(ended_view()) == "took 1h 01m"
    ended = [worker_entry(0, up=False, stalled=False, exit={"reason": "completed"})]
    assert eta_text(job_view(eta=None, workers=ended)) == "all workers have ended"


def test_the_state_of_a_worker_is_one_phrase() -> None:
    states = [worker_state(WorkerView.from_json(entry)) for entry in a_view()["workers"]]
    assert states == ["running", "running (run 2)", "stalled", "killed_unknown", "completed", "starting"]


def test_the_activity_of_a_worker_is_its_state() -> None:
    assert worker_state(WorkerView.from_json(worker_entry(at="checkpointing"))) == "checkpointing"


def test_the_last_values_of_a_training_are_shown() -> None:
    view = a_view()
    view["workers"][1] |= {
        "values": {"grad_norm": 0.4412, "epoch": 2, "loss": 1.82599, "learning_rate": 8.6e-06},
        "best_values": {"loss": 1.75},
    }
    assert "\nworker_w1: loss 1.826 (best 1.75), learning_rate 8.6e-06, grad_norm 0.4412\n" in screen(view, 120)
    assert "loss" not in screen(a_view(), 120)


def test_one_file_is_not_told_in_the_plural() -> None:
    assert "output 1 file 5 B" in screen(a_view(outputs=[{"group": "output", "files": 1, "bytes": 5}]), 120)


def test_a_job_that_ended_without_a_cause_says_why_it_was_stopped() -> None:
    view = ended_view()
    stop = {"reason": "terminated_peer", "cause": "no cuda", "time": NOW}
    view["report"] |= {"state": "FAILED", "exit_status": 1, "stopped": stop}
    assert "\nstopped: no cuda\n" in screen({**view, "state": "FAILED"})


def test_a_worker_without_a_process_is_starting_until_the_job_has_ended() -> None:
    assert "starting" in screen(a_view(), 120)
    shown = screen(a_view(state="UNKNOWN"), 120)
    assert "ETA " not in shown.replace("  ETA  ", "")
    assert "1m 00s" not in shown, "nobody knows whether they still run"
    assert "not started" in shown
    assert "starting" not in shown


@pytest.mark.parametrize(
    ("up", "kill_at", "text"),
    [
        (2, NOW + 23.6, "stopping: 2 workers have 24 s to save"),
        (1, NOW + 0.9, "stopping: 1 worker is being killed"),
        (2, NOW - 5, "stopping: 2 workers are being killed"),
        (1, None, "stopping: 1 worker has time to save"),
        (0, NOW + 9, "stopping: all workers have ended"),
    ],
)
def test_a_job_that_is_being_stopped_says_how_long_its_workers_have(
    up: int, kill_at: float | None, text: str, lines: "Lines"
) -> None:
    workers = [worker_entry(rank, up=rank < up) for rank in range(2)]
    view = job_view(workers=workers, stop={"reason": "cancelled", "cause": "c", "kill_at": kill_at}, phase="completing")
    first, _, second, *_ = screen(view, 120).splitlines()
    assert first.endswith("  ana  stopping")
    assert second == text
    assert "ETA" not in screen(view, 120).replace("  ETA  ", "")
    assert "1m 00s" not in screen(view, 120), "a worker that ends has no ETA"
    hint = f"; Ctrl-C again kills {'it' if up == 1 else 'them'}" if "to save" in text else ""
    assert f"\n{text}{hint}\n" in screen(view, 120, on_interrupt=STOPS_JOB)
    (line,) = lines.show(view)
    assert " job 4459 stopping | " in line
    assert f" | {text} | " in line


@pytest.mark.parametrize(
    ("over", "word"),
    [
        ({"phase": "launching"}, "starting"),
        ({"phase": "evaluating"}, "evaluating"),
        ({"phase": "finished"}, "completing"),
        ({"workers": [worker_entry(0, stalled=True), worker_entry(1, **dead("completed", 0))]}, "stalled"),
        ({"workers": [worker_entry(0, stalled=True), worker_entry(1)]}, "running: 1 stalled"),
        ({"state": "PENDING", "job_id": "local-1"}, "starting"),
        ({"state": "PENDING"}, "pending"),
        ({"suspended": True}, "suspended"),
        ({"state": "UNKNOWN", "unknown_reason": "no sidecar answers"}, "unknown: no sidecar answers"),
        ({"state": "OUT_OF_MEMORY", "stop": {"reason": "host_oom"}}, "out of memory"),
    ],
)
def test_the_state_of_a_job_is_one_phrase(over: dict[str, Any], word: str) -> None:
    assert screen(job_view(**over), 120).splitlines()[0].endswith(f"  ana  {word}")


def test_the_last_line_says_when_the_view_was_updated_and_what_ctrl_c_does() -> None:
    shown = screen(a_view(), 120, on_interrupt="ends the view, not the job").splitlines()
    assert shown[-1] == "updated 2025-11-22 04:13:41; Ctrl-C ends the view, not the job"
    assert "updated" not in screen(ended_view(), 120)


def test_a_disk_that_is_almost_full_or_will_be_is_shown_in_the_colour_of_its_alert() -> None:
    space = {"group": "output", "available_bytes": 5 * 1024**3, "size_bytes": 1000 * 1024**3, "responding": True}
    shown = screen(a_view(filesystems=[space | {"low": True}]), 120, colors=True)
    assert "\x1b[31m! the disk of output is almost full: 5.0 GiB free\x1b[0m" in shown
    shown = screen(a_view(filesystems=[space | {"full_at": NOW + 60}]), 120, colors=True)
    assert "\x1b[33m! the disk of output will be full at 2025-11-22 04:14, before the job ends\x1b[0m" in shown
    assert "will be full" not in screen(a_view(filesystems=[space | {"full_at": NOW + 600}]), 120)
    shown = screen(a_view(filesystems=[space | {"full_at": NOW + 60, "lacks": "inodes"}]), 120)
    assert "! the disk of output will be out of inodes at 2025-11-22 04:14, before the job ends" in shown


@pytest.mark.parametrize(
    ("left", "text"), [(1, "disk 1.0 GiB left of the user quota (1%)"), (70, "disk 50.0 GiB free (5%)")]
)
def test_a_quota_is_shown_if_it_leaves_less_than_the_disk(left: int, text: str) -> None:
    quota = {"kind": "user", "limit_bytes": 100 * 1024**3, "available_bytes": left * 1024**3}
    space = {"group": "output", "available_bytes": 50 * 1024**3, "size_bytes": 1000 * 1024**3, "quota": quota}
    output = {"group": "output", "files": 6, "bytes": 5 * 1024**2}
    assert f"output 6 files 5.0 MiB, {text}" in screen(a_view(filesystems=[space], outputs=[output]), 120)


def test_stragglers_and_the_first_worker_to_stop_are_named() -> None:
    view = a_view(first_to_stop="worker_w2")
    view["workers"][0]["lag"] = 0.37
    assert "stopped first" not in screen(view, 120), "it is the only one"
    view["workers"][1]["stalled"] = True
    shown = screen(view, 120)
    assert "worker_w0  cn00  0    ! running, 37% behind " in shown
    assert "of the workers without progress, worker_w2 stopped first" in shown


def test_a_file_system_that_does_not_answer_is_named() -> None:
    spaces = [
        {"group": "output", "available_bytes": None, "size_bytes": None, "responding": False, "mount": "/nfs/a\nb"},
        {"group": "run", "available_bytes": 5, "size_bytes": 10, "responding": True, "mount": "/"},
    ]
    assert r"/nfs/a\nb of output does not answer" in screen(a_view(filesystems=spaces), 120)


def test_the_sidecars_of_a_suspended_job_need_not_answer() -> None:
    text = "no answer from the sidecar on cn01"
    assert text in screen(a_view(), 120)
    assert text not in screen(a_view(suspended=True), 120)


def test_the_last_checkpoint_has_its_age_interval_and_next_time() -> None:
    last = {"name": "step_\n300", "time": NOW - 725, "state": "complete", "reason": None}
    found = {
        "count": 7,
        "last": last,
        "last_complete": last,
        "writing": False,
        "interval_s": 1800.0,
        "next_expected": NOW + 1075,
    }
    assert r"7 checkpoints, last step_\n300 12m 05s ago, every 30m 00s, next in 17m 55s" in screen(
        a_view(checkpoints=found), 120
    )
    late = {**found, "next_expected": NOW - 61}
    assert "every 30m 00s, late by 1m 01s" in screen(a_view(checkpoints=late), 120)
    writing = {**found, "writing": True}
    assert "ago, every 30m 00s, the next one is being written" in screen(a_view(checkpoints=writing), 120)
    assert "written" not in screen(a_view(checkpoints=writing, phase="finished"), 120)
    assert "late by" not in screen(a_view(checkpoints=late, suspended=True), 120)


def test_damaged_files_and_files_that_stopped_growing_are_shown() -> None:
    bad = [{"file": "output_3\n.jsonl", "format": "jsonl", "reason": "line 7 is not JSON"}]
    group = {
        "group": "output",
        "files": 6,
        "bytes": 1024,
        "growth_bytes_per_second": None,
        "mtime": NOW,
        "records": 12,
        "stalled": False,
        "stalled_ranks": [3, 9],
        "files_invalid": 2,
        "invalid": bad,
    }
    cut = {"name": "step_400", "time": NOW - 5, "state": "incomplete", "reason": "2 of 8 files are missing"}
    shown = screen(a_view(outputs=[group], checkpoints={"last": cut, "last_complete": None}), 120)
    assert "output 6 files 1.0 KiB 12 records" in shown
    assert "! output: no longer written by worker_w3, rank 9" in shown
    assert "! output: 2 damaged: output_3\\n.jsonl: line 7 is not JSON" in shown
    assert "! checkpoint step_400 is incomplete: 2 of 8 files are missing" in shown
    nobody = {**group, "stalled": True, "stalled_ranks": [], "files_invalid": 0, "invalid": []}
    assert "! output: no longer growing" in screen(a_view(outputs=[nobody]), 120)
    early = {"group": "output", "counting": True, "files": 6, "bytes": 1024}
    assert "output 6 files 1.0 KiB so far (still counting)" in screen(a_view(outputs=[early]), 120)


def test_no_name_or_value_breaks_a_line() -> None:
    view = a_view(first_to_stop="worker_w0", items=None, phase="running", events=a_view()["events"][:2])
    view["workers"][0] |= {"lag": 0.5}
    view["outputs"][0] |= {
        "files_invalid": 1,
        "invalid": [{"file": "f", "format": None, "reason": "r"}],
        "stalled_ranks": [0],
    }
    found = {"name": "step_3", "time": NOW, "state": "incomplete", "reason": "r"}
    view |= {"checkpoints": {"last": found, "last_complete": found}, "launch": {"verified": False, "lacking": ["l"]}}
    view |= {"readiness": {"ready": False, "since": None, "not_ready_since": None, "waiting": "w"}}
    plain = screen(view, 1000).splitlines()

    def with_control_characters(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: with_control_characters(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [with_control_characters(entry) for entry in value]
        return f"{value}\n\x1b[2J\u2028" if isinstance(value, str) and value != "incomplete" else value

    shown = screen(with_control_characters(view), 1000).splitlines()
    assert len(shown) == len(plain)
    assert all(character.isprintable() for line in shown for character in line)
    assert all(line.startswith(expected.split(" ")[0]) for line, expected in zip(shown, plain, strict=True))


def test_a_job_that_only_serves_has_neither_progress_nor_eta() -> None:
    shown = screen(serving_view("running", "running", "running", phase="launching"), 100)
    assert ("no progress yet" in shown, "ETA unknown yet" in shown) == (True, True), "the benchmark has work"
    for last in ("waiting", "not_started"):
        shown = screen(serving_view("running", "running", last), 100)
        assert not any(text in shown for text in ("progress", "ETA unknown", "░"))
    counted = serving_view("running", "waiting") | {"items": 3}
    assert "3 items" in screen(counted, 100)
    ended = serving_view("running", "not_started", report=ended_view()["report"]) | {"readiness": None}
    assert "took 1h 01m" in screen(ended, 100)


@pytest.mark.parametrize(
    ("reported", "shown"),
    [
        ({"output_tokens_per_second": 181.6}, "182 tok/s"),
        ({"output_tokens_per_second": 2.34, "input_tokens_per_second": 0.0}, "2.3 tok/s"),
        ({"output_tokens_per_second": 0.0}, "0 tok/s"),
        ({"input_tokens_per_second": 2012.4}, "2012 tok/s in"),
        ({"output_tokens_per_second": 9.0, "input_tokens_per_second": 2012.4, "role": "prefill"}, "2012 tok/s in"),
        ({"output_tokens_per_second": 9.0, "role": "prefill"}, "9.0 tok/s"),
        ({"output_tokens_per_second": 9.0, "rate": 3.25}, "3.2"),
        ({"rate": 1 / 10800}, "0.333/h"),
        ({"output_tokens_per_second": 9.0, "up": False}, "-"),
        ({"output_tokens_per_second": None, "input_tokens_per_second": None}, "-"),
        ({}, "-"),
    ],
)
def test_the_rate_of_an_engine_is_its_token_rate(reported: dict[str, Any], shown: str) -> None:
    view = serving_view("running", "running")
    view["workers"][0] |= reported
    (row,) = [line for line in screen(view, 120).splitlines() if line.startswith("worker_w0")]
    assert re.split(r"  +", row)[4] == shown


def test_no_progress_bar_without_a_total() -> None:
    assert "\n16 requests\n" in screen(a_view(items=16, items_expected=None, unit="requests", rate=None), 100)
    assert "\n[░░░" in screen(a_view(items=None, items_expected=None, rate=None), 100)


def test_values_from_a_sidecar_are_plain_text() -> None:
    """Neither markup nor control characters of a unit are obeyed, and a time of another world is unknown."""
    picture = screen(a_view(unit="[/red]\x1b[2J", end=1e19, limit_end=1e19), 100)
    assert "[/RED]\\X1B[2J" in picture
    assert "\x1b[2J" not in picture


# Lines for pipes and files


class Lines:
    """A `LineView` with its own clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(plain_lines, "time", SimpleNamespace(monotonic=lambda: self.now))
        self._out = io.StringIO()
        self._log = LineView(self._out)

    def show(self, view: dict[str, Any], later: float = 0.0) -> list[str]:
        """The lines that one view adds."""
        self.now += later
        self._out.seek(0)
        self._out.truncate()
        self._log.show(JobView.from_json(view))
        return self._out.getvalue().splitlines()


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Lines:
    return Lines(monkeypatch)


def two_workers(**over: Any) -> dict[str, Any]:
    return a_view(workers=[worker_entry(0), worker_entry(1)], **over)


def test_a_line_has_the_state_of_the_job(lines: Lines) -> None:
    (line,) = lines.show(two_workers(limit_end=None))
    assert line == (
        "2025-11-22 04:13:41 job 4459 running | workers 2/2 up | 50.1% 4,506/9,000 items | 37.5 items/s (average 35.1)"
        " | ETA 2m 05s (1m 40s to 1h 01m), at 2025-11-22 04:15 | worker_w0 750 worker_w1 751"
    )


def test_the_unit_of_the_job_is_used_everywhere(lines: Lines) -> None:
    view = in_units("steps", "steps", items=750, items_expected=1500, rate=12.5, average_rate=None)
    shown = screen(view, 120)
    assert "  50.0% 750/1,500 steps  12.5 steps/s\n" in shown
    assert "     STEPS " in shown
    assert "items" not in shown.lower()
    (line,) = lines.show(view)
    assert " | 50.0% 750/1,500 steps | 12.5 steps/s | " in line


def test_a_line_is_written_on_changes_and_at_least_once_a_minute(lines: Lines) -> None:
    assert len(lines.show(two_workers())) == 1
    assert lines.show(two_workers()) == []
    assert lines.show(two_workers(items=4507), later=1) == []
    assert len(lines.show(two_workers(items=4508), later=5)) == 1
    assert lines.show(two_workers(items=4508), later=30) == []
    assert len(lines.show(two_workers(items=4508), later=31)) == 1
    assert len(lines.show(two_workers(items=4508, phase="completing"))) == 1


def test_the_end_of_a_worker_has_its_own_line(lines: Lines) -> None:
    lines.show(two_workers())
    ended = two_workers()
    ended["workers"][1] = worker_entry(1, **dead("app_error", 3))
    assert lines.show(ended) == ["2025-11-22 04:13:11 worker_w1 on cn00 ended: app_error (exit status 3)"]
    assert lines.show(ended) == []
    ended["workers"][0] = worker_entry(0, **dead("app_error", 3))
    ended["workers"][0]["exit"]["time"] = 1e20  # out of range
    assert lines.show(ended) == ["- worker_w0 on cn00 ended: app_error (exit status 3)"]


def test_the_line_of_the_end_has_the_time_of_the_end(lines: Lines) -> None:
    view = ended_view()
    view["report"]["end"] = NOW - 3600
    line = lines.show(view)[-1]
    assert line.startswith("2025-11-22 03:13:41 job 4459 ")


def test_a_restart_has_a_line_with_its_reason_even_if_the_end_was_not_seen(lines: Lines) -> None:
    lines.show(two_workers())
    evidence = ["killed by SIGKILL", "sender unknown"]
    exits = [worker_end("killed_unknown", time=NOW - 9 + run, restart=run, evidence=evidence) for run in range(2)]
    again = two_workers()
    again["workers"][1] = worker_entry(1, restarts=1, exits=exits[:1])
    prefix = "2025-11-22 04:13:32 worker_w1 on cn00 restarted (run 2) after killed_unknown"
    assert lines.show(again) == [f"{prefix} (killed by SIGKILL; sender unknown)"]
    assert lines.show(again) == []
    again["workers"][1] = worker_entry(1, restarts=2, exits=exits)
    (line,) = lines.show(again)
    assert line.startswith("2025-11-22 04:13:33 worker_w1 on cn00 restarted (run 3) after killed_unknown (")


def test_restarts_before_the_first_view_keep_their_own_times(lines: Lines) -> None:
    exits = [worker_end("app_error", 3, restart=run, time=time) for run, time in ((0, NOW - 7200), (1, None))]
    found = lines.show(a_view(workers=[worker_entry(1, restarts=2, exits=exits)]))
    assert [line.partition(" after")[0] for line in found[:2]] == [
        "2025-11-22 02:13:41 worker_w1 on cn00 restarted (run 2)",
        "2025-11-22 04:13:41 worker_w1 on cn00 restarted (run 3)",
    ]


def test_the_token_rate_of_all_engines_is_next_to_their_readiness(lines: Lines) -> None:
    view = serving_view("running", "running", output_tokens_per_second=181.6)
    view["readiness"] |= {"ready": True, "since": NOW, "waiting": ""}
    assert "\nready since 2025-11-22 04:13  182 tok/s\n" in screen(view, 100)
    (line,) = lines.show(view)
    assert " | ready since 2025-11-22 04:13 | no progress yet | 182 tok/s | " in line


def late_view(**over: Any) -> dict[str, Any]:
    """A job that ended because its second worker was not ready in time. Both workers ended on SIGTERM."""
    asked = dead("completed", 0)
    asked["exit"]["asked_to_end"] = True
    missing = {"worker": "worker_w1", "rank": 1, "node": "cn00"}
    evidence = ["not ready after 7 s", "worker_w1 is not ready: /health answers 503"]
    cause = {**missing, "missing": [missing], "missing_total": 1, "reason": "launch_failed", "evidence": evidence}
    return a_view(workers=[worker_entry(0, **asked), worker_entry(1, **asked)], cause=cause, **over)


def test_a_worker_that_was_not_ready_in_time_is_shown_as_failed(lines: Lines) -> None:
    lines.show(two_workers())
    assert [line.partition(" on cn00 ")[2] for line in lines.show(late_view())] == [
        "ended: completed when asked to end (exit status 0)",
        "ended: launch_failed (not ready after 7 s; when asked to end: exit status 0)",
    ]
    rows = [line.split("  ") for line in screen(late_view(), 120).splitlines() if line.startswith("worker_w")]
    assert [[cell.strip() for cell in row if cell.strip()][3] for row in rows] == ["completed", "! launch_failed"]
    view = late_view()
    evidence = ["never started: the job ended in an earlier stage", "the job was being stopped: not ready"]
    view["workers"].append(worker_entry(2, **dead("terminated_peer", None)) | {"state": "not_started"})
    view["workers"][2]["exit"]["evidence"] = evidence
    assert [line.partition(" on cn01 ")[2] for line in lines.show(view)] == [
        "was not started (the job ended in an earlier stage; the job was being stopped: not ready)"
    ]
    nobody = late_view()
    nobody["cause"] |= {"worker": "the model", "rank": None}
    nobody["cause"]["missing"] = [{"worker": "the model", "rank": None, "node": "cn00"}]
    assert "! launch_failed" not in screen(nobody, 120)


def test_control_characters_do_not_split_a_line(lines: Lines) -> None:
    shown = lines.show(evil_view())
    assert len(shown) == 3  # two ended workers and the state
    assert all(character.isprintable() for line in shown for character in line)
    assert "[red]b[/red]" in shown[0]


def test_an_unverified_launch_shows_what_is_missing() -> None:
    lacking = ["cn01: 1 of 2 workers with the GPUs of the plan; not worker_w1 (rank 1)"]
    shown = screen(a_view(launch={"verified": False, "lacking": lacking}), 120)
    assert "! launch not verified: cn01: 1 of 2 workers with the GPUs of the plan; not worker_w1 (rank 1)" in shown
    assert "not verified" not in screen(a_view(), 120)
    many = [f"gpu{number:03}: 0 of 8 workers with a log file" for number in range(64)]
    shown = " ".join(screen(a_view(launch={"verified": False, "lacking": many}), 120).split())
    assert "gpu001: 0 of 8 workers with a log file; gpu002: 0 of 8 workers with a log file; and 61 more" in shown
    assert "gpu003" not in shown


def test_a_line_shows_the_missing_services_until_they_are_ready(lines: Lines) -> None:
    view = serving_view("running", "waiting", limit_end=None)
    (line,) = lines.show(view)
    assert line == (
        "2025-11-22 04:13:41 job 4459 running | workers 1/2 up"
        " | not ready for 2m 10s: waiting for decode_w0 and the model"
    )
    view["readiness"]["waiting"] = "the model"
    assert lines.show(view, later=1) == [], "not more often than progress"
    assert len(lines.show(view, later=5)) == 1
    view["readiness"] |= {"ready": True, "since": NOW, "waiting": ""}
    (line,) = lines.show(view)
    assert line.endswith(" | ready since 2025-11-22 04:13")


def test_a_line_of_a_pending_job_has_the_reason(lines: Lines) -> None:
    (line,) = lines.show(pending_view())
    assert line.endswith("job 4459 pending | workers 2 planned | waiting in the queue: Dependency")
    assert len(lines.show(pending_view() | {"pending_reason": "Resources"})) == 1
