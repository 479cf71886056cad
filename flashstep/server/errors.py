"""Errors in the words of the API that was called, with the HTTP status of what went wrong.

OpenAI's paths: ``{"error": {message, type, param, code}}``, the status as code. Anthropic's: ``{"type": "error", "error": {type,
message}}``. Whatever a user can cause is an ``ApiError`` with a 4xx status and the field's name in ``param``. Knows nothing of
requests.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec
from starlette.responses import Response

Shape = Literal["openai", "anthropic"]

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
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
SENTENCES = {404: "there is no such path", 405: "this path does not take that method"}


class ApiError(Exception):
    """An answer that is an error. ``headers`` are those that its status asks for (Allow, Retry-After)."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.headers = headers

    def body(self, shape: Shape = "openai") -> bytes:
        if shape == "anthropic":
            kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
            return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": self.message}})
        error = {
            "message": self.message,
            "type": TYPES.get(self.status, "BadRequestError"),
            "param": self.param,
            "code": self.status,
        }
        return msgspec.json.encode({"error": error})

    def response(self, shape: Shape = "openai") -> Response:
        body = self.body(shape)
        return Response(body, self.status, self.headers, media_type="application/json")


def shape_of(path: str) -> Shape:
    """How errors are spelled under ``path``."""
    return "anthropic" if path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/") else "openai"


def engine_gone(reason: str) -> ApiError:
    return ApiError(f"the engine is not running: {reason}", status=503)
