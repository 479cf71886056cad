"""When a request ends: the test of a run of newly accepted tokens.

One rule for one token or many: walk the run in order; at each token a stop id is tested before the length, and whatever stands
behind the end is thrown away; a run behind which nothing can follow ends in an error, if it does not end by itself.
``min_tokens`` is not tested here: the sampler cannot choose a stop id before it.
"""

from collections.abc import Sequence, Set
from typing import NamedTuple

from flashstep.request import FinishReason


class Verdict(NamedTuple):
    """What is kept of a run, and how the request ended with it (both None: it goes on)."""

    kept: tuple[int, ...]
    reason: FinishReason | None = None
    stop_token: int | None = None


def judge(run: Sequence[int], *, room: int, stop_ids: Set[int], failed: bool = False) -> Verdict:
    """Judge ``run``; the request may have ``room`` more tokens (at least 1) before its length ends it. ``failed``: its constraint
    lets nothing follow."""
    assert room >= 1, "a request without room has ended already"
    for index, token in enumerate(run):
        if token in stop_ids:
            return Verdict(tuple(run[: index + 1]), FinishReason.STOP, token)
        if index + 1 == room:
            return Verdict(tuple(run[:room]), FinishReason.LENGTH)
    return Verdict(tuple(run), FinishReason.ERROR if failed else None)
