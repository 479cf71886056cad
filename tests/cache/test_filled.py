"""Filled caches: what is named holds the value as its format rounds it, and nothing else changes."""

import pytest
import torch

from flashstep.cache.filled import MEAN, PATTERNS, FilledCache
from flashstep.cache.groups import CacheGroups
from flashstep.cache.pool import POISON_BYTE, CachePool
from flashstep.config.model import ModelConfig
from flashstep.quant import mxfp4, mxfp8, nvfp4
from tests.weights.conftest import tiny_json

SIZE = 8


@pytest.fixture
def pool() -> CachePool:
    config = ModelConfig.parse(tiny_json(dspark_block_size=5))
    return CachePool(
        CacheGroups.of(config, drafts=True),
        num_blocks=100,
        num_window_blocks=12,
        block_size=SIZE,
        num_slots=3,
        device=torch.device("cpu"),
    )


def records(pool: CachePool) -> list[tuple[str, torch.Tensor]]:
    """Every group's values fp32 [blocks, records, width] with its kind; NaN where poisoned."""
    found = [
        ("window", mxfp8.dequantise(values.view(torch.float8_e4m3fn), scales))
        for values, scales in (pool.window(layer).planes for layer in pool.window_layers)
    ]
    for source in map(pool.source, pool.sources):
        found.append(("global", nvfp4.dequantise(*source.compressed)))
        found.append(("global", mxfp4.dequantise(*source.index_keys)))
    return found


def test_named_blocks_hold_the_value(pool: CachePool) -> None:
    pool.poison()
    blocks, windows = torch.tensor([3, 99]), torch.tensor([0, 7])
    FilledCache(pool).fill(1, blocks, windows)
    for kind, values in records(pool):
        named = windows if kind == "window" else blocks
        assert ((values[named] - MEAN).abs() <= 0.25 * MEAN).all(), "a 4-bit record is as near as that"
    for tail in (pool.source(layer).tail for layer in pool.sources):
        if tail is not None:
            assert (tail[1] == MEAN).all() and tail[0].isnan().all() and tail[2].isnan().all()
    untouched = torch.ones(100, dtype=torch.bool)
    untouched[blocks] = False
    for layer in pool.sources:
        for plane in (*pool.source(layer).compressed, *pool.source(layer).index_keys):
            assert (plane[untouched] == POISON_BYTE).all()
    for layer in pool.window_layers:
        for plane in pool.window(layer).planes:
            assert (plane[[n for n in range(12) if n not in (0, 7)]] == POISON_BYTE).all()


def test_values_may_differ(pool: CachePool) -> None:
    pool.poison()
    blocks = torch.arange(100)
    FilledCache(pool, std=1.0, seed=5).fill(0, blocks, torch.arange(12))
    for kind, values in records(pool):
        assert values.isfinite().all() and 0.8 < values.std() < 1.2
        assert len({record.numpy().tobytes() for record in values.flatten(0, 1)}) == (
            min(len(values), PATTERNS) * values.shape[1]
        ), kind
    again = [values.clone() for _, values in records(pool)]
    FilledCache(pool, std=1.0, seed=5).fill(0, blocks, torch.arange(12))
    assert all(torch.equal(one, two) for one, (_, two) in zip(again, records(pool), strict=True)), "seeded"
