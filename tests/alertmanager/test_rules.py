"""Alert rules, their tests, runbooks and routing are consistent and accepted by the tools."""

import copy
import json
import re
import resource
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
import yaml

from exporter.gpus.analysis.xid import PAGING_XIDS
from tests.alertmanager.promtool_cases import alert_rules, promtool_output, variants
from tests.support.promql import PROMETHEUS_SERIES, metric_names, rule_metric_names, template_metric_names

ROOT = Path(__file__).resolve().parents[2]
ALERTMANAGER = ROOT / "alertmanager"
RULES = ALERTMANAGER / "rules"
RUNBOOKS = ALERTMANAGER / "runbooks"
CONFIG = ALERTMANAGER / "alertmanager.yml"
TESTS = Path(__file__).resolve().parent

RUNBOOK_BASE = "https://github.com/gpujob/gpujob/blob/main/alertmanager/runbooks"
COMPONENTS = {"worker", "progress", "output", "checkpoint", "disk", "memory", "gpu", "log", "job", "self"}
# Exit reasons that no rule on exits may use: requested by a user or the scheduler, consequences of
# another exit, or (node_failure) lost together with the sidecar that would report them.
SILENT_REASONS = {"completed", "terminated_peer", "cancelled", "time_limit", "preempted", "node_failure"}
ALERTING_REASONS = {
    "GpuJobWorkerKilled": {"killed_unknown", "crashed_signal"},
    "GpuJobWorkerCrashed": {"app_error", "launch_failed", "nccl_timeout", "gpu_fault", "disk_full", "resource_limit"},
    "GpuJobWorkerOutOfMemory": {"host_oom", "cuda_oom"},
}

HEARTBEAT = "GpuJobWatchdog"  # it always fires, whatever the series

MOST_CPU_S = 60  # of promtool or amtool; the longest case takes 13
HANGS_S = 300.0  # other tests may leave a tenth of a processor
needs_tools = pytest.mark.skipif(
    not (shutil.which("promtool") and shutil.which("amtool")), reason="promtool is not installed"
)


@dataclass(frozen=True)
class Assertion:
    """One expectation of a promtool test about one alert."""

    alert: str
    fires: bool
    series_end: bool


@cache
def load(path: Path) -> Any:
    """The YAML document in ``path``."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def groups() -> list[dict[str, Any]]:
    """Every group of every rule file."""
    return [group for path in sorted(RULES.glob("*.yml")) for group in load(path)["groups"]]


def rules() -> list[dict[str, Any]]:
    """Every rule of every group."""
    return [rule for group in groups() for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    """Every alert by its name."""
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def promtool_files() -> list[Path]:
    """The promtool test files."""
    return sorted(TESTS.glob("*.test.yml"))


@cache
def assertions() -> tuple[Assertion, ...]:
    """Expectations of the promtool tests about single alerts, in both of their forms."""
    return tuple(_assertions())


def _assertions() -> Iterator[Assertion]:
    for path in promtool_files():
        for case in load(path)["tests"]:
            series_end = any("stale" in str(series["values"]) for series in case["input_series"])
            for row in case.get("alert_rule_test", ()):
                yield Assertion(row["alertname"], bool(row.get("exp_alerts")), series_end)
            for row in case.get("promql_expr_test", ()):
                if 'alertstate="pending"' in row["expr"]:
                    continue
                named = re.findall(r'alertname="(\w+)"', row["expr"] + str(row.get("exp_samples", "")))
                for alert in named if "ALERTS" in row["expr"] else ():
                    yield Assertion(alert, bool(row.get("exp_samples")), series_end)


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command, with both outputs as one text."""
    return subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANGS_S,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S)),
        check=False,
    )


@needs_tools
def test_promtool_accepts_the_rules() -> None:
    done = run("promtool", "check", "rules", *sorted(RULES.glob("*.yml")))
    assert done.returncode == 0, done.stdout


@needs_tools
@pytest.mark.parametrize("path", promtool_files(), ids=lambda path: path.name)
def test_rules_fire_and_stay_silent(path: Path) -> None:
    done = run("promtool", "test", "rules", path)
    assert done.returncode == 0, done.stdout


@needs_tools
@pytest.mark.parametrize("alert", sorted(name for name in alert_rules() if variants(name)))
def test_bystanders_notify_and_another_port_change_no_alert(alert: str) -> None:
    assert promtool_output([alert_rules()[alert]], variants(alert)) is None


@needs_tools
def test_amtool_accepts_the_configuration() -> None:
    done = run("amtool", "check-config", CONFIG)
    assert done.returncode == 0, done.stdout


@needs_tools
@pytest.mark.parametrize(
    ("receiver", "labels"),
    [
        *(
            (
                {"critical": "page", "warning": "notify", "info": "notify"}[rule["labels"]["severity"]]
                if rule["labels"]["component"] != "self"
                else "operators",
                {"alertname": name, **rule["labels"], "cluster": "c1", "job_id": "7"},
            )
            for name, rule in alerts().items()
            if name != HEARTBEAT
        ),
        ("heartbeat", {"alertname": HEARTBEAT, **alerts()[HEARTBEAT]["labels"]}),
        ("page", {"severity": "critical", "component": "gpu"}),
        ("notify", {"severity": "warning", "component": "gpu"}),
        ("operators", {"severity": "critical", "component": "self"}),
        ("notify", {"severity": "info", "component": "slurm"}),
        ("notify", {}),
    ],
    ids=lambda value: " ".join(value.values()) if isinstance(value, dict) else value,
)
def test_an_alert_reaches_its_receiver(receiver: str, labels: dict[str, str]) -> None:
    matchers = [f"{name}={value}" for name, value in labels.items()]
    routes_test = ("amtool", "config", "routes", "test", f"--config.file={CONFIG}")
    done = run(*routes_test, f"--verify.receivers={receiver}", *matchers)
    assert done.returncode == 0, done.stdout


@needs_tools
@pytest.mark.parametrize(
    ("receivers", "labels"),
    [
        ("ada,page", ("severity=critical", "user=ada")),
        ("ada,notify", ("severity=warning", "user=ada")),
        ("ada,notify", ("severity=info", "user=ada")),
        ("ada,operators", ("severity=warning", "component=self", "user=ada")),
        ("notify", ("severity=info", "user=bob")),
    ],
)
def test_an_alert_also_reaches_the_owner_of_the_job(tmp_path: Path, receivers: str, labels: tuple[str, ...]) -> None:
    """The blocks of the page about mails, where it says to add them."""
    text = (ROOT / "docs" / "how-to" / "alerts-by-mail.md").read_text(encoding="utf-8")
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    _, site, owner_routes, owner_receivers = blocks
    config = copy.deepcopy(load(CONFIG)) | site
    config["route"]["routes"] = [*owner_routes, *config["route"]["routes"]]
    config["receivers"] = [*config["receivers"], *owner_receivers]
    path = tmp_path / "alertmanager.yml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    done = run("amtool", "check-config", path)
    assert done.returncode == 0, done.stdout
    routes_test = ("amtool", "config", "routes", "test", f"--config.file={path}")
    done = run(*routes_test, f"--verify.receivers={receivers}", *labels, "job_id=7")
    assert done.returncode == 0, done.stdout


def test_a_dead_worker_pages_as_soon_as_the_page_about_mails_says() -> None:
    """A scrape, an evaluation and the wait of the route: with the shipped intervals within 45 s, else within 15 s."""
    text = (ROOT / "docs" / "how-to" / "alerts-by-mail.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) s[^|]*\| (\d+) s \| \d+ to (\d+), at most (\d+) \|$", text, re.MULTILINE)
    shipped, *others = [[int(number) for number in row] for row in rows]
    prometheus = load(ROOT / "docker" / "prometheus.yml")
    (sidecars,) = (each for each in prometheus["scrape_configs"] if each["job_name"] == "gpujob-sidecar")
    assert [f"{each}s" for each in shipped[:2]] == [
        sidecars["scrape_interval"],
        prometheus["global"]["evaluation_interval"],
    ]
    (wait,) = (each["group_wait"] for each in load(CONFIG)["route"]["routes"] if each["receiver"] == "page")
    for scrape, evaluation, measured, most in (shipped, *others):
        assert measured <= most == scrape + evaluation + int(wait.removesuffix("s"))
    assert shipped[3] <= 45
    assert min(most for *_, most in others) <= 15


def test_alerts_of_a_group_with_an_interval_of_its_own_wait_at_least_twice_as_long() -> None:
    for group in groups():
        waits = {rule["alert"]: rule.get("for", "0s") for rule in group["rules"] if "alert" in rule}
        if waits.keys() - {HEARTBEAT} and "interval" in group:
            assert group["interval"] == "30s", group["name"]
            assert all(wait.endswith("m") for name, wait in waits.items() if name != HEARTBEAT), waits


@needs_tools
def test_promtool_accepts_the_prometheus_settings_of_the_docs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "how-to" / "connect-prometheus.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    settings = next(block for block in blocks if "scrape_configs" in block)
    (scrape,) = yaml.safe_load(settings)["scrape_configs"]
    assert scrape["job_name"] == "gpujob-sidecar"
    assert all("refresh_interval" in discovery for discovery in scrape["file_sd_configs"])

    path = tmp_path / "prometheus.yml"
    path.write_text(settings.replace("/etc/prometheus/gpujob", str(RULES)), encoding="utf-8")
    done = run("promtool", "check", "config", path)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("rules found") == len(groups())


@pytest.mark.parametrize("name", alerts())
def test_an_alert_has_all_its_parts(name: str) -> None:
    rule = alerts()[name]
    assert re.fullmatch(r"GpuJob([A-Z][a-z]+|A(?=[A-Z]))+", name)
    assert rule["labels"].keys() == {"severity", "component"}
    assert rule["labels"]["severity"] in ({"none"} if name == HEARTBEAT else {"critical", "warning", "info"})
    assert rule["labels"]["component"] in COMPONENTS
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url", "dashboard_url"}
    assert "for" in rule
    assert "{{" not in rule["annotations"]["summary"]
    assert rule["annotations"]["runbook_url"] == f"{RUNBOOK_BASE}/{name}.md"


BOARDS = {path.stem: json.loads(path.read_text("utf-8")) for path in (ROOT / "grafana/dashboards").glob("*.json")}


@pytest.mark.parametrize("name", alerts())
def test_an_alert_leads_to_a_board_of_what_it_is_about(name: str) -> None:
    """As promtool expands the links: every variable is one of the board, and none that it needs is left to chance."""
    rows = [row for path in promtool_files() for case in load(path)["tests"] for row in case.get("alert_rule_test", ())]
    found = [each for row in rows if row["alertname"] == name for each in row.get("exp_alerts") or ()]
    links = [
        (each["exp_annotations"]["dashboard_url"], each["exp_labels"]) for each in found if "exp_annotations" in each
    ]
    assert links
    for link, labels in links:
        address, _, query = link.partition("?")
        assert address.endswith("/user/")
        ((_, board), *values) = parse_qsl(query)
        variables = [each for each in BOARDS[board]["templating"]["list"] if each["type"] == "query"]
        one_of = {each["name"] for each in variables if not each.get("multi")}
        assert {key for key, _ in values} <= {f"var-{each['name']}" for each in variables}
        assert dict(values).items() >= {(f"var-{label}", labels[label]) for label in one_of & labels.keys()}
    assert not re.findall(r"{{ (?:\$labels)?\.\w* }}", alerts()[name]["annotations"]["dashboard_url"])  # as they are


OF_A_WHOLE_JOB = {name for name, rule in alerts().items() if rule["labels"]["component"] == "job"}
OF_NO_JOB = {  # the hub, Prometheus and Alertmanager: what their descriptions name
    "GpuJobHubDown": "$labels.instance ",
    "GpuJobHubBlind": "$labels.cluster ",
    "GpuJobRulesFailing": "$labels.rule_group ",
    "GpuJobNotificationsFailing": "$labels.integration ",
    "GpuJobNotificationFailed": "$labels.integration ",
    "GpuJobTargetsUnreadable": "$value ",
    HEARTBEAT: "always fires",
}


@pytest.mark.parametrize("name", alerts())
def test_a_description_has_job_user_and_node(name: str) -> None:
    """Of a whole job its partition instead."""
    description = alerts()[name]["annotations"]["description"]
    if name in OF_NO_JOB:
        assert OF_NO_JOB[name] in description
        return
    for label in ("job_id", "job_name", "user"):
        assert f"$labels.{label} " in description
    if name in OF_A_WHOLE_JOB | {"GpuJobSidecarDown"}:
        assert "$labels.partition " in description
    else:
        assert any(node in description for node in ("$labels.node ", 'label "node"', "{{ .Labels.node }}"))
    assert "\n" not in description.strip()


@pytest.mark.parametrize("name", alerts())
def test_an_example_among_equals_is_always_the_same(name: str) -> None:
    """topk() takes any of several states that are all 1; templates sort by a label instead."""
    assert not re.search(r"(?:topk|bottomk)\(1, [\w:]+{[^`}]*}\s*==", alerts()[name]["annotations"]["description"])


def test_summaries_are_unique() -> None:
    assert not repeated(rule["annotations"]["summary"] for rule in alerts().values())


def repeated(values: Iterator[str]) -> list[str]:
    """Values that occur more than once."""
    return [value for value, count in Counter(values).items() if count > 1]


def test_names_of_alerts_and_groups_are_unique() -> None:
    assert not repeated(rule["alert"] for rule in rules() if "alert" in rule)
    assert not repeated(group["name"] for group in groups())
    for path in RULES.glob("*.yml"):
        assert [group["name"] for group in load(path)["groups"]] == [path.stem]


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == alerts().keys()


@pytest.mark.parametrize("name", alerts())
def test_a_runbook_has_its_four_parts(name: str) -> None:
    lines = (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8").splitlines()
    assert lines[0] == f"# {name}"
    headings = [line for line in lines if line.startswith("## ")]
    assert headings == ["## Meaning", "## Impact", "## Diagnosis", "## Mitigation"]


def test_the_readme_lists_every_alert_with_its_severity() -> None:
    text = (ALERTMANAGER / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| \[(GpuJob\w+)\]\(runbooks/\1\.md\) \| (\w+) \|", text, re.MULTILINE))
    assert rows == {name: rule["labels"]["severity"] for name, rule in alerts().items()}
    assert RUNBOOK_BASE in text


def boards_of(alert: dict[str, Any]) -> list[str]:
    """The links to a board that an alert can have: one for each branch of its template."""
    url = alert["annotations"]["dashboard_url"]
    choice = re.fullmatch(r"(.*?){{ if .*? }}(.*?){{ else }}(.*?){{ end }}", url)
    return [url] if choice is None else [choice[1] + choice[2], choice[1] + choice[3]]


def test_the_commands_of_the_readme_change_every_link_of_the_rules(tmp_path: Path) -> None:
    text = (ALERTMANAGER / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\$ (sed .*)$", text, re.MULTILINE)
    assert len(commands) == 2  # for the runbooks, and for the boards
    shutil.copytree(RULES, tmp_path / "rules")
    for command in commands:
        subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    copied = [load(path) for path in sorted((tmp_path / "rules").glob("*.yml"))]
    changed = {
        rule["alert"]: rule
        for document in copied
        for group in document["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    assert changed.keys() == alerts().keys()
    served = re.compile(r"{{ \$externalURL }}/user/\?board=(gpujob-[a-z]+)&?")
    for name, alert in alerts().items():
        assert changed[name]["annotations"]["runbook_url"] == f"https://wiki.example.org/gpujob/{name}.md"
        links = boards_of(changed[name])
        assert links == [served.sub(r"https://grafana.example.org/d/\1?", link) for link in boards_of(alert)]
        for link in links:
            board = re.match(r"https://grafana\.example\.org/d/(gpujob-[a-z]+)\?", link)
            assert board is not None
            assert (ROOT / f"grafana/dashboards/{board[1]}.json").exists()


@pytest.mark.parametrize("name", alerts().keys() - {HEARTBEAT})
def test_an_alert_is_tested_firing_silent_and_after_its_series_end(name: str) -> None:
    expectations = [assertion for assertion in assertions() if assertion.alert == name]
    assert any(assertion.fires for assertion in expectations)
    assert any(not assertion.fires for assertion in expectations)
    assert any(not assertion.fires and assertion.series_end for assertion in expectations)


def test_promtool_tests_name_only_alerts_that_exist() -> None:
    assert {assertion.alert for assertion in assertions()} == alerts().keys()


@pytest.mark.parametrize("path", promtool_files(), ids=lambda path: path.name)
def test_a_promtool_file_sets_the_order_of_all_groups(path: Path) -> None:
    """promtool evaluates unlisted groups in any order, but alerts read recorded series."""
    document = load(path)
    assert document["rule_files"] == ["../../alertmanager/rules/*.yml"]
    assert document["group_eval_order"][0] == "gpujob-recording"
    assert sorted(document["group_eval_order"]) == sorted(group["name"] for group in groups())
    assert not repeated(case["name"] for case in document["tests"])


def test_every_exit_reason_has_one_alert_or_is_silent() -> None:
    read: dict[str, set[str]] = {}
    for name, rule in alerts().items():
        if "gpujob_worker_last_exit_timestamp_seconds{reason=~" in re.sub(r"\s", "", rule["expr"]):
            (pattern,) = re.findall(r'reason=~"([^"]*)"', rule["expr"])
            read[name] = set(pattern.split("|"))
    assert read.pop("GpuJobFailed") == set().union(*read.values())  # which these alerts hide
    assert read == ALERTING_REASONS
    assert not set().union(*read.values()) & SILENT_REASONS
    (silent,) = re.findall(r'reason!~"([^"]*)"', alerts()["GpuJobWorkerRestarting"]["expr"])
    assert set(silent.split("|")) == SILENT_REASONS


def test_worker_failures_alert_immediately_and_outlive_the_job() -> None:
    for name in ALERTING_REASONS:
        assert alerts()[name]["for"] == "0s"
        assert alerts()[name]["keep_firing_for"] == "15m"


def test_gpu_faults_alert_immediately_and_outlive_the_job() -> None:
    for name in ("GpuJobGpuLost", "GpuJobGpuXidCritical"):
        assert alerts()[name]["for"] == "0s"
        assert alerts()[name]["keep_firing_for"] == "15m"


def test_critical_xids_equal_those_of_the_table() -> None:
    expr = alerts()["GpuJobGpuXidCritical"]["expr"]
    (codes,) = re.findall(r'xid=~"([^"]*)"', expr)
    assert codes == "|".join(map(str, PAGING_XIDS))
    page = (RUNBOOKS / "GpuJobGpuXidCritical.md").read_text(encoding="utf-8")
    xids = "\n".join(re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE))
    assert re.findall(r"\d+", xids) == codes.split("|")


def test_recorded_series_are_read() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    used = set().union(*(metric_names(rule["expr"]) for rule in alerts().values()))
    used |= set().union(*(template_metric_names(rule["annotations"]["description"]) for rule in alerts().values()))
    fleet = (ROOT / "grafana/dashboards/gpujob-fleet.json").read_text(encoding="utf-8")
    assert recorded <= used | set(re.findall(r"\w+:gpujob_\w+:\w+", fleet))


def test_rules_read_only_gpujob_series_and_those_of_prometheus_itself() -> None:
    assert {name for name in rule_metric_names(RULES) if not name.startswith("gpujob_")} == PROMETHEUS_SERIES


def named_by(matcher: str) -> set[str]:
    """Alerts in a matcher of an inhibition rule."""
    pattern = re.fullmatch(r'alertname=~?"(.*)"', matcher)
    assert pattern
    prefix, _, rest = pattern[1].partition("(")
    return {prefix + ending for ending in rest.removesuffix(")").split("|")}


def test_inhibition_names_existing_alerts_and_requires_equal_labels() -> None:
    """Two alerts without the label would be equal in it, so one would inhibit the other."""
    for inhibition in load(CONFIG)["inhibit_rules"]:
        cluster, *labels = inhibition["equal"]
        assert cluster == "cluster"
        assert labels in (["job_id", "user"], ["job_id", "user", "node"])
        for side in ("source_matchers", "target_matchers"):
            name, *guards = inhibition[side]
            assert guards == [f'{label}!=""' for label in labels]
            assert named_by(name) <= alerts().keys()
            if "node" in labels:
                expressions = [alerts()[alert]["expr"] for alert in named_by(name)]
                assert all(
                    "by (cluster, job_id, job_name, user, partition, notify, node)" in expr for expr in expressions
                )


def test_an_alert_ends_a_minute_after_those_that_it_inhibits() -> None:
    """Each group of rules is evaluated at a time of its own: what ends first must not be what hides the others."""
    hiding = {name for rule in load(CONFIG)["inhibit_rules"] for name in named_by(rule["source_matchers"][0])}
    assert {name for name in hiding if alerts()[name].get("keep_firing_for") not in ("1m", "15m")} == set()


def test_no_alert_inhibits_itself_through_others() -> None:
    """Two alerts that inhibit each other would both be lost."""
    inhibits: dict[str, set[str]] = {}
    for inhibition in load(CONFIG)["inhibit_rules"]:
        for source in named_by(inhibition["source_matchers"][0]):
            inhibits.setdefault(source, set()).update(named_by(inhibition["target_matchers"][0]))
    for first in inhibits:
        reached = set(inhibits[first])
        while more := set().union(*(inhibits.get(name, set()) for name in reached)) - reached:
            reached |= more
        assert first not in reached


@pytest.mark.parametrize(
    ("expr", "names"),
    [
        ("up", {"up"}),
        ("time() - 600", set()),
        ('rate(a_total{x="y"}[5m]) / on (z) group_left () b offset 5m', {"a_total", "b"}),
        ("max_over_time((c - d)[1h:5m]) > topk(3, e) unless f @ end()", {"c", "d", "e", "f"}),
        ('{__name__="g", x="y"} or h:i:j', {"g", "h:i:j"}),
        ('label_replace(k, "a", "$1", "b", "(.*)") == bool -l', {"k", "l"}),
    ],
)
def test_metric_names_of_an_expression(expr: str, names: set[str]) -> None:
    assert metric_names(expr) == names


@pytest.mark.parametrize("expr", ["sum(", "", '{__name__=~"a.*"}', '{job="x"}'])
def test_metric_names_refuse_unverifiable_expressions(expr: str) -> None:
    with pytest.raises(ValueError, match=r"not PromQL|without a fixed metric name"):
        metric_names(expr)


def test_metric_names_of_a_template() -> None:
    text = "{{ range query (printf `gpujob_worker_up{node=%q} == 0` $labels.node) }}gpujob{{ end }}"
    assert template_metric_names(text) == {"gpujob_worker_up"}
