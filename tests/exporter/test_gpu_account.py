"""What is made of the GPUs in a status: whose they are, what is wrong, and sums."""

from typing import Any

import pytest

from exporter.derive.gpu_account import (
    account,
    account_words,
    energy_words,
    node_trouble,
    worker_devices,
    worker_troubles,
)
from tests.gpu_status import GIB, XID_31, XID_79, XID_NOISE, gpu, gpus, of_worker, use, uuid_of


def told(entry: dict[str, Any], node: dict[str, Any]) -> list[tuple[str, str]]:
    return [(trouble.key, trouble.words) for trouble in worker_troubles(entry, worker_devices(entry, node), node)]


def test_planned_gpus_come_first_then_others_that_are_used() -> None:
    entry = of_worker(1, gpu_use=[use(0, memory_bytes=5, sm_ratio=None)])
    planned, other = worker_devices(entry, gpus(gpu(0), gpu(1)))
    assert (planned["gpu"], planned["uuid"], planned["planned"], planned["used"]) == ("1", uuid_of(1), True, False)
    assert other == {
        "gpu": "0", "uuid": uuid_of(0), "planned": False, "used": True, "memory_bytes": 5, "sm_ratio": None,
        "attribution": "process",
    }  # fmt: skip


def test_nobody_tells_whether_a_gpu_is_used_that_is_not_seen() -> None:
    unseen = worker_devices(of_worker(1, gpu_use=[]), gpus(gpu(0)))
    assert [(device["gpu"], device["used"]) for device in unseen] == [(None, None)]
    before = worker_devices({"gpu_plan": [uuid_of(0)]}, gpus(gpu(0)))
    assert [(device["gpu"], device["used"]) for device in before] == [("0", None)]
    assert worker_devices({}, {}) == []


def test_a_worker_that_has_ended_is_on_no_gpu_which_does_not_say_that_it_never_was() -> None:
    node, end = gpus(gpu(0), gpu(1)), {"reason": "completed"}
    gone = {**of_worker(0, gpu_use=[]), "exit": end}
    assert [device["used"] for device in worker_devices(gone, node)] == [None]
    kept = {**of_worker(0, gpu_use=[use(1)]), "exit": end}
    assert [device["used"] for device in worker_devices(kept, node)] == [False, True]


def test_all_that_is_wrong_with_a_worker_is_told_in_words() -> None:
    stranger = {"pid": 7, "memory_bytes": 5 * GIB, "name": "py\n3", "uid": 1001}
    node = gpus(gpu(0, state="lost", words="GPU is lost", xids=[XID_79, XID_NOISE], foreign=[stranger]))
    entry = of_worker(0, gpu_misplaced="uses GPU 0 of worker_w1", gpu_conditions={"held_idle": "holds 15 GiB idle"})
    assert told(entry, node) == [
        ("misplaced", "uses GPU 0 of worker_w1"),
        ("lost 0", "GPU 0 is lost"),
        ("xid 0 79", "GPU 0: Xid 79, GPU has fallen off the bus"),
        ("foreign 0 7", "process 7 (py?3), which is not of this job, holds 5.0 GiB of GPU 0"),
        ("held_idle", "holds 15 GiB idle"),
    ]
    stuck = {"state": "hanging", "words": "nvmlDeviceGetMemoryInfo has not come back"}
    unknown = gpus(gpu(0, foreign=[{"pid": 7, "memory_bytes": None}], **stuck))
    assert [words for _, words in told(of_worker(0), unknown)] == [
        "GPU 0 does not answer: nvmlDeviceGetMemoryInfo has not come back",
        "process 7, which is not of this job, is on GPU 0",
    ]


def test_a_worker_that_does_well_has_no_trouble() -> None:
    assert told(of_worker(0), gpus(gpu(0), gpu(1, state="lost"))) == []


@pytest.mark.parametrize(("start", "codes"), [(900.0, ["xid 0 79", "xid 0 31"]), (1100.0, ["xid 0 79"])])
def test_what_an_earlier_run_did_to_its_gpu_is_over_unless_the_device_is_at_fault(
    start: float, codes: list[str]
) -> None:
    node = gpus(gpu(0, xids=[XID_79, XID_31]))
    assert [key for key, _ in told({**of_worker(0), "start": start}, node)] == codes


def test_how_often_an_error_was_told_is_said() -> None:
    assert told(of_worker(0), gpus(gpu(0, xids=[XID_31]))) == [
        ("xid 0 31", "GPU 0: Xid 31, GPU memory page fault (2 times)")
    ]


def test_faults_of_a_divided_gpu_are_those_of_its_instances() -> None:
    node = gpus(gpu(0, state="lost"), gpu("0:1"), gpu(1, state="lost"))
    assert [key for key, _ in told(of_worker("0:1"), node)] == ["lost 0"]


def test_a_node_says_which_gpus_are_not_healthy_and_why() -> None:
    reasons = [{"gpu": "3", "severity": "failure", "words": "fell off"}, {"gpu": None, "severity": "w", "words": "all"}]
    trouble = node_trouble(gpus(gpu(3), health="failure", reasons=reasons))
    assert trouble is not None
    assert trouble.words == "failure: GPU 3: fell off; all"
    bare = node_trouble(gpus(gpu(3), health="warning"))
    assert bare is not None
    assert bare.words == "warning"
    assert node_trouble(gpus(gpu(3))) is None
    assert node_trouble(gpus(health=None)) is None
    assert node_trouble({}) is None


def test_a_driver_that_cannot_be_read_is_trouble_where_the_plan_gives_gpus() -> None:
    broken = gpus(driver_state="no_permission", words="Insufficient Permissions", allocated=2, health=None)
    trouble = node_trouble(broken)
    assert trouble is not None
    assert trouble.words == "cannot be read (no_permission): Insufficient Permissions"
    assert node_trouble({**broken, "allocated": 0}) is None


def test_sums_are_by_node_and_of_all() -> None:
    statuses: dict[str, dict[str, Any]] = {
        "cn02": {"gpus": gpus(gpu(0, utilization_mean_ratio=0.5, energy_job_j=None))},
        "cn01": {"gpus": gpus(gpu(0), gpu(1, memory_peak_bytes=99 * GIB, utilization_mean_ratio=0.7))},
        "cn03": {"gpus": {}},
    }
    found = account(statuses)
    assert found is not None
    assert (found["count"], found["names"], found["energy_j"]) == (3, {"NVIDIA H200": 3}, 7.2e6)
    assert (found["utilization_mean_ratio"], found["memory_peak_bytes"]) == (pytest.approx(0.7), 99 * GIB)
    first, second = found["nodes"]
    assert (first["node"], first["utilization_mean_ratio"], first["energy_j"]) == ("cn01", pytest.approx(0.8), 7.2e6)
    assert (second["node"], second["utilization_mean_ratio"], second["energy_j"]) == ("cn02", 0.5, None)
    assert [device["energy_j"] for device in first["gpus"]] == [3.6e6, 3.6e6]
    assert account_words(found) == "3 x NVIDIA H200, 70 % busy, 2.0 kWh"


def test_a_job_without_gpus_has_no_account() -> None:
    assert account({"cn01": {"gpus": {}}, "cn02": {}}) is None


def test_of_a_divided_gpu_its_instances_count_and_the_energy_of_the_whole() -> None:
    part = {"utilization_mean_ratio": None, "energy_job_j": None, "name": "NVIDIA H200 MIG 1g.18gb"}
    found = account({"cn01": {"gpus": gpus(gpu(0), gpu("0:0", **part), gpu("0:1", **part))}})
    assert found is not None
    assert (found["names"], found["energy_j"]) == ({"NVIDIA H200 MIG 1g.18gb": 2}, 3.6e6)
    assert (found["utilization_mean_ratio"], found["memory_peak_bytes"]) == (None, 30 * GIB)


def test_gpus_that_could_not_be_read_are_said_to_be_so() -> None:
    lone: dict[str, Any] = {"gpus": gpus(driver_state="no_driver", allocated=2)}
    found = account({"cn01": lone})
    assert found is not None
    assert account_words(found) == "could not be read on cn01 (no_driver)"
    statuses: dict[str, dict[str, Any]] = {f"cn{n}": lone for n in range(6)}
    many = account({**statuses, "x": {"gpus": gpus(gpu(0))}})
    assert many is not None
    assert account_words(many).startswith("1 x NVIDIA H200, 90 % busy, 1.0 kWh, could not be read on cn0 (no_driver), ")
    assert account_words(many).endswith("cn3 (no_driver) and 2 more nodes")


@pytest.mark.parametrize(
    ("joules", "words"),
    [(None, "-"), (0.0, "0.000 kWh"), (44e3, "0.012 kWh"), (44.3e6, "12.3 kWh"), (4.5e9, "1250 kWh")],
)
def test_energy_is_told_in_kwh(joules: float | None, words: str) -> None:
    assert energy_words(joules) == words
