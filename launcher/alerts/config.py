"""The configuration of Alertmanager: our receivers, routes and inhibitions, beside what the site had."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from launcher.jobfile.alerts.notify import ChannelSpec, NotifySpec, SmtpSpec

Tree = dict[str, object]

PREFIX = "gpujob-"  # of our receivers and time intervals
WATCHDOG = "GpuJobWatchdog"
TRIAL = "GpuJobTrial"  # alert of `gpujob alerts test`
DISCORD_FILES_SINCE = (0, 28)  # versions before have no `webhook_url_file`
MOST_ALERTS = 20  # of one webhook: a body of at most 64 KiB for our receiver
OURS = 'alertname=~"GpuJob.*"'
OWNER = 'user=~"[a-z_][a-z0-9._-]{0,31}"'  # a name of Slurm, and nothing else that could be part of an address
HARDWARE = "GpuJobGpu(Lost|XidCritical|Unhealthy|Degraded)"
JOB = ("cluster", "job_id", "user")  # one message for one job


class Site(NamedTuple):
    """What a configuration depends on besides the cluster file."""

    version: tuple[int, int]  # of Alertmanager
    read_secret: Callable[[str], str]  # the text of a file, for keys that have no file of their own
    inhibit_rules: Sequence[object]
    templates: str  # glob
    log: str | None = None  # name of a channel that gets every alert, whatever the routes say


def make_config(notify: NotifySpec, site: Site, base: Mapping[str, object]) -> Tree:
    """The whole configuration. Parts of ours in ``base`` are replaced; everything else in it stays."""
    receivers = _receivers(notify, site)
    routes, intervals = _route(notify, [str(each["name"]) for each in receivers], site.log), _intervals(notify)
    config: Tree = dict(base)
    root = dict(_mapping(base.get("route"))) or {"receiver": f"{PREFIX}notify", "group_by": list(JOB)}
    root["routes"] = [routes, *(each for each in _list(root.get("routes")) if not _is_our_route(each))]
    config["route"] = root
    for key, ours in (("receivers", receivers), ("time_intervals", intervals)):
        theirs = [each for each in _list(base.get(key)) if not str(_mapping(each).get("name", "")).startswith(PREFIX)]
        if merged := [*theirs, *ours]:
            config[key] = merged
    rules = [rule for rule in _list(base.get("inhibit_rules")) if not _is_our_rule(rule)]
    config["inhibit_rules"] = [*rules, *site.inhibit_rules]
    globs = [each for each in _list(base.get("templates")) if each != site.templates]
    config["templates"] = [*globs, site.templates]
    return config


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _is_our_route(route: object) -> bool:
    return str(_mapping(route).get("receiver", "")).startswith(PREFIX)


def _is_our_rule(rule: object) -> bool:
    sources = _list(_mapping(rule).get("source_matchers"))
    return any(str(matcher).startswith(('alertname=~"GpuJob', 'alertname="GpuJob')) for matcher in sources)


def _receivers(notify: NotifySpec, site: Site) -> list[Tree]:
    made = {name: _channel(channel, notify, site) for name, channel in notify.channels.items()}
    found: list[Tree] = [{"name": f"{PREFIX}none"}]
    logs = [name for name, channel in notify.channels.items() if channel.log is not None]
    beats = [made[name] for name in logs]
    if notify.heartbeat is not None:
        beats.append(_webhook(site.read_secret(notify.heartbeat.url_file), notify.heartbeat.token_file))
    hooks = [_mapping(hook) for beat in beats for hook in _list(beat["webhook_configs"])]
    heartbeat = [{**hook, "send_resolved": False} for hook in hooks]
    found.append({"name": f"{PREFIX}heartbeat", **({"webhook_configs": heartbeat} if heartbeat else {})})
    for key in ("page", "notify", "operators"):
        names = getattr(notify, key)
        chosen = [name for name in made if name != site.log] if names is None else names
        found.append({"name": f"{PREFIX}{key}", **_joined(made[name] for name in chosen)})
    if notify.owner_domain is not None:
        found.append({"name": f"{PREFIX}owner", **_mail(f"{{{{ .CommonLabels.user }}}}@{notify.owner_domain}", notify)})
    return found + [{"name": f"{PREFIX}channel-{name}", **parts} for name, parts in made.items()]


def _joined(parts: Iterable[Mapping[str, object]]) -> Tree:
    """Configurations of several channels as those of one receiver."""
    found: Tree = {}
    for part in parts:
        for key, configs in part.items():
            found[key] = [*_list(found.get(key)), *(dict(_mapping(each)) for each in _list(configs))]
    return found


def _template(name: str) -> str:
    return '{{ template "gpujob.' + name + '" . }}'


# Links to the boards that Prometheus serves, each to that of its alert; a trial and alerts of others have none
SERVED_BOARDS = (
    '{{ define "gpujob.board" }}{{ with .Annotations.dashboard_url }}{{ . }}&{{ template "gpujob.range" $ }}'
    "{{ else }}{{ .GeneratorURL }}{{ end }}{{ end }}\n"
)
LINK = '{{ template "gpujob.board" (index .Alerts 0) }}'


def _channel(channel: ChannelSpec, notify: NotifySpec, site: Site) -> Tree:
    """The configuration of one channel."""
    if channel.email is not None:
        return _mail(channel.email.to, notify)
    if channel.slack is not None:
        slack: Tree = {"title": _template("slack.title"), "title_link": LINK, "text": _template("slack")}
        place = {"channel": channel.slack.channel} if channel.slack.channel else {}
        url = {"api_url_file": channel.slack.url_file}
        look = {"fallback": _template("slack.title"), "color": _template("color"), "send_resolved": True}
        return {"slack_configs": [{**url, **place, **slack, **look}]}
    if channel.discord is not None:
        file = channel.discord.url_file
        has_files = site.version >= DISCORD_FILES_SINCE
        url = {"webhook_url_file": file} if has_files else {"webhook_url": site.read_secret(file)}
        return {"discord_configs": [{**url, "title": _template("title"), "message": _template("discord")}]}
    if channel.pagerduty is not None:
        url = {} if channel.pagerduty.url is None else {"url": channel.pagerduty.url}
        texts: Tree = {
            "severity": _template("pagerduty.severity"),
            "description": _template("title"),
            "client": "gpujob",
            "client_url": LINK,
            # From 0.33 on, Alertmanager reads details as YAML if they are, and takes job names in them for templates.
            # With its first line our text is no YAML. The other two Alertmanager would fill in itself.
            "details": {"text": f"Alerts of gpujob\n{_template('text')}", "firing": "", "resolved": ""},
        }
        return {"pagerduty_configs": [{"routing_key_file": channel.pagerduty.key_file, **url, **texts}]}
    if channel.opsgenie is not None:
        url = {} if channel.opsgenie.url is None else {"api_url": channel.opsgenie.url}
        page = {"message": _template("title"), "description": _template("text"), "source": "gpujob"}
        more = {"priority": _template("opsgenie.priority"), "tags": "gpujob,{{ .CommonLabels.severity }}"}
        return {"opsgenie_configs": [{"api_key_file": channel.opsgenie.key_file, **url, **page, **more}]}
    if channel.webhook is not None:
        return _webhook(site.read_secret(channel.webhook.url_file), channel.webhook.token_file)
    return {} if channel.log is None else _webhook(channel.log.url, channel.log.token_file)


def _webhook(url: str, token_file: str | None) -> Tree:
    hook: Tree = {"url": url, "send_resolved": True, "max_alerts": MOST_ALERTS}
    if token_file is not None:
        hook["http_config"] = {"authorization": {"type": "Bearer", "credentials_file": token_file}}
    return {"webhook_configs": [hook]}


def _mail(to: str, notify: NotifySpec) -> Tree:
    server = {} if notify.smtp is None else _smtp(notify.smtp)
    mail = {"to": to, **server, "send_resolved": True}
    texts = {"headers": {"Subject": _template("title")}, "html": _template("html"), "text": _template("text")}
    return {"email_configs": [{**mail, **texts}]}


def _smtp(smtp: SmtpSpec) -> Tree:
    server: Tree = {"smarthost": smtp.smarthost, "from": smtp.from_, "require_tls": smtp.require_tls}
    if smtp.username is not None:
        server["auth_username"] = smtp.username
    if smtp.password_file is not None:
        server["auth_password_file"] = smtp.password_file
    return server


def _route(notify: NotifySpec, receivers: Sequence[str], log: str | None) -> Tree:
    """Our part of the routes, in one route. The comments of the shipped file hold for the same entries here.

    Operators hear of hardware and of the monitoring itself whatever a job says in `notify`.
    """

    def to(name: str, *matchers: str, **more: object) -> Tree:
        return {**({"matchers": list(matchers)} if matchers else {}), "receiver": f"{PREFIX}{name}", **more}

    def to_one(name: str, *matchers: str, **more: object) -> Tree:
        """A route of all severities. In one group, a critical alert would wait for the interval of a warning."""
        return to(name, *matchers, group_by=[*JOB, "severity"], group_wait="10s", **more)

    has_owner = f"{PREFIX}owner" in receivers
    hours = {"active_time_intervals": [f"{PREFIX}office-hours"]} if notify.office_hours is not None else {}
    info_in_hours = {"routes": [{"matchers": ['severity="info"'], **hours}]} if hours else {}
    only = [to_one(f"channel-{name}", f'notify="{name}"', **info_in_hours) for name in notify.channels]
    owner = [to_one("owner", 'notify="owner"', 'job_id!=""', OWNER, **info_in_hours)] if has_owner else []
    # A trial is left out: Alertmanager counts the messages of all webhooks together.
    to_log = [to_one(f"channel-{log}", f'alertname!="{TRIAL}"', **{"continue": True})] if log is not None else []
    also_owner = [to_one("owner", 'job_id!=""', OWNER, 'severity=~"critical|warning"', **{"continue": True})]
    routes = [
        to("heartbeat", f'alertname="{WATCHDOG}"', group_by=["alertname"], **_times("0s", "1m", "50s")),
        *to_log,
        to("operators", 'component="self"', group_by=["cluster", "alertname"]),
        to("operators", f'alertname=~"{HARDWARE}"', group_by=["cluster", "node"], **{"continue": True}),
        to("none", 'notify="none"'),
        *only,
        *owner,
        *(also_owner if has_owner else []),
        to("page", 'severity="critical"', group_wait="10s", repeat_interval="4h"),
        # In one group of the job, its end would wait for hours behind an alert that was sent before.
        to("notify", 'severity="info"', group_by=[*JOB, "alertname"], **_times("15m", "4h", "24h"), **hours),
        to("notify"),
    ]
    return {**to("notify", OURS), "group_by": list(JOB), **_times("30s", "5m", "12h"), "routes": routes}


def _times(wait: str, interval: str, repeat: str) -> dict[str, object]:
    return {"group_wait": wait, "group_interval": interval, "repeat_interval": repeat}


def _intervals(notify: NotifySpec) -> list[Tree]:
    hours = notify.office_hours
    if hours is None:
        return []
    times = [{"start_time": hours.start, "end_time": hours.end}]
    interval = {"weekdays": list(hours.days), "times": times, "location": hours.timezone}
    return [{"name": f"{PREFIX}office-hours", "time_intervals": [interval]}]


def board_template(url: str) -> str:
    """The template of links to a board of Grafana, with the alert's job and time."""
    variables = "".join(f"&var-{name}={{{{ .Labels.{name} | urlquery }}}}" for name in ("cluster", "job_id"))
    mark = "&" if "?" in url else "?"
    return f'{{{{ define "gpujob.board" }}}}{url}{mark}{{{{ template "gpujob.range" . }}}}{variables}{{{{ end }}}}\n'
