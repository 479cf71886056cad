"""``flashstep bench pdl``: programmatic launches, counted in graphs and timed."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tyro
from rich.table import Table

from flashstep.cli.flags import too_small
from flashstep.cli.recording import Recording
from flashstep.cli.terminal import INTERRUPTED, OUT


@dataclass(frozen=True, kw_only=True)
class BenchPdl:
    """Programmatic edges in captured graphs: how many, what they cost or bring; in pairs of kernels and the router chain."""

    rounds: int = 6
    """rounds in A B B A order; 21 replays each, of which the median counts"""
    json: Path | None = None
    """write every round's time and every graph's counts to this file"""
    recording: tyro.conf.OmitArgPrefixes[Recording] = field(default_factory=Recording)

    def run(self) -> int:
        wrong = self.recording.problems({"--json": self.json}) + too_small(self, {"rounds": 1})
        if wrong:
            raise ValueError("; ".join(wrong))
        from flashstep.bench.pdl import Measured, entry, measure, paired_difference

        table = Table(title="programmatic dependent launch", title_justify="left")
        for name in (
            "chain",
            "arm",
            "us",
            "us a unit",
            "against first arm",
            "kernels",
            "edges",
            "programmatic",
        ):
            words = name in ("chain", "arm")
            table.add_column(name, justify="left" if words else "right", no_wrap=words)
        measured: list[Measured] = []
        faults: tuple[str, ...] = ()
        try:
            for item in measure(rounds=self.rounds):
                measured.append(item)
        except KeyboardInterrupt:
            faults = (f"it was interrupted behind {len(measured)} arms",)
        first = {item.chain: item for item in reversed(measured)}
        for item in measured:
            facts = item.facts
            table.add_row(
                item.chain,
                item.arm,
                f"{item.median_us:.1f}",
                f"{item.median_us / item.units:.3f}",
                f"{paired_difference(first[item.chain].us, item.us):+.2f}",
                *(
                    ("", "", "")
                    if facts is None
                    else map(str, (facts.kernels, facts.edges, facts.programmatic))
                ),
            )
        OUT.print(table)
        if self.json is not None:
            self.json.write_text(json.dumps([asdict(item) for item in measured], indent=1))
        for fault in faults:
            OUT.print(f"fault: {fault}")
        self.recording.keep(entry(measured, rounds=self.rounds, faults=faults))
        return INTERRUPTED if faults else 0
