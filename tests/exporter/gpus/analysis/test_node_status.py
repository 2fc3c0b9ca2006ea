"""GPUs in the status of a node: users, problems, totals and events."""

from typing import Any

import pytest

from exporter.contract.events import LoggedEvent
from exporter.contract.report import GpuEvent, GpuReport, WorkerGpu
from exporter.contract.status import NodeGpus, NodeStatus
from exporter.gpus.analysis import node_status
from exporter.gpus.analysis.node_status import (
    MOST_EVENTS,
    account_gpus,
    account_text,
    energy_text,
    gpu_events,
    node_gpu_problems,
    worker_gpu_problems,
)
from tests.support.gpu_status import (
    GIB,
    XID_31,
    XID_79,
    XID_NOISE,
    gpu,
    gpus,
    node_of,
    of_worker,
    status_of,
    use,
    uuid_of,
)


def worker_devices(entry: dict[str, Any], node: dict[str, Any]) -> tuple[WorkerGpu, ...]:
    return node_status.worker_devices(status_of(entry), node_of(node))


def problems(entry: dict[str, Any], node: dict[str, Any]) -> list[tuple[str, str]]:
    worker = status_of(entry)
    found = worker_gpu_problems(worker, worker.start, worker_devices(entry, node), node_of(node))
    return [(problem.key, problem.text) for problem in found]


def node_problems(node: dict[str, Any]) -> list[str]:
    return [problem.text for problem in node_gpu_problems(NodeGpus.from_json(node))]


def accounted(nodes: dict[str, dict[str, Any]], *events: LoggedEvent) -> GpuReport:
    """Totals of nodes with these GPUs."""
    found = account_gpus({name: NodeStatus(gpus=node_of(node)) for name, node in nodes.items()}, events)
    assert found is not None
    return found


def test_planned_gpus_come_first_then_others_that_are_used() -> None:
    entry = of_worker(1, gpu_use=[use(0, memory_bytes=5, sm_ratio=None)])
    planned, other = worker_devices(entry, gpus(gpu(0), gpu(1)))
    assert (planned.gpu, planned.uuid, planned.planned, planned.used) == ("1", uuid_of(1), True, False)
    assert other == WorkerGpu(gpu="0", uuid=uuid_of(0), used=True, memory_bytes=5, attribution="process")


def test_the_use_of_an_unlisted_gpu_is_unknown() -> None:
    unseen = worker_devices(of_worker(1, gpu_use=[]), gpus(gpu(0)))
    assert [(device.gpu, device.used) for device in unseen] == [(None, None)]
    before = worker_devices({"gpu_plan": [uuid_of(0)]}, gpus(gpu(0)))
    assert [(device.gpu, device.used) for device in before] == [("0", None)]
    assert worker_devices({}, {}) == ()


def test_the_use_of_a_gpu_is_unknown_without_process_lists() -> None:
    node = gpus(gpu(0), gpu(1))
    assert [device.used for device in worker_devices(of_worker(0, 1, gpu_use=None), node)] == [None, None]


@pytest.mark.parametrize("state", ["lost", "reset_required", "hanging"])
def test_the_use_of_an_unreadable_gpu_is_unknown(state: str) -> None:
    devices = worker_devices(of_worker(0, 1, gpu_use=[]), gpus(gpu(0, state=state), gpu(1)))
    assert [device.used for device in devices] == [None, False]
    (kept,) = worker_devices(of_worker(0), gpus(gpu(0, state=state)))
    assert kept.used is True


@pytest.mark.parametrize(("uses", "used"), [(None, [None]), ([], [False]), ([use(1)], [False, True])])
def test_the_gpu_use_of_an_ended_worker_comes_from_the_status(
    uses: list[dict[str, Any]] | None, used: list[bool | None]
) -> None:
    ended = {**of_worker(0, gpu_use=uses), "exit": {"reason": "completed"}}
    assert [device.used for device in worker_devices(ended, gpus(gpu(0), gpu(1)))] == used


def test_a_planned_position_without_a_gpu_is_missing() -> None:
    entry, node = {**of_worker(6), "gpu_missing": ["7"]}, gpus(gpu(6), allocated=2)
    there, missing = worker_devices(entry, node)
    assert (there.gpu, there.uuid) == ("6", uuid_of(6))
    assert missing == WorkerGpu(gpu="7", planned=True)
    assert problems(entry, node) == [("missing 7", "GPU 7 is missing")]


def test_every_problem_of_a_worker_has_a_text() -> None:
    foreign = {"pid": 7, "memory_bytes": 5 * GIB, "name": "py\n3", "uid": 1001}
    node = gpus(gpu(0, state="lost", words="GPU is lost", xids=[XID_79, XID_NOISE], foreign=[foreign]))
    entry = of_worker(0, gpu_misplaced="uses GPU 0 of worker_w1", gpu_conditions={"held_idle": "holds 15 GiB idle"})
    assert problems(entry, node) == [
        ("misplaced", "uses GPU 0 of worker_w1"),
        ("lost 0", "GPU 0 is lost"),
        ("xid 0 79", "GPU 0: Xid 79, GPU has fallen off the bus"),
        ("foreign 0 7", "process 7 (py?3), not of this job, holds 5.0 GiB of GPU 0"),
        ("held_idle", "held_idle: holds 15 GiB idle"),
    ]
    stuck = {"state": "hanging", "words": "nvmlDeviceGetMemoryInfo has not returned"}
    unknown = gpus(gpu(0, foreign=[{"pid": 7, "memory_bytes": None}], **stuck))
    assert [text for _, text in problems(of_worker(0), unknown)] == [
        "GPU 0 does not answer: nvmlDeviceGetMemoryInfo has not returned",
        "process 7, not of this job, is on GPU 0",
    ]


def test_a_healthy_worker_has_no_problems() -> None:
    assert problems(of_worker(0), gpus(gpu(0), gpu(1, state="lost"))) == []


@pytest.mark.parametrize(("start", "codes"), [(900.0, ["xid 0 79", "xid 0 31"]), (1100.0, ["xid 0 79"])])
def test_an_xid_of_an_earlier_run_counts_only_for_a_device_error(start: float, codes: list[str]) -> None:
    node = gpus(gpu(0, xids=[XID_79, XID_31]))
    assert [key for key, _ in problems({**of_worker(0), "start": start}, node)] == codes


def test_the_text_contains_the_number_of_xids() -> None:
    assert problems(of_worker(0), gpus(gpu(0, xids=[XID_31]))) == [
        ("xid 0 31", "GPU 0: Xid 31, GPU memory page fault (2 times)")
    ]


def test_faults_of_a_mig_gpu_affect_its_instances() -> None:
    node = gpus(gpu(0, state="lost"), gpu("0:1"), gpu(1, state="lost"))
    assert [key for key, _ in problems(of_worker("0:1"), node)] == ["lost 0"]


def test_the_node_lists_unhealthy_gpus_with_reasons() -> None:
    reasons = [{"gpu": "3", "severity": "failure", "words": "fell off"}, {"gpu": None, "severity": "w", "words": "all"}]
    assert node_problems(gpus(gpu(3), health="failure", reasons=reasons)) == ["failure: GPU 3: fell off; all"]
    assert node_problems(gpus(gpu(3), health="warning")) == ["warning"]
    assert node_problems(gpus(gpu(3))) == node_problems(gpus(health=None)) == node_problems({}) == []


@pytest.mark.parametrize(
    ("shown", "allocated", "texts"),
    [
        (2, 4, ["the plan needs 4 GPUs and the driver shows 2"]),
        (0, 1, ["the plan needs 1 GPU and the driver shows none"]),
        (2, 2, []),
        (3, 2, []),
    ],
)
def test_fewer_gpus_than_planned_are_a_problem(shown: int, allocated: int, texts: list[str]) -> None:
    assert node_problems(gpus(*map(gpu, range(shown)), allocated=allocated)) == texts


def test_a_node_may_have_missing_and_unhealthy_gpus() -> None:
    assert node_problems(gpus(gpu(0), allocated=2, health="warning")) == [
        "the plan needs 2 GPUs and the driver shows 1",
        "warning",
    ]


def test_an_unreadable_driver_is_a_problem_where_gpus_are_planned() -> None:
    broken = gpus(driver_state="no_permission", words="Insufficient Permissions", allocated=2, health=None)
    assert node_problems(broken) == ["cannot be read (no_permission): Insufficient Permissions"]
    assert node_problems({**broken, "allocated": 0}) == []


def test_totals_are_per_node_and_over_all_nodes() -> None:
    found = accounted(
        {
            "cn02": gpus(gpu(0, utilization_mean_ratio=0.5, energy_job_j=None)),
            "cn01": gpus(gpu(0), gpu(1, memory_peak_bytes=99 * GIB, utilization_mean_ratio=0.7)),
            "cn03": {},
        }
    )
    assert (found.count, found.names, found.energy_j) == (3, {"NVIDIA H200": 3}, 7.2e6)
    assert found.utilization_mean_ratio == pytest.approx(0.7)
    assert found.memory_peak_bytes == 99 * GIB
    first, second = found.nodes
    assert (first.node, first.energy_j) == ("cn01", 7.2e6)
    assert first.utilization_mean_ratio == pytest.approx(0.8)
    assert (second.node, second.utilization_mean_ratio, second.energy_j) == ("cn02", 0.5, None)
    assert [device.energy_j for device in first.gpus] == [3.6e6, 3.6e6]
    assert account_text(found) == "3 x NVIDIA H200, 70 % busy, 2.0 kWh"


def test_idle_time_is_of_the_gpus_that_were_seen() -> None:
    found = accounted({"cn01": gpus(gpu(0, seen_s=60.0, idle_s=6.0), gpu(1, seen_s=40.0, idle_s=0.0), gpu(2))})
    assert (found.seen_s, found.idle_s) == (100.0, 6.0)
    assert [(device.seen_s, device.idle_s) for device in found.nodes[0].gpus] == [
        (60.0, 6.0),
        (40.0, 0.0),
        (None, None),
    ]
    unseen = accounted({"cn01": gpus(gpu(0))})
    assert (unseen.seen_s, unseen.idle_s) == (None, None)


def test_a_job_without_gpus_has_no_totals() -> None:
    assert account_gpus({"cn01": NodeStatus(), "cn02": NodeStatus()}) is None


def test_totals_of_a_mig_gpu_count_its_instances_and_the_energy_of_the_gpu() -> None:
    part = {"utilization_mean_ratio": None, "energy_job_j": None, "name": "NVIDIA H200 MIG 1g.18gb"}
    found = accounted({"cn01": gpus(gpu(0), gpu("0:0", **part), gpu("0:1", **part))})
    assert (found.names, found.energy_j) == ({"NVIDIA H200 MIG 1g.18gb": 2}, 3.6e6)
    assert (found.utilization_mean_ratio, found.memory_peak_bytes) == (None, 30 * GIB)
    assert account_text(found) == "2 x NVIDIA H200 MIG 1g.18gb, 1.0 kWh (whole GPU)"


def test_events_of_a_single_node_may_omit_its_name() -> None:
    lost, one = event(5.0, "GPU lost", "critical", node=None), {"cn01": gpus(gpu(0))}
    assert accounted(one, lost).events[0].node == "cn01"
    assert accounted({**one, "cn02": {}}, lost).events[0].node is None


def test_unreadable_gpus_are_mentioned() -> None:
    lone = gpus(driver_state="no_driver", allocated=2)
    assert account_text(accounted({"cn01": lone})) == "could not be read on cn01 (no_driver)"
    many = account_text(accounted({f"cn{n}": lone for n in range(6)} | {"x": gpus(gpu(0))}))
    assert many.startswith("1 x NVIDIA H200, 90 % busy, 1.0 kWh, could not be read on cn0 (no_driver), ")
    assert many.endswith("cn3 (no_driver) and 2 more nodes")


@pytest.mark.parametrize(
    ("joules", "text"),
    [(None, "-"), (0.0, "0.000 kWh"), (44e3, "0.012 kWh"), (44.3e6, "12.3 kWh"), (4.5e9, "1250 kWh")],
)
def test_energy_is_shown_in_kwh(joules: float | None, text: str) -> None:
    assert energy_text(joules) == text


def event(time: float, kind: str, level: str = "warning", **over: Any) -> LoggedEvent:
    known = {"job_id": "1", "time": time, "level": level, "event": kind, "detail": "GPU 1", "node": "cn01", **over}
    return LoggedEvent.from_json(known)


def kinds(*events: LoggedEvent) -> list[str | None]:
    return [found.event for found in gpu_events(events)]


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
    assert gpu_events([late]) == [GpuEvent(1.0, "cn01", "warning", "GPU hangs", "worker_w1", "GPU 1")]


def test_the_first_events_are_kept_and_all_are_counted() -> None:
    found = accounted({"cn01": gpus(gpu(0))}, *(event(float(n), "GPU lost") for n in range(MOST_EVENTS + 3)))
    assert (len(found.events), found.events_total) == (MOST_EVENTS, MOST_EVENTS + 3)
    assert found.events[0].time == 0.0
