"""The check at the doors: what it refuses, how it says so, and that hostile grammars cost little."""

import time

import pytest
from llguidance import LLMatcher

from flashstep.request import Constraint
from flashstep.sampling.grammar import MAX_GRAMMAR_CHARS, MAX_REASON_CHARS, problem


def of(grammar: str) -> str | None:
    return problem(Constraint(grammar=grammar))


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a"',
        "start: /(?s:.*)/",
        LLMatcher.grammar_from_json_schema({"type": "object"}),
        LLMatcher.grammar_from_regex("(a|b){2,5}"),
    ],
)
def test_good(grammar: str) -> None:
    assert of(grammar) is None


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("", ""),
        ("start: b", "unknown name"),
        ("{", "EOF"),
        ("start: start", "no text matches it"),
        ('start: "a" </think>', "unknown special token"),
        ("start: <[2035]>", "Token range"),
        ("start: /(a/", "unclosed group"),
        (LLMatcher.grammar_from_json_schema({"not": {}}), 'Unimplemented keys: ["not"]'),
        (LLMatcher.grammar_from_json_schema({"$ref": "http://localhost/x"}), "does not fetch"),
    ],
)
def test_bad(grammar: str, words: str) -> None:
    found = of(grammar)
    assert found is not None and words in found
    assert "\n" not in found and len(found) <= MAX_REASON_CHARS + 100


HOSTILE = {
    "long": "start: " + '"a" ' * MAX_GRAMMAR_CHARS,
    "deep": "start: " + "(" * 60_000 + '"a"' + ")" * 60_000,
    "deep regex": LLMatcher.grammar_from_regex("(" * 50_000 + ")" * 50_000),
    "repeats": LLMatcher.grammar_from_regex("((a{1,1000}){1,1000}){1,1000}"),
    "states": LLMatcher.grammar_from_regex("(a|b)*a(a|b){5000}"),
    "complement": "start: A\nA: ~/(a|b)*a(a|b){500}/",
    "keys": LLMatcher.grammar_from_json_schema(
        {"type": "object", "properties": {f"k{number}": {} for number in range(5000)}}
    ),
    "enum": LLMatcher.grammar_from_json_schema({"enum": [f"v{number}" for number in range(10_000)]}),
    "items": LLMatcher.grammar_from_json_schema({"type": "array", "minItems": 10**6, "maxItems": 10**9}),
    "ambiguous": 'start: e\ne: e e | "a" | e "a" e | ""',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str) -> None:
    """Whatever the verdict is, it comes soon, and in a few words."""
    began = time.process_time()  # of the processor, however busy that is with other things
    found = of(HOSTILE[name])
    assert time.process_time() - began < 10  # seen: 0.9 s at most
    assert found is None or len(found) <= MAX_REASON_CHARS + 100
