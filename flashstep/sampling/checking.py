"""``grammar.problem`` in processes of its own, each with a limit of time and of memory: for grammars that anybody may send.

llguidance's limits do not bound everything: one ``multipleOf`` of 99,999,989 compiles for minutes and takes gigabytes, and what
overflows its stack takes the process with it (measured: docs/log.md, 2026-12-01). So each try is a fork of its own, which can go
too far without harm. Everybody gets a short try first, the newest before all; what takes longer waits in a line of its own. So an
ordinary grammar stands behind a hostile one or two. Knows constraints and verdicts, nothing else; torch-free.
"""

import ctypes
import multiprocessing
import os
import resource
import signal
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, TypeVar

from flashstep.request import Constraint
from flashstep.sampling import grammar

SHORT_SECONDS = 0.05  # of the processor, for the first try; a schema of 45,000 characters takes 0.02
MOST_SECONDS = 1.0  # for the second
MOST_WAIT_S = 4.0  # of one try, for a machine that is busy with other things
MOST_MEGABYTES = 128  # beside what the process takes by itself
# How a try ends that went too far, as an exit code (minus a signal): by its time of the processor, or for want of its memory. Any
# other end is the machine's doing and says nothing of the grammar.
OUT_OF_TIME = -signal.SIGPROF
OUT_OF_MEMORY = frozenset({1, -signal.SIGABRT, -signal.SIGSEGV})
TOO_FAR = f"compiling it takes more than {MOST_SECONDS:g} second or {MOST_MEGABYTES} MB"
START_TIMEOUT_S = 60.0
PROCESSES = min(4, max((os.cpu_count() or 1) // 2, 1))  # for short tries; one more is for long ones
MOST_LONG = 8  # who may wait for a long try; the next is told to come again
THREADS = ThreadPoolExecutor(32, thread_name_prefix="grammars")  # for those who wait for a verdict
REMEMBERED = 128  # verdicts
NAME = "flashstep-grammars"  # of each process
PR_SET_PDEATHSIG = 1

T = TypeVar("T")
_verdicts: OrderedDict[Constraint, str | None] = OrderedDict()
_changed = threading.Condition()  # guards the verdicts, the lines and who still waits in them


class Busy(Exception):
    """Nobody knows: the checkers or the machine had no time to look at a grammar."""

    def __init__(self) -> None:
        super().__init__("this server is too busy to compile the grammar of the constraint; try again later")


class Wait:
    """Somebody who waits for verdicts; ``over``: no longer, so that what is not remembered is ``Busy`` at once."""

    def __init__(self, *, over: bool = False) -> None:
        self.over = over

    def end(self) -> None:
        """From any thread."""
        with _changed:
            self.over = True
            _changed.notify_all()

    def run(self, make: Callable[[], T]) -> T:
        """``make()``, whose calls of ``problem`` wait no longer than this does."""
        before = _wait.set(self)
        try:
            return make()
        finally:
            _wait.reset(before)


_FOR_EVER = Wait()
_wait: ContextVar[Wait] = ContextVar("wait", default=_FOR_EVER)


def problem(constraint: Constraint) -> str | None:
    """What is wrong with the grammar of ``constraint``, in words; None if matching can begin. ``Busy``: nobody knows.

    From any thread: it waits its turn, unless the verdict is remembered.
    """
    if wrong := grammar.too_long(constraint):
        return wrong  # not remembered: that would keep it
    try:
        return _remembered(constraint)
    except KeyError:
        pass
    wait = _wait.get()
    for line, seconds in ((_short, SHORT_SECONDS), (_long, MOST_SECONDS)):
        checker = line.take(wait)
        try:
            return _remembered(constraint)  # others may have asked meanwhile
        except KeyError:
            tried = checker.tried(constraint, seconds, wait)
        finally:
            line.give_back(checker)
        if tried.exit_code == 0:
            return _remember(constraint, tried.verdict)
        if tried.exit_code in OUT_OF_MEMORY:
            break
        if tried.exit_code != OUT_OF_TIME:
            raise Busy
    return _remember(constraint, TOO_FAR)


def _remembered(constraint: Constraint) -> str | None:
    """``KeyError`` if it is not."""
    with _changed:
        _verdicts.move_to_end(constraint)
        return _verdicts[constraint]


def _remember(constraint: Constraint, verdict: str | None) -> str | None:
    with _changed:
        _verdicts[constraint] = verdict
        if len(_verdicts) > REMEMBERED:
            _verdicts.popitem(last=False)
    return verdict


def end() -> None:
    """When a server stops: the threads of those who have left wait for no try that still runs."""
    for process in multiprocessing.active_children():
        if process.name == NAME:
            process.kill()


class _Tried(NamedTuple):
    """``exit_code``: of the process (minus a signal); 0: there is a verdict."""

    verdict: str | None
    exit_code: int


class _Line:
    """Checkers, and who waits for one: first come, first served, or the newest first, who waits for one try at most."""

    def __init__(self, checkers: int, *, most_waiting: int | None = None, newest_first: bool = False) -> None:
        self._idle = [_Checker() for _ in range(checkers)]
        self._waiting: deque[object] = deque()
        self._most_waiting = most_waiting
        self._next = -1 if newest_first else 0

    def take(self, wait: Wait) -> "_Checker":
        """``Busy`` if too many wait, or once ``wait`` is over."""
        ticket = object()
        with _changed:
            if wait.over or len(self._waiting) == self._most_waiting:
                raise Busy
            self._waiting.append(ticket)
            try:
                _changed.wait_for(lambda: wait.over or (self._idle and self._waiting[self._next] is ticket))
                if wait.over:
                    raise Busy
                return self._idle.pop()
            finally:
                self._waiting.remove(ticket)
                _changed.notify_all()

    def give_back(self, checker: "_Checker") -> None:
        with _changed:
            self._idle.append(checker)
            _changed.notify_all()


class _Checker:
    """One process, started when it is first needed, that forks for each try."""

    def __init__(self) -> None:
        self._end: Connection | None = None

    def tried(self, constraint: Constraint, seconds: float, wait: Wait) -> _Tried:
        """``Busy`` if somebody ends the process, and the one that is started in its place while ``wait`` is not over."""
        for _ in range(2):
            if wait.over:
                break
            try:
                end = self._end or self._start()
                end.send((constraint, seconds, MOST_WAIT_S))
                return end.recv()
            except (EOFError, OSError):
                if self._end is not None:
                    self._end.close()
                self._end = None
        raise Busy

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        end, other = context.Pipe()
        process = context.Process(target=_serve, args=(other,), name=NAME, daemon=True)
        process.start()
        other.close()
        if not end.poll(START_TIMEOUT_S):
            process.kill()
            raise RuntimeError("the process that checks grammars does not start")
        end.recv()
        self._end = end
        return end


_short = _Line(PROCESSES, newest_first=True)
_long = _Line(1, most_waiting=MOST_LONG)


def _serve(end: Connection) -> None:
    """The process: one constraint in, one try out, until nobody is at the other end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; our end is the server's
    grammar.problem(Constraint(grammar='start: "a"'))
    end.send(None)
    _limit_memory()
    try:
        while True:
            end.send(_forked(*end.recv()))
    except (EOFError, OSError):
        return


def _forked(constraint: Constraint, seconds: float, wait_s: float) -> _Tried:
    """A try in a process of its own, which the signal of one of its timers ends. This one has no threads, so it may fork."""
    source, sink = multiprocessing.Pipe(duplex=False)
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with its parent,
            if os.getppid() == parent:  # which may have ended before
                signal.setitimer(signal.ITIMER_PROF, seconds)
                signal.setitimer(signal.ITIMER_REAL, wait_s)
                sink.send(grammar.problem(constraint))
                os._exit(0)
        finally:
            os._exit(1)
    sink.close()
    verdict = None
    try:
        verdict = source.recv()
    except EOFError:
        pass  # its status says why
    finally:
        source.close()
    _, status = os.waitpid(pid, 0)
    return _Tried(verdict, os.waitstatus_to_exitcode(status))


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (MOST_MEGABYTES << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(
        os.open(os.devnull, os.O_WRONLY), 2
    )  # what an allocator says when it gives up is no news to the server's log
