"""The ledger: one JSON line for each result, with where it comes from, what was asked for, and its raw samples.

Takes and gives ``Entry``. A line is written whole and at once, so that several commands may write one file and Ctrl-C leaves it
valid; nothing is ever rewritten. Knows no GPU, no engine and no statistics.
"""

import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from flashstep.bench.origin import Origin

FORMAT = 1
Kind = Literal["forward", "latency", "pdl", "decode", "probe", "chain", "serve", "replay", "eval"]


class LedgerError(ValueError):
    """A file that is no ledger, with the number of each line that is wrong."""


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """Raw values, column by column: ``columns[name][i]`` belongs to ``keys[i]``; None where that sample has no such value.

    A key says what was measured so that another run's sample of the same thing is found: a request's number, a session and its
    turn, a step, a question's id. Keys are unique. ``unit`` is what one sample is: "request", "step", "replay", "question".
    """

    unit: str
    keys: tuple[str, ...]
    columns: dict[str, tuple[float | None, ...]]

    def __post_init__(self) -> None:
        if len(set(self.keys)) != len(self.keys):
            raise ValueError("two samples have the same key")
        wrong = [name for name, values in self.columns.items() if len(values) != len(self.keys)]
        if wrong:
            raise ValueError(f"{len(self.keys)} keys, but other numbers of values in {', '.join(wrong)}")

    def column(self, name: str) -> dict[str, float]:
        """The values of one column by key, without those that are None."""
        values = self.columns.get(name, ())
        return {key: value for key, value in zip(self.keys, values, strict=False) if value is not None}


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of one measurement.

    ``label`` names the arm and ``round`` its place in an experiment; ``job`` is the process or server that runs shared, where
    runs can be exchanged within it only (None: each run had its own). ``settings`` is what two arms must have in common to be
    compared (workload, lengths, seed policy); ``subject`` is what was measured and may differ (URL, model, engine flags, server's
    version). ``metrics`` are summaries of ``samples`` under names of ``bench.metrics``; ``detail`` is what only pictures read.
    ``faults`` are sentences about what went wrong; ``complete`` is False where the run ended before its plan. ``raw`` is a file
    with more (each chunk's time, each answer), relative to the ledger's folder.
    """

    kind: Kind
    origin: Origin
    settings: dict[str, Any]
    subject: dict[str, Any]
    samples: Samples
    metrics: dict[str, float]
    seed: int | None = None
    label: str = ""
    round: int = 0
    job: str | None = None
    detail: dict[str, Any] = {}
    faults: tuple[str, ...] = ()
    complete: bool = True
    synthetic_acceptance: bool = False
    routing: str = "real"
    raw: str | None = None
    format: int = FORMAT
    id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex[:12])


def append(path: Path, entry: Entry) -> None:
    """Add ``entry`` to the ledger at ``path``, which is made where it is absent. The line is in the file or it is not."""
    line = msgspec.json.encode(entry) + b"\n"
    place = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        written = os.write(place, line)
        if written != len(line):
            raise OSError(f"{path}: {written} of {len(line)} bytes were written; is the disk full?")
        os.fsync(place)
    finally:
        os.close(place)


def read(path: Path) -> list[Entry]:
    """All entries of the ledger at ``path``; ``LedgerError`` names every line that is none."""
    if not path.is_file():
        raise LedgerError(f"{path}: there is no such ledger")
    entries, wrong = [], []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            entry = msgspec.json.decode(line, type=Entry)
        except (msgspec.DecodeError, ValueError) as error:
            wrong.append(f"line {number}: {error}")
            continue
        if entry.format != FORMAT:
            wrong.append(f"line {number}: format {entry.format}; this flashstep reads {FORMAT}")
        entries.append(entry)
    if wrong:
        raise LedgerError(f"{path} is no ledger: " + "; ".join(wrong))
    return entries


def unequal(entries: Iterable[Entry]) -> dict[str, list[Any]]:
    """The settings that are not the same in all ``entries``, each with the values found."""
    found: dict[str, list[Any]] = {}
    seen = [entry.settings for entry in entries]
    for name in sorted({name for settings in seen for name in settings}):
        values: list[Any] = []
        for settings in seen:
            value = _plain(settings.get(name))
            if value not in values:
                values.append(value)
        if len(values) > 1:
            found[name] = values
    return found


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value
