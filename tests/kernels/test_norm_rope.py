"""RMS norm and rotation: the traps of spec/model.md 12 that live here (5, 10, 28).

Norms and rotations are references of which fused ops are made; angles are an op with a faster row.
"""

import pytest
import torch
from torch import Tensor

from flashstep.kernels.norm_rope import NormRope, reference
from tests.kernels.implementations import DEVICE, families

angled = pytest.mark.parametrize("norm_rope", families(NormRope))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def test_rms_multiplies_the_weight_before_the_cast() -> None:
    x = normal(50, 64).bfloat16()
    weight = (1 + 0.1 * normal(64, seed=1)).bfloat16()
    out = reference.rms(x, weight, eps=1e-20)
    unit = x.double() / x.double().square().mean(1, keepdim=True).sqrt()
    assert torch.equal(out, (unit * weight.double()).bfloat16())
    assert (out != unit.bfloat16() * weight).float().mean() > 0.1


@pytest.mark.parametrize("channels", [5120, 1280, 512, 96])
def test_rms_of_rows_that_lie_apart(channels: int) -> None:
    """Rows of sizes from 2^-30 to 2^7 inside a wider product; each gives the same alone."""
    product = normal(7, channels + 32) * torch.exp2(torch.arange(7, device=DEVICE) * 6 - 30.0).unsqueeze(1)
    x, weight = product.bfloat16()[:, 32:], (1 + 0.1 * normal(channels, seed=1)).bfloat16()
    out = reference.rms(x, weight, eps=1e-20)
    assert torch.equal(out, reference.rms(x.contiguous(), weight, eps=1e-20))
    assert torch.equal(out[3:4], reference.rms(x[3:4], weight, eps=1e-20))


def test_rms_has_no_floor_to_speak_of() -> None:
    ones = torch.ones(32, device=DEVICE)
    out = reference.rms((1e-6 * ones).unsqueeze(0).bfloat16(), ones.bfloat16(), eps=1e-20)
    torch.testing.assert_close(out.float(), ones.unsqueeze(0), rtol=1e-2, atol=0)
    zeros = torch.zeros(1, 32, device=DEVICE).bfloat16()
    assert torch.equal(reference.rms(zeros, ones.bfloat16(), eps=1e-20), zeros)


@angled
def test_angles_are_fp32_products(norm_rope: NormRope) -> None:
    """At 1M positions an angle taken in float64 differs; in places the cosines may differ in fp32's last bit."""
    positions = torch.cat((torch.tensor([0, 1, 999_983]), torch.arange(1_048_000, 1_048_576, 7))).to(DEVICE)
    frequencies = torch.cat((torch.tensor([1.0, 3.6355386e-3]), 10_000.0 ** -(torch.arange(30) / 30))).to(
        DEVICE
    )
    cos, sin = norm_rope.angles(positions, frequencies)
    angle = (positions.float().unsqueeze(1) * frequencies).double()
    for got, want in ((cos, angle.cos().float()), (sin, angle.sin().float())):
        torch.testing.assert_close(got, want, rtol=2.0**-22, atol=1e-9)
        assert (got != want).float().mean() <= 1e-3
    exact = positions.double().unsqueeze(1) * frequencies.double()
    assert (cos - exact.cos()).abs().max() > 1e-3


def test_rotate_turns_adjacent_pairs_of_the_last_channels() -> None:
    x = normal(5, 3, 16, seed=1).bfloat16()
    cos, sin = reference.angles(torch.arange(5, device=DEVICE) * 7, torch.tensor([1.0, 0.3], device=DEVICE))
    out = reference.rotate(x, cos, sin)
    assert torch.equal(out[..., :12], x[..., :12])
    turned = torch.view_as_complex(x[..., 12:].double().unflatten(-1, (2, 2)))
    turned = torch.view_as_real(turned * torch.complex(cos.double(), sin.double()).unsqueeze(1)).flatten(-2)
    assert torch.equal(out[..., 12:], turned.bfloat16())


@pytest.mark.parametrize("op", ["rotate", "rotate_inverse"])
@pytest.mark.parametrize(
    ("shape", "pairs"),
    [((9, 64, 512), 32), ((9, 512), 32), ((9, 32, 128), 32), ((9, 5, 96), 8), ((9, 3, 64), 8)],
)
def test_rotations_at_other_shapes(op: str, shape: tuple[int, ...], pairs: int) -> None:
    """Vectors that lie apart, channels that do not turn kept to the bit (infinities, negative zeros)."""
    x = normal(*shape[:-1], shape[-1] + 16).bfloat16()[..., 16:]
    x[0, ..., 0], x[1, ..., 1] = float("inf"), -0.0
    frequencies = 10_000.0 ** -(torch.arange(pairs, device=DEVICE) / pairs)
    cos, sin = reference.angles(torch.arange(9, device=DEVICE) * 100_003, frequencies)
    turn = getattr(reference, op)
    got, want = turn(x, cos, sin), turn(x.contiguous(), cos, sin)
    tail = shape[-1] - 2 * pairs
    assert torch.equal(
        got[..., :tail].contiguous().view(torch.int16), x[..., :tail].contiguous().view(torch.int16)
    )
    assert torch.equal(got[..., tail:], want[..., tail:])


def test_rotate_inverse_undoes_up_to_rounding() -> None:
    x = normal(9, 8, seed=2).bfloat16()
    cos, sin = reference.angles(torch.arange(9, device=DEVICE) + 1, torch.tensor([1.0, 0.1], device=DEVICE))
    back = reference.rotate_inverse(reference.rotate(x, cos, sin), cos, sin)
    torch.testing.assert_close(back, x, rtol=2e-2, atol=2e-2)
    assert not torch.allclose(
        reference.rotate_inverse(x, cos, sin).float(), reference.rotate(x, cos, sin).float(), atol=0.1
    )
