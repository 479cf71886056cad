"""The flags with which every measurement is kept: the ledger it goes into, and its place in an experiment."""

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from flashstep.bench.ledger import Entry, append
from flashstep.cli.terminal import note, require_folders
from flashstep.config.engine_options import EngineOptions, changed_options


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
        require_folders({"--ledger": self.ledger})
        if self.round < 0:
            raise ValueError(f"--round is {self.round}; rounds count from 0")
        if self.plan and not re.fullmatch("[0-9a-f]{64}", self.plan):
            raise ValueError(
                f"--plan is {self.plan!r}; it must be the 64 hexadecimal digits of the plan's SHA-256"
            )

    def keep(self, entry: Entry) -> None:
        """Append ``entry``, under this label and round, if a ledger was given."""
        if self.ledger is None:
            return
        placed = msgspec.structs.replace(entry, label=self.label, round=self.round, plan=self.plan or None)
        append(self.ledger, placed)
        note(f"kept in {self.ledger} as {entry.id}")


def told_options(options: EngineOptions) -> dict[str, str]:
    """What an entry's subject says of an engine: the flags that do not stand at their defaults."""
    return {flag: str(getattr(options, flag[2:].replace("-", "_"))) for flag in changed_options(options)}
