"""The small endpoints: /health, /ping, /version, /load, /metrics, /v1/models, /tokenize, /detokenize."""

from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

import flashstep
from flashstep.server import intake
from flashstep.server.answering import json_response, received, worked
from flashstep.server.errors import ApiError
from flashstep.server.frontend import Frontend
from flashstep.server.openai import DetokenizeBody, TokenizeBody

OF_TEXT = {
    "model",
    "prompt",
    "add_special_tokens",
    "return_token_strs",
}  # what /tokenize takes beside a prompt


async def health(request: Request) -> Response:
    """200 with no body while the engine lives, else 503."""
    front: Frontend = request.app.state.front
    front.check_alive()
    return Response(status_code=200)


async def version(request: Request) -> Response:
    return json_response(msgspec.json.encode({"version": flashstep.__version__}))


async def load(request: Request) -> Response:
    """How many requests are in flight, under vLLM's name."""
    front: Frontend = request.app.state.front
    return json_response(msgspec.json.encode({"server_load": front.num_in_flight}))


async def metrics(request: Request) -> Response:
    front: Frontend = request.app.state.front
    return Response(front.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _card(front: Frontend, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": front.created,
        "owned_by": "flashstep",
        "root": front.names[0],
        "parent": None,
        "max_model_len": front.ready.max_model_len,
        **({"falsified_by": front.ready.falsifies} if front.ready.falsifies else {}),
    }


async def models(request: Request) -> Response:
    front: Frontend = request.app.state.front
    return json_response(
        msgspec.json.encode({"object": "list", "data": [_card(front, name) for name in front.names]})
    )


async def model(request: Request) -> Response:
    front: Frontend = request.app.state.front
    name = request.path_params["name"]
    front.check_model(name)
    return json_response(msgspec.json.encode(_card(front, name)))


async def tokenize(request: Request) -> Response:
    front: Frontend = request.app.state.front
    body, size = await received(request, TokenizeBody)
    return json_response(await worked(_tokenized, front, body, size=size))


def _tokenized(front: Frontend, body: TokenizeBody) -> bytes:
    ids = _ids(front, body)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": front.ready.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [front.tokenizer.token_text(token) for token in ids]
    return msgspec.json.encode(answer)


def _ids(front: Frontend, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        _refuse_chat_fields(body)
        return front.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    return list(intake.chat_prompt(front, intake.conversation(body)).ids)


def _refuse_chat_fields(body: TokenizeBody) -> None:
    """A text has no turns, and nothing that would change it is taken."""
    blank = TokenizeBody()
    for name in body.__struct_fields__:
        if name not in OF_TEXT and getattr(body, name) != getattr(blank, name):
            raise ApiError(f"{name} goes with messages, not with prompt", param=name)


async def detokenize(request: Request) -> Response:
    front: Frontend = request.app.state.front
    body, size = await received(request, DetokenizeBody)
    return json_response(await worked(_detokenized, front, body, size=size))


def _detokenized(front: Frontend, body: DetokenizeBody) -> bytes:
    for token in body.tokens:
        if not 0 <= token < front.ready.vocab_size:
            raise ApiError(
                f"tokens holds {token}; token ids lie in 0..{front.ready.vocab_size - 1}", param="tokens"
            )
    return msgspec.json.encode({"prompt": front.tokenizer.decode(body.tokens)})
