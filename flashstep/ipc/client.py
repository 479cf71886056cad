"""The server's view of one engine process: submit requests, follow their tokens, notice its death. asyncio, one loop.

How to use it (everything is called on the event loop's thread)::

    client = EngineClient(addresses, sentinel=process.sentinel)
    ready = await client.start(timeout_s=60)             # raises EngineDied if the engine fails before it is ready
    with client.submit([request])[0] as stream:          # leaving the block early aborts the request
        async for output in stream:                      # RequestOutput: all tokens since the last one, merged
            ...                                          # the last one has finish_reason
    client.stats, client.alive, client.failure           # newest Stats or None; bool; why it is not alive, or None
    client.close()                                       # asks the engine to end

A stream raises ``RequestRejected`` (the engine cannot take the request; the text is for the user) or ``EngineDied``.
Knows nothing of HTTP or text. Slow readers cost nothing: what arrives meanwhile is merged into one output.
"""

import asyncio
from collections.abc import Iterable, Sequence
from types import TracebackType

from flashstep.ipc.channel import Addresses, ServerEnd
from flashstep.ipc.messages import (
    Abort,
    Failed,
    Outputs,
    Ready,
    Rejected,
    RequestOutput,
    Shutdown,
    Stats,
    Submit,
    ToServer,
)
from flashstep.request import Request

MESSAGES_AT_ONCE = 16  # handled before the event loop gets its turn again
LAST_WORDS_S = 0.2  # after the process has gone, how long its final message may still be on the way


class EngineDied(RuntimeError):
    """The engine process ended or reported that it failed; nothing more will come from it."""


class RequestRejected(ValueError):
    """The engine refused this request; the message says why and is meant for the user."""


class OutputStream:
    """The outputs of one request, as an async iterator that ends after the output with a ``finish_reason``.

    One reader. Each step of the iteration gives everything that has arrived since the last one, merged.
    """

    __slots__ = ("_client", "_error", "_pending", "_waiter", "done", "id", "params", "queued_tokens")

    def __init__(self, client: "EngineClient", request: Request) -> None:
        self.id = request.id
        self.params = request.params
        self.queued_tokens = len(request.prompt)  # 0 once the first token is here
        self.done = False  # the final output was delivered, or the stream was closed
        self._client = client
        self._pending: list[RequestOutput] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._pending:
            if self._error is not None:
                self.done = True
                raise self._error
            if self.done:
                raise StopAsyncIteration
            self._waiter = self._client.new_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        output = _merged(self._pending)
        self._pending = []
        if output.finish_reason is not None:
            self.done = True
        return output

    def abort(self) -> None:
        """End the request early and go on following: its last output tells how it went."""
        self._client.abort((self.id,))

    def close(self) -> None:
        """Stop following; abort the request if it has not ended. Safe to call twice."""
        if not self.done:
            self.done = True
            self._client.forget(self)
        self._pending = []
        self._wake()

    def __enter__(self) -> "OutputStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def push(self, output: RequestOutput) -> None:
        """Called by the client when an output arrives."""
        self._pending.append(output)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        """Called by the client: what has arrived is still delivered, then ``error`` is raised."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """One engine, seen from the server. See the module's docstring for its use.

    ``sentinel`` is the ``multiprocessing`` sentinel of the engine process (readable once the process has gone); None when
    the engine is not our child, in which case only a ``Failed`` message tells of its end.
    """

    def __init__(self, addresses: Addresses, *, sentinel: int | None = None) -> None:
        self.ready: Ready | None = None  # set by ``start``
        self.stats: Stats | None = None  # the newest, at most every 100 ms
        self.failure: str | None = None  # why the engine is gone
        self.num_queued_tokens = 0  # of whole prompts whose first token has not come
        self._end = ServerEnd(addresses)
        self._sentinel = sentinel
        self._closed = False
        self._streams: dict[str, OutputStream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: asyncio.Event | None = None  # set when ready or failed

    # ---- life ----------------------------------------------------------------------------------------------------

    async def start(self, *, timeout_s: float) -> Ready:
        """Wait until the engine is ready; raise ``EngineDied`` if it fails first, ``TimeoutError`` if it takes longer."""
        assert self._loop is None, "start() is called once"
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._loop.add_reader(self._end.fileno, self._drain)
        if self._sentinel is not None:
            self._loop.add_reader(self._sentinel, self._process_gone)
        self._drain()  # the descriptor is edge triggered: what came before it was watched gives no edge
        async with asyncio.timeout(timeout_s):
            while self.ready is None and self.failure is None:
                self._changed.clear()
                await self._changed.wait()
        if self.ready is None:
            raise EngineDied(self.failure)
        return self.ready

    @property
    def alive(self) -> bool:
        """Ready, and not failed since."""
        return self.ready is not None and self.failure is None

    @property
    def closed(self) -> bool:
        """``close`` was called: the engine's end is ours."""
        return self._closed

    async def wait_failed(self) -> str:
        """Return the reason once the engine is gone (for a watcher task that ends the server)."""
        assert self._changed is not None, "call start() first"
        while self.failure is None:
            self._changed.clear()
            await self._changed.wait()
        return self.failure

    def close(self) -> None:
        """Ask the engine to end and let go of the sockets; safe to call twice. Streams still open raise ``EngineDied``."""
        if self._closed:
            return
        self._closed = True
        if self.alive:
            self._end.send(Shutdown())
        self._fail("the engine was asked to shut down")
        if self._loop is not None:
            self._loop.remove_reader(self._end.fileno)
        self._end.close()

    # ---- requests ------------------------------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._streams)

    def submit(self, requests: Sequence[Request]) -> tuple[OutputStream, ...]:
        """Send requests (one message) and return their streams in order. Ids must be unique among unfinished requests."""
        if self.failure is not None:
            raise EngineDied(self.failure)
        assert self.ready is not None, "submit() before start()"
        for request in requests:
            assert request.id not in self._streams, f"request id {request.id!r} is in use"
        self._end.send(Submit.of(requests))  # first: what cannot be sent must leave no stream
        streams = tuple(OutputStream(self, request) for request in requests)
        self._streams.update((stream.id, stream) for stream in streams)
        self.num_queued_tokens += sum(stream.queued_tokens for stream in streams)
        return streams

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests early; each stream's last output then says "abort". Unknown or finished ids are ignored."""
        known = tuple(i for i in request_ids if i in self._streams)
        if known and self.failure is None:
            self._end.send(Abort(request_ids=known))

    def forget(self, stream: OutputStream) -> None:
        """Abort ``stream``'s request, if it is unfinished, and drop whatever still comes for it."""
        self._not_queued(stream)
        if self._streams.pop(stream.id, None) is not None and self.failure is None:
            self._end.send(Abort(request_ids=(stream.id,)))

    def _not_queued(self, stream: OutputStream) -> None:
        self.num_queued_tokens -= stream.queued_tokens
        stream.queued_tokens = 0

    def new_future(self) -> "asyncio.Future[None]":
        assert self._loop is not None
        return self._loop.create_future()

    # ---- what arrives --------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Take what is here, so much at a time: a fast engine must not keep the loop from its other work."""
        for _ in range(MESSAGES_AT_ONCE):
            if self._closed or (message := self._end.receive()) is None:
                return
            self._handle(message)
        assert self._loop is not None
        self._loop.call_soon(
            self._drain
        )  # the descriptor is edge triggered: for what is left no edge will come

    def _drain_all(self) -> None:
        """Take everything: the process has gone, so no more is made meanwhile."""
        while not self._closed and (message := self._end.receive()) is not None:
            self._handle(message)

    def _handle(self, message: ToServer) -> None:
        if isinstance(message, Outputs):
            self._hand_out(message)
        elif isinstance(message, Stats):
            self.stats = message
        elif isinstance(message, Rejected):
            stream = self._streams.pop(message.request_id, None)
            if stream is not None:
                self._not_queued(stream)
                stream.fail(RequestRejected(message.reason))
        elif isinstance(message, Ready):
            self.ready = message
            self._announce()
        elif isinstance(message, Failed):
            self._fail(message.reason)

    def _hand_out(self, message: Outputs) -> None:
        streams = self._streams
        for output in message.outputs:
            stream = streams.get(output.id)
            if stream is None:
                continue  # closed here; the engine has not heard of it yet
            if stream.queued_tokens and (output.tokens or output.finish_reason is not None):
                self._not_queued(stream)
            if output.finish_reason is not None:
                del streams[output.id]
            stream.push(output)

    def _process_gone(self) -> None:
        assert self._loop is not None and self._sentinel is not None
        self._loop.remove_reader(self._sentinel)
        self._drain_all()
        if self.failure is None:
            self._loop.call_later(LAST_WORDS_S, self._process_gone_silently)

    def _process_gone_silently(self) -> None:
        if self.failure is None and not self._closed:
            self._drain_all()
            self._fail("the engine process ended without a message (killed, or crashed outside Python)")

    def _fail(self, reason: str) -> None:
        if self.failure is not None:
            return
        self.failure = reason
        if self._loop is not None and self._sentinel is not None:
            self._loop.remove_reader(self._sentinel)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineDied(reason))
        self._announce()

    def _announce(self) -> None:
        if self._changed is not None:
            self._changed.set()


def _merged(outputs: list[RequestOutput]) -> RequestOutput:
    """One output that says what ``outputs`` say one after the other."""
    if len(outputs) == 1:
        return outputs[0]
    last = outputs[-1]
    # what comes once, with the first token: log-probabilities of the prompt may have come before
    first = next((output for output in outputs if output.cached_tokens is not None), last)
    return RequestOutput(
        id=last.id,
        tokens=tuple(token for output in outputs for token in output.tokens),
        finish_reason=last.finish_reason,
        failure=last.failure,
        stop_token=last.stop_token,
        logprobs=tuple(item for output in outputs for item in output.logprobs),
        prompt_logprobs=tuple(item for output in outputs for item in output.prompt_logprobs),
        cached_tokens=first.cached_tokens,
        replayed_tokens=first.replayed_tokens,
        transferred_tokens=first.transferred_tokens,
        queued_s=first.queued_s,
        prefill_s=first.prefill_s,
        preemptions=last.preemptions,
        acceptance=last.acceptance,
    )
