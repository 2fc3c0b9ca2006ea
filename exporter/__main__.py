"""Run as ``python -m exporter``."""

import sys
from importlib.util import find_spec

OWN_HASHES = ("_md5", "_sha1", "_sha3", "_blake2")
SHA2 = (("_sha2",), ("_sha256", "_sha512"))  # where an interpreter has its own SHA-2, by version


def leave_out_openssl() -> None:
    """Do without OpenSSL, as an interpreter that was built without it: this program serves plain HTTP.

    Of a sidecar it would be 8 MiB out of 54. Some distributions have no other hash functions: there half of it stays.
    """
    sys.modules.setdefault("ssl", None)  # type: ignore[arg-type]
    if all(map(find_spec, OWN_HASHES)) and any(all(map(find_spec, names)) for names in SHA2):
        sys.modules.setdefault("_hashlib", None)  # type: ignore[arg-type]


if __name__ == "__main__":
    leave_out_openssl()
    from exporter.cli import main

    main()
