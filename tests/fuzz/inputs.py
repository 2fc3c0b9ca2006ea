"""Hypothesis strategies for foreign data: valid files with arbitrary damage."""

from collections.abc import Sequence

from hypothesis import strategies as st

PIECES = [
    *(
        b"",
        b"\0",
        b"\xff",
        b"\n",
        b"\r\n",
        b'"',
        b"\\",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"=",
        b"|",
        b"-",
        b"<",
        b"%",
    ),
    *(
        b"null",
        b"true",
        b"NaN",
        b"Infinity",
        b"-1",
        b"1e999",
        b"9" * 40,
        b"9" * 5000,
        b"0x",
        b"1.5",
        b'"\\ud800"',
        b"\xed\xa0\x80",
    ),
    *(b"[" * 2000, b'{"a":' * 2000, b"(" * 2000, b"\xf0\x9f\x98\x80", b"\x1b[31m", b"\xe2\x80\xae", b" " * 500),
    *(bytes(8), b"\xff" * 8, b"\x7f\xff\xff\xff\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"[0-99999999]", b"\xc2\xb2"),
]
_PLACE = st.floats(0, 1)
_EDITS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "replace", "remove", "repeat", "truncate"]),
        _PLACE,
        st.integers(1, 40),
        st.sampled_from(PIECES) | st.binary(min_size=1, max_size=12),
    ),
    max_size=4,
)


def damaged(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """A valid input with up to four edits, or any short text."""
    return st.builds(_edit, st.sampled_from(list(seeds)), _EDITS) | st.binary(max_size=80)


def damaged_text(seeds: Sequence[str]) -> st.SearchStrategy[str]:
    """The same as text that was UTF-8."""
    return damaged([seed.encode() for seed in seeds]).map(lambda data: data.decode("utf-8", "replace"))


def _edit(data: bytes, edits: Sequence[tuple[str, float, int, bytes]]) -> bytes:
    for kind, place, count, piece in edits:
        at = int(place * len(data))
        if kind == "insert":
            data = data[:at] + piece + data[at:]
        elif kind == "replace":
            data = data[:at] + piece + data[at + len(piece) :]
        elif kind == "remove":
            data = data[:at] + data[at + count :]
        elif kind == "repeat":
            data = data[:at] + data[at : at + count] * 20 + data[at + count :]
        else:
            data = data[:at]
    return data
