"""What the bodies of Responses and Messages have in common: vLLM's sampling fields, and how a body becomes a chat in other words.

Both APIs are answered as chats are: sampling, constraints and tools are checked and made from a ``ChatBody``, and what is wrong
is then told in the words of the API that was called; events have names in both. Knows no conversation and no answers.
"""

import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from flashstep.server.answers import encode
from flashstep.server.errors import ApiError, quoted
from flashstep.server.openai import Body, ChatBody, StructuredOutputs, TemplateOptions, converted
from flashstep.server.sse import named_event

T = TypeVar("T")


class ProtocolBody(Body, frozen=True, kw_only=True):
    """Fields that mean the same as in a chat."""

    stream: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = msgspec.field(default_factory=dict)
    bad_words: list[str] = msgspec.field(default_factory=list)
    seed: int | None = None
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
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


def own_tools(
    given: Sequence[dict[str, Any]], form: type[T], *, kind: str, implied: str | None = None
) -> list[T]:
    """The tools that a client runs, which are of the type ``kind``; ``implied`` is that of a tool without one."""
    for at, tool in enumerate(given):
        if (other := tool.get("type", implied)) != kind:
            raise ApiError(
                f"tools[{at}] is of type {quoted(other)}; this server runs no tools of its own and takes {kind} tools only",
                param="tools",
            )
    return [converted(tool, form, name=f"tools[{at}]") for at, tool in enumerate(given)]


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
