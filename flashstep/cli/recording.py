"""The flags with which every measurement is kept: the ledger it goes into, and its place in an experiment."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from flashstep.bench.ledger import Entry, append
from flashstep.cli.terminal import note, require_folders


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Where a result is kept."""

    ledger: Path | None = None
    """append the result, with its raw samples, to this file of JSON lines"""
    label: str = ""
    """name of the arm that this run belongs to"""
    round: int = 0
    """place of this run in an experiment, from 0"""

    def check(self) -> None:
        """Before anything long begins: ``ValueError`` where the result could not be kept."""
        require_folders({"--ledger": self.ledger})
        if self.round < 0:
            raise ValueError(f"--round is {self.round}; rounds count from 0")

    def keep(self, entry: Entry) -> None:
        """Append ``entry``, under this label and round, if a ledger was given."""
        if self.ledger is None:
            return
        append(self.ledger, msgspec.structs.replace(entry, label=self.label, round=self.round))
        note(f"kept in {self.ledger} as {entry.id}")
