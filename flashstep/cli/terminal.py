"""What commands show: results on stdout, everything else (progress, notes) on stderr."""

from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console

# text is shown as it is: a model's "[red]" or ":smile:" is not ours to interpret
OUT = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
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
