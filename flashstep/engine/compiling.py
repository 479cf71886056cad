"""Requests that wait for their constraints: compiled in threads of their own, so that the steps of others go on meanwhile.

Takes requests that the engine has checked; gives each back, with what was compiled, once it is done, whichever is done first.
Knows no scheduler: to it these requests have not arrived yet.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from flashstep.request import Constraint, Request
from flashstep.runner.facts import Compiled

MOST_THREADS = 4


class Compiling:
    """See the module's docstring. One thread uses it; ``compile`` runs in others, as does ``wake``, once a request is done."""

    def __init__(self, compile: Callable[[Constraint], Compiled], *, wake: Callable[[], None]) -> None:
        threads = min(MOST_THREADS, max((os.cpu_count() or 1) // 2, 1))
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="compiling")
        self._compile = compile
        self._wake = wake
        self._waiting: dict[str, tuple[Request, Future[Compiled]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    def begin(self, request: Request) -> None:
        """``request`` waits from now on; it has a constraint."""
        constraint = request.params.constraint
        assert constraint is not None and request.id not in self._waiting, request.id
        future = self._threads.submit(self._compile, constraint)
        self._waiting[request.id] = (request, future)
        future.add_done_callback(lambda _: self._wake())

    def drop(self, request_ids: Iterable[str]) -> list[str]:
        """Forget those that wait here, and give their ids; what is being compiled for them is thrown away."""
        here = [request_id for request_id in request_ids if request_id in self._waiting]
        for request_id in here:
            _, future = self._waiting.pop(request_id)
            future.cancel()
        return here

    def done(self) -> list[tuple[Request, Future[Compiled]]]:
        """Those that wait no longer, in order of arrival."""
        ready = [item for item in self._waiting.values() if item[1].done()]
        for request, _ in ready:
            del self._waiting[request.id]
        return ready

    def close(self) -> list[str]:
        """Drop all; gives their ids."""
        left = self.drop(list(self._waiting))
        self._threads.shutdown(wait=False, cancel_futures=True)
        return left
