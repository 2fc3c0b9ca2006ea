"""Counts of records of growing files, against what json and csv read from the whole text."""

import csv
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.files.formats.record_count import MARK_BYTES, ArrayItemCounter, LineCounter, guess_delimiter
from tests.support.strategies import PLACES, cut

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text('ab"\\[]{},:\n\u00e9', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('k"\\],', max_size=4), inner, max_size=4),
    max_leaves=20,
)
CELL = st.text('a,;"\n x', max_size=6)
MOST = st.sampled_from([1, 2, 7, 1 << 20])


class GrowingFile:
    """A file that is written in parts."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("records")
        self.size = 0

    def append(self, data: bytes, counter: LineCounter | ArrayItemCounter | None = None) -> None:
        """Write more, and count it."""
        os.pwrite(self.fd, data, self.size)
        self.size += len(data)
        if counter is not None:
            self.count(counter)

    def replace(self, data: bytes) -> None:
        os.ftruncate(self.fd, 0)
        self.size = 0
        self.append(data)

    def count(self, counter: LineCounter | ArrayItemCounter, most: int = 1 << 20) -> None:
        while counter.advance(self.fd, self.size, most):
            pass


@pytest.fixture
def file() -> Iterator[GrowingFile]:
    growing = GrowingFile()
    yield growing
    os.close(growing.fd)


def count_in_parts(counter: LineCounter | ArrayItemCounter, text: bytes, places: list[int], most: int) -> None:
    """Count a text that arrives in parts."""
    growing = GrowingFile()
    for piece in cut(text, places):
        growing.append(piece)
        growing.count(counter, most)
    os.close(growing.fd)


def rows(text: str) -> int:
    """The number of rows that csv.reader finds in the text."""
    return sum(row != [] for row in csv.reader(io.StringIO(text, newline="")))


def table(cells: list[list[str]], line_end: str, quoting: int) -> str:
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator=line_end, quoting=quoting).writerows(cells)  # type: ignore[arg-type]
    return out.getvalue()


# -- lines -------------------------------------------------------------------------------------------


@given(
    lines=st.lists(JSON_VALUES.map(json.dumps) | st.sampled_from(["", " ", "\t \r"])),
    end=st.sampled_from(["\n", "\r\n"]),
    tail=st.sampled_from([b"", b" ", b"{", b'{"a": "']),
    places=PLACES,
    most=MOST,
)
@example(lines=["1", "", "2"], end="\n", tail=b"", places=[0, 1, 2, 3], most=1)
def test_lines_of_jsonl_that_are_not_blank_count(
    lines: list[str], end: str, tail: bytes, places: list[int], most: int
) -> None:
    counter = LineCounter()
    count_in_parts(counter, "".join(line + end for line in lines).encode() + tail, places, most)
    assert counter.records == sum(bool(line.strip()) for line in lines)
    assert counter.unfinished == bool(tail.strip())


@given(
    cells=st.lists(st.lists(CELL, min_size=2, max_size=4), max_size=8),
    end=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    mark=st.sampled_from([b"", b"\xef\xbb\xbf"]),
    places=PLACES,
    most=MOST,
)
@example(cells=[["a", "b"], ['"', "\n\n"]], end="\n", quoting=0, mark=b"", places=list(range(20)), most=1)
@example(cells=[["a", "b"], ["\n", '""\n"']], end="\r\n", quoting=1, mark=b"\xef\xbb\xbf", places=[], most=1)
def test_rows_of_a_table_equal_those_of_csv_reader(
    cells: list[list[str]], end: str, quoting: int, mark: bytes, places: list[int], most: int
) -> None:
    text = table([["first", "second"], *cells], end, quoting)
    counter = LineCounter(csv=True)
    count_in_parts(counter, mark + text.encode(), places, most)
    assert counter.records == rows(text) - 1 == len(cells)
    assert not counter.unfinished


@given(text=st.text(',"\nab', max_size=30), places=PLACES, most=MOST)
@example(text='"a""\n', places=[3], most=1)
@example(text='a"b\nc', places=[], most=1)
@example(text='"a"b"\n"c\n', places=[], most=1)
def test_quotes_are_parsed_like_csv_reader(text: str, places: list[int], most: int) -> None:
    text = f"h,i\n{text}"
    counter = LineCounter(csv=True)
    count_in_parts(counter, text.encode(), places, most)
    finished = next(prefixes(text))
    assert counter.records == rows(finished) - 1
    assert counter.unfinished == (finished != text)


def prefixes(text: str) -> Iterator[str]:
    """The text up to each newline, the longest first."""
    for place in range(len(text), 0, -1):
        head = text[:place]
        if head.endswith("\n") and list(csv.reader(io.StringIO(head + "x", newline="")))[-1] == ["x"]:
            yield head


@pytest.mark.parametrize("quoted", ['a "word", and', 'in;"side', '5" disk'])
def test_a_quote_within_a_field_opens_no_quoted_field(file: GrowingFile, quoted: str) -> None:
    counter = LineCounter(csv=True)
    file.append(f"a,b,c\n1,2,3\n1,{quoted}\n1,2,3\n".encode(), counter)
    assert counter.records == 3


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"a,b;c,d", b","),
        (b"a;b;c", b";"),
        (b"a\tb,c\td\te", b"\t"),
        (b"a|b", b"|"),
        (b"word", b","),
        (b'"a,b,c";d', b";"),
        (b'a;"b,c,d', b";"),
        (b"", b","),
    ],
)
def test_the_delimiter_is_the_most_frequent_candidate_in_the_first_line(line: bytes, found: bytes) -> None:
    assert guess_delimiter(line) == found


def test_rows_with_another_delimiter_are_counted(file: GrowingFile) -> None:
    counter = LineCounter(csv=True)
    file.append(b'a;b\n"x\ny";2\n1,"2;3\n', counter)
    assert counter.records == 2


def test_a_half_written_header_is_awaited(file: GrowingFile) -> None:
    counter = LineCounter(csv=True)
    file.append(b"a;b", counter)
    assert (counter.records, counter.unfinished, counter.position) == (0, True, 0)
    file.append(b';c\n1;"\n";3\n', counter)
    assert (counter.records, counter.unfinished) == (1, False)
    file.replace(b"")
    file.count(counter)
    assert (counter.records, counter.unfinished) == (0, False)


def test_a_header_longer_than_one_read_is_not_awaited(file: GrowingFile) -> None:
    counter = LineCounter(csv=True)
    file.append(b"name," * 2000 + b"\n" + b"1," * 2000 + b"\n", counter)
    assert counter.records == 1


@pytest.mark.parametrize(
    ("text", "records"),
    [
        (b"0,alpha\n1,beta\n", 2),
        (b"alpha,0.5\nbeta,0.25\n", 2),
        (b"name,score\nalpha,0.5\nbeta,0.25\n", 2),
        (b"name,score\nalpha,NA\nbeta,0.25\n", 2),
        (b"name,when\nalpha,2024-01-05T10:00:00Z\n", 1),
        (b",0,1,2\n0,0.5,1,2\n1,2,3,4\n", 2),
        (b"0,1,2\n0.5,1,2\n2,3,4\n", 2),
        (b"img_0.png,a cat\nimg_1.png,a dog\n", 2),
        (b"cat,dog\ncat,bird\n", 2),
        (b"deadbeef,x\n0badcafe,y\nfeedface,z\n", 3),
        (b"A cat sits.,x\nA dog,y\n", 2),
        (b"path,caption\nimg.png,a dog\n", 1),
        (b"country,2019,2020\nFrance,1.5,2\n", 2),
        (b"# made by hand\n\n# and foot\nname,score\na,1\n", 1),
        (b"#chrom\tstart\nx\ty\nz\tw\n", 2),
        (b"#tag,one\n#tig,two\nword,three\n", 2),
        (b"#tag,1\n#tig,2\n", 2),
        (b'"# Heading 3",1\n"# Heading 4",2\n', 2),
    ],
    ids=range(18),
)
def test_the_content_of_the_first_row_decides_whether_it_is_a_header(
    file: GrowingFile, text: bytes, records: int
) -> None:
    for most in (1, 1 << 20):
        counter = LineCounter(csv=True)
        file.replace(b"")
        for line in text.splitlines(keepends=True):  # the decisive line may come later
            file.append(line)
            file.count(counter, most)
        assert counter.records == records


@pytest.mark.parametrize("is_table", [False, True], ids=["jsonl", "csv"])
@pytest.mark.parametrize("place", [0, 3, 400, 8000], ids=["top", "first line", "near the top", "later"])
def test_a_hole_is_awaited(file: GrowingFile, is_table: bool, place: int) -> None:
    counter, whole = LineCounter(csv=is_table, waits_at_holes=True), b"111,2222\n" * 2000
    file.replace(whole[:place] + bytes(4096) + whole[place + 4096 :])
    file.count(counter)
    assert (counter.records, counter.hole) == (place // 9, True)
    file.count(counter)
    assert (counter.records, counter.hole) == (place // 9, True)
    os.pwrite(file.fd, whole[place : place + 4096], place)
    file.count(counter)
    assert (counter.records, counter.hole) == (2000, False)


def test_a_hole_that_is_never_filled_is_skipped(file: GrowingFile) -> None:
    counter = LineCounter(waits_at_holes=True)
    file.append(b"1\n" + bytes(4096) + b"2\n3\n", counter)
    assert counter.records == 1
    counter.pass_hole(file.size)
    file.count(counter)
    assert (counter.records, counter.hole) == (3, False)
    file.append(bytes(10) + b"\n", counter)
    assert (counter.records, counter.hole) == (3, True)
    plain = LineCounter()
    file.count(plain)
    assert plain.records == 4


def test_a_half_written_line_counts_once_it_is_finished(file: GrowingFile) -> None:
    counter = LineCounter()
    seen = []
    for piece in (b'{"a": 1}\n{"a"', b": 2", b"}", b"\n", b"\n", b" {}"):
        file.append(piece, counter)
        seen.append((counter.records, counter.unfinished))
    assert seen == [(1, True), (1, True), (1, True), (2, False), (2, False), (2, True)]


@pytest.mark.parametrize("counter", [LineCounter(), LineCounter(csv=True)], ids=["jsonl", "csv"])
def test_a_rewritten_file_is_counted_from_its_top(file: GrowingFile, counter: LineCounter) -> None:
    file.append(b"1,1\n" * 100, counter)
    before = counter.records
    file.replace(b"2,2\n" * 20)  # shorter
    file.count(counter)
    assert counter.records == before - 80 == 20
    file.replace(b"3,3\n" * 50)  # longer
    file.count(counter)
    assert counter.records == before - 50
    file.replace(b"4,4\n5,\n" * 25 + b"666666\n\n\n\n" * 3)  # about as long
    file.count(counter)
    assert counter.records == before - 100 + 53


def test_a_count_respects_its_byte_limit(file: GrowingFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.append(b"x\n" * 50_000)
    read = 0
    real = os.pread

    def pread(fd: int, size: int, offset: int) -> bytes:
        nonlocal read
        read += size
        return real(fd, size, offset)

    monkeypatch.setattr(os, "pread", pread)
    counter, polls, more = LineCounter(), 0, True
    while more:
        read = 0
        more = counter.advance(file.fd, file.size, 1000)
        assert read <= 1000 + MARK_BYTES
        polls += 1
    assert (counter.records, polls) == (50_000, 100)
    read = 0
    assert not counter.advance(file.fd, file.size)
    assert read <= MARK_BYTES


def test_only_bytes_up_to_the_given_size_are_counted(file: GrowingFile) -> None:
    counter = LineCounter()
    file.append(b"1\n2\n3\n")
    assert not counter.advance(file.fd, 4)
    assert (counter.records, counter.position) == (2, 4)


def test_counting_a_file_that_became_shorter_stops_at_its_end(file: GrowingFile) -> None:
    counter = LineCounter()
    file.append(b"1\n2\n")
    assert not counter.advance(file.fd, 100)
    assert counter.records == 2


@pytest.mark.parametrize("counter", [LineCounter(), ArrayItemCounter()], ids=["lines", "array"])
def test_a_byte_order_mark_is_ignored(file: GrowingFile, counter: LineCounter | ArrayItemCounter) -> None:
    for piece in (b"\xef", b"\xbb", b"\xbf"):
        file.append(piece, counter)
    assert not isinstance(counter, LineCounter) or not counter.unfinished
    file.append(b"[1]\n", counter)
    assert (counter.records if isinstance(counter, LineCounter) else counter.items) == 1


def test_an_empty_file_has_no_records(file: GrowingFile) -> None:
    for counter in (LineCounter(), LineCounter(csv=True)):
        file.count(counter)
        assert (counter.records, counter.unfinished) == (0, False)


@pytest.mark.parametrize("counter", [LineCounter(), ArrayItemCounter()])
def test_a_counter_is_small(counter: object) -> None:
    assert not hasattr(counter, "__dict__")


# -- arrays ------------------------------------------------------------------------------------------


@given(
    value=JSON_VALUES | st.lists(JSON_VALUES),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
    white=st.sampled_from(["", " ", "\n\t"]),
    places=PLACES,
    most=MOST,
)
@example(value=["\\"], indent=None, ascii_only=True, white="", places=list(range(9)), most=1)
@example(value=['\\"', "],["], indent=None, ascii_only=True, white="", places=list(range(20)), most=1)
@example(value=["", "", {"": ""}], indent=None, ascii_only=True, white="", places=[], most=1 << 20)
def test_items_of_an_array_equal_those_of_json(
    value: object, indent: int | None, ascii_only: bool, white: str, places: list[int], most: int
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    counter = ArrayItemCounter()
    count_in_parts(counter, (white + text + white).encode(), places, most)
    assert counter.items == (len(value) if isinstance(value, list) else None)
    assert counter.complete == isinstance(value, list)


def test_only_items_followed_by_more_text_count_so_far(file: GrowingFile) -> None:
    counter = ArrayItemCounter()
    seen = []
    for piece in (b" ", b"[", b" ", b'{"a": [1, 2]}', b',"', b',"', b",3", b"]", b" \n"):
        file.append(piece, counter)
        seen.append((counter.items, counter.complete))
    assert seen == [
        *[(None, False), (0, False), (0, False), (0, False), (1, False), (1, False), (2, False), (3, True), (3, True)]
    ]


@pytest.mark.parametrize("depth", [1, 7, 8, 9, 50, 100_000])
def test_arrays_of_any_depth_are_counted(file: GrowingFile, depth: int) -> None:
    counter = ArrayItemCounter()
    file.append(b"[1" + b",[[],2" * depth + b"]" * depth + b",3]")
    file.count(counter, 1000)
    assert (counter.items, counter.complete) == (3, True)


@pytest.mark.parametrize("text", [b"{}", b'"["', b"1", b"null", b"[1]]", b"[1] 2", b"[] []", b"[1]\n[2,3]", b"\xff"])
def test_text_that_is_no_array_has_no_items(file: GrowingFile, text: bytes) -> None:
    for most in (1, 1000):
        counter = ArrayItemCounter()
        file.replace(text)
        file.count(counter, most)
        assert counter.items is None


def test_reading_stops_if_the_root_is_no_array(file: GrowingFile) -> None:
    counter = ArrayItemCounter()
    file.append(b"{" + b" " * 100)
    assert not counter.advance(file.fd, file.size, 10)
    assert not counter.advance(file.fd, file.size, 10)
    assert counter.position == 10
    file.replace(b"[1, 2]")
    file.count(counter)
    assert counter.items == 2


def test_a_rewritten_array_is_counted_again(file: GrowingFile) -> None:
    counter = ArrayItemCounter()
    for text, items in ((b"[1, 2]", 2), (b"[1, 2, 3]", 3), (b"[1]", 1), (b"[]", 0), (b"[[1, 2]]", 1)):
        file.replace(text)
        file.count(counter)
        assert counter.items == items


def test_a_file_is_counted_through_its_descriptor_only(tmp_path: Path) -> None:
    path = tmp_path / "array.json"
    path.write_text(json.dumps([{"a": "x,]" * 100}] * 20_000), encoding="utf-8")
    counter = ArrayItemCounter()
    with path.open("rb") as source:
        os.unlink(path)
        while counter.advance(source.fileno(), os.fstat(source.fileno()).st_size, 100_000):
            pass
    assert counter.items == 20_000


@pytest.mark.parametrize("header", [["id", "answer", "score"], ["0", "Yes.\nNo.", "1"]])
@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_quoted_line_breaks_of_a_tab_separated_file_lie_in_its_fields(header: list[str], piece: int) -> None:
    out = io.StringIO(newline="")
    table = csv.writer(out, delimiter="\t")
    table.writerows([header, *([str(number), f'Answer {number}.\n\nMore\tof "it".', "1"] for number in range(1, 300))])
    text = out.getvalue().encode()
    counter = LineCounter(csv=True)
    count_in_parts(counter, text, [*range(0, 1000, piece), len(text)], 1 << 20)
    assert (counter.records, counter.unfinished) == (299 + (header[0] == "0"), False)


def test_a_quote_in_a_tab_separated_file_is_an_ordinary_character(tmp_path: Path) -> None:
    text = b"id\ttext\n" + b'7\t"open\n' * 30
    (tmp_path / "a.tsv").write_bytes(text)
    count, fd = LineCounter(csv=True), os.open(tmp_path / "a.tsv", os.O_RDONLY)
    try:
        while count.advance(fd, len(text), 64):
            pass
    finally:
        os.close(fd)
    assert count.records == 30
