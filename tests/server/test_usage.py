"""Usage adds up on every path: streamed or whole, however the tokens are grouped, whatever ends the answer (case A19)."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.server.conftest import MODEL, Server
from tests.server.test_chat_completions import CALL, EOS, HI, TOOLS

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ALL_USAGE = {"include_usage": True, "continuous_usage_stats": True}


def events(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream as they stand on the wire."""
    status, text = server.post(path, body | {"stream": True})
    assert status == 200, text
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    return ({"messages": HI} if path == CHAT else {"prompt": "hi"}) | fields


def spoken(choice: dict[str, Any]) -> tuple[str, ...]:
    """What a choice says (text or content, reasoning, the calls' names and arguments) and how it ends."""
    told = choice.get("message") or choice
    calls = [call["function"] for call in told.get("tool_calls") or ()]
    named = "|".join(call["name"] + call["arguments"] for call in calls)
    text = told.get("text") or told.get("content") or ""
    return text, told.get("reasoning") or "", named, choice["finish_reason"], str(choice["stop_reason"])


def said(chunks: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The same of a stream, put together."""
    choices: dict[int, dict[str, Any]] = {}
    for (piece,) in (chunk["choices"] for chunk in chunks if chunk["choices"]):
        one = choices.setdefault(piece["index"], {"text": "", "reasoning": "", "tool_calls": []})
        delta = piece.get("delta") or piece
        one["text"] += delta.get("content") or delta.get("text") or ""
        one["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or ():
            if call.get("id"):
                one["tool_calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
            one["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if piece["finish_reason"]:
            one |= {name: piece[name] for name in ("finish_reason", "stop_reason")}
    return [spoken(choices[index]) for index in sorted(choices)]


def adds_up(usage: dict[str, Any]) -> None:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 <= usage["prompt_tokens_details"]["replayed_tokens"] <= cached <= usage["prompt_tokens"]
    assert usage["prompt_cache_hit_tokens"] == cached
    assert usage["prompt_cache_miss_tokens"] == usage["prompt_tokens"] - cached
    reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    assert 0 <= reasoning <= usage["completion_tokens"]


PARTS = ("so ", "\n", "\U0001f642", "STOP", "</think>", "STO", CALL, "\u7b54", "{}", "end")
ENDS = st.sampled_from(["stop", "length"])


@example(parts=["so ", "STOP", CALL], widths=[3], finish="stop", path=CHAT, options={}, tools={})
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=6),
    widths=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    finish=ENDS,
    path=st.sampled_from([CHAT, TEXT]),
    options=st.fixed_dictionaries(
        {},
        optional={
            "stop": st.just(["STOP", "\U0001f642"]),
            "n": st.just(3),
            "min_tokens": st.integers(0, 4),
            "include_stop_str_in_output": st.booleans(),
            "return_metrics": st.booleans(),
        },
    ),
    tools=st.fixed_dictionaries(
        {}, optional={"tool_choice": st.just("none"), "parallel_tool_calls": st.just(False)}
    ),
)
def test_usage_does_not_depend_on_streams_or_groups(
    server: Server,
    parts: list[str],
    widths: list[int],
    finish: str,
    path: str,
    options: dict[str, Any],
    tools: dict[str, Any],
) -> None:
    ids = server.tokenizer.encode("".join(parts))
    script: dict[str, Any] = {"finish": finish, "cached": 2, "replayed": 1}
    if finish == "stop":
        ids, script = [*ids, EOS], script | {"stop_token": EOS}
    ids = ids or [EOS]
    groups, at = [], 0
    while at < len(ids):
        groups.append(ids[at : at + widths[len(groups) % len(widths)]])
        at += len(groups[-1])
    fields = options | ({"tools": TOOLS, **tools} if path == CHAT else {})
    single = body_of(path, **fields, **server.script("single", [[token] for token in ids], **script))
    grouped = body_of(path, **fields, **server.script("grouped", groups, **script))

    status, whole = server.post(path, single)
    assert status == 200, whole
    adds_up(whole["usage"])
    assert server.post(path, grouped)[1]["usage"] == whole["usage"]
    for body in (single, grouped):
        chunks = events(server, path, body | {"stream_options": ALL_USAGE})
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
        assert chunks[-2]["usage"] == whole["usage"], "the last choice's end tells all of it already"
        assert said(chunks) == [spoken(choice) for choice in whole["choices"]]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        for chunk in chunks:
            adds_up(chunk["usage"])
    if not options.get("stop"):
        assert whole["usage"]["completion_tokens"] == len(ids) * options.get("n", 1)


@pytest.mark.parametrize("width", [1, 6])
def test_a19_ends_within_a_run(server: Server, width: int) -> None:
    """A run of drafts that stood, with its end inside: the engine cuts what is behind it, a stop string is cut here."""

    def usage(output: str, *, finish: str = "stop", eos: bool = True, **options: Any) -> tuple[int, int]:
        ids = [*server.tokenizer.encode(output), *([EOS] if eos else [])]
        runs = [ids[i : i + width] for i in range(0, len(ids), width)]
        extra = server.script("a19", runs, finish=finish, stop_token=EOS if eos else None)
        told = server.post(CHAT, body_of(CHAT, **options, **extra))[1]["usage"]
        return told["completion_tokens"], told["completion_tokens_details"]["reasoning_tokens"]

    tokens = server.tokenizer.encode
    assert usage("so so") == (len(tokens("so so")) + 1, len(tokens("so so")))
    assert usage("so</think>it is") == (len(tokens("so</think>it is")) + 1, len(tokens("so")))
    cut = usage("so so so", finish="length", eos=False)
    assert cut == (len(tokens("so so so")),) * 2
    stopped = usage("a</think>b|c d e f g h", stop=["|"])
    assert stopped == (len(tokens("a</think>b|")), 1), "what was behind the stop string is not counted"
    assert usage("") == (1, 0), "an empty answer is its end"


def test_continuous_usage_tells_reasoning_and_cache(server: Server) -> None:
    """Alone it puts usage on every chunk, and adds no chunk behind them."""
    extra = server.script("continuous", "one two three</think>four", cached=3, replayed=2, step_s=0.01)
    body = body_of(CHAT, stream_options={"continuous_usage_stats": True}, **extra)
    chunks = events(server, CHAT, body)
    assert all(chunk["choices"] for chunk in chunks)
    usages = [chunk["usage"] for chunk in chunks]
    assert all(
        usage["prompt_tokens_details"] == {"cached_tokens": 3, "replayed_tokens": 2} for usage in usages
    )
    reasoning = [usage["completion_tokens_details"]["reasoning_tokens"] for usage in usages]
    assert reasoning == sorted(reasoning) and len(set(reasoning)) > 2
    assert reasoning[-1] == len(server.tokenizer.encode("one two three"))


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_count_once(server: Server, stream: bool) -> None:
    extra = server.script("once", "a b", cached=1)

    def usage(**fields: Any) -> dict[str, Any]:
        if stream:
            return events(server, TEXT, fields | extra | {"stream_options": {"include_usage": True}})[-1][
                "usage"
            ]
        return server.post(TEXT, fields | extra)[1]["usage"]

    answer, prompts = len(server.tokenizer.encode("a b")), [[5, 6, 7], [8, 9]]
    told = usage(prompt=prompts, n=2)
    assert (told["prompt_tokens"], told["completion_tokens"]) == (5, 4 * answer)
    assert told["prompt_cache_hit_tokens"] == 2
    echoed = usage(prompt=prompts, echo=True)
    assert (echoed["prompt_tokens"], echoed["completion_tokens"]) == (5, 2 * answer)
    scored = usage(prompt=prompts, echo=True, max_tokens=0, logprobs=0)
    assert (scored["prompt_tokens"], scored["completion_tokens"]) == (5, 0)


# ---- styles ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    serving = {"stream_style": "deepseek", "reasoning_field": "reasoning_content"}
    made = Server(tmp_path_factory.mktemp("deepseek"), serving=serving)
    yield made
    made.stop()


def test_deepseeks_stream(deepseek: Server) -> None:
    extra = deepseek.script("styled", "so</think>four", cached=2)
    body = body_of(CHAT, stream_options={"include_usage": True}, **extra)
    chunks = events(deepseek, CHAT, body)
    assert chunks[0]["choices"][0]["delta"] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "",
    }
    assert all(chunk["choices"] and "usage" in chunk for chunk in chunks)
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    whole = deepseek.post(CHAT, body_of(CHAT, **extra))[1]
    assert chunks[-1]["usage"] == whole["usage"]
    assert whole["choices"][0]["message"] == {
        "role": "assistant",
        "content": "four",
        "reasoning_content": "so",
    }
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "so"
    assert not any("reasoning" in delta for delta in deltas)
    assert not any("usage" in chunk for chunk in events(deepseek, CHAT, body_of(CHAT, **extra)))


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_deepseeks_usage_rides_on_the_last_end(deepseek: Server, path: str) -> None:
    """Of several choices too, and with metrics, for which an end may have to wait."""
    extra = deepseek.script("last-end", "so</think>a STOP b", step_s=0.002)
    body = body_of(path, n=4, stop=["STOP"], return_metrics=True, **extra)
    chunks = events(deepseek, path, body | {"stream_options": {"include_usage": True}})
    told = [bool(chunk["usage"]) for chunk in chunks]
    assert told == [False] * (len(chunks) - 1) + [True]
    assert ["metrics" in chunk for chunk in chunks] == told
    assert chunks[-1]["usage"] == deepseek.post(path, body)[1]["usage"]


@pytest.mark.parametrize(
    ("field", "names"), [("both", {"reasoning", "reasoning_content"}), ("reasoning", {"reasoning"})]
)
def test_the_name_of_reasoning(own_server: Callable[..., Server], field: str, names: set[str]) -> None:
    server = own_server(serving={"reasoning_field": field, "enable_force_include_usage": True})
    body = body_of(CHAT, **server.script("named", "so</think>four"))
    message = server.post(CHAT, body)[1]["choices"][0]["message"]
    assert {name for name in message if "reasoning" in name} == names
    assert {message[name] for name in names} == {"so"}
    chunks = events(server, CHAT, body)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0, "usage was forced"
    said = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert {name for delta in said for name in delta if "reasoning" in name} == names
    again = server.client.chat.completions.create(model=MODEL, messages=[*HI, message, *HI], max_tokens=1)
    assert again.usage.completion_tokens == 1, "the message is taken back as it was given"
