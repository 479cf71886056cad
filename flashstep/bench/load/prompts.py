"""What is asked: sessions of one or more turns, from random words of given lengths or from a file of JSON lines.

Takes lengths and a seed, or a file; gives ``Session`` values, the same for the same seed whatever the order they are asked in.
Knows no HTTP and no time but the pause before a turn.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from flashstep.bench.load.lengths import LEAD, Range, Words

Message = dict[str, Any]
PREFIX, SESSION, WARM_UP, PROBE = range(4)  # streams of random numbers that do not touch one another


class PromptError(ValueError):
    """A file of prompts that cannot be read, with the number of each line that is wrong."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What is new in one request: ``messages`` of a chat, or ``prompt`` text, after all that came before in its session.

    ``think_s`` is the pause since the answer before it. ``answer`` is the recorded answer that may stand in the next prompt
    instead of the live one. ``prompt_tokens`` is the length wished for the whole prompt, where one is known. ``output_len``
    None leaves the answer's length to the server.
    """

    messages: tuple[Message, ...] = ()
    prompt: str = ""
    output_len: int | None = None
    think_s: float = 0.0
    answer: str | None = None
    prompt_tokens: int | None = None


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One user's turns, each asked when the one before it is answered."""

    key: str
    turns: tuple[Turn, ...]

    def turn_key(self, index: int) -> str:
        """A request's name: the session's, and its turn where there are several."""
        return self.key if len(self.turns) == 1 else f"{self.key}/{index}"


class RandomPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts of random words. ``input_len`` counts a first turn's whole prompt as the server does, template and prefix
    included; a later turn adds as many words as the first has. ``prefix_len`` tokens of words are the same in all prompts."""

    input_len: Range
    output_len: Range
    prefix_len: int = 0
    turns: Range = Range(1, 1)
    think_ms: Range = Range(0, 0)

    def sessions(self, words: Words, seed: int, *, stream: int = SESSION, chat: bool) -> Iterator[Session]:
        """Endless, the same for the same ``seed`` and ``stream``; ``ValueError`` where a prompt is too short for its template."""
        least = words.overhead + self.prefix_len + 1
        if self.input_len.low < least:
            raise ValueError(
                f"--input-len begins at {self.input_len.low}; the server's template takes {words.overhead} tokens and "
                f"--prefix-len {self.prefix_len}, so it is at least {least}"
            )
        prefix = LEAD + words.text(self.prefix_len, np.random.default_rng([seed, PREFIX]))
        number = 0
        while True:
            rng = np.random.default_rng([seed, stream, number])
            yield self._session(words, rng, str(number), prefix, chat=chat)
            number += 1

    def _session(
        self, words: Words, rng: np.random.Generator, key: str, prefix: str, *, chat: bool
    ) -> Session:
        turns = []
        for index in range(self.turns.draw(rng)):
            length, output_len = self.input_len.draw(rng), self.output_len.draw(rng)
            own = words.text(length - words.overhead - self.prefix_len, rng)
            text = (prefix if index == 0 else LEAD) + own
            turns.append(
                Turn(
                    messages=({"role": "user", "content": text},) if chat else (),
                    prompt="" if chat else text,
                    output_len=output_len,
                    think_s=self.think_ms.draw(rng) / 1e3 if index else 0.0,
                    answer=words.text(output_len, rng),
                    prompt_tokens=length if index == 0 and words.checked else None,
                )
            )
        return Session(key=key, turns=tuple(turns))


class PromptFile(msgspec.Struct, frozen=True, kw_only=True):
    """The sessions of a file, and the digest of what was read."""

    sha256: str
    sessions: tuple[Session, ...]


class _FileTurn(msgspec.Struct, forbid_unknown_fields=True):
    user: str
    output_len: int | None = None
    think_s: float = 0.0
    answer: str | None = None


class _FileLine(msgspec.Struct, forbid_unknown_fields=True):
    id: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    turns: list[_FileTurn] | None = None
    system: str | None = None
    output_len: int | None = None


def read_prompts(
    path: Path, *, output_len: int | None, chat: bool, needs_answers: bool = False
) -> PromptFile:
    """The sessions of a file, a line each; ``PromptError`` names every line that is none.

    A line is ``{"prompt": text}``, ``{"messages": [...]}`` (a chat that is answered once) or ``{"turns": [{"user": text,
    "answer": text, "think_s": 2.5}, ...], "system": text}`` (asked turn by turn), each with ``"id"`` and ``"output_len"`` if
    it likes; ``output_len`` here is for turns that name none. ``needs_answers``: a turn that another follows has its recorded
    answer.
    """
    if not path.is_file():
        raise PromptError(f"{path}: there is no such file")
    sessions: list[Session] = []
    wrong: list[str] = []
    data = path.read_bytes()
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            read = msgspec.json.decode(line, type=_FileLine)
            session = _file_session(read, str(number), output_len, chat=chat)
            if needs_answers and any(turn.answer is None for turn in session.turns[:-1]):
                raise ValueError(
                    "a turn before the last has no answer; give one, or take the live ones: --history live"
                )
            sessions.append(session)
        except (msgspec.DecodeError, ValueError) as error:
            wrong.append(f"line {number}: {error}")
    ids = Counter(session.key for session in sessions)
    wrong += [f"two lines have the id {key!r}" for key, count in sorted(ids.items()) if count > 1]
    named = Counter(
        session.turn_key(turn)
        for session in sessions
        if ids[session.key] == 1
        for turn in range(len(session.turns))
    )
    wrong += [
        f"two requests would be called {key!r}: a turn of one session, and another one's id"
        for key, count in sorted(named.items())
        if count > 1
    ]
    if not sessions and not wrong:
        wrong.append("it has no lines")
    if wrong:
        raise PromptError(f"{path} is no file of prompts: " + "; ".join(wrong))
    return PromptFile(sha256=hashlib.sha256(data).hexdigest(), sessions=tuple(sessions))


def _file_session(line: _FileLine, number: str, output_len: int | None, *, chat: bool) -> Session:
    given = [name for name in ("prompt", "messages", "turns") if getattr(line, name) is not None]
    if len(given) != 1:
        raise ValueError(
            f"it has {' and '.join(given) or 'none'} of prompt, messages and turns; one of them is needed"
        )
    if line.system is not None and not (chat and line.turns):
        raise ValueError("system goes with turns of a chat")
    length = line.output_len if line.output_len is not None else output_len
    key = line.id or number
    if line.prompt is not None:
        return Session(key=key, turns=(_turn(line.prompt, length, chat=chat),))
    if line.messages is not None:
        if not chat:
            raise ValueError("messages need --endpoint chat")
        if not line.messages:
            raise ValueError("messages is empty")
        return Session(key=key, turns=(Turn(messages=tuple(line.messages), output_len=length),))
    return Session(key=key, turns=_file_turns(line, length, chat=chat))


def _file_turns(line: _FileLine, length: int | None, *, chat: bool) -> tuple[Turn, ...]:
    if not line.turns:
        raise ValueError("turns is empty")
    turns = []
    for index, each in enumerate(line.turns):
        if each.think_s < 0:
            raise ValueError(f"turn {index} thinks for {each.think_s:g} s")
        own = each.output_len if each.output_len is not None else length
        system = line.system if index == 0 else None
        turns.append(
            _turn(each.user, own, chat=chat, think_s=each.think_s, answer=each.answer, system=system)
        )
    return tuple(turns)


def _turn(
    text: str,
    output_len: int | None,
    *,
    chat: bool,
    think_s: float = 0.0,
    answer: str | None = None,
    system: str | None = None,
) -> Turn:
    if output_len is not None and output_len < 1:
        raise ValueError(f"output_len is {output_len}; it is at least 1")
    before = () if system is None else ({"role": "system", "content": system},)
    return Turn(
        messages=(*before, {"role": "user", "content": text}) if chat else (),
        prompt="" if chat else text,
        output_len=output_len,
        think_s=think_s,
        answer=answer,
    )
