"""Which worker a file belongs to, by its name."""

import re
from collections.abc import Mapping
from functools import lru_cache

_SURE = ("worker", "rank")  # before the number of a worker;
_WORDS = (*_SURE, "shard", "proc", "gpu", "task", "part")  # and what stands before other numbers too
_OF_A_NODE = re.compile(r"(?:^|[^A-Za-z])(?:node|host)[-_]?\d+(?!\d)", re.IGNORECASE)
_LOCAL = re.compile(r"(?:^|[^A-Za-z])local[-_]?$", re.IGNORECASE)


@lru_cache(maxsize=64)
def _number_after(words: frozenset[str]) -> re.Pattern[str]:
    alternatives = "|".join(re.escape(word) for word in sorted(words, key=lambda word: (-len(word), word)))
    return re.compile(rf"(?:^|[^A-Za-z])({alternatives})[-_]?w?(\d+)(?!\d)", re.IGNORECASE)


def rank_in_file_name(name: str, ranks: Mapping[tuple[str, int], int], *, sure: bool = False) -> int | None:
    """The rank of the worker that a file name such as ``output_worker_3.jsonl`` tells, or None.

    Only a number behind a word for a worker counts: ``checkpoint_500.pt`` is nobody's, and ``node0_gpu3`` counts
    within its node. ``ranks`` is by role and index: a number behind the name of a role counts within the role, one
    behind another word for a worker is a rank. ``sure``: only behind words that files which are no worker's own do
    not have, as shards of an even size do.
    """
    roles = {role.casefold(): role for role, _ in ranks}
    for match in _number_after(frozenset((*(_SURE if sure else _WORDS), *roles))).finditer(name):
        word, number = match[1].casefold(), int(match[2])
        if word not in roles and _is_local(name, word, match.start(1)):
            continue
        return ranks.get((roles.get(word, ""), number), number)
    return None


def _is_local(name: str, word: str, start: int) -> bool:
    """Whether the number behind this word counts within a node that stands before it."""
    before = name[:start]
    return (word == "gpu" or _LOCAL.search(before) is not None) and _OF_A_NODE.search(before) is not None
