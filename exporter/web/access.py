"""Who may see which part of a page. Requests with a foreign host or origin are refused."""

import base64
import binascii
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Container, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from exporter.web.aiohttp_server import web
from exporter.web.config import WebConfig
from exporter.web.users import PasswordChecks

if TYPE_CHECKING:
    from exporter.web.config_file import WebConfigFile

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Needs(IntEnum):
    """What a request needs to see a path."""

    NOTHING = 0
    WHAT_THE_SITE_ASKS = 1  # credentials if the web configuration names any
    CREDENTIALS = 2  # the token, a user's password or, where there are no users, a client certificate
    TOKEN = 3


class Client(NamedTuple):
    """Who sends a request, as far as is proven."""

    has_token: bool = False
    is_known: bool = False  # by the token, a password or a certificate


class Access:
    """Admission to one page."""

    def __init__(
        self,
        needs: Mapping[str, Needs],
        *,
        names: Container[str],
        token: str | None = None,
        web_file: "WebConfigFile | None" = None,
        other_paths: Needs = Needs.NOTHING,
        place: str = "the job's token as `Authorization: Bearer TOKEN`; it is in the file `token` of the run directory",
    ) -> None:
        """``needs`` are those of paths, and ``other_paths`` those of others. ``names`` are those of this machine.

        ``place`` says what a client needs, and where the token is.
        """
        self._needs, self._other_paths, self._place = needs, other_paths, place
        self._names = names
        self._token = token
        self._web_file = web_file
        self._passwords = PasswordChecks()

    @property
    def _config(self) -> WebConfig:
        return self._web_file.latest.config if self._web_file is not None else WebConfig()

    def protect(self, application: web.Application) -> None:
        """Let only those requests through to the application that may be answered."""
        application.middlewares.append(self._admit)
        application.on_response_prepare.append(self._add_headers)

    async def _add_headers(self, _: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(self._config.headers)

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get("Host", "")
        if host and not self._is_ours(host, request):
            return web.Response(
                status=421, text=f"421: this page is not that of {host!r}; ask for the node by its name\n"
            )
        origin = request.headers.get("Origin")
        if origin is not None and origin.lower() != f"{request.scheme}://{host}".lower():
            return web.Response(status=403, text="403: this page answers no other site's requests\n")
        config, needs = self._config, self._needs.get(request.path, self._other_paths)
        if needs is Needs.WHAT_THE_SITE_ASKS and config.has_credentials:
            needs = Needs.CREDENTIALS
        client = await self.identify(request) if needs else Client()
        if (needs is Needs.CREDENTIALS and not client.is_known) or (needs is Needs.TOKEN and not client.has_token):
            return self._refusal(config, needs)
        return await handler(request)

    def _is_ours(self, host: str, request: web.Request) -> bool:
        """Whether the host of a request is this one. With TLS, the client has compared name and certificate."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if request.secure or name.rstrip(".") in self._names:
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    async def identify(self, request: web.Request) -> Client:
        """What the credentials of a request prove."""
        scheme, _, value = request.headers.get("Authorization", "").partition(" ")
        given = value.strip().encode("utf-8", "surrogateescape")
        if scheme.lower() == "bearer" and self._token and hmac.compare_digest(given, self._token.encode("ascii")):
            return Client(has_token=True, is_known=True)
        if not self._config.users and request.transport is not None and request.transport.get_extra_info("peercert"):
            return Client(is_known=True)  # verified, or the connection would not exist
        if scheme.lower() != "basic":
            return Client()
        try:
            user, colon, password = (
                base64.b64decode(given, validate=True).decode("utf-8", "surrogateescape").partition(":")
            )
        except binascii.Error:
            return Client()
        return Client(is_known=bool(colon) and await self._passwords.is_right(self._config.users, user, password))

    def _refusal(self, config: WebConfig, needs: Needs) -> web.Response:
        how = self._place
        schemes = ['Bearer realm="gpujob"']
        if config.users and needs is not Needs.TOKEN:
            how += ", or a user and password"
            schemes.append('Basic realm="gpujob"')
        headers = {"WWW-Authenticate": ", ".join(schemes)}
        return web.Response(status=401, headers=headers, text=f"401: this needs {how}\n")
