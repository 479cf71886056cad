"""The tools that a request offers, and what it wants of them: checked, and in the words of ``chat.calls``.

Takes ``tools``, ``tool_choice`` and ``parallel_tool_calls`` as OpenAI's chats have them; refuses what is wrong with the field's
name. Knows no prompts and no grammars.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from flashstep.chat.calls import Tool
from flashstep.server.errors import ApiError, quoted
from flashstep.server.openai import converted

TOOL_CHOICES = ("auto", "none", "required")
NAMED = '{"type": "function", "function": {"name": ...}}'
MAX_NAME_CHARS = 64


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Which ``tools`` may be called, and whether one must (``required``), and more than one may (``several``)."""

    tools: tuple[Tool, ...]
    required: bool
    several: bool


class _Function(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | bool | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _Function


class _NamedFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str


class _NamedChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _NamedFunction


def offer(
    tools: Sequence[dict[str, Any]] | None, choice: str | dict[str, Any] | None, *, parallel: bool = True
) -> Offer | None:
    """None if nothing may be called. A named tool is called once."""
    made = _tools(tools)
    wanted = _choice(choice)
    if not made:
        if wanted not in ("auto", "none"):
            raise ApiError("tool_choice asks for a call, and no tools are offered", param="tool_choice")
        return None
    if wanted == "none":
        return None
    if wanted in TOOL_CHOICES:
        return Offer(tools=made, required=wanted == "required", several=parallel)
    (name,) = wanted
    named = tuple(tool for tool in made if tool.name == name)
    if not named:
        offered = ", ".join(tool.name for tool in made[:20])
        raise ApiError(
            f"tool_choice names {quoted(name)}, which is not among the tools: {offered}", param="tool_choice"
        )
    return Offer(tools=named, required=True, several=False)


def _choice(given: str | dict[str, Any] | None) -> str | tuple[str]:
    """One of ``TOOL_CHOICES``, or the name of a tool, alone in a tuple."""
    if given is None:
        return "auto"
    if isinstance(given, str):
        if given not in TOOL_CHOICES:
            raise ApiError(
                f"tool_choice is {quoted(given)}; it must be {', '.join(TOOL_CHOICES)}, or a function: {NAMED}",
                param="tool_choice",
            )
        return given
    return (converted(given, _NamedChoice, name="tool_choice").function.name,)


def _tools(given: Sequence[dict[str, Any]] | None) -> tuple[Tool, ...]:
    if given is None:
        return ()
    if not given:
        raise ApiError("tools is an empty list; leave it out, or offer a tool", param="tools")
    made: dict[str, Tool] = {}
    for number, one in enumerate(given):
        function = converted(one, _Tool, name=f"tools[{number}]").function
        if len(function.name) > MAX_NAME_CHARS:
            raise ApiError(
                f"tools[{number}].function.name is {len(function.name)} characters long; at most {MAX_NAME_CHARS} are allowed",
                param="tools",
            )
        if function.name in made:
            raise ApiError(
                f"tools[{number}].function.name is {function.name!r}, as of a tool before it", param="tools"
            )
        made[function.name] = Tool(
            name=function.name, parameters=function.parameters, strict=function.strict or False
        )
    return tuple(made.values())
