"""Logs of real requests made into traces: lengths and a hash chain of blocks take the place of the text (H7).

A log is a trace of ours whose turns have messages. Takes a tokenizer; the text does not leave this module. Knows no server.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from flashstep.bench.load.counting import tokenizer_at
from flashstep.bench.load.sessions import Session, Turn

ID_BYTES = 6  # of a hash: ids stay below 2**53, which every JSON reader keeps


def block_hashed(sessions: Sequence[Session], tokenizer: Path) -> list[Session]:
    """``sessions`` with each turn's messages replaced by the prompt's length and block ids; other turns stay.

    Each message is tokenised by itself, with its role in front: a chat template's own tokens are not counted. Ids are
    equal where all text up to the block's end is, in any session: the scope is "all".
    """
    made = tokenizer_at(tokenizer)
    return [_hashed(session, made) for session in sessions]


def _hashed(session: Session, tokenizer: Tokenizer) -> Session:
    if not any(turn.messages for stream in session.streams for turn in stream.turns):
        return session
    return msgspec.structs.replace(
        session,
        scope="all",
        turns=_turns(session.turns, tokenizer, session.block_tokens),
        agents=tuple(
            msgspec.structs.replace(agent, turns=_turns(agent.turns, tokenizer, session.block_tokens))
            for agent in session.agents
        ),
        prefix_tokens=session.prefix_tokens or _system_tokens(session.turns, tokenizer),
    )


def _turns(turns: Sequence[Turn], tokenizer: Tokenizer, block_tokens: int) -> tuple[Turn, ...]:
    return tuple(_turn(turn, tokenizer, block_tokens) if turn.messages else turn for turn in turns)


def _turn(turn: Turn, tokenizer: Tokenizer, block_tokens: int) -> Turn:
    ids: list[int] = []
    for message in turn.messages:
        ids += tokenizer.encode(f"{message.role}\n{message.content}", add_special_tokens=False).ids
    chain = hashlib.sha256()
    blocks = []
    for end in range(block_tokens, len(ids) + 1, block_tokens):
        block = ids[end - block_tokens : end]
        chain.update(b"".join(token.to_bytes(4, "little") for token in block))
        blocks.append(int.from_bytes(chain.digest()[:ID_BYTES], "little"))
    return msgspec.structs.replace(turn, messages=(), input_tokens=max(1, len(ids)), blocks=tuple(blocks))


def _system_tokens(turns: Sequence[Turn], tokenizer: Tokenizer) -> int:
    """Of the first prompt's leading system messages."""
    count = 0
    for message in turns[0].messages:
        if message.role not in {"system", "developer"}:
            break
        count += len(tokenizer.encode(f"{message.role}\n{message.content}", add_special_tokens=False).ids)
    return count
