"""Series of the hub: every job by itself, sums of all, and the hub's own health."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from exporter.collecting.families import Family, Samples
from exporter.contract.identity import safe_label
from exporter.hub.costs import cost, energies, gpu_seconds, idle_s, seen_ratio
from exporter.hub.counters import COST, ENDED, ENERGY_J, GPU_S, IDLE_S, STARTED, WAIT_S, CounterKey, Counters
from exporter.hub.jobs import Job
from exporter.slurm.accounting import tres
from exporter.slurm.diagnostics import Diagnostics
from exporter.slurm.nodes import NodeRow
from exporter.slurm.prices import Prices
from exporter.slurm.states import ENDS, array_of

JOB = ("job_id", "job_name", "user", "partition")
ALERTING_JOB = (*JOB, "notify")  # of the series that alerts count; notify is that of the job file, or empty
PLACE = ("user", "partition")

INFO = Family(
    "job_info",
    "A job of Slurm, and whether gpujob launched it.",
    (*JOB, "attempt", "account", "qos", "launched_by"),
    "info",
)
STATE = Family("job_state", "1 for the present base state of the job.", (*ALERTING_JOB, "state"))
REASON = Family("job_pending_reason", "1 for the reason why the job waits.", (*ALERTING_JOB, "reason"))
MONITORED = Family("job_monitored", "1 while the sidecars of the job are to be scraped.", ALERTING_JOB)
SUBMIT = Family("job_submit_timestamp_seconds", "When this attempt of the job was submitted.", ALERTING_JOB)
START = Family("job_start_timestamp_seconds", "When this attempt of the job started.", JOB)
END = Family("job_end_timestamp_seconds", "When the job ended.", JOB)
EXPECTED_START = Family("job_expected_start_timestamp_seconds", "When Slurm expects a waiting job to start.", JOB)
LIMIT = Family("job_limit_timestamp_seconds", "When a running job reaches its time limit.", JOB)
GPUS = Family("job_gpus", "GPUs allocated to the job, or requested while it waits.", JOB)
NODE_STATE = Family("node_state", "1 for the state of a node with GPUs.", ("node", "partition", "state"))
NODE_GPUS = Family("node_gpus", "GPUs of the node.", ("node", "partition"))
NODE_GPUS_USED = Family("node_gpus_allocated", "GPUs of the node that jobs have.", ("node", "partition"))
NODE_PRICE = Family("node_price_per_hour", "List price of the node's GPUs.", ("node", "partition", "currency"))
NODES = Family("job_nodes", "Nodes of the job; of a waiting one those that it asks for.", JOB)
CPUS = Family("job_cpus", "CPUs of the job; of a waiting one those that it asks for.", JOB)
MEMORY = Family("job_memory_bytes", "Memory of the job; of a waiting one what it asks for.", JOB)
EXIT_CODE = Family("job_exit_code", "Exit code of the ended job, from accounting or from its report.", JOB)
CPU_RATIO = Family("job_cpu_efficiency_ratio", "CPU time of the ended job over its CPUs times elapsed time.", JOB)
MEMORY_RATIO = Family("job_memory_efficiency_ratio", "Memory of the ended job's largest step over the request.", JOB)
LIMIT_RATIO = Family("job_time_limit_used_ratio", "Elapsed time of the ended job over its time limit.", JOB)
JOB_GPU_SECONDS = Family("job_gpu_seconds", "GPU seconds of the ended job, over its attempts.", JOB)
JOB_IDLE = Family("job_gpu_idle_seconds", "GPU seconds in which sidecars saw an idle GPU, of the last attempt.", JOB)
JOB_SEEN = Family("job_gpu_seen_ratio", "Share of the last attempt's GPU time that sidecars saw.", JOB)
JOB_ENERGY = Family(
    "job_energy_joules",
    "Energy of the last attempt: by the counters of its GPUs (gpu), or of its whole nodes by Slurm (slurm).",
    (*JOB, "source"),
)
JOB_COST = Family("job_cost", "List price of the ended job, over its attempts.", (*JOB, "currency"))
PRICE = Family("job_price_per_hour", "List price of the GPUs of the running job.", (*JOB, "currency"))
JOB_BUDGET = Family(
    "job_budget_used_ratio", "Used share of the budget of a running job or sweep.", (*ALERTING_JOB, "kind")
)
USER_BUDGET = Family("user_budget_used_ratio", "Used share of the user's budget.", ("user", "kind"))
ITEMS = Family("job_items_processed", "Items of the ended job, from its report.", JOB)
ITEMS_EXPECTED = Family("job_items_expected", "Items that the ended job should have, from its report.", JOB)
JOBS = Family(
    "jobs",
    "Jobs listed by Slurm or ended in the last 30 minutes. Waiting jobs count in each partition that they request.",
    (*PLACE, "state"),
)
PENDING = Family(
    "jobs_pending",
    "Waiting jobs by pending reason. A job counts in each partition that it requests.",
    ("partition", "reason"),
)
JOBS_ENDED = Family("jobs_ended_total", "Ends of jobs.", (*PLACE, "state"), "counter")
JOBS_STARTED = Family("jobs_started_total", "Starts of jobs.", PLACE, "counter")
WAITED = Family(
    "queue_wait_seconds_total", "Time that started jobs had waited since their submission.", PLACE, "counter"
)
GPU_SECONDS = Family("gpu_seconds_total", "Allocated GPU seconds.", PLACE, "counter")
IDLE = Family("gpu_idle_seconds_total", "GPU seconds in which sidecars saw an idle GPU.", PLACE, "counter")
ENERGY = Family(
    "energy_joules_total",
    "Energy of ended attempts, by source as in gpujob_job_energy_joules.",
    (*PLACE, "source"),
    "counter",
)
COST_TOTAL = Family("cost_total", "List price of allocated GPUs.", (*PLACE, "currency"), "counter")
HUB_COMMANDS = Family("hub_commands_total", "Commands of Slurm that the hub ran.", ("command", "outcome"), "counter")
HUB_SECONDS = Family("hub_command_seconds_total", "Time that commands of Slurm took.", ("command",), "counter")
HUB_SUCCESS = Family(
    "hub_last_success_timestamp_seconds",
    "When this Slurm command last succeeded. For squeue: when the hub last used its answer, or started without one.",
    ("command",),
)
HUB_INTERVAL = Family("hub_poll_interval_seconds", "Current interval between two reads of the queue.")
HUB_LAG = Family("hub_accounting_lag_seconds", "How long the oldest ended job has waited for its figures.")
HUB_UNPARSED = Family(
    "hub_unparsed_lines_total", "Lines of Slurm's answers that could not be parsed.", ("command",), "counter"
)
HUB_JOBS = Family("hub_jobs", "Jobs that the hub follows.", ("kind",))
HUB_STORE = Family("hub_store_bytes", "Size of the hub's file.")
HUB_STORE_WORKS = Family("hub_store_works", "Whether the hub's file can be written.")
HUB_CLOCK = Family("hub_clock_offset_seconds", "Clock of Slurm's controller minus the clock of this machine.")
HUB_ACCOUNTING = Family("hub_accounting_queue", "Records that the controller has not yet sent to accounting.")
HUB_AGENTS = Family("hub_controller_agent_queue", "Messages that the controller has not yet sent to nodes.")
HUB_THREADS = Family("hub_controller_threads", "Threads of the controller that answer requests.")
HUB_RPCS = Family(
    "hub_controller_rpcs_total",
    "Requests that the controller answered: from all users, or from the hub's user.",
    ("who",),
    "counter",
)
HUB_RPC_SECONDS = Family("hub_controller_rpc_seconds_total", "Time that those requests took.", ("who",), "counter")
HUB_MOUNTS = Family("hub_mount_responding", "Whether a mount with run directories answers.", ("mount",))
HUB_REQUESTS = Family("hub_http_requests_total", "Answered requests.", ("handler", "code"), "counter")
HUB_REQUEST_SECONDS = Family(
    "hub_http_request_seconds_total",
    "Time that those requests took, including waits.",
    ("handler",),
    "counter",
)
FAMILIES = (
    *(INFO, STATE, REASON, MONITORED, SUBMIT, START, END, EXPECTED_START, LIMIT, GPUS, NODES, CPUS, MEMORY, EXIT_CODE),
    *(CPU_RATIO, MEMORY_RATIO, LIMIT_RATIO, JOB_GPU_SECONDS, JOB_IDLE, JOB_SEEN, JOB_ENERGY, JOB_COST, PRICE, ITEMS),
    *(JOB_BUDGET, USER_BUDGET),
    *(ITEMS_EXPECTED, IDLE, ENERGY, COST_TOTAL, JOBS, PENDING, JOBS_ENDED, JOBS_STARTED, WAITED),
    *(GPU_SECONDS, HUB_COMMANDS, HUB_UNPARSED, HUB_SECONDS, HUB_SUCCESS, HUB_INTERVAL, HUB_LAG, HUB_JOBS, HUB_STORE),
    *(
        HUB_STORE_WORKS,
        HUB_MOUNTS,
        HUB_CLOCK,
        HUB_ACCOUNTING,
        HUB_AGENTS,
        HUB_THREADS,
        HUB_RPCS,
        HUB_RPC_SECONDS,
        HUB_REQUESTS,
        HUB_REQUEST_SECONDS,
        NODE_STATE,
        NODE_GPUS,
        NODE_GPUS_USED,
        NODE_PRICE,
    ),
)


class CommandUse(NamedTuple):
    """How a command of Slurm has answered since the hub started."""

    answers: int = 0
    failures: int = 0
    seconds: float = 0.0
    last_success: float | None = None


class SelfFacts(NamedTuple):
    """What the hub tells of itself."""

    commands: Mapping[str, CommandUse]
    unparsed: Mapping[str, int]  # lines by command
    interval_s: float
    store_bytes: int | None
    store_works: bool
    requests: Mapping[tuple[str, int], int]  # by handler and status
    request_s: Mapping[str, float]  # by handler
    mounts: Mapping[str, bool]  # with run directories, and whether they answer


_OF_PLACE = {WAIT_S: WAITED, GPU_S: GPU_SECONDS, IDLE_S: IDLE, ENERGY_J: ENERGY, COST: COST_TOTAL}


def render_counters(counters: Counters, out: Samples) -> None:
    """Add the counters of users and partitions."""
    for (name, user, partition, kind), value in counters.items():
        place = {"user": user, "partition": partition}
        if name == STARTED:
            out.add(JOBS_STARTED, value, **place)
            for end in sorted(ENDS):
                out.add(JOBS_ENDED, counters.get(CounterKey(ENDED, user, partition, end), 0.0), **place, state=end)
        elif name in _OF_PLACE:
            family = _OF_PLACE[name]
            out.add(family, value, **place, **dict.fromkeys(family.labels[len(PLACE) :], kind))


def render_job(job: Job, out: Samples) -> None:
    """Add the series of one job."""
    tracked, figures = job.tracked, job.tracked.figures
    row = out.row(**_job_labels(job))
    launched_by = "gpujob" if tracked.run_dir else ""
    row.add(
        INFO,
        1,
        attempt=tracked.attempt,
        account=safe_label(job.account),
        qos=safe_label(job.qos),
        launched_by=launched_by,
    )
    notify = safe_label(job.notify)
    row.add(STATE, 1, notify=notify, state=safe_label(tracked.state))
    is_pending = tracked.state == "PENDING"
    if is_pending and tracked.reason:
        row.add(REASON, 1, notify=notify, reason=_head(tracked.reason))
    if job.is_monitored:
        row.add(MONITORED, 1, notify=notify)
    row.add(SUBMIT, tracked.submitted, notify=notify)
    row.add(START, tracked.started)
    row.add(END, tracked.ended)
    row.add(EXPECTED_START, job.expected_start if is_pending else None)
    if tracked.state == "RUNNING" and tracked.started is not None and tracked.limit_s is not None:
        row.add(LIMIT, tracked.started + tracked.suspended_s + tracked.limit_s)
    row.add(GPUS, job.gpus)
    row.add(NODES, job.node_count or None)
    row.add(CPUS, tres(job.resources, "cpu"))
    row.add(MEMORY, tres(job.resources, "mem"))
    if job.price is not None and tracked.state == "RUNNING":
        row.add(PRICE, job.price.per_hour, currency=job.price.currency)
    if not tracked.is_over:
        return
    for source, energy in energies(job).items():
        row.add(JOB_ENERGY, energy, source=source)
    row.add(JOB_IDLE, idle_s(job))
    row.add(JOB_SEEN, seen_ratio(job))
    if job.outcome is not None:
        row.add(ITEMS, job.outcome.items_processed)
        row.add(ITEMS_EXPECTED, job.outcome.items_expected)
    row.add(EXIT_CODE, _exit_code(job))
    if figures is None:
        return
    row.add(CPU_RATIO, figures.cpu_ratio)
    row.add(MEMORY_RATIO, _ratio(figures.memory_bytes, figures.memory_requested_bytes))
    row.add(LIMIT_RATIO, _ratio(figures.elapsed_s, figures.limit_s))
    row.add(JOB_GPU_SECONDS, gpu_seconds(job, 0.0))
    if job.price is not None:
        row.add(JOB_COST, cost(job, 0.0), currency=job.price.currency)


def _exit_code(job: Job) -> int | None:
    """Exit code from accounting, or from the report until accounting has one."""
    code = (job.tracked.figures.exit_code or "" if job.tracked.figures else "").partition(":")[0]
    reported = None if job.outcome is None else job.outcome.exit_status
    return int(code) if code.isdecimal() else reported


def _job_labels(job: Job) -> dict[str, str]:
    job_id = array_of(job.tracked.job_id) if job.key != job.tracked.job_id else job.tracked.job_id
    user, partition = job.place
    labels = (safe_label(job_id), safe_label(job.tracked.name), user, partition)
    return dict(zip(JOB, labels, strict=True))


def render_job_budget(job: Job, used: Mapping[str, float], out: Samples) -> None:
    """Add the used shares of a job's budget."""
    for kind, ratio in used.items():
        out.add(JOB_BUDGET, ratio, **_job_labels(job), notify=safe_label(job.notify), kind=kind)


def render_user_budgets(used: Mapping[tuple[str, str], float], out: Samples) -> None:
    """Add the use of the users' budgets."""
    for (user, kind), ratio in used.items():
        out.add(USER_BUDGET, ratio, user=safe_label(user), kind=kind)


class Sum(NamedTuple):
    """One sum over jobs."""

    family: Family
    labels: tuple[str, ...]


def sums_of(job: Job) -> tuple[Sum, ...]:
    """The sums to which the tasks of a job belong."""
    tracked = job.tracked
    reason = tracked.reason or "None" if tracked.state == "PENDING" else None
    return _sums_of(job.user, job.partition, tracked.state, reason)


@lru_cache(maxsize=4096)  # thousands of jobs have the same few
def _sums_of(user: str, partitions: str, state: str, reason: str | None) -> tuple[Sum, ...]:
    found = list[Sum]()
    for partition in partitions.split(","):  # it waits for one of them
        place = safe_label(partition)
        found.append(Sum(JOBS, (safe_label(user), place, safe_label(state))))
        if reason is not None:
            found.append(Sum(PENDING, (place, _head(reason))))
    return tuple(found)


def render_sums(sums: Mapping[Sum, int], out: Samples) -> None:
    """Add the sums over jobs."""
    for (family, labels), number in sums.items():
        out.add(family, number, **dict(zip(family.labels, labels, strict=True)))


def render_nodes(nodes: Iterable[NodeRow], prices: Prices | None, out: Samples) -> None:
    """Add the series of the nodes that have GPUs."""
    for row in nodes:
        if row.gpus:
            place = {"node": safe_label(row.node), "partition": safe_label(row.partition)}
            out.add(NODE_STATE, 1, **place, state=safe_label(row.state if row.responds else "not_responding"))
            out.add(NODE_GPUS, sum(row.gpus.values()), **place)
            out.add(NODE_GPUS_USED, row.gpus_used, **place)
            if prices is not None:
                out.add(NODE_PRICE, prices.of_gpus(row.gpus), **place, currency=prices.currency)


def render_controller(found: Diagnostics, offset_s: float | None, out: Samples) -> None:
    """Add the load and the clock of Slurm's controller."""
    out.add(HUB_CLOCK, offset_s)
    out.add(HUB_ACCOUNTING, found.accounting_queue)
    out.add(HUB_AGENTS, found.agent_queue)
    out.add(HUB_THREADS, found.threads)
    for who, use in (("all", found.rpcs), ("own", found.own_rpcs)):
        out.add(HUB_RPCS, use.calls, who=who)
        out.add(HUB_RPC_SECONDS, use.seconds, who=who)


def render_self(facts: SelfFacts, out: Samples) -> None:
    """Add the series of the hub itself."""
    for command, use in facts.commands.items():
        out.add(HUB_COMMANDS, use.answers, command=command, outcome="answer")
        out.add(HUB_COMMANDS, use.failures, command=command, outcome="failure")
        out.add(HUB_UNPARSED, facts.unparsed.get(command, 0), command=command)
        out.add(HUB_SECONDS, use.seconds, command=command)
        out.add(HUB_SUCCESS, use.last_success, command=command)
    out.add(HUB_INTERVAL, facts.interval_s)
    out.add(HUB_STORE, facts.store_bytes)
    out.add(HUB_STORE_WORKS, facts.store_works)
    for mount, responds in facts.mounts.items():
        name = mount.encode("utf-8", "backslashreplace").decode()  # a folder may have any bytes as its name
        out.add(HUB_MOUNTS, responds, mount=name)
    for (handler, code), number in facts.requests.items():
        out.add(HUB_REQUESTS, number, handler=handler, code=code)
    for handler, seconds in facts.request_s.items():
        out.add(HUB_REQUEST_SECONDS, seconds, handler=handler)


def _head(reason: str) -> str:
    """The word of a reason without what follows in brackets or after a colon."""
    return safe_label(reason.partition(":")[0].partition("(")[0])


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
