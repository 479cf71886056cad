"""What every endpoint takes and gives: the table that /openapi.json is made of.

An entry names the structs of body, answer and events, and the errors. A route without an entry fails a test
(``tests/server/test_openapi.py``).
"""

from typing import Any

import msgspec

from flashstep.server.errors import shape_of
from flashstep.server.messages.body import CountBody, MessagesBody
from flashstep.server.openai import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from flashstep.server.openapi import described
from flashstep.server.responses.body import InputBody, ResponsesBody

ERRORS = {
    400: "The request is wrong; the error says where and what is allowed.",
    401: "The key is missing or wrong.",
    403: "The page of another site asks, and --allowed-origins does not name it.",
    404: "There is no such thing here: a model, a response, a file.",
    408: "The request did not come to its end in time.",
    413: "The body is too long.",
    415: "The body is said to be something else than JSON.",
    500: "The engine ended this request with an error.",
    503: "The server is full (Retry-After says when to come again), or the engine is not running.",
}
BODY = (400, 404, 408, 413, 415)
ANSWERING = (*BODY, 500, 503)


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path; ``says`` and ``gives`` are its descriptions.

    ``answer`` is the struct of a JSON answer, ``events`` of each event of a stream but ``last_event``, ``media`` other kinds of
    answers (all texts); without any of them the answer is empty.
    """

    method: str
    path: str
    says: str
    gives: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    events: type[msgspec.Struct] | None = None
    last_event: str | None = None
    media: tuple[str, ...] = ()
    errors: tuple[int, ...] = ()

    def kinds(self) -> set[type[msgspec.Struct]]:
        """Every struct that its description refers to."""
        named = {self.body, self.answer, self.events, error_body(self.path)}
        return {kind for kind in named if kind is not None}


def error_body(path: str) -> type[msgspec.Struct]:
    """How errors look under ``path``."""
    return described.AnthropicError if shape_of(path) == "anthropic" else described.OpenAIError


def _get(path: str, says: str, gives: str, **more: Any) -> Operation:
    return Operation(method="GET", path=path, says=says, gives=gives, **more)


def _post(path: str, says: str, gives: str, **more: Any) -> Operation:
    return Operation(method="POST", path=path, says=says, gives=gives, **more)


_TABLE = [
    _post(
        "/v1/chat/completions",
        "Answer a conversation with reasoning, content and tool calls.",
        "The answer, whole or, with stream, as events that end in [DONE].",
        body=ChatBody,
        answer=described.ChatCompletion,
        events=described.ChatCompletionChunk,
        last_event="[DONE]",
        errors=ANSWERING,
    ),
    _post(
        "/v1/completions",
        "Continue raw prompts, texts or token ids.",
        "The answers, whole or, with stream, as events that end in [DONE].",
        body=CompletionBody,
        answer=described.Completion,
        events=described.CompletionChunk,
        last_event="[DONE]",
        errors=ANSWERING,
    ),
    _post(
        "/v1/responses",
        "Answer items with items, in OpenAI's newer API.",
        "The response, whole or, with stream, as named events; with background, as it begins.",
        body=ResponsesBody,
        answer=described.ResponseObject,
        events=described.ResponseEvent,
        errors=ANSWERING,
    ),
    _post(
        "/v1/responses/input_tokens",
        "How many tokens a response's prompt has.",
        "The count.",
        body=InputBody,
        answer=described.InputTokens,
        errors=BODY,
    ),
    _get(
        "/v1/responses/{id}",
        "A response that is kept, as it stands.",
        "The response.",
        answer=described.ResponseObject,
        errors=(400, 404),
    ),
    Operation(
        method="DELETE",
        path="/v1/responses/{id}",
        says="Forget a response.",
        gives="It is forgotten.",
        answer=described.Deleted,
        errors=(400, 404),
    ),
    _post(
        "/v1/responses/{id}/cancel",
        "End a background response.",
        "The response as it ended.",
        answer=described.ResponseObject,
        errors=(400, 404),
    ),
    _post(
        "/v1/messages",
        "Answer a conversation, in Anthropic's API.",
        "The message, whole or, with stream, as named events.",
        body=MessagesBody,
        answer=described.Message,
        events=described.MessageEvent,
        errors=ANSWERING,
    ),
    _post(
        "/v1/messages/count_tokens",
        "How many tokens a message's prompt has.",
        "The count.",
        body=CountBody,
        answer=described.TokenCount,
        errors=BODY,
    ),
    _post(
        "/tokenize",
        "The token ids of a text, or of a conversation as the model sees it.",
        "The ids.",
        body=TokenizeBody,
        answer=described.Tokenized,
        errors=BODY,
    ),
    _post(
        "/detokenize",
        "The text of token ids.",
        "The text.",
        body=DetokenizeBody,
        answer=described.Detokenized,
        errors=BODY,
    ),
    _get("/v1/models", "The served names.", "The names.", answer=described.ModelList),
    _get("/v1/models/{name}", "One served name.", "The model.", answer=described.ModelCard, errors=(404,)),
    _get("/health", "Whether the engine lives.", "It does.", errors=(503,)),
    _get("/ping", "As /health.", "The engine lives.", errors=(503,)),
    _post("/ping", "As /health.", "The engine lives.", errors=(503,)),
    _get("/load", "How many requests are in flight.", "The number.", answer=described.Load),
    _get("/version", "The server's version.", "The version.", answer=described.Version),
    _get(
        "/metrics",
        "Counters and histograms for Prometheus.",
        "In Prometheus' text form.",
        media=("text/plain",),
    ),
    _get("/openapi.json", "This document.", "The document.", answer=described.Document),
    _get("/", "The status page.", "The page.", media=("text/html",)),
    _get(
        "/page/{name}",
        "A file of the status page.",
        "The file.",
        media=("text/css", "text/javascript", "image/svg+xml"),
        errors=(404,),
    ),
    _get("/status", "The figures of the status page.", "The figures.", answer=described.Figures),
]
OPERATIONS = {(operation.method, operation.path): operation for operation in _TABLE}
