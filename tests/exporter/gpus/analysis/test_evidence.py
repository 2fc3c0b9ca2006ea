"""GPU evidence in the diagnosis of a worker."""

from typing import Any

from exporter.gpus.analysis import evidence
from exporter.gpus.analysis.evidence import GpuEvidence, gpu_lines
from tests.support.gpu_status import GIB, XID_79, gpu, gpus, node_of, of_worker, status_of, use, uuid_of


def gpu_sample(entry: dict[str, Any], node: dict[str, Any]) -> dict[str, float]:
    return evidence.gpu_sample(status_of(entry), node_of(node))


def gpu_evidence(entry: dict[str, Any], node: dict[str, Any], samples: list[dict[str, float]]) -> GpuEvidence:
    found = evidence.gpu_evidence(status_of(entry), node_of(node), samples)
    assert found is not None
    return found


def test_a_sample_has_mean_ratios_and_total_memory() -> None:
    entry = of_worker(0, 1, gpu_use=[use(0, sm_ratio=0.4), use(1, sm_ratio=None, memory_bytes=GIB)])
    node = gpus(gpu(0, utilization_ratio=1.0), gpu(1, utilization_ratio=0.5), gpu(2, utilization_ratio=0.0))
    assert gpu_sample(entry, node) == {
        "gpu_utilization_ratio": 0.75,
        "gpu_sm_ratio": 0.4,
        "gpu_memory_bytes": 16 * GIB,
    }


def test_a_sample_covers_the_planned_gpus_before_any_is_used() -> None:
    node = gpus(gpu(0, utilization_ratio=0.0), gpu(1))
    assert gpu_sample(of_worker(0, gpu_use=[]), node) == {"gpu_utilization_ratio": 0.0}


def test_a_sample_covers_the_used_gpus() -> None:
    node = gpus(gpu(0, utilization_ratio=0.0), gpu(1, utilization_ratio=0.8))
    assert gpu_sample(of_worker(0, gpu_use=[use(1)]), node)["gpu_utilization_ratio"] == 0.8


def test_a_sample_omits_unknown_values() -> None:
    entry = of_worker(0, gpu_use=[use(0, sm_ratio=None, memory_bytes=None)])
    assert gpu_sample(entry, gpus(gpu(0, utilization_ratio=None))) == {}
    assert gpu_sample({}, gpus()) == {}


def test_the_last_minute_ends_with_the_last_sample() -> None:
    samples = [{"time": 10.0, "gpu_sm_ratio": 0.0, "gpu_memory_bytes": 99.0}]
    samples += [{"time": 100.0 + at, "gpu_sm_ratio": 0.5, "gpu_memory_bytes": 5.0 + at % 2} for at in range(5)]
    found = gpu_evidence(of_worker(0), gpus(gpu(0)), samples)
    assert found.last_minute == {"gpu_sm_ratio": 0.5, "gpu_memory_bytes": 5.0, "gpu_memory_peak_bytes": 6.0}
    assert gpu_evidence(of_worker(0), gpus(gpu(0)), []).last_minute == {}


def test_the_evidence_lists_devices_and_problems() -> None:
    node = gpus(gpu(0, state="lost", words="GPU is lost", xids=[XID_79]), gpu(1))
    found = gpu_evidence(of_worker(0, gpu_use=[use(1)]), node, [])
    assert [(device.uuid, device.state) for device in found.devices] == [
        (uuid_of(0), "lost"),
        (uuid_of(1), "ok"),
    ]
    assert [(trouble.words, trouble.time) for trouble in found.troubles] == [
        ("GPU 0 is lost", None),
        ("GPU 0: Xid 79, GPU has fallen off the bus", 1000.0),
    ]
    assert evidence.gpu_evidence(status_of({}), node_of(node), []) is None


def test_a_lost_gpu_has_its_time_of_loss() -> None:
    node = gpus(gpu(0, state="lost", words="GPU is lost", lost_since=990.0), gpu("0:1"), gpu(1, lost_since=None))
    for index in (0, "0:1"):
        assert next(gpu_lines(gpu_evidence(of_worker(index), node, []))) == ("wrong", "GPU 0 is lost", 990.0)


def test_the_evidence_is_shown_as_lines() -> None:
    samples = [{"time": 1.0, "gpu_utilization_ratio": 0.954, "gpu_sm_ratio": 0.5, "gpu_memory_bytes": 15.0 * GIB}]
    node = gpus(gpu(0, xids=[XID_79]), gpu(1))
    assert list(gpu_lines(gpu_evidence(of_worker(0, gpu_use=[use(1)]), node, samples))) == [
        ("wrong", "GPU 0: Xid 79, GPU has fallen off the bus", 1000.0),
        (
            "last minute",
            "95 % busy, 50 % by its own kernels, 15.0 GiB of GPU memory at the end, at most 15.0 GiB",
            None,
        ),
        ("GPU 0", "NVIDIA H200, 141 GiB, GPU-00, 61 °C, not used", None),
        ("GPU 1", "NVIDIA H200, 141 GiB, GPU-01, 61 °C, not of its plan", None),
    ]


def test_a_missing_gpu_is_listed_once() -> None:
    found = gpu_evidence({"gpu_plan": [], "gpu_missing": ["7"]}, gpus(gpu(0), allocated=2), [])
    assert list(gpu_lines(found)) == [("wrong", "GPU 7 is missing", None)]


def test_a_gpu_is_not_called_unused_without_process_lists() -> None:
    found = gpu_evidence(of_worker(0, gpu_use=None), gpus(gpu(0)), [])
    assert list(gpu_lines(found)) == [("GPU 0", "NVIDIA H200, 141 GiB, GPU-00, 61 °C", None)]
    assert gpu_sample(of_worker(0, gpu_use=None), gpus(gpu(0, utilization_ratio=0.5))) == {"gpu_utilization_ratio": 0.5}


def test_unreadable_gpus_are_listed_from_the_plan() -> None:
    found = gpu_evidence(of_worker(0, gpu_use=[]), gpus(driver_state="failing"), [])
    assert list(gpu_lines(found)) == [("GPU ?", "unknown, GPU-00", None)]
    assert list(gpu_lines(None)) == []
