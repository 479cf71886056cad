"""Linear layers in plain torch: weights dequantised once, exactly, to float64; one rounding of each result.

A float64 sum of products of numbers with few-bit significands is exact, or so nearly that the rounding cannot tell: results do
not depend on the number of rows, on chunking or on threads. What another implementation prepared is taken as ``double()`` of it
(its own is float64 already, and stays as it is).
"""

from typing import Any

import torch
from torch import Tensor

from flashstep.quant import mxfp8
from flashstep.quant.tensor import QuantTensor


def prepare_fp8(*weights: QuantTensor) -> Tensor:
    """See ``Gemm.prepare_fp8``: float64 [O, I]."""
    return torch.cat([weight.dequantise().double() for weight in weights])


def prepare_fp8_grouped(weight: QuantTensor, *, groups: int) -> Tensor:
    """See ``Gemm.prepare_fp8_grouped``: float64 [G, I, O]."""
    return weight.dequantise().double().unflatten(0, (groups, -1)).transpose(1, 2).contiguous()


def prepare_bf16(*weights: Tensor) -> Tensor:
    """See ``Gemm.prepare_bf16``: float64 [O, I]."""
    return torch.cat(weights).double()


def quantise_input(x_TI: Tensor) -> Tensor:
    """See ``Gemm.quantise_input``: the quantised values, float64 [T, I]."""
    return mxfp8.quantise_dequantise(x_TI, dtype=torch.float64)


def lin8(quantised: Any, weight: Any) -> Tensor:
    """See ``Gemm.lin8``."""
    return (quantised.double() @ weight.double().T).bfloat16()


def linb(x_TI: Tensor, weight: Any) -> Tensor:
    """See ``Gemm.linb``."""
    return (x_TI.double() @ weight.double().T).bfloat16()


def linf(x_TI: Tensor, weight: Any) -> Tensor:
    """See ``Gemm.linf``."""
    return (x_TI.double() @ weight.double().T).float()


def linb_grouped(x_TGI: Tensor, weight: Any) -> Tensor:
    """See ``Gemm.linb_grouped``."""
    return (x_TGI.double().transpose(0, 1) @ weight.double()).transpose(0, 1).bfloat16()
