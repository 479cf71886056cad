"""Packed records as operands of a matrix instruction (Gluon): found, loaded and made bf16 in registers, for shared memory.

A record's id is its block times the slots of a block plus its place, -1 where there is none. Keys are bf16 exactly, times 2^-64,
so that one product with a scale makes them of E4M3's or E2M1's bits moved to bf16's places; who uses them multiplies by
``KEY_SCALE``. A window scale beyond 2^71 makes NaN. Knows tiles of 64 keys of 512 channels, no softmax.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE = gl.constexpr(64)  # records
KEY_SCALE = gl.constexpr(2.0**64)
IDS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # how ids lie in shared memory

# two bf16 each of bytes (0, 1) and (2, 3): E4M3's bits in bf16's places are its value times 2^-120
_E4M3 = gl.constexpr("""{
.reg .b32 a, b, s, t;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 s, a, 4;
shr.u32 t, b, 4;
and.b32 s, s, 0x07f007f0;
and.b32 t, t, 0x07f007f0;
lop3.b32 a, a, 0x80008000, s, 0xea;
lop3.b32 b, b, 0x80008000, t, 0xea;
mul.bf16x2 $0, a, $3;
mul.bf16x2 $1, b, $3;
}""")
# two bf16 each of bytes 0 .. 3, the low nibble first: E2M1's bits in bf16's places are its value times 2^-126
_E2M1 = gl.constexpr("""{
.reg .b32 e, z0, z1, z2, z3, s0, s1, s2, s3;
shl.b32 e, $4, 4;
prmt.b32 z0, e, $4, 0x4000;
prmt.b32 z1, e, $4, 0x5010;
prmt.b32 z2, e, $4, 0x6020;
prmt.b32 z3, e, $4, 0x7030;
shr.u32 s0, z0, 6;
shr.u32 s1, z1, 6;
shr.u32 s2, z2, 6;
shr.u32 s3, z3, 6;
and.b32 s0, s0, 0x01c001c0;
and.b32 s1, s1, 0x01c001c0;
and.b32 s2, s2, 0x01c001c0;
and.b32 s3, s3, 0x01c001c0;
lop3.b32 z0, z0, 0x80008000, s0, 0xea;
lop3.b32 z1, z1, 0x80008000, s1, 0xea;
lop3.b32 z2, z2, 0x80008000, s2, 0xea;
lop3.b32 z3, z3, 0x80008000, s3, 0xea;
mul.bf16x2 $0, z0, $5;
mul.bf16x2 $1, z1, $5;
mul.bf16x2 $2, z2, $5;
mul.bf16x2 $3, z3, $5;
}""")
# two E4M3 numbers -> each times 2^62 as a pair of the same bf16
_E4M3_PAIR = gl.constexpr("""{
.reg .b16 s, l, u;
.reg .b32 h, a, b;
cvt.u16.u32 s, $2;
cvt.rn.f16x2.e4m3x2 h, s;
mov.b32 {l, u}, h;
cvt.f32.f16 a, l;
cvt.f32.f16 b, u;
mul.f32 a, a, 0f5E800000;
mul.f32 b, b, 0f5E800000;
prmt.b32 $0, a, a, 0x3232;
prmt.b32 $1, b, b, 0x3232;
}""")


@gluon.constexpr_function
def tiles_of(keys):
    """Tiles that hold so many keys, a power of two of them."""
    return triton.next_power_of_2(triton.cdiv(keys, 64))


@gluon.constexpr_function
def near_layout(warps):
    """[64 records, 32 vectors, 4 words]: a lane's 16 bytes are 32 of bf16; eight lanes' stores fall into different banks."""
    rows = [[2 * warps, 0, 0], [4 * warps, 0, 0], [8 * warps, 0, 0]]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 16, 0], *(row for row in rows if row[0] < 64)],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [0, 4, 0], [0, 8, 0]],
        warp_bases=[[2, 0, 0], [4, 0, 0]] + ([[8, 0, 0]] if warps == 8 else []),
        block_bases=[],
        shape=[64, 32, 4],
    )


@gluon.constexpr_function
def far_layout(warps):
    """[64 records, 16 vectors, 4 words]: as above; a lane's 16 bytes are 64 of bf16."""
    rows = [[4 * warps, 0, 0], [8 * warps, 0, 0]]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 8, 0], *(row for row in rows if row[0] < 64)],
        lane_bases=[[0, 1, 0], [1, 0, 0], [2, 0, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[4, 0, 0], [8, 0, 0]] + ([[16, 0, 0]] if warps == 8 else []),
        block_bases=[],
        shape=[64, 16, 4],
    )


@gluon.jit
def load_near(
    values_ptr, scales_ptr, ids, values_block, scales_block, SLOTS: gl.constexpr, LAYOUT: gl.constexpr
):
    """Words int32 [64, 32, 4] and scales int32 [64, 32] of the window records ``ids`` [64] (block * SLOTS + place, -1: none)."""
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    columns: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    depth: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))
    record = ids.load(rows)
    live = gl.expand_dims(record >= 0, 1)
    block, place = (record // SLOTS).to(gl.int64), record % SLOTS
    vector = gl.expand_dims(gl.arange(0, 32, layout=columns), 0)
    word = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=depth), 0), 1)
    start = gl.expand_dims(block * values_block + place * 128, 1) + vector * 4
    data = gl.load(values_ptr + (gl.expand_dims(start, 2) + word), mask=gl.expand_dims(live, 2), other=0)
    start = gl.expand_dims(block * scales_block + place * 16, 1) + vector // 2
    scale = gl.load(scales_ptr + start, mask=live, other=0).to(gl.int32)
    return data, scale


@gluon.jit
def store_near(keys, data, scale):
    """bf16 keys times 2^-64 into ``keys`` (int32 [64, 256]); a scale beyond 2^71 makes them NaN."""
    power = gl.minimum(scale + 56, 255) << 7
    factor = gl.expand_dims(power | (power << 16), 2)
    low, high = gl.inline_asm_elementwise(
        _E4M3, "=&r,=&r,r,r", [data, factor], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    keys.store(gl.reshape(gl.join(low, high), [64, 256]))


@gluon.jit
def load_far(
    values_ptr, scales_ptr, ids, values_block, scales_block, SLOTS: gl.constexpr, LAYOUT: gl.constexpr
):
    """Words int32 [64, 16, 4] and pairs of scales uint16 [64, 16] of the compressed records ``ids``."""
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    columns: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    depth: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))
    record = ids.load(rows)
    live = gl.expand_dims(record >= 0, 1)
    block, place = (record // SLOTS).to(gl.int64), record % SLOTS
    vector = gl.expand_dims(gl.arange(0, 16, layout=columns), 0)
    word = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=depth), 0), 1)
    start = gl.expand_dims(block * values_block + place * 64, 1) + vector * 4
    data = gl.load(values_ptr + (gl.expand_dims(start, 2) + word), mask=gl.expand_dims(live, 2), other=0)
    start = gl.expand_dims(block * scales_block + place * 16, 1) + vector
    scale = gl.load(scales_ptr + start, mask=live, other=0)
    return data, scale


@gluon.jit
def store_far(keys, data, scale, LAYOUT: gl.constexpr):
    """As ``store_near``."""
    depth: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))
    word = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=depth), 0), 1)
    first, second = gl.inline_asm_elementwise(
        _E4M3_PAIR, "=r,=r,r", [scale.to(gl.int32)], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    factor = gl.where(word < 2, gl.expand_dims(first, 2), gl.expand_dims(second, 2))
    a, b, c, d = gl.inline_asm_elementwise(
        _E2M1, "=&r,=&r,=&r,=&r,r,r", [data, factor], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True,
        pack=1,
    )  # fmt: skip
    keys.store(gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [64, 256]))


@gluon.jit
def store_own(keys, k_ptr, k_place, OWN: gl.constexpr, num_warps: gl.constexpr):
    """The first ``OWN`` of a tile from keys bf16 [OWN, C] that go through Q8 (spec/model.md 0) as a record would, then zeros."""
    HELD: gl.constexpr = 8 if OWN <= 8 else TILE
    GROUPED: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 4, 8], [num_warps, 1, 1], [2, 1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, GROUPED))
    GROUPS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, GROUPED))
    PLACES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, GROUPED))
    place = gl.expand_dims(gl.expand_dims(gl.arange(0, HELD, layout=ROWS), 1), 2)
    group = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, layout=GROUPS), 0), 2)
    within = gl.expand_dims(gl.expand_dims(gl.arange(0, 32, layout=PLACES), 0), 1)
    x = gl.load(k_ptr + place * k_place + (group * 32 + within), mask=place < OWN, other=0.0).to(gl.float32)
    # of bits, so that NaN counts as the largest; the floor is a comparison, which leaves it alone
    amax = gl.max(x.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 2).to(gl.float32, bitcast=True)
    bits = (gl.where(amax < 1e-4, 1e-4, amax) * (1.0 / 448.0)).to(gl.int32, bitcast=True)
    exponent = gl.where(bits > 0x7F000000, 255, (bits + 0x7FFFFF) >> 23)
    inverse = gl.where(exponent == 255, 0x7FC00000, (254 - exponent) << 23).to(gl.float32, bitcast=True)
    y = x * gl.expand_dims(inverse, 2)
    y = gl.where(y > 448.0, 448.0, gl.where(y < -448.0, -448.0, y)).to(gl.float8e4nv).to(gl.float32)
    y = y * gl.expand_dims(((exponent - 64) << 23).to(gl.float32, bitcast=True), 2)
    if HELD < TILE:
        keys.store(
            gl.zeros([TILE, 512], gl.bfloat16, gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0]))
        )
        gl.thread_barrier()
    keys.slice(0, HELD).store(gl.reshape(y, [HELD, 512]).to(gl.bfloat16))


@gluon.jit
def find(
    table, row, positions_ptr, request_ptr, start_ptr, selected_ptr, window_table_ptr, far_table_ptr,
    window_columns, far_columns, selected_row, first,
    WIDTH: gl.constexpr, SELECTED: gl.constexpr, OWN: gl.constexpr, WINDOW_SLOTS: gl.constexpr, FAR_SLOTS: gl.constexpr,
    SHARE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Write the ids of a row's records into ``table`` -> its request, and the tile behind the share's last, at least one more.

    The last tile of the table says that number. Tiles of nothing at the end are left out, which changes no bit.
    """
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    NEAR: gl.constexpr = tiles_of(WIDTH) * TILE
    if OWN == 0:
        position = gl.load(positions_ptr + row)
        request = gl.maximum(gl.load(request_ptr + row), 0)  # a row of padding has none, and sees nothing
    else:
        request = row // OWN
        position = gl.load(positions_ptr + request) - 1
    start = gl.load(start_ptr + request)
    key = gl.arange(0, table.shape[0], layout=FLAT)
    seen = position - (WIDTH - 1) + key
    held = (seen >= 0) & (key < WIDTH)  # not yet whether it may be read: no load waits for ``start``
    seen = gl.where(held, seen, 0)
    block = gl.load(window_table_ptr + request * window_columns + seen // WINDOW_SLOTS, mask=held, other=-1)
    held = (block >= 0) & (seen >= start)
    record = gl.where(held, block * WINDOW_SLOTS + seen % WINDOW_SLOTS, -1).to(gl.int32)
    last = NEAR // TILE
    if SELECTED > 0:
        place = key - NEAR
        held = (place >= 0) & (place < SELECTED)
        entry = gl.load(selected_ptr + row * selected_row + place, mask=held, other=-1)
        live = entry >= 0
        entry = gl.where(live, entry, 0)
        block = gl.load(far_table_ptr + request * far_columns + entry // FAR_SLOTS, mask=live, other=-1)
        far = gl.where(block >= 0, block * FAR_SLOTS + entry % FAR_SLOTS, -1).to(gl.int32)
        record = gl.where(place < 0, record, far)
        last = NEAR // TILE + gl.max(gl.where(far >= 0, place // TILE + 1, 0), 0)
    if OWN > 0:
        record = gl.where((key >= NEAR) & (key < NEAR + OWN), 0, record)
        last = NEAR // TILE + 1
    last = gl.maximum(gl.minimum(last, first + SHARE), first + 1)
    table.store(gl.where(key >= table.shape[0] - TILE, last, record))
    gl.thread_barrier()
    return request, last
