"""Structural tags in both spellings: free text until a trigger, then the tag; what is none is refused in words."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashstep.chat.grammar import GrammarError, constraint
from flashstep.chat.structural import structural_tag
from tests.chat.test_grammar import accepts

INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY_TEXT = {"type": "any_text"}
FIRST = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=add>", "schema": {"type": "integer"}, "end": "</function>"},
        {"begin": "<function=say>", "schema": {"type": "string"}, "end": "</function>"},
        {"begin": "[[", "end": "]]"},
    ],
    "triggers": ["<function=", "[["],
}


def constant(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def of(form: dict[str, Any]) -> str:
    return structural_tag({"type": "structural_tag", "format": form})


@pytest.mark.parametrize("given", [FIRST, json.dumps(FIRST)])
def test_vllms_first_form(given: Any) -> None:
    made = structural_tag(given)
    for text in (
        "",
        "hello <function",
        'a <function=add>12</function> b <function=say>"x"</function> c',
        "a[[1]]b[[{}]]",
    ):
        assert accepts(made, text), text
    for text in (
        'a <function=add>"x"</function>',
        "<function=sub>",
        "<function=add>12",
        "a[[1]b",
        "<function=add>1</function><function=sub>",
    ):
        assert not accepts(made, text), text


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (constant("a"), ["a"], ["", "aa"]),
        (INTEGER, ["12"], ["x", ""]),
        ({"type": "regex", "pattern": "a/[b\n]+"}, ["a/b", "a/\n"], ["a/", "ab"]),
        ({"type": "grammar", "grammar": 'root ::= "x" | "y" root'}, ["x", "yyx"], ["y", ""]),
        (ANY_TEXT, ["", "a\nb"], []),
        ({"type": "sequence", "elements": [constant("a"), INTEGER, constant(";")]}, ["a12;"], ["a;", "a12"]),
        ({"type": "or", "elements": [constant("a"), INTEGER]}, ["a", "7"], ["a7", ""]),
        (tag("<t>", ANY_TEXT, "</t>"), ["<t>a<t></t>", "<t></t>"], ["<t>a", "<t>a</t>b", "<t></t></t>"]),
        (tag("<", ANY_TEXT, ";"), ["<;", "<a;"], ["<a;;", "<a"]),
        (tag("<t>", {"type": "regex", "pattern": ".*"}, "</t>"), ["<t>a</t>"], ["<t>a", "<t>\n</t>"]),
        (tag("<t>", ANY_TEXT, ""), ["<t>", "<t>a"], ["a"]),
        (
            {"type": "triggered_tags", "triggers": ["<"], "tags": [tag("<t>", INTEGER, ";")]},
            ["", "a", "a<t>1;b<t>2;"],
            ["a<", "a<t>x;"],
        ),
        (
            {
                "type": "triggered_tags",
                "triggers": ["<"],
                "tags": [{"begin": "<t>", "content": INTEGER, "end": ";"}],
                "at_least_one": True,
                "stop_after_first": True,
            },
            ["a<t>1;"],
            ["", "a", "a<t>1;b"],
        ),
        (
            {"type": "tags_with_separator", "tags": [tag("<", INTEGER, ">")], "separator": ","},
            ["", "<1>", "<1>,<2>"],
            ["<1>,", "<1><2>"],
        ),
        (
            {
                "type": "tags_with_separator",
                "tags": [tag("<", INTEGER, ">")],
                "separator": ",",
                "at_least_one": True,
                "stop_after_first": True,
            },
            ["<1>"],
            ["", "<1>,<2>"],
        ),
    ],
)
def test_xgrammars_form(form: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    made = of(form)
    assert [text for text in right if not accepts(made, text)] == []
    assert [text for text in wrong if accepts(made, text)] == []


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=8), st.integers(), st.text(max_size=8))
def test_any_text_around_a_tag(before: str, number: int, after: str) -> None:
    made = of({"type": "triggered_tags", "triggers": ["<n"], "tags": [tag("<n>", INTEGER, "</n>")]})
    free = "<n" not in before and "<n" not in after
    assert accepts(made, f"{before}<n>{number}</n>{after}") == free
    assert not accepts(made, f"{before}<n>{number}.5</n>{after}")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{", "no structural tag"),
        ({"type": "structural_tag"}, "either format or structures"),
        (FIRST | {"format": ANY_TEXT}, "either format or structures"),
        (FIRST | {"triggers": []}, "triggers is an empty list"),
        (FIRST | {"triggers": ["", "[["]}, "empty"),
        (FIRST | {"triggers": ["<"]}, "none of the triggers"),
        (FIRST | {"other": 1}, "other"),
        ({"type": "other", "format": ANY_TEXT}, "must be structural_tag"),
        ({"type": "structural_tag", "format": {"type": "qwen_xml_parameter"}}, "qwen_xml_parameter"),
        ({"type": "structural_tag", "format": {"type": "or", "elements": []}}, "empty"),
        ({"type": "structural_tag", "format": tag("a", {"type": "regex", "pattern": "("}, "")}, "unclosed"),
        (
            {
                "type": "structural_tag",
                "format": tag("a", {"type": "json_schema", "json_schema": {"not": {}}}, ""),
            },
            "not",
        ),
        (
            {"type": "structural_tag", "format": tag("a", {"type": "grammar", "grammar": '{"grammars": []}'}, "")},
            "Lark or GBNF",
        ),
        (
            {"type": "structural_tag", "format": tag("a", {"type": "regex", "pattern": "(?x)a # b\nc"}, "")},
            "must stand on one line",
        ),
        ({"type": "structural_tag", "triggers": [f"<{n} " for n in range(2000)], "structures": [
            {"begin": f"<{n} ", "end": ""} for n in range(2000)
        ]}, "too large"),
        ({"type": "structural_tag", "triggers": [f"<{n} " for n in range(9000)], "structures": [
            {"begin": "<8999 ", "end": ""}
        ] * 400}, "too large"),
    ],
)  # fmt: skip
def test_what_is_none_is_refused(given: Any, words: str) -> None:
    with pytest.raises(GrammarError) as caught:
        constraint(structural_tag(given), after=None)
    assert words in str(caught.value)


def test_deep_nesting_is_refused_or_taken_in_words() -> None:
    form = ANY_TEXT
    for _ in range(3000):
        form = {"type": "or", "elements": [form]}
    with pytest.raises(GrammarError):
        constraint(of(form), after=None)
