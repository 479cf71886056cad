"""What a measurement says of itself: the records that are written as JSON, and the machine and commit they come from.

Knows no model: numbers, names, and how they were obtained. Times are in microseconds.
"""

import datetime
import math
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

QUERY = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where figures come from. ``commit`` ends in "+" if files differ from it; None where there is no repository."""

    command: str
    date: str
    commit: str | None
    device: str
    torch: str


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


def origin(torch_version: str) -> Origin:
    """Of the process that asks."""
    return Origin(
        command=shlex.join(["flashstep", *sys.argv[1:]]),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        commit=_commit(),
        device=_asked(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]) or "CPU",
        torch=torch_version,
    )


def _commit() -> str | None:
    here = str(Path(__file__).parent)
    commit = _asked(["git", "-C", here, "rev-parse", "--short", "HEAD"])
    changed = _asked(["git", "-C", here, "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}+" if commit and changed else commit or None


def _asked(command: Sequence[str]) -> str:
    """What ``command`` prints, or nothing if it is not there or refuses."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least ``share`` of all do not exceed."""
    ordered = sorted(samples)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def as_json(report: Any) -> bytes:
    """``report`` as indented JSON, with what follows from it (medians, ratios) left to the reader."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1)
