"""Sparse latent attention of few rows: their keys in shares, so that all multiprocessors have work.

How many shares a row's keys are taken in, and so the order of its sums, depends on how many rows there are.
"""

import triton
from torch import Tensor

from flashstep.kernels.attention import AttentionRows, Planes, launch
from flashstep.kernels.attention import triton as whole

_MULTIPROCESSORS = 132  # of an H200: beyond a program each, a share more gains nothing
_SPLITS = (10, 5, 2)  # of 10 tiles of keys


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
    splits = _splits(q_THC.shape[0], q_THC.shape[1])
    if splits == 1 or q_THC.shape[2] != launch.CHANNELS:
        return whole.attend_sparse(
            q_THC,
            cos_TP=cos_TP,
            sin_TP=sin_TP,
            window=window,
            compressed=compressed,
            rows=rows,
            selected_TK=selected_TK,
            width=width,
            sink_H=sink_H,
        )
    return launch.attend(
        q_THC,
        (cos_TP, sin_TP),
        window,
        (compressed, selected_TK),
        rows=rows,
        width=width,
        sink_H=sink_H,
        splits=splits,
    )


def _splits(rows: int, heads: int) -> int:
    programs = rows * triton.cdiv(heads, launch.program(heads)[0])
    return next((splits for splits in _SPLITS if programs * splits <= _MULTIPROCESSORS), 1)
