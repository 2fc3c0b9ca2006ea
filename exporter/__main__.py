"""Entry point of ``python -m exporter``."""

import sys
from importlib.util import find_spec

WEB_CONFIG_FLAG = "--web.config.file"
HASH_MODULES = ("_md5", "_sha1", "_sha3", "_blake2")
SHA2_MODULES = (("_sha2",), ("_sha256", "_sha512"))  # modules of an interpreter's own SHA-2, by version


def block_openssl() -> None:
    """Block the import of OpenSSL, which only a page with TLS needs.

    OpenSSL would take 8 of a sidecar's 54 MiB, or half of that if the interpreter has no other hash functions.
    """
    sys.modules.setdefault("ssl", None)  # type: ignore[arg-type]
    if all(map(find_spec, HASH_MODULES)) and any(all(map(find_spec, names)) for names in SHA2_MODULES):
        sys.modules.setdefault("_hashlib", None)  # type: ignore[arg-type]


if __name__ == "__main__":
    if not any(word.startswith(WEB_CONFIG_FLAG) for word in sys.argv):
        block_openssl()
    from exporter.cli import main

    main()
