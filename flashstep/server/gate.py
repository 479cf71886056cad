"""What every HTTP request passes first: it gets an id, is counted while it runs, and leaves one log line at its end.

ASGI middleware around the whole application. The id is the client's ``X-Request-Id``, or else the ``request_id`` of its
body, which the handler finds, or else is made here; it comes back in the header of that name, ends the id in the answer, and
stands in the log. What users wrote is never logged.
Knows nothing of what is asked.
"""

import re
import time
import uuid
from collections.abc import Awaitable, Sequence
from contextlib import nullcontext

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flashstep.server.choices import Choice
from flashstep.server.errors import HUNG_UP, ApiError
from flashstep.server.frontend import Frontend
from flashstep.server.keys import OPEN_PATHS
from flashstep.telemetry.log import Log

ID_HEADER = "x-request-id"
MAX_ID_CHARS = 128
ID_PATTERN = rf"[!-~]{{1,{MAX_ID_CHARS}}}"  # it stands in a header and in the log
ID_RULE = f"must have 1..{MAX_ID_CHARS} visible ASCII characters"
MAX_LOGGED_CHARS = 200  # of a path

_log = Log("request")


class Visit(msgspec.Struct):
    """What is known of one HTTP request, as ``request.state.visit``; handlers ``follow`` the choices that answer it."""

    id: str
    status: int = HUNG_UP
    choices: Sequence[Choice] = ()
    n: int = 1  # so many choices in turn answer one prompt
    param: str | None = None  # the field that was refused

    def follow(self, choices: Sequence[Choice], *, n: int = 1) -> None:
        """These answer it."""
        self.choices, self.n = choices, n


class Gate:
    """See the module."""

    def __init__(self, app: ASGIApp, front: Frontend) -> None:
        self._app = app
        self._front = front
        options = front.options
        self._logs = not options.disable_uvicorn_access_log
        quiet = options.disable_access_log_for_endpoints.split(",")
        self._quiet = frozenset(path.strip() for path in quiet)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_s = time.monotonic()
        given = Headers(scope=scope).get(ID_HEADER)
        visit = Visit(id=given or uuid.uuid4().hex)
        scope["state"]["visit"] = visit

        def told(message: Message) -> Awaitable[None]:  # no coroutine of its own: every chunk passes here
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                message["headers"] = [*message["headers"], (ID_HEADER.encode(), visit.id.encode())]
            return send(message)

        try:
            with nullcontext() if scope["path"] in OPEN_PATHS else self._front.in_flight():
                if given is not None and not is_id(given):
                    visit.id = uuid.uuid4().hex
                    error = ApiError(f"{ID_HEADER} {ID_RULE}")
                    await error.response(scope["path"])(scope, receive, told)
                else:
                    await self._app(scope, receive, told)
        except BaseException:
            visit.status = 500
            raise
        finally:
            if self._logs and scope["path"] not in self._quiet:
                _write(scope, visit, time.monotonic() - began_s)


def is_id(given: str) -> bool:
    """A client may name its request so, in the header or in the body's ``request_id``."""
    return re.fullmatch(ID_PATTERN, given) is not None


def _write(scope: Scope, visit: Visit, seconds: float) -> None:
    choices = visit.choices
    counts: dict[str, int | str] = {} if visit.param is None else {"param": visit.param}
    if choices:
        reasons = dict.fromkeys(choice.finish_reason or "abort" for choice in choices)
        counts = {
            "choices": len(choices),
            "prompt_tokens": sum(choice.prompt_tokens for choice in choices[:: visit.n]),
            "cached_tokens": sum(choice.cached_tokens for choice in choices[:: visit.n]),
            "completion_tokens": sum(choice.completion_tokens for choice in choices),
            "finish": ",".join(reasons),
        }
    _log.info(
        "answered",
        id=visit.id,
        client=scope["client"][0] if scope["client"] else "",
        method=scope["method"],
        path=scope["path"][:MAX_LOGGED_CHARS],
        status=visit.status,
        seconds=seconds,
        **counts,
    )
