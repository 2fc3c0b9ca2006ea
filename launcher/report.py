"""The report of a job, out of what its run directory holds."""

import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from exporter import records
from exporter.derive import progress_lines
from exporter.derive.exits import CONSEQUENCES, Stop, first_cause, parse_stop
from exporter.derive.findings import Mark, Position
from exporter.derive.gpu_account import account, account_words, worker_devices
from exporter.derive.progress import Track, share_of
from exporter.derive.work import ITEMS, unit_word, work_of
from exporter.derive.workers import worker_rank
from exporter.manifest import Manifest, Task, read_manifest
from exporter.readers.lexicon import lexicon_of
from exporter.readers.worker_logs import extra_logs, log_paths, progress_path, read_begin, read_end, run_suffix
from launcher.job_ids import job_id_of
from launcher.judge import Judge, failures
from launcher.report_gpus import gpu_sections, read_gpu_events
from launcher.report_words import clock, plain
from launcher.verify import Check, verify
from launcher.verify_looks import OutOfTime, ProgressOf

REPORT_SCHEMA = 1
REPORT_TEXT_FILE = "report.md"
LOG_TAIL_BYTES = 64 * 1024
FLAWS_SHOWN = 20
"""Damaged files that the text names; the others are in the JSON."""

EXIT_STATUS = {
    "COMPLETED": 0,
    "FAILED": 1,
    "TIMEOUT": 3,
    "OUT_OF_MEMORY": 4,
    "CANCELLED": 5,
    "NODE_FAIL": 6,
    "BOOT_FAIL": 6,
    "PREEMPTED": 7,
    "INCOMPLETE": 8,
    "UNKNOWN": 9,
    "RUNNING": 10,
    "PENDING": 10,
}
"""Exit status of `run`, `report` and `watch --until done` by state of the job."""

_STATE_OF_REASON = {
    "host_oom": "OUT_OF_MEMORY",
    "node_failure": "NODE_FAIL",
    "time_limit": "TIMEOUT",
    "preempted": "PREEMPTED",
    "cancelled": "CANCELLED",
}


def benchmark_log(attempt: int) -> str:
    """Where the launchers of benchmarks put what these print."""
    return f"benchmark{run_suffix(attempt, 0)}.out"


def read_runs(
    judge: Judge, manifest: Manifest, task: Task, attempt: int, node: str, stop: Stop | None
) -> list[dict[str, Any]]:
    """Every run of one task, oldest first: its records and, once it has ended, why."""
    folder = manifest.run_dir / records.WORKERS_DIR
    runs: list[dict[str, Any]] = []
    while True:
        stem = records.record_name(task.worker, task.rank, attempt, len(runs))
        start = records.read_json(folder / f"{stem}.start.json")
        ended = records.read_json(folder / f"{stem}.exit.json")
        if start is None and ended is None:
            return runs
        run: dict[str, Any] = {"restart": len(runs), **(start or {}), "record": ended, "exit": None}
        if ended is not None:
            run["start"] = ended.get("start", run.get("start"))
            run["exit"] = judge.judge(task, len(runs), node, ended, stop)
        runs.append(run)


def last_position(
    manifest: Manifest, task: Task, attempt: int, restart: int, node: str, since: float | None = None
) -> tuple[int, int | None, str] | None:
    """Position, total and unit that a task's logs and its progress file tell at their end, as if they were followed.

    ``since`` is when this run began: files of the job's own log pattern that are older are of another.
    """
    lexicon = lexicon_of(manifest)
    rank_of = partial(worker_rank, ranks=manifest.ranks_of_roles())
    others = extra_logs(manifest, rank_of, since).get(task.rank, [])
    paths = (*log_paths(task, manifest.run_dir, node, attempt, restart), *others)
    ends = {str(path): read_end(path, LOG_TAIL_BYTES) for path in paths}
    pack = lexicon.pack_of(*(read_begin(path, LOG_TAIL_BYTES) for path in paths), *ends.values())
    tasks = [(of.role, of.worker, of.rank, of.critical) for of in manifest.tasks]
    track = Track(
        lexicon.preference(pack),
        epoch_bases={**lexicon.epoch_bases(pack), progress_lines.PATTERN: 0},
        epochs=manifest.total_epochs,
        steps=manifest.total_steps,
        share=share_of(manifest.total_items, tasks, task.rank),
    )
    for path, text in ends.items():
        for moment, position in enumerate(lexicon.engine(pack).scan(text).positions):
            track.update(path, position, float(moment))
    own = progress_path(task, manifest.run_dir, node, attempt, restart)
    told = progress_lines.findings(read_end(own, LOG_TAIL_BYTES), 0)
    in_order: list[Position | Mark] = [*told.positions, *told.marks]
    for moment, record in enumerate(sorted(in_order, key=lambda record: record.offset)):
        if isinstance(record, Mark):
            track.mark(record, float(moment))
        else:
            track.update(str(own), record, float(moment), order=1)
    if track.done is None or track.unit is None:
        return None
    return int(track.done), None if track.total is None else int(track.total), track.unit


def read_statuses(run_dir: Path, attempt: int) -> dict[str, dict[str, Any]]:
    """The latest status that each sidecar of this attempt has written, by node."""
    found = {}
    try:
        names = sorted(path for path in (run_dir / records.STATUS_DIR).iterdir() if path.suffix == ".json")
    except OSError:
        return {}
    for path in names:
        status = records.read_json(path)
        if status is not None and status.get("attempt", attempt) == attempt:
            found[path.stem] = status
    return found


def merge_workers(statuses: Mapping[str, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Worker entries of all nodes by rank."""
    merged: dict[int, dict[str, Any]] = {}
    for status in statuses.values():
        for entry in status.get("workers", ()):
            if "rank" in entry:  # not before the sidecar's first look at the workers
                merged[int(entry["rank"])] = dict(entry)
    return merged


def build_report(
    run_dir: Path,
    *,
    now: float,
    ended: bool,
    ends: Mapping[int, Mapping[str, Any]] | None = None,
    job_end: float | None = None,
    slurm_state: str | None = None,
    launch: Mapping[str, Any] | None = None,
    out_of_time: OutOfTime = lambda: False,
    progress: ProgressOf | None = None,
) -> dict[str, Any]:
    """The report of the job in ``run_dir``; ``ended`` tells that nothing of it runs any more.

    ``launch`` is how the launch went, and ``slurm_state`` Slurm's word on a job whose orchestrator
    was lost and could not say why it ended.

    ``ends`` are the last ends by rank as the orchestrator has seen them: what no record tells.
    ``out_of_time`` is asked while output files are read, and ``progress`` told how far that is.
    """
    manifest = read_manifest(run_dir)
    orchestrator: Mapping[str, Any] = records.read_json(run_dir / records.ORCHESTRATOR_FILE) or {}
    hosts = [str(host) for host in orchestrator.get("hosts", ())]
    attempt = int(orchestrator.get("attempt", 0))
    statuses = read_statuses(run_dir, attempt)
    published = records.read_json(run_dir / records.STATE_FILE) or {}
    stop = parse_stop(published)
    seen = merge_workers(statuses)
    nodes = {
        task.rank: hosts[task.node_index] if task.node_index < len(hosts) else f"node index {task.node_index}"
        for task in manifest.tasks
    }
    judge = Judge(manifest, attempt, job_end)
    runs = {task.rank: read_runs(judge, manifest, task, attempt, nodes[task.rank], stop) for task in manifest.tasks}
    if stop is None and slurm_state is not None:
        stop = _stop_by_slurm(slurm_state, hosts, nodes, runs)
        runs = {task.rank: read_runs(judge, manifest, task, attempt, nodes[task.rank], stop) for task in manifest.tasks}
    _tell_of_peers(judge, manifest, runs, nodes, stop)
    workers = []
    for task in manifest.tasks:
        node, known = nodes[task.rank], (ends or {}).get(task.rank)
        exit_ = _last_end(judge, task, node, runs[task.rank], stop, known, ended)
        entry = seen.get(task.rank, {})
        devices = worker_devices(entry, statuses.get(node, {}).get("gpus") or {})
        found = _worker(manifest, task, attempt, node, runs[task.rank], exit_, entry, ended)
        workers.append({**found, "gpu_devices": devices, "gpu_misplaced": entry.get("gpu_misplaced")})
    cause = _cause(workers) or _cause_of_stop(published.get("stop"))
    if cause is not None:
        cause["diagnosis"] = _diagnosis(run_dir, cause, attempt)
    state = _state(workers, cause, stop.reason if stop else None, ended)
    work = work_of(workers)
    checks: list[Check] = []
    if state == "COMPLETED":
        checks = _verify(manifest, workers, attempt, orchestrator.get("start"), statuses, out_of_time, progress)
        if any(check.passed is False for check in checks):
            state = "INCOMPLETE"
    start = orchestrator.get("start")
    end = now if ended else None
    duration = (end or now) - start if isinstance(start, int | float) else None
    return {
        "schema": REPORT_SCHEMA,
        "job_id": orchestrator.get("job_id", job_id_of(run_dir)),
        "job_name": manifest.job_name,
        "attempt": attempt,
        "state": state,
        "exit_status": EXIT_STATUS[state],
        "cause": cause,
        "stopped": {"reason": stop.reason, "cause": stop.cause, "time": stop.time} if stop else None,
        "start": start,
        "end": end,
        "duration_s": duration,
        "unit": work.unit,
        "items": work.done,
        "items_expected": work.expected_of(manifest.total_items),
        "items_processed": work.processed,
        "throughput_items_per_second": work.processed / duration if work.processed is not None and duration else None,
        "verification": _verification(state, [check.to_json() for check in checks]),
        "gpus": account(statuses, read_gpu_events(run_dir, start)),
        "launch": launch,
        "diagnoses": _diagnoses(run_dir, workers),
        "monitoring": _monitoring(manifest, hosts, statuses),
        "nodes": hosts,
        "workers": workers,
        "run_dir": str(run_dir),
    }


_FILES_COUNTED = re.compile(r"(\d+) files, \d+ bytes")
"""At the beginning of what is said of output files that are there."""
VERIFIED_STATES = ("COMPLETED", "INCOMPLETE")
"""States of a job that has ended well: which of the two it is, its verification tells."""


def _verification(state: str, checks: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        # at least one thing beyond the exit statuses must have been looked at
        "verified": state == "COMPLETED" and any(check["passed"] and check["name"] != "workers" for check in checks),
        "checks": checks,
    }


def _verify(
    manifest: Manifest,
    workers: Iterable[Mapping[str, Any]],
    attempt: int,
    start: object,
    told: Mapping[str, Mapping[str, Any]],
    out_of_time: OutOfTime,
    progress: ProgressOf | None,
    *,
    again: bool = False,
    before: int = 0,
) -> list[Check]:
    """The checks of a job that has ended, by the entries of its workers and its files.

    ``told`` is what the sidecars have last said, ``before`` the output files that there were when it was verified.
    """
    workers = list(workers)
    work = work_of(workers)
    since = _first_start(manifest, attempt, start)
    idle = [int(worker["rank"]) for worker in workers if worker.get("items_expected") == 0]
    busy = [int(worker["rank"]) for worker in workers if worker.get("items_expected") or worker.get("items")]
    logs = _logs(manifest, workers, attempt)
    # the monitor of a job that others have started has its own checks of workers and items
    critical = [] if manifest.attached else [worker for worker in workers if worker["critical"]]
    reasons = [worker["exit"]["reason"] if worker["exit"] else None for worker in critical]
    return verify(
        manifest,
        work=work,
        reasons=None if manifest.attached else reasons,
        since=since,
        idle=idle,
        busy=busy,
        logs=logs,
        told=told,
        out_of_time=out_of_time,
        progress=progress,
        again=again,
        before=before,
    )


def _first_start(manifest: Manifest, attempt: int, start: object) -> float:
    """When the first attempt of the job has begun: what it has written is the job's own too."""
    moments = [start]
    for task in manifest.tasks[:1] if attempt else ():
        stem = records.record_name(task.worker, task.rank, 0, 0)
        moments.append(
            (records.read_json(manifest.run_dir / records.WORKERS_DIR / f"{stem}.start.json") or {}).get("start")
        )
    return min((float(moment) for moment in moments if isinstance(moment, int | float)), default=0.0)


def _logs(manifest: Manifest, workers: Iterable[Mapping[str, Any]], attempt: int) -> list[Path]:
    """Logs in which a benchmark may have printed its results: of the last runs, and one of its own."""
    tasks = {task.rank: task for task in manifest.tasks}
    paths = [manifest.run_dir / benchmark_log(attempt)]
    for worker in workers:
        task = tasks.get(int(worker["rank"]))
        if task is not None and worker["critical"]:
            paths += log_paths(task, manifest.run_dir, str(worker["node"]), attempt, int(worker["restarts"]))
    return list(dict.fromkeys(paths))


def verify_again(run_dir: Path, report: Mapping[str, Any], progress: ProgressOf | None = None) -> dict[str, Any]:
    """The report of a job that has ended with its files verified anew; ``differs`` names the checks that have changed.

    What a job came to that has not ended well stays. Nothing is written.
    """
    manifest = read_manifest(run_dir)
    attempt = int(report.get("attempt") or 0)
    before = {check["name"]: check for check in report["verification"]["checks"]}
    counted = _FILES_COUNTED.match(str(before.get("outputs", {}).get("detail", "")))
    found = _verify(
        manifest,
        report["workers"],
        attempt,
        report["start"],
        read_statuses(run_dir, attempt),
        lambda: False,
        progress,
        again=True,
        before=int(counted[1]) if counted else 0,
    )
    checks = [check.to_json() for check in found]
    if manifest.attached:  # how it went the monitor alone has seen
        names = {check.name for check in found}
        checks = [check for name, check in before.items() if name not in names] + checks
    state = report["state"]
    if state in VERIFIED_STATES:
        state = "INCOMPLETE" if any(check["passed"] is False for check in checks) else "COMPLETED"
    differs = [check["name"] for check in checks if check["passed"] is not before.get(check["name"], {}).get("passed")]
    verification = {**_verification(state, checks), "state_before": report["state"], "differs": differs}
    return {**report, "state": state, "exit_status": EXIT_STATUS[state], "verification": verification}


def _diagnoses(run_dir: Path, workers: list[dict[str, Any]]) -> list[str]:
    """Diagnoses of the workers that have failed, relative to the run directory."""
    failed = [worker["worker"] for worker in workers if worker["exit"] and worker["exit"]["reason"] not in CONSEQUENCES]
    names = [f"{records.DIAGNOSTICS_DIR}/{name}.txt" for name in dict.fromkeys(failed)]
    return [name for name in names if (run_dir / name).exists()]


def _diagnosis(run_dir: Path, cause: Mapping[str, Any], attempt: int) -> str | None:
    """Where the diagnosis of this end is: not that of an earlier run or attempt."""
    place = Path(records.DIAGNOSTICS_DIR, f"{cause['worker']}.json")
    body = records.read_json(run_dir / place) or {}
    same = all(body.get(key) == cause[key] for key in ("rank", "restart")) and body.get("attempt") == attempt
    return str(place.with_suffix(".txt")) if same else None


REASON_OF_STATE = {
    "NODE_FAIL": "node_failure",
    "BOOT_FAIL": "node_failure",
    "TIMEOUT": "time_limit",
    "DEADLINE": "time_limit",
    "PREEMPTED": "preempted",
    "CANCELLED": "cancelled",
    "FAILED": "terminated_peer",
}
"""Exit reason that the workers of a job inherit when Slurm alone tells how it ended."""
BATCH_LOST = "the batch step has ended and has left no report: was the guard of the orchestrator killed?"


def _stop_by_slurm(
    state: str, hosts: list[str], nodes: Mapping[int, str], runs: Mapping[int, list[dict[str, Any]]]
) -> Stop | None:
    """A stop as the orchestrator would have published it; a node that has left no exit record at all has failed."""
    reason = REASON_OF_STATE.get(state)
    if reason is None:
        return None
    told = {nodes[rank] for rank, found in runs.items() if found and found[-1]["record"] is not None}
    silent = [host for host in hosts if host in nodes.values() and host not in told]
    if reason == "node_failure" and silent:
        cause = f"Slurm: {state}; nothing was left by {', '.join(silent)}"
        return Stop("terminated_peer", cause, 0.0, nodes=tuple(silent))
    return Stop(reason, f"Slurm: {state}; {BATCH_LOST}" if state == "FAILED" else f"Slurm: {state}", 0.0)


def _tell_of_peers(
    judge: Judge,
    manifest: Manifest,
    runs: Mapping[int, list[dict[str, Any]]],
    nodes: Mapping[int, str],
    stop: Stop | None,
) -> None:
    """Judge once more, now that it is known which others had failed before."""
    failed = failures((task, run["exit"]) for task in manifest.tasks for run in runs[task.rank] if run["exit"])
    for task in manifest.tasks:
        peers = [peer for rank, peer in failed if rank != task.rank]
        for run in runs[task.rank] if peers else ():
            if run["exit"] is not None:
                run["exit"] = judge.judge(task, run["restart"], nodes[task.rank], run["record"], stop, peers)


def _last_end(
    judge: Judge,
    task: Task,
    node: str,
    runs: list[dict[str, Any]],
    stop: Stop | None,
    known: Mapping[str, Any] | None,
    ended: bool,
) -> dict[str, Any] | None:
    """How the last run ended: by its record, as the orchestrator has seen it, or without any evidence."""
    if known is not None and int(known["restart"]) >= len(runs):
        return dict(known)
    found = runs[-1]["exit"] if runs else None
    if found is None and known is not None:
        return dict(known)
    if found is None and ended and runs:
        return judge.judge(task, len(runs) - 1, node, {}, stop)
    return found


def _worker(
    manifest: Manifest,
    task: Task,
    attempt: int,
    node: str,
    runs: list[dict[str, Any]],
    exit_: Mapping[str, Any] | None,
    seen: Mapping[str, Any],
    ended: bool,
) -> dict[str, Any]:
    position, expected, processed, unit = (
        seen.get(key) for key in ("items", "items_expected", "items_processed", "unit")
    )
    if ended and runs and (position is None or not seen.get("exit")):
        # its sidecar did not see the end: the log knows more, unless its end counts something else
        told = last_position(manifest, task, attempt, len(runs) - 1, node, runs[-1].get("start"))
        if told is not None and (position is None or told[2] == unit_word(seen)):
            last, total, unit = told
            if position is not None and processed is not None:
                processed += max(0, last - position)
            position, expected = last, total or (expected if position is not None else None)
    return {
        "worker": task.worker,
        "role": task.role,
        "rank": task.rank,
        "critical": task.critical,
        "node": node,
        "gpus": list(task.gpus),
        "up": bool(runs) and exit_ is None,
        "state": "dead" if exit_ else ("running" if runs else "not_found"),
        "start": runs[-1].get("start") if runs else None,
        "restarts": max(0, len(runs) - 1),
        "exit": exit_,
        "exits": [run["exit"] for run in runs if run["exit"]],
        "unit": unit,
        "pattern": seen.get("pattern"),
        "items": position,
        "items_expected": expected,
        "items_processed": processed,
        "cpu_s": seen.get("cpu_s"),
        "log_errors": seen.get("log_errors", {}),
    }


def _cause(workers: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first failure in time among the last ends of the workers that the job cannot do without."""
    needed = [worker for worker in workers if worker["critical"]] or workers
    ended = [worker for worker in needed if worker["exit"]]
    index = first_cause([(worker["exit"]["time"] or float("inf"), worker["exit"]["reason"]) for worker in ended])
    if index is None:
        return None
    worker = ended[index]
    return {key: worker[key] for key in ("worker", "rank", "node")} | {
        key: worker["exit"][key] for key in ("reason", "code", "signal", "time", "restart", "evidence")
    }


def _cause_of_stop(stop: Any) -> dict[str, Any] | None:
    """What the stop of the job itself names as failed: a part of us, or a worker that was not ready in time."""
    failed = stop.get("failed") if isinstance(stop, dict) else None
    if not isinstance(failed, dict):
        return None
    return {"code": None, "signal": None, "restart": 0, "time": stop.get("time"), **failed}


def _state(workers: list[dict[str, Any]], cause: dict[str, Any] | None, stop_reason: str | None, ended: bool) -> str:
    if not ended:
        return "RUNNING"
    needed = [worker for worker in workers if worker["critical"]] or workers
    ends = [worker["exit"] or {} for worker in needed]
    reasons = [end.get("reason") for end in ends]
    # one that was told to end and answered with 0 has not done all its work
    if all(reason == "completed" for reason in reasons) and not any(end.get("asked_to_end") for end in ends):
        return "COMPLETED"
    if stop_reason in _STATE_OF_REASON:
        return _STATE_OF_REASON[stop_reason]
    if cause is not None:
        return _STATE_OF_REASON.get(cause["reason"], "FAILED")
    inherited = [reason for reason in reasons if reason in CONSEQUENCES and reason in _STATE_OF_REASON]
    return _STATE_OF_REASON[inherited[0]] if inherited else "FAILED"


def _monitoring(manifest: Manifest, hosts: list[str], statuses: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "nodes_with_final_values": sorted(node for node, status in statuses.items() if status.get("final")),
        "nodes_without": sorted(node for node in hosts if not statuses.get(node, {}).get("final")),
    }


def write_report(run_dir: Path, report: Mapping[str, Any]) -> None:
    """``report.json`` and ``report.md``."""
    records.write_json(run_dir / records.REPORT_FILE, report)
    temporary = run_dir / f".{REPORT_TEXT_FILE}.tmp"
    temporary.write_text(render_report(report), encoding="utf-8", errors="replace")
    temporary.replace(run_dir / REPORT_TEXT_FILE)


def duration_words(seconds: float | None) -> str:
    """``2h 34m``, ``1m 05s``, ``12 s``; a dash when it is not known."""
    if seconds is None:
        return "-"
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    minutes, left = divmod(total, 60)
    if minutes < 60:
        return f"{minutes}m {left:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours < 24 else f"{hours // 24}d {hours % 24:02d}h"


def _is_issue(check: Mapping[str, Any]) -> bool:
    return bool(check["level"] == "issue" and check["passed"] is False)


def _flaw_lines(check: Mapping[str, Any]) -> list[str]:
    """What is wrong with single files, of many some."""
    flaws = check.get("files", [])
    lines = []
    for flaw in flaws[:FLAWS_SHOWN]:
        known = f" ({flaw['format']})" if flaw["format"] else ""
        lines.append(f"{plain(flaw['file'])}{known}: {plain(flaw['reason'])}")
    more = check.get("files_total", 0) - len(lines)
    return [*lines, f"and {more} more"] if more > 0 else lines


def render_report(report: Mapping[str, Any]) -> str:
    """The report for people, as Markdown."""
    verification, cause = report["verification"], report["cause"]
    unseen = ", its output not checked" if report["state"] == "COMPLETED" else ""
    verified = " and verified" if verification["verified"] else unseen
    lines = [
        f"# Job {report['job_id']} {plain(report['job_name'])}: {report['state']}{verified}",
        "",
        f"- time: {clock(report['start'])} to {clock(report['end'])}, {duration_words(report['duration_s'])}",
        f"- nodes: {', '.join(report['nodes'])}",
    ]
    if report["items"] is not None:
        expected = f" of {report['items_expected']}" if report["items_expected"] else ""
        rate = report["throughput_items_per_second"]
        unit = unit_word(report)
        speed = f", {rate:.1f} {unit}/s over the whole job" if rate else ""
        lines.append(f"- {unit}: {report['items']}{expected}{speed}")
    gpus = report.get("gpus")  # not in reports of older versions
    if gpus:
        lines.append(f"- GPUs: {plain(account_words(gpus))}")
    if report["stopped"]:
        lines.append(f"- stopped: {plain(report['stopped']['cause'])}")
    if report.get("requeued"):
        lines.append("- requeued: the job goes on in its next attempt")
    if cause:
        rank = f" (rank {cause['rank']})" if cause["rank"] is not None else ""
        lines.append(
            f"- cause: {cause['worker']}{rank} on {cause['node']} ended by {cause['reason']} "
            f"at {clock(cause['time'])}: {'; '.join(cause['evidence'])}"
        )
        if cause["diagnosis"]:
            lines.append(f"- diagnosis: {report['run_dir']}/{cause['diagnosis']}")
    if report["launch"] and not report["launch"]["verified"]:
        faults = [check["detail"] for check in report["launch"]["checks"] if _is_issue(check)]
        lines.append(f"- launch: not verified: {plain('; '.join(faults))}")
    if report["monitoring"]["nodes_without"]:
        lines.append(f"- no final values from: {', '.join(report['monitoring']['nodes_without'])}")
    if verification["checks"]:
        lines += ["", "## Verification", ""]
        mark = {True: "ok", False: "FAILED", None: "not checked"}
        for check in verification["checks"]:
            lines.append(f"- {check['name']}: {mark[check['passed']]}: {check['detail']}")
            lines += [f"    - {words}" for words in _flaw_lines(check)]
    units = work_of(report["workers"]).units
    lines += [
        "",
        "## Workers",
        "",
        f"| worker | rank | node | end | {'position' if len(units) > 1 else (*units, ITEMS)[0]} | restarts |",
        "|---|---|---|---|---|---|",
    ]
    for worker in report["workers"]:
        ended = worker["exit"]
        words = f"{ended['reason']} ({'; '.join(ended['evidence'])})" if ended else worker["state"]
        items = "-" if worker["items"] is None else str(worker["items"])
        if worker["items"] is not None and worker["items_expected"]:
            items += f"/{worker['items_expected']}"
        if worker["items"] is not None and len(units) > 1:
            items += f" {unit_word(worker)}"
        cells = (worker["worker"], worker["rank"], worker["node"], plain(words), items, worker["restarts"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    if gpus:
        lines += gpu_sections(gpus, report["workers"])
    if report["diagnoses"]:
        lines += ["", "## Diagnoses", "", *(f"- {name}" for name in report["diagnoses"])]
    return "\n".join(lines) + "\n"
