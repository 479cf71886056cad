"""Whether the server takes more requests: ``--max-num-queued-reqs`` and ``--max-num-queued-tokens`` (spec/serving.md A2).

What is refused here has touched nothing: no engine has heard of it, and the client is told when to come again.
"""

from collections.abc import Sequence

from flashstep.request import Request
from flashstep.server.errors import ApiError
from flashstep.server.frontend import Frontend

RETRY_AFTER_S = 1


def check_room(front: Frontend, requests: Sequence[Request]) -> None:
    """Raise a 503 if ``requests`` would be too many. Nothing may be awaited between this and their submission.

    Requests: those unfinished and the new ones are at most the limit. Tokens: the limit is reached by whole prompts that still
    have no first token; what a prompt has computed or found in the cache is not subtracted, and the new ones are not counted.
    """
    client, options = front.client, front.options
    most = options.max_num_queued_reqs
    if most is not None:
        if len(requests) > most:
            raise ApiError(
                f"this asks for {len(requests)} answers; the server takes {most} at a time", param="n"
            )
        if client.num_unfinished + len(requests) > most:
            raise _full(front, "max_num_queued_reqs", f"{client.num_unfinished} requests wait or run")
    tokens = options.max_num_queued_tokens
    if tokens is not None and client.num_queued_tokens >= tokens:
        raise _full(front, "max_num_queued_tokens", f"{client.num_queued_tokens} tokens of prompts wait")


def _full(front: Frontend, reason: str, what: str) -> ApiError:
    front.metrics.rejected(reason)
    limit = getattr(front.options, reason)
    return ApiError(
        f"the server is full: {what}, of {limit} allowed; try again later",
        status=503,
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )
