"""Muon for the matrices, AdamW for the rest. Rates live in tensors, so a whole step can be captured in a CUDA graph.

``Muon`` takes stacks of matrices [..., rows, columns] (experts and output groups are batch dimensions) and makes each
update nearly orthogonal by five Newton-Schulz steps in bf16. Knows nothing of the model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic coefficients of Jordan et al., Muon
NEWTON_STEPS = 5


def orthogonalise(update: Tensor) -> Tensor:
    """[N, rows, columns] -> bf16, each matrix with singular values near 1 (Newton-Schulz, spectral norm bounded first)."""
    a, b, c = NEWTON_SCHULZ
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Momentum 0.95 (Nesterov), decoupled weight decay; ``rate`` is a tensor set by the trainer before each step."""

    def __init__(
        self, weights: Sequence[Tensor], *, rate: Tensor, decay: float = 0.05, momentum: float = 0.95
    ) -> None:
        self.rate, self.decay, self.momentum = rate, decay, momentum
        self.weights = list(weights)
        groups: dict[tuple[int, int], list[Tensor]] = {}
        for weight in weights:
            groups.setdefault((weight.shape[-2], weight.shape[-1]), []).append(weight)
        self.groups = list(groups.values())
        self.averages = [[torch.zeros_like(w) for w in group] for group in self.groups]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        """One update; ``gradients`` in the order of the weights."""
        by_weight = {id(w): g for w, g in zip(self.weights, gradients, strict=True)}
        for group, averages in zip(self.groups, self.averages, strict=True):
            grads = [by_weight[id(w)] for w in group]
            torch._foreach_lerp_(averages, grads, 1 - self.momentum)
            updates = torch._foreach_lerp(grads, averages, self.momentum)
            rows, columns = group[0].shape[-2:]
            stack = torch.cat([u.reshape(-1, rows, columns) for u in updates])
            flat = orthogonalise(stack).float() * (max(1.0, rows / columns) ** 0.5) * self.rate
            parts = flat.split([w.numel() // (rows * columns) for w in group])
            torch._foreach_mul_(group, 1 - self.rate * self.decay)
            torch._foreach_sub_(group, [p.reshape(w.shape) for p, w in zip(parts, group, strict=True)])


class Adam:
    """AdamW without decay, betas (0.9, 0.95); bias correction and rate in tensors."""

    def __init__(
        self, weights: Sequence[Tensor], *, rate: Tensor, betas: tuple[float, float] = (0.9, 0.95)
    ) -> None:
        self.weights, self.rate, self.betas = list(weights), rate, betas
        self.first = [torch.zeros_like(w) for w in self.weights]
        self.second = [torch.zeros_like(w) for w in self.weights]
        self.powers = torch.ones(2, device=rate.device)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        """One update; ``gradients`` in the order of the weights."""
        one, two = self.betas
        grads = list(gradients)
        torch._foreach_lerp_(self.first, grads, 1 - one)
        torch._foreach_mul_(self.second, two)
        torch._foreach_addcmul_(self.second, grads, grads, 1 - two)
        self.powers[0].mul_(one)
        self.powers[1].mul_(two)
        root = torch._foreach_sqrt(self.second)
        torch._foreach_div_(root, (1 - self.powers[1]).sqrt())
        torch._foreach_add_(root, 1e-8)
        change = torch._foreach_div(self.first, root)
        torch._foreach_mul_(change, self.rate / (1 - self.powers[0]))
        torch._foreach_sub_(self.weights, change)
