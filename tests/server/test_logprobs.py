"""Log-probabilities as clients read them: one entry a token, offsets into the text, bytes, finite numbers; whole and streamed."""

import json
import math
from typing import Any

import pytest

from flashstep.chat.tokenizer import TextTokenizer
from flashstep.request import TokenLogprob
from flashstep.server.answers import encode
from flashstep.server.logprobs import LOWEST_LOGPROB, Spelling, TextLogprobs, chat_logprobs, prompt_logprobs
from tests.server.conftest import TOKENIZER, Server
from tests.server.test_usage import CHAT, TEXT, body_of, events

EOS = 1
WIDE = "\u7b54 \U0001f642\U0001f643 e\u0301."  # characters of several bytes, some of several tokens


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    if not TOKENIZER.exists():
        pytest.skip(f"{TOKENIZER} is absent")
    return TextTokenizer.from_file(TOKENIZER)


def joined(parts: list[dict[str, Any] | None]) -> dict[str, list[Any]]:
    """Completions' parallel lists of all chunks."""
    whole: dict[str, list[Any]] = {}
    for part in parts:
        for name, values in (part or {}).items():
            whole[name] = whole.get(name, []) + values
    return whole


def streamed(server: Server, body: dict[str, Any]) -> dict[int, tuple[str, dict[str, list[Any]]]]:
    """Text and log-probabilities of each choice."""
    texts: dict[int, str] = {}
    parts: dict[int, list[Any]] = {}
    for chunk in events(server, TEXT, body):
        (choice,) = chunk["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        parts.setdefault(choice["index"], []).append(choice["logprobs"])
    return {index: (texts[index], joined(parts[index])) for index in texts}


# ---- completions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_point_into_the_text(server: Server, width: int, echo: bool) -> None:
    ids = [*server.tokenizer.encode(WIDE), EOS]
    runs = [ids[i : i + width] for i in range(0, len(ids), width)]
    extra = server.script("offsets", runs, stop_token=EOS)
    body = {"prompt": "\u00fcber \U0001f642", "logprobs": 2, "echo": echo, "n": 2, **extra}
    choices = server.post(TEXT, body)[1]["choices"]
    for choice in choices:
        told, text = choice["logprobs"], choice["text"]
        assert text == ("\u00fcber \U0001f642" if echo else "") + WIDE
        count = len(ids) + (len(server.tokenizer.encode("\u00fcber \U0001f642")) if echo else 0)
        assert {name: len(values) for name, values in told.items()} == dict.fromkeys(
            ("text_offset", "token_logprobs", "tokens", "top_logprobs"), count
        )
        for token, at in zip(told["tokens"], told["text_offset"], strict=True):
            if not token.startswith("bytes:") and token != server.tokenizer.token_text(EOS):
                assert text.startswith(token, at), (token, at)
        assert told["text_offset"] == sorted(told["text_offset"])
        assert told["text_offset"][-1] == len(text), "the end is hidden: it stands behind the text"
        assert any(token.startswith("bytes:\\x") for token in told["tokens"])
        assert streamed(server, body)[choice["index"]] == (text, told)


def test_echo_of_prompts_in_ids(server: Server) -> None:
    """Each choice has its own prompt's text and scores, and the first token has none."""
    prompts = [server.tokenizer.encode("one two"), server.tokenizer.encode("three")]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "n": 2, **server.script("ids", " x")}
    choices = server.post(TEXT, body)[1]["choices"]
    for choice, prompt, text in zip(
        choices, [prompts[0]] * 2 + [prompts[1]] * 2, ["one two"] * 2 + ["three"] * 2, strict=True
    ):
        assert choice["text"] == text + " x"
        told = choice["logprobs"]
        assert told["tokens"][: len(prompt)] == [server.tokenizer.token_text(token) for token in prompt]
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        assert streamed(server, body)[choice["index"]] == (choice["text"], told)


def test_a_prompt_that_ends_within_a_character(server: Server) -> None:
    """Its echo ends in U+FFFD, and the answer begins behind that, whatever its first bytes are."""
    ids = server.tokenizer.encode("a" + "".join(WIDE[2:4]))
    assert len(server.tokenizer.token_bytes(ids[-1])) < 4, "the last character has several tokens"
    body = {"prompt": ids[:-1], "echo": True, "logprobs": 0, **server.script("within", [[ids[-1]], [ids[0]]])}
    (choice,) = server.post(TEXT, body)[1]["choices"]
    text, told = choice["text"], choice["logprobs"]
    assert text.startswith("a") and text.endswith("a") and "\ufffd" in text
    prompt_text = server.tokenizer.decode(ids[:-1])
    assert told["text_offset"][len(ids) - 1] == len(prompt_text)
    assert text.startswith("a", told["text_offset"][-1]) and told["text_offset"][-1] > 0
    assert streamed(server, body)[0] == (text, told)


def test_the_chosen_token_is_always_among_them(server: Server) -> None:
    """As OpenAI has it: up to logprobs + 1 entries; 0 gives the chosen one alone."""
    extra = server.script("chosen", "a b")
    (choice,) = server.post(TEXT, {"prompt": "x", "logprobs": 0, **extra})[1]["choices"]
    told = choice["logprobs"]
    assert [list(top) for top in told["top_logprobs"]] == [[token] for token in told["tokens"]]
    assert server.post(TEXT, {"prompt": "x", **extra})[1]["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stop_string_cuts_them_where_it_cuts_the_count(server: Server, path: str) -> None:
    """Whatever of a run lies behind it is neither told nor counted."""
    ids = server.tokenizer.encode("</think>one STOP two three")
    asked = {"logprobs": True} if path == CHAT else {"logprobs": 0}
    body = body_of(path, stop=["STOP"], return_token_ids=True, **asked, **server.script("cut", [ids]))
    answer = server.post(path, body)[1]
    (choice,) = answer["choices"]
    entries = choice["logprobs"]["content" if path == CHAT else "tokens"]
    count = answer["usage"]["completion_tokens"]
    assert len(entries) == len(choice["token_ids"]) == count < len(ids)
    assert server.tokenizer.decode(choice["token_ids"]).endswith("STOP")


# ---- chats -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 4])
def test_every_token_of_a_chat_has_its_entry(server: Server, width: int) -> None:
    """Reasoning, markup of a call and the end as well; their bytes are the text, whatever a token splits."""
    ids = [*server.tokenizer.encode(f"so {WIDE}</think>{WIDE}"), EOS]
    runs = [ids[i : i + width] for i in range(0, len(ids), width)]
    body = body_of(CHAT, logprobs=True, top_logprobs=20, **server.script("bytes", runs, stop_token=EOS))
    answer = server.post(CHAT, body)[1]
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"] == len(ids)
    data = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert data == server.tokenizer.decode(ids).encode()
    assert all(len(entry["top_logprobs"]) == 20 for entry in entries)
    chunks = [chunk["choices"][0] for chunk in events(server, CHAT, body)]
    assert [
        entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]
    ] == entries


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_token_ids_are_told_once(server: Server, path: str) -> None:
    """The prompt's with the first chunk of each choice, the answer's with each."""
    body = body_of(path, n=2, return_token_ids=True, **server.script("told-ids", "a</think>b c"))
    whole = server.post(path, body)[1]
    prompt = whole["prompt_token_ids"] if path == CHAT else whole["choices"][0]["prompt_token_ids"]
    assert len(prompt) == whole["usage"]["prompt_tokens"]
    prompts: dict[int, list[Any]] = {0: [], 1: []}
    made: dict[int, list[int]] = {0: [], 1: []}
    for chunk in events(server, path, body):
        (choice,) = chunk["choices"]
        told = (chunk if path == CHAT else choice).get("prompt_token_ids")
        prompts[choice["index"]] += [] if told is None else [told]
        made[choice["index"]] += choice.get("token_ids", [])
    assert prompts == {0: [prompt], 1: [prompt]}
    assert [made[choice["index"]] for choice in whole["choices"]] == [
        choice["token_ids"] for choice in whole["choices"]
    ]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_tokens_by_number(server: Server, path: str) -> None:
    ids = server.tokenizer.encode("</think>\U0001f642 x")
    asked = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1}
    body = body_of(path, return_tokens_as_token_ids=True, **asked, **server.script("numbers", [ids]))
    told = server.post(path, body)[1]["choices"][0]["logprobs"]
    names = [entry["token"] for entry in told["content"]] if path == CHAT else told["tokens"]
    assert names == [f"token_id:{token}" for token in ids]
    tops = [entry["top_logprobs"] for entry in told["content"]] if path == CHAT else told["top_logprobs"]
    assert all("token_id:" in json.dumps(top) for top in tops)


# ---- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30])
def test_json_never_says_infinity(tokenizer: TextTokenizer, value: float) -> None:
    item = TokenLogprob(5, value, 9, ((5, value, 9), (6, -0.5, 1)))
    spelling = Spelling(tokenizer)
    text = TextLogprobs(spelling, count=2, skip_special_tokens=True)
    text.answer([item])
    forms = [
        chat_logprobs(spelling, [item], count=2),
        text.take(),
        prompt_logprobs(spelling, [item], count=2),
    ]
    for form in forms:
        written = encode(form).decode()
        assert "null" not in written.replace("[null,", "["), written
        numbers = json.loads(written)
        assert str(LOWEST_LOGPROB) in json.dumps(numbers)
    assert text.take() is None


def test_prompt_scores_with_alternatives_and_echo(server: Server) -> None:
    """Both may be asked for: the larger number is computed, each gets its own."""
    body = {"prompt": "one two three", "echo": True, "logprobs": 1, "prompt_logprobs": 3, "max_tokens": 1}
    (choice,) = server.post(TEXT, body)[1]["choices"]
    assert all(len(entry) == 3 for entry in choice["prompt_logprobs"][1:])
    assert all(len(entry) == 1 for entry in choice["logprobs"]["top_logprobs"][1:])
    status, answer = server.post(TEXT, body | {"stream": True})
    assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")
