"""The engine behind the wire: plans and launches step N+1 while step N runs, and speaks for both.

Takes an engine, its end of the wire and the thread that the runner lives in; gives one Outputs message a step, Stats at
most every 100 ms, and Rejected for what the door refuses. Requests whose constraints are being compiled wait beside the steps
(``compiling``). Two steps are in flight at most. Knows no process: ``launch``
starts and ends it.
"""

import math
import os
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import zmq

from flashstep.engine.compiling import Compiling
from flashstep.engine.engine import Engine, Planned
from flashstep.ipc.channel import EngineEnd
from flashstep.ipc.messages import Abort, Outputs, Rejected, RequestOutput, Shutdown, Submit
from flashstep.request import FinishReason, Request
from flashstep.runner.facts import Launched
from flashstep.step import MAX_IN_FLIGHT, StepResult
from flashstep.telemetry.log import Log

STATS_INTERVAL_S = 0.1
IDLE_CHECK_MS = 1000  # idle for so long: check the bookkeeping, once
log = Log("engine.loop")


class EngineLoop:
    """``run`` serves until ``stop`` is called (from a signal handler too), the front end says Shutdown, or it has gone.

    ``parent`` is a descriptor that turns readable when the front end's process has gone (None: nobody to outlive).
    """

    def __init__(
        self, engine: Engine, end: EngineEnd, *, runner_thread: ThreadPoolExecutor, parent: int | None
    ) -> None:
        self._engine = engine
        self._end = end
        self._thread = runner_thread
        self._parent = parent
        self._launches: deque[Future[Launched]] = deque()  # steps in flight, oldest first
        self._result: Future[StepResult] | None = None  # of the oldest
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._compiling = Compiling(engine.compile, wake=self._poke)
        self._stopping = False
        self._stats_due = True  # something has changed since the last Stats
        self._stats_at = 0.0
        self._check_due = False  # steps have run since the memory's bookkeeping was last checked
        self._poller = zmq.Poller()
        self._poller.register(end.readable, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        if parent is not None:
            self._poller.register(parent, zmq.POLLIN)

    def stop(self) -> None:
        """Ask ``run`` to return after the steps in flight. Safe in a signal handler and from any thread."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        """Serve. What a step raises is raised here."""
        self._end.send(self._engine.ready)
        while not self._stopping:
            self._read_messages()
            self._add_compiled()
            self._plan_ahead()
            self._tell_stats()
            self._wait()
            while self._oldest_is_over():
                self._commit()
        self._wind_up()

    # ---- moves ---------------------------------------------------------------------------------------------------

    def _read_messages(self) -> None:
        while (message := self._end.receive()) is not None:
            self._stats_due = True
            if isinstance(message, Submit):
                for request in message.whole():
                    self._take(request)
            elif isinstance(message, Abort):
                self._abort(message.request_ids)
            elif isinstance(message, Shutdown):
                self._stopping = True

    def _take(self, request: Request) -> None:
        try:
            if request.params.constraint is None:
                self._engine.add(request)
                return
            self._engine.check(request)
            if request.id in self._compiling:
                raise ValueError(f"request id {request.id!r} is in use")
            self._compiling.begin(request)
        except ValueError as error:
            self._end.send(Rejected(request_id=request.id, reason=str(error)))

    def _add_compiled(self) -> None:
        """Requests whose constraint is compiled go on to the engine."""
        for request, compiled in self._compiling.done():
            self._stats_due = True
            try:
                broken = compiled.exception()  # it costs its own request only
                if broken is not None:
                    log.error("a grammar could not be compiled", error=repr(broken))
                    raise ValueError(f"the grammar could not be compiled: {broken}")
                self._engine.add(request, compiled.result())
            except ValueError as error:
                self._end.send(Rejected(request_id=request.id, reason=str(error)))

    def _abort(self, request_ids: Iterable[str]) -> None:
        ids = tuple(request_ids)
        self._tell([_aborted(request_id) for request_id in self._compiling.drop(ids)])
        self._tell(self._engine.abort(ids))

    def _plan_ahead(self) -> None:
        """Launch what can be planned; only then let the runner's thread wait for the oldest step's result."""
        while not self._stopping and len(self._launches) < MAX_IN_FLIGHT:
            planned = self._engine.plan()
            if planned is None:
                break
            launch = self._thread.submit(self._launch, planned)
            launch.add_done_callback(lambda _: self._poke())
            self._launches.append(launch)
        self._ask_for_result()

    def _launch(self, planned: Planned) -> Launched:
        """In the runner's thread. A step may be over before its result is asked for, while the next one is being launched."""
        step = self._engine.launch(planned)
        step.when_over(self._poke)
        return step

    def _ask_for_result(self) -> None:
        if self._result is None and self._launches:
            self._result = self._thread.submit(_result, self._launches[0])
            self._result.add_done_callback(lambda _: self._poke())

    def _poke(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _oldest_is_over(self) -> bool:
        """A step that was over when it was launched does not wait for the launch behind it."""
        if not self._launches or not self._launches[0].done():
            return False
        if self._result is not None and self._result.done():
            return True
        failed = self._launches[0].exception() is not None
        return failed or self._launches[0].result().over

    def _commit(self) -> None:
        launch, result, self._result = self._launches.popleft(), self._result, None
        step = launch.result()
        if step.over:
            self._tell(self._engine.commit(step.result()))
        else:
            assert result is not None
            self._tell(self._engine.commit(result.result()))
        self._stats_due = self._check_due = True

    def _tell(self, outputs: list[RequestOutput]) -> None:
        if outputs:
            self._end.send(Outputs(outputs=tuple(outputs)))

    def _tell_stats(self) -> None:
        now = time.monotonic()
        if self._stats_due and now - self._stats_at >= STATS_INTERVAL_S:
            self._stats_due = False
            self._stats_at = now
            self._end.send(msgspec.structs.replace(self._engine.stats(), deferred=len(self._compiling)))

    def _wait(self) -> None:
        """Sleep until a message, a result, a signal, or the moment for Stats."""
        timeout = None
        if self._stats_due:
            timeout = math.ceil(max(self._stats_at + STATS_INTERVAL_S - time.monotonic(), 0) * 1000)
        elif self._check_due and not self._launches:
            timeout = IDLE_CHECK_MS
        ready = dict(self._poller.poll(timeout))
        if not ready and not self._stats_due and not self._engine.has_work:
            self._engine.check_integrity()  # idle: nobody waits for the milliseconds that it takes
            self._check_due = False
        if self._wake in ready:
            os.eventfd_read(self._wake)
        if self._parent is not None and self._parent in ready:
            log.warning("the front end has gone")
            self._stopping = True

    def _wind_up(self) -> None:
        """Let the steps in flight return, then end every request that is left."""
        while self._launches:
            self._ask_for_result()
            self._commit()
        self._tell([_aborted(request_id) for request_id in self._compiling.close()])
        self._tell(self._engine.abort(self._engine.unfinished))
        self._engine.check_integrity()
        log.info("ended", steps=self._engine.stats().steps)


def _aborted(request_id: str) -> RequestOutput:
    return RequestOutput(id=request_id, finish_reason=FinishReason.ABORT.value)


def _result(launch: "Future[Launched]") -> StepResult:
    """In the runner's thread, behind the launch."""
    return launch.result().result()
