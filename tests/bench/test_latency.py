"""``bench latency`` on the CPU: every token is counted, and steps are told apart from the prompt's."""

from pathlib import Path

import msgspec
import pytest

from flashstep.bench.latency import LatencyReport, Workload, measure
from flashstep.bench.results import as_json
from flashstep.cli.model import tiny_model
from flashstep.config.engine import EngineConfig
from flashstep.config.speculative import SpeculativeOptions


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
    report = measure(config, Workload(input_len=9, output_len=4, batch_size=2), warm_ups=0, rounds=1)
    assert report.balance is not None and report.balance.parts == 8 and len(report.balance.by_step) >= 4
    entry = report.entry(settings={}, subject={}, seed=0)
    assert entry.metrics["balancedness"] == report.balance.mean
