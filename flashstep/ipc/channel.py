"""The sockets between a server and its engine: two one-way ZeroMQ pipes over ``ipc://``, one msgpack struct a message.

A reader binds, a writer connects: what is sent before the other end listens waits for it. Order is kept within a direction
and nothing is ever dropped: the queues have no high-water mark, because a lost Outputs would be a lost token. Knows nothing
of requests.
"""

import os
import shutil
import tempfile
from pathlib import Path

import msgspec
import zmq

from flashstep.config.errors import ConfigError
from flashstep.ipc.messages import ToEngine, ToServer

SOCKET_PATH_BYTES = 107  # of a Unix socket on Linux
LINGER_MS = 500  # how long a closing socket may still try to deliver its last words


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """Where one engine is reached: a private folder with one socket for each direction."""

    folder: str

    @classmethod
    def fresh(cls) -> "Addresses":
        """A new folder that only this user can enter. Its maker calls ``remove`` when both ends are closed.

        ``ConfigError`` if the machine's temporary folder has too long a name for a socket.
        """
        addresses = cls(folder=tempfile.mkdtemp(prefix="flashstep-"))
        length = len(os.fsencode(addresses.to_engine.removeprefix("ipc://")))
        if length > SOCKET_PATH_BYTES:
            addresses.remove()
            raise ConfigError(
                f"the temporary folder {tempfile.gettempdir()}",
                [
                    f"a socket in it has a path of {length} bytes, of {SOCKET_PATH_BYTES} allowed; set TMPDIR to a shorter one"
                ],
            )
        return addresses

    @property
    def to_engine(self) -> str:
        return f"ipc://{self.folder}/in"

    @property
    def to_server(self) -> str:
        return f"ipc://{self.folder}/out"

    def remove(self) -> None:
        shutil.rmtree(Path(self.folder), ignore_errors=True)


class _End:
    """One end: a socket to write and a socket to read."""

    def __init__(self, context: zmq.Context, out: zmq.Socket, into: zmq.Socket) -> None:
        self._context = context
        self._out = out
        self._into = into
        self._encode = msgspec.msgpack.Encoder().encode
        self._closed = False

    @property
    def fileno(self) -> int:
        """A descriptor that turns readable when messages may have arrived. Edge triggered: drain until None."""
        descriptor = self._into.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        return descriptor

    @property
    def readable(self) -> zmq.Socket:
        """The reading socket, for a ``zmq.Poller``."""
        return self._into

    def _send(self, message: object) -> None:
        self._out.send(self._encode(message), zmq.NOBLOCK)

    def _receive(self) -> bytes | None:
        try:
            return self._into.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._into.close(linger=0)
            self._out.close(linger=LINGER_MS)
            self._context.term()


def _sockets(addresses: Addresses) -> tuple[zmq.Context, zmq.Socket, zmq.Socket]:
    context = zmq.Context()
    out, into = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    for socket in (out, into):
        socket.set_hwm(0)
    return context, out, into


class ServerEnd(_End):
    """The server's end. It has nothing to say before the engine is Ready, and connects when it first speaks."""

    def __init__(self, addresses: Addresses) -> None:
        context, out, into = _sockets(addresses)
        into.bind(addresses.to_server)
        super().__init__(context, out, into)
        self._decode = msgspec.msgpack.Decoder(ToServer).decode
        self._to_engine = addresses.to_engine
        self._connected = False

    def send(self, message: ToEngine) -> None:
        if not self._connected:
            self._connected = True
            self._out.connect(
                self._to_engine
            )  # not earlier: connecting to a socket that is not there is tried again late
        self._send(message)

    def receive(self) -> ToServer | None:
        """The next message that is already here, or None."""
        data = self._receive()
        return None if data is None else self._decode(data)


class EngineEnd(_End):
    """The engine's end."""

    def __init__(self, addresses: Addresses) -> None:
        context, out, into = _sockets(addresses)
        into.bind(addresses.to_engine)
        out.connect(addresses.to_server)
        super().__init__(context, out, into)
        self._decode = msgspec.msgpack.Decoder(ToEngine).decode

    def send(self, message: ToServer) -> None:
        self._send(message)

    def receive(self) -> ToEngine | None:
        """The next message that is already here, or None."""
        data = self._receive()
        return None if data is None else self._decode(data)
