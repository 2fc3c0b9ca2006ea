"""GPUs in the terminal view, drawn from hand-written job views."""

from typing import Any

import pytest

from exporter.contract.view import JobView, WorkerView
from exporter.gpus.analysis.node_status import GpuProblem, worker_devices
from launcher.watch import gpus as gpu_view_parts
from launcher.watch.gpus import gpu_index_text
from tests.launcher.conftest import Golden
from tests.launcher.watch.test_picture import Lines, a_view, screen
from tests.support.builders import NOW, dead, worker_entry
from tests.support.gpu_status import GIB, XID_79, gpu, gpus, node_of, of_worker, status_of, use

pytestmark = pytest.mark.usefixtures("utc")

FOREIGN_PROCESS = {"pid": 7, "memory_bytes": 5 * GIB}
FELL_OFF = {"gpu": "1", "severity": "failure", "words": "it has fallen off the bus (Xid 79)"}


def devices_of(entry: dict[str, Any], node: dict[str, Any]) -> list[dict[str, Any]]:
    return [device.to_json() for device in worker_devices(status_of(entry), node_of(node))]


def gpu_cells(worker: dict[str, Any], node: dict[str, Any]) -> tuple[str, str, str]:
    return gpu_view_parts.gpu_cells(WorkerView.from_json(worker), node_of(node))


def gpu_problems(view: dict[str, Any]) -> list[tuple[str, list[GpuProblem]]]:
    return gpu_view_parts.gpu_problems(JobView.from_json(view))


def mean_utilization(view: dict[str, Any]) -> float | None:
    return gpu_view_parts.mean_utilization(JobView.from_json(view))


def on_gpus(rank: int, *indices: int | str, node: dict[str, Any], **over: Any) -> dict[str, Any]:
    """A worker with the GPUs that its sidecar reports."""
    entry = of_worker(*indices, **{key: over.pop(key) for key in list(over) if key.startswith("gpu_")})
    shown = {key: entry[key] for key in ("gpu_misplaced", "gpu_conditions", "gpu_memory_full")}
    return {**worker_entry(rank, **over), **shown, "gpus": list(range(len(indices))),
            "gpu_devices": devices_of(entry, node)}  # fmt: skip


def gpu_view(**over: Any) -> dict[str, Any]:
    """A job on two nodes with all kinds of GPU problems."""
    healthy_node = gpus(gpu(0), gpu(1, foreign=[FOREIGN_PROCESS]), gpu(2, utilization_ratio=0.05), gpu(3))
    faulty_node = gpus(
        gpu(0, workers=["worker_w2", "worker_w4"]),
        gpu(1, state="lost", words="GPU is lost", utilization_ratio=None, xids=[{**XID_79, "time": NOW - 40}]),
        health="failure",
        reasons=[FELL_OFF],
    )
    idle = {"held_idle": "holds 15.0 GiB of GPU memory and has not computed for 12m"}
    workers = [
        on_gpus(0, 0, node=healthy_node),
        on_gpus(1, 1, 2, node=healthy_node, gpu_conditions=idle, restarts=1),
        on_gpus(2, 0, node=faulty_node),
        on_gpus(3, 1, node=faulty_node, **dead("gpu_fault", 1)),
        on_gpus(4, 1, node=faulty_node, gpu_use=[use(0)], gpu_misplaced="uses GPU 0 of worker_w2, not its GPU 1"),
    ]
    for entry, node in zip(workers, ("cn00", "cn00", "cn01", "cn01", "cn01"), strict=True):
        entry["node"] = node
    nodes = [{"node": "cn00", **healthy_node}, {"node": "cn01", **faulty_node}]
    return a_view(workers=workers, gpus=nodes, cause=None, events=[], nodes=[], **over)


@pytest.mark.parametrize("width", [80, 120])
def test_the_view_with_gpus_matches_the_golden_page(width: int, golden: Golden) -> None:
    golden(f"launcher/watch-gpus-{width}.txt", screen(gpu_view(), width))


@pytest.mark.parametrize("width", [30, 40, 60, 70, 80, 100, 120, 200])
def test_no_line_with_gpus_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, screen(gpu_view(), width).splitlines())) <= width


@pytest.mark.parametrize("width", [60, 80, 100])
def test_numbers_are_not_cut_in_a_narrow_terminal(width: int) -> None:
    table = [line for line in screen(gpu_view(), width).splitlines() if line.startswith("worker_w") or "GPU%" in line]
    assert len(table) == 6
    assert "…" not in "".join(table)
    assert " 95%  15.0/141 " in table[1]


def test_a_long_node_name_is_shortened_before_columns_are_dropped() -> None:
    view = gpu_view()
    for entry in (*view["workers"], *view["gpus"]):
        entry["node"] = f"gpu-node-of-rack-17-in-hall-{entry['node']}"
    (head,) = (line for line in screen(view, 80).splitlines() if "GPU%" in line)
    assert head.split() == ["WORKER", "NODE", "GPU", "STATE", "GPU%", "GPU", "GiB", "ITEMS", "ETA"]
    assert "worker_w0  gpu-node-o…  0    running " in screen(view, 80)
    assert "worker_w0  gpu-node-of-rack-17-in-hall-cn00  0    running " in screen(view, 160)


def test_a_job_without_gpus_has_no_gpu_columns() -> None:
    shown = screen(a_view(workers=[worker_entry(0, gpus=[]), worker_entry(1, gpus=[])]), 200)
    assert "GPU" not in shown
    assert " WORKER" not in shown
    assert "WORKER     NODE  STATE " in shown


def test_without_a_sidecar_only_the_plan_is_shown() -> None:
    shown = screen(a_view(), 200)
    assert " GPU  " in shown
    assert "GPU%" not in shown


def cells(*indices: int | str, node: dict[str, Any], **over: Any) -> tuple[str, str, str]:
    return gpu_cells(on_gpus(0, *indices, node=node, **over), node)


def test_several_gpus_of_a_worker_have_mean_utilization_and_total_memory() -> None:
    node = gpus(gpu(0, utilization_ratio=0.9), gpu(1, utilization_ratio=0.5), gpu(2, utilization_ratio=0.1))
    assert cells(0, 1, 2, node=node) == ("0-2 (3)", "50%", "45.0/423")
    assert cells(1, 2, node=node) == ("1,2", "30%", "30.0/282")


def test_the_used_gpu_is_shown_instead_of_the_planned_one() -> None:
    node = gpus(gpu(0), gpu(1, utilization_ratio=0.1))
    assert cells(1, node=node, gpu_use=[use(0)]) == ("0", "95%", "15.0/141")


def test_an_unused_gpu_has_no_memory_of_its_worker() -> None:
    node = gpus(gpu(0, utilization_ratio=0.0, memory_used_bytes=GIB, workers=[]))
    assert cells(0, node=node, gpu_use=[]) == ("0", "0%", "0.0/141")


def test_a_shared_gpu_shows_the_share_of_the_worker() -> None:
    both = gpus(gpu(0, workers=["worker_w0", "worker_w1"]))
    assert cells(0, node=both) == ("0", "50%", "15.0/141")
    assert cells(0, node=both, gpu_use=[use(0, sm_ratio=None, memory_bytes=None)]) == ("0", "95%", "-")


def test_gpu_memory_belongs_to_the_only_worker_without_values_per_process() -> None:
    silent = use(0, memory_bytes=None, sm_ratio=None)
    assert cells(0, node=gpus(gpu(0)), gpu_use=[silent]) == ("0", "95%", "20.0/141")
    assert cells(0, node=gpus(gpu(0, foreign=[FOREIGN_PROCESS])), gpu_use=[silent]) == ("0", "95%", "-")


def test_unknown_values_are_a_dash() -> None:
    dim = gpus(gpu(0, utilization_ratio=None, memory_total_bytes=None))
    assert cells(0, node=dim) == ("0", "-", "15.0")
    assert cells(0, node=gpus(driver_state="failing"), gpu_use=[]) == ("0", "-", "-")
    assert gpu_cells(worker_entry(0, gpus=[]), {}) == ("-", "-", "-")


def test_an_ended_worker_shows_only_its_gpu() -> None:
    assert cells(0, node=gpus(gpu(0)), **dead("completed", 0)) == ("0", "-", "-")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], "-"),
        (["3"], "3"),
        (["2", "1"], "1,2"),
        ([str(n) for n in range(8)], "0-7 (8)"),
        (["0", "1", "2", "5", "7", "8"], "0-2,5,7,8 (6)"),
        (["0:1"], "0:1"),
        (["1", "0:1"], "1,0:1"),
    ],
)
def test_gpus_are_named_by_their_indices(names: list[str], text: str) -> None:
    assert gpu_index_text(names) == text


def test_a_completed_worker_has_no_gpu_problems() -> None:
    view = gpu_view()
    view["workers"][3] |= dead("completed", 0)
    assert "! worker_w3" not in screen(view, 120)


def test_only_some_of_many_gpu_problems_are_shown() -> None:
    node = gpus(*(gpu(n, state="lost") for n in range(12)))
    workers = [on_gpus(n, n, node=node) for n in range(12)]
    for entry in workers:
        entry["node"] = "cn00"
    shown = screen(a_view(workers=workers, gpus=[{"node": "cn00", **node}]), 120)
    assert shown.count(" is lost\n") == 8
    assert "! and 4 more with GPUs\n" in shown


def test_unreadable_gpus_are_shown_by_node() -> None:
    blind = gpus(driver_state="version_mismatch", words="Driver/library\x1b mismatch", allocated=2, health=None)
    shown = screen(a_view(gpus=[{"node": "cn00", **blind}]), 120)
    assert "! GPUs of cn00: cannot be read (version_mismatch): Driver/library\\x1b mismatch\n" in shown


def test_healthy_gpus_have_no_line() -> None:
    node = gpus(gpu(0))
    assert gpu_problems(a_view(workers=[on_gpus(0, 0, node=node)], gpus=[{"node": "cn00", **node}])) == []


def shared(*foreign: dict[str, Any], **of_second: Any) -> dict[str, Any]:
    """Two workers on one GPU, with these foreign processes."""
    node = gpus(gpu(0, workers=["worker_w0", "worker_w1"], foreign=list(foreign)))
    workers = [on_gpus(0, 0, node=node), on_gpus(1, 0, node=node, **of_second)]
    return a_view(workers=workers, gpus=[{"node": "cn00", **node}])


@pytest.mark.parametrize("of_second", [{}, dead("completed", 0)])
def test_a_foreign_process_on_a_shared_gpu_is_shown_once(of_second: dict[str, Any]) -> None:
    found = [
        (subject, [problem.key for problem in problems])
        for subject, problems in gpu_problems(shared(FOREIGN_PROCESS, **of_second))
    ]
    assert found == [("GPUs of cn00", ["foreign 0 7"])]


def test_a_missing_gpu_is_shown_for_its_node_and_its_worker() -> None:
    node = gpus(gpu(0), allocated=2)
    entry = of_worker(0, gpu_missing=["7"])
    missing = {**worker_entry(0), "gpu_devices": devices_of(entry, node), "gpu_conditions": {}}
    found = gpu_problems(a_view(workers=[missing], gpus=[{"node": "cn00", **node}]))
    assert [(subject, [problem.text for problem in problems]) for subject, problems in found] == [
        ("GPUs of cn00", ["the plan needs 2 GPUs and the driver shows 1"]),
        ("worker_w0 on cn00", ["GPU 7 is missing"]),
    ]
    assert gpu_cells(missing, node) == ("0", "95%", "15.0/141")


def test_a_shared_gpu_counts_once_in_the_mean_of_the_job() -> None:
    node = gpus(gpu(0, utilization_ratio=1.0), gpu(1, utilization_ratio=0.5), gpu(2, utilization_ratio=0.0))
    workers = [on_gpus(rank, index, node=node) for rank, index in enumerate((0, 0, 1))]
    view = a_view(workers=[{**entry, "node": "cn00"} for entry in workers], gpus=[{"node": "cn00", **node}])
    assert mean_utilization(view) == 0.75
    assert mean_utilization(a_view()) is None


def test_lines_have_the_gpu_utilization_and_each_new_problem_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines(monkeypatch)
    (healthy, faulty_node), shown = (gpus(gpu(0), health=health, reasons=[]) for health in ("healthy", "warning")), []
    for node, seconds in ((healthy, 1), (faulty_node, 2), (faulty_node, 3), (healthy, 4), (faulty_node, 5)):
        conditions = {"held_idle": f"has not computed for {seconds}m"} if node is faulty_node else {}
        entry = {**on_gpus(0, 0, node=node, gpu_conditions=conditions), "node": "cn00"}
        shown.append(lines.show(a_view(workers=[entry], gpus=[{"node": "cn00", **node}])))
    first, second, third, fourth, fifth = shown
    assert " | GPUs 95% busy | " in first[0]
    assert second == [
        "2025-11-22 04:13:41 GPUs of cn00: warning",
        "2025-11-22 04:13:41 worker_w0 on cn00: held_idle: has not computed for 2m",
    ]
    assert fourth == [
        "2025-11-22 04:13:41 GPUs of cn00: healthy again",
        "2025-11-22 04:13:41 worker_w0 on cn00: held_idle is over",
    ]
    assert (third, len(fifth)) == ([], 2)


def lines_of(lines: Lines, node: dict[str, Any] | None, **over: Any) -> list[str]:
    """Lines added by one view of a worker on GPU 0, without times and the summary of the job."""
    entry = {**on_gpus(0, 0, node=node or {}, **over), "node": "cn00"}
    view = a_view(workers=[entry], gpus=[] if node is None else [{"node": "cn00", **node}])
    return [line[20:] for line in lines.show(view) if " | " not in line and "ended" not in line]


def test_a_gpu_works_again_after_its_last_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines(monkeypatch)
    assert lines_of(lines, gpus(gpu(0, state="lost"))) == ["worker_w0 on cn00: GPU 0 is lost"]
    assert lines_of(lines, gpus(gpu(0, state="reset_required"))) == ["worker_w0 on cn00: GPU 0 needs a reset"]
    assert lines_of(lines, gpus(gpu(0))) == ["worker_w0 on cn00: GPU 0 works again"]
    assert lines_of(lines, gpus(gpu(0))) == []


def test_a_node_is_healthy_again_only_when_reported_as_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines(monkeypatch)
    shown = [lines_of(lines, gpus(gpu(0), health=health)) for health in ("failure", "warning", None, "healthy")]
    assert shown == [["GPUs of cn00: failure"], ["GPUs of cn00: warning"], [], ["GPUs of cn00: healthy again"]]


def test_a_readable_driver_is_shown_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines(monkeypatch)
    assert lines_of(lines, gpus(gpu(0), driver_state="failing")) == ["GPUs of cn00: cannot be read (failing)"]
    assert lines_of(lines, gpus(gpu(0))) == ["GPUs of cn00: can be read again"]


@pytest.mark.parametrize(
    ("node", "over"),
    [
        (None, {}),
        (gpus(gpu(0), driver_state="failing", allocated=0), {}),
        (gpus(gpu(0)), {"gpu_conditions": None}),
        (gpus(gpu(0)), {"pid": None}),
        (gpus(gpu(0)), dead("app_error", 1)),
        (gpus(gpu(0)), dead("completed", 0)),
    ],
)
def test_a_condition_without_new_values_is_not_shown_as_over(
    node: dict[str, Any] | None, over: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, idle = Lines(monkeypatch), {"gpu_conditions": {"held_idle": "no use"}}
    assert lines_of(lines, gpus(gpu(0)), **idle) == ["worker_w0 on cn00: held_idle: no use"]
    assert lines_of(lines, node, **over) == []
    assert lines_of(lines, gpus(gpu(0)), **idle) == []
    assert lines_of(lines, gpus(gpu(0))) == ["worker_w0 on cn00: held_idle is over"]


def test_the_end_of_a_foreign_process_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines(monkeypatch)
    shown = [
        line[20:] for view in (shared(FOREIGN_PROCESS), shared()) for line in lines.show(view) if " | " not in line
    ]
    assert shown == [
        "GPUs of cn00: process 7, not of this job, holds 5.0 GiB of GPU 0",
        "GPUs of cn00: process 7 is no longer on GPU 0",
    ]
