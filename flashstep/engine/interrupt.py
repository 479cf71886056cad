"""Ctrl-C, held back while a step runs: half a step leaves an engine that nobody can use. Knows no engine."""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # the exit code of a process that Ctrl-C has ended


@contextmanager
def held() -> Generator[Callable[[], None]]:
    """Inside, Ctrl-C waits: what is given raises KeyboardInterrupt if it was pressed, and so does the end of the block.

    A second Ctrl-C ends the process (SystemExit) wherever it is. Where SIGINT is none of Python's (ignored in the background, or
    another thread than the main one, which alone hears of signals), nothing is changed.
    """
    pressed = False

    def hold(_number: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise SystemExit(INTERRUPTED)
        pressed = True

    def check() -> None:
        nonlocal pressed
        if pressed:
            pressed = False
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield check
        return
    signal.signal(signal.SIGINT, hold)
    try:
        try:
            yield check
        finally:
            signal.signal(signal.SIGINT, before)
    except GeneratorExit:  # whoever iterates leaves, and does not ask whether it was pressed
        check()
        raise
    check()
