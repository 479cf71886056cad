"""What every HTTP request passes first: it gets an id, is counted while it runs, and leaves one log line at its end.

ASGI middleware around the whole application. The id is the client's ``X-Request-Id``, or is made here; it comes back in the
header of that name, ends the id in the answer, and stands in the log. What users wrote is never logged.
Knows nothing of what is asked.
"""

import time
import uuid
from collections.abc import Awaitable, Sequence

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flashstep.server.choices import Choice
from flashstep.server.errors import ApiError, shape_of
from flashstep.server.frontend import Frontend
from flashstep.server.keys import OPEN_PATHS
from flashstep.telemetry.log import Log

ID_HEADER = "x-request-id"
MAX_ID_CHARS = 128
MAX_LOGGED_CHARS = 200  # of a path
HUNG_UP = 499  # the status in the log where nobody waited for one

_log = Log("request")


class Visit(msgspec.Struct):
    """What is known of one HTTP request, as ``request.state.visit``; handlers add the choices that they follow."""

    id: str
    status: int = HUNG_UP
    choices: Sequence[Choice] = ()
    n: int = 1  # so many choices in turn answer one prompt


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

        counted = scope["path"] not in OPEN_PATHS
        self._front.num_in_flight += counted
        try:
            if given is not None and not _is_id(given):
                visit.id = uuid.uuid4().hex
                error = ApiError(f"{ID_HEADER} must have 1..{MAX_ID_CHARS} visible ASCII characters")
                await error.response(shape_of(scope["path"]))(scope, receive, told)
            else:
                await self._app(scope, receive, told)
        except BaseException:
            visit.status = 500
            raise
        finally:
            self._front.num_in_flight -= counted
            if self._logs and scope["path"] not in self._quiet:
                _write(scope, visit, time.monotonic() - began_s)


def _is_id(given: str) -> bool:
    return 0 < len(given) <= MAX_ID_CHARS and given.isascii() and given.isprintable() and " " not in given


def _write(scope: Scope, visit: Visit, seconds: float) -> None:
    choices = visit.choices
    counts: dict[str, int | str] = {}
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
