"""The weka format: read strictly, written so that it reads the same, flat lists of several agents' requests taken apart."""

import json
from typing import Any

import msgspec
import pytest

from flashstep.bench.load import weka
from flashstep.bench.load.generate import Habits, generate
from flashstep.bench.load.sessions import Message, Session, Turn


def call(t: float, *blocks: int, api: float = 1.0, **changes: Any) -> dict[str, Any]:
    return {
        "t": t,
        "type": "s",
        "model": "m",
        "in": 64 * len(blocks),
        "out": 5,
        "hash_ids": list(blocks),
        "api_time": api,
        **changes,
    }


def trace(*requests: dict[str, Any], **changes: Any) -> bytes:
    whole = {
        "id": "s",
        "models": ["m"],
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": list(requests),
    }
    return json.dumps(whole | changes).encode()


def subagent(t: float, *requests: dict[str, Any], **changes: Any) -> dict[str, Any]:
    known = {"t": t, "type": "subagent", "agent_id": "a1", "subagent_type": "Explore", "status": "completed"}
    return known | {"requests": list(requests), "models": ["m"]} | changes


def test_what_is_written_reads_the_same() -> None:
    habits = msgspec.structs.replace(Habits(), fan_out=0.3, context_tokens=60_000)
    for session in generate(12, seed=1, habits=habits, most_turns=30):
        back = weka.decode(weka.encode(session))
        assert back.streams == session.streams
        assert back.session == session.session


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (trace(call(0, 1), note="x"), "unknown field `note`"),
        (trace(call(0, 1, extra=1)), r"unknown field `extra` - at `\$.requests"),
        (trace(call(0, 1), hash_id_scope="global"), "hash_id_scope"),
        (trace(call(0, 1, type="x")), "requests"),
        (trace(subagent(0, call(0, 1), extra=1)), "unknown field `extra`"),
        (b"{", "truncated"),
    ],
)
def test_extra_keys_and_other_shapes_are_errors_that_say_where(data: bytes, told: str) -> None:
    with pytest.raises(msgspec.DecodeError, match=told):
        weka.decode(data)


def test_ids_behind_the_last_full_block_are_left_out_and_an_empty_answer_becomes_one_token() -> None:
    session = weka.decode(trace(call(0, 1, 2, 3, **{"in": 130, "out": 0}), tool_tokens=60, system_tokens=4))
    (turn,) = session.turns
    assert (turn.input_tokens, turn.blocks, turn.output_tokens, session.prefix_tokens) == (130, (1, 2), 1, 64)


def test_a_sub_agent_s_older_times_count_from_its_begin_and_its_end_is_told_or_its_last_answer_s() -> None:
    told = weka.decode(trace(call(0, 1), subagent(100, call(5, 9, api=2), duration_ms=9000)))
    assert (told.agents[0].turns[0].at_s, told.agents[0].ended_s) == (105, 109)
    untold = weka.decode(trace(call(0, 1), subagent(100, call(105, 9, api=2), agent_id="b")))
    assert (untold.agents[0].turns[0].at_s, untold.agents[0].ended_s) == (105, 107)


def test_a_flat_list_of_two_agents_is_taken_apart_by_who_was_busy_and_what_they_share() -> None:
    flat = weka.decode(
        trace(
            call(0, 1, 2),
            call(2, 1, 2, 3),
            call(2.5, 1, 8, api=2),  # while the first is busy, with another context
            call(4, 1, 2, 3, 4),
            call(5, 1, 8, 9),
        )
    )
    assert [turn.blocks[-1] for turn in flat.turns] == [2, 3, 4]
    (other,) = flat.agents
    assert [turn.blocks[-1] for turn in other.turns] == [8, 9]
    assert flat.name_of(1) == "s::sa:split-001"


def test_a_shorter_context_goes_on_where_nobody_comes_back_to_the_longer_one() -> None:
    compacted = weka.decode(trace(call(0, 1, 2, 3), call(2, 1, 9), call(4, 1, 9, 5)))
    assert len(compacted.turns) == 3 and not compacted.agents
    forked = weka.decode(trace(call(0, 1, 2, 3), call(2, 1, 9), call(4, 1, 2, 3, 4)))
    assert [turn.blocks[-1] for turn in forked.turns] == [3, 4]
    assert [turn.blocks[-1] for turn in forked.agents[0].turns] == [9]


def test_a_prompt_that_was_sent_before_the_last_answer_is_no_continuation() -> None:
    both = weka.decode(trace(call(0, 1, 2, api=2), call(1, 1, 2, 3)))
    assert len(both.turns) == 1 and len(both.agents) == 1
    assert len(weka.decode(trace(call(0, 1, 2, api=1), call(1, 1, 2, 3))).turns) == 2


def test_another_model_is_another_conversation() -> None:
    mixed = weka.decode(trace(call(0, 1, 2), call(2, 1, 2, 3, model="small")))
    assert len(mixed.turns) == 1 and len(mixed.agents) == 1


def test_real_text_cannot_be_written() -> None:
    turn = Turn(at_s=0, output_tokens=1, messages=(Message("user", "hello"),))
    with pytest.raises(ValueError, match="s has real messages"):
        weka.encode(Session(session="s", turns=(turn,)))
