"""The fused ops in plain torch: the references of the families below, one after the other."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashstep.kernels.cast import Planes
from flashstep.kernels.cast import reference as cast
from flashstep.kernels.engram import Hashing
from flashstep.kernels.engram import Planes as TablePlanes
from flashstep.kernels.engram import reference as engram
from flashstep.kernels.fused import Places
from flashstep.kernels.gemm import reference as gemm
from flashstep.kernels.norm_rope import reference as norm_rope


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
    column_T, within_T = positions_T // block_size, positions_T % block_size
    window_T = window_table_RB[request_T, column_T]
    block_T = block_table_RB[request_T, column_T]
    may_write_T = (block_T >= 0) & store_T
    pair_T = block_T * (block_size // 2) + within_T // 2
    tables = [
        norm_rope.angles((positions_T - back).clamp(min=0), frequencies_P)
        for back, frequencies_P in zip(back_A, frequencies_AP, strict=True)
    ]
    return Places(
        slot_T=slot_R[request_T],
        window_slot_T=torch.where(window_T >= 0, window_T * block_size + within_T, -1),
        entry_slot_T=(
            torch.where(may_write_T, block_T * block_size + within_T, -1),
            torch.where(may_write_T & (positions_T % 2 == 1), pair_T, -1),
        ),
        visible_T=(positions_T + 1, (positions_T + 1) // 2),
        cos_ATP=torch.stack([cos_TP for cos_TP, _ in tables]),
        sin_ATP=torch.stack([sin_TP for _, sin_TP in tables]),
    )


def norm_quantise(x_TC: Tensor, weight_C: Tensor, *, eps: float) -> Any:
    """See ``Fused.norm_quantise``."""
    return gemm.quantise_input(norm_rope.rms(x_TC, weight_C, eps=eps))


def latent_and_record(
    x_TX: Tensor,
    *,
    latent_weight_L: Tensor,
    key_weight_C: Tensor,
    eps: float,
    cos_TP: Tensor,
    sin_TP: Tensor,
    planes: Planes,
    slot_T: Tensor,
) -> Any:
    """See ``Fused.latent_and_record``."""
    latent, key_TC = latent_and_key(
        x_TX,
        latent_weight_L=latent_weight_L,
        key_weight_C=key_weight_C,
        eps=eps,
        cos_TP=cos_TP,
        sin_TP=sin_TP,
    )
    cast.store_mxfp8(key_TC, planes, slot_T=slot_T)
    return latent


def latent_and_key(
    x_TX: Tensor,
    *,
    latent_weight_L: Tensor,
    key_weight_C: Tensor,
    eps: float,
    cos_TP: Tensor,
    sin_TP: Tensor,
) -> tuple[Any, Tensor]:
    """See ``Fused.latent_and_key``."""
    latent_TL, key_TC = x_TX.split((latent_weight_L.shape[0], key_weight_C.shape[0]), dim=1)
    latent = norm_quantise(latent_TL, latent_weight_L, eps=eps)
    return latent, norm_rope.rotate(norm_rope.rms(key_TC, key_weight_C, eps=eps), cos_TP, sin_TP)


def store_contexts(
    k_TX: Tensor,
    weight_SC: Tensor,
    *,
    eps: float,
    cos_TP: Tensor,
    sin_TP: Tensor,
    planes: Sequence[Planes],
    slot_T: Tensor,
) -> None:
    """See ``Fused.store_contexts``."""
    for key_TC, weight_C, stage in zip(k_TX.chunk(len(planes), dim=1), weight_SC, planes, strict=True):
        cast.store_mxfp8(
            norm_rope.rotate(norm_rope.rms(key_TC, weight_C, eps=eps), cos_TP, sin_TP), stage, slot_T=slot_T
        )


def rotate_round(x_THK: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """See ``Fused.rotate_round``."""
    return cast.round_mxfp4(norm_rope.rotate(x_THK, cos_TP, sin_TP))


def publish_pairs(
    x_TX: Tensor,
    weight_C: Tensor,
    *,
    eps: float,
    tail: Tensor,
    row_slot_T: Tensor,
    positions_T: Tensor,
    cos_TP: Tensor,
    sin_TP: Tensor,
    planes: Planes,
    slot_T: Tensor,
) -> Tensor:
    """See ``Fused.publish_pairs``."""
    value_TC, score_TC = x_TX.chunk(2, dim=1)
    pooled_TC = pool_pairs(value_TC, score_TC, tail=tail, slot_T=row_slot_T, positions_T=positions_T)
    return publish_rows(
        pooled_TC, weight_C, eps=eps, cos_TP=cos_TP, sin_TP=sin_TP, planes=planes, slot_T=slot_T
    )


def publish_rows(
    x_TC: Tensor,
    weight_C: Tensor,
    *,
    eps: float,
    cos_TP: Tensor,
    sin_TP: Tensor,
    planes: Planes,
    slot_T: Tensor,
) -> Tensor:
    """See ``Fused.publish_rows``."""
    latent_TC = norm_rope.rms(x_TC, weight_C, eps=eps)
    cast.store_nvfp4(norm_rope.rotate(latent_TC, cos_TP, sin_TP), planes, slot_T=slot_T)
    return latent_TC


def store_key(
    x_TK: Tensor,
    weight_K: Tensor,
    *,
    eps: float,
    cos_TP: Tensor,
    sin_TP: Tensor,
    planes: Planes,
    slot_T: Tensor,
) -> None:
    """See ``Fused.store_key``."""
    cast.store_mxfp4(
        norm_rope.rotate(norm_rope.rms(x_TK, weight_K, eps=eps), cos_TP, sin_TP), planes, slot_T=slot_T
    )


def store_key_and_tail(
    x_TK: Tensor,
    weight_K: Tensor,
    *,
    eps: float,
    cos_TP: Tensor,
    sin_TP: Tensor,
    planes: Planes,
    slot_T: Tensor,
    product_TX: Tensor,
    tail: Tensor,
    row_slot_T: Tensor,
    positions_T: Tensor,
) -> None:
    """See ``Fused.store_key_and_tail``."""
    store_key(x_TK, weight_K, eps=eps, cos_TP=cos_TP, sin_TP=sin_TP, planes=planes, slot_T=slot_T)
    value_TC, score_TC = product_TX.chunk(2, dim=1)
    store_tail(value_TC, score_TC, tail=tail, slot_T=row_slot_T, positions_T=positions_T)


def look_up_quantised(lookback_TN: Tensor, hashing: Hashing, table: TablePlanes) -> Any:
    """See ``Fused.look_up_quantised``."""
    return gemm.quantise_input(engram.look_up(lookback_TN, hashing, table))


# ---- parts of the publisher that no other family has --------------------------------------------------------------------


def pool_pairs(
    value_TC: Tensor, score_TC: Tensor, *, tail: Tensor, slot_T: Tensor, positions_T: Tensor
) -> Tensor:
    """fp32 rows -> bf16 [T, C]: at an odd position the channelwise softmax pooling of (position - 1, position), rounded once.

    Rows of one slot are consecutive and ascending. The first half is the row before, or comes from ``tail`` fp32
    [slots, L, 2, C] where the row before belongs to an earlier step. Rows at even positions are zero: nothing closes there.
    """
    _check_pairs(value_TC, score_TC, tail)
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
    """Write the last L rows [C] of each slot into ``tail``, none of slot -1; call after ``pool_pairs`` has read it.

    The ring holds the (value, score) rows of a slot's last positions, place = position mod L, so that a group whose first half
    came in an earlier step, or was followed by rejected drafts, still closes by position (spec/model.md 3.4).
    """
    _check_pairs(value_TC, score_TC, tail)
    length, rows = tail.shape[1], positions_T.shape[0]
    later = torch.arange(rows, device=slot_T.device) + length
    inside = later < rows
    overwritten = inside & (slot_T[later.clamp(max=rows - 1)] == slot_T)
    last = (~overwritten & (slot_T >= 0)).nonzero().squeeze(1)  # rows of no slot pad a step
    tail[slot_T[last], positions_T[last] % length] = torch.stack((value_TC[last], score_TC[last]), dim=1)


def _check_pairs(value_TC: Tensor, score_TC: Tensor, tail: Tensor) -> None:
    assert value_TC.dtype is torch.float32 and score_TC.dtype is torch.float32 and tail.dtype is torch.float32
    assert tail.ndim == 4 and tail.shape[2:] == (2, value_TC.shape[1])
