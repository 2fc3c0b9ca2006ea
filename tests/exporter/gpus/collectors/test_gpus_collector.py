"""The job's GPUs on a node: which they are, what is shown of them, and what is told when they change."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from exporter.collecting.collector import NodeStatus
from exporter.collecting.saved_state import save_state
from exporter.gpus.analysis.xid import KNOWN_XIDS
from exporter.gpus.collectors import page as gpu_page
from exporter.gpus.collectors.gpus_collector import DRIVER_STATE, HEALTH, VISIBLE, XIDS, GpusCollector
from exporter.gpus.records import GpuActivity, GpuCondition, GpuState
from tests.exporter.gpus.fake_gpus import AMD, DEVICE_LISTS, GIB, Node, divided, gpu, instance, uuid
from tests.support.exporter import make_context, make_manifest, page_of, samples_of


@pytest.fixture(autouse=True)
def no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """No devices are given by the environment unless a test does."""
    for name in DEVICE_LISTS:
        monkeypatch.delenv(name, raising=False)


def shown(node: Node) -> list[str]:
    """Labels of the GPUs on the page, in its order."""
    return [entry.state.gpu.index for entry in node.look().gpus]


def place(run_dir: Path, **more: Any) -> Node:
    """A node with four GPUs, all of which the plan gives to one worker."""
    return Node(run_dir, *(gpu(number) for number in range(4)), **{"plan": ((0, 1, 2, 3),), **more})


# Which GPUs are the job's


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2,3", ["2", "3"]),
        ("3, 0", ["0", "3"]),
        (f"{uuid(1)},{uuid(3)}", ["1", "3"]),
        ("GPU-2a,GPU-0a", ["0", "2"]),
        ("1,7,2", ["1"]),
        ("1,GPU-2a", ["1"]),
        ("GPU-", []),
        ("", ["0", "1", "2", "3"]),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,1", []),
    ],
)
def test_cuda_visible_devices_says_which_gpus_are_the_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, indices: list[str]
) -> None:
    if text is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert shown(place(tmp_path)) == indices


def test_positions_of_the_plan_count_in_the_order_of_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,0,2")
    node = place(tmp_path)
    snapshot = node.look()
    assert node.board.gpu_positions == {0: uuid(3), 1: uuid(0), 2: uuid(2)}
    assert node.board.own_gpus == (uuid(3), uuid(0), uuid(2))
    assert (snapshot.allocated, snapshot.visible) == (4, 3)


def test_a_gpu_that_is_not_there_any_more_leaves_its_position_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{uuid(0)},GPU-gone,{uuid(2)}")
    node = place(tmp_path)
    node.look()
    assert node.board.gpu_positions == {0: uuid(0), 2: uuid(2)}


def test_what_a_gpu_has_come_to_outlives_the_sidecar(tmp_path: Path) -> None:
    first = Node(tmp_path, gpu(0))
    first.look()
    first.change(0, energy_j=1e6 + 500, memory_used_bytes=99 * GIB, utilization_ratio=1.0)
    first.look(10)
    first.change(0, memory_used_bytes=1 * GIB)
    first.look(61)
    second = Node(tmp_path, gpu(0, activity=GpuActivity(energy_j=1e6 + 800, utilization_ratio=1.0)), clock=first.clock)
    (entry,) = second.look(5).gpus
    assert (entry.energy_job_j, entry.memory_peak_bytes) == (800, 99 * GIB)
    assert entry.utilization_mean_ratio == 1.0


def test_after_the_jobs_end_nothing_is_added_to_what_its_gpus_have_come_to(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0))
    node.look()
    node.board.job_phase = "finished"
    node.change(0, energy_j=2e6, memory_used_bytes=140 * GIB)
    (entry,) = node.look(5).gpus
    assert (entry.energy_job_j, entry.memory_peak_bytes) == (None, 70 * GIB)


def test_lost_gpus_are_told_to_who_judges_ends(tmp_path: Path) -> None:
    node = place(tmp_path)
    seen = node.host.gpus[2]
    node.host.gpus[2] = GpuState(seen.gpu, "lost", "GPU is lost")
    node.look(1)
    since = node.clock.now
    node.look(30)
    assert node.board.gpus_lost == {uuid(2): (since, "GPU is lost")}
    node.host.gpus[2] = seen
    node.look(1)
    assert node.board.gpus_lost == {}


@pytest.mark.parametrize("broken", [{uuid(0): {"busy_s": 1}}, {uuid(0): "no"}, {uuid(0): {"busy_s": None}}])
def test_broken_totals_begin_anew(tmp_path: Path, broken: dict[str, object]) -> None:
    node = Node(tmp_path, gpu(0))
    identity = node.context.identity
    save_state(tmp_path, identity.node, identity.job_id, identity.attempt, broken, kind="gpu_totals")
    (entry,) = node.look().gpus
    assert entry.memory_peak_bytes == 70 * GIB


def test_amd_gpus_are_those_that_rocm_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1,2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    node = place(tmp_path)
    assert shown(node) == ["0"]
    node.host.driver = AMD
    assert shown(node) == ["1", "2"]
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3")
    assert shown(node) == ["3"]


@pytest.mark.parametrize(("first", "indices"), [(0, ["0", "1"]), (2, ["2", "3"]), (3, ["3"]), (4, [])])
def test_nodes_that_one_machine_plays_have_each_their_share(tmp_path: Path, first: int, indices: list[str]) -> None:
    node = Node(tmp_path, *(gpu(number) for number in range(4)), plan=((0,), (1,)), first_gpu=first)
    assert shown(node) == indices
    assert node.board.gpu_positions == {at: uuid(int(index)) for at, index in enumerate(indices)}


def test_the_share_of_a_node_is_one_of_the_given_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0")
    assert shown(Node(tmp_path, *(gpu(number) for number in range(4)), first_gpu=1)) == ["1"]


def test_a_job_of_others_names_its_gpus_as_the_driver_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # of the terminal from which it is watched
    node = Node(tmp_path, *(gpu(number) for number in range(4)), plan=((3,), (1,), (9,)), attached=True)
    assert shown(node) == ["1", "3"]
    assert node.board.gpu_positions == {1: uuid(1), 3: uuid(3)}


@pytest.mark.parametrize("text", [None, "", "NoDevFiles", "-1"])
@pytest.mark.parametrize("attached", [False, True])
def test_a_job_without_gpus_asks_for_none_and_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, attached: bool
) -> None:
    if text is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    node = place(tmp_path, plan=((),), attached=attached)
    assert node.page() == ""
    assert node.status().gpus == {}
    assert node.host.asked == 0
    assert node.gpus.interval_s == 60.0


def test_gpus_of_the_terminal_are_not_those_of_a_job_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    node = place(tmp_path, plan=((),), attached=True)
    assert node.page() == ""
    assert node.host.asked == 0


def test_gpus_that_are_given_but_not_in_the_plan_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    snapshot = place(tmp_path, plan=((),)).look()
    assert (snapshot.allocated, snapshot.visible) == (0, 2)


def test_a_sidecar_that_nobody_gave_a_reader_shows_nothing(tmp_path: Path) -> None:
    collector = GpusCollector(make_context(make_manifest(tmp_path)))
    snapshot = collector.read()
    assert page_of(collector, snapshot) == ""


def test_mig_instances_are_units_and_their_gpu_is_shown_with_them(tmp_path: Path) -> None:
    node = Node(tmp_path, divided(0), instance(0, 0), instance(0, 1), gpu(1), plan=((0,), (1,)))
    snapshot = node.look()
    assert [entry.state.gpu.index for entry in snapshot.gpus] == ["0", "0:0", "0:1", "1"]
    assert node.board.gpu_positions == {
        0: node.host.gpus[1].gpu.uuid,
        1: node.host.gpus[2].gpu.uuid,
        2: node.host.gpus[3].gpu.uuid,
    }
    assert snapshot.visible == 3
    page = page_of(node.gpus, snapshot)
    modes = {line.partition('mig_mode="')[2].partition('"')[0] for line in page.splitlines() if "gpu_info{" in line}
    assert modes == {"on", "instance", "off"}


def test_a_mig_instance_can_be_given_by_its_uuid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, divided(0), instance(0, 0), instance(0, 1), gpu(1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", node.host.gpus[2].gpu.uuid)
    assert shown(node) == ["0", "0:1"]


# What is shown


def test_what_is_not_known_has_no_series(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0, activity=GpuActivity(), condition=GpuCondition()))
    page = page_of(node.gpus, node.look())
    assert {family for family in node.gpus.families if samples_of(page, family)} == {
        *(DRIVER_STATE, VISIBLE, HEALTH, XIDS),
        *(gpu_page.INFO, gpu_page.UP),
    }


def test_zero_is_known(tmp_path: Path) -> None:
    activity = GpuActivity(utilization_ratio=0.0, power_average_w=0.0, throttle_s={"thermal": 0.0})
    node = Node(tmp_path, gpu(0, activity=activity, condition=GpuCondition(row_remap_pending=False, nvlink_errors=0)))
    page = page_of(node.gpus, node.look())
    assert samples_of(page, gpu_page.UTILIZATION) == {'gpu="0"': 0}
    assert samples_of(page, gpu_page.POWER) == {'gpu="0",kind="average"': 0}
    assert samples_of(page, gpu_page.THROTTLE) == {'gpu="0",reason="thermal"': 0}
    assert samples_of(page, gpu_page.REMAP_PENDING) == {'gpu="0"': 0}
    assert samples_of(page, gpu_page.NVLINK_ERRORS) == {'gpu="0"': 0}
    assert node.status().gpus["gpus"][0]["power_w"] == 0.0


def test_links_are_shares_of_what_they_can_be(tmp_path: Path) -> None:
    condition = GpuCondition(pcie_width=8, pcie_width_max=16, pcie_generation=4)
    page = page_of((node := Node(tmp_path, gpu(0, condition=condition))).gpus, node.look())
    assert samples_of(page, gpu_page.PCIE_WIDTH) == {'gpu="0"': 0.5}
    assert samples_of(page, gpu_page.PCIE_GENERATION) == {}


@pytest.mark.parametrize("state", ["lost", "reset_required", "hanging"])
def test_of_a_gpu_that_does_not_answer_only_that_is_shown(tmp_path: Path, state: Any) -> None:
    node = place(tmp_path)
    node.look()
    node.host.gpus[1] = GpuState(node.host.gpus[1].gpu, state, "GPU is lost")
    snapshot = node.look(1)
    page = page_of(node.gpus, snapshot)
    assert samples_of(page, gpu_page.UP) == {'gpu="0"': 1, 'gpu="1"': 0, 'gpu="2"': 1, 'gpu="3"': 1}
    assert samples_of(page, gpu_page.STATE) == {f'gpu="1",state="{state}"': 1}
    assert list(samples_of(page, gpu_page.UTILIZATION)) == ['gpu="0"', 'gpu="2"', 'gpu="3"']
    assert samples_of(page, HEALTH)['health="failure"'] == 1
    (reason,) = snapshot.reasons
    assert (reason.gpu, reason.severity) == ("1", "failure")
    assert reason.text.endswith("GPU is lost")


@pytest.mark.parametrize(
    ("state", "health"), [("no_library", None), ("no_driver", None), ("hanging", "failure"), ("failing", "failure")]
)
def test_without_a_driver_the_page_says_so(tmp_path: Path, state: Any, health: str | None) -> None:
    node = place(tmp_path)
    node.host.gpus, node.host.driver, node.host.state, node.host.words = [], None, state, "it is not there"
    snapshot = node.look()
    page = page_of(node.gpus, snapshot)
    assert samples_of(page, DRIVER_STATE) == {f'state="{state}"': 1}
    assert samples_of(page, VISIBLE) == {"": 0}
    assert samples_of(page, XIDS) == {}
    assert snapshot.health == health
    assert node.events()[0] == ("warning", "GPU driver", f"GPUs cannot be read: {state}: it is not there")
    node.host.state, node.host.words = "ok", None
    assert node.events(1)[-1][1:] == ("GPU driver", "GPUs can be read again")
    assert [kind for _, kind, _ in node.events(1)].count("GPU driver") == 2


def test_counts_of_xids_begin_at_0_where_the_driver_tells_them(tmp_path: Path) -> None:
    node = place(tmp_path)
    zero = {f'xid="{code}"': 0 for code in KNOWN_XIDS}
    assert samples_of(page_of(node.gpus, node.look()), XIDS) == zero
    node.xid(0, 79)
    node.xid(1, 79)
    node.xid(2, 62_000)
    page = page_of(node.gpus, node.look(1))
    assert samples_of(page, XIDS) == {**zero, 'xid="79"': 2, 'xid="62000"': 1}
    assert samples_of(page, gpu_page.XID_TIME) == {
        f'gpu="{number}",xid="{code}"': node.clock.now - 1 for number, code in ((0, 79), (1, 79), (2, 62_000))
    }
    node.host.driver = AMD
    assert f'xid="{KNOWN_XIDS[0]}"' not in samples_of(page_of(node.gpus, node.look(1)), XIDS)


def test_a_job_looks_as_often_as_it_checks_but_between_one_and_five_seconds(tmp_path: Path) -> None:
    intervals = [place(tmp_path, check_interval_s=check).gpus.interval_s for check in (0.1, 2.0, 60.0)]
    assert intervals == [1.0, 2.0, 5.0]


# What a GPU has come to


def test_mean_peak_and_energy_are_those_since_the_first_look(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0))
    node.change(0, utilization_ratio=1.0, memory_used_bytes=3 * GIB, energy_j=5000.0)
    (first,) = node.look().gpus
    assert (first.utilization_mean_ratio, first.memory_peak_bytes, first.energy_job_j) == (None, 3 * GIB, None)
    node.change(0, utilization_ratio=0.0, memory_used_bytes=9 * GIB, energy_j=5600.0)
    node.look(1)
    node.change(0, utilization_ratio=1.0, memory_used_bytes=1 * GIB, energy_j=6000.0)
    (entry,) = node.look(3).gpus
    assert entry.utilization_mean_ratio == 0.75
    assert entry.memory_peak_bytes == 9 * GIB
    assert entry.energy_job_j == 1000.0


def test_energy_goes_on_after_the_driver_was_loaded_anew(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0))
    for energy in (5000.0, 5500.0, 10.0, 110.0):
        node.change(0, energy_j=energy)
        node.look(1)
    assert node.look(1).gpus[0].energy_job_j == 600.0


def test_time_in_which_a_gpu_was_not_seen_counts_for_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0))
    seen = node.host.gpus[0]
    node.change(0, utilization_ratio=1.0)
    node.look()
    node.look(1)
    node.host.gpus[0] = dataclasses.replace(seen, state="lost", activity=None)
    node.look(100)
    node.host.gpus[0] = seen
    node.change(0, utilization_ratio=0.0)
    node.look(100)
    assert node.look(1).gpus[0].utilization_mean_ratio == 0.5


# Events


def test_a_gpu_that_is_lost_and_comes_back_is_told_once_each(tmp_path: Path) -> None:
    node = place(tmp_path)
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
def test_each_xid_is_told_once_with_its_gpu(tmp_path: Path, code: int, level: str) -> None:
    node = place(tmp_path)
    node.look()
    node.xid(3, code)
    told = [event for event in node.events(1) if event[1] == "GPU Xid"]
    assert [(told_level, kind) for told_level, kind, _ in told] == [(level, "GPU Xid")]
    assert told[0][2].startswith(f"GPU 3 ({uuid(3)}): Xid {code}: ")
    node.xid(3, code)
    node.events(1)
    assert [kind for _, kind, _ in node.events(1)].count("GPU Xid") == 2


def test_health_is_told_when_it_changes_and_not_when_it_is_unknown_for_a_while(tmp_path: Path) -> None:
    node = place(tmp_path)
    node.change(0, row_remap_pending=True)
    warning = ("warning", "GPU health", "warning: GPU 0: a row of its memory is remapped at the next reset")
    assert node.events() == [warning]
    gpus, node.host.gpus = node.host.gpus, []
    node.host.state = "no_permission"
    assert node.look(1).health is None
    node.host.gpus, node.host.state = gpus, "ok"
    assert [event for event in node.events(1) if event[1] == "GPU health"] == [warning]


@pytest.mark.parametrize(
    ("changes", "health", "words"),
    [
        ({}, "healthy", None),
        ({"row_remap_failure": True}, "failure", "a row of its memory could not be remapped"),
        ({"recovery_action": "reset"}, "failure", "the driver asks for a reset of it"),
        ({"recovery_action": "none"}, "healthy", None),
        ({"pages_pending": True}, "warning", "a page of its memory is retired once the driver is loaded again"),
        ({"pcie_width": 8, "pcie_width_max": 16}, "warning", "PCIe has 8 lanes of 16"),
        (
            {"pcie_generation": 3, "pcie_generation_max": 5, "utilization_ratio": 0.9},
            "warning",
            "PCIe runs as generation 3 of 5 while the GPU works",
        ),
        ({"pcie_generation": 3, "pcie_generation_max": 5, "utilization_ratio": 0.0}, "healthy", None),
    ],
)
def test_health_follows_from_what_the_gpus_tell(
    tmp_path: Path, changes: dict[str, Any], health: str, words: str | None
) -> None:
    node = place(tmp_path)
    node.change(1, **changes)
    node.look()
    snapshot = node.look(60)
    assert snapshot.health == health
    assert [(reason.gpu, reason.text) for reason in snapshot.reasons] == ([] if words is None else [("1", words)])
    one_hot = {f'health="{name}"': int(name == health) for name in ("healthy", "warning", "failure")}
    assert samples_of(page_of(node.gpus, snapshot), HEALTH) == one_hot


def test_errors_that_nobody_would_tell_of_are_not_counted_from_0(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0))
    node.host.reports_events = False
    assert not samples_of(page_of(node.gpus, node.look()), XIDS)
    node.kernel.unavailable_reason = None
    assert set(samples_of(page_of(node.gpus, node.look(1)), XIDS).values()) == {0}


# The status


def test_the_status_has_everything_and_is_json(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0))
    node.run(0, 5)
    node.use(0, 5, 1)
    node.status()
    node.xid(0, 79)
    node.change(0, energy_j=1e6 + 400, sm_activity_ratio=0.8, tensor_activity_ratio=0.4)
    shown = json.loads(json.dumps(node.status(1).gpus))
    (foreign,) = shown["gpus"][0].pop("foreign")
    assert {name: foreign[name] for name in ("pid", "memory_bytes")} == {"pid": 1, "memory_bytes": GIB}
    assert foreign.keys() == {"pid", "memory_bytes", "name", "uid"}
    (reason,) = shown["reasons"]
    assert reason.keys() == {"gpu", "severity", "words"}
    assert shown == {
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


def test_of_a_lost_gpu_the_status_still_says_which_it_is(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0))
    node.host.gpus[0] = GpuState(node.host.gpus[0].gpu, "lost", "GPU is lost")
    (entry,) = node.status().gpus["gpus"]
    known = {name: value for name, value in entry.items() if value not in (None, [])}
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


def test_power_is_the_average_or_else_that_of_the_moment(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0))
    node.change(0, power_average_w=None, power_instant_w=321.0)
    assert node.status().gpus["gpus"][0]["power_w"] == 321.0
    node.change(0, power_average_w=300.0)
    assert node.status().gpus["gpus"][0]["power_w"] == 300.0


def test_reading_alone_adds_nothing_to_the_status(tmp_path: Path) -> None:
    status = NodeStatus()
    node = place(tmp_path, plan=((),))
    node.gpus.describe(node.look(), status)
    assert status == NodeStatus()


def test_before_the_driver_has_said_which_gpus_there_are_nothing_is_shown(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0))
    node.host.gpus, node.host.ready = [], False
    assert page_of(node.gpus, node.look()) == ""
    node.host.state, node.host.words = "hanging", "open has not come back"
    assert 'gpujob_gpu_driver_state{state="hanging"} 1' in page_of(node.gpus, node.look(1))
