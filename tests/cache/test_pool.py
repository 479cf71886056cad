"""The pool: what it allocates, that views are windows onto it, and poison."""

import pytest
import torch

from flashstep.cache.groups import TAIL_RING, CacheGroups
from flashstep.cache.pool import CachePool
from flashstep.quant import mxfp4, mxfp8, nvfp4
from tests.cache.test_records import released_groups
from tests.model import tiny

CPU = torch.device("cpu")


def pool(
    groups: CacheGroups, *, block_size: int = 4, num_blocks: int = 6, num_window_blocks: int = 5
) -> CachePool:
    return CachePool(
        groups,
        num_blocks=num_blocks,
        num_window_blocks=num_window_blocks,
        block_size=block_size,
        num_slots=3,
        device=CPU,
    )


def test_a_released_token_costs_890_bytes_of_global_kv() -> None:
    groups = released_groups()
    p = pool(groups, block_size=32, num_blocks=2, num_window_blocks=1)
    assert p.block_bytes == 32 * 890
    assert p.window_block_bytes == 32 * 528 * 40
    tails = 3 * groups.tail_bytes_per_slot
    assert p.total_bytes == 2 * 32 * 890 + 32 * 528 * 40 + tails
    assert tails == 3 * 3 * TAIL_RING * 1024 * 4


@pytest.mark.parametrize(("block", "ring"), [(5, 8), (6, 8), (8, 10), (15, 17)])
def test_drafts_add_windows_and_lengthen_the_tail(block: int, ring: int) -> None:
    """Window layers behind the backbone's, and two rows of a tail more than a step may draft (A08)."""
    config = tiny.configuration("A", dspark_block_size=block)
    plain, groups = CacheGroups.of(config), CacheGroups.of(config, drafts=True)
    assert (plain.window_layers, plain.tail_ring) == (tuple(range(8)), TAIL_RING)
    assert (groups.window_layers, groups.tail_ring) == (tuple(range(11)), ring)
    p = pool(groups)
    assert [view.tail.shape[1] for s in (2, 4) if (view := p.source(s)).tail is not None] == [ring, ring]
    assert p.total_bytes - pool(plain).total_bytes == 3 * (5 * 4 * 66) + 2 * 3 * (ring - 8) * 2 * 64 * 4
    p.window(10).planes[0].zero_()
    p.poison_window_blocks(torch.tensor([4]))
    assert [bool((b == 0xFF).all()) for b in p.window(10).planes[0]] == [False] * 4 + [True]


def test_views_have_their_layers_and_ratios() -> None:
    config = tiny.configuration("A")
    p = pool(CacheGroups.of(config))
    for source, ratio in ((2, 2), (4, 2), (5, 1)):
        view = p.source(source)
        assert view.ratio == ratio and (view.tail is None) is (ratio == 1)
        assert view.compressed[0].shape == (6, 4 // ratio, 32) and view.index_keys[0].shape == (
            6,
            4 // ratio,
            16,
        )
        assert view.compressed[1].shape == (6, 4 // ratio, 4) and view.index_keys[1].shape == (
            6,
            4 // ratio,
            1,
        )
    assert p.window(7).planes[0].shape == (5, 4, 64)
    for layer in (2, 3):
        p.window(layer).planes[0].zero_()
    p.window(3).planes[0][2, 1] = 9
    assert bool((p.window(3).planes[0][2, 1] == 9).all()) and not p.window(2).planes[0].any()


def test_an_odd_block_would_split_a_pair() -> None:
    with pytest.raises(ValueError, match="even"):
        pool(CacheGroups.of(tiny.configuration("A")), block_size=5)


def test_poison_reads_as_nan_everywhere() -> None:
    p = pool(CacheGroups.of(tiny.configuration("A")))
    p.poison()
    source = p.source(2)
    assert source.tail is not None and source.tail.isnan().all()
    for form, planes in ((mxfp8, p.window(0).planes), (nvfp4, source.compressed), (mxfp4, source.index_keys)):
        assert form.dequantise(*planes).isnan().all()


def test_poison_of_blocks_spares_the_others() -> None:
    p = pool(CacheGroups.of(tiny.configuration("A")))
    for plane in (*p.source(5).compressed, *p.source(4).index_keys, *p.window(6).planes):
        plane.zero_()
    p.poison_blocks(torch.tensor([1, 4]))
    p.poison_window_blocks(torch.tensor([0]))
    for planes in (p.source(5).compressed, p.source(4).index_keys):
        assert [bool((b == 0xFF).all()) for b in planes[0]] == [False, True, False, False, True, False]
        assert not planes[1][[0, 2, 3, 5]].any()
    assert bool((p.window(6).planes[1][0] == 0xFF).all()) and not p.window(6).planes[0][1:].any()


def test_views_follow_a_pool_to_its_new_memory() -> None:
    """What layers were given before is of the new memory behind it, in shape, place and bytes."""
    groups = CacheGroups.of(tiny.configuration("A"))
    resized = pool(groups, num_blocks=3, num_window_blocks=2)
    fresh = pool(groups, num_blocks=7, num_window_blocks=5)
    window, source = resized.window(3), resized.source(2)
    resized.resize(7, 5)
    resized.poison()
    fresh.poison()
    pairs = [
        *zip(window.planes, fresh.window(3).planes, strict=True),
        *zip(source.compressed, fresh.source(2).compressed, strict=True),
        *zip(source.index_keys, fresh.source(2).index_keys, strict=True),
    ]
    for old, new in pairs:
        assert (old.shape, old.stride(), old.storage_offset()) == (
            new.shape,
            new.stride(),
            new.storage_offset(),
        )
        assert torch.equal(old, new)
    window.planes[0][4, 1] = 3
    assert torch.equal(resized.window(3).planes[0], window.planes[0])
    assert (resized.num_blocks, resized.num_window_blocks, resized.total_bytes) == (7, 5, fresh.total_bytes)
