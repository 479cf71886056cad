"""Router and grouped experts in plain torch: float64 contractions, rounded where the model rounds."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashstep.quant import mxfp8
from flashstep.quant.tensor import QuantTensor

SOFTPLUS_LINEAR = 40.0  # beyond it softplus(x) is x, to float64's last bit
SOFTMAX = "softmax"
WEIGHT_FLOOR = 1e-20  # a literal of the model, not a norm epsilon


class PreparedExperts(NamedTuple):
    """float64: gate beside up [E, 2F, D], because they share an input, and down [E, D, F]."""

    gate_up: Tensor
    down: Tensor


def prepare_gate(weight_ED: Tensor) -> Tensor:
    """See ``Moe.prepare_gate``."""
    return weight_ED.double()


def prepare_experts(w1: QuantTensor, w3: QuantTensor, w2: QuantTensor) -> PreparedExperts:
    """See ``Moe.prepare_experts``: dequantised once, exactly; float64 because every use would convert to it."""
    gate_up = torch.cat((w1.dequantise(), w3.dequantise()), dim=1)
    return PreparedExperts(gate_up.double(), w2.dequantise().double())


def route(
    x_TD: Tensor,
    gate: Any,
    *,
    bias_E: Tensor,
    count: int,
    scale: float,
    temperature: float,
    scoring: str,
) -> tuple[Tensor, Tensor]:
    """See ``Moe.route``."""
    logits = x_TD.double() @ gate.double().T / temperature
    if scoring == SOFTMAX:
        scores = logits.softmax(dim=1).float()
    else:
        scores = torch.nn.functional.softplus(logits, threshold=SOFTPLUS_LINEAR).sqrt().float()
    # a stable descending sort, and not topk, whose choice among equal scores is arbitrary
    ranked = (scores + bias_E).sort(dim=1, descending=True, stable=True).indices
    experts = ranked[:, :count].sort(dim=1).values
    chosen = scores.gather(1, experts).double()
    return experts, (chosen / (chosen.sum(1, keepdim=True) + WEIGHT_FLOOR) * scale).float()


def swiglu(gate_up_TF: Tensor, *, limit: float) -> Tensor:
    """See ``Moe.swiglu``: float64."""
    return mxfp8.quantise_dequantise(_gated(gate_up_TF, limit=limit).bfloat16(), dtype=torch.float64)


def experts(
    quantised: Any, prepared: Any, *, experts_TK: Tensor, weights_TK: Tensor, shared_TD: Tensor, limit: float
) -> Tensor:
    """See ``Moe.experts``. Pairs (row, expert) are sorted by expert: an active expert multiplies its own at once."""
    rows, count = experts_TK.shape
    chosen, order = experts_TK.flatten().sort(stable=True)
    absent = int((chosen < 0).sum())  # choices that live elsewhere sort before all others
    chosen, order = chosen[absent:], order[absent:]
    if not len(order):
        return shared_TD.clone()
    active, lengths = (found.tolist() for found in torch.unique_consecutive(chosen, return_counts=True))
    gate_up_PF = _by_expert(quantised.double()[order // count], prepared.gate_up, active, lengths).bfloat16()
    inner_PF = _gated(gate_up_PF, limit=limit).mul_(weights_TK.flatten()[order].unsqueeze(1)).bfloat16()
    inner_PF = mxfp8.quantise_dequantise(inner_PF, dtype=torch.float64)
    y_PD = _by_expert(inner_PF, prepared.down, active, lengths).bfloat16()
    y_TKD = y_PD.new_zeros(rows * count, y_PD.shape[1]).index_copy_(0, order, y_PD).view(rows, count, -1)
    return (y_TKD.sum(1, dtype=torch.float64) + shared_TD).bfloat16()


def _by_expert(x_PI: Tensor, weight_EOI: Tensor, active: list[int], lengths: list[int]) -> Tensor:
    """float64 [P, O]: runs of ``lengths`` rows, each times the weight of its expert."""
    out = x_PI.new_empty(x_PI.shape[0], weight_EOI.shape[1])
    for expert, x, y in zip(active, x_PI.split(lengths), out.split(lengths), strict=True):
        torch.mm(x, weight_EOI[expert].T, out=y)
    return out


def _gated(gate_up_TF: Tensor, *, limit: float) -> Tensor:
    """float64 silu(min(gate, limit)) * clamp(up): the gate is clamped from above only."""
    gate, up = gate_up_TF.double().chunk(2, dim=1)
    return torch.nn.functional.silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))
