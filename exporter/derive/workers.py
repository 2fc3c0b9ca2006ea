"""Which worker a file belongs to, by its name."""

import re
from collections.abc import Mapping
from functools import lru_cache

_WORDS = ("worker", "rank", "shard", "proc", "gpu", "task", "part")


@lru_cache(maxsize=64)
def _number_after(words: frozenset[str]) -> re.Pattern[str]:
    alternatives = "|".join(re.escape(word) for word in sorted(words, key=lambda word: (-len(word), word)))
    return re.compile(rf"(?:^|[^A-Za-z])({alternatives})[-_]?w?(\d+)(?!\d)", re.IGNORECASE)


def worker_rank(name: str, ranks: Mapping[tuple[str, int], int]) -> int | None:
    """The rank of the worker that a file name such as ``output_worker_3.jsonl`` tells, or None.

    Only a number behind a word for a worker counts: ``checkpoint_500.pt`` is nobody's.
    ``ranks`` is by role and index: a number behind the name of a role counts within the role, one
    behind another word for a worker is a rank.
    """
    roles = {role.casefold(): role for role, _ in ranks}
    match = _number_after(frozenset((*_WORDS, *roles))).search(name)
    if match is None:
        return None
    number = int(match[2])
    return ranks.get((roles.get(match[1].casefold(), ""), number), number)
