"""The arms of an experiment, read from ledgers, and the question that is asked of them.

``ledger.jsonl`` is an arm if all its entries have one label; ``ledger.jsonl:label`` is one of several. Judges nothing.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import msgspec

from flashstep.bench.experiment import CONTROL, Margin, Stated
from flashstep.bench.ledger import Entry, LedgerError, read
from flashstep.bench.measure import Measure


class Arms(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of an experiment. ``control`` is the build of A once more; empty without one.

    ``replaced`` ended early, and the same arm's same round was run again to its end: they are told, and not counted.
    """

    a: tuple[Entry, ...]
    b: tuple[Entry, ...]
    control: tuple[Entry, ...] = ()
    replaced: tuple[Entry, ...] = ()

    @property
    def named(self) -> dict[str, tuple[Entry, ...]]:
        return {"A": self.a, "B": self.b} | ({CONTROL: self.control} if self.control else {})

    @property
    def all(self) -> list[Entry]:
        return list(chain(*self.named.values()))


def arms_of(a: Iterable[Entry], b: Iterable[Entry], control: Iterable[Entry] = ()) -> Arms:
    """The runs in the order of their ledgers. What ended early is replaced by a complete run of its round; nothing else is."""
    counted, replaced = [], []
    for runs in map(list, (a, b, control)):
        whole = {e.round for e in runs if e.complete}
        counted.append(tuple(e for e in runs if e.complete or e.round not in whole))
        replaced += [e for e in runs if not e.complete and e.round in whole]
    return Arms(a=counted[0], b=counted[1], control=counted[2], replaced=tuple(replaced))


def without_copies(runs: Sequence[Entry]) -> tuple[Entry, ...]:
    """The runs whose samples are not those of an earlier one to the last value: answers given again at temperature 0."""
    return tuple(
        e for place, e in enumerate(runs) if all(e.samples != before.samples for before in runs[:place])
    )


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of the runs. ``stated``: the plan that says so, where one was written before the first of them."""

    measure: Measure
    alpha: float = 0.05
    margin: Margin | None = None
    stated: Stated | None = None


def entries_of(text: str) -> list[Entry]:
    """The entries of ``ledger.jsonl`` or ``ledger.jsonl:label``; ``ValueError`` where that is not one arm."""
    path, label = ledger_and_label(text)
    entries = read(path)
    labels = sorted({entry.label for entry in entries})
    if label is None and len(labels) > 1:
        choices = ", ".join(f"{path}:{name}" for name in labels)
        raise LedgerError(f"{path} has more than one arm; say which: {choices}")
    chosen = [entry for entry in entries if label is None or entry.label == label]
    if not chosen:
        raise LedgerError(
            f"{path} has no entries{f' of arm {label!r}' if label else ''}; it has {', '.join(labels) or 'none'}"
        )
    return chosen


def ledger_and_label(text: str) -> tuple[Path, str | None]:
    """A whole name that exists is a ledger; else the label stands behind the last colon."""
    if Path(text).exists() or ":" not in text:
        return Path(text), None
    path, _, label = text.rpartition(":")
    return Path(path), label


def is_ledger(text: str) -> bool:
    """Whether an arm is to be read, not run."""
    path, _ = ledger_and_label(text)
    return path.is_file() or path.suffix == ".jsonl"
