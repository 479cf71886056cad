"""Ctrl-C and SIGTERM during a run: what is open ends, what was answered is kept, and pressing again loses nothing.

Takes the event loop's signals; tells whoever asked (``then``). Knows no run.
"""

import asyncio
import signal
from collections.abc import Callable
from typing import Self

INTERRUPTED = "interrupted"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """``with Stopping() as stopping:`` inside a running loop, around all that must not be lost, the ledger's line too."""

    def __init__(self) -> None:
        self._ends: list[Callable[[], None]] = []
        self.is_asked = False

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._ask)
        return self

    def __exit__(self, *_error: object) -> None:
        for number in SIGNALS:
            self._loop.remove_signal_handler(number)
            if self.is_asked:
                signal.signal(number, signal.SIG_IGN)  # all is kept: the process only has to end

    def then(self, end: Callable[[], None]) -> None:
        """Call ``end`` when somebody asks, or now if somebody has."""
        self._ends.append(end)
        if self.is_asked:
            end()

    def _ask(self) -> None:
        self.is_asked = True
        for end in self._ends:
            end()
