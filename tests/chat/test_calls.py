"""The grammar of tool calls: what fits the schema is accepted as the model writes it and read back, and nothing else is."""

import json
import re
import string
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from flashstep.chat import calls, grammar
from flashstep.chat.calls import Calls, Tool
from flashstep.chat.conversation import Conversation
from flashstep.chat.encode import ChatEncoder
from flashstep.chat.grammar import GrammarError
from flashstep.chat.schemas import text_form
from flashstep.chat.tokenizer import TextTokenizer
from flashstep.request import Constraint
from flashstep.sampling.constraint import Matcher, Vocabulary
from tests.sampling.test_constraint import TINY, VOCAB_SIZE

MARKER, EOS = 2036, 1
BAR = "\uff5cDSML\uff5c"
CITY = {"type": "string"}
TOOL = Tool(
    name="f",
    strict=True,
    parameters={
        "type": "object",
        "properties": {
            "city": CITY,
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "integer"},
            "tree": {"$ref": "#/$defs/tree"},
            "note": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        },
        "required": ["city"],
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"left": {"$ref": "#/$defs/tree"}},
                "additionalProperties": False,
            }
        },
    },
)


@cache
def tokenizer() -> TextTokenizer:
    return TextTokenizer.from_file(TINY / "tokenizer.json")


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary.read(TINY, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))


@cache
def encoder() -> ChatEncoder:
    return ChatEncoder(tokenizer())


def ids(text: str) -> list[int]:
    """``text`` with its control tokens; values must not hold any spelling of one."""
    return tokenizer().encode(text, add_special_tokens=False)


def accepts(serialised: str, text: str) -> bool:
    """Whether the engine's matcher follows ``text`` to an end."""
    one = Matcher(vocabulary(), grammar.constraint(serialised, after=None, control_tokens=(MARKER,)))
    for token in ids(text):
        one.accept([token])
        if one.failure is not None:
            return False
    return one.keep([EOS]) == 1


def written(*invokes: tuple[str, Sequence[tuple[str, bool, str]]]) -> str:
    """Calls in the model's markup (F19): for each its name and its parameters: name, whether bare text, value."""
    made = f"\n\n<{BAR} calls>\n"
    for name, parameters in invokes:
        made += f'<{BAR} invoke name="{name}">\n'
        for parameter, bare, value in parameters:
            kind = "true" if bare else "false"
            made += f'<{BAR} parameter name="{parameter}" string="{kind}">{value}</{BAR} parameter>\n'
        made += f"</{BAR} invoke>\n"
    return made + f"</{BAR} calls>"


def one(**arguments: Any) -> str:
    """A call of f as the model writes it: strings bare, all else as JSON."""
    parameters = [
        (
            name,
            isinstance(value, str),
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False),
        )
        for name, value in arguments.items()
    ]
    return written(("f", parameters))


def read(text: str) -> list[tuple[str, Any]]:
    """The calls that the parser of answers finds."""
    content, found = read_runs([[token] for token in ids(text)])
    assert content == ""
    return found


def read_runs(runs: Sequence[Sequence[int]]) -> tuple[str, list[tuple[str, Any]]]:
    """The content and the calls of an answer that comes in ``runs`` of tokens."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    talk = Conversation(messages=[{"role": "user", "content": "q"}], tools=tools, thinking=False)
    parser = encoder().encode(talk).parser()
    deltas = [parser.push(run) for run in runs]
    last, reason = parser.finish("stop")
    assert reason == "tool_calls"
    deltas.append(last)
    found: list[list[str]] = []
    for piece in (call for delta in deltas for call in delta.tool_calls):
        if piece.name is not None:
            found.append([piece.name, ""])
        found[-1][1] += piece.arguments
    content = "".join(delta.content for delta in deltas)
    return content, [(name, json.loads(arguments)) for name, arguments in found]


def must(*tools: Tool, **options: Any) -> str:
    return calls.required(Calls(tools=tools or (TOOL,), marker=MARKER, **options))


# ---- one tool ------------------------------------------------------------------------------------------------------------

FITS: list[dict[str, Any]] = [
    {"city": "Paris"},
    {"city": ""},
    {"city": ' <b>\n"x" </city\n'},
    {"city": "x", "days": 3},
    {"city": "x", "unit": "C", "days": -1, "tree": {"left": {"left": {}}}, "note": "abc"},
    {"city": "x", "note": None},
]
UNFIT: list[dict[str, Any]] = [
    {},
    {"days": 3},
    {"city": 3},
    {"city": "x", "unit": "K"},
    {"city": "x", "unit": "CC"},
    {"city": "x", "days": "3"},
    {"city": "x", "days": 1.5},
    {"city": "x", "tree": {"right": {}}},
    {"city": "x", "note": "abcd"},
    {"city": "x", "other": 1},
]


@pytest.mark.parametrize("arguments", FITS)
def test_arguments_that_fit(arguments: dict[str, Any]) -> None:
    text = one(**arguments)
    assert accepts(must(), text) and accepts(must(several=False), text)
    assert read(text) == [("f", arguments)]


@pytest.mark.parametrize("arguments", UNFIT)
def test_arguments_that_do_not_fit(arguments: dict[str, Any]) -> None:
    assert not accepts(must(), one(**arguments))


def test_markup_is_exact() -> None:
    text = one(city="x")
    assert accepts(must(), text)
    for wrong in (
        text[1:],
        text + "\n",
        text.replace(" calls>\n", " calls>", 1),
        text.replace(f"</{BAR} calls>", ""),
        text.replace('"true"', '"yes"'),
        text.replace('"f"', '"g"'),
        text.replace(BAR, "\uff5cDSMl\uff5c"),
        "I would rather talk.",
        "",
    ):
        assert not accepts(must(), wrong), wrong


def test_how_many() -> None:
    tools = (TOOL, Tool(name="g"))
    f, g = ("f", [("city", True, "x")]), ("g", ())
    both = written(f, g)
    assert accepts(must(*tools), both) and read(both) == [("f", {"city": "x"}), ("g", {})]
    assert not accepts(must(*tools, several=False), both)
    assert accepts(must(*tools, several=False), written(g))
    assert not accepts(must(*tools), written())
    begun = written(f).removeprefix(f"\n\n<{BAR} calls>\n")
    assert accepts(must(*tools, begun=True), begun) and not accepts(must(*tools), begun)


def test_offered_calls_stand_behind_any_text() -> None:
    made = calls.offered(Calls(tools=(TOOL,), marker=MARKER), form=None)
    text = one(city="x")
    for right in ("", "hello", "a < b </", "Let me see." + text, text):
        assert accepts(made, right), right
    for wrong in ("hm" + one(), text + "more", "hm" + text[:-3]):
        assert not accepts(made, wrong), wrong


def test_offered_calls_or_a_form() -> None:
    for form, answer in ((grammar.json_object(), '{"a": 1}'), (grammar.grammar('start: "yes"'), "yes")):
        made = calls.offered(Calls(tools=(TOOL,), marker=MARKER), form=form)
        assert accepts(made, answer) and accepts(made, one(city="x"))
        assert not any(accepts(made, wrong) for wrong in ("", "hello", answer + one(city="x"), one()))


def test_other_parameters_of_a_strict_tool() -> None:
    """Only where the schema says what they are; their names are not those that it lists."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    closed = must(Tool(name="f", strict=True, parameters=schema))
    numbers = must(
        Tool(name="f", strict=True, parameters=schema | {"additionalProperties": {"type": "integer"}})
    )
    anything = must(Tool(name="f", strict=True, parameters=schema | {"additionalProperties": True}))
    assert not accepts(closed, one(b=1))
    assert accepts(numbers, one(a=1, b=2, c=3)) and not accepts(numbers, one(b="x"))
    assert accepts(anything, one(b="x", c=[1])) and accepts(anything, one())
    assert not accepts(numbers, written(("f", [("a", False, "1"), ("a", False, "2")])))
    needs = schema | {"required": ["z"], "additionalProperties": True}
    needed = must(Tool(name="f", strict=True, parameters=needs))
    assert accepts(needed, one(a=1, z="x")) and not accepts(needed, one(a=1))


def test_a_tool_that_is_not_strict() -> None:
    """Names are enforced, and each value is well-formed; nothing else is."""
    assert TOOL.parameters is not None
    loose = must(Tool(name="f", parameters=TOOL.parameters))
    for arguments in ({}, {"days": "3", "city": 1}, {"tree": [None], "unit": "K"}):
        assert accepts(loose, one(**arguments)), arguments
    assert not accepts(loose, one(other=1))
    assert not accepts(loose, written(("f", [("days", False, "three")])))
    any_name = must(Tool(name="f", parameters={"type": "object"}))
    assert accepts(any_name, one(other=1)) and accepts(any_name, one())
    assert not accepts(must(Tool(name="f")), one(other=1)) and accepts(must(Tool(name="f")), one())


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "pattern": "^[a-z]/[0-9]$"}, ["a/1"], ["a/12", "xa/1", ""]),
        ({"type": "string", "pattern": "^(a|b)+$"}, ["ab"], ["abc", ""]),
        ({"type": "string", "pattern": "b"}, ["b", "abc"], ["ac"]),
        ({"type": "string", "pattern": "^[$^]a"}, ["$a", "^abc"], ["a"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "\u4e2d\U0001f600x"], ["a", "abcd"]),
        ({"type": "string", "pattern": "a", "maxLength": 2}, ["xa"], ["xx", "xax"]),
        ({"type": "string", "enum": ["a/b", 'q"\n', "</"]}, ["a/b", 'q"\n', "</"], ["a", "q"]),
        ({"const": "only"}, ["only"], ["on", "only "]),
        ({"allOf": [{"$ref": "#/$defs/kind"}], "description": "d"}, ["x", "y"], ["z"]),
        ({"type": "string", "title": "T", "default": "d", "x-order": 1}, ["", "anything"], []),
    ],
)
def test_bare_text(schema: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": schema},
        "required": ["a"],
        "$defs": {"kind": {"type": "string", "enum": ["x", "y"]}},
    }
    made = must(Tool(name="f", strict=True, parameters=parameters))
    assert [text for text in right if not accepts(made, one(a=text))] == []
    assert [text for text in wrong if accepts(made, one(a=text))] == []
    assert all(read(one(a=text)) == [("f", {"a": text})] for text in right)


def test_strings_that_no_bare_text_is_held_to_are_json() -> None:
    """Both are read as the same argument."""
    for schema, right in (
        ({"type": "string", "format": "date"}, "2026-12-01"),
        ({"type": "string", "pattern": "^a|b$"}, "ax"),
    ):
        parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        made = must(Tool(name="f", strict=True, parameters=parameters))
        text = written(("f", [("a", False, json.dumps(right))]))
        assert accepts(made, text) and read(text) == [("f", {"a": right})]
        assert not accepts(made, written(("f", [("a", False, '"no"')])))


# ---- random schemas ------------------------------------------------------------------------------------------------------

TEXT = st.text(alphabet=string.ascii_letters + string.digits + ' "<>/\\\n\u00e9\u4e2d{}', max_size=6)
SCALARS: list[tuple[dict[str, Any], st.SearchStrategy[Any]]] = [
    ({"type": "string"}, TEXT),
    ({"type": "string", "maxLength": 4}, TEXT.filter(lambda text: len(text) <= 4)),
    ({"enum": ["a", "b c", "</x>"]}, st.sampled_from(["a", "b c", "</x>"])),
    ({"enum": ["a", 1, None]}, st.sampled_from(["a", 1, None])),
    ({"type": "string", "pattern": "^[a-c]+$"}, st.text(alphabet="abc", min_size=1, max_size=4)),
    ({"type": "integer"}, st.integers(-999, 999)),
    ({"type": "integer", "minimum": 0, "maximum": 9}, st.integers(0, 9)),
    ({"type": "boolean"}, st.booleans()),
    ({"type": ["string", "null"]}, st.none() | TEXT),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, st.integers(0, 9) | TEXT),
    ({}, st.none() | st.integers(0, 9) | TEXT | st.lists(st.booleans(), max_size=2)),
]


@st.composite
def typed(draw: st.DrawFn, depth: int = 2) -> tuple[dict[str, Any], st.SearchStrategy[Any]]:
    """A schema with the values that satisfy it."""
    kind = draw(st.sampled_from(["scalar", "scalar", "array", "object"] if depth else ["scalar"]))
    if kind == "scalar":
        return draw(st.sampled_from(SCALARS))
    if kind == "array":
        schema, values = draw(typed(depth=depth - 1))
        return {"type": "array", "items": schema, "maxItems": 2}, st.lists(values, max_size=2)
    return draw(objects(depth=depth - 1))


@st.composite
def objects(draw: st.DrawFn, depth: int = 2) -> tuple[dict[str, Any], st.SearchStrategy[Any]]:
    names = draw(st.lists(st.sampled_from(["a", "bc", "d_e", "x-1", "\u00fc"]), unique=True, max_size=3))
    members = {name: draw(typed(depth=depth)) for name in names}
    required = [name for name in names if draw(st.booleans())]
    schema = {
        "type": "object",
        "properties": {name: schema for name, (schema, _) in members.items()},
        "required": required,
        "additionalProperties": False,
    }
    values = st.fixed_dictionaries({name: value for name, (_, value) in members.items()})

    @st.composite
    def some(draw: st.DrawFn) -> dict[str, Any]:
        whole = draw(values)
        return {name: whole[name] for name in names if name in required or draw(st.booleans())}

    return schema, some()


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_random_schemas(data: st.DataObject) -> None:
    """What satisfies the schema is accepted and read back as it was; what the grammar accepts satisfies the schema."""
    schema, values = data.draw(objects())
    made = must(Tool(name="f", strict=True, parameters=schema))
    arguments = data.draw(values)
    text = one(**arguments)
    assert accepts(made, text), (schema, arguments)
    assert read(text) == [("f", arguments)]
    other = arguments | {data.draw(st.sampled_from(["a", "bc", "zz"])): data.draw(SCALARS[-1][1])}
    other = {name: other[name] for name in (*schema["properties"], "zz") if name in other}
    assert accepts(made, one(**other)) == jsonschema_rs.is_valid(schema, other), (schema, other)


@settings(max_examples=60, deadline=None)
@given(objects(), st.randoms(use_true_random=False))
def test_whatever_is_sampled_satisfies_the_schema(
    made: tuple[dict[str, Any], st.SearchStrategy[Any]], random: Any
) -> None:
    """A walk that takes any token which the engine would let it take."""
    schema, _ = made
    one = Matcher(
        vocabulary(),
        Constraint(
            grammar=must(Tool(name="f", strict=True, parameters=schema), several=False),
            control_tokens=(MARKER,),
        ),
    )
    output: list[int] = []
    while len(output) < 400:
        (mask_V,) = one.masks([])
        allowed = mask_V.nonzero()[:, 0].tolist()
        ends = [token for token in allowed if token in END_PIECES or token == MARKER]
        token = random.choice(ends if ends and random.random() < 0.5 else allowed)
        if token == EOS:
            break
        one.accept([token])
        output.append(token)
    else:
        return  # a text that never ends says nothing
    assert one.failure is None
    data = b"".join(map(tokenizer().token_bytes, output))
    if b"\\u" in data:  # half of a surrogate pair, escaped, is what JSON's own grammar allows
        return
    ((name, arguments),) = read(data.decode(errors="replace"))
    assert name == "f" and jsonschema_rs.is_valid(schema, arguments), (schema, arguments)


END_PIECES = frozenset(token for text in ("</", '"', "}", "]", "0") for token in ids(text))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a15_a_stream_may_be_cut_anywhere(data: st.DataObject) -> None:
    """Between any two letters, and into runs of any length: the same words, calls and arguments."""
    _, values = data.draw(objects())
    f, g = data.draw(values), data.draw(values)
    said = data.draw(TEXT).strip("<\n ")
    text = said + one(**f).replace(f"</{BAR} calls>", "") + one(**g).removeprefix(f"\n\n<{BAR} calls>\n")
    letters = [
        [MARKER] if part == BAR else ids(part)
        for part in re.split(f"({BAR}|.)", text, flags=re.DOTALL)
        if part
    ]
    pieces = letters if data.draw(st.booleans()) else [[token] for token in ids(text)]
    runs: list[list[int]] = []
    for piece in pieces:
        if runs and data.draw(st.booleans()):
            runs[-1].extend(piece)
        else:
            runs.append(list(piece))
    assert read_runs(runs) == (said, [("f", f), ("f", g)])


# ---- what cannot be enforced ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"type": "array"}, "always an object"),
        ({"type": "object", "patternProperties": {"^a": {}}}, "patternProperties"),
        ({"type": "object", "not": {}}, "'not'"),
        ({"type": "object", "if": {}}, "'if'"),
        ({"type": "object", "dependentRequired": {}}, "dependentRequired"),
        ({"type": "object", "anyOf": [{}]}, "anyOf"),
        ({"properties": {"a b": {}}}, "'a b'"),
        ({"properties": {'a"': {}}}, "cannot be written"),
        ({"properties": {"bad": {"not": {}}}}, "'bad' of the tool 'f': Unimplemented keys: [\"not\"]"),
        ({"properties": {"bad": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"properties": {"bad": {"type": "string", "pattern": "(?=a)b"}}}, "look-around"),
        ({"properties": {"bad": {"type": "string", "pattern": "(a"}}}, "'bad'"),
        ({"properties": {"bad": {"$ref": "#/$defs/none"}}}, "nothing there"),
        ({"properties": {"bad": {"$ref": "https://example.com/x"}}}, "example.com"),
        ({"properties": {"bad": {"items": {"$ref": "#/$defs/none"}}}}, "nothing there"),
        ({"properties": {"bad": "bar"}}, "'bad'"),
        ({"properties": {"bad": {"type": "integer", "minimum": 3, "maximum": 2}}, "required": ["bad"]}, "'bad'"),
        ({"properties": {"bad": {"enum": []}}, "required": ["bad"]}, "'bad'"),
        ({"properties": {"bad": False}, "required": ["bad"]}, "'bad'"),
        ({"required": ["bad"], "additionalProperties": False}, "'bad'"),
        ({"properties": []}, "properties"),
        ({"$ref": "#"}, "f"),
        (False, "f"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_named(parameters: Any, words: str) -> None:
    right = Tool(name="right", strict=True, parameters={"properties": {"a": CITY}})
    with pytest.raises(GrammarError) as caught:
        calls.check([right, Tool(name="f", strict=True, parameters=parameters)], marker=MARKER)
    assert words in str(caught.value) and "right" not in str(caught.value)
    calls.check([right, Tool(name="f", parameters=parameters)], marker=MARKER)


def test_many_tools_fit_and_are_quick_to_check() -> None:
    tools = [
        Tool(
            name=f"tool_{number}",
            strict=True,
            parameters={
                "type": "object",
                "properties": {
                    f"parameter_{number}_{each}": {
                        "type": ["string", "integer", "boolean", "array"][each % 4]
                    }
                    for each in range(10)
                },
            },
        )
        for number in range(64)
    ]
    made = must(*tools)
    assert accepts(
        made, written(("tool_63", [("parameter_63_0", True, "x"), ("parameter_63_9", False, "1")]))
    )
    assert LLMatcher.validate_grammar(made, vocabulary().tokens) == ""


def test_short_schemas_of_many_alternatives_and_deep_ones() -> None:
    """Each definition doubles the one before: looked at one by one that would never end."""
    doubling = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)}
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    start = time.process_time()  # of the processor, however busy that is with other things
    properties = {"a": {"$ref": "#/$defs/d0"}}
    schema = {"type": "object", "properties": properties, "$defs": doubling | {"d30": {"type": "integer"}}}
    assert accepts(must(Tool(name="f", strict=True, parameters=schema)), one(a=1))
    with pytest.raises(GrammarError, match="the tool 'f'"):
        calls.check([Tool(name="f", strict=True, parameters={"properties": {"a": deep}})], marker=MARKER)
    assert time.process_time() - start < 20


@pytest.mark.parametrize(
    ("end", "accepted"),
    [
        ({"type": []}, None),
        ({"type": "integer"}, True),
        ({"enum": []}, None),
        ({"$ref": "#/hidden/d0"}, None),
    ],
)
def test_what_has_no_alternatives_is_looked_at_no_longer(end: dict[str, Any], accepted: bool | None) -> None:
    """A billion places of which none is a value; and one that refers to itself."""
    doubling = {f"d{n}": {"anyOf": [{"$ref": f"#/hidden/d{n + 1}"}] * 2} for n in range(30)}
    schema = {"properties": {"a": {"$ref": "#/hidden/d0"}}, "hidden": doubling | {"d30": end}}
    made = must(Tool(name="f", strict=True, parameters=schema))
    assert len(made) < 10_000
    assert accepted is None or accepts(made, one(a=1)) == accepted


def large(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"key {n}": {"type": "integer"} for n in range(3000)}} | keywords


@pytest.mark.parametrize(
    ("shared", "keywords"),
    [
        (large(), {"title": "{n}"}),  # each is a grammar of its own
        (large(), {}),  # all are the same one
        ({"enum": [f"value {n}" for n in range(5000)]}, {}),
        ({"enum": [*range(20_000), "a"], "type": "string"}, {}),  # of which almost nothing is written
        ({"type": ["integer"] * 60} | {f"note {n}": n for n in range(3000)}, {}),
        ({"type": "string", "pattern": "^" + "a^" * 20_000}, {}),
    ],
)
def test_what_many_refer_to_is_not_written_for_ever(shared: dict[str, Any], keywords: dict[str, str]) -> None:
    properties = {
        f"p{n}": {"$ref": "#/$defs/shared"} | {key: text.format(n=n) for key, text in keywords.items()}
        for n in range(500)
    }
    tool = Tool(name="f", strict=True, parameters={"properties": properties, "$defs": {"shared": shared}})
    with pytest.raises(GrammarError, match="too large"):
        must(tool)


def test_long_pointers_and_definitions_in_definitions_are_not_followed_for_ever() -> None:
    name = "n" * 10_000
    tool = Tool(
        name="f",
        strict=True,
        parameters={
            "properties": {f"p{n}": {"$ref": f"#/{name}"} for n in range(500)},
            name: {"type": "string"},
        },
    )
    with pytest.raises(GrammarError, match="too large"):
        must(tool)
    inner: dict[str, Any] = {"enum": list(range(20_000))}
    pointers = ["#/deep"]
    for _ in range(100):
        inner = {"type": "object", "properties": {"x": inner}}
        pointers.append(pointers[-1] + "/properties/x")
    whole = {"type": "object", "properties": {str(n): {"$ref": at} for n, at in enumerate(pointers)}}
    with pytest.raises(GrammarError, match="too large"):
        must(Tool(name="f", strict=True, parameters={"properties": {"a": whole}, "deep": inner}))


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [("(?x)a # b", "a", "b"), ("^(?x: a b )$", "ab", "a b"), ("(?i)^ab$", "AB", "b")],
)
def test_a_flag_of_a_pattern_swallows_nothing(pattern: str, right: str, wrong: str) -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": pattern}}}
    made = must(Tool(name="f", strict=True, parameters=schema))
    for text, accepted in ((right, True), (wrong, False)):
        forms = [written(("f", [("a", bare, text if bare else json.dumps(text))])) for bare in (True, False)]
        assert any(accepts(made, form) for form in forms) == accepted


def test_a_pattern_is_read_once() -> None:
    """Brackets that never close: each was looked for to the end."""
    start = time.process_time()
    for pattern in ("[" * 100_000, "(?x:a #" + "[" * 100_000 + "\n)", "[a" * 50_000 + "\\", "(?a" * 40_000):
        text_form({"type": "string", "pattern": pattern})
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "string"}, False]},
        {"anyOf": [False, {"type": "string"}, {"$ref": "#/$defs/no"}]},
    ],
)
def test_an_alternative_that_nothing_satisfies_is_none(schema: dict[str, Any]) -> None:
    made = must(Tool(name="f", strict=True, parameters={"properties": {"a": schema}, "$defs": {"no": False}}))
    assert accepts(made, one(a="x")) and not accepts(made, one(a=1))


@pytest.mark.parametrize("schema", [{"anyOf": [False, False]}, {"type": []}, {"anyOf": []}])
def test_a_parameter_that_nothing_satisfies_is_refused(schema: dict[str, Any]) -> None:
    tool = Tool(name="f", strict=True, parameters={"properties": {"bad": schema}, "required": ["bad"]})
    with pytest.raises(GrammarError, match="'bad'"):
        calls.check([tool], marker=MARKER)
