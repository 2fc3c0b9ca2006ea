"""Readiness from the answers of engines and front ends, and the text about missing workers."""

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
from tests.support.launcher import job_readiness, plan_of

DISAGG = {"prefill": 4, "decode": 1}


def rule(kind: str, expected: dict[str, int] | None = None, **over: Any) -> ReadyRule:
    return ReadyRule(**{"subject": "", "kind": kind, "node": 0, "port": 8000, "expected": expected or {}, **over})


def instances(*components: str, endpoint: str = "generate") -> list[dict[str, str]]:
    return [{"endpoint": endpoint, "component": component} for component in components]


def to_json_bytes(value: object) -> bytes:
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
def test_dynamo_counts_the_generate_endpoints(body: object, prefill: int, decode: int) -> None:
    assert parse_dynamo(to_json_bytes(body)) == {"prefill": prefill, "decode": decode}


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
    assert parse_sglang(to_json_bytes({"workers": [], "stats": stats})) == {"prefill": prefill, "decode": decode}


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
def test_an_unexpected_body_gives_no_counts(body: bytes) -> None:
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
@example(to_json_bytes({"instances": instances("decode", "prefill")}), 503)
@example(b'{"stats": {"decode_count": 1' + b"0" * 5000 + b"}}", 200)
def test_garbage_is_never_ready_and_never_raises(body: bytes, http_status: int) -> None:
    for kind in ("dynamo", "sglang"):
        status = rule_status(rule(kind, DISAGG), [ServerReply(http_status, body)])
        assert not status.ready
        assert status.seen.keys() == DISAGG.keys()
        assert all(number >= 0 for number in status.seen.values())
    if not parse_models(body):
        assert not rule_status(rule("vllm"), [ServerReply(200, b""), ServerReply(http_status, body)]).ready


# -- rules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ready_rule", "replies", "status"),
    [
        (
            rule("dynamo", DISAGG),
            [ServerReply(200, to_json_bytes({"instances": instances(*["prefill"] * 4)}))],
            RuleStatus(ready=False, seen={"prefill": 4, "decode": 0}),
        ),
        (
            rule("dynamo", DISAGG),
            [ServerReply(200, to_json_bytes({"instances": instances(*["prefill"] * 5, "decode")}))],
            RuleStatus(ready=True, seen={"prefill": 5, "decode": 1}),
        ),
        (
            rule("sglang", {"agg": 2}),
            [ServerReply(200, to_json_bytes({"stats": {"regular_count": 2}}))],
            RuleStatus(ready=True, seen={"agg": 2}),
        ),
        (
            rule("dynamo", {"prefill": 1, "decode": 2, "agg": 2}),
            [ServerReply(200, to_json_bytes({"instances": instances("prefill", *["backend"] * 3)}))],
            RuleStatus(ready=False, seen={"prefill": 1, "decode": 2, "agg": 1}),
        ),
        (
            rule("dynamo", DISAGG),
            [ServerReply(503, to_json_bytes({"instances": instances(*["prefill"] * 4, "decode")}))],
            RuleStatus(ready=False, seen={"prefill": 0, "decode": 0}, detail="/health answers 503"),
        ),
        (
            rule("sglang", DISAGG, path="/list"),
            [ServerReply(200, b"OK")],
            RuleStatus(
                ready=False,
                seen={"prefill": 0, "decode": 0},
                detail="/list does not answer like sglang",
            ),
        ),
        (rule("dynamo"), [ServerReply(200, to_json_bytes({"instances": []}))], RuleStatus(ready=True)),
        (
            rule("vllm", {"decode": 1}),
            [ServerReply(200, b""), ServerReply(200, to_json_bytes({"object": "list", "data": [{"id": "m"}]}))],
            RuleStatus(ready=True, seen={"decode": 1}),
        ),
        (
            rule("vllm", {"decode": 1}),
            [ServerReply(200, b""), ServerReply(200, to_json_bytes({"data": []}))],
            RuleStatus(ready=False, seen={"decode": 0}, detail="/v1/models names no model"),
        ),
        (rule("vllm"), [ServerReply(500, b"")], RuleStatus(ready=False, detail="/health answers 500")),
        (rule("http", {"decode": 1}), [ServerReply(200, b"anything")], RuleStatus(ready=True, seen={"decode": 1})),
        (rule("http", path="/ping"), [ServerReply(302, b"")], RuleStatus(ready=False, detail="/ping answers 302")),
        (rule("tcp"), [], RuleStatus(ready=True)),
    ],
)
def test_a_rule_is_ready_when_the_expected_workers_are_present(
    ready_rule: ReadyRule, replies: list[ServerReply], status: RuleStatus
) -> None:
    assert rule_status(ready_rule, replies) == status


def test_the_path_of_a_rule_replaces_the_first_request_path() -> None:
    assert [request_paths(rule(kind)) for kind in ("dynamo", "sglang", "http", "tcp")] == [
        ("/health",),
        ("/workers",),
        ("/health",),
        (),
    ]
    assert request_paths(rule("vllm", path="/ping")) == ("/ping", "/v1/models")
    assert request_paths(rule("tcp", path="/ping")) == ()


# -- the job as a whole --------------------------------------------------------------------------


def totals_and_missing(*seen_by_rule: tuple[ReadyRule, dict[str, int]]) -> tuple[dict[str, int], dict[str, int], str]:
    """Seen, expected and missing workers when each rule has seen these counts."""
    rules = [ready_rule for ready_rule, _ in seen_by_rule]
    statuses = [
        RuleStatus(all(seen.get(role, 0) >= n for role, n in r.expected.items()), seen) for r, seen in seen_by_rule
    ]
    seen, expected = worker_totals(rules, statuses)
    return seen, expected, missing_text(rules, statuses, seen, expected)


def test_the_lowest_count_of_several_front_ends_is_used() -> None:
    first, second = rule("dynamo", DISAGG), rule("dynamo", DISAGG, node=1)
    assert totals_and_missing((first, {"prefill": 4, "decode": 1}), (second, {"prefill": 2, "decode": 1})) == (
        {"prefill": 2, "decode": 1},
        DISAGG,
        "2 prefills and 0 decodes",
    )


def test_counts_of_workers_with_their_own_rule_are_added() -> None:
    rules = [rule("http", {"agg": 1}, subject=f"agg_w{index}") for index in range(3)]
    seen, expected, waiting = totals_and_missing((rules[0], {"agg": 1}), (rules[1], {"agg": 0}), (rules[2], {"agg": 0}))
    assert (seen, expected, waiting) == ({"agg": 1}, {"agg": 3}, "0 prefills and 2 decodes")


def test_missing_services_without_counts_are_named() -> None:
    ready, down = RuleStatus(ready=True), RuleStatus(ready=False)
    rules = [rule("tcp", subject="etcd"), rule("http", subject="nginx"), rule("http")]
    assert missing_text(rules, [ready, down, down], {}, {}) == "nginx and the model"
    assert missing_text(rules, [ready, ready, ready], {}, {}) == ""
    many = [rule("http", subject=f"w{index}") for index in range(20)]
    assert missing_text(many, [down] * 20, {}, {}).endswith("w6 and w7 and 12 more")


def test_a_front_end_is_not_named_in_addition_to_its_workers() -> None:
    ready_rule = rule("dynamo", DISAGG, subject="frontend_0")
    statuses = [unreached_status(ready_rule, "connection refused by cn01:8000")]
    assert missing_text([ready_rule], statuses, *worker_totals([ready_rule], statuses)) == "4 prefills and 1 decodes"


def test_a_worker_with_its_own_rule_is_named_only_if_it_is_not_counted() -> None:
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
def test_a_worker_that_is_not_ready_is_missing_even_if_a_router_counts_it(
    counted: dict[str, int], seen: dict[str, int], waiting: str
) -> None:
    rules = [rule("http", subject="prefill_w0"), rule("http", subject="decode_w0"), rule("sglang", DISAGG)]
    enough = all(counted[role] >= number for role, number in DISAGG.items())
    statuses = [RuleStatus(ready=False), RuleStatus(ready=False), RuleStatus(enough, counted)]
    assert worker_totals(rules, statuses) == (seen, DISAGG)
    assert missing_text(rules, statuses, *worker_totals(rules, statuses)) == waiting


@given(st.lists(st.booleans(), min_size=1, max_size=5), st.lists(st.booleans(), min_size=1, max_size=5), st.data())
def test_a_missing_worker_is_counted_or_named_but_not_both(
    prefill: list[bool], decode: list[bool], data: st.DataObject
) -> None:
    up = {f"{role}_w{index}": ready for role, states in (("prefill", prefill), ("decode", decode))
          for index, ready in enumerate(states)}  # fmt: skip
    counts = {"prefill": len(prefill), "decode": len(decode)}
    counted = {role: data.draw(st.integers(0, number + 1)) for role, number in counts.items()}
    enough = all(counted[role] >= number for role, number in counts.items())
    rules = [*(rule("http", subject=name) for name in up), rule("sglang", counts)]
    statuses = [*(RuleStatus(ready) for ready in up.values()), RuleStatus(enough, counted)]
    seen, expected = worker_totals(rules, statuses)
    waiting = missing_text(rules, statuses, seen, expected)
    missing = [
        max(states.count(False), len(states) - counted[role])
        for role, states in (("prefill", prefill), ("decode", decode))
    ]
    assert waiting == (f"{missing[0]} prefills and {missing[1]} decodes" if any(missing) else "")


@given(
    st.dictionaries(st.sampled_from(["prefill", "decode", "agg", "worker"]), st.integers(0, 20), min_size=1),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_missing_and_present_counts_are_never_negative(expected: dict[str, int], prefill: int, decode: int) -> None:
    ready_rule = rule("dynamo", expected)
    body = to_json_bytes({"instances": instances(*["prefill"] * prefill, *["decode"] * decode)})
    status = rule_status(ready_rule, [ServerReply(200, body)])
    seen, total = worker_totals([ready_rule], [status])
    waiting = missing_text([ready_rule], [status], seen, total)
    assert "-" not in waiting
    assert "-" not in present_text(seen)
    enough = prefill >= expected.get("prefill", 0) and decode >= sum(expected.values()) - expected.get("prefill", 0)
    assert status.ready == enough == (waiting == "")


# -- missing workers -----------------------------------------------------------------------------


def serving_plan(*rules: ReadyRule) -> Plan:
    """Two decode workers of two nodes each, and a front end on the first node."""
    tasks = []
    for rank, (worker, index, local, node) in enumerate(
        [("decode_w0", 0, 0, 0), ("decode_w0", 0, 1, 1), ("decode_w1", 1, 0, 2), ("decode_w1", 1, 1, 3)]
    ):
        logs = (f"{{node}}_{worker}{{run}}.out", f"{{node}}_{worker}{{run}}.err")
        tasks.append(TaskPlan(Task(worker, "decode", index, rank, local, node, (), logs), (), {}))
    front_end = Task("frontend_0", "frontend", 0, 4, 0, 0, (), ("{node}_frontend_0{run}.out",))
    tasks.append(TaskPlan(front_end, (), {}, stage="frontends", ports={"public": 8000}))
    return dataclasses.replace(plan_of(), nodes=4, tasks=tuple(tasks), readiness=ReadinessPlan(rules))


def missing(
    tmp_path: Path, plan: Plan, *rule_documents: dict[str, Any], restarts: dict[int, int] | None = None
) -> list[str]:
    facts = RunFacts("4459", tmp_path, tuple(f"cn0{index + 1}" for index in range(plan.nodes)))
    return describe_missing(plan, facts, job_readiness(*rule_documents) if rule_documents else None, restarts)


def test_unregistered_workers_are_named_with_the_ends_of_their_logs(tmp_path: Path) -> None:
    (tmp_path / "cn01_decode_w0.err").write_text("".join(f"line {index}\n" for index in range(9)))
    (tmp_path / "cn03_decode_w1_r2.out").write_text("loading\n\napi_key=sk-abcdefghijklmnopqrstuvwxyz123456\n")
    plan = serving_plan(rule("dynamo", {"decode": 2}))
    assert missing(tmp_path, plan, {"ready": False, "seen": {"decode": 1}, "detail": ""}, restarts={2: 2}) == [
        "decode: 1 of 2 not ready, among decode_w0 on cn01, decode_w1 on cn03",
        "cn01_decode_w0.out is empty",
        "cn01_decode_w0.err:",
        *(f"    line {index}" for index in range(4, 9)),
        "cn03_decode_w1_r2.out:",
        "    loading",
        "    api_key=<redacted>",
        "cn03_decode_w1_r2.err is empty",
    ]


def test_a_silent_front_end_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "cn01_frontend_0.out").write_text("Traceback\nOSError: [Errno 98] Address already in use\n")
    plan = serving_plan(rule("dynamo", {"decode": 2}))
    rule_document = {"ready": False, "seen": {"decode": 0}, "detail": "connection refused by cn01:8000"}
    assert missing(tmp_path, plan, rule_document) == [
        "the model is not ready: connection refused by cn01:8000",
        "cn01_frontend_0.out:",
        "    Traceback",
        "    OSError: [Errno 98] Address already in use",
    ]


def test_ready_services_are_not_missing(tmp_path: Path) -> None:
    plan = serving_plan(rule("http", {"decode": 1}, subject="decode_w0"), rule("tcp", subject="decode_w1", node=2))
    lines = missing(tmp_path, plan, {"ready": True, "seen": {"decode": 1}}, {"ready": False, "detail": "refused"})
    assert lines[0] == "decode_w1 is not ready: refused"
    assert not [line for line in lines if "decode_w0" in line]
    assert missing(tmp_path, plan, {"ready": True}, {"ready": True}) == []


def test_every_target_is_missing_before_the_first_answer(tmp_path: Path) -> None:
    plan = serving_plan(rule("dynamo", {"decode": 2}))
    assert missing(tmp_path, plan) == [
        "the model is not ready: no answer yet",
        "cn01_frontend_0.out is empty",
    ]


def test_only_a_few_logs_are_shown(tmp_path: Path) -> None:
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


def test_abandoned_workers_are_not_awaited() -> None:
    rules = [
        ReadyRule("decode_w0", "http", 0, 6100, "/health", {"decode": 1}),
        ReadyRule("decode_w1", "http", 0, 6101, "/health", {"decode": 1}),
        ReadyRule("", "dynamo", 0, 8000, "/health", {"decode": 2, "prefill": 1}),
        ReadyRule("frontend_0", "dynamo", 0, 8000, "/health", {"decode": 2}),
    ]
    statuses = [
        RuleStatus(ready=True, seen={"decode": 1}),
        unreached_status(rules[1], "connection refused"),
        RuleStatus(ready=False, seen={"decode": 1, "prefill": 1}),
        unreached_status(rules[3], "connection refused"),
    ]
    assert without_workers(rules, statuses, {}) == (rules, statuses)
    remaining_rules, remaining_statuses = without_workers(rules, statuses, {"decode_w1": "decode"})
    assert [status.ready for status in remaining_statuses] == [True, True, True, False]
    assert [rule.expected for rule in remaining_rules] == [
        {"decode": 1},
        {},
        {"decode": 1, "prefill": 1},
        {"decode": 1},
    ]
    assert worker_totals(remaining_rules, remaining_statuses) == (
        {"decode": 0, "prefill": 1},
        {"decode": 1, "prefill": 1},
    )
