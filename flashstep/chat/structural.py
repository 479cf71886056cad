"""Structural tags to a grammar: text that is free until a trigger, and then follows the tag that the trigger begins.

Both spellings: vLLM's first one (``structures`` and ``triggers``), and xgrammar's (``format``, a tree). Takes decoded JSON.
Triggers, tags and the text between them are text: no control token is meant by any spelling. Knows no HTTP.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from flashstep.chat import grammar
from flashstep.chat.grammar import GrammarError
from flashstep.chat.lark import Lark, any_of, literal, regex
from flashstep.chat.schemas import ANY_TEXT

T = TypeVar("T")


class ConstString(msgspec.Struct, tag="const_string", frozen=True, forbid_unknown_fields=True):
    value: str


class JsonSchema(msgspec.Struct, tag="json_schema", frozen=True, forbid_unknown_fields=True):
    json_schema: dict[str, Any] | bool


class Regex(msgspec.Struct, tag="regex", frozen=True, forbid_unknown_fields=True):
    pattern: str


class Grammar(msgspec.Struct, tag="grammar", frozen=True, forbid_unknown_fields=True):
    grammar: str


class AnyText(msgspec.Struct, tag="any_text", frozen=True, forbid_unknown_fields=True):
    """In a tag: up to its end."""


class Sequenced(msgspec.Struct, tag="sequence", frozen=True, forbid_unknown_fields=True):
    elements: list["Format"]


class Or(msgspec.Struct, tag="or", frozen=True, forbid_unknown_fields=True):
    elements: list["Format"]


class Tag(msgspec.Struct, tag="tag", frozen=True, forbid_unknown_fields=True):
    begin: str
    content: "Format"
    end: str


class TriggeredTags(msgspec.Struct, tag="triggered_tags", frozen=True, forbid_unknown_fields=True):
    """Free text in which a trigger begins one of ``tags``, any number of times."""

    triggers: list[str]
    tags: list[Tag]
    at_least_one: bool = False
    stop_after_first: bool = False


class TagsWithSeparator(msgspec.Struct, tag="tags_with_separator", frozen=True, forbid_unknown_fields=True):
    tags: list[Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = (
    ConstString
    | JsonSchema
    | Regex
    | Grammar
    | AnyText
    | Sequenced
    | Or
    | Tag
    | TriggeredTags
    | TagsWithSeparator
)


class Structure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's first form of a tag, around JSON."""

    begin: str
    schema: dict[str, Any] | bool = True
    end: str


class StructuralTag(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``format``, or ``structures`` with their ``triggers``."""

    type: str
    format: Format | None = None
    structures: list[Structure] | None = None
    triggers: list[str] | None = None


def structural_tag(given: dict[str, Any] | str) -> str:
    """The serialised grammar; raise ``GrammarError`` for what is none."""
    try:
        tag = msgspec.convert(msgspec.json.decode(given) if isinstance(given, str) else given, StructuralTag)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"it is no structural tag: {error}") from error
    lark = Lark()
    try:
        return lark.serialised(_written(lark, _format(tag)))
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error


def _format(tag: StructuralTag) -> Format:
    old = tag.structures is not None and tag.triggers is not None
    if tag.type != "structural_tag" or (tag.format is not None) == old:
        raise GrammarError(
            "its type must be structural_tag, and it needs either format or structures with triggers"
        )
    if tag.format is not None:
        return tag.format
    tags = [Tag(one.begin, JsonSchema(one.schema), one.end) for one in tag.structures or ()]
    return TriggeredTags(tag.triggers or [], tags)


def _written(lark: Lark, form: Format) -> str:
    """A rule body that matches ``form``."""
    match form:
        case ConstString(value=text):
            return literal(text)
        case JsonSchema(json_schema=schema):
            return lark.nested(grammar.json_schema(schema))
        case Regex(pattern=pattern):
            return lark.terminal(regex(pattern))
        case Grammar(grammar=text):
            return lark.nested(grammar.grammar(text))
        case AnyText():
            return lark.terminal(ANY_TEXT)
        case Sequenced() | Or():
            elements = [lark.rule(_written(lark, one)) for one in _some(form.elements, "elements")]
            return " ".join(elements) if isinstance(form, Sequenced) else any_of(elements)
        case Tag():
            return f"{literal(form.begin)} {_inside(lark, form)}"
        case TriggeredTags():
            return _triggered(lark, form)
        case TagsWithSeparator():
            return _separated(lark, form)


def _inside(lark: Lark, tag: Tag) -> str:
    """What follows the beginning of ``tag``. Text that could swallow the end is of one unit with it."""
    end = literal(tag.end)
    match tag.content:
        case AnyText() if tag.end:
            return lark.terminal(_up_to_first([tag.end], end))
        case Regex(pattern=pattern):
            return lark.terminal(f"{regex(pattern)} {end}")
        case other:
            return f"{lark.rule(_written(lark, other))} {end}"


def _triggered(lark: Lark, form: TriggeredTags) -> str:
    triggers = _some(form.triggers, "triggers")
    if not all(triggers):
        raise GrammarError("a trigger is empty, so that no text could stand before it")
    begun: dict[str, list[str]] = {}
    for tag in _some(form.tags, "tags"):
        lark.spend(len(triggers))
        trigger = next((trigger for trigger in triggers if tag.begin.startswith(trigger)), None)
        if trigger is None:
            raise GrammarError(f"the tag that begins with {tag.begin!r} begins with none of the triggers")
        rest = literal(tag.begin[len(trigger) :])
        begun.setdefault(trigger, []).append(lark.rule(f"{rest} {_inside(lark, tag)}"))
    one = lark.rule(
        any_of(
            f"{lark.terminal(_up_to_first(triggers, literal(trigger)))} {any_of(rests)}"
            for trigger, rests in begun.items()
        )
    )
    free = lark.terminal(f"{ANY_TEXT} & ~({ANY_TEXT} {any_of(map(literal, triggers))} {ANY_TEXT})")
    if form.stop_after_first:
        return one if form.at_least_one else f"{one} | {free}"
    return f"{one}{'+' if form.at_least_one else '*'} {free}"


def _separated(lark: Lark, form: TagsWithSeparator) -> str:
    tag = lark.rule(any_of(lark.rule(_written(lark, one)) for one in _some(form.tags, "tags")))
    whole = tag if form.stop_after_first else f"{tag} ({literal(form.separator)} {tag})*"
    return whole if form.at_least_one else f"({whole})?"


def _up_to_first(ends: Sequence[str], end: str) -> str:
    """A terminal: any text up to and with ``end``, in which none of ``ends`` stands earlier."""
    return f"({ANY_TEXT} {end}) & ~({ANY_TEXT} {any_of(map(literal, ends))} /(?s:.+)/)"


def _some(items: list[T], name: str) -> list[T]:
    if not items:
        raise GrammarError(f"{name} is an empty list")
    return items
