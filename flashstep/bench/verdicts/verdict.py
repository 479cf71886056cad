"""What a rule says where it is broken, and lists in its sentences."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import msgspec

from flashstep.bench.arms import Arms
from flashstep.bench.ledger import Entry

SHOWN = 3  # of a list in a sentence


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One rule that the design breaks. ``stops`` is what cannot be claimed then; "nothing": it is only told."""

    rule: str
    stops: Literal["claim", "difference", "non-inferiority", "nothing"]
    why: str
    remedy: str = ""


def distinct(values: Iterable[Any]) -> list[Any]:
    """In order; what cannot be hashed, too."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def by_arm(arms: Arms, of: Callable[[Entry], Any]) -> dict[str, list[Any]]:
    """The different values of ``of`` in the runs of each arm."""
    return {label: distinct(map(of, runs)) for label, runs in arms.named.items()}


def differ(found: Mapping[str, list[Any]]) -> bool:
    """Whether there is more than one value in all arms together."""
    return len(distinct(chain(*found.values()))) > 1


def some(values: Sequence[Any]) -> str:
    """The first few."""
    shown = ", ".join(str(value) for value in values[:SHOWN])
    return shown + (f" and {len(values) - SHOWN} more" if len(values) > SHOWN else "")


def listed(found: dict[str, list[Any]]) -> str:
    """By arm."""
    return "; ".join(f"{label} {some(values)}" for label, values in found.items())
