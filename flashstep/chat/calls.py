"""The markup of tool calls (DSML of V4.1, spec/serving.md F19) as a grammar: which tools, which arguments, how many calls.

Takes tools and gives grammars in llguidance's form. The arguments of a strict tool follow its schema: parameters in the order of
``properties``, each at most once, the required ones always; behind them others, only where ``additionalProperties`` is given and
not false, and of those a name may come twice (a grammar cannot remember what the model made up). Of any other tool the names of
parameters are enforced (any name if the schema has no ``properties``), not their order, number or values. Strings stand bare;
what is no string, and what no bare text can be held to, is JSON. Knows no HTTP.
"""

import re
import time
from collections.abc import Iterator, Sequence

import msgspec

from flashstep.chat.grammar import GrammarError, json_schema
from flashstep.chat.lark import Lark, Spend, any_of, literal, token
from flashstep.chat.schemas import (
    ANY_TEXT,
    Document,
    Schema,
    SchemaError,
    keywords,
    text_form,
)
from flashstep.request import Constraint
from flashstep.sampling.checking import problem

OPENING = " calls>\n"  # of the block, behind "<" and the marker
MOST_SEARCH_S = 3.0
OBJECT_KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties"})
# the recipe's parser takes a name up to the next space, and puts it into JSON as it is
NAME = re.compile(r'[^\s"\\\x00-\x1f]+')
ANY_NAME = r'/[^\s"\\<>\x00-\x1f]+/'


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """What may be called. ``parameters`` is the JSON Schema of the arguments; None: it takes none."""

    name: str
    parameters: Schema | None = None
    strict: bool = False


class Calls(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one answer: one of ``tools`` or, if ``several``, one or more. ``marker`` is the token of the markup.

    ``begun``: the prompt ends with the opening tag.
    """

    tools: Sequence[Tool]
    marker: int
    several: bool = True
    begun: bool = False


def required(calls: Calls) -> str:
    """Nothing but calls."""
    writer = _Writer(calls.marker)
    return writer.lark.serialised(writer.block(calls, opening=literal("\n\n<")))


def offered(calls: Calls, *, form: str | None) -> str:
    """Any text, with calls behind it or none; if there is a ``form`` (a serialised grammar), either that or calls."""
    writer = _Writer(calls.marker)
    if form is None:
        other, opening = writer.lark.terminal(ANY_TEXT), writer.lark.terminal(f'{ANY_TEXT} "<"')
    else:
        other, opening = writer.lark.nested(form), literal("\n\n<")
    return writer.lark.serialised(f"{other} | {writer.block(calls, opening=opening)}")


def check(tools: Sequence[Tool], *, marker: int) -> None:
    """Raise ``GrammarError``, with the tool and the parameter, for what of the strict ``tools`` cannot be enforced.

    Looks for no longer than ``MOST_SEARCH_S``: each piece of a hostile request is compiled by itself.
    """
    end = time.monotonic() + MOST_SEARCH_S
    for tool in tools:
        if not tool.strict or time.monotonic() > end or (whole := _problem(tool, None, marker)) is None:
            continue
        for parameter in _Arguments(tool, Lark().spend).parameters():
            if time.monotonic() < end and (wrong := _problem(tool, parameter, marker)):
                raise GrammarError(f"the parameter {parameter.name!r} of the tool {tool.name!r}: {wrong}")
        raise GrammarError(f"the tool {tool.name!r}: {whole}")


def _problem(tool: Tool, parameter: "_Parameter | None", marker: int) -> str | None:
    """What is wrong with one parameter of ``tool``, or with all of it."""
    writer = _Writer(marker)
    try:
        start = writer.call(tool) if parameter is None else writer.parameter(parameter)
        return problem(Constraint(grammar=writer.lark.serialised(start), control_tokens=(marker,)))
    except (GrammarError, SchemaError, RecursionError) as error:
        return str(error)


class _Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """One place for an argument. ``name`` None is any name but those ``taken``."""

    name: str | None
    schema: Schema
    document: Document
    required: bool = False
    taken: tuple[str, ...] = ()


class _Arguments:
    """The schema of one tool's arguments, whose root must be that of a plain object."""

    def __init__(self, tool: Tool, spend: Spend) -> None:
        self._document = Document(True if tool.parameters is None else tool.parameters)
        if tool.parameters is None:
            root: Schema = {"properties": {}}
        else:
            root = self._document.followed(tool.parameters, spend)
        self._root = root if isinstance(root, dict) else {}
        self._properties = self._root.get("properties", {})
        if tool.strict:
            if root is False:
                raise GrammarError("its parameters are false, which no arguments satisfy")
            self._check()

    def _check(self) -> None:
        root = self._root
        if root.get("type", "object") != "object":
            raise GrammarError(f"its parameters are of type {root['type']!r}; arguments are always an object")
        if unknown := sorted(keywords(root) - OBJECT_KEYWORDS):
            raise GrammarError(
                f"the keyword {unknown[0]!r} at the top of its parameters cannot be enforced; allowed there are"
                f" {', '.join(sorted(OBJECT_KEYWORDS))}"
            )
        if not isinstance(self._properties, dict) or not isinstance(root.get("required", []), list):
            raise GrammarError("properties must be an object and required a list")
        for name in (*self._properties, *root.get("required", [])):
            if not isinstance(name, str) or not NAME.fullmatch(name):
                raise GrammarError(
                    f"the parameter's name {name!r} cannot be written in a call: white space, quotes and backslashes cannot"
                )

    def parameters(self) -> list[_Parameter]:
        """Of a strict tool, in the order in which they are given."""
        needed = dict.fromkeys(self._root.get("required", []))
        rest: Schema = self._root.get("additionalProperties", True)
        listed = self._properties | {name: rest for name in needed if name not in self._properties}
        made = [
            _Parameter(name=name, schema=schema, document=self._document, required=name in needed)
            for name, schema in listed.items()
            if schema is not False or name in needed
        ]
        if "additionalProperties" in self._root and rest is not False:
            made.append(_Parameter(name=None, schema=rest, document=self._document, taken=tuple(listed)))
        return made

    def anything(self) -> Iterator[_Parameter]:
        """Of any other tool: its names, each with any value."""
        if not isinstance(self._root.get("properties"), dict):
            yield _Parameter(name=None, schema=True, document=self._document)
            return
        for name in self._properties:
            if NAME.fullmatch(name):
                yield _Parameter(name=name, schema=True, document=self._document)


class _Writer:
    """Writes markup into a grammar."""

    def __init__(self, marker: int) -> None:
        self.lark = Lark()
        self._marker = token(marker)

    def block(self, calls: Calls, *, opening: str) -> str:
        """All calls, from ``opening`` (what ends with "<") on."""
        call = self.lark.rule(any_of(self.call(tool) for tool in calls.tools))
        before = "" if calls.begun else f"{opening} {self._marker} {literal(OPENING)} "
        return before + f"{call}{'+' if calls.several else ''} {self._closed(' calls>')}"

    def call(self, tool: Tool) -> str:
        """One call of ``tool``."""
        try:
            arguments = _Arguments(tool, self.lark.spend)
            inner = self._strict(arguments) if tool.strict else self._loose(arguments)
        except (SchemaError, RecursionError) as error:
            raise GrammarError(f"the tool {tool.name!r}: {error}") from error
        opened = literal(f' invoke name="{tool.name}">\n')
        closed = self._closed(" invoke>\n")
        return self.lark.rule(f'"<" {self._marker} {opened} {inner} {closed}')

    def parameter(self, parameter: _Parameter) -> str:
        """One argument."""
        if parameter.name is None:
            name = ANY_NAME
            if parameter.taken:
                name += f" & ~{any_of(map(literal, parameter.taken))}"
            opened = f'" parameter name=\\"" {self.lark.terminal(name)} "\\" string=\\""'
        else:
            opened = literal(f' parameter name="{parameter.name}" string="')
        return self.lark.rule(f'"<" {self._marker} {opened} {self._value(parameter)}')

    def _strict(self, arguments: _Arguments) -> str:
        return " ".join(
            self.parameter(one) + ("*" if one.name is None else "" if one.required else "?")
            for one in arguments.parameters()
        )

    def _loose(self, arguments: _Arguments) -> str:
        parameters = [self.parameter(one) for one in arguments.anything()]
        return any_of(parameters) + "*" if parameters else ""

    def _value(self, parameter: _Parameter) -> str:
        """The value, from how it is written to the closing tag, whose "</" is of one unit of text with a bare string."""
        texts: list[str] = []
        others: list[Schema] = []
        document, spend = parameter.document, self.lark.spend
        for schema in document.alternatives(parameter.schema, spend):
            if schema is False:
                continue
            if schema is True or (isinstance(schema, dict) and not keywords(schema)):
                texts.append(ANY_TEXT)
                others.append(True)
            elif (text := text_form(schema)) is not None:
                texts.append(f"({text})")
            else:
                others.append(schema)
        forms = [f'"true\\">" {self.lark.terminal(any_of(texts) + literal("</"))}'] if texts else []
        if others or not texts:
            left: Schema = (
                {"anyOf": others} if texts and others[1:] else others[0] if texts else parameter.schema
            )
            json = self.lark.nested(json_schema(document.alone(left, spend)))
            forms.append(f'"false\\">" {json} "</"')
        return self.lark.rule(f'{any_of(forms)} {self._marker} " parameter>\\n"')

    def _closed(self, name: str) -> str:
        return f'"</" {self._marker} {literal(name)}'
