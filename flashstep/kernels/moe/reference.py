"""Router and grouped experts in plain torch: float64 contractions, rounded where the model rounds."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashstep.quant import mxfp8
from flashstep.quant.tensor import QuantTensor

SOFTPLUS_LINEAR = 40.0  # beyond it softplus(x) is x, to float64's last bit
WEIGHT_FLOOR = 1e-20  # a literal of the model, not a norm epsilon


class PreparedExperts(NamedTuple):
    """float64 [E, F, D], [E, F, D], [E, D, F]."""

    gate: Tensor
    up: Tensor
    down: Tensor


def prepare_gate(weight_ED: Tensor) -> Tensor:
    """See ``Moe.prepare_gate``."""
    return weight_ED.double()


def prepare_experts(w1: QuantTensor, w3: QuantTensor, w2: QuantTensor) -> PreparedExperts:
    """See ``Moe.prepare_experts``: dequantised once, exactly; float64 because every use would convert to it."""
    return PreparedExperts(*(weight.dequantise().double() for weight in (w1, w3, w2)))


def route(
    x_TD: Tensor, gate: Any, *, bias_E: Tensor, count: int, scale: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """See ``Moe.route``."""
    logits = x_TD.double() @ gate.T / temperature
    scores = torch.nn.functional.softplus(logits, threshold=SOFTPLUS_LINEAR).sqrt().float()
    # a stable descending sort, and not topk, whose choice among equal scores is arbitrary
    ranked = (scores + bias_E).sort(dim=1, descending=True, stable=True).indices
    experts = ranked[:, :count].sort(dim=1).values
    chosen = scores.gather(1, experts).double()
    return experts, (chosen / (chosen.sum(1, keepdim=True) + WEIGHT_FLOOR) * scale).float()


def swiglu(gate_TF: Tensor, up_TF: Tensor, *, limit: float) -> Tensor:
    """See ``Moe.swiglu``."""
    return _gated(gate_TF, up_TF, limit=limit).bfloat16()


def experts(
    x_TD: Tensor, prepared: Any, *, experts_TK: Tensor, weights_TK: Tensor, shared_TD: Tensor, limit: float
) -> Tensor:
    """See ``Moe.experts``. Rows are sorted by expert, so that each active expert multiplies its own rows once."""
    x = mxfp8.quantise_dequantise(x_TD).double()
    chosen, order = experts_TK.flatten().sort(stable=True)
    active, counts = torch.unique_consecutive(chosen, return_counts=True)
    total = torch.zeros_like(x)
    stop = 0
    for expert, length in zip(active.tolist(), counts.tolist(), strict=True):
        start, stop = stop, stop + length
        pairs = order[start:stop]
        rows = pairs // experts_TK.shape[1]
        x_rows = x[rows]
        gate = (x_rows @ prepared.gate[expert].T).bfloat16()
        up = (x_rows @ prepared.up[expert].T).bfloat16()
        inner = weights_TK.flatten()[pairs].double().unsqueeze(1) * _gated(gate, up, limit=limit)
        down = mxfp8.quantise_dequantise(inner.bfloat16()).double() @ prepared.down[expert].T
        total[rows] += down.bfloat16().double()
    return (total + shared_TD.double()).bfloat16()


def _gated(gate_TF: Tensor, up_TF: Tensor, *, limit: float) -> Tensor:
    """float64 silu(min(gate, limit)) * clamp(up): the gate is clamped from above only."""
    gate = gate_TF.double().clamp(max=limit)
    return torch.nn.functional.silu(gate) * up_TF.double().clamp(-limit, limit)
