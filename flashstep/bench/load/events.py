"""Server-sent events of an OpenAI-compatible stream: bytes into data, data into what one event adds to an answer.

Takes bytes as they come from a socket; gives ``Piece``. Knows no time and no HTTP.
"""

import json
from typing import Annotated, Any, NamedTuple

import msgspec

DONE = b"[DONE]"
LONGEST_EVENT_BYTES = 64 << 20  # an event that never ends must not take the memory
# What a server counts for one request above these, or below 0, is no count: sums and arrays are made of it.
MOST_READ, MOST_MADE = 1 << 28, 1 << 21
Read = Annotated[int, msgspec.Meta(ge=0, le=MOST_READ)]
Made = Annotated[int, msgspec.Meta(ge=0, le=MOST_MADE)]


class MalformedEvent(ValueError):
    """Data that is no event of an OpenAI-compatible stream."""


class EventReader:
    """Splits bytes into the data of events: any line end, comments (keep-alives) and other fields left out."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # of a line that has not ended: joined once, when it has
        self._data: list[bytes] = []
        self._held = 0  # bytes of the event so far
        self._after_return = False  # the last byte was a CR: a LF behind it belongs to it

    def feed(self, received: bytes) -> list[bytes]:
        """The data of each event that ``received`` completes."""
        if self._after_return and received.startswith(b"\n"):
            received = received[1:]
        if not received:
            return []
        self._after_return = received.endswith(b"\r")
        lines = received.splitlines()  # of bytes: at CR, LF and CR LF, as the standard has it
        is_open = received[-1] not in b"\r\n"
        self._held += len(received)
        if self._held > LONGEST_EVENT_BYTES:
            raise MalformedEvent(f"an event has more than {LONGEST_EVENT_BYTES >> 20} MiB and no end")
        self._rest.append(lines[0])
        if is_open and len(lines) == 1:
            return []
        lines[0] = b"".join(self._rest)
        self._rest = [lines.pop()] if is_open else []
        return self._completed(lines)

    def _completed(self, lines: list[bytes]) -> list[bytes]:
        complete: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line:
                if self._data:
                    complete.append(b"\n".join(self._data))
                    self._data = []
                self._held = len(self._rest[0]) if self._rest else 0
        return complete


class Piece(NamedTuple):
    """What one event adds.

    ``text`` is content, ``reasoning`` thinking and ``tool`` a call's name and arguments; any of them makes the event one of
    content (E15). ``token_ids`` counts the tokens that the event itself lists (vLLM's return_token_ids, or
    log-probabilities), None where it lists none. ``usage`` is what the server counted so far, or for the whole. ``unread``
    says what of the event was against the format and is left out.
    """

    text: str
    reasoning: str
    tool: str
    token_ids: int | None
    finish_reason: str | None
    usage: "Usage | None"
    error: str
    unread: str = ""

    @property
    def is_content(self) -> bool:
        return bool(self.text or self.reasoning or self.tool)


class PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: Read | None = None


class Usage(msgspec.Struct, gc=False):
    """The server's count of tokens."""

    prompt_tokens: Read | None = None
    completion_tokens: Made | None = None
    prompt_tokens_details: PromptDetails | None = None
    prompt_cache_hit_tokens: Read | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Under either name (F11, F12)."""
        if self.prompt_tokens_details is not None and self.prompt_tokens_details.cached_tokens is not None:
            return self.prompt_tokens_details.cached_tokens
        return self.prompt_cache_hit_tokens


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct, gc=False):
    function: _Function | None = None


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Listed(msgspec.Struct, gc=False):
    """A token with its probabilities, which nobody here reads."""


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Listed] | None = None
    tokens: list[str | None] | None = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    object: str | None = None
    message: Any = None


_decode = msgspec.json.Decoder(_Event).decode
_NO_DELTA = _Delta()


def read_piece(data: bytes) -> Piece:
    """What the event with ``data`` adds; ``MalformedEvent`` if it is none."""
    unread = ""
    try:
        event = _decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        event, unread = _without_figures(data, error)
    if event.error is not None or event.object == "error":
        what = event.message if event.error is None else event.error
        return Piece("", "", "", None, None, event.usage, told(what), unread)
    choice = event.choices[0] if event.choices else None
    if choice is None:
        return Piece("", "", "", None, None, event.usage, "", unread)
    delta = choice.delta or _NO_DELTA
    return Piece(
        (delta.content or "") if choice.text is None else choice.text,
        delta.reasoning or delta.reasoning_content or "",
        _tool_text(delta.tool_calls) if delta.tool_calls else "",
        _listed_tokens(choice),
        choice.finish_reason,
        event.usage,
        "",
        unread,
    )


def _without_figures(data: bytes, error: Exception) -> tuple[_Event, str]:
    """An event whose usage or probabilities are against the format: its text and time stand, and the figures are left out."""
    try:
        value = json.loads(data)  # takes NaN, which is no JSON
        usage = value.pop("usage", None)
        event = msgspec.convert(value, _Event)
    except (ValueError, TypeError, AttributeError, RecursionError):
        start = data[:80].decode(errors="replace")
        raise MalformedEvent(f"{error}; the event begins {start!r}") from None
    try:
        event.usage = msgspec.convert(usage, Usage | None, strict=False)
    except msgspec.ValidationError:
        return event, f"its usage is no count of tokens: {error}"
    return event, f"its figures are against the format: {error}"


def told(error: Any) -> str:
    """The sentence in an error of the API, whatever its shape."""
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error)


def _tool_text(calls: list[_ToolCall]) -> str:
    functions = [call.function for call in calls if call.function is not None]
    return "".join((function.name or "") + (function.arguments or "") for function in functions)


def _listed_tokens(choice: _Choice) -> int | None:
    if choice.token_ids is not None:
        return len(choice.token_ids)
    if choice.logprobs is not None:
        listed = choice.logprobs.content if choice.logprobs.content is not None else choice.logprobs.tokens
        return None if listed is None else len(listed)
    return None
