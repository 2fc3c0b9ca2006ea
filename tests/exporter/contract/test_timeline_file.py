"""The file of a timeline: what is written is read again, and damage is an error."""

import gzip
import json
import os
from pathlib import Path

import pytest

from exporter.contract.records import RecordError
from exporter.contract.timeline_file import TimelineHead, TimelineSeries, open_timeline, pack_timeline

HEAD = TimelineHead(
    job_id="4459",
    attempt=0,
    node="n1",
    instance="n1:9410",
    step_s=5.0,
    times=(1.5, 6.5, 11.25),
    moments=(6.5,),
)
HOSTILE = r'gpujob_info{job_name="a\"} 1\n#\\",user="}"}'
SERIES = [
    TimelineSeries('gpujob_worker_items{worker="w0"}', (0, 2), (3.0, None)),
    TimelineSeries(HOSTILE, (1,), (1_700_000_000.123,)),
]


def read(path: Path) -> tuple[TimelineHead, list[TimelineSeries]]:
    with open_timeline(path) as (head, series):
        return head, list(series)


def test_a_timeline_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "n1.timeline.json.gz"
    path.write_bytes(pack_timeline(HEAD, SERIES))
    head, series = read(path)
    assert head == HEAD
    assert [(name, *map(tuple, columns)) for name, *columns in series] == SERIES
    assert len(json.loads(gzip.decompress(path.read_bytes()))["series"]) == 2  # to others it is one object
    path.write_bytes(pack_timeline(HEAD, []))
    assert read(path) == (HEAD, [])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[1.5, 6.5", "[6.5, 6.5"),  # times that do not rise
        ("11.25]", "NaN]"),
        ('"points": [0, 2]', '"points": [2, 0]'),
        ('"points": [0, 2]', '"points": [0, 3]'),
        ('"points": [0, 2]', '"points": [-1, 2]'),
        ('"points": [0, 2]', '"points": [0]'),
        ("[3, null]", "[1e38, null]"),
        (r'{worker=\"w0\"}"', r'{worker=\"w0\"}\nup 1"'),  # another line in an export
        (r'{worker=\"w0\"}"', r'{worker=\"w0\"} 1"'),
        ('"schema": 1', '"schema": 2'),
        ("\n]}\n", ""),
    ],
)
def test_a_damaged_timeline_is_an_error(old: str, new: str, tmp_path: Path) -> None:
    text = gzip.decompress(pack_timeline(HEAD, SERIES)).decode()
    assert old in text
    path = tmp_path / "n1.timeline.json.gz"
    path.write_bytes(gzip.compress(text.replace(old, new, 1).encode()))
    with pytest.raises(RecordError):
        read(path)


def test_a_timeline_that_unpacks_to_more_than_any_of_ours_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "n1.timeline.json.gz"
    series = TimelineSeries(f'a{{b="{"x" * 1_000_000}"}}', (0,), (1.0,))
    path.write_bytes(pack_timeline(HEAD, [series] * 60))
    assert len(read(path)[1]) == 60
    path.write_bytes(pack_timeline(HEAD, [series] * 70))
    with pytest.raises(RecordError, match="too large"):
        read(path)


def test_half_a_timeline_is_an_error(tmp_path: Path) -> None:
    path, whole = tmp_path / "n1.timeline.json.gz", pack_timeline(HEAD, SERIES)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(RecordError):
            read(path)


def test_a_pipe_of_another_user_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "n1.timeline.json.gz")
    with pytest.raises(OSError, match="not a regular file"):
        read(tmp_path / "n1.timeline.json.gz")
