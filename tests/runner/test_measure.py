"""What the caches of a GPU may take: by arithmetic before loading, and when it is asked at all. A GPU test measures."""

from pathlib import Path

import msgspec

from flashstep.config.engine import DEFAULT_CACHE_BYTES, EngineConfig
from flashstep.config.presets import released
from flashstep.parallel.layout import Layout
from flashstep.runner.measure import expected, measures
from flashstep.runner.memory import plan_memory

GPU = 139 * 10**9
CONFIG = EngineConfig(model=Path("released"), load_format="dummy", emulate="dep32:0", max_num_seqs=16)


def test_only_what_nobody_has_said_is_measured() -> None:
    assert measures(CONFIG, on_gpu=True) and not measures(CONFIG, on_gpu=False)
    assert not measures(msgspec.structs.replace(CONFIG, kv_cache_memory_bytes=1 << 30), on_gpu=True)
    assert not measures(msgspec.structs.replace(CONFIG, num_blocks_override=9), on_gpu=True)


def test_the_cache_gets_what_the_share_leaves() -> None:
    layout = Layout.parse("dep32:0")
    view = layout.view(released())
    plans = {}
    for share in (0.5, 0.9):
        config = msgspec.structs.replace(CONFIG, gpu_memory_utilization=share)
        filled = expected(view, config, layout=layout, free_bytes=GPU)
        assert filled.kv_cache_memory_bytes is not None
        plans[share] = plan_memory(view, filled, layout=layout, on_gpu=True)
        assert 0.9 * share * GPU < plans[share].device_bytes <= share * GPU + (1 << 20)
    assert plans[0.9].budget.num_blocks >= plans[0.5].budget.num_blocks


def test_a_gpu_that_is_too_small_is_for_the_check_to_refuse() -> None:
    layout = Layout.parse("dep32:0")
    filled = expected(layout.view(released()), CONFIG, layout=layout, free_bytes=10**9)
    assert filled.kv_cache_memory_bytes == DEFAULT_CACHE_BYTES
