"""Prompts made of block ids: equal beginnings are equal text, lengths are the recorded ones, the user has the last word."""

import asyncio
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from flashstep.bench.load.conversation import Prompts, rid, segments
from flashstep.bench.load.counting import by_tokenizer
from flashstep.bench.load.generate import Habits, generate, scaled
from flashstep.bench.load.lengths import Words, learn
from flashstep.bench.load.sessions import Message, Place, Session, Turn, shared

TINY = Path(__file__).parents[3] / "flashstep" / "tiny"
HABITS = msgspec.structs.replace(scaled(Habits(), 0.05), fan_out=0.2, context_tokens=4000)


@pytest.fixture(scope="module")
def words() -> Words:
    return asyncio.run(learn(by_tokenizer(TINY)))


@pytest.fixture(scope="module")
def drawn() -> list[Session]:
    found = generate(25, seed=11, habits=HABITS, most_turns=25)
    assert sum(len(session.agents) for session in found) > 5
    return found


def text(messages: list[dict[str, str]]) -> str:
    return "".join(message["content"] for message in messages)


def test_prompts_have_the_recorded_lengths_to_the_token(words: Words, drawn: list[Session]) -> None:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    for session in drawn:
        prompts = Prompts(session, words, run="r", rid=None)
        for number, stream in enumerate(session.streams):
            for place, turn in enumerate(stream.turns):
                messages = prompts.messages(Place(number, place))
                ids = [tokenizer.encode(each["content"], add_special_tokens=False).ids for each in messages]
                assert sum(map(len, ids)) == turn.input_tokens


def test_prompts_share_text_just_as_far_as_they_share_blocks(words: Words, drawn: list[Session]) -> None:
    """Also message by message: what both prompts have whole is the same message, so that a template cannot part them."""
    shrunk = 0
    for session in drawn:
        prompts = Prompts(session, words, run="r", rid="0" * 12)
        for number, stream in enumerate(session.streams):
            for place, (before, turn) in enumerate(pairwise(stream.turns)):
                one, two = prompts.messages(Place(number, place)), prompts.messages(Place(number, place + 1))
                common = shared(before.blocks, turn.blocks)
                shrunk += common < len(before.blocks)
                kept = text(one).split(" ")[: common * session.block_tokens + 1]
                assert text(two).split(" ")[: len(kept)] == kept
                assert (
                    text(two).split(" ")[: len(kept) + 40] != text(one).split(" ")[: len(kept) + 40]
                    or one == two
                )
                whole = sum(
                    part.last <= common and not part.tail
                    for part in list(segments(stream, session.block_tokens))[place]
                )
                assert two[:whole] == one[:whole]
    assert shrunk > 3, "contexts were compacted"


def test_the_user_has_the_last_word_and_nobody_speaks_before_the_user(drawn: list[Session]) -> None:
    roles = set()
    for session in drawn:
        for stream in session.streams:
            for parts in segments(stream, session.block_tokens):
                assert parts[-1].role == "user"
                assert next(part.role for part in parts if part.role != "system") == "user"
                assert all(part.last > part.first or part.tail for part in parts)
                assert all(after.first == before.last for before, after in pairwise(parts))
                roles |= {part.role for part in parts}
    assert roles == {"system", "user", "assistant"}


def made(
    *turns: tuple[int, tuple[int, ...], int], prefix_tokens: int = 0
) -> list[list[tuple[str, int, int, int]]]:
    """The messages of (input tokens, blocks, output tokens) turns."""
    session = Session(
        session="s",
        prefix_tokens=prefix_tokens,
        turns=tuple(
            Turn(at_s=i, input_tokens=n, blocks=b, output_tokens=o) for i, (n, b, o) in enumerate(turns)
        ),
    )
    return [[*map(tuple, parts)] for parts in segments(session.streams[0], 64)]


def test_the_answer_takes_whole_blocks_of_what_is_new() -> None:
    _, second = made((128, (1, 2), 65), (384, (1, 2, 3, 4, 5, 6), 1), prefix_tokens=10)
    assert second == [("system", 0, 1, 0), ("user", 1, 2, 0), ("assistant", 2, 4, 0), ("user", 4, 6, 0)]


def test_the_last_new_block_is_the_user_s_where_the_answer_would_take_all() -> None:
    _, second = made((64, (1,), 500), (192, (1, 2, 3), 1))
    assert second == [("user", 0, 1, 0), ("assistant", 1, 2, 0), ("user", 2, 3, 0)]


def test_a_cut_behind_the_system_prompt_begins_anew_with_the_user() -> None:
    _, second = made((192, (1, 2, 3), 70), (192, (1, 8, 9), 1), prefix_tokens=64)
    assert second == [("system", 0, 1, 0), ("user", 1, 3, 0)]


def test_a_cut_behind_an_answer_leaves_it_to_the_user() -> None:
    *_, third = made((64, (1,), 64), (192, (1, 2, 3), 1), (128, (1, 2), 1))
    assert third == [("user", 0, 1, 0), ("user", 1, 2, 0)]


def test_blocks_that_were_not_recorded_are_text_of_their_own() -> None:
    first, second = made((200, (1,), 8), (300, (1,), 8))
    assert first == [("user", 0, 1, 136)]
    assert second == [("user", 0, 1, 0), ("user", 1, 1, 236)]


def test_equal_ids_are_equal_text_in_a_session_and_in_all_of_them_where_these_share(words: Words) -> None:
    turn = Turn(at_s=0, output_tokens=1, input_tokens=64, blocks=(7,))

    def content(name: str, scope: str, run: str = "r") -> str:
        session = Session(session=name, turns=(turn,), scope=scope)  # ty: ignore[invalid-argument-type]
        return text(Prompts(session, words, run=run, rid=None).messages(Place(0, 0)))

    assert content("a", "session") == content("a", "session") != content("b", "session")
    assert content("a", "all") == content("b", "all") != content("b", "all", run="another")


def test_the_mark_is_the_first_user_s_and_recorded_text_stays(words: Words) -> None:
    said = (
        Message("system", "be brief"),
        Message("user", "hello"),
        Message("assistant", "yes"),
        Message("user", "go on"),
    )
    session = Session(session="s", turns=(Turn(at_s=0, output_tokens=1, messages=said),))
    messages = Prompts(session, words, run="r", rid=rid("r", "s", 0)).messages(Place(0, 0))
    assert [message["content"] for message in messages] == [
        "be brief",
        f"[rid:{rid('r', 's', 0)}]\n\nhello",
        "yes",
        "go on",
    ]
    assert len(rid("r", "s", 0)) == 12 and rid("r", "s", 0) != rid("r", "s", 1) != rid("q", "s", 1)


def test_turns_may_be_asked_for_in_any_order_and_each_is_made_when_it_is_asked_for(words: Words) -> None:
    session = max(generate(6, seed=2, habits=scaled(Habits(), 0.02)), key=lambda each: len(each.turns))
    places = [Place(0, turn) for turn in range(len(session.turns))]
    assert len(places) >= 9
    in_order, any_order = (
        Prompts(session, words, run="r", rid=None),
        Prompts(session, words, run="r", rid=None),
    )
    told = {place: in_order.messages(place) for place in places[:9]}
    for place in reversed(places[:9]):
        assert any_order.messages(place) == told[place]
