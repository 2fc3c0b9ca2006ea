"""Preflight checks of the machine, the cluster and the servers of the site."""

import dataclasses
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from exporter.files.disks.space_reader import SpaceFacts
from exporter.gpus import inventory_reader
from exporter.gpus.inventory_reader import GpuInventory, InventoryGpu, read_gpu_inventory
from exporter.machine.mounts import MountPoint
from launcher.check import python_modules, site_facts
from launcher.check.site_facts import (
    GIB,
    check_disk,
    check_driver,
    check_endpoints,
    check_gpu_memory,
    check_installation,
    check_interpreter,
    check_memory,
    check_network,
    check_packages,
    check_partition,
    memory_bytes,
    parse_partitions,
    read_partitions,
)
from tests.launcher.check.planned_jobs import planned_job, summaries
from tests.support.fake_slurm import BIN, FakeSlurm
from tests.support.launcher import plan_of


def gpu(index: int, free_gib: int) -> InventoryGpu:
    return InventoryGpu(index, "H200", free_gib * GIB, 141 * GIB, f"GPU-{'abcd'[index]}")


TWO_GPUS = GpuInventory("550.54.15", (12, 4), (gpu(0, 140), gpu(1, 20)))
PYTHON: dict[str, Any] = {"workers": [{"command": [sys.executable, "-c", "pass"]}]}


# -- environment ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "environ", "status", "expected"),
    [
        ("python3 x.py", {"PATH": "/usr/bin:/bin"}, "warning", 'and "python3" is /usr/bin/python3; '),
        ("python3 x.py", {"PATH": "/nowhere"}, "warning", '"python3" is not found here'),
        ("python3 x.py", {"VIRTUAL_ENV": "/venv"}, "ok", "/venv is active"),
        ("python3.11 x.py", {"CONDA_PREFIX": "/conda/a"}, "ok", "/conda/a is active"),
        ("/venv/bin/python x.py", {}, "ok", "/venv/bin/python is given by its path"),
        ("torchrun x.py", {}, "not checked", '"torchrun" is not Python'),
    ],
)
def test_python_should_belong_to_an_environment(
    command: str, environ: dict[str, str], status: str, expected: str, tmp_path: Path
) -> None:
    (item,) = check_interpreter(planned_job(tmp_path, environ=environ, workers=[{"command": command}]))
    assert item.status == status
    assert expected in item.message


def test_an_interpreter_in_a_virtual_environment_needs_no_active_one(tmp_path: Path) -> None:
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python3").symlink_to(sys.executable)
    (tmp_path / "alone/bin").mkdir(parents=True)
    (tmp_path / "alone/bin/python3").symlink_to(sys.executable)
    (tmp_path / "venv/pyvenv.cfg").write_text("home = /usr\n")
    roles = [{"role": role, "command": "python3 x.py"} for role in ("a", "b")]
    for name, expected in (
        ("venv", [("interpreter", "ok", f"workers ({role}).command") for role in ("a", "b")]),
        ("alone", [("no-environment", "warning", "workers (a).command")]),
    ):
        job = planned_job(tmp_path, environ={"PATH": str(tmp_path / name / "bin")}, workers=roles)
        assert summaries(check_interpreter(job)) == expected


@pytest.mark.parametrize(("local", "status"), [(True, "error"), (False, "warning")])
def test_modules_that_the_interpreter_does_not_find_are_reported(local: bool, status: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('it must not be run')")
    names = ["json", "no_such_module", "os.path", "json.no_such_module", "no_such.module"]
    job = planned_job(tmp_path, local=local, environment={"packages": names}, **PYTHON)
    item = check_packages(job)
    assert (item.code, item.status) == ("no-package", status)
    assert item.message.startswith(
        f"{sys.executable} does not find no_such_module, json.no_such_module, no_such.module;"
    )
    job = planned_job(tmp_path, environment={"packages": ["json", "mine"]}, env={"PYTHONPATH": "."}, **PYTHON)
    item = check_packages(job)
    assert (item.status, item.message) == ("ok", f"{sys.executable} finds json, mine")


def test_modules_are_not_checked_without_an_answer_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec: dict[str, Any] = {"environment": {"packages": ["json"]}}
    assert check_packages(planned_job(tmp_path, **PYTHON)).status == "not checked"
    assert check_packages(planned_job(tmp_path, **spec)).status == "not checked"
    monkeypatch.setattr(python_modules, "FIND_TIMEOUT_S", 0.2)
    for program, expected in (
        ("exec sleep 60", "did not answer in 0.2 s"),
        ("echo broken >&2; exit 3", "ended with 3: broken"),
    ):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{program}\n")
        path.chmod(0o755)
        item = check_packages(planned_job(tmp_path, workers=[{"command": "./python x.py"}], **spec))
        assert item.status == "not checked"
        assert expected in item.message


def test_the_driver_finding_has_the_supported_cuda_version() -> None:
    item = check_driver(TWO_GPUS)
    assert (item.status, item.message.partition(";")[0]) == ("ok", "driver 550.54.15 supports CUDA 12.4 and older")
    assert check_driver("NVML: not here").status == "not checked"


class FakeNvml(types.ModuleType):
    """The NVML calls that we use, for a machine with one GPU."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):  # noqa: N801 - the name in pynvml
        pass

    def __init__(self, fails: str = "") -> None:
        super().__init__("pynvml")
        self.fails = fails
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self.fails == "nvmlInit":
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlSystemGetCudaDriverVersion_v2": 12040,
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": object(),
            "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(free=1, total=2),
            "nvmlDeviceGetName": "H200",
            "nvmlDeviceGetUUID": "GPU-a",
            "nvmlSystemGetDriverVersion": "550.54.15",
        }
        if name not in answers:
            raise AttributeError(name)

        def call(*_: object) -> Any:
            if self.fails == name:
                raise (self.NVMLError_NotSupported if name == "nvmlDeviceGetMemoryInfo" else self.NVMLError)("no")
            return answers[name]

        return call


@pytest.mark.parametrize(
    ("fails", "found"),
    [
        ("", GpuInventory("550.54.15", (12, 4), (InventoryGpu(0, "H200", 1, 2, "GPU-a"),))),
        ("nvmlInit", "NVML: Driver Not Loaded"),
        ("nvmlDeviceGetCount", "NVML: no"),
        ("nvmlDeviceGetMemoryInfo", GpuInventory("550.54.15", (12, 4), (InventoryGpu(0, "H200", 0, 0, "GPU-a"),))),
    ],
)
def test_the_gpu_inventory_comes_from_the_driver(fails: str, found: object, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml(fails)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert read_gpu_inventory() == found
    assert fake.open == 0


def test_there_is_no_inventory_without_the_nvml_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert str(read_gpu_inventory()).startswith("nvidia-ml-py is not installed")
    assert "pynvml" not in vars(inventory_reader)


@pytest.mark.gpu
@pytest.mark.skipif(isinstance(read_gpu_inventory(), str), reason="needs a GPU")
def test_a_real_gpu_has_memory() -> None:
    found = read_gpu_inventory()
    assert isinstance(found, GpuInventory)
    assert all(gpu.total_bytes >= gpu.free_bytes > 0 for gpu in found.gpus)
    assert found.cuda >= (11, 0)


# -- resources -----------------------------------------------------------------------------------


def test_a_gpu_in_use_is_a_warning(tmp_path: Path) -> None:
    def check(gpus: int, inventory: GpuInventory | str = TWO_GPUS, *, local: bool = True) -> list[tuple[str, str, str]]:
        spec: dict[str, Any] = {"resources": {"gpus_per_node": gpus}, "workers": [{"command": "true", "gpus": gpus}]}
        return summaries(check_gpu_memory(planned_job(tmp_path, local=local, **spec), inventory))

    assert check(0) == []
    assert check(1) == [("gpu-memory", "ok", "GPU memory")]
    assert check(2) == [("gpu-busy", "warning", "GPU memory")]
    assert check(2, "NVML: none") == check(2, local=False) == [("gpu-memory", "not checked", "GPU memory")]


@pytest.mark.parametrize(
    ("devices", "found"),
    [
        ("2,3", "at least 128.0 GiB free on each GPU"),
        ("3,2", "at least 140.0 GiB free on each GPU"),
        ("1,0", "GPU 1 (H200) has 20.0 of 141.0 GiB free; another process uses it; `nvidia-smi` shows which"),
        ("GPU-b,GPU-a", "GPU 1 (H200) has 20.0 of 141.0 GiB free; another process uses it; `nvidia-smi` shows which"),
        ("", "at least 130.0 GiB free on each GPU"),
        ("MIG-1,MIG-2", "none of the job's GPUs is known here"),
    ],
)
def test_the_gpus_in_the_list_of_visible_devices_are_those_whose_memory_counts(
    devices: str, found: str, tmp_path: Path
) -> None:
    four = GpuInventory("550.54.15", (12, 4), (gpu(0, 130), gpu(1, 20), gpu(2, 128), gpu(3, 140)))
    environ = {"CUDA_VISIBLE_DEVICES": devices}
    spec: dict[str, Any] = {"resources": {"gpus_per_node": 4}, "workers": [{"command": "true", "gpus": 1}]}
    (item,) = check_gpu_memory(planned_job(tmp_path, environ=environ, **spec), four)
    assert item.message == found


def test_the_memory_of_a_gpu_that_a_role_names_by_its_number_counts(tmp_path: Path) -> None:
    roles = [
        {"role": role, "command": "true", "gpus": 1, "env": {"CUDA_VISIBLE_DEVICES": devices}}
        for role, devices in (("a", "0"), ("b", "1"))
    ]
    items = check_gpu_memory(planned_job(tmp_path, workers=roles, resources={"gpus_per_node": 2}), TWO_GPUS)
    assert summaries(items) == [("gpu-busy", "warning", "GPU memory")]


@pytest.mark.parametrize(
    ("text", "size"),
    [(None, None), ("512", 512 << 20), ("8K", 8 << 10), ("8M", 8 << 20), ("64G", 64 << 30), ("2T", 2 << 40)],
)
def test_memory_sizes_have_the_units_of_slurm(text: str | None, size: int | None) -> None:
    assert memory_bytes(text) == size


@pytest.mark.parametrize(
    ("asked", "nodes", "status"), [(None, 1, "ok"), ("3G", 1, "ok"), ("5G", 1, "warning"), ("3G", 2, "warning")]
)
def test_requested_memory_is_compared_with_available_memory(
    asked: str | None, nodes: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: types.SimpleNamespace(available=4 * GIB))
    resources = {"nodes": nodes, "memory_per_node": asked}
    assert check_memory(planned_job(tmp_path, resources=resources)).status == status
    assert check_memory(planned_job(tmp_path, local=False, resources=resources)).status == "not checked"


@pytest.mark.parametrize(
    ("available", "size", "status"),
    [(21 * GIB, 100 * GIB, "ok"), (19 * GIB, 100 * GIB, "warning"), (1025 * GIB, 10000 * GIB, "ok"), (0, 0, "warning")],
)
def test_a_fifth_of_a_disk_or_a_terabyte_is_enough(
    available: int, size: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_facts, "read_space", lambda _: SpaceFacts(available, size))
    job = planned_job(tmp_path, paths={"output_dir": "out"})
    assert summaries(check_disk(job.plan)) == [("disk" if status == "ok" else "disk-low", status, "logs_dir")]


SINFO = """\
batch*|up|1-00:00:00|4|(null)
batch*|up|1-00:00:00|2|gpu:a100:4(S:0-1),gpu:1g.10gb:2,shard:8
gpu|up|infinite|8|gpu:8
old|inact|30:00|1|gpu:2
strange line
"""


def test_partitions_are_read_from_sinfo() -> None:
    found = parse_partitions(SINFO)
    assert [(p.name, p.default, p.up, p.time_limit_s, p.nodes, p.gpus) for p in found.values()] == [
        ("batch", True, True, 86400.0, 6, 6),
        ("gpu", False, True, None, 8, 8),
        ("old", False, False, 1800.0, 1, 2),
    ]


def test_a_time_limit_that_cannot_be_read_is_no_limit() -> None:
    assert parse_partitions(f"gpu|up|1-00:00:00|{'9' * 5001}|gpu:8\n") == {}
    (found,) = parse_partitions("gpu|up|1-00:00:|4|gpu:8\n").values()
    assert (found.time_limit_s, found.nodes, found.gpus) == (None, 4, 8)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{BIN}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE_SLURM", str(fake.folder))
    monkeypatch.setenv("SINFO_FORMAT", "%N")
    fake.say("sinfo", "out", SINFO)
    return fake


@pytest.mark.parametrize(
    ("slurm_keys", "resources", "expected"),
    [
        ({}, {}, [("partition", "ok", "slurm.partition")]),
        ({"partition": "gpu", "time_limit": "9-00:00:00"}, {}, [("partition", "ok", "slurm.partition")]),
        ({"partition": "gup"}, {}, [("no-partition", "error", "slurm.partition")]),
        ({"partition": "old"}, {}, [("partition-down", "warning", "slurm.partition")]),
        ({"time_limit": "2-00:00:00"}, {}, [("time-limit", "warning", "slurm.time_limit")]),
        ({"partition": "gpu"}, {"nodes": 9}, [("too-many-nodes", "error", "resources.nodes")]),
        ({"partition": "gpu,old"}, {"nodes": 5}, [("partition", "ok", "slurm.partition")]),  # Slurm takes either
        ({"directives": {"clusters": "b"}}, {"nodes": 99}, [("partition", "not checked", "slurm.partition")]),
        ({}, {"gpus_per_node": 7}, [("too-large", "warning", "resources.gpus_per_node")]),
        ({"partition": "gpu,none"}, {"gpus_per_node": 8}, [("partition", "ok", "slurm.partition")]),
    ],
)
def test_a_job_is_checked_against_its_partition(
    slurm_keys: dict[str, str],
    resources: dict[str, int],
    expected: list[tuple[str, str, str]],
    slurm: FakeSlurm,
    tmp_path: Path,
) -> None:
    job = planned_job(tmp_path, local=False, slurm=slurm_keys, resources=resources)
    assert summaries(check_partition(job, read_partitions())) == expected
    (call,) = slurm.calls("sinfo")
    assert "SINFO_FORMAT" not in call["env"]


def test_a_cluster_without_a_default_partition_needs_one(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.say("sinfo", "out", "gpu|up|infinite|8|gpu:8\n")
    (item,) = check_partition(planned_job(tmp_path, local=False), read_partitions())
    assert (item.status, item.message) == ("error", "there is no default partition; use one of gpu")


NO_CLUSTER = """\
sinfo: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
sinfo: error: fetch_config: DNS SRV lookup failed
sinfo: error: _establish_config_source: failed to fetch config
sinfo: fatal: Could not establish a configuration source
"""  # printed by Slurm 22.05 and later without a slurm.conf


def test_the_partition_is_not_checked_without_an_answer_from_slurm(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = planned_job(tmp_path, local=False)
    slurm.say("sinfo", "sleep", 30)
    with monkeypatch.context() as hurried:
        hurried.setattr(site_facts, "SLURM_TIMEOUT_S", 0.3)
        assert summaries(check_partition(job, read_partitions())) == [("partition", "not checked", "slurm.partition")]
    slurm.say("sinfo", "sleep", 0)
    slurm.say("sinfo", "status", 1)
    slurm.say("sinfo", "err", "slurm_load_partitions: Unable to contact slurm controller")
    (item,) = check_partition(job, read_partitions())
    assert "Unable to contact slurm controller" in item.message
    slurm.say("sinfo", "err", "x" * 1000)
    (item,) = check_partition(job, read_partitions())
    assert item.message == f"sinfo exited with 1: {'x' * 179}..."
    slurm.say("sinfo", "err", NO_CLUSTER)
    (item,) = check_partition(job, read_partitions())
    assert item.message == (
        "sinfo finds no Slurm cluster here: no slurm.conf and no SLURM_CONF; run this where jobs are submitted"
    )
    monkeypatch.setenv("PATH", "/nowhere")
    assert summaries(check_partition(job, read_partitions())) == [("partition", "not checked", "slurm.partition")]


DISK, NFS = ("/", "ext4", "/dev/sda1"), ("/shared", "nfs4", "server:/shared")


@pytest.mark.parametrize(
    ("mounts", "package", "python", "expected"),
    [
        ([DISK, NFS], "/opt/gpujob/launcher", "/shared/python3", ("local-installation", "warning")),
        ([DISK, NFS], "/shared/gpujob/launcher", "/usr/local/bin/python3.11", ("node-python", "not checked")),
        ([DISK, NFS], "/shared/gpujob/launcher", "/shared/python3", ("installation", "ok")),
        ([DISK], "/opt/gpujob/launcher", "/usr/local/bin/python3.11", ("installation", "ok")),
    ],
)
def test_an_installation_that_only_this_machine_has_is_reported(
    mounts: list[tuple[str, str, str]], package: str, python: str, expected: tuple[str, str]
) -> None:
    """Without a remote run directory, as on one machine that plays several nodes, mounts show nothing."""
    plan = dataclasses.replace(plan_of(workdir="/shared/work"), python=python)
    item = check_installation(plan, [MountPoint(*mount) for mount in mounts], package)
    assert (item.code, item.status) == expected


# -- monitoring ----------------------------------------------------------------------------------


class Ready(BaseHTTPRequestHandler):
    """Answers like Prometheus: ``/busy`` is not ready, ``/slow`` is too late."""

    def do_GET(self) -> None:
        if self.path.startswith("/slow"):
            time.sleep(10)
        self.send_response({"/-/ready": 200, "/busy/-/ready": 503}.get(self.path, 404))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Ready) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize(
    ("url", "status", "expected"),
    [
        ("http://{server}", "ok", "http://{server} is ready"),
        ("http://{server}/", "ok", "http://{server} is ready"),
        ("http://ana:hunter2@{server}", "ok", "http://{server} is ready"),
        ("http://{server}/busy", "warning", "answers with 503; is this Prometheus, and is it ready?"),
        ("http://{server}/other", "warning", "answers with 404"),
        ("http://{server}/slow", "warning", "does not answer (no answer in time)"),
        ("http://ana:hunter2@127.0.0.1:9", "warning", "http://127.0.0.1:9 does not answer (no connection)"),
        ("http://no-such-host.invalid", "warning", "does not answer (no connection)"),
    ],
)
def test_monitoring_servers_must_be_ready(
    url: str, status: str, expected: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_facts, "HTTP_TIMEOUT_S", 0.4 if url.endswith("/slow") else 60.0)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    address = {"prometheus_url": url.format(server=server)}
    first, second = check_endpoints(planned_job(tmp_path, cluster=address))
    assert (first.status, second.status) == (status, "not checked")
    assert expected.format(server=server) in first.message
    assert "hunter2" not in first.message


@pytest.mark.parametrize(
    ("model", "environ", "expected"),
    [
        (None, {}, ("network", "not checked")),
        ("/models/x", {}, ("network", "not checked")),
        ("hf:a/b", {"HF_HUB_OFFLINE": "1"}, ("network", "ok")),
        ("hf:a/b", {"https_proxy": "http://proxy:3128"}, ("network", "not checked")),
        ("hf:a/b", {"HF_ENDPOINT": "http://127.0.0.1:{taken}"}, ("network", "ok")),
        ("mine", {"HF_ENDPOINT": "http://127.0.0.1:{taken}"}, ("network", "ok")),
        ("hf:a/b", {"HF_ENDPOINT": "http://127.0.0.1:{free}"}, ("no-network", "warning")),
    ],
)
def test_the_hub_of_a_downloaded_model_must_answer(
    model: str | None, environ: dict[str, str], expected: tuple[str, str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound but not listening, so no other process uses it
        ports = {"taken": server.getsockname()[1], "free": closed.getsockname()[1]}
        spec: dict[str, Any] = {} if model is None else {"model": {"path": model}}
        job = planned_job(
            tmp_path,
            cluster={"models": {"mine": "hf:a/b"}},
            environ={name: value.format(**ports) for name, value in environ.items()},
            **spec,
        )
        item = check_network(job)
    assert (item.code, item.status) == expected
