"""Responses by their ids, in memory: those that can be asked for again, continued, or cancelled while they run.

Bounded in number and in bytes; the oldest that has ended goes first. What has ended is kept as JSON, so its size is known. Knows
no engine and no HTTP.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from flashstep.server.errors import ApiError, quoted


class Running(msgspec.Struct):
    """A background response: ``task`` follows it, ``cancel`` ends it, ``snapshot`` is the object as it stands.

    ``num_bytes`` are those of the conversation that it answers.
    """

    task: asyncio.Task[None]
    cancel: Callable[[], None]
    snapshot: Callable[[], bytes]
    num_bytes: int = 0


class Ended(msgspec.Struct):
    """``response`` is the object, ``items`` its whole conversation, each as JSON. ``background``: it was one."""

    response: bytes
    items: bytes
    background: bool

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items)


class ResponseStore:
    """At most ``max_responses`` and ``max_bytes``; 0 responses keeps nothing."""

    def __init__(self, *, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._running: dict[str, Running] = {}
        self._ended: dict[str, Ended] = {}
        self.num_bytes = 0

    def fits(self, num_bytes: int) -> bool:
        """A response to a conversation of so many bytes can be kept, if others make room."""
        return self._max_responses > 0 and num_bytes <= self._max_bytes

    def no_room(self, num_bytes: int) -> str:
        """Why one that does not fit is not kept."""
        if self._max_responses == 0:
            return "this server keeps no responses"
        return f"the conversation has {num_bytes} bytes; {self._max_bytes} are kept of all responses"

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    def check_background(self, num_bytes: int) -> None:
        """Raise unless one more, of ``num_bytes``, may run: a running one is never dropped."""
        if not self.fits(num_bytes):
            raise ApiError(f"background is true, and {self.no_room(num_bytes)}", param="background")
        taken = sum(running.num_bytes for running in self._running.values())
        if len(self._running) >= self._max_responses or taken + num_bytes > self._max_bytes:
            raise ApiError(
                f"{len(self._running)} background responses run already; ask again later",
                status=503,
                headers={"Retry-After": "1"},
            )

    def run(self, id: str, running: Running) -> None:
        self._running[id] = running
        self.num_bytes += running.num_bytes
        self._make_room()

    def end(self, id: str, ended: Ended) -> None:
        """Keep ``ended``, unless it was forgotten while it ran, or is larger than everything that may be kept."""
        forgotten = not self._stop(id) and ended.background
        if not forgotten and self.fits(ended.num_bytes):
            self._ended[id] = ended
            self.num_bytes += ended.num_bytes
            self._make_room()

    def find(self, id: str, *, param: str = "response_id") -> Running | Ended:
        found: Running | Ended | None = self._running.get(id) or self._ended.get(id)
        if found is None:
            raise ApiError(
                f"there is no response {quoted(id)}, or it is no longer kept", param=param, status=404
            )
        return found

    def items(self, id: str) -> list[dict[str, Any]]:
        """The conversation up to and with response ``id``, to be continued."""
        found = self.find(id, param="previous_response_id")
        if isinstance(found, Running) or not found.items:
            raise ApiError(
                f"the response {quoted(id)} has no answer to continue from", param="previous_response_id"
            )
        return msgspec.json.decode(found.items)

    def forget(self, id: str) -> None:
        """Drop a response; one that runs is cancelled first."""
        found = self.find(id)
        if isinstance(found, Running):
            found.cancel()
            self._stop(id)
        else:
            self._drop(id)

    def _stop(self, id: str) -> bool:
        """Whether it ran."""
        running = self._running.pop(id, None)
        self.num_bytes -= 0 if running is None else running.num_bytes
        return running is not None

    def _drop(self, id: str) -> None:
        self.num_bytes -= self._ended.pop(id).num_bytes

    def _make_room(self) -> None:
        while self._ended and (len(self) > self._max_responses or self.num_bytes > self._max_bytes):
            self._drop(next(iter(self._ended)))
