"""The ledger: one JSON line for each result, with where it comes from, what was asked for, and its raw samples.

Takes and gives ``Entry``. A line is written whole and under a lock, so that several commands may write one file and Ctrl-C leaves
it valid; nothing is ever rewritten. Knows no GPU, no engine and no statistics.
"""

import contextlib
import fcntl
import logging
import math
import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from flashstep.bench.origin import Origin
from flashstep.telemetry.lines import write_whole

FORMAT = 2  # format 1 could not tell of a filled cache
MOST_TOLD = 10  # lines of a file that is no ledger at all
LOG = logging.getLogger(__name__)
Kind = Literal["forward", "latency", "pdl", "decode", "probe", "chain", "serve", "replay", "eval"]


class LedgerError(ValueError):
    """A file that is no ledger, with the number of each line that is wrong."""


def routing(falsified_by: Iterable[str]) -> str:
    """Of ``Entry.falsified_by``, what was done to routing: "uniform routing", "recorded routing", "real routing"."""
    return next((words for words in falsified_by if words.endswith(" routing")), "real routing")


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

    @classmethod
    def of_steps(cls, us: Iterable[float], tokens: Iterable[float | None]) -> "Samples":
        """Steps in a row, numbered from 0: the time of each and the tokens it brought."""
        columns = {
            "step_us": tuple(us),
            "tokens": tuple(None if count is None else float(count) for count in tokens),
        }
        return cls(unit="step", keys=tuple(map(str, range(len(columns["step_us"])))), columns=columns)

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
    ``failed`` is how many were asked for beside the samples and came to nothing (requests, questions). ``falsified_by`` says what
    made its texts wrong on purpose, as the server or the configuration tells it (``EngineConfig.falsifies``); () of a server that
    says nothing. ``faults`` are sentences about what went wrong; ``complete`` is False where the run ended before its plan, not
    where something failed in it. ``raw`` is a file with more (each chunk's time, each answer), relative to the ledger's folder.
    ``plan`` is the SHA-256 of the plan that was written before this run (``bench.experiment``).
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
    failed: int = 0
    complete: bool = True
    falsified_by: tuple[str, ...] = ()
    raw: str | None = None
    plan: str | None = None
    format: int = FORMAT
    id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex[:12])


def append(path: Path, entry: Entry) -> None:
    """Add ``entry`` to the ledger at ``path``, which is made where it is absent. The line is in the file or it is not.

    Writers wait for one another. A line that a killed writer left torn is ended first, so that it takes no other with it. Values
    that are no finite numbers have no place in JSON: a sample becomes None, a metric is left out, a fault says so. ``OSError``
    if the line cannot be written (the file is then as it was), ``LedgerError`` if it could not be read again.
    """
    line = msgspec.json.encode(_finite(entry)) + b"\n"
    try:
        _decode(line)
    except ValueError as error:
        raise LedgerError(f"{path}: this {entry.kind} entry could not be read again: {error}") from None
    place = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(place, fcntl.LOCK_EX)
        size = os.fstat(place).st_size
        torn = size > 0 and os.pread(place, 1, size - 1) != b"\n"
        try:
            write_whole(place, b"\n" + line if torn else line)
            os.fsync(place)
        except OSError as error:
            with contextlib.suppress(OSError):  # no regular file
                os.ftruncate(place, size)  # fsync may be what failed
            raise OSError(f"{path}: the entry was not written: {error}") from error
    finally:
        os.close(place)


def read(path: Path) -> list[Entry]:
    """All entries of the ledger at ``path``; ``LedgerError`` names the lines that are none.

    Lines that end in the middle (their writer was killed, the disk was full) are told to the log and left out: nothing that
    stands in them is missing elsewhere. So are entries that stand there already; two different ones under one id are an error.
    """
    return _once([(path, number, entry) for number, entry in _read(path)])


def read_all(paths: Iterable[Path]) -> list[Entry]:
    """The entries of several ledgers, in order, each once, as ``read`` gives those of one. All files that are wrong are told."""
    found: list[tuple[Path, int, Entry]] = []
    wrong: list[str] = []
    for path in paths:
        try:
            found += [(path, number, entry) for number, entry in _read(path)]
        except LedgerError as error:
            wrong.append(str(error))
    if wrong:
        raise LedgerError("; ".join(dict.fromkeys(wrong)))
    return _once(found)


def problem_of(path: Path) -> str:
    """Why nothing should be appended to the file at ``path``, in words; "" where it is a ledger, empty or absent."""
    try:
        with path.open("rb") as lines:
            first = next((line.strip() for line in lines if line.strip()), b"")
    except OSError:
        return ""  # whoever writes it will hear of that
    try:
        if first:
            _decode(first)
    except ValueError as error:
        return "" if _is_torn(first, error) else f"is there and no ledger: {error}"
    return ""


def _once(found: Iterable[tuple[Path, int, Entry]]) -> list[Entry]:
    """Without repetitions, which are told: a run that is read twice is still one run."""
    known: dict[str, tuple[Path, int, Entry]] = {}
    repeated: list[str] = []
    wrong: list[str] = []
    for path, number, entry in found:
        first = known.setdefault(entry.id, (path, number, entry))
        if first[2] is entry:
            continue
        if first[2] == entry:
            repeated.append(entry.id)
        else:
            wrong.append(
                f"{path}, line {number}: another entry than {first[0]}, line {first[1]}, under the same id {entry.id}"
            )
    if wrong:
        raise LedgerError("; ".join(_first_of(wrong)))
    if repeated:
        LOG.warning(
            "read once, though they stand there more than once: %d entries (%s)",
            len(set(repeated)),
            ", ".join(_first_of(list(dict.fromkeys(repeated)))),
        )
    return [entry for _, _, entry in known.values()]


def _first_of(words: list[str], what: str = "more") -> list[str]:
    more = [f"and {len(words) - MOST_TOLD} {what}"] if len(words) > MOST_TOLD else []
    return words[:MOST_TOLD] + more


def _read(path: Path) -> list[tuple[int, Entry]]:
    """The entries of one file with the numbers of their lines."""
    if not path.is_file():
        raise LedgerError(f"{path}: there is no such ledger")
    if not os.access(path, os.R_OK):
        raise LedgerError(f"{path} cannot be read")
    entries: list[tuple[int, Entry]] = []
    wrong: list[str] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            text = line.strip()  # a line end within a torn string would be an error of its own
            if not text:
                continue
            try:
                entries.append((number, _decode(text)))
            except ValueError as error:
                if _is_torn(text, error):
                    LOG.warning(
                        "%s: line %d ends in the middle, as of a killed writer; it is left out", path, number
                    )
                else:
                    wrong.append(f"line {number}: {error}")
    if wrong:
        raise LedgerError(f"{path} is no ledger: " + "; ".join(_first_of(wrong, "more lines")))
    return entries


class _Numbered(msgspec.Struct):
    format: int = FORMAT


def _decode(line: bytes) -> Entry:
    """The entry of one line; ``ValueError``. The format is looked at first: another one may have other fields."""
    found = msgspec.json.decode(line, type=_Numbered).format
    if found != FORMAT:
        raise ValueError(f"format {found}; this flashstep reads {FORMAT}")
    return msgspec.json.decode(line, type=Entry)


def _is_torn(text: bytes, error: ValueError) -> bool:
    """Whether the line of an object ended too early."""
    truncated = isinstance(error, msgspec.DecodeError) and str(error) == "Input data was truncated"
    return text.startswith(b"{") and (truncated or not text.endswith(b"}"))


def _finite(entry: Entry) -> Entry:
    """``entry`` without the values that JSON cannot hold."""
    columns = {
        name: tuple(value if value is None or math.isfinite(value) else None for value in values)
        for name, values in entry.samples.columns.items()
    }
    metrics = {name: value for name, value in entry.metrics.items() if math.isfinite(value)}
    faults = [
        f"metric {name} was {value} and is left out"
        for name, value in entry.metrics.items()
        if name not in metrics
    ]
    for name, values in entry.samples.columns.items():
        lost = sum(value is not None and not math.isfinite(value) for value in values)
        if lost:
            faults.append(f"{lost} values of {name} were no finite numbers and are left out")
    if not faults:
        return entry
    samples = msgspec.structs.replace(entry.samples, columns=columns)
    return msgspec.structs.replace(entry, samples=samples, metrics=metrics, faults=(*entry.faults, *faults))


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
