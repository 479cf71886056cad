"""``flashstep bench loads``: what a file of expert loads says, without the model that it is of."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from flashstep.cli.terminal import OUT, note

if TYPE_CHECKING:
    import numpy as np

    from flashstep.parallel.loads import Loads, Moe

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
        least = {"parts": 1, "window": 1, "skip": 0}
        wrong = [
            f"--{name} is {getattr(self, name)}; it must be at least {at_least}"
            for name, at_least in least.items()
            if getattr(self, name) < at_least
        ]
        if not self.file.is_file():
            wrong.append(f"{self.file}: there is no such file")
        if wrong:
            raise ValueError("; ".join(wrong))
        from flashstep.parallel.loads import read

        loads = read(self.file)
        if loads.cut:
            note(f"{self.file}: its last line is not whole and is left out")
        header = loads.header
        told = [self._told(name, moe, steps) for name, moe, steps in _kinds(loads, self.skip) if steps]
        OUT.print(
            f"{header.model}, layout {header.layout}, routing {header.routing}; {len(loads.steps)} steps, "
            f"{sum(step.rows for step in loads.steps):,} rows\n"
            f"balancedness over {self.parts} parts, mean over largest load:"
        )
        for line in told:
            OUT.print(line)
        return 0

    def _told(self, name: str, moe: "Moe", steps: "list[np.ndarray]") -> str:
        from flashstep.parallel.balance import balancedness_by_window

        if moe.experts % self.parts:
            raise ValueError(
                f"--parts is {self.parts}; {moe.experts} experts of the {name} cannot be shared equally"
            )
        by_step, by_window, (whole,) = (
            balancedness_by_window(steps, parts=self.parts, window=window)
            for window in (1, self.window, len(steps))
        )
        total_E = sum(steps[1:], steps[0]).sum(0)
        busiest = sorted(range(len(total_E)), key=lambda expert: -total_E[expert])[:BUSIEST]
        shares = ", ".join(f"{expert} ({100 * total_E[expert] / total_E.sum():.1f}%)" for expert in busiest)
        return (
            f"{name}, {moe.layers} layers of {moe.experts} experts, {moe.chosen} a row: {_mean(by_step)} a step "
            f"({min(by_step):.3f} to {max(by_step):.3f}), {_mean(by_window)} in {self.window} steps, {whole:.3f} in all "
            f"{len(steps)}; busiest experts {shares}"
        )


def _kinds(loads: "Loads", skip: int) -> "list[tuple[str, Moe, list[np.ndarray]]]":
    """Target, and draft where one ran: what it is, and its loads step by step, of steps that had rows."""
    header, steps = loads.header, loads.steps[skip:]
    kinds = [("target", header.target, [step.target for step in steps if step.rows])]
    if header.draft is not None:
        drafted = [step.draft for step in steps if step.draft is not None and step.draft.any()]
        kinds.append(("draft", header.draft, drafted))
    return kinds


def _mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.3f}"
