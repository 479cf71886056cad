"""What the numbers behind flags must be, in the one sentence that all commands use. Knows no command."""

from collections.abc import Mapping


def too_small(command: object, least: Mapping[str, float]) -> list[str]:
    """A sentence for each field of ``command`` that is below its least value, or no number (nan)."""
    return [
        f"--{name.replace('_', '-')} is {value}; it must be at least {at_least}"
        for name, at_least in least.items()
        if not (value := getattr(command, name)) >= at_least
    ]
