"""Pages of other sites change nothing here: ASGI middleware that refuses what a browser sends for them, but GET.

CORS alone keeps such pages from reading answers, not from having them made: a form or a fetch without preflight is sent unasked.
Browsers say whose page it is (``Sec-Fetch-Site``, ``Origin``); a request without either is no browser's. Where nothing but the
address keeps others out (a loopback address, no keys) a page of our own must come from an IP address, localhost or an allowed
origin, too: any name may lead here (DNS rebinding).
"""

import ipaddress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from flashstep.config.server import ANY, ServerOptions
from flashstep.server.errors import ApiError

READING = frozenset({"GET", "HEAD", "OPTIONS"})
OWN = ("same-origin", "none")  # of Sec-Fetch-Site
LOCALHOST = "localhost"


class Sites:
    """See the module."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._allowed = frozenset(options.allowed_origins)
        self._guards_names = not options.keys() and is_local(options.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in READING or (why := self._refused(Headers(scope=scope))) is None:
            await self._app(scope, receive, send)
            return
        error = ApiError(f"{why}; --allowed-origins lets it", status=403)
        await error.response(scope["path"])(scope, receive, send)

    def _refused(self, headers: Headers) -> str | None:
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if (site is None and origin is None) or self._allowed & {origin, ANY}:
            return None
        host = headers.get("host", "")
        own = site in OWN if site is not None else origin is not None and origin.partition("://")[2] == host
        if not own:
            return f"the page of another site ({origin or site}) may not call this server"
        name = host_name(host)
        if self._guards_names and _address(name) is None and not is_local(name):
            return f"a page of {host} may not call this server, which is for this machine alone"
        return None


def host_name(host: str) -> str:
    """Without its port, and an IPv6 address without its brackets."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).strip("[]")


def is_local(name: str) -> bool:
    """Whether ``name`` can only be this machine."""
    address = _address(name)
    if address is not None:
        return address.is_loopback
    return name.lower() == LOCALHOST or name.lower().endswith(f".{LOCALHOST}")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
