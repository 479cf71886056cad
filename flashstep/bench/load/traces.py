"""Traces on disk: a weka JSON file or a JSONL file of ours, or a folder of either; and what a trace is like.

``read`` gives sessions, ``write`` takes them. Knows both formats, no server.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from flashstep.bench.load import weka
from flashstep.bench.load.sessions import Session, problems, theoretical_hits

Format = Literal["weka", "jsonl"]
PERCENTILES = (10, 50, 90, 99)


class TraceError(ValueError):
    """Files that are no trace, with all that is wrong in them."""


def read(path: Path) -> list[Session]:
    """The sessions at ``path``, a file or a folder; of a folder, those of each .json (weka) and .jsonl (ours), by name.

    ``TraceError`` names everything that is wrong, by file, line, session and turn.
    """
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in {".json", ".jsonl"})
    wrong = [] if files else [f"{path}: no .json and no .jsonl file is in this folder"]
    sessions: list[Session] = []
    for file in files:
        for session in _sessions(file, wrong):
            wrong += [f"{file}, session {session.session!r}: {problem}" for problem in problems(session)]
            sessions.append(session)
    counts = Counter(name for session in sessions for name in session.names)
    wrong += [f"{path}: {count} sessions are called {name!r}" for name, count in counts.items() if count > 1]
    if wrong:
        raise TraceError("; ".join(wrong))
    return sessions


def _sessions(file: Path, wrong: list[str]) -> Iterator[Session]:
    try:
        data = file.read_bytes()
    except OSError as error:
        wrong.append(f"{file}: it cannot be read: {error.strerror}")
        return
    if file.suffix != ".jsonl":
        try:
            yield weka.decode(data)
        except msgspec.DecodeError as error:
            wrong.append(f"{file}: {error}")
        return
    lines = [(number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip()]
    if not lines:
        wrong.append(f"{file}: it is empty")
    for number, line in lines:
        try:
            yield msgspec.json.decode(line, type=Session)
        except msgspec.DecodeError as error:
            wrong.append(f"{file}, line {number}: {error}")


def write(folder: Path, sessions: Sequence[Session], *, form: Format) -> None:
    """Into ``folder``, which is made: a weka file a session, or sessions.jsonl with a line a session."""
    unfit = [
        session.session
        for session in sessions
        if form == "weka" and Path(session.session).name != session.session
    ]
    if unfit:
        raise ValueError(
            "; ".join(f"session {name!r} cannot be a file's name: write --form jsonl" for name in unfit)
        )
    folder.mkdir(parents=True, exist_ok=True)
    if form == "jsonl":
        lines = b"".join(msgspec.json.encode(session) + b"\n" for session in sessions)
        (folder / "sessions.jsonl").write_bytes(lines)
        return
    for session in sessions:
        (folder / f"{session.session}.json").write_bytes(weka.encode(session))


def digest(sessions: Sequence[Session]) -> str:
    """Of all that is in ``sessions``: two replays of equal digest had the same requests to send."""
    made = hashlib.sha256()
    for session in sessions:
        made.update(msgspec.json.encode(session))
    return made.hexdigest()[:16]


def summary(sessions: Sequence[Session]) -> dict[str, Any]:
    """Counts, percentiles of lengths and pauses, and the share of prompt blocks that a cache without limits would have.

    ``theoretical_prefix_hit`` is within each session (what a replay with a cache-busting prefix can hit at most), ``..._shared``
    with what sessions of scope "all" share counted, too; None where no prompt has blocks.
    """
    streams = [stream for session in sessions for stream in session.streams]
    turns = [turn for stream in streams for turn in stream.turns]
    pauses = [
        max(0.0, turn.at_s - before.ended_s)
        for stream in streams
        for before, turn in zip(stream.turns, stream.turns[1:], strict=False)
    ]
    everywhere: set[int] = set()
    within = [hit for session in sessions for hit in theoretical_hits(session).values()]
    across = [
        hit
        for session in sessions
        for hit in theoretical_hits(session, everywhere if session.scope == "all" else None).values()
    ]
    return {
        "sessions": len(sessions),
        "sub_agents": len(streams) - len(sessions),
        "requests": len(turns),
        "theoretical_prefix_hit": _share(within),
        "theoretical_prefix_hit_shared": _share(across),
        "session_turns": _spread([len(session.turns) for session in sessions]),
        "input_tokens": _spread([turn.input_tokens for turn in turns if turn.input_tokens is not None]),
        "output_tokens": _spread([turn.output_tokens for turn in turns]),
        "pause_s": _spread(pauses),
        "session_s": _spread(
            [max(stream.turns[-1].ended_s for stream in s.streams if stream.turns) for s in sessions]
        ),
    }


def _share(hits: Sequence[tuple[int, int]]) -> float | None:
    total = sum(hit[1] for hit in hits)
    return sum(hit[0] for hit in hits) / total if total else None


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    found = np.percentile(values, PERCENTILES)
    named = {f"p{place}": float(value) for place, value in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(np.mean(values))} | named | {"max": float(max(values)), "sum": float(sum(values))}
