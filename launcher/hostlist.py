"""Slurm's host lists: ``node[01-03,7],x-[1-2]-y`` (sinfo(1), scontrol show hostnames)."""

from launcher.errors import SlurmError

MOST_HOSTS = 100_000


def parse_hostlist(text: str) -> tuple[str, ...]:
    """Host names of a host list, in its order; the width of a range's numbers is kept."""
    hosts: list[str] = []
    for part in _split(text):
        hosts.extend(_expand(part, text))
    return tuple(hosts)


def _split(text: str) -> list[str]:
    """Parts between the commas outside brackets."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
        if depth not in (0, 1):
            raise SlurmError(f"host list {text!r}: brackets do not match at character {index + 1}")
    if depth:
        raise SlurmError(f"host list {text!r}: a bracket is not closed")
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def _expand(part: str, text: str) -> list[str]:
    start = part.find("[")
    if start < 0:
        return [part]
    end = part.index("]", start)
    tails = _expand(part[end + 1 :], text)
    hosts: list[str] = []
    for entry in part[start + 1 : end].split(","):
        low, dash, high = entry.partition("-")
        digits = low + high if dash else low
        if (
            not low
            or (dash and not high)
            or not (digits.isascii() and digits.isdigit())
            or (dash and int(high) < int(low))
        ):
            raise SlurmError(f"host list {text!r}: {entry!r} is neither a number nor a rising range")
        if int(high if dash else low) - int(low) >= MOST_HOSTS:
            raise SlurmError(f"host list {text!r}: {entry!r} is more than {MOST_HOSTS} hosts")
        for number in range(int(low), int(high if dash else low) + 1):
            hosts.extend(f"{part[:start]}{number:0{len(low)}d}{tail}" for tail in tails)
    return hosts
