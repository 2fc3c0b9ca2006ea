"""What results of benchmarks tell of the tokens that were generated: in JSON, and where they are printed in a log.

A result without tokens is a failure only where there should be some: benchmarks of embeddings and of ranking report
requests that have succeeded, with 0 tokens.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from exporter.files.formats import FileCheck
from exporter.files.formats.source import CheckUndecided, FileDamaged, FileSource

RESULT_BYTES = 64 << 10
"""Of the beginning of a large file, and of the end of a log, in which results of benchmarks are looked for."""
TOTALS = ("total_output_tokens", "total_generated_tokens", "total_completion_tokens")
"""What a benchmark calls the tokens of all its requests,"""
EACH = ("output_tokens", "generated_tokens", "completion_tokens")  # and what is told of one request
AVERAGES = ("output_token_throughput", "output_sequence_length", "request_count")
"""Of AIPerf: objects with their average."""
OF_A_BENCHMARK = ("num_prompts", "request_throughput", "output_throughput", "total_input_tokens")
"""Beside one of these, ``completed`` is a number of requests."""
TEXTS = ("text", "output", "response", "completion", "content", "answer", "generated", "generated_text", "output_text")
"""What holds the text that was generated for one request,"""
ALL_TEXTS = "generated_texts"  # and for all of them
OF_TEXT = re.compile(r"ttft|time_to_first_token")  # in names of values that only generated text has
ABOUT = ("backend", "endpoint", "endpoint_type", "task", "task_type", "label", "model", "model_id")
"""What a result says of itself."""
NO_TEXT = re.compile(r"embed|rerank|pooling|classif|reward|score", re.IGNORECASE)  # in those where no text is generated

_TOTAL_IN_TEXT = re.compile(rb'(?<!\\)"(%b)"\s{0,8}:\s{0,8}(\d{1,20})(?![\d.])' % "|".join(TOTALS).encode())
_ABOUT_IN_TEXT = re.compile(rb'(?<!\\)"(?:%b)"\s{0,8}:\s{0,8}"([^"]{0,200})"' % "|".join(ABOUT).encode())
_TOTAL_IN_LOG = re.compile(
    rb"\b(Total generated tokens|Successful requests): {1,60}([\d,]{1,24})(?:\.0{1,9})?(?=\s|\Z)"
)
_OF_TEXT_IN_LOG = re.compile(rb"TTFT|Time to First Token")
_ABOUT_IN_LOG = re.compile(rb"^(?:Backend|Endpoint|Model|Task): {1,60}(\S{1,200})", re.MULTILINE)


class TokenCounts(NamedTuple):
    """What a text tells of tokens."""

    results: int = 0  # results of whole benchmarks,
    results_with_tokens: int = 0  # those that have some, or may have,
    results_open: int = 0  # and those of which it cannot be told whether they should have some
    empty: str | None = None  # what one without any token says that should have some
    requests: int = 0  # requests that tell their tokens,
    requests_with_tokens: int = 0  # those that have some, or may have,
    requests_open: int = 0  # and those of which it cannot be told whether they should have some
    more: bool = False  # whether there may be more of them where nobody has looked


def add_token_counts(one: TokenCounts, other: TokenCounts) -> TokenCounts:
    """What two texts tell together."""
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
    """``1 result and 47 of 48 requests``: how many have tokens, or may have; all of them where none has."""
    found = []
    kinds = ((told.results, told.results_with_tokens, "result"), (told.requests, told.requests_with_tokens, "request"))
    some = told.results_with_tokens or told.requests_with_tokens
    for count, having, what in kinds:
        if count:
            share = f"{having} of " if some and having < count else ""
            found.append(f"{share}{count} {what}{'' if count == 1 else 's'}")
    return f"{'at least ' if told.more else ''}{' and '.join(found)}"


def result_text(source: FileSource, verdict: FileCheck) -> bytes:
    """The part of a JSON file in which the result of a benchmark would stand; nothing of another file."""
    if verdict.format not in ("json", "jsonl") or verdict.state not in ("valid", "unfinished", "unknown"):
        return b""
    small = (1 << 20) if verdict.format == "json" else 2 * RESULT_BYTES
    try:
        return source.head(source.size if source.size <= small else RESULT_BYTES)
    except (FileDamaged, CheckUndecided, OSError):
        return b""


def count_tokens(text: bytes, *, lines: bool, whole: bool = True) -> TokenCounts:
    """What JSON or JSON ``lines`` tell of tokens; of a text that is not ``whole``, its beginning."""
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
    if partial and told.requests:  # what was not looked at may have some
        told = told._replace(requests_with_tokens=told.requests_with_tokens + 1, more=True)
    if partial and told.results:
        told = told._replace(results_with_tokens=told.results_with_tokens + 1, more=True)
    return told


def _tokens_of_part(text: bytes) -> TokenCounts:
    """What the beginning of a JSON text tells."""
    of_text = OF_TEXT.search(text.decode(errors="replace")) is not None and not without_text_in_part(text)
    told = TokenCounts()
    for key, number in _TOTAL_IN_TEXT.findall(text):
        told = add_token_counts(told, _result(f"{key.decode()} is 0", has=int(number) > 0, should=of_text))
    return told


def _result(words: str, *, has: bool, should: bool) -> TokenCounts:
    """One result, and what to say where it has no tokens and should."""
    return TokenCounts(1, int(has), int(not has and not should), None if has or not should else words)


def _is_without_text(about: Iterable[str]) -> bool:
    return any(NO_TEXT.search(word) for word in about)


def generates_no_text(body: Mapping[str, Any]) -> bool:
    """Whether a result says of itself that no text was to be generated."""
    return _is_without_text(body[key] for key in ABOUT if isinstance(body.get(key), str))


def without_text_in_part(text: bytes) -> bool:
    """The same of a part of its JSON text."""
    return _is_without_text(word.decode(errors="replace") for word in _ABOUT_IN_TEXT.findall(text))


def _is_of_text(body: Mapping[str, Any]) -> bool:
    """Whether a result is of a benchmark that has text generated."""
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
    """What the results that a log ends in tell; where none has tokens, the last of them.

    Before the end of a log that is not ``whole`` there may be more.
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
