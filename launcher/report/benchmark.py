"""Results of the benchmark in ``report.md``: a table by concurrency, and problems."""

from collections.abc import Iterator, Sequence

from launcher.verify.benchmark_results import LATENCIES, Result
from launcher.words import plain_item

MOST_SHOWN = 40  # longest table

FAILED = "failed"  # heading and key of failed requests

COLUMNS = (
    ("concurrency", "concurrency", 1.0, ".0f"),
    ("request rate", "request_rate_per_second", 1.0, "g"),
    ("requests", "requests", 1.0, ".0f"),
    (FAILED, FAILED, 1.0, ".0f"),
    ("requests/s", "requests_per_second", 1.0, ".2f"),
    ("output tokens/s", "output_tokens_per_second", 1.0, ".1f"),
    ("total tokens/s", "total_tokens_per_second", 1.0, ".1f"),
    *(
        (f"{ours.upper()} {statistic} (ms)", f"{ours}_{statistic}_s", 1000.0, ".1f")
        for ours in dict.fromkeys(LATENCIES.values())
        for statistic in ("median", "p99")
    ),
)  # heading, key, factor and format of each possible column


def benchmark_section(results: Sequence[Result]) -> Iterator[str]:
    """Markdown lines: a table of the results, then the files that could not be read."""
    rows = [_with_failed(entry) for entry in results if "problem" not in entry]
    columns = [column for column in COLUMNS if any(_has_column(column[1], entry) for entry in rows)]
    if results:
        yield from ("", "## Benchmark", "")
    if columns:
        yield f"| {' | '.join(head for head, *_ in columns)} |"
        yield f"|{'---|' * len(columns)}"
        for entry in rows[:MOST_SHOWN]:
            yield f"| {' | '.join(_cell(entry, *column[1:]) for column in columns)} |"
    if len(rows) > MOST_SHOWN:
        yield from ("", f"and {len(rows) - MOST_SHOWN} more, in report.json")
    if failed := sum(entry.get(FAILED, 0) for entry in rows):
        asked = sum(entry["requests_expected"] for entry in rows if "requests_expected" in entry)
        text = f"{failed} of {asked} requests failed"
        yield from ("", f"**Warning**: {text}; rates, tokens and latencies include only completed requests.")
    problems = [entry for entry in results if "problem" in entry]
    if problems and columns:
        yield ""
    for entry in problems[:MOST_SHOWN]:
        yield f"- {plain_item(': '.join(filter(None, (entry['file'], entry['problem']))))}"
    if len(problems) > MOST_SHOWN:
        yield f"- and {len(problems) - MOST_SHOWN} more, in report.json"


def _with_failed(entry: Result) -> Result:
    """Add the number of failed requests to a result, if known and not 0."""
    failed = entry.get("requests_expected", 0) - entry.get("requests", 0)
    return {**entry, FAILED: failed} if "requests" in entry and failed > 0 else entry


def _has_column(key: str, entry: Result) -> bool:
    """Whether a value gets a column. TPOT replaces ITL where both exist."""
    return key in entry and not (key.startswith("itl_") and key.replace("itl_", "tpot_") in entry)


def _cell(entry: Result, key: str, factor: float, number_format: str) -> str:
    if key not in entry:
        return "-"
    text = format(entry[key] * factor, number_format)
    if key == FAILED:
        return f"{text} ({100 * entry[FAILED] / entry['requests_expected']:.3g}%)"
    differs = key == "requests" and entry.get("requests_expected", entry[key]) != entry[key]
    return f"{text} of {entry['requests_expected']}" if differs else text
