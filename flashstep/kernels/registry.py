"""The table op x implementation, and the one place that loads an implementation.

Owns how a row of data (``Implementation``) becomes a callable: rows are tried in the written order, the reference stands
last and needs nothing. Takes the families' tables, what the device can do and the switch; gives ``Choice`` records, with the
reason for each row that was passed over. Chosen once, when a model is built; knows nothing of what an op computes.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

REFERENCE = "reference"
AUTO = "auto"
PREPARE = "prepare_"  # such an op lays a weight out for the other ops of its family


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """One row: ``op`` is "family.name", ``module`` defines a function of that name, ``needs`` are device facts."""

    op: str
    module: str
    needs: frozenset[str] = frozenset()

    @property
    def is_reference(self) -> bool:
        return self.module.endswith(f".{REFERENCE}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What one call must move and compute: the floor that a measurement is held against."""

    bytes: int
    flops: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The row that was chosen for an op, and why those before it were not."""

    chosen: Implementation
    passed_over: tuple[tuple[str, str], ...]  # (module, reason)

    def load(self) -> Callable[..., Any]:
        module = importlib.import_module(self.chosen.module)  # noqa: TID251 - only the chosen module may be loaded
        return getattr(module, self.chosen.op.partition(".")[2])


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """Which ops must use the reference: all of them, some of them, or none. This is the bisection tool."""

    everything: bool = False
    ops: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str, *, known: Iterable[str]) -> "Switch":
        """Read "auto", "reference" or "reference:family.op,family.op"; raise ValueError for anything else."""
        known = set(known)
        if text == AUTO:
            return cls()
        if text == REFERENCE:
            return cls(everything=True)
        prefix, _, names = text.partition(":")
        ops = frozenset(name.strip() for name in names.split(",") if name.strip())
        if prefix != REFERENCE or not ops:
            raise ValueError(
                f"kernels is {text!r}; allowed are 'auto', 'reference' and 'reference:<family>.<op>[,...]'"
            )
        unknown = sorted(ops - known)
        if unknown:
            raise ValueError(
                f"kernels names unknown ops {unknown}; `python -m flashstep.kernels` prints the known ones"
            )
        for op in sorted(ops):
            family, _, name = op.partition(".")
            if name.startswith(PREPARE) and not {o for o in known if o.startswith(f"{family}.")} <= ops:
                raise ValueError(
                    f"kernels forces {op} and not all ops of {family}: only the reference can take what the reference "
                    f"prepared; name the op that takes it (it takes what any row prepared), or every op of {family}"
                )
        return cls(ops=ops)

    def forces_reference(self, op: str) -> bool:
        return self.everything or op in self.ops


class Family:
    """The base of a family's public ops: complete when constructed, one loaded callable an op of ``TABLE``."""

    TABLE: ClassVar[tuple[Implementation, ...]] = ()

    def __init__(self, loaded: Mapping[str, Callable[..., Any]]) -> None:
        missing = {row.op for row in self.TABLE} - loaded.keys()
        assert not missing, f"no implementation was given for {sorted(missing)}"
        self._loaded = {row.op.partition(".")[2]: loaded[row.op] for row in self.TABLE}


def choose(table: Iterable[Implementation], *, facts: frozenset[str], switch: Switch) -> dict[str, Choice]:
    """For each op of ``table`` the first row whose needs are all among the device's ``facts``."""
    rows: dict[str, list[Implementation]] = {}
    for row in table:
        rows.setdefault(row.op, []).append(row)
    choices = {}
    for op, candidates in rows.items():
        reference = candidates[-1]
        assert reference.is_reference, f"the last row of {op} must be its reference"
        assert not reference.needs, f"the reference of {op} must need nothing"
        passed_over = []
        for row in candidates:
            reason = _reason_against(row, facts=facts, switch=switch)
            if reason is None:
                choices[op] = Choice(chosen=row, passed_over=tuple(passed_over))
                break
            passed_over.append((row.module, reason))
    return choices


def _reason_against(row: Implementation, *, facts: frozenset[str], switch: Switch) -> str | None:
    if row.is_reference:
        return None
    if switch.forces_reference(row.op):
        return "the switch forces the reference"
    missing = sorted(row.needs - facts)
    return f"this device lacks {', '.join(missing)}" if missing else None
