"""RMS norm and rotation: the traps of spec/model.md 12 that live here (5, 10, 28)."""

import pytest
import torch

from flashstep.kernels.norm_rope import NormRope
from tests.kernels.implementations import families

pytestmark = pytest.mark.parametrize("norm_rope", families(NormRope))


def test_rms_multiplies_the_weight_before_the_cast(norm_rope: NormRope) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 64, generator=generator).bfloat16()
    weight = (1 + 0.1 * torch.randn(64, generator=generator)).bfloat16()
    out = norm_rope.rms(x, weight, eps=1e-20)
    unit = x.double() / x.double().square().mean(1, keepdim=True).sqrt()
    assert torch.equal(out, (unit * weight.double()).bfloat16())
    assert not torch.equal(out, (unit.bfloat16() * weight))


def test_rms_has_no_floor_to_speak_of(norm_rope: NormRope) -> None:
    x = torch.full((1, 32), 1e-6).bfloat16()
    out = norm_rope.rms(x, torch.ones(32).bfloat16(), eps=1e-20)
    torch.testing.assert_close(out.float(), torch.ones(1, 32), rtol=1e-2, atol=0)
    assert torch.equal(
        norm_rope.rms(torch.zeros(1, 32).bfloat16(), torch.ones(32).bfloat16(), eps=1e-20),
        torch.zeros(1, 32).bfloat16(),
    )


def test_angles_are_fp32_products(norm_rope: NormRope) -> None:
    positions, frequencies = torch.tensor([0, 1, 999_983]), torch.tensor([1.0, 3.6355386e-3])
    cos, sin = norm_rope.angles(positions, frequencies)
    angle = (positions.float().unsqueeze(1) * frequencies).double()
    assert torch.equal(cos, angle.cos().float()) and torch.equal(sin, angle.sin().float())


def test_rotate_turns_adjacent_pairs_of_the_last_channels(norm_rope: NormRope) -> None:
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    cos, sin = norm_rope.angles(torch.arange(5) * 7, torch.tensor([1.0, 0.3]))
    out = norm_rope.rotate(x, cos, sin)
    assert torch.equal(out[..., :12], x[..., :12])
    turned = torch.view_as_complex(x[..., 12:].double().unflatten(-1, (2, 2)))
    turned = torch.view_as_real(turned * torch.complex(cos.double(), sin.double()).unsqueeze(1)).flatten(-2)
    assert torch.equal(out[..., 12:], turned.bfloat16())


def test_rotate_inverse_undoes_up_to_rounding(norm_rope: NormRope) -> None:
    x = torch.randn(9, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    cos, sin = norm_rope.angles(torch.arange(9) + 1, torch.tensor([1.0, 0.1]))
    back = norm_rope.rotate_inverse(norm_rope.rotate(x, cos, sin), cos, sin)
    torch.testing.assert_close(back, x, rtol=2e-2, atol=2e-2)
    assert not torch.allclose(
        norm_rope.rotate_inverse(x, cos, sin).float(), norm_rope.rotate(x, cos, sin).float(), atol=0.1
    )
