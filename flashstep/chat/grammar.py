"""What a user asks the answer's form to be (schema, regex, choice, grammar) to the ``Constraint`` that the engine follows.

Wraps llguidance's compilers. Whatever cannot be enforced as it stands is refused with ``GrammarError``, which says what is wrong;
nothing is loosened in silence. Knows no HTTP and no tokens but the one behind which a grammar begins.
"""

import json
from collections.abc import Sequence
from typing import Any

import llguidance
import msgspec
from llguidance import LLMatcher

from flashstep.request import Constraint
from flashstep.sampling.checking import problem
from flashstep.sampling.grammar import MAX_GRAMMAR_CHARS

ANY_OBJECT = {"type": "object"}
# Between the parts of JSON: nothing, a space, or a new line with its indent. llguidance's own rule is white space without end,
# and models do get lost in it: with the tiny one no answer to a schema ever ended.
WHITE_SPACE = r"( |\n[ \t]{0,64})"


class GrammarError(ValueError):
    """The wanted form cannot be enforced."""


def json_schema(schema: dict[str, Any] | bool | str) -> str:
    """Of a JSON Schema, decoded or as text. Its ``x-guidance`` may say how JSON is written, not that keywords are ignored."""
    if isinstance(schema, str):
        _check_length(schema)
        try:
            schema = msgspec.json.decode(schema, type=dict[str, Any] | bool)
        except (msgspec.DecodeError, RecursionError) as error:
            raise GrammarError(f"the JSON schema is not valid JSON: {error}") from error
    if schema is False:
        raise GrammarError("the JSON schema is false, which no value satisfies")
    try:
        text = json.dumps({} if schema is True else schema)
        return LLMatcher.grammar_from_json_schema(
            text, defaults={"whitespace_pattern": WHITE_SPACE}, overrides={"lenient": False}
        )
    except (RecursionError, ValueError) as error:  # the compiler's own reader has a limit of depth, too
        raise GrammarError(f"the JSON schema cannot be read: {error}") from error


def json_object() -> str:
    """Of any JSON object."""
    return json_schema(ANY_OBJECT)


def regex(pattern: str) -> str:
    """Of a regular expression (Rust's syntax: no look-around, no back-references) that matches the whole text."""
    return LLMatcher.grammar_from_regex(pattern)


def choice(texts: Sequence[str]) -> str:
    """Of one of ``texts``."""
    if not texts:
        raise GrammarError("the choice is an empty list; it needs at least one text")
    return LLMatcher.grammar_from_lark(
        "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in texts)
    )


def grammar(text: str) -> str:
    """Of a context-free grammar, in llguidance's Lark or in GBNF (``root ::= ...``)."""
    _check_length(text)
    if text.lstrip().startswith(
        "{"
    ):  # llguidance's own form, which could say that keywords of a schema are ignored
        raise GrammarError("it is JSON; a grammar is written in Lark or GBNF")
    try:
        return llguidance.grammar_from("grammar", text)
    except ValueError as error:
        raise GrammarError(str(error)) from error


def constraint(serialised: str, *, after: int | None, control_tokens: tuple[int, ...] = ()) -> Constraint:
    """Of a grammar that one of the functions above made, or ``chat.calls``, if it can be matched."""
    made = Constraint(grammar=serialised, after=after, control_tokens=control_tokens)
    if wrong := problem(made):
        raise GrammarError(wrong)
    return made


def _check_length(text: str) -> None:
    """Before anything reads it: not every reader is linear."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"it is {len(text)} characters long; at most {MAX_GRAMMAR_CHARS} are taken")
