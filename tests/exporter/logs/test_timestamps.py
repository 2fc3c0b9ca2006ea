"""The time at the head of a log record."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.logs.timestamps import TimestampReader, zone_offset

REFERENCE = datetime(2025, 11, 4, 12, tzinfo=UTC).timestamp()


def moment(text: str) -> float:
    """Epoch seconds of an ISO time, in UTC unless it names a zone."""
    parsed = datetime.fromisoformat(text)
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()


@pytest.mark.parametrize(
    ("head", "time"),
    [
        (b"2025-11-04T05:31:43 up", "2025-11-04 05:31:43"),
        (b"2025-11-04 05:31:43,123 - INFO - up", "2025-11-04 05:31:43.123"),
        (b"2025-11-04T05:31:43.123456Z up", "2025-11-04 05:31:43.123456"),
        (b"2025-11-04T05:31:43+02:00 up", "2025-11-04 03:31:43"),
        (b"2025-11-04 05:31:43 -0530 up", "2025-11-04 11:01:43"),
        (b"2025-11-04 05:31:43+02 up", "2025-11-04 03:31:43"),
        (b"2025-11-04 05:31:43 - 1200 items", "2025-11-04 05:31:43"),
        (b"2025-11-04 05:31:43:123 milliseconds left out", "2025-11-04 05:31:43"),
        (b"2025/11/04 05:31:43 up", "2025-11-04 05:31:43"),
        (b"20251104T053143Z up", "2025-11-04 05:31:43"),
        (b"2025-11-04 05:31:43.123456: I tensorflow/core/x.cc:1] up", "2025-11-04 05:31:43.123456"),
        (b"[2025-11-04 05:31:43 DP0 TP0] Prefill batch", "2025-11-04 05:31:43"),
        (b"[01/16/2026-06:20:17] [TRT-LLM] [RANK 0] [I] iter = 5559", "2026-01-16 06:20:17"),
        (b"01/16/2026 06:20:17 - INFO - __main__ - up", "2026-01-16 06:20:17"),
        (b"INFO 07-10 12:34:56 [loggers.py:116] Engine 000", "2025-07-10 12:34:56"),
        (b"(APIServer pid=66) INFO 09-02 08:46:23 [v1/metrics]", "2025-09-02 08:46:23"),
        (b"(EngineCore_0 pid=9) (VllmWorker TP0 pid=8) INFO 09-02 08:46:23 up", "2025-09-02 08:46:23"),
        (b"[01/16 06:20:17 d2.utils.events]: eta", "2026-01-16 06:20:17"),
        (b"I0710 12:34:56.123456 1234 file.cc:12] up", "2025-07-10 12:34:56.123456"),
        (b"I20250710 12:34:56.123456 1234 file.cc:12] up", "2025-07-10 12:34:56.123456"),
        (b"Nov  4 05:31:43 node1 slurmd: up", "2025-11-04 05:31:43"),
        (b"Tue Nov  4 05:31:43 2024 up", "2024-11-04 05:31:43"),
        (b"[04/Nov/2025:05:31:43 +0100] GET", "2025-11-04 04:31:43"),
        (b"[1700000000.125] up", "2023-11-14 22:13:20.125"),
        (b"[1700000000125] up", "2023-11-14 22:13:20.125"),
        (b"ts=1700000000.125 level=info", "2023-11-14 22:13:20.125"),
        (b'{"ts": 1700000000.125, "msg": "up"}', "2023-11-14 22:13:20.125"),
        (b'{"msg": "up", "timestamp": "2025-11-04T05:31:43.5Z"}', "2025-11-04 05:31:43.5"),
        (b'{"level":"info","time":1700000000125}', "2023-11-14 22:13:20.125"),
        (b':::MLLOG {"namespace": "", "time_ms": 1700000000125, "event_type": "x"}', "2023-11-14 22:13:20.125"),
        (b"time=2025-11-04T05:31:43Z level=info", "2025-11-04 05:31:43"),
        (b"[05:31:43] up", "2025-11-04 05:31:43"),
        (b"05:31:43.5 up", "2025-11-04 05:31:43.5"),
        (b"[NeMo I 2024-05-01 10:00:00 nemo_logging:393] up", "2024-05-01 10:00:00"),
        (b"[2023-01-01 00:00:00,000] [INFO] [engine.py:1] up", "2023-01-01 00:00:00"),
        (b"[rank0]: 2025-11-04 05:31:43 up", "2025-11-04 05:31:43"),
        (b" 0: 2025-11-04 05:31:43 up", "2025-11-04 05:31:43"),
        (b"[1,0]<stdout>:2025-11-04 05:31:43 up", "2025-11-04 05:31:43"),
        (b"node-01 | 2025-11-04 05:31:43 up", "2025-11-04 05:31:43"),
        (b"12: [default3]:[2025-11-04 05:31:43] up", "2025-11-04 05:31:43"),
        (b"p0\x1b[2m2026-04-27T23:03:15.250907Z\x1b[0m up", "2026-04-27 23:03:15.250907"),
        (b"\x1b[32m[2025-11-04 05:31:43]\x1b[0m up", "2025-11-04 05:31:43"),
        (b"2025-11-04 23:59:60 leap", "2025-11-05 00:00:00"),
    ],
    ids=lambda value: value.decode() if isinstance(value, bytes) else None,
)
def test_a_time_at_the_head_is_read(head: bytes, time: str) -> None:
    assert TimestampReader(REFERENCE).read(head) == pytest.approx(moment(time), abs=1e-4)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"loss 2023",
        b"version 12.4.1, built 2023",
        b"2025.11.04",
        b"10.0.0.1:8000 is up",
        b"0000:05:00.0 NVIDIA H100",
        b"05:31:43:aa:bb:cc is the address",
        b"12:34:56::1 answers",
        b"Step 12:30",
        b"Step 12:30:45",
        b"[05:31:43<01:00:00, 1.2it/s]",
        b" 12%|#5 | 10/100 [00:05:31<01:00:00]",
        b"00:05:30 elapsed",
        b"1:02:03 to go",
        b"[   12.345678] nvidia: loaded",
        b"1700000000 bytes",
        b"0: 1700000000 items",
        b"[17000000001234] a number of 14 digits",
        b"[9999999999] beyond 2100",
        b'{"time": 12.5}',
        b"Loaded a data set made on 2019-01-01 00:00:00",
        b"iter = 2, timestamp = 2026-08-19 14:11:49",
        b"2025-11-04",
        b"2025-11-04 05:31",
        b"\xff\xfe 05",
    ],
)
def test_other_numbers_are_no_timestamps(head: bytes) -> None:
    assert TimestampReader(REFERENCE).read(head) is None


@pytest.mark.parametrize(
    "head",
    [
        b"2025-02-30 10:00:00 up",
        b"2025-13-01 10:00:00 up",
        b"0000-01-01 10:00:00 up",
        b"2025-11-04 24:00:00 up",
        b"2025-11-04 10:60:00 up",
        b"2025-11-04 10:00:61 up",
        b"[16/01/2026-06:20:17] day first",
        b"INFO 02-30 12:34:56 up",
        b"I0230 12:34:56.123456 up",
        b"[24:00:00] up",
    ],
)
def test_an_impossible_time_is_none(head: bytes) -> None:
    assert TimestampReader(REFERENCE).read(head) is None


@pytest.mark.parametrize("head", [b"INFO 07-10 12:34:56 up", b"Nov  4 05:31:43 up", b"[05:31:43] up"])
def test_without_a_reference_an_incomplete_time_is_none(head: bytes) -> None:
    assert TimestampReader().read(head) is None


def test_a_missing_year_is_the_one_nearest_to_the_reference() -> None:
    reader = TimestampReader(moment("2026-01-01 00:10:00"))
    assert reader.read(b"INFO 12-31 23:59:00 up") == moment("2025-12-31 23:59:00")
    assert reader.read(b"INFO 01-01 00:00:30 up") == moment("2026-01-01 00:00:30")
    assert reader.read(b"INFO 12-31 23:59:00 up") == moment("2025-12-31 23:59:00")
    reader.reference = moment("2028-02-01")
    assert reader.read(b"INFO 12-31 23:59:00 up") == moment("2027-12-31 23:59:00")
    assert reader.read(b"INFO 02-29 00:00:00 up") == moment("2028-02-29")


def test_times_of_day_continue_after_midnight() -> None:
    reader = TimestampReader(moment("2025-11-04 20:00:00"))
    read = [reader.read(head) for head in (b"[21:00:00]", b"[23:59:59]", b"[00:00:01]", b"[23:59:58]", b"[09:00:00]")]
    days = ["2025-11-04 21:00:00", "2025-11-04 23:59:59", "2025-11-05 00:00:01", "2025-11-04 23:59:58"]
    assert read == [*map(moment, days), moment("2025-11-05 09:00:00")]
    assert [reader.read(head) for head in (b"[20:00:00]", b"[03:00:00]")] == [
        moment("2025-11-05 20:00:00"),
        moment("2025-11-06 03:00:00"),
    ]


def test_one_log_may_use_several_time_formats() -> None:
    reader = TimestampReader(REFERENCE)
    heads = (b"2025-11-04 05:31:43 a", b"INFO 11-04 05:31:44 b", b'{"ts": 1700000000}', b"no time", b"[05:31:45] c")
    wanted = [moment("2025-11-04 05:31:43"), moment("2025-11-04 05:31:44"), 1700000000.0, None]
    wanted.append(moment("2025-11-04 05:31:45"))
    for _ in range(2):
        assert [reader.read(head) for head in heads] == wanted


MOMENTS = st.datetimes(datetime(2001, 1, 1), datetime(2099, 12, 31), timezones=st.just(UTC))
WAYS = (
    "%Y-%m-%d %H:%M:%S,%f",
    "[%Y-%m-%dT%H:%M:%S.%fZ",
    "[%m/%d/%Y-%H:%M:%S]",
    "INFO %m-%d %H:%M:%S x",
    "I%m%d %H:%M:%S.%f",
    "%b %d %H:%M:%S host",
    "[%H:%M:%S]",
)


@given(st.lists(st.tuples(MOMENTS, st.sampled_from(WAYS)), min_size=1, max_size=20))
def test_written_timestamps_are_read_back(records: list[tuple[datetime, str]]) -> None:
    reader = TimestampReader()
    for time, way in records:
        reader.reference = time.timestamp()
        exact = time if "%f" in way else time.replace(microsecond=0)
        assert reader.read(time.strftime(way).encode()) == pytest.approx(exact.timestamp(), abs=1e-5)


@given(st.lists(st.one_of(st.binary(max_size=60), st.from_regex(rb"\[?[\dIT/:., +-]{0,40}", fullmatch=True))))
def test_no_record_raises_an_error(heads: list[bytes]) -> None:
    reader = TimestampReader(REFERENCE)
    for head in heads:
        stamp = reader.read(head)
        assert stamp is None or isinstance(stamp, float)


SAME = ("2026-01-02 03:04:05", "[2026-01-02T03:04:05", '{"ts": "2026-01-02T03:04:05', "01/02 03:04:05", "03:04:05")
BEHIND = (
    " [INFO] step 1 of 2",
    ".5 step 1 of 2",
    ",500 step 1",
    " +0200 step 1 of 2",
    "+02:00] step",
    "Z step 1 of 2",
    " ",
    "",
)


@given(st.lists(st.tuples(st.sampled_from(SAME), st.sampled_from(BEHIND)), max_size=12))
def test_earlier_records_do_not_change_a_timestamp(records: list[tuple[str, str]]) -> None:
    reader = TimestampReader(REFERENCE)
    for head, behind in records:
        text = (head + behind).encode()
        # a time without a date depends on earlier ones
        assert reader.read(text) == TimestampReader(reader.reference).read(text)


@given(st.integers(-48, 56), st.floats(-400, 400))
@example(-48, 0.0)
@example(56, 400.0)
def test_the_time_zone_is_found_from_a_fresh_record(quarters: int, delay_s: float) -> None:
    clock = datetime.fromtimestamp(REFERENCE, timezone(timedelta(minutes=15 * quarters)))
    stamp = clock.replace(tzinfo=UTC).timestamp() - delay_s
    assert zone_offset(stamp, REFERENCE) == -900 * quarters


def test_a_timestamp_that_no_zone_explains_is_unchanged() -> None:
    assert zone_offset(REFERENCE - 86400 * 3, REFERENCE) == 0
    assert zone_offset(REFERENCE + 86400, REFERENCE) == 0
