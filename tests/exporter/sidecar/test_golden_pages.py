"""Golden pages, one for each collector, and rules that all families follow."""

import dataclasses
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics import parser as openmetrics_parser

from exporter.alerts.receiver import FAMILIES as RECEIVER_FAMILIES
from exporter.collecting.detail import ESSENTIAL_FAMILIES, FULL_FAMILIES, LATE_FAMILIES
from exporter.collecting.families import PREFIX, Samples
from exporter.contract.alert_thresholds import AlertThreshold
from exporter.contract.manifest import ESSENTIAL, FULL
from exporter.contract.status import (
    EtaEstimate,
    FigureOfMerit,
    JobOutlook,
    Launch,
    LaunchCheck,
    Memory,
    OutputGroup,
    ProcessDetails,
    SidecarCost,
    WorkerOutput,
)
from exporter.files.checkpoints.collector import CheckpointsSnapshot
from exporter.files.checkpoints.sets import Checkpoint
from exporter.files.disks.collector import DiskSnapshot, GroupSpace
from exporter.files.disks.quota_reader import QuotaFacts
from exporter.files.disks.space_reader import SpaceFacts
from exporter.files.outputs.collector import OutputsSnapshot
from exporter.gpus.analysis.hang_signatures import Finding
from exporter.gpus.analysis.users import GpuUse, GpuUsers, NodeGpuUsage, WorkerPlacement
from exporter.gpus.analysis.xid import KNOWN_XIDS
from exporter.gpus.collectors.gpus_collector import GpusSnapshot
from exporter.gpus.collectors.workers_collector import GpuWorkersSnapshot
from exporter.gpus.records import Gpu, GpuActivity, GpuCondition, GpuDriver, GpuEntry, GpuProcess, GpuState, XidCount
from exporter.hub.page.series import FAMILIES as HUB_FAMILIES
from exporter.launch.readiness_reader import PublishedReadiness
from exporter.machine.process_tree import ProcessTreeSample
from exporter.progress.collector import LogsSnapshot
from exporter.progress.job_eta import NodeOutlook
from exporter.progress.worker_logs_reader import WorkerLogFacts
from exporter.sidecar.background_reads import FAMILIES, CollectorSlot
from exporter.sidecar.job_collector import JobSnapshot
from exporter.sidecar.sidecar import Sidecar
from exporter.workers.collector import WorkersSnapshot
from exporter.workers.run_totals import ExitTotals, RunUsage, WorkerExit
from exporter.workers.runs_reader import WorkerReading
from tests.conftest import GOLDEN
from tests.grafana.substitute import substitute, variables
from tests.support.exporter import FakeClock, declared_families, make_context, make_manifest, make_task
from tests.support.promql import BOARD_SERIES, PROMETHEUS_SERIES, metric_names, rule_metric_names

ROOT = Path(__file__).resolve().parents[3]
PAGES = GOLDEN / "exporter"
START = 1_700_000_000.0
FIRST, SECOND = make_task(0), make_task(1, role="decode", index=0)
THRESHOLDS = (
    *(AlertThreshold("disk_free", 5e10), AlertThreshold("straggler", None)),
    AlertThreshold("time_limit_chance", None),
)
CONTEXT = make_context(
    make_manifest(Path("/runs/1"), FIRST, SECOND, time_limit_s=3600.0, total_items=1000, alert_thresholds=THRESHOLDS),
    job_name='embed "v2" [a]',
)

COLLECTORS = {slot.collector.name: slot.collector for slot in Sidecar(CONTEXT).slots}

parse_openmetrics: Callable[[str], Iterator[Metric]] = openmetrics_parser.text_string_to_metric_families


def job() -> object:
    return JobSnapshot("running", None)


def readiness() -> object:
    counts = {"seen": {"prefill": 3, "decode": 1}, "expected": {"prefill": 4, "decode": 1}}
    return PublishedReadiness(attempt=0, ready=False, since=None, timeout_s=1800.0, waiting="1 prefills", **counts)


def workers() -> object:
    running = WorkerReading(
        dataclasses.replace(FIRST, restarts=2),
        up=True,
        state="sleeping",
        pid=4242,
        start=START + 0.25,
        restart=1,
        sample=ProcessTreeSample("sleeping", 12.5, 1 << 30, 17, 3, 4096, 8192),
        details=ProcessDetails(pss_bytes=900 << 20, open_files=42, voluntary_switches=1000, involuntary_switches=20),
        usage=RunUsage(99.75, 4096, 16384, 1000, 20),
        exits=ExitTotals().plus(WorkerExit(0, 3, None, START + 7.5, "app_error", ("exit status 3",))),
    )
    dead = WorkerReading(
        SECOND,
        up=False,
        state="dead",
        pid=4243,
        start=START + 1,
        restart=2,
        exits=ExitTotals()
        .plus(WorkerExit(0, None, 9, START + 2, "killed_unknown", ("killed by SIGKILL", "sender unknown")))
        .plus(WorkerExit(1, None, 9, START + 3, "killed_unknown", ("killed by SIGKILL", "sender unknown")))
        .plus(WorkerExit(2, None, 15, START + 4, "terminated_peer", ("killed by SIGTERM",))),
    )
    return WorkersSnapshot((running, dead), ())


def memory() -> object:
    return Memory(
        used_bytes=300 << 30,
        limit_bytes=400 << 30,
        peak_bytes=390 << 30,
        working_set_bytes=123_456_789_012,
        oom_kills=2,
        pressure_some_s=2.5,
        pressure_full_s=0.787540,
    )


def gpus() -> object:
    parent = Gpu("GPU-5e1f", "0", "nvidia", 'H200 "a"', "0000:18:00.0", mig=True, persistence=True)
    activity = GpuActivity(
        utilization_ratio=0.97,
        memory_utilization_ratio=0.5,
        memory_used_bytes=113_066_115_072,
        memory_total_bytes=150_754_820_096,
        power_average_w=630.5,
        power_instant_w=651.0,
        power_limit_w=700.0,
        energy_j=80_005_211.714,
        temperature_c=61.0,
        memory_temperature_c=68.0,
        sm_clock_hz=1.83e9,
        memory_clock_hz=3.201e9,
        throttle_s={"power_cap": 12.25, "thermal": 0.0},
        sm_activity_ratio=0.8825,
        tensor_activity_ratio=0.525,
        dram_activity_ratio=0.4775,
        nvlink_rx_bytes_per_s=2.05e11,
        nvlink_tx_bytes_per_s=2.04e11,
        has_nvlink_rate=True,
        pcie_rx_bytes_per_s=2.4e9,
        pcie_tx_bytes_per_s=1.2e9,
    )
    condition = GpuCondition(
        ecc_corrected=103,
        ecc_uncorrected=1,
        rows_remapped_corrected=2,
        rows_remapped_uncorrected=0,
        row_remap_pending=True,
        row_remap_failure=False,
        pages_retired_corrected=1,
        pages_retired_uncorrected=0,
        pages_pending=False,
        recovery_action="reset",
        pcie_replays=7,
        pcie_generation=4,
        pcie_generation_max=5,
        pcie_width=8,
        pcie_width_max=16,
        nvlink_rx_bytes=923_379_117_179_904,
        nvlink_tx_bytes=923_379_117_179_905,
        nvlink_errors=3,
        fan_ratio=0.3,
    )
    mig_instance = Gpu("MIG-77", "0:1", "nvidia", "H200 MIG 3g", "0000:18:00.0", parent="GPU-5e1f")
    lost = Gpu("GPU-dead", "1", "nvidia", "H200", "0000:29:00.0")
    entries = (
        GpuEntry(
            GpuState(parent, activity=activity, condition=condition),
            job_memory_errors={"corrected": 3, "uncorrected": 1},
            xids={94: XidCount(2, START + 7.5)},
        ),
        GpuEntry(
            GpuState(
                mig_instance,
                activity=GpuActivity(utilization_ratio=0.0),  # has no rate of NVLink, so the bytes are shown
                condition=GpuCondition(nvlink_rx_bytes=923_379_117_179_904, nvlink_tx_bytes=923_379_117_179_905),
            )
        ),
        GpuEntry(GpuState(lost, "lost", "GPU is lost"), xids={79: XidCount(1, START + 9)}),
    )
    xids = {**dict.fromkeys(KNOWN_XIDS, 0), 79: 1, 94: 2}
    driver = GpuDriver("nvidia", "570.86.15", "12.8")
    return GpusSnapshot("ok", driver=driver, visible=2, gpus=entries, health="failure", xids=xids)


def gpu_workers() -> object:
    usage = NodeGpuUsage(
        uses=(
            GpuUse(0, "GPU-5e1f", "0", "process", planned=True, memory_bytes=5 << 30, sm_ratio=0.75),
            GpuUse(1, "GPU-5e1f", "0", "inferred", planned=False),
        ),
        gpus=(GpuUsers("GPU-5e1f", "0", (0, 1), (GpuProcess(7),)), GpuUsers("GPU-77", "1", (), None)),
        workers=(WorkerPlacement(0, misplaced=False), WorkerPlacement(1, misplaced=True, text="uses GPU 0")),
    )
    conditions = {
        0: {
            "busy_without_progress": Finding(None),
            "held_idle": Finding(state=False),
            "memory_filling": Finding(state=True, text="soon", full_time=START + 7200.5),
        },
        1: {"unused": Finding(state=True)},
    }
    return GpuWorkersSnapshot(usage, conditions, planned={})


def logs() -> object:
    errors = (("cuda_oom", "critical", 0), ("connection", "warning", 4))
    working = WorkerLogFacts(
        task=FIRST,
        read_at=START + 600,
        pack="generic",
        unit="items",
        pattern="items",
        position=650,
        expected=1000,
        processed=700,
        epoch=None,
        last_rise=START + 595.5,
        rate=1.25,
        average_rate=1.0833333333333333,
        eta=EtaEstimate(280.0, 250.5, 310.0),
        confidence="high",
        stalled=False,
        slowdown=1.25,
        phase="checkpointing",
        checkpoints=(START + 100, START + 300, START + 500),
        checkpoint_seconds=(10.0, 12.0, 11.0),
        values=(("loss", 0.125, START + 590), ("epoch", 3.0, START + 500)),
        errors=errors,
        bytes_read=123_456_789_012,
        lines=1_000_000,
        lag_bytes=512,
    )
    silent = WorkerLogFacts(task=SECOND, read_at=START + 600, pack="generic", errors=errors[:1], unmatched="no pattern")
    job = JobOutlook(
        deadline=START + 1000,
        eta=EtaEstimate(280.0, 250.5, 310.0),
        time_limit_met_probability=0.999,
        checkpoint_next=START + 711,
        checkpoint_before_time_limit=True,
    )
    outlook = NodeOutlook(START + 600, job, {FIRST.rank: 0.0, SECOND.rank: 0.25})
    return LogsSnapshot((working, silent), outlook, (("slow", 2),))


def fom() -> object:
    return (FigureOfMerit("gflops", 511.264069, START + 60.5), FigureOfMerit("samples_per_second", 12.0, START + 90))


def outputs() -> object:
    output = OutputGroup(
        group="output",
        files=12,
        bytes=5 << 40,
        growth_bytes_per_second=1536.5,
        mtime=START + 599.5,
        records=123_456,
        stalled=False,
        valid=False,
        files_invalid=2,
        workers={
            FIRST.rank: WorkerOutput(files=8, bytes=4 << 40, mtime=START + 599.5, records=100_000, stalled=False),
            SECOND.rank: WorkerOutput(files=4, bytes=1 << 40, mtime=START + 100, stalled=True),
        },
    )
    return OutputsSnapshot((output, OutputGroup(group="checkpoint")))


def checkpoints() -> object:
    last = Checkpoint("step 300", "step_300", "invalid", 300, None, 8, 5 << 40, START + 500.5, 12.0, valid=False)
    return CheckpointsSnapshot(total=3, writing=True, last=last, last_complete=last, interval_s=200.0)


def disk() -> object:
    healthy = GroupSpace(
        "output",
        responding=True,
        space=SpaceFacts(3 << 40, 9 << 40, 123_456_789, 1_000_000_000),
        quota=QuotaFacts("project", 4 << 40, 1 << 40),
        full_at=START + 7200.5,
        mount="/lustre",
        fstype="lustre",
    )
    hanging = GroupSpace("checkpoint", responding=False, mount="/nfs", fstype="nfs4", silent_since=START + 590)
    full = GroupSpace("run", responding=True, space=SpaceFacts(0, 1 << 40), full_at=START + 500)
    return DiskSnapshot((healthy, hanging, full))


def launch() -> object:
    checks = (("processes", True), ("gpus", False), ("output", None))
    return Launch(
        checks=tuple(LaunchCheck(name=name, level="issue", passed=passed, detail="") for name, passed in checks)
    )


def self_page() -> object:
    return SidecarCost(version="1.2.3", cpu_s=1.25, rss_bytes=42 << 20)


SNAPSHOTS: dict[str, Callable[[], object]] = {
    "job": job,
    "readiness": readiness,
    "workers": workers,
    "memory": memory,
    "gpus": gpus,
    "gpu_workers": gpu_workers,
    "logs": logs,
    "fom": fom,
    "outputs": outputs,
    "checkpoints": checkpoints,
    "disk": disk,
    "self": self_page,
    "launch": launch,
}


def render(name: str, *, openmetrics: bool = False) -> str:
    out = Samples(CONTEXT.identity.constant_labels())
    COLLECTORS[name].render(SNAPSHOTS[name](), out)  # type: ignore[arg-type]
    return out.page(openmetrics=openmetrics)


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_the_page_of_a_collector_matches_its_golden_page(name: str, golden: Callable[[str, str], Path]) -> None:
    golden(f"exporter/{name}.prom", render(name))


class Failing:
    """A collector whose read succeeds or fails."""

    families = ()
    interval_s = 1e6

    def __init__(self, name: str, *, fails: bool) -> None:
        self.name = name
        self._fails = fails

    def read(self) -> int:
        if self._fails:
            raise OSError("gone")
        return 1

    def render(self, snapshot: int, out: Samples) -> None:
        """Add nothing."""

    def describe(self, snapshot: int, status: object) -> None:
        """Add nothing."""


def test_the_page_about_reads_matches_its_golden_page(golden: Callable[[str, str], Path]) -> None:
    out = Samples(CONTEXT.identity.constant_labels())
    for name, fails in (("workers", False), ("logs", True)):
        slot = CollectorSlot(Failing(name, fails=fails), FakeClock(START))
        slot._read()
        slot.render_self(out)
    golden("exporter/refresh.prom", out.page())


@pytest.mark.parametrize("name", [*SNAPSHOTS, "refresh"])
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_every_golden_page(name: str) -> None:
    text = (PAGES / f"{name}.prom").read_text(encoding="utf-8")
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_every_page_is_valid_openmetrics(name: str) -> None:
    metrics = list(parse_openmetrics(render(name, openmetrics=True)))
    declared = {family.full_name for family in COLLECTORS[name].families}
    assert {sample.name for metric in metrics for sample in metric.samples} == declared


def golden_names() -> set[str]:
    """Names of all series on the golden pages."""
    lines = [line for path in PAGES.glob("*.prom") for line in path.read_text(encoding="utf-8").splitlines()]
    return {line.partition("{")[0] for line in lines if not line.startswith("#")}


def test_every_collector_has_a_golden_page() -> None:
    built = {name for name, collector in COLLECTORS.items() if collector.families}
    assert built == SNAPSHOTS.keys()
    assert {path.stem for path in PAGES.glob("*.prom")} == built | {"refresh"}


def test_the_golden_pages_have_exactly_the_declared_families() -> None:
    assert golden_names() == {family.full_name for family in declared_families()}


def test_names_of_families_are_unique_and_well_formed() -> None:
    names = [family.full_name for family in declared_families()]
    assert len(names) == len(set(names))
    assert all(name.startswith(PREFIX) and name.isascii() and name == name.lower() for name in names)


def test_the_help_of_every_family_is_a_sentence() -> None:
    for family in declared_families():
        assert family.help.endswith("."), family.name
        assert family.help[0].isupper(), family.name
        assert "\n" not in family.help, family.name


def test_no_family_has_a_reserved_or_process_label() -> None:
    constant = set(CONTEXT.identity.constant_labels())
    for family in declared_families():
        assert not set(family.labels) & (constant | {"job", "instance", "pid", "path", "message", "le"}), family.name
        assert ("quantile" in family.labels) == (family.kind == "summary"), family.name
        assert len(set(family.labels)) == len(family.labels), family.name


def test_no_collector_declares_the_families_about_reads() -> None:
    declared = {family.full_name for collector in COLLECTORS.values() for family in collector.families}
    assert not declared & {family.full_name for family in FAMILIES}


DASHBOARDS = sorted((ROOT / "grafana" / "dashboards").glob("*.json"))


def panel_metric_names(path: Path) -> set[str]:
    """Metrics in the queries of a dashboard, its variables and its annotations."""
    values, names = variables(cluster="c1", job_id="42"), set[str]()

    def visit(node: Any) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("expr"), str):
                names.update(metric_names(substitute(node["expr"], values)))
            for inner in node.values():
                visit(inner)
        elif isinstance(node, list):
            for inner in node:
                visit(inner)

    visit(json.loads(path.read_text(encoding="utf-8")))
    return names


OF_THE_HUB = {family.full_name for family in HUB_FAMILIES}


def undeclared(names: set[str]) -> set[str]:
    """Names that neither a collector nor the hub declares, except series from Prometheus and recording rules."""
    declared = {family.full_name for family in (*declared_families(), *RECEIVER_FAMILIES)} | OF_THE_HUB | BOARD_SERIES
    return {name for name in names if ":" not in name} - declared


def test_the_table_of_details_names_declared_families() -> None:
    names = ESSENTIAL_FAMILIES | FULL_FAMILIES | LATE_FAMILIES
    assert names <= {family.name for family in declared_families()}
    assert not ESSENTIAL_FAMILIES & FULL_FAMILIES


def test_rules_read_series_of_essential_detail_and_dashboards_of_normal_detail() -> None:
    detail = {family.full_name: family.detail for family in declared_families()}
    rules = rule_metric_names(ROOT / "alertmanager" / "rules") - OF_THE_HUB - PROMETHEUS_SERIES
    assert {name for name in detail if detail[name] == ESSENTIAL} == rules | {"gpujob_info"}
    panels = {name for path in DASHBOARDS for name in panel_metric_names(path)}
    panels |= rule_metric_names(ROOT / "alertmanager" / "rules", for_boards=True)
    assert {name for name in panels if detail.get(name) == FULL} == {"gpujob_collector_duration_seconds"}


def test_every_metric_of_a_rule_is_declared() -> None:
    rules = ROOT / "alertmanager" / "rules"
    names = rule_metric_names(rules) | rule_metric_names(rules, for_boards=True)
    assert len(names) > 5
    assert not undeclared(names)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_metric_of_a_dashboard_is_declared(path: Path) -> None:
    names = panel_metric_names(path)
    assert len(names) > 5
    assert not undeclared(names)
