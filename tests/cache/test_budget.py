"""The memory plan: the released figures, and that what is planned fits and suffices."""

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashstep.cache.budget import plan_cache, report, weight_bytes
from flashstep.cache.groups import CacheGroups
from flashstep.config.cache import CacheConfig, HitPolicy
from flashstep.config.engine import EngineConfig
from flashstep.config.engram import EngramOptions
from flashstep.config.errors import ConfigError
from flashstep.config.model import ModelConfig
from flashstep.config.presets import released
from flashstep.config.scheduler import SchedulerConfig
from flashstep.config.speculative import SpeculativeOptions, speculation
from flashstep.scheduler.scheduler import Scheduler

RELEASED = released()
GIB = 1 << 30


def engine(**options) -> EngineConfig:
    return EngineConfig(model=Path("none"), **options)


def test_890_bytes_of_global_kv_a_token_at_the_released_shapes():
    groups = CacheGroups.of(RELEASED)
    assert (groups.window.bytes, groups.compressed.bytes, groups.index_key.bytes) == (528, 288, 68)
    assert groups.global_bytes_per_token == 890
    for block_size in (2, 32, 64):
        assert plan_cache(RELEASED, engine(block_size=block_size)).block_bytes == 890 * block_size
    assert "890 bytes a token" in report(RELEASED, engine())


def test_the_released_weights_add_up_to_the_published_total():
    """spec/model.md 11: 510,286,023,000 bytes, of which the image tower (left out in the plan) is counted here."""
    matrices = [(1024, 588), (5120, 9216), (5120, 5120)]  # patches and aligner
    blocks = 32 * (2 * 1024 + 3072 * 1024 + 3072 + 1024 * 1024 + 1024 + 5632 * 1024 + 1024 * 2816)
    vectors = 3 * 5120 + 1024 + 1024 + 5120 + 5120
    vision = 2 * (sum(math.prod(shape) for shape in matrices) + blocks + vectors)
    assert sum(weight_bytes(RELEASED).values()) + vision == 510_286_023_000


def test_the_weights_agree_with_the_table_of_names():
    """Two independent sums: by formula here, tensor by tensor in weights.names."""
    from flashstep.weights.names import parameters

    width = {"BF16": 2, "F32": 4}
    total = 0
    for parameter in parameters(RELEASED).values():
        for stored in parameter.stored:
            total += math.prod(stored.shape) * width.get(stored.dtype, 1)
    assert total == sum(weight_bytes(RELEASED).values())


@settings(max_examples=60, deadline=None)
@given(
    memory=st.integers(1, 2 << 30),
    block_size=st.sampled_from([8, 32, 64]),
    max_num_seqs=st.sampled_from([1, 8, 256, 1024]),
    batched=st.sampled_from([16, 2048, 16384]),
    max_model_len=st.sampled_from([None, 64, 4096, 1 << 20]),
    policy=st.sampled_from(list(HitPolicy)),
    drafts=st.sampled_from([None, 1, 5]),
)
def test_what_is_planned_fits_and_a_scheduler_accepts_it(
    memory, block_size, max_num_seqs, batched, max_model_len, policy, drafts
):
    options = SpeculativeOptions(num_speculative_tokens=drafts) if drafts else None
    config = engine(
        kv_cache_memory_bytes=memory,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        max_model_len=max_model_len,
        hit_policy=policy,
        speculative=options,
    )
    try:
        budget = plan_cache(RELEASED, config)
    except ConfigError:
        wanted = max_model_len or 1
        assert memory < 4 * wanted * 890 + 2 * max_num_seqs * 98_304 + 2 * (block_size + 512) * 22_704
        return
    assert budget.bytes <= memory
    assert budget.max_model_len <= RELEASED.max_position_embeddings
    if max_model_len is not None:
        assert budget.max_model_len == max_model_len
    cache = CacheConfig(
        block_size=block_size,
        num_blocks=budget.num_blocks,
        num_window_blocks=budget.num_window_blocks,
        hit_policy=policy,
    )
    limits = SchedulerConfig(
        max_model_len=budget.max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=batched
    )
    Scheduler(
        limits,
        cache,
        sliding_window=RELEASED.sliding_window,
        eos_token_ids=(1,),
        speculation=speculation(options, RELEASED) if options else None,
    )


def test_more_memory_is_never_fewer_blocks_and_is_used():
    previous = 0
    for gib in range(1, 40, 3):
        budget = plan_cache(RELEASED, engine(kv_cache_memory_bytes=gib * GIB))
        assert budget.num_blocks >= previous
        assert budget.bytes > 0.99 * gib * GIB
        previous = budget.num_blocks


def test_windows_get_their_need_and_exact_hits_a_quarter_of_the_rest():
    options = {"kv_cache_memory_bytes": 40 * GIB, "max_num_seqs": 16}
    exact = plan_cache(RELEASED, engine(**options))
    bounded = plan_cache(RELEASED, engine(**options, hit_policy=HitPolicy.BOUNDED))
    assert bounded.num_window_blocks == bounded.live_window_blocks == 16 * 6 + 2 * 64
    extra = (exact.num_window_blocks - exact.live_window_blocks) * exact.window_block_bytes
    assert 0.24 < extra / (40 * GIB) < 0.25
    off = plan_cache(RELEASED, engine(**options, enable_prefix_caching=False))
    assert off.num_window_blocks == bounded.num_window_blocks


@pytest.mark.parametrize(("asked", "k"), [(None, 5), (2, 2)])
def test_drafts_take_windows_of_their_own_and_rows_ahead(asked, k):
    """spec/model.md 10: 2,906,112 bytes of windows a request with drafts; global KV stays at 890 bytes a token."""
    options = {"kv_cache_memory_bytes": 40 * GIB, "max_num_seqs": 16, "hit_policy": HitPolicy.BOUNDED}
    config = engine(**options, block_size=2, speculative=SpeculativeOptions(num_speculative_tokens=asked))
    budget, plain = plan_cache(RELEASED, config), plan_cache(RELEASED, engine(**options, block_size=2))
    assert 64 * budget.window_block_bytes == 2_906_112 and 64 * plain.window_block_bytes == 2_703_360
    assert budget.block_bytes == 2 * 890
    ahead = 2 * (1 + k)  # two steps in flight, each as long as its drafts and a token more
    assert plain.live_window_blocks == 16 * (64 + 1 + 1) + 2 * 1024
    assert budget.live_window_blocks == 16 * (-(-(128 + ahead - 1) // 2) + 1) + 2 * 1024
    deep = msgspec.structs.replace(RELEASED, dspark_block_size=8)
    assert plan_cache(deep, config).tail_bytes == 16 * 3 * 10 * 1024 * 4
    assert budget.tail_bytes == plain.tail_bytes == 16 * 3 * 8 * 1024 * 4


def test_an_override_sets_the_global_blocks():
    budget = plan_cache(RELEASED, engine(num_blocks_override=10))
    assert (budget.num_blocks, budget.max_model_len) == (10, 320)
    with pytest.raises(ConfigError, match="max_model_len 321; give num_gpu_blocks_override at least 11"):
        plan_cache(RELEASED, engine(num_blocks_override=10, max_model_len=321))


def test_what_does_not_fit_is_refused_with_the_bytes_it_needs():
    with pytest.raises(ConfigError, match=r"kv_cache_memory_bytes at least (\d+)") as caught:
        plan_cache(RELEASED, engine(max_model_len=1 << 20))
    need = int(str(caught.value).split("at least ")[1].split()[0])
    plan_cache(RELEASED, engine(max_model_len=1 << 20, kv_cache_memory_bytes=2 * need))
    with pytest.raises(ConfigError, match=r"block_size is 5.*\n.*2000000.*1048576"):
        plan_cache(RELEASED, engine(block_size=5, max_model_len=2_000_000))


def test_a_model_without_kv_sources_needs_no_global_memory():
    plain = msgspec.structs.replace(
        RELEASED,
        compress_ratios=(0,) * 43,
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        candidate_source_layer_id=-1,
    )
    assert isinstance(plain, ModelConfig)
    budget = plan_cache(plain, engine(max_model_len=4096))
    assert (budget.block_bytes, budget.num_blocks) == (0, 256 * 128)


def test_the_report_names_every_group_and_its_reason():
    text = report(
        RELEASED,
        engine(engram=EngramOptions(dp_shared_memory=True), device="cpu", kv_cache_memory_bytes=64 * GIB),
    )
    for word in (
        "routed experts",
        "Engram tables",
        "memory-mapped on disk",
        "global KV",
        "1/2 + 1/2 + 1/2 + 1",
        "528 x 40 layers",
        "tails",
        "max_model_len 1,048,576 (the checkpoint's limit)",
        "requests of full length",
    ):
        assert word in text, word
    assert "the cache holds no more" in report(RELEASED, engine())
    assert "drafter is not loaded" in text
    drafting = report(RELEASED, engine(speculative=SpeculativeOptions()))
    assert "drafter is loaded" in drafting and "528 x 43 layers, 3 of them the drafter's" in drafting
    assert "(asked for)" in report(RELEASED, engine(max_model_len=100))
