"""``flashstep bench loads``: what a file of expert loads says, without the model that it is of."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from flashstep.cli.flags import too_small
from flashstep.cli.terminal import OUT, note

if TYPE_CHECKING:
    from flashstep.parallel.balance import Evenness
    from flashstep.parallel.loads import Moe

BUSIEST = 5


@dataclass(frozen=True, kw_only=True)
class BenchLoads:
    """Balancedness of recorded expert loads (--record-expert-loads), per step and per window, and the busiest experts."""

    file: tyro.conf.Positional[Path]
    """the file"""
    parts: int = 8
    """ranks that hold a run of consecutive experts each, without replicas"""
    window: int = 100
    """steps whose loads are added up"""
    skip: int = 0
    """first steps that are left out"""

    def run(self) -> int:
        wrong = too_small(self, {"parts": 1, "window": 1, "skip": 0})
        if not self.file.is_file():
            wrong.append(f"{self.file}: there is no such file")
        if wrong:
            raise ValueError("; ".join(wrong))
        from flashstep.parallel.loads import read

        loads = read(self.file)
        if loads.cut:
            note(f"{self.file}: its last line is not whole and is left out")
        header = loads.header
        kinds = {"target": header.target} | ({} if header.draft is None else {"draft": header.draft})
        evenness = {name: self._evenness(name, moe) for name, moe in kinds.items()}
        rows = 0
        for step in loads.steps.between(self.skip):
            rows += step.rows
            for name, even in evenness.items():
                counts_LE = step.target if name == "target" else step.draft
                if counts_LE is not None and counts_LE.any():
                    even.add(counts_LE)
        OUT.print(
            f"{header.model}, layout {header.layout}, routing {header.routing}; "
            f"{max(len(loads.steps) - self.skip, 0)} steps, {rows:,} rows\n"
            f"balancedness over {self.parts} parts, mean over largest load:"
        )
        for name, even in evenness.items():
            if even.by_step:
                OUT.print(self._told(name, kinds[name], even))
        return 0

    def _evenness(self, name: str, moe: "Moe") -> "Evenness":
        from flashstep.parallel.balance import Evenness

        if moe.experts % self.parts:
            raise ValueError(
                f"--parts is {self.parts}; {moe.experts} experts of the {name} cannot be shared equally"
            )
        return Evenness(parts=self.parts, window=self.window)

    def _told(self, name: str, moe: "Moe", even: "Evenness") -> str:
        by_step, total_E = even.by_step, even.total_LE.sum(0)
        busiest = sorted(range(len(total_E)), key=lambda expert: -total_E[expert])[:BUSIEST]
        shares = ", ".join(f"{expert} ({100 * total_E[expert] / total_E.sum():.1f}%)" for expert in busiest)
        return (
            f"{name}, {moe.layers} layers of {moe.experts} experts, {moe.chosen} a row: {_mean(by_step)} a step "
            f"({min(by_step):.3f} to {max(by_step):.3f}), {_mean(even.by_window)} in {self.window} steps, {even.whole:.3f} in "
            f"all {len(by_step)}; busiest experts {shares}"
        )


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.3f}"
