"""JSON texts (RFC 8259, and extensions of Python's json): small ones whole, of large ones both ends."""

import json
import re

from exporter.files.formats.source import FIRST_BYTES, MOST_BYTES, CheckUndecided, FileDamaged, FileSource, ValidFile

NAME = "json"
EXTENSIONS = (".json",)
WINDOW_BYTES = 64 << 10  # read of each end of a text that is too large to parse
WHITE_SPACE = b" \t\r\n"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CLOSERS = {b"{": b"}", b"[": b"]", b'"': b'"'}
INDENTED = re.compile(rb"\s*[\[{][ \t]*\r?\n[ \t]+\S")  # start of an indented text
INDENTED_END = re.compile(rb"\n[ \t]+[\]}]\s*\Z")
LITERALS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
NUMBER_BEGINNINGS = (".", "e", "E", "e+", "e-", "E+", "E-")  # possible rest of a truncated number after a valid one
IN_THE_MIDDLE = "ends in the middle of a value"

_DECODER = json.JSONDecoder(parse_float=len, parse_int=len)  # accepts numbers of any length without storing them


def claims(source: FileSource) -> bool:
    """Whether the text begins with a bracket."""
    return source.head(FIRST_BYTES).removeprefix(BYTE_ORDER_MARK).lstrip(WHITE_SPACE)[:1] in (b"{", b"[")


def inspect(source: FileSource) -> ValidFile:
    """Count the items if the root is an array. Of a large text, both ends must fit one value."""
    if source.size > MOST_BYTES:
        return _check_ends(source)
    value = parse_json(decode(source.head(source.size)))
    return ValidFile(NAME, len(value) if isinstance(value, list) else None)


def decode(data: bytes) -> str:
    """Decode a whole JSON file."""
    try:
        text = data.decode(json.detect_encoding(data), "surrogatepass")
    except UnicodeDecodeError as error:
        refuse_nul(data)
        raise FileDamaged(f"byte {error.start} (0x{data[error.start]:02x}) is not {error.encoding.upper()}") from error
    if "\0" in text:
        refuse_nul(data)
    return text


def refuse_nul(data: bytes, where: str = "") -> None:
    """Raise FileDamaged if there are NUL bytes, which a lost write leaves."""
    if b"\0" in data:
        raise FileDamaged(f"has {data.count(0)} NUL bytes{where}: what was written there is lost")


def read_ends(source: FileSource) -> tuple[bytes, bytes]:
    """Beginning and end of a text of lines; all of a small one, and nothing."""
    whole = source.size <= MOST_BYTES
    head = source.head(source.size if whole else WINDOW_BYTES)
    tail = b"" if whole else source.tail(WINDOW_BYTES)
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise CheckUndecided("is UTF-16 text")
    refuse_nul(head)
    refuse_nul(tail, " near its end")
    return head, tail


def parse_json(text: str) -> object:
    """Parse a text; each number becomes the length of its text."""
    try:
        return _DECODER.decode(text.removeprefix("\ufeff"))
    except json.JSONDecodeError as error:
        if not text.strip():
            raise FileDamaged("contains only white space") from error
        if is_truncated(error):
            raise FileDamaged(IN_THE_MIDDLE) from error
        raise FileDamaged(f"is not JSON at line {error.lineno}, column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise CheckUndecided("is nested too deeply to be checked") from error


def is_truncated(error: json.JSONDecodeError) -> bool:
    """Whether more text could have made it valid."""
    rest = error.doc[error.pos :].rstrip()
    return (
        error.msg.startswith("Unterminated string")
        or (error.msg.startswith("Expecting value") and any(word.startswith(rest) for word in LITERALS))
        or (error.msg.startswith("Invalid \\u") and len(rest) <= len("uXXXX") and '"' not in rest)
        or rest in ("", *NUMBER_BEGINNINGS)
    )


def _check_ends(source: FileSource) -> ValidFile:
    head, tail = source.head(WINDOW_BYTES), source.tail(WINDOW_BYTES)
    if json.detect_encoding(head) not in ("utf-8", "utf-8-sig"):
        raise CheckUndecided("is large and not in UTF-8")
    refuse_nul(head, " near its beginning")
    refuse_nul(tail, " near its end")
    text = head.removeprefix(BYTE_ORDER_MARK).lstrip(WHITE_SPACE)
    closer, end = CLOSERS.get(text[:1]), tail.rstrip(WHITE_SPACE)
    if not text or not end:
        raise CheckUndecided("begins or ends with a lot of white space")
    if closer is None:
        raise FileDamaged("is large, but does not begin with a bracket")
    if not end.endswith(closer):
        raise FileDamaged(f"begins with {text[:1].decode()} but does not end with {closer.decode()}")
    if _closes_inner(end):
        raise FileDamaged("ends with a bracket that closes an inner value")
    line, newline, _ = text.partition(b"\n")
    if newline and _is_value(line):
        raise FileDamaged("has text after its first value")
    if INDENTED.match(text) and INDENTED_END.search(tail):
        raise CheckUndecided("ends with a bracket that seems to close an inner value")
    return ValidFile(NAME, None, "only its beginning and end were checked")


def _closes_inner(end: bytes) -> bool:
    """Whether the opening bracket of the last one lies in these bytes, so that it is not the root's."""
    if end.endswith(b'"'):
        return False
    # the end lies outside strings, and so does every second piece before it; a leading quote may be escaped
    plain = end.lstrip(b'\\"').replace(b"\\\\", b"").replace(b'\\"', b"")
    depth = 0
    for code in reversed(b"".join(plain.split(b'"')[::-2][::-1])):
        if code in b"]}":
            depth += 1
        elif code in b"[{":
            depth -= 1
            if not depth:
                return True
    return False


def _is_value(line: bytes) -> bool:
    try:
        parse_json(line.decode("utf-8", "surrogatepass"))
    except (FileDamaged, CheckUndecided, UnicodeDecodeError):
        return False
    return True
