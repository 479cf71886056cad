"""What is seen of a run of load while it goes on: a bar on a terminal, a line now and then elsewhere.

Takes what ``bench.load.serve`` tells a ``Watch``; writes to stderr.
"""

import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from flashstep.cli.terminal import NOTES, note

if TYPE_CHECKING:
    from flashstep.bench.load.client import Answered
    from flashstep.bench.load.serve import Open

LINE_EVERY_S = 5.0
REFRESH_S = 0.25
RECENT = 200  # requests that the median of the moment is of


class LoadProgress:
    """A ``Watch`` on stderr."""

    def __init__(self) -> None:
        self._done = self._failed = self._tokens = 0
        self._recent: deque[float] = deque(maxlen=RECENT)

    def tell(self, text: str) -> None:
        note(text)

    def took(self, answered: "Answered") -> None:
        self._done += 1
        self._failed += bool(answered.fault)
        self._tokens += answered.output_tokens or 0
        if answered.ttft_s is not None:
            self._recent.append(answered.ttft_s)

    @contextmanager
    def begin(self, run: "Open", total: int | None, duration_s: float | None) -> Generator[None]:
        """Show the run until the context ends. A thread of its own draws, so that a slow terminal holds up no request."""
        self._start_s = time.perf_counter()
        ended = Event()
        show = self._bar if NOTES.is_terminal else self._lines
        thread = Thread(target=show, args=(run, total, duration_s, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _bar(self, run: "Open", total: int | None, duration_s: float | None, ended: Event) -> None:
        by_time = total is None
        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=NOTES, auto_refresh=False, transient=True) as progress:
            task = progress.add_task("", total=duration_s if by_time else total)
            while not ended.wait(REFRESH_S):
                elapsed_s = time.perf_counter() - self._start_s
                completed = elapsed_s if by_time else self._done
                progress.update(task, completed=completed, description=self._words(run, total))
                progress.refresh()

    def _lines(self, run: "Open", total: int | None, duration_s: float | None, ended: Event) -> None:
        while not ended.wait(LINE_EVERY_S):
            elapsed_s = time.perf_counter() - self._start_s
            of = f" of {duration_s:g}" if duration_s else ""
            note(f"{elapsed_s:.0f}{of} s: {self._words(run, total)}")

    def _words(self, run: "Open", total: int | None) -> str:
        elapsed_s = time.perf_counter() - self._start_s
        sent = list(run.open.values())
        words = [f"{self._done}{'' if total is None else f' of {total}'} answered", f"{len(sent)} open"]
        if self._failed:
            words.append(f"{self._failed} FAILED")
        words.append(f"{self._tokens / elapsed_s:,.0f} tokens/s")
        if recent := sorted(self._recent.copy()):
            words.append(f"TTFT {1e3 * recent[len(recent) // 2]:,.0f} ms")
        if sent and (oldest_s := time.perf_counter() - min(sent)) >= LINE_EVERY_S:
            words.append(f"the oldest open for {oldest_s:.0f} s")
        return ", ".join(words)
