"""Mixture of experts: router, routed experts, and the gated activation they share with the shared expert (spec/model.md 5).

Owns the signatures. Only rows that chose an expert are computed for it. Suffixes: T rows, D width, E experts, K chosen
experts a row, F inner width.
"""

from typing import Any

import torch
from torch import Tensor

from flashstep.kernels.device import ANY_ORDER
from flashstep.kernels.registry import Cost, Family, Implementation
from flashstep.quant.tensor import QuantTensor

SQRT_SOFTPLUS, SOFTMAX = "sqrt_softplus", "softmax"
OPS = ("prepare_gate", "prepare_experts", "route", "swiglu", "experts")


class Moe(Family):
    """Public MoE ops."""

    TABLE = (
        *(
            Implementation(
                op=f"moe.{op}", module="flashstep.kernels.moe.e4m3", needs=frozenset({"sm90", ANY_ORDER})
            )
            for op in ("prepare_experts", "experts")
        ),
        *(
            Implementation(op=f"moe.{op}", module="flashstep.kernels.moe.cuda", needs=frozenset({"sm90"}))
            for op in OPS
        ),
        *(Implementation(op=f"moe.{op}", module="flashstep.kernels.moe.reference") for op in OPS),
    )

    def prepare_gate(self, weight_ED: Tensor) -> Any:
        """bf16 [E, D] router weight, made ready for ``route``."""
        assert weight_ED.dtype is torch.bfloat16
        return self._loaded["prepare_gate"](weight_ED)

    def prepare_experts(self, w1: QuantTensor, w3: QuantTensor, w2: QuantTensor) -> Any:
        """MXFP4 gate [E, F, D], up [E, F, D] and down [E, D, F], made ready for ``experts``."""
        return self._loaded["prepare_experts"](w1, w3, w2)

    def route(
        self,
        x_TD: Tensor,
        gate: Any,
        *,
        bias_E: Tensor,
        count: int,
        scale: float,
        temperature: float,
        scoring: str = SQRT_SOFTPLUS,
    ) -> tuple[Tensor, Tensor]:
        """bf16 rows -> experts int64 [T, K] ascending and weights fp32 [T, K].

        s = sqrt(softplus(x . gate / temperature)), fp32 (or the logits' softmax, as other models' routers score); the best K
        of s + bias (lowest id on ties); weights come from the unbiased s, normalised over the chosen, times ``scale``.
        """
        assert x_TD.dtype is torch.bfloat16 and bias_E.dtype is torch.float32
        assert scoring in (SQRT_SOFTPLUS, SOFTMAX)
        return self._loaded["route"](
            x_TD, gate, bias_E=bias_E, count=count, scale=scale, temperature=temperature, scoring=scoring
        )

    def swiglu(self, gate_up_TF: Tensor, *, limit: float) -> Any:
        """bf16 [T, 2F], the gate before up -> [T, F], the input of a ``lin8``: b(silu(min(gate, limit)) * clamp(up, +-limit)).

        Quantised as ``gemm.quantise_input`` gives it: values in bf16 or wider. F is a multiple of 32.
        """
        assert gate_up_TF.dtype is torch.bfloat16 and gate_up_TF.shape[1] % 64 == 0
        return self._loaded["swiglu"](gate_up_TF, limit=limit)

    def experts(
        self,
        quantised: Any,
        prepared: Any,
        *,
        experts_TK: Tensor,
        weights_TK: Tensor,
        shared_TD: Tensor,
        limit: float,
    ) -> Tensor:
        """T rows from ``gemm.quantise_input`` -> bf16 [T, D]: b(sum over chosen experts of their bf16 output + the shared one's).

        Inputs of every linear are quantised per 32 channels; the routing weight multiplies before the down projection. A choice
        of -1 is an expert that is not here and adds nothing; a row may choose an expert more than once.
        """
        assert shared_TD.dtype is torch.bfloat16 and weights_TK.dtype is torch.float32
        return self._loaded["experts"](
            quantised,
            prepared,
            experts_TK=experts_TK,
            weights_TK=weights_TK,
            shared_TD=shared_TD,
            limit=limit,
        )


def route_cost(*, rows: int, width: int, experts: int, count: int) -> Cost:
    """bf16 weight and rows in, ids and weights out."""
    return Cost(bytes=2 * width * (experts + rows) + 12 * rows * count, flops=2 * rows * width * experts)


def swiglu_cost(*, rows: int, inner: int) -> Cost:
    """Two bf16 rows in, one of quantised values out."""
    return Cost(bytes=6 * rows * inner, flops=5 * rows * inner)


def experts_cost(*, rows: int, width: int, inner: int, count: int, active: int) -> Cost:
    """``active`` experts' FP4 weights with their scales; each row passes ``count`` of them."""
    weight = active * 3 * width * inner * 17 // 32
    return Cost(bytes=weight + 2 * rows * width * 3, flops=6 * rows * count * width * inner)
