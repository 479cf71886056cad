"""Routes and lifetime of the HTTP server: Starlette on uvicorn.

Takes an engine client and a chat encoder; gives an ASGI application (``create_app``) or runs it until told to stop
(``run_server``). Knows nothing of how the engine was started.
"""

import asyncio
import functools
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from flashstep.chat.encode import ChatEncoder
from flashstep.config.server import ServerOptions
from flashstep.ipc.client import EngineClient
from flashstep.sampling import checking
from flashstep.server import health, status
from flashstep.server.chat_completions import chat_completions
from flashstep.server.completions import completions
from flashstep.server.connection import Connection, Limits
from flashstep.server.errors import SENTENCES, ApiError
from flashstep.server.frontend import Frontend
from flashstep.server.gate import ID_HEADER, Gate
from flashstep.server.keys import Keys
from flashstep.server.messages import endpoints as messages
from flashstep.server.metrics.acceptance import log_acceptance
from flashstep.server.openapi.document import document, encoded, openapi
from flashstep.server.responses import endpoints as responses
from flashstep.server.responses.store import ResponseStore
from flashstep.server.sites import Sites
from flashstep.telemetry.log import Log

BACKLOG = 2048  # a burst of connections waits here instead of being refused
CUT_S = 2  # once told to stop, how long answers that outlast the grace period may take to be told that they are cut off

_log = Log("server")


def create_app(client: EngineClient, encoder: ChatEncoder, options: ServerOptions) -> Starlette:
    """The application. ``client`` must be ready (``await client.start(...)``) on the loop that will serve."""
    routes = [
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/messages", messages.create, methods=["POST"]),
        Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
        Route("/v1/responses", responses.create, methods=["POST"]),
        Route("/v1/responses/input_tokens", responses.input_tokens, methods=["POST"]),
        Route("/v1/responses/{id}", responses.retrieve),
        Route("/v1/responses/{id}", responses.delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/cancel", responses.cancel, methods=["POST"]),
        Route("/v1/models", health.models),
        Route("/v1/models/{name:path}", health.model),
        Route("/tokenize", health.tokenize, methods=["POST"]),
        Route("/detokenize", health.detokenize, methods=["POST"]),
        Route("/health", health.health),
        Route("/ping", health.health, methods=["GET", "POST"]),
        Route("/openapi.json", openapi),
        Route("/version", health.version),
        Route("/load", health.load),
        Route("/metrics", health.metrics),
    ]
    if not options.disable_status_page:
        routes += [
            Route("/", status.page),
            Route("/page/{name}", status.file),
            Route("/status", status.status),
        ]
    handlers = {ApiError: _refused, HTTPException: _no_such_path, Exception: _our_fault}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    front = app.state.front = Frontend(client, encoder, options)
    app.state.openapi = encoded(document(routes, options, vocab_size=front.ready.vocab_size))
    app.state.responses = ResponseStore(
        max_responses=options.max_stored_responses, max_bytes=options.max_stored_response_bytes
    )
    return app


def guarded(app: Starlette, options: ServerOptions) -> ASGIApp:
    """``app`` behind what every request passes: the gate, then the rules for other sites' pages, then the keys."""
    inner: ASGIApp = app
    if options.otlp_traces_endpoint is not None:
        from flashstep.server.tracing import Traced

        inner = Traced(inner)
    if keys := options.keys():
        inner = Keys(inner, keys=keys)
    inner = Sites(inner, options)
    if options.allowed_origins:
        inner = CORSMiddleware(
            inner,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
            expose_headers=(ID_HEADER,),
        )
    return Gate(inner, app.state.front)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.state.visit.param = "(unknown)" if error.param_is_theirs else error.param
    return error.response(request.url.path)


async def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = SENTENCES.get(error.status_code, error.detail)
    headers = {"Allow": _allowed(request)} if error.status_code == 405 else error.headers
    refused = ApiError(
        f"{request.method} {request.url.path}: {sentence}", status=error.status_code, headers=headers
    )
    return refused.response(request.url.path)


def _allowed(request: Request) -> str:
    """The methods of the path, which may be those of several routes."""
    paths = [route for route in request.app.routes if isinstance(route, Route)]
    first = next(route for route in paths if route.matches(request.scope)[0] != Match.NONE)
    return ", ".join(
        sorted({method for route in paths if route.path == first.path for method in route.methods or ()})
    )


async def _our_fault(request: Request, error: Exception) -> Response:
    """A defect of this server. Starlette raises the error again after this answer, so that it is logged with its trace."""
    return ApiError("internal error", status=500).response(request.url.path)


async def serve(
    client: EngineClient,
    encoder: ChatEncoder,
    options: ServerOptions,
    *,
    on_listening: Callable[[str, int], None] | None = None,
) -> None:
    """Take the port, wait for the engine, then serve until SIGINT or SIGTERM.

    Closes ``client``, which ends the engine, when it stops.

    Raises ``EngineDied`` or ``TimeoutError`` if the engine never gets ready, ``OSError`` if the port cannot be had. If the engine
    dies later the server stays: running requests get an error, new ones and /health get 503.
    """
    with _bound(options.host, options.port) as listener:  # first: loading may take minutes
        await client.start(timeout_s=options.ready_timeout_s)
        app = create_app(client, encoder, options)
        end_tracing = _begin_tracing(app.state.front)
        config = uvicorn.Config(
            guarded(app, options),
            log_level=options.uvicorn_log_level,
            access_log=False,
            lifespan="off",
            workers=1,  # as the next two, read from the environment if it is not said here
            proxy_headers=False,
            forwarded_allow_ips="",
            loop="uvloop",
            http=_protocol(options),
            ws="none",
            server_header=False,
            ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile,
            timeout_keep_alive=options.keep_alive_timeout_s,
            timeout_graceful_shutdown=options.shutdown_timeout + CUT_S,
        )
        listener.listen(BACKLOG)
        watcher = asyncio.create_task(_report_death(client))
        teller = asyncio.create_task(log_acceptance(client, interval_s=options.acceptance_log_s))
        if on_listening is not None:
            host, port = listener.getsockname()[:2]
            on_listening(host, port)
        try:
            with _signals_only_stop():
                await _Server(config, client, grace_s=options.shutdown_timeout).serve(sockets=[listener])
        finally:
            watcher.cancel()
            teller.cancel()
            checking.end()
            end_tracing()


def _begin_tracing(front: Frontend) -> Callable[[], None]:
    """Send a span of each request, where somebody wants them; gives what ends it."""
    endpoint = front.options.otlp_traces_endpoint
    if endpoint is None:
        return lambda: None
    from flashstep.server.tracing import RequestTracer

    tracer = RequestTracer(endpoint, model=front.names[0])
    front.metrics.listeners.append(tracer.ended)
    return tracer.close


def _protocol(options: ServerOptions) -> Any:
    limits = Limits(
        head_bytes=options.h11_max_incomplete_event_size,
        headers=options.h11_max_header_count,
        receive_s=options.receive_timeout_s,
        read_s=options.send_timeout_s,
    )
    return functools.partial(Connection, limits=limits)


class _Server(uvicorn.Server):
    """Ends what still runs after the grace period, or at a second Ctrl-C, with an error that its client can read.

    uvicorn would cancel it: the client would see a connection that breaks, and the log a trace for each.
    """

    def __init__(self, config: uvicorn.Config, client: EngineClient, *, grace_s: float) -> None:
        super().__init__(config)
        self._client = client
        self._grace_s = grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._grace_s, self._client.close)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            self._client.close()
            if running := self.server_state.tasks:
                await asyncio.wait(running, timeout=CUT_S)


@contextmanager
def _signals_only_stop() -> Generator[None]:
    """uvicorn raises the signal that stopped it again, for an earlier handler. Here there is none to call: ``serve`` returns."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_server(
    client: EngineClient,
    encoder: ChatEncoder,
    options: ServerOptions,
    *,
    on_listening: Callable[[str, int], None] | None = None,
) -> None:
    """``serve`` on a fresh uvloop event loop; returns when the server has stopped. For the command line.

    ``client`` is a new ``EngineClient`` whose engine process was started (it need not be ready: this waits). ``encoder`` is
    ``ChatEncoder(TextTokenizer.from_file(folder / "tokenizer.json"))``. ``on_listening(host, port)`` is called once requests are
    accepted (``port`` 0 in ``options`` takes a free one). The caller closes the client and ends the engine.
    """
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(serve(client, encoder, options, on_listening=on_listening))


def _new_loop() -> asyncio.AbstractEventLoop:
    return uvloop.new_event_loop()


def _bound(host: str, port: int) -> socket.socket:
    """A socket that owns the port; nobody can connect before it listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


async def _report_death(client: EngineClient) -> None:
    reason = await client.wait_failed()
    if not client.closed:
        _log.error("the engine is gone", reason=reason)
