"""The FFN of a layer: router, routed experts, one shared expert (spec/model.md 5).

Expert parallelism would be declared where ``prepare_experts`` takes the stacked weights: a rank takes its slice of the first
dimension, and the rows travel to it; the shared expert stays with the row.
"""

from torch import Tensor

from flashstep.config.model import ModelConfig
from flashstep.kernels import Ops
from flashstep.model.linear import Linear8
from flashstep.model.parameters import Parameters


class MoE:
    """bf16 [T, D] -> bf16 [T, D]."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        prefix: str,
        *,
        ops: Ops,
        experts_per_token: int,
    ) -> None:
        self._moe, self._gemm = ops.moe, ops.gemm
        self._gate = ops.moe.prepare_gate(parameters.plain(f"{prefix}.gate.weight"))
        self._bias_E = parameters.plain(f"{prefix}.gate.bias")
        parameters.plain(
            f"{prefix}.gate.bias_vl"
        )  # the bias of image tokens: read with vision, unused by text
        self._experts = ops.moe.prepare_experts(
            parameters.quantised(f"{prefix}.experts.w1"),
            parameters.quantised(f"{prefix}.experts.w3"),
            parameters.quantised(f"{prefix}.experts.w2"),
        )
        shared = f"{prefix}.shared_experts"
        self._shared_gate_up = Linear8(parameters, f"{shared}.w1", f"{shared}.w3", ops=ops)
        self._shared_down = Linear8(parameters, f"{shared}.w2", ops=ops)
        self._count = experts_per_token
        self._scale = config.routed_scaling_factor
        self._temperature = config.gate_temp
        self._limit = config.swiglu_limit

    def __call__(self, x_TD: Tensor) -> Tensor:
        experts_TK, weights_TK = self._moe.route(
            x_TD,
            self._gate,
            bias_E=self._bias_E,
            count=self._count,
            scale=self._scale,
            temperature=self._temperature,
        )
        quantised = self._gemm.quantise_input(x_TD)
        inner_TF = self._moe.swiglu(self._shared_gate_up.product(quantised), limit=self._limit)
        return self._moe.experts(
            quantised,
            self._experts,
            experts_TK=experts_TK,
            weights_TK=weights_TK,
            shared_TD=self._shared_down(inner_TF),
            limit=self._limit,
        )
