"""Sparse latent attention at 512 channels: hands tensors to the kernels of ``wgmma`` and says how they are launched.

Owns the choice of a program's shape, by the head count alone. Takes rows as ``flashstep.kernels.attention`` does, and in how many
shares a row's keys are to be taken. Knows no rounding.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from flashstep.kernels.attention import AttentionRows, BlockRows, Planes
from flashstep.kernels.attention.records import KEY_SCALE, tiles_of
from flashstep.kernels.attention.wgmma import LOG2_E, attend_rows_kernel, merge_kernel
from flashstep.kernels.jit import programmatic

CHANNELS = 512  # of a head: what the layouts of a tile are made for
MULTIPROCESSORS = 132  # of an H200; a program fills one, and takes the rows that are that far apart


def attend(
    q_THC: Tensor,
    rotation: tuple[Tensor, Tensor],
    window: Planes,
    far: tuple[Planes, Tensor] | None,
    *,
    rows: AttentionRows,
    width: int,
    sink_H: Tensor,
    splits: int,
) -> Tensor:
    """bf16 [T, H, C] of queries before their rotation; ``far``: the compressed records and the entries [T, K] seen of them.

    The keys of a row are taken in up to ``splits`` shares by as many programs, whose sums are then added in their order.
    """
    places = _Places(rows.positions_T, rows.request_T, rows.window_start_R, rows.window_table_RB)
    entries = None if far is None else (*far, rows.block_table_RB)
    return _launch(q_THC, rotation, window, places, entries, None, width=width, sink_H=sink_H, splits=splits)


def attend_block(
    q_RKHC: Tensor,
    k_RKC: Tensor,
    rotation: tuple[Tensor, Tensor],
    window: Planes,
    *,
    rows: BlockRows,
    width: int,
    sink_H: Tensor,
) -> Tensor:
    """bf16 [R, K, H, C]: every place is a row, which also sees the keys of all places of its block."""
    places = _Places(rows.position_R, rows.position_R, rows.window_start_R, rows.window_table_RB)
    q_THC = q_RKHC.flatten(0, 1)
    out = _launch(q_THC, rotation, window, places, None, k_RKC, width=width, sink_H=sink_H, splits=1)
    return out.view(q_RKHC.shape)


class _Places(NamedTuple):
    """Where rows stand, int64; a block's rows have no request."""

    positions: Tensor
    request_T: Tensor
    window_start_R: Tensor
    window_table_RB: Tensor


def _launch(
    q_THC: Tensor,
    rotation: tuple[Tensor, Tensor],
    window: Planes,
    places: _Places,
    far: tuple[Planes, Tensor, Tensor] | None,
    k_RKC: Tensor | None,
    *,
    width: int,
    sink_H: Tensor,
    splits: int,
) -> Tensor:
    count, heads, channels = q_THC.shape
    assert channels == CHANNELS
    out = torch.empty(q_THC.shape, dtype=q_THC.dtype, device=q_THC.device)
    if not count:
        return out
    block, options = program(heads)
    blocks, pdl = triton.cdiv(heads, block), programmatic(q_THC.device)
    tiles = tiles_of(width) + tiles_of(0 if far is None else far[1].shape[1])
    splits = triton.cdiv(tiles, triton.cdiv(tiles, splits))  # no share is empty
    cos_TP, sin_TP = rotation
    near_values, near_scales = _planes(window, torch.uint8)
    table = places.window_table_RB
    # a kernel without entries or keys of its own reads none of what stands for them here
    far_values, far_scales, far_table, selected_TK, selected = near_values, near_scales, table, table, 0
    if far is not None:
        (far_values, far_scales), selected_TK, far_table = _planes(far[0], torch.int16), *far[1:]
        selected = selected_TK.shape[1]
    own = q_THC.unsqueeze(1) if k_RKC is None else k_RKC
    for tensor in (q_THC, cos_TP, sin_TP, table, far_table, selected_TK, own):
        assert tensor.stride(-1) == 1
    sums = peaks = totals = cos_TP  # a kernel of one share writes none of them
    if splits > 1:
        pieces = count * blocks * splits * block
        sums, peaks, totals = (
            torch.empty(n, dtype=torch.float32, device=q_THC.device)
            for n in (pieces * channels, pieces, pieces)
        )
    constants = {
        "HEADS": heads, "CHANNELS": channels, "PAIRS": cos_TP.shape[1], "BLOCK_HEADS": block, "SPLITS": splits, "PDL": pdl,
    }  # fmt: skip
    items = count * blocks * splits
    attend_rows_kernel[(min(items, MULTIPROCESSORS),)](
        q_THC, cos_TP, sin_TP, out, sums, peaks, totals, sink_H, places.positions, places.request_T, places.window_start_R,
        selected_TK, near_values, near_scales, table, far_values, far_scales, far_table, own,
        q_THC.stride(0), q_THC.stride(1), cos_TP.stride(0), sin_TP.stride(0),
        near_values.stride(0), near_scales.stride(0), table.stride(0),
        far_values.stride(0), far_scales.stride(0), far_table.stride(0), selected_TK.stride(0),
        own.stride(0), own.stride(1), channels**-0.5 * LOG2_E.value * KEY_SCALE.value, items,
        **constants, WIDTH=width, SELECTED=selected, OWN=0 if k_RKC is None else k_RKC.shape[1],
        WINDOW_SLOTS=window[0].shape[1], FAR_SLOTS=far_values.shape[1],
        **options, launch_pdl=pdl,
    )  # fmt: skip
    if splits > 1:
        group, part = min(block, 8), 64
        merge_kernel[(count, triton.cdiv(heads, group), channels // part)](
            sums, peaks, totals, sink_H, cos_TP, sin_TP, out, cos_TP.stride(0), sin_TP.stride(0),
            **constants, GROUP=group, PART=part, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    return out


def program(heads: int) -> tuple[int, dict[str, int]]:
    """Heads of a program, and its launch options: of the head count alone, so that a row's bits do not depend on the batch."""
    block = min(64, max(8, triton.next_power_of_2(heads)))
    if block == 64:
        return block, {"BUFFERS": 2, "FILLERS": 4, "FILLER_REGISTERS": 112, "num_warps": 8}
    buffers, registers = (2, 128) if block == 32 else (3, 144)
    return block, {"BUFFERS": buffers, "FILLERS": 8, "FILLER_REGISTERS": registers, "num_warps": 4}


def _planes(planes: Planes, scales: torch.dtype) -> Planes:
    """Values as words of 32 bits, scales as ``scales``; the records of a block each lie together, one behind the other."""
    values, factors = planes[0].view(torch.int32), planes[1].view(scales)
    for plane in (values, factors):
        assert plane.stride(2) == 1 and plane.stride(1) == plane.shape[2]
    return values, factors


_TYPES = {
    "*bf16:16": "q_ptr out_ptr k_ptr",
    "*fp32:16": "cos_ptr sin_ptr sums_ptr peaks_ptr totals_ptr sink_ptr",
    "*i32:16": "selected_ptr window_ptr far_ptr",
    "*u8:16": "window_scales_ptr",
    "*i16:16": "far_scales_ptr",
    "*i64:16": "positions_ptr request_ptr start_ptr window_table_ptr far_table_ptr",
    "fp32": "scale",
    "i32:16": "q_row q_head cos_row sin_row window_block window_scales_block far_values_block far_scales_block "
    "k_block k_place",
    "i32": "window_columns far_columns selected_row items",
}
_SIGNATURE = {name: kind for kind, names in _TYPES.items() for name in names.split()}


def _variant(
    heads: int, selected: int, splits: int, own: int
) -> tuple[dict[str, int | bool], dict[str, int]]:
    """Constants and launch options of a call at released shapes."""
    block, options = program(heads)
    shape = {
        "HEADS": heads,
        "CHANNELS": CHANNELS,
        "PAIRS": 32,
        "WIDTH": 128,
        "SELECTED": selected,
        "OWN": own,
    }
    slots = {"WINDOW_SLOTS": 64, "FAR_SLOTS": 64}
    constants = {**shape, **slots, "BLOCK_HEADS": block, "SPLITS": splits, "PDL": True, **options}
    return constants, {"num_warps": options["num_warps"]}


# (kernel, signature, constants, options) to compile ahead of time
AOT = (
    *(
        (attend_rows_kernel, _SIGNATURE, *_variant(heads, selected, splits, own))
        for heads in (64, 32, 16, 8)
        for selected, splits, own in ((512, 1, 0), (512, 10, 0), (0, 1, 0), (0, 1, 5))
    ),
    *(
        (
            merge_kernel,
            _SIGNATURE,
            {
                "HEADS": heads, "CHANNELS": CHANNELS, "PAIRS": 32, "BLOCK_HEADS": heads, "SPLITS": 10, "GROUP": 8,
                "PART": 64, "PDL": True, "num_warps": 4,
            },
            {"num_warps": 4},
        )
        for heads in (64, 8)
    ),
)  # fmt: skip
