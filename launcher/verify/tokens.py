"""Generated tokens according to benchmark results, in JSON files and printed in logs.

A result without tokens is a failure only if text should be generated. Benchmarks of embeddings and ranking report
successful requests with 0 tokens.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from exporter.files.formats import FileCheck
from exporter.files.formats.source import CheckUndecided, FileDamaged, FileSource

RESULT_BYTES = 64 << 10  # read from the start of a large file and the end of a log: results are printed there
# Keys for the tokens of all requests.
TOTALS = ("total_output_tokens", "total_generated_tokens", "total_completion_tokens")
EACH = ("output_tokens", "generated_tokens", "completion_tokens")  # keys for the tokens of one request
# AIPerf keys of objects with an average.
AVERAGES = ("output_token_throughput", "output_sequence_length", "request_count")
# Next to one of these, ``completed`` is a number of requests.
OF_A_BENCHMARK = ("num_prompts", "request_throughput", "output_throughput", "total_input_tokens")
# Keys for the text generated for one request.
TEXTS = ("text", "output", "response", "completion", "content", "answer", "generated", "generated_text", "output_text")
ALL_TEXTS = "generated_texts"  # key for the texts of all requests
OF_TEXT = re.compile(r"ttft|time_to_first_token")  # in keys that only generated text has
# Keys by which a result describes itself.
ABOUT = ("backend", "endpoint", "endpoint_type", "task", "task_type", "label", "model", "model_id")
# descriptions of results without generated text
NO_TEXT = re.compile(r"embed|rerank|pooling|classif|reward|score", re.IGNORECASE)

_TOTAL_IN_TEXT = re.compile(rb'(?<!\\)"(%b)"\s{0,8}:\s{0,8}(\d{1,20})(?![\d.])' % "|".join(TOTALS).encode())
_ABOUT_IN_TEXT = re.compile(rb'(?<!\\)"(?:%b)"\s{0,8}:\s{0,8}"([^"]{0,200})"' % "|".join(ABOUT).encode())
_TOTAL_IN_LOG = re.compile(
    rb"\b(Total generated tokens|Successful requests): {1,60}([\d,]{1,24})(?:\.0{1,9})?(?=\s|\Z)"
)
_OF_TEXT_IN_LOG = re.compile(rb"TTFT|Time to First Token")
_ABOUT_IN_LOG = re.compile(rb"^(?:Backend|Endpoint|Model|Task): {1,60}(\S{1,200})", re.MULTILINE)


class TokenCounts(NamedTuple):
    """Results and requests found in a text, and how many have tokens."""

    results: int = 0  # results of complete benchmarks
    results_with_tokens: int = 0  # those that have, or may have, tokens
    results_open: int = 0  # those where it is unknown whether tokens are expected
    empty: str | None = None  # text of a result that has no tokens and should
    requests: int = 0  # requests that report their tokens
    requests_with_tokens: int = 0  # those that have, or may have, tokens
    requests_open: int = 0  # those where it is unknown whether tokens are expected
    more: bool = False  # whether unread text may contain more


def add_token_counts(one: TokenCounts, other: TokenCounts) -> TokenCounts:
    return TokenCounts(
        one.results + other.results,
        one.results_with_tokens + other.results_with_tokens,
        one.results_open + other.results_open,
        one.empty or other.empty,
        one.requests + other.requests,
        one.requests_with_tokens + other.requests_with_tokens,
        one.requests_open + other.requests_open,
        one.more or other.more,
    )


def token_check_text(told: TokenCounts) -> str:
    """``1 result and 47 of 48 requests``: those that have, or may have, tokens. All, if none has."""
    found = []
    kinds = ((told.results, told.results_with_tokens, "result"), (told.requests, told.requests_with_tokens, "request"))
    some = told.results_with_tokens or told.requests_with_tokens
    for count, having, what in kinds:
        if count:
            share = f"{having} of " if some and having < count else ""
            found.append(f"{share}{count} {what}{'' if count == 1 else 's'}")
    return f"{'at least ' if told.more else ''}{' and '.join(found)}"


def result_text(source: FileSource, verdict: FileCheck) -> bytes:
    """The part of a JSON file that would contain a benchmark result; empty for another format."""
    if verdict.format not in ("json", "jsonl") or verdict.state not in ("valid", "unfinished", "unknown"):
        return b""
    small = (1 << 20) if verdict.format == "json" else 2 * RESULT_BYTES
    try:
        return source.head(source.size if source.size <= small else RESULT_BYTES)
    except (FileDamaged, CheckUndecided, OSError):
        return b""


def count_tokens(text: bytes, *, lines: bool, whole: bool = True) -> TokenCounts:
    """Count tokens in JSON or JSON ``lines``. If not ``whole``, the text is the start of a file."""
    values: list[Any] = []
    partial = not whole
    for part in text.splitlines() if lines else (text,):
        try:
            value = json.loads(part.removeprefix(b"\xef\xbb\xbf")) if part.strip() else None
        except (ValueError, RecursionError):
            partial = True
            continue
        values += value if isinstance(value, list) else [value]
    if partial and not lines:
        return _tokens_of_part(text)
    told = TokenCounts()
    for value in values:
        if isinstance(value, dict):
            told = add_token_counts(told, _tokens_of(value))
    if partial and told.requests:  # the unread part may have some
        told = told._replace(requests_with_tokens=told.requests_with_tokens + 1, more=True)
    if partial and told.results:
        told = told._replace(results_with_tokens=told.results_with_tokens + 1, more=True)
    return told


def _tokens_of_part(text: bytes) -> TokenCounts:
    """Count tokens in the start of a JSON text."""
    of_text = OF_TEXT.search(text.decode(errors="replace")) is not None and not without_text_in_part(text)
    told = TokenCounts()
    for key, number in _TOTAL_IN_TEXT.findall(text):
        told = add_token_counts(told, _result(f"{key.decode()} is 0", has=int(number) > 0, should=of_text))
    return told


def _result(words: str, *, has: bool, should: bool) -> TokenCounts:
    """One result; ``words`` are its description if it has no tokens and should."""
    return TokenCounts(1, int(has), int(not has and not should), None if has or not should else words)


def _is_without_text(about: Iterable[str]) -> bool:
    return any(NO_TEXT.search(word) for word in about)


def generates_no_text(body: Mapping[str, Any]) -> bool:
    """Whether a result describes itself as one without generated text."""
    return _is_without_text(body[key] for key in ABOUT if isinstance(body.get(key), str))


def without_text_in_part(text: bytes) -> bool:
    """The same, for a part of its JSON text."""
    return _is_without_text(word.decode(errors="replace") for word in _ABOUT_IN_TEXT.findall(text))


def _is_of_text(body: Mapping[str, Any]) -> bool:
    """Whether the benchmark of a result generates text."""
    if generates_no_text(body):
        return False
    texts = body.get(ALL_TEXTS)
    return any(OF_TEXT.search(key) for key in body) or (isinstance(texts, list) and bool(texts) and not any(texts))


def _tokens_of(body: Mapping[str, Any]) -> TokenCounts:
    done = body.get("completed")
    for key in TOTALS:
        if _is_number(body.get(key)):
            should = _is_of_text(body) or (_is_number(done) and done == 0)
            return _result(f"{key} is 0", has=body[key] != 0, should=should)
    if _is_number(done) and any(key in body for key in OF_A_BENCHMARK):
        return _result("completed is 0", has=done != 0, should=True)
    averages = {key: body[key]["avg"] for key in AVERAGES if isinstance(body.get(key), dict) and "avg" in body[key]}
    if any(_is_number(average) for average in averages.values()):
        zero = next((key for key, value in averages.items() if value == 0), None)
        should = _is_of_text(body) or averages.get("request_count") == 0
        return _result(f"{zero} is 0", has=zero is None, should=should)
    for key in EACH:
        if _is_number(body.get(key)):
            has, texts = body[key] != 0, [body[name] for name in TEXTS if isinstance(body.get(name), str)]
            should = bool(texts) and not any(texts)
            return TokenCounts(requests=1, requests_with_tokens=int(has), requests_open=int(not has and not should))
    return TokenCounts()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def count_tokens_in_log(text: bytes, *, whole: bool = True) -> TokenCounts:
    """Count tokens in the results printed at the end of a log; if none has tokens, in the last one.

    A log that is not ``whole`` may contain earlier results.
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
        return TokenCounts(len(results), having, more=not whole)
    if done == 0:
        return _result("Successful requests: 0", has=False, should=True)
    if tokens not in last:
        return _result("", has=True, should=False)
    about = (word.decode(errors="replace") for word in _ABOUT_IN_LOG.findall(text))
    should = done is None or (_OF_TEXT_IN_LOG.search(text) is not None and not _is_without_text(about))
    return _result("Total generated tokens: 0", has=False, should=should)
