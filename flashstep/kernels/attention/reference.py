"""Sparse latent attention in plain torch; float64 inside, one rounding to bf16.

The window records that the rows of a request share are decoded once; each row gathers its own of them, and its own selected
records. Rows are taken in tiles whose gathered records fit ``WORKSPACE_BYTES``, whatever the batch and the lengths; draft blocks,
by requests.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flashstep.kernels.attention import AttentionRows, BlockRows, Planes
from flashstep.quant import mxfp8, nvfp4

WORKSPACE_BYTES = 2 << 20  # 0.5 to 8 MiB differ by 10 %: measured 2026-11-30, see docs/log.md


class Windows(NamedTuple):
    """The window records of a step. A run is a request's rows at consecutive positions; it needs the W - 1 records before it too.

    A draft block is one row: it needs the W records before its first place.

    block_F, place_F  int64  where each record of all runs lies, 0 where it does not exist
    live_F            bool   whether it exists
    record_TW         int64  which of them a row sees, oldest first
    """

    block_F: Tensor
    place_F: Tensor
    live_F: Tensor
    record_TW: Tensor


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
    q_THC = rotate(q_THC, cos_TP, sin_TP)
    windows = _windows(rows, width=width, slots=window[0].shape[1])
    near_FC = _near(window, windows)
    pieces = []
    for part in _tiles(q_THC, slots=width):
        chosen = windows.record_TW[part]
        pieces.append(_attend(q_THC[part], near_FC[chosen], windows.live_F[chosen], sink_H=sink_H))
    return rotate_inverse(torch.cat(pieces), cos_TP, sin_TP)


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
    q_THC = rotate(q_THC, cos_TP, sin_TP)
    windows = _windows(rows, width=width, slots=window[0].shape[1])
    near_FC = _near(window, windows)
    pieces = []
    for part in _tiles(q_THC, slots=width + selected_TK.shape[1]):
        chosen, selected = windows.record_TW[part], selected_TK[part].long()
        far, far_live = _far(compressed, rows.block_table_RB[rows.request_T[part]], selected)
        records = torch.cat((near_FC[chosen], far), dim=1)
        live = torch.cat((windows.live_F[chosen], far_live), dim=1)
        pieces.append(_attend(q_THC[part], records, live, sink_H=sink_H))
    return rotate_inverse(torch.cat(pieces), cos_TP, sin_TP)


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
    if "context" not in rows.memo:
        rows.memo["context"] = _find_context(rows, width=width, slots=window[0].shape[1])
    context: Windows = rows.memo["context"]
    near_FC = _near(window, context)
    # the places of a block see the same records: to the softmax they are so many more heads
    q_RHC = rotate(q_RKHC.flatten(0, 1), cos_TP, sin_TP).view_as(q_RKHC).flatten(1, 2)
    sinks = sink_H.repeat(q_RKHC.shape[1])
    pieces = []
    for part in _tiles(q_RHC, slots=width + k_RKC.shape[1]):
        own = mxfp8.quantise_dequantise(k_RKC[part], dtype=torch.float64)
        chosen = context.record_TW[part]
        records = torch.cat((near_FC[chosen], own), dim=1)
        live = torch.cat((context.live_F[chosen], chosen.new_ones(own.shape[:2]).bool()), dim=1)
        pieces.append(_attend(q_RHC[part], records, live, sink_H=sinks))
    o_THC = torch.cat(pieces).view_as(q_RKHC).flatten(0, 1)
    return rotate_inverse(o_THC, cos_TP, sin_TP).view_as(q_RKHC)


def rotate(x_THC: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """As ``NormRope.rotate`` of all heads of each row, bit for bit (families do not import one another)."""
    turn = torch.complex(cos_TP, sin_TP).to(torch.complex128).unsqueeze(1)
    out = x_THC.clone()
    tail = out[..., -2 * cos_TP.shape[1] :]
    turned = torch.view_as_complex(tail.double().unflatten(-1, (-1, 2))) * turn
    tail.copy_(torch.view_as_real(turned).flatten(-2))
    return out


def rotate_inverse(x_THC: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """As ``NormRope.rotate_inverse``."""
    return rotate(x_THC, cos_TP, -sin_TP)


def _tiles(q_THC: Tensor, *, slots: int) -> list[slice]:
    rows = max(1, WORKSPACE_BYTES // (slots * q_THC.shape[2] * 8))
    return [slice(low, low + rows) for low in range(0, q_THC.shape[0], rows)]


def _windows(rows: AttentionRows, *, width: int, slots: int) -> Windows:
    """Worked out by the first layer that asks."""
    if "windows" not in rows.memo:
        rows.memo["windows"] = _find_windows(rows, width=width, slots=slots)
    return rows.memo["windows"]


def _find_windows(rows: AttentionRows, *, width: int, slots: int) -> Windows:
    positions, request = rows.positions_T, rows.request_T
    device, count = positions.device, positions.shape[0]
    starts = torch.ones(count, dtype=torch.bool, device=device)
    starts[1:] = (request[1:] != request[:-1]) | (positions[1:] != positions[:-1] + 1)
    run = starts.cumsum(0) - 1
    first = starts.nonzero().squeeze(1)
    oldest = torch.arange(count, device=device) + run * (width - 1)  # of each row's window, among all records
    record = oldest.unsqueeze(1) + torch.arange(width, device=device)
    # records of a run: the whole window of its first row, then one more a row
    lengths = torch.diff(first, append=first.new_tensor([count])) + width - 1
    back = torch.arange(int(lengths.sum()), device=device) - oldest[first].repeat_interleave(lengths)
    position = (positions[first] - (width - 1)).repeat_interleave(lengths) + back
    owner = request[first].repeat_interleave(lengths)
    live = position >= rows.window_start_R[owner].clamp(min=0)
    position = position.where(live, 0)
    block = rows.window_table_RB[owner, position // slots]
    live &= block >= 0
    return Windows(block_F=block.where(live, 0), place_F=position % slots, live_F=live, record_TW=record)


def _find_context(rows: BlockRows, *, width: int, slots: int) -> Windows:
    back = torch.arange(-width, 0, device=rows.position_R.device)
    position = rows.position_R.unsqueeze(1) + back
    live = position >= rows.window_start_R.clamp(min=0).unsqueeze(1)
    position = position.where(live, 0)
    block = rows.window_table_RB.gather(1, position // slots)
    live &= block >= 0
    record = torch.arange(position.numel(), device=position.device).view_as(position)
    return Windows(
        block_F=block.where(live, 0).flatten(),
        place_F=(position % slots).flatten(),
        live_F=live.flatten(),
        record_TW=record,
    )


def _near(window: Planes, windows: Windows) -> Tensor:
    """float64 [F, C] window records; those that do not exist are zeros (what stands there may be NaN, and 0 * NaN is NaN)."""
    values, scales = (plane[windows.block_F, windows.place_F] for plane in window)
    return mxfp8.dequantise(values, scales, dtype=torch.float64).masked_fill_(~windows.live_F.unsqueeze(1), 0)


def _far(compressed: Planes, table_TB: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
    """float64 [rows, K, C] compressed records ``selected`` (int64), zeros where none, and which exist, bool [rows, K]."""
    slots = compressed[0].shape[1]
    place = selected.clamp(min=0)
    block = table_TB.gather(1, place // slots)
    live = (selected >= 0) & (block >= 0)
    block, place = block.where(live, 0), place % slots
    values, scales = (plane[block, place] for plane in compressed)
    records = nvfp4.dequantise(values, scales, dtype=torch.float64)
    return records.masked_fill_(~live.unsqueeze(2), 0), live


def _attend(q_THC: Tensor, records: Tensor, live: Tensor, *, sink_H: Tensor) -> Tensor:
    """bf16 [rows, H, C]: one softmax over the live records [rows, slots, C] and the sink, whose value is nothing.

    Probabilities are rounded to bf16 for the product with the values and not for their sum, as the model does.
    """
    logits = torch.bmm(q_THC.double(), records.transpose(1, 2)).mul_(q_THC.shape[2] ** -0.5)
    logits.masked_fill_(~live.unsqueeze(1), float("-inf"))
    peak = logits.amax(2, keepdim=True)
    weights = logits.sub_(peak).exp_()
    total = weights.sum(2, keepdim=True) + torch.exp(sink_H.unsqueeze(1) - peak)
    return torch.bmm(weights.bfloat16().double(), records).div_(total).bfloat16()
