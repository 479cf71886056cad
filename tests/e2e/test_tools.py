"""Calls that must be made, and forms, from the real tiny model with speculation on: whatever it would say, they fit the schema.

Real processes and the ``openai`` client; prompts that ask for no tool at all, greedy and at temperature 1, thinking and not.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema_rs
import openai
import pydantic
import pytest

from tests.e2e.serving import Served, processor_s

BOOKING = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "nights": {"type": "integer", "minimum": 1, "maximum": 30},
        "guest": {"$ref": "#/$defs/guest"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{2}$"},
    },
    "required": ["city", "nights"],
    "additionalProperties": False,
    "$defs": {
        "guest": {
            "type": "object",
            "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}},
            "required": ["age"],
            "additionalProperties": False,
        }
    },
}
PING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"book": BOOKING, "ping": PING}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
BOOK: Any = {"type": "function", "function": {"name": "book"}}
PROMPTS = ("What is the capital of France?", "Tell me something.", "What is 37 * 48?")
BUSY = 503
THINKING_OFF = {"thinking": {"type": "disabled"}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Served(None, "--speculative-config", "{}")
    yield made
    made.remove()


def check(calls: Any, *, only: str | None = None) -> None:
    assert calls
    for call in calls:
        assert only in (None, call.function.name)
        arguments = json.loads(call.function.arguments)
        assert jsonschema_rs.is_valid(SCHEMAS[call.function.name], arguments), call


def check_made(
    served: Served, choice: Any, prompt: str, *, temperature: float, thinking: bool, seed: int
) -> None:
    """One call, whatever the prompt is about."""
    answer = served.client.chat.completions.create(
        model=served.model,
        messages=[{"role": "user", "content": prompt}],
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=temperature,
        seed=seed,
        max_tokens=600,
        extra_body={} if thinking else THINKING_OFF,
    )
    (one,) = answer.choices
    assert one.finish_reason == "tool_calls", one
    assert not one.message.content and len(one.message.tool_calls or ()) == 1
    assert bool(getattr(one.message, "reasoning_content", None)) <= thinking
    check(one.message.tool_calls, only=None if choice == "required" else "book")


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("choice", ["required", BOOK], ids=["required", "named"])
def test_a_required_call_is_made(served: Served, choice: Any, thinking: bool) -> None:
    check_made(served, choice, PROMPTS[0], temperature=0 if thinking else 1, thinking=thinking, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("choice", ["required", BOOK], ids=["required", "named"])
def test_a_required_call_is_made_for_every_prompt(
    served: Served, choice: Any, temperature: float, thinking: bool
) -> None:
    def made(prompt: str, seed: int) -> None:
        check_made(served, choice, prompt, temperature=temperature, thinking=thinking, seed=seed)

    seeds = range(2 if temperature else 1)
    with ThreadPoolExecutor(len(PROMPTS) * len(seeds)) as beside:
        for future in [beside.submit(made, prompt, seed) for prompt in PROMPTS for seed in seeds]:
            future.result()


def test_a_streamed_call_concatenates_to_json(served: Served) -> None:
    stream = served.client.chat.completions.create(
        model=served.model,
        messages=[{"role": "user", "content": PROMPTS[0]}],
        tools=TOOLS,
        tool_choice=BOOK,
        temperature=1,
        seed=3,
        stream=True,
        max_tokens=600,
    )
    chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
    pieces: list[Any] = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert pieces[0].function.name == "book" and pieces[0].id
    arguments = "".join(piece.function.arguments or "" for piece in pieces)
    assert jsonschema_rs.is_valid(BOOKING, json.loads(arguments))
    assert not any(chunk.delta.content for chunk in chunks)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]


class Weather(pydantic.BaseModel):
    """Current weather."""

    place: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3] | None
    units: Literal["C", "F"] | None


class Guess(pydantic.BaseModel):
    sure: bool
    kind: Literal["city", "river"]


def test_parse_of_the_openai_client(served: Served) -> None:
    """Pydantic models as tools and as the answer's form: the SDK checks what comes against them."""
    answer = served.client.chat.completions.parse(
        model=served.model,
        messages=[{"role": "user", "content": PROMPTS[0]}],
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=1,
        seed=2,
        max_tokens=200,
        extra_body=THINKING_OFF,
    )
    (call,) = answer.choices[0].message.tool_calls or [None]
    assert call is not None
    assert isinstance(call.function.parsed_arguments, Weather)
    made = served.client.chat.completions.parse(
        model=served.model,
        messages=[{"role": "user", "content": PROMPTS[0]}],
        response_format=Guess,
        temperature=1,
        seed=2,
        max_tokens=200,
        extra_body=THINKING_OFF,
    )
    assert isinstance(made.choices[0].message.parsed, Guess)


def test_a_form_beside_tools_gives_the_form_or_calls(served: Served) -> None:
    for seed, prompt in enumerate(PROMPTS[1:]):
        answer = served.client.chat.completions.parse(
            model=served.model,
            messages=[{"role": "user", "content": prompt}],
            tools=TOOLS,
            response_format=Guess,
            temperature=1,
            seed=seed,
            max_tokens=500,
        )
        message = answer.choices[0].message
        if message.tool_calls:
            check(message.tool_calls)
            assert not message.content
        else:
            assert isinstance(message.parsed, Guess)


def test_offered_calls_follow_their_schema(served: Served) -> None:
    """tool_choice auto: the model calls this tool by itself, and could say 17 + 5; a number is all that it may."""
    parameters = {
        "type": "object",
        "properties": {"expression": {"type": "string", "pattern": "^[0-9]{3,5}$"}},
        "required": ["expression"],
        "additionalProperties": False,
    }
    function = {"name": "calculator", "description": "Evaluate.", "parameters": parameters, "strict": True}
    tools: Any = [{"type": "function", "function": function}]
    answer = served.client.chat.completions.create(
        model=served.model,
        messages=[{"role": "user", "content": "What is 37 * 48?"}],
        tools=tools,
        temperature=0,
        max_tokens=300,
    )
    one = answer.choices[0]
    assert one.finish_reason == "tool_calls", one
    made: Any = one.message.tool_calls or ()
    for call in made:
        assert jsonschema_rs.is_valid(parameters, json.loads(call.function.arguments))


GUESS = Guess.model_json_schema() | {"additionalProperties": False}


def deep(levels: int) -> str:
    """A schema as text: no JSON library here goes so deep."""
    return '{"items": ' * levels + "{}" + "}" * levels


BAD: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {"foo": "bar"}}},
    {"regex": "(unclosed"},
    {"json": {"$ref": "#/$defs/nothing"}},
    {"json": {"type": "string", "pattern": "(?=a)b"}},
    {"json": {"enum": [f"value number {number}" for number in range(100_000)]}},
    {"json": deep(10_000)},
]


def test_a26_bad_forms_and_a_good_one_beside_each(served: Served) -> None:
    """Refused in 5 s of the processor, as forms of the answer and as arguments of a strict tool; the engine goes on."""

    def spent_s() -> float:
        """By all but the engine."""
        return processor_s(served.pid, *(pid for pid in served.children() if pid != served.engine_pid))

    def posted(fields: dict[str, Any]) -> tuple[int, Any, float]:
        """Again if the server says so: tests run beside others, and a grammar may get no time."""
        start_s = spent_s()
        status, answer = served.post("/v1/chat/completions", asked | fields)
        return posted(fields) if status == BUSY else (status, answer, spent_s() - start_s)

    asked = {"model": served.model, "messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 100}
    good = {"response_format": {"type": "json_schema", "json_schema": {"name": "g", "schema": GUESS}}}
    bad: list[dict[str, Any]] = [{"structured_outputs": outputs} for outputs in BAD]
    for schema in (outputs["json"] for outputs in BAD if isinstance(outputs.get("json"), dict)):
        parameters = {"type": "object", "properties": {"a": schema}}
        function = {"name": "f", "parameters": parameters, "strict": True}
        bad.append({"tools": [{"type": "function", "function": function}]})
    with ThreadPoolExecutor(1) as beside:
        for number, fields in enumerate(bad):
            future = beside.submit(posted, good | THINKING_OFF) if number % 5 == 0 else None
            status, answer, took_s = posted(fields)
            assert status == 400 and answer["error"]["param"] == next(iter(fields)), answer
            assert len(answer["error"]["message"]) < 1000 and took_s < 5
            if future is not None:
                status, answer, _ = future.result()
                assert status == 200
                assert jsonschema_rs.is_valid(GUESS, json.loads(answer["choices"][0]["message"]["content"]))
