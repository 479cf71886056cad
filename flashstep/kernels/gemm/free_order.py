"""Linear layers of many rows by cuBLAS: sums are taken in whatever order it chooses for the number of rows.

Takes what ``cuda`` prepared. An FP8 weight is expanded to bf16 (exactly) for each call: that costs a thirtieth of the product of
8,192 rows and keeps no second copy. Few rows go to ``cuda``. Knows no layer.
"""

from typing import Any

import torch
from torch import Tensor

from flashstep.kernels.gemm import cuda

MANY_ROWS = 1024  # below, expanding costs more than cuBLAS gains

# partial sums must not be rounded to bf16 (a setting of the process)
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def lin8(quantised: Any, weight: cuda.Weight8) -> Tensor:
    """See ``Gemm.lin8``."""
    if quantised.shape[0] < MANY_ROWS:
        return cuda.lin8(quantised, weight)
    return torch.mm(quantised.bfloat16(), weight.expanded().T)


def linb(x_TI: Tensor, weight: Tensor) -> Tensor:
    """See ``Gemm.linb``."""
    return torch.mm(x_TI, weight.T) if x_TI.shape[0] >= MANY_ROWS else cuda.linb(x_TI, weight)


def linf(x_TI: Tensor, weight: Tensor) -> Tensor:
    """See ``Gemm.linf``."""
    if x_TI.shape[0] < MANY_ROWS:
        return cuda.linf(x_TI, weight)
    return torch.mm(x_TI, weight.T, out_dtype=torch.float32)


def linb_grouped(x_TGI: Tensor, weight: cuda.Weight8) -> Tensor:
    """See ``Gemm.linb_grouped``."""
    rows, groups, _ = x_TGI.shape
    if rows < MANY_ROWS:
        return cuda.linb_grouped(x_TGI, weight)
    out_TGO = torch.empty(rows, groups, weight.outputs, dtype=torch.bfloat16, device=x_TGI.device)
    for group, weight_OI in enumerate(weight.expanded().chunk(groups)):
        torch.mm(x_TGI[:, group], weight_OI.T, out=out_TGO[:, group])
    return out_TGO
