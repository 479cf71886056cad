"""Expert loads: how many rows each expert got, layer by layer and step by step, in a file (torch-free).

JSON lines: a ``Header``, then a ``Line`` for each step, written whole and at once, so that a file is valid wherever its writing
ended. Counts are little-endian 32-bit integers [layers, experts], deflated, as base64: 40 layers of 384 experts take a few KB.
Knows no model, no device and no routing.
"""

import base64
import contextlib
import itertools
import os
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, overload

import msgspec
import numpy as np

from flashstep.telemetry.lines import write_whole

FORMAT = 1
COUNTS = np.dtype("<u4")


class LoadsError(ValueError):
    """A file that is no file of expert loads, or not of the model that it is wanted for."""


class Moe(msgspec.Struct, frozen=True):
    """``layers`` layers in which each row chooses ``chosen`` of ``experts``."""

    layers: int
    experts: int
    chosen: int


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a file is of. ``draft`` None: no draft ran. ``layout`` names the rank that recorded (experts are always the whole
    model's); ``routing`` is what chose them: loads of another than "real" say nothing about a model.
    """

    model: str
    target: Moe
    draft: Moe | None
    layout: str
    routing: str
    format: int = FORMAT


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One step: rows that have a token (padding is none), counts of the target's layers and, where it drafted, of the draft's."""

    step: int
    rows: int
    target: str
    draft: str | None = None


class StepLoads(NamedTuple):
    """``target`` int64 [layers, experts] and ``draft``, if the step drafted. A layer that fewer rows ran through has fewer."""

    step: int
    rows: int
    target: np.ndarray
    draft: np.ndarray | None


class LoadsWriter:
    """Writes a file of its own at ``path``, or, where something is there, beside it: loads, loads.2, loads.3, ..

    A device (/dev/stdout) is written to as it is. ``OSError`` where it cannot be written.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.header = header
        self.path, self._place = _fresh(path)
        write_whole(self._place, msgspec.json.encode(header) + b"\n")

    def write(self, loads: StepLoads) -> None:
        """Add a step; it is in the file when this returns, and nothing of it on ``OSError``."""
        draft = None if loads.draft is None else _packed(loads.draft)
        line = Line(step=loads.step, rows=loads.rows, target=_packed(loads.target), draft=draft)
        write_whole(self._place, msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        os.close(self._place)


def _fresh(path: Path) -> tuple[Path, int]:
    """A file that was not there, and its descriptor."""
    if path.exists() and not path.is_file():
        return path, os.open(path, os.O_WRONLY | os.O_APPEND)
    for number in itertools.count(1):
        found = path if number == 1 else path.with_stem(f"{path.stem}.{number}")
        with contextlib.suppress(FileExistsError):
            return found, os.open(found, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
    raise AssertionError("numbers do not end")


class Steps(Sequence[StepLoads]):
    """The steps of a file, each read when asked for: what is kept is where its line begins. ``LoadsError`` names the line."""

    def __init__(self, path: Path, header: Header, begins: "array[int]") -> None:
        self._path = path
        self._header = header
        self._begins = begins  # and the end of the last
        self._file = path.open("rb", buffering=0)

    def __len__(self) -> int:
        return len(self._begins) - 1

    @overload
    def __getitem__(self, index: int) -> StepLoads: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepLoads]: ...
    def __getitem__(self, index: int | slice) -> StepLoads | list[StepLoads]:
        numbers = range(len(self))[index]
        return self._step(numbers) if isinstance(numbers, int) else [self._step(number) for number in numbers]

    def between(self, first: int, end: int | None = None) -> Iterator[StepLoads]:
        """One after the other."""
        return (self._step(number) for number in range(len(self))[first:end])

    def drafted(self) -> "array[int]":
        """Numbers of the steps that drafted."""
        return array("Q", (number for number in range(len(self)) if self._line(number).draft is not None))

    def _text(self, number: int) -> bytes:
        begin, end = self._begins[number], self._begins[number + 1]
        return os.pread(self._file.fileno(), end - begin, begin)

    def _line(self, number: int) -> Line:
        try:
            return msgspec.json.decode(self._text(number), type=Line)
        except ValueError as error:
            raise LoadsError(f"{self._path}, line {number + 2}: {error}") from error

    def _step(self, number: int) -> StepLoads:
        line, header = self._line(number), self._header
        try:
            target = _unpacked(line.target, header.target)
            draft = None
            if line.draft is not None:
                if header.draft is None:
                    raise ValueError("it has loads of a draft, and the header has no draft")
                draft = _unpacked(line.draft, header.draft)
        except (ValueError, zlib.error) as error:
            raise LoadsError(f"{self._path}, line {number + 2}: {error}") from error
        return StepLoads(line.step, line.rows, target, draft)


class Loads(NamedTuple):
    """A whole file. ``cut``: its last line is not whole, for its writer was killed; it is left out."""

    header: Header
    steps: Steps
    cut: bool


def read(path: Path) -> Loads:
    """The loads in ``path``; ``LoadsError`` says what is wrong with its header. Steps are looked at when they are read."""
    with path.open("rb") as lines:
        first = lines.readline()
        try:
            header = msgspec.json.decode(first, type=Header)
        except msgspec.DecodeError as error:
            raise LoadsError(f"{path} is no file of expert loads: line 1: {error}") from error
        if header.format != FORMAT:
            raise LoadsError(f"{path} has format {header.format}; this flashstep reads {FORMAT}")
        begins, cut = array("Q", [len(first)]), False
        for line in lines:
            if line.endswith(b"\n"):
                begins.append(begins[-1] + len(line))
            else:  # a piece of a line
                cut = True
    return Loads(header, Steps(path, header, begins), cut)


def _packed(counts_LE: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(counts_LE.astype(COUNTS).tobytes(), 1)).decode()


def _unpacked(text: str, moe: Moe) -> np.ndarray:
    counts = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), dtype=COUNTS)
    if len(counts) != moe.layers * moe.experts:
        raise ValueError(
            f"{len(counts)} counts, and {moe.layers} layers of {moe.experts} experts have others"
        )
    counts_LE = counts.reshape(moe.layers, moe.experts).astype(np.int64)
    totals = counts_LE.sum(1)
    if (totals % moe.chosen).any() or (counts_LE.max(1) * moe.chosen > totals).any():
        raise ValueError(f"counts are not those of rows that choose {moe.chosen} experts each")
    return counts_LE
