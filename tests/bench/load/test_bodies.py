"""Bodies: what came before stands in the next prompt, recorded or live; shared fields are where they were asked for."""

import pytest

from flashstep.bench.load.bodies import Shape
from flashstep.bench.load.prompts import Session, Turn

CHAT = Session(
    key="s",
    turns=(
        Turn(messages=({"role": "user", "content": "a"},), answer="recorded", output_len=3),
        Turn(messages=({"role": "user", "content": "b"},), output_len=4),
    ),
)
TEXT = Session(key="s", turns=(Turn(prompt="a", answer=" recorded"), Turn(prompt=" b")))


@pytest.mark.parametrize(("history", "said"), [("recorded", "recorded"), ("live", "live!")])
def test_the_answer_before_is_recorded_or_live(history: str, said: str) -> None:
    shape = Shape(model="m", history=history)
    call = shape.call(CHAT, 1, ["live!"])
    assert [(message["role"], message["content"]) for message in call.body["messages"]] == [
        ("user", "a"),
        ("assistant", said),
        ("user", "b"),
    ]
    assert call.key == "s/1" and call.path == "/v1/chat/completions"


def test_a_completions_prompt_is_all_the_text() -> None:
    recorded = Shape(model="m", endpoint="completions").call(TEXT, 1, [" live"])
    live = Shape(model="m", endpoint="completions", history="live").call(TEXT, 1, [" live"])
    assert (recorded.body["prompt"], live.body["prompt"]) == ("a recorded b", "a live b")
    assert recorded.path == "/v1/completions" and "messages" not in recorded.body


def test_shared_fields() -> None:
    body = Shape(model="m").call(CHAT, 0, []).body
    assert body["stream"] is True and body["ignore_eos"] is True and body["temperature"] == 0.0
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert body["max_completion_tokens"] == 3 and "seed" not in body
    bare = Shape(model="m", ignore_eos=False, temperature=None, counting="not").call(CHAT, 0, []).body
    assert not {"ignore_eos", "temperature", "seed", "stream_options"} & bare.keys()
    text = Shape(model="m", endpoint="completions").call(TEXT, 0, []).body
    assert "max_tokens" not in text and "max_completion_tokens" not in text, "the server's own limit holds"
    over = Shape(model="m", extra={"top_k": 1, "temperature": 0.5}).call(CHAT, 0, []).body
    assert (over["top_k"], over["temperature"]) == (1, 0.5)


def test_sampling_has_a_seed_of_its_own_for_each_request() -> None:
    hot = Shape(model="m", temperature=1.0, seed=3)
    first, second = hot.call(CHAT, 0, []).body["seed"], hot.call(CHAT, 1, [""]).body["seed"]
    assert first != second and first == hot.call(CHAT, 0, []).body["seed"]
    assert first != Shape(model="m", temperature=1.0, seed=4).call(CHAT, 0, []).body["seed"]
