"""One streamed request to an OpenAI-compatible server over HTTP, with the time of each event.

Takes a ``Call``; gives ``Answered``, whatever the server does: a refusal, a broken stream or a timeout is a ``fault`` in it,
with all that came before. Times are ``time.perf_counter()`` seconds. Definitions E13 to E17. Knows no workload and no
statistics.
"""

import asyncio
import errno
import os
import time
from collections.abc import Mapping
from itertools import pairwise
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
import msgspec

from flashstep.bench.load.events import DONE, EventReader, MalformedEvent, Piece, Usage, read_piece, told

# Idle connections are closed before servers close them (uvicorn: 5 s), so that no request meets a closing one.
KEEP_ALIVE_S = 3.0
BODY_BYTES = 64 << 10  # of an answer that is no stream: enough for its reason
Fault = Literal[
    "unreachable", "status", "not a stream", "malformed", "error event", "cut off", "timeout", "interrupted"
]
TokenSource = Literal["usage", "events"]


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What to send: POST ``body`` to ``path`` ("/v1/chat/completions" or "/v1/completions"), as it is.

    The body asks for a stream itself (``"stream": true``, ``"stream_options": {"include_usage": true}``). ``key`` says which
    request this is and comes back in the answer.
    """

    key: str
    path: str
    body: dict[str, Any]
    headers: dict[str, str] = {}


class Chunk(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One server-sent event with JSON in it, when the client read it.

    ``tokens`` are the new ones that the event itself tells of (continuous usage, token ids or log-probabilities), None where it
    tells nothing. ``is_content`` is E15's: it carries content, reasoning or tool text. ``size`` is the bytes of its data.
    """

    at_s: float
    tokens: int | None
    is_content: bool
    size: int


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a ``Call``.

    ``sent_s`` is just before the request goes out (a new connection's set-up is inside); ``first_s`` and ``last_s`` are the
    first and last chunk of content (E15), None without any; ``ended_s`` is the end of the answer or of the try.
    ``output_tokens`` are never guessed: ``tokens_from`` "usage" is the server's final count, "events" the sum of what every
    content event listed, and None is no count. ``fault`` is "" for a whole answer; ``error`` is then its sentence. ``status``
    is 0 where no answer began.
    """

    key: str
    sent_s: float
    ended_s: float
    first_s: float | None = None
    last_s: float | None = None
    chunks: tuple[Chunk, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    tokens_from: TokenSource | None = None
    text: str = ""
    reasoning: str = ""
    tool_text: str = ""  # names and arguments of tool calls, one behind the other: name{...}name{...}
    finish_reason: str | None = None
    status: int = 0
    fault: Fault | Literal[""] = ""
    error: str = ""

    @property
    def is_whole(self) -> bool:
        return not self.fault

    @property
    def ttft_s(self) -> float | None:
        """E15: first content chunk minus send; a chunk with only a role does not count."""
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def latency_s(self) -> float | None:
        """E15's request latency (vLLM: E2EL): last content chunk minus send, without usage chunk and [DONE]."""
        return None if self.last_s is None else self.last_s - self.sent_s

    @property
    def itl_s(self) -> float | None:
        """E16: (request latency - TTFT) / (output tokens - 1); None below two tokens, or where they were not counted."""
        if (
            self.first_s is None
            or self.last_s is None
            or self.output_tokens is None
            or self.output_tokens < 2
        ):
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)

    @property
    def tpot_s(self) -> float | None:
        """E13's time per output token: the same quantity as E16's ITL, under vLLM's name."""
        return self.itl_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """E13's ITL: seconds between content chunks, as the client saw them; a chunk may hold several tokens."""
        return tuple(after - before for before, after in pairwise(self.content_s))

    @property
    def content_s(self) -> tuple[float, ...]:
        """When each content chunk was read."""
        return tuple(chunk.at_s for chunk in self.chunks if chunk.is_content)


class Client:
    """Connections to one server. ``base_url`` is with or without /v1; ``timeout_s`` is for one whole answer.

    ``connections`` None sets no limit: a request never waits for one of ours, so that its time is the server's. Used as
    ``async with Client(...) as client``. ``headers`` go with every request; ``api_key`` as a bearer token.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 6 * 3600.0,
        connections: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.root = base_url.rstrip("/").removesuffix("/v1")
        if not self.root.startswith(("http://", "https://")):
            raise ValueError(f"--url is {base_url!r}; it begins with http:// or https://")
        self._timeout_s = timeout_s
        self._limit = connections or 0
        self._headers = {
            "Accept": "text/event-stream",
            "Content-Type": "application/json",
            **(headers or {}),
        }
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._open: set[asyncio.Timeout] = set()
        self._interrupted = False

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=self._limit, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def send(self, call: Call) -> Answered:
        """Send ``call`` and read its whole answer. Raises nothing for what a server or the network does."""
        answer = _Answer(call.key)
        if self._interrupted:
            return answer.finished("interrupted", "interrupted before it was sent")
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                self._open.add(deadline)
                try:
                    await self._exchange(call, answer)
                finally:
                    self._open.discard(deadline)
        except TimeoutError:
            if self._interrupted:
                return answer.finished("interrupted", "interrupted")
            return answer.finished("timeout", f"no end within {self._timeout_s:g} s")
        except aiohttp.ClientConnectorError as error:
            return answer.finished("unreachable", f"{self.root} cannot be reached: {_why(error.os_error)}")
        except (aiohttp.ClientError, OSError) as error:
            return answer.finished("cut off", f"the connection broke: {str(error) or type(error).__name__}")
        except MalformedEvent as error:
            return answer.finished("malformed", f"the server sent what is no event: {error}")
        return answer.finished(answer.fault, answer.error)

    def interrupt(self) -> None:
        """End every open request now, and each later one at once: all answer with the fault "interrupted"."""
        self._interrupted = True
        now = asyncio.get_running_loop().time()
        for deadline in self._open:
            deadline.reschedule(now)

    async def get(self, path: str, *, within_s: float = 10.0) -> bytes | None:
        """The body of a GET that the server answers with 200, else None."""
        status, body = await self._get(path, within_s)
        return body if status == 200 else None

    async def status(self, path: str, *, within_s: float = 10.0) -> int:
        """The status of a GET; 0 where no answer came."""
        return (await self._get(path, within_s))[0]

    async def _get(self, path: str, within_s: float) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(within_s), self._session.get(self.root + path) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return 0, b""

    async def models(self) -> list[str]:
        """What /v1/models lists; empty where it lists nothing that can be read."""
        body = await self.get("/v1/models")
        try:
            return [] if body is None else [card.id for card in _decode_models(body).data]
        except msgspec.DecodeError:
            return []

    async def _exchange(self, call: Call, answer: "_Answer") -> None:
        data = msgspec.json.encode(call.body)  # before the clock starts: a long prompt takes a while
        answer.sent_s = time.perf_counter()
        async with self._session.post(
            self.root + call.path, data=data, headers=call.headers, allow_redirects=False
        ) as response:
            answer.status = response.status
            if response.status != 200:
                answer.fault = "status"
                answer.error = f"HTTP {response.status}: {await _reason(response)}"
            elif response.content_type != "text/event-stream":
                answer.fault = "not a stream"
                answer.error = (
                    f"the answer is {response.content_type}, not text/event-stream: {await _reason(response)}"
                )
            else:
                await answer.read(response.content)


class _Card(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Card]


_decode_models = msgspec.json.Decoder(_Models).decode


class _Answer:
    """An answer while it comes."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.sent_s = time.perf_counter()
        self.status = 0
        self.fault: Fault | Literal[""] = ""
        self.error = ""
        self._chunks: list[Chunk] = []
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._tool_text: list[str] = []
        self._usage = Usage()
        self._counted = 0  # output tokens that events told of so far
        self._unlisted = False  # a content event said nothing of its tokens
        self._finish_reason: str | None = None
        self._done = False

    async def read(self, content: aiohttp.StreamReader) -> None:
        """All events until the server ends the answer."""
        reader = EventReader()
        clock = time.perf_counter
        while received := await content.readany():
            now = clock()
            for data in reader.feed(received):
                if data == DONE:
                    self._done = True
                else:
                    self._take(read_piece(data), now, len(data))
        if not self.fault and not self._done and self._finish_reason is None:
            self.fault = "cut off"
            self.error = "the stream ended without a finish reason and without [DONE]"

    def _take(self, piece: Piece, now: float, size: int) -> None:
        if piece.error and not self.fault:
            self.fault, self.error = "error event", f"the server ended the stream: {piece.error}"
        is_content = piece.is_content
        if is_content:
            if self._first_s is None:
                self._first_s = now
            self._last_s = now
            if piece.text:
                self._text.append(piece.text)
            if piece.reasoning:
                self._reasoning.append(piece.reasoning)
            if piece.tool:
                self._tool_text.append(piece.tool)
        self._finish_reason = piece.finish_reason or self._finish_reason
        self._chunks.append(Chunk(now, self._count(piece), is_content, size))

    def _count(self, piece: Piece) -> int | None:
        """The new tokens that the event tells of."""
        tokens = piece.token_ids
        if piece.usage is not None:
            self._usage = piece.usage
            if tokens is None and piece.usage.completion_tokens is not None:
                tokens = max(0, piece.usage.completion_tokens - self._counted)
        if tokens is None:
            self._unlisted |= piece.is_content
            return None
        self._counted += tokens
        return tokens

    def finished(self, fault: Fault | Literal[""], error: str) -> Answered:
        output_tokens, tokens_from = self._usage.completion_tokens, "usage"
        if (output_tokens is None or fault) and not self._unlisted and self._first_s is not None:
            output_tokens, tokens_from = self._counted, "events"
        return Answered(
            key=self.key,
            sent_s=self.sent_s,
            ended_s=time.perf_counter(),
            first_s=self._first_s,
            last_s=self._last_s,
            chunks=tuple(self._chunks),
            prompt_tokens=self._usage.prompt_tokens,
            cached_tokens=self._usage.cached_tokens,
            output_tokens=output_tokens,
            tokens_from=None if output_tokens is None else tokens_from,
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            tool_text="".join(self._tool_text),
            finish_reason=self._finish_reason,
            status=self.status,
            fault=fault,
            error=error,
        )


def _why(error: OSError) -> str:
    """In the words of the system where it has some."""
    number = error.errno
    return os.strerror(number) if number is not None and number in errno.errorcode else str(error)


async def _reason(response: aiohttp.ClientResponse) -> str:
    """The server's own sentence, or the beginning of its words where it sent no JSON."""
    raw = await response.content.read(BODY_BYTES)
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return raw.decode(errors="replace")[:200]
    return told(body.get("error", body) if isinstance(body, dict) else body)[:500]
