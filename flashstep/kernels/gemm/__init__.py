"""Linear layers (spec/model.md 0): FP8 blocks with quantised inputs, plain bf16, fp32 results, and the grouped output.

Owns the signatures. ``prepare_*`` turn a checkpoint tensor into whatever layout the chosen implementation multiplies with;
the prepared weight is opaque to the caller; its ``double()`` is what the reference would have made, so that the switch can
force one op alone. Suffixes: T rows, I inputs, O outputs, G groups.
"""

from typing import Any

import torch
from torch import Tensor

from flashstep.kernels.registry import Cost, Family, Implementation
from flashstep.quant.tensor import QuantTensor

MANY_ROWS = ("lin8", "linb", "linf", "linb_grouped")
PRODUCTS = ("prepare_fp8", "prepare_fp8_grouped", "prepare_bf16", *MANY_ROWS)
OPS = ("quantise_input", *PRODUCTS)


def _rows(module: str, ops: tuple[str, ...], *, needs: set[str]) -> tuple[Implementation, ...]:
    return tuple(
        Implementation(op=f"gemm.{op}", module=f"flashstep.kernels.gemm.{module}", needs=frozenset(needs))
        for op in ops
    )


class Gemm(Family):
    """Public linear ops."""

    TABLE = (
        *_rows("free_order", MANY_ROWS, needs={"sm90", "nvcc", "any_order"}),
        *_rows("cuda", PRODUCTS, needs={"sm90", "nvcc"}),
        *_rows("triton", OPS, needs={"sm90"}),
        *_rows("reference", OPS, needs=set()),
    )

    def prepare_fp8(self, *weights: QuantTensor) -> Any:
        """E4M3 [O, I] with E8M0 scales per 32 x 32 block, made ready for ``lin8``; several give their outputs side by side."""
        return self._loaded["prepare_fp8"](*weights)

    def prepare_fp8_grouped(self, weight: QuantTensor, *, groups: int) -> Any:
        """E4M3 [G * O, I] with 32 x 32 blocks, made ready for ``linb_grouped`` (the released wo_a)."""
        return self._loaded["prepare_fp8_grouped"](weight, groups=groups)

    def prepare_bf16(self, *weights: Tensor) -> Any:
        """bf16 [O, I], made ready for ``linb`` and ``linf``; several give their outputs side by side."""
        assert all(weight.dtype is torch.bfloat16 and weight.ndim == 2 for weight in weights)
        return self._loaded["prepare_bf16"](*weights)

    def quantise_input(self, x_TI: Tensor) -> Any:
        """bf16 [T, I], quantised per 32 channels (Q8), made ready for ``lin8`` and ``moe.experts``: once for all who share it.

        Gives the quantised values [T, I] in bf16 or wider (exact in each), so that implementations can be mixed.
        """
        assert x_TI.dtype is torch.bfloat16 and x_TI.ndim == 2
        return self._loaded["quantise_input"](x_TI)

    def lin8(self, quantised: Any, weight: Any) -> Tensor:
        """A quantised input of T rows -> bf16 [T, O], accumulation at least fp32."""
        return self._loaded["lin8"](quantised, weight)

    def linb(self, x_TI: Tensor, weight: Any) -> Tensor:
        """bf16 [T, I] -> bf16 [T, O], accumulation at least fp32; nothing is quantised."""
        assert x_TI.dtype is torch.bfloat16 and x_TI.ndim == 2
        return self._loaded["linb"](x_TI, weight)

    def linf(self, x_TI: Tensor, weight: Any) -> Tensor:
        """bf16 [T, I] -> fp32 [T, O], operands promoted to fp32 (no TF32)."""
        assert x_TI.dtype is torch.bfloat16 and x_TI.ndim == 2
        return self._loaded["linf"](x_TI, weight)

    def linb_grouped(self, x_TGI: Tensor, weight: Any) -> Tensor:
        """bf16 [T, G, I] -> bf16 [T, G, O]: each group has its own weight (block-diagonal); inputs not quantised."""
        assert x_TGI.dtype is torch.bfloat16 and x_TGI.ndim == 3
        return self._loaded["linb_grouped"](x_TGI, weight)


def quantise_input_cost(*, rows: int, inputs: int) -> Cost:
    """bf16 in, E4M3 and scales out."""
    return Cost(bytes=rows * (3 * inputs + inputs // 32), flops=4 * rows * inputs)


def lin8_cost(*, rows: int, inputs: int, outputs: int) -> Cost:
    """FP8 weight with its scales, bf16 in and out."""
    weight = inputs * outputs + (inputs // 32) * (outputs // 32)
    return Cost(bytes=weight + 2 * rows * (inputs + outputs), flops=2 * rows * inputs * outputs)


def linb_cost(*, rows: int, inputs: int, outputs: int) -> Cost:
    """bf16 weight, input and output."""
    return Cost(bytes=2 * (inputs * outputs + rows * (inputs + outputs)), flops=2 * rows * inputs * outputs)


def linf_cost(*, rows: int, inputs: int, outputs: int) -> Cost:
    """bf16 weight and input, fp32 output."""
    return Cost(
        bytes=2 * inputs * outputs + rows * (2 * inputs + 4 * outputs), flops=2 * rows * inputs * outputs
    )


def linb_grouped_cost(*, rows: int, groups: int, inputs: int, outputs: int) -> Cost:
    """FP8 weight of every group, bf16 in and out."""
    weight = groups * (inputs * outputs + (inputs // 32) * (outputs // 32))
    return Cost(
        bytes=weight + 2 * rows * groups * (inputs + outputs), flops=2 * rows * groups * inputs * outputs
    )
