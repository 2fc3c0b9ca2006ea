"""The web configuration file of a running page, and its changes."""

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from exporter.contract.errors import ExporterError
from exporter.web.config import WebConfig, parse_web_config

if TYPE_CHECKING:
    import ssl

RELOAD_S = 5.0  # between two looks at the files

log = logging.getLogger("gpujob.web")


class LoadedConfig(NamedTuple):
    """A configuration whose files were read without a problem."""

    config: WebConfig
    context: "ssl.SSLContext | None"  # None without TLS
    certificate: str | None  # fingerprint of the server's certificate; None without TLS
    stamps: tuple[object, ...]  # of its files when they were read


def load_web_config(path: str) -> LoadedConfig:
    """Read the file and those that it names. Raises ExporterError with every problem."""
    from exporter.contract.bounded_yaml import MOST_BYTES  # lazy: it loads YAML, and most pages have no such file

    own = _stamp(path)
    try:
        with open(path, encoding="utf-8") as source:
            text = source.read(MOST_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ExporterError(f"{path}: the web configuration cannot be read: {why}") from error
    if len(text) > MOST_BYTES:
        raise ExporterError(f"{path}: has more than {MOST_BYTES:,} characters, the limit; is it the right file?")
    config = parse_web_config(text, path)
    if config.users:
        import bcrypt  # noqa: F401 - lazy: only pages with users need it, and must have it before they listen
    if config.tls is None:
        return LoadedConfig(config, None, None, (own,))
    from exporter.web.tls import fingerprint, make_context  # lazy: OpenSSL takes 8 MiB

    stamps = (own, *map(_stamp, config.tls.files.values()))
    return LoadedConfig(config, make_context(config.tls, path), fingerprint(config.tls.cert_file), stamps)


def _stamp(path: str) -> tuple[str, int, int, int] | None:
    """What changes when a file is replaced or rewritten; None without the file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return path, found.st_mtime_ns, found.st_size, found.st_ino


class WebConfigFile:
    """A web configuration that follows its files: new connections use the latest valid one."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.latest = load_web_config(path)
        self._problem = ""

    def server_context(self) -> "ssl.SSLContext | None":
        """A context for a server, whose new connections use the latest files; None without TLS."""
        if self.latest.context is None:
            return None
        from exporter.web.tls import FollowingContext  # lazy: OpenSSL takes 8 MiB

        return FollowingContext.of(lambda: self.latest.context)  # type: ignore[arg-type, return-value]  # TLS stays

    def watch(self) -> None:
        """Follow the files from now on, on a thread of its own: their file system may hang."""
        threading.Thread(target=self._follow, name="web_config", daemon=True).start()

    def _follow(self) -> None:
        while True:
            time.sleep(RELOAD_S)
            self.reload()

    def reload(self) -> None:
        """Read the files again if they have changed; an invalid change is logged once and has no effect."""
        tls, stamps = self.latest.config.tls, self.latest.stamps
        if not self._problem and stamps == tuple(map(_stamp, (self.path, *(tls.files.values() if tls else ())))):
            return
        try:
            loaded = load_web_config(self.path)
            if (loaded.context is None) is not (self.latest.context is None):
                raise ExporterError(f"{self.path}: TLS can be added or removed only by a restart")
        except ExporterError as error:
            if str(error) != self._problem:
                log.error("the web configuration has changed and stays as it was: %s", error)
            self._problem = str(error)
            return
        self.latest, self._problem = loaded, ""
        log.info("the web configuration was read again")
