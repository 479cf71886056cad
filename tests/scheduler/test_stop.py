"""The finish check on whole accepted runs (case A11)."""

import pytest

from flashstep.request import FinishReason
from flashstep.scheduler.stop import judge

STOP, EOS = 7, 1
RUN = [10, 11, 12, 20, 21, 22]


@pytest.mark.parametrize(
    ("run", "kept", "reason", "token"),
    [
        ([10, 11, STOP, 20, 21, 22], 3, FinishReason.STOP, STOP),
        ([10, 11, 12, 20, 21, STOP], 5, FinishReason.LENGTH, None),
        ([10, 11, 12, 20, EOS, 22], 5, FinishReason.STOP, EOS),
        (RUN, 5, FinishReason.LENGTH, None),
        (RUN[:4], 4, None, None),
        ([EOS, STOP], 1, FinishReason.STOP, EOS),
        ([], 0, None, None),
    ],
)
def test_a_stop_goes_before_the_length_and_the_tail_is_thrown_away(run, kept, reason, token):
    verdict = judge(run, room=5, stop_ids={STOP, EOS})
    assert verdict.kept == tuple(run[:kept])
    assert (verdict.reason, verdict.stop_token) == (reason, token)


def test_no_room_is_our_mistake():
    with pytest.raises(AssertionError):
        judge([1], room=0, stop_ids=set())
