"""Who may call: ASGI middleware that asks for one of the server's keys, as ``Authorization: Bearer`` or ``x-api-key``.

Everything is guarded but ``OPEN_PATHS``, so that a new endpoint is guarded until somebody decides otherwise. Keys are kept as
digests, compared in constant time, and never shown.
"""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from flashstep.server.errors import ApiError

# what probes, scrapers and browsers ask for before they could know a key; nothing that users wrote is told there
OPEN_PATHS = frozenset(
    {"/health", "/ping", "/version", "/load", "/metrics", "/openapi.json", "/status"}
    | {"/", "/page/page.css", "/page/page.js", "/page/icon.svg"}
)
BEARER = "bearer "


class Keys:
    """Lets a request through if it has a key, needs none, or is a question of what the path takes (OPTIONS)."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS" or self._known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            "the key is missing or wrong; send it as Authorization: Bearer KEY, or as x-api-key: KEY",
            status=401,
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response(scope["path"])(scope, receive, send)

    def _known(self, headers: Headers) -> bool:
        given = [headers.get("x-api-key", "")]
        authorization = headers.get("authorization", "")
        if authorization[: len(BEARER)].lower() == BEARER:
            given.append(authorization[len(BEARER) :].strip())
        pairs = [(_digest(one), known) for one in given for known in self._digests]
        # a list, not a generator: all pairs are compared, whichever matches
        return any([hmac.compare_digest(one, known) for one, known in pairs])  # noqa: C419


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
