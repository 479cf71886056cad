"""Server-wide defaults: they fill what a request leaves out, under whichever name it could have said it, in every API."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flashstep.server.defaults import Defaults
from tests.server.conftest import Server

HI: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
KNOWN = {"temperature", "top_p", "chat_template_kwargs", "thinking", "enable_thinking", "reasoning_effort"}
DEFAULTS = Defaults(
    sampling={"temperature": 0.5, "min_p": 0.1}, template={"thinking": False, "reasoning_effort": 30}
)


def test_sampling_fills_what_a_body_has_and_does_not_say() -> None:
    made = DEFAULTS.completed({"top_p": 0.9}, KNOWN - {"chat_template_kwargs"})
    assert made == {"temperature": 0.5, "top_p": 0.9}
    assert DEFAULTS.completed({"temperature": 1.0}, {"temperature"}) == {"temperature": 1.0}


@pytest.mark.parametrize(
    ("fields", "switches"),
    [
        ({}, {"thinking": False, "reasoning_effort": 30}),
        ({"thinking": {"type": "enabled"}}, {"reasoning_effort": 30}),
        ({"enable_thinking": True}, {"reasoning_effort": 30}),
        (
            {"chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True, "reasoning_effort": 30},
        ),
        ({"reasoning_effort": "high"}, {"thinking": False}),
        ({"reasoning_effort": "none"}, {}),
        ({"reasoning": {"effort": "low"}}, {"thinking": False}),
        ({"output_config": {"effort": "low"}}, {"thinking": False}),
        ({"chat_template_kwargs": {"reasoning_effort": 5}}, {"thinking": False, "reasoning_effort": 5}),
        ({"chat_template_kwargs": {"thinking": None}}, {"thinking": None, "reasoning_effort": 30}),
        ({"chat_template_kwargs": "wrong"}, "wrong"),
    ],
)
def test_switches_yield_to_the_request(fields: dict[str, Any], switches: Any) -> None:
    assert DEFAULTS.completed(fields, KNOWN)["chat_template_kwargs"] == switches


def test_effort_none_as_a_default_yields_to_thinking() -> None:
    quiet = Defaults(template={"reasoning_effort": "none"})
    assert quiet.completed({"thinking": {"type": "enabled"}}, KNOWN)["chat_template_kwargs"] == {}


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    serving = {
        "override_generation_config": '{"temperature": 0.25, "top_p": 0.5}',
        "default_chat_template_kwargs": '{"thinking": false}',
    }
    made = Server(tmp_path_factory.mktemp("scripts"), serving=serving)
    yield made
    made.stop()


def test_chats_do_not_think_unless_they_say_so(quiet: Server, server: Server) -> None:
    talk: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
    on, off = {"thinking": {"type": "enabled"}}, {"thinking": {"type": "disabled"}}

    def tokens(where: Server, more: dict[str, Any]) -> list[int]:
        return where.post("/tokenize", talk | more)[1]["tokens"]

    assert tokens(quiet, {}) == tokens(quiet, off) == tokens(server, off)
    assert tokens(quiet, on) == tokens(server, on) == tokens(server, {})
    assert tokens(quiet, {}) != tokens(quiet, on)
    assert (
        quiet.client.chat.completions.create(model="stub", max_tokens=2, **talk).usage.completion_tokens == 2
    )


def test_a_text_has_no_switches(quiet: Server) -> None:
    status, answer = quiet.post("/tokenize", {"prompt": "hi"})
    assert (status, answer.get("count")) == (200, len(quiet.tokenizer.encode("hi"))), answer
    said = {"prompt": "hi", "chat_template_kwargs": {"thinking": False}}
    assert quiet.post("/tokenize", said)[1]["error"]["param"] == "chat_template_kwargs"


def test_a_default_effort_asks_for_no_thinking(own_server: Callable[..., Server]) -> None:
    """The last turn is the assistant's, which needs thinking to be off: an effort of the server's does not switch it on."""
    eager = own_server(serving={"default_chat_template_kwargs": '{"reasoning_effort": "high"}'})
    body = {"messages": [*HI, {"role": "assistant", "content": "So"}], "max_tokens": 2}
    for said, status in (
        ({}, 200),
        ({"thinking": {"type": "disabled"}}, 200),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, 200),
        ({"output_config": {"effort": "high"}}, 400),
        ({"thinking": {"type": "adaptive"}}, 400),
    ):
        assert eager.post("/v1/messages", body | said)[0] == status, said


def test_sampling_is_told_by_responses(quiet: Server) -> None:
    body = {"model": "stub", "input": "hello", "max_output_tokens": 2}
    status, answer = quiet.post("/v1/responses", body)
    assert (status, answer["temperature"], answer["top_p"]) == (200, 0.25, 0.5)
    status, answer = quiet.post("/v1/responses", body | {"temperature": 1.0})
    assert (status, answer["temperature"], answer["top_p"]) == (200, 1.0, 0.5)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_every_chat_api_answers_with_defaults_and_its_own_words(quiet: Server, path: str) -> None:
    body: dict[str, Any] = {"model": "stub"}
    if path == "/v1/responses":
        body |= {"input": "hello", "max_output_tokens": 2, "reasoning": {"effort": "high"}}
    else:
        body |= {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        body |= {"thinking": {"type": "enabled"}}
    status, answer = quiet.post(path, body)
    assert status == 200, answer
