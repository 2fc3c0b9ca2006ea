"""Split a part of a log into records that end at a newline or carriage return, without colours."""

import re
from collections.abc import Iterator, Sequence

PART_BYTES = 32 * 1024  # part copied at a time to count record ends: it stays in the cache and on the heap
FAR_BYTES = 256  # mean distance of returns from which visiting each of them is faster than a search for two bytes
NEWLINE, RETURN = b"\n\r"

COPIED_BYTES = 16 * 1024  # up to this size, a chunk copies its text

# Part at the end of a chunk that is searched backwards first, and the factor for the next part
NEAR_BYTES, GROWTH_FACTOR = 4 * 1024, 8

Buffer = bytes | bytearray | memoryview
_ESCAPE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n\r]*(?:\x07|\x1b\\)?|[ -/]+[0-~]|[0-Z\\^_`-~])")


def record_ends(buffer: bytes | bytearray, end: int) -> tuple[int, int]:
    r"""Count newlines, and record ends, in the first ``end`` bytes; ``\r\n`` is one."""
    newlines = returns = 0
    view = memoryview(buffer)
    for start in range(0, end, PART_BYTES):
        part = bytes(view[start : min(end, start + PART_BYTES)])
        # removing the ends is several times faster than counting them
        rest = part.replace(b"\n", b"")
        newlines += len(part) - len(rest)
        returns += len(rest) - len(rest.replace(b"\r", b""))
    if returns and _has_double_end(buffer, end, returns):
        returns -= buffer.count(b"\r\n", 0, end)
    return newlines, newlines + returns


def _has_double_end(buffer: bytes | bytearray, end: int, returns: int) -> bool:
    r"""Whether there is ``\r\n``: to search for two bytes takes longer than to visit each of a few returns."""
    if returns > end // FAR_BYTES:
        return buffer.find(b"\r\n", 0, end) >= 0
    place = buffer.find(RETURN, 0, end - 1)
    while place >= 0:
        if buffer[place + 1] == NEWLINE:
            return True
        place = buffer.find(RETURN, place + 1, end - 1)
    return False


class LogChunk:
    """Whole records without colours, and their offset in the file."""

    def __init__(self, buffer: Buffer, end: int, offset: int) -> None:
        # copying a few records is cheap, and makes every operation faster than on a part of a large buffer
        text = bytes(memoryview(buffer)[:end]) if end <= COPIED_BYTES or isinstance(buffer, memoryview) else buffer
        self.offset = offset
        self._coloured: bytes | None = None
        if text.find(b"\x1b", 0, end) >= 0:
            self._coloured = bytes(memoryview(text)[:end]).replace(b"\r", b"\n")
            text = _ESCAPE.sub(b"", self._coloured)
            end = len(text)
            self._last_offsets = (0, 0)
        self.is_plain = self._coloured is None  # whether its bytes are the same as in the file
        self.text = text
        self.end = end
        self.has_returns = text.find(b"\r", 0, end) >= 0  # whether a record may end at a return

    def record_start(self, position: int) -> int:
        """Start of the record that contains a place."""
        start = self.text.rfind(b"\n", 0, position) + 1
        return max(start, self.text.rfind(b"\r", start, position) + 1) if self.has_returns else start

    def record_end(self, position: int) -> int:
        """End of the record, without its line end."""
        stop = self.text.find(b"\n", position, self.end)
        if stop < 0:
            stop = self.end
        if self.has_returns:
            back = self.text.find(b"\r", position, stop)
            return stop if back < 0 else back
        return stop

    def view(self) -> Buffer:
        return self.text if self.end == len(self.text) else memoryview(self.text)[: self.end]

    def file_offset(self, start: int) -> int:
        """Byte of the file at which the record begins that starts here."""
        if self._coloured is None:
            return self.offset + start
        # colours contain no record ends, so the same number of records precede it
        text, coloured = self.text, self._coloured
        plain, place = self._last_offsets
        if self.end - start < abs(start - plain):
            plain, place = self.end, len(coloured)
        elif start < abs(start - plain):
            plain, place = 0, 0
        if start >= plain:
            for _ in range(text.count(b"\n", plain, start)):
                place = coloured.find(b"\n", place) + 1
        else:
            for _ in range(text.count(b"\n", start, plain)):
                place = coloured.rfind(b"\n", 0, place)
            place = coloured.rfind(b"\n", 0, place) + 1
        self._last_offsets = (start, place)
        return self.offset + place

    def records(self) -> Iterator[tuple[int, int]]:
        """Start and end of each nonempty record."""
        start = 0
        while start < self.end:
            stop = self.record_end(start)
            if stop > start:
                yield start, stop
            start = stop + 1

    def records_backwards(self, literals: Sequence[bytes], begin: int) -> Iterator[tuple[int, int]]:
        """Yield records after ``begin`` that contain one of the literals (or all, without literals), last first."""
        text, behind = self.text, self.end
        lasts = [behind] * len(literals)
        near = NEAR_BYTES
        floor = max(begin, behind - near)
        while behind > begin:
            if literals:
                # Search a literal again only when its last place is used, and only behind the last place of earlier
                # literals: searching for an absent one is long.
                place = floor - 1
                for number, literal in enumerate(literals):
                    if lasts[number] + len(literal) > behind:
                        found = text.rfind(literal, max(floor, place), behind)
                        if found < 0 and (place >= floor or floor > begin):
                            continue  # it may still occur before that place
                        lasts[number] = found
                    place = max(place, lasts[number])
                if place < floor:
                    if floor == begin:
                        return
                    near *= GROWTH_FACTOR
                    floor = max(begin, self.end - near)
                    continue
                start, stop = self.record_start(place), self.record_end(place)
            else:
                stop = behind - (text[behind - 1] in b"\r\n")
                start = self.record_start(stop)
            if stop > start:
                yield start, stop
            behind = start
