"""Errors as OpenAI clients read them: ``{"error": {message, type, param, code}}`` with the HTTP status as code.

Whatever a user can cause is an ``ApiError`` with a 4xx status and the field's name in ``param``. Knows nothing of requests.
"""

import msgspec
from starlette.responses import Response

TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
SENTENCES = {404: "there is no such path", 405: "this path does not take that method"}


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status

    def body(self) -> bytes:
        error = {
            "message": self.message,
            "type": TYPES.get(self.status, "BadRequestError"),
            "param": self.param,
            "code": self.status,
        }
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        return Response(self.body(), status_code=self.status, media_type="application/json")


def engine_gone(reason: str) -> ApiError:
    return ApiError(f"the engine is not running: {reason}", status=503)
