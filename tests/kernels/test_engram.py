"""Engram injection: gate goldens through the op, statistics per stream, all streams get the value."""

import pytest
import torch

from flashstep.kernels.engram import Engram, reference
from tests.kernels.implementations import DEVICE, families

pytestmark = pytest.mark.parametrize("engram", families(Engram))
STREAMS, WIDTH = 4, 64


def check(engram: Engram, got: torch.Tensor, want: torch.Tensor) -> None:
    """The reference is held to equality, a row that adds in fp32 to one step of bf16."""
    assert got.dtype is want.dtype
    if engram._loaded["inject"] is reference.inject:
        assert torch.equal(got, want)
    else:
        torch.testing.assert_close(got, want, rtol=2.0**-7, atol=1e-5)


def inputs(rows: int, width: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, STREAMS, width), (rows, (STREAMS + 1) * width), (STREAMS, width), (STREAMS, width))
    return tuple(torch.randn(*shape, generator=generator).bfloat16().to(DEVICE) for shape in shapes)


@pytest.mark.parametrize(("dot", "gate"), [(0.0, 0.50025), (-4.0, 0.11920), (0.25, 0.62246)])
def test_inject_reproduces_the_golden_gates(engram: Engram, dot: float, gate: float) -> None:
    """Streams and keys of unit magnitude: the product is sqrt(width) * weight, whatever the streams' scales."""
    x = torch.tensor([1.0, 2.0, 0.5, 4.0], device=DEVICE).view(1, 4, 1).expand(1, STREAMS, WIDTH)
    key = torch.ones(1, STREAMS * WIDTH, device=DEVICE).bfloat16()
    value = torch.full((1, WIDTH), 256.0, device=DEVICE).bfloat16()
    weight = torch.full((STREAMS, WIDTH), dot / WIDTH**0.5, device=DEVICE).bfloat16()
    out = engram.inject(
        x.bfloat16().contiguous(),
        torch.cat((key, value), dim=1),
        query_weight_SD=weight,
        key_weight_SD=torch.ones_like(weight),
        eps=1e-20,
    )
    added = out.float() - x
    torch.testing.assert_close(added / 256, torch.full_like(added, gate), rtol=4e-3, atol=2e-3)


def test_inject_equals_the_formula(engram: Engram) -> None:
    x, kv, qw, kw = inputs(9, WIDTH)
    out = engram.inject(x, kv, query_weight_SD=qw, key_weight_SD=kw, eps=1e-20)
    for stream in range(STREAMS):
        xs, ks = x[:, stream].double(), kv[:, stream * WIDTH : (stream + 1) * WIDTH].double()
        dot = (
            (xs * qw[stream].double() * kw[stream].double() * ks).sum(1)
            * WIDTH**0.5
            / (xs.norm(dim=1) * ks.norm(dim=1))
        )
        gate = torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt()).unsqueeze(1)
        check(engram, out[:, stream], (xs + gate * kv[:, STREAMS * WIDTH :].double()).bfloat16())


@pytest.mark.parametrize(("rows", "width"), [(3, 5120), (5, 96), (0, 64)])
def test_inject_equals_the_reference_at_other_shapes(engram: Engram, rows: int, width: int) -> None:
    x, kv, query_weight, key_weight = inputs(rows, width)
    weights = {"query_weight_SD": query_weight, "key_weight_SD": key_weight, "eps": 1e-20}
    out = engram.inject(x, kv, **weights)
    check(engram, out, reference.inject(x, kv, **weights))
    assert all(
        torch.equal(engram.inject(x[t : t + 1], kv[t : t + 1], **weights)[0], out[t]) for t in range(rows)
    )
