"""Certificates for tests of TLS, made by the command `openssl`."""

import subprocess
from pathlib import Path
from typing import NamedTuple


class Pair(NamedTuple):
    """PEM files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self.own = self._make(name, "-addext", "basicConstraints=critical,CA:TRUE")

    def issue(self, name: str, names: str, usage: str = "serverAuth") -> Pair:
        """A certificate for these names, such as ``DNS:node01,IP:127.0.0.1``."""
        ca = ("-CA", str(self.own.certificate), "-CAkey", str(self.own.key))
        return self._make(name, *ca, "-addext", f"subjectAltName={names}", "-addext", f"extendedKeyUsage={usage}")

    def _make(self, name: str, *options: str) -> Pair:
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(pair.key))
        argv = ["openssl", "req", "-x509", *key, "-out", str(pair.certificate), "-subj", f"/CN={name}", "-days", "2"]
        subprocess.run([*argv, *options], check=True, capture_output=True, timeout=60)
        return pair
