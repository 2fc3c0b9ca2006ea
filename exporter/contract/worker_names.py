"""Worker of a file, found by the file's name."""

import re
from collections.abc import Mapping
from functools import lru_cache

_WORKER_WORDS = ("worker", "rank")  # words used only before the number of a worker
_NUMBERED_WORDS = (*_WORKER_WORDS, "shard", "proc", "gpu", "task", "part")  # words used before other numbers too
_NODE_NUMBER = re.compile(r"(?:^|[^A-Za-z])(?:node|host)[-_]?\d+(?!\d)", re.IGNORECASE)
_LOCAL_WORD = re.compile(r"(?:^|[^A-Za-z])local[-_]?$", re.IGNORECASE)


@lru_cache(maxsize=64)
def _number_pattern(words: frozenset[str]) -> re.Pattern[str]:
    alternatives = "|".join(re.escape(word) for word in sorted(words, key=lambda word: (-len(word), word)))
    return re.compile(rf"(?:^|[^A-Za-z])({alternatives})[-_]?w?(\d+)(?!\d)", re.IGNORECASE)


def rank_in_file_name(name: str, ranks: Mapping[tuple[str, int], int], *, sure: bool = False) -> int | None:
    """Rank of the worker in a file name such as ``output_worker_3.jsonl``, or None.

    Only a number after a word for a worker counts: ``checkpoint_500.pt`` has no worker, and ``node0_gpu3`` counts
    within its node. After a role name the number is the index in the role, after any other word the rank. ``ranks`` is
    by role and index. ``sure`` accepts only words that shared files, such as shards, do not have.
    """
    roles = {role.casefold(): role for role, _ in ranks}
    for match in _number_pattern(frozenset((*(_WORKER_WORDS if sure else _NUMBERED_WORDS), *roles))).finditer(name):
        word, number = match[1].casefold(), int(match[2])
        if word not in roles and _is_local(name, word, match.start(1)):
            continue
        return ranks.get((roles.get(word, ""), number), number)
    return None


def _is_local(name: str, word: str, start: int) -> bool:
    """Whether the number after this word counts within a node named before it."""
    before = name[:start]
    return (word == "gpu" or _LOCAL_WORD.search(before) is not None) and _NODE_NUMBER.search(before) is not None
