"""Variables with the name of a secret get no values from a sweep."""

from typing import Any

import pytest

from launcher.errors import ConfigError
from launcher.sweep.points import expand_sweep, read_sweep

SECRET = "sk-secret-1"


def problems_of(sweep: dict[str, Any], **over: Any) -> list[str]:
    body: dict[str, Any] = {"name": "s4", "workers": [{"command": "true", "env": {"OWN": "1"}}], **over, "sweep": sweep}
    with pytest.raises(ConfigError) as raised:
        read_sweep(body, "job.yaml")
    assert SECRET not in str(raised.value), "it would be in the log of whoever ran this"
    return list(raised.value.problems)


@pytest.mark.parametrize(
    ("sweep", "over", "place", "source"),
    [
        (
            {"list": [{"workers[0].env.API_KEY": SECRET}]},
            {},
            "workers[0].env.API_KEY",
            "sweep.list[0].workers[0].env.API_KEY",
        ),
        (
            {"grid": {"workers.worker.env": [{}, {"MY_TOKEN": SECRET}]}},
            {},
            "workers[0].env.MY_TOKEN",
            "sweep.grid.workers.worker.env[1]",
        ),
        ({"grid": {"backend": [{"env": {"HF_TOKEN": SECRET}}]}}, {}, "backend.env.HF_TOKEN", "sweep.grid.backend[0]"),
        ({"zip": {"k": ["x", SECRET]}}, {"env": {"API_KEY": "{k}"}}, "env.API_KEY", "{k} of sweep.zip.k[0]"),
        ({"grid": {"k": [SECRET]}}, {"env": {"PASSWORD": "a-{k}"}}, "env.PASSWORD", "{k} of sweep.grid.k[0]"),
        ({"grid": {"e": [{"API_KEY": SECRET}]}}, {"env": "{e}"}, "env.API_KEY", "{e} of sweep.grid.e[0]"),
    ],
)
def test_a_variable_with_the_name_of_a_secret_is_refused(
    sweep: dict[str, Any], over: dict[str, Any], place: str, source: str
) -> None:
    name = place.rpartition(".")[2]
    (problem,) = problems_of(sweep, **over)
    assert problem == (
        f"{place}: {source} sets its value, and the name {name} looks like a secret. Values of a sweep appear in names "
        f"and in files that others can read; remove it from the sweep and add `secrets: [{name}]`, "
        "or rename the variable if it is not a secret"
    )


ENGINE = {"model": {"path": "/models/m"}, "resources": {"agg_workers": 1, "gpus_per_node": 1}}


@pytest.mark.parametrize(
    ("sweep", "backend", "place", "source"),
    [
        (
            {"grid": {"backend.args.api-key": [SECRET]}},
            {},
            "backend.args.api-key",
            "sweep.grid.backend.args.api-key[0]",
        ),
        (
            {"list": [{"backend.args": {"admin-api-key": SECRET}}]},
            {},
            "backend.args.admin-api-key",
            "sweep.list[0].backend.args",
        ),
        (
            {"grid": {"backend.agg.args.api_key": [SECRET]}},
            {},
            "backend.agg.args.api_key",
            "sweep.grid.backend.agg.args.api_key[0]",
        ),
        (
            {"zip": {"k": ["x", SECRET]}},
            {"args": {"hf-token": "{k}"}},
            "backend.args.hf-token",
            "{k} of sweep.zip.k[0]",
        ),
        (
            {"grid": {"k": [SECRET]}},
            {"args": {"api-key": ["a", "b-{k}"]}},
            "backend.args.api-key",
            "{k} of sweep.grid.k[0]",
        ),
        (
            {"grid": {"backend.agg.config": [{"server": {"password": SECRET}}]}},
            {"type": "trtllm"},
            "backend.agg.config.server.password",
            "sweep.grid.backend.agg.config[0]",
        ),
    ],
)
def test_an_option_with_the_name_of_a_secret_is_refused(
    sweep: dict[str, Any], backend: dict[str, Any], place: str, source: str
) -> None:
    (problem,) = problems_of(sweep, **ENGINE, workers=[], backend={"type": "vllm", **backend})
    assert problem == (
        f"{place}: {source} sets its value, and the name {place.rpartition('.')[2]} looks like a secret. Values of a "
        "sweep appear in names and in files that others can read; remove it from the sweep and write it at the option, "
        "or list the program's own variable for it in `secrets`"
    )


@pytest.mark.parametrize(
    ("sweep", "args"),
    [
        ({"grid": {"backend.args.max-num-batched-tokens": [1024, 2048]}}, {}),
        ({"grid": {"backend.args.tokenizer": ["slow", "fast"]}}, {}),
        ({"grid": {"backend.args.ssl-key": ["/a/key.pem"]}}, {}),
        ({"grid": {"backend.args.seed": [1, 2]}}, {"api-key": "written-out"}),
    ],
)
def test_other_options_and_those_outside_the_sweep_are_accepted(sweep: dict[str, Any], args: dict[str, Any]) -> None:
    backend = {"type": "vllm", "args": args}
    body: dict[str, Any] = {"name": "s4", "workers": [], **ENGINE, "backend": backend, "sweep": sweep}
    assert expand_sweep(body, "job.yaml").points


def test_other_problems_are_reported_without_point_names() -> None:
    sweep = {"grid": {"k": [SECRET, "sk-secret-2"], "workers[7].gpus": [1]}}
    problems = problems_of(sweep, env={"API_KEY": "{k}"}, slurm={"time": 1})
    assert [problem.partition(":")[0] for problem in problems] == ["env.API_KEY", "slurm.time"]


@pytest.mark.parametrize(
    ("sweep", "over"),
    [
        ({"grid": {"workers[0].env.TOKENIZERS_PARALLELISM": ["true", "false"]}}, {}),
        ({"grid": {"env.MAX_TOKENS": [128, 256]}}, {}),
        ({"grid": {"n": [128, 256]}}, {"env": {"MAX_TOKENS": "{n}"}}),
        ({"grid": {"env.AUTH_FILE": ["/a/b", "~/c"]}}, {}),
        ({"grid": {"env.API_KEY": [None]}}, {"env": {"API_KEY": "written-out"}}),
        ({"grid": {"env": [{"N": "1"}, {"N": "2"}]}}, {"env": {"API_KEY": "written-out"}}),
        ({"grid": {"workers[0].gpus": [0]}}, {"env": {"API_KEY": "written-out"}}),
        ({"grid": {"n": [1]}}, {"env": {"API_KEY": "written-out-{point}", "N": "{n}"}}),
    ],
)
def test_other_variables_and_those_outside_the_sweep_are_accepted(sweep: dict[str, Any], over: dict[str, Any]) -> None:
    body: dict[str, Any] = {"name": "s4", "workers": [{"command": "true", "env": {}}], **over, "sweep": sweep}
    assert expand_sweep(body, "job.yaml").points
