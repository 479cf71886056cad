"""Fused ops against the references of the families, one after the other; padding rows; the ring under any cut (A31, A04).

The reference is held to equality. A row that adds in fp32 may round a number to the neighbour of bf16, which a quantiser may make
a step of its own: rarely, and never more than that step.
"""

import pytest
import torch
from torch import Tensor

from flashstep.kernels.cast import reference as cast
from flashstep.kernels.engram import Hashing
from flashstep.kernels.engram import reference as engram
from flashstep.kernels.fused import Fused, reference
from flashstep.kernels.gemm import reference as gemm
from flashstep.kernels.norm_rope import reference as norm_rope
from flashstep.quant import mxfp4, mxfp8, nvfp4
from tests.kernels.implementations import DEVICE, families

pytestmark = pytest.mark.parametrize("fused", families(Fused))
EPS = 1e-20
MARK = 0xA5
SLOTS = 4
STEP = {mxfp8: 2.0**-3, nvfp4: 0.34, mxfp4: 0.34}  # between neighbours, of the group's largest magnitude
SHAPES = [(7, 1280, 512, 32), (1, 64, 64, 8), (300, 96, 512, 32)]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def weight(channels: int, seed: int = 9) -> Tensor:
    return (1 + 0.1 * normal(channels, seed=seed).float()).bfloat16()


def rotation(rows: int, pairs: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Of positions far apart, as slices of a larger table."""
    frequencies = 10_000.0 ** -(torch.arange(pairs, device=DEVICE) / pairs)
    cos, sin = norm_rope.angles(torch.arange(rows, device=DEVICE) * 1009 + seed, frequencies)
    return torch.stack((sin, cos))[1], torch.stack((sin, sin))[1]


def planes(records: int, values: int, scales: int) -> tuple[Tensor, Tensor]:
    raw = torch.full(
        (-(-records // SLOTS), SLOTS * (values + scales)), MARK, dtype=torch.uint8, device=DEVICE
    )
    return (
        raw[:, : SLOTS * values].unflatten(1, (SLOTS, values)),
        raw[:, SLOTS * values :].unflatten(1, (SLOTS, scales)),
    )


def slots(rows: int) -> Tensor:
    """Places out of order, with holes and rows that write nothing."""
    found = torch.randperm(rows + 5, generator=torch.Generator().manual_seed(rows))[:rows]
    found[::5] = -1
    return found.to(DEVICE)


def check(fused: Fused, op: str, got: Tensor, want: Tensor, *, step: float = 0.0) -> None:
    """``step``: what one unit of bf16 may become, against the largest magnitude of the 16 or 32 numbers around."""
    if fused._loaded[op] is getattr(reference, op):
        assert torch.equal(got, want)
        return
    got, want = got.double(), want.double()
    assert (got != want).sum() <= 1 + got.numel() // 500
    around = want.unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True)
    allowed = (want.abs() * 2.0**-7).unflatten(-1, (-1, 16)) + step * around
    assert ((got - want).abs().unflatten(-1, (-1, 16)) <= allowed).all()


def check_records(
    fused: Fused, op: str, got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], form
) -> None:
    """Bytes that nobody may write, and values."""
    touched = [(part != MARK).any(2) for part in (*got, *want)]
    assert torch.equal(touched[0] | touched[1], touched[2] | touched[3])
    read = [form.dequantise(*parts)[touched[0] | touched[1]] for parts in (got, want)]
    check(fused, op, *read, step=STEP[form])


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_place_rows(fused: Fused, rows: int) -> None:
    """Positions, tables and angles said in Python."""
    generator = torch.Generator().manual_seed(rows)
    positions = torch.randint(0, 96, (rows,), generator=generator)
    requests = torch.randint(0, 3, (rows,), generator=generator)
    store = torch.rand(rows, generator=generator) < 0.7
    window, block = torch.randint(-1, 50, (2, 3, 12), generator=generator)
    frequencies = torch.rand(3, 8, generator=generator)
    places = fused.place_rows(
        positions.to(DEVICE),
        requests.to(DEVICE),
        store.to(DEVICE),
        slot_R=torch.tensor([5, 0, 2], device=DEVICE),
        window_table_RB=window.to(DEVICE),
        block_table_RB=block.to(DEVICE),
        block_size=8,
        frequencies_AP=frequencies.to(DEVICE),
        back_A=torch.tensor([0, 0, 1], device=DEVICE),
    )
    for row, (p, r) in enumerate(zip(positions.tolist(), requests.tolist(), strict=True)):
        w, b = int(window[r, p // 8]), int(block[r, p // 8])
        assert places.slot_T[row] == (5, 0, 2)[r]
        assert places.window_slot_T[row] == (w * 8 + p % 8 if w >= 0 else -1)
        writes = b >= 0 and bool(store[row])
        assert places.entry_slot_T[0][row] == (b * 8 + p % 8 if writes else -1)
        assert places.entry_slot_T[1][row] == (b * 4 + p % 8 // 2 if writes and p % 2 else -1)
        assert [int(visible[row]) for visible in places.visible_T] == [p + 1, (p + 1) // 2]
    for table, back in enumerate((0, 0, 1)):
        want = norm_rope.angles((positions - back).clamp(min=0), frequencies[table])
        for got, other in zip((places.cos_ATP[table], places.sin_ATP[table]), want, strict=True):
            torch.testing.assert_close(got.cpu(), other, rtol=2.0**-22, atol=1e-9)
            assert (got.cpu() != other).float().mean() <= 1e-3


@pytest.mark.parametrize(("rows", "channels"), [(7, 5120), (3, 64), (50, 1280), (0, 64)])
def test_norm_quantise(fused: Fused, rows: int, channels: int) -> None:
    x, w = normal(rows, channels + 32)[:, 32:], weight(channels)
    got = fused.norm_quantise(x, w, eps=EPS)
    check(fused, "norm_quantise", got, gemm.quantise_input(norm_rope.rms(x, w, eps=EPS)), step=STEP[mxfp8])
    if rows:
        assert torch.equal(fused.norm_quantise(x[-1:], w, eps=EPS), got[-1:])


@pytest.mark.parametrize(("rows", "latent", "channels", "pairs"), SHAPES)
def test_latent_and_record(fused: Fused, rows: int, latent: int, channels: int, pairs: int) -> None:
    x, slot_T = normal(rows, latent + channels), slots(rows)
    cos, sin = rotation(rows, pairs)
    weights = {"latent_weight_L": weight(latent), "key_weight_C": weight(channels, seed=8), "eps": EPS}
    got, want = (planes(rows + 8, channels, channels // 32) for _ in range(2))
    quantised = fused.latent_and_record(x, cos_TP=cos, sin_TP=sin, planes=got, slot_T=slot_T, **weights)
    key = norm_rope.rotate(norm_rope.rms(x[:, latent:], weights["key_weight_C"], eps=EPS), cos, sin)
    cast.store_mxfp8(key, want, slot_T=slot_T)
    other = gemm.quantise_input(norm_rope.rms(x[:, :latent], weights["latent_weight_L"], eps=EPS))
    check(fused, "latent_and_record", quantised, other, step=STEP[mxfp8])
    check_records(fused, "latent_and_record", got, want, mxfp8)


@pytest.mark.parametrize(("rows", "latent", "channels", "pairs"), SHAPES)
def test_latent_and_key(fused: Fused, rows: int, latent: int, channels: int, pairs: int) -> None:
    x = normal(rows, latent + channels)
    cos, sin = rotation(rows, pairs)
    weights = {"latent_weight_L": weight(latent), "key_weight_C": weight(channels, seed=8), "eps": EPS}
    quantised, key = fused.latent_and_key(x, cos_TP=cos, sin_TP=sin, **weights)
    want = norm_rope.rotate(norm_rope.rms(x[:, latent:], weights["key_weight_C"], eps=EPS), cos, sin)
    other = gemm.quantise_input(norm_rope.rms(x[:, :latent], weights["latent_weight_L"], eps=EPS))
    check(fused, "latent_and_key", quantised, other, step=STEP[mxfp8])
    check(fused, "latent_and_key", key, want, step=2.0**-8)  # a rotation mixes two neighbours


@pytest.mark.parametrize(("rows", "stages", "channels", "pairs"), [(7, 3, 512, 32), (20, 2, 64, 8)])
def test_store_contexts(fused: Fused, rows: int, stages: int, channels: int, pairs: int) -> None:
    x, slot_T = normal(rows, stages * channels), slots(rows)
    cos, sin = rotation(rows, pairs)
    weights = torch.stack([weight(channels, seed=stage) for stage in range(stages)])
    values, scales = channels, channels // 32

    def layers() -> list[tuple[Tensor, Tensor]]:
        raw = torch.full(
            (stages, rows + 5, SLOTS * (values + scales)), MARK, dtype=torch.uint8, device=DEVICE
        )
        return [
            (
                part[:, : SLOTS * values].unflatten(1, (SLOTS, values)),
                part[:, SLOTS * values :].unflatten(1, (SLOTS, scales)),
            )
            for part in raw
        ]

    got, want = layers(), layers()
    fused.store_contexts(x, weights, eps=EPS, cos_TP=cos, sin_TP=sin, planes=got, slot_T=slot_T)
    for stage, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        k = x[:, stage * channels : (stage + 1) * channels]
        key = norm_rope.rotate(norm_rope.rms(k, weights[stage], eps=EPS), cos, sin)
        cast.store_mxfp8(key, theirs, slot_T=slot_T)
        check_records(fused, "store_contexts", ours, theirs, mxfp8)


@pytest.mark.parametrize(
    ("rows", "heads", "channels", "pairs"), [(7, 32, 128, 32), (5, 4, 32, 8), (3, 5, 96, 16)]
)
def test_rotate_round(fused: Fused, rows: int, heads: int, channels: int, pairs: int) -> None:
    x = normal(rows, heads * channels + 64)[:, 64:].unflatten(1, (heads, channels))
    cos, sin = rotation(rows, pairs)
    want = cast.round_mxfp4(norm_rope.rotate(x, cos, sin))
    check(fused, "rotate_round", fused.rotate_round(x, cos, sin), want, step=STEP[mxfp4])


@pytest.mark.parametrize(("rows", "channels", "pairs"), [(7, 512, 32), (300, 64, 8)])
def test_publish_rows(fused: Fused, rows: int, channels: int, pairs: int) -> None:
    x, w, slot_T = normal(rows, channels + 16)[:, 16:], weight(channels), slots(rows)
    cos, sin = rotation(rows, pairs)
    got, want = (planes(rows + 8, channels // 2, channels // 16) for _ in range(2))
    latent = fused.publish_rows(x, w, eps=EPS, cos_TP=cos, sin_TP=sin, planes=got, slot_T=slot_T)
    normed = norm_rope.rms(x, w, eps=EPS)
    cast.store_nvfp4(norm_rope.rotate(normed, cos, sin), want, slot_T=slot_T)
    check(fused, "publish_rows", latent, normed)
    check_records(fused, "publish_rows", got, want, nvfp4)


@pytest.mark.parametrize(("rows", "channels", "pairs"), [(7, 128, 32), (300, 32, 8)])
def test_store_key(fused: Fused, rows: int, channels: int, pairs: int) -> None:
    x, w, slot_T = normal(rows, channels), weight(channels), slots(rows)
    cos, sin = rotation(rows, pairs)
    got, want = (planes(rows + 8, channels // 2, channels // 32) for _ in range(2))
    fused.store_key(x, w, eps=EPS, cos_TP=cos, sin_TP=sin, planes=got, slot_T=slot_T)
    cast.store_mxfp4(norm_rope.rotate(norm_rope.rms(x, w, eps=EPS), cos, sin), want, slot_T=slot_T)
    check_records(fused, "store_key", got, want, mxfp4)


# steps of (slot, first position, rows): chunks that end at, before and behind the ring's length, beginning at odd positions
CUTS = {
    "one row": [[(0, 0, 1)], [(0, 1, 1)], [(0, 2, 1)], [(0, 3, 1)]],
    "the row that takes the place that the first reads": [[(1, 0, 7)], [(1, 7, 8)], [(1, 15, 9)]],
    "as long as the ring can make it wrong": [[(1, 0, 7)], [(1, 7, 15)], [(1, 22, 16)]],
    "long": [[(0, 0, 1)], [(0, 1, 48)], [(0, 49, 200)]],
    "even": [[(1, 0, 8)], [(1, 8, 15)], [(1, 23, 6)], [(1, 29, 6)]],
    "neighbours": [
        [(0, 0, 3), (2, 0, 5)],
        [(0, 3, 6), (2, 5, 6), (3, 0, 6)],
        [(0, 9, 9), (2, 11, 12), (3, 6, 17)],
    ],
}


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(("channels", "key_channels", "pairs"), [(512, 128, 32), (32, 32, 4)])
def test_publish_pairs_under_any_cut(
    fused: Fused, cuts: str, channels: int, key_channels: int, pairs: int
) -> None:
    w = weight(channels)
    tail = torch.full((5, 8, 2, channels), float("nan"), device=DEVICE)
    other = tail.clone()
    for number, step in enumerate(CUTS[cuts]):
        slot = torch.cat([torch.full((rows,), s) for s, _, rows in step]).to(DEVICE)
        at = torch.cat([torch.arange(start, start + rows) for _, start, rows in step]).to(DEVICE)
        rows = slot.shape[0]
        x = normal(rows, 2 * channels + 32, seed=number, dtype=torch.float32)[:, 32:]
        cos, sin = rotation(rows, pairs)
        entry = torch.where(at % 2 == 1, slots(rows), -1)
        records = ((channels // 2, channels // 16), (key_channels // 2, key_channels // 32))
        got, want = ([planes(rows + 8, *sizes) for sizes in records] for _ in range(2))
        key, key_weight = normal(rows, key_channels), weight(key_channels)
        ring: dict = {"tail": tail, "row_slot_T": slot, "positions_T": at}
        stores: dict = {"eps": EPS, "cos_TP": cos, "sin_TP": sin, "slot_T": entry}
        latent = fused.publish_pairs(x, w, planes=got[0], **stores, **ring)
        fused.store_key_and_tail(key, key_weight, planes=got[1], product_TX=x, **stores, **ring)
        both = x[:, :channels], x[:, channels:]
        pooled = reference.pool_pairs(*both, tail=other, slot_T=slot, positions_T=at)
        reference.store_tail(*both, tail=other, slot_T=slot, positions_T=at)
        normed = norm_rope.rms(pooled, w, eps=EPS)
        cast.store_nvfp4(norm_rope.rotate(normed, cos, sin), want[0], slot_T=entry)
        normed_key = norm_rope.rms(key, key_weight, eps=EPS)
        cast.store_mxfp4(norm_rope.rotate(normed_key, cos, sin), want[1], slot_T=entry)
        check(fused, "publish_pairs", latent, normed, step=2.0**-7)
        check_records(fused, "publish_pairs", got[0], want[0], nvfp4)
        check_records(fused, "store_key_and_tail", got[1], want[1], mxfp4)
        assert torch.equal(tail.nan_to_num(7.0), other.nan_to_num(7.0))


def test_publish_pairs_leaves_padding_alone(fused: Fused) -> None:
    """A captured graph's padding rows have slot -1; the reference never sees them."""
    if fused._loaded["publish_pairs"] is reference.publish_pairs:
        pytest.skip("the reference has no padding rows")
    tail = normal(4, 8, 2, 64, dtype=torch.float32)
    before = tail.clone()
    entries, keys = planes(16, 32, 4), planes(16, 16, 1)
    cos, sin = rotation(3, 8)
    nowhere = torch.full((3,), -1, device=DEVICE)
    ring: dict = {
        "tail": tail,
        "row_slot_T": nowhere,
        "positions_T": torch.tensor([0, 1, -1], device=DEVICE),
    }
    stores: dict = {"eps": EPS, "cos_TP": cos, "sin_TP": sin, "slot_T": nowhere}
    x = normal(3, 128, dtype=torch.float32)
    latent = fused.publish_pairs(x, weight(64), planes=entries, **stores, **ring)
    fused.store_key_and_tail(normal(3, 32), weight(32), planes=keys, product_TX=x, **stores, **ring)
    assert torch.equal(tail, before) and not latent.any()
    assert all(bool((part == MARK).all()) for part in (*entries, *keys))


@pytest.mark.parametrize(("heads", "width"), [(8, 256), (2, 32), (3, 64)])
@pytest.mark.parametrize("apart", [True, False])
def test_look_up_quantised(fused: Fused, heads: int, width: int, apart: bool) -> None:
    """Values and scales in two planes, or row by row; scales down to where the quantiser's floor rounds."""
    generator = torch.Generator().manual_seed(heads)
    rows, columns = 700, 3 * heads
    values = (torch.randn(rows, width, generator=generator) * 30).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.randint(90, 140, (rows, width // 32), generator=generator, dtype=torch.uint8)
    joined = torch.cat((values, scales), 1).to(DEVICE)
    table = (values.to(DEVICE), scales.to(DEVICE)) if apart else (joined[:, :width], joined[:, width:])
    primes = torch.full((columns,), rows // columns)
    hashing = Hashing(
        torch.tensor([76632096046245, 4839876093313, 35959672319349, 73987337458391]).to(DEVICE),
        primes.to(DEVICE),
        (torch.arange(columns) * (rows // columns)).to(DEVICE),
    )
    lookback = torch.randint(0, 99_092, (9, 4), generator=generator).to(DEVICE)
    got = fused.look_up_quantised(lookback, hashing, table)
    assert torch.equal(got.double(), gemm.quantise_input(engram.look_up(lookback, hashing, table)))
    assert fused.look_up_quantised(lookback[:0], hashing, table).shape == (0, columns * width)
