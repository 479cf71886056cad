"""Engram injection: gate goldens through the op, statistics per stream, all streams get the value."""

import pytest
import torch

from flashstep.kernels.engram import Engram
from tests.kernels.implementations import families

pytestmark = pytest.mark.parametrize("engram", families(Engram))
STREAMS, WIDTH = 4, 64


@pytest.mark.parametrize(("dot", "gate"), [(0.0, 0.50025), (-4.0, 0.11920), (0.25, 0.62246)])
def test_inject_reproduces_the_golden_gates(engram: Engram, dot: float, gate: float) -> None:
    """Streams and keys of unit magnitude: the product is sqrt(width) * weight, whatever the streams' scales."""
    x = torch.ones(1, STREAMS, WIDTH).bfloat16()
    key = torch.ones(1, STREAMS * WIDTH).bfloat16()
    value = torch.full((1, WIDTH), 256.0).bfloat16()
    weight = torch.full((STREAMS, WIDTH), dot / WIDTH**0.5).bfloat16()
    out = engram.inject(
        x * torch.tensor([1.0, 2.0, 0.5, 4.0]).view(1, 4, 1).bfloat16(),
        torch.cat((key, value), dim=1),
        query_weight_SD=weight,
        key_weight_SD=torch.ones_like(weight),
        eps=1e-20,
    )
    added = out.float() - torch.tensor([1.0, 2.0, 0.5, 4.0]).view(1, 4, 1)
    torch.testing.assert_close(added / 256, torch.full_like(added, gate), rtol=4e-3, atol=2e-3)


def test_inject_equals_the_formula(engram: Engram) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, STREAMS, WIDTH, generator=generator).bfloat16()
    kv = torch.randn(9, (STREAMS + 1) * WIDTH, generator=generator).bfloat16()
    qw, kw = (torch.randn(STREAMS, WIDTH, generator=generator).bfloat16() for _ in range(2))
    out = engram.inject(x, kv, query_weight_SD=qw, key_weight_SD=kw, eps=1e-20)
    for stream in range(STREAMS):
        xs, ks = x[:, stream].double(), kv[:, stream * WIDTH : (stream + 1) * WIDTH].double()
        dot = (
            (xs * qw[stream].double() * kw[stream].double() * ks).sum(1)
            * WIDTH**0.5
            / (xs.norm(dim=1) * ks.norm(dim=1))
        )
        gate = torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt()).unsqueeze(1)
        assert torch.equal(out[:, stream], (xs + gate * kv[:, STREAMS * WIDTH :].double()).bfloat16())
