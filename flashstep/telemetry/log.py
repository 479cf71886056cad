"""Structured log lines on stderr: time, level, place, event, then key=value fields; request ids are fields like any other.

Takes events and fields; gives lines that grep and logfmt parsers read. What users wrote never reaches a log: fields named in
``PRIVATE`` are replaced by their size. Knows nothing of who logs.
"""

import json
import logging
import sys
import time
from collections.abc import Sized
from typing import Any

ROOT = "flashstep"
PRIVATE = frozenset({"prompt", "messages", "text", "content", "reasoning", "tokens", "tools", "body"})
LEVELS = ("debug", "info", "warning", "error")


class Log:
    """A named source of events: ``log.info("admitted", request="r1", cached=64)``."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"{ROOT}.{name}")

    def debug(self, event: str, **fields: Any) -> None:
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write(logging.ERROR, event, fields)

    def _write(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(
                level,
                "%s",
                " ".join([event, *(f"{key}={_shown(key, value)}" for key, value in fields.items())]),
            )


def configure(level: str = "info") -> None:
    """Send the lines of this process to stderr from ``level`` up (one of ``LEVELS``); a second call replaces the first."""
    assert level in LEVELS, level
    root = logging.getLogger(ROOT)
    root.handlers.clear()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Line())
    root.addHandler(handler)
    root.setLevel(level.upper())
    root.propagate = False


class _Line(logging.Formatter):
    """``2026-11-30T21:29:11.123Z INFO engine.loop started max_num_seqs=256``"""

    converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", self.converter(record.created))
        place = record.name.removeprefix(ROOT + ".")
        line = f"{moment}.{int(record.msecs):03d}Z {record.levelname} {place} {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _shown(key: str, value: Any) -> str:
    if key in PRIVATE:
        return f"<{len(value)}>" if isinstance(value, Sized) else "<private>"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    plain = bool(text) and text.isprintable() and not any(mark in text for mark in ' "=')
    return text if plain else json.dumps(text)
