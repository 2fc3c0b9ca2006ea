"""The exit reason that follows from the evidence."""

import signal
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.workers.exit_reason import (
    CONSEQUENCES,
    DISK_FULL_BYTES,
    REASONS,
    ExitEvidence,
    FailedPeer,
    GpuFault,
    JobStop,
    LogEvidence,
    LostGpu,
    awaits_oom_victim,
    evidence_from_record,
    find_exit_reason,
    first_failure,
    needs_log_evidence,
    parse_job_stop,
    signal_name,
)

TERM, KILL, SEGV, ABRT, HUP, USR1, XCPU = (
    int(getattr(signal, f"SIG{name}")) for name in ("TERM", "KILL", "SEGV", "ABRT", "HUP", "USR1", "XCPU")
)
VICTIM = FailedPeer("worker_w3", 102.0, "host_oom", 0)  # ends last: its memory is freed first
PEER = JobStop("terminated_peer", "worker_w1 rank 1 on node02 ended by app_error", 100.0, 1, 0)
FELL_OFF = GpuFault(99.0, 79, "Xid 79 on the GPU at 0000:3b:00, process 7")
ADDRESS = GpuFault(99.0, 31, "Xid 31 on GPU 3, process 7")
LINK = GpuFault(100.0, 74, "Xid 74 on GPU 0 (GPU-a): NVLink error")
FIRMWARE = GpuFault(100.0, 119, "Xid 119 on GPU 0 (GPU-a): its firmware (GSP) does not answer")
LOST = LostGpu(100.0, "GPU 0 (GPU-a)", "GPU is lost")
WATCHDOG = "Watchdog caught collective operation timeout: ran for 600000 milliseconds"
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
ILLEGAL = "RuntimeError: CUDA error: an illegal memory access was encountered"
XID = "[12.3] NVRM: Xid (PCI:0000:3b:00): {}, pid=4242, name=python3"
OVER = JobStop("completed", "the benchmark has completed", 100.0)
UNNAMED = JobStop("node_failure", "Slurm: a node has failed", 100.0)
NODE = JobStop("terminated_peer", "Slurm: node n1 has failed", 100.0, nodes=("n1",))
LIMIT = JobStop("time_limit", "SIGTERM at the time limit", 100.0)

CASES = {
    "completed": {
        "exit 0": ExitEvidence(code=0),
        "exit 0 whatever else happened": ExitEvidence(
            code=0, oom_kills=3, log=LogEvidence(("cuda_oom",)), forwarded=(TERM,), stop=PEER, end=101.0
        ),
        "exit 0 on a full disk": ExitEvidence(code=0, disk_available_bytes=0),
        "a service that ends after SIGTERM during the teardown": ExitEvidence(
            code=0, end=101.0, service=True, forwarded=(TERM,), stop=PEER
        ),
        "a service at the end of the job": ExitEvidence(
            signal=TERM, end=101.0, service=True, forwarded=(TERM,), stop=OVER
        ),
        "a service that is killed at the end of the job": ExitEvidence(end=101.0, service=True, stop=OVER),
        "an error of the program on a device, and exit 0": ExitEvidence(code=0, end=100.0, gpu_faults=(ADDRESS,)),
        "a device that was lost, and exit 0": ExitEvidence(code=0, end=104.0, gpu_lost=(LOST,)),
        "exit 0 that the kernel reports": ExitEvidence(code=0, source="kernel", attached=True),
    },
    "app_error": {
        "exit 3": ExitEvidence(code=3),
        "exit 1 with a warning in the log": ExitEvidence(code=1, log=LogEvidence(("python_traceback", "connection"))),
        **{f"exit {code}": ExitEvidence(code=code) for code in (128, 149, 150, 160, 178, 191, 255)},
        "a warning before the time limit that it survived": ExitEvidence(code=3, forwarded=(USR1,)),
        "SIGHUP that it survived": ExitEvidence(code=3, forwarded=(HUP,)),
        "a warning before the time limit that it did not handle": ExitEvidence(
            signal=USR1, forwarded=(USR1,), end=880.0, job_end=1000.0
        ),
        "a warning that its shell did not handle": ExitEvidence(
            code=128 + USR1, forwarded=(USR1,), end=880.0, job_end=1000.0
        ),
        "a kill in the control group, and an error of its own": ExitEvidence(
            code=1, oom_kills=1, log=LogEvidence((), "ValueError: bad shard")
        ),
        "disk with room": ExitEvidence(code=1, disk_available_bytes=DISK_FULL_BYTES),
        "a service that ends by itself": ExitEvidence(code=0, end=50.0, service=True),
        "a service that ends by itself while the job is being stopped": ExitEvidence(
            code=0, end=101.0, service=True, stop=PEER
        ),
        "a service that ends by itself after a warning": ExitEvidence(
            code=0, end=50.0, service=True, forwarded=(USR1,)
        ),
        "a device that fell off the bus an hour before": ExitEvidence(
            code=1, end=100.0 + 3600.0, gpu_faults=(FELL_OFF,), log=LogEvidence((), "ValueError: bad shard")
        ),
        "a link that failed, and another error in the log": ExitEvidence(
            code=1, end=155.0, log=LogEvidence((), "KeyError: 'input_ids'"), gpu_faults=(LINK,)
        ),
        "a link that failed ten minutes before": ExitEvidence(code=1, end=705.0, gpu_faults=(LINK,)),
        "an error of the program on a device long before": ExitEvidence(code=1, end=99.0 + 61.0, gpu_faults=(ADDRESS,)),
        "work that the driver removed": ExitEvidence(
            code=1, end=100.0, gpu_faults=(GpuFault(99.0, 45, "Xid 45"), GpuFault(99.0, 43, "Xid 43"))
        ),
        "an error of a copy engine": ExitEvidence(code=1, end=100.0, gpu_faults=(GpuFault(99.0, 39, "Xid 39"),)),
        "an unknown error of a device": ExitEvidence(code=1, end=100.0, gpu_faults=(GpuFault(99.0, 999, "Xid 999"),)),
        "a row of memory that was remapped": ExitEvidence(
            code=1, end=100.0, gpu_faults=(GpuFault(99.0, 63, "Xid 63"),)
        ),
        "a device that was lost later": ExitEvidence(code=1, end=89.0, gpu_lost=(LOST,)),
        "a device that was lost ten minutes before": ExitEvidence(
            code=1, end=705.0, log=LogEvidence((), "ValueError: bad shard"), gpu_lost=(LOST,)
        ),
        "an error of the program, as the driver says in the log": ExitEvidence(
            code=1, log=LogEvidence(("gpu_xid",), XID.format(31))
        ),
        "a driver message before another error": ExitEvidence(
            code=1, log=LogEvidence(("gpu_xid",), "ValueError: bad shard")
        ),
        "a driver message in a log without an error": ExitEvidence(code=1, log=LogEvidence(("gpu_xid",))),
        "no driver for the device": ExitEvidence(
            code=1, log=LogEvidence(("gpu_driver",), "Failed to initialize NVML: Driver/library version mismatch")
        ),
        "a lost connection and no peer had failed": ExitEvidence(code=1, end=100.0, log=LogEvidence(("peer_lost",))),
        "a lost connection before the peer failed": ExitEvidence(
            code=1, end=100.0, log=LogEvidence(("peer_lost",)), peer=FailedPeer("worker_w3", 101.0, "app_error")
        ),
        "a lost connection long before the job was stopped for another worker": ExitEvidence(
            code=1, end=94.0, log=LogEvidence(("peer_lost",)), stop=PEER, follows_stop=True
        ),
        "a lost connection before a stop that names no worker": ExitEvidence(
            code=1, end=99.0, log=LogEvidence(("peer_lost",)), stop=NODE, follows_stop=True
        ),
        "another error before the job was stopped for another worker": ExitEvidence(
            code=1, end=99.0, log=LogEvidence((), "ValueError: bad shard"), stop=PEER, follows_stop=True
        ),
        "exit 3 on its own during the teardown": ExitEvidence(code=3, end=101.0, stop=PEER),
        "exit 3 before the notice": ExitEvidence(code=3, end=99.9, stop=PEER),
    },
    "cuda_oom": {
        "host and device out of memory": ExitEvidence(code=1, oom_kills=1, log=LogEvidence(("cuda_oom",))),
        "device out of memory": ExitEvidence(code=1, log=LogEvidence(("cuda_oom", "python_traceback"))),
        "device out of memory before the timeout it led to": ExitEvidence(
            code=1, log=LogEvidence(("nccl_timeout", "cuda_oom"))
        ),
        "device out of memory, lost connections of its other processes, and a stop for another worker": ExitEvidence(
            code=1, end=99.0, log=LogEvidence(("cuda_oom", "peer_lost")), stop=PEER, follows_stop=True
        ),
        "firmware that does not answer, and no memory left on the device ten minutes later": ExitEvidence(
            code=1, end=705.0, log=LogEvidence(("cuda_oom",)), gpu_faults=(FIRMWARE,)
        ),
        "a link that failed, and no memory left on the device": ExitEvidence(
            code=1, end=155.0, log=LogEvidence(("cuda_oom",)), gpu_faults=(LINK,)
        ),
        "an error of the program on a device that had no memory left": ExitEvidence(
            code=1, end=100.0, log=LogEvidence(("cuda_oom",)), gpu_faults=(ADDRESS,)
        ),
    },
    "host_oom": {
        "SIGKILL and a kill by the kernel": ExitEvidence(signal=KILL, oom_kills=1),
        "137 and a kill by the kernel": ExitEvidence(code=137, oom_kills=2),
        "a child killed by the kernel": ExitEvidence(code=1, oom_kills=1),
        "a loader that was killed, as the log says": ExitEvidence(
            code=1, oom_kills=1, log=LogEvidence(("loader_killed",), "RuntimeError: DataLoader worker (pid 7)")
        ),
        "SIGKILL and the kernel log names it": ExitEvidence(
            signal=KILL, oom_kills=0, oom_victim="its process 7 was killed for lack of memory"
        ),
        "a kill by the kernel just before the notice": ExitEvidence(signal=KILL, oom_kills=1, end=99.9, stop=PEER),
        "a loader that was killed, as another worker of the control group": ExitEvidence(
            code=1, oom_kills=2, end=100.0, log=LogEvidence(("loader_killed",), "DataLoader"), oom_peers=(VICTIM,)
        ),
        "SIGKILL, as another worker of the control group": ExitEvidence(
            signal=KILL, oom_kills=1, end=100.0, oom_peers=(VICTIM,)
        ),
        "a notice of Slurm in the log": ExitEvidence(code=1, log=LogEvidence(("host_oom",), "oom_kill event")),
    },
    "gpu_fault": {
        "a device that fell off the bus": ExitEvidence(code=1, end=100.0, gpu_faults=(FELL_OFF,)),
        "a device that fell off the bus an hour before, and a log without an error": ExitEvidence(
            code=1, end=100.0 + 3600.0, gpu_faults=(FELL_OFF,)
        ),
        "firmware that does not answer, and a collective that timed out ten minutes later": ExitEvidence(
            signal=ABRT, end=705.0, log=LogEvidence(("nccl_timeout",), WATCHDOG), gpu_faults=(FIRMWARE,)
        ),
        "firmware that does not answer, and SIGKILL from nowhere": ExitEvidence(
            signal=KILL, end=705.0, log=LogEvidence((), "ValueError: bad shard"), gpu_faults=(FIRMWARE,)
        ),
        "firmware that does not answer, and no record": ExitEvidence(end=705.0, gpu_faults=(FIRMWARE,)),
        "a link that failed, and nothing else": ExitEvidence(code=1, end=155.0, gpu_faults=(LINK,)),
        "a link that failed, and SIGABRT": ExitEvidence(signal=ABRT, end=155.0, gpu_faults=(LINK,)),
        "a memory error of the device, and no memory left on it": ExitEvidence(
            code=1, end=155.0, log=LogEvidence(("cuda_oom",)), gpu_faults=(GpuFault(100.0, 48, "Xid 48"),)
        ),
        "an error of the program on a device": ExitEvidence(code=1, end=100.0, gpu_faults=(ADDRESS,)),
        "an error of the program on a device, upon which it aborted": ExitEvidence(
            signal=ABRT, end=100.0, gpu_faults=(ADDRESS,)
        ),
        "an error of the program on a device, just after its end": ExitEvidence(
            code=1, end=98.0, gpu_faults=(ADDRESS,)
        ),
        "an error of the program on a device that then fell off the bus": ExitEvidence(
            code=1, end=100.0, log=LogEvidence(("cuda_oom",)), gpu_faults=(ADDRESS, FELL_OFF)
        ),
        "a memory error within one program": ExitEvidence(
            code=1, end=100.0, gpu_faults=(GpuFault(99.0, 94, "Xid 94"),)
        ),
        "a device that was lost, and no Xid": ExitEvidence(code=124, end=104.0, gpu_lost=(LOST,)),
        "a device that was lost, and the error of the program about it": ExitEvidence(
            code=1, end=160.0, log=LogEvidence((), ILLEGAL), gpu_lost=(LOST,)
        ),
        "a device that was found lost just after the end": ExitEvidence(signal=ABRT, end=98.0, gpu_lost=(LOST,)),
        "a device that was lost, and a collective that timed out ten minutes later": ExitEvidence(
            signal=ABRT, end=705.0, log=LogEvidence(("nccl_timeout",), WATCHDOG), gpu_lost=(LOST,)
        ),
        "a device that has lost memory, as the log says": ExitEvidence(
            code=1, log=LogEvidence(("cuda_error", "gpu_xid"), ECC)
        ),
        "a device that fell off the bus, as the driver says in the log": ExitEvidence(
            signal=ABRT, log=LogEvidence(("gpu_xid", "nccl_timeout"), XID.format(79))
        ),
    },
    "nccl_timeout": {
        "SIGABRT after a collective timed out": ExitEvidence(signal=ABRT, log=LogEvidence(("nccl_timeout",))),
        "firmware that did not answer after the end, and a collective that timed out": ExitEvidence(
            signal=ABRT, end=89.0, log=LogEvidence(("nccl_timeout",), WATCHDOG), gpu_faults=(FIRMWARE,)
        ),
        "a link that failed, and a collective that timed out ten minutes later": ExitEvidence(
            signal=ABRT, end=705.0, log=LogEvidence(("nccl_timeout",), WATCHDOG), gpu_faults=(LINK,)
        ),
        "an error of the program on a device, and a collective that timed out": ExitEvidence(
            signal=ABRT, end=100.0, log=LogEvidence(("nccl_timeout",)), gpu_faults=(ADDRESS,)
        ),
    },
    "disk_full": {
        "disk full in the log": ExitEvidence(code=1, log=LogEvidence(("disk_full",))),
        "disk full and nothing in the log": ExitEvidence(code=1, disk_available_bytes=DISK_FULL_BYTES - 1),
        "an error of the program on a full disk": ExitEvidence(
            code=1, end=100.0, disk_available_bytes=0, gpu_faults=(ADDRESS,)
        ),
    },
    "resource_limit": {
        "SIGXCPU": ExitEvidence(signal=XCPU),
        "SIGXFSZ that a shell reports as 153": ExitEvidence(code=153),
        "a file that is too large, as the log says": ExitEvidence(code=1, log=LogEvidence(("resource_limit",))),
    },
    "crashed_signal": {
        "SIGSEGV": ExitEvidence(signal=SEGV),
        "SIGSEGV that a shell reports as 139": ExitEvidence(code=139),
        "SIGABRT": ExitEvidence(signal=ABRT),
    },
    "terminated_peer": {
        "SIGTERM after the notice": ExitEvidence(signal=TERM, forwarded=(TERM,), end=101.0, stop=PEER),
        "SIGTERM after the notice, answered by exit 1": ExitEvidence(code=1, forwarded=(TERM,), end=101.0, stop=PEER),
        "no record after the notice": ExitEvidence(end=101.0, stop=PEER),
        "a helper at the end of the job": ExitEvidence(signal=TERM, end=101.0, forwarded=(TERM,), stop=OVER),
        "a worker of a job that was not ready in time": ExitEvidence(
            signal=TERM, end=101.0, forwarded=(TERM,), stop=JobStop("launch_failed", "not ready after 9 s", 100.0)
        ),
        "SIGTERM when an unnamed node has failed": ExitEvidence(
            signal=TERM, forwarded=(TERM,), end=101.0, stop=UNNAMED
        ),
        "SIGTERM on another node than the one that failed": ExitEvidence(
            signal=TERM, forwarded=(TERM,), end=101.0, stop=NODE, node="n2"
        ),
        "a device that was lost, and a notice that the job ends": ExitEvidence(
            signal=TERM, forwarded=(TERM,), end=101.0, stop=PEER, gpu_lost=(LOST,)
        ),
        "a lost connection after a peer had failed": ExitEvidence(
            code=1, end=100.0, log=LogEvidence(("peer_lost",)), peer=FailedPeer("worker_w3", 99.0, "crashed_signal")
        ),
        "a lost connection before the job was stopped for another worker": ExitEvidence(
            code=1, end=99.0, log=LogEvidence(("peer_lost",)), stop=PEER, follows_stop=True
        ),
        "a lost connection and a timeout before the job was stopped for another worker": ExitEvidence(
            code=1, end=99.0, log=LogEvidence(("peer_lost", "nccl_timeout")), stop=PEER, follows_stop=True
        ),
        "no word of its own, and another worker of the control group was killed": ExitEvidence(
            code=1, oom_kills=2, end=100.0, oom_peers=(VICTIM,)
        ),
        "a lost connection to a worker of the control group that was killed": ExitEvidence(
            code=1, oom_kills=1, end=100.0, log=LogEvidence(("peer_lost",), "Connection reset"), oom_peers=(VICTIM,)
        ),
        "SIGTERM from nowhere after a peer had failed": ExitEvidence(
            signal=TERM, source="kernel", attached=True, end=100.0, peer=FailedPeer("worker_w3", 99.0, "app_error")
        ),
        "a wrapper that was killed during the teardown": ExitEvidence(
            signal=KILL, source="kernel", end=101.0, wrapper="was killed by SIGKILL", stop=PEER
        ),
    },
    "time_limit": {
        "SIGTERM from outside at the time limit": ExitEvidence(
            signal=TERM, forwarded=(TERM,), end=995.0, job_end=1000.0
        ),
        "SIGTERM at the end of the time": ExitEvidence(signal=TERM, forwarded=(TERM,), end=101.0, stop=LIMIT),
        "a service that ends after SIGTERM at the time limit": ExitEvidence(
            code=0, end=50.0, service=True, forwarded=(TERM,), job_end=40.0
        ),
        "an attached job at its time limit": ExitEvidence(
            signal=KILL, source="kernel", attached=True, end=995.0, job_end=1000.0
        ),
    },
    "preempted": {
        "SIGTERM at a preemption": ExitEvidence(
            signal=TERM, forwarded=(18, TERM), end=101.0, stop=JobStop("preempted", "Slurm: preempted", 100.0)
        )
    },
    "cancelled": {
        "SIGTERM of a job that is cancelled": ExitEvidence(
            signal=TERM, forwarded=(TERM,), end=101.0, stop=JobStop("cancelled", "because", 100.0)
        ),
        "SIGTERM an hour before the notice": ExitEvidence(
            signal=TERM, forwarded=(TERM,), end=PEER.time - 3600, stop=PEER
        ),
        "a signal long after a limit that was extended": ExitEvidence(
            signal=TERM, forwarded=(TERM,), end=36000.0, job_end=3600.0
        ),
        "SIGTERM from outside": ExitEvidence(signal=TERM, forwarded=(TERM,), end=50.0),
        "SIGTERM from outside long before it": ExitEvidence(signal=TERM, forwarded=(TERM,), end=500.0, job_end=1000.0),
        "a service that ends after SIGTERM from outside": ExitEvidence(
            code=0, end=50.0, service=True, forwarded=(USR1, TERM)
        ),
        "firmware that does not answer, and SIGTERM from outside ten minutes later": ExitEvidence(
            signal=TERM, forwarded=(TERM,), end=705.0, gpu_faults=(FIRMWARE,)
        ),
        "SIGXCPU as a warning of Slurm": ExitEvidence(signal=XCPU, forwarded=(XCPU,), end=50.0),
        "a link that failed, and SIGTERM from outside": ExitEvidence(
            signal=TERM, forwarded=(TERM,), end=155.0, gpu_faults=(LINK,)
        ),
        "an error of the program on a device, and SIGTERM from outside": ExitEvidence(
            signal=TERM, forwarded=(TERM,), end=100.0, gpu_faults=(ADDRESS,)
        ),
    },
    "node_failure": {
        "no record when an unnamed node has failed": ExitEvidence(end=101.0, source="srun", stop=UNNAMED),
        "no record from a node that has failed": ExitEvidence(end=101.0, stop=NODE, node="n1"),
        "SIGTERM on the node that failed": ExitEvidence(
            signal=TERM, forwarded=(TERM,), end=101.0, stop=NODE, node="n1"
        ),
    },
    "launch_failed": {
        "a command that does not exist": ExitEvidence(code=127, error="cannot start 'x': No such file or directory"),
        "a command that could not start during the teardown": ExitEvidence(
            code=126, error="cannot start 'x': Permission denied", end=101.0, stop=PEER
        ),
    },
    "killed_unknown": {
        "SIGKILL without evidence": ExitEvidence(signal=KILL),
        "SIGKILL that a shell reports as 137": ExitEvidence(code=137),
        "SIGKILL and no kill by the kernel": ExitEvidence(signal=KILL, oom_kills=0),
        "a count that fell": ExitEvidence(signal=KILL, oom_kills=-2),
        "no record at all": ExitEvidence(),
        "SIGTERM from nowhere": ExitEvidence(signal=TERM),
        "SIGKILL on a full disk": ExitEvidence(signal=KILL, disk_available_bytes=0),
        "firmware that does not answer, and an attached job with unknown status": ExitEvidence(
            end=705.0, attached=True, source="kernel", gpu_faults=(FIRMWARE,)
        ),
        "firmware that does not answer, and a wrapper that was killed": ExitEvidence(
            signal=KILL, source="kernel", end=705.0, wrapper="was killed by SIGKILL", gpu_faults=(FIRMWARE,)
        ),
        "an error of the program on a device, and SIGKILL from nowhere": ExitEvidence(
            signal=KILL, end=100.0, gpu_faults=(ADDRESS,)
        ),
        "SIGKILL from nowhere after a peer had failed": ExitEvidence(
            signal=KILL, end=100.0, peer=FailedPeer("worker_w3", 99.0, "app_error")
        ),
        "a wrapper that was killed": ExitEvidence(
            signal=KILL, source="kernel", end=100.0, wrapper="was killed by SIGKILL"
        ),
        "SIGKILL just before the notice": ExitEvidence(signal=KILL, end=99.9, stop=PEER),
    },
}  # by reason
EVIDENCE_AND_REASON = [
    pytest.param(evidence, reason, id=name) for reason, cases in CASES.items() for name, evidence in cases.items()
]


@pytest.mark.parametrize(("evidence", "reason"), EVIDENCE_AND_REASON)
def test_evidence_gives_its_reason(evidence: ExitEvidence, reason: str) -> None:
    assert find_exit_reason(evidence).reason == reason


@pytest.mark.parametrize(
    ("evidence", "waits"),
    [
        (ExitEvidence(code=1, oom_kills=1), True),
        (ExitEvidence(code=1, oom_kills=1, log=LogEvidence(("peer_lost",), "Connection reset by peer")), True),
        (ExitEvidence(code=1, log=LogEvidence(("peer_lost",), "Connection reset by peer")), False),
        (ExitEvidence(code=1, oom_kills=1, log=LogEvidence(("cuda_oom",), "CUDA out of memory")), False),
        (ExitEvidence(code=1, oom_kills=1, log=LogEvidence(("loader_killed",), "DataLoader worker")), False),
        (ExitEvidence(code=1, oom_kills=1, end=100.0, oom_peers=(VICTIM,)), False),
        (ExitEvidence(code=137, oom_kills=1), False),
        (ExitEvidence(signal=KILL, oom_kills=1), False),
        (ExitEvidence(code=0, oom_kills=1), False),
        (ExitEvidence(code=1), False),
    ],
)
def test_only_an_end_that_a_peer_may_explain_waits_for_the_victim(evidence: ExitEvidence, waits: bool) -> None:
    assert awaits_oom_victim(evidence) is waits


def test_every_reason_is_reached_by_a_case() -> None:
    assert tuple(CASES) == REASONS


NUMBERS = st.none() | st.integers(1, 64)
EVIDENCE = st.builds(
    ExitEvidence,
    code=st.none() | st.integers(0, 255),
    signal=NUMBERS,
    end=st.none() | st.floats(0, 1e9),
    error=st.none() | st.just("cannot start"),
    oom_kills=st.none() | st.integers(0, 5),
    forwarded=st.lists(st.integers(1, 64), max_size=3).map(tuple),
    log=st.builds(
        LogEvidence,
        st.lists(st.sampled_from(["cuda_oom", "nccl_timeout", "peer_lost", "x"]), max_size=2).map(tuple),
        st.none() | st.just("RuntimeError: x"),
        st.none() | st.just("node_worker.err"),
    ),
    core=st.booleans(),
    source=st.sampled_from(["wrapper", "kernel"]),
    attached=st.booleans(),
    oom_victim=st.none() | st.just("its process 7 was killed"),
    wrapper=st.none() | st.just("was killed by SIGKILL"),
    gpu_faults=st.lists(st.builds(GpuFault, st.floats(0, 1e9), st.integers(1, 200), st.just("Xid")), max_size=2).map(
        tuple
    ),
    gpu_lost=st.lists(st.builds(LostGpu, st.floats(0, 1e9), st.just("GPU 0"), st.just("")), max_size=2).map(tuple),
    node=st.sampled_from(["n1", "n2"]),
    peer=st.none() | st.builds(FailedPeer, st.just("worker_w9"), st.floats(0, 1e9), st.just("app_error")),
    survivors=st.integers(0, 3),
    disk_available_bytes=st.none() | st.integers(0, 2**40),
    stop=st.none() | st.sampled_from([PEER, LIMIT, NODE]),
    job_end=st.none() | st.floats(0, 1e9),
)


@given(EVIDENCE)
def test_all_evidence_gives_a_reason_with_an_explanation(evidence: ExitEvidence) -> None:
    result = find_exit_reason(evidence)
    assert result.reason in REASONS
    assert result.evidence
    assert all(result.evidence)
    if evidence.code == 0 and not evidence.error:
        assert result.reason == "completed"


@pytest.mark.parametrize(("evidence", "_reason"), EVIDENCE_AND_REASON)
@pytest.mark.parametrize(
    "log", [LogEvidence(("cuda_oom",), "CUDA out of memory"), LogEvidence(("peer_lost",), "reset")]
)
def test_a_reason_that_needs_no_log_ignores_the_log(evidence: ExitEvidence, _reason: str, log: LogEvidence) -> None:
    if not needs_log_evidence(evidence):
        assert find_exit_reason(replace(evidence, log=log)) == find_exit_reason(replace(evidence, log=LogEvidence()))


@pytest.mark.parametrize(
    ("evidence", "needs"),
    [
        (ExitEvidence(code=0), False),
        (ExitEvidence(code=127, error="cannot start 'x'"), False),
        (ExitEvidence(signal=TERM, forwarded=(TERM,), end=101.0, stop=PEER), False),
        (ExitEvidence(end=101.0, stop=PEER), False),
        (ExitEvidence(code=1, end=101.0, stop=PEER), True),
        (ExitEvidence(signal=TERM, forwarded=(TERM,), end=101.0), True),
        (ExitEvidence(code=0, service=True), True),
        (ExitEvidence(code=3), True),
    ],
)
def test_logs_are_needed_only_for_unexpected_ends(evidence: ExitEvidence, needs: bool) -> None:
    assert needs_log_evidence(evidence) is needs


@pytest.mark.parametrize(
    ("evidence", "texts"),
    [
        (ExitEvidence(code=3), ("exit status 3",)),
        (ExitEvidence(signal=KILL), ("killed by SIGKILL", "sender unknown")),
        (ExitEvidence(), ("exit status unknown", "no exit record was left")),
        (ExitEvidence(signal=KILL, oom_kills=2), ("killed by SIGKILL", "oom_kill rose by 2 in the worker's cgroup")),
        (ExitEvidence(code=1, log=LogEvidence(("cuda_oom",))), ("exit status 1", "its log says cuda_oom")),
        (
            ExitEvidence(code=1, log=LogEvidence(("gpu_xid",), ECC, "train.py:7, in w.err")),
            ("exit status 1", f"the last error in its log: {ECC} (train.py:7, in w.err)"),
        ),
        (
            ExitEvidence(code=1, log=LogEvidence((), "ValueError: bad shard", "train.py:12, in node_worker_w0.err")),
            ("exit status 1", "the last error in its log: ValueError: bad shard (train.py:12, in node_worker_w0.err)"),
        ),
        (ExitEvidence(signal=11, core=True), ("killed by SIGSEGV, core dumped",)),
        (ExitEvidence(signal=XCPU), ("killed by SIGXCPU", "it reached its limit of CPU time (ulimit -t)")),
        (ExitEvidence(code=139), ("exit status 139, a shell's word for SIGSEGV",)),
        (
            ExitEvidence(signal=USR1, forwarded=(USR1,), end=50.0),
            ("killed by SIGUSR1, which the program did not handle", "SIGUSR1 sent by another process"),
        ),
        (ExitEvidence(code=0, survivors=2), ("exit status 0", "it had left 2 processes in the background")),
        (
            ExitEvidence(attached=True, source="kernel"),
            ("exit status unknown", "it was not started by gpujob, so its status is unknown"),
        ),
        (
            ExitEvidence(signal=KILL, source="kernel", wrapper="was killed by SIGKILL"),
            (
                "killed by SIGKILL",
                "its wrapper was killed by SIGKILL and left no record, so the worker ended with it",
                "sender unknown",
            ),
        ),
        (
            ExitEvidence(signal=KILL, end=100.0, peer=FailedPeer("worker_w3", 98.5, "cuda_oom")),
            ("killed by SIGKILL", "worker_w3 had ended by cuda_oom 1.5 s before", "sender unknown"),
        ),
        (
            ExitEvidence(code=143, forwarded=(TERM,)),
            ("exit status 143, a shell's word for SIGTERM", "SIGTERM sent by another process"),
        ),
        (
            ExitEvidence(signal=TERM, forwarded=(TERM,), end=101.0, stop=PEER),
            ("killed by SIGTERM", "the job was being stopped: worker_w1 rank 1 on node02 ended by app_error"),
        ),
        (ExitEvidence(code=127, error="cannot start 'x'"), ("cannot start 'x'",)),
        (ExitEvidence(code=1, end=100.0, gpu_faults=(ADDRESS, FELL_OFF)), ("exit status 1", FELL_OFF.words)),
        (
            ExitEvidence(
                signal=ABRT, end=705.0, log=LogEvidence(("nccl_timeout",), WATCHDOG, "w.err"), gpu_faults=(FIRMWARE,)
            ),
            (
                "killed by SIGABRT",
                f"{FIRMWARE.words}, 605 s before its end; calls to it hang",
                f"the last error in its log: {WATCHDOG} (w.err)",
            ),
        ),
        (
            ExitEvidence(signal=KILL, end=705.0, gpu_faults=(FIRMWARE,)),
            ("killed by SIGKILL", f"{FIRMWARE.words}, 605 s before its end; calls to it hang"),
        ),
        (
            ExitEvidence(code=124, end=104.0, gpu_lost=(LOST,)),
            ("exit status 124", "GPU 0 (GPU-a) was lost 4 s before its end: GPU is lost"),
        ),
        (
            ExitEvidence(code=1, end=98.0, gpu_lost=(LOST,)),
            ("exit status 1", "GPU 0 (GPU-a) was found lost 2 s after its end: GPU is lost"),
        ),
        (ExitEvidence(code=1, gpu_lost=(LOST,)), ("exit status 1", "GPU 0 (GPU-a) was lost: GPU is lost")),
        (
            ExitEvidence(code=1, end=100.0, gpu_faults=(FELL_OFF,), gpu_lost=(LOST,)),
            ("exit status 1", FELL_OFF.words, "GPU 0 (GPU-a) was lost 0 s before its end: GPU is lost"),
        ),
        (
            ExitEvidence(code=1, end=705.0, log=LogEvidence((), "ValueError: bad shard"), gpu_lost=(LOST,)),
            (
                "exit status 1",
                "the last error in its log: ValueError: bad shard",
                "GPU 0 (GPU-a) was lost 605 s before its end: GPU is lost",
            ),
        ),
        (ExitEvidence(code=1, end=89.0, gpu_lost=(LOST,)), ("exit status 1",)),
        (
            ExitEvidence(code=1, end=100.0, gpu_faults=(ADDRESS,)),
            ("exit status 1", "Xid 31 on GPU 3, process 7: invalid address, by the program"),
        ),
        (
            ExitEvidence(signal=ABRT, end=100.0, log=LogEvidence((), ILLEGAL), gpu_faults=(ADDRESS,)),
            (
                "killed by SIGABRT",
                f"the last error in its log: {ILLEGAL}",
                "Xid 31 on GPU 3, process 7: invalid address, by the program",
            ),
        ),
        (  # asked to end before it could do so by itself
            ExitEvidence(code=1, end=101.0, oom_kills=1, oom_peers=(VICTIM,), forwarded=(TERM,), stop=PEER),
            (
                "exit status 1",
                "the job was being stopped: worker_w1 rank 1 on node02 ended by app_error",
                "the kernel had killed worker_w3 of the same control group",
            ),
        ),
    ],
)
def test_the_evidence_is_explained_as_text(evidence: ExitEvidence, texts: tuple[str, ...]) -> None:
    assert find_exit_reason(evidence).evidence == texts


def test_the_first_failure_in_time_is_the_cause() -> None:
    ends = [(30.0, "terminated_peer"), (20.0, "app_error"), (10.0, "completed"), (25.0, "cuda_oom")]
    assert first_failure(ends) == 1


@pytest.mark.parametrize("reason", sorted(CONSEQUENCES))
def test_a_consequence_is_never_the_cause(reason: str) -> None:
    assert first_failure([(1.0, reason)]) is None
    assert first_failure([(1.0, reason), (2.0, "killed_unknown")]) == 1


def test_without_ends_there_is_no_cause() -> None:
    assert first_failure([]) is None


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (15, "SIGTERM"), (64, "SIGRTMAX"), (99, "signal 99")])
def test_a_signal_has_its_name(number: int, name: str) -> None:
    assert signal_name(number) == name


@pytest.mark.parametrize(
    ("state", "stop"),
    [
        ({}, None),
        ({"stop": None}, None),
        ({"stop": "now"}, None),
        ({"stop": {"reason": "cancelled"}}, None),
        ({"stop": {"reason": "cancelled", "cause": "c", "time": None}}, None),
        ({"stop": {"reason": "cancelled", "cause": "c", "time": "later"}}, None),
        ({"stop": {"reason": "cancelled", "cause": "c", "time": 5}}, JobStop("cancelled", "c", 5.0, None, 0)),
        (
            {"stop": {"reason": "terminated_peer", "cause": "c", "time": 5, "rank": 3, "restart": 1}},
            JobStop("terminated_peer", "c", 5.0, 3, 1),
        ),
    ],
)
def test_an_incomplete_stop_notice_is_ignored(state: dict[str, Any], stop: JobStop | None) -> None:
    assert parse_job_stop(state) == stop


def test_a_stop_notice_with_an_unknown_reason_is_ignored() -> None:
    assert parse_job_stop({"stop": {"reason": "lunch", "cause": "c", "time": 5}}) is None


def test_an_exit_record_gives_its_evidence() -> None:
    record = {
        "code": None,
        "signal": 15,
        "end": 50.0,
        "oom_kills": 0,
        "signals": [[49.0, 15, 1], [49.5, 28, 0]],
        "disk_available_bytes": 9,
    }
    assert evidence_from_record(record, PEER) == ExitEvidence(
        signal=15, end=50.0, oom_kills=0, forwarded=(15, 28), disk_available_bytes=9, stop=PEER
    )
    assert evidence_from_record({}) == ExitEvidence()


def test_a_signal_hours_before_the_end_is_not_evidence() -> None:
    record = {"code": 1, "end": 36000.0, "signals": [[100.0, 15, 1], [35990.0, 10, 1]]}
    assert evidence_from_record(record).forwarded == (10,)
    assert evidence_from_record(record, JobStop("preempted", "Slurm: preempted", 90.0)).forwarded == (15, 10)
