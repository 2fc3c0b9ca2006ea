"""What the sidecar shows while a file grows agrees with what the verification finds at the end."""

import json
import random
import zipfile
from functools import partial
from io import BytesIO
from pathlib import Path

import pytest

from exporter.contract.worker_names import rank_in_file_name
from exporter.files.outputs.outputs_reader import FileOwnership, OutputReading, OutputWatch
from launcher.verify.files import OutputFiles
from tests.exporter.files.formats.sample_files import sample
from tests.exporter.files.formats.test_hdf5 import resealed

START = 1_700_000_000.0
OWNERS = FileOwnership(partial(rank_in_file_name, ranks={}), frozenset({0}), frozenset(), owns_unranked=True)

LINES = "".join(json.dumps({"id": number, "text": "x" * 80}) + "\n" for number in range(8000))
TABLE = "id,text\n" + "".join(f"{number},word {number}\n" for number in range(300))
RANDOM = random.Random(1)
WIDE = "\n".join(
    ",".join(cells)
    for cells in [
        [f"column_{at}" for at in range(4000)],
        *([f"{RANDOM.random()}" for _ in range(4000)] for _ in range(8)),
    ]
)
MARKED = bytearray(sample("rows-latest.h5"))
MARKED[11] = 1  # open for writing
NOT_CLOSED = "is not closed: its superblock says that it is open for writing"


def archive() -> bytes:
    text = BytesIO()
    with zipfile.ZipFile(text, "w") as members:
        for number in range(7):
            members.writestr(f"{number}.txt", "text")
    return text.getvalue()


def records_of(reading: OutputReading) -> int | None:
    found = [owned.records for owned in reading.owners.values() if owned.records is not None]
    return sum(found) if found else None


@pytest.mark.parametrize(
    ("name", "content", "head", "records", "flaw"),
    [
        ("middle.jsonl", LINES.replace('"id": 4000,', '"id": 4000'), 0, 8000, "line 4001 is not JSON"),
        ("lines.json", LINES[:60000], 0, 577, "its last line is half-written"),
        ("lines.json", LINES.rstrip("\n"), 0, 8000, None),
        ("utf-16.csv", TABLE.encode("utf-16"), 1, 300, None),
        ("utf-16.jsonl", "".join(LINES.splitlines(True)[:100]).encode("utf-16"), 0, 100, None),
        ("wide.csv", WIDE + "\n", 1, 8, None),
        ("members.zip", archive(), 0, None, None),
        ("open.h5", resealed(MARKED), 0, None, NOT_CLOSED),
    ],
)
def test_records_and_damage_are_the_same_live_and_at_the_end(
    name: str, content: str | bytes, head: int, records: int | None, flaw: str | None, tmp_path: Path
) -> None:
    whole = content.encode() if isinstance(content, str) else content
    watch = OutputWatch(str(tmp_path), "*", OWNERS, START)
    watch.poll(START)
    half = whole[: len(whole) // 2]
    (tmp_path / name).write_bytes(half)
    lines = half.decode("utf-16" if name.startswith("utf") else "latin-1", "ignore").count("\n") - head
    assert records_of(watch.poll(START + 5)) == (None if records is None else lines)
    (tmp_path / name).write_bytes(whole)
    for seconds in range(10, 60, 5):
        reading = watch.poll(START + seconds)
    assert records_of(reading) == records
    files = OutputFiles(str(tmp_path), "*", 0.0, {})
    while not (facts := files.poll(0.0)).done:
        pass
    assert (facts.records if facts.counted else None) == records
    assert [damage.reason.startswith(flaw or "?") for damage in facts.flaws] == [True] * (flaw is not None)
    is_growing = flaw is not None and ("half" in flaw or flaw == NOT_CLOSED)  # no damage while it may still be written
    assert [damage.reason for damage in reading.invalid] == [damage.reason for damage in facts.flaws] * (not is_growing)
