"""``grammar.problem`` in processes of its own, each with a limit of time and of memory: for grammars that anybody may send.

llguidance's limits do not bound everything: one ``multipleOf`` of 99,999,989 compiles for minutes and takes gigabytes, and what
overflows its stack takes the process with it (measured: docs/log.md, 2026-12-01). A process that goes too far is ended and
replaced. Knows constraints and verdicts, nothing else; torch-free.
"""

import multiprocessing
import os
import queue
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path

from flashstep.request import Constraint
from flashstep.sampling import grammar

MOST_SECONDS = 1.0  # of the processor
MOST_WAIT_S = 4.0  # for a machine that is busy with other things
MOST_MEGABYTES = 128  # beside what the process takes by itself
TOO_FAR = f"compiling it takes more than {MOST_SECONDS:g} second or {MOST_MEGABYTES} MB"
START_TIMEOUT_S = 60.0
DYING_S = 0.2
PROCESSES = min(4, max((os.cpu_count() or 1) // 2, 1))
# for those who wait for a verdict: no more than can be given at a time, and no other work behind them
THREADS = ThreadPoolExecutor(PROCESSES, thread_name_prefix="grammars")
REMEMBERED = 128  # verdicts


@lru_cache(maxsize=REMEMBERED)
def problem(constraint: Constraint) -> str | None:
    """What is wrong with the grammar of ``constraint``, in words; None if matching can begin. ``Busy``: nobody knows.

    From any thread: it waits its turn.
    """
    checker = _idle.get()
    try:
        return checker.problem(constraint)
    finally:
        _idle.put(checker)


class Busy(Exception):
    """The machine had no time to look at a grammar."""

    def __init__(self) -> None:
        super().__init__("this server is too busy to compile the grammar of the constraint; try again later")


class _Checker:
    """One process, started when it is first needed."""

    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None
        self._end: Connection | None = None

    def problem(self, constraint: Constraint) -> str | None:
        used = self._end is not None
        end = self._end or self._start()
        seconds = self._seconds()
        try:
            end.send(constraint)
            if end.poll(MOST_WAIT_S):
                return end.recv()
        except (EOFError, OSError):  # it has gone, over a limit or by a crash
            out_of_time = self._stop() == -signal.SIGPROF
            # of its memory others may have left little: a fresh one decides
            return self.problem(constraint) if used and not out_of_time else TOO_FAR
        seconds = self._seconds() - seconds
        self._stop()
        if seconds > MOST_SECONDS / 2:
            return TOO_FAR
        raise Busy

    def _seconds(self) -> float:
        """Of the processor, that it has used so far."""
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        end, other = context.Pipe()
        process = context.Process(target=_serve, args=(other,), name="flashstep-grammars", daemon=True)
        process.start()
        other.close()
        if not end.poll(START_TIMEOUT_S):
            process.kill()
            raise RuntimeError("the process that checks grammars does not start")
        end.recv()
        self._process, self._end = process, end
        return end

    def _stop(self) -> int | None:
        """End it, if it has not ended; gives its exit code."""
        assert self._process is not None and self._end is not None
        process, self._process = self._process, None
        self._end.close()
        self._end = None
        process.join(DYING_S)
        process.kill()
        process.join()
        return process.exitcode


_idle: "queue.LifoQueue[_Checker]" = queue.LifoQueue()
for _ in range(PROCESSES):
    _idle.put(_Checker())


def _serve(end: Connection) -> None:
    """The process: one constraint in, one verdict out, until nobody is at the other end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; our end is the server's
    grammar.problem(Constraint(grammar='start: "a"'))
    end.send(None)
    _limit_memory()
    try:
        while True:
            constraint = end.recv()
            signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)  # its signal ends the process
            verdict = grammar.problem(constraint)
            signal.setitimer(signal.ITIMER_PROF, 0)
            end.send(verdict)
    except (EOFError, OSError):
        return


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (MOST_MEGABYTES << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(
        os.open(os.devnull, os.O_WRONLY), 2
    )  # what an allocator says when it gives up is no news to the server's log
