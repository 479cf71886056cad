"""What is known of one of vLLM's flags, and the short notation that the table is written in.

A flag that is not ours is *taken* when its value asks for what is so here anyhow, else it is refused with a reason and with what
to use instead. Knows no command line.
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

ON, OFF = "on", "off"


class Shape(enum.Enum):
    """What follows a flag: nothing, one value, values up to the next flag, a JSON object."""

    SWITCH = enum.auto()
    VALUE = enum.auto()
    LIST = enum.auto()
    OBJECT = enum.auto()


class Standing(enum.Enum):
    """The value is the heading of its table in docs/from-vllm.md."""

    WORKS = "Works"
    ALWAYS = "Always so"
    LATER = "Not there yet"
    NEVER = "Has no counterpart"


@dataclass(frozen=True)
class Key:
    """One key of a flag's JSON object: the values that are taken, and what is so here."""

    taken: tuple[Any, ...]
    reason: str


@dataclass(frozen=True)
class Flag:
    """``name`` has no dashes before it. ``taken`` holds values in their spelling on the command line (a switch's are on, off).

    ``keys`` are those of a JSON object that may be named; ``reason`` says what is so here, ``instead`` what to use.
    """

    name: str
    shape: Shape
    standing: Standing
    taken: tuple[str, ...] = ()
    reason: str = ""
    instead: str = ""
    keys: Mapping[str, Key] = field(default_factory=dict)


def rows(
    standing: Standing,
    notation: str,
    reason: str,
    instead: str = "",
    *,
    keys: Mapping[str, Key] | None = None,
) -> Iterable[Flag]:
    """The flags of ``notation`` that share one reason.

    Its words: ``a-switch`` (off is taken), ``+a-switch`` (on is), ``-+a-switch`` (both are), ``a-flag=`` (a value, none is
    taken), ``a-flag=x|y`` (these are), ``a-flag*`` (several values), ``a-flag{}`` (a JSON object; an empty one is taken).
    """
    for word in notation.split():
        taken: tuple[str, ...] = (OFF,)
        shape = Shape.SWITCH
        name = word.lstrip("+-")
        if word.startswith("-+"):
            taken = (ON, OFF)
        elif word.startswith("+"):
            taken = (ON,)
        elif word.endswith("{}"):
            shape, name, taken = Shape.OBJECT, word[:-2], ()
        elif word.endswith("*"):
            shape, name, taken = Shape.LIST, word[:-1], ()
        elif "=" in word:
            shape = Shape.VALUE
            name, _, values = word.partition("=")
            taken = tuple(values.split("|")) if values else ()
        yield Flag(name, shape, standing, taken, reason, instead, keys or {})
