"""The dashboard of one job."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from grafana.build import board, variables
from grafana.build import queries as q
from grafana.build.board import Panel
from grafana.build.panels import bars, column, heat, lines, rows, share, states, tile

UID = "gpujob-job"

ITEMS_PER_SECOND = "count:items/s"
CORES = "suffix:cores"
CLOCK = "dtdhms"
UP = {0: ("down", "red"), 1: ("up", "green")}
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


def overview() -> list[Panel]:
    return [
        rows(
            "Job",
            "The job and its attempts in the time range, one line each. A requeue starts a new attempt.",
            {"nodes": q.JOB_INFO},
            labels=("job_name", "user", "partition", "attempt"),
            width=24,
            height=3,
        ),
        tile(
            "Phase",
            "Phase of the node that is least advanced: launching until every node has launched, finished when every"
            " node has. It is the last known phase in the time range, so an ended job keeps it. See Data age.",
            [q.PHASE],
            width=5,
            words=PHASE_WORDS,
        ),
        share(
            "Progress",
            "Completed items divided by expected items, both added over all workers for which they are known, also over"
            " those in step and those that are not critical. The last known value in the time range.",
            q.PROGRESS,
            width=5,
            steps=(("blue", None),),
            unknown="no item count",
        ),
        tile(
            "ETA (p50)",
            "Time until the slowest worker finishes; the chance that it finishes sooner is 50 %. Unknown until"
            " there is enough progress, and while a worker is stalled.",
            [q.ETA_NOW],
            width=5,
            unit=CLOCK,
        ),
        tile(
            "Time left until the limit",
            "Time until the time limit ends the job. Orange in the last ten minutes.",
            [q.TIME_LEFT_NOW],
            width=5,
            unit=CLOCK,
            steps=(("red", None), ("orange", 0), ("text", 600)),
            unknown="no limit known",
        ),
        tile(
            "Margin at the limit (p90)",
            "Time left until the limit minus the p90 ETA. Below zero, the job will probably hit its limit before it"
            " finishes. Below 15 minutes, it is close.",
            [q.MARGIN_NOW],
            width=4,
            unit="s",
            decimals=1,
            steps=(("red", None), ("orange", 0), ("green", 900)),
        ),
        tile(
            "Workers",
            "Workers that are up now, and workers that the job should have. Alert: GpuJobWorkersLost.",
            [q.WORKERS_UP, q.WORKERS_EXPECTED],
            width=5,
        ),
        tile(
            "Stalled workers",
            "Workers with work left that made no progress for the job's own stall timeout. Alert: GpuJobNoProgress.",
            [q.WORKERS_STALLED],
            width=4,
            steps=(("green", None), ("red", 1)),
        ),
        tile(
            "Items per second",
            "Sum over the workers: now, and on average since they started. Rates of workers in step are added too:"
            " eight of 2 steps per second make 16, where `gpujob watch` shows 2. A rate that is no longer measured is"
            " unknown, not zero.",
            [q.RATE_NOW, q.RATE_AVERAGE],
            width=5,
            unit=ITEMS_PER_SECOND,
        ),
        tile(
            "Data age",
            "Time since a sidecar last read successfully: the most recent node, and the least recent one. All data"
            " on this page is that old. After a requeue to other nodes, the former ones count as old while they are"
            " in the time range. Alert: GpuJobNodeSidecarDown.",
            [q.AGE_FRESHEST, q.AGE_OLDEST],
            width=6,
            unit="s",
            decimals=0,
            steps=(("green", None), ("orange", 60), ("red", 180)),
        ),
        tile(
            "Ready workers",
            "For a serving job: workers that are ready, and workers that it waits for. Alert: GpuJobNotReady.",
            [q.READY_WORKERS, q.READY_EXPECTED],
            width=4,
            unknown="no services",
        ),
        rows(
            "Workers now",
            "One line for each worker, the last that ended first: why it ended, and when. Quiet is the time since its"
            " last progress. Alerts: GpuJobWorkerCrashed, GpuJobWorkerKilled, GpuJobWorkerOutOfMemory.",
            {
                "up": q.WORKERS_NOW,
                "done": q.WORKERS_DONE,
                "rate": q.WORKERS_RATE,
                "quiet": q.WORKERS_AGE,
                "ended": q.EXIT_TIMES,
            },
            labels=("worker", "node", "reason"),
            first_by="ended",
            columns=[
                column("node", link=board.to_board("gpujob-node", node="node")),
                column("up", words={1: ("up", "green"), 0: ("ended", "text")}),
                column("done", unit="percentunit", decimals=0),
                column("rate", unit=ITEMS_PER_SECOND),
                column("quiet", unit="s", decimals=0),
                column("ended", unit="dateTimeAsIso"),
            ],
            width=24,
            height=7,
            unknown="-",
        ),
        rows(
            "Firing alerts",
            "Alerts of the job that fire now, and since when. Select a name for what to do.",
            {"since": q.ALERTS_NOW},
            labels=("alertname", "severity", "node", "worker"),
            first_by="since",
            columns=[
                column("alertname", link=board.TO_RUNBOOK),
                column("node", link=board.to_board("gpujob-node", node="node")),
                column("since", unit="dateTimeAsIso"),
            ],
            width=14,
            unknown="none",
        ),
        lines(
            "Values in the logs",
            "Values of named patterns, such as the loss, as the workers last logged them.",
            [q.LOG_VALUES, q.LOG_HIGHEST, q.LOG_LOWEST],
            width=10,
            minimum=None,
            unknown="no pattern with a name",
            height=7,
        ),
    ]


def progress() -> list[Panel]:
    return [
        lines(
            "Completed and expected items",
            "Position in the work, summed over the workers, also over those in step. It falls when a worker resumes"
            " from an older checkpoint.",
            [q.ITEMS, q.ITEMS_EXPECTED],
            width=12,
            unknown="no item count",
        ),
        lines(
            "Rate",
            "Work per second, summed over the workers, also over those in step: measured by Prometheus, and the"
            " sidecar's own current and average rate.",
            [q.ITEM_RATE, q.ITEM_RATE_CURRENT, q.ITEM_RATE_AVERAGE],
            width=12,
            unit=ITEMS_PER_SECOND,
        ),
        lines(
            "ETA and time left until the limit",
            "ETA of the slowest worker (p10, p50 and p90: it finishes sooner in 10, 50 and 90 of 100 cases), and"
            " time left until the limit. Where an ETA line is above the limit line, the job will not finish in time.",
            [q.ETA_P10, q.ETA_P50, q.ETA_P90, q.TIME_LEFT],
            width=12,
            unit=CLOCK,
            minimum=None,
            colors={q.TIME_LEFT.legend: "red"},
        ),
        heat(
            "Rate of each worker",
            "The sidecar's current rate. A worker well below the others delays the job.",
            q.WORKER_RATE,
            width=12,
            unit=ITEMS_PER_SECOND,
        ),
        lines(
            "Chance to finish before the limit",
            "Probability that the work finishes before the time limit, on the node where it is lowest. Alerts below"
            " 10 %: GpuJobTimeLimitPredicted and GpuJobTimeLimitCertain.",
            [q.CHANCE],
            width=8,
            unit="percentunit",
            maximum=1,
            unknown="no limit or no estimate",
        ),
        lines(
            "Slowest workers",
            "The ten workers that slowed down most. Time per item, divided by that at the fastest speed that the worker"
            " kept up. Pauses do not count. At 1 the worker is as fast as ever. Alert above 1.25: GpuJobSlowdown.",
            [q.SLOWDOWN],
            width=8,
            decimals=2,
            unknown="no other speed yet",
        ),
        lines(
            "Workers behind",
            "The ten workers that lag most: how far each is behind the median of its role. Alert above 20 %:"
            " GpuJobStraggler.",
            [q.LAG],
            width=8,
            unit="percentunit",
            unknown="fewer than three workers",
        ),
    ]


def workers() -> list[Panel]:
    return [
        states(
            "Workers least up",
            "The ten workers that were up for the least part of the time range. A worker that has ended has no state.",
            q.WORKER_UP,
            words=UP,
            width=12,
            height=8,
        ),
        lines(
            "Workers by process state",
            "Process states of the kernel. A long disk_sleep points to a file system or driver. A zombie points to"
            " a parent that does not wait for its child.",
            [q.WORKER_STATES],
            width=12,
            decimals=0,
            stacked=True,
            stepped=True,
            colors=STATE_COLORS,
        ),
        rows(
            "Exits",
            "Number of exits of each worker in the time range, by reason, and the time of the last one. Alerts:"
            " GpuJobWorkerCrashed, GpuJobWorkerKilled and GpuJobWorkerOutOfMemory. killed_unknown means that there"
            " was no evidence for another reason.",
            {"exits": q.EXITS, "last at": q.EXIT_TIMES},
            labels=("worker", "node", "reason"),
            first_by="last at",
            columns=[column("exits", decimals=0), column("last at", unit="dateTimeAsIso")],
            width=14,
            unknown="no exits",
        ),
        rows(
            "Last exit status",
            "Status of the last exit of each worker, as a shell reports it. After a signal it is 128 plus the"
            " signal number, such as 137 for SIGKILL.",
            {"status": q.EXIT_STATUS},
            labels=("worker", "node"),
            width=10,
            unknown="no exits",
        ),
        heat(
            "CPU cores used",
            "CPU time per second of each worker and its descendants: 1 is one core.",
            q.WORKER_CPU,
            width=12,
            unit=CORES,
        ),
        heat(
            "Resident memory",
            "Memory of each worker and its descendants.",
            q.WORKER_RSS,
            width=12,
            unit="bytes",
        ),
        lines(
            "Read and written",
            "Bytes per second that all workers together read from and wrote to storage, as counted by the kernel.",
            [q.WORKER_READ, q.WORKER_WRITE],
            width=12,
            unit="binBps",
        ),
        bars(
            "Restarts",
            "Restarts of workers in the time range: the ten most.",
            q.RESTARTS,
            width=12,
            steps=(("green", None), ("orange", 1)),
            unknown="none",
            height=8,
        ),
        lines(
            "Memory of the job",
            "Memory of all processes of the job, on the node that uses most. Page cache fills the space below the"
            " limit; the kernel reclaims it before it kills a process. Alert: GpuJobHostMemoryNearLimit.",
            [q.MEMORY_USED, q.MEMORY_WORKING_SET, q.MEMORY_PEAK, q.MEMORY_LIMIT],
            width=12,
            unit="bytes",
            colors={q.MEMORY_LIMIT.legend: "red"},
        ),
        lines(
            "Waiting for memory",
            "Share of time in which some or all (full) processes of the job waited for memory, on the node with the"
            " longest wait. Needs cgroup v2.",
            [q.MEMORY_PRESSURE],
            width=6,
            unit="percentunit",
        ),
        lines(
            "OOM kills",
            "Processes that the kernel killed because the job ran out of memory. Each point counts the previous"
            " five minutes.",
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
            "GPUs that the plan gives to workers, and GPUs of the job that respond. Alerts: GpuJobGpuLost and"
            " GpuJobGpuUnreadable.",
            [q.GPUS, q.GPUS_ANSWERING],
            width=4,
            height=8,
        ),
        rows(
            "GPUs by node",
            "Health of the GPUs (reasons are in /status of the node), planned and visible GPUs, and processes on"
            " them that do not belong to the job. Alerts: GpuJobGpuUnhealthy, GpuJobGpuDegraded and"
            " GpuJobGpuForeignProcess.",
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
            "GPU problems of each worker, and their share of the time range. Alerts: GpuJobGpuHang (busy without"
            " progress), GpuJobGpuIdle and GpuJobGpuSlow.",
            {"share of time": q.GPU_CONDITIONS},
            labels=("worker", "node", "condition"),
            first_by="share of time",
            columns=[column("share of time", unit="percentunit", decimals=0)],
            width=10,
            unknown="none",
            height=8,
        ),
        heat(
            "Utilization of each GPU",
            "Share of time in which anything ran on a GPU, even if it used little of it: a waiting collective shows"
            " 100 %. For fewer rows, choose nodes above.",
            q.GPU_UTILIZATION,
            width=12,
            unit="percentunit",
            maximum=1,
            unknown="no GPU seen",
        ),
        heat(
            "GPU memory in use",
            "Share of each GPU's memory that is in use. A constant level is fine at any height, because frameworks"
            " keep what they allocate. A level that only rises will run out. Alert: GpuJobGpuMemoryFilling.",
            q.GPU_MEMORY,
            width=12,
            unit="percentunit",
            maximum=1,
            unknown="no GPU seen",
        ),
        lines(
            "GPU activity",
            "Average over the GPUs: multiprocessors with work, computing tensor cores, and used memory bandwidth."
            " Available on Hopper and later.",
            [q.SM_ACTIVITY, q.TENSOR_ACTIVITY, q.DRAM_ACTIVITY],
            width=8,
            unit="percentunit",
            maximum=1,
            unknown="not reported by these GPUs",
        ),
        heat(
            "GPU power",
            "Power of all GPUs of each node. High utilization at low power means waiting.",
            q.GPU_POWER,
            width=8,
            unit="watt",
            unknown="no GPU seen",
        ),
        lines(
            "GPU traffic",
            "Bytes per second that all GPUs together receive (rx) and send (tx). PCIe is read only if enabled,"
            " because reading it takes time.",
            [q.NVLINK, q.PCIE],
            width=8,
            unit="binBps",
            unknown="not reported by these GPUs",
        ),
        heat(
            "GPU temperature",
            "Temperature of each GPU, or of its memory if that is measured and hotter.",
            q.GPU_TEMPERATURE,
            width=8,
            unit="celsius",
            minimum=20,
            maximum=100,
            unknown="no GPU seen",
        ),
        lines(
            "Throttled clocks",
            "Share of time in which clocks were throttled, by reason, on the GPU with the largest share. A power"
            " cap is normal under full load; all other reasons cost time. Alert: GpuJobGpuSlow.",
            [q.GPU_THROTTLE],
            width=8,
            unit="percentunit",
            maximum=1,
            colors={"power_cap": "text"},
            unknown="never throttled",
        ),
        lines(
            "GPU errors",
            "Memory errors, NVLink errors, and packets sent again over PCIe. Each point counts the previous five"
            " minutes.",
            [q.GPU_ECC, q.GPU_LINK_ERRORS, q.PCIE_REPLAYS],
            width=8,
            decimals=0,
            stepped=True,
            unknown="no GPU seen",
        ),
        rows(
            "Xid errors",
            "Errors that the driver reported in the time range: GPU, code, and time of the last one. Alert for"
            " hardware errors: GpuJobGpuXidCritical. Programs cause 13, 31 and 43; 45 follows from the end of a"
            " program.",
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
            "Energy that the GPUs used in the time range, while they were monitored.",
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
            "Files that match the pattern of each path group. A file counts once, even if several nodes see it.",
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
            "Growth of each path group over two minutes, in bytes per second. Below zero, files were removed.",
            [q.OUTPUT_GROWTH],
            width=8,
            unit="binBps",
            minimum=None,
        ),
        lines(
            "Age of the newest write",
            "Time since a file of the group last changed. A sawtooth is the normal rhythm of writing. A line that"
            " only rises is a writer that has stopped.",
            [q.OUTPUT_AGE],
            width=8,
            unit="s",
        ),
        lines(
            "Records",
            "Records in the files of each path group: lines, elements or rows. If there are fewer records than"
            " completed items, results are missing.",
            [q.OUTPUT_RECORDS],
            width=8,
            decimals=0,
            unknown="no format with records",
        ),
        lines(
            "Damaged files",
            "Files that cannot be read to their end, and that nothing writes to any more.",
            [q.OUTPUT_INVALID],
            width=8,
            decimals=0,
            stepped=True,
        ),
        lines(
            "Checkpoints",
            "Checkpoints saved. Each point counts the previous five minutes. A checkpoint of several files counts"
            " when it is complete.",
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
            "Responding file systems",
            "1 if the directories of the path group respond on all nodes, 0 if a read hangs on one.",
            [q.RESPONDING],
            width=8,
            decimals=0,
            maximum=1,
            stepped=True,
        ),
        lines(
            "Disk: available and size",
            "Space on the file system of each path group, on the node with the least.",
            [q.DISK_AVAILABLE, q.DISK_SIZE],
            width=12,
            unit="bytes",
        ),
        bars(
            "Free disk space",
            "Available share of the file system of each path group, on the node with the least. GpuJobDiskLow fires"
            " below 10 GB, or below 10 % if that is less than 1 TB.",
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
            "Exits by reason, and restarts. Each point counts the previous five minutes.",
            [q.RESTARTS_IN_TIME, q.EXITS_IN_TIME],
            width=12,
            decimals=0,
            stepped=True,
            unknown="none",
        ),
        lines(
            "Log errors",
            "Lines of the workers' logs that match an error pattern. Each point counts the previous five minutes.",
            [q.LOG_ERRORS],
            width=12,
            decimals=0,
            stepped=True,
            unknown="none",
        ),
        lines(
            "Phase over time",
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
            "CPU time of the sidecar, as a share of one core, on the ten nodes where it is highest. The dashed line at"
            " 1 % is its budget.",
            [q.SIDECAR_CPU],
            width=7,
            unit="percentunit",
            steps=(("transparent", None), ("red", 0.01)),
            shown_up_to=0.011,
        ),
        lines(
            "Sidecar memory",
            "Resident memory of the sidecar on the ten nodes where it is highest. The dashed line at 80 MiB is its"
            " budget.",
            [q.SIDECAR_RSS],
            width=7,
            unit="bytes",
            steps=(("transparent", None), ("red", 80 * MIB)),
            shown_up_to=88 * MIB,
        ),
        rows(
            "Collectors",
            "Whether the last read of each collector succeeded, how long it took, and the time since the last"
            " success. A failing collector affects only its own series.",
            {
                "last read": q.COLLECTOR_SUCCESS,
                "duration": q.COLLECTOR_DURATION,
                "since last success": q.COLLECTOR_AGE,
            },
            labels=("node", "collector"),
            first_by="since last success",
            columns=[
                column("last read", words={1: ("ok", "green"), 0: ("failed", "red")}),
                column("duration", unit="s", decimals=1),
                column("since last success", unit="s", decimals=0),
            ],
            width=10,
            height=8,
        ),
    ]


ROWS = (
    ("Overview", overview),
    ("Progress", progress),
    ("Workers", workers),
    ("GPUs", gpus),
    ("Outputs", outputs),
    ("Events", events),
    ("Monitor cost", monitor_cost),
)


def build() -> Dashboard:
    return board.build(
        UID,
        ROWS,
        (variables.cluster(), variables.job_id(), variables.node()),
        (variables.job_start(), variables.worker_exits(), variables.checkpoints(), variables.alerts(q.FIRING)),
        open_rows=1,
    )
