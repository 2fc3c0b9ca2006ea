"""What the answers of engines and front ends mean, and what is said of those who are missing."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.contract.manifest import Task
from launcher.plan.plan import Plan, ReadinessPlan, ReadyRule, RunFacts, TaskPlan
from launcher.run.before.readiness import (
    MOST_NAMED,
    RuleStatus,
    ServerReply,
    describe_missing,
    missing_text,
    parse_dynamo,
    parse_models,
    parse_sglang,
    present_text,
    request_paths,
    rule_status,
    unreached_status,
    without_workers,
    worker_totals,
)
from tests.support.launcher import plan_of

DISAGG = {"prefill": 4, "decode": 1}


def rule(kind: str, expected: dict[str, int] | None = None, **over: Any) -> ReadyRule:
    return ReadyRule(**{"subject": "", "kind": kind, "node": 0, "port": 8000, "expected": expected or {}, **over})


def instances(*components: str, endpoint: str = "generate") -> list[dict[str, str]]:
    return [{"endpoint": endpoint, "component": component} for component in components]


def said(value: object) -> bytes:
    return json.dumps(value).encode()


# -- bodies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "prefill", "decode"),
    [
        ({"instances": []}, 0, 0),
        ({"instances": instances("prefill", "prefill", "decode")}, 2, 1),
        ({"instances": instances("tensorrt_llm", "backend")}, 0, 2),
        ({"instances": instances("prefill", endpoint="clear_kv_blocks") + instances("prefill")}, 1, 0),
        ({"instances": instances("frontend", "planner", "Prefill", "")}, 0, 0),
        ({"instances": {"694d": instances("prefill")[0], "694e": instances("decode")[0]}}, 1, 1),
        ({"instances": [None, 3, "prefill", ["decode"], *instances("decode")]}, 0, 1),
        ({"instances": [{"endpoint": "generate"}, {"component": "prefill"}, {"endpoint": ["generate"]}]}, 0, 0),
        ({"status": "healthy", "endpoints": ["dyn://a"], "instances": instances("decode")}, 0, 1),
    ],
)
def test_dynamo_counts_the_endpoints_that_generate(body: object, prefill: int, decode: int) -> None:
    assert parse_dynamo(said(body)) == {"prefill": prefill, "decode": decode}


@pytest.mark.parametrize(
    ("stats", "prefill", "decode"),
    [
        ({"prefill_count": 4, "decode_count": 1, "regular_count": 0}, 4, 1),
        ({"prefill_count": 0, "decode_count": 0, "regular_count": 3}, 0, 3),
        ({"regular_count": 2, "decode_count": 1}, 0, 3),
        ({}, 0, 0),
    ],
)
def test_sglang_counts_regular_workers_as_decode(stats: dict[str, int], prefill: int, decode: int) -> None:
    assert parse_sglang(said({"workers": [], "stats": stats})) == {"prefill": prefill, "decode": decode}


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"OK", b"null", b"[]", b'"healthy"', b"{}", b"\xff\xfe", b"{" * 50, b"[" * 100_000),
        *(b'{"instances": null}', b'{"instances": 4}', b'{"instances": "prefill"}', b'{"instances": [{"endpoint"'),
        *(b'{"stats": []}', b'{"stats": {"prefill_count": "4"}}', b'{"stats": {"decode_count": -1}}'),
        *(b'{"stats": {"regular_count": true}}', b'{"stats": {"prefill_count": 4.0}}', b'{"stats": null}'),
        b"<html>502 Bad Gateway</html>",
    ],
)
def test_a_body_of_another_kind_tells_nothing(body: bytes) -> None:
    assert parse_dynamo(body) is None
    assert parse_sglang(body) is None
    assert parse_models(body) == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.sampled_from(["instances", "stats", "data", "id", "endpoint", "component"]), inner)
    ),
)


@given(st.binary() | json_values.map(lambda value: json.dumps(value).encode()), st.integers(-1, 999))
@example(said({"instances": instances("decode", "prefill")}), 503)
@example(b'{"stats": {"decode_count": 1' + b"0" * 5000 + b"}}", 200)
def test_garbage_is_never_ready_and_never_raises(body: bytes, status: int) -> None:
    for kind in ("dynamo", "sglang"):
        standing = rule_status(rule(kind, DISAGG), [ServerReply(status, body)])
        assert not standing.ready
        assert standing.seen.keys() == DISAGG.keys()
        assert all(number >= 0 for number in standing.seen.values())
    if not parse_models(body):
        assert not rule_status(rule("vllm"), [ServerReply(200, b""), ServerReply(status, body)]).ready


# -- rules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "replies", "standing"),
    [
        (
            rule("dynamo", DISAGG),
            [ServerReply(200, said({"instances": instances(*["prefill"] * 4)}))],
            RuleStatus(ready=False, seen={"prefill": 4, "decode": 0}),
        ),
        (
            rule("dynamo", DISAGG),
            [ServerReply(200, said({"instances": instances(*["prefill"] * 5, "decode")}))],
            RuleStatus(ready=True, seen={"prefill": 5, "decode": 1}),
        ),
        (
            rule("sglang", {"agg": 2}),
            [ServerReply(200, said({"stats": {"regular_count": 2}}))],
            RuleStatus(ready=True, seen={"agg": 2}),
        ),
        (
            rule("dynamo", {"prefill": 1, "decode": 2, "agg": 2}),
            [ServerReply(200, said({"instances": instances("prefill", *["backend"] * 3)}))],
            RuleStatus(ready=False, seen={"prefill": 1, "decode": 2, "agg": 1}),
        ),
        (
            rule("dynamo", DISAGG),
            [ServerReply(503, said({"instances": instances(*["prefill"] * 4, "decode")}))],
            RuleStatus(ready=False, seen={"prefill": 0, "decode": 0}, detail="/health answers 503"),
        ),
        (
            rule("sglang", DISAGG, path="/list"),
            [ServerReply(200, b"OK")],
            RuleStatus(
                ready=False,
                seen={"prefill": 0, "decode": 0},
                detail="/list answers something else than sglang does",
            ),
        ),
        (rule("dynamo"), [ServerReply(200, said({"instances": []}))], RuleStatus(ready=True)),
        (
            rule("vllm", {"decode": 1}),
            [ServerReply(200, b""), ServerReply(200, said({"object": "list", "data": [{"id": "m"}]}))],
            RuleStatus(ready=True, seen={"decode": 1}),
        ),
        (
            rule("vllm", {"decode": 1}),
            [ServerReply(200, b""), ServerReply(200, said({"data": []}))],
            RuleStatus(ready=False, seen={"decode": 0}, detail="/v1/models names no model"),
        ),
        (rule("vllm"), [ServerReply(500, b"")], RuleStatus(ready=False, detail="/health answers 500")),
        (rule("http", {"decode": 1}), [ServerReply(200, b"anything")], RuleStatus(ready=True, seen={"decode": 1})),
        (rule("http", path="/ping"), [ServerReply(302, b"")], RuleStatus(ready=False, detail="/ping answers 302")),
        (rule("tcp"), [], RuleStatus(ready=True)),
    ],
)
def test_a_rule_holds_when_as_many_as_expected_are_there(
    asked: ReadyRule, replies: list[ServerReply], standing: RuleStatus
) -> None:
    assert rule_status(asked, replies) == standing


def test_a_rules_own_path_stands_for_the_first() -> None:
    assert [request_paths(rule(kind)) for kind in ("dynamo", "sglang", "http", "tcp")] == [
        ("/health",),
        ("/workers",),
        ("/health",),
        (),
    ]
    assert request_paths(rule("vllm", path="/ping")) == ("/ping", "/v1/models")
    assert request_paths(rule("tcp", path="/ping")) == ()


# -- the job as a whole --------------------------------------------------------------------------


def whole(*told: tuple[ReadyRule, dict[str, int]]) -> tuple[dict[str, int], dict[str, int], str]:
    """Seen, expected and who is waited for, when each rule sees so many."""
    rules = [asked for asked, _ in told]
    standings = [RuleStatus(all(seen.get(role, 0) >= n for role, n in r.expected.items()), seen) for r, seen in told]
    seen, expected = worker_totals(rules, standings)
    return seen, expected, missing_text(rules, standings, seen, expected)


def test_the_front_end_that_knows_least_is_believed() -> None:
    first, second = rule("dynamo", DISAGG), rule("dynamo", DISAGG, node=1)
    assert whole((first, {"prefill": 4, "decode": 1}), (second, {"prefill": 2, "decode": 1})) == (
        {"prefill": 2, "decode": 1},
        DISAGG,
        "2 prefills and 0 decodes",
    )


def test_workers_that_are_asked_themselves_add_up() -> None:
    rules = [rule("http", {"agg": 1}, subject=f"agg_w{index}") for index in range(3)]
    seen, expected, waiting = whole((rules[0], {"agg": 1}), (rules[1], {"agg": 0}), (rules[2], {"agg": 0}))
    assert (seen, expected, waiting) == ({"agg": 1}, {"agg": 3}, "0 prefills and 2 decodes")


def test_services_without_counts_are_waited_for_by_name() -> None:
    ready, down = RuleStatus(ready=True), RuleStatus(ready=False)
    rules = [rule("tcp", subject="etcd"), rule("http", subject="nginx"), rule("http")]
    assert missing_text(rules, [ready, down, down], {}, {}) == "nginx and the model"
    assert missing_text(rules, [ready, ready, ready], {}, {}) == ""
    many = [rule("http", subject=f"w{index}") for index in range(20)]
    assert missing_text(many, [down] * 20, {}, {}).endswith("w6 and w7 and 12 more")


def test_a_front_end_is_not_waited_for_besides_its_workers() -> None:
    asked = rule("dynamo", DISAGG, subject="frontend_0")
    standings = [unreached_status(asked, "connection refused by cn01:8000")]
    assert missing_text([asked], standings, *worker_totals([asked], standings)) == "4 prefills and 1 decodes"


def test_a_worker_that_is_asked_itself_is_named_only_where_nobody_counts_it_as_missing() -> None:
    workers = [rule("http", subject="prefill_w0"), rule("http", subject="decode_w0")]
    down = RuleStatus(ready=False)
    assert missing_text(workers, [down, down], *worker_totals(workers, [down, down])) == "prefill_w0 and decode_w0"


@pytest.mark.parametrize(
    ("counted", "seen", "waiting"),
    [
        ({"prefill": 3, "decode": 0}, {"prefill": 3, "decode": 0}, "1 prefills and 1 decodes"),
        ({"prefill": 4, "decode": 0}, {"prefill": 3, "decode": 0}, "1 prefills and 1 decodes"),
        ({"prefill": 2, "decode": 1}, {"prefill": 2, "decode": 0}, "2 prefills and 1 decodes"),
        ({"prefill": 9, "decode": 9}, {"prefill": 3, "decode": 0}, "1 prefills and 1 decodes"),
    ],
)
def test_a_worker_that_is_not_ready_is_missing_even_where_a_router_counts_it(
    counted: dict[str, int], seen: dict[str, int], waiting: str
) -> None:
    rules = [rule("http", subject="prefill_w0"), rule("http", subject="decode_w0"), rule("sglang", DISAGG)]
    enough = all(counted[role] >= number for role, number in DISAGG.items())
    standings = [RuleStatus(ready=False), RuleStatus(ready=False), RuleStatus(enough, counted)]
    assert worker_totals(rules, standings) == (seen, DISAGG)
    assert missing_text(rules, standings, *worker_totals(rules, standings)) == waiting


@given(st.lists(st.booleans(), min_size=1, max_size=5), st.lists(st.booleans(), min_size=1, max_size=5), st.data())
def test_who_is_missing_is_counted_or_named_and_never_both(
    prefill: list[bool], decode: list[bool], data: st.DataObject
) -> None:
    up = {f"{role}_w{index}": ready for role, of in (("prefill", prefill), ("decode", decode))
          for index, ready in enumerate(of)}  # fmt: skip
    counts = {"prefill": len(prefill), "decode": len(decode)}
    counted = {role: data.draw(st.integers(0, number + 1)) for role, number in counts.items()}
    enough = all(counted[role] >= number for role, number in counts.items())
    rules = [*(rule("http", subject=name) for name in up), rule("sglang", counts)]
    standings = [*(RuleStatus(ready) for ready in up.values()), RuleStatus(enough, counted)]
    seen, expected = worker_totals(rules, standings)
    waiting = missing_text(rules, standings, seen, expected)
    missing = [max(of.count(False), len(of) - counted[role]) for role, of in (("prefill", prefill), ("decode", decode))]
    assert waiting == (f"{missing[0]} prefills and {missing[1]} decodes" if any(missing) else "")


@given(
    st.dictionaries(st.sampled_from(["prefill", "decode", "agg", "worker"]), st.integers(0, 20), min_size=1),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_nobody_waits_for_less_than_nobody(expected: dict[str, int], prefill: int, decode: int) -> None:
    asked = rule("dynamo", expected)
    body = said({"instances": instances(*["prefill"] * prefill, *["decode"] * decode)})
    standing = rule_status(asked, [ServerReply(200, body)])
    seen, wanted = worker_totals([asked], [standing])
    waiting = missing_text([asked], [standing], seen, wanted)
    assert "-" not in waiting
    assert "-" not in present_text(seen)
    enough = prefill >= expected.get("prefill", 0) and decode >= sum(expected.values()) - expected.get("prefill", 0)
    assert standing.ready == enough == (waiting == "")


# -- who is missing ------------------------------------------------------------------------------


def serving_plan(*rules: ReadyRule) -> Plan:
    """Two decode workers of two nodes each, and a front end on the first node."""
    tasks = []
    for rank, (worker, index, local, node) in enumerate(
        [("decode_w0", 0, 0, 0), ("decode_w0", 0, 1, 1), ("decode_w1", 1, 0, 2), ("decode_w1", 1, 1, 3)]
    ):
        logs = (f"{{node}}_{worker}{{run}}.out", f"{{node}}_{worker}{{run}}.err")
        tasks.append(TaskPlan(Task(worker, "decode", index, rank, local, node, (), logs), (), {}))
    front = Task("frontend_0", "frontend", 0, 4, 0, 0, (), ("{node}_frontend_0{run}.out",))
    tasks.append(TaskPlan(front, (), {}, stage="frontends", ports={"public": 8000}))
    return dataclasses.replace(plan_of(), nodes=4, tasks=tuple(tasks), readiness=ReadinessPlan(rules))


def missing(tmp_path: Path, plan: Plan, *told: dict[str, Any], restarts: dict[int, int] | None = None) -> list[str]:
    facts = RunFacts("4459", tmp_path, tuple(f"cn0{index + 1}" for index in range(plan.nodes)))
    return describe_missing(plan, facts, {"rules": list(told)} if told else None, restarts)


def test_workers_that_have_not_registered_are_named_with_the_ends_of_their_logs(tmp_path: Path) -> None:
    (tmp_path / "cn01_decode_w0.err").write_text("".join(f"line {index}\n" for index in range(9)))
    (tmp_path / "cn03_decode_w1_r2.out").write_text("loading\n\napi_key=sk-abcdefghijklmnopqrstuvwxyz123456\n")
    plan = serving_plan(rule("dynamo", {"decode": 2}))
    assert missing(tmp_path, plan, {"ready": False, "seen": {"decode": 1}, "detail": ""}, restarts={2: 2}) == [
        "decode: 1 of 2 not ready, of decode_w0 on cn01, decode_w1 on cn03",
        "cn01_decode_w0.out is empty",
        "cn01_decode_w0.err:",
        *(f"    line {index}" for index in range(4, 9)),
        "cn03_decode_w1_r2.out:",
        "    loading",
        "    api_key=<redacted>",
        "cn03_decode_w1_r2.err is empty",
    ]


def test_a_front_end_that_does_not_answer_is_named_with_the_end_of_its_own_log(tmp_path: Path) -> None:
    (tmp_path / "cn01_frontend_0.out").write_text("Traceback\nOSError: [Errno 98] Address already in use\n")
    plan = serving_plan(rule("dynamo", {"decode": 2}))
    told = {"ready": False, "seen": {"decode": 0}, "detail": "connection refused by cn01:8000"}
    assert missing(tmp_path, plan, told) == [
        "the model is not ready: connection refused by cn01:8000",
        "cn01_frontend_0.out:",
        "    Traceback",
        "    OSError: [Errno 98] Address already in use",
    ]


def test_those_who_are_ready_are_not_missing(tmp_path: Path) -> None:
    plan = serving_plan(rule("http", {"decode": 1}, subject="decode_w0"), rule("tcp", subject="decode_w1", node=2))
    lines = missing(tmp_path, plan, {"ready": True, "seen": {"decode": 1}}, {"ready": False, "detail": "refused"})
    assert lines[0] == "decode_w1 is not ready: refused"
    assert not [line for line in lines if "decode_w0" in line]
    assert missing(tmp_path, plan, {"ready": True}, {"ready": True}) == []


def test_without_any_answer_everybody_who_was_to_be_asked_is_missing(tmp_path: Path) -> None:
    plan = serving_plan(rule("dynamo", {"decode": 2}))
    assert missing(tmp_path, plan) == [
        "the model is not ready: no answer yet",
        "cn01_frontend_0.out is empty",
    ]


def test_the_logs_of_a_few_are_enough(tmp_path: Path) -> None:
    plan = serving_plan(*(rule("http", subject=f"w{index}") for index in range(40)))
    planned = plan.tasks[0]
    tasks = tuple(
        dataclasses.replace(
            planned, task=dataclasses.replace(planned.task, worker=f"w{index}", rank=index, logs=(f"w{index}.out",))
        )
        for index in range(40)
    )
    lines = missing(tmp_path, dataclasses.replace(plan, tasks=tasks))
    assert len([line for line in lines if line.endswith("no answer yet")]) == 40
    assert len([line for line in lines if line.endswith("is empty")]) == MOST_NAMED


def test_nobody_waits_for_workers_that_are_given_up() -> None:
    rules = [
        ReadyRule("decode_w0", "http", 0, 6100, "/health", {"decode": 1}),
        ReadyRule("decode_w1", "http", 0, 6101, "/health", {"decode": 1}),
        ReadyRule("", "dynamo", 0, 8000, "/health", {"decode": 2, "prefill": 1}),
        ReadyRule("frontend_0", "dynamo", 0, 8000, "/health", {"decode": 2}),
    ]
    standings = [
        RuleStatus(ready=True, seen={"decode": 1}),
        unreached_status(rules[1], "connection refused"),
        RuleStatus(ready=False, seen={"decode": 1, "prefill": 1}),
        unreached_status(rules[3], "connection refused"),
    ]
    assert without_workers(rules, standings, {}) == (rules, standings)
    asked, found = without_workers(rules, standings, {"decode_w1": "decode"})
    assert [standing.ready for standing in found] == [True, True, True, False]
    assert [rule.expected for rule in asked] == [{"decode": 1}, {}, {"decode": 1, "prefill": 1}, {"decode": 1}]
    assert worker_totals(asked, found) == ({"decode": 0, "prefill": 1}, {"decode": 1, "prefill": 1})
