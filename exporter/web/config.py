"""Read the web configuration file of Prometheus exporters: TLS, users and headers of a page.

The format is that of Prometheus' exporter-toolkit. Keys that Python's TLS cannot honour are refused, so that no page is
less protected than its file says.
"""

import difflib
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from exporter.contract.errors import ExporterError

VERSIONS = ("TLS10", "TLS11", "TLS12", "TLS13")
NO_CERTIFICATE = ("NoClientCert", "RequestClientCert")  # the second requests a certificate and ignores it
REQUIRED_CERTIFICATE = ("RequireAnyClientCert", "RequireAndVerifyClientCert")
CLIENT_AUTH_TYPES = (*NO_CERTIFICATE, "VerifyClientCertIfGiven", *REQUIRED_CERTIFICATE)
HEADERS = {  # headers that may be set, with their possible values
    "Content-Security-Policy": (),
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
}
_SUITES = {
    "AES_128_CBC_SHA": "AES128-SHA",
    "AES_256_CBC_SHA": "AES256-SHA",
    "AES_128_GCM_SHA256": "AES128-GCM-SHA256",
    "AES_256_GCM_SHA384": "AES256-GCM-SHA384",
    "CHACHA20_POLY1305_SHA256": "CHACHA20-POLY1305",
}
CIPHERS = {  # names of Go: names of OpenSSL; those of TLS 1.3 cannot be chosen, neither there nor here
    **{f"TLS_ECDHE_{key}_WITH_{go}": f"ECDHE-{key}-{own}" for key in ("RSA", "ECDSA") for go, own in _SUITES.items()},
    **{f"TLS_RSA_WITH_{go}": own for go, own in _SUITES.items() if go.startswith("AES")},
    **dict.fromkeys(("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"), ""),
}
_BCRYPT = re.compile(r"\$2[aby]\$(0[4-9]|[12]\d|3[01])\$[./A-Za-z0-9]{53}")
_WORDS = {str: "a text", bool: "true or false", list: "a list of texts", dict: "a mapping"}

_SECTIONS = {"tls_server_config": dict, "http_server_config": dict, "basic_auth_users": dict}
_TLS_KEYS = {
    **dict.fromkeys(("cert_file", "key_file", "client_auth_type", "client_ca_file", "min_version", "max_version"), str),
    **dict.fromkeys(("client_allowed_sans", "cipher_suites"), list),
    "prefer_server_cipher_suites": bool,
}
_HTTP_KEYS = {"http2": bool, "headers": dict}
_ELSEWHERE = {  # keys of exporter-toolkit that are refused: what to do instead
    "cert": "put the certificate into a file and name it in cert_file",
    "key": "put the key into a file and name it in key_file",
    "client_ca": "put the certificate into a file and name it in client_ca_file",
    "curve_preferences": "remove it; OpenSSL's own order is used",
    "rate_limit": "remove it; every page has fixed limits",
}


class TlsConfig(NamedTuple):
    """``tls_server_config``, with absolute paths."""

    cert_file: str
    key_file: str
    client_auth_type: str = "NoClientCert"
    client_ca_file: str | None = None
    client_allowed_sans: tuple[str, ...] = ()
    min_version: str = "TLS12"
    max_version: str = "TLS13"
    cipher_suites: tuple[str, ...] = ()
    prefer_server_cipher_suites: bool = True

    @property
    def files(self) -> dict[str, str]:
        """Paths by their keys."""
        named = {"cert_file": self.cert_file, "key_file": self.key_file, "client_ca_file": self.client_ca_file}
        return {key: path for key, path in named.items() if path}


class WebConfig(NamedTuple):
    """A valid web configuration."""

    tls: TlsConfig | None = None
    headers: Mapping[str, str] = {}
    users: Mapping[str, str] = {}  # bcrypt hashes by name

    @property
    def has_credentials(self) -> bool:
        """Whether it says who may read the page: users, or holders of a certificate."""
        return bool(self.users) or (self.tls is not None and self.tls.client_auth_type not in NO_CERTIFICATE)


def parse_web_config(text: str, path: str) -> WebConfig:
    """Parse the text of the file at ``path``. Raises ExporterError with every problem."""
    import yaml  # lazy: most pages have no such file, and YAML takes 20 ms and 2 MiB

    from exporter.contract.bounded_yaml import UniqueKeyLoader, yaml_problem  # lazy: likewise

    try:
        body = yaml.load(text, UniqueKeyLoader)  # noqa: S506 - a safe loader
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise ExporterError(f"{path}: {yaml_problem(error, text)}") from error
    if not isinstance(body, dict | None):
        raise ExporterError(f"{path}: is not a mapping; write for example `tls_server_config:` with its keys below")
    problems: list[str] = []
    sections = _known_values(body or {}, _SECTIONS, "", problems)
    http = _known_values(sections.get("http_server_config", {}), _HTTP_KEYS, "http_server_config.", problems)
    tls = _parse_tls(sections.get("tls_server_config", {}), os.path.dirname(os.path.abspath(path)), problems)
    headers, users = http.get("headers", {}), sections.get("basic_auth_users", {})
    for name, value in headers.items():
        if problem := _header_problem(name, value):
            problems.append(f"http_server_config.headers.{name}: {problem}")
    for name, value in users.items():  # without the value, which may be a password
        if not isinstance(name, str) or ":" in name:
            shown = f"{name.partition(':')[0]}:..." if isinstance(name, str) else name
            problems.append(f"basic_auth_users: {shown!r} is not a user name; use a text without a colon")
        elif not isinstance(value, str) or not _BCRYPT.fullmatch(value):
            problems.append(f"basic_auth_users.{name}: is not a bcrypt hash; `htpasswd -nBC 10 {name}` makes one")
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise ExporterError("\n  ".join([f"{path}: {count}", *problems]))
    return WebConfig(tls, headers, users)


def _known_values(body: Mapping[Any, Any], keys: Mapping[str, type], place: str, problems: list[str]) -> dict[str, Any]:
    """Values of known keys with the right type; null is as good as missing."""
    found = {}
    for key, value in body.items():
        if key not in keys:
            near = difflib.get_close_matches(str(key), keys, 1)
            cure = _ELSEWHERE.get(key) or (f'did you mean "{near[0]}"?' if near else f"use one of {', '.join(keys)}")
            problems.append(f"{place}{key}: {'is not supported' if key in _ELSEWHERE else 'unknown key'}; {cure}")
        elif value is not None and not isinstance(value, keys[key]):
            shown = "the value" if key == "basic_auth_users" else repr(value)  # which may have a password
            problems.append(f"{place}{key}: {shown} is not {_WORDS[keys[key]]}")
        elif value is not None:
            found[key] = value
    return found


def _is_path(text: str) -> bool:
    """Whether a file can have this name: NUL and half a character (a surrogate) are in none."""
    return not any(character == "\0" or "\ud800" <= character <= "\udfff" for character in text)


def _header_problem(name: object, value: object) -> str | None:
    if name not in HEADERS:
        return f"cannot be set; use one of {', '.join(HEADERS)}"
    allowed = HEADERS[str(name)]
    if not isinstance(value, str) or not value.isprintable() or (allowed and value not in allowed):
        return f"{value!r} is not {' or '.join(allowed) or 'a text of one line, in quotes'}"
    return None


def _parse_tls(body: Mapping[Any, Any], folder: str, problems: list[str]) -> TlsConfig | None:
    """``tls_server_config``; None without one, or with problems."""
    found: list[str] = []
    values = _known_values(body, _TLS_KEYS, "", found)
    for key in ("client_allowed_sans", "cipher_suites"):
        values[key] = tuple(values.get(key, ()))
        found += [f"{key}: {entry!r} is not a text" for entry in values[key] if not isinstance(entry, str)]
    for key in ("cert_file", "key_file", "client_ca_file"):
        if not _is_path(values.get(key, "")):
            found.append(f"{key}: {values[key]!r} is not a file name; remove what no name can have")
        elif values.get(key):
            values[key] = os.path.join(folder, values[key])
        elif key != "client_ca_file" and body:
            found.append(f"{key}: is missing; name the PEM file of the {'certificate' if 'cert' in key else 'key'}")
    known = {"client_auth_type": CLIENT_AUTH_TYPES, "min_version": VERSIONS, "max_version": VERSIONS}
    for key, choices in known.items():
        if values.get(key, choices[0]) not in choices:
            found.append(f"{key}: unknown value {values[key]!r}; use one of {', '.join(choices)}")
    found += [
        f"cipher_suites: unknown cipher {name!r}; use names of Go, such as {next(iter(CIPHERS))}"
        for name in values["cipher_suites"]
        if isinstance(name, str) and name not in CIPHERS
    ]
    if body and not found:
        tls = TlsConfig(**values)
        found += _contradictions(tls)
        if not found:
            return tls
    problems += [f"tls_server_config.{problem}" for problem in found]
    return None


def _contradictions(tls: TlsConfig) -> list[str]:
    """Problems between the keys of ``tls_server_config``."""
    found, kind = [], tls.client_auth_type
    if tls.client_ca_file and kind in NO_CERTIFICATE:
        found.append(f"client_ca_file: has no effect with client_auth_type {kind}; use RequireAndVerifyClientCert")
    if not tls.client_ca_file and kind not in NO_CERTIFICATE:
        found.append(f"client_auth_type: {kind} needs client_ca_file, the CA of the clients' certificates")
    if tls.client_allowed_sans and kind not in REQUIRED_CERTIFICATE:
        found.append(f"client_allowed_sans: has no effect with client_auth_type {kind}; use RequireAndVerifyClientCert")
    if VERSIONS.index(tls.min_version) > VERSIONS.index(tls.max_version):
        found.append(f"min_version: {tls.min_version} is above max_version {tls.max_version}; exchange them")
    return found
