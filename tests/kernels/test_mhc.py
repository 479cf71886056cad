"""mHC ops: golden Sinkhorn, orientation of the mix, one statistic over all streams, nothing rounded early.

The reference is held to equality; rows that add in fp32 to 1e-5 of fp32 results, and to one step of bf16.
"""

from types import ModuleType

import pytest
import torch

from flashstep.kernels.mhc import Mhc, reference
from tests.kernels.implementations import DEVICE, families

pytestmark = pytest.mark.parametrize("mhc", families(Mhc))
STREAMS, WIDTH, ROWS = 4, 32, 11
LOGITS = torch.tensor([[0.5, -1, 2, 0], [1, 0.25, -0.75, 0.5], [-0.5, 1.5, 0, 1], [0, 0, 0, 0]])
BALANCED = torch.tensor(
    [
        [0.194238, 0.040232, 0.647623, 0.117906],
        [0.459817, 0.201621, 0.059446, 0.279115],
        [0.073688, 0.505421, 0.090384, 0.330506],
        [0.272256, 0.252725, 0.202546, 0.272472],
    ]
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def streams(rows: int = ROWS, width: int = WIDTH) -> torch.Tensor:
    return normal(rows, STREAMS, width).bfloat16()


def coefficients(
    mhc: Mhc | ModuleType, x: torch.Tensor, *, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor
):
    site = mhc.prepare_site(fn.to(DEVICE), base_M=base.to(DEVICE), scale_3=scale.to(DEVICE), streams=STREAMS)
    return mhc.coefficients(x, site, iterations=20, eps=1e-6, norm_eps=1e-20)


def check(mhc: Mhc, got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype is want.dtype
    if mhc._loaded["collapse"] is reference.collapse:
        assert torch.equal(got, want)
    else:
        rtol = 2.0**-7 if want.dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(got, want, rtol=rtol, atol=1e-5)


def test_coefficients_reproduce_the_golden_sinkhorn(mhc: Mhc) -> None:
    """With a zero projection the base alone decides: sigmoid(0) twice, and the golden mix of spec/model.md 13."""
    base = torch.cat((torch.zeros(8), LOGITS.flatten()))
    pre, post, comb = coefficients(
        mhc, streams(), fn=torch.zeros(24, STREAMS * WIDTH), base=base, scale=torch.ones(3)
    )
    check(mhc, pre, torch.full((ROWS, 4), 0.5 + 1e-6, device=DEVICE))
    check(mhc, post, torch.ones(ROWS, 4, device=DEVICE))
    torch.testing.assert_close(comb, BALANCED.to(DEVICE).expand(ROWS, 4, 4), rtol=0, atol=1e-6)
    torch.testing.assert_close(comb.sum(1), torch.ones_like(pre), rtol=0, atol=1e-5)  # columns last


def test_prepare_site_and_scale_take_their_places(mhc: Mhc) -> None:
    x = streams()
    fn = normal(24, STREAMS * WIDTH, seed=1) * 0.1
    scale = torch.tensor([0.5, 1.5, 0.0])
    pre, post, comb = coefficients(mhc, x, fn=fn, base=torch.zeros(24), scale=scale)
    z = x.flatten(1).double()
    mixed = (z @ fn.double().T) / z.square().mean(1, keepdim=True).sqrt()
    check(mhc, pre, (torch.sigmoid(mixed[:, :4] * 0.5) + 1e-6).float())
    check(mhc, post, (2 * torch.sigmoid(mixed[:, 4:8] * 1.5)).float())
    torch.testing.assert_close(comb, torch.full_like(comb, 0.25), rtol=0, atol=1e-6)


def test_the_reference_takes_what_any_row_prepared(mhc: Mhc) -> None:
    """So that ``reference:mhc.coefficients`` can force that op alone."""
    x, fn = streams(), normal(24, STREAMS * WIDTH, seed=1)
    given = {
        "base_M": normal(24, seed=2),
        "scale_3": torch.tensor([0.5, 1.5, 0.7], device=DEVICE),
        "streams": STREAMS,
    }
    for got, want in zip(
        *(
            reference.coefficients(x, m.prepare_site(fn, **given), iterations=20, eps=1e-6, norm_eps=1e-20)
            for m in (mhc, reference)
        ),
        strict=True,
    ):
        assert torch.equal(got, want)


def test_collapse_reads_one_stream_when_told(mhc: Mhc) -> None:
    x, pre = streams(), torch.zeros(ROWS, STREAMS, device=DEVICE)
    pre[:, 2] = 1
    assert torch.equal(mhc.collapse(x, pre), x[:, 2])


def test_write_sums_over_input_streams(mhc: Mhc) -> None:
    """comb[i, j] carries i to j: a permutation moves whole streams, and the transpose would not."""
    x, y = streams(), streams()[:, 1].contiguous()
    comb = torch.zeros(ROWS, STREAMS, STREAMS, device=DEVICE)
    for source, target in enumerate((2, 0, 3, 1)):
        comb[:, source, target] = 1
    post = torch.tensor([0.0, 1.0, 0.0, 2.0], device=DEVICE).repeat(ROWS, 1)
    out = mhc.write(y, x, post_TS=post, comb_TSS=comb)
    assert torch.equal(out[:, 0], x[:, 1]) and torch.equal(out[:, 2], x[:, 0])
    check(mhc, out[:, 1], (x[:, 3].double() + y.double()).bfloat16())
    check(mhc, out[:, 3], (x[:, 2].double() + 2 * y.double()).bfloat16())


def test_rows_do_not_see_their_neighbours(mhc: Mhc) -> None:
    x, fn, base = streams(150), normal(24, STREAMS * WIDTH, seed=1) * 0.1, normal(24, seed=2)
    together = coefficients(mhc, x, fn=fn, base=base, scale=torch.ones(3))
    for rows in (slice(3, 5), slice(70, 140), slice(149, 150)):
        alone = coefficients(mhc, x[rows].contiguous(), fn=fn, base=base, scale=torch.ones(3))
        assert all(torch.equal(a, t[rows]) for a, t in zip(alone, together, strict=True))


@pytest.mark.parametrize(("rows", "width"), [(6, 5120), (1, 5120), (67, 544), (0, 32)])
def test_ops_equal_the_reference_at_other_shapes(mhc: Mhc, rows: int, width: int) -> None:
    """Released and odd widths; streams of unlike size, so that the one statistic matters."""
    x = (streams(rows, width) * torch.tensor([1.0, 8.0, 0.125, 3.0], device=DEVICE).view(1, 4, 1)).bfloat16()
    y = normal(rows, width, seed=3).bfloat16()
    site = {
        "fn": normal(24, STREAMS * width, seed=1) * 0.05,
        "base": normal(24, seed=2),
        "scale": torch.tensor([0.7, 1.3, 2.1]),
    }
    want = coefficients(reference, x, **site)
    for got, expected in zip(coefficients(mhc, x, **site), want, strict=True):
        check(mhc, got, expected)
    pre, post, comb = want
    check(mhc, mhc.collapse(x, pre), reference.collapse(x, pre))
    out = mhc.write(y, x, post_TS=post, comb_TSS=comb)
    check(mhc, out, reference.write(y, x, post_TS=post, comb_TSS=comb))


def test_coefficients_use_all_bits_of_the_projection(mhc: Mhc) -> None:
    """One channel a row alone decides its logits, which are large: what a weight loses shows in a small sigmoid."""
    width, rows = 512, 9
    x = torch.zeros(rows, STREAMS * width, device=DEVICE)
    x[torch.arange(rows), torch.arange(rows) * 227] = 3.0
    site = {
        "fn": normal(24, STREAMS * width, seed=1) * 0.15,
        "base": torch.zeros(24),
        "scale": torch.tensor([1.0, 1.0, 0.1]),
    }
    streams_TSD = x.view(rows, STREAMS, width).bfloat16()
    want = coefficients(reference, streams_TSD, **site)
    for got, expected in zip(coefficients(mhc, streams_TSD, **site), want, strict=True):
        if mhc._loaded["coefficients"] is reference.coefficients:
            assert torch.equal(got, expected)
        else:
            torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-8)
