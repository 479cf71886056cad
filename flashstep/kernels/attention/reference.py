"""Sparse latent attention in plain torch: each row gathers its own records; float64 inside, one rounding to bf16.

Rows are taken in tiles whose gathered records fit ``WORKSPACE_BYTES``, whatever the batch and the lengths.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from flashstep.kernels.attention import AttentionRows, Planes
from flashstep.quant import mxfp8, nvfp4

WORKSPACE_BYTES = 8 << 20  # beyond this the copies leave the cache: measured 2026-11-30


def attend_window(
    q_THC: Tensor, *, window: Planes, rows: AttentionRows, width: int, sink_H: Tensor
) -> Tensor:
    """See ``Attention.attend_window``."""
    out = torch.empty_like(q_THC)
    for part in _tiles(q_THC, slots=width):
        records, live = _room(q_THC[part], slots=width)
        _gather_window(window, rows, part, into=(records, live))
        out[part] = _softmax_of_records(q_THC[part], records, live, sink_H=sink_H)
    return out


def attend_sparse(
    q_THC: Tensor,
    *,
    window: Planes,
    compressed: Planes,
    rows: AttentionRows,
    selected_TK: Tensor,
    width: int,
    sink_H: Tensor,
) -> Tensor:
    """See ``Attention.attend_sparse``."""
    out = torch.empty_like(q_THC)
    slots = width + selected_TK.shape[1]
    for part in _tiles(q_THC, slots=slots):
        records, live = _room(q_THC[part], slots=slots)
        _gather_window(window, rows, part, into=(records[:, :width], live[:, :width]))
        chosen = selected_TK[part].long()
        far = (records[:, width:], live[:, width:])
        _gather(
            compressed,
            rows.block_table_RB[rows.request_T[part]],
            chosen,
            chosen >= 0,
            decode=nvfp4.dequantise,
            into=far,
        )
        out[part] = _softmax_of_records(q_THC[part], records, live, sink_H=sink_H)
    return out


def _tiles(q_THC: Tensor, *, slots: int) -> list[slice]:
    rows = max(1, WORKSPACE_BYTES // (slots * q_THC.shape[2] * 8))
    return [slice(low, low + rows) for low in range(0, q_THC.shape[0], rows)]


def _room(q_THC: Tensor, *, slots: int) -> tuple[Tensor, Tensor]:
    """Records float64 [rows, slots, C] and which of them exist, bool [rows, slots]: the window oldest first, then the chosen."""
    rows, _, channels = q_THC.shape
    records = torch.empty(rows, slots, channels, dtype=torch.float64, device=q_THC.device)
    return records, torch.empty(rows, slots, dtype=torch.bool, device=q_THC.device)


def _gather_window(window: Planes, rows: AttentionRows, part: slice, *, into: tuple[Tensor, Tensor]) -> None:
    positions, request = rows.positions_T[part], rows.request_T[part]
    width = into[0].shape[1]
    wanted = positions.unsqueeze(1) - torch.arange(width - 1, -1, -1, device=positions.device)
    live = wanted >= rows.window_start_R[request].clamp(min=0).unsqueeze(1)
    _gather(window, rows.window_table_RB[request], wanted, live, decode=mxfp8.dequantise, into=into)


def _gather(
    planes: Planes,
    table_TB: Tensor,
    wanted: Tensor,
    live: Tensor,
    *,
    decode: Callable[[Tensor, Tensor], Tensor],
    into: tuple[Tensor, Tensor],
) -> None:
    """Records ``wanted`` (int64 [rows, slots]) where ``live``, through each row's block table; the others become zeros."""
    values, scales = planes
    slots = values.shape[1]
    wanted = wanted.where(live, 0)
    block = table_TB.gather(1, wanted // slots)
    live = live & (block >= 0)
    block, place = block.where(live, 0), wanted % slots
    records, exist = into
    records.copy_(decode(values[block, place], scales[block, place]))
    exist.copy_(live)
    if not bool(live.all()):
        records.masked_fill_(~live.unsqueeze(2), 0)  # what stands there may be NaN, and 0 * NaN is NaN


def _softmax_of_records(q_THC: Tensor, records: Tensor, live: Tensor, *, sink_H: Tensor) -> Tensor:
    """bf16 [rows, H, C]: one softmax over the live records and the sink, whose value is nothing.

    Probabilities are rounded to bf16 for the product with the values and not for their sum, as the model does.
    """
    logits = torch.matmul(q_THC.double(), records.transpose(1, 2)).mul_(q_THC.shape[2] ** -0.5)
    logits.masked_fill_(~live.unsqueeze(1), float("-inf"))
    peak = logits.amax(2, keepdim=True)
    weights = logits.sub_(peak).exp_()
    total = weights.sum(2, keepdim=True) + torch.exp(sink_H.double().unsqueeze(1) - peak)
    return torch.matmul(weights.bfloat16().double(), records).div_(total).bfloat16()
