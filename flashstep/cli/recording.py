"""The flags with which every measurement is kept: the ledger it goes into, and its place in an experiment."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import msgspec
import tyro

from flashstep.bench.ledger import Entry, append, problem_of
from flashstep.cli.outputs import output_problems
from flashstep.cli.terminal import note
from flashstep.config.engine_options import EngineOptions, changed_options

# their group in --help is "engine options"
EngineFlags = tyro.conf.OmitArgPrefixes[Annotated[EngineOptions, tyro.conf.arg(name="engine")]]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Where a result is kept."""

    ledger: Path | None = None
    """append the result, with its raw samples, to this file of JSON lines"""
    label: str = ""
    """name of the arm that this run belongs to"""
    round: int = 0
    """place of this run in an experiment, from 0"""
    plan: str = ""
    """SHA-256 of the experiment's plan, as flashstep bench compare wrote it before the first run"""

    def check(self) -> None:
        """Before anything long begins: ``ValueError`` where the result could not be kept."""
        if wrong := self.problems():
            raise ValueError("; ".join(wrong))

    def problems(
        self,
        outputs: Mapping[str, Path | None] = MappingProxyType({}),
        *,
        inputs: Mapping[str, Path | None] = MappingProxyType({}),
    ) -> list[str]:
        """Why the result, and a command's other ``outputs`` by their flags, could not be kept, in sentences."""
        wrong = output_problems({"--ledger": self.ledger, **outputs}, inputs=inputs)
        if self.ledger is not None and self.ledger.is_file() and (problem := problem_of(self.ledger)):
            wrong.append(f"--ledger is {self.ledger}, which {problem}")
        if self.round < 0:
            wrong.append(f"--round is {self.round}; rounds count from 0")
        if self.plan and not re.fullmatch("[0-9a-f]{64}", self.plan):
            wrong.append(
                f"--plan is {self.plan!r}; it must be the 64 hexadecimal digits of the plan's SHA-256"
            )
        return wrong

    def raw_file(self, name: str) -> Path | None:
        """A file for more than an entry holds, in ``LEDGER.raw``, which is made; None without a ledger.

        Not beside the ledger: ``bench report *.jsonl`` shall find ledgers only.
        """
        if self.ledger is None:
            return None
        folder = self.ledger.with_name(f"{self.ledger.name}.raw")
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise ValueError(f"{folder} cannot be made: {error.strerror}") from None
        return folder / name

    def keep(self, entry: Entry) -> None:
        """Append ``entry``, under this label and round, if a ledger was given."""
        if self.ledger is None:
            return
        placed = msgspec.structs.replace(entry, label=self.label, round=self.round, plan=self.plan or None)
        try:
            append(self.ledger, placed)
        except OSError as error:  # a full disk, rights that changed meanwhile
            raise ValueError(str(error)) from None
        note(f"kept in {self.ledger} as {entry.id}")


def told_options(options: EngineOptions) -> dict[str, str]:
    """What an entry's subject says of an engine: the flags that do not stand at their defaults."""
    return {flag: str(getattr(options, flag[2:].replace("-", "_"))) for flag in changed_options(options)}
