"""The request bodies of OpenAI's completions and chat completions, with vLLM's extensions, as msgspec structs.

``decode`` turns bytes into one of them or raises an ``ApiError`` that names the field. No option is silently ignored: a field
outside the struct is refused, unless it is one of ``METADATA`` (says something about the request and changes no answer) or null.
Knows no tokens and no engine.
"""

import re
from typing import Any, Literal, TypeVar

import msgspec

from flashstep.server.errors import ApiError

METADATA = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)
LATER = {
    "guided_json": 'use structured_outputs: {"json": ...}',
    "guided_regex": 'use structured_outputs: {"regex": ...}',
    "guided_choice": 'use structured_outputs: {"choice": ...}',
    "guided_grammar": 'use structured_outputs: {"grammar": ...}',
    "guided_json_object": 'use structured_outputs: {"json_object": true}',
    "guided_decoding_backend": "there is one backend, llguidance",
    "guided_whitespace_pattern": "white space of JSON cannot be chosen",
    "structural_tag": "structural tags are not supported yet",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "thinking_token_budget": "a limit on reasoning is not supported yet",
    "kv_transfer_params": "prefill and decode in different engines is not supported yet",
    "truncate_prompt_tokens": "a prompt is never cut; send a shorter one",
    "best_of": "use n",
    "suffix": "insertion is not something this model does",
    "modalities": "only text is supported",
    "audio": "only text is supported",
}


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None  # nothing is ever padded here: OpenAI's way to say so


class Thinking(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """DeepSeek's own switch."""

    type: Literal["enabled", "disabled"]


class TemplateOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What vLLM users put into ``chat_template_kwargs``."""

    thinking: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | int | float | None = None


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The schema is enforced whether ``strict`` is true or not."""

    schema: dict[str, Any] | bool
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """``type`` is text, json_object, or json_schema, which needs ``json_schema``."""

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's constraints; exactly one of them. ``json`` is a schema, decoded or as text; ``grammar`` is Lark or GBNF."""

    json: dict[str, Any] | bool | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class SamplingBody(msgspec.Struct, frozen=True, kw_only=True):
    """What completions and chat have in common."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = {}
    bad_words: list[str] = []
    n: int = 1
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = 0
    cache_salt: str = ""
    return_token_ids: bool = False
    structured_outputs: StructuredOutputs | None = None


class CompletionBody(SamplingBody, frozen=True, kw_only=True):
    """POST /v1/completions. ``logprobs`` is the number of alternatives."""

    prompt: str | list[str | int | list[int]]
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True


class ChatBody(SamplingBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions. ``logprobs`` switches on, ``top_logprobs`` is the number of alternatives."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    thinking: Thinking | None = None
    reasoning_effort: str | int | float | None = None
    chat_template_kwargs: TemplateOptions = TemplateOptions()
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    response_format: ResponseFormat | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: ``prompt``, or ``messages`` with what a chat may add."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    thinking: Thinking | None = None
    reasoning_effort: str | int | float | None = None
    chat_template_kwargs: TemplateOptions = TemplateOptions()
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


B = TypeVar("B", CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)


def decode(body: bytes, kind: type[B]) -> B:
    """``body`` as ``kind``; null means that a field is absent."""
    try:
        fields = msgspec.json.decode(body)
    except msgspec.DecodeError as error:  # msgspec reports invalid UTF-8 as one, too
        raise ApiError(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ApiError("the body is nested too deeply") from error
    if not isinstance(fields, dict):
        raise ApiError("the body must be a JSON object")
    fields = {name: value for name, value in fields.items() if value is not None and name not in METADATA}
    _refuse_unknown(fields, set(kind.__struct_fields__))
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from error


def _refuse_unknown(fields: dict[str, Any], known: set[str]) -> None:
    unknown = [name for name in fields if name not in known]
    if unknown:
        sentences = (f"{name!r}: {LATER.get(name, 'no such option here')}" for name in unknown)
        raise ApiError(f"this server does not take {'; '.join(sentences)}", param=unknown[0])


def _named(message: str) -> ApiError:
    """msgspec's sentence, with the field it speaks of as ``param``."""
    sentence, _, path = message.partition(" - at `$")
    path = path.strip(".`")
    if not path and (found := re.search("field `(.+?)`", sentence)):
        path = found.group(1)
    return ApiError(f"{path}: {sentence}" if path else sentence, param=re.split(r"[.\[]", path)[0] or None)
