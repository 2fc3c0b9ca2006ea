"""Words of the terminal view: foreign text, sizes, moments, the pace of engines, and how workers ended."""

import time
from collections.abc import Mapping
from typing import Any

from launcher.plan.plan import PREFILL


def printable_line(text: object) -> str:
    """User text in one line, with escapes such as ``\\n`` for what would move the cursor of a terminal."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in str(text)
    )


def size_text(count: float | None) -> str:
    """``14.2 GiB``; a dash when it is not known."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def clock_time_text(moment: float | None) -> str:
    """``13:22:15``, with the date when it is not today."""
    if moment is None:
        return "-"
    there, here = time.localtime(moment), time.localtime()
    return time.strftime("%H:%M:%S" if there[:3] == here[:3] else "%Y-%m-%d %H:%M", there)


def token_rate_text(rate: float | None) -> str:
    """``182 tok/s``; nothing where it is not known."""
    if rate is None:
        return ""
    return f"{rate:.0f} tok/s" if rate == 0 or rate >= 10 else f"{rate:.1f} tok/s"


def throughput_text(worker: Mapping[str, Any]) -> str:
    """``37.5``, the rate of its position, or the tokens that an engine makes, ``2012 tok/s in`` those that it reads.

    A dash where neither is known.
    """
    if not worker["up"]:
        return "-"
    if worker.get("rate"):
        return f"{worker['rate']:.1f}"
    made, read = (worker.get(f"{kind}_tokens_per_second") for kind in ("output", "input"))
    if read is not None and (made is None or worker["role"] == PREFILL):
        return f"{token_rate_text(read)} in"
    return token_rate_text(made) or "-"


def not_ready_in_time(view: Mapping[str, Any]) -> dict[int, str]:
    """Why the job ended, of the workers that it ended for since they were not ready, by their ranks."""
    cause = view["cause"] or {}
    return {entry["rank"]: cause["reason"] for entry in cause.get("missing") or () if entry["rank"] is not None}


def end_text(worker: Mapping[str, Any], cause: Mapping[str, Any] | None) -> str:
    """``ended: app_error (exit status 3)``; ``cause`` is that of a job that has ended for this worker."""
    ended = worker["exit"]
    evidence = "; ".join(ended["evidence"])
    if worker["state"] == "not_started":
        return f"was not started ({evidence.removeprefix('never started: ')})"
    if cause is not None:
        return f"ended: {cause['reason']} ({cause['evidence'][0]}; when asked to end: {evidence})"
    # with its answer to that it has completed nothing
    asked = " when asked to end" if ended["reason"] == "completed" and ended.get("asked_to_end") else ""
    return f"ended: {ended['reason']}{asked} ({evidence})"
