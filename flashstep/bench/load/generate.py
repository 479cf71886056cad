"""Sessions of coding agents, drawn by lot: growing contexts, tool results of any size, sub-agents, pauses, compaction.

``generate`` gives sessions as a recorder would have written them. Every distribution is one field of ``Habits``, with its source:
[T] TraceLab, 4,265 sessions of two coding agents (arXiv 2606.30560 and tracelab.cs.washington.edu: steps of a session p25 4,
p50 15, p90 135, p99 1,107; 8.9 of 82 by the user; 54.9G tokens read in 357,161 steps, 52.6G of them cached, 187M written);
[A] the AgentX traces (datasets cc-traces-weka: tools 12,974 and system 2,771 tokens in most sessions, first prompts of 16K to
84K; InferenceX issue 1632: prefix hit 96.8% in one edition, 85.8% in another; tt-inference-server 5116: mean answer 736);
[Q] gaps between the turns of a production trace of a coding model (agentic-kvc, 876d09d: p25 0.7 s, p50 1.6, p75 8.6, p90 44,
p99 738); [O] our own guess, where nothing is published. Knows no server.
"""

import itertools
import math
from collections.abc import Iterator

import msgspec
import numpy as np

from flashstep.bench.load.sessions import Agent, Session, Turn

OWN_PREFIX = 0  # block ids of what all sessions begin with, and of what all sub-agents begin with
AGENTS_PREFIX = 100_000
FIRST_FREE = 1_000_000  # of a session's own text; the next session's begin this much later


class Lognormal(msgspec.Struct, frozen=True):
    """exp of a normal distribution: half the values are below ``median``; ``sigma`` is the spread of their logarithm."""

    median: float
    sigma: float

    def draw(self, lot: np.random.Generator) -> float:
        return self.median * math.exp(self.sigma * lot.standard_normal())


class Habits(msgspec.Struct, frozen=True, kw_only=True):
    """How agents work. Tokens are of the recorded model's; times in seconds."""

    turns: Lognormal = Lognormal(15, 1.79)  # [T] mean 74, p90 149, p99 965
    by_user: float = 0.11  # [T] share of turns that a person began
    prefix_tokens: int = 15_744  # [A] tools and system prompt, equal in all sessions
    opening_tokens: Lognormal = Lognormal(
        3_000, 1.2
    )  # [A] instructions of the project, first question, first files
    result_tokens: Lognormal = Lognormal(400, 1.8)  # [T] what a tool returns: mean 2,000
    most_result_tokens: int = 25_000  # [O] tools cut off what is longer
    question_tokens: Lognormal = Lognormal(60, 1.2)  # [O] what a person types
    answer_tokens: Lognormal = Lognormal(180, 1.46)  # [T][A] mean 523, p99 5,400
    most_answer_tokens: int = 32_000  # [O]
    tool_pause_s: Lognormal = Lognormal(
        1.4, 1.6
    )  # [Q] with the next one: 62% below 5 s, 92% below 44 s, 99% below 738 s
    person_pause_s: Lognormal = Lognormal(75, 1.7)  # [Q]
    context_tokens: int = 200_000  # the recorded model's limit
    compact_at: float = 0.8  # [O] share of the limit at which the context is replaced by a summary
    summary_tokens: Lognormal = Lognormal(4_000, 0.5)  # [O]
    fan_out: float = 0.03  # [O] share of turns that begin sub-agents
    mean_agents: float = 2.0  # [O] sub-agents begun at once: geometric, at most 8
    agent_turns: Lognormal = Lognormal(6, 0.9)  # [O]
    agent_prefix_tokens: int = 8_000  # [O] rounded to blocks, equal in all sub-agents
    first_token_s: float = 1.5  # [O] of the server that was recorded
    token_s: float = 0.015  # [O] likewise
    block_tokens: int = 64


def scaled(habits: Habits, scale: float) -> Habits:
    """``habits`` with ``scale`` times the tokens (a small server's) in the same number of turns and the same times."""

    def times(value: Lognormal) -> Lognormal:
        return Lognormal(max(1.0, value.median * scale), value.sigma)

    def whole(value: int) -> int:
        return max(1, round(value * scale))

    changes = {
        name: times(value) if isinstance(value, Lognormal) else whole(value)
        for name, value in ((name, getattr(habits, name)) for name in habits.__struct_fields__)
        if name.endswith("_tokens") and name != "block_tokens"
    }
    return msgspec.structs.replace(habits, **changes)


class _Writer:
    """One conversation as it grows: its prompt's length and blocks, and the time."""

    def __init__(self, habits: Habits, *, prefix: range, fresh: Iterator[int], at_s: float) -> None:
        self._habits = habits
        self._prefix = [*prefix]
        self._fresh = fresh
        self._blocks = [*prefix]
        self.tokens = len(prefix) * habits.block_tokens
        self.at_s = at_s
        self.turns: list[Turn] = []

    def add(self, tokens: int) -> None:
        """The prompt grows at its end."""
        self.tokens += tokens
        missing = self.tokens // self._habits.block_tokens - len(self._blocks)
        self._blocks += itertools.islice(self._fresh, missing)

    def compact(self, tokens: int) -> None:
        """Of the prompt only its prefix stays, with a summary of ``tokens`` behind it."""
        self._blocks = [*self._prefix]
        self.tokens = len(self._prefix) * self._habits.block_tokens
        self.add(tokens)

    def ask(self, answer_tokens: int) -> None:
        """One request: time passes, and the answer is part of the next prompt."""
        service_s = self._habits.first_token_s + self._habits.token_s * answer_tokens
        self.turns.append(
            Turn(
                at_s=round(self.at_s, 3),
                service_s=round(service_s, 3),
                input_tokens=self.tokens,
                output_tokens=answer_tokens,
                blocks=tuple(self._blocks),
            )
        )
        self.at_s += service_s
        self.add(answer_tokens)


def generate(number: int, *, seed: int, habits: Habits, most_turns: int | None = None) -> list[Session]:
    """``number`` sessions, each with its own lot, so that more of them begin with the same ones.

    ``most_turns`` cuts long sessions (and their sub-agents) short; None keeps the tail that measurements of agents show.
    """
    return [_session(place, seed=seed, habits=habits, most_turns=most_turns) for place in range(number)]


def _session(place: int, *, seed: int, habits: Habits, most_turns: int | None) -> Session:
    lot = np.random.default_rng([seed, place])
    fresh = itertools.count(FIRST_FREE * (place + 1))
    prefix = _prefix(OWN_PREFIX, habits.prefix_tokens, habits)
    own = _Writer(habits, prefix=prefix, fresh=fresh, at_s=0.0)
    agents: list[Agent] = []
    own.add(_whole(habits.opening_tokens.draw(lot)))
    turns = _count(habits.turns, lot, most=most_turns, least=2)
    for number in range(turns):
        own.ask(_whole(habits.answer_tokens.draw(lot), habits.most_answer_tokens))
        if number == turns - 1:
            break
        if lot.random() < habits.fan_out:
            begun = _fan_out(
                own.at_s, len(agents), lot=lot, habits=habits, fresh=fresh, most_turns=most_turns
            )
            agents += begun
            own.at_s = max(agent.ended_s for agent in begun)
        _wait(own, lot, habits)
    return Session(
        session=f"session-{seed}-{place:04}",
        turns=tuple(own.turns),
        agents=tuple(agents),
        prefix_tokens=len(prefix) * habits.block_tokens,
        block_tokens=habits.block_tokens,
        scope="all",
    )


def _fan_out(
    at_s: float,
    known: int,
    *,
    lot: np.random.Generator,
    habits: Habits,
    fresh: Iterator[int],
    most_turns: int | None,
) -> list[Agent]:
    """Sub-agents that begin at ``at_s``, side by side; ``known`` are there already."""
    prefix = _prefix(AGENTS_PREFIX, habits.agent_prefix_tokens, habits)
    begun = []
    for number in range(min(8, int(lot.geometric(1 / habits.mean_agents)))):
        agent = _Writer(habits, prefix=prefix, fresh=fresh, at_s=at_s)
        agent.add(_whole(habits.question_tokens.draw(lot)))
        turns = _count(habits.agent_turns, lot, most=most_turns, least=1)
        for turn in range(turns):
            agent.ask(_whole(habits.answer_tokens.draw(lot), habits.most_answer_tokens))
            if turn < turns - 1:
                _grow(agent, lot, habits, by_user=False)
        begun.append(
            Agent(
                name=f"agent-{known + number + 1:03}",
                at_s=round(at_s, 3),
                ended_s=round(agent.at_s, 3),
                turns=tuple(agent.turns),
                prefix_tokens=len(prefix) * habits.block_tokens,
            )
        )
    return begun


def _wait(own: _Writer, lot: np.random.Generator, habits: Habits) -> None:
    _grow(own, lot, habits, by_user=lot.random() < habits.by_user)


def _grow(writer: _Writer, lot: np.random.Generator, habits: Habits, *, by_user: bool) -> None:
    """What is between two turns: a pause, and a question or a tool's result; a full context is compacted."""
    pause = habits.person_pause_s if by_user else habits.tool_pause_s
    writer.at_s += pause.draw(lot)
    added = habits.question_tokens if by_user else habits.result_tokens
    tokens = _whole(added.draw(lot), habits.most_result_tokens)
    if writer.tokens + tokens > habits.compact_at * habits.context_tokens:
        writer.compact(_whole(habits.summary_tokens.draw(lot)))
    writer.add(tokens)


def _prefix(first: int, tokens: int, habits: Habits) -> range:
    return range(first, first + max(1, round(tokens / habits.block_tokens)))


def _whole(value: float, most: int | None = None) -> int:
    return max(1, round(value if most is None else min(value, most)))


def _count(habit: Lognormal, lot: np.random.Generator, *, most: int | None, least: int) -> int:
    return max(least, _whole(habit.draw(lot), most))
