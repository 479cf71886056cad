"""From a body to parameters: what all prompts of a body share is made once, however many there are."""

from types import SimpleNamespace
from typing import Any

import pytest

from flashstep.chat.tokenizer import TextTokenizer
from flashstep.request import SamplingParams
from flashstep.server import intake
from flashstep.server.errors import ApiError
from flashstep.server.openai import CompletionBody
from tests.server.conftest import TOKENIZER

MOST = 100


class Counting(TextTokenizer):
    """Counts the texts that it encodes."""

    texts = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.texts += 1
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture
def front() -> Any:
    tokenizer = Counting(TOKENIZER.read_text())
    ready = SimpleNamespace(max_model_len=MOST, vocab_size=tokenizer.num_ids)
    return SimpleNamespace(tokenizer=tokenizer, ready=ready)


def params(front: Any, lengths: list[int], max_tokens: int | None, **fields: Any) -> list[SamplingParams]:
    return intake.sampling(
        front,
        CompletionBody(prompt="", **fields),
        lengths=lengths,
        prompt_param="prompt",
        max_tokens=max_tokens,
        logprobs=None,
        prompt_logprobs=None,
    )


@pytest.mark.parametrize("max_tokens", [None, 5])
def test_words_are_encoded_once(front: Any, max_tokens: int | None) -> None:
    lengths = [1, 7, 3] * 50
    made = params(front, lengths, max_tokens, bad_words=["one", "two"], logit_bias={"5": 1.0})
    assert front.tokenizer.texts == 2 * 2  # at the start of a text, and behind a space
    assert [one.max_tokens for one in made] == [max_tokens or MOST - length for length in lengths]
    assert all(one.bad_words is made[0].bad_words and len(one.bad_words) >= 2 for one in made)


def test_the_longest_and_the_shortest_prompt_decide(front: Any) -> None:
    for lengths, max_tokens, fields, told in (
        ([1, MOST, 1], None, {}, "leaves no room"),
        ([1, MOST - 4, 1], 5, {}, "you requested 101 tokens"),
        ([1, MOST - 4, 1], None, {"min_tokens": 5}, "min_tokens is 5; it must not exceed max_tokens"),
        ([1, 0, 1], 5, {}, "prompt is empty"),
    ):
        with pytest.raises(ApiError, match=told):
            params(front, lengths, max_tokens, **fields)
