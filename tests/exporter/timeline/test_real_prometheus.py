"""The timeline of a real job beside what a real Prometheus stored, and the boards of a Prometheus that never saw it."""

import gzip
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from exporter.contract import run_files
from grafana.build.queries import all_queries
from tests.grafana.substitute import substitute, variables
from tests.grafana.watched_job import watched_job
from tests.realstack.stack import Stack, prometheus_unavailable
from tests.support.exporter import SOON_S
from tests.support.launcher import GPUJOB, LocalJob, clean_environment, read_json

pytestmark = pytest.mark.prometheus

ROOT = Path(__file__).resolve().parents[3]
# What the board of a job cannot show from a timeline. Prometheus makes alerts; a sidecar has none.
NOT_BACKFILLED = frozenset(("alerts_now", "firing"))
# Even of a page that is read twice between two changes, one reader may see a value that the other misses
RESTLESS = frozenset(
    f"gpujob_{name}"
    for name in (
        "worker_throughput_items_per_second",
        "worker_log_value",
        "worker_lag_ratio",
        "worker_state",
        "eta_seconds",
        "output_growth_bytes_per_second",
    )
)

Samples = Mapping[tuple[tuple[str, str], ...], list[tuple[float, float]]]


class Watched(NamedTuple):
    """A job that has ended, with what Prometheus stored and what the query of each panel returned then."""

    job: LocalJob
    stored: Samples
    answered: frozenset[str]
    start: float
    end: float


def labels_of(metric: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(metric.items()))


def samples_of(stack: Stack, selector: str, at: float) -> Samples:
    """All samples of an hour."""
    return {
        labels_of(series["metric"]): [(float(time), float(value)) for time, value in series["values"]]
        for series in stack.query(f"{selector}[1h]", at)
    }


def answered(stack: Stack, job_id: str, start: float, end: float) -> frozenset[str]:
    """Names of the queries of the job board that return data for the time of the job."""
    values = variables(cluster="here", job_id=job_id, span=round(end - start))
    return frozenset(
        query.name for query in all_queries() if stack.query_range(substitute(query.expr, values), start, end, 5)
    )


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """One of the workers is killed. The others go on."""
    if reason := prometheus_unavailable():
        pytest.skip(reason)
    start = time.time()
    folder = tmp_path_factory.mktemp("timeline")
    # each load of a GPU is scraped some times: in the first minute the sidecar, too, reads it each second
    with watched_job(folder, items=6000, check_interval=2, load_interval=5) as (stack, job):
        up = 'gpujob_worker_items{rank="3"} > 50'
        stack.wait_for(lambda: stack.query(up), 120, "progress of a worker")
        os.kill(job.worker(3)["pid"], signal.SIGKILL)
        job.wait(300)
        end = time.time()
        job_id = job.report()["job_id"]
        selector = f'{{__name__=~"gpujob_.+|up", job="gpujob-sidecar", job_id="{job_id}"}}'
        yield Watched(job, samples_of(stack, selector, end), answered(stack, job_id, start, end), start, end)


def test_its_values_are_those_of_prometheus_within_one_step(watched: Watched) -> None:
    (path,) = (watched.job.run_dir / run_files.STATUS_DIR).glob("*.timeline.json.gz")
    timeline = json.loads(gzip.decompress(path.read_bytes()))
    times, window = timeline["times"], timeline["step_s"]
    assert len(times) > 10
    compared, wrong = 0, []
    odd: list[str] = []
    for series in timeline["series"]:
        name, _, labels = series["series"].partition("{")
        pairs = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels))
        target = {"__name__": name, "job": "gpujob-sidecar", "instance": timeline["instance"]}
        stored = watched.stored.get(labels_of({**pairs, **target}))
        if stored is None:
            wrong.append(f"{series['series']}: Prometheus has no such series")
            continue
        changes = dict(zip(series["points"], series["values"], strict=True))
        value: float | None = None
        for point, moment in enumerate(times):
            value = changes.get(point, value)
            around = [(at, sample) for at, sample in stored if moment - window <= at <= moment + window]
            if value is None or moment - window < stored[0][0] or moment + window > stored[-1][0]:
                continue
            if not around or not around[0][0] <= moment <= around[-1][0]:
                continue  # beside a gap: the sidecar or Prometheus stood still
            near = [sample for _, sample in around]
            compared += 1
            slack = 1e-6 * max(map(abs, (*near, value)))
            if not min(near) - slack <= value <= max(near) + slack:
                text = f"{series['series']} at {moment}: {value}, Prometheus {near}"
                (odd if name in RESTLESS else wrong).append(text)
    assert compared > 1000
    assert not wrong, f"{len(wrong)} of {compared}: " + "\n".join(wrong[:20])
    assert len(odd) <= compared / 500, "\n".join(odd)


def test_the_end_of_a_worker_keeps_its_moment(watched: Watched) -> None:
    exit_ = read_json(next(watched.job.run_dir.glob("workers/worker_w3_*.exit.json")))
    (path,) = (watched.job.run_dir / run_files.STATUS_DIR).glob("*.timeline.json.gz")
    timeline = json.loads(gzip.decompress(path.read_bytes()))
    name = "gpujob_worker_last_exit_timestamp_seconds{"
    (ended,) = (each for each in timeline["series"] if each["series"].startswith(name) and 'rank="3"' in each["series"])
    assert ended["values"] == [pytest.approx(exit_["end"], abs=0.001)]
    # it is a moment at once, or at the next look if the read came between the two steps of one
    first, later = timeline["times"][ended["points"][0] :][:2]
    assert {first, later} & set(timeline["moments"])
    assert 0 <= first - exit_["end"] < SOON_S


def test_the_boards_of_a_prometheus_that_never_scraped_it_show_the_job(watched: Watched, tmp_path: Path) -> None:
    """With the commands of the page about stacks."""
    page = (ROOT / "docs/how-to/stack.md").read_text("utf-8")
    commands = re.findall(r"^\$ ((?:gpujob timeline|promtool) .*)", page, re.MULTILINE)
    assert len(commands) == 2
    job_id = watched.job.report()["job_id"]
    with Stack(tmp_path / "stack", rules=[]) as stack:
        places = {"4459": watched.job.run_dir, "~/.local/share/gpujob/stack/data": stack.directory / "data"}
        for command in commands:
            words = [str(places.get(word, word)) for word in command.split()]
            words[0] = str(GPUJOB) if words[0] == "gpujob" else words[0]
            subprocess.run(words, cwd=tmp_path, env=clean_environment(), check=True, timeout=60, capture_output=True)
        info = f'gpujob_info{{job_id="{job_id}"}}'
        stack.wait_for(lambda: stack.query(f"last_over_time({info}[1h])"), 150, "the blocks")  # read once a minute
        found = answered(stack, job_id, watched.start, watched.end)
        backfilled = samples_of(stack, f'{{__name__=~"gpujob_.+|up", job_id="{job_id}"}}', watched.end)
    assert watched.answered - found <= NOT_BACKFILLED
    assert len(found) > 40
    assert backfilled.keys() <= watched.stored.keys()
