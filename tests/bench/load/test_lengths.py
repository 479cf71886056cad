"""Texts of exact lengths: by the tiny model's own tokenizer, by one that knows other words, and where nobody counts."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from flashstep.bench.load.lengths import CANDIDATES, ENOUGH, FEWEST, LEAD, Range, learn

TINY = Tokenizer.from_file(str(Path(__file__).parents[3] / "flashstep" / "tiny" / "tokenizer.json"))
TEMPLATE = 11


class Counting:
    """A server's count of a prompt, and how often it was asked. ``split`` words are two tokens."""

    def __init__(self, split: frozenset[str] = frozenset()) -> None:
        self._split = split
        self.asked = 0

    async def __call__(self, text: str) -> int:
        self.asked += 1
        return TEMPLATE + len(text.split()) + sum(word in self._split for word in text.split())


async def tiny_count(text: str) -> int:
    return TEMPLATE + len(TINY.encode(text).ids)


@pytest.mark.parametrize("length", [1, 2, 100, 3000])
async def test_a_text_has_exactly_the_tokens_wished(length: int) -> None:
    words = await learn(tiny_count)
    assert words.overhead == await tiny_count(LEAD) and len(words.words) >= ENOUGH
    text = LEAD + words.text(length, np.random.default_rng(length))
    assert await tiny_count(text) == words.overhead + length


async def test_one_question_is_enough_where_all_words_are_tokens() -> None:
    count = Counting()
    await learn(count)
    assert count.asked < 8


async def test_words_of_several_tokens_are_found_and_left_out() -> None:
    split = frozenset(CANDIDATES[::2])
    count = Counting(split)
    words = await learn(count)
    assert not split & set(words.words) and len(words.words) >= FEWEST


async def test_a_tokenizer_without_such_words_is_refused() -> None:
    with pytest.raises(ValueError, match="--prompts FILE"):
        await learn(Counting(frozenset(CANDIDATES[FEWEST - 1 :])))


async def test_where_nobody_counts_lengths_are_not_promised() -> None:
    async def silent(_text: str) -> None:
        return None

    words = await learn(silent)
    assert not words.checked and words.overhead == 0


def test_ranges() -> None:
    assert Range.parse("7") == Range(7, 7) and Range.parse("7:9") == Range(7, 9)
    drawn = {Range(7, 9).draw(np.random.default_rng(n)) for n in range(60)}
    assert drawn == {7, 8, 9}
    for text in ("", "x", "7:", ":7", "9:7", "-1", "1.5", "7:x"):
        with pytest.raises(ValueError):
            Range.parse(text)
    with pytest.raises(ValueError, match="below 1"):
        Range.parse("0", least=1)
