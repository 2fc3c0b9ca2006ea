"""The configuration of Alertmanager that `gpujob alerts config` writes."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from launcher.alerts.config import SERVED_BOARDS
from launcher.cli.alerts.config import BOARD_TEMPLATE
from launcher.cli.main import commands
from launcher.errors import ConfigError, LauncherError
from tests.launcher.conftest import Golden
from tests.support.launcher import ROOT

SITE = """\
notify:
  smtp: {smarthost: "smtp.example.org:587", from: gpujob@example.org, username: gpujob, password_file: DIR/key}
  owner_domain: example.org
  board_url: https://grafana.example.org/d/gpujob-job
  office_hours: {start: "09:00", timezone: Europe/Berlin}
  heartbeat: {url_file: DIR/url}
  page: [oncall, log]
  operators: [admins, log]
  channels:
    oncall: {pagerduty: {key_file: DIR/key}}
    admins: {email: {to: admins@example.org}}
    chat: {slack: {url_file: DIR/url, channel: "#gpu"}}
    discord: {discord: {url_file: DIR/url}}
    opsgenie: {opsgenie: {key_file: DIR/key, url: "https://api.eu.opsgenie.com/"}}
    hook: {webhook: {url_file: DIR/url}}
    log: {log: {token_file: DIR/key}}
"""
SEED = """\
job: {name: embed, num_workers: 4}
paths: {output_dir: /o, log_dir: /l}
alerts:
  email: {enabled: true, address: ada@example.org, smtp_server: smtp.example.org, smtp_port: 587}
  slack: {enabled: true, webhook: "https://hooks.example.org/from-the-file"}
"""
needs_amtool = pytest.mark.skipif(shutil.which("amtool") is None, reason="amtool is not installed")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a cluster file that names every kind of channel."""
    tmp_path.chmod(0o700)
    for name, text in (("key", "k3y\n"), ("url", "https://hooks.example.org/secret\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o600)
    (tmp_path / "gpujob.yaml").write_text(SITE.replace("DIR", str(tmp_path)), encoding="utf-8")
    (tmp_path / "gpujob.yaml").chmod(0o600)
    monkeypatch.setenv("GPUJOB_CONFIG", str(tmp_path / "gpujob.yaml"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(*options: str) -> Result:
    return CliRunner().invoke(commands, ["alerts", "config", *options])


def made(folder: Path) -> Any:
    return yaml.safe_load((folder / "alerting" / "alertmanager.yml").read_text(encoding="utf-8"))


@needs_amtool
def test_every_channel_and_route_is_as_the_golden_page_shows(site: Path, golden: Golden) -> None:
    assert config().exit_code == 0
    text = (site / "alerting" / "alertmanager.yml").read_text(encoding="utf-8")
    golden("launcher/alertmanager.yml", text.partition("inhibit_rules:")[0].replace(str(site), "DIR"))
    board = (site / "alerting" / "templates" / "gpujob-board.tmpl").read_text(encoding="utf-8")
    golden("launcher/gpujob-board.tmpl", board)
    for path in (site / "alerting").rglob("*"):
        assert oct(path.stat().st_mode)[-3:] == ("700" if path.is_dir() else "600"), path


@pytest.mark.parametrize("folder", ["~", "."])
def test_files_of_secrets_have_absolute_paths(site: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """Alertmanager expands no ``~``, and takes other paths as relative to its configuration."""
    monkeypatch.setenv("HOME", str(site))
    assert config().exit_code == 0
    absolute = made(site)
    (site / "gpujob.yaml").write_text(SITE.replace("DIR", folder), encoding="utf-8")
    assert config().exit_code == 0
    assert made(site) == absolute
    (site / "key").chmod(0o644)
    assert str(config().exception) == f"{site}/key: others can read this secret; run chmod 600 on it"


BOARD = "https://prometheus.example.org/user/?board=gpujob-job&var-job_id=a%26b"
ALERT = {
    "startsAt": "2026-11-20T13:00:07Z",
    "endsAt": "2026-11-20T14:00:07Z",
    "generatorURL": "https://p/graph",
    "annotations": {"dashboard_url": BOARD},
}


@needs_amtool
@pytest.mark.parametrize(
    ("served", "alert", "link"),
    [
        (True, {"status": "firing"}, f"{BOARD}&from=1795176007000&to=now"),
        (True, {"status": "resolved"}, f"{BOARD}&from=1795176007000&to=1795183207000"),
        (True, {"status": "firing", "annotations": {}}, "https://p/graph"),
        (False, {"status": "firing"}, "https://p/graph"),
    ],
)
def test_without_a_board_url_links_lead_to_what_is_there(
    site: Path, served: bool, alert: dict[str, object], link: str
) -> None:
    """To the board of the alert in a stack, which serves it, and else to the alert in Prometheus."""
    text = Path("gpujob.yaml").read_text(encoding="utf-8")
    Path("gpujob.yaml").write_text(re.sub("  board_url: .*\n", "", text), encoding="utf-8")
    assert config().exit_code == 0
    if served:
        Path("alerting", BOARD_TEMPLATE).write_text(SERVED_BOARDS)
    Path("data.json").write_text(json.dumps({"alerts": [{**ALERT, **alert}]}))
    for kind in ("text", "html"):
        words = ["amtool", "template", "render", "--template.glob=alerting/templates/*.tmpl", f"--template.type={kind}"]
        words += [
            "--template.data=data.json",
            '--template.text=<a href="{{ template "gpujob.board" index .Alerts 0 }}">',
        ]
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
        assert html.unescape(done.stdout.strip()) == f'<a href="{link}">'


ROUTES = [
    ("heartbeat", "alertname=GpuJobWatchdog severity=none component=self"),
    ("operators", "alertname=GpuJobHubDown severity=critical component=self"),
    ("operators", "alertname=GpuJobNodeSidecarDown severity=warning component=self job_id=7 user=ada notify=none"),
    ("owner page", "alertname=GpuJobWorkerKilled severity=critical component=worker job_id=7 user=ada"),
    ("owner notify", "alertname=GpuJobSlowdown severity=warning component=progress job_id=7 user=ada"),
    ("notify", "alertname=GpuJobCompleted severity=info component=job job_id=7 user=ada"),
    ("operators owner page", "alertname=GpuJobGpuLost severity=critical component=gpu job_id=7 user=ada node=n1"),
    ("operators none", "alertname=GpuJobGpuLost severity=critical component=gpu job_id=7 user=ada notify=none"),
    ("none", "alertname=GpuJobWorkerKilled severity=critical job_id=7 user=ada notify=none"),
    ("channel-chat", "alertname=GpuJobWorkerKilled severity=critical job_id=7 user=ada notify=chat"),
    ("owner", "alertname=GpuJobWorkerKilled severity=critical job_id=7 user=ada notify=owner"),
    ("owner page", "alertname=GpuJobWorkerKilled severity=critical job_id=7 user=ada notify=nobody-we-know"),
]


def receivers_of(*labels: str) -> str:
    """Who gets an alert with these labels, without our prefix."""
    words = ["amtool", "config", "routes", "test", "--config.file=alerting/alertmanager.yml"]
    done = subprocess.run([*words, *labels], capture_output=True, text=True, timeout=20, check=True)
    names = done.stdout.strip().split(",")
    assert all(name.startswith("gpujob-") for name in names)
    return " ".join(name.removeprefix("gpujob-") for name in names)


@needs_amtool
def test_an_alert_goes_where_its_labels_say(site: Path) -> None:
    assert config().exit_code == 0
    for receivers, labels in ROUTES:
        assert receivers_of(*labels.split()) == receivers, labels


@needs_amtool
def test_ends_of_jobs_reach_their_owners_alone_where_the_page_says_so(site: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "run-the-hub.md").read_text(encoding="utf-8")
    ((relabelling,),) = (
        block["alerting"]["alert_relabel_configs"]
        for block in map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
        if "alerting" in block
    )
    assert config().exit_code == 0
    for name, notify, receivers in (
        ("GpuJobFailed", "", "owner"),
        ("GpuJobCompleted", "", "owner"),
        ("GpuJobTimedOut", "chat", "channel-chat"),
        ("GpuJobNodeFailed", "", "owner page"),
    ):
        labels = {"alertname": name, "severity": "critical", "job_id": "7", "user": "ada", "notify": notify}
        if re.fullmatch(relabelling["regex"], ";".join(labels[label] for label in relabelling["source_labels"])):
            labels[relabelling["target_label"]] = relabelling["replacement"]
        assert receivers_of(*(f"{label}={value}" for label, value in labels.items() if value)) == receivers


@needs_amtool
def test_what_the_site_had_stays_and_a_second_run_changes_nothing(site: Path) -> None:
    theirs = {
        "global": {"smtp_smarthost": "old.example.org:25", "smtp_from": "a@example.org"},
        "route": {"receiver": "site", "routes": [{"receiver": "site", "matchers": ["team=db"]}]},
        "receivers": [{"name": "site", "webhook_configs": [{"url": "http://127.0.0.1:1/"}]}],
        "inhibit_rules": [{"source_matchers": ["a=b"], "target_matchers": ["c=d"], "equal": ["e"]}],
        "templates": ["/etc/theirs/*.tmpl"],
        "mute_time_intervals": [{"name": "nights", "time_intervals": [{"weekdays": ["monday"]}]}],
    }
    (site / "base.yml").write_text(yaml.safe_dump(theirs), encoding="utf-8")
    assert config("--base", "base.yml").exit_code == 0
    first = made(site)
    assert first["route"]["receiver"] == "site"
    assert first["route"]["routes"][1:] == theirs["route"]["routes"]  # type: ignore[index]
    assert first["receivers"][0] == theirs["receivers"][0]  # type: ignore[index]
    assert first["inhibit_rules"][0] == theirs["inhibit_rules"][0]  # type: ignore[index]
    assert {key: first[key] for key in ("global", "mute_time_intervals")} == {
        key: theirs[key] for key in ("global", "mute_time_intervals")
    }
    assert config("--base", "alerting/alertmanager.yml").exit_code == 0
    assert made(site) == first


@needs_amtool
def test_alerts_of_a_monitor_config_become_channels_and_their_secret_a_file(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "gpujob.yaml").write_text("partition: gpu\n", encoding="utf-8")
    (site / "seed.yaml").write_text(SEED, encoding="utf-8")
    result = config("--config", "seed.yaml", "--json")
    assert result.exit_code == 0
    assert '"channels": ["alert-slack", "alert-email"]' in result.output
    secret = site / "alerting" / "secrets" / "slack-url"
    assert secret.read_text(encoding="utf-8") == "https://hooks.example.org/from-the-file"
    assert oct(os.stat(secret).st_mode)[-3:] == "600"
    assert "from-the-file" not in result.output + (site / "alerting" / "alertmanager.yml").read_text(encoding="utf-8")
    (mail,) = next(each for each in made(site)["receivers"] if each["name"] == "gpujob-page")["email_configs"]
    assert (mail["to"], mail["smarthost"]) == ("ada@example.org", "smtp.example.org:587")


@needs_amtool
def test_a_channel_of_an_option_gets_what_the_cluster_file_sends_to_some_channels(site: Path) -> None:
    (site / "seed.yaml").write_text(SEED, encoding="utf-8")
    assert config("--alert-email", "ada@example.org", "--config", "seed.yaml").exit_code == 0
    for receiver in made(site)["receivers"]:
        if receiver["name"] in ("gpujob-page", "gpujob-notify", "gpujob-operators"):
            assert [mail["to"] for mail in receiver["email_configs"]][-1] == "ada@example.org", receiver["name"]
            assert receiver["slack_configs"][-1]["api_url_file"] == f"{site}/alerting/secrets/slack-url"


def test_a_key_of_a_monitor_config_that_is_null_has_its_default(site: Path) -> None:
    (site / "gpujob.yaml").write_text("partition: gpu\n", encoding="utf-8")
    seed = SEED.replace("enabled: true", "enabled: null").replace("smtp_port: 587", "smtp_port: null")
    (site / "seed.yaml").write_text(seed, encoding="utf-8")
    assert config("--config", "seed.yaml").exit_code == 0
    page = next(each for each in made(site)["receivers"] if each["name"] == "gpujob-page")
    assert page["email_configs"][0]["smarthost"] == "smtp.example.org:587"
    assert len(page["slack_configs"]) == 1


def test_discord_has_a_file_for_its_url_from_alertmanager_0_28_on(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(site))  # without amtool, which is of another version
    assert config("--alertmanager", "0.28").exit_code == 0
    (chat,) = next(each for each in made(site)["receivers"] if each["name"] == "gpujob-channel-discord")[
        "discord_configs"
    ]
    assert chat["webhook_url_file"] == f"{site}/url"
    assert "webhook_url" not in chat


MISTAKES = [
    (
        "page: [oncall",
        "page: [nobody",
        "notify.page[0]: 'nobody' is not one of `channels` (known: oncall, admins",
    ),
    ("smtp: {", "# {", "notify.smtp: is missing, and channels.admins needs it; write the mail server and the sender"),
    ("chat: {slack", "none: {slack", "notify.channels.none: is a name of gpujob; give the channel another one"),
    ("{discord: {url_file", "{discord: {}} #", ".discord.url_file: is missing; write the URL into a file of mode 0600"),
    ("{email: {to: admins@example.org}}", "{log: {}}", ".log.token_file: is missing; `gpujob alerts receive` makes it"),
    ("{email: {to: admins@example.org}}", "{}", "has no kinds of channels; give each channel exactly one of email"),
    ("to: admins@example.org", "to: admins", "'admins' is not an address; write for example ada@example.org"),
    ("smtp.example.org:587", "smtp.example.org", "'smtp.example.org' is not host:port; write for example smtp."),
    (
        'start: "09:00"',
        'start: "18:00"',
        "office_hours: the end, 18:00, is not after the start, 18:00; both are of the",
    ),
    ("Europe/Berlin", "Europe Berlin", "'Europe Berlin' is not a time zone; write for example Europe/Berlin"),
    ('start: "09:00"', 'start: "9"', "'9' is not a time of day; write for example \"08:00\""),
]


@pytest.mark.parametrize(("old", "new", "problem"), MISTAKES, ids=[new for _, new, _ in MISTAKES])
def test_a_mistake_is_an_error_and_nothing_is_written(site: Path, old: str, new: str, problem: str) -> None:
    text = (site / "gpujob.yaml").read_text(encoding="utf-8")
    assert old in text
    (site / "gpujob.yaml").write_text(text.replace(old, new, 1), encoding="utf-8")
    error = config().exception
    assert isinstance(error, ConfigError)
    assert problem in str(error)
    assert not (site / "alerting").exists()


@pytest.mark.parametrize("text", ["", "ftp://example.org/secret", "https://a.example.org https://b.example.org"])
def test_a_file_of_a_url_without_one_is_an_error_that_does_not_show_it(site: Path, text: str) -> None:
    (site / "url").write_text(text, encoding="utf-8")
    (site / "url").chmod(0o600)
    error = config().exception
    assert isinstance(error, LauncherError)
    assert str(error) == f"{site}/url: is not a URL on one line; write one with http:// or https:// and nothing else"
    assert not (site / "alerting").exists()


@needs_amtool
def test_mail_without_a_server_is_an_error_that_names_the_option(site: Path) -> None:
    (site / "gpujob.yaml").write_text("partition: gpu\n", encoding="utf-8")
    error = config("--alert-email", "ada@example.org").exception
    assert isinstance(error, LauncherError)
    assert str(error).startswith("--alert-email: no mail server is known; write `notify.smtp` into the cluster file")
    secret = site / "hook"
    secret.write_text("https://hooks.example.org/secret\n", encoding="utf-8")
    secret.chmod(0o600)
    assert "alertmanager.yml: 1 channel: alert-slack\n" in config("--alert-slack", "hook").output
    server = {"smtp_smarthost": "mail.example.org:25", "smtp_from": "gpu@example.org"}
    (site / "base.yml").write_text(yaml.safe_dump({"global": server}), encoding="utf-8")
    assert config("--alert-email", "ada@example.org", "--base", "base.yml").exit_code == 0
    assert made(site)["global"] == server


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--alert-slack", "https://hooks.example.org/secret"), "all users of this machine see arguments"),
        (("--alert-email", "ada"), "--alert-email: 'ada' is not an address"),
        (("--alertmanager", "0.24"), "'0.24' is not a version from 0.25 on; write for example 0.28"),
        (("--base", "missing.yml"), "cannot be read: No such file or directory"),
        (("--base", "url"), "is not a mapping"),
        (("--alert-slack", "open"), "others can read this secret; run chmod 600 on it"),
    ],
)
def test_an_option_that_is_wrong_is_an_error(site: Path, options: tuple[str, ...], problem: str) -> None:
    (site / "open").write_text("https://hooks.example.org/secret\n", encoding="utf-8")
    (site / "open").chmod(0o644)
    error = config(*options).exception
    assert isinstance(error, LauncherError)
    assert problem in str(error)
    assert not (site / "alerting").exists()
