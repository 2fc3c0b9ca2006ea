"""Words of the terminal view: foreign text, sizes and moments."""

import time


def clean(text: object) -> str:
    """User text in one line, with escapes such as ``\\n`` for what would move the cursor of a terminal."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in str(text)
    )


def size_words(count: float | None) -> str:
    """``14.2 GiB``; a dash when it is not known."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def clock_words(moment: float | None) -> str:
    """``13:22:15``, with the date when it is not today."""
    if moment is None:
        return "-"
    there, here = time.localtime(moment), time.localtime()
    return time.strftime("%H:%M:%S" if there[:3] == here[:3] else "%Y-%m-%d %H:%M", there)
