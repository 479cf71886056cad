"""Linear layers and the norm: a weight prepared for the chosen kernel, and the call that uses it.

A tensor-parallel shard would be declared here: each class takes its whole weight from ``Parameters`` in its constructor, which
is where a rank would take its rows (column-parallel: wq_b, w1, w3, indexer.wq_b, head) or columns (wo_b, w2) instead.
"""

from typing import Any

from torch import Tensor

from flashstep.kernels import Ops
from flashstep.model.parameters import Parameters


class Linear8:
    """LIN8: FP8 block weight, quantised input, bf16 [T, I] -> bf16 [T, O]. Several names: one product, outputs side by side."""

    def __init__(self, parameters: Parameters, *names: str, ops: Ops) -> None:
        self._gemm = ops.gemm
        self._weight = ops.gemm.prepare_fp8(*(parameters.quantised(f"{name}.weight") for name in names))

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.product(self._gemm.quantise_input(x_TI))

    def product(self, quantised: Any) -> Tensor:
        """The same of an input that ``gemm.quantise_input`` has quantised, for layers that share one."""
        return self._gemm.lin8(quantised, self._weight)


class LinearB:
    """LINB: bf16 weight, bf16 [T, I] -> bf16 [T, O]."""

    def __init__(self, parameters: Parameters, name: str, *, ops: Ops) -> None:
        self._gemm = ops.gemm
        self._weight = ops.gemm.prepare_bf16(parameters.plain(f"{name}.weight"))

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._gemm.linb(x_TI, self._weight)


class LinearF:
    """LINF: bf16 weight promoted to fp32, bf16 [T, I] -> fp32 [T, O]. Several names: one product, outputs side by side."""

    def __init__(self, parameters: Parameters, *names: str, ops: Ops) -> None:
        self._gemm = ops.gemm
        self._weight = ops.gemm.prepare_bf16(*(parameters.plain(f"{name}.weight") for name in names))

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._gemm.linf(x_TI, self._weight)


class GroupedOutput:
    """The released wo_a: block-diagonal over head groups, bf16 [T, G, I] -> bf16 [T, G, O], input not quantised."""

    def __init__(self, parameters: Parameters, name: str, *, groups: int, ops: Ops) -> None:
        self._gemm = ops.gemm
        self._weight = ops.gemm.prepare_fp8_grouped(parameters.quantised(f"{name}.weight"), groups=groups)

    def __call__(self, x_TGI: Tensor) -> Tensor:
        return self._gemm.linb_grouped(x_TGI, self._weight)


class Norm:
    """RMS norm with its bf16 weight."""

    def __init__(self, parameters: Parameters, name: str, *, eps: float, ops: Ops) -> None:
        self._norm_rope = ops.norm_rope
        self._weight = parameters.plain(f"{name}.weight")
        self._eps = eps

    def __call__(self, x_TC: Tensor) -> Tensor:
        return self._norm_rope.rms(x_TC, self._weight, eps=self._eps)
