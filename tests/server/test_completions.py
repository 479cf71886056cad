"""Raw completions over a real socket: prompts in every form, echo, scores, stop, streams."""

from typing import Any

import pytest

from tests.server.conftest import MODEL, Server


def complete(server: Server, prompt: Any, **options: Any) -> Any:
    return server.client.completions.create(model=MODEL, prompt=prompt, **options)


def streamed(server: Server, prompt: Any, **options: Any) -> tuple[dict[int, str], dict[int, str], Any]:
    texts: dict[int, str] = {}
    finish: dict[int, str] = {}
    usage = None
    stream = server.client.completions.create(
        model=MODEL, prompt=prompt, stream=True, stream_options={"include_usage": True}, **options
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert choice.index not in finish
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                finish[choice.index] = choice.finish_reason
    return texts, finish, usage


def test_forms_of_a_prompt(server: Server) -> None:
    ids = server.tokenizer.encode("hello there")
    for prompt in ("hello there", ["hello there"], ids, [ids]):
        answer = complete(server, prompt, max_tokens=3)
        assert answer.usage.prompt_tokens == len(ids)
        assert len(answer.choices) == 1 and answer.choices[0].text
    several = complete(server, ["a", "b c"], max_tokens=3, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.usage.completion_tokens == 12
    assert several.usage.prompt_tokens == len(server.tokenizer.encode("a")) + len(
        server.tokenizer.encode("b c")
    )


def test_control_spellings_are_control_tokens_in_raw_prompts(server: Server) -> None:
    answer = complete(server, "<think>", max_tokens=1, extra_body={"return_token_ids": True})
    assert answer.choices[0].prompt_token_ids == [server.tokenizer.id_of("<think>")]


@pytest.mark.parametrize(
    ("output", "options", "text", "finish"),
    [
        ("one two three", {}, "one two three", "stop"),
        ("one two STOP three", {"stop": "STOP"}, "one two ", "stop"),
        ("one \U0001f642 two", {"stop": ["\U0001f642"]}, "one ", "stop"),
        ("\n\n keep <think>all</think> ", {}, "\n\n keep <think>all</think> ", "stop"),
    ],
)
def test_text(server: Server, output: str, options: dict[str, Any], text: str, finish: str) -> None:
    extra = server.script("text", output)
    answer = complete(server, "x", extra_body=extra, **options)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, finish)
    texts, ends, usage = streamed(server, "x", extra_body=extra, **options)
    assert (texts[0], ends[0]) == (text, finish)
    assert usage == answer.usage


def test_cut_character(server: Server) -> None:
    """Case A18: what the length cuts is one U+FFFD, whole and streamed."""
    emoji = server.tokenizer.encode("\U0001f642")
    if len(emoji) == 1:
        pytest.skip("the tokenizer has this character whole")
    extra = server.script("cut", [[t] for t in server.tokenizer.encode("a") + emoji[:-1]], finish="length")
    assert complete(server, "x", extra_body=extra).choices[0].text == "a\ufffd"
    assert streamed(server, "x", extra_body=extra)[0][0] == "a\ufffd"


def test_echo_and_scores(server: Server) -> None:
    ids = server.tokenizer.encode("hello there")
    extra = server.script("echo", " you")
    count = len(server.tokenizer.encode(" you"))
    answer = complete(server, "hello there", echo=True, logprobs=2, extra_body=extra)
    (choice,) = answer.choices
    assert choice.text == "hello there you"
    scores = choice.logprobs
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.text_offset) == len(ids) + count
    assert scores.token_logprobs[0] is None and scores.token_logprobs[1:] == [-0.25] * (len(ids) + count - 1)
    assert "".join(scores.tokens) == choice.text
    assert streamed(server, "hello there", echo=True, logprobs=2, extra_body=extra)[0][0] == choice.text


def test_scoring_only(server: Server) -> None:
    """echo with max_tokens 0: the prompt's log-probabilities and nothing generated."""
    answer = complete(server, "hello there", echo=True, logprobs=1, max_tokens=0)
    assert answer.choices[0].text == "hello there"
    assert answer.usage.completion_tokens == 0
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.prompt_tokens
    assert streamed(server, "hello there", echo=True, max_tokens=0)[0][0] == "hello there"


def test_special_tokens_show_on_request(server: Server) -> None:
    eos = 1
    extra = server.script("special", [[*server.tokenizer.encode("a"), eos, *server.tokenizer.encode("b")]])
    assert complete(server, "x", extra_body=extra).choices[0].text == "ab"
    shown = complete(server, "x", extra_body={**extra, "skip_special_tokens": False}).choices[0].text
    assert shown == "a" + server.tokenizer.token_text(eos) + "b"


def test_detokenize_is_tokenize_backwards(server: Server) -> None:
    status, answer = server.post(
        "/tokenize", {"prompt": "hello <think> \U0001f642", "return_token_strs": True}
    )
    assert status == 200 and answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert server.post("/detokenize", {"tokens": answer["tokens"]}) == (
        200,
        {"prompt": "hello <think> \U0001f642"},
    )
