"""A job's states: what each transition leaves behind, and which are not allowed."""

import pytest

from flashstep.cache.prefix import NO_PREFIX, Chain, Prefix
from flashstep.scheduler.states import Job, State, Tables
from tests.scheduler.driving import request


def job(prompt=(5, 6, 7), limit: int = 4) -> Job:
    return Job(request("r", prompt), limit=limit, stop_ids=frozenset(), chain=Chain(4, salt=""), order=(0,))


def test_a_job_runs_through_its_states():
    one = job()
    assert (one.state, one.wanted, one.tables) == (State.WAITING, 3, None)
    one.admit(Tables(2, prefix=NO_PREFIX), prefix=NO_PREFIX, now=1.0)
    assert not one.plan_rows(2, step=0)
    assert (one.state, one.wanted) == (State.PREFILLING, 1)
    assert one.plan_rows(1, step=1)
    assert (one.state, one.placeholders, one.wanted, one.length) == (State.DECODING, 1, 1, 4)
    one.placeholders -= 1
    one.learn((9,), now=2.0)
    assert (one.tokens, one.length, one.first_token_at) == ([5, 6, 7, 9], 4, 2.0)
    tables = one.finish()
    assert (tables.slot, one.tables, one.state) == (2, None, State.FINISHED)


def test_a_preempted_job_has_everything_to_compute_again_and_owns_nothing():
    one = job()
    one.admit(Tables(0, prefix=NO_PREFIX), prefix=NO_PREFIX, now=1.0)
    one.plan_rows(3, step=0)
    one.preempt()
    assert (one.state, one.tables, one.computed, one.wanted, one.preemptions) == (
        State.WAITING,
        None,
        0,
        4,
        1,
    )
    prefix = Prefix(tokens=4, blocks=(7,), window_blocks=(3,))
    one.admit(Tables(1, prefix=prefix), prefix=prefix, now=5.0)
    assert (one.computed, one.registered, one.admitted_at, one.cached_tokens) == (4, 1, 1.0, 0)


def test_a_bounded_hit_starts_a_window_before_its_end():
    one = job(tuple(range(20)))
    prefix = Prefix(tokens=16, blocks=(1, 2, 3, 4), window_base=2, replay=8)
    one.admit(Tables(0, prefix=prefix), prefix=prefix, now=0.0)
    assert (one.computed, one.cached_tokens, one.replayed_tokens, one.tables.window_end) == (8, 16, 8, 2)


def test_a_job_is_exhausted_by_what_is_known_and_what_is_planned():
    one = job(limit=2)
    one.admit(Tables(0, prefix=NO_PREFIX), prefix=NO_PREFIX, now=0.0)
    one.plan_rows(3, step=0)
    assert not one.exhausted
    one.plan_rows(1, step=1)
    assert one.exhausted


@pytest.mark.parametrize("move", ["plan", "preempt", "admit", "finish"])
def test_moves_out_of_order_are_assertions(move):
    one = job()
    with pytest.raises(AssertionError):
        if move == "plan":
            one.plan_rows(1, step=0)
        elif move == "preempt":
            one.preempt()
        elif move == "admit":
            one.admit(Tables(0, prefix=NO_PREFIX), prefix=NO_PREFIX, now=0.0)
            one.admit(Tables(0, prefix=NO_PREFIX), prefix=NO_PREFIX, now=0.0)
        else:
            one.finish()
            one.finish()


def test_tables_tell_each_block_once_and_slide():
    prefix = Prefix(tokens=8, blocks=(1, 2), window_blocks=(8,), window_base=1)
    tables = Tables(0, prefix=prefix)
    tables.blocks += [3]
    tables.window += [9]
    assert tables.news() == ((1, 2, 3), (8, 9))
    assert tables.news() == ((), ())
    assert tables.slide(1) == []
    assert tables.slide(2) == [8]
    tables.window += [5]
    assert (tables.news(), tables.window_end) == (((), (5,)), 4)
