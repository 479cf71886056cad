"""What the bodies of Responses and Messages have in common: vLLM's sampling fields, and how a body becomes a chat in other words.

Both APIs are answered as chats are: sampling, constraints and tools are checked and made from a ``ChatBody``, and what is wrong
is then told in the words of the API that was called; events have names in both. Knows no conversation and no answers.
"""

import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from flashstep.server.answers import encode
from flashstep.server.errors import ApiError
from flashstep.server.openai import ChatBody, StructuredOutputs, TemplateOptions
from flashstep.server.sse import named_event

S = TypeVar("S", bound=msgspec.Struct)


class ProtocolBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that mean the same as in a chat."""

    model: str | None = None
    stream: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = {}
    bad_words: list[str] = []
    seed: int | None = None
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str = ""
    return_metrics: bool = False
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: TemplateOptions = TemplateOptions()

    def chat(self, **fields: Any) -> ChatBody:
        """A chat without messages, of the fields above and ``fields`` (those that are None are absent)."""
        shared = {name: getattr(self, name) for name in ProtocolBody.__struct_fields__}
        given = {name: value for name, value in fields.items() if value is not None}
        return ChatBody(messages=[], **shared, **given)


def frames(events: Iterable[dict[str, Any]]) -> bytes:
    """``events`` on the wire, each under the name that its ``type`` is."""
    return b"".join(named_event(event["type"], encode(event)) for event in events)


@contextmanager
def told_as(words: Mapping[str, str]) -> Generator[None]:
    """An ``ApiError`` about a chat's fields speaks of the fields that ``words`` gives for them.

    Of names that are English words, too, only the one the error is about is taken for a name.
    """
    try:
        yield
    except ApiError as error:
        for word, name in words.items():
            if word == error.param or "_" in word:
                error.message = re.sub(rf"\b{word}\b", name, error.message)
        if error.param is not None and error.param in words:
            error.param = words[error.param].split(".")[0]
        raise


def converted(value: Any, kind: type[S], *, name: str) -> S:
    """``value`` as ``kind``, or an error that speaks of ``name``."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        sentence, _, path = str(error).partition(" - at `$")
        raise ApiError(
            f"{name}{path.rstrip('`')}: {sentence}", param=name.split(".")[0].split("[")[0]
        ) from error
