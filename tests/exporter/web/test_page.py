"""A page with TLS, users and a token, as its clients see it."""

import asyncio
import base64
import contextlib
import http.client
import logging
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import bcrypt
import pytest
from aiohttp import web

from exporter.web import users as users_module
from exporter.web.access import Access, Needs
from exporter.web.addresses import open_socket
from exporter.web.config_file import WebConfigFile
from tests.support.certificates import Authority, Pair

TOKEN = "0123abcd"
NEEDS = {"/metrics": Needs.WHAT_THE_SITE_ASKS, "/status": Needs.CREDENTIALS, "/fom": Needs.TOKEN}
PATHS = ("/", *NEEDS)
OPEN = {"/": 200, "/metrics": 200, "/status": 401, "/fom": 401}
CLOSED = {**OPEN, "/metrics": 401}
KNOWN = {"/": 200, "/metrics": 200, "/status": 200, "/fom": 401}
REFUSED = (ssl.SSLError, ConnectionError)


class Certificates(NamedTuple):
    """Pairs of one authority, and one client of another."""

    authority: Authority
    server: Pair
    client: Pair
    neighbour: Pair  # another name, and an address
    foreigner: Pair


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    authority, other = Authority(folder), Authority(folder, "other")
    return Certificates(
        authority,
        authority.issue("server", "DNS:node01,IP:127.0.0.1"),
        authority.issue("client", "DNS:prometheus.site,URI:spiffe://site/prometheus", "clientAuth"),
        authority.issue("neighbour", "DNS:else.site,IP:10.0.0.7,email:ops@site", "clientAuth"),
        other.issue("foreigner", "DNS:prometheus.site", "clientAuth"),
    )


class Page:
    """A page that runs in a thread, with a client."""

    def __init__(self, port: int, web_file: WebConfigFile | None, authority: Authority | None) -> None:
        self.port = port
        self.web_file = web_file
        self._authority = authority

    def connect(self, client: Pair | None = None, **limits: Any) -> http.client.HTTPConnection:
        """A new connection, with TLS if the page has it and with these attributes of the context."""
        if self._authority is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        context = ssl.create_default_context(cafile=self._authority.own.certificate)
        for name, value in limits.items():
            setattr(context, name, value)
        if client is not None:
            context.load_cert_chain(*client)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=30, context=context)

    def ask(
        self, path: str, client: Pair | None = None, method: str = "GET", **headers: str
    ) -> tuple[int, dict[str, str], str]:
        """Status, headers and text of one request."""
        connection = self.connect(client)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with contextlib.closing(connection):
            connection.request(method, path, headers=named)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read().decode()

    def answers(self, client: Pair | None = None, **headers: str) -> dict[str, int]:
        """Status of each path."""
        return {path: self.ask(path, client, **headers)[0] for path in PATHS}


def basic(user: str, password: str) -> str:
    """The Authorization header of a user."""
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


@contextlib.contextmanager
def serve(path: Path | None, authority: Authority | None = None) -> Iterator[Page]:
    """A page with this web configuration."""
    web_file = WebConfigFile(str(path)) if path is not None else None
    application = web.Application()

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=f"this is {request.path}")

    application.add_routes([web.get(path, answer) for path in PATHS])
    Access(NEEDS, names=("node01", "node01.site"), token=TOKEN, web_file=web_file).protect(application)
    listening, loop = open_socket("127.0.0.1", 0), asyncio.new_event_loop()
    port, runner = listening.getsockname()[1], web.AppRunner(application, access_log=None)

    async def start() -> None:
        await runner.setup()
        context = web_file.server_context() if web_file is not None else None
        await web.SockSite(runner, listening, ssl_context=context).start()

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(start(), loop).result(30)
        yield Page(port, web_file, authority)
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def write(folder: Path, certificates: Certificates | None, *keys: str, rest: str = "") -> Path:
    """Write a web configuration."""
    lines = []
    if certificates is not None:
        pair = certificates.server
        lines = ["tls_server_config:", f"  cert_file: {pair.certificate}", f"  key_file: {pair.key}"]
        lines += [f"  {key}" for key in keys]
    path = folder / "web.yml"
    path.write_text("\n".join([*lines, rest, ""]))
    return path


def users(**passwords: str) -> str:
    hashes = {name: bcrypt.hashpw(text.encode(), bcrypt.gensalt(4)).decode() for name, text in passwords.items()}
    return "\n".join(["basic_auth_users:", *(f"  {name}: {text}" for name, text in hashes.items())])


# -- without a web configuration -----------------------------------------------------------------


def test_without_a_web_configuration_only_the_series_are_open() -> None:
    with serve(None) as page:
        assert page.answers() == OPEN
        assert page.answers(Authorization=f"Bearer {TOKEN}") == dict.fromkeys(PATHS, 200)
        assert page.answers(Authorization="Bearer 0123abce") == OPEN
        assert page.answers(Authorization="Bearer ") == OPEN
        assert page.answers(Authorization="Basic !") == OPEN


def test_a_refusal_says_what_is_needed() -> None:
    with serve(None) as page:
        status, headers, text = page.ask("/status")
        assert (status, headers["WWW-Authenticate"]) == (401, 'Bearer realm="gpujob"')
        assert text == (
            "401: this needs the job's token as `Authorization: Bearer TOKEN`; "
            "it is in the file `token` of the run directory\n"
        )


# -- host and origin -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["node01", "NODE01:9410", "node01.", "node01.site:80", "127.0.0.1:1", "[::1]:9410", "10.0.0.7", "[fe80::1]"]
)
def test_a_page_answers_to_its_names_and_to_addresses(host: str) -> None:
    with serve(None) as page:
        assert page.ask("/metrics", Host=host)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "node01.evil.example", "node02", "127.0.0.1.evil.example", "[::1"])
def test_a_page_does_not_answer_to_other_names(host: str) -> None:
    with serve(None) as page:
        for path in PATHS:
            assert page.ask(path, Host=host, Authorization=f"Bearer {TOKEN}")[0] == 421


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://node01:9410", 200),
        ("https://node01:9410", 403),
        ("http://node01", 403),
        ("http://evil.example", 403),
        ("null", 403),
    ],
)
def test_requests_of_other_sites_are_refused(origin: str, status: int) -> None:
    with serve(None) as page:
        assert page.ask("/metrics", Host="node01:9410", Origin=origin)[0] == status


# -- TLS -----------------------------------------------------------------------------------------


def test_a_page_with_tls_speaks_nothing_else(tmp_path: Path, certificates: Certificates) -> None:
    with serve(write(tmp_path, certificates), certificates.authority) as page:
        assert page.answers() == OPEN
        page._authority = None
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            page.ask("/")


def test_a_page_without_tls_does_not_answer_a_tls_client(certificates: Certificates) -> None:
    with serve(None, certificates.authority) as page, pytest.raises(REFUSED):
        page.ask("/")


def test_with_tls_the_certificate_names_the_page(tmp_path: Path, certificates: Certificates) -> None:
    with serve(write(tmp_path, certificates), certificates.authority) as page:
        assert page.ask("/metrics", Host="gn1.other.site")[0] == 200


@pytest.mark.parametrize(
    ("keys", "limits", "accepted"),
    [
        ("", {"maximum_version": ssl.TLSVersion.TLSv1_1}, False),
        ("", {"maximum_version": ssl.TLSVersion.TLSv1_2}, True),
        ("min_version: TLS13", {"maximum_version": ssl.TLSVersion.TLSv1_2}, False),
        ("max_version: TLS12", {"minimum_version": ssl.TLSVersion.TLSv1_3}, False),
        ("max_version: TLS12", {}, True),
    ],
)
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_versions_of_tls_are_limited(
    tmp_path: Path, certificates: Certificates, keys: str, limits: dict[str, Any], accepted: bool
) -> None:
    with serve(write(tmp_path, certificates, keys), certificates.authority) as page:
        connection = page.connect(**limits)
        with contextlib.nullcontext() if accepted else pytest.raises(REFUSED), contextlib.closing(connection):
            connection.connect()


AES128, AES256 = "ECDHE-ECDSA-AES128-GCM-SHA256", "ECDHE-ECDSA-AES256-GCM-SHA384"
GO = {
    AES128: "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    AES256: "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
}


@pytest.mark.parametrize(
    ("server", "own_order", "client", "chosen"),
    [
        ((AES128,), True, (AES128,), AES128),
        ((AES128,), True, (AES256,), None),
        ((AES128, AES256), True, (AES256, AES128), AES128),
        ((AES128, AES256), False, (AES256, AES128), AES256),
    ],
)
def test_cipher_suites_are_those_of_the_file(
    tmp_path: Path,
    certificates: Certificates,
    server: tuple[str, ...],
    own_order: bool,
    client: tuple[str, ...],
    chosen: str | None,
) -> None:
    keys = (
        f"cipher_suites: [{', '.join(GO[name] for name in server)}, TLS_AES_128_GCM_SHA256]",
        f"prefer_server_cipher_suites: {str(own_order).lower()}",
    )
    with serve(write(tmp_path, certificates, *keys), certificates.authority) as page:
        context = ssl.create_default_context(cafile=certificates.authority.own.certificate)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(":".join(client))
        connection = http.client.HTTPSConnection("127.0.0.1", page.port, timeout=30, context=context)
        with contextlib.closing(connection):
            if chosen is None:
                with pytest.raises(REFUSED):
                    connection.connect()
                return
            connection.connect()
            assert (connection.sock.cipher() or [None])[0] == chosen


# -- client certificates -------------------------------------------------------------------------


def with_clients(folder: Path, certificates: Certificates, kind: str, *keys: str) -> Path:
    ca = certificates.authority.own.certificate
    return write(folder, certificates, f"client_auth_type: {kind}", f"client_ca_file: {ca}", *keys)


@pytest.mark.parametrize("kind", ["RequireAndVerifyClientCert", "RequireAnyClientCert"])
def test_a_required_certificate_opens_the_page_to_its_holder_alone(
    tmp_path: Path, certificates: Certificates, kind: str
) -> None:
    with serve(with_clients(tmp_path, certificates, kind), certificates.authority) as page:
        assert page.answers(certificates.client) == KNOWN
        for client in (None, certificates.foreigner, certificates.server):
            with pytest.raises(REFUSED):
                page.ask("/", client)


def test_a_certificate_that_may_be_given_is_verified(tmp_path: Path, certificates: Certificates) -> None:
    path = with_clients(tmp_path, certificates, "VerifyClientCertIfGiven")
    with serve(path, certificates.authority) as page:
        assert page.answers() == CLOSED
        assert page.answers(certificates.client) == KNOWN
        assert page.answers(Authorization=f"Bearer {TOKEN}") == dict.fromkeys(PATHS, 200)
        with pytest.raises(REFUSED):
            page.ask("/", certificates.foreigner)


@pytest.mark.parametrize("kind", ["NoClientCert", "RequestClientCert"])
def test_a_certificate_that_nobody_verifies_proves_nothing(
    tmp_path: Path, certificates: Certificates, kind: str
) -> None:
    with serve(write(tmp_path, certificates, f"client_auth_type: {kind}"), certificates.authority) as page:
        for client in (None, certificates.client, certificates.foreigner):
            assert page.answers(client) == OPEN


@pytest.mark.parametrize(
    ("allowed", "client", "neighbour"),
    [
        ("prometheus.site", True, False),
        ("10.0.0.7", False, True),
        ("ops@site", False, True),
        ("spiffe://site/prometheus", True, False),
        ("nobody.site", False, False),
        ("prometheus.site, else.site", True, True),
    ],
)
def test_names_of_client_certificates_are_checked(
    tmp_path: Path, certificates: Certificates, allowed: str, client: bool, neighbour: bool
) -> None:
    sans = f"client_allowed_sans: [{allowed}]"
    path = with_clients(tmp_path, certificates, "RequireAndVerifyClientCert", sans)
    with serve(path, certificates.authority) as page:
        for pair, accepted in ((certificates.client, client), (certificates.neighbour, neighbour)):
            with contextlib.nullcontext() if accepted else pytest.raises(REFUSED):
                assert page.ask("/metrics", pair)[0] == 200


# -- headers and users ---------------------------------------------------------------------------


def test_headers_are_in_every_answer(tmp_path: Path) -> None:
    headers = {
        "Strict-Transport-Security": "max-age=31536000; includeSubDomains",
        "X-Frame-Options": "deny",
        "X-Content-Type-Options": "nosniff",
        "X-XSS-Protection": "1",
        "Content-Security-Policy": "default-src 'none'",
    }
    lines = "\n".join(f'    {name}: "{value}"' for name, value in headers.items())
    with serve(write(tmp_path, None, rest=f"http_server_config:\n  headers:\n{lines}")) as page:
        for path, status in (*OPEN.items(), ("/nothing", 404)):
            answer = page.ask(path)
            assert (answer[0], {name: answer[1].get(name) for name in headers}) == (status, headers)


def test_users_see_the_series_and_the_status(tmp_path: Path) -> None:
    with serve(write(tmp_path, None, rest=users(ada="secret", bob="other"))) as page:
        assert page.answers() == CLOSED
        assert page.ask("/metrics")[1]["WWW-Authenticate"] == 'Bearer realm="gpujob", Basic realm="gpujob"'
        for _ in range(2):  # the second time from what is known
            assert page.answers(Authorization=basic("ada", "secret")) == KNOWN
            for wrong in (("ada", "other"), ("ada", ""), ("nobody", "secret"), ("", ""), ("ada", "secret\0")):
                assert page.answers(Authorization=basic(*wrong)) == CLOSED
        assert page.answers(Authorization=f"Bearer {TOKEN}") == dict.fromkeys(PATHS, 200)
        assert page.answers(Authorization=f"Bearer {base64.b64encode(b'ada:secret').decode()}") == CLOSED


def test_a_certificate_replaces_no_password(tmp_path: Path, certificates: Certificates) -> None:
    ca = certificates.authority.own.certificate
    keys = ("client_auth_type: RequireAndVerifyClientCert", f"client_ca_file: {ca}")
    with serve(write(tmp_path, certificates, *keys, rest=users(ada="secret")), certificates.authority) as page:
        assert page.answers(certificates.client) == CLOSED
        assert page.answers(certificates.client, Authorization=basic("ada", "other")) == CLOSED
        assert page.answers(certificates.client, Authorization=basic("ada", "secret")) == KNOWN


def test_only_72_bytes_of_a_password_count_as_everywhere(tmp_path: Path) -> None:
    password = "p" * 72
    with serve(write(tmp_path, None, rest=users(ada=password))) as page:
        assert page.ask("/metrics", Authorization=basic("ada", f"{password}more"))[0] == 200
        assert page.ask("/metrics", Authorization=basic("ada", password[:-1]))[0] == 401


def test_what_is_known_of_one_password_is_not_believed_of_another(tmp_path: Path) -> None:
    """CVE-2022-46146: user, hash and password joined without a separator."""
    text = users(alice="alice123")
    hashed = text.rpartition(" ")[2]
    with serve(write(tmp_path, None, rest=text)) as page:
        assert page.ask("/metrics", Authorization=basic(f"alice{hashed}", "alice123"))[0] == 401
        assert page.ask("/metrics", Authorization=basic("alice", "alice123"))[0] == 200
        assert page.ask("/metrics", Authorization=basic("alice", f"{hashed}alice123"))[0] == 401


def test_many_logins_at_once_each_get_the_right_answer(tmp_path: Path) -> None:
    with serve(write(tmp_path, None, rest=users(alice="alice123"))) as page, ThreadPoolExecutor(20) as pool:
        passwords = ["alice123", "alice1234"] * 75
        statuses = pool.map(lambda password: page.ask("/metrics", Authorization=basic("alice", password))[0], passwords)
        assert list(statuses) == [200, 401] * 75


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hashes that passwords were compared with, in their order."""
    found: list[str] = []
    compare = users_module._matches

    def record(password: str, expected: str) -> bool:
        found.append(expected)
        return compare(password, expected)

    monkeypatch.setattr(users_module, "_matches", record)
    return found


def test_a_right_password_costs_one_hash_and_a_wrong_or_unknown_user_always_one(
    tmp_path: Path, hashes: list[str]
) -> None:
    with serve(write(tmp_path, None, rest=users(ada="secret"))) as page:
        for _ in range(20):
            assert page.ask("/metrics", Authorization=basic("ada", "secret"))[0] == 200
        assert len(hashes) == 1
        for user in ("ada", "nobody"):
            for _ in range(3):
                assert page.ask("/metrics", Authorization=basic(user, "wrong"))[0] == 401
        assert len(hashes) == 7
        assert len(set(hashes)) == 1


def test_other_requests_are_answered_while_a_password_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()

    def wait(*_: str) -> bool:
        begun.set()
        return go.wait(30)

    monkeypatch.setattr(users_module, "_matches", wait)
    with serve(write(tmp_path, None, rest=users(ada="secret"))) as page, ThreadPoolExecutor(1) as pool:
        login = pool.submit(page.ask, "/metrics", Authorization=basic("ada", "secret"))
        assert begun.wait(30)
        assert page.ask("/metrics", Authorization=f"Bearer {TOKEN}")[0] == 200
        go.set()
        assert login.result()[0] == 200


# -- changes of the files ------------------------------------------------------------------------


def reload(page: Page) -> None:
    assert page.web_file is not None
    page.web_file.reload()


def test_new_users_and_removed_ones_count_from_the_next_request(tmp_path: Path) -> None:
    with serve(write(tmp_path, None, rest=users(ada="secret"))) as page:
        assert page.answers(Authorization=basic("ada", "secret")) == KNOWN
        write(tmp_path, None, rest=users(ada="changed", bob="new"))
        reload(page)
        assert page.answers(Authorization=basic("ada", "secret")) == CLOSED
        assert page.answers(Authorization=basic("bob", "new")) == KNOWN


def test_a_new_certificate_is_used_for_new_connections(tmp_path: Path, certificates: Certificates) -> None:
    path, pair = write(tmp_path, None), Pair(tmp_path / "server.pem", tmp_path / "server.key")
    path.write_text("tls_server_config: {cert_file: server.pem, key_file: server.key}")
    first = Authority(tmp_path)
    first.issue("server", "IP:127.0.0.1")
    with serve(path, first) as page:
        connection = page.connect()
        connection.request("GET", "/")
        assert connection.getresponse().read()
        for own, new in zip(pair, certificates.server, strict=True):
            own.write_bytes(new.read_bytes())
        reload(page)
        connection.request("GET", "/")  # the connection goes on
        assert connection.getresponse().read()
        connection.close()
        with pytest.raises(REFUSED):
            page.ask("/")
        page._authority = certificates.authority
        assert page.ask("/")[0] == 200


def test_a_new_policy_for_clients_counts_for_new_connections(tmp_path: Path, certificates: Certificates) -> None:
    with serve(with_clients(tmp_path, certificates, "RequireAndVerifyClientCert"), certificates.authority) as page:
        with pytest.raises(REFUSED):
            page.ask("/")
        with_clients(tmp_path, certificates, "VerifyClientCertIfGiven")
        reload(page)
        assert page.answers() == CLOSED


@pytest.mark.parametrize("problem", ["tls_server_config: {min_version: TLS9}", "", "basic_auth_users: {ada: plain}"])
def test_an_invalid_change_is_logged_once_and_changes_nothing(
    tmp_path: Path, certificates: Certificates, caplog: pytest.LogCaptureFixture, problem: str
) -> None:
    path = with_clients(tmp_path, certificates, "RequireAndVerifyClientCert")
    text = path.read_text()
    with serve(path, certificates.authority) as page, caplog.at_level(logging.INFO, "gpujob.web"):
        path.write_text(problem)
        for _ in range(3):
            reload(page)
        assert page.answers(certificates.client) == KNOWN
        (message,) = caplog.messages
        assert message.startswith(f"the web configuration has changed and stays as it was: {path}: ")
        caplog.clear()
        path.write_text(text)
        for _ in range(3):
            reload(page)
        assert caplog.messages == ["the web configuration was read again"]


def test_a_key_that_comes_after_its_certificate_is_waited_for(tmp_path: Path, certificates: Certificates) -> None:
    path, pair = tmp_path / "web.yml", Pair(tmp_path / "server.pem", tmp_path / "server.key")
    path.write_text("tls_server_config: {cert_file: server.pem, key_file: server.key}")
    first = Authority(tmp_path)
    first.issue("server", "IP:127.0.0.1")
    with serve(path, first) as page:
        pair.certificate.write_bytes(certificates.server.certificate.read_bytes())
        reload(page)
        assert page.ask("/")[0] == 200
        pair.key.write_bytes(certificates.server.key.read_bytes())
        reload(page)
        page._authority = certificates.authority
        assert page.ask("/")[0] == 200


def test_the_files_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("exporter.web.config_file.RELOAD_S", 0.01)
    path = write(tmp_path, None, rest=users(ada="secret"))
    web_file = WebConfigFile(str(path))
    web_file.watch()
    write(tmp_path, None, rest=users(bob="secret"))
    end = time.monotonic() + 30
    while "bob" not in web_file.latest.config.users:
        assert time.monotonic() < end
        time.sleep(0.01)
    monkeypatch.setattr("exporter.web.config_file.RELOAD_S", 1e6)  # its thread outlives the test and should sleep
