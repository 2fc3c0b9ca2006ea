"""Generated tokens according to benchmark results, in JSON files and printed in logs.

A result without tokens is a failure only if text should be generated. Benchmarks of embeddings and ranking report
successful requests with 0 tokens.
"""

import json
import re
from collections.abc import Iterable
from typing import NamedTuple

from exporter.contract.records import JsonObject
from exporter.files.formats import FileCheck
from exporter.files.formats.source import CheckUndecided, FileDamaged, FileSource

RESULT_BYTES = 64 << 10  # read from the start of a large file and the end of a log: results are printed there
# Keys for the tokens of all requests.
TOTAL_KEYS = ("total_output_tokens", "total_generated_tokens", "total_completion_tokens")
REQUEST_KEYS = ("output_tokens", "generated_tokens", "completion_tokens")  # keys for the tokens of one request
# AIPerf keys of objects with an average.
AVERAGE_KEYS = ("output_token_throughput", "output_sequence_length", "request_count")
# Next to one of these, ``completed`` is a number of requests.
BENCHMARK_KEYS = ("num_prompts", "request_throughput", "output_throughput", "total_input_tokens")
# Keys for the text generated for one request.
TEXT_KEYS = (
    *("text", "output", "response", "completion", "content", "answer"),
    *("generated", "generated_text", "output_text"),
)
ALL_TEXTS_KEY = "generated_texts"  # key for the texts of all requests
TEXT_ONLY_KEY = re.compile(r"ttft|time_to_first_token")  # in keys that only generated text has
# Keys by which a result describes itself.
DESCRIPTION_KEYS = ("backend", "endpoint", "endpoint_type", "task", "task_type", "label", "model", "model_id")
# descriptions of results without generated text
NO_TEXT_DESCRIPTION = re.compile(r"embed|rerank|pooling|classif|reward|score", re.IGNORECASE)

_TOTAL_IN_TEXT = re.compile(rb'(?<!\\)"(%b)"\s{0,8}:\s{0,8}(\d{1,20})(?![\d.])' % "|".join(TOTAL_KEYS).encode())
_DESCRIPTION_IN_TEXT = re.compile(
    rb'(?<!\\)"(?:%b)"\s{0,8}:\s{0,8}"([^"]{0,200})"' % "|".join(DESCRIPTION_KEYS).encode()
)
_TOTAL_IN_LOG = re.compile(
    rb"\b(Total generated tokens|Successful requests): {1,60}([\d,]{1,24})(?:\.0{1,9})?(?=\s|\Z)"
)
_TEXT_ONLY_IN_LOG = re.compile(rb"TTFT|Time to First Token")
_DESCRIPTION_IN_LOG = re.compile(rb"^(?:Backend|Endpoint|Model|Task): {1,60}(\S{1,200})", re.MULTILINE)


class TokenCounts(NamedTuple):
    """Results and requests found in a text, and how many have tokens."""

    results: int = 0  # results of complete benchmarks
    results_with_tokens: int = 0  # those that have, or may have, tokens
    results_undecided: int = 0  # those where it is unknown whether tokens are expected
    failure_text: str | None = None  # text of a result that has no tokens and should
    requests: int = 0  # requests that report their tokens
    requests_with_tokens: int = 0  # those that have, or may have, tokens
    requests_undecided: int = 0  # those where it is unknown whether tokens are expected
    may_have_more: bool = False  # whether unread text may contain more


NO_TOKENS = TokenCounts()


def add_token_counts(one: TokenCounts, other: TokenCounts) -> TokenCounts:
    return TokenCounts(
        one.results + other.results,
        one.results_with_tokens + other.results_with_tokens,
        one.results_undecided + other.results_undecided,
        one.failure_text or other.failure_text,
        one.requests + other.requests,
        one.requests_with_tokens + other.requests_with_tokens,
        one.requests_undecided + other.requests_undecided,
        one.may_have_more or other.may_have_more,
    )


def token_check_text(counts: TokenCounts) -> str:
    """``1 result and 47 of 48 requests``: those that have, or may have, tokens. All, if none has."""
    found = []
    kinds = (
        (counts.results, counts.results_with_tokens, "result"),
        (counts.requests, counts.requests_with_tokens, "request"),
    )
    some = counts.results_with_tokens or counts.requests_with_tokens
    for count, having, what in kinds:
        if count:
            share = f"{having} of " if some and having < count else ""
            found.append(f"{share}{count} {what}{'' if count == 1 else 's'}")
    return f"{'at least ' if counts.may_have_more else ''}{' and '.join(found)}"


def result_text(source: FileSource, file_check: FileCheck) -> bytes:
    """The part of a JSON file that would contain a benchmark result; empty for another format."""
    if file_check.format not in ("json", "jsonl") or file_check.state not in ("valid", "unfinished", "unknown"):
        return b""
    small = (1 << 20) if file_check.format == "json" else 2 * RESULT_BYTES
    try:
        return source.head(source.size if source.size <= small else RESULT_BYTES)
    except (FileDamaged, CheckUndecided, OSError):
        return b""


def count_tokens(text: bytes, *, is_json_lines: bool, is_complete: bool = True) -> TokenCounts:
    """Count tokens in JSON or JSON ``is_json_lines``. If not ``is_complete``, the text is the start of a file."""
    values: list[object] = []
    partial = not is_complete
    for part in text.splitlines() if is_json_lines else (text,):
        try:
            value = json.loads(part.removeprefix(b"\xef\xbb\xbf")) if part.strip() else None
        except (ValueError, RecursionError):
            partial = True
            continue
        values += value if isinstance(value, list) else [value]
    if partial and not is_json_lines:
        return _count_in_part(text)
    counts = TokenCounts()
    for value in values:
        if isinstance(value, dict):
            counts = add_token_counts(counts, _count_in_result(value))
    if partial and counts.requests:  # the unread part may have some
        counts = counts._replace(requests_with_tokens=counts.requests_with_tokens + 1, may_have_more=True)
    if partial and counts.results:
        counts = counts._replace(results_with_tokens=counts.results_with_tokens + 1, may_have_more=True)
    return counts


def _count_in_part(text: bytes) -> TokenCounts:
    """Count tokens in the start of a JSON text."""
    of_text = TEXT_ONLY_KEY.search(text.decode(errors="replace")) is not None and not part_generates_no_text(text)
    counts = TokenCounts()
    for key, number in _TOTAL_IN_TEXT.findall(text):
        counts = add_token_counts(
            counts, _one_result(f"{key.decode()} is 0", has_tokens=int(number) > 0, needs_tokens=of_text)
        )
    return counts


def _one_result(failure_text: str, *, has_tokens: bool, needs_tokens: bool) -> TokenCounts:
    """One result; ``failure_text`` are its description if it has no tokens and should."""
    return TokenCounts(
        1,
        int(has_tokens),
        int(not has_tokens and not needs_tokens),
        None if has_tokens or not needs_tokens else failure_text,
    )


def _describes_no_text(descriptions: Iterable[str]) -> bool:
    return any(NO_TEXT_DESCRIPTION.search(word) for word in descriptions)


def generates_no_text(body: JsonObject) -> bool:
    """Whether a result describes itself as one without generated text."""
    return _describes_no_text(word for key in DESCRIPTION_KEYS if isinstance(word := body.get(key), str))


def part_generates_no_text(text: bytes) -> bool:
    """The same, for a part of its JSON text."""
    return _describes_no_text(word.decode(errors="replace") for word in _DESCRIPTION_IN_TEXT.findall(text))


def _generates_text(body: JsonObject) -> bool:
    """Whether the benchmark of a result generates text."""
    if generates_no_text(body):
        return False
    texts = body.get(ALL_TEXTS_KEY)
    return any(TEXT_ONLY_KEY.search(key) for key in body) or (
        isinstance(texts, list) and bool(texts) and not any(texts)
    )


def _count_in_result(body: JsonObject) -> TokenCounts:
    done = body.get("completed")
    for key in TOTAL_KEYS:
        if _is_number(body.get(key)):
            should = _generates_text(body) or (_is_number(done) and done == 0)
            return _one_result(f"{key} is 0", has_tokens=body[key] != 0, needs_tokens=should)
    if _is_number(done) and any(key in body for key in BENCHMARK_KEYS):
        return _one_result("completed is 0", has_tokens=done != 0, needs_tokens=True)
    averages = {
        key: metric["avg"] for key in AVERAGE_KEYS if isinstance(metric := body.get(key), dict) and "avg" in metric
    }
    if any(_is_number(average) for average in averages.values()):
        zero = next((key for key, value in averages.items() if value == 0), None)
        should = _generates_text(body) or averages.get("request_count") == 0
        return _one_result(f"{zero} is 0", has_tokens=zero is None, needs_tokens=should)
    for key in REQUEST_KEYS:
        if _is_number(body.get(key)):
            has, texts = body[key] != 0, [body[name] for name in TEXT_KEYS if isinstance(body.get(name), str)]
            should = bool(texts) and not any(texts)
            return TokenCounts(
                requests=1, requests_with_tokens=int(has), requests_undecided=int(not has and not should)
            )
    return TokenCounts()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def count_tokens_in_log(text: bytes, *, is_complete: bool = True) -> TokenCounts:
    """Count tokens in the results printed at the end of a log; if none has tokens, in the last one.

    A log that is not ``is_complete`` may contain earlier results.
    """
    results: list[dict[bytes, int]] = []
    for key, number in _TOTAL_IN_LOG.findall(text):
        if not results or key in results[-1] or key == b"Successful requests":
            results.append({})
        results[-1][key] = int(number.replace(b",", b"") or 0)
    if not results:
        return TokenCounts()
    last, tokens = results[-1], b"Total generated tokens"
    done = last.get(b"Successful requests")
    if having := sum(bool(result.get(tokens)) for result in results):
        return TokenCounts(len(results), having, may_have_more=not is_complete)
    if done == 0:
        return _one_result("Successful requests: 0", has_tokens=False, needs_tokens=True)
    if tokens not in last:
        return _one_result("", has_tokens=True, needs_tokens=False)
    about = (word.decode(errors="replace") for word in _DESCRIPTION_IN_LOG.findall(text))
    should = done is None or (_TEXT_ONLY_IN_LOG.search(text) is not None and not _describes_no_text(about))
    return _one_result("Total generated tokens: 0", has_tokens=False, needs_tokens=should)
