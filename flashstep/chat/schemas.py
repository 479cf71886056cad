"""One argument out of a tool's JSON Schema: its alternatives, which of them are plain text, and a schema that stands alone.

``text_form`` says a schema of strings as a Lark terminal, because a tool call holds strings bare, without JSON's quotes. Takes
decoded JSON; nothing is loosened: what it does not know it leaves for the compiler of JSON Schemas. Knows no markup.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from flashstep.chat.lark import any_of, literal, regex

Schema = dict[str, Any] | bool

KEYWORDS = frozenset(  # that say something about values, in any draft; all others are annotations
    "$ref $dynamicRef $recursiveRef additionalItems additionalProperties allOf anyOf const contains dependencies"
    " dependentRequired dependentSchemas else enum exclusiveMaximum exclusiveMinimum format if items maxContains maxItems"
    " maxLength maxProperties maximum minContains minItems minLength minProperties minimum multipleOf not oneOf pattern"
    " patternProperties prefixItems properties propertyNames required then type unevaluatedItems unevaluatedProperties"
    " uniqueItems".split()
)
# keywords whose values are no schemas, and those whose values are schemas by name
LITERAL_KEYWORDS = frozenset({"const", "default", "enum", "example", "examples"})
NAMING_KEYWORDS = frozenset({"$defs", "definitions", "properties", "patternProperties", "dependentSchemas"})
TEXT_KEYWORDS = frozenset({"type", "pattern", "minLength", "maxLength", "enum", "const"})
# followed to find what kind of value a schema is of; deeper ones are left to the compiler
MAX_REFERENCES = 32
# of a pattern: escape, class, or character
PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
ANY_TEXT = "/(?s:.*)/"


class SchemaError(ValueError):
    """The schema refers to something that is not there."""


class Document:
    """A whole JSON Schema, in which references are looked up."""

    def __init__(self, root: Schema) -> None:
        self.root = root

    def followed(self, schema: Schema) -> Schema:
        """``schema``, or what it stands for if it is a reference and nothing else."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(schema, dict) or keywords(schema) != {"$ref"}:
                break
            schema = self._at(schema["$ref"])
        return schema

    def alternatives(self, schema: Schema, *, depth: int = MAX_REFERENCES) -> Iterator[Schema]:
        """Schemas of which a value satisfies one at least if and only if it satisfies ``schema``."""
        schema = self.followed(schema)
        if not isinstance(schema, dict) or not depth:
            yield schema
            return
        names = keywords(schema)
        branches = schema.get("anyOf") or schema.get("allOf")
        if isinstance(branches, list) and (names == {"anyOf"} or (names == {"allOf"} and len(branches) == 1)):
            for one in branches:
                yield from self.alternatives(one, depth=depth - 1)
        elif isinstance(schema.get("enum"), list) and names <= {"enum", "type"}:
            yield from _by_kind(schema)
        elif isinstance(schema.get("type"), list):
            for kind in schema["type"]:
                yield schema | {"type": kind}
        else:
            yield schema

    def alone(self, schema: Schema) -> Schema:
        """``schema`` as a document of its own, with the definitions that it needs."""
        names: dict[str, str] = {}  # by pointer
        made = _renamed(schema, names)
        definitions: dict[str, Schema] = {}
        while missing := [pointer for pointer, name in names.items() if name not in definitions]:
            for pointer in missing:
                definitions[names[pointer]] = _renamed(self._at(pointer), names)
        return made | {"$defs": definitions} if isinstance(made, dict) and definitions else made

    def _at(self, pointer: Any) -> Schema:
        """What a reference within this document points at."""
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise SchemaError(
                f"$ref is {json.dumps(pointer)}; it must point into the schema itself, as #/$defs/name does"
            )
        found: Any = self.root
        for step in pointer.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict) and key in found:
                found = found[key]
            else:
                raise SchemaError(f"$ref is {json.dumps(pointer)}, and there is nothing there")
        if not isinstance(found, dict | bool):
            raise SchemaError(f"$ref is {json.dumps(pointer)}, which is no schema")
        return found


def keywords(schema: dict[str, Any]) -> set[str]:
    """What of ``schema`` says something about values."""
    return schema.keys() & KEYWORDS


def text_form(schema: Schema) -> str | None:
    """The Lark terminal of the texts that satisfy ``schema``; None if it is not one of strings alone, or can't be said so.

    >>> text_form({"enum": ["a", "b"]})
    '("a" | "b")'
    """
    if not isinstance(schema, dict):
        return None
    names = keywords(schema)
    if not names <= TEXT_KEYWORDS or schema.get("type", "string") != "string":
        return None
    parts = [_one_of([schema["const"]])] if "const" in names else []
    if "enum" in names:
        parts.append(_one_of(schema["enum"]))
    elif not names & {"type", "const"}:
        return None
    if names & {"minLength", "maxLength"}:
        parts.append(_of_length(schema.get("minLength", 0), schema.get("maxLength")))
    if "pattern" in names:
        parts.append(_searched(schema["pattern"]))
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return " & ".join(known) or ANY_TEXT


def _by_kind(schema: dict[str, Any]) -> Iterator[Schema]:
    """An ``enum``: its texts apart from its other values."""
    kind = schema.get("type", "string")
    texts = [value for value in schema["enum"] if isinstance(value, str)]
    others = [value for value in schema["enum"] if not isinstance(value, str)]
    if not texts or not (kind == "string" or (isinstance(kind, list) and "string" in kind)):
        yield schema
        return
    yield {"enum": texts}
    if others and schema.get("type") != "string":
        yield schema | {"enum": others}


def _renamed(schema: Schema, names: dict[str, str]) -> Schema:
    """``schema`` with each reference pointing at a definition, whose name by pointer is added to ``names``."""
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str):
            made[key] = "#/$defs/" + names.setdefault(value, str(len(names)))
        elif key in LITERAL_KEYWORDS:
            made[key] = value
        elif key in NAMING_KEYWORDS and isinstance(value, dict):
            if not key.startswith(
                ("$", "def")
            ):  # definitions are referred to by where they stand in the root
                made[key] = {name: _renamed(one, names) for name, one in value.items()}
        elif isinstance(value, list):
            made[key] = [_renamed(one, names) for one in value]
        elif key != "$id":  # it would change what references are relative to
            made[key] = _renamed(value, names)
    return made


def _one_of(values: Any) -> str | None:
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        return None
    return any_of(map(literal, values))


def _of_length(low: Any, high: Any) -> str | None:
    if not isinstance(low, int) or not isinstance(high, int | None):
        return None
    return f"/(?s:.{{{low},{'' if high is None else high}}})/"


def _searched(pattern: Any) -> str | None:
    """A pattern that may match anywhere, as one of the whole text; None where anchors stand elsewhere than at its two ends."""
    if not isinstance(pattern, str):
        return None
    pieces = PIECE.findall(pattern)
    begins, ends = pieces[:1] == ["^"], pieces[-1:] == ["$"]
    inner = pieces[begins : len(pieces) - ends]
    if "^" in inner or "$" in inner or ((begins or ends) and _is_split(inner)):
        return None
    return regex(f"{'' if begins else '(?s:.*)'}(?:{''.join(inner)}){'' if ends else '(?s:.*)'}")


def _is_split(pieces: list[str]) -> bool:
    """Whether a "|" stands outside of all groups: an anchor would belong to one side of it."""
    depth = 0
    for piece in pieces:
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and not depth:
            return True
    return False
