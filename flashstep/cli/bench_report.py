"""``flashstep bench report``: a page of pictures and tables from ledgers."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from flashstep.bench.ledger import read
from flashstep.cli.extras import require_bench
from flashstep.cli.terminal import OUT, require_folders


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
        if not self.ledgers:
            raise ValueError("give at least one ledger")
        require_folders({"--out": self.out})
        require_bench("matplotlib")
        from flashstep.bench.report.page import default_title, read_claim, render

        entries = [entry for ledger in self.ledgers for entry in read(ledger)]
        if self.arms:
            unknown = [name for name in self.arms if all(entry.label != name for entry in entries)]
            if unknown:
                known = ", ".join(sorted({entry.label or '""' for entry in entries}))
                raise ValueError(f"--arms {', '.join(unknown)}: no entry has that label; there are {known}")
            entries = [entry for name in self.arms for entry in entries if entry.label == name]
        if not entries:
            raise ValueError(f"{', '.join(map(str, self.ledgers))}: there is no entry, and nothing to draw")
        claims = [read_claim(path) for path in self.claim]
        page = render(entries, claims, title=self.title or default_title(entries))
        self.out.write_text(page, encoding="utf-8")
        OUT.print(f"{self.out}: {len(entries)} entries, {len(page.encode()):,} bytes")
        return 0
