"""One client's connection: uvicorn's HTTP/1.1 protocol with bounds on what clients send, and on how slowly they send or read.

Takes bytes; gives ASGI requests, or an answer of its own and the end of the connection where the bytes are no request: not HTTP,
too long a URL or too many headers, too slow. Requests are answered one at a time: what a client sends before it has its answer
(pipelining) is not read, and the connection ends after that answer. Knows nothing of paths, but for the shape of an error.
"""

import asyncio
from typing import Any

import httptools
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from flashstep.server.errors import ApiError, shape_of
from flashstep.telemetry.log import Log

MAX_URL_BYTES = 8 << 10
SLOWEST_BYTES_S = 1000  # a client that sends at least so fast may take as long as it needs
LINGER_S = 2.0  # how long a refused client's bytes are still taken, so that it can read why
VERSIONS = ("1.0", "1.1")

_log = Log("server")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a head, headers of a request, seconds to send a request in and to read nothing in."""

    head_bytes: int
    headers: int
    receive_s: float
    read_s: float


class Connection(HttpToolsProtocol):
    """See the module. Of uvicorn's own state it uses ``cycle``, the newest request and its answer, and the parser."""

    parser: httptools.HttpRequestParser

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        limits: Limits,
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.url = b""
        self._limits = limits
        self._deaf = False  # nothing more is read: refused, or it ends after the running answer
        self._refusal: ApiError | None = None  # why a parser's callback gave up
        self._unread = 0  # bytes since the last that were a body: of a head, or of what frames a body
        self._received = 0  # bytes of this request
        self._began_s = 0.0
        self._sending: asyncio.TimerHandle | None = None  # runs while a request is awaited or comes in
        self._reading: asyncio.TimerHandle | None = None  # runs while the client does not read

    # ---- its life --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._unset_keepalive_if_required()
        if not self._answering and (self._sending is None or not self._received):
            self._await_request()  # its time begins with its first byte
        self._received += len(data)
        self._unread += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay_with_http1(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._give_up(error)
        else:
            if self._unread > self._limits.head_bytes:
                self._refuse(self._head_too_long())

    @property
    def _answering(self) -> bool:
        """A request's head is known, and its answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _give_up(self, error: httptools.HttpParserError) -> None:
        if self._answering and not self.cycle.more_body:  # the request is whole; this came behind it
            self._deaf = True
            self.cycle.keep_alive = False
        else:
            self._refuse(self._refusal or ApiError(f"this is not an HTTP/1.1 request: {error}"))

    # ---- what the parser finds -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._answering:
            raise httptools.HttpParserError("pipelined")
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._stop(ApiError(f"the URL is longer than {MAX_URL_BYTES} bytes", status=414))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > self._limits.headers:
            self._stop(ApiError(f"the request has more than {self._limits.headers} headers", status=431))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the head is read again without its wish
        if sum(len(name) + len(value) for name, value in self.headers) > self._limits.head_bytes:
            self._stop(self._head_too_long())
        if (version := self.parser.get_http_version()) not in VERSIONS:
            self._stop(ApiError(f"HTTP/{version} is not spoken here; send HTTP/1.1"))
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._unread = 0
        self._cancel_sending()
        super().on_message_complete()
        if not self._answering:  # refused before its body was there
            self._await_request()

    def _stop(self, refusal: ApiError) -> None:
        """Leave the parser, which can only be left by an exception; ``_give_up`` says the reason."""
        self._refusal = refusal
        raise httptools.HttpParserError(refusal.message)

    def _head_too_long(self) -> ApiError:
        return ApiError(f"the headers are longer than {self._limits.head_bytes} bytes", status=431)

    def _stay_with_http1(self, rest: bytes) -> None:
        """The client would like another protocol (Java's sends ``Upgrade: h2c``). The parser ends there; a new one goes on."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(ApiError("this is no proxy: CONNECT is not taken", status=405))
            return
        lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":  # what else it says still holds
                options = [option for option in value.split(b",") if b"upgrade" not in option.lower()]
                lines.append(b"connection: " + b",".join(options))
            elif name != b"upgrade":
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self._received = self._unread = 0
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    # ---- an answer without a request -------------------------------------------------------------------------------

    def _refuse(self, error: ApiError) -> None:
        """Answer with ``error`` unless an answer has begun, and end the connection."""
        self._deaf = True
        self._cancel_timers()
        answering = self._answering
        if answering:
            self.cycle.disconnected = True  # the handler that waits for the rest of a body
            self.cycle.message_event.set()
        if self.transport.is_closing():
            return
        _log.info("connection refused", client=self.client, status=error.status, reason=error.message)
        if answering and self.cycle.response_started:
            self.transport.abort()
            return
        self.flow.resume_reading()
        self.transport.write(self._answer(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.abort)
        else:  # TLS cannot be half closed
            self.transport.close()

    def _answer(self, error: ApiError) -> bytes:
        path = self.url.partition(b"?")[0].decode("latin-1")
        body = error.body(shape_of(path))
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        return STATUS_LINE[error.status] + lines + b"\r\n" + body

    # ---- slow clients ----------------------------------------------------------------------------------------------

    def _await_request(self) -> None:
        self._cancel_sending()
        self._began_s, self._received = self.loop.time(), 0
        self._sending = self.loop.call_later(self._limits.receive_s, self._check_sending)

    def _check_sending(self) -> None:
        now = self.loop.time()
        if self.flow.read_paused:  # we are the slow ones
            self._began_s, self._received = now, 0
        left_s = self._began_s + self._limits.receive_s + self._received / SLOWEST_BYTES_S - now
        if left_s > 0:
            self._sending = self.loop.call_later(left_s, self._check_sending)
        elif self._received or self.cycle is not None:
            self._refuse(ApiError("the request came too slowly", status=408))
        else:
            self.transport.close()  # it never said a word

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()

    def _await_reader(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(self._limits.read_s, self._check_reader, left)

    def _check_reader(self, before: int) -> None:
        """Drop a client that has taken nothing: its request is aborted as if it had hung up."""
        if self.transport.get_write_buffer_size() < before:
            self._await_reader()
            return
        _log.info("connection dropped", client=self.client, reason="the client does not read", unsent=before)
        self.transport.abort()

    def _cancel_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _cancel_timers(self) -> None:
        self._cancel_sending()
        if self._reading is not None:
            self._reading.cancel()
