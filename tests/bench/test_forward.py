"""``bench forward`` on the CPU, with the tiny model and with a rank of it: what is timed is what was asked for."""

from pathlib import Path

import msgspec
import pytest

from flashstep.bench.cases import Case
from flashstep.bench.forward import engine_for, measure
from flashstep.bench.results import Report, as_json, percentile
from flashstep.cache.budget import plan_cache
from flashstep.cli.model import tiny_model
from flashstep.config.engine import EngineConfig
from flashstep.config.presets import released
from flashstep.parallel.balance import balancedness
from flashstep.parallel.loads import read

CASES = ("2*6@70", "1*1@40:0", "40@30", "40@30c", "9")


@pytest.mark.parametrize("emulate", [None, "tp2:1", "dep4:3"])
def test_every_kind_of_case_is_timed(emulate: str | None) -> None:
    config = EngineConfig(model=tiny_model(), emulate=emulate, load_format="dummy" if emulate else "auto")
    told: list[str] = []
    report = measure(config, CASES, repeats=3, progress=told.append)
    assert [case.case for case in report.cases] == ["2*6@70:5", "1*1@40:0", "1*40@30", "1*40@30c", "1*9@0"]
    assert [case.rows for case in report.cases] == [12, 1, 40, 40, 9]
    for case in report.cases:
        assert len(case.samples_us) == 3 and case.us > 0 and case.floor_us is None and not case.graph
        assert 0 < case.touched_experts <= 1.3 * case.expected_experts
    assert report.layout == (emulate or "whole") and bool(report.excluded) == bool(emulate)
    assert len(told) == 1 + len(CASES)
    again = msgspec.json.decode(as_json(report), type=Report)
    assert again == report


def test_the_engine_has_room_for_every_case() -> None:
    """Also at the released shapes: every request of a case has blocks of its own, and its windows."""
    model = released()
    texts = ("1*6@131072", "64*6@131072", "8192@524288", "2*8192@0c")
    cases = [Case.parse(text, draft_block=model.dspark_block_size) for text in texts]
    config = engine_for(EngineConfig(model=Path("none")), model, cases)
    budget = plan_cache(model, config)
    for case in cases:
        assert case.blocks(block_size=config.block_size) <= budget.num_blocks
        held = case.window_blocks(block_size=config.block_size, window=model.sliding_window)
        assert held <= budget.num_window_blocks
    assert config.max_model_len is not None and config.max_model_len >= 524288 + 8192
    assert budget.bytes < 25e9


def test_more_rows_than_a_step_of_decoding_has_are_refused() -> None:
    with pytest.raises(ValueError, match="has 9 rows a request"):
        measure(EngineConfig(model=tiny_model()), ("9@20:5",), repeats=1)


def test_experts_are_those_that_were_asked_for(tmp_path: Path) -> None:
    """Uniform loads, padding none: one step of each case is written down, and its balancedness told."""
    loads = tmp_path / "loads"
    config = EngineConfig(model=tiny_model(), routing="uniform", record_expert_loads=loads)
    report = measure(config, ("8*6@70", "64@30"), repeats=1)
    (decoding, prompt), header = read(loads).steps, read(loads).header
    assert decoding.draft is not None and prompt.draft is None
    for step, case in zip((decoding, prompt), report.cases, strict=True):
        assert step.rows == case.rows and case.balancedness is not None
        for counts_E in step.target:
            assert counts_E.sum() in (0, step.rows * header.target.chosen, 64 * header.target.chosen)
            assert counts_E.max() - counts_E[counts_E > 0].min(initial=counts_E.max()) <= 1
        assert case.balancedness == balancedness(step.target, parts=8) and case.balancedness > 0.8
    assert measure(EngineConfig(model=tiny_model()), ("9",), repeats=1).cases[0].balancedness is None


def test_percentiles() -> None:
    found = [percentile([3.0, 1.0, 2.0, 4.0], share) for share in (0.0, 0.5, 0.99, 1.0)]
    assert found == [1.0, 2.0, 4.0, 4.0]


@pytest.mark.gpu
def test_on_a_gpu_steps_are_taken_apart(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    report = measure(EngineConfig(model=tiny_model()), ("40@30", "2*6@70"), repeats=3, trace=trace)
    prompt, decoding = report.cases
    assert decoding.graph and not prompt.graph
    for case in report.cases:
        whole = sum(kernel.us for kernel in case.kernels)
        assert (
            case.launches
            == sum(kernel.calls for kernel in case.kernels)
            == sum(p.launches for p in case.parts)
        )
        assert sum(part.us or 0 for part in case.parts) == pytest.approx(whole)
        assert case.idle_share is not None and 0 <= case.idle_share < 1 and case.floor_us
        told = sum(kernel.us for kernel in case.kernels if kernel.account)
        assert told > 0.95 * whole, "nearly every kernel is known to belong to an op"
    assert report.memory.loaded_bytes > 0 and "traceEvents" in trace.read_text()
