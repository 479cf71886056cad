"""A server before a stub engine, as a program: ``python -m tests.server.served OPTIONS_JSON``.

Prints its port and its engine's process id, and serves until SIGTERM.
"""

import multiprocessing
import sys
from pathlib import Path

import msgspec

from flashstep.chat.encode import ChatEncoder
from flashstep.chat.tokenizer import TextTokenizer
from flashstep.config.server import ServerOptions
from flashstep.ipc.channel import Addresses
from flashstep.ipc.client import EngineClient
from flashstep.server.app import run_server
from flashstep.telemetry.log import configure
from tests.server import stub_engine


class Served(msgspec.Struct, kw_only=True):
    tokenizer: str
    engine: stub_engine.Options
    server: ServerOptions


def main(options: Served) -> None:
    configure()
    addresses = Addresses.fresh()
    options.engine.folder = addresses.folder
    process = multiprocessing.get_context("spawn").Process(
        target=stub_engine.main, args=(options.engine,), daemon=True
    )
    process.start()
    client = EngineClient(addresses, sentinel=process.sentinel)
    encoder = ChatEncoder(TextTokenizer.from_file(Path(options.tokenizer)))

    def announce(_: str, port: int) -> None:
        sys.stdout.write(f"{port} {process.pid}\n")
        sys.stdout.flush()

    try:
        run_server(client, encoder, options.server, on_listening=announce)
    finally:
        client.close()
        process.join(2)
        addresses.remove()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1].encode(), type=Served))
