"""Whatever is in foreign data, a parser returns, or raises the error that it declares, within a second.

Few examples by default; ``make fuzz`` spends ``SECONDS`` on all of them together.
"""

import contextlib
import gzip
import json
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from exporter.alerts.messages import log_json, parse_message
from exporter.collecting.saved_state import load_saved_state
from exporter.contract.errors import ExporterError, ManifestError
from exporter.contract.manifest import parse_manifest, render_manifest
from exporter.contract.records import RecordError
from exporter.contract.report import Report
from exporter.contract.run_files import read_json
from exporter.contract.status import NodeStatus
from exporter.contract.timeline_file import TimelineHead, TimelineSeries, open_timeline, pack_timeline
from exporter.files.checkpoints.layouts_reader import (
    parse_array,
    parse_core_metadata,
    parse_distcp_metadata,
    parse_index,
    parse_orbax_tree,
    parse_shard_index,
)
from exporter.files.checkpoints.names import parse_name
from exporter.files.formats import check_file
from exporter.files.formats.source import CheckUndecided, open_source
from exporter.hub.runs.run_directory_reader import parse_outcome
from exporter.logs.errors.last_error import last_error
from exporter.logs.lexicon_reader import build_lexicon
from exporter.logs.packs import PackError, parse_pack
from exporter.logs.packs_reader import PACKS, pack_names, read_error_patterns, read_packs
from exporter.logs.patterns import PatternError
from exporter.logs.redact import redact, redact_all
from exporter.machine.kernel_log import parse_event, parse_line
from exporter.progress.progress_file import parse_updates
from exporter.sidecar.figures_collector import FigureOfMeritError, parse_figure_of_merit
from exporter.slurm.accounting import parse_accounting, parse_history
from exporter.slurm.commands_reader import SlurmUnansweredError
from exporter.slurm.queue import GarbledAnswerError, parse_queue
from exporter.slurm.sources.hub_reader import HubAnswer
from exporter.slurm.sources.rest_reader import parse_rest_jobs
from exporter.web.config import parse_web_config
from exporter.workers.slurm_end_notice import parse_preemption_end, parse_slurm_end_notice, parse_time_limit_end
from launcher.alerts.firing import parse_alertmanager, parse_prometheus, parse_receiver, parse_silences, render
from launcher.alerts.trial import parse_counts
from launcher.check.inputs import PARSERS as INPUT_PARSERS
from launcher.check.site_facts import parse_partitions
from launcher.errors import ConfigError, LauncherError, SlurmError
from launcher.fleet.chart import make_chart, parse_samples, render_chart
from launcher.jobfile.jobfile import parse_cluster, parse_job
from launcher.jobfile.monitor_config import load_monitor_config
from launcher.run.before.readiness import parse_dynamo, parse_models, parse_sglang
from launcher.rundir.job_records import read_orchestrator
from launcher.rundir.statuses import read_statuses
from launcher.rundir.yaml_files import load_yaml
from launcher.scan.scan import scan_log
from launcher.steps.hostlist import parse_hostlist
from launcher.track.gpu_use import parse_gpu_metrics
from launcher.verify.benchmark_results import NoBenchmarkResult, parse_benchmark_result, parse_partial_result
from launcher.verify.tokens import count_tokens
from tests.exporter.files.formats.sample_files import FOLDER
from tests.fuzz.inputs import damaged, damaged_text
from tests.launcher.verify.checkpoint_files import megatron_core, orbax_zarr, torch_distributed, zarr, zarr_sharded
from tests.support.exporter import make_manifest, make_task

MOST_S = 2.0  # processor time for one input; the slowest takes 0.3 s on an idle machine
MOST_KB = 256 << 10  # growth of the process over all inputs of one parser
EXAMPLES = 15  # of each parser in the ordinary suite
SCRATCH = tempfile.TemporaryDirectory(prefix="gpujob-fuzz-")  # removed when the interpreter ends
LENGTH_S = float(os.environ.get("FUZZ_SECONDS", "0"))


@dataclass(frozen=True)
class Parser:
    """A function that reads foreign data, valid inputs of it, and the errors that it declares."""

    read: Callable[[Any], object]
    inputs: st.SearchStrategy[Any]
    errors: tuple[type[Exception], ...] = ()


def in_file(read: Callable[[Path], object], name: str) -> Callable[[bytes], object]:
    """Read from a file with the input as its content."""

    def read_file(data: bytes) -> object:
        path = Path(SCRATCH.name, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return read(path)

    return read_file


def check_format(path: Path) -> object:
    with open_source(path.parent, path.name) as source:
        return check_file(source)


def check_input(check: Callable[[str, str | None, bool], str | None]) -> Callable[[str], object]:
    return lambda text: check(text, text[-20:], True)


def text_of(body: object) -> bytes:
    return json.dumps(body).encode()


def read_timeline(path: Path) -> object:
    with open_timeline(path) as (head, series):
        return head, list(series)


TIMELINE = pack_timeline(
    TimelineHead(job_id="1", attempt=0, node="n", instance="n:1", step_s=5.0, times=(1.0, 6.0)),
    [TimelineSeries('gpujob_worker_up{worker="w\\"0"}', (0, 1), (1.0, None))],
)
LOG = b"\n".join(sample.text.encode() for pack in read_packs() for sample in pack.samples[:3])
LOGS = [LOG[at : at + 600] for at in range(0, len(LOG), 600)]
ERROR_LOG = (
    b"Traceback (most recent call last):\n  File \"a.py\", line 1, in f\n    g(token='x')\nValueError: bad\n\n"
    b"During handling of the above exception, another exception occurred:\n\n[rank1]: RuntimeError: CUDA error\n"
)
JOB = """name: a
workers: [{role: w, command: "python t.py --rank {rank}", count: 2, gpus: 1, env: {A: b}}]
resources: {nodes: 2, gpus_per_node: 4}
slurm: {time_limit: "01:00:00", directives: {comment: x}}
progress: {total_items: 100, patterns: [{name: items, pattern: 'done (?P<items>\\d+)'}]}
errors: [{pattern: 'a+b', severity: critical}]
"""
CLUSTER = "logs_dir: logs\ngpus_per_node: 8\nmodels: {a: /m/a}\nslurm: {partition: gpu}\n"
MONITOR = "job: {name: a, num_workers: 2}\npaths: {output_dir: o, log_dir: l}\nalerts: {email: {address: a@b.org}}\n"
WEB = "http_server_config: {headers: {Cache-Control: no-store}}\nbasic_auth_users: {ada: x}\n"
ANCHORS = "a: &a {x: 1}\nb: {<<: *a, y: [*a, 0x1F, 1:30, 2001-12-14, .inf]}\n"
STATUS = {"schema": 1, "node": {"name": "n"}, "workers": [{"worker": "w", "rank": 0, "eta": None, "values": {"a": 1}}]}
RESULT = {"max_concurrency": 4, "completed": 8, "output_throughput": 1.5, "duration": 2.0, "median_ttft_ms": 3.0}
MANIFEST = render_manifest(make_manifest(Path("/r"), make_task()))
UPDATES = b'{"items": 3, "total": 9, "loss": 0.5}\n{"step": 4, "phase": "eval"}\nitems=5 total=9 loss=nan\n'
MEMORY_STAT = (
    "anon 4096\nfile 8192\nsome avg10=0.00 avg60=1.5 avg300=0 total=12\nfull avg10=0 avg60=0 avg300=0 total=1\n"
)
MOUNTS = "36 35 98:0 /a /mnt/b rw,noatime master:1 - ext3 /dev/root rw\n31 23 0:26 / /sys/fs/cgroup rw - cgroup2 c rw\n"
KERNEL = (
    b"4,1339,5140900,-;Memory cgroup out of memory: Killed process 77 (python) total-vm:1kB, anon-rss:2kB\n TASK=a\n",
    b"4,1340,5140901,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.\n",
)
NOTICE = "slurmstepd: error: *** JOB 2 ON rs1 CANCELLED AT 2026-11-21T12:02:53 DUE TO TIME LIMIT ***\n"
GPU_METRICS = "time,index,utilization.gpu [%],memory.used [MiB],memory.total [MiB]\n1,0,5 %,10 MiB,81920 MiB\n"
SLURM_SAMPLES = Path(__file__).parents[1] / "exporter" / "slurm" / "samples"
SCONTROL = "JobId=2 JobState=RUNNING PreemptTime=2026-11-21T12:02:53 PreemptEligibleTime=None EndTime=Unknown\n"
LIMITED = "JobId=2 JobState=RUNNING StartTime=2026-11-21T12:00:00 EndTime=2026-11-21T13:00:00 Deadline=N/A\n"
DISTRIBUTED = text_of({"instances": [{"endpoint": "generate", "component": "prefill"}], "stats": {"prefill_count": 1}})

ENDED = "gpu|lab|normal|1|n1|7|ada|COMPLETED|0:0|100|110|150|40|5|2|00:01|cpu=2,energy=9||job\n"
WEBHOOK = """{"alerts": [{"status": "firing", "labels": {"alertname": "A"}, "annotations": {"summary": "s"},
"startsAt": "2026-11-20T13:31:07.123456789Z"}], "truncatedAlerts": 2}"""
MANAGER_ALERTS = """[{"labels": {"alertname": "GpuJobA", "job_id": "7"}, "startsAt": "2026-11-20T13:31:07Z",
"status": {"state": "active", "silencedBy": ["a"], "inhibitedBy": []}}]"""
SERVER_ALERTS = """{"data": {"alerts": [{"labels": {"a": "b"}, "state": "firing", "activeAt": "2026-11-20T13:31:07Z"}]},
"alerts": [{"labels": {"a": "b"}, "since": "2026-11-20T13:31:07Z"}]}"""
SILENCES = """[{"id": "a", "matchers": [{"name": "job_id", "value": "7", "isRegex": false, "isEqual": true}],
"endsAt": "2026-11-20T13:31:07Z", "createdBy": "ada", "status": {"state": "active"}}]"""
COUNTS = 'alertmanager_notification_requests_failed_total{integration="slack"} 1\n'
PARSERS = {
    "log": Parser(in_file(lambda path: scan_log(str(path), build_lexicon()), "a.log"), damaged([*LOGS, ERROR_LOG])),
    "last error": Parser(lambda text: last_error(text, read_error_patterns()), damaged([*LOGS, ERROR_LOG])),
    "redaction": Parser(redact, damaged_text([ERROR_LOG.decode(), "curl -u a:b x", "HF_TOKEN=x", "password: |\n  x"])),
    "redaction of JSON": Parser(
        lambda body: redact_all(json.loads(body)),
        damaged([text_of(STATUS)]),
        (ValueError, AttributeError, RecursionError),
    ),
    "pack": Parser(
        lambda text: parse_pack(text, "a"),
        damaged_text([(PACKS / f"{name}.toml").read_text() for name in pack_names()[:4]]),
        (PackError, PatternError),
    ),
    "webhook of Alertmanager": Parser(
        lambda text: [log_json(alert, 0.0) for alert in parse_message(text)[0]], damaged_text([WEBHOOK]), (RecordError,)
    ),
    "alerts of Alertmanager": Parser(
        lambda text: render(parse_alertmanager(text), {}, 0.0), damaged_text([MANAGER_ALERTS]), (ValueError,)
    ),
    "alerts of Prometheus": Parser(parse_prometheus, damaged_text([SERVER_ALERTS]), (ValueError,)),
    "alerts of the receiver": Parser(parse_receiver, damaged_text([SERVER_ALERTS]), (ValueError,)),
    "silences of Alertmanager": Parser(parse_silences, damaged_text([SILENCES]), (ValueError,)),
    "counts of Alertmanager": Parser(parse_counts, damaged_text([COUNTS])),
    "progress file": Parser(lambda text: parse_updates(text, 0), damaged([UPDATES])),
    "figure of merit": Parser(parse_figure_of_merit, damaged([b'{"name": "a", "value": 1.5}']), (FigureOfMeritError,)),
    "benchmark result": Parser(parse_benchmark_result, damaged([text_of(RESULT)]), (NoBenchmarkResult,)),
    "part of a benchmark result": Parser(
        lambda text: parse_partial_result(text[:200], text[-200:]), damaged([text_of(RESULT)]), (NoBenchmarkResult,)
    ),
    "tokens of results": Parser(
        lambda text: [count_tokens(text, is_json_lines=lines) for lines in (True, False)],
        damaged([text_of(RESULT), b'{"output_tokens": 3}\n{"usage": {"completion_tokens": 2}}\n']),
    ),
    **{
        f"file {path.name}": Parser(in_file(check_format, path.name), damaged([path.read_bytes()]))
        for path in sorted(FOLDER.glob("*.*"))
        if path.suffix != ".md"
    },
    **{
        f"file {name}": Parser(in_file(check_format, name), damaged([text]))
        for name, text in {"a.json": text_of(STATUS), "a.jsonl": text_of(STATUS) * 2, "a.csv": b'a,b\n1,"x"\n'}.items()
    },
    "checkpoint index": Parser(parse_index, damaged([text_of({"weight_map": {"a": "model-1-of-2.safetensors"}})])),
    "distributed checkpoint": Parser(parse_distcp_metadata, damaged([torch_distributed(1)["step-1/.metadata"]])),
    "Zarr array": Parser(
        parse_array, damaged([orbax_zarr(1)["1/w/zarr.json"], zarr(1)["checkpoint_1.zarr/plain/.zarray"]])
    ),
    "Zarr shard": Parser(
        parse_shard_index, damaged([zarr_sharded(1)["checkpoint_1.zarr/w/zarr.json"]]), (CheckUndecided,)
    ),
    "Megatron core": Parser(parse_core_metadata, damaged([megatron_core(1)["iter_0000001/metadata.json"]])),
    "Orbax tree": Parser(parse_orbax_tree, damaged([orbax_zarr(1)["1/_METADATA"]])),
    "checkpoint name": Parser(parse_name, damaged_text(["checkpoint_100.pt", "step-5/rank_3_of_8.bin", "e1.tmp.12"])),
    "status": Parser(
        lambda body: NodeStatus.from_json(json.loads(body)), damaged([text_of(STATUS)]), (ValueError, RecursionError)
    ),
    "report": Parser(
        lambda body: Report.from_json(json.loads(body)),
        damaged([text_of({"schema": 1, "job": {}})]),
        (ValueError, RecursionError),
    ),
    "timeline": Parser(in_file(read_timeline, "n.timeline.json.gz"), damaged([TIMELINE]), (RecordError,)),
    "text of a timeline": Parser(
        lambda body: in_file(read_timeline, "m.timeline.json.gz")(gzip.compress(body)),
        damaged([gzip.decompress(TIMELINE)]),
        (RecordError,),
    ),
    "statuses of a run": Parser(
        in_file(lambda path: read_statuses(path.parents[1], 0), "run/status/n.json"), damaged([text_of(STATUS)])
    ),
    "orchestrator": Parser(
        in_file(lambda path: read_orchestrator(path.parent), "run/orchestrator.json"),
        damaged([text_of({"schema": 1, "pid": 4})]),
    ),
    "JSON of a run": Parser(in_file(read_json, "a.json"), damaged([text_of(STATUS)])),
    "saved state": Parser(
        in_file(lambda path: load_saved_state(path.parents[1], "n", "1", 0, kind="a"), "run/state/n.a.json"),
        damaged([text_of({"schema": 1, "job_id": "1", "attempt": 0, "a": {}})]),
    ),
    "manifest": Parser(
        lambda text: parse_manifest(text, Path("/r")), damaged_text([text_of(MANIFEST).decode()]), (ManifestError,)
    ),
    "YAML": Parser(lambda text: load_yaml(text, "a"), damaged_text([JOB, ANCHORS]), (ConfigError,)),
    "job file": Parser(lambda text: parse_job(text, "a"), damaged_text([JOB]), (ConfigError,)),
    "cluster file": Parser(lambda text: parse_cluster(text, "a"), damaged_text([CLUSTER]), (ConfigError,)),
    "monitor_config.yaml": Parser(
        in_file(lambda path: load_monitor_config(str(path), {}), "m.yaml"),
        damaged([MONITOR.encode()]),
        (LauncherError,),
    ),
    "web configuration": Parser(lambda text: parse_web_config(text, "/w.yml"), damaged_text([WEB]), (ExporterError,)),
    **{
        f"input {suffix}": Parser(check_input(check), damaged_text([text_of(STATUS).decode(), "a,b\n1,2\n", JOB]))
        for suffix, check in INPUT_PARSERS.items()
    },
    "squeue": Parser(
        parse_queue, damaged_text([(SLURM_SAMPLES / "squeue.24.11.5.txt").read_text()]), (GarbledAnswerError,)
    ),
    "jobs of a hub": Parser(
        lambda body: HubAnswer.from_json(json.loads(body)).rows(),
        damaged(
            [b'{"scope": {"cluster": "c", "interval_s": 60}, "jobs": [{"job_id": "7", "job_name": "", "state": "S"}]}']
        ),
        (ValueError, RecursionError),
    ),
    "jobs of slurmrestd": Parser(
        lambda body: parse_rest_jobs(json.loads(body) if body.startswith(b"{") else {}),
        damaged([(SLURM_SAMPLES / f"rest.{version}.json").read_bytes() for version in ("22.05.8", "26.05.5")]),
        (ValueError, RecursionError, SlurmUnansweredError),
    ),
    "sacct": Parser(parse_accounting, damaged_text([(SLURM_SAMPLES / "sacct.24.11.5.txt").read_text()])),
    "sacct for the hub": Parser(parse_history, damaged_text([ENDED])),
    "report for the hub": Parser(
        lambda text: parse_outcome(text, "7"),
        damaged_text([text_of({"job_id": "7", "state": "FAILED", "exit_status": 1, "gpus": {"count": 2}}).decode()]),
        (ValueError, RecursionError),
    ),
    "history of GPUs": Parser(
        lambda text: render_chart(make_chart(found), 0.0) if (found := parse_samples(text)) else None,
        damaged_text(["2025-11-24T16:00:00Z,n1,0,50,40.00,80.00,300.0,50\n2025-11-24T16:00:01Z,n1,1,,40.00,80.00,,\n"]),
    ),
    "gpu_metrics.csv": Parser(lambda text: parse_gpu_metrics(*text.partition("\n")[::2]), damaged_text([GPU_METRICS])),
    "sinfo": Parser(
        parse_partitions, damaged_text(["gpu*|up|1-00:00:00|4|gpu:a100:8(S:0-1)\ncpu|down|infinite|2|(null)\n"])
    ),
    "host list": Parser(parse_hostlist, damaged_text(["node[01-03,7],x", "a[1-2]b[3-4]"]), (SlurmError,)),
    "end notice of Slurm": Parser(parse_slurm_end_notice, damaged_text([NOTICE])),
    "preemption of Slurm": Parser(parse_preemption_end, damaged_text([SCONTROL])),
    "time limit of Slurm": Parser(
        parse_time_limit_end, damaged_text([SCONTROL.replace("Unknown", "2026-11-21T13:00:00")])
    ),
    "readiness pages": Parser(
        lambda body: (parse_dynamo(body), parse_sglang(body), parse_models(body)),
        damaged([DISTRIBUTED, text_of({"data": [{"id": "m"}]})]),
    ),
    "kernel log": Parser(
        lambda record: (parse_line(record), parse_event(record.decode("utf-8", "replace"))), damaged(KERNEL)
    ),
}
"""Every reader of data that the job, its users or other programs write. No command parses a Prometheus page."""


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_takes_any_input(name: str) -> None:
    parser = PARSERS[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def check(value: object) -> None:
        began = time.process_time()
        with contextlib.suppress(*parser.errors):
            parser.read(value)
        assert time.process_time() - began < MOST_S

    suppressed = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    examples = settings(max_examples=200 if LENGTH_S else EXAMPLES, database=None, suppress_health_check=suppressed)
    end = time.monotonic() + LENGTH_S / len(PARSERS)
    while True:
        seed(random.randrange(2**32))(examples(given(parser.inputs)(check)))()
        if time.monotonic() >= end:
            break
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_KB
