"""Slurm's host lists."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.errors import SlurmError
from launcher.steps.hostlist import fold_hostlist, parse_hostlist


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
        ("node[01-03,7],x-[1-2]-y", ["node01", "node02", "node03", "node7", "x-1-y", "x-2-y"]),
        ("r[1-2]c[01,03]n[7-8]", [f"r{r}c{c}n{n}" for r in (1, 2) for c in ("01", "03") for n in (7, 8)]),
        ("cn[099-101]", ["cn099", "cn100", "cn101"]),
        ("cn[8-8]", ["cn8"]),
        ("cn[3,1-2]", ["cn3", "cn1", "cn2"]),
        ("[1-2]", ["1", "2"]),
        ("n[1].rack[2].example", ["n1.rack2.example"]),
        ("cn1\ncn[2-3]\n", ["cn1", "cn2", "cn3"]),
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
        ("cn[]", "'' is neither a number nor an ascending range"),
        ("cn[a-b]", "'a-b' is neither a number nor an ascending range"),
        ("foo[9-11],-foo10", "'-foo10' is not a host name; it must begin with a letter or a digit"),
        ("cn1,.", "'.' is not a host name"),
        ("c" * 250 + "[1-1000]", "a name of 254 characters is too long; use at most 253"),
        ("a,b/c", "'/' at character 4 is not allowed in a host name"),
        ("cn[1-2]:x", "':' at character 8 is not allowed in a host name"),
        ("cn[3-1]", "'3-1' is neither a number nor an ascending range"),
        ("cn[1-]", "'1-' is neither a number nor an ascending range"),
        ("cn[1,,2]", "'' is neither a number nor an ascending range"),
        ("cn[1-2-3]", "'1-2-3' is neither a number nor an ascending range"),
        ("cn[1, 2]", "' 2' is neither a number nor an ascending range"),
        ("cn[1[2-3]]", "brackets do not match at character 5"),
        ("cn]1[", "brackets do not match at character 3"),
        ("cn1 cn2", "'cn1 cn2' is not part of a host name; put commas between hosts"),
        ("cn[0-100000]", "'0-100000' is more than 100000 hosts"),
        ("r[1-1000]n[1-1000]", "'r[1-1000]n[1-1000]' is more than 100000 hosts"),
        ("cn[²]", "is neither a number nor an ascending range"),
        ("cn[1-³]", "is neither a number nor an ascending range"),
        (f"cn[{'9' * 5000}]", "is neither a number nor an ascending range"),
    ],
)
def test_an_invalid_host_list_is_reported_with_its_text(text: str, problem: str) -> None:
    with pytest.raises(SlurmError) as caught:
        parse_hostlist(text)
    assert repr(text) in str(caught.value)
    assert problem in str(caught.value)


@given(st.text(alphabet="ab1-9[],. ", max_size=20))
def test_any_text_is_a_host_list_or_a_slurm_error(text: str) -> None:
    try:
        hosts = parse_hostlist(text)
    except SlurmError:
        return
    assert all(hosts)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["cn1"], "cn1"),
        (["cn1", "cn2"], "cn[1-2]"),
        (["cn1", "cn2", "cn3", "cn7"], "cn[1-3,7]"),
        (["cn08", "cn09", "cn10"], "cn[08-10]"),
        (["cn8", "cn9", "cn10"], "cn[8-10]"),
        (["cn8", "cn09"], "cn[8,09]"),
        (["cn3", "cn2", "cn1"], "cn[3,2,1]"),
        (["n1-ib", "n2-ib"], "n[1-2]-ib"),
        (["n7.c2", "n8.c2"], "n[7-8].c2"),
        (["r1n1", "r1n2", "r2n1", "r2n2"], "r1n[1-2],r2n[1-2]"),
        (["login", "cn1", "cn2", "gpu1"], "login,cn[1-2],gpu1"),
        (["cn1", "cn1", "cn2"], "cn1,cn[1-2]"),
    ],
)
def test_consecutive_hosts_share_brackets(names: list[str], text: str) -> None:
    assert fold_hostlist(names) == text
    assert list(parse_hostlist(text)) == names


HOSTS = st.lists(st.from_regex(r"[a-z]{0,2}(0|00)?[0-9]{1,3}([a-c][0-9]{1,2})?(-ib)?", fullmatch=True), max_size=40)
NUMBERED = st.lists(st.integers(0, 1200).map(lambda number: f"cn{number:02}"), max_size=60)


@given(HOSTS | NUMBERED | NUMBERED.map(sorted))
@example([f"cn{number}" for number in range(8, 12)])
def test_folded_hosts_are_unfolded_in_their_order(hosts: list[str]) -> None:
    assert list(parse_hostlist(fold_hostlist(hosts))) == hosts


@given(st.integers(0, 5000), st.integers(1, 3000), st.integers(1, 6))
def test_consecutive_numbers_are_one_range(first: int, count: int, width: int) -> None:
    hosts = [f"cn{number:0{width}}" for number in range(first, first + count)]
    if count > 1:
        assert fold_hostlist(hosts) == f"cn[{hosts[0][2:]}-{hosts[-1][2:]}]"
