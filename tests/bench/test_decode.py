"""``bench decode`` on the CPU: what is counted is steady, no prompt is computed, and each request has blocks of its own."""

import signal
from pathlib import Path

import msgspec
import pytest

from flashstep.bench.decode import DecodeReport, Workload, engine_for, measure, requests_of
from flashstep.bench.offline import Offline
from flashstep.bench.results import as_json
from flashstep.cache.budget import plan_cache
from flashstep.cli.model import tiny_model
from flashstep.config.engine import EngineConfig
from flashstep.config.model import ModelConfig
from flashstep.config.presets import released
from flashstep.config.speculative import RejectionSampleMethod, SpeculativeOptions

MODEL = ModelConfig.read(tiny_model())
WORKLOAD = Workload(context=3001, batch_size=3, steps=6, warm_up=2)
SYNTHETIC = SpeculativeOptions(
    rejection_sample_method=RejectionSampleMethod.SYNTHETIC, synthetic_acceptance_length=2.5
)


@pytest.mark.parametrize(
    ("speculative", "emulate"),
    [
        (None, None),
        (SpeculativeOptions(num_speculative_tokens=2), None),
        (SYNTHETIC, "dep4:1"),
        (None, "tp2:0"),
    ],
    ids=["plain", "drafts", "synthetic-dep", "tp"],
)
def test_every_counted_step_runs_every_request(
    speculative: SpeculativeOptions | None, emulate: str | None, tmp_path: Path
) -> None:
    config = EngineConfig(
        model=tiny_model(),
        speculative=speculative,
        emulate=emulate,
        load_format="dummy" if emulate else "auto",
        routing="uniform",
        record_expert_loads=tmp_path / "loads",
    )
    report = measure(config, WORKLOAD)
    assert report.complete and not report.faults and len(report.steps) == WORKLOAD.steps
    assert all(len(step.tokens) == 3 and step.us > 0 for step in report.steps)
    assert report.drafts == (0 if speculative is None else speculative.num_speculative_tokens or 5)
    assert report.tokens_a_step == 1 if speculative is None else report.tokens_a_step >= 1
    synthetic = ("synthetic acceptance",) if speculative is SYNTHETIC else ()
    assert report.falsified_by == (*synthetic, "uniform routing", "filled cache")
    assert report.balance is not None and report.balance.parts == (4 if emulate == "dep4:1" else 8)
    assert len(report.balance.by_step) == WORKLOAD.steps and 0 < report.balance.window <= 1
    assert as_json(msgspec.json.decode(as_json(report), type=DecodeReport)) == as_json(report)
    entry = report.entry()
    assert entry.samples.column("step_us").keys() == set(map(str, range(WORKLOAD.steps)))
    assert entry.metrics["step_us"] == report.median_us
    assert entry.settings["context"] == 3001 and entry.subject["layout"] == (emulate or "whole")
    assert entry.falsified_by == report.falsified_by
    assert (entry.settings["cache"], entry.settings["fill_cache_std"]) == ("filled", 0.0)


def test_the_context_is_there_and_nobody_computed_it() -> None:
    config = engine_for(EngineConfig(model=tiny_model()), MODEL, WORKLOAD)
    offline = Offline(config)
    for request in requests_of(WORKLOAD, vocabulary=2048, seed=0, limit=config):
        offline.engine.add(request)
    steps = offline.steps()
    first = next(steps)
    stats = offline.engine.stats()
    assert len(first.tokens) == 3, "all in one step"
    assert stats.transferred_tokens == 3 * 3000 and stats.rows <= 2 * 3 and stats.cached_tokens == 0
    held = offline.engine._scheduler._memory.blocks.owned
    assert held == 3 * -(-3002 // config.block_size), "blocks of their own"
    steps.close()
    offline.engine.check_integrity()
    assert not offline.engine.has_work


def test_prompts_differ_in_their_ends() -> None:
    config = engine_for(EngineConfig(model=tiny_model()), MODEL, WORKLOAD)
    prompts = [item.prompt for item in requests_of(WORKLOAD, vocabulary=2048, seed=1, limit=config)]
    assert all(len(prompt) == 3001 for prompt in prompts) and len({prompt[-8:] for prompt in prompts}) == 3
    again = [item.prompt for item in requests_of(WORKLOAD, vocabulary=2048, seed=1, limit=config)]
    assert prompts == again


def test_memory_fits_at_the_released_shapes() -> None:
    workload = Workload(context=131_072, batch_size=64, steps=100, warm_up=10)
    model = released()
    config = engine_for(EngineConfig(model=Path("none"), speculative=SpeculativeOptions()), model, workload)
    budget = plan_cache(model, config)
    assert budget.max_model_len == config.max_model_len
    assert budget.num_blocks >= 64 * -(-budget.max_model_len // budget.block_size)
    assert budget.num_window_blocks >= budget.live_window_blocks


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="the model's positions end at 1048576"):
        measure(EngineConfig(model=tiny_model()), Workload(context=1 << 20, batch_size=1, steps=1, warm_up=0))


def test_an_interrupted_run_keeps_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Offline.steps

    def interrupted(self: Offline):
        for number, step in enumerate(steps(self)):
            if number == 5:
                raise KeyboardInterrupt
            yield step

    monkeypatch.setattr(Offline, "steps", interrupted)
    report = measure(EngineConfig(model=tiny_model()), WORKLOAD)
    assert len(report.steps) == 2 and not report.complete and report.faults == ("it was interrupted",)
    assert not report.entry().complete and report.entry().metrics["step_us"] > 0


def test_ctrl_c_takes_effect_between_steps() -> None:
    """Wherever it comes: the step is finished and given, the engine is left whole, and the old handler is back."""
    offline = Offline(engine_for(EngineConfig(model=tiny_model()), MODEL, WORKLOAD))
    for request in requests_of(WORKLOAD, vocabulary=2048, seed=0, limit=offline.config):
        offline.engine.add(request)
    commit, taken = offline.engine.commit, []

    def cut(result):
        if len(taken) == 3:
            signal.raise_signal(signal.SIGINT)  # in the middle of a step
        return commit(result)

    offline.engine.commit = cut
    with pytest.raises(KeyboardInterrupt):
        for step in offline.steps():
            taken.append(step)
    assert len(taken) == 4 and not offline.engine.has_work
    offline.engine.check_integrity()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
