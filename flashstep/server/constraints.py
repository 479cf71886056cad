"""From tools, ``response_format`` and ``structured_outputs`` to what the prompt tells of and what the engine enforces.

Refuses, with the field's name, what cannot be enforced. Knows the bodies and the grammars, no prompts.
"""

import asyncio
import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from starlette.types import Receive

from flashstep.chat import calls, grammar, structural
from flashstep.chat.encode import ChatPrompt
from flashstep.request import Constraint
from flashstep.sampling import checking
from flashstep.server import tools
from flashstep.server.errors import HUNG_UP, ApiError, quoted
from flashstep.server.frontend import Frontend
from flashstep.server.openai import ChatBody, ResponseFormat, SamplingBody, StructuredOutputs
from flashstep.server.sse import closed_on_disconnect
from flashstep.server.tools import Offer

FORMAT = "response_format"
OUTPUTS = "structured_outputs"
MOST_UNKNOWN = 256  # requests that wait for the verdict on a grammar
MOST_IN_LINE_S = 10.0  # each of them
FORMATS = {
    "text": (),
    "json_object": (),
    "json_schema": ("json_schema",),
    "structural_tag": ("format", "structures", "triggers"),
}
KINDS: dict[str, Callable[[Any], str]] = {
    "json": grammar.json_schema,
    "json_object": lambda _: grammar.json_object(),
    "regex": grammar.regex,
    "choice": grammar.choice,
    "grammar": grammar.grammar,
    "structural_tag": structural.structural_tag,
}


def rendered_format(form: ResponseFormat | None) -> dict[str, Any] | None:
    """``form`` as the prompt tells the model of it; None if the prompt says nothing."""
    if form is not None and form.type not in FORMATS:
        raise ApiError(
            f"{FORMAT}.type is {quoted(form.type)}; it must be one of {', '.join(FORMATS)}", param=FORMAT
        )
    return None if form is None or form.type in ("text", "structural_tag") else msgspec.to_builtins(form)


_room = threading.BoundedSemaphore(MOST_UNKNOWN)


async def constraint(
    front: Frontend, body: SamplingBody, prompt: ChatPrompt | None, *, receive: Receive
) -> Constraint | None:
    """What the answer must match, if anything; ``prompt`` None: that of a raw completion.

    A grammar that is known waits for nobody. A new one waits in ``checking``'s lines, for others' long tries only if it takes
    long itself, and until its client hangs up; 503 if nobody could look at it within ``MOST_IN_LINE_S``.
    """
    wanted = _wanted(body)
    offer = None
    if isinstance(body, ChatBody):
        offer = tools.offer(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
    if offer is not None and offer.required and wanted is not None:
        raise ApiError(
            f"tool_choice asks for a call, and {wanted.param} for a form that no call has; send one of them",
            param=wanted.param,
        )
    if wanted is None and not (offer is not None and (offer.required or any(t.strict for t in offer.tools))):
        return None
    make = functools.partial(_made, wanted, offer, prompt)
    try:
        return await asyncio.to_thread(lambda: checking.Wait(over=True).run(make))
    except checking.Busy:  # it is not known
        return await _in_line(front, make, receive)


async def _in_line(front: Frontend, make: Callable[[], Constraint], receive: Receive) -> Constraint:
    busy = ApiError(str(checking.Busy()), status=503, headers={"Retry-After": "1"})
    if not _room.acquire(blocking=False):
        raise busy
    wait = checking.Wait()
    made = asyncio.get_running_loop().run_in_executor(checking.THREADS, lambda: wait.run(make))
    gone = asyncio.ensure_future(front.client.wait_failed())  # as it is when the server stops

    def leave() -> None:
        made.cancel()

    try:
        async with closed_on_disconnect(receive, leave):
            await asyncio.wait((made, gone), timeout=MOST_IN_LINE_S, return_when=asyncio.FIRST_COMPLETED)
        if made.cancelled():
            raise ApiError("the client hung up before its grammar was checked", status=HUNG_UP)
        if not made.done():
            front.check_alive()
            raise busy
        return made.result()
    except checking.Busy as error:
        raise busy from error
    finally:
        leave()
        gone.cancel()
        wait.end()
        _room.release()


def limited(made: Constraint | None, budget: int | None, *, after: int | None) -> Constraint | None:
    """``made``, and no more than ``budget`` tokens before ``after``, which ends reasoning.

    Without reasoning (``after`` None) there is nothing to limit: every budget is kept.
    """
    if budget is None or after is None:
        return made
    return msgspec.structs.replace(made or Constraint(after=after), limit=budget)


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
    for name in ("json_schema", "format", "structures", "triggers"):
        if getattr(form, name) is not None and name not in FORMATS[form.type]:
            raise ApiError(f"{FORMAT}.{name} does not belong to the type {form.type}", param=FORMAT)
    if form.type == "text":
        return None
    if form.type == "json_object":
        return _Wanted(FORMAT, "json_object", True)
    if form.type == "structural_tag":
        return _Wanted(FORMAT, "structural_tag", msgspec.to_builtins(form))
    if form.json_schema is None:
        raise ApiError(f"{FORMAT}: the type json_schema needs json_schema", param=FORMAT)
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


def _made(wanted: _Wanted | None, offer: Offer | None, prompt: ChatPrompt | None) -> Constraint:
    after = None if prompt is None else prompt.reasoning_end
    made = None if wanted is None else _form(wanted, after=after)
    if offer is None or prompt is None:
        assert made is not None, "there is something to enforce"
        return made
    allowed = calls.Calls(
        tools=offer.tools, marker=prompt.call_marker, several=offer.several, begun=prompt.begins_calls
    )
    try:
        form = None if made is None else made.grammar
        whole = calls.required(allowed) if offer.required else calls.offered(allowed, form=form)
        return grammar.constraint(whole, after=after, control_tokens=(prompt.call_marker,))
    except (grammar.GrammarError, RecursionError) as error:
        # what is too large as a whole is not looked at piece by piece: that takes as long again for each
        blamed = None if str(error) == checking.TOO_FAR else _blamed(allowed)
        raise ApiError(f"tools cannot be enforced: {blamed or error}", param="tools") from error


def _form(wanted: _Wanted, *, after: int | None) -> Constraint:
    try:
        return grammar.constraint(KINDS[wanted.kind](wanted.value), after=after)
    except grammar.GrammarError as error:
        name = FORMAT if wanted.param == FORMAT else f"{OUTPUTS}.{wanted.kind}"
        raise ApiError(f"{name} cannot be enforced: {error}", param=wanted.param) from error


def _blamed(allowed: calls.Calls) -> str | None:
    """What is wrong with one of the tools; None if only all of them together are too much."""
    try:
        calls.check(allowed.tools, marker=allowed.marker)
    except grammar.GrammarError as error:
        return str(error)
    return None
