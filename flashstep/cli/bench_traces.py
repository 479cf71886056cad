"""``flashstep bench traces``: traces of agents' sessions: made, converted, checked, told about."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.table import Table

from flashstep.bench.load import traces
from flashstep.bench.load.generate import Habits, generate, scaled
from flashstep.bench.load.logs import block_hashed
from flashstep.bench.load.sessions import Session
from flashstep.cli.flags import too_small
from flashstep.cli.terminal import OUT, note, require_outputs


@dataclass(frozen=True, kw_only=True)
class BenchTraces:
    """Make a trace of coding agents' sessions, or convert or check one.

    Without --read sessions are drawn by lot, with growing contexts, tool results of any size, sub-agents and pauses after
    published figures (flashstep/bench/load/generate.py has each with its source). With --read they come from a file or folder:
    weka JSON, or JSON lines of ours (docs/measuring.md), among them logs with real messages, of which --tokenizer keeps lengths
    and block hashes.
    """

    read: Path | None = None
    """read this trace instead of drawing one"""
    out: Path | None = None
    """write the trace into this folder; without it there is only the summary"""
    form: traces.Format = "weka"
    """what to write: weka (one JSON file a session; AgentX reads it, and shares no blocks between sessions) or jsonl"""
    sessions: int = 100
    """how many to draw"""
    seed: int = 42
    """of the lot: the same seed gives the same sessions, and more sessions begin with the same ones"""
    scale: float = 1.0
    """tokens of every length, times this: below 1 for a small model"""
    context_tokens: int = 200_000
    """limit of the recorded model, before --scale: contexts are compacted before they reach it"""
    most_turns: int | None = None
    """cut sessions short after so many turns; without it the longest have thousands"""
    tokenizer: Path | None = None
    """tokenizer.json, or its folder: replaces real messages by their lengths and block hashes"""
    json: Path | None = None
    """write the summary to this file"""

    def run(self) -> int:
        self._check()
        sessions = traces.read(self.read) if self.read is not None else self._drawn()
        if self.tokenizer is not None:
            sessions = block_hashed(sessions, self.tokenizer)
        summary = traces.summary(sessions)
        if self.out is not None:
            traces.write(self.out, sessions, form=self.form)
            note(f"{len(sessions)} sessions are in {self.out}")
        if self.json is not None:
            self.json.write_bytes(
                msgspec.json.format(msgspec.json.encode(summary | {"digest": traces.digest(sessions)}))
            )
        OUT.print(_told(summary))
        OUT.print(_table(summary))
        return 0

    def _check(self) -> None:
        wrong = []
        drawn = ("sessions", "seed", "scale", "context_tokens", "most_turns")
        changed = [name for name in drawn if getattr(self, name) != getattr(BenchTraces, name)]
        if self.read is not None and changed:
            flags = ", ".join("--" + name.replace("_", "-") for name in changed)
            wrong.append(f"{flags}: what is read with --read is not drawn; leave it out")
        if self.read is None and self.tokenizer is not None:
            wrong.append("--tokenizer is for real messages, which only a trace given with --read has")
        wrong += too_small(self, {"sessions": 1})
        if not 0 < self.scale <= 100:
            wrong.append(f"--scale is {self.scale}; it must be above 0 and at most 100")
        if self.most_turns is not None and self.most_turns < 2:
            wrong.append(f"--most-turns is {self.most_turns}; it must be at least 2")
        least = round(2 * Habits().prefix_tokens / Habits().compact_at)
        if self.context_tokens < least:
            wrong.append(
                f"--context-tokens is {self.context_tokens}; with the system prompt it must be at least {least}"
            )
        if self.out is not None and self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            wrong.append(f"--out is {self.out}, which has something in it: it would be part of the trace")
        if self.out is not None and not self.out.parent.is_dir():
            wrong.append(f"--out is {self.out}; there is no folder {self.out.parent}")
        if wrong:
            raise ValueError("; ".join(wrong))
        require_outputs({"--json": self.json})

    def _drawn(self) -> list[Session]:
        habits = msgspec.structs.replace(Habits(), context_tokens=self.context_tokens)
        return generate(
            self.sessions, seed=self.seed, habits=scaled(habits, self.scale), most_turns=self.most_turns
        )


def _told(summary: dict) -> str:
    text = f"{summary['sessions']} sessions with {summary['sub_agents']} sub-agents, {summary['requests']} requests"
    hit, shared = summary["theoretical_prefix_hit"], summary["theoretical_prefix_hit_shared"]
    if hit is None:
        return text
    text += f"; theoretical prefix hit {100 * hit:.1f}%"
    return text if shared == hit else text + f" ({100 * shared:.1f}% with what sessions share)"


def _table(summary: dict) -> Table:
    table = Table("", "mean", "p10", "p50", "p90", "p99", "max")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, spread in summary.items():
        if isinstance(spread, dict) and spread:
            table.add_row(
                name.replace("_", " "),
                *(
                    f"{spread[key]:,.4g}" if spread[key] < 1000 else f"{spread[key]:,.0f}"
                    for key in ("mean", "p10", "p50", "p90", "p99", "max")
                ),
            )
    return table
