"""Read the time at the head of a log record."""

import re
from datetime import date
from functools import lru_cache

from exporter.contract.lazy_regex import lazy_regex

DAY_S = 86400
YEAR_S = 31_556_952
ZONE_STEP_S = 900  # zones differ from UTC by multiples of a quarter of an hour
WEST_MOST_S, EAST_MOST_S = 12 * 3600, 14 * 3600  # largest differences of a zone from UTC
EPOCH_LEAST, EPOCH_MOST = 946_684_800, 4_102_444_800  # a bare number is a time only between the years 2000 and 2100

HEAD_BYTES = 160  # the first digits of a time come before this byte
CACHED_MINUTES = 512
ZONE_BYTES = 8  # longest zone, and the byte after it that could make it another word

_MAYBE = re.compile(rb"\d:\d\d|\d{10}|\dT\d{4}")
_ESCAPE = re.compile(rb"\x1b\[[0-9;]{0,16}[A-Za-z]")
# Text allowed before the time: the writer (of srun, mpirun, torchrun, Ray or compose), the severity, or the field name.
# A time after other words is not that of the record.
_PREFIX = rb"""(?>[ \t]*+(?:
    \[(?:[A-Za-z_][^\[\]\r\n]{0,40}+|\d{1,4}(?:,[ ]?\d{1,4})?)\](?:<\w{1,8}>)?:?
  | \([A-Za-z_][^()\r\n]{0,60}+\)
  | (?i:trace|debug|info|notice|warn(?:ing)?|error|critical|fatal)\b[ \t]?[:|-]?
  | (?:\d{1,6}|[A-Za-z](?:[A-Za-z_.-]*+\d){1,20}+[A-Za-z_.-]*+)[ \t]*+[:|](?=[ \t])
  | (?i:datetime|asctime|timestamp|date|time|ts)[ \t]?[=:]
  | p\d{1,3}?(?=\d{4}-\d\d-\d\d)
))*+[ \t]*+(?:\[NeMo[ ][A-Z][ ]|[\[(<"'])?+[ \t]*+"""
_JSON = rb"""(?::::MLLOG[ ])?[ \t]*+\{.{0,100}?
    ["'](?:ts|t|time|timestamp|@timestamp|time_ms|asctime|datetime)["'][ \t]{0,4}:[ \t]{0,4}["']?"""

_MONTHS = (b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec")
_NAME = rb"(?P<name>" + b"|".join(_MONTHS) + b")"
_YEAR, _MONTH, _DAY = rb"(?P<year>\d{4})", rb"(?P<month>\d\d)", rb"(?P<day>\d\d)"
_CLOCK = rb"(?P<hour>\d\d):(?P<least>\d\d)"
_SECOND = rb"(?P<second>\d\d(?:[.,]\d{1,9})?)(?!\d)"
_ZONE = rb"(?P<zone>[ ]?(?:Z|UTC|GMT)\b|[ ]?[+-](?:0\d|1[0-4]):?[0-5]\d(?![\d:.])|[+-](?:0\d|1[0-4])(?![\d:.]))?"
_REST = b":" + _SECOND + _ZONE

# Most common formats first. Group `minute` is the text under which a minute is cached; formats without it are computed
# each time. The last one is a bare number, allowed only after a bracket or field name, or in JSON.
_FORMATS = (
    rb"(?P<minute>%b(?P<sep>[-/])%b(?P=sep)%b(?:[T_]|[ ]{1,2})%b)%b" % (_YEAR, _MONTH, _DAY, _CLOCK, _REST),
    rb"(?P<minute>%b/%b/%b[ -]%b)%b" % (_MONTH, _DAY, _YEAR, _CLOCK, _REST),
    rb"(?P<minute>%b[-/]%b[ ]%b)%b" % (_MONTH, _DAY, _CLOCK, _REST),
    rb"(?P<minute>[IWEFCD]%b%b[ ]%b)%b" % (_MONTH, _DAY, _CLOCK, _REST),
    rb"(?P<minute>[IWEFCD]?%b%b%b[T -]%b)%b" % (_YEAR, _MONTH, _DAY, _CLOCK, _REST),
    rb"(?P<minute>%b%b%bT(?P<hour>\d\d)(?P<least>\d\d))%b" % (_YEAR, _MONTH, _DAY, _SECOND + _ZONE),
    rb"(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),?[ ])?%b[ ](?P<day>[ \d]?\d)[ ]%b%b(?:[ ]%b\b)?"
    % (_NAME, _CLOCK, _REST, _YEAR),
    rb"(?P<minute>%b/%b/%b[: ]%b)%b" % (_DAY, _NAME, _YEAR, _CLOCK, _REST),
    rb"%b%b(?![\w</%%]|:\S|[ ]?(?:elapsed|remaining|left|total)\b)" % (_CLOCK, _REST),
    rb"""(?<=[\[=:"' ])(?P<number>\d{10}(?:\d{3}|\d{6}|\d{9})?(?:\.\d{1,9})?)(?![\w.:])""",
)
_NUMBER_BEFORE = rb"(?<=[\[=])"
_PLAIN = tuple(
    lazy_regex(rb"(?x)" + _PREFIX + (_NUMBER_BEFORE if b"<number>" in way else b"") + way) for way in _FORMATS
)
_IN_JSON = tuple(lazy_regex(rb"(?xs)" + _JSON + way) for way in _FORMATS)
_JSON_BEGINS = (b"{", b":::MLLOG")


def _minute(year: int, month: int, day: int, hour: int, minute: int) -> float | None:
    """Epoch seconds, or None if there is no such minute."""
    if hour > 23 or minute > 59:
        return None
    try:
        days = date(year, month, day).toordinal()
    except ValueError:
        return None
    return float((days - 719_163) * DAY_S + hour * 3600 + minute * 60)


def _match_minute(found: re.Match[bytes], reference: float | None) -> float | None:
    """Minute of a match; without its year or day, the one nearest to ``reference``."""
    part = found.groupdict()
    hour, minute = int(part["hour"]), int(part["least"])
    if "day" not in part:
        if reference is None or hour > 23 or minute > 59:
            return None
        moment = reference // DAY_S * DAY_S + hour * 3600 + minute * 60
        return moment + DAY_S * round((reference - moment) / DAY_S)
    month = _MONTHS.index(part["name"]) + 1 if "name" in part else int(part["month"])
    day = int(part["day"])
    if part.get("year"):
        return _minute(int(part["year"]), month, day, hour, minute)
    if reference is None:
        return None
    year = 1970 + int(reference // YEAR_S)
    found_in = (_minute(y, month, day, hour, minute) for y in (year - 1, year, year + 1))
    return min((moment for moment in found_in if moment is not None), key=lambda it: abs(it - reference), default=None)


@lru_cache(64)
def _zone_s(zone: bytes) -> int:
    """Seconds that a zone is ahead of UTC."""
    digits = zone.strip().replace(b":", b"")
    if digits[:1] not in (b"+", b"-"):
        return 0
    ahead = int(digits[1:3]) * 3600 + int(digits[3:] or b"0") * 60
    return -ahead if digits[:1] == b"-" else ahead


def _parse_epoch(number: bytes) -> float | None:
    """Epoch seconds of a bare number in seconds, milli-, micro- or nanoseconds, according to its length."""
    moment = float(number) / 10 ** (len(number.partition(b".")[0]) - 10)
    return moment if EPOCH_LEAST <= moment <= EPOCH_MOST else None


class TimestampReader:
    """Reads the time at the head of a log's records, fastest if all have the same format.

    A time without its year or day is the one nearest to ``reference``, or None without one. The reference follows times
    of day, so that a log may span many midnights.
    """

    def __init__(self, reference: float | None = None) -> None:
        self.reference = reference
        self._last_format = _PLAIN[0]
        self._minutes: dict[bytes, float | None] = {}
        self._day: float | None = None
        self._last_head = b""  # start of the last record with an absolute time, including the time and a possible zone
        self._last_time = 0.0  # that time

    def read(self, head: bytes) -> float | None:
        """Epoch seconds, as if the log's clock were UTC unless the record names its zone; None without a time.

        ``head`` is the beginning of a record, or all of it. An impossible time, such as 30 February, is None.
        """
        if self._last_head and head.startswith(self._last_head):
            return self._last_time  # many lines share one time
        if b"\x1b" in head:
            head = _ESCAPE.sub(b"", head[: 2 * HEAD_BYTES])
        found = self._last_format.match(head)
        if found is None:
            found = self._search(head)
            if found is None:
                return None
        if "second" not in found.re.groupindex:
            return _parse_epoch(found["number"])
        second, zone = found.group("second", "zone")
        part = float(second.replace(b",", b"."))
        minute = self._minute(found)
        if minute is None or part >= 61:
            return None
        time = minute + part if zone is None else minute + part - _zone_s(zone)
        # the same text, including a possible zone, gives the same time unless that depends on the reference
        end = found.end() + ZONE_BYTES
        self._last_head = head[:end] if len(head) >= end and "year" in found.re.groupindex and found["year"] else b""
        self._last_time = time
        return time

    def _minute(self, found: re.Match[bytes]) -> float | None:
        near = self.reference
        if "minute" not in found.re.groupindex:
            moment = _match_minute(found, near)
            if moment is not None and near is not None and "day" not in found.re.groupindex:
                self.reference = moment
            return moment
        day = None if near is None else near // DAY_S
        if day != self._day or len(self._minutes) > CACHED_MINUTES:
            self._minutes.clear()  # a date without its year depends on the reference
            self._day = day
        text = found["minute"]
        try:
            return self._minutes[text]
        except KeyError:
            moment = self._minutes[text] = _match_minute(found, near)
            return moment

    def _search(self, head: bytes) -> re.Match[bytes] | None:
        """Match any format; that format is tried first from then on."""
        if _MAYBE.search(head, 0, HEAD_BYTES) is None:
            return None
        for regex in _IN_JSON if head.lstrip().startswith(_JSON_BEGINS) else _PLAIN:
            if (found := regex.match(head)) is not None:
                self._last_format = found.re
                return found
        return None


def zone_offset(stamp: float, reference: float) -> int:
    """Seconds, a multiple of 15 minutes, that bring a stamp without a zone near the reference.

    0 if no zone on Earth does: the record is then old, and its clock may well be UTC. So use a new record.
    """
    offset = round((reference - stamp) / ZONE_STEP_S) * ZONE_STEP_S
    return offset if -EAST_MOST_S <= offset <= WEST_MOST_S else 0
