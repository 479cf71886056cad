"""Writes small weka traces (spec/serving.md H6), the recorded agent sessions that AgentX replays: lengths and block ids, no text.

A session is a prompt that grows by whole blocks from turn to turn, so that each turn hits the prefix cache behind the last one's
blocks; one session of two has a sub-agent, which runs beside its parent. Knows no server and no harness.
"""

import json
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 64
BLOCKS_A_TURN = 1
OUTPUT_TOKENS = 6
TURN_S = 0.1  # from one request of a session to its next
MODEL = "recorded"


def write_traces(folder: Path, *, sessions: int, turns: int) -> int:
    """One file a session in ``folder``; gives the tokens of the longest prompt and answer together, as the harness counts."""
    folder.mkdir(parents=True)
    for number in range(sessions):
        session = {
            "id": f"session-{number}",
            "models": [MODEL],
            "block_size": BLOCK_TOKENS,
            "hash_id_scope": "local",
            "tool_tokens": 0,
            "system_tokens": BLOCK_TOKENS,
            "requests": _requests(turns, first_block=1000 * (number + 1)),
        }
        if number % 2:
            session["requests"].insert(turns // 2, _subagent(session["requests"][turns // 2 - 1]["t"]))
        (folder / f"{session['id']}.json").write_text(json.dumps(session))
    return turns * BLOCKS_A_TURN * BLOCK_TOKENS + OUTPUT_TOKENS


def _requests(turns: int, *, first_block: int, start_s: float = 0.0) -> list[dict[str, Any]]:
    return [
        {
            "t": start_s + TURN_S * turn,
            "type": "s",
            "model": MODEL,
            "in": (turn + 1) * BLOCKS_A_TURN * BLOCK_TOKENS,
            "out": OUTPUT_TOKENS,
            "hash_ids": [first_block + block for block in range((turn + 1) * BLOCKS_A_TURN)],
            "input_types": ["text"],
            "output_types": ["text"],
            "stop": "end_turn",
            "api_time": 0.1,
            "think_time": 0.0,
            "ttft": 0.05,
        }
        for turn in range(turns)
    ]


def _subagent(start_s: float) -> dict[str, Any]:
    requests = _requests(2, first_block=500, start_s=start_s)
    return {
        "t": start_s,
        "type": "subagent",
        "agent_id": "agent_001",
        "subagent_type": "Explore",
        "duration_ms": 600,
        "total_tokens": sum(request["in"] + request["out"] for request in requests),
        "tool_use_count": 0,
        "status": "completed",
        "requests": requests,
        "models": [MODEL],
        "tool_tokens": 0,
        "system_tokens": BLOCK_TOKENS,
    }
