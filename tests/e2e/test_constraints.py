"""Constraints in the whole server: hostile ones are refused and harm nobody, broken ones end with a reason; thinking budgets."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.serving import Served, await_that, little_model, resident_bytes

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
# which of so many keys comes next is more than llguidance looks at in one step: it begins, and breaks behind "{"
WIDE = {"type": "object", "properties": {f"k{number}": {} for number in range(900)}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = little_model(tmp_path_factory.mktemp("model") / "little")
    made = Served(
        model, "--max-model-len", "512", "--kv-cache-memory-bytes", str(16 << 20), "--max-num-seqs", "8"
    )
    yield made
    made.remove()


@pytest.fixture(autouse=True)
def _unharmed(served: Served) -> Iterator[None]:
    yield
    await_that(lambda: served.idle, within_s=20)
    assert "Traceback" not in served.log()


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "seed": 1} | fields


def of_schema(schema: Any, **fields: Any) -> dict[str, Any]:
    """Not as ``response_format``, of which the prompt tells: a context of 512 tokens holds no large schema."""
    return chat(structured_outputs={"json": schema}, thinking={"type": "disabled"}, **fields)


def of_outputs(**outputs: Any) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 5, "structured_outputs": outputs}


def deep(levels: int) -> bytes:
    inner = '{"type":"object","properties":{"a":' * levels + "{}" + "}}" * levels
    return json.dumps(of_schema("SCHEMA")).encode().replace(b'"SCHEMA"', inner.encode())


HOSTILE: dict[str, tuple[str, Any]] = {
    "properties": (CHAT, of_schema({"type": "object", "properties": {"foo": "bar"}})),
    "regex": (TEXT, of_outputs(regex="(unclosed")),
    "ref": (CHAT, of_schema({"$ref": "#/$defs/nothing"})),
    "look-ahead": (CHAT, of_schema({"type": "string", "pattern": "^(?=a)b"})),
    "deep": (CHAT, deep(10_000)),
    "enum of 2 MB": (CHAT, of_schema({"enum": [f"value {number:08}" for number in range(100_000)]})),
    "choice of 1e5": (TEXT, of_outputs(choice=[str(number) for number in range(100_000)])),
    "multipleOf": (CHAT, of_schema({"type": "integer", "multipleOf": 99_999_989})),
    "exponential": (
        TEXT,
        of_outputs(
            grammar="start: A0\n" + "\n".join(f"A{n}: A{n + 1} A{n + 1}" for n in range(40)) + '\nA40: "a"'
        ),
    ),
    "left recursion alone": (TEXT, of_outputs(grammar="start: a\na: b\nb: a")),
    "allOf": (
        CHAT,
        of_schema({"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(20)]}),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a26(served: Served, name: str) -> None:
    """Each is refused with a reason, and a good one that came at the same moment has its answer."""
    path, body = HOSTILE[name]
    found: list[tuple[int, Any]] = []
    beside = threading.Thread(target=lambda: found.append(served.post(CHAT, of_schema(SCHEMA))))
    beside.start()
    while (answered := served.post(path, body))[0] == 503:
        pass  # tests run beside others, and a grammar has had no second of the processor in four
    status, answer = answered
    beside.join()
    assert status == 400, answer
    message = answer["error"]["message"]
    assert message.startswith("structured_outputs") or message == "the body is nested too deeply"
    status, good = found[0]
    assert status == 200, good
    assert json.loads(good["choices"][0]["message"]["content"]).keys() == {"a"}


TAME = {
    "repeats": of_outputs(regex="(a{1,1000}){1,1000}"),
    "backtracking": of_outputs(regex="(x+x+)+y"),
    "dots": of_outputs(regex=".{0,100000}"),
    "maxLength": of_schema({"type": "string", "maxLength": 10**9}, max_tokens=5),
    "minItems": of_schema({"type": "array", "minItems": 10**6, "items": {}}, max_tokens=5),
}


@pytest.mark.parametrize("name", TAME)
def test_what_only_looks_hostile_is_answered(served: Served, name: str) -> None:
    body = TAME[name]
    status, answer = served.post(TEXT if "prompt" in body else CHAT, body)
    assert status == 200, answer
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")


def test_a_constraint_that_breaks_ends_the_request_with_the_reason(served: Served) -> None:
    status, answer = served.post(CHAT, of_schema(WIDE))
    assert status == 400 and "form that was asked for" in answer["error"]["message"], answer
    assert "items" in answer["error"]["message"]
    status, events = served.post(CHAT, of_schema(WIDE, stream=True, min_tokens=50, ignore_eos=True))
    assert status == 200 and events.endswith("data: [DONE]\n\n")
    error = json.loads(events.split("data: ")[-2])["error"]
    assert error["code"] == 400 and "items" in error["message"]


@pytest.mark.parametrize(
    "conflict",
    [
        {"stop_token_ids": list(range(2, 1000))},
        {"bad_words": ["{", "a", '"']},
        {"logit_bias": {str(token): -100 for token in range(2, 500)}},
        {"min_tokens": 200},
        {"ignore_eos": True},
    ],
    ids=lambda conflict: next(iter(conflict)),
)
def test_options_that_fight_the_form_end_too(served: Served, conflict: dict[str, Any]) -> None:
    """The form wins over bad words and min_tokens; a stop token ends the text wherever it comes."""
    status, answer = served.post(CHAT, of_schema(SCHEMA, **conflict))
    assert status == 200, answer
    (choice,) = answer["choices"]
    if "stop_token_ids" in conflict:
        assert answer["usage"]["completion_tokens"] < 4
    else:
        assert json.loads(choice["message"]["content"]).keys() == {"a"}
    assert choice["finish_reason"] == ("length" if "ignore_eos" in conflict else "stop")


# ---- the limit of thinking -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_thinking_budget(served: Served, budget: int) -> None:
    status, answer = served.post(
        CHAT, chat(thinking_token_budget=budget, n=3, max_tokens=30, ignore_eos=True)
    )
    assert status == 200, answer
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 3 * budget
    for choice in answer["choices"]:
        assert choice["message"]["content"], "behind the budget comes the answer"
        assert choice["message"]["reasoning"] is None or budget


def test_a_thinking_budget_before_a_form(served: Served) -> None:
    body = of_schema(SCHEMA) | {"thinking": {"type": "enabled"}, "thinking_token_budget": 5}
    status, answer = served.post(CHAT, body)
    assert status == 200, answer
    assert json.loads(answer["choices"][0]["message"]["content"]).keys() == {"a"}
    assert 0 < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 5


def test_a_budget_of_messages(served: Served) -> None:
    body = chat(max_tokens=30) | {"model": served.model, "thinking": {"type": "enabled", "budget_tokens": 6}}
    body.pop("seed")
    status, answer = served.post(MESSAGES, body)
    assert status == 200, answer
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    body["thinking"]["budget_tokens"] = -1
    status, answer = served.post(MESSAGES, body)
    assert status == 400 and "thinking.budget_tokens is -1" in answer["error"]["message"]


def test_a_budget_of_nothing(served: Served) -> None:
    off = {"thinking": {"type": "disabled"}, "max_tokens": 8}
    limited = served.post(CHAT, chat(thinking_token_budget=3, **off))[1]["choices"]
    assert limited == served.post(CHAT, chat(**off))[1]["choices"], "no thinking keeps every budget"
    for wrong in (-1, 1.5, "many"):
        status, answer = served.post(CHAT, chat(thinking_token_budget=wrong))
        assert status == 400 and answer["error"]["param"] == "thinking_token_budget", answer


# ---- memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_stays_flat_under_hostile_constraints(served: Served) -> None:
    """100 of them, no two alike, in all processes."""

    def burst(count: int, *, first: int) -> None:
        for number in range(first, first + count):
            schemas: list[Any] = [
                {"enum": [f"{number} {value}" for value in range(5000)]},
                {"type": "object", "properties": {f"{number}k{key}": {} for key in range(700)}},
                {"type": "integer", "multipleOf": 39_000 + number},
                {"type": "string", "pattern": f"(\\w{{1,40}}{number}){{1,40}}"},
            ]
            endless = {"type": "integer", "multipleOf": 90_000_000 + number}
            schema = endless if number % 20 == 0 else schemas[number % len(schemas)]
            served.post(CHAT, of_schema(schema, max_tokens=10))

    def used() -> int:
        return sum(resident_bytes(pid) for pid in (served.pid, *served.children()))

    burst(40, first=0)
    before = used()
    burst(100, first=100)
    assert used() - before < 50 << 20
