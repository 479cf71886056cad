"""``bench latency`` on the CPU: every token is counted, and steps are told apart from the prompt's."""

import statistics
from pathlib import Path

import msgspec
import pytest

from flashstep.bench.latency import LatencyReport, Workload, measure
from flashstep.bench.offline import Offline
from flashstep.bench.results import as_json
from flashstep.cli.model import tiny_model
from flashstep.config.engine import EngineConfig
from flashstep.config.speculative import SpeculativeOptions
from flashstep.request import Request, SamplingParams


@pytest.mark.parametrize("speculative", [None, SpeculativeOptions()])
def test_rounds_count_every_token(speculative: SpeculativeOptions | None) -> None:
    workload = Workload(input_len=9, output_len=8, batch_size=2)
    config = EngineConfig(model=tiny_model(), speculative=speculative)
    report = measure(config, workload, warm_ups=1, rounds=2)
    assert len(report.rounds) == 2
    for item in report.rounds:
        # the first token of each request comes of the prompt's step
        assert sum(item.tokens) == 2 * (8 - 1) and len(item.tokens) == len(item.steps_us)
        assert 0 < item.first_token_us < item.total_us and min(item.steps_us) > 0
    assert report.tokens_a_step == 1 if speculative is None else report.tokens_a_step >= 1
    assert report.step_us(0.5) <= report.step_us(0.99)
    assert report.tokens_a_second > 0
    assert msgspec.json.decode(as_json(report), type=LatencyReport) == report
    entry = report.entry(settings={"routing": "real"}, subject={"engine": {}}, seed=3)
    rates = entry.detail["acceptance_by_position"]
    assert (len(rates), entry.seed, entry.complete) == (5 if speculative else 0, 3, True)
    assert sum(entry.samples.column("tokens").values()) == 2 * 2 * 7


def test_balancedness_is_told_while_loads_are_recorded(tmp_path: Path) -> None:
    config = EngineConfig(model=tiny_model(), record_expert_loads=tmp_path / "loads")
    report = measure(config, Workload(input_len=9, output_len=4, batch_size=2), warm_ups=2, rounds=1)
    assert report.balance is not None and report.balance.parts == 8
    assert 4 <= len(report.balance.by_step) <= 6, "warm-ups do not count"
    entry = report.entry(settings={}, subject={}, seed=0)
    assert entry.metrics["balancedness"] == report.balance.mean


@pytest.mark.parametrize("output_len", [2, 3])
def test_each_interval_holds_one_forward(output_len: int) -> None:
    """On a CPU, where a launch computes: the first token waits for no decoding step, and the last step takes its time."""
    workload = Workload(input_len=1, output_len=output_len, batch_size=1)
    report = measure(EngineConfig(model=tiny_model()), workload, warm_ups=1, rounds=5)
    for item in report.rounds:
        assert len(item.steps_us) == output_len - 1
    first = statistics.median(item.first_token_us for item in report.rounds)
    last = statistics.median(item.steps_us[-1] for item in report.rounds)
    # a prompt of one token is a forward like the others
    assert 0.55 < last / first < 1.8


def test_offline_steps_hold_one_forward_each() -> None:
    offline = Offline(EngineConfig(model=tiny_model()))
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    taken = []
    for number in range(4):
        offline.engine.add(Request(id=str(number), prompt=(5 + number,), params=params))
        taken.append([step.us for step in offline.steps()])
    assert {len(steps) for steps in taken} == {4}
    first, last = (statistics.median(steps[place] for steps in taken[1:]) for place in (0, -1))
    assert 0.55 < last / first < 1.8
