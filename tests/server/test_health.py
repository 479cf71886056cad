"""The small endpoints."""

import openai
import pytest

import flashstep
from tests.server.conftest import MODEL, Server


def test_models(server: Server) -> None:
    listed = server.client.models.list().data
    assert [card.id for card in listed] == [MODEL, "alias"]
    assert server.client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("gpt-0")
    assert server.get("/v1/models")[1]["data"][0]["max_model_len"] == 512


def test_health_and_version(server: Server) -> None:
    assert server.get("/health") == (200, "")
    assert server.get("/ping") == (200, "")
    assert server.get("/version") == (200, {"version": flashstep.__version__})


def test_a_text_takes_nothing_of_a_conversation(server: Server) -> None:
    for field, value in (("reasoning_effort", "high"), ("tools", []), ("enable_thinking", False)):
        status, answer = server.post("/tokenize", {"prompt": "hi", field: value})
        assert (status, answer["error"]["param"]) == (400, field)
