"""Drawn sessions: the same for a seed, like the published figures, within the limits that were asked."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest

from flashstep.bench.load import traces
from flashstep.bench.load.generate import FIRST_FREE, Habits, Lognormal, generate, scaled
from flashstep.bench.load.sessions import Session, problems


@pytest.fixture(scope="module")
def many() -> list[Session]:
    return generate(400, seed=1, habits=Habits())


def test_a_seed_gives_the_same_sessions_and_more_begin_with_them() -> None:
    three = generate(3, seed=9, habits=Habits(), most_turns=20)
    assert generate(5, seed=9, habits=Habits(), most_turns=20)[:3] == three
    assert generate(3, seed=10, habits=Habits(), most_turns=20) != three


def test_drawn_sessions_are_sound(many: list[Session]) -> None:
    assert [problem for session in many[:100] for problem in problems(session)] == []


def test_they_are_like_the_published_figures(many: list[Session]) -> None:
    """Within a third, where four hundred sessions are too few for more (the sources are in generate.py)."""
    found = traces.summary(many)
    steps = found["session_turns"]
    assert steps["p50"] == pytest.approx(15, rel=0.35) and steps["p90"] == pytest.approx(135, rel=0.35)
    assert found["output_tokens"]["mean"] == pytest.approx(523, rel=0.15)
    pauses = [
        turn.at_s - before.ended_s
        for session in many
        if not session.agents  # their parents wait for them on top
        for before, turn in pairwise(session.turns)
    ]
    shares = [np.mean(np.array(pauses) < limit) for limit in (1.6, 8.6, 44, 738)]
    assert shares == pytest.approx([0.5, 0.75, 0.9, 0.99], abs=0.06)
    assert 0.94 < found["theoretical_prefix_hit"] < 0.98, "96.8% in the AgentX traces of April"


def test_contexts_are_compacted_below_the_limit_and_keep_their_system_prompt(many: list[Session]) -> None:
    habits = Habits()
    longest = max(turn.input_tokens or 0 for session in many for turn in session.turns)
    assert longest <= habits.compact_at * habits.context_tokens + habits.most_answer_tokens
    prefix = many[0].turns[0].blocks[: many[0].prefix_tokens // 64]
    cuts = 0
    for session in many:
        for before, turn in pairwise(session.turns):
            assert turn.blocks[: len(prefix)] == prefix
            cuts += turn.blocks[: len(before.blocks)] != before.blocks
    assert cuts > 10


def test_sessions_share_their_system_prompt_and_no_other_block(many: list[Session]) -> None:
    own = [
        {
            block
            for stream in session.streams
            for turn in stream.turns
            for block in turn.blocks
            if block >= FIRST_FREE
        }
        for session in many[:50]
    ]
    assert sum(map(len, own)) == len(set.union(*own))


def test_sub_agents_run_side_by_side_and_their_parent_waits(many: list[Session]) -> None:
    overlapping = 0
    for session in many:
        for stream in session.streams[1:]:
            assert (
                stream.before is None or session.turns[stream.before].at_s >= stream.turns[-1].ended_s - 0.01
            )
            assert stream.after is not None and stream.before == stream.after + 1
        overlapping += sum(a.at_s == b.at_s for a, b in pairwise(session.agents))
    assert overlapping > 100


def test_scaling_changes_tokens_and_nothing_else() -> None:
    small = generate(30, seed=4, habits=scaled(Habits(), 0.02), most_turns=20)
    large = generate(30, seed=4, habits=Habits(), most_turns=20)
    assert traces.summary(small)["requests"] == traces.summary(large)["requests"]
    ratio = traces.summary(small)["input_tokens"]["mean"] / traces.summary(large)["input_tokens"]["mean"]
    assert ratio == pytest.approx(0.02, rel=0.15)
    assert scaled(Habits(), 0.02).block_tokens == 64


def test_most_turns_cuts_sessions_and_sub_agents() -> None:
    habits = msgspec.structs.replace(
        Habits(), turns=Lognormal(50, 0.1), agent_turns=Lognormal(50, 0.1), fan_out=0.5
    )
    for session in generate(5, seed=1, habits=habits, most_turns=7):
        assert [len(stream.turns) for stream in session.streams] == [7] * len(session.streams)
