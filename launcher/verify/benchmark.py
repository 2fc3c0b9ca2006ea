"""Whether a serving job's benchmark measured what was planned, according to its result files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.records import NOTHING, Record
from exporter.contract.status import DamagedFile
from exporter.files.formats.source import printable
from launcher.plan.plan import BENCHMARK, PLAN_FILE
from launcher.verify.benchmark_results import UNKNOWN_FORMAT, Entry, Result, Results
from launcher.verify.verify import VerificationCheck, required_count
from launcher.words import names_text

MOST_NAMED = 20  # concurrencies named in one line
NO_REQUEST, NO_TOKENS = "no completed request", "no output tokens"
TOO_FEW = "fewer than {:g}% of the requests completed"
TOKEN_KEYS = ("output_tokens", "output_tokens_per_second")  # keys for tokens; the first present counts


class _PlannedTask(Record):
    stage: str | None = None
    env: Mapping[str, str] = NOTHING


class _PlannedTasks(Record):
    tasks: tuple[_PlannedTask, ...] = ()


@dataclass(frozen=True)
class PlannedBenchmark:
    """What the job file asks of the benchmark."""

    concurrencies: tuple[int, ...]  # those that need a result; empty for types that promise none
    has_tokens: bool  # whether text is to be generated


def read_planned_benchmark(run_dir: Path) -> PlannedBenchmark | None:
    """The planned benchmark of a run directory; None without one, or if the plan is unreadable.

    Read from the benchmark's variables: a type that promises results has ``GPUJOB_RESULT_DIR``.
    """
    plan = _PlannedTasks.read_valid(run_dir / PLAN_FILE) or _PlannedTasks()
    for task in plan.tasks:
        given = task.env
        if task.stage == BENCHMARK and "GPUJOB_REQ_RATE" in given:
            concurrencies = given.get("GPUJOB_CONCURRENCIES", "") if "GPUJOB_RESULT_DIR" in given else ""
            found = tuple(int(part) for part in concurrencies.split("x") if part.isdigit())
            return PlannedBenchmark(found, "GPUJOB_OSL" in given)
    return None


def missing_concurrencies(planned: PlannedBenchmark | None, results: Results) -> list[int]:
    """Planned concurrencies without a readable result. A result that does not name its concurrency fits any."""
    rows = _rows(results)
    known = {entry.get("concurrency") for entry in rows}
    found = (
        [] if planned is None else [concurrency for concurrency in planned.concurrencies if concurrency not in known]
    )
    unnamed = sum("concurrency" not in entry for entry in rows)
    return found if len(found) > unnamed else []


def missing_entry(concurrencies: Sequence[int]) -> Entry:
    return {"file": "", "missing": list(concurrencies), "problem": _missing_text(concurrencies)}


def all_report_tokens(results: Results) -> bool:
    """Whether there are results and each reports output tokens."""
    rows = _rows(results)
    return bool(rows) and all(any(key in entry for key in TOKEN_KEYS) for entry in rows)


def benchmark_check(planned: PlannedBenchmark | None, results: Results, share: float) -> VerificationCheck | None:
    """Check that each planned concurrency has a result with requests and tokens; None without anything to check.

    If a result reports the planned requests, at least this ``share`` must be completed.
    """
    if planned is None:
        return None
    rows, lacking = _rows(results), missing_concurrencies(planned, results)
    damaged = [
        entry
        for entry in results
        if entry["file"] and not entry.get("problem", UNKNOWN_FORMAT).startswith(UNKNOWN_FORMAT)
    ]
    unread = [str(entry["problem"]) for entry in results if not entry["file"] and "missing" not in entry]
    if not (rows or damaged or planned.concurrencies):
        return None
    faults = [_missing_text(lacking)] if lacking else []
    faults += _faults_by_concurrency(planned, rows, share)
    if damaged and not planned.concurrencies:
        faults.append("damaged results")
    if not faults:
        return VerificationCheck(BENCHMARK, True, _done_text(rows, planned))
    text = "; ".join(faults)
    if unread and lacking:
        return VerificationCheck(BENCHMARK, None, "; ".join((text, *unread)))
    flaws = tuple(DamagedFile(printable(str(entry["file"])), None, str(entry["problem"])) for entry in damaged)
    return VerificationCheck(BENCHMARK, False, text, flaws, len(flaws))


def _rows(results: Results) -> Results:
    return [entry for entry in results if "problem" not in entry]


def _missing_text(concurrencies: Sequence[int]) -> str:
    return f"no result for concurrency {names_text(list(map(str, concurrencies)), MOST_NAMED)}"


def _faults_by_concurrency(planned: PlannedBenchmark, rows: Results, share: float) -> list[str]:
    """Faults by concurrency. One good result is enough: others may be warm-ups."""
    groups: dict[str, list[Result]] = {}
    for entry in rows:
        concurrency = entry.get("concurrency")
        if concurrency is None:
            name = f"in {printable(str(entry['file']))}"
        elif planned.concurrencies and concurrency not in planned.concurrencies:
            continue
        else:
            name = str(concurrency)
        groups.setdefault(name, []).append(entry)
    faults = {
        name: [_result_fault(entry, share, has_tokens=planned.has_tokens) for entry in entries]
        for name, entries in groups.items()
    }
    found = []
    for fault in (NO_REQUEST, NO_TOKENS, TOO_FEW):
        names = [name for name, lacking in faults.items() if None not in lacking and lacking[-1] == fault]
        texts = {name: f"{name}{_request_count_text(groups[name][-1]) if fault == TOO_FEW else ''}" for name in names}
        numbered = [texts[name] for name in names if name.isdigit()]
        others = [texts[name] for name in names if not name.isdigit()]
        places = ([f"at concurrency {names_text(numbered, MOST_NAMED)}"] if numbered else []) + others[:MOST_NAMED]
        if places:
            found.append(f"{fault.format(100 * share)} {', '.join(places)}")
    return found


def _request_count_text(entry: Result) -> str:
    return f" ({entry['requests']} of {entry['requests_expected']})"


def _result_fault(entry: Result, share: float, *, has_tokens: bool) -> str | None:
    """The fault of one result, or None."""
    if entry.get("requests", entry.get("requests_per_second")) == 0:
        return NO_REQUEST
    of_text = has_tokens or any(key.startswith("ttft_") for key in entry)
    if of_text and next((entry[key] for key in TOKEN_KEYS if key in entry), None) == 0:
        return NO_TOKENS
    done, asked = entry.get("requests"), entry.get("requests_expected")
    return TOO_FEW if done is not None and asked is not None and done < required_count(share, asked) else None


def _done_text(rows: Results, planned: PlannedBenchmark) -> str:
    count = len(planned.concurrencies)
    text = f"results for {'all ' if count > 1 else ''}{count} concurrenc{'y' if count == 1 else 'ies'}"
    if not count:
        text = f"{len(rows)} result{'' if len(rows) == 1 else 's'}"
    counts = []
    if all("requests" in entry for entry in rows):
        done = sum(entry["requests"] for entry in rows)
        asked = sum(entry.get("requests_expected", entry["requests"]) for entry in rows)
        counts.append(f"{done} of {asked} requests ({asked - done} failed)" if done < asked else f"{done} requests")
    if all("output_tokens" in entry for entry in rows):
        counts.append(f"{sum(entry['output_tokens'] for entry in rows)} output tokens")
    return f"{text}: {', '.join(counts)}" if counts else text
