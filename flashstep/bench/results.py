"""What a measurement says of itself: the records that are written as JSON, and the machine and commit they come from.

Knows no model: numbers, names, and how they were obtained. Times are in microseconds.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from flashstep.bench.ledger import Entry, Samples
from flashstep.bench.origin import Origin


class PartTime(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a step. ``floor_us`` None: no floor is defined for it; ``us`` None: the part was not taken apart."""

    name: str
    us: float | None
    floor_us: float | None
    launches: int

    @property
    def ratio(self) -> float | None:
        return None if self.us is None or not self.floor_us else self.us / self.floor_us


class KernelTime(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one kernel on one account: what they keep the device busy with behind what ran before."""

    name: str
    account: str
    part: str
    calls: int
    us: float


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A case: raw samples of whole steps, and one step taken apart (on a CPU it is not).

    ``touched_experts`` a layer, and how many uniform routing touches: the floor of a decoding step counts with the latter.
    ``balancedness`` of the experts' loads (mean over largest part), None where they are not recorded.
    """

    case: str
    rows: int
    graph: bool
    samples_us: tuple[float, ...]
    floor_us: float | None
    touched_experts: float
    expected_experts: float
    parts: tuple[PartTime, ...] = ()
    kernels: tuple[KernelTime, ...] = ()
    launches: int = 0
    idle_share: float | None = None
    balancedness: float | None = None

    @property
    def us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def ratio(self) -> float | None:
        return None if not self.floor_us else self.us / self.floor_us


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the device: planned and measured behind loading, and the most that was there while loading and while measuring."""

    planned_bytes: int
    loaded_bytes: int
    peak_loading_bytes: int
    peak_bytes: int
    load_s: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All cases of one command."""

    origin: Origin
    model: str
    layout: str
    excluded: tuple[str, ...]
    memory: Memory
    cases: tuple[Measured, ...]
    faults: tuple[str, ...] = ()

    def entry(
        self,
        *,
        settings: dict[str, Any],
        subject: dict[str, Any],
        seed: int,
        falsified_by: tuple[str, ...] = (),
    ) -> Entry:
        """For the ledger: a sample for each timed run. One case has a step time; several have a column each, and no whole."""
        plain = [msgspec.to_builtins(case) for case in self.cases]
        return Entry(
            kind="forward",
            origin=self.origin,
            settings=settings,
            subject={"model": self.model, "layout": self.layout} | subject,
            samples=self._samples(),
            metrics=self._metrics(),
            seed=seed,
            detail={
                "cases": [
                    {name: value for name, value in case.items() if name != "samples_us"}
                    | {"us": measured.us}
                    for case, measured in zip(plain, self.cases, strict=True)
                ],
                "memory": msgspec.to_builtins(self.memory),
                "excluded": list(self.excluded),
            },
            faults=self.faults,
            complete=not self.faults,
            falsified_by=falsified_by,
        )

    def _samples(self) -> Samples:
        runs = max((len(case.samples_us) for case in self.cases), default=0)
        columns = {
            "step_us" if len(self.cases) == 1 else f"step_us {number} {case.case}": (
                case.samples_us + (None,) * (runs - len(case.samples_us))
            )
            for number, case in enumerate(self.cases)
        }
        return Samples(unit="replay", keys=tuple(map(str, range(runs))), columns=columns)

    def _metrics(self) -> dict[str, float]:
        if len(self.cases) != 1:  # steps of different shapes have no mean that says anything
            return {}
        (case,) = self.cases
        return {"step_us": case.us} | (
            {} if case.balancedness is None else {"balancedness": case.balancedness}
        )


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least ``share`` of all do not exceed."""
    ordered = sorted(samples)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def as_json(report: Any) -> bytes:
    """``report`` as indented JSON, with what follows from it (medians, ratios) left to the reader."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1)
