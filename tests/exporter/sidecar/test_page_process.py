"""The page of a real sidecar with TLS and credentials, for a real Prometheus and for other users."""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bcrypt
import pytest
import yaml

from exporter.contract import run_files
from launcher.rundir.targets import TargetFiles, read_sidecars, sidecar_target_groups
from tests.exporter.sidecar.test_sidecar_process import SidecarProcess, refused, run
from tests.support.certificates import Authority
from tests.support.exporter import NOBODY, NODE, make_manifest, until, write_manifest
from tests.support.ports import free_port

FIGURE = '{"name": "score", "value": 1.5}'
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask as another user")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority whose folder has the files of a node and of a Prometheus."""
    folder = tmp_path_factory.mktemp("ca")
    authority = Authority(folder)
    authority.issue("node", f"DNS:{NODE},DNS:localhost,IP:127.0.0.1")
    authority.issue("prometheus", "DNS:prometheus", "clientAuth")
    return authority


def web_config(folder: Path, authority: Authority, client_auth_type: str = "NoClientCert", **users: str) -> Path:
    """A web configuration with TLS."""
    ca = authority.own.certificate
    tls = {"cert_file": str(ca.with_name("node.pem")), "key_file": str(ca.with_name("node.key"))}
    if client_auth_type != "NoClientCert":
        tls |= {"client_auth_type": client_auth_type, "client_ca_file": str(ca)}
    hashes = {name: bcrypt.hashpw(text.encode(), bcrypt.gensalt(4)).decode() for name, text in users.items()}
    path = folder / "web.yml"
    path.write_text(yaml.safe_dump({"tls_server_config": tls, "basic_auth_users": hashes}))
    return path


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., SidecarProcess]]:
    """Start sidecars of a job; keywords are keys of its manifest."""
    started: list[SidecarProcess] = []

    def start_sidecar(*options: str, **manifest: Any) -> SidecarProcess:
        given = {"check_interval_s": 1.0, "listen_address": "127.0.0.1:0", **manifest}
        write_manifest(make_manifest(tmp_path, **given))
        run_files.write_job_state(str(tmp_path), "running")
        started.append(SidecarProcess(tmp_path, *options))
        return started[-1]

    yield start_sidecar
    for process in started:
        process.close()


def curl(url: str, *options: str, user: int = NOBODY) -> tuple[int, str]:
    """Status and text of a request by another user; status 0 without an answer."""
    argv = ["curl", "-sS", "--noproxy", "*", "-m", "30", "-w", "\n%{http_code}", *options, url]
    prefix = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user else []
    done = subprocess.run([*prefix, *argv], capture_output=True, text=True, check=False, timeout=60, cwd="/")
    text, _, status = done.stdout.rpartition("\n")
    return int(status), text + done.stderr


@as_root
def test_another_user_sees_the_open_series_and_nothing_else(start: Callable[..., SidecarProcess]) -> None:
    sidecar = start()
    sidecar.until_ready()
    url = f"http://127.0.0.1:{sidecar.port}"
    assert curl(f"{url}/metrics")[0] == 200
    status, text = curl(f"{url}/status")
    assert status == 401
    assert text.startswith("401: this needs the job's token")
    token = sidecar.run_dir / run_files.TOKEN_FILE
    assert token.stat().st_mode & 0o777 == 0o600
    wrong = "0" * 64
    assert curl(f"{url}/status", "-H", f"Authorization: Bearer {wrong}")[0] == 401
    for number in range(70):
        assert curl(f"{url}/fom", "-d", FIGURE.replace("score", f"n{number}"))[0] == 401
    own = f"Authorization: Bearer {token.read_text().strip()}"
    assert curl(str(sidecar.record["fom"]), "-H", own, "-d", FIGURE, user=0) == (200, '{"status": "ok"}')
    until(lambda: "gpujob_figure_of_merit{" in sidecar.text("/metrics"), "the figure")
    assert 'name="n0"' not in sidecar.text("/metrics")


@as_root
def test_authenticated_series_need_the_token(start: Callable[..., SidecarProcess]) -> None:
    sidecar = start(metrics_access="authenticated")
    url = f"http://127.0.0.1:{sidecar.port}/metrics"
    assert curl(url)[0] == 401
    assert "gpujob_info{" in sidecar.text("/metrics")


@as_root
def test_a_page_with_tls_and_client_certificates_is_closed_to_other_users(
    tmp_path: Path, authority: Authority, start: Callable[..., SidecarProcess]
) -> None:
    folder = authority.own.certificate.parent
    path = web_config(tmp_path, authority, "RequireAndVerifyClientCert")
    sidecar = start(web_config_file=str(path))
    url, ca = f"https://127.0.0.1:{sidecar.port}", ("--cacert", str(folder / "ca.pem"))
    assert curl(f"{url}/metrics", *ca, user=0)[0] == 0, "without a certificate"
    other = Authority(tmp_path, "other").issue("stranger", "DNS:prometheus", "clientAuth")
    pair = ("--cert", str(other.certificate), "--key", str(other.key))
    assert curl(f"{url}/metrics", *ca, *pair, user=0)[0] == 0, "with one of another authority"
    pair = ("--cert", str(folder / "prometheus.pem"), "--key", str(folder / "prometheus.key"))
    status, text = curl(f"{url}/metrics", *ca, *pair, user=0)
    assert status == 200
    assert "gpujob_info{" in text
    assert curl(f"http://127.0.0.1:{sidecar.port}/metrics")[0] == 0, "without TLS"
    own = str(sidecar.record["fom"]).removesuffix("/fom")
    assert curl(f"{own}/metrics")[0] == 401, "the listener of the job"
    assert curl(f"{own}/fom", "-d", FIGURE)[0] == 401
    token = f"Authorization: Bearer {run_files.read_token(sidecar.run_dir)}"
    assert curl(f"{own}/fom", "-H", token, "-d", FIGURE, user=0)[0] == 200


def test_a_restarted_sidecar_keeps_ports_token_and_certificate(
    tmp_path: Path, authority: Authority, start: Callable[..., SidecarProcess]
) -> None:
    web = str(web_config(tmp_path, authority))
    # those of a sidecar before the first one; another test may take what the kernel gives
    earlier = {"attempt": 0, "port": free_port(), "fom": f"http://127.0.0.1:{free_port()}/fom"}
    (tmp_path / run_files.SIDECARS_DIR).mkdir()
    run_files.write_json(tmp_path / run_files.SIDECARS_DIR / f"{NODE}.json", earlier)
    first, token = start(web_config_file=web), run_files.read_token(tmp_path)
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    second = start(web_config_file=web)
    assert run_files.read_token(tmp_path) == token
    names = ("port", "fom", "certificate", "address")
    assert [second.record[name] for name in names] == [first.record[name] for name in names]
    assert second.record["certificate"]


def test_a_new_certificate_is_published(
    tmp_path: Path, authority: Authority, start: Callable[..., SidecarProcess]
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for name in ("node.pem", "node.key"):
        shutil.copy(authority.own.certificate.with_name(name), own)
    (own / "web.yml").write_text("tls_server_config: {cert_file: node.pem, key_file: node.key}")
    sidecar = start(web_config_file=str(own / "web.yml"))
    Authority(own, "new").issue("node", "IP:127.0.0.1")
    path = tmp_path / run_files.SIDECARS_DIR / f"{NODE}.json"
    until(
        lambda: (run_files.read_json(path) or {}).get("certificate") not in (None, sidecar.record["certificate"]),
        "the new certificate",
    )


def test_an_invalid_web_configuration_is_refused_before_listening(tmp_path: Path) -> None:
    write_manifest(make_manifest(tmp_path))
    path = tmp_path / "web.yml"
    path.write_text("basic_auth_user: {}")
    done = run("sidecar", "--run-dir", str(tmp_path), "--web.config.file", str(path))
    assert done.returncode == 2
    assert done.stderr == (
        f'gpujob-exporter: {path}: 1 problem\n  basic_auth_user: unknown key; did you mean "basic_auth_users"?\n'
    )
    assert not (tmp_path / run_files.SIDECARS_DIR).exists()
    missing = ("sidecar", "--job-name", "a", "--num-workers", "1", "--output-dir", "o", "--log-dir", "l")
    message = refused(run(*missing, "--web.config.file", "/none.yml", "--web.listen-address", "127.0.0.1:0"))
    assert message == "/none.yml: the web configuration cannot be read: No such file or directory"


# -- Prometheus ----------------------------------------------------------------------------------


def documented_configuration(way: str) -> str:
    """The scrape configuration of the documentation, with its lines about TLS and credentials."""
    text = Path(__file__).parents[3].joinpath("docs/how-to/connect-prometheus.md").read_text()
    section = text[text.index("## 3. Load") : text.index("## 6. ")]
    scrape, tls, scheme, password = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    if way != "certificate":
        tls = re.sub(r" +(cert|key)_file: .*\n", "", tls)
    if way.endswith("password"):
        tls += password
    before, labels, after = scrape.partition("    metric_relabel_configs:")
    return f"{before}{scheme}{tls}{labels}{after}"


@contextmanager
def prometheus(folder: Path, configuration: str) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """A Prometheus with this configuration, and its results of queries."""
    path, port = folder / "prometheus.yml", free_port()
    path.write_text(configuration)
    subprocess.run(["promtool", "check", "config", str(path)], check=True, capture_output=True)
    options = [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "prometheus.log").open("wb") as log:
        argv = ["prometheus", f"--config.file={path}", *options]
        server = subprocess.Popen(argv, stdout=log, stderr=log, cwd=folder)

    def query(text: str) -> list[dict[str, Any]]:
        url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': text})}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                return found
        except (OSError, http.client.HTTPException):
            return []  # not yet

    try:
        yield query
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.prometheus
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
@pytest.mark.parametrize("way", ["certificate", "password", "wrong password", "no credentials"])
def test_prometheus_scrapes_a_closed_page_as_documented(
    tmp_path: Path, authority: Authority, start: Callable[..., SidecarProcess], way: str
) -> None:
    if way == "certificate":
        path = web_config(tmp_path, authority, "RequireAndVerifyClientCert")
    else:
        path = web_config(tmp_path, authority, prometheus="secret")
    sidecar = start("--web.listen-address", "localhost:0", web_config_file=str(path))
    targets = tmp_path / "targets"
    targets.mkdir()
    groups = sidecar_target_groups(read_sidecars(sidecar.run_dir, 0).values(), "")
    assert TargetFiles(tmp_path, str(targets)).publish(groups)
    folder = tmp_path / "etc"
    shutil.copytree(authority.own.certificate.parent, folder)
    (folder / "password").write_text("secret\n" if way == "password" else "other\n")
    text = documented_configuration(way).replace("/etc/prometheus/gpujob", str(folder))
    text = text.replace("/run/gpujob", str(targets)).replace("15s", "10s")  # the timeout is the documented one
    with prometheus(tmp_path, text) as query:
        works = way in ("certificate", "password")

        def scraped() -> list[dict[str, Any]] | None:
            found = query('up{job="gpujob-sidecar"}')
            # the first scrape of a page that can be read may be too late for its timeout
            return found if found and (found[0]["value"][1] == "1" or not works) else None

        (up,) = until(scraped, "a scrape")
        assert up["value"][1] == ("1" if works else "0"), (tmp_path / "prometheus.log").read_text()
        assert up["metric"]["instance"] == f"localhost:{sidecar.port}"
        if works:
            (info,) = until(lambda: query("gpujob_info"), "the series")
            assert (info["metric"]["job_id"], info["metric"]["job"]) == ("4459", "gpujob-sidecar")
        else:
            assert query("gpujob_info") == []
