"""mHC ops: golden Sinkhorn, orientation of the mix, one statistic over all streams, nothing rounded early, norm and quantiser.

The reference is held to equality, with the families whose arithmetic it repeats too; rows that add in fp32 to 2e-5 of fp32
results, and to one step of bf16 of what follows from their own streams.
"""

from types import ModuleType
from typing import Any

import pytest
import torch

from flashstep.kernels.gemm.reference import quantise_input
from flashstep.kernels.mhc import Entered, Mhc, reference
from flashstep.kernels.norm_rope.reference import rms
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


def streams(rows: int = ROWS, width: int = WIDTH, seed: int = 0) -> torch.Tensor:
    return normal(rows, STREAMS, width, seed=seed).bfloat16()


def some_coefficients(rows: int = ROWS) -> torch.Tensor:
    pre, post = torch.sigmoid(normal(rows, STREAMS, seed=5)), 2 * torch.sigmoid(normal(rows, STREAMS, seed=6))
    comb = torch.softmax(normal(rows, STREAMS, STREAMS, seed=7), dim=-1)
    return torch.cat((pre, post, comb.flatten(1)), dim=1)


def site_of(
    mhc: Mhc | ModuleType,
    width: int = WIDTH,
    *,
    fn: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> Any:
    fn = normal(24, STREAMS * width, seed=1) * 0.05 if fn is None else fn
    base = normal(24, seed=2) if base is None else base
    return mhc.prepare_site(
        fn.to(DEVICE),
        base_M=base.to(DEVICE),
        scale_3=(torch.tensor([0.7, 1.3, 2.1]) if scale is None else scale).to(DEVICE),
        norm_D=(1 + 0.3 * normal(width, seed=3)).bfloat16(),
        iterations=20,
        eps=1e-6,
        norm_eps=1e-20,
    )


def entered(mhc: Mhc, x: torch.Tensor, site: Any) -> torch.Tensor:
    """The coefficients alone: what reads does not matter for them."""
    return mhc.enter(x, torch.ones(x.shape[:2], device=DEVICE), site).coefficients_TM


def is_reference(mhc: Mhc, op: str) -> bool:
    return mhc._loaded[op] is getattr(reference, op)


def check(mhc: Mhc, op: str, got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype is want.dtype
    if is_reference(mhc, op):
        assert torch.equal(got, want)
    else:
        rtol = 2.0**-7 if want.dtype is torch.bfloat16 else 2e-5
        torch.testing.assert_close(got, want, rtol=rtol, atol=1e-5)


def check_entered(mhc: Mhc, op: str, got: Entered, x: torch.Tensor, pre: torch.Tensor, site: Any) -> None:
    """What follows from streams ``x``, as they were written, by the families' own references."""
    check(mhc, op, got.coefficients_TM, reference.coefficients(x, site))
    check(mhc, op, got.hidden.plain_TD, rms(reference.collapse(x, pre), site.norm_D, eps=1e-20))
    assert torch.equal(got.hidden.quantised.double(), quantise_input(got.hidden.plain_TD))


def test_coefficients_reproduce_the_golden_sinkhorn(mhc: Mhc) -> None:
    """With a zero projection the base alone decides: sigmoid(0) twice, and the golden mix of spec/model.md 13."""
    base = torch.cat((torch.zeros(8), LOGITS.flatten()))
    site = site_of(mhc, fn=torch.zeros(24, STREAMS * WIDTH), base=base, scale=torch.ones(3))
    got = entered(mhc, streams(), site)
    check(mhc, "enter", got[:, :4], torch.full((ROWS, 4), 0.5 + 1e-6, device=DEVICE))
    check(mhc, "enter", got[:, 4:8], torch.ones(ROWS, 4, device=DEVICE))
    comb = got[:, 8:].unflatten(1, (4, 4))
    torch.testing.assert_close(comb, BALANCED.to(DEVICE).expand(ROWS, 4, 4), rtol=0, atol=1e-6)
    torch.testing.assert_close(comb.sum(1), torch.ones_like(got[:, :4]), rtol=0, atol=1e-5)  # columns last


def test_prepare_site_and_scale_take_their_places(mhc: Mhc) -> None:
    x = streams()
    fn = normal(24, STREAMS * WIDTH, seed=1) * 0.1
    scale = torch.tensor([0.5, 1.5, 0.0])
    got = entered(mhc, x, site_of(mhc, fn=fn, base=torch.zeros(24), scale=scale))
    z = x.flatten(1).double()
    mixed = (z @ fn.double().T) / z.square().mean(1, keepdim=True).sqrt()
    check(mhc, "enter", got[:, :4], (torch.sigmoid(mixed[:, :4] * 0.5) + 1e-6).float())
    check(mhc, "enter", got[:, 4:8], (2 * torch.sigmoid(mixed[:, 4:8] * 1.5)).float())
    torch.testing.assert_close(got[:, 8:], torch.full_like(got[:, 8:], 0.25), rtol=0, atol=1e-6)


def test_the_reference_takes_what_any_row_prepared(mhc: Mhc) -> None:
    """So that ``reference:mhc.boundary`` can force that op alone."""
    x, y, c = streams(), streams()[:, 1].contiguous(), some_coefficients()
    (out, got), (out_alone, want) = (
        reference.boundary(y, x, c, site_of(m), mean=True) for m in (mhc, reference)
    )
    assert torch.equal(out, out_alone)
    assert torch.equal(got.coefficients_TM, want.coefficients_TM)
    assert torch.equal(got.hidden.plain_TD, want.hidden.plain_TD)


def test_enter_reads_one_stream_when_told(mhc: Mhc) -> None:
    """And norms it: a row of the embedding, whose streams lie in one place."""
    x = streams()[:, 2].contiguous()
    pre = torch.zeros(1, STREAMS, device=DEVICE)
    pre[:, 0] = 1
    site = site_of(mhc)
    got = mhc.enter(x.unsqueeze(1).expand(-1, STREAMS, -1), pre.expand(ROWS, -1), site)
    check(mhc, "enter", got.hidden.plain_TD, rms(x, site.norm_D, eps=1e-20))
    assert got.mean_TD is None


def permuted(rows: int) -> torch.Tensor:
    """pre reads stream 2; stream 0 goes to 2, 1 to 0, 2 to 3, 3 to 1; the output goes to stream 1, and twice to 3."""
    comb = torch.zeros(STREAMS, STREAMS, device=DEVICE)
    for source, target in enumerate((2, 0, 3, 1)):
        comb[source, target] = 1
    shares = torch.tensor([0.0, 0, 1, 0, 0, 1, 0, 2], device=DEVICE)
    return torch.cat((shares, comb.flatten())).repeat(rows, 1)


def test_write_sums_over_input_streams(mhc: Mhc) -> None:
    """comb[i, j] carries i to j: a permutation moves whole streams, and the transpose would not."""
    x, y, c, site = streams(), streams()[:, 1].contiguous(), permuted(ROWS), site_of(mhc)
    written, (out, got) = mhc.write(y, x, c), mhc.boundary(y, x, c, site, mean=True)
    for op, out_TSD in (("write", written), ("boundary", out)):
        assert torch.equal(out_TSD[:, 0], x[:, 1]) and torch.equal(out_TSD[:, 2], x[:, 0])
        check(mhc, op, out_TSD[:, 1], (x[:, 3].double() + y.double()).bfloat16())
        check(mhc, op, out_TSD[:, 3], (x[:, 2].double() + 2 * y.double()).bfloat16())
    check(mhc, "boundary", got.hidden.plain_TD, rms(x[:, 0], site.norm_D, eps=1e-20))
    assert got.mean_TD is not None
    check(mhc, "boundary", got.mean_TD, out.double().mean(1).bfloat16())


def test_leave_collapses_what_it_writes(mhc: Mhc) -> None:
    x, y, c = streams(), streams()[:, 1].contiguous(), permuted(ROWS)
    norm_D, rows = (1 + 0.3 * normal(WIDTH, seed=3)).bfloat16(), torch.tensor([7, 2, 2], device=DEVICE)
    for chosen in (None, rows):
        hidden, normed = mhc.leave(y, x, c, norm_D, norm_eps=1e-20, rows_R=chosen)
        want = x[:, 0] if chosen is None else x[chosen, 0]
        assert torch.equal(hidden, want)
        check(mhc, "leave", normed, rms(want, norm_D, eps=1e-20))


def test_rows_do_not_see_their_neighbours(mhc: Mhc) -> None:
    x, y, c = streams(150), streams(150, seed=9)[:, 0].contiguous(), some_coefficients(150)
    site = site_of(mhc)
    together, from_together = mhc.boundary(y, x, c, site)
    for rows in (slice(3, 5), slice(70, 140), slice(149, 150)):
        alone, got = mhc.boundary(y[rows].contiguous(), x[rows].contiguous(), c[rows].contiguous(), site)
        assert torch.equal(alone, together[rows])
        assert torch.equal(got.coefficients_TM, from_together.coefficients_TM[rows])
        assert torch.equal(got.hidden.plain_TD, from_together.hidden.plain_TD[rows])
        assert torch.equal(got.hidden.quantised, from_together.hidden.quantised[rows])


@pytest.mark.parametrize(("rows", "width"), [(6, 5120), (1, 5120), (67, 544), (300, 1024), (0, 32)])
def test_ops_equal_the_reference_at_other_shapes(mhc: Mhc, rows: int, width: int) -> None:
    """Released and odd widths; streams of unlike size, so that the one statistic matters."""
    x = (streams(rows, width) * torch.tensor([1.0, 8.0, 0.125, 3.0], device=DEVICE).view(1, 4, 1)).bfloat16()
    y, c, site = normal(rows, width, seed=3).bfloat16(), some_coefficients(rows), site_of(mhc, width)
    check_entered(mhc, "enter", mhc.enter(x, c[:, :4], site), x, c[:, :4], site)
    out, got = mhc.boundary(y, x, c, site, mean=True)
    check(mhc, "boundary", out, reference.write(y, x, c))
    check_entered(mhc, "boundary", got, out, c[:, :4], site)
    assert got.mean_TD is not None
    assert torch.equal(got.mean_TD, reference.collapse(out, torch.full((rows, 4), 0.25, device=DEVICE)))
    check(mhc, "write", mhc.write(y, x, c), reference.write(y, x, c))
    chosen = torch.arange(rows - 1, -1, -2, device=DEVICE)
    hidden, normed = mhc.leave(y, x, c, site.norm_D, norm_eps=1e-20, rows_R=chosen)
    want = reference.leave(y, x, c, site.norm_D, norm_eps=1e-20, rows_R=chosen)
    check(mhc, "leave", hidden, want[0])
    check(mhc, "leave", normed, rms(hidden, site.norm_D, eps=1e-20))


def test_a_broken_group_is_nan_in_the_quantised_copy_too(mhc: Mhc) -> None:
    """As ``gemm.quantise_input`` gives it."""
    x = streams(3, 64)
    x[1, 0, 40] = float("nan")
    pre = torch.ones(3, STREAMS, device=DEVICE)
    hidden = mhc.enter(x, pre, site_of(mhc, 64)).hidden
    torch.testing.assert_close(
        hidden.quantised.double(), quantise_input(hidden.plain_TD), rtol=0, atol=0, equal_nan=True
    )
    assert not hidden.quantised[[0, 2]].isnan().any()


def test_coefficients_use_enough_bits_of_the_projection(mhc: Mhc) -> None:
    """One channel a row alone decides its logits, which are large: what a weight loses shows in a small sigmoid."""
    width, rows = 512, 9
    x = torch.zeros(rows, STREAMS * width, device=DEVICE)
    x[torch.arange(rows), torch.arange(rows) * 227] = 3.0
    site = site_of(
        mhc,
        width,
        fn=normal(24, STREAMS * width, seed=1) * 0.15,
        base=torch.zeros(24),
        scale=torch.tensor([1.0, 1.0, 0.1]),
    )
    x_TSD = x.view(rows, STREAMS, width).bfloat16()
    got, want = entered(mhc, x_TSD, site), reference.coefficients(x_TSD, site)
    if is_reference(mhc, "enter"):
        assert torch.equal(got, want)
    else:
        torch.testing.assert_close(got, want, rtol=3e-4, atol=1e-8)
