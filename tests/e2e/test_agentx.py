"""The AgentX harness, as benchmarks use it, against the embedded model: the command of spec/serving.md H.1, and its score (H12).

The harness has an environment of its own, ``.venv-agentx`` (``make`` makes it): it wants other releases of pyzmq, rich and
prometheus-client than flashstep does.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import ROOT, TINY, Served, environment
from tests.e2e.weka import write_traces

AGENTX = ROOT / ".venv-agentx" / "bin" / "agentx"
DURATION_S = 6
WARM_UP_PER_LANE = 1
LANES = 2
TEMPLATE_TOKENS = 200  # what the chat template and the harness's own words may add to a recorded prompt
EXTRA = {"chat_template_kwargs": {"reasoning_effort": "high", "thinking": True}, "temperature": 1}


def replay(served: Served, *, traces: Path, tokenizer: Path, out: Path) -> str:
    """Run the harness to its end; gives what it printed. It must end with 0."""
    options = {
        "--url": served.url,
        "--model": "flashstep",
        "--tokenizer": tokenizer,
        "--concurrency": LANES,
        "--benchmark-duration": DURATION_S,
        "--random-seed": 42,
        "--custom-dataset-type": "weka_trace",
        "--input-file": traces,
        "--ui": "none",
        "--warmup-requests-per-lane": WARM_UP_PER_LANE,
        "--extra-inputs": json.dumps(EXTRA),
        "--output-artifact-dir": out,
    }
    arguments = [str(word) for pair in options.items() for word in pair]
    ended = subprocess.run(
        [AGENTX, "profile", "--unsafe-override", *arguments],
        cwd=out.parent,
        env=environment(HOME=str(out.parent)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def percentile(values: list[float], share: float) -> float:
    """Between the two nearest values, as the harness does it."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def inter_token_ms(record: dict[str, Any]) -> float:
    """From the three figures of one request that a client sees with a watch."""
    values = {name: metric["value"] for name, metric in record["metrics"].items()}
    decoding = values["request_latency"] - values["time_to_first_token"]
    return decoding / (values["output_sequence_length"] - 1)


@pytest.mark.slow
@pytest.mark.skipif(not AGENTX.exists(), reason=f"{AGENTX} is absent: make .venv-agentx/.installed")
def test_agentx_replays_sessions_without_an_error(tmp_path: Path) -> None:
    traces, tokenizer, out = tmp_path / "traces", tmp_path / "tokenizer", tmp_path / "out"
    longest = write_traces(traces, sessions=2, turns=6)
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tokenizer / name)
    limit = str(longest + TEMPLATE_TOKENS)
    served = Served(None, "--max-model-len", limit, "--served-model-name", "flashstep")
    try:
        printed = replay(served, traces=traces, tokenizer=tokenizer, out=out)
        assert served.idle
        assert "Traceback" not in served.log()
        engine_saw = served.metric("request_success_total")
    finally:
        served.remove()

    records = [json.loads(line) for line in (out / "profile_export.jsonl").read_text().splitlines()]
    assert not [record["error"] for record in records if record.get("error")]
    assert len(records) == engine_saw, "a request that the harness counts was answered, and no other"
    measured = [record for record in records if record["metadata"]["benchmark_phase"] == "profiling"]
    assert len(measured) > 2 * LANES
    assert {record["metadata"]["agent_depth"] for record in records} == {0, 1}, "the sub-agent ran, too"
    export = json.loads((out / "profile_export_aiperf.json").read_text())
    assert export["request_count"]["avg"] == len(measured)
    assert export["error_summary"] == [] and export["was_cancelled"] is False
    assert export["metadata"]["submission_invalid_reasons"] == ["unsafe_override"]
    assert export["total_usage_prompt_cache_read_tokens"]["avg"] > 0, (
        "turns of a session hit the prefix cache"
    )

    told = 1000 / export["inter_token_latency"]["p90"]
    recomputed = 1000 / percentile([inter_token_ms(record) for record in measured], 0.9)
    assert recomputed == pytest.approx(told, rel=1e-9), "P90 interactivity, tokens/s/user"
    assert f"{export['request_count']['avg']:,.2f}" in printed
