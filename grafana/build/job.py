"""The dashboard of one job."""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.builders import bargauge, dashboard, gauge, stat, table, timeseries
from grafana_foundation_sdk.models.dashboard import Dashboard, DashboardCursorSync

from grafana.build import queries as q
from grafana.build import variables
from grafana.build.panels import bars, column, heading, lines, rows, share, tile

UID = "gpujob-job"

ITEMS_PER_SECOND = "count:items/s"
CORES = "suffix:cores"
CLOCK = "dtdhms"
MIB = 1024 * 1024

PHASE_COLORS = dict(zip(q.PHASES, ("yellow", "green", "purple", "dark-purple", "blue", "text"), strict=True))
PHASE_WORDS = dict(enumerate(PHASE_COLORS.items(), start=1))
STATE_COLORS = {
    "running": "green",
    "sleeping": "blue",
    "disk_sleep": "orange",
    "stopped": "purple",
    "zombie": "red",
    "dead": "dark-red",
    "not_found": "text",
}

Panel = bargauge.Panel | gauge.Panel | stat.Panel | table.Panel | timeseries.Panel


def verdict() -> list[Panel]:
    return [
        rows(
            "Job",
            "The job as the sidecars name it, one line for each attempt seen in the time range. A requeue"
            " is a new attempt.",
            {"nodes": q.JOB_INFO},
            labels=("job_name", "user", "partition", "attempt"),
            width=24,
            height=3,
        ),
        tile(
            "Phase",
            "Phase of the node that is least far: launching until every node has launched, finished when"
            " every node has. The last one known in the time range, so an ended job keeps it; see the data"
            " age.",
            [q.PHASE],
            width=5,
            words=PHASE_WORDS,
        ),
        share(
            "Progress",
            "Items done of items expected, over the workers that know both. The last value known in the time range.",
            q.PROGRESS,
            width=5,
            steps=(("blue", None),),
            unknown="no item count",
        ),
        tile(
            "Time to the end (p50)",
            "Time until the slowest worker is done, half of the cases being sooner. Unknown before enough"
            " progress was seen and while a worker is stalled.",
            [q.ETA_NOW],
            width=5,
            unit=CLOCK,
        ),
        tile(
            "Time left to the limit",
            "Time until the time limit ends the job. Orange in the last ten minutes.",
            [q.TIME_LEFT_NOW],
            width=5,
            unit=CLOCK,
            steps=(("red", None), ("orange", 0), ("text", 600)),
            unknown="no limit known",
        ),
        tile(
            "Margin at the limit (p90)",
            "Time left to the limit, less the time to the end in nine of ten cases. Below zero the job is"
            " likely to be cut off before it is done; below 15 minutes it is close.",
            [q.MARGIN_NOW],
            width=4,
            unit="s",
            decimals=1,
            steps=(("red", None), ("orange", 0), ("green", 900)),
        ),
        tile(
            "Workers",
            "Workers that are alive now, and workers that the job asked for. Watched by GpuJobWorkersLost.",
            [q.WORKERS_UP, q.WORKERS_EXPECTED],
            width=5,
        ),
        tile(
            "Stalled workers",
            "Workers with work left that have been silent for the job's own stall timeout. Watched by"
            " GpuJobNoProgress.",
            [q.WORKERS_STALLED],
            width=4,
            steps=(("green", None), ("red", 1)),
        ),
        tile(
            "Items per second",
            "Sum over the workers: now, and on average since they started. A rate that is no longer"
            " measured is unknown, not zero.",
            [q.RATE_NOW, q.RATE_AVERAGE],
            width=5,
            unit=ITEMS_PER_SECOND,
            decimals=1,
        ),
        tile(
            "Data age",
            "Time since a sidecar last looked with success: the node seen last, and the node not seen for"
            " longest. All of this page is as old as that. After a requeue to other nodes the former ones"
            " count as old while they are in the time range. Watched by GpuJobNodeSidecarDown.",
            [q.AGE_FRESHEST, q.AGE_OLDEST],
            width=6,
            unit="s",
            decimals=0,
            steps=(("green", None), ("orange", 60), ("red", 180)),
        ),
        tile(
            "Ready workers",
            "Of a serving job: workers that its front end knows of, and those that it waits for. Watched by"
            " GpuJobNotReady.",
            [q.READY_WORKERS, q.READY_EXPECTED],
            width=4,
            unknown="no services",
        ),
    ]


def progress() -> list[Panel]:
    return [
        lines(
            "Items done and expected",
            "Position in the work, added over the workers. It falls when a worker resumes from an older checkpoint.",
            [q.ITEMS, q.ITEMS_EXPECTED],
            width=12,
            unknown="no item count",
        ),
        lines(
            "Rate",
            "Work done per second, added over the workers: measured by Prometheus, and the sidecar's own"
            " current and average rate.",
            [q.ITEM_RATE, q.ITEM_RATE_CURRENT, q.ITEM_RATE_AVERAGE],
            width=12,
            unit=ITEMS_PER_SECOND,
        ),
        lines(
            "Time to the end against time to the limit",
            "Time to the end of the slowest worker (10, 50 and 90 of 100 cases are sooner) and time left"
            " to the limit. Where a line to the end lies above the line to the limit, the job will be cut"
            " off.",
            [q.ETA_P10, q.ETA_P50, q.ETA_P90, q.TIME_LEFT],
            width=12,
            unit=CLOCK,
            minimum=None,
            colors={q.TIME_LEFT.legend: "red"},
        ),
        lines(
            "Rate of each worker",
            "The sidecar's current rate. A worker well below the others holds the job back.",
            [q.WORKER_RATE],
            width=12,
            unit=ITEMS_PER_SECOND,
        ),
        lines(
            "Chance to be done before the limit",
            "Probability that the work is done before the time limit, of the node that is least likely to be. Watched"
            " by GpuJobTimeLimitPredicted and GpuJobTimeLimitCertain, below 10 %.",
            [q.CHANCE],
            width=8,
            unit="percentunit",
            maximum=1,
            unknown="no limit or no estimate",
        ),
        lines(
            "Slow-down of each worker",
            "Time for an item, of what it was at the fastest speed that the worker kept up; pauses do not count. At 1"
            " it is as fast as ever; above 1.25 GpuJobSlowdown watches.",
            [q.SLOWDOWN],
            width=8,
            decimals=2,
            unknown="no speed known yet",
        ),
        lines(
            "Lag of each worker",
            "Part by which a worker is behind the median of its kind. Watched by GpuJobStraggler, above 20 %.",
            [q.LAG],
            width=8,
            unit="percentunit",
            unknown="fewer than three workers",
        ),
    ]


def workers() -> list[Panel]:
    return [
        lines(
            "Workers up",
            "One band for each worker that is alive; a gap is the time it was not.",
            [q.WORKER_UP],
            width=12,
            decimals=0,
            stacked=True,
            stepped=True,
        ),
        lines(
            "Workers by state of their process",
            "States of the kernel. disk_sleep that lasts points at a file system or driver; zombie at a"
            " parent that does not wait.",
            [q.WORKER_STATES],
            width=12,
            decimals=0,
            stacked=True,
            stepped=True,
            colors=STATE_COLORS,
        ),
        rows(
            "Exits",
            "How often each worker exited in the time range, by reason, and when last. Watched by"
            " GpuJobWorkerCrashed, GpuJobWorkerKilled and GpuJobWorkerOutOfMemory. killed_unknown means"
            " that there was no evidence for another reason.",
            {"exits": q.EXITS, "last at": q.EXIT_TIMES},
            labels=("worker", "node", "reason"),
            first_by="last at",
            columns=[column("exits", decimals=0), column("last at", unit="dateTimeAsIso")],
            width=14,
            unknown="no exits",
        ),
        rows(
            "Last exit status",
            "Status of the last exit of each worker, as a shell gives it: 128 and the signal's number when"
            " a signal ended it, as 137 for SIGKILL.",
            {"status": q.EXIT_STATUS},
            labels=("worker", "node"),
            width=10,
            unknown="no exits",
        ),
        lines(
            "CPU cores used",
            "Processor time per second of each worker with its descendants: 1 is one core.",
            [q.WORKER_CPU],
            width=12,
            unit=CORES,
        ),
        lines(
            "Resident memory",
            "Memory of each worker with its descendants.",
            [q.WORKER_RSS],
            width=12,
            unit="bytes",
        ),
        lines(
            "Read and written",
            "Bytes per second that the workers together read from and wrote to storage, as the kernel counts them.",
            [q.WORKER_READ, q.WORKER_WRITE],
            width=12,
            unit="binBps",
        ),
        bars(
            "Restarts",
            "Restarts of each worker in the time range.",
            q.RESTARTS,
            width=12,
            steps=(("green", None), ("orange", 1)),
            height=8,
        ),
        lines(
            "Memory of the job",
            "Memory of all processes of the job on the node that uses most. Page cache fills what is left below the"
            " limit and is taken back before anything is killed. Watched by GpuJobHostMemoryNearLimit.",
            [q.MEMORY_USED, q.MEMORY_WORKING_SET, q.MEMORY_PEAK, q.MEMORY_LIMIT],
            width=12,
            unit="bytes",
            colors={q.MEMORY_LIMIT.legend: "red"},
        ),
        lines(
            "Waiting for memory",
            "Share of the time in which some or all (full) processes of the job waited for memory, on the node"
            " where they waited longest. Only cgroups v2 tell.",
            [q.MEMORY_PRESSURE],
            width=6,
            unit="percentunit",
        ),
        lines(
            "OOM kills",
            "Processes that the kernel killed because the job's memory ran out; each point counts the five"
            " minutes before it.",
            [q.OOM_KILLS],
            width=6,
            decimals=0,
            stepped=True,
        ),
    ]


def gpus() -> list[Panel]:
    return [
        tile(
            "GPUs",
            "GPUs that the plan gives to workers, and those of the job that answer. Watched by GpuJobGpuLost and"
            " GpuJobGpuUnreadable.",
            [q.GPUS, q.GPUS_ANSWERING],
            width=4,
            height=8,
        ),
        rows(
            "GPUs by node",
            "Health in the words warning and failure, for which the status page of the node has the reasons, GPUs that"
            " the plan gives to workers and that are seen, and processes on them that are not of the job. Watched by"
            " GpuJobGpuUnhealthy, GpuJobGpuDegraded and GpuJobGpuForeignProcess.",
            {
                "health": q.GPU_HEALTH,
                "allocated": q.GPUS_BY_NODE,
                "visible": q.GPUS_VISIBLE_BY_NODE,
                "foreign processes": q.GPU_FOREIGN,
            },
            labels=("node",),
            first_by="health",
            columns=[
                column("health", words={0: ("healthy", "green"), 1: ("warning", "orange"), 2: ("failure", "red")})
            ],
            width=10,
            height=8,
        ),
        rows(
            "Conditions of workers",
            "What has been the matter with the GPU of a worker, and for which share of the time range. Watched by"
            " GpuJobGpuHang (busy without progress), GpuJobGpuIdle and GpuJobGpuSlow.",
            {"of the time": q.GPU_CONDITIONS},
            labels=("worker", "node", "condition"),
            first_by="of the time",
            columns=[column("of the time", unit="percentunit", decimals=0)],
            width=10,
            unknown="none",
            height=8,
        ),
        lines(
            "Utilization of each GPU",
            "Share of the time in which anything ran on a GPU, however little of it worked: a collective that waits"
            " shows 100 %. Choose nodes above to tell the lines apart.",
            [q.GPU_UTILIZATION],
            width=12,
            unit="percentunit",
            maximum=1,
            unknown="no GPU seen",
        ),
        lines(
            "GPU memory in use",
            "Share of the memory of each GPU that is taken. Level is fine at any height, since frameworks keep what"
            " they took; what only rises will run out. Watched by GpuJobGpuMemoryFilling.",
            [q.GPU_MEMORY],
            width=12,
            unit="percentunit",
            maximum=1,
            unknown="no GPU seen",
        ),
        lines(
            "How much of the GPUs works",
            "Average over the GPUs: multiprocessors that have work, tensor cores that compute, memory bandwidth that is"
            " used. Known on Hopper and later.",
            [q.SM_ACTIVITY, q.TENSOR_ACTIVITY, q.DRAM_ACTIVITY],
            width=8,
            unit="percentunit",
            maximum=1,
            unknown="these GPUs do not tell",
        ),
        lines(
            "GPU power",
            "Power of all GPUs of a node. High use at low power is waiting.",
            [q.GPU_POWER],
            width=8,
            unit="watt",
            unknown="no GPU seen",
        ),
        lines(
            "GPU traffic",
            "Bytes per second that the GPUs together receive (rx) and send (tx). PCIe is read only when that is turned"
            " on, since it takes time.",
            [q.NVLINK, q.PCIE],
            width=8,
            unit="binBps",
            unknown="these GPUs do not tell",
        ),
        lines(
            "GPU temperature",
            "The hottest GPU of each node, and the hottest memory where it is measured.",
            [q.GPU_TEMPERATURE],
            width=8,
            unit="celsius",
            unknown="no GPU seen",
        ),
        lines(
            "Clocks held down",
            "Share of the time in which clocks were held down, by reason, on the GPU where it was most. At its power"
            " cap a GPU works as hard as it may; all else costs time. Watched by GpuJobGpuSlow.",
            [q.GPU_THROTTLE],
            width=8,
            unit="percentunit",
            maximum=1,
            colors={"power_cap": "text"},
            unknown="no GPU seen",
        ),
        lines(
            "GPU errors",
            "Errors of memory, of NVLink, and packets sent again over PCIe; each point counts the five minutes"
            " before it.",
            [q.GPU_ECC, q.GPU_LINK_ERRORS, q.PCIE_REPLAYS],
            width=8,
            decimals=0,
            stepped=True,
            unknown="no GPU seen",
        ),
        rows(
            "Xid errors",
            "Errors that the driver reported in the time range: GPU, code, and when last. Those of the hardware are"
            " watched by GpuJobGpuXidCritical; 13, 31 and 43 come from programs, and 45 follows from the end of one.",
            {"last at": q.XIDS},
            labels=("node", "gpu", "xid"),
            first_by="last at",
            columns=[column("last at", unit="dateTimeAsIso")],
            width=20,
            unknown="none",
            height=5,
        ),
        tile(
            "Energy used",
            "Energy that the GPUs used in the time range, as far as they were seen.",
            [q.GPU_ENERGY],
            width=4,
            unit="kwatth",
            decimals=1,
            height=5,
        ),
    ]


def outputs() -> list[Panel]:
    return [
        lines(
            "Files",
            "Files that match the pattern of each path group. A file counts once, whichever nodes see it.",
            [q.OUTPUT_FILES],
            width=8,
            decimals=0,
            stepped=True,
        ),
        lines(
            "Bytes",
            "Size of the files of each path group.",
            [q.OUTPUT_BYTES],
            width=8,
            unit="bytes",
        ),
        lines(
            "Growth",
            "Bytes per second by which each path group grew over a minute. Below zero, files were removed.",
            [q.OUTPUT_GROWTH],
            width=8,
            unit="binBps",
            minimum=None,
        ),
        lines(
            "Age of the newest write",
            "Time since a file of the group last changed. A saw-tooth is the rhythm of writing; a line"
            " that only rises is a writer that has stopped.",
            [q.OUTPUT_AGE],
            width=8,
            unit="s",
        ),
        lines(
            "Records",
            "Records in the files of each path group: lines, elements or rows. Less than the items that are done"
            " means that results are missing.",
            [q.OUTPUT_RECORDS],
            width=8,
            decimals=0,
            unknown="no format with records",
        ),
        lines(
            "Damaged files",
            "Files to which nothing is written any more and that cannot be read to their end.",
            [q.OUTPUT_INVALID],
            width=8,
            decimals=0,
            stepped=True,
        ),
        lines(
            "Checkpoints",
            "Checkpoints saved; each point counts the five minutes before it. One of several files counts once it is"
            " whole.",
            [q.CHECKPOINTS],
            width=8,
            decimals=0,
            stepped=True,
            unknown="no pattern of checkpoints",
        ),
        lines(
            "Age of the last checkpoint",
            "Work that would be lost if the job ended now.",
            [q.CHECKPOINT_AGE],
            width=8,
            unit="s",
            unknown="no checkpoint yet",
        ),
        lines(
            "File systems that answer",
            "Whether looks at the directories of each path group come back: 1 on all nodes, or 0 where one hangs.",
            [q.RESPONDING],
            width=8,
            decimals=0,
            maximum=1,
            stepped=True,
        ),
        lines(
            "Disk: available and size",
            "Space on the file system of each path group, of the node that has least.",
            [q.DISK_AVAILABLE, q.DISK_SIZE],
            width=12,
            unit="bytes",
        ),
        bars(
            "Disk left",
            "Available share of the file system of each path group, of the node that has least. Below a"
            " tenth, when that is less than 1 TB, GpuJobDiskLow fires; it does so for any size below 10"
            " GB.",
            q.DISK_LEFT,
            width=12,
            unit="percentunit",
            maximum=1,
            steps=(("red", None), ("green", 0.1)),
            height=8,
        ),
    ]


def events() -> list[Panel]:
    return [
        lines(
            "Worker exits and restarts",
            "Exits by reason and restarts; each point counts the five minutes before it.",
            [q.RESTARTS_IN_TIME, q.EXITS_IN_TIME],
            width=12,
            decimals=0,
            stepped=True,
            unknown="no workers seen",
        ),
        lines(
            "Log errors",
            "Lines of the workers' logs that match an error pattern; each point counts the five minutes before it.",
            [q.LOG_ERRORS],
            width=12,
            decimals=0,
            stepped=True,
            unknown="no pattern watched",
        ),
        lines(
            "Phase in time",
            "Share of the nodes in each phase.",
            [q.PHASE_SHARE],
            width=24,
            unit="percentunit",
            maximum=1,
            stacked=True,
            stepped=True,
            colors=PHASE_COLORS,
            height=6,
        ),
    ]


def monitor_cost() -> list[Panel]:
    return [
        lines(
            "Sidecar CPU",
            "Processor time of the sidecar on each node, as a share of one core. The dashed line at 1 % is its budget.",
            [q.SIDECAR_CPU],
            width=7,
            unit="percentunit",
            steps=(("transparent", None), ("red", 0.01)),
            shown_up_to=0.011,
        ),
        lines(
            "Sidecar memory",
            "Resident memory of the sidecar on each node. The dashed line at 80 MiB is its budget.",
            [q.SIDECAR_RSS],
            width=7,
            unit="bytes",
            steps=(("transparent", None), ("red", 80 * MIB)),
            shown_up_to=88 * MIB,
        ),
        rows(
            "Collectors",
            "Whether the last look of each collector worked, how long it took, and how long ago it last"
            " worked. One that fails costs its own series only.",
            {
                "last look": q.COLLECTOR_SUCCESS,
                "took": q.COLLECTOR_DURATION,
                "last success, ago": q.COLLECTOR_AGE,
            },
            labels=("node", "collector"),
            first_by="last success, ago",
            columns=[
                column("last look", words={1: ("ok", "green"), 0: ("failed", "red")}),
                column("took", unit="s", decimals=1),
                column("last success, ago", unit="s", decimals=0),
            ],
            width=10,
            height=8,
        ),
    ]


ROWS = (
    ("Verdict", verdict),
    ("Progress", progress),
    ("Workers", workers),
    ("GPUs", gpus),
    ("Outputs", outputs),
    ("Events", events),
    ("Monitor cost", monitor_cost),
)


def _place(board: dashboard.Dashboard, number: int, title: str, panels: Sequence[Panel]) -> None:
    """Add a row and its panels. Their ids are by row, so that adding one moves no link to another row."""
    board.with_row(heading(title).id(number * 100))
    for index, panel in enumerate(panels, start=1):
        board.with_panel(panel.id(number * 100 + index))


def build() -> Dashboard:
    """The whole dashboard."""
    board = (
        dashboard.Dashboard("One job")
        .uid(UID)
        .description("One GPU job from its first second to its last: will it finish, in time, and if not, why.")
        .tags(["gpujob"])
        .readonly()
        .time("now-6h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(variables.datasource())
        .with_variable(variables.cluster())
        .with_variable(variables.job_id())
        .with_variable(variables.node())
        .annotation(variables.job_start())
        .annotation(variables.worker_exits())
    )
    for number, (title, panels) in enumerate(ROWS, start=1):
        _place(board, number, title, panels())
    return board.build()
