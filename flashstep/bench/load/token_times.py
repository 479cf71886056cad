"""When each token came: the tokens of a chunk, spread over the gap before it.

With speculation, or under load, a chunk holds several tokens, so that gaps between chunks are not times per token (E13, H14).
Takes ``Answered``; gives seconds, and whence the number of tokens in each chunk is known. Knows no statistics.
"""

from typing import Literal, NamedTuple

import numpy as np

from flashstep.bench.load.client import Answered

Source = Literal["events", "one a chunk"]


class TokenTimes(NamedTuple):
    """``at_s`` ascending. ``source`` "events": each event said how many tokens it brings (continuous usage, token ids);
    "one a chunk": there are as many content chunks as the server counted tokens."""

    at_s: np.ndarray
    source: Source


def token_times(answered: Answered) -> TokenTimes | None:
    """Of each token that became text; None where nothing tells how many tokens a chunk has.

    The tokens of the first chunk all came with it. Those of a later one are spread evenly over the time since the chunk
    before it. Tokens of an event without content (a role, half a character) came with the next content. Tokens after the last
    content (an end of sequence) have no time.
    """
    content = [chunk for chunk in answered.chunks if chunk.is_content]
    if not content:
        return None
    at_s = np.array([chunk.at_s for chunk in content])
    if any(chunk.tokens is None for chunk in content):
        return TokenTimes(at_s, "one a chunk") if len(content) == answered.output_tokens else None
    so_far = np.cumsum([chunk.tokens or 0 for chunk in answered.chunks])
    ends = so_far[[place for place, chunk in enumerate(answered.chunks) if chunk.is_content]]
    counts = np.diff(ends, prepend=0)
    gaps_s = np.diff(at_s, prepend=at_s[0])
    place = np.arange(ends[-1]) - np.repeat(ends - counts, counts) + 1  # of each token in its chunk, from 1
    share = place / np.repeat(counts, counts)
    return TokenTimes(np.repeat(at_s - gaps_s, counts) + np.repeat(gaps_s, counts) * share, "events")
