"""The heartbeat through the whole chain: our configuration, a real Alertmanager, and the receiver."""

import json
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from exporter.alerts.messages import iso
from exporter.contract.records import JsonValue
from launcher.alerts.api import Source, ask
from launcher.cli.main import commands
from tests.support.alert_services import ALERTMANAGER, Services, running_alertmanager

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(ALERTMANAGER is None, reason="alertmanager is not installed"),
]

BEATS = 7


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end, "too late"
        time.sleep(0.05)


@pytest.fixture
def outside() -> Iterator[Services]:
    services = Services()
    yield services
    services.close()


def test_a_heartbeat_arrives_each_time_and_its_end_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outside: Services
) -> None:
    state, log = tmp_path / "state", tmp_path / "state" / "alerts.log"
    words = ["receive-alerts", "--state-dir", str(state), "--web.listen-address", "127.0.0.1:0"]
    words += ["--silence-after", "15"]
    receiver = subprocess.Popen([sys.executable, "-m", "exporter", *words], stderr=subprocess.DEVNULL)
    try:
        until((state / "receiver.json").exists)
        url = json.loads((state / "receiver.json").read_text(encoding="utf-8"))["url"]
        channel = f'{{log: {{token_file: {state}/token, url: "{url}/gpujob"}}}}'
        (tmp_path / "url").write_text(f"{outside.url}/outside\n", encoding="utf-8")
        (tmp_path / "url").chmod(0o600)
        notify = f"notify: {{channels: {{log: {channel}}}, heartbeat: {{url_file: {tmp_path}/url}}}}\n"
        (tmp_path / "gpujob.yaml").write_text(notify, encoding="utf-8")
        tmp_path.chmod(0o700)
        monkeypatch.setenv("GPUJOB_CONFIG", str(tmp_path / "gpujob.yaml"))
        assert CliRunner().invoke(commands, ["alerts", "config", "-o", str(tmp_path / "made")]).exit_code == 0
        config = tmp_path / "made" / "alertmanager.yml"
        text = config.read_text(encoding="utf-8")
        times_of = "group_interval: {}\n      repeat_interval: {}"
        slow, fast = times_of.format("1m", "50s"), times_of.format("1s", "800ms")
        assert slow in text
        config.write_text(text.replace(slow, fast), encoding="utf-8")

        def heartbeat(name: str) -> float | None:
            with urllib.request.urlopen(f"{url}/metrics", timeout=60) as page:
                samples = dict(line.rpartition(" ")[::2] for line in page.read().decode().splitlines())
            value = samples.get(f"gpujob_alerts_heartbeat_{name}")
            return None if value is None else float(value)

        with running_alertmanager(config, tmp_path / "data") as manager:
            now = time.time()
            times = {"startsAt": iso(now), "endsAt": iso(now + 600)}
            labels = {"alertname": "GpuJobWatchdog", "severity": "none", "component": "self"}
            alerts: list[JsonValue] = [{"labels": {**labels}, **times}]
            ask(Source("alertmanager", manager), "/api/v2/alerts", alerts)
            beats = list[float]()

            def has_all_beats() -> bool:
                if (beat := heartbeat("timestamp_seconds")) is not None and beat not in beats:
                    beats.append(beat)
                return len(beats) == BEATS

            until(has_all_beats)
            # each second, and not only each second one; where the machine stands still, some are late
            assert statistics.median(later - earlier for earlier, later in pairwise(beats)) < 1.5
            assert len(outside.messages) >= BEATS - 1
            assert {message.channel for message in outside.messages} == {"outside"}
            assert "BROKEN" not in log.read_text(encoding="utf-8")
        until(lambda: "ALERTING IS BROKEN" in log.read_text(encoding="utf-8"))
        assert heartbeat("ok") == 0
    finally:
        receiver.send_signal(signal.SIGTERM)
        receiver.wait(10)
