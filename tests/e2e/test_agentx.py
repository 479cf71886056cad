"""The AgentX harness, as benchmarks use it: the command of spec/serving.md H.1, its score (H12), and our own replay beside it.

On the embedded model the harness must run without an error, and ``flashstep bench replay`` must send the server the same prompts.
On a server with known times both must also tell the same times. The harness has an environment of its own, ``.venv-agentx``
(``make`` makes it): it wants other releases of pyzmq, rich and prometheus-client than flashstep does.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import pytest

from flashstep.bench import ledger
from flashstep.bench.load import traces
from flashstep.bench.load.generate import Habits, Lognormal, generate, scaled
from flashstep.bench.load.sessions import Session, in_order, theoretical_hits
from tests.bench.load.scripted import FIRST_S, TOKEN_S, ScriptedServer
from tests.e2e.serving import ROOT, TINY, Served, environment

AGENTX = ROOT / ".venv-agentx" / "bin" / "agentx"
DURATION_S = 8
WARM_UP_PER_LANE = 1
LANES = 2
JOINED_AT = 0.5  # of its first session, in both tools: where a lot decides, two tools draw two
TEMPLATE_TOKENS = 200  # what the chat template and the harness's own words may add to a recorded prompt
EXTRA = {"chat_template_kwargs": {"reasoning_effort": "high", "thinking": True}, "temperature": 1}
HABITS = msgspec.structs.replace(
    scaled(Habits(), 0.02),
    tool_pause_s=Lognormal(0.1, 0.5),
    person_pause_s=Lognormal(0.3, 0.5),
    fan_out=0.3,
    first_token_s=FIRST_S,
    token_s=TOKEN_S,
)
NEEDED = pytest.mark.skipif(not AGENTX.exists(), reason=f"{AGENTX} is absent: make .venv-agentx/.installed")
Turn = tuple[str, int]  # conversation, turn


class Harness:
    """One run of the harness: what it printed, its records of the measured phase, its summary."""

    def __init__(self, url: str, *, model: str, folder: Path, extra: Mapping[str, Any]) -> None:
        tokenizer, out = folder / "tokenizer", folder / "out"
        tokenizer.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TINY / name, tokenizer / name)
        options = {
            "--url": url,
            "--model": model,
            "--tokenizer": tokenizer,
            "--concurrency": LANES,
            "--benchmark-duration": DURATION_S,
            "--random-seed": 42,
            "--custom-dataset-type": "weka_trace",
            "--input-file": folder / "traces",
            "--ui": "none",
            "--warmup-requests-per-lane": WARM_UP_PER_LANE,
            "--trajectory-start-min-ratio": JOINED_AT,
            "--trajectory-start-max-ratio": JOINED_AT,
            "--extra-inputs": json.dumps(extra),
            "--output-artifact-dir": out,
        }
        arguments = [str(word) for pair in options.items() for word in pair]
        ended = subprocess.run(
            [AGENTX, "profile", "--unsafe-override", *arguments],
            cwd=folder,
            env=environment(HOME=str(folder)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout
        self.printed = ended.stdout
        self.records = [json.loads(line) for line in (out / "profile_export.jsonl").read_text().splitlines()]
        self.measured = [r for r in self.records if r["metadata"]["benchmark_phase"] == "profiling"]
        self.export = json.loads((out / "profile_export_aiperf.json").read_text())

    def values(self, metric: str) -> dict[Turn, float]:
        """By conversation and turn; of replays of the same turn, the last."""
        return {
            (r["metadata"]["conversation_id"], r["metadata"]["turn_index"]): r["metrics"][metric]["value"]
            for r in self.measured
            if metric in r["metrics"]
        }


class Ours:
    """One run of ``flashstep bench replay`` with the same trace, lanes, time and place to join."""

    def __init__(self, url: str, *, folder: Path, extra: Mapping[str, Any]) -> None:
        kept, raw = folder / "ledger.jsonl", folder / "raw.jsonl"
        options = {
            "--url": url,
            "--max-concurrency": LANES,
            "--duration-s": DURATION_S,
            "--warmup-requests": WARM_UP_PER_LANE,
            "--start-from": JOINED_AT,
            "--start-to": JOINED_AT,
            "--tokenizer": TINY,
            "--extra-body": json.dumps(extra),
            "--ledger": kept,
            "--raw": raw,
        }
        arguments = [str(word) for pair in options.items() for word in pair]
        command = [sys.executable, "-m", "flashstep", "bench", "replay", str(folder / "traces"), *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        (self.entry,) = ledger.read(kept)
        rows = [json.loads(line) for line in raw.read_text().splitlines()[1:]]
        self.measured = [row for row in rows if row["phase"] == "measured"]

    def values(self, name: str) -> dict[Turn, float]:
        return {(row["conversation"], row["turn"]): row["answer"][name] for row in self.measured}


def inter_token_ms(record: dict[str, Any]) -> float:
    """From the three figures of one request that a client sees with a watch."""
    values = {name: metric["value"] for name, metric in record["metrics"].items()}
    decoding = values["request_latency"] - values["time_to_first_token"]
    return decoding / (values["output_sequence_length"] - 1)


def drawn(folder: Path, *, sessions: int, answer_tokens: Lognormal, most_turns: int) -> list[Session]:
    habits = msgspec.structs.replace(HABITS, answer_tokens=answer_tokens)
    made = generate(sessions, seed=5, habits=habits, most_turns=most_turns)
    assert {0, 1} <= {len(session.streams) > 1 for session in made}
    traces.write(folder / "traces", made, form="weka")
    return made


def told_hit(made: Sequence[Session], turns: Sequence[Turn]) -> float:
    """Our theoretical hit of just these requests, in percent."""
    hits = {
        (session.name_of(place.stream), place.turn): theoretical_hits(session)[place]
        for session in made
        for place in in_order(session)
    }
    return 100 * sum(hits[turn].hit for turn in turns) / sum(hits[turn].total for turn in turns)


def assert_same_prompts(theirs: Harness, ours: Ours) -> None:
    """The server counted the same tokens in the prompt of every turn that both sent, but for a few.

    Where the harness joins blocks the tokenizer may merge across the seam; our blocks are words, which add up; and the mark's hex
    digits are other tokens each time.
    """
    told, counted = theirs.values("usage_prompt_tokens"), ours.values("prompt_tokens")
    both = told.keys() & counted.keys()
    assert len(both) >= 0.8 * min(len(told), len(counted)) > 4, "a busy machine gives one of them less time"
    assert [counted[turn] for turn in both] == pytest.approx([told[turn] for turn in both], abs=8)
    lengths, asked = theirs.values("output_sequence_length"), ours.values("output_tokens")
    assert {turn: lengths[turn] for turn in both} == {turn: asked[turn] for turn in both}


CHAINS = """
import sys
from pathlib import Path
from aiperf.dataset.loader.weka_agent_chains import detect_agent_chains
from aiperf.dataset.loader.weka_trace_models import WekaSubagentEntry, WekaTrace
for file in sorted(Path(sys.argv[1]).glob("*.json")):
    trace = WekaTrace.model_validate_json(file.read_bytes())
    agents = [entry for entry in trace.requests if isinstance(entry, WekaSubagentEntry)]
    own = [call for call in trace.requests if not isinstance(call, WekaSubagentEntry)]
    found = [detect_agent_chains(list(enumerate(calls))) for calls in (own, *(agent.requests for agent in agents))]
    print(trace.id, sum(1 + len(chains.worker_indices) for chains in found))
"""


@NEEDED
def test_agentx_finds_the_conversations_that_were_drawn(tmp_path: Path) -> None:
    """Also where a context was compacted: the harness must not take what follows for another agent's."""
    habits = msgspec.structs.replace(Habits(), fan_out=0.1, context_tokens=60_000)
    made = generate(20, seed=3, habits=habits, most_turns=60)
    traces.write(tmp_path, made, form="weka")
    cuts = [
        b.blocks[: len(a.blocks)] != a.blocks for s in made for q in s.streams for a, b in pairwise(q.turns)
    ]
    assert sum(cuts) > 5
    command = [AGENTX.with_name("python"), "-c", CHAINS, tmp_path]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.split(
        "\n"
    )
    assert found[:-1] == [f"{session.session} {len(session.streams)}" for session in made]


@pytest.mark.slow
@NEEDED
def test_agentx_replays_sessions_without_an_error_and_ours_sends_the_same(tmp_path: Path) -> None:
    made = drawn(tmp_path, sessions=4, answer_tokens=Lognormal(5, 0.3), most_turns=5)
    longest = max((t.input_tokens or 0) + t.output_tokens for s in made for q in s.streams for t in q.turns)
    limit = str(longest + TEMPLATE_TOKENS)
    served = Served(
        None, "--max-model-len", limit, "--served-model-name", "flashstep", "--enable-prompt-tokens-details"
    )
    try:
        theirs = Harness(served.url, model="flashstep", folder=tmp_path, extra=EXTRA)
        assert served.idle
        engine_saw = served.metric("request_success_total")
        ours = Ours(served.url, folder=tmp_path, extra=EXTRA)
        assert served.idle
        assert "Traceback" not in served.log()
    finally:
        served.remove()

    assert not [record["error"] for record in theirs.records if record.get("error")]
    assert len(theirs.records) == engine_saw, "a request that the harness counts was answered, and no other"
    assert len(theirs.measured) > 2 * LANES
    assert {record["metadata"]["agent_depth"] for record in theirs.records} == {0, 1}, (
        "the sub-agent ran, too"
    )
    export = theirs.export
    assert export["request_count"]["avg"] == len(theirs.measured)
    assert export["error_summary"] == [] and export["was_cancelled"] is False
    assert export["metadata"]["submission_invalid_reasons"] == ["unsafe_override"]
    cached = export["total_usage_prompt_cache_read_tokens"]["avg"]
    assert cached > 0, "turns of a session hit the prefix cache"

    timed = [record for record in theirs.measured if "inter_token_latency" in record["metrics"]]
    recomputed = 1000 / np.percentile([inter_token_ms(record) for record in timed], 90)
    told = 1000 / export["inter_token_latency"]["p90"]
    assert recomputed == pytest.approx(told, rel=1e-9), "P90 interactivity, tokens/s/user"
    assert f"{export['request_count']['avg']:,.2f}" in theirs.printed

    assert ours.entry.complete and not [fault for fault in ours.entry.faults if "requests" in fault]
    assert_same_prompts(theirs, ours)
    theirs_hit = cached / export["total_usage_prompt_tokens"]["avg"]
    assert ours.entry.metrics["prefix_hit"] == pytest.approx(theirs_hit, abs=0.1)


@pytest.mark.slow
@NEEDED
def test_ours_and_the_harness_tell_the_same_of_a_server_with_known_times(tmp_path: Path) -> None:
    """Tolerances: timers of the scripted server and both clients have a grain of 1 ms, once in a TTFT and spread over an answer's
    30 or more tokens in an ITL; requests at the end of the time are in or out by chance, one a lane; a busy machine adds to TTFT.
    """
    made = drawn(tmp_path, sessions=8, answer_tokens=Lognormal(45, 0.2), most_turns=8)
    with ScriptedServer() as server:
        theirs = Harness(server.url, model="scripted", folder=tmp_path, extra={})
    with ScriptedServer() as server:
        ours = Ours(server.url, folder=tmp_path, extra={})

    metrics, export = ours.entry.metrics, theirs.export
    theirs_ttft, theirs_itl = export["time_to_first_token"]["p50"], export["inter_token_latency"]["p50"]
    assert metrics["ttft_ms"] == pytest.approx(theirs_ttft, abs=3)
    assert metrics["ttft_ms"] == pytest.approx(1000 * FIRST_S, abs=5)
    assert metrics["itl_ms"] == pytest.approx(theirs_itl, rel=0.03)
    assert metrics["itl_ms"] == pytest.approx(1000 * TOKEN_S, rel=0.03)
    assert metrics["p90_interactivity_tps"] == pytest.approx(
        1000 / export["inter_token_latency"]["p90"], rel=0.05
    )

    assert len(ours.measured) == pytest.approx(len(theirs.measured), rel=0.08, abs=2 * LANES)
    assert_same_prompts(theirs, ours)
    outputs = [
        median(each.values(name).values())
        for each, name in ((theirs, "output_sequence_length"), (ours, "output_tokens"))
    ]
    assert outputs[0] == pytest.approx(outputs[1], rel=0.1)

    sent = [(r["metadata"]["conversation_id"], r["metadata"]["turn_index"]) for r in theirs.measured]
    assert told_hit(made, sent) == pytest.approx(export["theoretical_prefix_cache_hit"]["avg"], abs=1e-6)
    sent = [(row["conversation"], row["turn"]) for row in ours.measured]
    assert told_hit(made, sent) == pytest.approx(100 * metrics["theoretical_prefix_hit"], abs=1e-6)
    theirs_hit = (
        export["total_usage_prompt_cache_read_tokens"]["avg"] / export["total_usage_prompt_tokens"]["avg"]
    )
    assert metrics["prefix_hit"] == pytest.approx(theirs_hit, abs=0.04)
