"""Reading a command line by vLLM's rules of spelling: which flags were given, with which values, and how they were written.

``--flag value`` and ``--flag=value``, underscores for dashes, ``--no-x``, ``--disable-x`` for ``--enable-x``, flags of one dash,
``-O3``, keys of JSON objects behind dots (``--speculative-config.method dspark``). Knows shapes, not meanings.
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashstep.config.vllm.flags import OFF, ON, Shape
from flashstep.config.vllm.table import SHORT

VERSION = "0.33"
GONE = {  # flags of older versions of vLLM
    "guided-decoding-backend": "leave it out: there is one backend, llguidance",
}
SECRET = ("api-key", "hf-token")  # their values are never shown
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_LEVEL = re.compile(r"-O=?(\d+)")
_NUMBER = re.compile(r"-\d+(\.\d+)?")


@dataclass(frozen=True)
class Given:
    """A flag that was given: ``spelled`` as the user wrote it; of a JSON object either its text or the ``path`` to one key."""

    name: str
    spelled: str
    values: tuple[str, ...]
    path: tuple[str, ...] = ()


@dataclass
class Line:
    """What a command line says: what stands behind no flag, the flags in their order, and what cannot be read."""

    positional: list[str] = field(default_factory=list)
    given: list[Given] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def number(text: str) -> int | None:
    """``text`` as a whole number, where k, m, g, t are powers of 1,000 and K, M, G, T of 1,024; None if it is none."""
    if found := _SIZE.fullmatch(text.strip()):
        digits, unit = found.groups()
        if "." in digits and unit.isupper():
            return None
        size = (1024 if unit.isupper() else 1000) ** _POWERS[unit.lower()]
        return int(float(digits) * size) if "." in digits else int(digits) * size
    return int(text) if re.fullmatch(r"\s*-?\d{1,30}\s*", text) else None


def read(arguments: Sequence[str], shapes: Mapping[str, Shape]) -> Line:
    """The flags of ``arguments``; ``shapes`` are all that are known, by their names without dashes."""
    line = Line()
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            line.positional.append(word)
        elif found := _LEVEL.fullmatch(word):
            line.given.append(Given("optimization-level", "-O", (found[1],)))
        else:
            _flag(line, word, rest, shapes)
    return line


def _flag(line: Line, word: str, rest: list[str], shapes: Mapping[str, Shape]) -> None:
    spelled, equals, text = word.partition("=")
    head, *path = spelled.lstrip("-").split(".")
    name, switched = _known(head, shapes, long=word.startswith("--"))
    if name is None:
        line.problems.append(_stranger(spelled, shapes))
        while rest and not equals and not rest[0].startswith("-"):
            rest.pop(0)  # its values, for all that is known
        return
    shape = shapes[name]
    if path and shape is not Shape.OBJECT:
        line.problems.append(f"{spelled}: --{name} takes no JSON object, so it has no keys behind dots")
    if shape is Shape.SWITCH:
        if equals:
            line.problems.append(f"{word}: it takes no value; say --{name} or --no-{name}")
        line.given.append(Given(name, spelled, (switched,)))
        return
    values = [text] if equals else _values(rest, several=shape is Shape.LIST)
    if name in SECRET and not equals:
        _hide(line, spelled, rest, shapes)
    if not values:
        line.problems.append(f"{spelled} needs a value")
        return
    line.given.append(Given(name, spelled, tuple(values), tuple(path)))


def _hide(line: Line, spelled: str, rest: list[str], shapes: Mapping[str, Shape]) -> None:
    """What stands behind ``spelled`` and is like no flag may be a secret that begins with a dash: it is not shown."""
    while rest and rest[0].startswith("-") and not _names_flag(rest[0], shapes):
        rest.pop(0)
        line.problems.append(f"{spelled}: a value that begins with a dash is written {spelled}=VALUE")


def _names_flag(word: str, shapes: Mapping[str, Shape]) -> bool:
    head = word.partition("=")[0].lstrip("-").split(".")[0]
    long = word.startswith("--")
    known, _ = _known(head, shapes, long=long)
    return known is not None or _LEVEL.fullmatch(word) is not None or (long and bool(_near(head, shapes)))


def _values(rest: list[str], *, several: bool) -> list[str]:
    values: list[str] = []
    while rest and (several or not values) and (not rest[0].startswith("-") or _NUMBER.fullmatch(rest[0])):
        values.append(rest.pop(0))
    return values


def _known(head: str, shapes: Mapping[str, Shape], *, long: bool) -> tuple[str | None, str]:
    """The flag that ``head`` names, and what it says if it is a switch."""
    if not long:
        name = SHORT.get(head)
        return (name, ON) if name in shapes else (None, ON)
    name = head.replace("_", "-")
    if name in shapes:
        return name, ON
    opposites = [name.removeprefix("no-")] if name.startswith("no-") else []
    for one, other in (("disable-", "enable-"), ("enable-", "disable-")):
        opposites += [other + part.removeprefix(one) for part in (name, *opposites) if part.startswith(one)]
    for opposite in opposites:
        if shapes.get(opposite) is Shape.SWITCH:
            return opposite, OFF
    return None, ON


def _near(name: str, shapes: Mapping[str, Shape]) -> list[str]:
    return difflib.get_close_matches(name.replace("_", "-"), shapes, n=3, cutoff=0.7)


def _stranger(spelled: str, shapes: Mapping[str, Shape]) -> str:
    near = _near(spelled.lstrip("-"), shapes)
    names = ", ".join("--" + name for name in near)
    hint = f"; near to it {'is' if len(near) == 1 else 'are'} {names}" if near else ""
    hint = f"; {GONE[name]}" if (name := spelled.lstrip("-").replace("_", "-")) in GONE else hint
    return f"{spelled} is no flag of flashstep serve, and none of vLLM {VERSION}'s{hint}"


# ---- JSON objects -----------------------------------------------------------------------------------------------------------


def key_value(text: str) -> Any:
    """What stands behind a dotted key: JSON, else a size, else text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        size = number(text)
        return text if size is None else size


def merge(into: dict[str, Any], update: Mapping[str, Any], *, where: str) -> list[str]:
    """Put ``update`` into the object ``into``, deep; sentences where both name one key and differ."""
    problems = []
    for key, value in update.items():
        old = into.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            problems += merge(old, value, where=f"{where}.{key}")
        elif isinstance(old, list) and isinstance(value, list):
            into[key] = old + value
        elif key in into and old != value:
            problems.append(f"{where}.{key} is given twice: {json.dumps(old)} and {json.dumps(value)}")
        else:
            into[key] = value
    return problems
