"""Text of logs, names and paths in ``report.md`` is never markup."""

import types
import typing
from collections.abc import Mapping

from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from exporter.contract.records import Record
from exporter.contract.report import Report
from launcher.report.text import render_report

READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
MARKUP = ("link_open", "image", "html_inline", "html_block", "code_inline", "code_block", "fence", "blockquote_open")
PIECES = st.sampled_from(
    [
        *"[]()<>!|`#\\:~-=*+&.1 \n\r\t\x0b\x85\u2028",
        "http://evil",
        "<script>",
        "<!--",
        "](",
        "]: ",
        "\\](",
        "![x](y)",
        "x",
    ]
)


def filled(kind: object, text: str) -> object:
    """A value of this type with the text in every place for text."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return filled(next(argument for argument in arguments if argument is not types.NoneType), text)
    if origin is tuple:
        inner = arguments[:1] if arguments[-1] is ... else arguments
        return tuple(filled(argument, text) for argument in inner)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"file": text, "problem": text} if arguments[0] is str else {1: filled(arguments[1], text)}
    if isinstance(kind, type) and issubclass(kind, Record):
        hints = typing.get_type_hints(kind)
        return kind(**{name: filled(hints[name], text) for name in kind.FIELDS})
    if isinstance(kind, type) and hasattr(kind, "_fields"):
        return kind(**{name: filled(hint, text) for name, hint in typing.get_type_hints(kind).items()})
    return {str: text, bool: False, int: 1, float: 1.0}.get(typing.cast(type, kind))


def marks(text: str) -> list[str]:
    """Headings, tables and markup of a report in which every text is this one."""
    tokens = READER.parse(render_report(typing.cast(Report, filled(Report, text))))
    inner = [child.type for token in tokens for child in token.children or ()]
    found = [token.type for token in tokens if token.type in (*MARKUP, "heading_open", "tr_open", "td_open", "hr")]
    return found + [name for name in inner if name in MARKUP]


@given(st.lists(PIECES, max_size=12).map("".join))
@example("<script>alert(1)</script>")
@example("![x](http://evil)")
@example("[x](javascript:alert(1))")
@example("[x]: http://evil\n[x]")
@example("\\<b> \\`a` \\| <http://evil>")
@example("# a\n===\n> b\n~~~")
def test_a_hostile_text_makes_no_markup(text: str) -> None:
    assert marks(text) == marks("x")
