"""What reaches the engine through the door: extreme but legal values, and the issue's bad input with a real engine behind.

Which field an error names is ``tests/server/test_errors.py``'s matter. Here: nothing is answered by 500, no trace is logged, and
the engine says the same before and after.
"""

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.e2e.serving import Served, await_that, small_model

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
CONTEXT = 512
VOCABULARY = 2048
KNOWN = {"prompt": "one two three", "max_tokens": 6, "temperature": 0, "logprobs": 3, "ignore_eos": True}
EXAMPLES = 120


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = small_model(tmp_path_factory.mktemp("model") / "small")
    flags = ("--max-model-len", str(CONTEXT), "--kv-cache-memory-bytes", str(16 << 20), "--max-num-seqs", "6")
    made = Served(model, *flags)
    yield made
    made.remove()


@pytest.fixture(autouse=True)
def _unharmed(served: Served) -> Iterator[None]:
    """The engine answers as before, nothing of the test is left in it, and no defect was logged."""
    before = served.post(TEXT, KNOWN)[1]["choices"]
    yield
    await_that(lambda: served.idle, within_s=20)
    assert served.post(TEXT, KNOWN)[1]["choices"] == before
    assert "Traceback" not in served.log()
    assert served.get("/health")[0] == 200


HI = [{"role": "user", "content": "hi"}]
ISSUE: dict[str, tuple[bytes | dict[str, Any], str | None]] = {
    "malformed JSON": (b'{"prompt": "x", ', None),
    "wrong type": ({"prompt": "x", "max_tokens": "ten"}, "max_tokens"),
    "unknown model": ({"prompt": "x", "model": "gpt-0"}, "model"),
    "prompt too long": ({"prompt": "word " * 4 * CONTEXT}, "prompt"),
    "negative number": ({"prompt": "x", "max_tokens": -5}, "max_tokens"),
    "invalid UTF-8": (b'{"prompt": "\xff\xfe\x80"}', None),
    "token out of range": ({"prompt": [VOCABULARY]}, "prompt"),
    "negative token": ({"prompt": [3, -1]}, "prompt"),
    "10 MB": ({"prompt": "a" * (10 << 20)}, None),
}


@pytest.mark.parametrize("name", ISSUE)
def test_the_issues_list(served: Served, name: str) -> None:
    body, field = ISSUE[name]
    status, answer = served.post(TEXT, body)
    assert 400 <= status < 500, answer
    assert answer["error"]["code"] == status and answer["error"]["message"]
    if field:
        assert answer["error"]["param"] == field


def test_a_bad_role(served: Served) -> None:
    status, answer = served.post(CHAT, {"messages": [{"role": "robot", "content": "x"}]})
    assert status == 400 and answer["error"]["param"] == "messages"


TOKEN = st.integers(0, VOCABULARY - 1)
EXTREME: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0, 1e-320, 1e-9, 1e-3, 1, 1.999, 2]) | st.floats(0, 2),
    "top_p": st.sampled_from([1e-300, 1e-9, 0.5, 1]) | st.floats(0, 1, exclude_min=True),
    "top_k": st.sampled_from([-1, 0, 1, VOCABULARY, 10**9]),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.sampled_from([1e-30, 0.5, 1, 2, 1e30]),
    "logit_bias": st.dictionaries(TOKEN.map(str), st.sampled_from([-100, -1, 0, 1, 100]), max_size=300),
    "bad_words": st.lists(st.text(min_size=1, max_size=6), max_size=4),
    "stop": st.lists(st.text(min_size=1, max_size=3), max_size=4),
    "stop_token_ids": st.lists(TOKEN, max_size=600),
    "min_tokens": st.integers(0, 4),
    "max_tokens": st.integers(1, 4),
    "seed": st.sampled_from([0, -1, 1, 2**31, 2**63 - 1, -(2**63)]),
    "n": st.integers(1, 5),
    "logprobs": st.integers(0, 20),
    "prompt_logprobs": st.integers(0, 20),
    "echo": st.booleans(),
    "ignore_eos": st.booleans(),
    "priority": st.sampled_from([-(2**62), 0, 2**62]),
    "cache_salt": st.text(max_size=20),
    "user": st.text(max_size=20),
}
PROMPT = (
    st.lists(TOKEN, min_size=1, max_size=20)
    | st.text(min_size=1, max_size=40)
    | st.lists(st.lists(TOKEN, min_size=1, max_size=5), min_size=1, max_size=3)
    | st.sampled_from([[token] * (CONTEXT - 4) for token in (0, 1, 2, VOCABULARY - 1)])
)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    prompt=PROMPT,
    names=st.lists(st.sampled_from(sorted(EXTREME)), unique=True, max_size=6),
    stream=st.booleans(),
    data=st.data(),
)
def test_extremes_that_the_sampler_sees(
    served: Served, prompt: Any, names: list[str], stream: bool, data: st.DataObject
) -> None:
    fields = {name: data.draw(EXTREME[name], label=name) for name in names}
    body = {"prompt": prompt, "max_tokens": 2, "stream": stream} | fields
    status, answer = served.post(TEXT, body)
    assert status in (200, 400), answer
    if stream and status == 200:
        assert (
            answer.endswith("data: [DONE]\n\n") and 'data: {"error"' not in answer
        )  # a token may spell it, too
    elif status == 200:
        assert all(choice["finish_reason"] in ("stop", "length") for choice in answer["choices"])


MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "system", "assistant", "tool", "developer"]),
        "content": st.text(max_size=30),
    },
    optional={
        "name": st.text(max_size=5),
        "reasoning_content": st.text(max_size=10),
        "tool_call_id": st.text(max_size=5),
    },
)


@settings(max_examples=EXAMPLES // 2, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages=st.lists(MESSAGE, min_size=1, max_size=4), thinking=st.booleans())
def test_conversations_in_any_order(served: Served, messages: list[dict[str, str]], thinking: bool) -> None:
    body = {"messages": messages, "max_tokens": 2, "chat_template_kwargs": {"thinking": thinking}}
    status, answer = served.post(CHAT, body)
    assert status in (200, 400), answer


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\xff" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX: " + b"y" * (1 << 20) + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 40\r\n\r\n{",
        b"POST /v1/%ff%00/../completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
    ],
    ids=["noise", "version", "length", "negative", "chunk", "header", "half", "path"],
)
def test_what_is_no_http(served: Served, data: bytes) -> None:
    with socket.create_connection((served.host, int(served.port)), timeout=5) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while more := connection.recv(1 << 16):
                answer += more
        except ConnectionResetError:
            pass  # hung up on with something unread: that is an answer too
    assert b" 500 " not in answer.split(b"\r\n")[0]
