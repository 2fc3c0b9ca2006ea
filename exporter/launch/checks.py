"""Launch checks: facts about one node in, one result per check out."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.status import LaunchCheck, LaunchProblem
from exporter.gpus.analysis.users import parse_visible_devices
from exporter.workers.exit_reason import CONSEQUENCES

Level = Literal["issue", "warning"]

LEVELS: Mapping[str, Level] = {
    "processes": "issue",
    "count": "issue",
    "gpus": "issue",
    "gpu_use": "warning",
    "logs": "issue",
    "log_lines": "warning",
    "output_dir": "issue",
    "output": "warning",
    "progress": "warning",
}  # all checks, in the order in which a launch passes them

# Variables that list the devices of a process; the first that is set decides. CUDA reads the first one alone.
DEVICES_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

SETTLE_S = 5.0  # a worker that lives this long has started: a broken environment shows sooner


@dataclass(frozen=True)
class WorkerLaunchFacts:
    """Facts about one worker so far; None is "not visible", not "absent"."""

    worker: str
    rank: int
    gpus: tuple[int, ...] = ()  # from the plan, as positions on its node
    visible_gpus: int = 0  # how many the plan lets it see, if more than these
    critical: bool = True
    service: bool = False  # whether it serves until the job ends, without a position in its log
    pid: int | None = None
    started: bool = False
    up: bool = False
    age_s: float | None = None
    reason: str | None = None  # why its last run ended; None while it runs
    evidence: str = ""  # for the reason
    devices: str | None = None  # devices that its process may see
    devices_variable: str = DEVICES_VARIABLES[0]  # where they are listed
    devices_unset: bool = False  # whether no such variable is set, so that it sees all devices
    misplaced: str | None = None  # GPUs that it uses instead of the planned ones, according to the driver
    device_files: int | None = None  # GPUs that it or a descendant has opened
    log_files: int | None = 0  # None if its output goes to no file that is known
    log_bytes: int = 0
    items: float | None = None


@dataclass(frozen=True)
class NodeLaunchFacts:
    """Facts about the node."""

    output_dir: str | None = None  # None if the job has no output to check
    output_problem: str | None = None
    output_files: int | None = None  # None if files of other nodes cannot be excluded, or none are expected
    expects_progress: bool = False  # whether progress is reported; otherwise its absence means nothing
    has_gpus: bool = False  # whether the job requests GPUs
    sets_devices: bool = True  # whether the launcher sets every worker's devices


def check_launch(
    workers: Sequence[WorkerLaunchFacts],
    node: NodeLaunchFacts,
    *,
    elapsed_s: float,
    launch_timeout_s: float,
    is_over: bool = False,
) -> tuple[LaunchCheck, ...]:
    """One result for each check that applies to this node; ``is_over``: whether the job has ended."""
    final = is_over or elapsed_s >= launch_timeout_s
    settle_s = 0.0 if final else min(SETTLE_S, launch_timeout_s / 2)
    planned = [worker for worker in workers if worker.gpus]
    with_logs = [worker for worker in workers if worker.log_files is not None]
    with_devices = (
        [worker for worker in workers if node.sets_devices or not _selects_devices(worker)] if node.has_gpus else []
    )
    checks: list[LaunchCheck | None] = [
        _check_each("processes", workers, _not_started, final, "started"),
        _check_running(workers, settle_s, final=final, is_over=is_over),
        _check_each(
            "gpus", with_devices, lambda worker: _wrong_gpus(worker, workers), final, "with the GPUs of the plan"
        ),
        _check_each("gpu_use", planned, _unused_gpus, final, "with a GPU in use"),
        _check_each("logs", with_logs, _no_log, final, "with a log file"),
        _check_each("log_lines", with_logs, _empty_log, final, "with a first line in the log"),
        _check_output_dir(node, final),
        _check_output(node, final),
        _check_each(
            "progress",
            [worker for worker in with_logs if _should_show_progress(worker)],
            _no_progress,
            final,
            "with a position",
        )
        if node.expects_progress
        else None,
    ]
    return tuple(check for check in checks if check is not None)


def _check(
    name: str, passed: bool | None, detail: str, lacking: tuple[LaunchProblem, ...] = (), unseen: int = 0
) -> LaunchCheck:
    return LaunchCheck(name=name, level=LEVELS[name], passed=passed, detail=detail, lacking=lacking, unseen=unseen)


def is_launch_verified(checks: Iterable[LaunchCheck]) -> bool:
    """Whether all checks that a launch requires have passed."""
    return all(check.passed is True for check in checks if check.level == "issue")


NOT_VISIBLE = ""  # finding for a worker that was not visible: it never fails, and may still pass while it runs


def _check_each(
    name: str,
    workers: Sequence[WorkerLaunchFacts],
    problem: Callable[[WorkerLaunchFacts], str | None],
    final: bool,
    text: str,
) -> LaunchCheck | None:
    """Apply one check to each worker; None if there are no workers, or none was visible in time."""
    found = [(worker, problem(worker)) for worker in workers]
    unseen = [worker for worker, found_text in found if found_text == NOT_VISIBLE]
    is_awaited = not final and any(worker.reason is None for worker in unseen)
    if not workers or (not is_awaited and len(unseen) == len(found)):
        return None
    problems = tuple(
        LaunchProblem(worker=worker.worker, rank=worker.rank, found=found_text)
        for worker, found_text in found
        if found_text
    )
    well = len(found) - len(problems) - len(unseen)
    passed = True if not problems and not is_awaited else False if final else None
    return _check(name, passed, _detail(f"{well} of {len(found)} workers {text}", problems), problems, len(unseen))


def _detail(text: str, problems: Sequence[LaunchProblem]) -> str:
    names = ", ".join(f"{problem.worker} (rank {problem.rank})" for problem in problems if problem.worker is not None)
    return f"{text}; not {names}" if names else text


def _not_started(worker: WorkerLaunchFacts) -> str | None:
    if worker.started:
        return None
    return f"it could not be started: {worker.evidence}" if worker.reason else "none of its processes was found"


def _check_running(workers: Sequence[WorkerLaunchFacts], settle_s: float, *, final: bool, is_over: bool) -> LaunchCheck:
    """Check that each worker runs, in its own process; a worker that completed or was ended from outside passes."""
    problems: list[LaunchProblem] = []
    young = 0
    by_pid: dict[int, str] = {}
    for worker in workers:
        found = None
        if worker.reason is not None:
            if worker.reason not in CONSEQUENCES:
                found = f"it has ended: {worker.reason}" + (f" ({worker.evidence})" if worker.evidence else "")
        elif not worker.started:
            found = "none of its processes was found"
        elif not worker.up:
            found = None if is_over else "its process no longer exists"  # the job is ending, and the worker with it
        elif worker.pid is not None and worker.pid in by_pid:
            found = f"process {worker.pid} is also counted for {by_pid[worker.pid]}"
        elif worker.age_s is None or worker.age_s < settle_s:
            young += not final
        if found is not None:
            problems.append(LaunchProblem(worker=worker.worker, rank=worker.rank, found=found))
        if worker.up and worker.pid is not None:
            by_pid.setdefault(worker.pid, worker.worker)
    well = len(workers) - len(problems)
    passed = None if young and not problems else True if not problems else False if final else None
    return _check(
        "count", passed, _detail(f"{well} of {len(workers)} workers alive or completed", problems), tuple(problems)
    )


def _wrong_gpus(worker: WorkerLaunchFacts, workers: Sequence[WorkerLaunchFacts]) -> str | None:
    if worker.misplaced is not None:
        return f"it {worker.misplaced}"
    if worker.devices_unset:
        return f"{DEVICES_VARIABLES[0]} is not set in its environment: it sees every GPU of the node"
    if worker.devices is None:
        return NOT_VISIBLE
    seen, wanted = parse_visible_devices(worker.devices), worker.visible_gpus or len(worker.gpus)
    if len(seen) != wanted:
        return (
            f'{worker.devices_variable} is "{worker.devices}", {_devices(len(seen))}; '
            f"the plan gives it {_devices(wanted)}{_positions(worker)}"
        )
    for other in workers:
        if other.rank == worker.rank or other.devices is None or not other.up or not worker.up:
            continue
        if other.worker == worker.worker and worker.visible_gpus:
            continue  # both see all GPUs of their worker
        theirs = parse_visible_devices(other.devices)
        shared = sorted(set(seen) & set(theirs))
        # If the other has too many devices, only that one is at fault.
        if shared and len(theirs) == (other.visible_gpus or len(other.gpus)) and not set(worker.gpus) & set(other.gpus):
            return f"it shares device {', '.join(shared)} with {other.worker}; the plan gives each its own"
    return None


def _selects_devices(worker: WorkerLaunchFacts) -> bool:
    """Whether it sees more devices than its own, so that it selects them itself, like the workers of `torchrun`."""
    return worker.devices_unset or len(parse_visible_devices(worker.devices or "")) > len(worker.gpus)


def _devices(count: int) -> str:
    return f"{count} device{'' if count == 1 else 's'}"


def _positions(worker: WorkerLaunchFacts) -> str:
    return f" (GPU {', '.join(map(str, worker.gpus))})" if worker.gpus and not worker.visible_gpus else ""


def _unused_gpus(worker: WorkerLaunchFacts) -> str | None:
    if worker.device_files is None:
        return NOT_VISIBLE
    return None if worker.device_files else "none of its processes has opened a GPU"


def _no_log(worker: WorkerLaunchFacts) -> str | None:
    return None if worker.log_files else "it has no log file"


def _empty_log(worker: WorkerLaunchFacts) -> str | None:
    return None if worker.log_bytes else "its log is empty"


def _should_show_progress(worker: WorkerLaunchFacts) -> bool:
    """Whether its work should show a position."""
    return worker.critical and not worker.service


def _no_progress(worker: WorkerLaunchFacts) -> str | None:
    return None if worker.items is not None else "no position was found in its log"


def _check_output_dir(node: NodeLaunchFacts, final: bool) -> LaunchCheck | None:
    if node.output_dir is None:
        return None
    if node.output_problem is None:
        return _check("output_dir", True, f"{node.output_dir} can be written to")
    problem = LaunchProblem(found=node.output_problem)
    return _check("output_dir", False if final else None, node.output_problem, (problem,))


def _check_output(node: NodeLaunchFacts, final: bool) -> LaunchCheck | None:
    if node.output_files is None:
        return None
    if node.output_files:
        return _check("output", True, f"{node.output_files} output files")
    problem = LaunchProblem(found="there is no output file yet")
    return _check("output", False if final else None, "no output file yet", (problem,))
