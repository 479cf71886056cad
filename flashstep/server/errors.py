"""Errors in the words of the API that was called, with the HTTP status of what went wrong.

OpenAI's paths: ``{"error": {message, type, param, code}}``, the status as code. Anthropic's: ``{"type": "error", "error": {type,
message}}``. Whatever a user can cause is an ``ApiError`` with a 4xx status and the field's name in ``param``. However much is
wrong with a body, and however long what it holds, the error stays short. Knows nothing of requests.
"""

import re
from collections.abc import Iterable, Mapping
from itertools import islice
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
from starlette.responses import Response

Shape = Literal["openai", "anthropic"]

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    414: "UriTooLongError",
    415: "UnsupportedMediaTypeError",
    431: "HeadersTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
MAX_TOLD = 20  # problems that one error tells
MAX_MESSAGE_CHARS = 2000
MAX_QUOTED_CHARS = 100
HUNG_UP = 499  # the status in the log where nobody waited for one
SENTENCES = {404: "there is no such path", 405: "this path does not take that method"}


class ApiError(Exception):
    """An answer that is an error. ``headers`` are those that its status asks for (Allow, Retry-After).

    ``details`` are told in Anthropic's words alone: by them its SDK knows what it can do without. ``param_is_theirs``: the client
    made it up, so that no log may hold it.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
        param_is_theirs: bool = False,
    ) -> None:
        self.message = excerpt(message, MAX_MESSAGE_CHARS)
        super().__init__(self.message)
        self.param = None if param is None else excerpt(param, MAX_QUOTED_CHARS)
        self.status = status
        self.headers = headers
        self.details = details
        self.param_is_theirs = param_is_theirs

    def body(self, shape: Shape = "openai") -> bytes:
        if shape == "anthropic":
            kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
            told: dict[str, Any] = {"type": kind, "message": self.message}
            if self.details is not None:
                told["details"] = self.details
            return msgspec.json.encode({"type": "error", "error": told})
        error = {
            "message": self.message,
            "type": TYPES.get(self.status, "BadRequestError"),
            "param": self.param,
            "code": self.status,
        }
        return msgspec.json.encode({"error": error})

    def response(self, path: str) -> Response:
        """To a request of ``path``, in the words of its API."""
        body = self.body(shape_of(path))
        return Response(body, self.status, self.headers, media_type="application/json")


def excerpt(text: str, chars: int) -> str:
    """``text``, or its two ends where it is longer than ``chars``."""
    if len(text) <= chars:
        return text
    half = (chars - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def quoted(value: Any) -> str:
    """A decoded JSON value that a user sent, as an error tells it: an excerpt of a long one; of a list or object the kind."""
    if isinstance(value, str):
        return repr(excerpt(value, MAX_QUOTED_CHARS))
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return excerpt(repr(value), MAX_QUOTED_CHARS)


def refuse(problems: Iterable[ApiError]) -> None:
    """Raise the first ``MAX_TOLD`` of ``problems`` as one error, with the field of the first; no others are looked for."""
    found = list(islice(problems, MAX_TOLD + 1))
    if found:
        told = [problem.message for problem in found[:MAX_TOLD]]
        raise ApiError(
            "; ".join([*told, "and more"] if len(found) > MAX_TOLD else told),
            param=found[0].param,
            details=next((problem.details for problem in found if problem.details), None),
            param_is_theirs=found[0].param_is_theirs,
        )


def mistyped(error: msgspec.ValidationError, kind: Any, *, name: str) -> str:
    """What is wrong with the value of ``name``, which should be a ``kind``: where, and what is allowed there."""
    sentence, _, path = str(error).partition(" - at `$")
    path = path.rstrip("`")
    found = _kinds_at(kind, [step for step in re.split(r"[.\[\]]+", path) if step])
    if sentence.startswith("Invalid enum value"):
        values = [value for one in found if get_origin(one) is Literal for value in get_args(one)]
        sentence += f"; it must be {', '.join(msgspec.json.encode(value).decode() for value in values)}"
    elif stranger := re.fullmatch("Object contains unknown field `(.*)`", sentence, re.DOTALL):
        structs = [one for one in found if isinstance(one, type) and issubclass(one, msgspec.Struct)]
        names = ", ".join(field for one in structs for field in one.__struct_fields__)
        why = {field: why for one in structs for field, why in getattr(one, "refused", {}).items()}
        sentence += f"; {why.get(stranger[1], f'its fields are {names}')}"
    return f"{name}{path}: {sentence}"


def _kinds_at(kind: Any, steps: list[str]) -> list[Any]:
    """The types that the value may have to which ``steps`` lead."""
    if get_origin(kind) in (Union, UnionType):
        return [found for one in get_args(kind) for found in _kinds_at(one, steps)]
    if not steps:
        return [kind]
    if get_origin(kind) is list:
        return _kinds_at(get_args(kind)[0], steps[1:])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
        return _kinds_at(fields[steps[0]], steps[1:]) if steps[0] in fields else []
    return []


def shape_of(path: str) -> Shape:
    """How errors are spelled under ``path``."""
    return "anthropic" if path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/") else "openai"


def engine_gone(reason: str) -> ApiError:
    return ApiError(f"the engine is not running: {reason}", status=503)
