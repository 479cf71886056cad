"""The raw file of a run: a JSON line for each request, with every chunk's time, written as the request ends.

Takes a plan's or a replay's ``Record``; gives a file of which every line is whole, however the process ends. The first line
says when the run began, by both clocks: all other times are ``time.perf_counter()`` seconds. Knows no ledger.
"""

import contextlib
import datetime
import os
import time
from pathlib import Path
from typing import Self

import msgspec


class Beginning(msgspec.Struct, frozen=True, kw_only=True):
    """The first line: ``perf_counter_s`` was ``date``."""

    date: str
    perf_counter_s: float
    chunks: tuple[str, ...] = ("at_s", "tokens", "is_content", "size")


class RawFile:
    """Used as ``with RawFile(path) as raw: raw.take(record)``; ``ValueError`` for one that is there already or cannot be made.

    A full disk ends the file and not the run: ``fault`` then says so, in a sentence.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fault = ""
        self._size = 0

    def __enter__(self) -> Self:
        try:
            self._place = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except OSError as error:
            raise ValueError(f"{self.path} cannot be made: {error.strerror}") from None
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        self._line(Beginning(date=now, perf_counter_s=time.perf_counter()))
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._place)

    def take(self, record: msgspec.Struct) -> None:
        self._line(record)

    def _line(self, value: msgspec.Struct) -> None:
        if self.fault:
            return
        line = msgspec.json.encode(value) + b"\n"
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._place, rest) :]
            self._size += len(line)
        except OSError as error:
            self.fault = (
                f"the raw file {self.path} ends early: {error.strerror}; what was answered later is not in it"
            )
            with contextlib.suppress(OSError):
                os.ftruncate(self._place, self._size)
