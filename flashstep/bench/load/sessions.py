"""Recorded sessions of agents: what was asked when, how long prompts and answers were, and which blocks the prompts share.

The types of a trace, as JSON lines hold them (docs/measuring.md), and what follows from them alone: who waits for whom, in which
order requests came, what a cache without limits would have. Knows lengths and block ids, no server and no other format.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec

Scope = Literal["session", "all"]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant", "tool", "developer"]
    content: str


class Turn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request. ``at_s`` is when it was sent, in seconds of its session; ``service_s`` how long it took.

    The prompt is ``messages`` (real text, the whole prompt), or ``input_tokens`` with the id of each full block of it: prompts
    that begin with equal ids begin with equal text. ``output_tokens`` are generated, whatever they say.
    """

    at_s: float
    output_tokens: int
    input_tokens: int | None = None
    blocks: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()
    service_s: float = 0.0

    @property
    def ended_s(self) -> float:
        return self.at_s + self.service_s


class Agent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A sub-agent: a conversation of its own that the session's begins at ``at_s`` and that ends at ``ended_s``.

    ``prefix_tokens`` are those of its tools and system prompt.
    """

    name: str
    at_s: float
    ended_s: float
    turns: tuple[Turn, ...]
    prefix_tokens: int = 0


class Stream(NamedTuple):
    """One conversation. A sub-agent's begins behind turn ``after`` of the session's own, and turn ``before`` waits for its end.

    ``name`` is "" for the session's own, which is behind nothing; ``before`` is None where nobody waits.
    """

    name: str
    turns: tuple[Turn, ...]
    prefix_tokens: int
    after: int | None
    before: int | None


class Session(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, dict=True
):
    """One recorded session: its own conversation and its sub-agents'.

    ``scope`` says where equal block ids mean equal text: within the "session", or in "all" sessions of the trace.
    """

    session: str
    turns: tuple[Turn, ...]
    agents: tuple[Agent, ...] = ()
    prefix_tokens: int = 0
    block_tokens: int = 64
    scope: Scope = "session"

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        """The session's own conversation, then its sub-agents': each is sent one request at a time."""
        own = Stream("", self.turns, self.prefix_tokens, None, None)
        return (own, *(_stream(agent, self.turns) for agent in self.agents))

    @cached_property
    def hits(self) -> dict["Place", "Blocks"]:
        """Of each prompt, by a cache that has seen nothing else (``theoretical_hits``)."""
        return theoretical_hits(self)

    @property
    def names(self) -> set[str]:
        """Of its conversations."""
        return {self.name_of(stream) for stream in range(len(self.agents) + 1)}

    def name_of(self, stream: int) -> str:
        """What records call a conversation: as AgentX does, so that the two can be laid side by side."""
        return f"{self.session}::sa:{self.agents[stream - 1].name}" if stream else self.session


def _stream(agent: Agent, own: tuple[Turn, ...]) -> Stream:
    after = max((number for number, turn in enumerate(own) if turn.at_s <= agent.at_s), default=None)
    first = 0 if after is None else after + 1
    waiting = (number for number in range(first, len(own)) if own[number].at_s >= agent.ended_s)
    return Stream(agent.name, agent.turns, agent.prefix_tokens, after, next(waiting, None))


class Place(NamedTuple):
    """One turn of a session."""

    stream: int
    turn: int


def in_order(session: Session) -> list[Place]:
    """Every turn of ``session``, as they were sent when it was recorded."""
    places = [
        (turn.at_s, Place(number, place))
        for number, stream in enumerate(session.streams)
        for place, turn in enumerate(stream.turns)
    ]
    return [place for _, place in sorted(places)]


class Blocks(NamedTuple):
    """Of one prompt: how many of its leading blocks some earlier prompt had, and how many it has."""

    hit: int
    total: int


def theoretical_hits(session: Session, seen: set[int] | None = None) -> dict[Place, Blocks]:
    """What a cache without limits would have of each prompt, whole blocks from the beginning, in recorded order.

    The count of AgentX's "Theoretical Prefix Cache Hit". ``seen`` are the blocks of other sessions, and takes in this one's;
    turns with recorded text have no blocks and are left out.
    """
    seen = set() if seen is None else seen
    found = {}
    last: dict[
        int, tuple[int, ...]
    ] = {}  # each stream's prompt before, which was seen: most prompts only grow
    for place in in_order(session):
        turn = session.streams[place.stream].turns[place.turn]
        if turn.messages:
            continue
        before = last.get(place.stream, ())
        known = len(before) if turn.blocks[: len(before)] == before else 0
        further = turn.blocks[known:]
        hit = known + sum(1 for _ in itertools.takewhile(seen.__contains__, further))
        found[place] = Blocks(hit, len(turn.blocks))
        seen.update(further)
        last[place.stream] = turn.blocks
    return found


def shared(blocks: tuple[int, ...], others: tuple[int, ...]) -> int:
    """How many leading blocks two prompts have in common."""
    if others[: len(blocks)] == blocks:
        return len(blocks)
    pairs = zip(blocks, others, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def problems(session: Session) -> list[str]:
    """What contradicts itself in ``session``, one sentence each."""
    found = [] if session.turns else ["it has no turns"]
    if session.block_tokens < 1:
        return [*found, f"block_tokens is {session.block_tokens}; it must be at least 1"]
    names = [agent.name for agent in session.agents]
    found += [
        f"two sub-agents are called {name!r}" for name, count in sorted(Counter(names).items()) if count > 1
    ]
    found += ["a sub-agent has no name" for name in names if not name]
    for agent in session.agents:
        if not agent.turns:
            found.append(f"sub-agent {agent.name!r} has no turns")
        if agent.ended_s < agent.at_s:
            found.append(f"sub-agent {agent.name!r} ends at {agent.ended_s} s and begins at {agent.at_s} s")
    if len({bool(turn.messages) for stream in session.streams for turn in stream.turns}) > 1:
        found.append("some of its turns have messages, and some lengths: a session has one or the other")
    for stream in session.streams:
        whose = f"sub-agent {stream.name!r}, " if stream.name else ""
        for number, turn in enumerate(stream.turns):
            found += [f"{whose}turn {number}: {text}" for text in _turn_problems(turn, session.block_tokens)]
        for number, (before, turn) in enumerate(itertools.pairwise(stream.turns), 1):
            if turn.at_s < before.at_s:
                found.append(
                    f"{whose}turn {number} is at {turn.at_s} s, before the turn ahead of it ({before.at_s} s)"
                )
    return found


def _turn_problems(turn: Turn, block_tokens: int) -> Iterator[str]:
    for name, value in (("at_s", turn.at_s), ("service_s", turn.service_s)):
        if not (math.isfinite(value) and value >= 0):
            yield f"{name} is {value}; it must be a number of seconds, not below 0"
    if turn.output_tokens < 1:
        yield f"output_tokens is {turn.output_tokens}; it must be at least 1"
    if turn.messages:
        if turn.blocks or turn.input_tokens is not None:
            yield "it has messages, and input_tokens or blocks beside them: give one or the other"
    elif turn.input_tokens is None:
        yield "it has neither messages nor input_tokens"
    elif turn.input_tokens < 1:
        yield f"input_tokens is {turn.input_tokens}; it must be at least 1"
    elif len(turn.blocks) > math.ceil(turn.input_tokens / block_tokens):
        yield f"{len(turn.blocks)} blocks of {block_tokens} tokens in a prompt of {turn.input_tokens}"
