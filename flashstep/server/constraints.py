"""From ``response_format`` and ``structured_outputs`` to what the prompt tells of and what the engine enforces.

Refuses, with the field's name, what cannot be enforced. Knows the bodies and the grammars, no prompts.
"""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from flashstep.chat import grammar
from flashstep.request import Constraint
from flashstep.server.errors import ApiError
from flashstep.server.openai import ChatBody, ResponseFormat, SamplingBody, StructuredOutputs

FORMAT = "response_format"
OUTPUTS = "structured_outputs"
KINDS: dict[str, Callable[[Any], str]] = {
    "json": grammar.json_schema,
    "json_object": lambda _: grammar.json_object(),
    "regex": grammar.regex,
    "choice": grammar.choice,
    "grammar": grammar.grammar,
}


def rendered_format(form: ResponseFormat | None) -> dict[str, Any] | None:
    """``form`` as the prompt tells the model of it; None if the prompt says nothing."""
    return None if form is None or form.type == "text" else msgspec.to_builtins(form)


def check_chat(body: ChatBody) -> None:
    """The rules that need neither prompt nor grammar."""
    wanted = _wanted(body)
    if wanted is not None and body.tools and body.tool_choice != "none":
        raise ApiError(
            f"tools are offered, and {wanted.param} asks for a form in which none could be called; this server cannot do both"
            ' yet: leave one out, or set tool_choice to "none"',
            param=wanted.param,
        )


async def constraint(body: SamplingBody, *, after: int | None) -> Constraint | None:
    """What the answer must match, if anything. ``after``: the token that ends reasoning.

    Grammars are checked in a thread: a large one takes up to a second.
    """
    wanted = _wanted(body)
    return None if wanted is None else await asyncio.to_thread(_made, wanted, after=after)


class _Wanted(NamedTuple):
    """``kind`` and ``value`` of the form that the field ``param`` asks for."""

    param: str
    kind: str
    value: Any


def _wanted(body: SamplingBody) -> _Wanted | None:
    form = body.response_format if isinstance(body, ChatBody) else None
    formed = None if form is None else _formed(form)
    if body.structured_outputs is None:
        return formed
    if formed is not None:
        raise ApiError(f"{FORMAT} and {OUTPUTS} both ask for a form; send one of them", param=OUTPUTS)
    return _only(body.structured_outputs)


def _formed(form: ResponseFormat) -> _Wanted | None:
    if form.type not in ("text", "json_object", "json_schema"):
        raise ApiError(
            f"{FORMAT}.type is {form.type!r}; it must be text, json_object or json_schema", param=FORMAT
        )
    if (form.type == "json_schema") != (form.json_schema is not None):
        raise ApiError(
            f"{FORMAT}: the type json_schema needs json_schema, and the others take none", param=FORMAT
        )
    if form.type == "text":
        return None
    if form.json_schema is None:
        return _Wanted(FORMAT, "json_object", True)
    return _Wanted(FORMAT, "json", form.json_schema.schema)


def _only(outputs: StructuredOutputs) -> _Wanted:
    given = [(kind, value) for kind in KINDS if (value := getattr(outputs, kind)) is not None]
    if len(given) != 1:
        raise ApiError(
            f"{OUTPUTS} takes exactly one of {', '.join(KINDS)}; {len(given)} are given", param=OUTPUTS
        )
    if given[0] == ("json_object", False):
        raise ApiError(f"{OUTPUTS}.json_object is false; leave it out", param=OUTPUTS)
    return _Wanted(OUTPUTS, *given[0])


def _made(wanted: _Wanted, *, after: int | None) -> Constraint:
    try:
        return grammar.constraint(KINDS[wanted.kind](wanted.value), after=after)
    except grammar.GrammarError as error:
        name = FORMAT if wanted.param == FORMAT else f"{OUTPUTS}.{wanted.kind}"
        raise ApiError(f"{name} cannot be enforced: {error}", param=wanted.param) from error
