"""The request bodies of OpenAI's completions and chat completions, with vLLM's extensions, as msgspec structs.

``decode`` turns bytes into one of them or raises an ``ApiError`` that names the field. No option is silently ignored: a field
outside the struct is refused, unless it is one of ``METADATA`` (says something about the request and changes no answer) or null.
Knows no tokens and no engine.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from flashstep.server.defaults import Defaults
from flashstep.server.errors import MAX_TOLD, ApiError, mistyped, quoted, refuse

NO_DEFAULTS = Defaults()
METADATA = frozenset(
    {
        "user",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "session_id",  # for routers: which requests belong together
        "spaces_between_special_tokens",  # a token's bytes stand as they are; nothing is ever put between two
    }
)
OFF: dict[str, object] = {  # the value with which a refused option asks for nothing
    "suffix": "",
    "store": False,
    "echo": False,
    "add_special_tokens": False,
    "use_beam_search": False,
    "early_stopping": False,
    "length_penalty": 1.0,
    "detokenize": True,
    "documents": [],
    "mm_processor_kwargs": {},
    "media_io_kwargs": {},
    "vllm_xargs": {},
    "kv_transfer_params": {},
    "logits_processors": [],
    "modalities": ["text"],
}
LATER = {
    "store": "chats and completions are not kept; /v1/responses keeps what it answers",
    "guided_json": 'use structured_outputs: {"json": ...}',
    "guided_regex": 'use structured_outputs: {"regex": ...}',
    "guided_choice": 'use structured_outputs: {"choice": ...}',
    "guided_grammar": 'use structured_outputs: {"grammar": ...}',
    "guided_json_object": 'use structured_outputs: {"json_object": true}',
    "guided_decoding_backend": "there is one backend, llguidance",
    "guided_whitespace_pattern": "white space of JSON cannot be chosen",
    "structural_tag": 'use structured_outputs: {"structural_tag": ...}',
    "functions": "use tools",
    "function_call": "use tool_choice",
    "kv_transfer_params": "prefill and decode in different engines is not supported yet",
    "truncate_prompt_tokens": "a prompt is never cut; send a shorter one",
    "use_beam_search": "there is no beam search; use n",
    "early_stopping": "there is no beam search; use n",
    "length_penalty": "there is no beam search; use n",
    "repetition_detection": "an answer that repeats itself is not ended; use repetition_penalty, or stop",
    "allowed_token_ids": 'use structured_outputs: {"choice": ...} or {"regex": ...}, or logit_bias',
    "logits_processors": "code of clients is not run here; use logit_bias or structured_outputs",
    "vllm_xargs": "there are no plug-ins that would read it",
    "detokenize": "answers always have text; return_token_ids adds the ids",
    "echo": "only /v1/completions echo",
    "add_special_tokens": "a chat's prompt has the special tokens that it needs; only raw prompts may get more",
    "documents": "the model's prompt has no place for documents; put them into a message",
    "chat_template": "the model has one prompt format, which cannot be replaced",
    "mm_processor_kwargs": "only text is supported",
    "media_io_kwargs": "only text is supported",
    "extra_body": "that is a parameter of the SDK; in a body its fields stand at the top level",
    "reasoning": "use reasoning_effort, and thinking to switch it off",
    "verbosity": "ask for short or long answers in a message",
    "prediction": "speculation needs no prediction here",
    "web_search_options": "there is no search here; offer it as a tool",
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

    refused: ClassVar[dict[str, str]] = {"budget_tokens": "use thinking_token_budget"}

    type: Literal["enabled", "disabled"]


class TemplateOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What vLLM users put into ``chat_template_kwargs``."""

    thinking: bool | Thinking | None = None
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
    """``type`` is text, json_object, json_schema (with ``json_schema``), or structural_tag (what ``chat.structural`` reads)."""

    type: str
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's constraints; exactly one of them. ``json`` is a schema, decoded or as text; ``grammar`` is Lark or GBNF."""

    json: dict[str, Any] | bool | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What every body has."""

    model: str | None = None


class SamplingBody(Body, frozen=True, kw_only=True):
    """What completions and chat have in common."""

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
    best_of: int | None = None
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
    request_id: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_metrics: bool = False
    structured_outputs: StructuredOutputs | None = None


class CompletionBody(SamplingBody, frozen=True, kw_only=True):
    """POST /v1/completions. ``logprobs`` is the number of alternatives."""

    refused: ClassVar[dict[str, str]] = LATER | {"response_format": "use structured_outputs"}

    prompt: str | list[str | int | list[int]]
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True


class ChatBody(SamplingBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions. ``logprobs`` switches on, ``top_logprobs`` is the number of alternatives."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    thinking: bool | Thinking | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | int | float | None = None
    chat_template_kwargs: TemplateOptions = TemplateOptions()
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    thinking_token_budget: int | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    response_format: ResponseFormat | None = None


class TokenizeBody(Body, frozen=True, kw_only=True):
    """POST /tokenize: ``prompt``, or ``messages`` with what a chat may add."""

    prompt: str | None = None
    add_special_tokens: bool = True
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    thinking: bool | Thinking | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | int | float | None = None
    chat_template_kwargs: TemplateOptions = TemplateOptions()
    return_token_strs: bool = False


class DetokenizeBody(Body, frozen=True, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]


B = TypeVar("B", bound=msgspec.Struct)
T = TypeVar("T")


def decode(body: bytes, kind: type[B], defaults: Defaults = NO_DEFAULTS) -> B:
    """``body`` as ``kind``; null means that a field is absent, and ``defaults`` say what an absent one is.

    ``kind.refused`` may say why it lacks a field, ``kind.refused_details`` what the error then has as ``details``.
    """
    try:
        fields = msgspec.json.decode(body)
    except msgspec.DecodeError as error:  # msgspec reports invalid UTF-8 as one, too
        raise ApiError(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ApiError("the body is nested too deeply") from error
    if not isinstance(fields, dict):
        raise ApiError("the body must be a JSON object")
    known = set(kind.__struct_fields__)
    fields = {name: value for name, value in fields.items() if _asks(name, value, known)}
    fields = defaults.completed(fields, known)
    try:
        if fields.keys() <= known:
            return msgspec.convert(fields, kind)
    except msgspec.ValidationError:
        pass  # it tells the first problem only, and takes 64.0 for one
    fields = {name: _integral(value) for name, value in fields.items()}
    refuse(chain(_unknown(fields, kind), _mistyped(fields, kind)))
    return msgspec.convert(fields, kind)


def _integral(value: Any, *, depth: int = 2) -> Any:
    """Numbers, alone or in lists (of lists), as integers where they are some: to JSON, 64.0 is 64."""
    if isinstance(value, list) and depth:
        return [_integral(one, depth=depth - 1) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _asks(name: str, value: object, known: set[str]) -> bool:
    """False if the field could as well be absent."""
    if value is None or (name in METADATA and name not in known):
        return False
    off = OFF.get(name)
    return name in known or value != off or isinstance(value, bool) != isinstance(off, bool)


def _unknown(fields: dict[str, Any], kind: type[msgspec.Struct]) -> Iterable[ApiError]:
    unknown = [name for name in fields if name not in kind.__struct_fields__]
    if not unknown:
        return []
    why: dict[str, str] = getattr(kind, "refused", LATER)
    details: dict[str, dict[str, Any]] = getattr(kind, "refused_details", {})
    sentences = [f"{quoted(name)}: {why.get(name, 'no such option here')}" for name in unknown[:MAX_TOLD]]
    if len(unknown) > MAX_TOLD:
        sentences.append("and more")
    return [
        ApiError(
            f"this server does not take {'; '.join(sentences)}",
            param=unknown[0],
            details=next((details[name] for name in unknown if name in details), None),
            param_is_theirs=True,
        )
    ]


def _mistyped(fields: dict[str, Any], kind: type[msgspec.Struct]) -> Iterator[ApiError]:
    """What is wrong with each field on its own."""
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in fields:
            yield ApiError(f"{field.name}: this field is required", param=field.name)
        elif field.name in fields:
            try:
                converted(fields[field.name], field.type, name=field.name)
            except ApiError as error:
                yield error


def converted(value: Any, kind: type[T], *, name: str) -> T:
    """``value`` as ``kind``, or an error that speaks of ``name``."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ApiError(mistyped(error, kind, name=name), param=name.split(".")[0].split("[")[0]) from error
