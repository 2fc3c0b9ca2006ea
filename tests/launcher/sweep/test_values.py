"""Values of a sweep reach a worker unchanged, as data."""

from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.errors import ConfigError
from launcher.plan.placeholders import fill_placeholders, fill_template, task_argv, task_environment
from launcher.plan.plan import Plan
from launcher.sweep.points import check_points, expand_sweep
from launcher.sweep.values import escape_text, escape_value, format_place, join_literally
from tests.support.launcher import HARD_NAMES, facts_of, plan_of

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
braced = st.lists(
    st.sampled_from(["{", "}", "{{", "}}", "{rank}", "{{rank}}", "{x}", "{X}", "ran", "k", "rank", "$", "\\", "'"]),
    max_size=6,
).map("".join)
values = texts | braced | st.sampled_from(HARD_NAMES)


def plan_with(sweep: dict[str, Any], **over: Any) -> Plan:
    """The plan of the only point of a sweep."""
    body = {"name": "j", "workers": [{"command": "true"}], **over, "sweep": {"list": [sweep]}}
    (spec,) = check_points(expand_sweep(body, "job.yaml"), "job.yaml")
    return plan_of(spec)


def argv_of(plan: Plan) -> list[str]:
    return task_argv(plan, plan.tasks[0], facts_of(plan))


@given(values, values)
@example("{rank}", "{{rank}}")
@example("{nats_port}", "{host_0}")
@example("{http_port}", "{RANK}")
@example("{", "}")
@example("{x", "}")
@example("ran", "k}")
@example("", "")
def test_any_value_reaches_the_worker_unchanged(v: str, w: str) -> None:
    argv = ["prog", "{v}", "--x={v}/{rank}:{w}", "{{v}} ${v} {w}{v}", '{"a": {v}, "b": {rank}}']
    workers = [{"command": argv, "env": {"OWN": "{w}"}}]
    plan = plan_with({"v": v, "w": w}, workers=workers, env={"V": "{v}", "BOTH": "<{v}{w}> {rank}"})
    assert argv_of(plan) == [
        *("prog", v, f"--x={v}/0:{w}"),
        *("{v} ${v} " + w + v, '{"a": ' + v + ', "b": 0}'),
    ]
    environment = task_environment(plan, plan.tasks[0], facts_of(plan), 0)
    assert {name: environment[name] for name in ("V", "BOTH", "OWN")} == {"V": v, "BOTH": f"<{v}{w}> 0", "OWN": w}


@given(values, values)
def test_a_value_next_to_anything_is_unchanged_or_refused(v: str, w: str) -> None:
    """Next to a placeholder, and inside the braces of one."""
    argv = ["prog", "{v}{rank}{w}", "{ran{v}}", "{{ran{w}}}", "{v}{{rank}}{w}"]
    workers = [{"command": argv}]
    if (v[-1:], w[:1]) == ("{", "}"):
        with pytest.raises(ConfigError, match="braces of values around a placeholder form a literal one"):
            plan_with({"v": v, "w": w}, workers=workers)
        return
    plan = plan_with({"v": v, "w": w}, workers=workers)
    assert argv_of(plan) == ["prog", f"{v}0{w}", "{ran" + v + "}", "{{ran" + w + "}}", v + "{rank}" + w]


def test_placeholders_of_the_run_are_kept() -> None:
    words = ["{v}", "{host_0}", "{ip_0}", "{port_6100}", "{leader}", "{worker_size}"]
    plan = plan_with({"v": 1}, workers=[{"command": ["prog", *words], "env": {"A": "{ip_0}"}}])
    assert argv_of(plan)[2:] == ["cn00", "cn00", "6100", "cn00", "1"]
    assert task_environment(plan, plan.tasks[0], facts_of(plan), 0)["A"] == "cn00"


def test_values_that_would_escape_a_placeholder_are_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        plan_with({"v": "{", "w": "}"}, workers=[{"command": ["prog", "{v}{rank}{w}"]}])
    problem = "braces of values around a placeholder form a literal one; put something between them"
    assert raised.value.problems == (f"j_v-_w: workers[0].command: '{{{{rank}}}}': {problem}",)


@given(values.filter(lambda value: not set(value) & set("\x85\u2028\u2029\ufeff")))  # PyYAML loses these
def test_any_value_reaches_options_and_configuration_unchanged(value: str) -> None:
    backend = {"type": "sglang", "args": {"x": "{v}", "all": "{all}"}, "config": {"a": "{v}", "b": ["<{v}>", "{all}"]}}
    over = {"backend": backend, "model": {"path": "/m"}, "resources": {"gpus_per_node": 1, "agg_workers": 1}}
    plan = plan_with({"v": value, "all": [value, 7]}, workers=[], **over)
    argv = argv_of(plan)
    assert argv[argv.index("--x") + 1] == value
    assert argv[argv.index("--all") + 1 : argv.index("--all") + 3] == [value, "7"]
    ((name, text),) = plan.templates.items()
    assert name == "sglang_config_agg.yaml"
    found = yaml.safe_load(fill_template(plan, text, facts_of(plan)))
    assert found == {"a": value, "b": [f"<{value}>", [value, 7]]}


@given(values.filter(lambda value: "/" not in value and value not in ("", ".", "..")))
def test_any_value_may_be_part_of_the_output_directory(value: str) -> None:
    plan = plan_with({"v": value}, paths={"output_dir": "out/{v}"}, workers=[{"command": ["prog", "{output_dir}"]}])
    assert argv_of(plan) == ["prog", f"/home/ana/work/out/{value}"]
    assert plan.manifest.groups[0].directory == f"/home/ana/work/out/{value}"


SERVING: dict[str, Any] = {
    "workers": [],
    "backend": {"type": "sglang"},
    "model": {"path": "/m"},
    "resources": {"gpus_per_node": 1, "agg_workers": 1},
}


@given(values, values)
@example("a b", "1")
@example("{job_id}", "$HOME")
def test_any_value_is_one_argument_of_benchmark_and_front_end(v: str, w: str) -> None:
    over = {
        "benchmark": {"type": "custom", "command": "bench {v} --y={w} 'two words' {job_id}"},
        "frontend": {"type": "custom", "command": ["front", "{v}", "--p", "{http_port}", "{w}"]},
    }
    plan = plan_with({"v": v, "w": w}, **SERVING, **over)
    argv = {entry.task.worker: task_argv(plan, entry, facts_of(plan)) for entry in plan.tasks}
    assert argv["benchmark"] == ["bench", v, f"--y={w}", "two words", "4459"]
    assert argv["frontend_0"] == ["front", v, "--p", "8000", w]


@pytest.mark.parametrize(("part", "word"), [("benchmark", "bench"), ("frontend", "front")])
def test_a_shell_command_accepts_only_plain_values(part: str, word: str) -> None:
    over = {part: {"type": "custom", "command": f"bash -c '{word} {{v}}'"}}
    assert plan_with({"v": "a-b"}, **SERVING, **over).tasks[-1].argv == ("bash", "-c", f"{word} a-b")
    with pytest.raises(
        ConfigError, match=rf"{part}\.command: 'a b' of {{v}} would be interpreted by the shell; pass it in env"
    ):
        plan_with({"v": "a b"}, **SERVING, **over)


def test_the_fix_for_the_preamble_suggests_no_variable() -> None:
    with pytest.raises(ConfigError) as raised:
        plan_with({"v": "a b"}, setup={"preamble": "ulimit -n {v}"})
    (problem,) = raised.value.problems
    assert problem == (
        "j_va-b: setup.preamble: 'a b' of {v} would be interpreted by the shell; "
        "only letters, digits and _ . , : / @ % + = - are allowed there"
    )


def test_a_variable_named_command_is_not_a_command() -> None:
    plan = plan_with({"v": "a b"}, env={"command": "x {v}"}, workers=[{"command": "true"}])
    assert task_environment(plan, plan.tasks[0], facts_of(plan), 0)["command"] == "x a b"


@given(values.filter(bool))
@example("a{rank}")
def test_any_value_may_be_the_name_of_the_model(value: str) -> None:
    plan = plan_with({"v": value}, **{**SERVING, "model": {"path": "hf:org/a{v}", "name": "{v}"}})
    argv = argv_of(plan)
    assert argv[argv.index("--model-path") + 1] == f"org/a{value}"
    assert argv[argv.index("--served-model-name") + 1] == value


def test_a_value_of_a_key_may_contain_placeholders() -> None:
    plan = plan_with({"env.A": "{output_dir}/{rank}", "workers[0].command": "prog {rank}"}, paths={"output_dir": "/o"})
    assert argv_of(plan) == ["prog", "0"]
    assert task_environment(plan, plan.tasks[0], facts_of(plan), 0)["A"] == "/o/0"


def test_mounts_get_the_value() -> None:
    container = {"image": "i.sqsh", "mounts": ["{v}:/data"]}
    plan = plan_with({"v": "/a{rank}"}, container=container, env={"V": "{v}"})
    assert plan.container is not None
    mount = plan.container.mounts[-1]
    assert fill_placeholders(mount, {"rank": "0"}) == "/a{rank}:/data"


@given(values)
def test_an_escaped_value_is_restored(value: str) -> None:
    assert fill_placeholders(escape_text(value), {"rank": "0", "x": "1"}) == value
    assert escape_value({"{rank}": [value, 1, None]}) == {"{{rank}}": [escape_text(value), 1, None]}


def test_texts_without_values_are_unchanged() -> None:
    assert join_literally([("{rank} {{rank}} ${rank}", False)]) == "{rank} {{rank}} ${rank}"
    assert join_literally([("{", False), ("rank", True), ("} {rank}", False)]) == "{{rank}} {rank}"


def test_a_key_path_may_contain_non_text_keys() -> None:
    assert format_place((None, "a", 0)) == "None.a[0]"  # type: ignore[arg-type]
