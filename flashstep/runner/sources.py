"""Where loads of experts come from, step by step, when routers are not asked: equal ones, or those of a file (torch-free).

Takes numbers of steps and rows; gives counts [layers, experts] (``parallel.balance``). Knows no device and no tap.
"""

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import numpy as np

from flashstep.parallel.balance import drawn, uniform
from flashstep.parallel.loads import Moe
from flashstep.telemetry.log import Log

CYCLE = 64  # steps of uniform routing that differ
MOST_ADDED = 64  # recorded steps that one step's loads are added up from
log = Log("routing")


class Source(Protocol):
    """Loads by step, int64 [L, E] of some layers, for any number of rows; ``period`` steps differ."""

    period: int

    def loads(self, step: int, rows: int, layers: slice) -> np.ndarray: ...


class Uniform:
    """Equal loads (``parallel.balance.uniform``), of other experts in each step and layer."""

    period = CYCLE

    def __init__(self, moe: Moe, *, seed: int) -> None:
        self._moe = moe
        self._seed = seed

    def loads(self, step: int, rows: int, layers: slice) -> np.ndarray:
        moe = self._moe
        seed = (self._seed, step, rows)
        return uniform(rows=rows, layers=moe.layers, experts=moe.experts, chosen=moe.chosen, seed=seed)[
            layers
        ]


class Recorded:
    """The steps of a file in their order, again and again.

    A step of as many rows has the recorded loads themselves; one of fewer has those of rows drawn from them, and one of more
    those of the recorded steps that follow, too. Where ``MOST_ADDED`` steps (or all that there are) have too few rows still, they
    are repeated, and touch too few experts: ``doubt`` says so.
    """

    def __init__(self, moe: Moe, step: Callable[[int], np.ndarray], *, period: int, seed: int) -> None:
        self._moe = moe
        self._step = step
        self._seed = seed
        self.period = period
        self.worked_out = Counter[str]()  # loads by how they were made
        self.doubt: str | None = None

    def loads(self, step: int, rows: int, layers: slice) -> np.ndarray:
        chosen = self._moe.chosen
        counts_LE, added = self._step(step)[layers], 1
        while (short_L := counts_LE.sum(1) < rows * chosen).any() and added < min(MOST_ADDED, self.period):
            more_LE = self._step((step + added) % self.period)[layers]
            counts_LE = counts_LE + more_LE * short_L[:, None]
            added += 1
        had_L = counts_LE.sum(1) // chosen
        if short_L.any():
            made = "repeated"
            if self.doubt is None:
                self.doubt = (
                    f"a step of {rows} rows has the loads of {added} recorded steps with {had_L.min()} rows together: they are "
                    "repeated, and touch fewer experts than so many rows would"
                )
                log.warning(self.doubt)
        else:
            made = "drawn" if (had_L != rows).any() else "added" if added > 1 else "equal"
        self.worked_out[made] += 1
        return drawn(counts_LE, rows=rows, chosen=chosen, seed=(self._seed, step, rows))
