"""Tools of a chat: which grammar reaches the engine, what the prompt says, what a call comes back as, and what is refused."""

import json
from typing import Any

import pytest

from flashstep.chat import calls
from flashstep.chat.calls import Calls, Tool
from flashstep.chat.conversation import Conversation
from flashstep.request import Constraint
from tests.server.conftest import MODEL, Server
from tests.server.test_constraints import DSML, THINK_END, reached
from tests.server.test_errors import CHAT, refused

ASK: list[Any] = [{"role": "user", "content": "Weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "integer", "minimum": 1},
    },
    "required": ["city"],
    "$defs": {"city": {"type": "string", "minLength": 2}},
}
STRICT, LOOSE = (
    {"name": name, "parameters": SCHEMA, "strict": name == "strict"} for name in ("strict", "loose")
)
BAR = "\uff5cDSML\uff5c"
INVOKE = f'<{BAR} invoke name="loose">\n<{BAR} parameter name="city" string="true">Paris</{BAR} parameter>\n</{BAR} invoke>\n'
BEGUN = f"{INVOKE}</{BAR} calls>"
CALL = f"\n\n<{BAR} calls>\n{BEGUN}"
NAMED: Any = {"type": "function", "function": {"name": "loose"}}


def offered(*functions: dict[str, Any]) -> list[Any]:
    return [{"type": "function", "function": function} for function in functions]


def grammar(*functions: dict[str, Any], required: bool, **options: Any) -> str:
    tools = [Tool(name=f["name"], parameters=f["parameters"], strict=f["strict"]) for f in functions]
    allowed = Calls(tools=tools, marker=DSML, **options)
    return calls.required(allowed) if required else calls.offered(allowed, form=None)


def ask(server: Server, said: str, **options: Any) -> Any:
    """One choice and the prompt's length; the stub says ``said``."""
    body = {"model": MODEL, "messages": ASK, **server.script("tools", said), **options}
    status, answer = server.post(CHAT, body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    return choice, answer["usage"]["prompt_tokens"]


def prompt_tokens(server: Server, **options: Any) -> int:
    return len(server.encoder.encode(Conversation(messages=ASK, **options)).ids)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_that_must_be_made(server: Server, choice: Any, parallel: bool, thinking: bool) -> None:
    """While it thinks the prompt is that of auto; else it begins the calls (G3, example 14). A named tool is called once."""
    tools = offered(STRICT, LOOSE)
    switch = {} if thinking else {"thinking": {"type": "disabled"}}
    made, tokens = ask(
        server,
        f"hm</think>{CALL}" if thinking else BEGUN,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        **switch,
    )
    assert made["finish_reason"] == "tool_calls"
    (call,) = made["message"]["tool_calls"]
    assert call["function"] == {"name": "loose", "arguments": '{"city": "Paris"}'}
    assert made["message"]["content"] is None
    allowed = (STRICT, LOOSE) if choice == "required" else (LOOSE,)
    several = parallel and choice == "required"
    assert reached(server, "tools") == Constraint(
        grammar=grammar(*allowed, required=True, several=several, begun=not thinking),
        after=THINK_END if thinking else None,
        control_tokens=(DSML,),
    )
    without = [
        {"type": "function", "function": {k: v for k, v in f.items() if k != "strict"}}
        for f in (STRICT, LOOSE)
    ]
    as_told = "auto" if thinking else choice
    assert tokens == prompt_tokens(server, tools=without, tool_choice=as_told, thinking=thinking)


def test_offered_calls(server: Server) -> None:
    """A grammar runs if a tool is strict; the prompt shows its schema as it was sent."""
    for functions in ((STRICT,), (STRICT, LOOSE)):
        _, tokens = ask(server, "hm</think>Hello", tools=offered(*functions))
        assert reached(server, "tools") == Constraint(
            grammar=grammar(*functions, required=False), after=THINK_END, control_tokens=(DSML,)
        )
        loose = [f | {"strict": False} for f in functions]
        assert tokens == prompt_tokens(server, tools=offered(*loose))
    ask(server, "hm</think>Hello", tools=offered(LOOSE))
    assert reached(server, "tools") is None
    ask(server, "hm</think>Hello", tools=offered(STRICT), tool_choice="none")
    assert reached(server, "tools") is None
    ask(server, "hm</think>Hello", tools=offered(STRICT), parallel_tool_calls=False)
    wanted = grammar(STRICT, required=False, several=False)
    assert (found := reached(server, "tools")) is not None and found.grammar == wanted


def test_optional_parameters_of_strict_tools_in_every_api(server: Server) -> None:
    """The recipe would refuse them; each API has its own place for ``strict``."""
    allowed = grammar(STRICT, required=False)
    flat = {"type": "function", **STRICT}
    theirs = {"name": "strict", "input_schema": SCHEMA, "strict": True}
    for path, body in (
        ("/v1/responses", {"input": "Weather?", "tools": [flat]}),
        (
            "/v1/messages",
            {"messages": ASK, "tools": [theirs], "max_tokens": 50, "thinking": {"type": "adaptive"}},
        ),
    ):
        extra = server.script("apis", "hm</think>Hello")
        status, answer = server.post(path, {"model": MODEL, **body, **extra})
        assert status == 200, answer
        assert (found := reached(server, "apis")) is not None and found.grammar == allowed


def test_the_openai_client(server: Server) -> None:
    stream = server.client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        tools=offered(STRICT, LOOSE),
        tool_choice=NAMED,
        stream=True,
        extra_body=server.script("client", f"hm</think>{CALL}"),
    )
    choices = [chunk.choices[0] for chunk in stream if chunk.choices]
    pieces: list[Any] = [piece for choice in choices for piece in choice.delta.tool_calls or ()]
    assert pieces[0].function.name == "loose" and pieces[0].id
    assert json.loads("".join(piece.function.arguments or "" for piece in pieces)) == {"city": "Paris"}
    assert choices[-1].finish_reason == "tool_calls"


def test_a_prompt_is_counted_as_it_will_be(server: Server) -> None:
    """/tokenize takes the same choices."""
    for switch in ({}, {"thinking": {"type": "disabled"}}):
        body = {"messages": ASK, "tools": offered(LOOSE), "tool_choice": "required", **switch}
        status, answer = server.post("/tokenize", body)
        assert status == 200
        said = f"hm</think>{CALL}" if not switch else BEGUN
        assert answer["count"] == ask(server, said, **body)[1]


def test_structural_tags(server: Server) -> None:
    """In both fields, and not told in the prompt."""
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}],
        "triggers": ["<n"],
    }
    for field in (
        {"response_format": tag},
        {"structured_outputs": {"structural_tag": tag}},
        {"structured_outputs": {"structural_tag": json.dumps(tag)}},
        {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
    ):
        _, tokens = ask(server, "hm</think>a <n>1</n>", **field)
        assert tokens == prompt_tokens(server)
        assert (found := reached(server, "tools")) is not None and found.after == THINK_END
    for field in (
        {"response_format": tag | {"triggers": ["<x"]}},
        {"response_format": {"type": "structural_tag"}},
        {"response_format": {"type": "json_object", "triggers": ["<n"]}},
        {"structured_outputs": {"structural_tag": "{"}},
    ):
        assert refused(server, CHAT, {"messages": ASK, **field})["param"] == next(iter(field))


UNSUPPORTED = {"type": "object", "properties": {"when": {"type": "array", "uniqueItems": True}}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": []}, "tools", "empty list"),
        ({"tools": offered(LOOSE, LOOSE)}, "tools", "tools[1].function.name is 'loose', as of a tool before"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0]"),
        ({"tools": [*offered(LOOSE), {"type": "function", "function": LOOSE, "x": 1}]}, "tools", "tools[1]"),
        ({"tools": offered(LOOSE | {"extra": 1})}, "tools", "`extra`"),
        ({"tools": offered(LOOSE | {"strict": "yes"})}, "tools", "tools[0].function.strict"),
        ({"tools": offered(LOOSE | {"parameters": 5})}, "tools", "tools[0].function.parameters"),
        ({"tools": offered(LOOSE | {"parameters": {"type": "array"}})}, "tools", "array"),
        ({"tools": offered(LOOSE | {"name": "a b"})}, "tools", "pattern"),
        ({"tools": offered(LOOSE | {"name": "a" * 65})}, "tools", "65 characters"),
        ({"tools": offered(STRICT | {"parameters": UNSUPPORTED})}, "tools", "'when' of the tool 'strict'"),
        ({"tools": offered(STRICT | {"parameters": UNSUPPORTED}), "tool_choice": "required"}, "tools", "uniqueItems"),
        ({"tools": offered(STRICT | {"parameters": {"type": "object", "minProperties": 1}})}, "tools", "minProperties"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": NAMED}, "tool_choice", "no tools"),
        ({"tools": offered(LOOSE), "tool_choice": "banana"}, "tool_choice", "auto, none, required"),
        ({"tools": offered(STRICT), "tool_choice": NAMED}, "tool_choice", "'loose', which is not among"),
        ({"tools": offered(LOOSE), "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "tool_choice"),
        ({"tools": offered(LOOSE), "tool_choice": {"type": "function", "name": "loose"}}, "tool_choice", "name"),
        ({"tools": offered(LOOSE), "tool_choice": 3}, "tool_choice", "tool_choice"),
        ({"tools": offered(LOOSE), "parallel_tool_calls": "no"}, "parallel_tool_calls", "parallel_tool_calls"),
    ],
)  # fmt: skip
def test_what_is_refused(server: Server, fields: dict[str, Any], param: str, words: str) -> None:
    error = refused(server, CHAT, {"messages": ASK, **fields})
    assert error["param"] == param and words in error["message"], error


def test_choices_that_ask_for_nothing_need_no_tools(server: Server) -> None:
    for choice in ("auto", "none"):
        ask(server, "hm</think>Hello", tool_choice=choice)
        assert reached(server, "tools") is None
