"""One argument out of a tool's JSON Schema: its alternatives, which of them are plain text, and a schema that stands alone.

``text_form`` says a schema of strings as a Lark terminal, because a tool call holds strings bare, without JSON's quotes. Takes
decoded JSON; nothing is loosened: what it does not know it leaves for the compiler of JSON Schemas. References make a great deal
of a short schema, so whoever follows them says what is spent in ``spend``. Knows no markup.
"""

import json
import re
from typing import Any

from flashstep.chat.lark import VERBOSE, Spend, any_of, literal, regex

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
# looked at to find what kind of value a schema is of; more are left to the compiler
MAX_REFERENCES = 32
MAX_ALTERNATIVES = 64
MAX_LOOKS = 256
# of a pattern: escape, class (which may lack its end, so that nothing is searched twice), or character
PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|.", re.DOTALL)
ANY_TEXT = "/(?s:.*)/"


class SchemaError(ValueError):
    """The schema refers to something that is not there."""


class Document:
    """A whole JSON Schema, in which references are looked up."""

    def __init__(self, root: Schema) -> None:
        self.root = root

    def followed(self, schema: Schema, spend: Spend) -> Schema:
        """``schema``, or what it stands for if it is a reference and nothing else."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(schema, dict) or keywords(schema) != {"$ref"}:
                break
            schema = self._at(schema["$ref"], spend)
        return schema

    def alternatives(self, schema: Schema, spend: Spend) -> list[Schema]:
        """Schemas of which a value satisfies one at least if and only if it satisfies ``schema``: that alone if they are many."""
        found: list[Schema] = []
        left = [schema]  # the last comes next
        for _ in range(MAX_LOOKS):
            if not left:
                return found
            one = self.followed(left.pop(), spend)
            branches = _branches(one)
            if branches is None:
                spend(len(one) if isinstance(one, dict) else 1)
                found += _by_kind(one, spend)
            else:
                left += reversed(branches[: MAX_ALTERNATIVES + 1])
            if len(found) + len(left) > MAX_ALTERNATIVES:
                break
        return [schema]

    def alone(self, schema: Schema, spend: Spend) -> Schema:
        """``schema`` as a document of its own, with the definitions that it needs."""
        names: dict[str, str] = {}  # by pointer
        made = _renamed(schema, names, spend)
        definitions: dict[str, Schema] = {}
        while missing := [pointer for pointer, name in names.items() if name not in definitions]:
            for pointer in missing:
                definitions[names[pointer]] = _renamed(self._at(pointer, spend), names, spend)
        return made | {"$defs": definitions} if isinstance(made, dict) and definitions else made

    def _at(self, pointer: Any, spend: Spend) -> Schema:
        """What a reference within this document points at."""
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise SchemaError(
                f"$ref is {json.dumps(pointer)}; it must point into the schema itself, as #/$defs/name does"
            )
        spend(len(pointer))
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


def _branches(schema: Schema) -> list[Schema] | None:
    """What ``schema`` is one of, if it says nothing else."""
    if not isinstance(schema, dict):
        return None
    names = keywords(schema)
    if names not in ({"anyOf"}, {"allOf"}):
        return None
    branches = schema[names.pop()]
    known = isinstance(branches, list) and branches and ("anyOf" in schema or len(branches) == 1)
    return branches if known else None


def _by_kind(schema: Schema, spend: Spend) -> list[Schema]:
    """``schema`` by the types that it lists, and of an ``enum`` the texts apart from the other values."""
    if not isinstance(schema, dict):
        return [schema]
    if isinstance(schema.get("enum"), list) and keywords(schema) <= {"enum", "type"}:
        spend(len(schema["enum"]))
        return _texts_apart(schema)
    kinds = schema.get("type")
    if not isinstance(kinds, list) or len(kinds) > MAX_ALTERNATIVES:
        return [schema]
    spend(len(kinds) * len(schema))
    return [schema | {"type": kind} for kind in kinds]


def _texts_apart(schema: dict[str, Any]) -> list[Schema]:
    kind = schema.get("type", "string")
    texts = [value for value in schema["enum"] if isinstance(value, str)]
    others = [value for value in schema["enum"] if not isinstance(value, str)]
    if not texts or not (kind == "string" or (isinstance(kind, list) and "string" in kind)):
        return [schema]
    both = others and schema.get("type") != "string"
    return [{"enum": texts}, schema | {"enum": others}] if both else [{"enum": texts}]


def _renamed(schema: Schema, names: dict[str, str], spend: Spend) -> Schema:
    """``schema`` with each reference pointing at a definition, whose name by pointer is added to ``names``."""
    if not isinstance(schema, dict):
        spend(len(schema) if isinstance(schema, str) else 1)
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        spend(len(key))
        if key == "$ref" and isinstance(value, str):
            made[key] = "#/$defs/" + names.setdefault(value, str(len(names)))
        elif key in LITERAL_KEYWORDS:
            spend(len(json.dumps(value)))
            made[key] = value
        elif key in NAMING_KEYWORDS and isinstance(value, dict):
            if not key.startswith(
                ("$", "def")
            ):  # definitions are referred to by where they stand in the root
                made[key] = {name: _renamed(one, names, spend) for name, one in value.items()}
        elif isinstance(value, list):
            made[key] = [_renamed(one, names, spend) for one in value]
        elif key != "$id":  # it would change what references are relative to
            made[key] = _renamed(value, names, spend)
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
    """A pattern that may match anywhere, as one of the whole text; None where anchors stand elsewhere than at its two ends.

    None with the flag x, too: what is put behind such a pattern may be in its comment.
    """
    if not isinstance(pattern, str) or VERBOSE.search(pattern):
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
