"""The places of a step's rows in Triton: one program a row; the angles' cosines in float64, as ``norm_rope`` takes them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashstep.kernels.fused import Places
from flashstep.kernels.jit import programmatic, wait_for_producers


@triton.jit
def _place_rows(
    positions_ptr,
    request_ptr,
    store_ptr,
    slot_R_ptr,
    window_table_ptr,
    block_table_ptr,
    frequencies_ptr,
    back_ptr,
    places_ptr,
    cos_ptr,
    sin_ptr,
    rows,
    window_row,
    block_row,
    columns,
    BLOCK_SIZE: tl.constexpr,
    TABLES: tl.constexpr,
    TABLES_POW2: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_POW2: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: its six numbers (``places`` int64 [6, T]) and its angles' cosines and sines, fp32 [A, T, P]."""
    wait_for_producers(PDL)
    row = tl.program_id(0)
    position = tl.load(positions_ptr + row)
    request = tl.load(request_ptr + row)
    column = position // BLOCK_SIZE
    live = (position >= 0) & (request >= 0) & (column < columns)
    within = position % BLOCK_SIZE
    slot = tl.load(slot_R_ptr + request, mask=request >= 0, other=-1)
    window = tl.load(window_table_ptr + request * window_row + column, mask=live, other=-1).to(tl.int64)
    block = tl.load(block_table_ptr + request * block_row + column, mask=live, other=-1).to(tl.int64)
    writes = (block >= 0) & (tl.load(store_ptr + row) != 0)
    tl.store(places_ptr + row, slot)
    tl.store(places_ptr + rows + row, tl.where(window >= 0, window * BLOCK_SIZE + within, -1))
    tl.store(places_ptr + 2 * rows + row, tl.where(writes, block * BLOCK_SIZE + within, -1))
    pair = block * (BLOCK_SIZE // 2) + within // 2
    tl.store(places_ptr + 3 * rows + row, tl.where(writes & (position % 2 == 1), pair, -1))
    tl.store(places_ptr + 4 * rows + row, tl.maximum(position + 1, 0))
    tl.store(places_ptr + 5 * rows + row, tl.maximum(position + 1, 0) // 2)
    table = tl.arange(0, TABLES_POW2)
    turn = tl.arange(0, PAIRS_POW2)
    held = (table < TABLES)[:, None] & (turn < PAIRS)[None, :]
    back = tl.load(back_ptr + table, mask=table < TABLES, other=0)
    frequency = tl.load(frequencies_ptr + table[:, None] * PAIRS + turn[None, :], mask=held, other=0.0)
    at = tl.maximum(position - back, 0).to(tl.float32)
    angle = (at[:, None] * frequency).to(tl.float64)  # rounded to fp32 before its cosine is taken
    out = (table[:, None].to(tl.int64) * rows + row) * PAIRS + turn[None, :]
    tl.store(cos_ptr + out, tl.cos(angle).to(tl.float32), mask=held)
    tl.store(sin_ptr + out, tl.sin(angle).to(tl.float32), mask=held)


def place_rows(
    positions_T: Tensor,
    request_T: Tensor,
    store_T: Tensor,
    *,
    slot_R: Tensor,
    window_table_RB: Tensor,
    block_table_RB: Tensor,
    block_size: int,
    frequencies_AP: Tensor,
    back_A: Tensor,
) -> Places:
    """See ``Fused.place_rows``."""
    rows, (tables, pairs_) = positions_T.shape[0], frequencies_AP.shape
    assert window_table_RB.stride(1) == 1 and block_table_RB.stride(1) == 1
    assert frequencies_AP.is_contiguous() and window_table_RB.shape == block_table_RB.shape
    device = positions_T.device
    places = torch.empty(6, rows, dtype=torch.int64, device=device)
    angles = torch.empty(2, tables, rows, pairs_, dtype=torch.float32, device=device)
    if rows:
        _place_rows[(rows,)](
            positions_T,
            request_T,
            store_T,
            slot_R,
            window_table_RB,
            block_table_RB,
            frequencies_AP,
            back_A,
            places,
            angles[0],
            angles[1],
            rows,
            window_table_RB.stride(0),
            block_table_RB.stride(0),
            block_table_RB.shape[1],
            BLOCK_SIZE=block_size,
            TABLES=tables,
            TABLES_POW2=triton.next_power_of_2(tables),
            PAIRS=pairs_,
            PAIRS_POW2=triton.next_power_of_2(pairs_),
            num_warps=4,
            PDL=programmatic(device),
            launch_pdl=programmatic(device),
        )
    slot, window, entry_1, entry_2, visible_1, visible_2 = places.unbind(0)
    return Places(slot, window, (entry_1, entry_2), (visible_1, visible_2), angles[0], angles[1])


AOT = (
    (
        _place_rows,
        {
            "positions_ptr": "*i64:16",
            "request_ptr": "*i64:16",
            "store_ptr": "*i1:16",
            "slot_R_ptr": "*i64:16",
            "window_table_ptr": "*i64:16",
            "block_table_ptr": "*i64:16",
            "frequencies_ptr": "*fp32:16",
            "back_ptr": "*i64:16",
            "places_ptr": "*i64:16",
            "cos_ptr": "*fp32:16",
            "sin_ptr": "*fp32:16",
            "rows": "i32",
            "window_row": "i32",
            "block_row": "i32",
            "columns": "i32",
        },
        {"BLOCK_SIZE": 64, "TABLES": 3, "TABLES_POW2": 4, "PAIRS": 32, "PAIRS_POW2": 32, "PDL": True},
        {"num_warps": 4},
    ),
)
