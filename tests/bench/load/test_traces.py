"""Traces on disk: either format, a folder of both, everything wrong told at once; the summary; logs made into traces."""

import json
from pathlib import Path

import msgspec
import pytest

from flashstep.bench.load import traces
from flashstep.bench.load.generate import Habits, generate
from flashstep.bench.load.logs import block_hashed
from flashstep.bench.load.sessions import Session, theoretical_hits

TINY = Path(__file__).parents[3] / "flashstep" / "tiny"
SESSION = {"session": "mine", "turns": [{"at_s": 0.0, "output_tokens": 4, "input_tokens": 70, "blocks": [5]}]}


def test_both_formats_give_what_was_written(tmp_path: Path) -> None:
    made = generate(5, seed=2, habits=Habits(), most_turns=8)
    for form in ("weka", "jsonl"):
        traces.write(tmp_path / form, made, form=form)
    assert traces.read(tmp_path / "jsonl") == made
    assert traces.read(tmp_path / "jsonl" / "sessions.jsonl") == made
    weka = traces.read(tmp_path / "weka")
    assert [session.streams for session in weka] == [session.streams for session in made]
    assert traces.digest(made) == traces.digest(traces.read(tmp_path / "jsonl"))


def test_a_folder_may_hold_both_and_other_files_are_left_alone(tmp_path: Path) -> None:
    traces.write(tmp_path, generate(2, seed=2, habits=Habits(), most_turns=3), form="weka")
    (tmp_path / "a.jsonl").write_text(json.dumps(SESSION) + "\n\n")
    (tmp_path / "README.md").write_text("not a trace")
    assert [session.session for session in traces.read(tmp_path)] == [
        "mine",
        "session-2-0000",
        "session-2-0001",
    ]


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    twice, bad = dict(SESSION), {"session": "bad", "turns": [{"at_s": -1, "output_tokens": 0}]}
    lines = [
        json.dumps(SESSION),
        json.dumps(twice),
        json.dumps(bad),
        '{"session": 3}',
        json.dumps(SESSION | {"x": 1}),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.json").write_text("{}")
    (tmp_path / "c.jsonl").write_text("")
    with pytest.raises(traces.TraceError) as caught:
        traces.read(tmp_path)
    for told in (
        "2 sessions are called 'mine'",
        "a.jsonl, session 'bad': turn 0: at_s is -1",
        "a.jsonl, session 'bad': turn 0: output_tokens is 0",
        "a.jsonl, session 'bad': turn 0: it has neither messages nor input_tokens",
        "a.jsonl, line 4: Expected `str`, got `int` - at `$.session`",
        "a.jsonl, line 5: Object contains unknown field `x`",
        "b.json: Object missing required field",
        "c.jsonl: it is empty",
    ):
        assert told in str(caught.value)


def test_a_path_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(traces.TraceError, match=r"no \.json and no \.jsonl file"):
        traces.read(tmp_path)
    with pytest.raises(traces.TraceError, match="cannot be read: No such file"):
        traces.read(tmp_path / "absent.jsonl")


def test_a_session_s_name_is_no_path(tmp_path: Path) -> None:
    (sound,) = generate(1, seed=1, habits=Habits(), most_turns=2)
    session = Session(session="../outside", turns=sound.turns)
    with pytest.raises(ValueError, match=r"'\.\./outside' cannot be a file's name"):
        traces.write(tmp_path / "in", [session], form="weka")
    assert not list(tmp_path.glob("*.json"))


def test_the_summary_counts_what_is_there() -> None:
    turns = [
        {"at_s": 0.0, "service_s": 1.0, "output_tokens": 10, "input_tokens": 128, "blocks": [1, 2]},
        {"at_s": 3.0, "service_s": 1.0, "output_tokens": 30, "input_tokens": 256, "blocks": [1, 2, 3, 4]},
    ]
    both = [msgspec.convert({"session": name, "turns": turns, "scope": "all"}, Session) for name in "ab"]
    found = traces.summary(both)
    assert (found["sessions"], found["requests"], found["sub_agents"]) == (2, 4, 0)
    assert found["theoretical_prefix_hit"] == pytest.approx(4 / 12)
    assert found["theoretical_prefix_hit_shared"] == pytest.approx((2 + 6) / 12)
    assert (found["pause_s"]["mean"], found["output_tokens"]["p50"], found["session_s"]["max"]) == (2, 20, 4)


def test_a_log_with_text_becomes_lengths_and_a_hash_chain(tmp_path: Path) -> None:
    long = "the model reads the file and tells what is in it " * 40
    first = [{"role": "system", "content": long}, {"role": "user", "content": "secret question " + long}]
    second = [*first, {"role": "assistant", "content": long}, {"role": "user", "content": long}]
    other = [{"role": "system", "content": long}, {"role": "user", "content": "something else " + long}]
    lines = [
        {
            "session": "a",
            "turns": [{"at_s": i, "output_tokens": 9, "messages": m} for i, m in enumerate((first, second))],
        },
        {"session": "b", "turns": [{"at_s": 0, "output_tokens": 9, "messages": other}]},
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    a, b = block_hashed(traces.read(tmp_path), TINY)
    assert not any(turn.messages for turn in (*a.turns, *b.turns))
    one, two = (turn.blocks for turn in a.turns)
    assert two[: len(one)] == one and len(two) > len(one) and len(set(two)) == len(two)
    same = sum(x == y for x, y in zip(one, b.turns[0].blocks, strict=False))
    assert same == a.prefix_tokens // 64 > 0, "both begin with the same system prompt, and with nothing else"
    assert len(one) == (a.turns[0].input_tokens or 0) // 64
    seen: set[int] = set()
    theoretical_hits(a, seen)
    assert next(iter(theoretical_hits(b, seen).values())).hit == same
    traces.write(tmp_path / "out", [a, b], form="jsonl")
    assert b"secret" not in (tmp_path / "out" / "sessions.jsonl").read_bytes()


def test_names_of_conversations_do_not_meet(tmp_path: Path) -> None:
    """A request's key begins with its conversation's name, and keys are unique in a ledger."""
    turn = {"at_s": 0.0, "output_tokens": 1, "input_tokens": 1}
    agent = {"name": "b", "at_s": 0.0, "ended_s": 1.0, "turns": [turn]}
    lines = [{"session": "a", "turns": [turn], "agents": [agent]}, {"session": "a::sa:b", "turns": [turn]}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(traces.TraceError, match="2 sessions are called 'a::sa:b'"):
        traces.read(tmp_path)
