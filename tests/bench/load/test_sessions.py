"""Recorded sessions: who waits for whom, what a cache without limits would have, what contradicts itself."""

import math

import pytest

from flashstep.bench.load.sessions import (
    Agent,
    Message,
    Place,
    Session,
    Turn,
    in_order,
    problems,
    theoretical_hits,
)


def turn(at_s: float, *blocks: int, service_s: float = 1.0, tail: int = 0) -> Turn:
    return Turn(
        at_s=at_s, service_s=service_s, input_tokens=64 * len(blocks) + tail, output_tokens=8, blocks=blocks
    )


def session(*turns: Turn, agents: tuple[Agent, ...] = ()) -> Session:
    return Session(session="s", turns=turns, agents=agents)


def test_a_sub_agent_begins_behind_the_last_turn_before_it_and_the_first_turn_after_its_end_waits() -> None:
    own = (turn(0, 1), turn(6, 1, 2), turn(20, 1, 2, 3))
    ends = {"short": 6.0, "long": 12.5, "endless": 24.0}
    agents = tuple(Agent(name=name, at_s=2, ended_s=end, turns=(turn(2, 9),)) for name, end in ends.items())
    _, *found = session(*own, agents=agents).streams
    assert [(stream.name, stream.after, stream.before) for stream in found] == [
        ("short", 0, 1),
        ("long", 0, 2),
        ("endless", 0, None),
    ]


def test_a_sub_agent_before_the_first_turn_is_behind_none() -> None:
    early = Agent(name="early", at_s=0, ended_s=1, turns=(turn(0, 9),))
    (_, stream) = session(turn(5, 1), agents=(early,)).streams
    assert (stream.after, stream.before) == (None, 0)


def test_hits_are_leading_blocks_that_any_earlier_prompt_of_the_session_had() -> None:
    agent = Agent(name="a", at_s=1.5, ended_s=4, turns=(turn(2, 1, 9), turn(3, 9, 1)))
    whole = session(turn(0, 1, 2), turn(5, 1, 2, 9, 4), turn(6, 7, 1, 2), agents=(agent,))
    assert in_order(whole) == [Place(0, 0), Place(1, 0), Place(1, 1), Place(0, 1), Place(0, 2)]
    hits = theoretical_hits(whole)
    assert [hits[place] for place in in_order(whole)] == [(0, 2), (1, 2), (2, 2), (3, 4), (0, 3)]


def test_blocks_of_other_sessions_count_where_they_are_shared() -> None:
    seen = {1}
    assert theoretical_hits(session(turn(0, 1, 2)), seen)[Place(0, 0)] == (1, 2)
    assert seen == {1, 2}


def test_a_sound_session_has_no_problems() -> None:
    assert problems(session(turn(0, 1), turn(1, 1, 2, tail=5))) == []


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (session(), "it has no turns"),
        (session(turn(2, 1), turn(1, 1)), "turn 1 is at 1 s, before the turn ahead of it (2 s)"),
        (session(turn(math.nan, 1)), "turn 0: at_s is nan; it must be a number of seconds, not below 0"),
        (
            session(turn(0, 1, service_s=-1)),
            "turn 0: service_s is -1; it must be a number of seconds, not below 0",
        ),
        (
            session(Turn(at_s=0, output_tokens=0, input_tokens=1)),
            "turn 0: output_tokens is 0; it must be at least 1",
        ),
        (session(Turn(at_s=0, output_tokens=1)), "turn 0: it has neither messages nor input_tokens"),
        (
            session(Turn(at_s=0, output_tokens=1, input_tokens=0)),
            "turn 0: input_tokens is 0; it must be at least 1",
        ),
        (
            session(Turn(at_s=0, output_tokens=1, input_tokens=64, blocks=(1, 2))),
            "turn 0: 2 blocks of 64 tokens in a prompt of 64",
        ),
        (
            session(Turn(at_s=0, output_tokens=1, input_tokens=9, messages=(Message("user", "x"),))),
            "turn 0: it has messages, and input_tokens or blocks beside them: give one or the other",
        ),
        (
            session(turn(0, 1), Turn(at_s=1, output_tokens=1, messages=(Message("user", "x"),))),
            "some of its turns have messages, and some lengths: a session has one or the other",
        ),
        (
            session(turn(0, 1), agents=(Agent(name="a", at_s=3, ended_s=2, turns=(turn(3, 1),)),)),
            "sub-agent 'a' ends at 2 s and begins at 3 s",
        ),
        (
            session(turn(0, 1), agents=(Agent(name="a", at_s=1, ended_s=2, turns=()),)),
            "sub-agent 'a' has no turns",
        ),
        (
            session(turn(0, 1), agents=(Agent(name="", at_s=1, ended_s=2, turns=(turn(1, 1),)),)),
            "a sub-agent has no name",
        ),
        (
            session(turn(0, 1), agents=2 * (Agent(name="a", at_s=1, ended_s=2, turns=(turn(1, 1),)),)),
            "two sub-agents are called 'a'",
        ),
    ],
)
def test_what_contradicts_itself_is_told(wrong: Session, told: str) -> None:
    assert told in problems(wrong)
