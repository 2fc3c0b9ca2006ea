"""GPU events among the events of a job."""

from typing import Any

from exporter.gpus.analysis.node_status import MOST_EVENTS, gpu_events


def event(time: float, kind: str, level: str = "warning", **over: Any) -> dict[str, Any]:
    return {"time": time, "level": level, "event": kind, "detail": "GPU 1", "node": "cn01", **over}


def kinds(*events: dict[str, Any]) -> list[str]:
    return [found["event"] for found in gpu_events(events)["events"]]


def test_gpu_events_are_warnings_or_worse_and_recoveries() -> None:
    assert kinds(
        event(1.0, "GPU lost", "critical"),
        event(2.0, "GPU Xid", "info"),
        event(3.0, "GPU works again", "info"),
        event(4.0, "GPU health", "info"),
        event(5.0, "GPU driver", "info"),
        event(6.0, "GPU signature", worker="worker_w0"),
        event(7.0, "disk low", "critical"),
    ) == ["GPU lost", "GPU works again", "GPU driver", "GPU signature"]


def test_events_are_in_the_order_in_which_they_happened() -> None:
    late = event(9.0, "GPU hangs", happened=1.0, worker="worker_w1")
    assert kinds(event(3.0, "GPU Xid"), late, event(2.0, "GPU lost")) == ["GPU hangs", "GPU lost", "GPU Xid"]
    assert gpu_events([late])["events"] == [
        {"time": 1.0, "node": "cn01", "level": "warning", "event": "GPU hangs", "worker": "worker_w1",
         "detail": "GPU 1"}
    ]  # fmt: skip


def test_the_first_events_are_kept_and_all_are_counted() -> None:
    found = gpu_events(event(float(n), "GPU lost") for n in range(MOST_EVENTS + 3))
    assert (len(found["events"]), found["events_total"]) == (MOST_EVENTS, MOST_EVENTS + 3)
    assert found["events"][0]["time"] == 0.0


def test_an_event_without_a_time_is_ignored() -> None:
    assert gpu_events([{"event": "GPU lost", "time": "x"}, {}]) == {"events": [], "events_total": 0}
