"""The GPU collector: GPUs of the job on a node, their series, events and status."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from exporter.collecting.collector import StatusParts
from exporter.collecting.saved_state import save_state
from exporter.gpus.analysis.xid import KNOWN_XIDS
from exporter.gpus.collectors import page
from exporter.gpus.collectors.gpus_collector import DRIVER_STATE, HEALTH, VISIBLE, XIDS, GpusCollector
from exporter.gpus.records import GpuActivity, GpuCondition, GpuState, JobGpus
from tests.exporter.gpus.fake_gpus import AMD, DEVICE_LISTS, GIB, Node, gpu, instance, mig_gpu, uuid
from tests.support.exporter import make_context, make_manifest, page_of, publisher, samples_of
from tests.support.statuses import described


@pytest.fixture(autouse=True)
def no_device_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """No device list in the environment unless a test sets one."""
    for name in DEVICE_LISTS:
        monkeypatch.delenv(name, raising=False)


def gpu_indices(node: Node) -> list[str]:
    """Index labels of the GPUs on the page, in order."""
    return [entry.state.gpu.index for entry in node.read_gpus().gpus]


def four_gpus(run_dir: Path, **more: Any) -> Node:
    """A node with four GPUs, all planned for one worker."""
    return Node(run_dir, *(gpu(number) for number in range(4)), **{"plan": ((0, 1, 2, 3),), **more})


# GPUs of the job


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2,3", ["2", "3"]),
        ("3, 0", ["0", "3"]),
        (f"{uuid(1)},{uuid(3)}", ["1", "3"]),
        ("1,7,2", ["1"]),
        ("", ["0", "1", "2", "3"]),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_selects_the_gpus_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, indices: list[str]
) -> None:
    if text is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert gpu_indices(four_gpus(tmp_path)) == indices


def test_planned_positions_follow_the_order_of_the_device_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,0,2")
    node = four_gpus(tmp_path)
    snapshot = node.read_gpus()
    assert node.job_gpus.value.positions == {0: uuid(3), 1: uuid(0), 2: uuid(2)}
    assert list(node.job_gpus.value.positions.values()) == [uuid(3), uuid(0), uuid(2)]
    assert (snapshot.allocated, snapshot.visible) == (4, 3)


def test_a_missing_gpu_leaves_its_position_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{uuid(0)},GPU-gone,{uuid(2)}")
    node = four_gpus(tmp_path)
    node.read_gpus()
    assert node.job_gpus.value.positions == {0: uuid(0), 2: uuid(2)}


def test_gpu_totals_survive_a_restart_of_the_sidecar(tmp_path: Path) -> None:
    first = Node(tmp_path, gpu(0))
    first.read_gpus()
    first.change(0, energy_j=1e6 + 500, memory_used_bytes=99 * GIB, utilization_ratio=1.0)
    first.read_gpus(10)
    first.change(0, memory_used_bytes=1 * GIB)
    first.read_gpus(61)
    second = Node(tmp_path, gpu(0, activity=GpuActivity(energy_j=1e6 + 800, utilization_ratio=1.0)), clock=first.clock)
    (entry,) = second.read_gpus(5).gpus
    assert (entry.energy_job_j, entry.memory_peak_bytes) == (800, 99 * GIB)
    assert entry.utilization_mean_ratio == 1.0


def test_gpu_totals_stay_constant_after_the_end_of_the_job(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0))
    node.read_gpus()
    node.phase.publish("finished")
    node.change(0, energy_j=2e6, memory_used_bytes=140 * GIB)
    (entry,) = node.read_gpus(5).gpus
    assert (entry.energy_job_j, entry.memory_peak_bytes) == (None, 70 * GIB)


def test_lost_gpus_are_published_with_the_time_of_loss(tmp_path: Path) -> None:
    node = four_gpus(tmp_path)
    seen = node.host.gpus[2]
    node.host.gpus[2] = GpuState(seen.gpu, "lost", "GPU is lost")
    node.read_gpus(1)
    since = node.clock.now
    node.read_gpus(30)
    assert node.job_gpus.value.lost == {uuid(2): (since, "GPU is lost")}
    node.host.gpus[2] = seen
    node.read_gpus(1)
    assert node.job_gpus.value.lost == {}


@pytest.mark.parametrize("broken", [{uuid(0): {"busy_s": 1}}, {uuid(0): "no"}, {uuid(0): {"busy_s": None}}])
def test_damaged_totals_start_from_zero(tmp_path: Path, broken: dict[str, object]) -> None:
    node = Node(tmp_path, gpu(0))
    identity = node.context.identity
    save_state(tmp_path, identity.node, identity.job_id, identity.attempt, broken, kind="gpu_totals")
    (entry,) = node.read_gpus().gpus
    assert entry.memory_peak_bytes == 70 * GIB


def test_amd_gpus_are_selected_by_the_rocm_and_hip_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1,2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    node = four_gpus(tmp_path)
    assert gpu_indices(node) == ["0"]
    node.host.driver = AMD
    assert gpu_indices(node) == ["1", "2"]
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3")
    assert gpu_indices(node) == ["3"]


@pytest.mark.parametrize(("first", "indices"), [(0, ["0", "1"]), (2, ["2", "3"]), (3, ["3"]), (4, [])])
def test_simulated_nodes_on_one_machine_share_its_gpus(tmp_path: Path, first: int, indices: list[str]) -> None:
    node = Node(tmp_path, *(gpu(number) for number in range(4)), plan=((0,), (1,)), first_gpu=first)
    assert gpu_indices(node) == indices
    assert node.job_gpus.value.positions == {at: uuid(int(index)) for at, index in enumerate(indices)}


def test_the_share_of_a_simulated_node_is_taken_from_the_device_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0")
    assert gpu_indices(Node(tmp_path, *(gpu(number) for number in range(4)), first_gpu=1)) == ["1"]


def test_the_plan_of_an_attached_job_uses_driver_indices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # set in the terminal that runs the sidecar
    node = Node(tmp_path, *(gpu(number) for number in range(4)), plan=((3,), (1,), (9,)), attached=True)
    assert gpu_indices(node) == ["1", "3"]
    assert node.job_gpus.value.positions == {1: uuid(1), 3: uuid(3)}


def test_mig_instances_of_an_attached_job_have_positions(tmp_path: Path) -> None:
    plan = ((1,), (2,))
    node = Node(tmp_path, mig_gpu(0), instance(0, 0), instance(0, 1), gpu(1), plan=plan, attached=True)
    assert node.read_gpus().missing == ()
    assert node.job_gpus.value.positions == {1: node.host.gpus[2].gpu.uuid, 2: node.host.gpus[3].gpu.uuid}


@pytest.mark.parametrize("text", [None, "", "NoDevFiles", "-1"])
@pytest.mark.parametrize("attached", [False, True])
def test_a_job_without_gpus_polls_none_and_has_no_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, attached: bool
) -> None:
    if text is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    node = four_gpus(tmp_path, plan=((),), attached=attached)
    assert node.page() == ""
    assert node.status().gpus is None
    assert node.host.poll_count == 0
    assert node.gpus.interval_s == 60.0


def test_the_device_list_of_the_terminal_does_not_apply_to_an_attached_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    node = four_gpus(tmp_path, plan=((),), attached=True)
    assert node.page() == ""
    assert node.host.poll_count == 0


@pytest.mark.parametrize(
    ("first_gpu", "nodes", "visible"),
    [(None, 1, 2), (0, 1, 2), (0, 2, 0)],
    ids=["of a node", "of this machine", "of one of two nodes on this machine"],
)
def test_listed_gpus_outside_the_plan_are_visible(
    first_gpu: int | None, nodes: int, visible: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    snapshot = four_gpus(tmp_path, plan=((),), first_gpu=first_gpu, nodes=nodes).read_gpus()
    assert (snapshot.allocated, snapshot.visible) == (0, visible)


def test_without_a_gpu_host_there_are_no_series(tmp_path: Path) -> None:
    collector = GpusCollector(make_context(make_manifest(tmp_path)), publisher(JobGpus()), publisher("running"))
    snapshot = collector.read()
    assert page_of(collector, snapshot) == ""


def test_mig_instances_have_positions_and_are_shown_with_their_gpu(tmp_path: Path) -> None:
    node = Node(tmp_path, mig_gpu(0), instance(0, 0), instance(0, 1), gpu(1), plan=((0,), (1,)))
    snapshot = node.read_gpus()
    assert [entry.state.gpu.index for entry in snapshot.gpus] == ["0", "0:0", "0:1", "1"]
    assert node.job_gpus.value.positions == {
        0: node.host.gpus[1].gpu.uuid,
        1: node.host.gpus[2].gpu.uuid,
        2: node.host.gpus[3].gpu.uuid,
    }
    assert snapshot.visible == 3
    text = page_of(node.gpus, snapshot)
    modes = {line.partition('mig_mode="')[2].partition('"')[0] for line in text.splitlines() if "gpu_info{" in line}
    assert modes == {"on", "instance", "off"}


def test_a_mig_instance_can_be_selected_by_its_uuid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, mig_gpu(0), instance(0, 0), instance(0, 1), gpu(1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", node.host.gpus[2].gpu.uuid)
    assert gpu_indices(node) == ["0", "0:1"]


# Series


def test_unknown_values_have_no_series(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0, activity=GpuActivity(), condition=GpuCondition()))
    text = page_of(node.gpus, node.read_gpus())
    assert {family for family in node.gpus.families if samples_of(text, family)} == {
        *(DRIVER_STATE, VISIBLE, HEALTH, XIDS),
        *(page.INFO, page.UP),
    }


def test_zero_is_a_value(tmp_path: Path) -> None:
    activity = GpuActivity(utilization_ratio=0.0, power_average_w=0.0, throttle_s={"thermal": 0.0})
    node = Node(tmp_path, gpu(0, activity=activity, condition=GpuCondition(row_remap_pending=False, nvlink_errors=0)))
    text = page_of(node.gpus, node.read_gpus())
    assert samples_of(text, page.UTILIZATION) == {'gpu="0"': 0}
    assert samples_of(text, page.POWER) == {'gpu="0",kind="average"': 0}
    assert samples_of(text, page.THROTTLE) == {'gpu="0",reason="thermal"': 0}
    assert samples_of(text, page.REMAP_PENDING) == {'gpu="0"': 0}
    assert samples_of(text, page.NVLINK_ERRORS) == {'gpu="0"': 0}
    assert node.node_gpus().gpus[0].power_w == 0.0


@pytest.mark.parametrize("rate", [None, 5.0])
def test_nvlink_totals_are_of_gpus_without_a_rate_even_if_one_reading_has_none(
    tmp_path: Path, rate: float | None
) -> None:
    condition = GpuCondition(nvlink_rx_bytes=1000)
    measured = GpuActivity(nvlink_rx_bytes_per_s=rate, has_nvlink_rate=True)
    node = Node(
        tmp_path, gpu(0, activity=measured, condition=condition), gpu(1, activity=GpuActivity(), condition=condition)
    )
    text = page_of(node.gpus, node.read_gpus())
    assert samples_of(text, page.NVLINK_BYTES) == {'gpu="1",direction="rx"': 1000}


def test_pcie_width_and_generation_are_ratios_of_their_maximum(tmp_path: Path) -> None:
    condition = GpuCondition(pcie_width=8, pcie_width_max=16, pcie_generation=4)
    text = page_of((node := Node(tmp_path, gpu(0, condition=condition))).gpus, node.read_gpus())
    assert samples_of(text, page.PCIE_WIDTH) == {'gpu="0"': 0.5}
    assert samples_of(text, page.PCIE_GENERATION) == {}


@pytest.mark.parametrize("state", ["lost", "reset_required", "hanging"])
def test_a_gpu_that_does_not_answer_has_only_its_state(tmp_path: Path, state: Any) -> None:
    node = four_gpus(tmp_path)
    node.read_gpus()
    node.host.gpus[1] = GpuState(node.host.gpus[1].gpu, state, "GPU is lost")
    snapshot = node.read_gpus(1)
    text = page_of(node.gpus, snapshot)
    assert samples_of(text, page.UP) == {'gpu="0"': 1, 'gpu="1"': 0, 'gpu="2"': 1, 'gpu="3"': 1}
    assert samples_of(text, page.STATE) == {f'gpu="1",state="{state}"': 1}
    assert list(samples_of(text, page.UTILIZATION)) == ['gpu="0"', 'gpu="2"', 'gpu="3"']
    assert samples_of(text, HEALTH)['health="failure"'] == 1
    (reason,) = snapshot.reasons
    assert (reason.gpu, reason.severity) == ("1", "failure")
    assert reason.text.endswith("GPU is lost")


@pytest.mark.parametrize(
    ("state", "health"), [("no_library", None), ("no_driver", None), ("hanging", "failure"), ("failing", "failure")]
)
def test_the_page_shows_why_the_driver_is_unavailable(tmp_path: Path, state: Any, health: str | None) -> None:
    node = four_gpus(tmp_path)
    node.host.gpus, node.host.driver, node.host.state, node.host.message = [], None, state, "it is not there"
    snapshot = node.read_gpus()
    text = page_of(node.gpus, snapshot)
    assert samples_of(text, DRIVER_STATE) == {f'state="{state}"': 1}
    assert samples_of(text, VISIBLE) == {"": 0}
    assert samples_of(text, XIDS) == {}
    assert snapshot.health == health
    assert node.events()[0] == ("warning", "GPU driver", f"GPUs cannot be read: {state}: it is not there")
    node.host.state, node.host.message = "ok", None
    assert node.events(1)[-1][1:] == ("GPU driver", "GPUs can be read again")
    assert [kind for _, kind, _ in node.events(1)].count("GPU driver") == 2


def test_xid_counts_start_at_0_where_the_driver_reports_events(tmp_path: Path) -> None:
    node = four_gpus(tmp_path)
    zero = {f'xid="{code}"': 0 for code in KNOWN_XIDS}
    assert samples_of(page_of(node.gpus, node.read_gpus()), XIDS) == zero
    node.xid(0, 79)
    node.xid(1, 79)
    node.xid(2, 62_000)
    text = page_of(node.gpus, node.read_gpus(1))
    assert samples_of(text, XIDS) == {**zero, 'xid="79"': 2, 'xid="62000"': 1}
    assert samples_of(text, page.XID_TIME) == {
        f'gpu="{number}",xid="{code}"': node.clock.now - 1 for number, code in ((0, 79), (1, 79), (2, 62_000))
    }
    node.host.driver = AMD
    assert f'xid="{KNOWN_XIDS[0]}"' not in samples_of(page_of(node.gpus, node.read_gpus(1)), XIDS)


def test_the_interval_is_the_check_interval_between_one_and_five_seconds(tmp_path: Path) -> None:
    intervals = [four_gpus(tmp_path, check_interval_s=check).gpus.interval_s for check in (0.1, 2.0, 60.0)]
    assert intervals == [1.0, 2.0, 5.0]


# Totals of a GPU


def test_mean_peak_and_energy_count_from_the_first_read(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0))
    node.change(0, utilization_ratio=1.0, memory_used_bytes=3 * GIB, energy_j=5000.0)
    (first,) = node.read_gpus().gpus
    assert (first.utilization_mean_ratio, first.memory_peak_bytes, first.energy_job_j) == (None, 3 * GIB, None)
    node.change(0, utilization_ratio=0.0, memory_used_bytes=9 * GIB, energy_j=5600.0)
    node.read_gpus(1)
    node.change(0, utilization_ratio=1.0, memory_used_bytes=1 * GIB, energy_j=6000.0)
    (entry,) = node.read_gpus(3).gpus
    assert entry.utilization_mean_ratio == 0.75
    assert (first.seen_s, first.idle_s) == (None, None)
    assert (entry.seen_s, entry.idle_s) == (4.0, 1.0)
    assert entry.memory_peak_bytes == 9 * GIB
    assert entry.energy_job_j == 1000.0


def test_energy_keeps_counting_after_the_driver_was_reloaded(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0))
    for energy in (5000.0, 5500.0, 10.0, 110.0):
        node.change(0, energy_j=energy)
        node.read_gpus(1)
    assert node.read_gpus(1).gpus[0].energy_job_j == 600.0


def test_time_without_readings_does_not_count_towards_the_mean(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0))
    seen = node.host.gpus[0]
    node.change(0, utilization_ratio=1.0)
    node.read_gpus()
    node.read_gpus(1)
    node.host.gpus[0] = dataclasses.replace(seen, state="lost", activity=None)
    node.read_gpus(100)
    node.host.gpus[0] = seen
    node.change(0, utilization_ratio=0.0)
    node.read_gpus(100)
    (entry,) = node.read_gpus(1).gpus
    assert (entry.utilization_mean_ratio, entry.seen_s, entry.idle_s) == (0.5, 2.0, 1.0)


# Events


def test_the_loss_and_recovery_of_a_gpu_are_reported_once_each(tmp_path: Path) -> None:
    node = four_gpus(tmp_path)
    assert node.events() == []
    seen = node.host.gpus[2]
    node.host.gpus[2] = GpuState(seen.gpu, "lost", "GPU is lost")
    lost = ("critical", "GPU lost", f"GPU 2 ({uuid(2)}): GPU is lost")
    failure = "failure: GPU 2: it is lost: GPU is lost"
    assert node.events(1) == node.events(1) == [lost, ("critical", "GPU health", failure)]
    node.host.gpus[2] = seen
    assert node.events(1)[2:] == [
        ("info", "GPU works again", f"GPU 2 ({uuid(2)})"),
        ("info", "GPU health", "healthy"),
    ]
    assert len(node.events(1)) == 4


@pytest.mark.parametrize(
    ("code", "level"), [(79, "critical"), (119, "critical"), (31, "warning"), (45, "info"), (62_000, "info")]
)
def test_each_xid_is_reported_once_with_its_gpu(tmp_path: Path, code: int, level: str) -> None:
    node = four_gpus(tmp_path)
    node.read_gpus()
    node.xid(3, code)
    reported = [event for event in node.events(1) if event[1] == "GPU Xid"]
    assert [(reported_level, kind) for reported_level, kind, _ in reported] == [(level, "GPU Xid")]
    assert reported[0][2].startswith(f"GPU 3 ({uuid(3)}): Xid {code}: ")
    node.xid(3, code)
    node.events(1)
    assert [kind for _, kind, _ in node.events(1)].count("GPU Xid") == 2


def test_health_is_reported_on_change_and_not_after_a_gap(tmp_path: Path) -> None:
    node = four_gpus(tmp_path)
    node.change(0, row_remap_pending=True)
    warning = ("warning", "GPU health", "warning: GPU 0: a row of its memory will be remapped at the next reset")
    assert node.events() == [warning]
    gpus, node.host.gpus = node.host.gpus, []
    node.host.state = "no_permission"
    assert node.read_gpus(1).health is None
    node.host.gpus, node.host.state = gpus, "ok"
    assert [event for event in node.events(1) if event[1] == "GPU health"] == [warning]


@pytest.mark.parametrize(
    ("changes", "health", "text"),
    [
        ({}, "healthy", None),
        ({"row_remap_failure": True}, "failure", "a row of its memory could not be remapped"),
        ({"pcie_width": 8, "pcie_width_max": 16}, "warning", "PCIe uses 8 of 16 lanes"),
    ],
)
def test_health_follows_from_the_condition_of_the_gpus(
    tmp_path: Path, changes: dict[str, Any], health: str, text: str | None
) -> None:
    node = four_gpus(tmp_path)
    node.change(1, **changes)
    node.read_gpus()
    snapshot = node.read_gpus(60)
    assert snapshot.health == health
    assert [(reason.gpu, reason.text) for reason in snapshot.reasons] == ([] if text is None else [("1", text)])
    one_hot = {f'health="{name}"': int(name == health) for name in ("healthy", "warning", "failure")}
    assert samples_of(page_of(node.gpus, snapshot), HEALTH) == one_hot


def test_xid_counts_have_no_series_without_an_error_source(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0))
    node.host.reports_events = False
    assert not samples_of(page_of(node.gpus, node.read_gpus()), XIDS)
    node.kernel.unavailable_reason = None
    assert set(samples_of(page_of(node.gpus, node.read_gpus(1)), XIDS).values()) == {0}


# The status


def test_the_status_is_json_and_complete(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0))
    node.run(0, 5)
    node.use(0, 5, 1)
    node.status()
    node.xid(0, 79)
    node.change(0, energy_j=1e6 + 400, sm_activity_ratio=0.8, tensor_activity_ratio=0.4)
    status = json.loads(json.dumps(node.node_gpus(1).to_json()))
    (foreign,) = status["gpus"][0].pop("foreign")
    assert {name: foreign[name] for name in ("pid", "memory_bytes")} == {"pid": 1, "memory_bytes": GIB}
    assert foreign.keys() == {"pid", "memory_bytes", "name", "uid"}
    (reason,) = status["reasons"]
    assert reason.keys() == {"gpu", "severity", "words"}
    assert status == {
        "driver_state": "ok",
        "words": None,
        "vendor": "nvidia",
        "driver": "570.86.15",
        "cuda": "12.8",
        "allocated": 1,
        "visible": 1,
        "health": "failure",
        "reasons": [reason],
        "absent": {"nvmlDeviceGetFanSpeed": "Not Supported"},
        "gpus": [
            {
                "gpu": "0",
                "uuid": uuid(0),
                "name": "NVIDIA H200",
                "pci_bus_id": "0000:18:00.0",
                "state": "ok",
                "words": None,
                "utilization_ratio": 0.5,
                "memory_used_bytes": 70 * GIB,
                "memory_total_bytes": 141 * GIB,
                "power_w": 400.0,
                "power_limit_w": 700.0,
                "energy_j": 1e6 + 400,
                "energy_job_j": 400.0,
                "temperature_c": 55.0,
                "sm_activity_ratio": 0.8,
                "tensor_activity_ratio": 0.4,
                "utilization_mean_ratio": 0.5,
                "seen_s": 1.0,
                "idle_s": 0.0,
                "memory_peak_bytes": 70 * GIB,
                "workers": ["worker_w0"],
                "xids": [
                    {
                        "xid": 79,
                        "class": "hardware",
                        "count": 1,
                        "time": node.clock.now - 1,
                        "words": "fallen off the bus",
                    }
                ],
                "lost_since": None,
            }
        ],
    }


def test_the_status_identifies_a_lost_gpu(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0))
    node.host.gpus[0] = GpuState(node.host.gpus[0].gpu, "lost", "GPU is lost")
    (entry,) = node.node_gpus().gpus
    known = {name: value for name, value in entry.to_json().items() if value not in (None, [])}
    assert known == {
        "gpu": "0",
        "uuid": uuid(0),
        "name": "NVIDIA H200",
        "pci_bus_id": "0000:18:00.0",
        "state": "lost",
        "words": "GPU is lost",
        "memory_total_bytes": 141 * GIB,
        "lost_since": node.clock.now,
    }


def test_power_is_the_average_or_else_the_instant_value(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0))
    node.change(0, power_average_w=None, power_instant_w=321.0)
    assert node.node_gpus().gpus[0].power_w == 321.0
    node.change(0, power_average_w=300.0)
    assert node.node_gpus().gpus[0].power_w == 300.0


def test_reading_alone_adds_nothing_to_the_status(tmp_path: Path) -> None:
    node = four_gpus(tmp_path, plan=((),))
    assert described(node.gpus, node.read_gpus()) == StatusParts()


def test_there_are_no_series_before_the_first_listing(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0))
    node.host.gpus, node.host.ready = [], False
    assert page_of(node.gpus, node.read_gpus()) == ""
    node.host.state, node.host.message = "hanging", "open has not returned"
    assert 'gpujob_gpu_driver_state{state="hanging"} 1' in page_of(node.gpus, node.read_gpus(1))
