"""The FFN of a layer: router, routed experts, one shared expert (spec/model.md 5).

A rank that shares the experts with others holds some of them (``parallel.rank``): the router knows all, and ``placement`` says
where their pairs go; the shared expert stays with the row.
"""

from collections.abc import Callable

from torch import Tensor

from flashstep.config.model import ModelConfig
from flashstep.kernels import Ops
from flashstep.kernels.mhc import Hidden
from flashstep.model.linear import Linear8
from flashstep.model.parameters import Parameters


class MoE:
    """What the FFN's site gives of T rows -> bf16 [T, D]."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        prefix: str,
        *,
        ops: Ops,
        experts_per_token: int,
        tap: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._moe = ops.moe
        self._tap = tap
        self._gate = ops.moe.prepare_gate(parameters.plain(f"{prefix}.gate.weight"))
        self._bias_E = parameters.plain(f"{prefix}.gate.bias")
        parameters.plain(
            f"{prefix}.gate.bias_vl"
        )  # the bias of image tokens: read with vision, unused by text
        w1 = parameters.quantised(f"{prefix}.experts.w1")
        self._placement_E = parameters.rank.placement(self._bias_E.shape[0], local=w1.shape[0])
        self._experts = ops.moe.prepare_experts(
            w1,
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

    def __call__(self, hidden: Hidden) -> Tensor:
        experts_TK, weights_TK = self._moe.route(
            hidden.plain_TD,
            self._gate,
            bias_E=self._bias_E,
            count=self._count,
            scale=self._scale,
            temperature=self._temperature,
        )
        if self._tap is not None:  # somebody measures (``routing``)
            experts_TK = self._tap(experts_TK)
        if self._placement_E is not None:  # a rank that emulates expert parallelism keeps its own rows
            experts_TK = self._placement_E[experts_TK]
        inner = self._moe.swiglu(self._shared_gate_up.product(hidden.quantised), limit=self._limit)
        return self._moe.experts(
            hidden.quantised,
            self._experts,
            experts_TK=experts_TK,
            weights_TK=weights_TK,
            shared_TD=self._shared_down.product(inner),
            limit=self._limit,
        )
