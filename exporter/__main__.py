"""Entry point of ``python -m exporter``."""

import os
import sys
from importlib.util import find_spec

REST_ADDRESS = "GPUJOB_SLURMRESTD"  # variable that names a service of which a hub is a client
WEB_CONFIG_FLAG = "--web.config.file"
HASH_MODULES = ("_md5", "_sha1", "_sha3", "_blake2")
SHA2_MODULES = (("_sha2",), ("_sha256", "_sha512"))  # modules of an interpreter's own SHA-2, by version


def needs_openssl() -> bool:
    """Whether this process has a page with TLS, or is a client of one."""
    serves_tls = any(word.startswith(WEB_CONFIG_FLAG) for word in sys.argv)
    return serves_tls or os.environ.get(REST_ADDRESS, "").startswith("https:")


def block_openssl() -> None:
    """Block the import of OpenSSL, which few processes need.

    OpenSSL would take 8 of a sidecar's 54 MiB, or half of that if the interpreter has no other hash functions.
    """
    sys.modules.setdefault("ssl", None)  # type: ignore[arg-type]
    if all(map(find_spec, HASH_MODULES)) and any(all(map(find_spec, names)) for names in SHA2_MODULES):
        sys.modules.setdefault("_hashlib", None)  # type: ignore[arg-type]


if __name__ == "__main__":
    if not needs_openssl():
        block_openssl()
    from exporter.cli import main

    main()
