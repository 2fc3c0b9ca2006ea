"""Preflight checks of this machine, the cluster and the site's servers. Every query has a deadline."""

import itertools
import os
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from platform import python_version
from urllib.parse import urlsplit

from exporter.contract.lazy_dataclass import dataclass
from exporter.files.disks.space_reader import read_space
from exporter.gpus.analysis.users import listed_gpu_positions
from exporter.gpus.inventory_reader import GpuInventory, InventoryGpu
from exporter.machine.mounts import MountPoint, is_node_local, mount_of
from exporter.slurm.commands_reader import NO_CLUSTER, finds_no_cluster
from launcher.check import finding
from launcher.check.finding import CheckFinding
from launcher.check.preflight import given_devices, gpu_positions, written_directories
from launcher.check.python_modules import InterpreterSilent
from launcher.check.role_programs import environment_of, find_program, is_python, modules_not_found, role_commands
from launcher.errors import SlurmError
from launcher.jobfile.jobfile import HUB
from launcher.jobfile.value_types import parse_time_limit
from launcher.plan.plan import Plan
from launcher.planner.planned_job import PlannedJob
from launcher.steps.slurm_steps import run_command
from launcher.words import count_text

SLURM_TIMEOUT_S = 10.0  # for sinfo
PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # `launcher` in this installation
HTTP_TIMEOUT_S = 3.0  # for each server
# low disk space is below both; with a terabyte free, the share means little
LEAST_FREE_SHARE, ENOUGH_FREE_BYTES = 0.2, 1 << 40
LEAST_FREE_MEMORY_SHARE = 0.9  # of a GPU without other users; the driver keeps a little memory
GIB = 1 << 30
NOT_THIS_MACHINE = "the job's nodes are not this machine"
MOST_ERROR = 200  # characters of a Slurm error within one finding


# -- environment ---------------------------------------------------------------------------------


def check_interpreter(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Check that Python comes from an environment made for the job, not just from PATH."""
    doubtful = set[str]()
    for place, planned, argv in role_commands(planned_job):
        known = environment_of(planned_job, planned)
        active = known.get("VIRTUAL_ENV") or known.get("CONDA_PREFIX")
        if not argv:
            continue
        if planned.contained:
            yield finding.not_checked("interpreter", place, "it is in the container")
        elif not is_python(argv[0]):
            yield finding.not_checked("interpreter", place, f'"{argv[0]}" is not Python')
        elif "/" in argv[0]:
            yield finding.ok("interpreter", place, f"{argv[0]} is given by its path")
        elif active:
            yield finding.ok("interpreter", place, f"{active} is active")
        else:
            found = find_program(planned_job, planned, argv[0]) or "not found here"
            if _is_in_virtual_environment(found):
                yield finding.ok("interpreter", place, f'"{argv[0]}" is {found}, in a virtual environment')
            elif found not in doubtful:
                doubtful.add(found)
                message = (
                    f'no virtual environment is active, and "{argv[0]}" is {found}; '
                    "activate one, or give the path of its interpreter"
                )
                yield finding.warning("no-environment", place, message)


def _is_in_virtual_environment(interpreter: str) -> bool:
    """Whether an interpreter belongs to a virtual environment (PEP 405: pyvenv.cfg next to its directory)."""
    return (Path(interpreter).parent.parent / "pyvenv.cfg").is_file()


def check_packages(planned_job: PlannedJob) -> CheckFinding:
    """Check that the workers' Python finds the modules that the job names."""
    place, names = "environment.packages", planned_job.spec.environment.packages
    if not names:
        return finding.not_checked("packages", place, "the job file names none")
    for _, planned, argv in role_commands(planned_job):
        here = bool(argv) and is_python(argv[0]) and not planned.contained
        program = find_program(planned_job, planned, argv[0]) if here else None
        if program is None:
            continue
        try:
            missing = modules_not_found(planned_job, planned, program, names)
        except InterpreterSilent as why:
            return finding.not_checked("packages", place, str(why))
        if missing:
            message = f"{program} does not find {', '.join(missing)}; install it there, or name another interpreter"
            level = finding.error if planned_job.local else finding.warning
            return level("no-package", place, message)
        return finding.ok("packages", place, f"{program} finds {', '.join(names)}")
    return finding.not_checked("packages", place, "no command begins with a Python of this machine")


def check_driver(inventory: GpuInventory | str) -> CheckFinding:
    """Report the newest CUDA version that this machine's driver supports."""
    if isinstance(inventory, str):
        return finding.not_checked("cuda", "CUDA", f"no GPU driver answers here ({inventory})")
    newest = ".".join(map(str, inventory.cuda))
    message = f"driver {inventory.driver} supports CUDA {newest} and older; a framework built for a newer one will fail"
    return finding.ok("cuda", "CUDA", message)


def check_installation(plan: Plan, mounts: Sequence[MountPoint], package: str = PACKAGE) -> CheckFinding:
    """Check that the nodes see this installation, as far as mounts show it, and name the Python that they need.

    The Python of a virtual environment is a link to one that each node has by itself.
    """
    place, shared = "installation", mount_of(plan.logs_dir, mounts)
    python = os.path.realpath(plan.python)
    if is_node_local(mount_of(package, mounts), shared):
        message = f"{package} is on a disk of this machine; install gpujob where all nodes see it"
        return finding.warning("local-installation", place, message)
    if is_node_local(mount_of(python, mounts), shared):
        message = f"{python} is on a disk of this machine, so each node needs the same one: Python {python_version()}"
        return finding.not_checked("node-python", place, message)
    return finding.ok("installation", place, f"gpujob is {package}")


# -- resources -----------------------------------------------------------------------------------


def check_gpu_memory(planned_job: PlannedJob, inventory: GpuInventory | str) -> Iterator[CheckFinding]:
    """Check that no other process uses the GPUs of this machine."""
    place, plan = "GPU memory", planned_job.plan
    if not plan.gpus_per_node:
        return
    if not planned_job.local:
        yield finding.not_checked("gpu-memory", place, NOT_THIS_MACHINE)
    elif isinstance(inventory, str):
        yield finding.not_checked("gpu-memory", place, inventory)
    else:
        given = _gpus_given(planned_job, inventory)
        busy = [gpu for gpu in given if gpu.free_bytes < LEAST_FREE_MEMORY_SHARE * gpu.total_bytes]
        for gpu in busy:
            memory = f"{gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free"
            message = f"GPU {gpu.index} ({gpu.name}) has {memory}; another process uses it; `nvidia-smi` shows which"
            yield finding.warning("gpu-busy", place, message)
        if not given:
            yield finding.not_checked("gpu-memory", place, "none of the job's GPUs is known here")
        elif not busy:
            free = min(gpu.free_bytes for gpu in given)
            yield finding.ok("gpu-memory", place, f"at least {free / GIB:.1f} GiB free on each GPU")


def _gpus_given(planned_job: PlannedJob, inventory: GpuInventory) -> list[InventoryGpu]:
    """The GPUs of this machine that the tasks of a local plan see."""
    uuids = [gpu.uuid for gpu in inventory.gpus]
    given = [
        device
        for listed, positions in gpu_positions(planned_job).items()
        for device in given_devices(listed, positions)
    ]
    found = {at for device in given for at in listed_gpu_positions(device, uuids) if at is not None}
    return [inventory.gpus[at] for at in sorted(found)]


def check_memory(planned_job: PlannedJob) -> CheckFinding:
    """Check that this machine has the memory that a local job requests."""
    import psutil  # lazy: 10 ms, and only `check` needs it

    place, asked = "resources.memory_per_node", memory_bytes(planned_job.plan.memory_per_node)
    if not planned_job.local:
        return finding.not_checked("memory", place, NOT_THIS_MACHINE)
    available = psutil.virtual_memory().available
    if asked is None:
        return finding.ok("memory", place, f"{available / GIB:.1f} GiB available; the job asks for no amount")
    needed = asked * planned_job.plan.nodes
    message = f"{available / GIB:.1f} GiB available, {needed / GIB:.1f} asked for"
    if available < needed:
        return finding.warning("little-memory", place, f"{message}; end other programs, or ask for less")
    return finding.ok("memory", place, message)


def memory_bytes(text: str | None) -> int | None:
    """Bytes of a Slurm size such as ``64G``; a plain number is in MiB (sbatch(1))."""
    if text is None:
        return None
    scale = {"K": 10, "M": 20, "G": 30, "T": 40}.get(text[-1])
    return int(text) << 20 if scale is None else int(text[:-1]) << scale


def check_disk(plan: Plan) -> Iterator[CheckFinding]:
    """Check free space where the job writes, once for each file system."""
    seen: set[int] = set()
    for place, directory in written_directories(plan):
        path = Path(directory)
        there = next((parent for parent in (path, *path.parents) if parent.is_dir()), None)
        space = read_space(path) if there is not None else None
        if there is None or space is None or there.stat().st_dev in seen:
            continue
        seen.add(there.stat().st_dev)
        share = space.available_bytes / space.size_bytes if space.size_bytes else 0.0
        message = f"{space.available_bytes / GIB:.1f} GiB ({share:.0%}) free at {there}"
        if share < LEAST_FREE_SHARE and space.available_bytes < ENOUGH_FREE_BYTES:
            yield finding.warning("disk-low", place, f"{message}; free some space, or write elsewhere")
        else:
            yield finding.ok("disk", place, message)


def check_network(planned_job: PlannedJob) -> CheckFinding:
    """Check that the model hub answers from here; nodes may be less well connected."""
    model, place, environ = planned_job.spec.model, "network", planned_job.environ
    if model is None or not planned_job.cluster.resolve_model(model.path).startswith(HUB):
        return finding.not_checked("network", place, "the job is not known to download anything")
    if environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return finding.ok("network", place, "HF_HUB_OFFLINE is set: the model must be in the cache of the nodes")
    if any(environ.get(name) for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")):
        return finding.not_checked("network", place, "a proxy is set for the connection to the hub")
    hub = urlsplit(environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = hub.port or (80 if hub.scheme == "http" else 443)
    try:
        socket.create_connection((hub.hostname or "", port), HTTP_TIMEOUT_S).close()
    except OSError as error:
        message = f"{hub.hostname} does not answer here ({error}); download the model first, and give its directory"
        return finding.warning("no-network", place, message)
    return finding.ok("network", place, f"{hub.hostname} answers here")


@dataclass(frozen=True)
class SlurmPartition:
    """One partition, as reported by sinfo(1)."""

    name: str
    default: bool
    up: bool
    time_limit_s: float | None
    nodes: int
    gpus: int  # most GPUs of any node


def _partition_limit_s(text: str) -> float | None:
    """The time limit of a partition; None if it has none, such as ``infinite``, or none that we know."""
    try:
        return parse_time_limit(text)
    except ValueError:
        return None


def parse_partitions(text: str) -> dict[str, SlurmPartition]:
    """Partitions by name, from ``%P|%a|%l|%D|%G`` lines; a partition has one line for each kind of node."""
    found: dict[str, SlurmPartition] = {}
    for line in text.splitlines():
        fields = line.strip().split("|", 4)
        if len(fields) < 5 or re.fullmatch(r"[0-9]{1,9}", fields[3]) is None:
            continue
        name, available, limit, nodes, gres = fields
        default, name = name.endswith("*"), name.rstrip("*")
        gpus = sum(int(number) for number in re.findall(r"\bgpu(?::[^:,()]+)?:([0-9]{1,9})\b", gres))
        before = found.get(name)
        found[name] = SlurmPartition(
            name,
            default,
            available == "up",
            _partition_limit_s(limit),
            int(nodes) + (before.nodes if before else 0),
            max(gpus, before.gpus if before else 0),
        )
    return found


def read_partitions() -> dict[str, SlurmPartition] | str:
    """The partitions of the cluster by name, or why they are unknown."""
    try:
        argv = ["sinfo", "--all", "--noheader", "--format=%P|%a|%l|%D|%G"]
        return parse_partitions(run_command(argv, timeout_s=SLURM_TIMEOUT_S))
    except SlurmError as error:
        return _sinfo_error_text(str(error))
    except ValueError as error:
        return f"the output of sinfo cannot be read: {error}"


def check_partition(planned_job: PlannedJob, partitions: dict[str, SlurmPartition] | str) -> Iterator[CheckFinding]:
    """Check that the partition exists, is up, and is large enough for the job."""
    place, plan = "slurm.partition", planned_job.plan
    if isinstance(partitions, str) or "clusters" in plan.slurm.directives:
        why = partitions if isinstance(partitions, str) else "the job is for another cluster"
        yield finding.not_checked("partition", place, why)
        return
    asked = plan.slurm.partition
    if asked is None:
        chosen = [partition for partition in partitions.values() if partition.default]
    else:
        chosen = [partitions[name] for name in asked.split(",") if name in partitions]
    if not chosen:
        what = f'there is no partition "{asked}"' if asked else "there is no default partition"
        fix = f"use one of {', '.join(sorted(partitions))}" if partitions else "sinfo shows no partition"
        yield finding.error("no-partition", place, f"{what}; {fix}")
    if chosen and plan.nodes > (most := max(partition.nodes for partition in chosen)):
        names = " and ".join(partition.name for partition in chosen)
        message = f"{plan.nodes} requested and {names} has {most}; ask for less, or use another partition"
        yield finding.error("too-many-nodes", "resources.nodes", message)
        return
    misfits = {partition.name: list(_misfits(plan, partition)) for partition in chosen}
    fitting = [partition for partition in chosen if not misfits[partition.name]]
    for partition in fitting:  # Slurm takes any of them
        gpus = count_text(partition.gpus, "GPU")
        message = f"{partition.name} is up, {count_text(partition.nodes, 'node')} with {gpus} each at most"
        yield finding.ok("partition", place, message)
    if not fitting:
        yield from itertools.chain.from_iterable(misfits.values())


def _sinfo_error_text(words: str) -> str:
    """Shorten an error of sinfo. If it finds no cluster, explain that instead of its search for one."""
    if finds_no_cluster(words):
        return f"sinfo {NO_CLUSTER}"
    return words if len(words) <= MOST_ERROR else f"{words[:MOST_ERROR]}..."


def _misfits(plan: Plan, partition: SlurmPartition) -> Iterator[CheckFinding]:
    if not partition.up:
        message = f"{partition.name} is not up; the job would wait until it is"
        yield finding.warning("partition-down", "slurm.partition", message)
    asked, allowed = plan.slurm.time_limit, partition.time_limit_s
    if asked and allowed is not None and parse_time_limit(asked) > allowed:
        message = (
            f"{asked} is longer than {partition.name} allows ({allowed / 3600:g} h); "
            "the job would wait forever; ask for less, or use another partition"
        )
        yield finding.warning("time-limit", "slurm.time_limit", message)
    for key, needed, available in (
        ("nodes", plan.nodes, partition.nodes),
        ("gpus_per_node", plan.gpus_per_node, partition.gpus),
    ):
        if needed > available:
            message = f"{needed} requested and {partition.name} has {available}; ask for less, or use another partition"
            yield finding.warning("too-large", f"resources.{key}", message)


# -- monitoring ----------------------------------------------------------------------------------


def check_endpoints(planned_job: PlannedJob) -> Iterator[CheckFinding]:
    """Check that the site's Prometheus and Alertmanager are ready."""
    yield _endpoint("prometheus_url", planned_job.cluster.prometheus_url, "Prometheus")
    yield _endpoint("alertmanager_url", planned_job.cluster.alertmanager_url, "Alertmanager")


def _endpoint(key: str, url: str | None, name: str) -> CheckFinding:
    import requests  # lazy: 30 ms, and few sites name a server

    if url is None:
        return finding.not_checked(key, key, f"the cluster file names no {name}")
    parts = urlsplit(url)
    shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")  # hide a password
    try:
        with requests.Session() as session:
            session.trust_env = False  # a user's proxy does not reach servers of the cluster
            answer = session.get(f"{url.rstrip('/')}/-/ready", timeout=HTTP_TIMEOUT_S)
    except (requests.RequestException, ValueError) as error:
        why = "no answer in time" if isinstance(error, requests.Timeout) else "no connection"
        message = f"{shown} does not answer ({why}); is {name} running, and is the address right?"
        return finding.warning("unreachable", key, message)
    if not answer.ok:
        message = f"{shown} answers with {answer.status_code}; is this {name}, and is it ready?"
        return finding.warning("unreachable", key, message)
    return finding.ok(key, key, f"{shown} is ready")
