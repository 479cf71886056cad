"""Linear layers: a weight prepared for the chosen kernel, and the call that uses it.

A tensor-parallel rank's weights come with its own sizes (``parallel.layout``): rows of wq_b, w1, w3 and the head, columns of wo_b
and w2, whose products the ranks would add up.
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
    """LINF: bf16 weight promoted to fp32, bf16 [T, I] -> fp32 [T, O]. Several names: one product, outputs side by side.

    ``weight`` is the prepared one, for ops that do more with it than multiply.
    """

    def __init__(self, parameters: Parameters, *names: str, ops: Ops) -> None:
        self._gemm = ops.gemm
        self.weight = ops.gemm.prepare_bf16(*(parameters.plain(f"{name}.weight") for name in names))

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._gemm.linf(x_TI, self.weight)


class GroupedOutput:
    """The released wo_a: block-diagonal over head groups, bf16 [T, G, I] -> bf16 [T, G, O], input not quantised."""

    def __init__(self, parameters: Parameters, name: str, *, groups: int, ops: Ops) -> None:
        self._gemm = ops.gemm
        self._weight = ops.gemm.prepare_fp8_grouped(parameters.quantised(f"{name}.weight"), groups=groups)

    def __call__(self, x_TGI: Tensor) -> Tensor:
        return self._gemm.linb_grouped(x_TGI, self._weight)
