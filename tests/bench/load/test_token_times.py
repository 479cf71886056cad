"""Tokens of a chunk are spread over the gap before it, where somebody says how many there are."""

import pytest

from flashstep.bench.load.client import Answered, Chunk
from flashstep.bench.load.token_times import token_times


def answered(*chunks: Chunk, output_tokens: int | None = None) -> Answered:
    return Answered(key="k", sent_s=0.0, ended_s=9.0, chunks=chunks, output_tokens=output_tokens)


def content(at_s: float, tokens: int | None) -> Chunk:
    return Chunk(at_s, tokens, True, 10)


def other(at_s: float, tokens: int | None) -> Chunk:
    return Chunk(at_s, tokens, False, 10)


def test_a_chunk_of_several_tokens_is_spread_over_its_gap() -> None:
    found = token_times(answered(content(1.0, 2), content(2.0, 1), content(5.0, 3)))
    assert found is not None and found.source == "events"
    assert found.at_s == pytest.approx([1.0, 1.0, 2.0, 3.0, 4.0, 5.0])


def test_tokens_without_content_come_with_the_next_content() -> None:
    """A role event counts the first token (as ours and vLLM's do); half a character waits for its other half."""
    found = token_times(
        answered(other(1.0, 1), content(1.0, 0), other(2.0, 1), content(3.0, 1), other(4.0, 1))
    )
    assert found is not None
    assert found.at_s == pytest.approx([1.0, 2.0, 3.0]), "the end of sequence has no text, and no time"


def test_as_many_chunks_as_tokens_are_one_token_each() -> None:
    found = token_times(answered(content(1.0, None), content(2.0, None), output_tokens=2))
    assert found is not None and found.source == "one a chunk"
    assert found.at_s.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("output_tokens", [None, 3])
def test_where_nothing_tells_there_are_no_times(output_tokens: int | None) -> None:
    assert token_times(answered(content(1.0, None), content(2.0, None), output_tokens=output_tokens)) is None
    assert token_times(answered(other(1.0, 1))) is None
