"""What a real Alertmanager sends to each channel, as whole pages."""

import email
import email.policy
import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from click.testing import CliRunner

from exporter.alerts.messages import iso
from launcher.cli.main import commands
from tests.conftest import GOLDEN
from tests.launcher.conftest import Golden
from tests.support.alert_services import ALERTMANAGER, CHANNELS, Message, Services, running_alertmanager

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(ALERTMANAGER is None, reason="alertmanager is not installed"),
]
NEWER = (0, 33)  # whose payloads have more
BASE = "https://github.com/gpujob/gpujob/blob/main/alertmanager/runbooks"
HOSTILE = "<!channel> *b* _i_ ~s~ `c` [a](http://evil.example) @everyone <script>alert(1)</script> {{ .Status }} a_b"


class Site:
    """An Alertmanager with all channels."""

    def __init__(self, url: str, services: Services) -> None:
        self.url, self.services = url, services

    def post(self, alerts: Sequence[Mapping[str, Any]], start: float, end: float | None = None) -> None:
        """Report alerts that have begun, and ended if there is an end. One that began long ago is sent at once."""
        times = {"startsAt": iso(start), "endsAt": iso(start + 3600.0 if end is None else end)}
        body = json.dumps([{**alert, **times} for alert in alerts]).encode()
        request = urllib.request.Request(f"{self.url}/api/v2/alerts", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=5):
            pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder, services, patch = tmp_path_factory.mktemp("site"), Services(), pytest.MonkeyPatch()
    folder.chmod(0o700)
    cluster_file = folder / "gpujob.yaml"
    cluster_file.write_text(services.cluster_file(folder), encoding="utf-8")
    cluster_file.chmod(0o600)
    try:
        patch.setenv("GPUJOB_CONFIG", str(cluster_file))
        result = CliRunner().invoke(commands, ["alerts", "config", "-o", str(folder / "alerting")])
        assert result.exit_code == 0, result.output
        with running_alertmanager(folder / "alerting" / "alertmanager.yml", folder / "data") as url:
            yield Site(url, services)
    finally:
        patch.undo()
        services.close()


def alert(name: str, job_id: str, text: str, **labels: str) -> dict[str, Any]:
    """An alert as Prometheus posts it, without its times."""
    job = {"cluster": "hal", "job_id": job_id, "job_name": "embed", "user": "ada", "partition": "gpu"}
    return {
        "labels": {"alertname": name, "severity": "critical", "component": "worker", **job, **labels},
        "annotations": {"summary": "S.", "description": text, "runbook_url": f"{BASE}/{name}.md"},
        "generatorURL": "http://prometheus.example.org/graph?g0.expr=x",
    }


def killed(job_id: str, rank: int = 3, name: str = "embed") -> dict[str, Any]:
    worker = f"worker_w{rank}"
    text = f"Worker {worker} (rank {rank}) of job {job_id} ({name}, ada) on gn1 was killed. Reason: killed_unknown."
    labels = {"worker": worker, "rank": str(rank), "node": "gn1", "reason": "killed_unknown", "job_name": name}
    return alert("GpuJobWorkerKilled", job_id, text, **labels)


CASES: dict[str, list[dict[str, Any]]] = {
    "one-dead-worker": [killed("101")],
    "twelve-dead-workers": [killed("102", rank) for rank in range(12)],
    "lost-node": [
        alert("GpuJobNodeFailed", "103", "Job 103 (embed, ada) in partition gpu lost a node.", component="job"),
        alert("GpuJobWorkersLost", "103", "Job 103 (embed, ada) is missing 8 of its workers on gn1.", node="gn1"),
        alert("GpuJobTimeLimitCertain", "103", "Job 103 (embed, ada) will miss its time limit.", component="progress"),
    ],
    "hostile-name": [killed("105", name=HOSTILE)],
}


def next_second() -> float:
    """A start for which Alertmanager waits: it sends an older one before it knows what inhibits it."""
    return float(int(time.time()) + 1)


def without_times(text: str, start: float, end: float | None) -> str:
    """The text with names in place of the times of an alert."""
    for name, moment in (("START", start), ("END", end)):
        if moment is not None:
            words = (iso(moment) or "", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment)))
            for word in (*words, f"{moment * 1000:.0f}"):
                text = text.replace(word, name)
            text = text.replace(f"{(moment - 3600.0) * 1000:.0f}", f"{name}-1h")
    return text


def page(message: Message, services: Services) -> str:
    """A message as text, without what differs between two runs."""
    text = message.body
    if message.channel == "mail":
        mail = email.message_from_string(text, policy=email.policy.default)
        parts = [part for part in mail.walk() if not part.is_multipart()]
        head = "".join(f"{name}: {mail[name]}\n" for name in ("From", "To", "Subject"))
        text = head + "".join(f"--- {part.get_content_type()}\n{part.get_content().strip()}\n" for part in parts)
    else:
        text = json.dumps(json.loads(text), indent=1, ensure_ascii=False, sort_keys=True)
    return f"=== {message.channel}\n{text.replace(services.url, 'http://services').strip()}\n"


def version() -> tuple[int, ...]:
    done = subprocess.run([str(ALERTMANAGER), "--version"], capture_output=True, text=True, check=True)
    return tuple(map(int, re.findall(r"version (\d+)\.(\d+)", done.stdout + done.stderr)[0]))


def check(golden: Golden, name: str, text: str) -> None:
    """Compare all pages, those of a newer Alertmanager only where they differ from the older one's."""
    if version() >= NEWER:
        older = (GOLDEN / "launcher" / "alerts" / name).read_text(encoding="utf-8").split("=== ")
        text = "".join(f"=== {page}" for page in text.split("=== ") if page not in older)
        name = f"{'.'.join(map(str, NEWER))}/{name}"
    golden(f"launcher/alerts/{name}", text)


def is_about(job_id: str) -> Callable[[Message], bool]:
    return lambda message: re.search(rf'job {job_id}\b|"job_id": ?"{job_id}"', message.body) is not None


@pytest.mark.parametrize("case", CASES)
def test_the_messages_of_all_channels_are_as_the_golden_page_shows(case: str, site: Site, golden: Golden) -> None:
    alerts, start = CASES[case], next_second()
    site.post(alerts, start)
    found = site.services.wait(is_about(alerts[0]["labels"]["job_id"]), len(CHANNELS))
    assert sorted(each.channel for each in found) == list(CHANNELS)
    text = "".join(page(each, site.services) for each in sorted(found))
    check(golden, f"{case}.txt", without_times(text, start, None))


def test_an_alert_that_has_ended_is_no_longer_reported(site: Site, golden: Golden) -> None:
    start, about = next_second(), is_about("104")
    site.post([killed("104")], start)
    site.services.wait(about, len(CHANNELS))
    site.services.messages.clear()
    time.sleep(max(0.0, start + 1.1 - time.time()))  # an end that is still to come would not end the alert
    site.post([killed("104")], start, start + 1.0)
    found = site.services.wait(lambda each: about(each) or each.channel == "opsgenie", len(CHANNELS))
    text = "".join(page(each, site.services) for each in sorted(found))
    check(golden, "resolved.txt", without_times(text, start, start + 1.0))


def test_a_critical_alert_does_not_wait_for_the_group_of_an_earlier_warning(site: Site) -> None:
    """Where one channel gets all alerts of a job, as that which the job chose: they are two messages."""
    about = is_about("106")
    site.post([alert("GpuJobSlowdown", "106", "It is slow.", severity="warning", notify="slack")], next_second())
    site.services.wait(lambda each: about(each) and "[WARNING] job 106" in each.body, 1)
    dead = killed("106")
    site.post([{**dead, "labels": {**dead["labels"], "notify": "slack"}}], next_second())
    site.services.wait(lambda each: about(each) and "[CRITICAL] job 106" in each.body, 1)
