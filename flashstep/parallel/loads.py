"""Expert loads: how many rows each expert got, layer by layer and step by step, in a file (torch-free).

JSON lines: a ``Header``, then a ``Line`` for each step, written whole and at once, so that a file is valid wherever its writing
ended. Counts are little-endian 32-bit integers [layers, experts], deflated, as base64: 40 layers of 384 experts take a few KB.
Knows no model, no device and no routing.
"""

import base64
import zlib
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

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


class Loads(NamedTuple):
    """A whole file. ``cut``: its last line is not whole, for its writer was killed; it is left out."""

    header: Header
    steps: list[StepLoads]
    cut: bool


class LoadsWriter:
    """Writes the file at ``path`` anew."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.header = header
        self._file = path.open("wb", buffering=0)
        self._file.write(msgspec.json.encode(header) + b"\n")

    def write(self, loads: StepLoads) -> None:
        """Add a step; it is in the file when this returns."""
        draft = None if loads.draft is None else _packed(loads.draft)
        line = Line(step=loads.step, rows=loads.rows, target=_packed(loads.target), draft=draft)
        self._file.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> Loads:
    """The loads in ``path``; ``LoadsError`` says which line is wrong."""
    first, *rest = path.read_bytes().split(b"\n")
    try:
        header = msgspec.json.decode(first, type=Header)
    except msgspec.DecodeError as error:
        raise LoadsError(f"{path} is no file of expert loads: line 1: {error}") from error
    if header.format != FORMAT:
        raise LoadsError(f"{path} has format {header.format}; this flashstep reads {FORMAT}")
    last = (
        rest.pop() if rest else b""
    )  # what stands behind the last line's end: nothing, or a piece of a line
    return Loads(
        header, [_step(path, header, number, line) for number, line in enumerate(rest, 2)], bool(last)
    )


def _step(path: Path, header: Header, number: int, text: bytes) -> StepLoads:
    try:
        line = msgspec.json.decode(text, type=Line)
        target = _unpacked(line.target, header.target)
        draft = None
        if line.draft is not None:
            if header.draft is None:
                raise ValueError("it has loads of a draft, and the header has no draft")
            draft = _unpacked(line.draft, header.draft)
    except (ValueError, zlib.error) as error:
        raise LoadsError(f"{path}, line {number}: {error}") from error
    return StepLoads(line.step, line.rows, target, draft)


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
