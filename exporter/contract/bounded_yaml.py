"""YAML within limits: no text makes a program hang, run out of memory or fail in the middle of a structure. Pure.

Aliases (``*name``) make a short file large: ten levels of ten aliases each are ten thousand million values.
"""

from collections import Counter
from collections.abc import Hashable

import yaml

MOST_BYTES = 1 << 20  # of a file; the parser takes about 1 microsecond for a character
MOST_VALUES = 40_000  # keys and values, with aliases expanded; the parser takes a second for them
MOST_LEVELS = 64  # of lists and mappings; Python's own limit is some hundred
MOST_NUMBER = 1_000  # characters of a number or date; Python shows no number of more than 4,300 digits
MOST_WORD_BYTES = 128 * 1024 - 1  # of a text; Linux passes no longer argument or variable to a program


OPEN_QUOTE = "while scanning a quoted scalar"  # PyYAML's words for where it was
NUMBERS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp"))


class LimitError(yaml.MarkedYAMLError):
    """YAML beyond a limit; ``problem`` says which."""

    def __init__(self, problem: str, event: yaml.Event) -> None:
        super().__init__(None, None, problem, event.start_mark)  # type: ignore[arg-type] # a mark of the C parser is one


class WrittenInt(int):
    """A whole number with its text in the file: YAML reads ``0123`` as 83 and ``12:00:00`` as 43200."""

    text: str


class WrittenFloat(float):
    """A number with its text in the file, such as ``3.10``."""

    text: str


def _represent_number(dumper: yaml.SafeDumper, number: WrittenInt | WrittenFloat) -> yaml.ScalarNode:
    kind = "int" if isinstance(number, int) else "float"
    return dumper.represent_scalar(f"tag:yaml.org,2002:{kind}", number.text)


yaml.SafeDumper.add_representer(WrittenInt, _represent_number)
yaml.SafeDumper.add_representer(WrittenFloat, _represent_number)


class BoundedLoader(yaml.SafeLoader):
    """Loader that stops at the first value beyond a limit. Raises LimitError.

    A number that Python writes in another way keeps its text: see ``WrittenInt`` and ``WrittenFloat``.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = self._level = self._deepest = 0
        self._anchored: dict[str, tuple[int, int]] = {}  # number of values in each, and levels below it

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call] # the stubs have no types of the parser
        values, deepest = self._values, self._deepest
        self._deepest = self._level
        if isinstance(event, yaml.AliasEvent):
            more, levels = self._anchored.get(str(event.anchor), (1, 0))
            self._values += more
            self._deepest += levels
        else:
            self._values += 1
        self._require_limits(event)
        inner = isinstance(event, yaml.CollectionStartEvent)
        self._level += inner
        node = super().compose_node(parent, index)
        self._level -= inner
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchored:
                raise LimitError(f"*{event.anchor} is inside of what it stands for", event)
        elif isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            self._anchored[event.anchor] = (self._values - values, self._deepest - self._level)
        if isinstance(node, yaml.ScalarNode) and len(node.value) > MOST_NUMBER and node.tag in NUMBERS:
            raise LimitError(f"a number of {len(node.value):,} characters; write a shorter one, or quote a text", event)
        self._deepest = max(self._deepest, deepest)
        return node

    def _require_limits(self, event: yaml.Event) -> None:
        problem = None
        if self._values > MOST_VALUES:
            problem = f"more than {MOST_VALUES:,} keys and values, counting those of an alias each time; write fewer"
        elif self._deepest + isinstance(event, yaml.CollectionStartEvent) > MOST_LEVELS:
            problem = f"lists and mappings are nested more than {MOST_LEVELS} levels deep; write fewer levels"
        elif isinstance(event, yaml.ScalarEvent):
            size = len(event.value.encode("utf-8", "surrogatepass"))
            if size > MOST_WORD_BYTES:
                problem = (
                    f"a text of {size:,} bytes; Linux passes at most {MOST_WORD_BYTES:,} in one argument or variable, "
                    "so put the text into a file and name that"
                )
        if problem is not None:
            raise LimitError(problem, event)


def _construct_number(loader: BoundedLoader, node: yaml.ScalarNode) -> int | float:
    is_whole = node.tag.endswith(":int")
    value: int | float = loader.construct_yaml_int(node) if is_whole else loader.construct_yaml_float(node)
    if str(value) == node.value:
        return value
    written = WrittenInt(value) if is_whole else WrittenFloat(value)
    written.text = node.value
    return written


BoundedLoader.add_constructor("tag:yaml.org,2002:int", _construct_number)
BoundedLoader.add_constructor("tag:yaml.org,2002:float", _construct_number)


class UniqueKeyLoader(BoundedLoader):
    """Refuses a key that appears twice, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        counts = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [name for name, count in counts.items() if count > 1]:
            raise yaml.MarkedYAMLError(problem=f"{twice[0]} appears twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def _place(mark: yaml.Mark) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"


_CURES = {
    "mapping values are not allowed here": "indent the keys of a mapping alike, write a space after a colon, "
    'and put a text with ": " in quotes',
    "expected <block end>, but found '<block mapping start>'": "begin the keys of a mapping in the same column",
    "expected <block end>, but found '<scalar>'": "put the whole text in quotes",
    "could not find expected ':'": "write a colon and a space after a key",
    "found unknown escape character": "put a pattern in single quotes",
    "expected alphabetic or numeric character": "put a text that begins with * or & in quotes",
    "found character": "put the text in quotes",
    "but found another document": "write one document in a file",
}  # of what PyYAML reports, by the beginning of its words


def _hint(text: str, problem: str, mark: yaml.Mark) -> str:
    """The cure, or a question about a quoted text that began on an earlier line and ended on this one."""
    if text.startswith("\t", mark.index):
        is_indentation = not text[text.rfind("\n", 0, mark.index) + 1 : mark.index].strip()
        return "; indent with spaces" if is_indentation else "; write a space instead of the tab"
    opening = None
    try:
        for token in yaml.scan(text, Loader=yaml.SafeLoader):
            if token.start_mark.index > mark.index:
                break
            is_quoted = isinstance(token, yaml.ScalarToken) and token.style in ("'", '"')
            if is_quoted and token.start_mark.line < token.end_mark.line == mark.line:
                opening = token.start_mark
    except yaml.YAMLError:
        pass  # the problem itself
    if opening is not None:
        return f"; is the quote of {_place(opening)} closed?"
    return next((f"; {cure}" for words, cure in _CURES.items() if problem.startswith(words)), "")


def yaml_problem(error: Exception, text: str) -> str:
    """What is wrong with a text that a loader refused, with the place."""
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position)
        column = error.position - text.rfind("\n", 0, error.position)
        character = f"U+{ord(text[error.position]):04X}"
        return f"line {line + 1}, column {column}: not YAML: the character {character} is not allowed; write it escaped"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        if isinstance(error, LimitError):
            return f"{_place(mark)}: {error.problem}"
        if error.context == OPEN_QUOTE and error.context_mark is not None:
            return f"{_place(error.context_mark)}: not YAML: the quote is not closed"
        return f"{_place(mark)}: not YAML: {error.problem}{_hint(text, str(error.problem), mark)}"
    return f"not YAML: {error if isinstance(error, yaml.YAMLError) else f'{type(error).__name__}: {error}'}"


def parse_yaml(text: str) -> object:
    """Parse a YAML text. Raises ValueError, which says what is wrong and where."""
    try:
        return yaml.load(text, Loader=BoundedLoader)  # noqa: S506 - based on SafeLoader
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise ValueError(yaml_problem(error, text)) from error
