"""What commands show: results on stdout, everything else (progress, notes) on stderr."""

from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console

OUT = Console(highlight=False, soft_wrap=True)
NOTES = Console(stderr=True, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """One line for the person who waits."""
    NOTES.print(text, style="dim", markup=False)


@contextmanager
def waiting(text: str) -> Generator[None]:
    """Show that something long is going on: a spinner on a terminal, one line elsewhere."""
    if NOTES.is_terminal:
        with NOTES.status(text):
            yield
    else:
        note(f"{text} ...")
        yield
