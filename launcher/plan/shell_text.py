"""Variables and placeholders in the text of a shell, each with what is around it. Pure.

This follows bash as far as it decides whether the shell expands a variable at a place, and with which quotes.
"""

import re
from collections.abc import Generator, Iterator
from functools import lru_cache

# what is around a place: nothing is expanded in single quotes, in `$'...'` and in a here document after <<'EOF'
CODE, DOUBLE, SINGLE, ANSI, DOCUMENT, LITERAL_DOCUMENT = "", '"', "'", "$'", "<<", "<<'"

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_TOKEN = re.compile(
    rf"\\(?:\$\{{{_NAME}\}}|.)|\$\$|\$(?P<brace>\{{)?(?P<variable>{_NAME})(?(brace)\}})"
    rf"|\{{\{{(?P<literal>{_NAME})\}}\}}|\{{(?P<name>{_NAME})\}}"
    r"|\$?['\"]|\$?\(|\$\{(?!\{)|[)}`\n]|(?<![^\s;&|()<>`])#|\bcase(?=\s[^\n;]{1,200}\sin\s)|\besac\b"
    r"|(?<!<)<<(?P<tabs>-?)[ \t]*(?P<end>'[^'\n]+'|\"[^\"\n]+\"|\\?[\w.-]+)",
    re.DOTALL,
)
_PARTS = {
    "$(": (")", CODE),
    "(": (")", CODE),
    "`": ("`", CODE),
    "case": ("esac", CODE),
    "'": ("'", SINGLE),
    "$'": ("'", ANSI),
    '"': ('"', DOUBLE),
    '$"': ('"', DOUBLE),
}  # what ends the part that a mark begins, and what is around its text; ``${`` changes nothing


@lru_cache(maxsize=64)  # all tasks of a role have the same text
def shell_tokens(text: str) -> tuple[tuple[re.Match[str], str], ...]:
    """Each ``$variable``, ``{name}`` and ``{{literal}}``, by these groups, with what is around it.

    What a comment contains is left out.
    """
    return tuple(_scan(text, 0, len(text), CODE))


def expanded_variables(text: str) -> tuple[str, ...]:
    """Names of the variables that the shell expands."""
    unexpanded = (SINGLE, ANSI, LITERAL_DOCUMENT)
    found = (match["variable"] for match, around in shell_tokens(text) if around not in unexpanded)
    return tuple(dict.fromkeys(name for name in found if name))


def _scan(text: str, position: int, end: int, base: str) -> Iterator[tuple[re.Match[str], str]]:
    """Tokens of a part of the text; ``base`` is what is around it."""
    # open parts by what begins them, innermost last; documents after this line
    parts, documents = [("", "", base)], list[re.Match[str]]()
    word_end = -1  # end of an escape or part after which a word goes on, also with `#`
    while (match := _TOKEN.search(text, position, end)) is not None:
        mark, position = match[0], match.end()
        opening, part_end, around = parts[-1]
        if _is_token(match):
            yield match, around
        elif around in (SINGLE, ANSI):
            if mark in ("'", "$'") or (mark, around) == ("\\'", SINGLE):
                parts.pop()
            elif mark[0] != "\\":
                position = match.start() + 1
        elif mark[0] == "\\" or mark == "$$":
            word_end = position if mark != "\\\n" else word_end
        elif mark in (part_end, f"${part_end}"):
            parts.pop()
            word_end = position if opening != "(" else word_end
        elif mark == "${":
            parts.append((mark, "}", around))
        elif mark in ("$(", "`") or (mark in ('"', '$"') and part_end == "}"):
            parts.append((mark, *_PARTS[mark]))
        elif around in (DOUBLE, DOCUMENT):
            position = match.start() + 1
        elif mark in _PARTS:
            parts.append((mark, *_PARTS[mark]))
        elif mark == "#" and opening != "${" and match.start() != word_end:
            in_backticks = any(part[0] == "`" for part in parts)
            stop = re.compile(r"[`\n]" if in_backticks else r"\n").search(text, position, end)
            position = end if stop is None else stop.start()
        elif match["end"]:
            documents.append(match)
        elif mark == "\n":
            for document in documents:
                position = yield from _scan_document(text, position, end, document)
            documents.clear()


def _scan_document(
    text: str, position: int, end: int, start: re.Match[str]
) -> Generator[tuple[re.Match[str], str], None, int]:
    """Tokens of a here document; returns where it ends."""
    word = start["end"].strip("\\'\"")
    last_line = rf"^\t*{re.escape(word)}$" if start["tabs"] else rf"^{re.escape(word)}$"
    last = re.compile(last_line, re.MULTILINE).search(text, position, end)
    if last is None:
        return position  # no document: ``$((1 << n))``
    if word == start["end"]:
        yield from _scan(text, position, last.start(), DOCUMENT)
    else:
        found = _TOKEN.finditer(text, position, last.start())
        yield from ((match, LITERAL_DOCUMENT) for match in found if _is_token(match))
    return last.end()


def _is_token(match: re.Match[str]) -> bool:
    """Whether a match is a variable, a placeholder or a literal, not syntax around them."""
    return any(match[group] for group in ("variable", "name", "literal"))
