"""Sessions: the same for the same seed, in lengths that were wished; and files, whose wrong lines are all named."""

import hashlib
import json
import time
from itertools import islice
from pathlib import Path

import pytest

from flashstep.bench.load.lengths import LEAD, Range, Words
from flashstep.bench.load.prompts import WARM_UP, PromptError, RandomPrompts, Session, read_prompts

WORDS = Words(tuple("alpha beta gamma delta epsilon zeta eta theta".split()), overhead=5)
PLAIN = RandomPrompts(input_len=Range(20, 40), output_len=Range(3, 9))


def sessions(
    source: RandomPrompts = PLAIN, number: int = 20, seed: int = 0, **options: object
) -> list[Session]:
    return list(islice(source.sessions(WORDS, seed, chat=True, **options), number))


def text(session: Session, turn: int = 0) -> str:
    return session.turns[turn].messages[-1]["content"]


def test_the_same_seed_gives_the_same_sessions_and_another_gives_others() -> None:
    assert sessions() == sessions()
    assert sessions(number=5) == sessions()[:5]
    assert not {text(session) for session in sessions()} & {text(session) for session in sessions(seed=1)}
    assert not {text(session) for session in sessions()} & {
        text(session) for session in sessions(stream=WARM_UP)
    }


def test_lengths_are_in_their_ranges_and_count_the_template() -> None:
    found = sessions(number=200)
    lengths = [session.turns[0].prompt_tokens for session in found]
    assert min(lengths) == 20 and max(lengths) == 40
    for session, length in zip(found, lengths, strict=True):
        assert len(text(session).split()) - 1 + WORDS.overhead == length
    assert {session.turns[0].output_len for session in found} == set(range(3, 10))


def test_a_prefix_is_shared_and_the_rest_is_not() -> None:
    source = RandomPrompts(input_len=Range(40, 40), output_len=Range(1, 1), prefix_len=10)
    words = [text(session).split() for session in sessions(source)]
    assert len({tuple(each[:11]) for each in words}) == 1
    assert len({tuple(each[11:]) for each in words}) == len(words)
    assert {len(each) for each in words} == {36}


def test_turns_have_pauses_and_answers_and_only_the_first_a_known_length() -> None:
    source = RandomPrompts(
        input_len=Range(20, 20), output_len=Range(4, 4), turns=Range(3, 3), think_ms=Range(500, 1500)
    )
    session = sessions(source, 1)[0]
    assert [turn.prompt_tokens for turn in session.turns] == [20, None, None]
    assert session.turns[0].think_s == 0.0
    assert all(0.5 <= turn.think_s <= 1.5 for turn in session.turns[1:])
    assert all(turn.answer is not None and len(turn.answer.split()) == 4 for turn in session.turns)
    assert [session.turn_key(index) for index in range(3)] == ["0/0", "0/1", "0/2"]


def test_a_prompt_shorter_than_its_template_is_refused() -> None:
    with pytest.raises(ValueError, match="it is at least 16"):
        sessions(RandomPrompts(input_len=Range(15, 40), output_len=Range(1, 1), prefix_len=10))


def test_unchecked_words_promise_no_length() -> None:
    unchecked = Words(WORDS.words, overhead=0, checked=False)
    session = next(PLAIN.sessions(unchecked, 0, chat=False))
    assert session.turns[0].prompt_tokens is None and session.turns[0].prompt.startswith(LEAD)


# ---- files -----------------------------------------------------------------------------------------------------------


def write(folder: Path, *lines: object) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return file


def test_a_file_of_each_kind_of_line(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        {"prompt": "p", "output_len": 7},
        {"id": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
        "",
        {
            "system": "s",
            "turns": [{"user": "a", "answer": "b", "output_len": 2}, {"user": "c", "think_s": 1.5}],
        },
    )
    one, two, three = read_prompts(file, output_len=3, chat=True, needs_answers=True).sessions
    assert (one.key, one.turns[0].output_len, text(one)) == ("1", 7, "p")
    assert (two.key, two.turns[0].output_len) == ("m", 3)
    assert [message["role"] for message in two.turns[0].messages] == ["system", "user"]
    assert three.key == "4" and [turn.output_len for turn in three.turns] == [2, 3]
    assert [message["role"] for message in three.turns[0].messages] == ["system", "user"]
    assert (three.turns[0].answer, three.turns[1].think_s, text(three, 1)) == ("b", 1.5, "c")


def test_every_wrong_line_of_a_file_is_named(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "{",
        {"promt": "p"},
        {},
        {"prompt": "p", "messages": []},
        {"messages": []},
        {"turns": []},
        {"turns": [{"user": "a"}, {"user": "b"}]},
        {"turns": [{"user": "a", "answer": "x"}, {"user": "b", "think_s": -1}]},
        {"prompt": "p", "output_len": 0},
        {"prompt": "p", "system": "s"},
        {"id": "twice", "prompt": "p"},
        {"id": "twice", "prompt": "p"},
    )
    with pytest.raises(PromptError) as told:
        read_prompts(file, output_len=None, chat=True, needs_answers=True)
    assert [f"line {number}:" in str(told.value) for number in range(1, 11)] == [True] * 10
    assert "two lines have the id 'twice'" in str(told.value) and "line 11" not in str(told.value)
    assert read_prompts(write(tmp_path, {"turns": [{"user": "a"}, {"user": "b"}]}), output_len=1, chat=True)


def test_names_of_requests_do_not_meet(tmp_path: Path) -> None:
    file = write(tmp_path, {"id": "a", "turns": [{"user": "x"}, {"user": "y"}]}, {"id": "a/0", "prompt": "z"})
    with pytest.raises(PromptError, match="two requests would be called 'a/0'"):
        read_prompts(file, output_len=None, chat=True)


def test_a_file_is_told_by_what_was_read(tmp_path: Path) -> None:
    file = write(tmp_path, *({"prompt": f"p{n}"} for n in range(20_000)))
    start_s = time.process_time()
    read = read_prompts(file, output_len=None, chat=True)
    assert time.process_time() - start_s < 5, "names are counted, not searched for"
    assert read.sha256 == hashlib.sha256(file.read_bytes()).hexdigest() and len(read.sessions) == 20_000


def test_a_chat_needs_a_chat_endpoint_and_a_file_must_be_there(tmp_path: Path) -> None:
    file = write(tmp_path, {"messages": [{"role": "user", "content": "u"}]})
    with pytest.raises(PromptError, match="--endpoint chat"):
        read_prompts(file, output_len=None, chat=False)
    with pytest.raises(PromptError, match="no such file"):
        read_prompts(tmp_path / "none", output_len=None, chat=True)
    with pytest.raises(PromptError, match="no lines"):
        read_prompts(write(tmp_path, ""), output_len=None, chat=True)
