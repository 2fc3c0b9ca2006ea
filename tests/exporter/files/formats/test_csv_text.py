"""CSV: every row has as many fields as the first, in at least one dialect."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.files.formats import FileCheck, json_text
from exporter.files.formats.csv_text import PARTIAL_REASON, UNFINISHED_REASON
from exporter.files.formats.record_count import LineCounter
from tests.exporter.files.formats.support import check_bytes, flipped, source, states, truncated

SMALL = b'id,text,score\r\n1,"one, two",0.5\r\n2,"a ""word""\r\nand more",0.25\r\n3,plain,1\r\n'
LARGE = b"id,text,score\n" + b"".join(b'%d,"word, word",0.5\n' % number for number in range(20_000))


@pytest.fixture
def little_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_text, "MOST_BYTES", 2 * json_text.WINDOW_BYTES)


def table(data: bytes, name: str = "a.csv") -> FileCheck:
    return check_bytes(data, name)


@pytest.mark.parametrize(
    ("text", "records"),
    [
        (SMALL, 3),
        (SMALL.replace(b"\r\n", b"\n"), 3),
        (SMALL[:-2], 3),
        (b"a,b\n", 0),
        (b"a,b", 0),
        (b"\n", 0),
        (b"a\n1\n2\n", 2),
        (b"a;b\n1,5;2,5\n", 1),
        (b"a|b\n1|2\n", 1),
        (b"name, first;b\n1;2\n", 1),
        (b"# made by hand\na,b\n\n1,2\n", 1),
        (b"\xef\xbb\xbfa,b\n1,2\n", 1),
        (b"a,b\n1,\xe9\n", 1),
        (b'a,b\n1,5" disk\n', 1),
        (b'a,b\n1,"a \\"word\\", and"\n2,3\n', 2),
        (b"a,b\n'1,5','2,5'\n", 1),
        (b"text\none, two\nthree\n", 2),
        (b"a,b\n,\n,\n", 2),
        (b"".join(b"%d,word\n" % number for number in range(50)), 50),
        (b'id,text\n1,a\n2,"# b"\n', 2),
        (b'text,label\n"# Heading 3",a\n"# Heading 4",b\n# Heading 5,c\n', 3),
        (b'"# Heading 3",1\n"# Heading 4",2\n', 2),
    ],
    ids=range(22),
)
def test_complete_tables_are_valid(text: bytes, records: int) -> None:
    assert table(text) == FileCheck("valid", "csv", None, records)


@given(
    st.lists(st.lists(st.sampled_from(["1", "2.5", "a", "b c", "#x", "1,5", ""]), min_size=2, max_size=2), max_size=30),
    st.sampled_from(["", "# made, by hand\n", "#a,b\n#c,d\n", "\ufeff", "first,second\n"]),
)
def test_the_row_count_equals_that_of_a_growing_file(cells: list[list[str]], top: str) -> None:
    out = io.StringIO(newline="")
    out.write(top)
    csv.writer(out).writerows(cells)
    text = out.getvalue().encode() or b"\n"
    counter = LineCounter(csv=True)
    with source(text) as opened:
        for size in (len(text) // 2, len(text)):
            while counter.advance(opened._fd, size):
                pass
    found = table(text)
    assert found.state in ("valid", "unfinished", "unknown")
    assert found.records in (None, counter.records + counter.unfinished)


CELL = st.text('a,;"\n\t|x', max_size=6)


@given(
    cells=st.lists(st.lists(CELL, min_size=3, max_size=3), max_size=6),
    dialect=st.sampled_from(["excel", "excel-tab", "unix"]),
    repeated=st.sampled_from([1, 4000]),
)
def test_output_of_the_csv_module_is_valid(cells: list[list[str]], dialect: str, repeated: int) -> None:
    out = io.StringIO(newline="")
    csv.writer(out, dialect=dialect).writerows([["first", "second", "third"], *(cells * repeated)])
    found = table(out.getvalue().encode())
    assert found.state == "valid" or (len(out.getvalue()) > 1 << 17 and found.state == "unknown")
    assert found.records in (None, len(cells) * repeated)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"a,b,c\n1,2\n3,4,5\n", "row 2 has 2 fields, but the first row has 3"),
        (b"a,b\n1\n", "row 2 has 1 field, but the first row has 2"),
        (b"a,b\n1,2\n1,2,3\n", "row 3 has 3 fields, but the first row has 2"),
        (b"a,b\n1,2\n1,2,3", "row 3 has 3 fields, but the first row has 2"),
        (b"epoch,loss\n" + b"1,0.5\n" * 20 + b"eval,1,0.25\n", "row 22 has 3 fields, but the first row has 2"),
        (b"a,b\n1,2\n\nc,d,e\n3,4,5\n", "row 3 has 3 fields, but the first row has 2"),
        (b"a,b\n1,2\n# done\n", "row 3 has 1 field, but the first row has 2"),
    ],
)
def test_rows_with_different_numbers_of_fields_are_undecided(text: bytes, reason: str) -> None:
    assert table(text) == FileCheck("unknown", "csv", reason)


def test_lost_bytes_are_reported() -> None:
    reason = "has 9 NUL bytes: what was written there is lost"
    assert table(b"a,b\n1,2\n" + bytes(9)) == FileCheck("invalid", "csv", reason)


def test_a_first_row_unlike_all_others_is_undecided() -> None:
    found = table(b"made, by, hand\na,b\n1,2\n3,4\n")
    assert found == FileCheck("unknown", "csv", "its first row has 3 fields, but most others have 2")


@pytest.mark.parametrize(
    ("text", "records"),
    [(b"a,b,c\n1,2,3\n4,5", 1), (b'a,b\n1,"2', 0), (b'a,b\n1,"2\n', 0), (b'a,b\n1,2\n"3', 1), (b'a,b\n1,2\n"3,4\n', 1)],
)
def test_a_half_written_row_is_unfinished(text: bytes, records: int) -> None:
    assert table(text) == FileCheck("unfinished", "csv", UNFINISHED_REASON, records)


def test_a_truncated_table_is_valid_only_with_all_fields() -> None:
    for text in truncated(SMALL):
        found = table(text)
        rows = list(csv.reader(io.StringIO(text.decode() + "\n\0", newline="")))
        closed = rows.pop() == ["\0"]
        rows = [row for row in rows if row]
        if text.find(b"\n") > 0:
            assert (found.state == "valid") == (closed and len(rows[-1]) == 3), text
            assert found.state in ("valid", "unfinished")


def test_flipped_bytes_never_raise_an_error() -> None:
    assert states(flipped(SMALL, len(SMALL)), "a.csv") <= {"valid", "invalid", "unfinished", "unknown"}


@pytest.mark.usefixtures("little_is_read_whole")
def test_both_ends_of_a_large_table_are_checked() -> None:
    assert table(LARGE) == FileCheck("valid", "csv", PARTIAL_REASON)
    assert table(LARGE[:-1]) == FileCheck("valid", "csv", PARTIAL_REASON)
    assert table(LARGE[:-5]) == FileCheck("unfinished", "csv", UNFINISHED_REASON)
    assert table(LARGE + b"1\n" + LARGE[-100:]).state == "unknown"
    assert table(LARGE.replace(b",0.5", b"", 1)).reason == "row 2 has 2 fields, but the first row has 3"
    assert table(LARGE + bytes(3)).reason == "has 3 NUL bytes near its end: what was written there is lost"
    plain = LARGE.replace(b'"word, word"', b"word")
    assert table(plain + b"1\n2,word,3\n").reason == "a row near its end has 1 field, but the first row has 3"


@pytest.mark.usefixtures("little_is_read_whole")
@pytest.mark.parametrize("shift", range(12))
def test_an_end_part_that_begins_within_a_field_is_parsed(shift: int) -> None:
    row = b'1,"one\n two, three\n",0.5\n'
    text = b"id,text,score\n" + b"x" * shift + row * 10_000
    assert table(text) == FileCheck("valid", "csv", PARTIAL_REASON)
    assert table(text[:-3]) == FileCheck("valid", "csv", PARTIAL_REASON)
    assert table(text[:-6]) == FileCheck("unfinished", "csv", UNFINISHED_REASON)
    assert table(text[: -len(row) + 12]) == FileCheck("unfinished", "csv", UNFINISHED_REASON)


def test_a_long_field_is_never_damage() -> None:
    long = b'1,"' + b"a, b\n" * 40_000 + b'"\n'
    assert table(b"a,b\n1,2\n" + long + b"3,4\n").state in ("valid", "unknown")
    assert table(b'a,b\n1,"2"\n' + long[:-2] + b"c, d, e\n" * 9).state != "invalid"
    assert table(b"a,b\n" + b"x" * 200_000).state == "unknown"


def test_a_tab_separated_table_may_contain_quotes_as_letters() -> None:
    text = b'a\tb\n"open\t1\n' + b"word\t2\n" * 9
    assert table(text, "a.tsv") == FileCheck("valid", "csv", None, 10)


def test_utf16_is_not_checked() -> None:
    assert table("a,b\n1,2\n".encode("utf-16")).reason == "is UTF-16 text"


def test_only_the_extension_makes_a_file_a_table() -> None:
    assert check_bytes(SMALL, "a.txt").state == "unknown"


@given(st.binary(max_size=60) | st.text(',;"\n\r\t|a\\#', max_size=40).map(str.encode))
def test_any_bytes_can_be_checked(data: bytes) -> None:
    table(data or b"\n")
