"""Which fields the turns of a conversation may have: messages, their parts and calls in each API's words.

Takes decoded turns; gives what is wrong with them, with its path. Fields that answers of this or another server have and clients
send back are taken although nothing reads them (``idle``); any other is refused, unless it is null. Knows no prompts: what the
recipe refuses itself is left to it.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from flashstep.server.errors import ApiError, quoted


class Form(NamedTuple):
    """The fields of one kind of turn or part: those that are read, and those that change no answer."""

    read: tuple[str, ...]
    idle: tuple[str, ...] = ()


CACHED = ("cache_control", "prompt_cache_breakpoint")  # prompts are cached without being asked
NAMED = ("name", *CACHED)  # the prompt has no place for a speaker's name

CHAT: dict[str, Form] = {
    "system": Form(("role", "content"), NAMED),
    "developer": Form(("role", "content"), NAMED),
    "user": Form(("role", "content"), NAMED),
    "assistant": Form(
        ("role", "content", "reasoning", "reasoning_content", "tool_calls", "prefix"),
        (*NAMED, "annotations", "parsed"),
    ),
    "tool": Form(("role", "content", "tool_call_id"), NAMED),
    "latest_reminder": Form(("role", "content"), NAMED),
}
CHAT_PART = Form(("type", "text"), (*CACHED, "annotations"))
CHAT_CALL = Form(("id", "type", "function"), ("index", *CACHED))
CHAT_FUNCTION = Form(("name", "arguments"), ("parsed_arguments",))

ITEMS: dict[str, Form] = {
    "message": Form(("type", "role", "content"), ("id", "status", "phase")),
    "function_call": Form(
        ("type", "call_id", "name", "namespace", "arguments"),
        ("id", "status", "caller", "async", "parsed_arguments"),
    ),
    "function_call_output": Form(
        ("type", "call_id", "output"), ("id", "status", "name", "namespace", "caller")
    ),
    "reasoning": Form(("type", "content", "encrypted_content"), ("id", "status", "summary")),
}
ITEM_PART = Form(("type", "text"), (*CACHED, "annotations", "logprobs", "parsed"))
REASONING_PART = Form(("type", "text"))

TURN = Form(("role", "content"))
BLOCKS: dict[str, Form] = {
    "text": Form(("type", "text"), ("cache_control", "citations", "index", "parsed_output")),
    "thinking": Form(("type", "thinking"), ("signature", "cache_control", "index")),
    "tool_use": Form(("type", "id", "name", "input"), ("cache_control", "caller", "index", "toolset_name")),
    "tool_result": Form(("type", "tool_use_id", "content"), ("is_error", "cache_control", "toolset_name")),
}


def strangers(given: Any, form: Form | None, where: str) -> Iterator[ApiError]:
    """The fields of ``given`` that ``form`` has not. Of no object, or no known form, nothing is said here."""
    if form is None or not isinstance(given, Mapping):
        return
    allowed = (*form.read, *form.idle)
    for name in given:
        if name not in allowed and given[name] is not None:
            yield ApiError(
                f"{where} has no field {quoted(name)} here; its fields are {', '.join(allowed)}",
                param=where.split("[")[0],
            )


def part_strangers(parts: object, form: Form, where: str) -> Iterator[ApiError]:
    """``strangers`` of each of a content's parts, where it is a list."""
    for at, part in enumerate(parts if isinstance(parts, list) else ()):
        yield from strangers(part, form, f"{where}[{at}]")


def chat_problems(messages: Sequence[dict[str, Any]]) -> Iterator[ApiError]:
    """Of chat completions' messages."""
    calls: dict[str, None] | None = None  # in their order; of the assistant's turn that tools answer here
    for at, message in enumerate(messages):
        where, role = f"messages[{at}]", message.get("role")
        yield from strangers(message, CHAT.get(role) if isinstance(role, str) else None, where)
        yield from _chat_parts(message.get("content"), f"{where}.content")
        if role == "assistant":
            yield from _assistant_problems(message, where)
            ids = (call.get("id") for call in _calls(message))
            calls = dict.fromkeys(id for id in ids if isinstance(id, str))
        elif role == "tool":
            yield from _answer_problems(message, calls, where)
        else:
            calls = None


def _chat_parts(parts: object, where: str) -> Iterator[ApiError]:
    for at, part in enumerate(parts if isinstance(parts, list) else ()):
        if isinstance(part, dict) and part.get("type") == "text":  # the others are refused by the recipe
            yield from strangers(part, CHAT_PART, f"{where}[{at}]")


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def _assistant_problems(message: dict[str, Any], where: str) -> Iterator[ApiError]:
    for at, call in enumerate(_calls(message)):
        yield from strangers(call, CHAT_CALL, f"{where}.tool_calls[{at}]")
        yield from strangers(call.get("function"), CHAT_FUNCTION, f"{where}.tool_calls[{at}].function")
    first, second = message.get("reasoning"), message.get("reasoning_content")
    if first is not None and second is not None and first != second:
        yield ApiError(f"{where}: reasoning and reasoning_content differ; give one", param="messages")


def _answer_problems(
    message: dict[str, Any], calls: dict[str, None] | None, where: str
) -> Iterator[ApiError]:
    answered = message.get("tool_call_id")
    if answered is None:
        yield ApiError(f"{where}.tool_call_id: this field is required", param="messages")
    elif calls and isinstance(answered, str) and answered not in calls:
        told = ", ".join(quoted(call) for call in islice(calls, 20))
        yield ApiError(
            f"{where}.tool_call_id is {quoted(answered)}; the calls of the assistant's turn before are {told}",
            param="messages",
        )
