"""What commands show: results on stdout, everything else (progress, notes) on stderr."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from flashstep.request import Acceptance

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


def require_folders(outputs: Mapping[str, Path | None]) -> None:
    """Before anything long begins: ``ValueError`` for each file, by its flag, that could not be written at the end."""
    wrong = [
        f"{flag} is {path}; there is no folder {path.parent}"
        for flag, path in outputs.items()
        if path is not None and not path.parent.is_dir()
    ]
    if wrong:
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
        note(
            f"{kind.upper()} {what}: {FALSIFIED[name]}, so every text is wrong on purpose; for measuring speed only"
        )


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
