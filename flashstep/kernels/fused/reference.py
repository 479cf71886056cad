"""The fused ops in plain torch: the references of the families below, one after the other."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashstep.kernels.cast import Planes
from flashstep.kernels.cast import reference as cast
from flashstep.kernels.compressor import reference as compressor
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
    pooled_TC = compressor.pool_pairs(
        value_TC, score_TC, tail=tail, slot_T=row_slot_T, positions_T=positions_T
    )
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
    compressor.store_tail(value_TC, score_TC, tail=tail, slot_T=row_slot_T, positions_T=positions_T)


def look_up_quantised(lookback_TN: Tensor, hashing: Hashing, table: TablePlanes) -> Any:
    """See ``Fused.look_up_quantised``."""
    return gemm.quantise_input(engram.look_up(lookback_TN, hashing, table))
