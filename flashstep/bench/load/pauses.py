"""Pauses between requests, as they were recorded, but never long with nothing running.

Where a whole lane is idle for ``lane_idle_s``, or all lanes for ``idle_s`` (H4), all its pauses are shortened by the same
time, so that the next one ends: the order of requests and what overlaps stay. Takes the event loop's times; knows no request.
"""

import asyncio
from collections import defaultdict


class _Wait:
    def __init__(self, due_s: float, lane: int, over: asyncio.Future[None]) -> None:
        self.due_s = due_s
        self.lane = lane
        self.over = over
        self.timer: asyncio.TimerHandle | None = None


class Pauses:
    """Must be made inside the event loop. ``skipped_s`` is the time left out so far, summed over all lanes and idle spells."""

    def __init__(self, *, idle_s: float, lane_idle_s: float) -> None:
        self._idle_s = {None: idle_s}
        self._lane_idle_s = lane_idle_s
        self._loop = asyncio.get_running_loop()
        self._waits: set[_Wait] = set()
        self._running: dict[int | None, int] = defaultdict(int)  # requests, by lane; None is all
        self._watches: dict[int | None, asyncio.TimerHandle] = {}
        self._is_over = False
        self.skipped_s = 0.0

    async def until(self, due_s: float, *, lane: int) -> None:
        """Return at ``due_s`` of the loop's time, or earlier where an idle spell was cut short or all is over."""
        if self._is_over or due_s <= self._loop.time():
            return
        wait = _Wait(due_s, lane, self._loop.create_future())
        self._waits.add(wait)
        self._arm(wait)
        for group in (lane, None):
            self._watch(group)
        try:
            await wait.over
        finally:
            self._waits.discard(wait)
            if wait.timer is not None:
                wait.timer.cancel()

    def sent(self, lane: int) -> None:
        """A request of ``lane`` begins."""
        for group in (lane, None):
            self._running[group] += 1
            watch = self._watches.pop(group, None)
            if watch is not None:
                watch.cancel()

    def answered(self, lane: int) -> None:
        """It has ended."""
        for group in (lane, None):
            self._running[group] -= 1
            self._watch(group)

    def end(self) -> None:
        """All pauses are over, and later ones take no time."""
        self._is_over = True
        for watch in self._watches.values():
            watch.cancel()
        for wait in self._waits:
            _finish(wait)

    def _arm(self, wait: _Wait) -> None:
        if wait.timer is not None:
            wait.timer.cancel()
        wait.timer = self._loop.call_at(wait.due_s, _finish, wait)

    def _watch(self, group: int | None) -> None:
        """From now on ``group`` is idle, if nothing of it runs and it is not watched yet."""
        if self._running[group] == 0 and group not in self._watches and not self._is_over:
            within_s = self._idle_s.get(group, self._lane_idle_s)
            self._watches[group] = self._loop.call_later(within_s, self._skip, group)

    def _skip(self, group: int | None) -> None:
        del self._watches[group]
        waits = [wait for wait in self._waits if group is None or wait.lane == group]
        if not waits:
            return
        rest_s = min(wait.due_s for wait in waits) - self._loop.time()
        if rest_s <= 0:
            return
        self.skipped_s += rest_s
        for wait in waits:
            wait.due_s -= rest_s
            self._arm(wait)


def _finish(wait: _Wait) -> None:
    if not wait.over.done():
        wait.over.set_result(None)
