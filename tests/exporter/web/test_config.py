"""The web configuration file: what is valid, and what is said about everything else."""

import subprocess
import time
from pathlib import Path

import pytest

from exporter.contract.errors import ExporterError
from exporter.web.config import CIPHERS, CLIENT_AUTH_TYPES, WebConfig, parse_web_config
from exporter.web.config_file import load_web_config
from tests.support.certificates import Authority, Pair

PLACE = "/etc/web/web.yml"
PAIR = "cert_file: c.pem, key_file: k.pem"
HASH = "$2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG"


def tls(keys: str) -> str:
    """A file with the pair of the server and these keys."""
    return f"tls_server_config: {{{PAIR}, {keys}}}"


def problems_of(text: str) -> list[str]:
    """Problems of a file, without their common place."""
    with pytest.raises(ExporterError) as info:
        parse_web_config(text, PLACE)
    first, *problems = str(info.value).split("\n  ")
    assert first.startswith(f"{PLACE}: ")
    return problems or [first.removeprefix(f"{PLACE}: ")]


@pytest.mark.parametrize(
    "text",
    [
        *("", "# a comment", "basic_auth_users:", "tls_server_config:", "tls_server_config: {}"),
        "http_server_config: {http2: true}",
    ],
)
def test_a_file_may_ask_for_nothing(text: str) -> None:
    assert parse_web_config(text, PLACE) == WebConfig()


def test_paths_are_relative_to_the_file() -> None:
    text = "tls_server_config: {cert_file: c.pem, key_file: /keys/k.pem, client_ca_file: ../ca.pem, client_auth_type: "
    config = parse_web_config(f"{text}RequireAndVerifyClientCert}}", PLACE).tls
    assert config is not None
    assert config.files == {
        "cert_file": "/etc/web/c.pem",
        "key_file": "/keys/k.pem",
        "client_ca_file": "/etc/web/../ca.pem",
    }


@pytest.mark.parametrize("kind", CLIENT_AUTH_TYPES)
def test_each_client_auth_type_is_known(kind: str) -> None:
    verifies = kind in ("VerifyClientCertIfGiven", "RequireAnyClientCert", "RequireAndVerifyClientCert")
    config = parse_web_config(tls(f"client_auth_type: {kind}{', client_ca_file: ca.pem' if verifies else ''}"), PLACE)
    assert config.tls is not None
    assert config.tls.client_auth_type == kind
    assert config.has_credentials is verifies


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("just text", "is not a mapping; write for example `tls_server_config:` with its keys below"),
        ("- a list", "is not a mapping; write for example `tls_server_config:` with its keys below"),
        ("a: [", "line 1, column 5: not YAML: expected the node content"),
        ("a: " + "[" * 100, "line 1, column 67: lists and mappings are nested more than 64 levels deep"),
        (
            "basic_auth_users: {a: x}\nbasic_auth_users: {}",
            "line 1, column 1: not YAML: basic_auth_users appears twice",
        ),
        ("tls_config: {}", 'tls_config: unknown key; did you mean "tls_server_config"?'),
        (
            "rubbish: 1",
            "rubbish: unknown key; use one of tls_server_config, http_server_config, basic_auth_users",
        ),
        ('a: "\\UFFFFFFFF"', "not YAML: OverflowError: Python int too large to convert to C int"),
        (f"a: {'1:' * 300}1.5", "not YAML: OverflowError: int too large to convert to float"),
        ("tls_server_config: [1]", "tls_server_config: [1] is not a mapping"),
        (tls("min_versions: TLS12"), 'tls_server_config.min_versions: unknown key; did you mean "min_version"?'),
        (
            "tls_server_config: {key_file: k.pem}",
            "tls_server_config.cert_file: is missing; name the PEM file of the certificate",
        ),
        (
            "tls_server_config: {cert_file: c.pem, key_file: ''}",
            "tls_server_config.key_file: is missing; name the PEM file of the key",
        ),
        (
            tls("cert: PEM"),
            "tls_server_config.cert: is not supported; put the certificate into a file and name it in cert_file",
        ),
        (
            tls("curve_preferences: [X25519]"),
            "tls_server_config.curve_preferences: is not supported; remove it; OpenSSL's own order is used",
        ),
        (
            "rate_limit: {burst: 1}",
            "rate_limit: is not supported; remove it; every page has fixed limits",
        ),
        (
            tls("client_auth_type: Require"),
            f"tls_server_config.client_auth_type: unknown value 'Require'; use one of {', '.join(CLIENT_AUTH_TYPES)}",
        ),
        (
            tls("client_ca_file: ca.pem"),
            (
                "tls_server_config.client_ca_file: has no effect with client_auth_type NoClientCert; "
                "use RequireAndVerifyClientCert"
            ),
        ),
        (
            tls("client_auth_type: RequireAndVerifyClientCert"),
            (
                "tls_server_config.client_auth_type: RequireAndVerifyClientCert needs client_ca_file, "
                "the CA of the clients' certificates"
            ),
        ),
        (
            tls("client_auth_type: VerifyClientCertIfGiven, client_ca_file: ca.pem, client_allowed_sans: [a]"),
            (
                "tls_server_config.client_allowed_sans: has no effect with client_auth_type VerifyClientCertIfGiven; "
                "use RequireAndVerifyClientCert"
            ),
        ),
        (tls("client_allowed_sans: a"), "tls_server_config.client_allowed_sans: 'a' is not a list of texts"),
        (
            tls("min_version: TLS1.2"),
            "tls_server_config.min_version: unknown value 'TLS1.2'; use one of TLS10, TLS11, TLS12, TLS13",
        ),
        (
            tls("min_version: TLS13, max_version: TLS12"),
            "tls_server_config.min_version: TLS13 is above max_version TLS12; exchange them",
        ),
        (
            tls("cipher_suites: [TLS_RSA_WITH_ROT13]"),
            (
                "tls_server_config.cipher_suites: unknown cipher 'TLS_RSA_WITH_ROT13'; "
                f"use names of Go, such as {next(iter(CIPHERS))}"
            ),
        ),
        ("http_server_config: {http2: 'no'}", "http_server_config.http2: 'no' is not true or false"),
        (
            "http_server_config: {headers: {Server: gpujob}}",
            (
                "http_server_config.headers.Server: cannot be set; use one of Content-Security-Policy, "
                "Strict-Transport-Security, X-Content-Type-Options, X-Frame-Options, X-XSS-Protection"
            ),
        ),
        (
            "http_server_config: {headers: {X-Content-Type-Options: sniff}}",
            "http_server_config.headers.X-Content-Type-Options: 'sniff' is not nosniff",
        ),
        (
            "http_server_config: {headers: {X-Frame-Options: allow}}",
            "http_server_config.headers.X-Frame-Options: 'allow' is not deny or sameorigin",
        ),
        (
            'http_server_config: {headers: {X-XSS-Protection: "1\\r\\nSet-Cookie: a"}}',
            "http_server_config.headers.X-XSS-Protection: '1\\r\\nSet-Cookie: a' is not a text of one line, in quotes",
        ),
        (
            'tls_server_config: {cert_file: "a\\0", key_file: k.pem}',
            "tls_server_config.cert_file: 'a\\x00' is not a file name; remove what no name can have",
        ),
        (
            'tls_server_config: {cert_file: c.pem, key_file: "\\ud800"}',
            "tls_server_config.key_file: '\\ud800' is not a file name; remove what no name can have",
        ),
        ("basic_auth_users: {1: x}", "basic_auth_users: 1 is not a user name; use a text without a colon"),
    ],
)
def test_every_mistake_is_named_with_its_place_and_cure(text: str, problem: str) -> None:
    (found,) = problems_of(text)
    assert found.startswith(problem) if text.startswith(("a: [", "basic_auth_users: {a")) else found == problem


@pytest.mark.parametrize("value", ["hunter2", "$2y$10$short", HASH.replace("$2y", "$9y"), f"{HASH}x", ""])
def test_a_password_that_is_not_hashed_is_refused_and_not_shown(value: str) -> None:
    (found,) = problems_of(f"basic_auth_users: {{ada: '{value}'}}")
    assert found == "basic_auth_users.ada: is not a bcrypt hash; `htpasswd -nBC 10 ada` makes one"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("basic_auth_users: 'ada:hunter2'", "the value is not a mapping"),
        ("basic_auth_users: [ada, hunter2]", "the value is not a mapping"),
        ("basic_auth_users: {'ada:hunter2': x}", "'ada:...' is not a user name; use a text without a colon"),
    ],
)
def test_a_password_in_the_wrong_place_is_not_shown(text: str, shown: str) -> None:
    assert problems_of(text) == [f"basic_auth_users: {shown}"]


def test_all_problems_are_reported_at_once() -> None:
    text = "tls_server_config: {min_version: TLS9}\nbasic_auth_users: {ada: x}\nrate_limit: {}"
    assert [problem.partition(":")[0] for problem in problems_of(text)] == [
        *("rate_limit", "tls_server_config.cert_file", "tls_server_config.key_file", "tls_server_config.min_version"),
        "basic_auth_users.ada",
    ]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Authority(tmp_path_factory.mktemp("ca")).issue("server", "DNS:node01")


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ("cert_file: none.pem, key_file: {key}", "cert_file: {folder}/none.pem cannot be read: No such file"),
        ("cert_file: {cert}, key_file: none.pem", "key_file: {folder}/none.pem cannot be read: No such file"),
        (
            "cert_file: {cert}, key_file: {key}, client_auth_type: RequireAndVerifyClientCert, client_ca_file: ca.pem",
            "client_ca_file: {folder}/ca.pem cannot be read: No such file",
        ),
        (
            "cert_file: {cert}, key_file: {key}, client_auth_type: RequireAndVerifyClientCert, client_ca_file: empty",
            "client_ca_file: {folder}/empty cannot be used: NO_CERTIFICATE_OR_CRL_FOUND",
        ),
        ("cert_file: {key}, key_file: {cert}", "cert_file: {key} and {cert} cannot be used: "),
        (
            "cert_file: {cert}, key_file: other.key",
            "cert_file: {cert} and {folder}/other.key cannot be used: KEY_VALUES_",
        ),
        (
            "cert_file: {cert}, key_file: locked.key",
            "cert_file: {cert} and {folder}/locked.key cannot be used: the key",
        ),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, pair: Pair, keys: str, problem: str) -> None:
    (tmp_path / "empty").touch()
    Authority(tmp_path, "other")
    if "locked" in keys:
        argv = ["openssl", "pkcs8", "-topk8", "-in", str(pair.key), "-out", "locked.key", "-passout", "pass:x"]
        subprocess.run(argv, check=True, cwd=tmp_path, capture_output=True)
    values = {"cert": pair.certificate, "key": pair.key, "folder": tmp_path}
    path = tmp_path / "web.yml"
    path.write_text("tls_server_config: {" + keys.format(**values) + "}")
    with pytest.raises(ExporterError) as info:
        load_web_config(str(path))
    assert str(info.value).startswith(f"{path}: tls_server_config.{problem.format(**values)}")


def test_a_large_file_takes_little_time(tmp_path: Path) -> None:
    path = tmp_path / "web.yml"
    users = "".join(f"  u{number}: {HASH}\n" for number in range(14_000))
    path.write_text(f"basic_auth_users:\n{users}")
    begun = time.process_time()
    assert len(parse_web_config(path.read_text(), str(path)).users) == 14_000
    assert time.process_time() - begun < 10.0, "a comparison of all with all takes half a minute"
    path.write_text(f"basic_auth_users:\n{users}#{'x' * 100_000}")
    with pytest.raises(ExporterError, match=r"web\.yml: has more than 1,048,576 characters, the limit"):
        load_web_config(str(path))


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ExporterError, match=r"none\.yml: the web configuration cannot be read: No such file"):
        load_web_config(str(tmp_path / "none.yml"))
