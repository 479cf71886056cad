"""The server's life before it serves."""

import asyncio
import socket

import pytest

from flashstep.chat.encode import ChatEncoder
from flashstep.chat.tokenizer import TextTokenizer
from flashstep.config.server import ServerOptions
from flashstep.ipc.channel import Addresses
from flashstep.ipc.client import EngineClient
from flashstep.server.app import serve
from tests.server.conftest import MODEL, TOKENIZER


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
