"""The weka format of agent traces (spec/serving.md H6), as AgentX reads it: one JSON file a session, extra keys are errors.

``decode`` gives a ``Session``, ``encode`` a file's bytes. A recorder without names for its agents writes them all into one list
of requests; ``conversations`` takes such a list apart. Knows no folder.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from flashstep.bench.load.sessions import Agent, Session, Turn, shared

MODEL = "recorded"
EARLY_S = (
    1e-6  # by how much a sub-agent's request must be before its parent to be counted from the parent's time
)


class _Call(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    t: float
    model: str
    input_length: int = msgspec.field(name="in")
    output_length: int = msgspec.field(name="out")
    hash_ids: list[int] = []
    input_types: list[str] = []
    output_types: list[str] = []
    stop: str = ""
    api_time: float | None = None
    think_time: float | None = None


class _Normal(_Call, tag="n", tag_field="type"):
    pass


class _Streaming(_Call, tag="s", tag_field="type"):
    ttft: float | None = None


class _Subagent(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="subagent", tag_field="type"):
    t: float
    agent_id: str
    subagent_type: str
    status: str
    requests: list[_Normal | _Streaming]
    models: list[str]
    duration_ms: int | None = None
    total_tokens: int | None = None
    tool_use_count: int | None = None
    tool_tokens: int = 0
    system_tokens: int = 0


class _Trace(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    id: str
    models: list[str]
    block_size: int
    hash_id_scope: Literal["local"]
    requests: list[_Normal | _Streaming | _Subagent]
    tool_tokens: int = 0
    system_tokens: int = 0
    totals: dict[str, Any] | None = None


def decode(data: bytes) -> Session:
    """The session in a weka file; ``ValueError`` says at which key it is none."""
    trace = msgspec.json.decode(data, type=_Trace)
    calls = [call for call in trace.requests if not isinstance(call, _Subagent)]
    own, *others = conversations(calls, trace.block_size) if calls else [[]]
    agents = [
        agent
        for call in trace.requests
        if isinstance(call, _Subagent)
        for agent in _agents(call, trace.block_size)
    ]
    agents += [_split_off(f"split-{number:03}", turns) for number, turns in enumerate(others, 1)]
    return Session(
        session=trace.id,
        turns=tuple(own),
        agents=tuple(agents),
        prefix_tokens=trace.tool_tokens + trace.system_tokens,
        block_tokens=trace.block_size,
    )


def _agents(entry: _Subagent, block_tokens: int) -> list[Agent]:
    """The sub-agent of ``entry``, and what it began itself; nothing where no request of it was recorded."""
    for call in entry.requests:
        if call.t + EARLY_S < entry.t:  # older recorders count from the sub-agent's begin
            call.t += entry.t
    if not entry.requests:
        return []
    own, *others = conversations(entry.requests, block_tokens)
    last_s = max(turn.ended_s for turn in own)
    ended_s = last_s if entry.duration_ms is None else entry.t + max(0, entry.duration_ms) / 1000
    main = Agent(
        name=entry.agent_id,
        at_s=entry.t,
        ended_s=ended_s,
        turns=tuple(own),
        prefix_tokens=entry.tool_tokens + entry.system_tokens,
    )
    return [main, *(_split_off(f"{main.name}:split-{i:03}", turns) for i, turns in enumerate(others, 1))]


def _split_off(name: str, turns: Sequence[Turn]) -> Agent:
    return Agent(
        name=name, at_s=turns[0].at_s, ended_s=max(turn.ended_s for turn in turns), turns=tuple(turns)
    )


def conversations(calls: Sequence[_Call], block_tokens: int) -> list[list[Turn]]:
    """``calls`` by the conversation they belong to, the first call's first. Calls without blocks are the first one's.

    A call continues a conversation of the same model that was idle: one whose last prompt is the begin of its own, or else the
    one whose last prompt has most leading blocks in common with it, where no later call has more of them (the context was
    compacted). Any other call begins a conversation.
    """
    ordered = sorted(calls, key=lambda call: call.t)
    found: list[_Conversation] = []
    turns = [_turn(call, block_tokens) for call in ordered]
    for number, (call, turn) in enumerate(zip(ordered, turns, strict=True)):
        if found and not turn.blocks:
            found[0].turns.append(turn)
        elif (fitting := _continued(found, call.model, turn, turns[number + 1 :])) is not None:
            fitting.turns.append(turn)
        else:
            found.append(_Conversation(call.model, [turn]))
    return [conversation.turns for conversation in found]


class _Conversation(NamedTuple):
    model: str
    turns: list[Turn]

    def takes(self, model: str, turn: Turn) -> bool:
        """Whether it was idle when ``turn`` was sent."""
        return self.model == model and self.turns[-1].ended_s <= turn.at_s + EARLY_S


def _continued(
    found: Sequence[_Conversation], model: str, turn: Turn, later: Sequence[Turn]
) -> _Conversation | None:
    """The conversation that ``turn`` continues, if it is one of ``found``."""
    common = [shared(conversation.turns[-1].blocks, turn.blocks) for conversation in found]
    whole = [
        place
        for place, conversation in enumerate(found)
        if common[place] == len(conversation.turns[-1].blocks) and conversation.takes(model, turn)
    ]
    if whole:
        return found[max(whole, key=common.__getitem__)]
    most = max(common, default=0)
    if not most:
        return None
    nearest = found[common.index(most)]
    last = nearest.turns[-1].blocks
    is_left = any(shared(last, other.blocks) > most for other in later)
    return nearest if nearest.takes(model, turn) and not is_left else None


def _turn(call: _Call, block_tokens: int) -> Turn:
    service_s = call.api_time if call.api_time is not None and math.isfinite(call.api_time) else 0.0
    return Turn(
        at_s=call.t,
        service_s=max(0.0, service_s),
        input_tokens=call.input_length,
        output_tokens=max(
            1, call.output_length
        ),  # a recorded 0 is an answer that was cut off: a server gives 1 at least
        blocks=tuple(call.hash_ids[: call.input_length // block_tokens]),
    )


def encode(session: Session) -> bytes:
    """``session`` as a weka file; ``ValueError`` where it has real messages, which the format cannot hold."""
    requests: list[_Normal | _Streaming | _Subagent] = [*_calls(session.session, session.turns)]
    for agent in session.agents:
        calls = _calls(agent.name, agent.turns)
        requests.append(
            _Subagent(
                t=agent.at_s,
                agent_id=agent.name,
                subagent_type="agent",
                status="completed",
                duration_ms=round(1000 * (agent.ended_s - agent.at_s)),
                total_tokens=sum(call.input_length + call.output_length for call in calls),
                tool_use_count=max(0, len(calls) - 1),
                requests=[*calls],
                models=[MODEL],
                system_tokens=agent.prefix_tokens,
            )
        )
    trace = _Trace(
        id=session.session,
        models=[MODEL],
        block_size=session.block_tokens,
        hash_id_scope="local",
        requests=sorted(requests, key=lambda request: request.t),
        system_tokens=session.prefix_tokens,
    )
    return msgspec.json.encode(trace)


def _calls(name: str, turns: Sequence[Turn]) -> list[_Streaming]:
    if any(turn.messages for turn in turns):
        raise ValueError(
            f"{name} has real messages, and weka files hold lengths only; convert it with --tokenizer first"
        )
    calls = []
    ended_s = 0.0
    for number, turn in enumerate(turns):
        calls.append(
            _Streaming(
                t=turn.at_s,
                model=MODEL,
                input_length=turn.input_tokens or 1,
                output_length=turn.output_tokens,
                hash_ids=[*turn.blocks],
                input_types=["text"] if number == 0 else ["tool_result"],
                output_types=["text"],
                stop="end_turn" if number == len(turns) - 1 else "tool_use",
                api_time=turn.service_s,
                think_time=max(0.0, turn.at_s - ended_s) if number else 0.0,
            )
        )
        ended_s = turn.ended_s
    return calls
