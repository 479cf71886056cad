"""Prompts of a recorded session: the messages of each turn, made from block ids so that equal beginnings are equal text.

A prompt is its system prompt, then questions and recorded answers by turns; what the model really answers is left out, so that
the next prompt never depends on it (H8). Takes a ``Session`` and ``Words``; gives messages. Knows no server and no time.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from flashstep.bench.load.lengths import Words
from flashstep.bench.load.sessions import Place, Session, Stream, Turn, shared

RID_DIGITS = 12


class Segment(NamedTuple):
    """A message in the making: blocks ``first`` to ``last`` of the prompt, then ``tail`` tokens that are no full block."""

    role: str
    first: int
    last: int
    tail: int


def segments(stream: Stream, block_tokens: int) -> Iterator[tuple[Segment, ...]]:
    """The messages of one turn after another, as places in its prompt; made as they are asked for, since each has all before it.

    From one turn to the next, what both prompts begin with stays as it was; of the rest, as much as the last answer had is the
    assistant's, in whole blocks, and what remains is the user's, who always has the last word.
    """
    parts = _first(stream, block_tokens)
    yield parts
    for last, turn in itertools.pairwise(stream.turns):
        parts = _next(parts, last, turn, block_tokens)
        yield parts


def _parts(turn: Turn, block_tokens: int) -> tuple[int, int]:
    """Full blocks of a prompt that have ids, and the tokens behind them."""
    tokens = turn.input_tokens or 0
    full = min(len(turn.blocks), tokens // block_tokens)
    return full, tokens - full * block_tokens


def _first(stream: Stream, block_tokens: int) -> tuple[Segment, ...]:
    full, tail = _parts(stream.turns[0], block_tokens)
    system = min(math.ceil(stream.prefix_tokens / block_tokens), full)
    begun = [Segment("system", 0, system, 0)] if system else []
    if full > system or tail:
        begun.append(Segment("user", system, full, tail))
    return tuple(begun)


def _next(before: tuple[Segment, ...], last: Turn, turn: Turn, block_tokens: int) -> tuple[Segment, ...]:
    """The messages of ``turn``, behind those of ``last``."""
    full, tail = _parts(turn, block_tokens)
    common = min(shared(last.blocks, turn.blocks), full)
    kept = [
        part if part.last <= common and not part.tail else part._replace(last=min(part.last, common), tail=0)
        for part in before
        if part.first < common
    ]
    asked = any(part.role == "user" for part in kept)
    answer = min(math.ceil(last.output_tokens / block_tokens), full - common) if asked else 0
    if answer and answer == full - common and not tail:
        answer -= 1
    if answer:
        kept.append(Segment("assistant", common, common + answer, 0))
    if full > common + answer or tail:
        kept.append(Segment("user", common + answer, full, tail))
    elif kept and kept[-1].role == "assistant":  # nothing new, and the cut is behind an answer
        kept[-1] = kept[-1]._replace(role="user")
    return tuple(kept)


class Prompts:
    """The prompts of one replay of ``session``.

    Text depends on ``run``: what an earlier run left in a server's cache is no hit. ``rid`` (None: none) is a mark at the begin
    of the first user's message, "[rid:...]" and a blank line: within a run, a replay hits what its own earlier turns left and the
    system prompt, and nothing else of another replay, as AgentX has it (H5).
    """

    def __init__(self, session: Session, words: Words, *, run: str, rid: str | None) -> None:
        self._session = session
        self._words = words
        self._run = run
        self._mark = "" if rid is None else f"[rid:{rid}]\n\n"
        self._at: dict[int, tuple[int, Iterator[tuple[Segment, ...]], tuple[Segment, ...]]] = {}
        self._texts: dict[int, str] = {}

    def messages(self, place: Place) -> list[dict[str, str]]:
        """Of one turn: recorded ones as they are, or made ones of the recorded length."""
        turn = self._session.streams[place.stream].turns[place.turn]
        if turn.messages:
            made = [{"role": message.role, "content": message.content} for message in turn.messages]
        else:
            parts = self._parts(place)
            made = [{"role": part.role, "content": self._content(part, turn.blocks, place)} for part in parts]
        asked = next((message for message in made if message["role"] == "user"), made[0])
        asked["content"] = self._mark + asked["content"]
        return made

    def _parts(self, place: Place) -> tuple[Segment, ...]:
        """Of one turn: turns come one after another, and only for an earlier one it is all made again."""
        stream = self._session.streams[place.stream]
        at, following, parts = self._at.get(place.stream, (-1, iter(()), ()))
        if at < 0 or place.turn < at:
            at, following = -1, segments(stream, self._session.block_tokens)
        while at < place.turn:
            at, parts = at + 1, next(following)
        self._at[place.stream] = at, following, parts
        return parts

    def _content(self, part: Segment, blocks: tuple[int, ...], place: Place) -> str:
        text = "".join([self._block(block) for block in blocks[part.first : part.last]])
        if part.tail:
            text += _text(
                self._words, part.tail, f"{self._run}:{self._session.session}:{place.stream}:{place.turn}"
            )
        return text

    def _block(self, block: int) -> str:
        if block not in self._texts:
            scope = "" if self._session.scope == "all" else self._session.session
            self._texts[block] = _text(
                self._words, self._session.block_tokens, f"{self._run}:{scope}:{block}"
            )
        return self._texts[block]


def _text(words: Words, tokens: int, key: str) -> str:
    """Equal keys give equal text, in every process."""
    drawn = hashlib.shake_256(key.encode()).digest(
        2 * tokens
    )  # a prompt has thousands of keys: no generator is as quick
    return words.spelled(np.frombuffer(drawn, dtype="<u2") % len(words.words))


def rid(run: str, session: str, replay: int) -> str:
    """The mark of one replay of a session in one run."""
    return hashlib.sha256(f"{run}:{session}:{replay}".encode()).hexdigest()[:RID_DIGITS]
