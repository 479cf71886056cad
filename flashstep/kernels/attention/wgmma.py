"""Sparse latent attention for Hopper's warpgroup matrix instructions, straight from the packed records (Gluon).

A program takes up to 64 heads of one row after another, or a share of a row's keys, in tiles of 64 keys with a running maximum.
Some of its warps find, load and decode records and leave tiles in shared memory; the others multiply. 64 heads stand in the rows
of a matrix instruction; fewer stand in its columns, and keys or channels in its rows, so that 8 heads are not padded. Queries
come unrotated and outputs go rotated back. A row's sums are taken in the same order whoever takes them.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashstep.kernels.attention.records import (
    IDS,
    KEY_SCALE,
    TILE,
    far_layout,
    find,
    load_far,
    load_near,
    near_layout,
    store_far,
    store_near,
    store_own,
    tiles_of,
)

LOG2_E = gl.constexpr(1.4426950408889634)
NOTHING = gl.constexpr(-1e30)  # a maximum of no logits; not -inf, whose differences are NaN
TABLES = gl.constexpr(
    4
)  # of record ids: more than tiles are ahead, so that none is written over while it is read


@gluon.jit
def _turned(x, cos_ptr, sin_ptr, SIGN: gl.constexpr, CHANNELS: gl.constexpr, PAIRS: gl.constexpr):
    """bf16 [N, C] with its last 2P channels turned as adjacent pairs, rounded once; ``SIGN`` -1 turns back."""
    even, odd = gl.split(gl.reshape(x.to(gl.float32), [x.shape[0], CHANNELS // 2, 2]))
    columns: gl.constexpr = gl.SliceLayout(0, even.type.layout)
    turn = gl.arange(0, CHANNELS // 2, layout=columns) - (CHANNELS // 2 - PAIRS)
    turned = turn >= 0
    cos = gl.expand_dims(gl.load(cos_ptr + turn, mask=turned, other=1.0), 0)
    sin = gl.expand_dims(gl.load(sin_ptr + turn, mask=turned, other=0.0), 0) * SIGN
    turned = gl.expand_dims(turned, 0)
    # channels that do not turn pass as they are: 0 * inf is NaN, and a sum loses the sign of zero
    first = gl.where(turned, even * cos - odd * sin, even)
    second = gl.where(turned, even * sin + odd * cos, odd)
    return gl.reshape(gl.join(first, second), [x.shape[0], CHANNELS]).to(gl.bfloat16)


@gluon.jit
def _softmax_tile(product, ids, peak, total, scale, KEY_AXIS: gl.constexpr, LAYOUT: gl.constexpr):
    """-> the new peak [H], weights and their running sums by place (fp32, as ``product``), and what shrinks earlier ones [H]."""
    live = gl.expand_dims(ids.load(gl.SliceLayout(1 - KEY_AXIS, LAYOUT)) >= 0, 1 - KEY_AXIS)
    logits = gl.where(live, product * scale, float("-inf"))
    fresh = gl.maximum(peak, gl.max(logits, KEY_AXIS))
    weights = gl.exp2(logits - gl.expand_dims(fresh, KEY_AXIS))
    shrink = gl.exp2(peak - fresh)
    return fresh, weights, total * gl.expand_dims(shrink, KEY_AXIS) + weights, shrink


@gluon.jit
def _hand_over(full, done, BUFFERS: gl.constexpr):
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(full.index(done % BUFFERS), count=1)


@gluon.jit
def _fill(
    keys, tables, full, empty, items,
    positions_ptr, request_ptr, start_ptr, selected_ptr, window_table_ptr, far_table_ptr, window_columns, far_columns,
    selected_row, window_ptr, window_scales_ptr, far_ptr, far_scales_ptr, window_block, window_scales_block,
    far_values_block, far_scales_block, k_ptr, k_block, k_place,
    WIDTH: gl.constexpr, SELECTED: gl.constexpr, OWN: gl.constexpr, WINDOW_SLOTS: gl.constexpr, FAR_SLOTS: gl.constexpr,
    BLOCKS: gl.constexpr, SPLITS: gl.constexpr, SHARE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The warps that leave tiles of keys in the buffers, each when its last readers have left it."""
    NEAR: gl.constexpr = near_layout(WARPS)
    FAR: gl.constexpr = far_layout(WARPS)
    NEAR_TILES: gl.constexpr = tiles_of(WIDTH)
    BUFFERS: gl.constexpr = keys.shape[0]
    ROWS: gl.constexpr = tables.shape[1] // TILE
    ids = tables._reinterpret(gl.int32, [TABLES * ROWS, TILE], IDS)
    words = keys._reinterpret(gl.int32, [BUFFERS, TILE, keys.shape[2] // 2], gl.NVMMASharedLayout(128, 32))
    done = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row = (item // (BLOCKS * SPLITS)).to(gl.int64)
        first = item % SPLITS * SHARE
        request, last = find(
            tables.index(turn), row, positions_ptr, request_ptr, start_ptr, selected_ptr, window_table_ptr, far_table_ptr,
            window_columns, far_columns, selected_row, first,
            WIDTH, SELECTED, OWN, WINDOW_SLOTS, FAR_SLOTS, SHARE, WARPS,
        )  # fmt: skip
        base = turn * ROWS
        for tile in range(first, gl.minimum(last, NEAR_TILES)):
            data, factor = load_near(
                window_ptr, window_scales_ptr, ids.index(base + tile), window_block, window_scales_block, WINDOW_SLOTS, NEAR
            )  # fmt: skip
            mbarrier.wait(empty.index(done % BUFFERS), ((done // BUFFERS) & 1) ^ 1)
            store_near(words.index(done % BUFFERS), data, factor)
            _hand_over(full, done, BUFFERS)
            done += 1
        if OWN > 0:
            mbarrier.wait(empty.index(done % BUFFERS), ((done // BUFFERS) & 1) ^ 1)
            store_own(keys.index(done % BUFFERS), k_ptr + request * k_block, k_place, OWN, WARPS)
            _hand_over(full, done, BUFFERS)
            done += 1
        if SELECTED > 0:
            begin = gl.maximum(first, NEAR_TILES)
            if begin < last:
                data, factor = load_far(
                    far_ptr, far_scales_ptr, ids.index(base + begin), far_values_block, far_scales_block, FAR_SLOTS, FAR
                )  # fmt: skip
                for tile in range(begin, last):
                    mbarrier.wait(empty.index(done % BUFFERS), ((done // BUFFERS) & 1) ^ 1)
                    store_far(words.index(done % BUFFERS), data, factor, FAR)
                    after = base + gl.minimum(tile + 1, last - 1)
                    data, factor = load_far(
                        far_ptr, far_scales_ptr, ids.index(after), far_values_block, far_scales_block, FAR_SLOTS, FAR
                    )  # fmt: skip
                    _hand_over(full, done, BUFFERS)
                    done += 1
        turn = (turn + 1) % TABLES


@gluon.jit
def _logits_of(q, keys, into, KEY_AXIS: gl.constexpr):
    """Begin the product of queries and keys."""
    if KEY_AXIS == 1:
        return warpgroup_mma(q, keys.permute((1, 0)), into, use_acc=False, is_async=True)
    else:
        return warpgroup_mma(keys, q.permute((1, 0)), into, use_acc=False, is_async=True)


@gluon.jit
def _take_tile(
    product, ids, probabilities, keys, peak, total, sums, scale,
    KEY_AXIS: gl.constexpr, LOGITS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """One step of the running softmax, up to the begun product with the values: (peak, total, sums under way)."""
    peak, weights, total, shrink = _softmax_tile(product, ids, peak, total, scale, KEY_AXIS, LOGITS)
    sums = sums * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(KEY_AXIS, SUMS)), KEY_AXIS)
    if KEY_AXIS == 1:
        probabilities.store(weights.to(gl.bfloat16))
    else:
        probabilities.permute((1, 0)).store(weights.to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    if KEY_AXIS == 1:
        sums = warpgroup_mma(probabilities, keys, sums, is_async=True)
    else:
        sums = warpgroup_mma(keys.permute((1, 0)), probabilities.permute((1, 0)), sums, is_async=True)
    return peak, total, sums


@gluon.jit
def _give_back(empty, done, BUFFERS: gl.constexpr):
    gl.thread_barrier()
    mbarrier.arrive(empty.index(done % BUFFERS), count=1)


@gluon.jit
def _multiply(
    q_all, probabilities, keys, tables, full, empty, items,
    q_ptr, cos_ptr, sin_ptr, out_ptr, sums_ptr, peaks_ptr, totals_ptr, sink_ptr, q_row, q_head, cos_row, sin_row, scale,
    HEADS: gl.constexpr, PAIRS: gl.constexpr, BLOCKS: gl.constexpr, SPLITS: gl.constexpr, SHARE: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The warps that turn queries, attend to the tiles as they come, and write what comes of them."""
    BLOCK_HEADS: gl.constexpr = q_all.shape[1]
    CHANNELS: gl.constexpr = q_all.shape[2]
    q_shared = q_all.index(0)
    BUFFERS: gl.constexpr = keys.shape[0]
    KEY_AXIS: gl.constexpr = 1 if BLOCK_HEADS == 64 else 0
    RECORDS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    if KEY_AXIS == 1:
        LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
        SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    else:
        LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_HEADS, 16])
        SUMS: gl.constexpr = LOGITS
    HEAD: gl.constexpr = gl.SliceLayout(KEY_AXIS, LOGITS)
    ROWS: gl.constexpr = tables.shape[1] // TILE
    ids = tables._reinterpret(gl.int32, [TABLES * ROWS, TILE], IDS)
    done = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row = (item // (BLOCKS * SPLITS)).to(gl.int64)
        low = item // SPLITS % BLOCKS * BLOCK_HEADS
        first = item % SPLITS * SHARE
        base = turn * ROWS
        head = low + gl.arange(0, BLOCK_HEADS, layout=gl.SliceLayout(1, RECORDS))
        channel = gl.expand_dims(gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, RECORDS)), 0)
        held = gl.expand_dims(head < HEADS, 1)
        q = gl.load(q_ptr + row * q_row + (gl.expand_dims(head * q_head, 1) + channel), mask=held, other=0.0)
        q_shared.store(_turned(q, cos_ptr + row * cos_row, sin_ptr + row * sin_row, 1.0, CHANNELS, PAIRS))
        fence_async_shared()
        gl.thread_barrier()
        peak = gl.full([BLOCK_HEADS], NOTHING, gl.float32, HEAD)
        if KEY_AXIS == 1:
            total = gl.zeros([BLOCK_HEADS, TILE], gl.float32, LOGITS)
            sums = gl.zeros([BLOCK_HEADS, CHANNELS], gl.float32, SUMS)
        else:
            total = gl.zeros([TILE, BLOCK_HEADS], gl.float32, LOGITS)
            sums = gl.zeros([CHANNELS, BLOCK_HEADS], gl.float32, SUMS)
        mbarrier.wait(full.index(done % BUFFERS), (done // BUFFERS) & 1)
        last = gl.max(ids.index(base + ROWS - 1).load(gl.SliceLayout(1 - KEY_AXIS, LOGITS)), 0)
        product = _logits_of(q_shared, keys.index(done % BUFFERS), total, KEY_AXIS)
        product = warpgroup_mma_wait(0, deps=(product,))
        for tile in range(first, last - 1):
            peak, total, begun = _take_tile(
                product, ids.index(base + tile), probabilities, keys.index(done % BUFFERS), peak, total, sums, scale,
                KEY_AXIS, LOGITS, SUMS,
            )  # fmt: skip
            done += 1
            mbarrier.wait(full.index(done % BUFFERS), (done // BUFFERS) & 1)
            # an index that is always 0: with a constant one, 64 registers of addresses are kept through the loop, and spill
            product = _logits_of(q_all.index(done >> 24), keys.index(done % BUFFERS), product, KEY_AXIS)
            sums = warpgroup_mma_wait(1, deps=(begun,))
            _give_back(empty, done - 1, BUFFERS)
            product = warpgroup_mma_wait(0, deps=(product,))
        peak, total, begun = _take_tile(
            product, ids.index(base + last - 1), probabilities, keys.index(done % BUFFERS), peak, total, sums, scale,
            KEY_AXIS, LOGITS, SUMS,
        )  # fmt: skip
        sums = warpgroup_mma_wait(0, deps=(begun,))
        _give_back(empty, done, BUFFERS)
        done += 1
        turn = (turn + 1) % TABLES
        whole = gl.sum(total, KEY_AXIS)
        mine = gl.arange(0, BLOCK_HEADS, layout=HEAD)
        if SPLITS == 1:
            sink = gl.load(sink_ptr + low + mine, mask=low + mine < HEADS, other=0.0) * LOG2_E
            divisor = gl.convert_layout(whole + gl.exp2(sink - peak), gl.SliceLayout(KEY_AXIS, SUMS))
            out = (sums * KEY_SCALE / gl.expand_dims(divisor, KEY_AXIS)).to(gl.bfloat16)
            if KEY_AXIS == 1:
                q_shared.store(out)
            else:
                q_shared.permute((1, 0)).store(out)
            gl.thread_barrier()
            out = q_shared.load(RECORDS)
            out = _turned(out, cos_ptr + row * cos_row, sin_ptr + row * sin_row, -1.0, CHANNELS, PAIRS)
            target = out_ptr + row * (HEADS * CHANNELS) + (gl.expand_dims(head * CHANNELS, 1) + channel)
            gl.store(target, gl.convert_layout(out, RECORDS), mask=held)
            gl.thread_barrier()
        else:
            gl.store(peaks_ptr + item * BLOCK_HEADS + mine, peak)
            gl.store(totals_ptr + item * BLOCK_HEADS + mine, whole)
            up = gl.expand_dims(gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, SUMS)), 1)
            across = gl.expand_dims(gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, SUMS)), 0)
            gl.store(sums_ptr + item * (BLOCK_HEADS * CHANNELS) + (up * sums.shape[1] + across), sums)


@gluon.jit(do_not_specialize=["window_columns", "far_columns", "selected_row", "items"])
def attend_rows_kernel(
    q_ptr, cos_ptr, sin_ptr, out_ptr, sums_ptr, peaks_ptr, totals_ptr, sink_ptr, positions_ptr, request_ptr, start_ptr,
    selected_ptr, window_ptr, window_scales_ptr, window_table_ptr, far_ptr, far_scales_ptr, far_table_ptr, k_ptr,
    q_row, q_head, cos_row, sin_row, window_block, window_scales_block, window_columns,
    far_values_block, far_scales_block, far_columns, selected_row, k_block, k_place, scale, items,
    HEADS: gl.constexpr, CHANNELS: gl.constexpr, PAIRS: gl.constexpr, WIDTH: gl.constexpr, SELECTED: gl.constexpr,
    OWN: gl.constexpr, WINDOW_SLOTS: gl.constexpr, FAR_SLOTS: gl.constexpr, BLOCK_HEADS: gl.constexpr, BUFFERS: gl.constexpr,
    FILLERS: gl.constexpr, FILLER_REGISTERS: gl.constexpr, SPLITS: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Item by item: ``BLOCK_HEADS`` heads of a row and one of ``SPLITS`` shares of its keys, the window's first, then the others.

    With ``OWN`` keys a row is a place of a draft block, whose positions are the blocks', and the keys of its places come last.
    Values in words of 32 bits, scales of selected records in pairs. One share writes the output [T, H, C]; several, for
    ``merge_kernel``: sums fp32 [items, BLOCK_HEADS * C], of 64 heads head by head, of fewer channel by channel, and peaks and
    totals fp32 [items, BLOCK_HEADS].
    """
    gl.static_assert(OWN <= TILE and (OWN == 0 or (SPLITS == 1 and SELECTED == 0)))
    BLOCKS: gl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    TILES: gl.constexpr = tiles_of(WIDTH) + tiles_of(SELECTED + OWN)
    SHARE: gl.constexpr = (TILES + SPLITS - 1) // SPLITS
    ROWS: gl.constexpr = tiles_of(TILES * TILE + TILE)  # and one tile that says how many there are
    PLAIN: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    q_all = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_HEADS, CHANNELS], PLAIN)
    probabilities = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_HEADS, TILE], PLAIN)
    keys = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, TILE, CHANNELS], PLAIN)
    tables = gl.allocate_shared_memory(gl.int32, [TABLES, ROWS * TILE], IDS)
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(BUFFERS):
        mbarrier.init(full.index(buffer), count=1)
        mbarrier.init(empty.index(buffer), count=1)
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    q_all, probabilities, keys, tables, full, empty, items,
                    q_ptr, cos_ptr, sin_ptr, out_ptr, sums_ptr, peaks_ptr, totals_ptr, sink_ptr,
                    q_row, q_head, cos_row, sin_row, scale,
                    HEADS, PAIRS, BLOCKS, SPLITS, SHARE, num_warps,
                ),
            ),
            (
                _fill,
                (
                    keys, tables, full, empty, items,
                    positions_ptr, request_ptr, start_ptr, selected_ptr, window_table_ptr, far_table_ptr,
                    window_columns, far_columns, selected_row, window_ptr, window_scales_ptr, far_ptr, far_scales_ptr,
                    window_block, window_scales_block, far_values_block, far_scales_block, k_ptr, k_block, k_place,
                    WIDTH, SELECTED, OWN, WINDOW_SLOTS, FAR_SLOTS, BLOCKS, SPLITS, SHARE, FILLERS,
                ),
            ),
        ],
        [FILLERS],
        [FILLER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def merge_kernel(
    sums_ptr, peaks_ptr, totals_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr, cos_row, sin_row,
    HEADS: gl.constexpr, CHANNELS: gl.constexpr, PAIRS: gl.constexpr, BLOCK_HEADS: gl.constexpr, SPLITS: gl.constexpr,
    GROUP: gl.constexpr, PART: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """``GROUP`` heads and ``PART`` channels of one row: the shares of ``attend_rows_kernel``, in their order, then as it ends."""
    TILED: gl.constexpr = gl.BlockedLayout([1, 4], [32 // (PART // 4), PART // 4], [num_warps, 1], [1, 0])
    HELD: gl.constexpr = gl.SliceLayout(1, TILED)
    row = gl.program_id(0).to(gl.int64)
    heads = gl.program_id(1) * GROUP
    low = gl.program_id(2) * PART
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = heads + gl.arange(0, GROUP, layout=HELD)
    channel = low + gl.arange(0, PART, layout=gl.SliceLayout(0, TILED))
    BLOCKS: gl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    piece = (row * BLOCKS + heads // BLOCK_HEADS) * SPLITS
    within = head % BLOCK_HEADS
    if BLOCK_HEADS == 64:
        offset = gl.expand_dims(within * CHANNELS, 1) + gl.expand_dims(channel, 0)
    else:
        offset = gl.expand_dims(within, 1) + gl.expand_dims(channel * BLOCK_HEADS, 0)
    peak = gl.full([GROUP], NOTHING, gl.float32, HELD)
    for share in gl.static_range(SPLITS):
        peak = gl.maximum(peak, gl.load(peaks_ptr + (piece + share) * BLOCK_HEADS + within))
    total = gl.exp2(gl.load(sink_ptr + head, mask=head < HEADS, other=0.0) * LOG2_E - peak)
    sums = gl.zeros([GROUP, PART], gl.float32, TILED)
    for share in gl.static_range(SPLITS):
        shrink = gl.exp2(gl.load(peaks_ptr + (piece + share) * BLOCK_HEADS + within) - peak)
        total += shrink * gl.load(totals_ptr + (piece + share) * BLOCK_HEADS + within)
        sums += gl.expand_dims(shrink, 1) * gl.load(
            sums_ptr + (piece + share) * (BLOCK_HEADS * CHANNELS) + offset
        )
    out = (sums * KEY_SCALE / gl.expand_dims(total, 1)).to(gl.bfloat16)
    FIRST: gl.constexpr = CHANNELS - 2 * PAIRS
    even, odd = gl.split(gl.reshape(out.to(gl.float32), [GROUP, PART // 2, 2]))
    columns: gl.constexpr = gl.SliceLayout(0, even.type.layout)
    turn = low // 2 + gl.arange(0, PART // 2, layout=columns) - FIRST // 2
    turned = turn >= 0
    cos = gl.expand_dims(gl.load(cos_ptr + row * cos_row + turn, mask=turned, other=1.0), 0)
    sin = gl.expand_dims(gl.load(sin_ptr + row * sin_row + turn, mask=turned, other=0.0), 0)
    turned = gl.expand_dims(turned, 0)
    first = gl.where(turned, even * cos + odd * sin, even)
    second = gl.where(turned, odd * cos - even * sin, odd)
    out = gl.convert_layout(gl.reshape(gl.join(first, second), [GROUP, PART]).to(gl.bfloat16), TILED)
    target = gl.expand_dims(head * CHANNELS, 1) + gl.expand_dims(channel, 0)
    gl.store(out_ptr + row * (HEADS * CHANNELS) + target, out, mask=gl.expand_dims(head < HEADS, 1))
