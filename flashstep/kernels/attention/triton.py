"""Sparse latent attention in Triton, straight from the packed records: nothing is gathered or decoded ahead of the kernel.

Heads of 512 channels, the released model's, go to ``launch``; the kernels here take any other number. One program takes the heads
of one row (or the heads and places of one draft block) through its keys in tiles, the window oldest first and then the selected
entries, with a running maximum; records become bf16 (exactly) in registers, both products run on tensor cores with fp32 sums.
Tiles depend on head count and shapes only and are never shared between rows, so a row's bits do not depend on its neighbours.
Heads are padded to 16, 32 or 64 by masks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashstep.kernels.attention import AttentionRows, BlockRows, Planes, launch

_LEAST_HEADS, _MOST_HEADS = (
    16,
    64,
)  # of a program: what a matrix instruction takes, and what its accumulator holds

_LOG2_E = 1.4426950408889634


@triton.jit
def _scaled(value, factor):
    """bf16 [N, C] of fp32 ``value`` [N, C] with a ``factor`` [N, C / group] for each group of channels.

    Records are loaded flat and grouped here, so that a warp reads them whole. The cast stands last: Triton 3.6 cannot place a
    reshape that feeds a Hopper matrix product directly.
    """
    groups: tl.constexpr = factor.shape[1]
    grouped = value.reshape(value.shape[0], groups, value.shape[1] // groups) * factor[:, :, None]
    return grouped.reshape(value.shape[0], value.shape[1]).to(tl.bfloat16)


@triton.jit
def _turned(x, cos_ptr, sin_ptr, cos_start, sin_start, SIGN: tl.constexpr, PAIRS: tl.constexpr):
    """bf16 [M, C], its last 2P channels turned as adjacent pairs and rounded; -1 turns back. Tables begin at ``start`` [M]."""
    HALF: tl.constexpr = x.shape[1] // 2
    even, odd = tl.split(x.to(tl.float32).reshape(x.shape[0], HALF, 2))
    turn = tl.arange(0, HALF) - (HALF - PAIRS)
    turned = (turn >= 0)[None, :]
    cos = tl.load(cos_ptr + cos_start[:, None] + turn[None, :], mask=turned, other=1.0)
    sin = tl.load(sin_ptr + sin_start[:, None] + turn[None, :], mask=turned, other=0.0) * SIGN
    # channels that do not turn pass as they are: 0 * inf is NaN, and a sum loses the sign of zero
    first = tl.where(turned, even * cos - odd * sin, even)
    second = tl.where(turned, even * sin + odd * cos, odd)
    return tl.join(first, second).reshape(x.shape[0], 2 * HALF).to(tl.bfloat16)


@triton.jit
def _mxfp8(data, scale):
    """bf16 [N, C] of E4M3 bytes [N, C] and E8M0 bytes [N, C / 32]; exact, since a scale is a power of two."""
    value = data.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return _scaled(value, (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True))


@triton.jit
def _fp4(code):
    """fp32 values of E2M1 codes (int32, the low four bits): their exponent and mantissa in fp32's places, then rebiased.

    .5 is a subnormal on the way, which an fp32 product keeps (Triton flushes none).
    """
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def _nvfp4(data, scale):
    """bf16 [N, C] of E2M1 pairs [N, C / 2] and E4M3 bytes [N, C / 16]; exact: 2 and 4 significant bits make 6."""
    pair = data.to(tl.int32)
    value = tl.interleave(_fp4(pair), _fp4(pair >> 4))
    return _scaled(value, scale.to(tl.float8e4nv, bitcast=True).to(tl.float32))


@triton.jit
def _load(
    values_ptr, scales_ptr, value_offset, scale_offset, live, BYTES: tl.constexpr, SCALES: tl.constexpr
):
    """Bytes [N, BYTES] and [N, SCALES] of records that begin at the offsets; zeros where not ``live``: NaN may stand there."""
    byte, group = tl.arange(0, BYTES), tl.arange(0, SCALES)
    data = tl.load(values_ptr + value_offset[:, None] + byte[None, :], mask=live[:, None], other=0)
    scale = tl.load(scales_ptr + scale_offset[:, None] + group[None, :], mask=live[:, None], other=0)
    return data, scale


@triton.jit
def _attend_tile(q, keys, live, peak, total, sums, scale):
    """One step of the running softmax: (peak [M] in units of log2, total [M], sums [M, C]) with a tile of keys [N, C].

    Probabilities are rounded to bf16 for the product and not for their total, as the model does.
    """
    logits = tl.dot(q, tl.trans(keys)) * scale
    logits = tl.where(live[None, :], logits, float("-inf"))
    fresh = tl.maximum(peak, tl.max(logits, 1))
    weights = tl.exp2(logits - fresh[:, None])
    shrink = tl.exp2(peak - fresh)
    total = total * shrink + tl.sum(weights, 1)
    sums = tl.dot(weights.to(tl.bfloat16), keys, sums * shrink[:, None])
    return fresh, total, sums


@triton.jit
def _attend_window_tile(
    q, peak, total, sums, scale,
    values_ptr, scales_ptr, table_ptr, position, live, values_block, scales_block,
    CHANNELS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """A tile of window records at ``position`` [N] of the request whose block table is ``table_ptr``."""
    place = tl.where(live, position, 0)
    block = tl.load(table_ptr + place // SLOTS, mask=live, other=-1)
    live = live & (block >= 0)
    place = place % SLOTS
    data, scales = _load(
        values_ptr,
        scales_ptr,
        block * values_block + place * CHANNELS,
        block * scales_block + place * (CHANNELS // 32),
        live,
        CHANNELS,
        CHANNELS // 32,
    )
    return _attend_tile(q, _mxfp8(data, scales), live, peak, total, sums, scale)


@triton.jit
def _attend_rows_kernel(
    q_ptr, cos_ptr, sin_ptr, out_ptr, sink_ptr, positions_ptr, request_ptr, start_ptr, selected_ptr,
    window_ptr, window_scales_ptr, window_table_ptr, far_ptr, far_scales_ptr, far_table_ptr,
    q_row, q_head, cos_row, sin_row, window_block, window_scales_block, window_columns,
    far_block, far_scales_block, far_columns, selected, selected_row, scale,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr,
    WINDOW_SLOTS: tl.constexpr, FAR_SLOTS: tl.constexpr, SPARSE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """``BLOCK_HEADS`` heads of one row: its window, and with ``SPARSE`` its selected entries."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    held = head < HEADS
    channel = tl.arange(0, CHANNELS)
    key = tl.arange(0, BLOCK_KEYS)
    q = tl.load(
        q_ptr + row * q_row + head[:, None] * q_head + channel[None, :], mask=held[:, None], other=0.0
    )
    cos_start, sin_start = head * 0 + row * cos_row, head * 0 + row * sin_row
    q = _turned(q, cos_ptr, sin_ptr, cos_start, sin_start, 1.0, PAIRS)
    sink = tl.load(sink_ptr + head, mask=held, other=0.0) * 1.4426950408889634
    position = tl.load(positions_ptr + row)
    request = tl.maximum(tl.load(request_ptr + row), 0)  # a row of padding has none, and sees nothing
    start = tl.maximum(tl.load(start_ptr + request), 0)
    peak = tl.full((BLOCK_HEADS,), -1e30, tl.float32)  # not -inf: a tile may hold no key
    total = tl.zeros((BLOCK_HEADS,), tl.float32)
    sums = tl.zeros((BLOCK_HEADS, CHANNELS), tl.float32)
    window_table_ptr += request * window_columns
    for low in range(0, WIDTH, BLOCK_KEYS):
        seen = position - (WIDTH - 1) + low + key
        live = (seen >= start) & (low + key < WIDTH)
        peak, total, sums = _attend_window_tile(
            q, peak, total, sums, scale,
            window_ptr, window_scales_ptr, window_table_ptr, seen, live, window_block, window_scales_block,
            CHANNELS, WINDOW_SLOTS,
        )  # fmt: skip
    if SPARSE:
        far_table_ptr += request * far_columns
        for low in range(0, selected, BLOCK_KEYS):
            entry = tl.load(
                selected_ptr + row * selected_row + low + key, mask=low + key < selected, other=-1
            ).to(tl.int64)
            live = entry >= 0
            place = tl.where(live, entry, 0)
            block = tl.load(far_table_ptr + place // FAR_SLOTS, mask=live, other=-1)
            live = live & (block >= 0)
            place = place % FAR_SLOTS
            data, scales = _load(
                far_ptr,
                far_scales_ptr,
                block * far_block + place * (CHANNELS // 2),
                block * far_scales_block + place * (CHANNELS // 16),
                live,
                CHANNELS // 2,
                CHANNELS // 16,
            )
            peak, total, sums = _attend_tile(q, _nvfp4(data, scales), live, peak, total, sums, scale)
    total += tl.exp2(sink - peak)
    out = (sums / total[:, None]).to(tl.bfloat16)
    out = _turned(out, cos_ptr, sin_ptr, cos_start, sin_start, -1.0, PAIRS)
    tl.store(out_ptr + (row * HEADS + head)[:, None] * CHANNELS + channel[None, :], out, mask=held[:, None])


@triton.jit
def _quantised(k_ptr, place, held, k_place, CHANNELS: tl.constexpr):
    """bf16 [N, C] keys at ``place`` [N] through Q8 (spec/model.md 0), zeros where not ``held``."""
    channel = tl.arange(0, CHANNELS)
    flat = tl.load(k_ptr + place[:, None] * k_place + channel[None, :], mask=held[:, None], other=0.0)
    x = flat.to(tl.float32).reshape(place.shape[0], CHANNELS // 32, 32)
    # of bits, so that NaN counts as the largest; the floor is a comparison, which leaves it alone
    amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2).to(tl.float32, bitcast=True)
    bits = (tl.where(amax < 1e-4, 1e-4, amax) * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    exponent = tl.where(bits > 0x7F000000, 255, (bits + 0x7FFFFF) >> 23)
    inverse = tl.where(exponent == 255, 0x7FC00000, (254 - exponent) << 23).to(tl.float32, bitcast=True)
    y = (x * inverse[:, :, None]).reshape(place.shape[0], CHANNELS)
    y = tl.where(y > 448.0, 448.0, tl.where(y < -448.0, -448.0, y))
    return _mxfp8(y.to(tl.float8e4nv).to(tl.uint8, bitcast=True), exponent)


@triton.jit
def _attend_block_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, out_ptr, sink_ptr, position_ptr, start_ptr,
    window_ptr, window_scales_ptr, window_table_ptr,
    q_block, q_place, q_head, k_block, k_place, cos_row, sin_row, window_block, window_scales_block, window_columns, scale,
    HEADS: tl.constexpr, PLACES: tl.constexpr, CHANNELS: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr,
    WINDOW_SLOTS: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_OWN: tl.constexpr,
):  # fmt: skip
    """``BLOCK_QUERIES`` of the K * H queries of one draft block: the window before it, then the keys of its own places."""
    request = tl.program_id(0).to(tl.int64)
    query = tl.program_id(1) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    held = query < PLACES * HEADS
    place, head = query // HEADS, query % HEADS
    channel = tl.arange(0, CHANNELS)
    key = tl.arange(0, BLOCK_KEYS)
    offset = request * q_block + place * q_place + head * q_head
    q = tl.load(q_ptr + offset[:, None] + channel[None, :], mask=held[:, None], other=0.0)
    turn_row = request * PLACES + tl.where(held, place, 0)
    q = _turned(q, cos_ptr, sin_ptr, turn_row * cos_row, turn_row * sin_row, 1.0, PAIRS)
    sink = tl.load(sink_ptr + head, mask=held, other=0.0) * 1.4426950408889634
    position = tl.load(position_ptr + request)
    start = tl.maximum(tl.load(start_ptr + request), 0)
    peak = tl.full((BLOCK_QUERIES,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_QUERIES,), tl.float32)
    sums = tl.zeros((BLOCK_QUERIES, CHANNELS), tl.float32)
    window_table_ptr += request * window_columns
    for low in range(0, WIDTH, BLOCK_KEYS):
        seen = position - WIDTH + low + key
        live = (seen >= start) & (low + key < WIDTH)
        peak, total, sums = _attend_window_tile(
            q, peak, total, sums, scale,
            window_ptr, window_scales_ptr, window_table_ptr, seen, live, window_block, window_scales_block,
            CHANNELS, WINDOW_SLOTS,
        )  # fmt: skip
    own = tl.arange(0, BLOCK_OWN)
    live = own < PLACES
    keys = _quantised(k_ptr + request * k_block, own, live, k_place, CHANNELS)
    peak, total, sums = _attend_tile(q, keys, live, peak, total, sums, scale)
    total += tl.exp2(sink - peak)
    out = (sums / total[:, None]).to(tl.bfloat16)
    out = _turned(out, cos_ptr, sin_ptr, turn_row * cos_row, turn_row * sin_row, -1.0, PAIRS)
    row = request * (PLACES * HEADS) + query
    tl.store(out_ptr + row[:, None] * CHANNELS + channel[None, :], out, mask=held[:, None])


def attend_window(
    q_THC: Tensor,
    *,
    cos_TP: Tensor,
    sin_TP: Tensor,
    window: Planes,
    rows: AttentionRows,
    width: int,
    sink_H: Tensor,
) -> Tensor:
    """See ``Attention.attend_window``."""
    return _attend_rows(q_THC, (cos_TP, sin_TP), window, None, rows=rows, width=width, sink_H=sink_H)


def attend_sparse(
    q_THC: Tensor,
    *,
    cos_TP: Tensor,
    sin_TP: Tensor,
    window: Planes,
    compressed: Planes,
    rows: AttentionRows,
    selected_TK: Tensor,
    width: int,
    sink_H: Tensor,
) -> Tensor:
    """See ``Attention.attend_sparse``."""
    far = compressed, selected_TK
    return _attend_rows(q_THC, (cos_TP, sin_TP), window, far, rows=rows, width=width, sink_H=sink_H)


def attend_block(
    q_RKHC: Tensor,
    k_RKC: Tensor,
    *,
    cos_TP: Tensor,
    sin_TP: Tensor,
    window: Planes,
    rows: BlockRows,
    width: int,
    sink_H: Tensor,
) -> Tensor:
    """See ``Attention.attend_block``."""
    requests, places, heads, channels = q_RKHC.shape
    if channels == launch.CHANNELS:
        turn = cos_TP, sin_TP
        return launch.attend_block(q_RKHC, k_RKC, turn, window, rows=rows, width=width, sink_H=sink_H)
    out = torch.empty(q_RKHC.shape, dtype=q_RKHC.dtype, device=q_RKHC.device)
    if not requests:
        return out
    q_RKHC, k_RKC = _channels_together(q_RKHC), _channels_together(k_RKC)
    table = _channels_together(rows.window_table_RB)
    queries = _block_heads(places * heads)
    keys, options = _tile(queries, channels)
    _attend_block_kernel[(requests, triton.cdiv(places * heads, queries))](
        q_RKHC,
        k_RKC,
        cos_TP,
        sin_TP,
        out,
        sink_H.contiguous(),
        rows.position_R.contiguous(),
        rows.window_start_R.contiguous(),
        *window,
        table,
        *q_RKHC.stride()[:3],
        *k_RKC.stride()[:2],
        cos_TP.stride(0),
        sin_TP.stride(0),
        *_block_strides(window, value_bytes=channels, scale_bytes=channels // 32),
        table.stride(0),
        channels**-0.5 * _LOG2_E,
        HEADS=heads,
        PLACES=places,
        CHANNELS=channels,
        PAIRS=cos_TP.shape[1],
        WIDTH=width,
        WINDOW_SLOTS=window[0].shape[1],
        BLOCK_QUERIES=queries,
        BLOCK_OWN=max(16, triton.next_power_of_2(places)),
        BLOCK_KEYS=keys,
        **options,
    )
    return out


def _attend_rows(
    q_THC: Tensor,
    rotation: tuple[Tensor, Tensor],
    window: Planes,
    far: tuple[Planes, Tensor] | None,
    *,
    rows: AttentionRows,
    width: int,
    sink_H: Tensor,
) -> Tensor:
    """``far``: the compressed records and the entries [T, K] that the rows see of them."""
    count, heads, channels = q_THC.shape
    if channels == launch.CHANNELS:
        return launch.attend(q_THC, rotation, window, far, rows=rows, width=width, sink_H=sink_H, splits=1)
    out = torch.empty(q_THC.shape, dtype=q_THC.dtype, device=q_THC.device)
    if not count:
        return out
    q_THC = _channels_together(q_THC)
    near_table, far_table = (
        _channels_together(table) for table in (rows.window_table_RB, rows.block_table_RB)
    )
    if far is None:
        # a kernel without entries reads none of what stands for them here
        far_planes, far_strides, selected_TK, selected = window, (0, 0), rows.request_T.unsqueeze(1), 0
    else:
        far_planes, selected_TK = far[0], _channels_together(far[1])
        far_strides = _block_strides(far_planes, value_bytes=channels // 2, scale_bytes=channels // 16)
        selected = selected_TK.shape[1]
    block = _block_heads(heads)
    keys, options = _tile(block, channels)
    _attend_rows_kernel[(count, triton.cdiv(heads, block))](
        q_THC,
        *rotation,
        out,
        sink_H.contiguous(),
        rows.positions_T.contiguous(),
        rows.request_T.contiguous(),
        rows.window_start_R.contiguous(),
        selected_TK,
        *window,
        near_table,
        *far_planes,
        far_table,
        *q_THC.stride()[:2],
        rotation[0].stride(0),
        rotation[1].stride(0),
        *_block_strides(window, value_bytes=channels, scale_bytes=channels // 32),
        near_table.stride(0),
        *far_strides,
        far_table.stride(0),
        selected,
        selected_TK.stride(0),
        channels**-0.5 * _LOG2_E,
        HEADS=heads,
        CHANNELS=channels,
        PAIRS=rotation[0].shape[1],
        WIDTH=width,
        WINDOW_SLOTS=window[0].shape[1],
        FAR_SLOTS=far_planes[0].shape[1],
        SPARSE=far is not None,
        BLOCK_HEADS=block,
        BLOCK_KEYS=keys,
        **options,
    )
    return out


def _channels_together(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _block_strides(planes: Planes, *, value_bytes: int, scale_bytes: int) -> tuple[int, int]:
    """Bytes from block to block of both planes, whose records each lie together, one behind the other."""
    strides = [plane.stride() for plane in planes]
    assert strides[0][1:] == (value_bytes, 1), "values of a block are one array"
    assert strides[1][1] == scale_bytes and (scale_bytes == 1 or strides[1][2] == 1), "so are its scales"
    return strides[0][0], strides[1][0]


def _block_heads(heads: int) -> int:
    """Of the head count alone, never of the batch: another tile may add in another order."""
    return min(_MOST_HEADS, max(_LEAST_HEADS, triton.next_power_of_2(heads)))


def _tile(heads: int, channels: int) -> tuple[int, dict[str, int]]:
    """Keys of a tile and launch options of a program of ``heads``; its sums fp32 must stay in registers, tiles in shared memory.

    Three stages let the records' addresses be looked up a tile before the records, and these a tile before their use. With 32
    heads, 64 keys spill (416 bytes a thread). 16 keys are too few for any: decoded FP4 makes Triton 3.6 choose operands of 8
    keys a thread, four threads of which must find 32, or their sums are wrong (seen on an H200; test_compile.py looks for it).
    """
    if channels <= 128:
        return 64, {"num_warps": 4, "num_stages": 1}
    return 32 if heads == 32 else 64, {"num_warps": 8, "num_stages": 3}


_TYPES = {
    "*bf16:16": "q_ptr k_ptr out_ptr",
    "*fp32:16": "sink_ptr cos_ptr sin_ptr",
    "*i32:16": "selected_ptr",
    "*u8:16": "window_ptr window_scales_ptr far_ptr far_scales_ptr",
    "*i64:16": "positions_ptr position_ptr request_ptr start_ptr window_table_ptr far_table_ptr",
    "fp32": "scale",
    "i32:16": "q_row q_head q_block q_place k_block k_place cos_row sin_row window_block window_scales_block far_block "
    "far_scales_block",
    "i32": "window_columns far_columns selected selected_row",
}
_SIGNATURE = {name: kind for kind, names in _TYPES.items() for name in names.split()}


def _rows_variant(
    heads: int, channels: int, width: int, slots: int, *, sparse: bool
) -> dict[str, int | bool]:
    return {
        "HEADS": heads,
        "CHANNELS": channels,
        "PAIRS": channels // 16,
        "WIDTH": width,
        "WINDOW_SLOTS": slots,
        "FAR_SLOTS": slots,
        "SPARSE": sparse,
        "BLOCK_HEADS": _block_heads(heads),
        "BLOCK_KEYS": _tile(_block_heads(heads), channels)[0],
    }


def _block_variant(heads: int, channels: int, width: int, slots: int) -> dict[str, int]:
    return {
        "HEADS": heads,
        "PLACES": 5,
        "CHANNELS": channels,
        "PAIRS": channels // 16,
        "WIDTH": width,
        "WINDOW_SLOTS": slots,
        "BLOCK_QUERIES": _block_heads(5 * heads),
        "BLOCK_KEYS": _tile(_block_heads(5 * heads), channels)[0],
        "BLOCK_OWN": 16,
    }


_ROWS = (_rows_variant(4, 64, 8, 16, sparse=True), _rows_variant(3, 32, 5, 4, sparse=False))
_BLOCKS = (_block_variant(4, 64, 8, 16),)
# (kernel, signature, constants, options) to compile ahead of time: released and tiny shapes
AOT = (
    *(
        (_attend_rows_kernel, _SIGNATURE, v, _tile(int(v["BLOCK_HEADS"]), int(v["CHANNELS"]))[1])
        for v in _ROWS
    ),
    *((_attend_block_kernel, _SIGNATURE, v, _tile(v["BLOCK_QUERIES"], v["CHANNELS"])[1]) for v in _BLOCKS),
)
