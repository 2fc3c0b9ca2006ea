"""TLS of a page: contexts from a configuration, and one that follows its changes."""

import base64
import hashlib
import ipaddress
import re
import ssl
from collections.abc import Callable, Collection
from typing import Any, Self

from exporter.contract.errors import ExporterError
from exporter.web.config import CIPHERS, NO_CERTIFICATE, REQUIRED_CERTIFICATE, TlsConfig

_VERSIONS = {
    "TLS10": ssl.TLSVersion.TLSv1,
    "TLS11": ssl.TLSVersion.TLSv1_1,
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)


def make_context(tls: TlsConfig, path: str) -> ssl.SSLContext:
    """The context of a server. ``path`` is that of the configuration. Raises ExporterError."""
    for key, name in tls.files.items():
        try:
            open(name, "rb").close()
        except OSError as error:
            raise ExporterError(
                f"{path}: tls_server_config.{key}: {name} cannot be read: {error.strerror}; give a file that the users "
                "of this page's program can read"
            ) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.maximum_version = _VERSIONS[tls.min_version], _VERSIONS[tls.max_version]
    if not tls.prefer_server_cipher_suites:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    key = "cipher_suites"
    try:
        if ciphers := [CIPHERS[name] for name in tls.cipher_suites if CIPHERS[name]]:
            context.set_ciphers(":".join(ciphers))
        key = "cert_file"
        context.load_cert_chain(tls.cert_file, tls.key_file, password=_no_password)
        if tls.client_ca_file:
            key = "client_ca_file"
            context.load_verify_locations(tls.client_ca_file)
    except (ssl.SSLError, ValueError) as error:
        why = getattr(error, "reason", None) or str(error)
        files = " and ".join(
            dict.fromkeys((tls.files.get(key, "its list"), *([tls.key_file] if key == "cert_file" else [])))
        )
        raise ExporterError(f"{path}: tls_server_config.{key}: {files} cannot be used: {why}") from error
    if tls.client_auth_type not in NO_CERTIFICATE:
        is_required = tls.client_auth_type in REQUIRED_CERTIFICATE
        context.verify_mode = ssl.CERT_REQUIRED if is_required else ssl.CERT_OPTIONAL
    if tls.client_allowed_sans:
        context.sslobject_class = _checking_sans(frozenset(tls.client_allowed_sans))
    return context


def _no_password() -> str:
    raise ValueError("the key has a password; store it without one, readable only by those who need it")


def _checking_sans(allowed: Collection[str]) -> type[ssl.SSLObject]:
    """Connections that end unless an alternative name of the client's certificate is allowed."""

    class Connection(ssl.SSLObject):
        def do_handshake(self) -> None:
            super().do_handshake()
            if not alternative_names(self.getpeercert() or {}) & set(allowed):
                raise ssl.SSLCertVerificationError("no name of the client's certificate is in client_allowed_sans")

    return Connection


def alternative_names(certificate: Any) -> set[str]:
    """DNS names, addresses, e-mail addresses and URIs of a certificate as ``getpeercert`` returns it."""
    names = set()
    for kind, value in certificate.get("subjectAltName", ()):
        if kind in ("DNS", "email", "URI"):
            names.add(value)
        elif kind == "IP Address":
            names.add(str(ipaddress.ip_address(value.strip())))
    return names


def fingerprint(certificate_file: str) -> str:
    """SHA-256 of the server's own certificate, the first in the file, in hexadecimal digits."""
    with open(certificate_file, "rb") as source:
        found = _CERTIFICATE.search(source.read())
    return hashlib.sha256(base64.b64decode(found[1])).hexdigest() if found else ""


class FollowingContext(ssl.SSLContext):
    """A context whose connections each use the one that is the latest when they begin."""

    latest: Callable[[], ssl.SSLContext]

    @classmethod
    def of(cls, latest: Callable[[], ssl.SSLContext]) -> Self:
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context.latest = latest
        return context

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        return self.latest().wrap_bio(*arguments, **options)
