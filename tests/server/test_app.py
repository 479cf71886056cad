"""The server's life before it serves."""

import asyncio
import http.client
import json
import os
import signal
import socket
from collections.abc import Callable

import pytest

from flashstep.chat.encode import ChatEncoder
from flashstep.chat.tokenizer import TextTokenizer
from flashstep.config.server import ServerOptions
from flashstep.ipc.channel import Addresses
from flashstep.ipc.client import EngineClient
from flashstep.server.app import serve
from tests.server.conftest import MODEL, TOKENIZER, Server


async def test_a_taken_port_is_told_before_the_engine_has_loaded() -> None:
    encoder = ChatEncoder(TextTokenizer.from_file(TOKENIZER))
    addresses = Addresses.fresh()
    client = EngineClient(addresses)  # of an engine that never gets ready
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = ServerOptions(served_model_name=(MODEL,), port=taken.getsockname()[1])
        try:
            with pytest.raises(OSError, match="Address already in use"):
                await asyncio.wait_for(serve(client, encoder, options), timeout=5)
        finally:
            client.close()
            addresses.remove()


@pytest.mark.parametrize("grace_s", [0, 60])
def test_the_grace_period_is_what_was_asked_for(own_server: Callable[..., Server], grace_s: int) -> None:
    """Without one a running answer is cut off at once and told so; within a long one it ends as it should."""
    server = own_server(serving={"shutdown_timeout": grace_s})
    salt = server.script("slow", [[5]] * 100, finish="length", step_s=0.01)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "x", "stream": True, **salt}))
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    os.kill(server.pid, signal.SIGTERM)
    rest = response.read().decode()
    assert rest.endswith("data: [DONE]\n\n")
    assert ('"code":503' in rest) == (grace_s == 0)
    assert ('"finish_reason":"length"' in rest) == (grace_s > 0)
