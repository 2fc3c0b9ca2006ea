"""The section `notify` of the cluster file: channels for alerts, and which alerts go there."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from launcher.jobfile.alerts.thresholds import Receiver
from launcher.jobfile.value_types import Directory, FileModel, Url, check_entry, combine_problems

OWN_NAMES = ("owner", "none")  # of receivers that every site has
_ADDRESS = re.compile(r"[^@\s,<>\"]{1,64}@[^@\s,<>\"]{1,255}")
_SERVER = re.compile(r"[A-Za-z0-9.-]{1,253}:\d{1,5}|\[[0-9A-Fa-f:.]+\]:\d{1,5}")
_DOMAIN = re.compile(r"[A-Za-z0-9.-]{1,253}")
_CLOCK = re.compile(r"([01]\d|2[0-3]):[0-5]\d|24:00")
_ZONE = re.compile(r"[A-Za-z0-9_+-]{1,40}(/[A-Za-z0-9_+-]{1,40}){0,2}")
Day = Literal["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]


def address_problem(text: str) -> str | None:
    """Problem with an address of mail, or None."""
    return None if _ADDRESS.fullmatch(text) else f"{text!r} is not an address; write for example ada@example.org"


def server_problem(text: str) -> str | None:
    """Problem with a mail server, or None."""
    return None if _SERVER.fullmatch(text) else f"{text!r} is not host:port; write for example smtp.example.org:587"


def _domain_problem(text: str) -> str | None:
    return None if _DOMAIN.fullmatch(text) else f"{text!r} is not a domain; write for example example.org"


def _clock_problem(text: str) -> str | None:
    return None if _CLOCK.fullmatch(text) else f'{text!r} is not a time of day; write for example "08:00"'


def _zone_problem(text: str) -> str | None:
    return None if _ZONE.fullmatch(text) else f"{text!r} is not a time zone; write for example Europe/Berlin"


MailAddress = Annotated[str, check_entry(address_problem)]
MailServer = Annotated[str, check_entry(server_problem)]
TimeOfDay = Annotated[str, check_entry(_clock_problem)]


class SmtpSpec(FileModel):
    """The mail server of the site."""

    smarthost: MailServer
    from_: Annotated[MailAddress, Field(alias="from")]
    username: str | None = None
    password_file: Directory | None = None
    require_tls: bool = True


class EmailChannel(FileModel):
    """Mail to one address."""

    to: MailAddress


class SlackChannel(FileModel):
    """A channel in Slack, by the URL of an incoming webhook."""

    url_file: Directory
    channel: str | None = None


class DiscordChannel(FileModel):
    """A channel in Discord, by the URL of a webhook."""

    url_file: Directory


class PagerDutyChannel(FileModel):
    """A service in PagerDuty, by the key of its Events API v2."""

    key_file: Directory
    url: Url | None = None


class OpsgenieChannel(FileModel):
    """A team in Opsgenie, by the key of its API."""

    key_file: Directory
    url: Url | None = None


class WebhookChannel(FileModel):
    """Any program that takes the JSON of Alertmanager."""

    url_file: Directory
    token_file: Directory | None = None


class LogChannel(FileModel):
    """The log of `gpujob alerts receive`, which also watches the heartbeat."""

    token_file: Directory
    url: Url = "http://127.0.0.1:9499/gpujob"


class ChannelSpec(FileModel):
    """One channel: exactly one of its keys."""

    email: EmailChannel | None = None
    slack: SlackChannel | None = None
    discord: DiscordChannel | None = None
    pagerduty: PagerDutyChannel | None = None
    opsgenie: OpsgenieChannel | None = None
    webhook: WebhookChannel | None = None
    log: LogChannel | None = None

    @model_validator(mode="after")
    def _one(self) -> "ChannelSpec":
        if len(given := [name for name in type(self).model_fields if getattr(self, name) is not None]) != 1:
            known = ", ".join(type(self).model_fields)
            raise ValueError(f"has {len(given) or 'no'} kinds of channels; give each channel exactly one of {known}")
        return self


class OfficeHours(FileModel):
    """When alerts of severity info are sent."""

    days: list[Day] = ["monday", "tuesday", "wednesday", "thursday", "friday"]
    start: TimeOfDay = "08:00"
    end: TimeOfDay = "18:00"
    timezone: Annotated[str, check_entry(_zone_problem)] = "UTC"

    @model_validator(mode="after")
    def _ends_later(self) -> "OfficeHours":
        if self.end <= self.start:
            raise ValueError(f"the end, {self.end}, is not after the start, {self.start}; both are of the same day")
        return self


def _names_that_are_free(channels: dict[str, ChannelSpec]) -> dict[str, ChannelSpec]:
    if taken := [name for name in channels if name in OWN_NAMES]:
        raise combine_problems(
            [((name,), "is a name of gpujob; give the channel another one") for name in taken], channels
        )
    return channels


class NotifySpec(FileModel):
    """Who is notified of alerts. `gpujob alerts config` makes the configuration of Alertmanager from it."""

    smtp: SmtpSpec | None = None
    owner_domain: Annotated[str, check_entry(_domain_problem)] | None = None
    board_url: Url | None = None
    channels: Annotated[dict[Receiver, ChannelSpec], AfterValidator(_names_that_are_free)] = {}
    page: list[str] | None = None
    notify: list[str] | None = None
    operators: list[str] | None = None
    heartbeat: WebhookChannel | None = None
    office_hours: OfficeHours | None = None


def find_problems(notify: NotifySpec, *, has_mail_server: bool) -> list[str]:
    """What does not fit together, one sentence each with its place."""
    known = ", ".join(notify.channels) or "none"
    problems = [
        f"notify.{key}[{index}]: {name!r} is not one of `channels` (known: {known})"
        for key in ("page", "notify", "operators")
        for index, name in enumerate(getattr(notify, key) or ())
        if name not in notify.channels
    ]
    mails = [f"channels.{name}" for name, channel in notify.channels.items() if channel.email is not None]
    if notify.owner_domain is not None:
        mails.append("owner_domain")
    if mails and not has_mail_server:
        problems.append(f"notify.smtp: is missing, and {mails[0]} needs it; write the mail server and the sender")
    return problems
