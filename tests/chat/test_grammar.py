"""Options to grammars: each kind accepts what it should and nothing else; what cannot be enforced is refused in words."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from flashstep.chat import grammar
from flashstep.chat.grammar import GrammarError
from flashstep.sampling.grammar import MAX_GRAMMAR_CHARS, _bytes_vocabulary

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def accepts(serialised: str, text: str) -> bool:
    """Whether all of ``text`` matches, byte by byte."""
    made = grammar.constraint(serialised, after=5)
    assert made.after == 5
    vocabulary: LLTokenizer = _bytes_vocabulary()
    matcher = LLMatcher(vocabulary, made.grammar, log_level=0)
    return all(matcher.try_consume_tokens([byte]) == 1 for byte in text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize("schema", [OBJECT, json.dumps(OBJECT)])
def test_json_schema(schema: dict[str, Any] | str) -> None:
    made = grammar.json_schema(schema)
    for text in (
        '{"a":1}',
        '{ "a" : -7,\n "b": [null, {"c": "\u4e2d"}] }',
        json.dumps({"a": 1, "b": [2]}, indent=8),
    ):
        assert accepts(made, text), text
    for text in ("", "{}", '{"a":"1"}', '{"a":1', '```json\n{"a":1}', '{"a":1}}', "1"):
        assert not accepts(made, text), text


def test_white_space_has_an_end() -> None:
    made = grammar.json_schema(OBJECT)
    for text in ('{"a":  1}', '{"a":\n\n1}', "{\n" + " " * 65 + '"a": 1}', ' {"a": 1}', '{"a": 1}\n'):
        assert not accepts(made, text), text
    assert accepts(
        grammar.json_schema(OBJECT | {"x-guidance": {"whitespace_pattern": " +"}}), '{"a":      1}'
    )


def test_json_object() -> None:
    made = grammar.json_object()
    assert accepts(made, "{}") and accepts(made, '{"a": [1, {"b": null}], "\u00fc": "\U0001f600\\n"}')
    assert not any(accepts(made, text) for text in ("", "[]", "1", "null", '"a"', "{,}"))


def test_true_is_any_value() -> None:
    assert all(accepts(grammar.json_schema(True), text) for text in ("1", "null", "[{}]"))


def test_regex_matches_the_whole_text() -> None:
    made = grammar.regex(r"\d{2}/[a-c]+")
    assert accepts(made, "12/abc")
    assert not any(accepts(made, text) for text in ("x12/a", "12/", "12/abcd", "12/a\n"))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=6), min_size=1, max_size=5), st.text(max_size=6))
def test_choice(texts: list[str], other: str) -> None:
    if not any(texts):
        texts = [*texts, "x"]
    made = grammar.choice(texts)
    assert all(accepts(made, text) for text in texts)
    assert accepts(made, other) == (other in texts)


@pytest.mark.parametrize(
    "text", ['root ::= "a" | "b" digits\ndigits ::= [0-9]+', 'start: "a" | "b" DIGITS\nDIGITS: /[0-9]+/']
)
def test_grammar_in_either_notation(text: str) -> None:
    made = grammar.grammar(text)
    assert accepts(made, "a") and accepts(made, "b07")
    assert not accepts(made, "b") and not accepts(made, "a1")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "object", "if": {}, "then": {}}, "if"),
        ({"type": "array", "items": {"uniqueItems": True}}, "uniqueItems"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"not": {}, "x-guidance": {"lenient": True}}, "not"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "format": "banana"}, "banana"),
        ({"type": "banana"}, "banana"),
        ({"$ref": "https://example.com/x"}, "example.com"),
        ({"$ref": "#/$defs/x"}, "$defs"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "Unsatisfiable"),
        ({"enum": [f"value {number}" for number in range(20_000)]}, str(MAX_GRAMMAR_CHARS)),
        (False, "false"),
        ("{", "JSON"),
        ("[1]", "array"),
        ('{"a":' * 3000 + "1" + "}" * 3000, "recursion"),
    ],
)
def test_schemas_that_are_refused(schema: Any, words: str) -> None:
    with pytest.raises(GrammarError) as caught:
        grammar.constraint(grammar.json_schema(schema), after=None)
    assert words in str(caught.value)


def test_a_schema_that_is_nested_too_deeply() -> None:
    schema: dict[str, Any] = {}
    for _ in range(600):
        schema = {"items": schema}
    with pytest.raises(GrammarError, match="recursion"):
        grammar.json_schema(schema)


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("regex", "(a", "unclosed"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", "a" * MAX_GRAMMAR_CHARS, "characters"),
        ("choice", [], "empty"),
        ("choice", ["a" * MAX_GRAMMAR_CHARS], "characters"),
        ("grammar", "hello", "line 1"),
        ("grammar", "", "root"),
        ("grammar", 'start: "a" b', "unknown name"),
        ("grammar", 'start: "a" </think>', "special token"),
        ("grammar", "start: start", "no text"),
        ("grammar", "x" * (MAX_GRAMMAR_CHARS + 1), "characters"),
        ("grammar", "root ::= " + "(" * 40_000, "recursion"),
    ],
)
def test_others_that_are_refused(kind: str, value: Any, words: str) -> None:
    make = {"regex": grammar.regex, "choice": grammar.choice, "grammar": grammar.grammar}[kind]
    with pytest.raises(GrammarError) as caught:
        grammar.constraint(make(value), after=None)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1000
