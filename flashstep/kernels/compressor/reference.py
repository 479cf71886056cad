"""Pair pooling and its tail ring in plain torch: float64 inside, one rounding to bf16."""

import torch
from torch import Tensor


def pool_pairs(
    value_TC: Tensor, score_TC: Tensor, *, tail: Tensor, slot_T: Tensor, positions_T: Tensor
) -> Tensor:
    """See ``Compressor.pool_pairs``."""
    pooled = torch.zeros_like(value_TC, dtype=torch.bfloat16)
    closing = (positions_T % 2 == 1).nonzero().squeeze(1)
    if closing.numel() == 0:
        return pooled
    before = (closing - 1).clamp(min=0)
    same_step = (
        (closing > 0)
        & (slot_T[before] == slot_T[closing])
        & (positions_T[before] == positions_T[closing] - 1)
    )
    kept = tail[slot_T[closing], (positions_T[closing] - 1) % tail.shape[1]]
    value_1 = torch.where(same_step.unsqueeze(1), value_TC[before], kept[:, 0]).double()
    score_1 = torch.where(same_step.unsqueeze(1), score_TC[before], kept[:, 1]).double()
    value_2, score_2 = value_TC[closing].double(), score_TC[closing].double()
    first = torch.sigmoid(score_1 - score_2)
    second = torch.sigmoid(score_2 - score_1)
    pooled[closing] = (value_1 * first + value_2 * second).bfloat16()
    return pooled


def store_tail(
    value_TC: Tensor, score_TC: Tensor, *, tail: Tensor, slot_T: Tensor, positions_T: Tensor
) -> None:
    """See ``Compressor.store_tail``. Earlier rows that share a place with a later one of their slot are left out."""
    length, rows = tail.shape[1], positions_T.shape[0]
    later = torch.arange(rows, device=slot_T.device) + length
    inside = later < rows
    overwritten = inside & (slot_T[later.clamp(max=rows - 1)] == slot_T)
    last = (~overwritten & (slot_T >= 0)).nonzero().squeeze(1)  # rows of no slot pad a step
    tail[slot_T[last], positions_T[last] % length] = torch.stack((value_TC[last], score_TC[last]), dim=1)
