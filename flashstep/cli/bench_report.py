"""``flashstep bench report``: a page of pictures and tables from ledgers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from flashstep.bench.ledger import Entry, read_all
from flashstep.cli.extras import require_bench
from flashstep.cli.outputs import output_problems, write
from flashstep.cli.terminal import OUT

if TYPE_CHECKING:
    from flashstep.bench.report.page import ToldClaim


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """Draw one self-contained HTML page from ledgers: frontier, latencies, steps and floors, acceptance, balance, accuracy."""

    ledgers: tyro.conf.Positional[tuple[Path, ...]]
    """ledgers, as --ledger of the other commands writes them"""
    out: Path = Path("report.html")
    """write the page here"""
    claim: tuple[Path, ...] = ()
    """claims to show, as flashstep bench compare writes them as JSON"""
    title: str | None = None
    """heading of the page"""
    arms: tuple[str, ...] = ()
    """only entries with these labels, in this order"""

    def run(self) -> int:
        require_bench("matplotlib")
        from flashstep.bench.report.page import default_title, render

        entries, claims = self._read()
        page = render(entries, claims, title=self.title or default_title(entries))
        write(self.out, page.encode())
        OUT.print(f"{self.out}: {len(entries)} entries, {len(page.encode()):,} bytes")
        return 0

    def _read(self) -> tuple[list[Entry], list["ToldClaim"]]:
        """Entries and claims; everything that is wrong with flags and files is one ``ValueError``."""
        from flashstep.bench.report.page import read_claim

        inputs = {
            **{f"the ledger {path}": path for path in self.ledgers},
            **{f"--claim {path}": path for path in self.claim},
        }
        wrong = output_problems({"--out": self.out}, inputs=inputs, kinds={"--out": "HTML"})
        if not self.ledgers:
            wrong.append("give at least one ledger")
        entries: list[Entry] = []
        claims: list[ToldClaim] = []
        try:
            entries = read_all(self.ledgers)
            wrong += self._problems(entries) if self.ledgers else []
        except ValueError as error:
            wrong.append(str(error))
        for path in self.claim:
            try:
                claims.append(read_claim(path))
            except ValueError as error:
                wrong.append(str(error))
        if wrong:
            raise ValueError("; ".join(wrong))
        if self.arms:
            entries = [entry for name in self.arms for entry in entries if entry.label == name]
        return entries, claims

    def _problems(self, entries: Sequence[Entry]) -> list[str]:
        if not entries:
            return [f"{', '.join(map(str, self.ledgers))}: there is no entry, and nothing to draw"]
        labels = {entry.label for entry in entries}
        wrong = []
        if unknown := [name for name in self.arms if name not in labels]:
            known = ", ".join(sorted(label or '""' for label in labels))
            wrong.append(f"--arms {', '.join(unknown)}: no entry has that label; there are {known}")
        if len(set(self.arms)) != len(self.arms):
            wrong.append(f"--arms {' '.join(self.arms)}: one of them stands there twice")
        return wrong
