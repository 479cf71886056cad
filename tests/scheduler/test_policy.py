"""The scheduler's choices as pure functions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashstep.scheduler.policy import order_key, share_rows, without_overtaking
from tests.scheduler.driving import request

WANTS = st.lists(st.integers(1, 3000), min_size=1, max_size=40)


@given(WANTS, st.integers(0, 2048))
def test_rows_are_all_given_or_nobody_wants_more(wants, rows):
    grants = share_rows(wants, rows)
    assert all(0 <= grant <= want for grant, want in zip(grants, wants, strict=True))
    assert sum(grants) == min(rows, sum(wants))


@given(WANTS, st.integers(0, 2048))
def test_the_oldest_and_the_shortest_each_get_half(wants, rows):
    grants = share_rows(wants, rows)
    assert grants[0] >= min(wants[0], -(-rows // 2))
    shortest = wants.index(min(wants))
    assert grants[shortest] >= min(wants[shortest], rows // 2)


@given(st.integers(1, 500), st.integers(1, 40), st.integers(0, 2048))
def test_equal_prompts_are_served_in_order(want, count, rows):
    grants = share_rows([want] * count, rows)
    assert grants == sorted(grants, reverse=True)


def test_a_lone_prompt_gets_everything():
    assert share_rows([5000], 2048) == [2048]


@given(WANTS, st.integers(0, 2048), st.data())
def test_nobody_waiting_is_overtaken(wants, rows, data):
    first = data.draw(st.integers(0, len(wants)))
    grants = share_rows(wants, rows)
    fair = without_overtaking(grants, first_waiting=first)
    waiting = [grant > 0 for grant in fair[first:]]
    assert waiting == sorted(waiting, reverse=True)
    assert sum(fair) <= sum(grants)
    assert all(grant <= want for grant, want in zip(fair, wants, strict=True))
    if fair[: len(fair)] != grants and sum(grants) >= len(wants):
        assert sum(fair) == sum(grants)


def test_order_keys():
    old, new = request("a", (1,), arrival=5.0, priority=3), request("b", (1,), arrival=1.0, priority=3)
    assert order_key(old, policy="fcfs", number=0) < order_key(new, policy="fcfs", number=1)
    assert order_key(old, policy="priority", number=0) > order_key(new, policy="priority", number=1)
    with pytest.raises(ValueError, match="lifo"):
        order_key(old, policy="lifo", number=0)
