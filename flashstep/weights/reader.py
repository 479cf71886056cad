"""The files of a checkpoint: which tensor lies in which shard, with what dtype and shape, before any byte of it is read.

Takes a folder with ``model.safetensors.index.json`` and its shards, or with one ``model.safetensors``; gives ``Checkpoint``. All
that is wrong between index and shards, in both directions, is collected as sentences. Knows no model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from flashstep.config.errors import ConfigError
from flashstep.config.files import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointError(ConfigError):
    """A checkpoint cannot be used; ``problems`` holds one sentence for each tensor or file at fault."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Where a tensor lies, and what the shard's header says of it."""

    file: str
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """An opened checkpoint. Tensors are memory-mapped: one that is not touched is not read."""

    def __init__(self, folder: Path) -> None:
        """Open every shard's header; what is wrong lies in ``problems`` and must be looked at before ``tensor``."""
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self.problems: list[str] = []
        self.reported: set[str] = set()  # names that ``problems`` already says are absent
        self._open: dict[str, Any] = {}
        places = self._places()
        for file in sorted({*places.values(), *_shards(folder)}):
            self._read_header(file, expected=[name for name, place in places.items() if place == file])
        self._compare(places)

    def tensor(self, name: str) -> Tensor:
        """The tensor as stored, a view of the memory map."""
        return self._open[self.entries[name].file].get_tensor(name)

    def _places(self) -> dict[str, str]:
        """Stored name -> file, as the index says; empty for a single file."""
        index = self.folder / INDEX
        if not index.is_file():
            if not (self.folder / SINGLE).is_file():
                self.problems.append(f"{self.folder} holds neither {INDEX} nor {SINGLE}")
            return {}
        try:
            data = read_json(index)
        except ConfigError as error:
            self.problems += [f"{INDEX}: {problem}" for problem in error.problems]
            return {}
        places = data.get("weight_map") if isinstance(data, Mapping) else None
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            self.problems.append(f"{INDEX} has no weight_map from tensor names to file names")
            return {}
        escaped = sorted({file for file in places.values() if Path(file).name != file})
        self.problems += [f"{INDEX} names {file!r}, which is not a plain file name" for file in escaped]
        return {name: file for name, file in places.items() if file not in escaped}

    def _read_header(self, file: str, *, expected: list[str]) -> None:
        try:
            shard = safe_open(self.folder / file, framework="pt")
        except FileNotFoundError:
            self.reported.update(expected)
            self.problems.append(
                f"{file} does not exist; {INDEX} places these tensors in it: {', '.join(sorted(expected))}"
            )
            return
        except (SafetensorError, OSError) as error:
            self.reported.update(expected)
            tensors = (
                f"; {INDEX} places these tensors in it: {', '.join(sorted(expected))}" if expected else ""
            )
            self.problems.append(
                f"{file or 'a file without a name'} is damaged or cut short ({error}){tensors}"
            )
            return
        self._open[file] = shard
        for name in shard.keys():  # noqa: SIM118 - a safe_open handle is no mapping
            if name in self.entries:
                self.problems.append(f"{name} is in two shards, {self.entries[name].file} and {file}")
                continue
            view = shard.get_slice(name)
            self.entries[name] = Entry(file=file, dtype=view.get_dtype(), shape=tuple(view.get_shape()))

    def _compare(self, places: Mapping[str, str]) -> None:
        """Index against shards, both ways."""
        if not (self.folder / INDEX).is_file():
            return
        for name, file in sorted(places.items()):
            entry = self.entries.get(name)
            if entry is not None and entry.file != file:
                self.problems.append(f"{name} is in {entry.file}, but {INDEX} places it in {file}")
            elif entry is None and file in self._open:
                self.reported.add(name)
                self.problems.append(f"{name} is not in {file}, where {INDEX} places it")
        self.problems += [
            f"{name} is in {entry.file}, but {INDEX} does not list it"
            for name, entry in sorted(self.entries.items())
            if name not in places
        ]


def _shards(folder: Path) -> list[str]:
    """The shard files that lie in ``folder``, whether or not an index names them."""
    return [file.name for file in folder.glob("*.safetensors")]
