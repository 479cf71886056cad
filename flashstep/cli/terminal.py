"""What commands show: results on stdout, everything else (progress, notes) on stderr."""

import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.table import Table

from flashstep.cli.outputs import output_problems
from flashstep.request import Acceptance

INTERRUPTED = 130  # exit code after Ctrl-C
LEAST_TEXT = 12  # columns of a terminal that a column of text can do with
PIPED = 100_000  # columns where nobody looks: tables are as wide as what stands in them


class Results(Console):
    """Shows tables whole: numbers (columns to the right) are never shortened nor broken, texts are broken where they must."""

    def print(self, *objects: Any, **how: Any) -> None:
        """As rich's; a table that a terminal has no room for is printed wider than it."""
        for table in (each for each in objects if isinstance(each, Table)):
            needed = _width_of(table, self)
            if needed > self.width:
                table.width = needed  # rich takes no wider one than the console for print's width
        super().print(*objects, **how)


def _width_of(table: Table, console: Console) -> int:
    """Fix the columns of numbers at what they need; the least width of ``table`` then."""
    needed = 1
    for column in table.columns:
        cells = [column.header, *column.cells]
        width = max(console.measure(cell).maximum for cell in cells)
        if column.justify == "right":
            column.no_wrap = True
            column.min_width = width
        else:
            column.overflow = "fold"
            width = width if column.no_wrap else min(width, LEAST_TEXT)
        needed += width + 3  # its padding and its line
    return needed


# text is shown as it is: a model's "[red]" or ":smile:" is not ours to interpret
OUT = Results(
    markup=False,
    emoji=False,
    highlight=False,
    soft_wrap=True,
    width=None if sys.stdout.isatty() else PIPED,
)
NOTES = Console(stderr=True, markup=False, emoji=False, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """One line for the person who waits."""
    NOTES.print(text, style="dim")


@contextmanager
def waiting(text: str) -> Generator[None]:
    """Show that something long is going on: a spinner on a terminal, one line elsewhere."""
    if NOTES.is_terminal:
        with NOTES.status(text):
            yield
    else:
        note(f"{text} ...")
        yield


def require_outputs(
    outputs: Mapping[str, Path | None],
    *,
    inputs: Mapping[str, Path | None] = MappingProxyType({}),
    kinds: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Before anything long begins: ``ValueError`` with all ``outputs.output_problems``."""
    if wrong := output_problems(outputs, inputs=inputs, kinds=kinds):
        raise ValueError("; ".join(wrong))


FALSIFIED = {
    "synthetic acceptance": "drafts stand by lot",
    "uniform routing": "rows go to experts that their routers did not choose",
    "recorded routing": "rows go to experts that their routers did not choose",
    "filled cache": "nobody has computed the prompts",
}


def warn_of_falsified(falsifies: Sequence[str]) -> None:
    """Say it before any text comes: with any of ``EngineConfig.falsifies`` none of it is the model's."""
    for name in falsifies:
        kind, _, what = name.partition(" ")
        why = FALSIFIED.get(name, "its server says so")
        note(f"{kind.upper()} {what}: {why}, so every text is wrong on purpose; for measuring speed only")


def note_acceptance(acceptance: Acceptance | None) -> None:
    """What speculation did so far, in one line; nothing where no step had drafts."""
    if acceptance is None or acceptance.mean_length is None:
        return
    rates = " ".join(f"{rate:.2f}" for rate in acceptance.position_rates)
    note(
        f"{'SYNTHETIC ' if acceptance.synthetic else ''}acceptance: {acceptance.mean_length:.2f} tokens a step over "
        f"{acceptance.steps} steps; {acceptance.accepted_tokens} of {acceptance.draft_tokens} drafts stood "
        f"(by position: {rates})"
    )
