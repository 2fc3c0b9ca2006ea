"""Slurm's host lists."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.errors import SlurmError
from launcher.hostlist import parse_hostlist


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("cn1", ["cn1"]),
        ("cn1,cn2", ["cn1", "cn2"]),
        ("cn[1-3]", ["cn1", "cn2", "cn3"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("cn[08-11]", ["cn08", "cn09", "cn10", "cn11"]),
        ("cn[9-11]", ["cn9", "cn10", "cn11"]),
        ("cn[001,010-012]", ["cn001", "cn010", "cn011", "cn012"]),
        ("cn[5]", ["cn5"]),
        ("cn[1-2]-ib", ["cn1-ib", "cn2-ib"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a[1,3],b7,c[2-3]-x", ["a1", "a3", "b7", "c2-x", "c3-x"]),
        ("cn2,cn1,cn2", ["cn2", "cn1", "cn2"]),
        ("gb200-rack1-[01-03]", ["gb200-rack1-01", "gb200-rack1-02", "gb200-rack1-03"]),
        (" a , b ,", ["a", "b"]),
    ],
)
def test_a_host_list_is_expanded_in_its_order(text: str, hosts: list[str]) -> None:
    assert parse_hostlist(text) == tuple(hosts)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("cn[1-3", "a bracket is not closed"),
        ("cn1-3]", "brackets do not match at character 6"),
        ("cn[[1]]", "brackets do not match at character 4"),
        ("cn[]", "'' is neither a number nor a rising range"),
        ("cn[a-b]", "'a-b' is neither a number nor a rising range"),
        ("cn[3-1]", "'3-1' is neither a number nor a rising range"),
        ("cn[1-]", "'1-' is neither a number nor a rising range"),
        ("cn[1,,2]", "'' is neither a number nor a rising range"),
    ],
)
def test_what_is_no_host_list_is_told_with_its_text(text: str, problem: str) -> None:
    with pytest.raises(SlurmError) as caught:
        parse_hostlist(text)
    assert repr(text) in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize("text", ["cn[²]", "cn[1-³]"])
def test_a_digit_is_one_of_ten(text: str) -> None:
    with pytest.raises(SlurmError, match="is neither a number nor a rising range"):
        parse_hostlist(text)


def folded(prefix: str, numbers: list[int], width: int, suffix: str) -> str:
    """Hosts with these numbers as Slurm writes them: rising neighbours as a range."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] + 1 == number:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    words = [f"{r[0]:0{width}}" if len(r) == 1 else f"{r[0]:0{width}}-{r[-1]:0{width}}" for r in ranges]
    return f"{prefix}[{','.join(words)}]{suffix}"


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z][a-z0-9-]{0,5}[a-z]", fullmatch=True),
            st.lists(st.integers(0, 300), min_size=1, max_size=12),
            st.integers(1, 4),
            st.sampled_from(["", "-ib", ".cluster"]),
        ),
        max_size=4,
    )
)
@example([("node", [1, 2, 3, 7], 2, "")])
def test_a_folded_list_is_unfolded(groups: list[tuple[str, list[int], int, str]]) -> None:
    text = ",".join(folded(*group) for group in groups)
    expected = [f"{prefix}{number:0{width}}{suffix}" for prefix, numbers, width, suffix in groups for number in numbers]
    assert list(parse_hostlist(text)) == expected


@given(st.text(alphabet="ab1-9[],. ", max_size=20))
def test_any_text_is_a_host_list_or_a_slurm_error(text: str) -> None:
    try:
        hosts = parse_hostlist(text)
    except SlurmError:
        return
    assert all(hosts)
