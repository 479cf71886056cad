"""The plan of memory: what is exact is exact, what does not fit is refused with a setting that does, and it does."""

import math
from pathlib import Path

import msgspec
import pytest

from flashstep.cache.budget import plan_cache, weight_bytes
from flashstep.config.engine import EngineConfig
from flashstep.config.engram import EngramOptions
from flashstep.config.errors import ConfigError
from flashstep.config.presets import released
from flashstep.config.speculative import SpeculativeOptions
from flashstep.parallel.layout import WHOLE, Layout
from flashstep.runner.memory import (
    WORKSPACE,
    Machine,
    check_memory,
    comparison,
    loaded_bytes,
    plan_memory,
    share_of,
)
from flashstep.weights.names import parameters

RELEASED = released()
H200 = Machine(host=10**12, device_free=139 * 10**9)
IN_GPU = EngramOptions(cpu_offload=False)


def engine(**options: object) -> EngineConfig:
    return EngineConfig(model=Path("none"), speculative=SpeculativeOptions(), load_format="dummy", **options)


def refusal(config: EngineConfig, layout: Layout = WHOLE, machine: Machine = H200) -> str:
    view = layout.view(RELEASED)
    plan = plan_memory(view, config, layout=layout, on_gpu=machine.device_free is not None)
    with pytest.raises(ConfigError) as caught:
        check_memory(plan, view, config, layout=layout, machine=machine)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("text", "gb"), [("tp4:0", 77.3), ("dep8:3", 50.6), ("dep32:0", 20.6), ("tp2:1", 153.7)]
)
def test_a_rank_s_weights_are_those_of_the_table_of_names(text: str, gb: float) -> None:
    """And of performance.md 3.1."""
    layout = Layout.parse(text)
    view = layout.view(RELEASED)
    width = {"BF16": 2, "F32": 4}
    stored = (s for p in parameters(view, layout).values() for s in p.stored)
    weights = weight_bytes(view, share_of(view, layout))
    assert sum(math.prod(s.shape) * width.get(s.dtype, 1) for s in stored) == sum(weights.values())
    assert round((sum(weights.values()) - weights["Engram tables"]) / 1e9, 1) == gb


@pytest.mark.parametrize("text", ["tp4:0", "dep8:3", "dep32:0"])
def test_the_ranks_to_be_measured_fit(text: str) -> None:
    layout = Layout.parse(text)
    view = layout.view(RELEASED)
    config = engine(kv_cache_memory_bytes=20 << 30, max_num_batched_tokens=8192)
    plan = plan_memory(view, config, layout=layout, on_gpu=True)
    check_memory(plan, view, config, layout=layout, machine=H200)
    assert plan.budget == plan_cache(view, config)
    assert plan.device["caches"] == plan.budget.bytes and 1e9 < plan.device[WORKSPACE] < 20e9
    assert loaded_bytes(plan) < plan.device_bytes
    assert "+0.0%" in comparison(plan, measured=loaded_bytes(plan))


def test_too_much_cache_is_refused_with_as_much_as_fits() -> None:
    layout = Layout.parse("dep8:3")
    problem = refusal(engine(kv_cache_memory_bytes=100 << 30), layout)
    assert "139.00 GB free" in problem and "caches 107.37 GB" in problem
    flag, value = problem.partition("Nearest that fits: ")[2].split()
    assert flag == "--kv-cache-memory-bytes"
    view = layout.view(RELEASED)
    for change, fits in ((0, True), (64 << 20, False)):
        config = engine(kv_cache_memory_bytes=int(value) + change)
        plan = plan_memory(view, config, layout=layout, on_gpu=True)
        assert (plan.device_bytes <= 139 * 10**9) == fits


def test_steps_that_are_too_large_are_made_smaller() -> None:
    problem = refusal(engine(max_num_batched_tokens=400_000), Layout.parse("dep8:3"))
    assert "a step's workspace" in problem and "--max-num-batched-tokens" in problem.partition("Nearest")[2]


def test_tables_in_the_gpu_s_memory_are_sent_to_the_host() -> None:
    problem = refusal(engine(engram=IN_GPU), Layout.parse("dep32:0"))
    assert "Engram tables 202.76 GB" in problem and "--engram-config" in problem.partition("Nearest")[2]


def test_a_model_that_is_too_large_is_told_which_rank_would_fit() -> None:
    assert "one rank of tp4 would: --load-format dummy --emulate tp4:0" in refusal(engine())
    assert "No setting fits" in refusal(engine(), machine=Machine(host=8 << 30, device_free=8 << 30))


def test_a_cpu_counts_what_plain_torch_makes_of_the_weights() -> None:
    on_cpu = plan_memory(RELEASED, engine(), layout=WHOLE, on_gpu=False)
    on_gpu = plan_memory(RELEASED, engine(), layout=WHOLE, on_gpu=True)
    values = 40 * 384 * 3 * 5120 * 2304
    assert on_cpu.device["weights: routed experts"] == 8 * values
    assert on_gpu.device["weights: routed experts"] == values * 17 // 32
    assert "this machine has" in refusal(engine(), machine=Machine(host=64 << 30, device_free=None))


def test_the_drafter_counts_only_where_drafts_are_made() -> None:
    without = msgspec.structs.replace(engine(), speculative=None)
    names = plan_memory(RELEASED, without, layout=WHOLE, on_gpu=True).device
    assert "weights: drafter" not in names


def test_experts_that_are_put_in_have_their_memory() -> None:
    """Only where somebody asks for them: rows of all layers, what a step makes them of, loads that are kept."""
    plain = plan_memory(RELEASED, engine(), layout=WHOLE, on_gpu=True).device
    uniform = plan_memory(RELEASED, engine(routing="uniform"), layout=WHOLE, on_gpu=True).device
    assert "expert routing" not in plain
    assert 10 << 20 < uniform["expert routing"] < 1 << 30
