"""A job file with a sweep, and its points."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import ConfigError
from launcher.plan.plan import safe_file_word
from launcher.sweep.names import MOST_NAME_LENGTH, short_name
from launcher.sweep.points import MOST_POINTS, ExpandedSweep, check_points, expand_sweep
from launcher.sweep.values import merge
from tests.support.launcher import HARD_NAMES

BODY: dict[str, Any] = {
    "name": "embed",
    "resources": {"nodes": 2, "gpus_per_node": 8},
    "workers": [
        {"role": "prefill", "count": 1, "gpus": 1, "command": "serve --lr {lr} --out {output_dir}"},
        {"role": "decode", "count": 2, "gpus": 2, "command": ["serve", "{lr}"]},
    ],
    "env": {"LR": "{lr}", "MODE": "fast"},
    "backend": {"args": {"mem-fraction": 0.5}},
    "slurm": {"time_limit": "01:00:00"},
}


def points_of(sweep: dict[str, Any], **over: Any) -> ExpandedSweep:
    return expand_sweep({**BODY, **over, "sweep": {"grid": {"lr": [0.1]}, **sweep}}, "job.yaml")


def problems_of(sweep: dict[str, Any], **over: Any) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        check_points(expand_sweep({**BODY, **over, "sweep": sweep}, "job.yaml"), "job.yaml")
    assert raised.value.source == "job.yaml"
    return list(raised.value.problems)


def value_at(body: Any, *path: str | int) -> Any:
    for step in path:
        body = body[step]
    return body


# Points


def test_a_grid_has_every_combination_and_its_first_key_is_the_slowest() -> None:
    sweep = points_of({"grid": {"lr": [0.1, 0.2], "workers[0].gpus": [1, 2, 4]}, "max_parallel": 2})
    assert [point.name for point in sweep.points] == [
        *("embed_lr0.1_gpus1", "embed_lr0.1_gpus2", "embed_lr0.1_gpus4"),
        *("embed_lr0.2_gpus1", "embed_lr0.2_gpus2", "embed_lr0.2_gpus4"),
    ]
    assert [point.index for point in sweep.points] == list(range(6))
    assert dict(sweep.points[5].values) == {"lr": 0.2, "workers[0].gpus": 4}
    assert sweep.max_parallel == 2
    assert [spec.name for spec in check_points(sweep, "job.yaml")] == [point.name for point in sweep.points]


def test_zip_is_parallel_and_grid_zip_and_list_multiply() -> None:
    sweep = points_of(
        {
            "grid": {"lr": [0.1, 0.2]},
            "zip": {"resources.nodes": [1, 2], "workers.decode.count": [3, 4]},
            "list": [{"env.MODE": "slow"}, {"slurm": {"time_limit": None, "partition": "gpu"}}],
        }
    )
    assert [(point.values["lr"], point.values["resources.nodes"]) for point in sweep.points[::2]] == [
        *((0.1, 1), (0.1, 2), (0.2, 1), (0.2, 2))
    ]
    body = sweep.points[3].body
    assert (value_at(body, "workers", 1, "count"), value_at(body, "workers", 0, "count")) == (4, 1)
    assert (body["slurm"], value_at(body, "env", "MODE")) == ({"partition": "gpu"}, "fast")
    assert value_at(sweep.points[2].body, "env", "MODE") == "slow"


def test_mappings_are_merged_lists_replaced_and_null_removes_a_key() -> None:
    (point,) = points_of(
        {"list": [{"resources": {"nodes": 3}, "backend": {"args": {"x": [1]}}, "benchmark.concurrencies": [4, 8]}]}
    ).points
    assert point.body["resources"] == {"nodes": 3, "gpus_per_node": 8}
    assert value_at(point.body, "backend", "args") == {"mem-fraction": 0.5, "x": [1]}
    assert point.body["benchmark"] == {"concurrencies": [4, 8]}
    (point,) = points_of({"list": [{"backend.args.mem-fraction": None, "env.MODE": None}]}).points
    assert (value_at(point.body, "backend", "args"), point.body["env"]) == ({}, {"LR": "0.1"})


def test_a_text_of_only_a_placeholder_gets_the_typed_value() -> None:
    backend = {"args": {"size": "{size}", "name": "m{size}", "all": "{all}"}}
    (point,) = points_of({"grid": {"lr": [0.1], "size": [8], "all": [[1, 2]]}}, backend=backend).points
    assert value_at(point.body, "backend", "args") == {"size": 8, "name": "m8", "all": [1, 2]}
    assert point.body["env"] == {"LR": "0.1", "MODE": "fast"}, "variables are texts"


def test_a_key_gets_the_typed_value_and_a_variable_its_text() -> None:
    sweep = points_of({"grid": {"lr": [0.1], "backend.args.mem-fraction": [0.8, 1, True, "x"], "env.FAST": [True]}})
    values = [value_at(point.body, "backend", "args", "mem-fraction") for point in sweep.points]
    assert [(type(value), value) for value in values] == [(float, 0.8), (int, 1), (bool, True), (str, "x")]
    assert {value_at(point.body, "env", "FAST") for point in sweep.points} == {"true"}


@pytest.mark.parametrize("hard_name", HARD_NAMES)
def test_any_value_is_one_argument_of_a_command(hard_name: str) -> None:
    (point,) = points_of({"grid": {"lr": [hard_name]}}).points
    expected = "{{rank}}" if hard_name == "{rank}" else hard_name
    assert value_at(point.body, "workers", 0, "command") == ["serve", "--lr", expected, "--out", "{output_dir}"]
    assert value_at(point.body, "workers", 1, "command") == ["serve", expected]
    assert value_at(point.body, "env", "LR") == expected
    assert safe_file_word(point.name) == point.name


def test_placeholders_inside_values_are_not_replaced() -> None:
    args = {"a": "{lr}", "b": "{bs} {lr}"}
    (point,) = points_of({"grid": {"lr": ["{bs}"], "bs": ["{lr}"]}}, backend={"args": args}).points
    assert value_at(point.body, "backend", "args") == {"a": "{{bs}}", "b": "{{lr}} {{bs}}"}, "literal for the run"


def test_shell_and_literal_braces_are_kept() -> None:
    command = "serve ${lr} {{lr}} '{\"lr\": {lr}}' {rank} {port_6100} {http_port}"
    (point,) = points_of({}, workers=[{"command": command}]).points
    argv = value_at(point.body, "workers", 0, "command")
    assert argv == ["serve", "${lr}", "{{lr}}", '{"lr": 0.1}', "{rank}", "{port_6100}", "{http_port}"]


def test_every_point_can_use_its_name_and_number() -> None:
    sweep = points_of({"grid": {"lr": [0.1, 0.2]}}, paths={"output_dir": "out/{point}", "log_dir": "{point_index}"})
    assert [point.body["paths"] for point in sweep.points] == [
        {"output_dir": "out/embed_lr0.1", "log_dir": 0},
        {"output_dir": "out/embed_lr0.2", "log_dir": 1},
    ]


# Names


def test_a_point_name_has_the_keys_and_values_of_the_point() -> None:
    resources = {"resources": {"nodes": 2}}
    sweep = points_of({"grid": {"lr": [1e-05], "benchmark.concurrencies": [[4, 8]]}, "list": [resources]})
    assert [point.name for point in sweep.points] == ["embed_lr1e-05_concurrencies4x8_nodes2"]
    same = {"workers.prefill.gpus": 1, "workers[1].gpus": 2, "env.D": "a/b c"}
    (point,) = points_of({"list": [same]}).points
    assert point.name == "embed_lr0.1_prefill.gpus1_workers1.gpus2_Da-b-c"


def test_a_long_name_is_shortened_and_stays_unique() -> None:
    sweep = points_of({"grid": {"lr": ["x" * 100 + "1", "x" * 100 + "2"]}})
    first, second = (point.name for point in sweep.points)
    assert len(first) == len(second) == MOST_NAME_LENGTH
    assert first[:55] == second[:55] == "embed_lr" + "x" * 47
    assert first != second


def test_points_with_the_same_name_are_numbered() -> None:
    sweep = points_of({"grid": {"lr": ["a b", "a/b", "a-b_2", "a-b"]}})
    assert [point.name for point in sweep.points] == [
        *("embed_lra-b", "embed_lra-b_2", "embed_lra-b_2_2", "embed_lra-b_3")
    ]


def test_a_name_of_the_file_or_of_the_points_is_used() -> None:
    sweep = points_of({"list": [{"name": "small"}, {"name": "large"}]})
    assert [(point.name, point.body["name"]) for point in sweep.points] == [("small", "small"), ("large", "large")]
    sweep = points_of({"grid": {"lr": [1, 2]}}, name="run {lr}")
    assert [point.name for point in sweep.points] == ["run_1", "run_2"]


@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=150), min_size=1, max_size=8
    )
)
def test_names_are_safe_short_and_unique(values: list[str]) -> None:
    points = expand_sweep(
        {"name": "j", "workers": [{"command": ["x", "{v}"]}], "sweep": {"grid": {"v": [*values]}}}, "job.yaml"
    ).points
    names = [point.name for point in points]
    assert len(set(names)) == len(names)
    for name in names:
        assert safe_file_word(name) == name
        assert len(name) <= MOST_NAME_LENGTH


@given(st.text(min_size=1, max_size=300))
def test_a_short_name_is_a_file_word(text: str) -> None:
    word = short_name(text)
    assert (word, len(word) <= MOST_NAME_LENGTH) == (safe_file_word(word), True)
    assert short_name(word) == word


# Properties

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
scalars = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | texts
letters = "abcdefghij"  # without those of key, pass and token: values of such names are refused
keys = st.text(letters, min_size=1, max_size=6).map(lambda word: f"x_{word}")
lists = st.lists(scalars.filter(lambda value: value is not None), min_size=1, max_size=4)


@given(
    grid=st.dictionaries(keys, lists, max_size=3),
    zipped=st.integers(0, 3),
    listed=st.integers(0, 3),
)
def test_points_are_the_product_and_other_keys_are_unchanged(
    grid: dict[str, list[Any]], zipped: int, listed: int
) -> None:
    sweep: dict[str, Any] = {"grid": {f"backend.args.{key}": values for key, values in grid.items()}}
    if zipped:
        sweep["zip"] = {"resources.nodes": list(range(1, zipped + 1))}
    if listed:
        sweep["list"] = [{"env.POINT": str(index)} for index in range(listed)]
    if not (grid or zipped or listed):
        return
    body = {**BODY, "workers": [{"command": "true"}], "env": {"A": "{b}"}, "sweep": sweep}
    body["env"] = {"A": "b"}
    points = expand_sweep(body, "job.yaml").points
    assert len(points) == math.prod(map(len, grid.values())) * max(1, zipped) * max(1, listed)
    for point in points:
        expected: dict[str, Any] = {key: value for key, value in body.items() if key != "sweep"} | {"name": point.name}
        args: dict[str, Any] = {"mem-fraction": 0.5, **{key: point.values[f"backend.args.{key}"] for key in grid}}
        expected["backend"] = {"args": args}
        if zipped:
            expected["resources"] = {**BODY["resources"], "nodes": point.values["resources.nodes"]}
        if listed:
            expected["env"] = {"A": "b", "POINT": point.values["env.POINT"]}
        assert point.body == expected
        for key, value in args.items():
            assert type(value_at(point.body, "backend", "args", key)) is type(value)


json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


@given(json_values, json_values)
def test_merge_is_idempotent_and_does_not_change_its_arguments(base: Any, over: Any) -> None:
    before = repr((base, over))
    merged = merge(base, over)
    assert merge(merged, over) == merged
    assert repr((base, over)) == before


# Problems


def test_too_many_points_are_reported_before_any_is_created() -> None:
    sweep = {"grid": {"lr": list(range(1000)), "bs": list(range(1000))}}
    assert problems_of(sweep) == [
        f"sweep: makes 1000000 points and the limit is {MOST_POINTS}; use fewer values, or several job files"
    ]
