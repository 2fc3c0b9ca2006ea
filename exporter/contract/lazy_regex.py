"""Regular expressions that are compiled on first use: most programs use few of them, and 100 take 50 ms."""

import re
from typing import AnyStr, cast


class _CompiledRegex:
    """Has the methods of a compiled pattern as attributes. Without ``__getattr__``, their calls are as fast."""


class _LazyRegex:
    """Stands for a pattern until its first use."""

    def __init__(self, text: str | bytes, flags: int) -> None:
        self._text, self._flags = text, flags

    def __getattr__(self, name: str) -> object:
        regex = re.compile(self._text, self._flags)
        vars(self).update({key: getattr(regex, key) for key in dir(regex) if not key.startswith("_")})
        object.__setattr__(self, "__class__", _CompiledRegex)
        return getattr(regex, name)


def lazy_regex(text: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """What ``re.compile`` gives, for modules that declare many patterns."""
    return cast(re.Pattern[AnyStr], _LazyRegex(text, flags))
