"""One streamed request to an OpenAI-compatible server over HTTP, with the time of each event.

Takes a ``Call``; gives ``Answered``, whatever the server does: a refusal, a broken stream or a timeout is a ``fault`` in it,
with all that came before. Times are ``time.perf_counter()`` seconds. Definitions E13 to E17. Knows no workload and no
statistics.
"""

import asyncio
import base64
import contextlib
import errno
import resource
import time
from collections.abc import Mapping
from itertools import pairwise
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self
from urllib.parse import unquote, urlsplit

import aiohttp
import msgspec

from flashstep.bench.load.cards import cards
from flashstep.bench.load.causes import shown, why, words_of
from flashstep.bench.load.events import DONE, EventReader, MalformedEvent, Piece, Usage, read_piece

# Idle connections are closed before servers close them (uvicorn: 5 s), so that no request meets a closing one.
KEEP_ALIVE_S = 3.0
BODY_BYTES = 64 << 10  # of an answer that is no stream: enough for its reason
END_WITHIN_S = 0.1  # after [DONE]: then the connection serves again; a server that does not end it loses it
OUT_OF_FILES = {errno.EMFILE, errno.ENFILE}
AWAY_AFTER = 20  # requests in a row that did not reach the server: it is gone, and the rest of a plan would only fail too
Fault = Literal[
    "unreachable",
    "out of files",
    "status",
    "not a stream",
    "malformed",
    "error event",
    "cut off",
    "timeout",
    "interrupted",
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
    content event listed, and None is no count. ``fault`` is "" for a whole answer; ``error`` is its sentence, else. ``status``
    is 0 where no answer began. ``unread`` says what of a whole answer was against the format and is left out.
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
    unread: str = ""

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
        """E16, and E13's TPOT: (request latency - TTFT) / (output tokens - 1); None below two tokens, or not counted."""
        if (
            self.first_s is None
            or self.last_s is None
            or self.output_tokens is None
            or self.output_tokens < 2
        ):
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """E13's ITL: seconds between content chunks, as the client saw them; a chunk may hold several tokens."""
        return tuple(after - before for before, after in pairwise(self.content_s))

    @property
    def content_s(self) -> tuple[float, ...]:
        """When each content chunk was read."""
        return tuple(chunk.at_s for chunk in self.chunks if chunk.is_content)


class Page(NamedTuple):
    """What a GET gave. ``status`` is 0 where no answer came; ``why`` is then the reason, else the server's own words where it
    refused."""

    status: int
    body: bytes
    why: str


def bare(answered: Answered) -> Answered:
    """What figures need of it: a long run has millions of chunks, and they are in the raw file."""
    return msgspec.structs.replace(answered, chunks=(), text="", reasoning="", tool_text="")


class Client:
    """Connections to one server. ``base_url`` is with or without /v1, and a user and password in it go into a header;
    ``timeout_s`` is for one whole answer.

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
        self.root, user = without_user(base_url)
        self._timeout_s = timeout_s
        self._limit = connections or 0
        self._headers = {
            "Accept": "text/event-stream",
            "Content-Type": "application/json",
            **(headers or {}),
        }
        if user:
            self._headers["Authorization"] = "Basic " + base64.b64encode(unquote(user).encode()).decode()
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._open: set[asyncio.Timeout] = set()
        self._interrupted = False

    async def __aenter__(self) -> Self:
        _raise_file_limit()
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
            if answer.is_done:
                return answer.finished(answer.fault, answer.error)
            if self._interrupted:
                return answer.finished("interrupted", "interrupted")
            return answer.finished("timeout", f"no end within {self._timeout_s:g} s")
        except aiohttp.ClientConnectorError as error:
            fault = "out of files" if getattr(error, "errno", None) in OUT_OF_FILES else "unreachable"
            return answer.finished(fault, f"{self.root} cannot be reached: {why(error)}")
        except (aiohttp.ClientError, OSError) as error:
            return answer.finished("cut off", f"the connection broke: {why(error)}")
        except MalformedEvent as error:
            return answer.finished("malformed", f"the server sent what is no event: {error}")
        return answer.finished(answer.fault, answer.error)

    def interrupt(self) -> None:
        """End every open request now, and each later one at once: all answer with the fault "interrupted"."""
        self._interrupted = True
        now = asyncio.get_running_loop().time()
        for deadline in self._open:
            deadline.reschedule(now)

    async def get(self, path: str) -> bytes | None:
        """The body of a GET that the server answers with 200, else None."""
        page = await self.page(path)
        return page.body if page.status == 200 else None

    async def page(self, path: str, *, within_s: float = 10.0) -> Page:
        """What a GET gives, whatever it is."""
        try:
            async with asyncio.timeout(within_s), self._session.get(self.root + path) as response:
                body = await response.read()
        except TimeoutError:
            return Page(0, b"", f"no answer within {within_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return Page(0, b"", shown(why(error)))
        status = response.status
        return Page(status, body, "" if status == 200 else shown(f"HTTP {status}: {words_of(body)}"))

    async def models(self) -> list[str]:
        """What /v1/models lists; empty where it lists nothing that can be read."""
        return list(cards(await self.get("/v1/models")))

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
        self._unread = ""
        self._ended_s: float | None = None
        self.is_done = False

    async def read(self, content: aiohttp.StreamReader) -> None:
        """All events until [DONE] or an error, or until the server ends the answer without them."""
        reader = EventReader()
        clock = time.perf_counter
        while not self.is_done and (received := await content.readany()):
            now = clock()
            for data in reader.feed(received):
                if data == DONE:
                    self.is_done, self._ended_s = True, now
                    break
                self._take(read_piece(data), now, len(data))
                if self.fault:  # an error event: nothing comes behind it
                    self.is_done, self._ended_s = True, now
                    break
        if not self.fault and self._finish_reason is None:
            self.fault, self.error = "cut off", "the stream ended without a finish reason"
        if self.is_done:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_WITHIN_S):
                    await content.readany()

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
        self._unread = self._unread or piece.unread
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
            ended_s=time.perf_counter() if self._ended_s is None else self._ended_s,
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
            error=shown(error),
            unread=shown(self._unread),
        )


def without_user(url: str) -> tuple[str, str]:
    """The root of a server's ``url`` without /v1, and the "user:password" that stood in it, or ""; ``ValueError``."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--url is {url!r}; it begins with http:// or https://")
    root = url.rstrip("/").removesuffix("/v1")
    user, sign, host = urlsplit(root).netloc.rpartition("@")
    return root.replace(f"{user}{sign}{host}", host, 1), user


def _raise_file_limit() -> None:
    """A request under way is an open file: as many as the system allows this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _reason(response: aiohttp.ClientResponse) -> str:
    """The server's own sentence, or the beginning of its words where it sent no JSON."""
    raw = bytearray()
    while len(raw) < BODY_BYTES and (more := await response.content.readany()):
        raw += more
    return words_of(bytes(raw))
